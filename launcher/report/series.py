"""Turn records into the numbers behind the charts: lines over time, and who met whom.

All times are seconds from the first step of the swarm. A line has at most `POINTS` points: a curve
keeps every n-th of its own, with the first and the last; figures derived from steps and groups are
binned into fewer, wider bins.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from p2plab.consensus import ConsensusCurve, CurvePoint
from p2plab.harness.claims import Json
from p2plab.records import SETTINGS, PeerHistory
from p2plab.run import Run
from p2ptrain.ids import Seconds

POINTS = 300

_NARROWEST_BIN_S: Seconds = 0.5
_STEPS_PER_BIN = 2.0


def curve(found: ConsensusCurve) -> Json:
    """The consensus model's curve, one list per quantity; `accuracy` is empty if there is none."""
    points = [found.points[index] for index in thinned(len(found.points), POINTS)]
    return {
        "at": [round(point.wall_s, 3) for point in points],
        "samples": [point.samples for point in points],
        "loss": [significant(point.loss) for point in points],
        "accuracy": _accuracies(points),
        "distance": [significant(point.consensus_distance) for point in points],
    }


def _accuracies(points: Sequence[CurvePoint]) -> list[float]:
    known = [significant(point.accuracy) for point in points if point.accuracy is not None]
    return known if len(known) == len(points) else []


def throughput(run: Run) -> Json:
    """Samples per second of the whole swarm; a step's samples are spread over its duration."""
    start = run.curve.started_at
    if start is None or not run.wall_s:
        return {"at": [], "rate": []}
    # Peers end within a step of each other: the last, half-empty bin would look like a breakdown.
    lasts = [history.steps[-1].at for history in run.histories if history.steps]
    end = max(min(lasts), start + run.wall_s - 2 * _longest_step_s(run))
    edges = np.linspace(start, end, _bins(run) + 1)
    total = np.zeros(len(edges))
    for history in run.histories:
        if history.steps:
            first = history.steps[0]
            times = [first.at - first.wait_s - first.compute_s, *(s.at for s in history.steps)]
            trained = np.cumsum([0, *(step.samples for step in history.steps)])
            total += np.interp(edges, times, trained)
    rates = np.diff(total) / np.diff(edges)
    middles = (edges[:-1] + edges[1:]) / 2 - start
    return {
        "at": [round(float(at), 3) for at in middles],
        "rate": [significant(float(rate)) for rate in rates],
    }


def consensus_distance(run: Run) -> Json:
    """Distance of peers from their group's mean: the median of each bin, and the middle 80 %."""
    start = run.curve.started_at
    found = sorted(
        (attempt.at, attempt.consensus_distance_l2)
        for history in run.histories
        for attempt in history.attempts
        if attempt.outcome == "done" and attempt.consensus_distance_l2 is not None
    )
    series: Json = {"at": [], "low": [], "middle": [], "high": []}
    if start is None or not run.wall_s or not found:
        return series
    times = np.array([at for at, _ in found])
    values = np.array([value for _, value in found])
    edges = np.linspace(start, start + run.wall_s, _bins(run) + 1)
    for (left, right), middle in zip(pairwise(np.searchsorted(times, edges)), edges, strict=False):
        if right > left:
            low, median, high = np.percentile(values[left:right], (10, 50, 90))
            series["at"].append(round(float(middle - start + (edges[1] - edges[0]) / 2), 3))
            for name, value in (("low", low), ("middle", median), ("high", high)):
                series[name].append(significant(float(value)))
    return series


def met(histories: Sequence[PeerHistory], most: int) -> Json:
    """How often each pair of peers was in one completed group, by their own records.

    Beyond `most` peers, neighbours by rank share a row and a column, and a count is the mean of
    the pairs in it.
    """
    rank_of = {history.name: rank for rank, history in enumerate(histories)}
    per_row = -(-len(histories) // most)
    size = -(-len(histories) // per_row)
    counts = np.zeros((size, size))
    pairs = np.zeros((size, size))
    for rank, history in enumerate(histories):
        row = rank // per_row
        for other in range(len(histories)):
            pairs[row, other // per_row] += other != rank
        for attempt in history.attempts:
            if attempt.outcome == "done":
                for name in attempt.members:
                    if name != history.name and name in rank_of:
                        counts[row, rank_of[name] // per_row] += 1
    means = np.divide(counts, pairs, out=np.zeros_like(counts), where=pairs > 0)
    names = [history.name for history in histories]
    labels = [
        names[first] if per_row == 1 else f"{names[first]} to {names[last]}"
        for first, last in (
            (row * per_row, min((row + 1) * per_row, len(names)) - 1) for row in range(size)
        )
    ]
    return {"labels": labels, "counts": [[significant(float(m)) for m in row] for row in means]}


def thinned(count: int, most: int) -> list[int]:
    """Up to `most` of the indices below `count`, evenly spaced, the first and the last among them.

    >>> thinned(5, 3)
    [0, 2, 4]
    """
    if count <= most:
        return list(range(count))
    return [round(index * (count - 1) / (most - 1)) for index in range(most)]


def significant(value: float) -> float:
    """Round to four digits, more than a chart shows."""
    return float(f"{value:.4g}")


def _bins(run: Run) -> int:
    """The number of bins: each holds some steps even of the slowest peer, to avoid jitter."""
    width_s = max(_NARROWEST_BIN_S, _STEPS_PER_BIN * _longest_step_s(run))
    return max(1, min(POINTS, int(run.wall_s / width_s)))


def _longest_step_s(run: Run) -> Seconds:
    """The mean step of the slowest peer."""
    spans = [(h.steps[-1].at - h.steps[0].at, len(h.steps)) for h in run.histories if h.steps]
    return max((span / max(1, count - 1) for span, count in spans), default=0.0)


def faults(histories: Sequence[PeerHistory], instances: Sequence[Json]) -> list[Json]:
    """The faults marked in charts, numbered as in their table; `until` is None at the end."""
    ranks = {history.name: rank for rank, history in enumerate(histories)}
    return [
        {
            "number": number,
            "at": round(instance["at_s"], 3),
            "until": None if until is None else round(until, 3),
            "ranks": [ranks[name] for name in instance["peers"]],
        }
        for number, instance in enumerate(instances, start=1)
        # A peer that joined stays: there is no period of trouble to frame.
        for until in [instance["at_s"] if instance["kind"] == "join" else instance["until_s"]]
    ]


def changes(run: Run) -> list[Json]:
    """When the first peer worked with other settings, and with which, as charts mark it."""
    first: dict[tuple[str, str], Seconds] = {}
    for history in run.histories:
        for event in history.events:
            if event.state == SETTINGS:
                key = (event.subject, event.why)
                first[key] = min(event.at, first.get(key, event.at))
    start = run.curve.started_at or 0.0
    found = sorted((at - start, text) for (_, text), at in first.items())
    return [{"at": round(max(0.0, at), 3), "text": text} for at, text in found]
