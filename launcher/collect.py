"""Summarise one run as ``summary.json``: what each peer did, and the common result.

The keys are an interface (`docs/architecture.md`, "Result files"): ``algorithm``, ``backend``,
``peers`` (a list, one object per peer), ``wall_s``, ``steps``, ``samples``, ``samples_per_s``,
``versions_per_s`` (averages that the busiest peer took part in; of models and gradients, those of
gradients), ``averages_per_peer`` (the mean over the peers of how many of their averages succeeded),
``failed_share`` (0 to 1: of the attempts of all peers, those that failed; attempts with a normal
ending other than success, such as a busy partner, count for neither side; null without attempts),
``bytes_per_step`` and ``bytes_per_peer`` (what one peer sends in one step, and in the whole run;
null without steps), ``longest_gap_s`` (the longest time that some number of some peer's model was
in no average while it trained), ``words`` with ``mean`` and ``worst`` (of sparse sums: the indices
and numbers that one peer sends or receives for one of them, whichever are more; null without such
sums),
``data`` (how often samples were trained, see `p2plab.dealt`; null where data are not dealt),
``silences`` (the sentences of peers that had stopped averaging, the first `MOST_SILENCES`),
``time_to_target_s`` (null if not reached), ``notes`` (sentences about lost peers and faults) and
``final`` with ``loss``, ``accuracy``, ``recall`` (of each class, where the task has classes) and
``consensus_distance`` (defined in `p2plab.consensus`). Each peer has its name as ``peer``, its
``state`` (ended or lost) with ``why``, and the totals of its own ``ended`` record.

``wall_s`` is the time from the first step of the swarm to the end of its last one, not the lifetime
of the processes or the launcher: starting Python and serving the others after the last step train
nothing, and would hide how slow a slow run is.

A **row** is a summary without its peers, as the comparison holds it.
"""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from p2plab.backends.base import PeerStatus
from p2plab.consensus import ConsensusCurve
from p2plab.dealt import data_of
from p2plab.harness.claims import Json
from p2plab.records import PeerHistory
from p2ptrain.core.effects import NO_FAILURE
from p2ptrain.ids import Seconds

MOST_SILENCES = 8
"""A fleet in which all averages fail has one such sentence per peer; the first few suffice."""


_RESULT_SUFFIXES = ("jsonl", "jsonl.1", "snapshots", "log", "toml", "slowdown")
_RESULT_NAMES = ("summary.json", "curve.json", "consensus.safetensors", "compose.yaml")


def clear_results(folder: Path) -> None:
    """Make `folder` and remove an earlier run's files: those that we name, and no others."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        name, _, suffix = path.name.partition(".")
        is_of_a_peer = suffix in _RESULT_SUFFIXES and name[:1] == "p" and name[1:].isdigit()
        if is_of_a_peer or path.name in _RESULT_NAMES:
            path.unlink()


def wall_s(histories: Iterable[PeerHistory], started_at: Seconds | None) -> Seconds:
    """From the first step of the swarm to the end of its last; 0 if it never took one."""
    last = max((history.steps[-1].at for history in histories if history.steps), default=None)
    return 0.0 if last is None or started_at is None else last - started_at


def summarise(
    algorithm: str,
    backend: str,
    histories: Sequence[PeerHistory],
    statuses: Sequence[PeerStatus],
    curve: ConsensusCurve,
) -> Json:
    """The summary of one finished run, as JSON."""
    peers = [
        {"peer": history.name, "state": status.state, "why": status.why, **history.totals()}
        for history, status in zip(histories, statuses, strict=True)
    ]
    duration_s = wall_s(histories, curve.started_at)
    samples = sum(history.samples for history in histories)
    return {
        "algorithm": algorithm,
        "backend": backend,
        "peers": peers,
        "wall_s": duration_s,
        "steps": sum(len(history.steps) for history in histories),
        "samples": samples,
        "samples_per_s": samples / duration_s if duration_s else 0.0,
        "versions_per_s": _versions(histories) / duration_s if duration_s else 0.0,
        "averages_per_peer": _averages_per_peer(peers),
        "failed_share": failed_share(peers),
        "bytes_per_step": _bytes_per_step(peers),
        "bytes_per_peer": _bytes_per_peer(peers),
        "longest_gap_s": _longest_gap_s(histories),
        "words": _words(histories),
        "data": data_of(histories),
        "silences": [said for history in histories for said in history.silences][:MOST_SILENCES],
        "time_to_target_s": curve.time_to_target_s,
        "final": _final(curve),
    }


def _averages_per_peer(peers: Sequence[Json]) -> float:
    return sum(peer["groups_formed"] or 0 for peer in peers) / len(peers) if peers else 0.0


def _bytes_per_step(peers: Sequence[Json]) -> float | None:
    """What one peer sends in one of its steps, of vectors."""
    steps = sum(peer["steps"] or 0 for peer in peers)
    return sum(peer["sent_bytes"] or 0 for peer in peers) / steps if steps else None


def _bytes_per_peer(peers: Sequence[Json]) -> float | None:
    return sum(peer["sent_bytes"] or 0 for peer in peers) / len(peers) if peers else None


def _longest_gap_s(histories: Iterable[PeerHistory]) -> Seconds | None:
    gaps_s = (history.longest_gap_s() for history in histories)
    return max((gap_s for gap_s in gaps_s if gap_s is not None), default=None)


def _words(histories: Iterable[PeerHistory]) -> Json:
    """Of sparse sums: what one peer moves for one of them, indices and numbers alone."""
    attempts = [attempt for history in histories for attempt in history.attempts]
    words = [a.words for a in attempts if a.outcome == "done" and a.words is not None]
    mean = sum(words) / len(words) if words else None
    return {"mean": mean, "worst": max(words, default=None)}


def failed_share(peers: Sequence[Json]) -> float | None:
    """Of all attempts that succeeded or failed, those that failed; None if there were none."""
    formed = sum(peer["groups_formed"] or 0 for peer in peers)
    failed = sum(sum(failures(peer["groups_failed"] or {}).values()) for peer in peers)
    return failed / (formed + failed) if formed + failed else None


def failures(by_outcome: Mapping[str, int]) -> dict[str, int]:
    """Count attempts by outcome, without the outcomes that are no failures."""
    return {why: count for why, count in by_outcome.items() if why not in NO_FAILURE}


def _versions(histories: Iterable[PeerHistory]) -> int:
    """Averages of the busiest peer. One that averages gradients sometimes averages models too."""
    most = 0
    for history in histories:
        done = Counter(a.what == "models" for a in history.attempts if a.outcome == "done")
        most = max(most, done[False] or done[True])
    return most


def _final(curve: ConsensusCurve) -> Json:
    if not curve.points:
        return {"loss": None, "accuracy": None, "recall": None, "consensus_distance": None}
    last = curve.points[-1]
    return {
        "loss": last.loss,
        "accuracy": last.accuracy,
        "recall": curve.final_recall,
        "consensus_distance": last.consensus_distance,
    }


def mean_of(values: Sequence[Any]) -> Any:  # Any: whatever JSON can hold
    """Combine one value from runs that differ in their seed only.

    The mean of numbers, also inside of objects; None if one of them is missing; else the first.
    """
    if any(value is None for value in values):
        return None
    first = values[0]
    if isinstance(first, dict):
        return {key: mean_of([value.get(key) for value in values]) for key in first}
    if isinstance(first, (int, float)) and not isinstance(first, bool):
        return sum(values) / len(values)
    return first


_NOT_COMPARED = ("backend", "peers", "notes")


def row_of(summary: Json) -> Json:
    """The part of a summary in which algorithms are compared."""
    return {key: value for key, value in summary.items() if key not in _NOT_COMPARED}


def write_json(path: Path, value: Any) -> None:  # Any: whatever JSON can hold
    """Write `value` for people and for strict parsers: a number that is not finite becomes null."""
    text = json.dumps(finite(value), indent=2, ensure_ascii=False, allow_nan=False)
    unfinished = path.with_name(f"{path.name}.tmp")  # or else a kill leaves half of it
    unfinished.write_text(text + "\n", encoding="utf-8")
    unfinished.replace(path)


def write_curve(path: Path, curve: ConsensusCurve) -> None:
    """Write the consensus curve, a list of its points."""
    write_json(path, [dataclasses.asdict(point) for point in curve.points])


def finite(value: Any) -> Any:  # Any: whatever JSON can hold
    """`value` with null for every number that is not finite: JSON has no others."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
