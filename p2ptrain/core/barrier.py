"""Barriers: everyone who trains meets once per version.

Who meets follows from the view, and when, from the version; what peers need is agreement on both
while others come and go. The *coordinator*, the first participant by name, collects an `Arrive`
from every participant; each carries the offer of its slot (`core/group_lock.py`). When all have
arrived it requests the group: those who have offered have granted, so that `Begin` follows at once;
those whose slot is in another group grant when that has ended. A slow peer may compute for long: no
peer is promised while it does, and a dead one is taken off the list by membership.

::

             arrive(v)               Begin(ticket, v)                 done: version v ended
      IDLE -----------> WAITING(v) --------------------> IN_GROUP ---------------------------> IDLE
                          ^  |  ^                            | broken: arrive again
                          |  |  +----------------------------+
          state of w held |  | CatchUp(w > v)
                          |  v
                        CATCHING_UP(w)

**After a break** some members may have finished version v and others not. Those who have will
arrive with v + 1, those who have not with v, and the coordinator, which waits for all, sees both:
it sends the ones behind to take the state (parameters *and* optimizer) of one that is ahead,
which stands still at its boundary because it waits at this very barrier. A newcomer is the same
case, only further behind. So there is one mechanism for both, and peers that average together are
equal.

**Two models.** Two parts of a swarm that cannot hear each other go on apart, each with its own
averages, and may come to the same version with two models. So each arrival states its *lineage*: 64
bits that follow from the first model and each average that went into it
(`runtime/agreed_state.py`). A group has one version and one lineage; where the newest version has
several, members of another lineage than most take the state of one of those, as members behind do.

**No cycle of waits**: participants wait for the coordinator's word, the coordinator for arrivals,
and an arrival needs nothing but the trainer's own step (or, catching up, the state of a peer that
is waiting). Waiting holds no slot. The request is one like any other: the lock's argument covers it
among all others. Two coordinators (their views differ) cannot form two groups that share a peer.

**A coordinator that forms nothing** though all have arrived (it hangs, or refuses for a reason that
no other peer knows of) stops nobody: a peer that has waited for `DEPUTY_S` tells the next
participant by name as well, and that one requests the group when it has heard of all.

`Arrive` is repeated every `resend_s` until something happens, so any message of this file may be
lost.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from p2ptrain.core.effects import Effect, Send, TakeState, VersionEnded
from p2ptrain.core.events import Outcome
from p2ptrain.core.group_lock import GroupLock
from p2ptrain.core.lock_state import Offered
from p2ptrain.core.messages import Arrive, BarrierMessage, CatchUp
from p2ptrain.core.purpose import Formation, Purpose, What
from p2ptrain.errors import InvariantViolation, LocalProtocolError
from p2ptrain.ids import PeerId, Seconds, Ticket

DEPUTY_S: Seconds = 2.0
"""A peer that has waited for so long tells the deputy too."""


@dataclass(frozen=True, slots=True)
class Idle:
    """The trainer computes."""


@dataclass(frozen=True, slots=True)
class Waiting:
    version: int
    lineage: int
    since: Seconds
    resend_at: Seconds
    said: Ticket | None = None
    """The offer that the others know of."""

    @property
    def purpose(self) -> Purpose:
        return barrier_of(self.version, self.lineage)


@dataclass(frozen=True, slots=True)
class CatchingUp:
    version: int
    lineage: int
    behind: tuple[int, int]
    """The version and lineage we wait with again if the state cannot be had."""


@dataclass(frozen=True, slots=True)
class InGroup:
    ticket: Ticket
    version: int
    lineage: int


BarrierState = Idle | Waiting | CatchingUp | InGroup


class Barrier:
    """One peer's share of the barriers; `participants()` is membership's word, sorted."""

    def __init__(
        self,
        me: PeerId,
        resend_s: Seconds,
        participants: Callable[[], Sequence[PeerId]],
        lock: GroupLock,
        emit: Callable[[Effect], None],
    ) -> None:
        self._me = me
        self._resend_s = resend_s
        self._participants = participants
        self._lock = lock
        self._emit = emit
        self._state: BarrierState = Idle()
        self._arrivals: dict[PeerId, tuple[int, int]] = {}  # of others: version, line
        self._request: Ticket | None = None  # as the coordinator
        self._withdrawn = False

    @property
    def state(self) -> BarrierState:
        return self._state

    def waits_with(self, version: int, lineage: int) -> bool:
        """True while our trainer stands at that boundary: others may take its state."""
        state = self._state
        return isinstance(state, Waiting) and (state.version, state.lineage) == (version, lineage)

    def admits(self, purpose: Purpose) -> bool:
        """True if we wait for just this."""
        return self.waits_with(purpose.version, purpose.lineage)

    # --- what happens -----------------------------------------------------------------------------

    def arrive(self, version: int, lineage: int, now: Seconds) -> None:
        """The trainer waits with `version` of `lineage`; it ends in `VersionEnded`."""
        if not isinstance(self._state, Idle):
            raise LocalProtocolError(f"{self._me} arrives with {version} but is {self._state}")
        self._wait(version, lineage, now)

    def withdraw(self) -> None:
        """The trainer stops: no more waiting. A group that is formed is left to end.

        The slot's own `withdraw` takes offer and request back.
        """
        self._withdrawn = True
        match self._state:
            case Waiting(version=version) | CatchingUp(behind=(version, _)):
                self._state = Idle()
                self._emit(VersionEnded(version, Outcome.WITHDRAWN))
            case _:
                pass

    def receive(self, source: PeerId, message: BarrierMessage, now: Seconds) -> None:
        match message:
            case Arrive(version=version, lineage=lineage, offer=offer, contribution=contribution):
                purpose = barrier_of(version, lineage)
                if not offer or self._lock.note_offer(source, offer, purpose, contribution):
                    self._arrivals[source] = version, lineage
                    self._maybe_request(now)
            case CatchUp(version=version, donor=donor, lineage=lineage):
                state = self._state
                if isinstance(state, Waiting) and (
                    state.version < version
                    or (state.version == version and state.lineage != lineage)
                ):
                    self._catch_up(version, donor, lineage, now)
            case _:
                assert_never(message)

    def formed(self, ticket: Ticket, purpose: Purpose) -> None:
        """A group is formed, and we are in it."""
        state = self._state
        if isinstance(state, Waiting) and purpose == state.purpose:
            self._state = InGroup(ticket, state.version, state.lineage)
            self._arrivals.clear()
            self._lock.stop_offering()

    def group_over(self, ticket: Ticket, outcome: Outcome, now: Seconds) -> None:
        """A group that we were in is over."""
        state = self._state
        if not isinstance(state, InGroup) or state.ticket != ticket:
            return
        if outcome is Outcome.DONE:
            self._state = Idle()
            self._emit(VersionEnded(state.version, outcome))
        else:
            self._wait(state.version, state.lineage, now)

    def request_ended(self, ticket: Ticket, outcome: Outcome, now: Seconds) -> None:
        """Our request as the coordinator has come to nothing, or its group is over."""
        if ticket != self._request:
            return
        self._request = None
        if outcome is Outcome.REFUSED:
            self._arrivals.clear()  # somebody waits for something else: all will say so again
        self._maybe_request(now)

    def follow(self, now: Seconds) -> None:
        """Call it after whatever has happened to the slot: its offer may have changed."""
        state, slot = self._state, self._lock.state
        if not isinstance(state, Waiting) or not isinstance(slot, Offered):
            return
        if slot.purpose == state.purpose and slot.ticket != state.said:
            self._say(now)

    def state_transferred(self, version: int, now: Seconds, *, taken: bool) -> None:
        """We hold the state that we were sent for, or it cannot be had."""
        state = self._state
        if isinstance(state, CatchingUp) and state.version == version:
            self._wait(*((version, state.lineage) if taken else state.behind), now)

    def peer_out(self, peer: PeerId) -> None:
        """A participant is dead or has left; if it comes back, it arrives anew."""
        self._arrivals.pop(peer, None)

    def view_changed(self, now: Seconds) -> None:
        """Membership has changed: the coordinator may have changed, or everyone may be here now."""
        if isinstance(self._state, Waiting):
            self._offer(self._state, now)
            self._maybe_request(now)

    def handle_timer(self, now: Seconds) -> None:
        state = self._state
        if isinstance(state, Waiting) and state.resend_at <= now:
            self._offer(state, now)
            self._say(now)
            self._maybe_request(now)

    def next_deadline(self) -> Seconds | None:
        return self._state.resend_at if isinstance(self._state, Waiting) else None

    def check(self) -> None:
        state = self._state
        if isinstance(state, InGroup) and not self._lock.holds(state.ticket):
            raise InvariantViolation(f"{self._me} meets in {state}, its slot is {self._lock.state}")

    # --- the participant's side -------------------------------------------------------------------

    def _wait(self, version: int, lineage: int, now: Seconds) -> None:
        if self._withdrawn:
            self._state = Idle()
            self._emit(VersionEnded(version, Outcome.WITHDRAWN))
            return
        self._state = Waiting(version, lineage, now, now + self._resend_s)
        self._offer(self._state, now)
        self._say(now)
        self._maybe_request(now)

    def _offer(self, state: Waiting, now: Seconds) -> None:
        """Our slot is the coordinator's, unless somebody else wants it."""
        coordinator = self._participants()[0]
        if coordinator == self._me:
            self._lock.withdraw_offer(now)
        else:
            self._lock.offer(coordinator, state.purpose, now)

    def _say(self, now: Seconds) -> None:
        """Tell the coordinator that we wait; after a while, the deputy too."""
        state, slot = self._state, self._lock.state
        if not isinstance(state, Waiting):
            return
        participants = self._participants()
        message = Arrive(state.version, state.lineage)
        if isinstance(slot, Offered) and slot.purpose == state.purpose:
            message = replace(message, offer=slot.ticket, contribution=slot.contribution)
        self._state = replace(state, resend_at=now + self._resend_s, said=message.offer)
        if participants[0] != self._me:
            self._emit(Send(participants[0], message))  # lost: sent again at `resend_at`
        is_late = now >= state.since + DEPUTY_S and len(participants) > 1
        if is_late and participants[1] != self._me:
            self._emit(
                Send(participants[1], Arrive(state.version, state.lineage))
            )  # lost: as above

    def _catch_up(self, version: int, donor: PeerId, lineage: int, now: Seconds) -> None:
        assert isinstance(self._state, Waiting)
        self._state = CatchingUp(version, lineage, (self._state.version, self._state.lineage))
        self._lock.withdraw_offer(now)
        self._emit(TakeState(version, donor, lineage))

    # --- the coordinator's side -------------------------------------------------------------------

    def _maybe_request(self, now: Seconds) -> None:
        """If we coordinate and everyone waits: let those behind catch up, or form the group."""
        state = self._state
        if not isinstance(state, Waiting) or self._request:
            return
        participants = tuple(self._participants())
        is_deputy = now >= state.since + DEPUTY_S and self._me in participants[:2]
        if participants[0] != self._me and not is_deputy:
            return
        arrivals = {**self._arrivals, self._me: (state.version, state.lineage)}
        if any(peer not in arrivals for peer in participants):
            return
        version, lineage = self._goal([arrivals[peer] for peer in participants])
        donors = [peer for peer in participants if arrivals[peer] == (version, lineage)]
        others = [peer for peer in participants if arrivals[peer] != (version, lineage)]
        for peer in others:
            if peer == self._me:
                self._catch_up(version, donors[0], lineage, now)
            else:  # lost: its `Arrive` brings it
                del self._arrivals[peer]
                self._emit(Send(peer, CatchUp(version, donors[0], lineage)))
        if not others:
            members = [peer for peer in participants if peer != self._me]
            self._request = self._lock.request(members, len(members), now, state.purpose)

    def _goal(self, arrivals: Sequence[tuple[int, int]]) -> tuple[int, int]:
        """The newest version and the line that most have of it, of equals the first one's."""
        newest = max(version for version, _ in arrivals)
        lineages = [lineage for version, lineage in arrivals if version == newest]
        return newest, max(lineages, key=lineages.count)


def barrier_of(version: int, lineage: int) -> Purpose:
    """What peers that wait with this version and lineage wait for."""
    return Purpose(Formation.BARRIER, What.GRADIENTS, version, lineage)
