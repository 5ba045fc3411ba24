"""Plan the faults of a run, and measure what they cost.

A scenario's ``[[faults]]`` are compiled once into **fault instances**: one for each peer of a
fault, except that a partition is one instance for all of its peers together. The `FaultPlan` says
when each begins and ends, the same in every backend: `at_s` counts from the first step of the run,
`at_step` the steps of a peer over all its processes. A backend applies and reverts an instance, and
knows nothing else about faults. Faults of one kind may overlap.

**The cost** of a fault is read from the peers' records: samples per second of the whole swarm
before, during and after it; the longest time in which no other peer ended a step (``stall_s``); and
the time from its end until the swarm was as fast again as before (``recovery_s``; for a fault that
does not end, from its beginning, until the swarm is as fast as the remaining peers can be).
``back_s`` is when all of its peers trained again, which is later than the fault's end
(``until_s``): a peer that starts again has to join first.

**All faults together** are measured by the remaining throughput, from the first fault on:
``present`` is the fraction of peer-time in which peers were present; ``kept`` is the throughput as
a fraction of that before; ``kept_of_present`` is ``kept / present``. It is 1 for an algorithm in
which no peer waits for a missing one.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from p2plab.conditions import FaultConfig
from p2plab.harness.claims import Json
from p2plab.records import PeerHistory
from p2ptrain.config import StopConfig
from p2ptrain.ids import Seconds

WINDOW_S: Seconds = 5.0
"""Throughput before and after a fault is taken over this time, or up to the nearest other fault."""

RECOVERED = 0.9
"""A swarm with this fraction of its earlier throughput has recovered."""

SMOOTHED_S: Seconds = 1.0

ABSENCES = ("crash", "leave", "pause", "join")
"""The kinds during which a peer is absent."""

_ROUNDING_S: Seconds = 1e-6
"""A moment that is so near has come: clocks add up with rounding errors."""


@dataclass(slots=True)
class FaultInstance:
    """One fault on these ranks; its beginning and end are in Unix seconds."""

    fault: FaultConfig
    ranks: tuple[int, ...]
    began: Seconds | None = None
    ended: Seconds | None = None
    missed: bool = False
    """Its peer was dead or had left, so it had no effect."""

    @property
    def is_on(self) -> bool:
        """True while it lasts."""
        return self.began is not None and self.ended is None and not self.missed

    def next_at(self, started_at: Seconds | None) -> Seconds | None:
        """When it begins or ends next; None if it does not, or no clock says when."""
        at_s, for_s = self.fault.at_s, self.fault.for_s
        if self.began is None:
            return None if at_s is None or started_at is None else started_at + at_s
        return self.began + for_s if for_s is not None and self.is_on else None


class FaultPlan:
    """The faults of one run, and which of them begin or end now."""

    def __init__(self, faults: Sequence[FaultConfig]) -> None:
        self.instances = [
            FaultInstance(fault, ranks)
            for fault in faults
            for ranks in ([fault.peers] if fault.kind == "partition" else _each(fault.peers))
        ]

    def carry_out(
        self,
        apply: Callable[[FaultInstance], bool],
        revert: Callable[[FaultInstance], None],
        histories: Sequence[PeerHistory],
        started_at: Seconds | None,
        now: Seconds,
    ) -> None:
        """Apply what begins now and revert what ends; may be called any number of times.

        Args:
            apply: returns False if the fault found no peer there.
            revert: ends what `apply` began.
            histories: of the peers, by rank.
            started_at: when the first step began, in Unix seconds; None before it has.
            now: in Unix seconds.
        """
        for instance in self.instances:
            if instance.began is None and _begins(instance, histories, started_at, now):
                instance.began = now
                instance.missed = not apply(instance)
            at = instance.next_at(started_at)
            if instance.is_on and at is not None and now >= at - _ROUNDING_S:
                instance.ended = now
                revert(instance)

    def next_at(self, started_at: Seconds | None) -> Seconds | None:
        """The next moment at which a fault begins or ends by the clock."""
        moments = (instance.next_at(started_at) for instance in self.instances)
        return min((at for at in moments if at is not None), default=None)


def _each(ranks: Sequence[int]) -> list[tuple[int, ...]]:
    return [(rank,) for rank in ranks]


def _begins(
    instance: FaultInstance,
    histories: Sequence[PeerHistory],
    started_at: Seconds | None,
    now: Seconds,
) -> bool:
    if instance.fault.at_step is not None:
        return len(histories[instance.ranks[0]].steps) >= instance.fault.at_step
    at = instance.next_at(started_at)
    return at is not None and now >= at - _ROUNDING_S


def left_of(stop: StopConfig, passed_s: Seconds) -> StopConfig:
    """The stop condition of a process that starts `passed_s` after the run did.

    A peer counts from its own first step, and a peer that starts later is to end with the others.
    """
    if stop.seconds is None:
        return stop
    return dataclasses.replace(stop, seconds=max(SMOOTHED_S, stop.seconds - passed_s))


# --- what it cost ---------------------------------------------------------------------------------


_RECOVERY_STEP_S: Seconds = 0.1


def costs_of(
    instances: Sequence[FaultInstance],
    histories: Sequence[PeerHistory],
    started_at: Seconds | None,
    end: Seconds,
) -> Json:
    """The costs of the faults of a finished run; this module's docstring explains the keys.

    Args:
        instances: with when they began and ended.
        histories: of the peers, by rank.
        started_at: when the first step began, in Unix seconds.
        end: the end of the time that is considered.
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
    """The throughput of a swarm over time, and which peers were present."""

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
        # A fault without an end is measured until the next one begins.
        over = min([self._end, *(t for t in edges if t > began)]) if ended is None else ended
        over = min(over, self._end)
        after_to = min([self._end, over + WINDOW_S, *(t for t in edges if t > over)])
        before = self._rate(before_from, began)
        return {
            "kind": instance.fault.kind,
            "peers": [self._histories[rank].name for rank in instance.ranks],
            "planned_s": instance.fault.at_s,
            "planned_step": instance.fault.at_step,
            "at_s": began - self._start,
            "until_s": None if ended is None or ended > self._end else ended - self._start,
            "back_s": self._back_s(instance),
            "before": before,
            "during": self._rate(began, over),
            "after": None if ended is None else self._rate(over, after_to),
            "stall_s": self._stall(instance, began, min(self._end, (ended or began) + WINDOW_S)),
            "recovery_s": self._recovery(instance, before),
        }

    def _back_s(self, instance: FaultInstance) -> Seconds | None:
        """When all of its peers trained again, or were no longer hindered; None if they were not.

        In seconds since the first step.
        """
        if instance.fault.kind in ABSENCES:
            back = max(self._absence(instance, rank)[1] for rank in instance.ranks)
        else:
            back = self._over(instance)
        return back - self._start if back < self._end else None

    def _over(self, instance: FaultInstance) -> Seconds:
        """When the last fault of its kind on its peers was over, of those that overlap with it."""
        over = self._end if instance.ended is None else instance.ended
        for one in self._instances:
            is_like = one.fault.kind == instance.fault.kind and set(one.ranks) & set(instance.ranks)
            if is_like and _began(one) <= over:
                over = max(over, self._end if one.ended is None else one.ended)
        return over

    def all_together(self) -> Json:
        """The throughput kept from the first fault on, relative to the peers that were present."""
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
        """The longest time in which no other peer ended a step."""
        others = [h for rank, h in enumerate(self._histories) if rank not in instance.ranks]
        ends = np.array(sorted(step.at for history in others for step in history.steps))
        if ends.size == 0:
            return None
        low = max(0, int(np.searchsorted(ends, begin)) - 1)
        high = int(np.searchsorted(ends, end)) + 1
        gaps = np.diff(ends[low:high])
        return float(gaps.max()) if gaps.size else None

    def _recovery(self, instance: FaultInstance, before: float | None) -> Seconds | None:
        """The time until the swarm is as fast again as it can be; None if it never is."""
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
        """The mean number of peers that were present."""
        if end - begin < _RECOVERY_STEP_S:
            return None
        missing, there = 0.0, [begin] * len(self._histories)  # accounted for up to here
        for rank, since, until in sorted(self._absences, key=lambda absence: absence[1]):
            since, until = max(since, there[rank]), min(until, end)
            missing += max(0.0, until - since)
            there[rank] = max(there[rank], until)
        return len(self._histories) - missing / (end - begin)

    def _absence(self, instance: FaultInstance, rank: int) -> tuple[Seconds, Seconds]:
        """Beginning and end of an absence: it ends when the peer trains, not when it is started."""
        if instance.fault.kind == "join":
            return self._start, self._first_step(rank, _began(instance))
        if instance.ended is None:
            return _began(instance), self._end
        if instance.fault.kind == "pause":
            return _began(instance), self._over(instance)
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
