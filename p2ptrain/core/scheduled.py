"""Arrive at a version and wait for its group: what barriers and wait-avoiding groups share.

A trainer *arrives* at a version. Its peer tells the *coordinator*, the first of those who meet by
name, with the offer of its slot if the trainer waits (`core/group_lock.py`). The coordinator counts
arrivals, and requests the group when enough have come: those who have offered have granted, so that
`Begin` follows at once; those whose slot is in another group grant when that has ended. An arrival
is said again every `resend_s`, and at once to another coordinator or with another offer, so any
message about it may be lost. A coordinator that dies is replaced by the next by name: those who
wait tell that one as soon as they see it.

Waiting holds no slot, and the request is one like any other: the lock's argument covers it. If
views differ, two coordinators may request groups of one version that share a peer; it enters the
first that it has granted, and refuses the other.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from p2ptrain.core.effects import Average, Effect, Outcome, Send, VersionEnded
from p2ptrain.core.group_lock import GroupLock
from p2ptrain.core.lock_state import Offered
from p2ptrain.core.messages import Activate, Arrive
from p2ptrain.core.purpose import Purpose
from p2ptrain.errors import InvariantViolation
from p2ptrain.ids import PeerId, Seconds, Ticket


@dataclass(frozen=True, slots=True)
class Arrival:
    """Our trainer is at `version`, which has not begun here."""

    version: int
    resend_at: Seconds
    lineage: int = 0
    """At a barrier."""
    waits: bool = True
    deputy_at: Seconds = math.inf
    """From when on the second by name gets it too."""
    told: PeerId | None = None
    """The coordinator that knows of it."""
    said: Ticket | None = None
    """And the offer that it knows of."""


@dataclass(eq=False)
class Scheduled(ABC):
    """One peer's share of the versions; `_view()` is who trains, sorted, with us."""

    _me: PeerId
    _resend_s: Seconds
    _view: Callable[[], Sequence[PeerId]]
    _lock: GroupLock
    _emit: Callable[[Effect], None]
    arrival: Arrival | None = field(default=None, init=False)
    group: Average | None = field(default=None, init=False)
    _arrivals: dict[PeerId, tuple[int, int]] = field(default_factory=dict, init=False)
    """As the coordinator: the version at which a trainer is; and its lineage, or if it waits."""
    _requested: tuple[Ticket, int] | None = field(default=None, init=False)
    """As that: the group of this version is being formed, or runs."""
    _withdrawn: bool = field(default=False, init=False)
    epoch: int = field(default=0, init=False)
    """Of the settings that its groups have."""

    def withdraw(self, now: Seconds) -> None:
        """The trainer stops: no more waiting. A group that is formed is left to end."""
        self.stop_waiting(now)

    def stop_waiting(self, now: Seconds) -> None:
        """No more waiting: other settings follow, or the trainer stops."""
        self._withdrawn = True
        self._arrivals.clear()
        self._end_arrival(Outcome.WITHDRAWN, now)

    def group_over(self, ticket: Ticket, outcome: Outcome, now: Seconds) -> None:
        """A group that we were in is over."""
        group = self.group
        if group and group.ticket == ticket:
            self.group = None
            self._left(group, outcome, now)

    def request_ended(self, ticket: Ticket, outcome: Outcome, now: Seconds) -> None:
        """Our request as the coordinator has come to nothing, or its group is over."""
        if self._requested and self._requested[0] == ticket:
            _, version = self._requested
            self._requested = None
            if outcome is Outcome.REFUSED:
                self._refused(version, now)
            self._maybe_run(now)

    def follow(self, now: Seconds) -> None:
        """Call it after whatever has happened to the slot: its offer may have changed."""
        arrival, slot = self.arrival, self._lock.state
        if arrival and isinstance(slot, Offered) and slot.ticket != arrival.said:
            _, purpose, _ = self._meets(arrival)
            if slot.purpose.formation is purpose.formation:
                self._tell(now)

    def peer_out(self, peer: PeerId) -> None:
        """A peer is dead or has left; if it comes back, it arrives anew."""
        self._arrivals.pop(peer, None)

    def view_changed(self, now: Seconds) -> None:
        """Membership has changed: the coordinator may have changed, or enough may be here now."""
        self._tell(now)
        self._maybe_run(now)

    def handle_timer(self, now: Seconds) -> None:
        if self.arrival and self.arrival.resend_at <= now:
            self._tell(now)
            self._maybe_run(now)

    def next_deadline(self) -> Seconds | None:
        return self.arrival.resend_at if self.arrival else None

    def check(self) -> None:
        group = self.group
        if group and (self._me not in group.members or not self._lock.holds(group.ticket)):
            raise InvariantViolation(f"{self._me} is in {group}, its slot is {self._lock.state}")

    @abstractmethod
    def admits(self, source: PeerId, purpose: Purpose) -> bool:
        """True if we can be in such a group, which `source` requests."""

    @abstractmethod
    def formed(self, average: Average) -> Average:
        """We are in this group. Returns the same, and says if our trainer waits for its end."""

    @abstractmethod
    def _meets(self, arrival: Arrival) -> tuple[Sequence[PeerId], Purpose, Arrive | Activate]:
        """Who meets, the coordinator first, for what, and what to tell it beside our offer."""

    @abstractmethod
    def _maybe_run(self, now: Seconds) -> None:
        """If we coordinate, and enough have arrived: request the group."""

    @abstractmethod
    def _refused(self, version: int, now: Seconds) -> None:
        """Our request for the group of `version` was refused by a member."""

    @abstractmethod
    def _left(self, group: Average, outcome: Outcome, now: Seconds) -> None:
        """We are not in `group` any more."""

    def _tell(self, now: Seconds) -> None:
        """If our trainer is here: tell the coordinator, and offer it our slot, unless it is us."""
        arrival = self.arrival
        if arrival is None:
            return
        members, purpose, words = self._meets(arrival)
        coordinator = members[0]
        if coordinator == self._me:
            self._lock.withdraw_offer(now)
        elif arrival.waits:
            self._lock.offer(coordinator, purpose, now)
        if self.arrival is not arrival:
            return  # our slot was free for its group at once
        said = words
        match self._lock.state:
            case Offered() as slot if arrival.waits and slot.to == coordinator:
                said = replace(words, offer=slot.ticket, contribution=slot.contribution)
            case _:
                pass
        is_due = arrival.resend_at <= now
        if not is_due and (arrival.told, arrival.said) == (coordinator, said.offer):
            return  # views that change often postpone nothing, and multiply no messages
        resend_at = now + self._resend_s if is_due else arrival.resend_at
        self.arrival = replace(arrival, resend_at=resend_at, told=coordinator, said=said.offer)
        if coordinator != self._me:
            self._emit(Send(coordinator, said))  # lost: sent again at `resend_at`
        for deputy in members[1:2]:
            if now >= arrival.deputy_at and deputy != self._me:
                self._emit(Send(deputy, words))  # lost: as above

    def _end_arrival(self, outcome: Outcome, now: Seconds) -> None:
        arrival, self.arrival = self.arrival, None
        if arrival:
            self._lock.withdraw_offer(now)
            if arrival.waits:
                self._emit(VersionEnded(arrival.version, outcome))
