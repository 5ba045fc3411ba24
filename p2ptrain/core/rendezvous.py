"""Scheduled groups: everyone who trains meets once per version.

Synchronous algorithms need no lock: who meets follows from the view, and when, from the version.
What they need is agreement on both while peers come and go. The *host*, the first participant by
name, collects an `Arrive` from every participant and answers all of them with one `Assemble`: its
list is the group, under a fresh ticket. There is no lease, since a slow peer may compute for long;
a dead one is taken off the list by membership.

::

             arrive(v)              Assemble(ticket, v)               done: version v ended
      IDLE -----------> WAITING(v) --------------------> IN_GROUP ---------------------------> IDLE
                          ^  |  ^                            | broken: arrive again
                          |  |  +----------------------------+
          state of w held |  | CatchUp(w > v)
                          |  v
                        CATCHING_UP(w)

**After a break** some members may have finished version v and others not. Those who have will
arrive with v + 1, those who have not with v, and the host, who waits for all, sees both: it sends
the ones behind to take over the state (parameters *and* optimizer) of one that is ahead, which
stands still at its boundary because it waits in this very rendezvous. A newcomer is the same case,
only further behind. So there is one mechanism for both, and peers that average together are equal.

**Two models.** Two parts of a swarm that cannot hear each other go on apart, each with its own
averages, and may come to the same version with two models. So whoever arrives says its *line*: a
number of 64 bits that follows from where its model began and from each average that has gone into
it (`runtime/agreed_state.py`). A group is of one version and one line; where the newest version has
several, those on another than most take over the state of one that is on it, as those behind do.

**No cycle of waits**: participants wait for the host's word, the host for arrivals, and an arrival
needs nothing but the trainer's own step (or, catching up, the state of a peer that is waiting).
Inside the group, members wait for each other's slices only. Two hosts (their views differ) cannot
form two groups that share a peer: a participant is in one group at a time and refuses slices of any
other ticket; the broken one arrives again, and membership agrees sooner or later. A host may count
an arrival that its sender has gone on from (it comes late, or the host stood still): its group says
what it is of, and who waits with something else says that it is out (`core/repair.py`).

`Arrive` is repeated every `resend_s` until something happens, so any message of this file may be
lost.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from p2ptrain.core.effects import Abandon, Average, Effect, Send, TakeState, VersionEnded, What
from p2ptrain.core.events import Outcome
from p2ptrain.core.links import Weigh, equally
from p2ptrain.core.messages import Arrive, Assemble, CatchUp, RendezvousMessage
from p2ptrain.errors import InvariantViolation, LocalProtocolError
from p2ptrain.ids import PeerId, Seconds, Ticket


@dataclass(frozen=True, slots=True)
class Idle:
    """The trainer computes."""


@dataclass(frozen=True, slots=True)
class Waiting:
    version: int
    line: int
    resend_at: Seconds


@dataclass(frozen=True, slots=True)
class CatchingUp:
    version: int
    line: int
    behind: tuple[int, int]
    """The version and line we wait with again if the state cannot be had."""


@dataclass(frozen=True, slots=True)
class InGroup:
    ticket: Ticket
    version: int
    line: int
    members: tuple[PeerId, ...]
    formed: tuple[PeerId, ...]
    """The first members, of whom the host tells again, whoever is left."""

    weights: tuple[int, ...]
    """Of their shares."""


RendezvousState = Idle | Waiting | CatchingUp | InGroup


class Rendezvous:
    """One peer's share of the scheduled groups; `participants()` is membership's word, sorted.

    Args:
        weigh: says how large the members' shares of what they average should be.
    """

    def __init__(
        self,
        me: PeerId,
        incarnation: int,
        resend_s: Seconds,
        participants: Callable[[], Sequence[PeerId]],
        emit: Callable[[Effect], None],
        weigh: Weigh = equally,
    ) -> None:
        self._me = me
        self._incarnation = incarnation
        self._resend_s = resend_s
        self._participants = participants
        self._emit = emit
        self._weigh = weigh
        self._state: RendezvousState = Idle()
        self._arrivals: dict[PeerId, tuple[int, int]] = {}  # as the host: version, line
        self._tickets = 0
        self._last_ended: dict[PeerId, Ticket] = {}  # of each host: nobody enters a group twice
        self._withdrawn = False

    @property
    def state(self) -> RendezvousState:
        return self._state

    def holds(self, ticket: Ticket) -> bool:
        """True while we are in the group of `ticket`: the fence for its slices and its result."""
        return isinstance(self._state, InGroup) and self._state.ticket == ticket

    def expects(self, ticket: Ticket) -> bool:
        """True while we wait for the word of whoever made `ticket`, and it may be that one."""
        if not isinstance(self._state, Waiting):
            return False  # perhaps nobody trains any more
        last = self._last_ended.get(ticket.initiator)
        is_new = last is None or last < ticket
        return is_new and self._participants()[0] == ticket.initiator

    def waits_with(self, version: int, line: int) -> bool:
        """True while our trainer stands at that boundary: others may take its state."""
        state = self._state
        return isinstance(state, Waiting) and (state.version, state.line) == (version, line)

    # --- what happens -----------------------------------------------------------------------------

    def arrive(self, version: int, line: int, now: Seconds) -> None:
        """The trainer waits with `version` of `line`; it ends in `VersionEnded`."""
        if not isinstance(self._state, Idle):
            raise LocalProtocolError(f"{self._me} arrives with {version} but is {self._state}")
        self._wait(version, line, now)

    def withdraw(self) -> None:
        """The trainer stops: no more waiting. A group that is formed is left to end."""
        self._withdrawn = True
        match self._state:
            case Waiting(version=version) | CatchingUp(behind=(version, _)):
                self._state = Idle()
                self._emit(VersionEnded(version, Outcome.WITHDRAWN))
            case _:
                pass
        self._arrivals.pop(self._me, None)

    def receive(self, source: PeerId, message: RendezvousMessage, now: Seconds) -> None:
        match message:
            case Arrive(version=version, line=line):
                self._handle_arrive(source, version, line)
            case Assemble():
                self._handle_assemble(message)
            case CatchUp(version=version, donor=donor, line=line):
                state = self._state
                if isinstance(state, Waiting) and (
                    state.version < version or (state.version == version and state.line != line)
                ):
                    self._catch_up(version, donor, line)
            case _:
                assert_never(message)

    def average_ended(self, ticket: Ticket, outcome: Outcome, now: Seconds) -> None:
        if not self.holds(ticket):
            return
        assert isinstance(self._state, InGroup)
        version, line = self._state.version, self._state.line
        self._last_ended[ticket.initiator] = ticket
        if outcome is Outcome.DONE:
            self._state = Idle()
            self._emit(VersionEnded(version, outcome))
        else:
            self._wait(version, line, now)

    def state_taken(self, version: int, now: Seconds) -> None:
        if isinstance(self._state, CatchingUp) and self._state.version == version:
            self._wait(version, self._state.line, now)

    def state_not_taken(self, version: int, now: Seconds) -> None:
        if isinstance(self._state, CatchingUp) and self._state.version == version:
            self._wait(*self._state.behind, now)

    def regroup(self, ticket: Ticket, members: tuple[PeerId, ...]) -> None:
        """Our group goes on without some of its members (`core/repair.py`)."""
        if self.holds(ticket):
            assert isinstance(self._state, InGroup)
            self._state = replace(self._state, members=members)

    def peer_gone(self, peer: PeerId, why: str, now: Seconds) -> None:
        self._arrivals.pop(peer, None)
        state = self._state
        if isinstance(state, InGroup) and peer in state.members:
            self._emit(Abandon(state.ticket, Outcome.LOST, why))
            self._last_ended[state.ticket.initiator] = state.ticket
            self._wait(state.version, state.line, now)

    def peer_left(self, peer: PeerId) -> None:
        """A participant said goodbye; if it comes back, it arrives anew."""
        self._arrivals.pop(peer, None)

    def view_changed(self) -> None:
        """Membership has news: the host may have changed, or everyone may be here now."""
        self._maybe_assemble()

    def handle_timer(self, now: Seconds) -> None:
        if isinstance(self._state, Waiting) and self._state.resend_at <= now:
            self._wait(self._state.version, self._state.line, now)

    def next_deadline(self) -> Seconds | None:
        return self._state.resend_at if isinstance(self._state, Waiting) else None

    def check(self) -> None:
        if isinstance(self._state, InGroup) and self._me not in self._state.members:
            raise InvariantViolation(f"{self._me} is in a group without itself: {self._state}")

    # --- the participant's side -------------------------------------------------------------------

    def _wait(self, version: int, line: int, now: Seconds) -> None:
        if self._withdrawn:
            self._state = Idle()
            self._emit(VersionEnded(version, Outcome.WITHDRAWN))
            return
        self._state = Waiting(version, line, now + self._resend_s)
        host = self._participants()[0]
        if host != self._me:
            self._emit(Send(host, Arrive(version, line)))  # lost: sent again at `resend_at`
        self._arrivals[self._me] = version, line
        self._maybe_assemble()

    def _handle_assemble(self, message: Assemble) -> None:
        ticket, members, weights = message.ticket, message.members, message.weights
        last = self._last_ended.get(ticket.initiator)
        if not isinstance(self._state, Waiting) or (last is not None and ticket <= last):
            return
        if self.waits_with(message.version, message.line) and self._me in members:
            self._state = InGroup(ticket, message.version, message.line, members, members, weights)
            self._arrivals.pop(self._me, None)
            self._emit(Average(ticket, members, What.GRADIENTS, weights, awaited=True))
        else:  # of something that we waited with once: we will not come, and say so if asked
            self._last_ended[ticket.initiator] = ticket

    def _catch_up(self, version: int, donor: PeerId, line: int) -> None:
        assert isinstance(self._state, Waiting)
        self._state = CatchingUp(version, line, (self._state.version, self._state.line))
        self._arrivals.pop(self._me, None)
        self._emit(TakeState(version, donor, line))

    # --- the host's side --------------------------------------------------------------------------

    def _handle_arrive(self, source: PeerId, version: int, line: int) -> None:
        state = self._state
        if isinstance(state, InGroup) and self._hosts(state, source):
            # Lost, if it was: its next `Arrive` brings it again. Who arrives with something else
            # does not come into this group, if it was not in it, and has to know its ticket.
            group = state.ticket, state.version, state.formed, state.weights, state.line
            self._emit(Send(source, Assemble(*group)))
            if (version, line) == (state.version, state.line):
                return
        self._arrivals[source] = version, line
        self._maybe_assemble()

    def _hosts(self, group: InGroup, guest: PeerId) -> bool:
        return group.ticket.initiator == self._me and guest in group.members

    def _maybe_assemble(self) -> None:
        """If we are the host and everyone waits: let those behind catch up, or begin."""
        if not isinstance(self._state, Waiting):
            return
        participants = tuple(self._participants())
        if participants[0] != self._me:
            return
        if any(peer not in self._arrivals for peer in participants):
            return
        version, line = self._goal([self._arrivals[peer] for peer in participants])
        donors = [peer for peer in participants if self._arrivals[peer] == (version, line)]
        others = [peer for peer in participants if self._arrivals[peer] != (version, line)]
        for peer in others:
            del self._arrivals[peer]
            if peer == self._me:
                self._catch_up(version, donors[0], line)
            else:  # lost: its `Arrive` brings it
                self._emit(Send(peer, CatchUp(version, donors[0], line)))
        if not others:
            self._assemble(version, line, participants)

    def _goal(self, arrivals: Sequence[tuple[int, int]]) -> tuple[int, int]:
        """The newest version and the line that most have of it, of equals the first one's."""
        newest = max(version for version, _ in arrivals)
        lines = [line for version, line in arrivals if version == newest]
        return newest, max(lines, key=lines.count)

    def _assemble(self, version: int, line: int, members: tuple[PeerId, ...]) -> None:
        self._tickets += 1
        ticket = Ticket(self._me, self._incarnation, self._tickets)
        self._arrivals.clear()
        weights = self._weigh(members)
        self._state = InGroup(ticket, version, line, members, members, weights)
        for peer in members:
            if peer != self._me:
                self._emit(Send(peer, Assemble(ticket, version, members, weights, line)))
        self._emit(Average(ticket, members, What.GRADIENTS, weights, awaited=True))
