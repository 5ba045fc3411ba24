"""Wait-avoiding groups: the trainer that arrives first runs a version, and waits for no other.

An algorithm that acts on a *schedule* says, for each version 1, 2, 3, ... and each view of who
trains, which group a peer is in and when that group may run (`Round`). Its trainer *arrives* at a
version. Once those have arrived whom the rule asks for (`Rule`: one, so many, a drawn initiator,
all), the version runs in the whole group: every member contributes the latest it has, wherever its
own trainer is. A trainer that arrives later finds that its version has run, and goes on. (Li et
al., PPoPP 2020 and TPDS 2021.)

**The protocol in two lines.** An arriving peer sends `Activate` to the coordinator of its group,
which requests the whole group when the rule is met (`core/scheduled.py`). A member that is past the
version refuses, and says how far it is: `Past`.

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

**Why no cycle of waits can exist.** A trainer waits for its version, or for its rule: for other
trainers to arrive at it *or beyond*. So of all versions that are waited for, the smallest waits
only for trainers that are in the middle of a step. (A trainer that is beyond has told another
coordinator: views differed, or it has left versions out. So one that has waited for `resend_s`
asks those who are missing, and gets `Past`.) A version that a member is past will never run in
its group: the coordinator gives it up, and tells those who wait for it. A lost `Past` comes again
with the next `Activate`.

**A late peer** loses nothing: what it has goes with the version that finds it, and its own result
is in its pending numbers, or kept for it (`Group.keep`). Several versions may pass meanwhile.

**When a member dies** inside, the group goes on without it, or is over for the others. The version
is not run again: what was not delivered goes with the next one. A joiner is in no view before it
trains, and its first arrival is answered with how far the others are.

**Bounded staleness** (`Rule.limiter`): the coordinator knows when each trainer arrived last, and
runs no version that would be more than so many later. It counts from when it first heard of a peer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from p2ptrain.core.effects import Average, Outcome, Send, VersionEnded
from p2ptrain.core.messages import Activate, Past, WaitAvoidingMessage
from p2ptrain.core.purpose import Formation, Purpose, What
from p2ptrain.core.scheduled import Arrival, Scheduled
from p2ptrain.errors import InvariantViolation
from p2ptrain.ids import PeerId, Seconds


@dataclass(frozen=True, slots=True)
class Rule:
    """When a version may run: one trainer waits for it, and so many wait there or beyond."""

    waiting: int = 1
    """Trainers that must wait. 1: none waits for another."""

    initiator: PeerId | None = None
    """Must be among them."""

    limiter: int | None = None
    """No trainer's last arrival, waiting or not, may be more than so many versions ago."""

    grace_s: Seconds = 0
    """Once all this is so, the others may still arrive for so long."""


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
    fragment: int = 0
    """Of the model, which is cut into so many; `Purpose`."""
    fragments: int = 1

    def purpose(self, version: int, epoch: int = 0) -> Purpose:
        """What a trainer waits for that waits for this round."""
        return Purpose(
            Formation.WAIT_AVOIDING,
            self.what,
            version,
            fragment=self.fragment,
            fragments=self.fragments,
            epoch=epoch,
        )


Schedule = Callable[[int, Sequence[PeerId], PeerId], Round]
"""Version, who trains (sorted), and one of them: its round. Pure, so that all find the same."""


@dataclass(eq=False)
class WaitAvoiding(Scheduled):
    """One peer's share of the scheduled versions; `_view()` is who trains, sorted, with us."""

    _schedule: Schedule | None
    begun: int = field(default=0, init=False)
    """The last version that began here."""
    _heard: int = field(default=0, init=False)
    """The last version that began anywhere, as far as we were told."""
    _beyond: dict[PeerId, int] = field(default_factory=dict, init=False)
    """As the coordinator: a version that has begun there."""
    _last: dict[PeerId, int] = field(default_factory=dict, init=False)
    """As that: the last version that a trainer knew."""
    _grace: tuple[int, Seconds | None] = field(default=(0, None), init=False)
    """As that: at this version, the others may arrive until then (`Rule.grace_s`); None: no more.
    """

    @property
    def version(self) -> int:
        """The last version that has begun here, or is known to have begun elsewhere."""
        return max(self.begun, self._heard)

    def admits(self, source: PeerId, purpose: Purpose) -> bool:
        if self._schedule is None or self._withdrawn:
            return False
        if purpose.version <= self.begun:
            if source != self._me:  # it hears how far we are; lost: its request is refused too
                self._emit(Send(source, Past(self.begun)))
            return False
        return True

    def begin_after(self, version: int) -> None:
        """All versions up to this one ran before this peer and all others started again."""
        self.begun = self._heard = max(self.version, version)

    def arrive(self, version: int, now: Seconds, *, waits: bool = True) -> None:
        """The trainer is at `version`; if it waits, that ends in one `VersionEnded`.

        At once, as `LATE`, if the version has run; with the result of a later one, if that begins
        first. A trainer that does not wait is at least not far behind (`Rule.limiter`).
        """
        group = self.group
        if group and group.purpose.version == version and not self._withdrawn:
            self.group = replace(group, awaited=group.awaited or waits)
        elif self._withdrawn or version <= self.begun:
            if waits:
                outcome = Outcome.WITHDRAWN if self._withdrawn else Outcome.LATE
                self._emit(VersionEnded(version, outcome))
        else:
            self.arrival = Arrival(version, now + self._resend_s, waits=waits)
            self._tell(now)

    def receive(self, source: PeerId, message: WaitAvoidingMessage, now: Seconds) -> None:
        if self._schedule is None:
            return  # its sender runs another algorithm
        match message:
            case Activate():
                self._handle_activate(source, message, now)
            case Past(version=version):
                self._heard = max(self._heard, version)
                self._handle_past(source, version, now)

    def formed(self, average: Average) -> Average:
        version, arrival = average.purpose.version, self.arrival
        self.begun = max(self.begun, version)
        if arrival and arrival.version <= version:
            average, self.arrival = replace(average, awaited=arrival.waits), None
            self._lock.stop_offering()
        self._arrivals = {p: known for p, known in self._arrivals.items() if known[0] > version}
        self.group = average
        return average

    def peer_out(self, peer: PeerId) -> None:
        super().peer_out(peer)
        self._beyond.pop(peer, None)
        self._last.pop(peer, None)

    def next_deadline(self) -> Seconds | None:
        version, until = self._grace
        others = super().next_deadline()
        if until is None or version <= self.begun or self._withdrawn:
            return others
        return until if others is None else min(until, others)

    def handle_timer(self, now: Seconds) -> None:
        arrival = self.arrival
        super().handle_timer(now)
        version, until = self._grace
        if until is not None and until <= now:
            self._grace = version, None
            self._maybe_run(now)
        if arrival and arrival.resend_at <= now:
            self._look_for_missing(arrival.version, now)

    def check(self) -> None:
        super().check()
        if self.arrival and self.arrival.version <= self.begun:
            raise InvariantViolation(f"{self._me} waits at {self.arrival}, begun {self.begun}")

    def _meets(self, arrival: Arrival) -> tuple[Sequence[PeerId], Purpose, Activate]:
        version, here = arrival.version, self._round(arrival.version)
        return here.members, here.purpose(version, self.epoch), Activate(version, arrival.waits)

    def _tell(self, now: Seconds) -> None:
        super()._tell(now)
        arrival = self.arrival
        if arrival and self._round(arrival.version).members[0] == self._me:
            self._count(self._me, arrival.version, arrival.waits, now)

    def _left(self, group: Average, outcome: Outcome, now: Seconds) -> None:
        if group.awaited:
            self._emit(VersionEnded(group.purpose.version, outcome))
        self._maybe_run(now)

    # --- the coordinator's side -------------------------------------------------------------------

    def _handle_activate(self, source: PeerId, message: Activate, now: Seconds) -> None:
        version, waits = message.version, message.waits
        if self._withdrawn:
            return  # we are about to leave; then somebody else is asked
        self._note_last(source, version, waits)
        if message.offer:
            purpose = self._round(version).purpose(version, self.epoch)
            self._lock.note_offer(source, message.offer, purpose, message.contribution)
        group, arrival = self.group, self.arrival
        if version > self.begun:
            self._count(source, version, waits, now)
            if arrival and arrival.version > version and source == self._round(version).members[0]:
                self._emit(Send(source, Past(arrival.version - 1)))  # our trainer comes to no such
        elif group is None or group.ticket.initiator != self._me or source not in group.members:
            self._lock.forget_offer(source)
            self._emit(Send(source, Past(self.begun)))  # if this is lost: it asks again

    def _look_for_missing(self, version: int, now: Seconds) -> None:
        """If we coordinate our group: ask some who have not arrived where they are.

        Most are in the middle of a step. One that is beyond believed in another group.
        """
        members = self._round(version).members
        if members[0] != self._me or self.group:
            return
        missing = [p for p in members[1:] if self._arrivals.get(p, (0, False))[0] < version]
        first = round(now / self._resend_s) if len(missing) > ASKED_AT_ONCE else 0
        for k in range(min(ASKED_AT_ONCE, len(missing))):
            peer = missing[(first + k) % len(missing)]
            self._emit(Send(peer, Activate(version, waits=False)))  # lost: sent again

    def _handle_past(self, source: PeerId, version: int, now: Seconds) -> None:
        """`source` is beyond `version`: it coordinates our group, or is in one of ours."""
        arrival = self.arrival
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
        if self.group or self._requested or self._withdrawn:
            return
        for version in sorted({version for version, waits in self._arrivals.values() if waits}):
            here = self._round(version)
            if version <= self.begun or not self._is_met(version, here):
                continue
            if self._is_granted_grace(version, here, now):
                return
            if here.members == (self._me,) and here.what is What.MODELS:
                self.begun = version  # its own mean
                self._arrivals.pop(self._me, None)
                self._end_arrival(Outcome.DONE, now)
                return
            others = [peer for peer in here.members if peer != self._me]
            # Formed or not, it ends in `request_ended`, which comes later.
            purpose = here.purpose(version, self.epoch)
            ticket = self._lock.request(others, len(others), now, purpose)
            self._requested = ticket, version
            return

    def _refused(self, version: int, now: Seconds) -> None:
        """A member is past this version, or not ready for it: it will not run in its group."""
        if version <= self.begun:
            return
        self.begun = version
        for peer, (theirs, waits) in tuple(self._arrivals.items()):
            if theirs <= version:
                del self._arrivals[peer]
                if waits and peer != self._me:
                    self._lock.forget_offer(peer)
                    self._emit(Send(peer, Past(version)))  # lost: it arrives again
        if self.arrival and self.arrival.version <= version:
            self._end_arrival(Outcome.REFUSED, now)

    def _is_met(self, version: int, here: Round) -> bool:
        rule = here.rule
        known = {peer: self._arrivals[peer] for peer in here.members if peer in self._arrivals}
        if (version, True) not in known.values():
            return False  # the one that waits for it believes in another group
        arrived = {peer: waits for peer, (theirs, waits) in known.items() if theirs >= version}
        arrived |= {p: True for p in here.members if self._beyond.get(p, 0) >= version}
        if self.arrival and self.arrival.version > version:
            arrived[self._me] = self.arrival.waits
        waiting = [peer for peer, waits in arrived.items() if waits]
        if len(waiting) < rule.waiting or rule.initiator not in (None, *waiting):
            return False
        for peer in here.members:
            last = self._last.setdefault(peer, version - 1)
            if rule.limiter is not None and peer not in arrived and version - last > rule.limiter:
                return False
        return True

    def _is_granted_grace(self, version: int, here: Round, now: Seconds) -> bool:
        """Whether others may still arrive at a version whose rule is met."""
        if not here.rule.grace_s:
            return False
        if self._grace[0] != version:
            self._grace = version, now + here.rule.grace_s
        arrived = {p for p, (theirs, _) in self._arrivals.items() if theirs >= version}
        everyone_is_here = arrived.issuperset(here.members)
        until = self._grace[1]
        return not everyone_is_here and until is not None and now < until

    def _round(self, version: int) -> Round:
        assert self._schedule is not None
        return self._schedule(version, self._view(), self._me)
