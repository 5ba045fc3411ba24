"""Wait-avoiding groups: the trainer that arrives first runs a version, and waits for no other.

An algorithm that acts on a *schedule* says, for each version 1, 2, 3, ... and each view of who
trains, which group a peer is in and when that group may run (`Round`). Its trainer *arrives* at a
version. Once those have arrived whom the rule asks for (`Rule`: one, so many, a drawn initiator,
all), the version runs in the whole group: every member contributes the latest it has, wherever its
own trainer is. A trainer that arrives later finds that its version has run, and goes on. (Li et
al., PPoPP 2020 and TPDS 2021.)

**The protocol in four lines.** An arriving peer tells the *coordinator* of its group, the first
member by name: `Activate`, with the offer of its slot if it waits. When the rule is met, the
coordinator requests the whole group through the slots (`core/group_lock.py`): those who wait have
granted by their offers, the others grant as soon as they are in no other group. A member that is
past the version refuses, and says how far it is: `Past`. A group needs no message to end.

::

                  Activate of those whom the rule asks for: Request to the others, Begin to all
      (coordinator) ----------------------------------------------+
                                                                  v
      BETWEEN VERSIONS ----- Begin(v), v > begun ------------> IN_GROUP(v)
          ^      ^                                                |
          |      +--------------- average ended, broken ----------+
          +---- Request(v), v <= begun: Relinquish, Past

**Each version runs at most once at each peer.** `begun` is the last version that began here, and
only grows: a peer admits v only if v > begun, when it is asked and when its slot would be granted.
Which versions it skips does not matter, since all that it holds goes with the next one. Where the
group is everyone, no version is skipped by anyone who is there.

**One coordinator, one ticket.** Several that arrive at once tell the same coordinator, which counts
them: there is nothing to agree on. If views differ, two may request two groups of one version that
share a peer; it enters the first that it has granted, and refuses the other.

**Why no cycle of waits can exist.** The requests are ordered among all others by the lock. A
trainer waits for its version, or for its rule: for other trainers to arrive at it *or beyond*. So
of all versions that are waited for, the smallest waits only for trainers that are in the middle of
a step. (A trainer that is beyond has told the coordinator of another group, if views differed. So a
coordinator that has waited for `resend_s` asks those who are missing, and is told `Past`.) A
version that a member is past will never run in its group: the coordinator gives it up, and tells
those who wait for it.

**A late peer** loses nothing: what it has goes with the version that finds it, and its own result
is in its pending numbers, or kept for it (`Group.keep`). Several versions may pass meanwhile.

**When a member dies** inside, membership says so and the group goes on without it, or is over for
the others. The version is not run again: what was not delivered goes with the next one. A
coordinator that dies is replaced by the next by name: those who wait tell that one. A joiner is in
no view before it trains, and its first arrival is answered with how far the others are.

**What each loss costs.** `Activate` is sent again every `resend_s`, as long as the trainer waits.
A lost `Past` comes again with the next `Activate`.

**Bounded staleness** (`Rule.limiter`): the coordinator knows when each trainer arrived last, and
runs no version that would be more than so many later. It counts from when it first heard of a peer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from p2ptrain.core.effects import Effect, Send, VersionEnded
from p2ptrain.core.events import Outcome
from p2ptrain.core.group_lock import GroupLock
from p2ptrain.core.lock_state import Offered
from p2ptrain.core.messages import Activate, Past, WaitAvoidingMessage
from p2ptrain.core.purpose import Formation, Purpose, What
from p2ptrain.errors import InvariantViolation
from p2ptrain.ids import PeerId, Seconds, Ticket


@dataclass(frozen=True, slots=True)
class Rule:
    """When a version may run: one trainer waits for it, and so many wait there or beyond."""

    waiting: int = 1
    """Trainers that must wait. 1: nobody waits for anybody."""

    initiator: PeerId | None = None
    """Must be among them."""

    limiter: int | None = None
    """No trainer's last arrival, waiting or not, may be more than so many versions ago."""


ASKED_AT_ONCE = 8
"""So many members are asked at a time where they are, however large the group."""

NOBODY = Rule()
"""The first one that waits runs it."""


@dataclass(frozen=True, slots=True)
class Round:
    """What happens at one version, as one peer sees it."""

    members: tuple[PeerId, ...]
    """The group that the peer is in, sorted."""

    what: What
    rule: Rule = NOBODY


Schedule = Callable[[int, Sequence[PeerId], PeerId], Round]
"""Version, who trains (sorted), and one of them: its round. Pure, so that all find the same."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """Our trainer is at `version`, which has not begun here."""

    version: int
    waits: bool
    resend_at: Seconds
    said: Ticket | None = None
    """The offer that the coordinator knows of."""


@dataclass(frozen=True, slots=True)
class InGroup:
    ticket: Ticket
    version: int
    members: tuple[PeerId, ...]
    awaited: bool
    """Our trainer waits for its end."""


@dataclass(frozen=True, slots=True)
class Requested:
    """As the coordinator: the group of this version is being formed, or runs."""

    ticket: Ticket
    version: int
    members: tuple[PeerId, ...]


class WaitAvoiding:
    """One peer's share of the scheduled versions; `view()` is who trains, sorted, with us."""

    def __init__(
        self,
        me: PeerId,
        resend_s: Seconds,
        schedule: Schedule | None,
        view: Callable[[], Sequence[PeerId]],
        lock: GroupLock,
        emit: Callable[[Effect], None],
    ) -> None:
        self._me = me
        self._resend_s = resend_s
        self._schedule = schedule
        self._view = view
        self._lock = lock
        self._emit = emit
        self._begun = 0  # the last version that began here
        self._heard = 0  # the last version that began anywhere, as far as we were told
        self._group: InGroup | None = None
        self._requested: Requested | None = None
        self._arrival: Arrival | None = None
        self._arrivals: dict[PeerId, tuple[int, bool]] = {}  # to us: version, and if it waits
        self._beyond: dict[PeerId, int] = {}  # as the coordinator: a version that has begun there
        self._last: dict[PeerId, int] = {}  # as that: the last version that a trainer knew
        self._withdrawn = False

    @property
    def group(self) -> InGroup | None:
        return self._group

    @property
    def arrival(self) -> Arrival | None:
        return self._arrival

    @property
    def begun(self) -> int:
        """The last version that began here."""
        return self._begun

    @property
    def version(self) -> int:
        """The last version that has begun here, or is known to have begun elsewhere."""
        return max(self._begun, self._heard)

    def admits(self, source: PeerId, purpose: Purpose) -> bool:
        """True if such a version can begin here; otherwise `source` hears how far we are."""
        if self._schedule is None or self._withdrawn:
            return False
        if purpose.version <= self._begun:
            if source != self._me:  # lost: its request is refused all the same
                self._emit(Send(source, Past(self._begun)))
            return False
        return True

    # --- what happens -----------------------------------------------------------------------------

    def arrive(self, version: int, now: Seconds, *, waits: bool = True) -> None:
        """The trainer is at `version`; if it waits, that ends in one `VersionEnded`.

        At once, as `LATE`, if the version has run; with the result of a later one, if that begins
        first. A trainer that does not wait is at least not far behind (`Rule.limiter`).
        """
        group = self._group
        if group and group.version == version and not self._withdrawn:
            self._group = replace(group, awaited=group.awaited or waits)
        elif self._withdrawn or version <= self._begun:
            outcome = Outcome.WITHDRAWN if self._withdrawn else Outcome.LATE
            if waits:
                self._emit(VersionEnded(version, outcome))
        else:
            self._arrival = Arrival(version, waits, now + self._resend_s)
            self._tell_coordinator(now)

    def withdraw(self, now: Seconds) -> None:
        """The trainer stops: no more groups. One that is formed is left to end."""
        self._withdrawn = True
        self._end_arrival(Outcome.WITHDRAWN, now)
        self._arrivals.clear()

    def receive(self, source: PeerId, message: WaitAvoidingMessage, now: Seconds) -> None:
        if self._schedule is None:
            return  # its sender runs another algorithm
        match message:
            case Activate():
                self._handle_activate(source, message, now)
            case Past(version=version):
                self._heard = max(self._heard, version)
                self._handle_past(source, version, now)
            case _:
                assert_never(message)

    def formed(self, ticket: Ticket, purpose: Purpose, members: tuple[PeerId, ...]) -> bool:
        """A version begins, and we are in its group; true if our trainer waits for it."""
        version, arrival = purpose.version, self._arrival
        self._begun = max(self._begun, version)
        arrived = arrival is not None and arrival.version <= version
        awaited = arrived and arrival is not None and arrival.waits
        if arrived:
            self._arrival = None
            self._lock.stop_offering()
        for peer, (theirs, _) in tuple(self._arrivals.items()):
            if theirs <= version:
                del self._arrivals[peer]
        self._group = InGroup(ticket, version, members, awaited)
        return awaited

    def group_over(self, ticket: Ticket, outcome: Outcome, now: Seconds) -> None:
        """A group that we were in is over."""
        group = self._group
        if group is None or group.ticket != ticket:
            return
        self._group = None
        if group.awaited:
            self._emit(VersionEnded(group.version, outcome))
        self._maybe_run(now)

    def request_ended(self, ticket: Ticket, outcome: Outcome, now: Seconds) -> None:
        """Our request as the coordinator has come to nothing, or its group is over."""
        requested = self._requested
        if requested is None or requested.ticket != ticket:
            return
        self._requested = None
        if outcome is Outcome.REFUSED and requested.version > self._begun:
            self._give_up(requested, now)
        self._maybe_run(now)

    def follow(self, now: Seconds) -> None:
        """Call it after whatever has happened to the slot: its offer may have changed."""
        arrival, slot = self._arrival, self._lock.state
        if arrival is None or not isinstance(slot, Offered) or slot.ticket == arrival.said:
            return
        if slot.purpose.formation is Formation.WAIT_AVOIDING:
            self._tell_coordinator(now)

    def peer_out(self, peer: PeerId) -> None:
        """A peer is dead or has left."""
        self._arrivals.pop(peer, None)
        self._beyond.pop(peer, None)
        self._last.pop(peer, None)

    def view_changed(self, now: Seconds) -> None:
        """Membership has changed: our coordinator may have changed, or a rule may be met now."""
        if self._arrival:
            self._tell_coordinator(now)
        self._maybe_run(now)

    def handle_timer(self, now: Seconds) -> None:
        arrival = self._arrival
        if arrival and arrival.resend_at <= now:
            self._arrival = replace(arrival, resend_at=now + self._resend_s)
            self._tell_coordinator(now)
            self._look_for_missing(arrival.version, now)
            self._maybe_run(now)

    def next_deadline(self) -> Seconds | None:
        return self._arrival.resend_at if self._arrival else None

    def check(self) -> None:
        group = self._group
        if group and (self._me not in group.members or not self._lock.holds(group.ticket)):
            raise InvariantViolation(f"{self._me} is in {group}, its slot is {self._lock.state}")
        if self._arrival and self._arrival.version <= self._begun:
            raise InvariantViolation(f"{self._me} waits at {self._arrival}, begun {self._begun}")

    # --- the trainer's side -----------------------------------------------------------------------

    def _tell_coordinator(self, now: Seconds) -> None:
        arrival = self._arrival
        assert arrival is not None
        version, here = arrival.version, self._round(arrival.version)
        coordinator = here.members[0]
        if coordinator == self._me:
            self._lock.withdraw_offer(now)
            self._count(self._me, version, arrival.waits, now)
            return
        message = Activate(version, arrival.waits)
        if arrival.waits:
            self._lock.offer(coordinator, version_of(version, here), now)
            slot = self._lock.state
            if isinstance(slot, Offered) and slot.to == coordinator:
                message = replace(message, offer=slot.ticket, contribution=slot.contribution)
        self._arrival = replace(arrival, said=message.offer)
        self._emit(Send(coordinator, message))  # lost: sent again

    def _end_arrival(self, outcome: Outcome, now: Seconds) -> None:
        arrival, self._arrival = self._arrival, None
        if arrival:
            self._lock.withdraw_offer(now)
            if arrival.waits:
                self._emit(VersionEnded(arrival.version, outcome))

    # --- the coordinator's side -------------------------------------------------------------------

    def _handle_activate(self, source: PeerId, message: Activate, now: Seconds) -> None:
        version, waits = message.version, message.waits
        if self._withdrawn:
            return  # we are about to leave; then somebody else is asked
        self._note_last(source, version, waits)
        if message.offer:
            purpose = version_of(version, self._round(version))
            self._lock.note_offer(source, message.offer, purpose, message.contribution)
        group = self._group
        if version > self._begun:
            self._count(source, version, waits, now)
        elif group is None or group.ticket.initiator != self._me or source not in group.members:
            self._lock.forget_offer(source)
            self._emit(Send(source, Past(self._begun)))  # lost: its `Activate` comes again

    def _look_for_missing(self, version: int, now: Seconds) -> None:
        """If we coordinate our group: ask some who have not arrived where they are.

        Most are in the middle of a step. One that is beyond believed in another group.
        """
        members = self._round(version).members
        if members[0] != self._me or self._group:
            return
        missing = [p for p in members[1:] if self._arrivals.get(p, (0, False))[0] < version]
        first = round(now / self._resend_s) if len(missing) > ASKED_AT_ONCE else 0
        for k in range(min(ASKED_AT_ONCE, len(missing))):
            peer = missing[(first + k) % len(missing)]
            self._emit(Send(peer, Activate(version, waits=False)))  # lost: sent again

    def _handle_past(self, source: PeerId, version: int, now: Seconds) -> None:
        """`source` is beyond `version`: it coordinates our group, or is in one of ours."""
        arrival = self._arrival
        if arrival and self._round(arrival.version).members[0] == self._me:
            self._beyond[source] = max(version, self._beyond.get(source, 0))
            self._maybe_run(now)
        elif arrival and arrival.version <= version:
            self._end_arrival(Outcome.LATE, now)

    def _count(self, peer: PeerId, version: int, waits: bool, now: Seconds) -> None:
        known, waited = self._arrivals.get(peer, (0, False))
        if version < known:
            return  # overtaken by its own later word
        self._arrivals[peer] = (version, waits or (waited and version == known))
        self._note_last(peer, version, waits)
        self._maybe_run(now)

    def _note_last(self, peer: PeerId, version: int, waits: bool) -> None:
        # One that waits will know this version. One that does not may have missed the last two, one
        # that is over and one under way.
        self._last[peer] = max(self._last.get(peer, 0), version if waits else version - 2)

    def _maybe_run(self, now: Seconds) -> None:
        """If none of ours is under way: request the first version whose rule is met."""
        if self._group or self._requested or self._withdrawn:
            return
        for version in sorted({version for version, waits in self._arrivals.values() if waits}):
            here = self._round(version)
            if version > self._begun and self._is_met(version, here):
                self._request(version, here, now)
                return

    def _request(self, version: int, here: Round, now: Seconds) -> None:
        if here.members == (self._me,) and here.what is What.MODELS:
            self._begun = version  # its own mean
            self._arrivals.pop(self._me, None)
            self._end_arrival(Outcome.DONE, now)
            return
        others = [peer for peer in here.members if peer != self._me]
        # Formed or not, it ends in `request_ended`, which comes later.
        ticket = self._lock.request(others, len(others), now, version_of(version, here))
        self._requested = Requested(ticket, version, here.members)

    def _give_up(self, requested: Requested, now: Seconds) -> None:
        """A member is past this version, or not ready for it: it will not run in its group."""
        self._begun = requested.version
        for peer, (version, waits) in tuple(self._arrivals.items()):
            if version <= requested.version:
                del self._arrivals[peer]
                if waits and peer != self._me:
                    self._lock.forget_offer(peer)
                    self._emit(Send(peer, Past(requested.version)))  # lost: it arrives again
        if self._arrival and self._arrival.version <= requested.version:
            self._end_arrival(Outcome.REFUSED, now)

    def _is_met(self, version: int, here: Round) -> bool:
        rule = here.rule
        known = {peer: self._arrivals[peer] for peer in here.members if peer in self._arrivals}
        if (version, True) not in known.values():
            return False  # the one that waits for it believes in another group
        arrived = {peer: waits for peer, (theirs, waits) in known.items() if theirs >= version}
        arrived |= {p: True for p in here.members if self._beyond.get(p, 0) >= version}
        waiting = [peer for peer, waits in arrived.items() if waits]
        if len(waiting) < rule.waiting or rule.initiator not in (None, *waiting):
            return False
        for peer in here.members:
            last = self._last.setdefault(peer, version - 1)
            if rule.limiter is not None and peer not in arrived and version - last > rule.limiter:
                return False
        return True

    def _round(self, version: int) -> Round:
        assert self._schedule is not None
        return self._schedule(version, self._view(), self._me)


def version_of(version: int, here: Round) -> Purpose:
    """What a trainer waits for that waits for this round."""
    return Purpose(Formation.WAIT_AVOIDING, here.what, version)
