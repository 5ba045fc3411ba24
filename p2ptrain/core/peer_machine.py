"""Compose everything that one peer decides: membership, groups, and the repair of groups.

::

    trainer, algorithm ──request, arrive, describe──►┌─────────────┐
    network ──────────────receive, unreachable──────►│ PeerMachine │──take_effects──► driver
    slow work ───────────────────ended──────────────►│             │
    time ─────────────────────handle_timer──────────►└─────────────┘──next_deadline──►

After any call that takes `now` the driver must carry out `take_effects()` in order, then arm one
timer for `next_deadline()`. Nothing here awaits, so every method runs to completion.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from p2ptrain.core.contribution import MODEL, Contribution
from p2ptrain.core.effects import (
    Abandon,
    Average,
    Effect,
    MemberChanged,
    Resolve,
    What,
)
from p2ptrain.core.events import (
    AverageBroke,
    AverageEnded,
    Ending,
    Outcome,
    StateNotTaken,
    StateTaken,
)
from p2ptrain.core.groups import PeerGroups
from p2ptrain.core.links import LinkMeter, weights_of
from p2ptrain.core.lock_state import LockConfig
from p2ptrain.core.membership import Membership, MembershipConfig
from p2ptrain.core.messages import (
    Ack,
    AttemptStatus,
    IndirectAck,
    IndirectPing,
    Member,
    MembershipUpdates,
    MemberState,
    Message,
    Phase,
    Ping,
    Resolution,
)
from p2ptrain.core.purpose import Purpose
from p2ptrain.core.repair import Repair, RepairConfig
from p2ptrain.core.timeout_policy import ObservedTimeoutPolicy
from p2ptrain.core.wait_avoiding import Schedule
from p2ptrain.errors import check_above_0
from p2ptrain.ids import PeerId, Seconds, Ticket


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtocolConfig:
    """The deadlines of all parts of the protocol."""

    membership: MembershipConfig = field(default_factory=MembershipConfig)
    lock: LockConfig = field(default_factory=LockConfig)
    repair: RepairConfig = field(default_factory=RepairConfig)

    barrier_resend_s: Seconds = 0.25
    """The period at which a peer that waits at a barrier repeats its `Arrive`. Too short: needless
    messages beside a straggler; too long: a lost message delays everyone."""

    def __post_init__(self) -> None:
        check_above_0("", self, "barrier_resend_s")


class PeerMachine:
    """One peer's decisions; the module's docstring states the duties of its driver.

    Args:
        me: this peer's first record; a link whose speed is given is not measured.
        schedule: the algorithm's, if it has one.
        state_contribution: this peer's scalars for a group, when it grants its slot.
    """

    def __init__(
        self,
        me: Member,
        config: ProtocolConfig,
        rng: Random,
        schedule: Schedule | None = None,
        state_contribution: Callable[[Purpose], Contribution] = lambda _: MODEL,
    ) -> None:
        self.has_model = True
        """False until this peer has the model that it goes on with: until then it refuses to join
        groups, since what it has may be noise."""
        self._effects: list[Effect] = []
        self._now: Seconds = 0.0
        self._unsettled: list[MemberChanged] = []  # of which the groups have not been told
        self.membership = Membership(me, config.membership, rng, self._note)
        self.contribution = state_contribution
        self.groups = PeerGroups(
            me.peer,
            me.incarnation,
            config.lock,
            config.barrier_resend_s,
            schedule,
            self,
            self._note,
            ObservedTimeoutPolicy(config.lock),
        )
        self.repair = Repair(me.peer, config.repair, self._is_alive, self.expects, self._note)
        self._views = self.membership.changes
        self._link = None if me.link_mbit else LinkMeter()

    # --- what can happen --------------------------------------------------------------------------

    def request(self, candidates: Sequence[PeerId], needed: int, now: Seconds) -> Ticket:
        """The algorithm claims a group with `needed` of `candidates`, which it prefers in order.

        Ends in a `GroupEnded` with this ticket.
        """
        self._now = now
        return self.groups.request(candidates, needed, now)

    def arrive(self, version: int, lineage: int, now: Seconds) -> None:
        """The trainer waits to average `version` with everyone; ends in `VersionEnded`."""
        self._now = now
        self.groups.arrive(version, lineage, now)

    def arrive_at(self, version: int, now: Seconds, *, waits: bool) -> None:
        """The trainer is at a version of the schedule; if it waits, that ends in `VersionEnded`."""
        self._now = now
        self.groups.arrive_at(version, now, waits=waits)

    def describe(self, now: Seconds, *, phase: Phase, steps: int, samples: int) -> None:
        """Update our own record; a new phase is announced to everyone at once."""
        changed = phase is not self.membership.me.phase
        self.membership.describe(phase=phase, steps=steps, samples=samples)
        if changed:
            self.membership.announce()
        self._settle(now)

    def outlive(self, incarnation: int) -> None:
        """Take an incarnation above `incarnation`, if others remember us under that."""
        self.membership.outlive(incarnation)
        self.groups.lock.rejoin(self.membership.born)

    def learn(self, members: Sequence[Member], now: Seconds, why: str) -> None:
        """Merge the records of a peer that joined, or that we joined."""
        self.membership.learn(members, now, why)
        self._settle(now)

    def receive(self, source: PeerId, message: Message, now: Seconds) -> None:
        self._now = now
        match message:
            case Ping() | Ack() | IndirectPing() | IndirectAck() | MembershipUpdates():
                self.membership.receive(source, message, now)
                self._settle(now)
            case AttemptStatus() | Resolution():
                self.repair.receive(source, message, now)
            case _:
                self.groups.receive(source, message, now)

    def unreachable(self, peer: PeerId, why: str, now: Seconds) -> None:
        """A connection to `peer` broke."""
        self.membership.unreachable(peer, why, now)
        self._settle(now)

    def heard(self, ticket: Ticket, peer: PeerId) -> None:
        """A chunk of this attempt has come from `peer`; without effects, and cheap."""
        self.repair.heard(ticket, peer)

    def ended(self, ending: Ending, now: Seconds) -> None:
        self._now = now
        match ending:
            case AverageBroke(ticket=ticket, complete=complete):
                self.repair.broke(ticket, now, complete=complete)
            case AverageEnded(ticket=ticket, outcome=outcome, why=why):
                self.repair.ended(ticket, now, done=outcome is Outcome.DONE)
                if outcome is Outcome.DONE:
                    self._measure_link(ending)
                self.groups.average_ended(ticket, outcome, why, now)
            case StateTaken(version=version):
                self.groups.state_taken(version, now)
            case StateNotTaken(version=version):
                self.groups.state_not_taken(version, now)

    def withdraw(self, now: Seconds) -> None:
        """The trainer stops: no new groups, except those that others claim."""
        self._now = now
        self.groups.withdraw("stopping", now)

    def leave(self, now: Seconds) -> None:
        """Say goodbye to everyone, when no group is held any more."""
        self.withdraw(now)
        self.membership.leave()

    def handle_timer(self, now: Seconds) -> None:
        self.membership.handle_timer(now)
        self._settle(now)
        self.repair.handle_timer(now)
        self.groups.handle_timer(now)

    # --- what the driver asks ---------------------------------------------------------------------

    def holds(self, ticket: Ticket) -> bool:
        """The fence: chunks and results under any other ticket are refused."""
        return self.repair.holds(ticket) and self.groups.lock.holds(ticket.root)

    def expects(self, ticket: Ticket) -> bool:
        """True if this peer may still enter the group of `ticket`."""
        return self.groups.lock.expects(ticket)

    def is_over(self, ticket: Ticket) -> bool:
        """True if no chunks can come under `ticket` any more, here."""
        return self.groups.lock.is_over(ticket.root) or self.repair.is_over(ticket)

    def next_deadline(self) -> Seconds | None:
        first = self.membership.next_deadline()
        for part in (self.groups, self.repair):
            deadline = part.next_deadline()
            if deadline is not None and (first is None or deadline < first):
                first = deadline
        return first

    def take_effects(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    def check(self) -> None:
        """Raise InvariantViolation if the parts contradict themselves or each other."""
        self.membership.check()
        self.groups.check()
        self.repair.check()

    # --- what groups ask --------------------------------------------------------------------------

    def participants(self) -> Sequence[PeerId]:
        """Everyone who meets at a barrier, sorted, with us."""
        return self.membership.participants()

    def trainees(self) -> Sequence[PeerId]:
        """Everyone who trains, sorted, with us."""
        return self.membership.trainees()

    def weigh(self, members: Sequence[PeerId]) -> tuple[int, ...]:
        """Weights of the members' shards."""
        known = [self.membership.member(peer) for peer in members]
        return weights_of([member.link_mbit if member else 0 for member in known])

    def outside_samples(self, members: Sequence[PeerId]) -> int:
        """Samples of everyone but `members`, as far as we know."""
        known = [self.membership.member(peer) for peer in members]
        return self.membership.samples - sum(member.samples for member in known if member)

    # --- inside -----------------------------------------------------------------------------------

    def _measure_link(self, done: AverageEnded) -> None:
        """Update the estimate of our link, which our record carries to the others."""
        if self._link is not None:
            self._link.note(done.moved_bytes, done.moving_s)
            if self._link.mbit != self.membership.me.link_mbit:
                self.membership.describe(link_mbit=self._link.mbit)

    def _note(self, effect: Effect) -> None:
        self._effects.append(effect)
        match effect:
            case MemberChanged():
                self._unsettled.append(effect)
            case Average(ticket=ticket, members=members, what=what):
                whole = what is What.GRADIENTS
                self.repair.formed(ticket, members, self._now, whole=whole)
            case Abandon(ticket=ticket):
                self.repair.ended(ticket, self._now, done=False)
            case Resolve(again=Ticket() as again, members=members):
                self.groups.lock.regroup(again.root, members)
            case _:
                pass

    def _is_alive(self, peer: PeerId) -> bool:
        member = self.membership.member(peer)
        return member is not None and member.state is MemberState.ALIVE

    def _settle(self, now: Seconds) -> None:
        """Tell the groups what membership has just decided."""
        self._now = now
        self.groups.lock.rejoin(self.membership.born)
        unsettled, self._unsettled = self._unsettled, []
        for change in unsettled:
            match change:
                case MemberChanged(peer=peer, state=MemberState.SUSPECT):
                    self.repair.doubted(peer, now)
                case MemberChanged(peer=peer, state=MemberState.DEAD, why=why):
                    if left := self.repair.peer_dead(peer, why):
                        self.groups.lock.regroup(*left)
                    self.groups.peer_dead(peer, why, now)
                case MemberChanged(peer=peer, state=MemberState.LEFT, why=why):
                    # It has finished its groups; our side of them ends by itself.
                    self.groups.peer_left(peer, why, now)
                case _:
                    pass
        before, self._views = self._views, self.membership.changes
        changed = [now_seen != seen for now_seen, seen in zip(self._views, before, strict=True)]
        if any(changed):
            self.groups.view_changed(now, participants=changed[0], trainees=changed[1])
