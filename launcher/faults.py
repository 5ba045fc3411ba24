"""What happens to the peers of a run, when, and what it cost.

A scenario's ``[[faults]]`` become **fault instances**: one for each peer of a fault, except that a
partition is one instance for all of its peers together. A `Schedule` says which of them begin or
end now; how one is carried out is the backend's. In every backend `run` notes the same things of
each: when it began, when it ended.

**The cost** of a fault is read from the peers' records: samples per second of the whole swarm
before, during and after it; for how long at most nobody else ended a step (``stall_s``); and how
long after its end the swarm was as fast again as before (``recovery_s``; of a fault that does not
end, after its beginning, and as fast as those who are left can be).

**All faults together** are measured by what is left of the swarm: ``present`` is the share of
peer-time that peers were there for, from the first fault on; ``kept`` is the throughput from then
on over that before; ``kept_of_present`` is their quotient. An algorithm in which nobody waits for
whoever is missing has 1.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from launcher.conditions import FaultConfig
from launcher.records import PeerHistory
from p2ptrain.config import StopConfig
from p2ptrain.ids import Seconds

WINDOW_S: Seconds = 5.0
"""Throughput before and after a fault is that of so long, or of less if another fault is nearer."""

RECOVERED = 0.9
"""Whoever is so fast, measured by what was before, has recovered."""

SMOOTHED_S: Seconds = 1.0

ABSENCES = ("crash", "leave", "pause", "join")
"""The kinds under which a peer is not there."""


@dataclass(slots=True)
class FaultInstance:
    """A fault, as it hits these ranks; in Unix seconds once it has begun, and ended."""

    fault: FaultConfig
    ranks: tuple[int, ...]
    began: Seconds | None = None
    ended: Seconds | None = None
    missed: bool = False
    """It found its peer dead, or gone."""

    @property
    def is_on(self) -> bool:
        """True while it lasts."""
        return self.began is not None and self.ended is None and not self.missed


def instances_of(faults: Sequence[FaultConfig]) -> list[FaultInstance]:
    """What is to happen, in the order in which it was written."""
    found = []
    for fault in faults:
        together = [fault.peers] if fault.kind == "partition" else [(rank,) for rank in fault.peers]
        found += [FaultInstance(fault, ranks) for ranks in together]
    return found


def left_of(stop: StopConfig, passed_s: Seconds) -> StopConfig:
    """The end for a life that begins `passed_s` after the run did.

    A peer counts from its own first step, and whoever comes later is to end with the others.
    """
    if stop.seconds is None:
        return stop
    return dataclasses.replace(stop, seconds=max(SMOOTHED_S, stop.seconds - passed_s))


class Schedule:
    """Which fault begins or ends now."""

    def __init__(self, faults: Sequence[FaultConfig]) -> None:
        self.instances = instances_of(faults)

    def take_due(
        self, histories: Sequence[PeerHistory], started_at: Seconds | None, now: Seconds
    ) -> Iterator[tuple[FaultInstance, Literal["apply", "revert"]]]:
        """Each beginning and each end that is due, once; may be called as often as one likes.

        Args:
            histories: of the peers, by rank.
            started_at: when the first step began, in Unix seconds; None before it has.
            now: in Unix seconds.
        """
        for instance in self.instances:
            if instance.began is None and _is_due(instance, histories, started_at, now):
                instance.began = now
                yield instance, "apply"
            for_s = instance.fault.for_s
            ends_at = None if instance.began is None or for_s is None else instance.began + for_s
            if (
                ends_at is not None
                and instance.ended is None
                and not instance.missed
                and now >= ends_at
            ):
                instance.ended = now
                yield instance, "revert"


def _is_due(
    instance: FaultInstance,
    histories: Sequence[PeerHistory],
    started_at: Seconds | None,
    now: Seconds,
) -> bool:
    fault = instance.fault
    if fault.at_step is not None:
        return len(histories[instance.ranks[0]].steps) >= fault.at_step
    assert fault.at_s is not None  # a fault has one of the two
    return started_at is not None and now >= started_at + fault.at_s


# --- what it cost ---------------------------------------------------------------------------------

Json = dict[str, Any]  # Any: whatever JSON can hold

_RECOVERY_STEP_S: Seconds = 0.1


def costs_of(
    instances: Sequence[FaultInstance],
    histories: Sequence[PeerHistory],
    started_at: Seconds | None,
    end: Seconds,
) -> Json:
    """What the faults of a finished run cost; the keys are in the docstring of this module.

    Args:
        instances: with when they began and ended.
        histories: of the peers, by rank.
        started_at: when the first step began, in Unix seconds.
        end: until when to look.
    """
    begun = [
        instance for instance in instances if instance.began is not None and not instance.missed
    ]
    begun = [instance for instance in begun if _began(instance) < end]
    if started_at is None or not begun:
        return {"instances": [], **dict.fromkeys(_OF_ALL)}
    begun.sort(key=_began)
    course = _Course(begun, histories, started_at, end)
    told = [course.cost(instance) for instance in begun]
    return {"instances": told, **course.all_together(), **_longest(told)}


_OF_ALL = ("present", "kept", "kept_of_present", "longest_stall_s", "longest_recovery_s")


def _longest(told: Sequence[Json]) -> Json:
    stalls = [one["stall_s"] for one in told if one["stall_s"] is not None]
    recoveries = [one["recovery_s"] for one in told if one["recovery_s"] is not None]
    return {
        "longest_stall_s": max(stalls, default=None),
        "longest_recovery_s": max(recoveries, default=None),
    }


class _Course:
    """The throughput of a swarm over time, and who was there."""

    def __init__(
        self,
        instances: Sequence[FaultInstance],
        histories: Sequence[PeerHistory],
        started_at: Seconds,
        end: Seconds,
    ) -> None:
        self._instances = instances
        self._histories = histories
        self._start = started_at
        self._end = end
        self._lines = [_line(history) for history in histories]
        self._absences = [
            (rank, *self._absence(instance, rank))
            for instance in instances
            for rank in instance.ranks
            if instance.fault.kind in ABSENCES
        ]

    def cost(self, instance: FaultInstance) -> Json:
        """One fault, in seconds since the first step."""
        began, ended = _began(instance), instance.ended
        edges = [_began(one) for one in self._instances] + [
            one.ended or began for one in self._instances
        ]
        before_from = max([self._start, began - WINDOW_S, *(t for t in edges if t < began)])
        # What does not end is looked at until something else happens.
        over = min([self._end, *(t for t in edges if t > began)]) if ended is None else ended
        over = min(over, self._end)
        after_to = min([self._end, over + WINDOW_S, *(t for t in edges if t > over)])
        before = self._rate(before_from, began)
        return {
            "kind": instance.fault.kind,
            "peers": [self._histories[rank].name for rank in instance.ranks],
            "at_s": began - self._start,
            "until_s": None if ended is None or ended > self._end else ended - self._start,
            "before": before,
            "during": self._rate(began, over),
            "after": None if ended is None else self._rate(over, after_to),
            "stall_s": self._stall(instance, began, min(self._end, (ended or began) + WINDOW_S)),
            "recovery_s": self._recovery(instance, before),
        }

    def all_together(self) -> Json:
        """What was left of the swarm from the first fault on, measured by who was there."""
        first = _began(self._instances[0])
        before, since = self._rate(self._start, first), self._rate(first, self._end)
        there_before, there_since = (
            self._present(self._start, first),
            self._present(first, self._end),
        )
        present = there_since / there_before if there_before and there_since is not None else None
        kept = since / before if before and since is not None else None
        both = present and kept is not None
        return {
            "present": present,
            "kept": kept,
            "kept_of_present": kept / present if both and present and kept is not None else None,
        }

    def _rate(self, begin: Seconds, end: Seconds) -> float | None:
        """Samples per second of the whole swarm; None over no time."""
        if end - begin < _RECOVERY_STEP_S:
            return None
        edges = np.array([begin, end])
        return float(sum(np.diff(np.interp(edges, *line))[0] for line in self._lines)) / (
            end - begin
        )

    def _stall(self, instance: FaultInstance, begin: Seconds, end: Seconds) -> Seconds | None:
        """The longest time without the end of a step of anybody else."""
        others = [h for rank, h in enumerate(self._histories) if rank not in instance.ranks]
        ends = np.array(sorted(step.at for history in others for step in history.steps))
        if ends.size == 0:
            return None
        low = max(0, int(np.searchsorted(ends, begin)) - 1)
        high = int(np.searchsorted(ends, end)) + 1
        gaps = np.diff(ends[low:high])
        return float(gaps.max()) if gaps.size else None

    def _recovery(self, instance: FaultInstance, before: float | None) -> Seconds | None:
        """How long until the swarm is as fast again as it can be; None if it never is."""
        since, share = instance.ended, 1.0
        if since is None:
            if instance.fault.kind not in ("crash", "leave"):
                return None
            since = _began(instance)
            share = 1 - len(instance.ranks) / max(1, len(self._histories) - self._missing(since))
        if before is None or since >= self._end - SMOOTHED_S:
            return None
        moments = np.arange(since, self._end - SMOOTHED_S, _RECOVERY_STEP_S)
        rates = sum(
            np.interp(moments + SMOOTHED_S, *line) - np.interp(moments, *line)
            for line in self._lines
        )
        fast = np.flatnonzero(np.asarray(rates) / SMOOTHED_S >= RECOVERED * share * before)
        return float(moments[fast[0]] - since) if fast.size else None

    def _missing(self, moment: Seconds) -> int:
        return len({rank for rank, begin, end in self._absences if begin < moment < end})

    def _present(self, begin: Seconds, end: Seconds) -> float | None:
        """How many peers were there, on average."""
        if end - begin < _RECOVERY_STEP_S:
            return None
        missing, there = 0.0, [begin] * len(self._histories)  # until when each has been looked at
        for rank, since, until in sorted(self._absences, key=lambda absence: absence[1]):
            since, until = max(since, there[rank]), min(until, end)
            missing += max(0.0, until - since)
            there[rank] = max(there[rank], until)
        return len(self._histories) - missing / (end - begin)

    def _absence(self, instance: FaultInstance, rank: int) -> tuple[Seconds, Seconds]:
        """From when to when a peer was not there: until it trains, not until it is started."""
        if instance.fault.kind == "join":
            return self._start, self._first_step(rank, _began(instance))
        if instance.ended is None:
            return _began(instance), self._end
        if instance.fault.kind == "pause":
            return _began(instance), instance.ended
        return _began(instance), self._first_step(rank, instance.ended)

    def _first_step(self, rank: int, moment: Seconds) -> Seconds:
        begins = (s.at - s.wait_s - s.compute_s for s in self._histories[rank].steps)
        return next((begin for begin in begins if begin >= moment), self._end)


def _began(instance: FaultInstance) -> Seconds:
    assert instance.began is not None  # only those that have begun are looked at
    return instance.began


def _line(history: PeerHistory) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Samples over time, for `np.interp`: a step's are spread over its duration."""
    if not history.steps:
        return np.zeros(1), np.zeros(1)
    spans = np.array([(s.at - s.wait_s - s.compute_s, s.at) for s in history.steps])
    total = np.cumsum([step.samples for step in history.steps], dtype=float)
    counts = np.stack([np.concatenate([[0.0], total[:-1]]), total], axis=1)
    return np.maximum.accumulate(spans.ravel()), counts.ravel()
