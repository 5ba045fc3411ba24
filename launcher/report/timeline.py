"""Build the timeline of every peer: exact bars where they fit into the file, shares everywhere.

A timeline has two resolutions. **Shares** cover the whole run: for each of `BINS` equal spans, the
fraction of it that a peer computed, waited and averaged, in 36 degrees, one character each.
**Bars** are the steps and averages themselves, exact to 0.1 ms. They cover the whole run if the
file has room, and otherwise a stretch in the middle.

Bars are written as differences, since small numbers are short: a step is ``gap, compute, wait``
(gap: from the end of the step before), an average is ``gap, length, who`` (gap: from the start of
the average before; who: the rank met, or minus the size of a larger group).
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from p2plab.harness.claims import Json
from p2plab.plot import activities, is_slow, shown_ranks, window_s
from p2plab.records import Attempt, PeerHistory, Step
from p2plab.run import Run
from p2ptrain.ids import Seconds

BINS = 600
UNITS_PER_S = 10_000
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"

Spans = Sequence[tuple[Seconds, Seconds]]
"""Starts and lengths."""


def timeline(run: Run, rows: int, bars: int) -> Json:
    """Up to `rows` peers, the slow and the lost among them, with up to `bars` exact bars."""
    ranks = shown_ranks(run.scenario, rows, [history.lost for history in run.histories])
    start, wall_s = run.curve.started_at or 0.0, run.wall_s
    shown = [run.histories[rank] for rank in ranks]
    exact_from, exact_to = _stretch(shown, start, wall_s, bars)
    names = {history.name: rank for rank, history in enumerate(run.histories)}
    lines = [
        {
            "name": run.histories[rank].name,
            "rank": rank,
            "label": _label(run, rank),
            **_shares(run.histories[rank], start, wall_s),
            **_bars(run.histories[rank], start, exact_from, exact_to, names),
        }
        for rank in ranks
    ]
    return {
        "rows": lines,
        "of": len(run.histories),
        "units_per_s": UNITS_PER_S,
        "exact_from": round(exact_from - start, 4),
        "exact_to": round(exact_to - start, 4),
        "window_s": round(window_s([run]), 4),
    }


def _label(run: Run, rank: int) -> str:
    if run.histories[rank].lost:
        return f"{run.histories[rank].name} lost"
    slow = " slow" if is_slow(run.scenario, rank) else ""
    return run.histories[rank].name + slow


def _stretch(
    histories: Sequence[PeerHistory], start: Seconds, wall_s: Seconds, most: int
) -> tuple[Seconds, Seconds]:
    """The longest stretch around the middle, up to the whole run, with at most `most` bars."""
    middle, width_s = start + wall_s / 2, wall_s
    while width_s > 0:
        left, right = middle - width_s / 2, middle + width_s / 2
        count = sum(
            len(_steps_in(history, left, right)) + len(_averages_in(history, left, right))
            for history in histories
        )
        if count <= most:
            return left, right
        width_s *= min(0.9, most / count)
    return middle, middle


def _steps_in(history: PeerHistory, left: Seconds, right: Seconds) -> list[Step]:
    return [s for s in history.steps if s.at > left and s.at - s.wait_s - s.compute_s < right]


def _averages_in(history: PeerHistory, left: Seconds, right: Seconds) -> list[Attempt]:
    return [
        a
        for a in history.attempts
        if a.outcome == "done" and a.at > left and a.at - a.exchange_s < right
    ]


def _bars(
    history: PeerHistory,
    start: Seconds,
    left: Seconds,
    right: Seconds,
    ranks: dict[str, int],
) -> Json:
    steps: list[int] = []
    end = 0
    found = _steps_in(history, left, right)
    for step in found:
        began, computed, ended = (
            _units(at - start)
            for at in (step.at - step.wait_s - step.compute_s, step.at - step.wait_s, step.at)
        )
        steps += [began - end, computed - began, ended - computed]
        end = ended
    averages: list[int] = []
    before = 0
    for average in sorted(_averages_in(history, left, right), key=lambda a: a.at - a.exchange_s):
        began = _units(average.at - average.exchange_s - start)
        length = _units(average.at - start) - began
        averages += [began - before, length, _who(history, average, ranks)]
        before = began
    return {"first": found[0].number if found else 0, "steps": steps, "averages": averages}


def _who(history: PeerHistory, average: Attempt, ranks: dict[str, int]) -> int:
    others = [name for name in average.members if name != history.name]
    return ranks[others[0]] if len(others) == 1 and others[0] in ranks else -len(average.members)


def _shares(history: PeerHistory, start: Seconds, wall_s: Seconds) -> Json:
    computing, waiting, averaging = activities(history, start, wall_s)
    edges = np.linspace(0.0, wall_s, BINS + 1)
    return {
        "compute": _degrees(computing, edges),
        "wait": _degrees(waiting, edges),
        "average": _degrees(_union(averaging), edges),
    }


def _degrees(spans: Spans, edges: NDArray[np.float64]) -> str:
    """The fraction of each bin that the spans, ordered and disjoint, cover."""
    if not spans or edges[-1] <= 0:
        return _DIGITS[0] * BINS
    array = np.array(spans)
    ends = array.sum(axis=1)
    # Times in records are rounded: a span may begin slightly before the last one ends.
    points = np.maximum.accumulate(np.stack([array[:, 0], ends], axis=1).ravel())
    covered = np.cumsum(array[:, 1])
    totals = np.stack([covered - array[:, 1], covered], axis=1).ravel()
    shares = np.diff(np.interp(edges, points, totals)) / np.diff(edges)
    return "".join(_DIGITS[round(float(min(1.0, share)) * 35)] for share in shares)


def _union(spans: Spans) -> Spans:
    """The same time, without overlap."""
    merged: list[tuple[Seconds, Seconds]] = []
    for begin, length in sorted(spans):
        if merged and begin <= sum(merged[-1]):
            first, before = merged[-1]
            merged[-1] = (first, max(before, begin + length - first))
        else:
            merged.append((begin, length))
    return merged


def _units(seconds: Seconds) -> int:
    return round(seconds * UNITS_PER_S)
