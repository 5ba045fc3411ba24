"""Everything that one peer decides, as one machine: membership, and the three kinds of groups.

::

    trainer, algorithm ─request, ask, arrive, describe►┌─────────────┐
    network ──────────────receive, unreachable──────►│ PeerMachine │──take_effects──► driver
    slow work ───────────────────ended──────────────►│             │
    time ─────────────────────handle_timer──────────►└─────────────┘──next_deadline──►

After any call that takes `now` you must carry out `take_effects()` in order, then arm one timer for
`next_deadline()`. Nothing here awaits, so every method runs to completion.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from p2ptrain.core.activation import Activation, Schedule
from p2ptrain.core.effects import (
    Abandon,
    Average,
    Effect,
    GroupEnded,
    MemberChanged,
    Mend,
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
from p2ptrain.core.group_book import GroupBook
from p2ptrain.core.group_generator import GroupGenerator
from p2ptrain.core.group_lock import GroupLock
from p2ptrain.core.links import LinkMeter, weights_of
from p2ptrain.core.lock_state import Granted, LockConfig
from p2ptrain.core.lock_state import InGroup as InLockGroup
from p2ptrain.core.membership import Membership, MembershipConfig
from p2ptrain.core.messages import (
    Ack,
    AckFor,
    Activate,
    Arrive,
    Ask,
    Assemble,
    Begin,
    Busy,
    CatchUp,
    Claim,
    Decline,
    Grant,
    Inquire,
    Member,
    MemberState,
    Mended,
    Message,
    Past,
    Phase,
    Ping,
    PingFor,
    Propose,
    Release,
    Rumours,
    Run,
    Settle,
    Standing,
)
from p2ptrain.core.pace import ObservedPace
from p2ptrain.core.rendezvous import InGroup as InScheduledGroup
from p2ptrain.core.rendezvous import Rendezvous
from p2ptrain.core.repair import Repair, RepairConfig
from p2ptrain.errors import ConfigError, InvariantViolation
from p2ptrain.ids import PeerId, Seconds, Ticket


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtocolConfig:
    """Deadlines of everything that a peer decides."""

    membership: MembershipConfig = field(default_factory=MembershipConfig)
    lock: LockConfig = field(default_factory=LockConfig)
    repair: RepairConfig = field(default_factory=RepairConfig)

    rendezvous_resend_s: Seconds = 0.25
    """A waiting peer says so again after this long. Too short: needless messages beside a
    straggler; too long: a lost message delays everyone."""

    def __post_init__(self) -> None:
        if not 0 < self.rendezvous_resend_s < math.inf:
            raise ConfigError(f"rendezvous_resend_s = {self.rendezvous_resend_s} must be above 0")


class PeerMachine:
    """One peer's decisions; the module's docstring states the duties of whoever drives it.

    Args:
        me: what is known of us from the start; a link whose speed is given is not measured.
        schedule: the algorithm's, if it has one.
        book: what the algorithm has groups proposed by, if it does.
    """

    def __init__(
        self,
        me: Member,
        config: ProtocolConfig,
        rng: Random,
        schedule: Schedule | None = None,
        book: GroupBook | None = None,
    ) -> None:
        self.has_model = True
        """False while the model that we are to go on with is still to come: nobody averages with
        what we have now, which may be noise."""
        self._effects: list[Effect] = []
        self._now: Seconds = 0.0
        self._unsettled: list[MemberChanged] = []  # of which the groups have not been told
        self.membership = Membership(me, config.membership, rng, self._note)
        self.lock = GroupLock(
            me.peer,
            me.incarnation,
            config.lock,
            self._note,
            self._weigh,
            ObservedPace(config.lock),
            lambda: self.has_model,
        )
        self.rendezvous = Rendezvous(
            me.peer,
            me.incarnation,
            config.rendezvous_resend_s,
            self.membership.participants,
            self._note,
            self._weigh,
        )
        self.activation = Activation(
            me.peer,
            me.incarnation,
            config.rendezvous_resend_s,
            schedule,
            self.membership.trainees,
            self._note,
            self._weigh,
            lambda: self.has_model,
        )
        self.generator = GroupGenerator(
            me.peer,
            me.incarnation,
            config.rendezvous_resend_s,
            config.lock.lease_s,
            book,
            self.membership.trainees,
            lambda members, now: self.lock.request(members, len(members), now),
            self._note,
            rng,
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
        return self.lock.request(candidates, needed, now)

    def arrive(self, version: int, line: int, now: Seconds) -> None:
        """The trainer waits to average `version` with everyone; ends in `VersionEnded`."""
        self._now = now
        self.rendezvous.arrive(version, line, now)

    def arrive_at(self, version: int, now: Seconds, *, waits: bool) -> None:
        """The trainer is at a version of the schedule; if it waits, that ends in `VersionEnded`."""
        self._now = now
        self.activation.arrive(version, now, waits=waits)

    def ask(self, updates: int, now: Seconds) -> None:
        """The algorithm wants a group that somebody proposes; ends in `TurnEnded`."""
        self.generator.ask(updates, now)
        self.generator.follow(now)

    def describe(self, now: Seconds, *, phase: Phase, steps: int, samples: int) -> None:
        """The trainer is in `phase` and has done so much; everyone hears of a new phase at once."""
        changed = phase is not self.membership.me.phase
        self.membership.describe(phase=phase, steps=steps, samples=samples)
        if changed:
            self.membership.announce()
        if phase is Phase.DONE:
            self.generator.retire()
        self._settle(now)

    def outlive(self, incarnation: int) -> None:
        """Others remember us under `incarnation`: if it is a former life's, ours is above it."""
        self.membership.outlive(incarnation)
        self._number_tickets()

    def learn(self, members: Sequence[Member], now: Seconds, why: str) -> None:
        """Somebody who joined, or whom we joined, told us of members."""
        self.membership.learn(members, now, why)
        self._settle(now)

    def receive(self, source: PeerId, message: Message, now: Seconds) -> None:
        self._now = now
        match message:
            case Ping() | Ack() | PingFor() | AckFor() | Rumours():
                self.membership.receive(source, message, now)
                self._settle(now)
            case Claim() | Grant() | Busy() | Begin() | Release() | Inquire():
                self.lock.receive(source, message, now)
            case Arrive() | Assemble() | CatchUp():
                self.rendezvous.receive(source, message, now)
            case Activate() | Run() | Decline() | Past():
                self.activation.receive(source, message, now)
            case Ask() | Propose() | Settle():
                self.generator.receive(source, message, now)
            case Standing() | Mended():
                self.repair.receive(source, message, now)
        self.generator.follow(now)

    def unreachable(self, peer: PeerId, why: str, now: Seconds) -> None:
        """A connection to `peer` broke."""
        self.membership.unreachable(peer, why, now)
        self._settle(now)

    def heard(self, ticket: Ticket, peer: PeerId) -> None:
        """A slice of this attempt has come from `peer`; it has no effects, and costs nothing."""
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
                self.lock.average_ended(ticket, outcome, why, now)
                self.rendezvous.average_ended(ticket, outcome, now)
                self.activation.average_ended(ticket, outcome, now)
                self.generator.average_ended(outcome)
                self.generator.follow(now)
            case StateTaken(version=version):
                self.rendezvous.state_taken(version, now)
            case StateNotTaken(version=version):
                self.rendezvous.state_not_taken(version, now)

    def withdraw(self, now: Seconds) -> None:
        """The trainer stops: no new groups, except those that others claim."""
        self._now = now
        self.rendezvous.withdraw()
        self.activation.withdraw()
        self.generator.withdraw(now)
        self.lock.withdraw("stopping", now)
        self.generator.follow(now)

    def leave(self, now: Seconds) -> None:
        """Say goodbye to everyone. Call it when no group is held any more."""
        self.withdraw(now)
        self.membership.leave()

    def handle_timer(self, now: Seconds) -> None:
        self.membership.handle_timer(now)
        self._settle(now)
        self.repair.handle_timer(now)
        self.lock.handle_timer(now)
        self.rendezvous.handle_timer(now)
        self.activation.handle_timer(now)
        self.generator.handle_timer(now)
        self.generator.follow(now)

    # --- what the driver asks ---------------------------------------------------------------------

    def holds(self, ticket: Ticket, now: Seconds) -> bool:
        """The fence: slices and results under any other ticket are refused."""
        root = ticket.root
        scheduled = self.rendezvous.holds(root) or self.activation.holds(root)
        return self.repair.holds(ticket) and (scheduled or self.lock.holds(root, now))

    def expects(self, ticket: Ticket) -> bool:
        """True if we may yet be in the group of `ticket`: promised, or on our way."""
        state = self.lock.state
        promised = isinstance(state, Granted) and state.ticket == ticket
        return promised or self.activation.expects(ticket) or self.rendezvous.expects(ticket)

    def is_over(self, ticket: Ticket) -> bool:
        """True if no slices can come under `ticket` any more, here."""
        return self.activation.is_over(ticket.root) or self.repair.is_over(ticket)

    def next_deadline(self) -> Seconds | None:
        first = self.membership.next_deadline()
        groups = (self.lock, self.rendezvous, self.activation, self.generator, self.repair)
        for part in groups:
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
        self.lock.check()
        self.rendezvous.check()
        self.activation.check()
        self.generator.check()
        self.repair.check()
        groups = (
            isinstance(self.lock.state, InLockGroup),
            isinstance(self.rendezvous.state, InScheduledGroup),
            self.activation.group is not None,
        )
        if sum(groups) > 1:
            raise InvariantViolation(f"{self.membership.me.peer} is in two groups")

    # --- inside -----------------------------------------------------------------------------------

    def _measure_link(self, done: AverageEnded) -> None:
        """See what a group tells of our link; the others hear of it with all else."""
        if self._link is not None:
            self._link.note(done.moved_bytes, done.moving_s)
            if self._link.mbit != self.membership.me.link_mbit:
                self.membership.describe(link_mbit=self._link.mbit)

    def _weigh(self, members: Sequence[PeerId]) -> tuple[int, ...]:
        known = [self.membership.member(peer) for peer in members]
        return weights_of([member.link_mbit if member else 0 for member in known])

    def _note(self, effect: Effect) -> None:
        self._effects.append(effect)
        match effect:
            case MemberChanged():
                self._unsettled.append(effect)
            case GroupEnded():
                self.generator.claim_ended(effect)
            case Average(ticket=ticket, members=members, what=what):
                whole = what is What.GRADIENTS
                self.repair.formed(ticket, members, self._now, whole=whole)
            case Abandon(ticket=ticket):
                self.repair.ended(ticket, self._now, done=False)
            case Mend(again=Ticket() as again, members=members):
                self._regroup(again.root, members)
            case _:
                pass

    def _regroup(self, root: Ticket, members: tuple[PeerId, ...]) -> None:
        """Our group goes on with these members; it is held by whoever formed it."""
        self.lock.regroup(root, members)
        self.rendezvous.regroup(root, members)
        self.activation.regroup(root, members)

    def _is_alive(self, peer: PeerId) -> bool:
        member = self.membership.member(peer)
        return member is not None and member.state is MemberState.ALIVE

    def _number_tickets(self) -> None:
        """Tickets of this life are newer than those of a former one that others remember."""
        for maker in (self.lock, self.rendezvous, self.activation, self.generator):
            maker._incarnation = self.membership.born

    def _settle(self, now: Seconds) -> None:
        """Tell the groups what membership has just decided."""
        self._now = now
        if self.lock._incarnation != self.membership.born:
            self._number_tickets()
        unsettled, self._unsettled = self._unsettled, []
        for change in unsettled:
            match change:
                case MemberChanged(peer=peer, state=MemberState.SUSPECT):
                    self.repair.doubted(peer, now)
                case MemberChanged(peer=peer, state=MemberState.GONE, why=why):
                    if left := self.repair.gone(peer, why):
                        self._regroup(*left)
                    self.lock.peer_gone(peer, why, now)
                    self.rendezvous.peer_gone(peer, why, now)
                    self.activation.peer_gone(peer, why, now)
                case MemberChanged(peer=peer, state=MemberState.LEFT, why=why):
                    # It has finished its groups; our side of them ends by itself.
                    self.lock.peer_left(peer, why, now)
                    self.rendezvous.peer_left(peer)
                    self.activation.peer_left(peer)
                case _:
                    pass
        before, self._views = self._views, self.membership.changes
        if self._views[0] != before[0]:
            self.rendezvous.view_changed()
        if self._views[1] != before[1]:
            self.activation.view_changed(now)
            self.generator.view_changed(now)
        self.generator.follow(now)
