"""Compose everything that one peer decides: membership, groups, and the repair of groups.

::

    trainer, algorithm ──request, arrive, describe──►┌─────────────┐
    network ──────────────receive, unreachable──────►│ PeerMachine │──take_effects──► driver
    slow work ───────────────────ended──────────────►│             │
    time ─────────────────────handle_timer──────────►└─────────────┘──next_deadline──►

After any call that takes `now` the driver must carry out `take_effects()` in order, then arm one
timer for `next_deadline()`. Nothing here awaits, so every method runs to completion.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from p2ptrain.core import effects
from p2ptrain.core.adaptive_timeout import MembershipConfig
from p2ptrain.core.contribution import MODEL, Contribution
from p2ptrain.core.effects import Effect, Ending, Outcome, What
from p2ptrain.core.epochs import Epochs
from p2ptrain.core.group_lock import SAME_FOR_ALL
from p2ptrain.core.groups import PeerGroups
from p2ptrain.core.links import LinkMeter, weights_of
from p2ptrain.core.lock_state import LockConfig, TimeoutPolicy
from p2ptrain.core.membership import Membership
from p2ptrain.core.messages import (
    Member,
    MembershipMessage,
    MemberState,
    Message,
    Phase,
    RepairMessage,
    SettingsChange,
)
from p2ptrain.core.partial_view import PartialView
from p2ptrain.core.purpose import GOSSIP, Purpose
from p2ptrain.core.repair import Repair, RepairConfig
from p2ptrain.core.slot_credit import SlotCredit
from p2ptrain.core.wait_avoiding import Schedule
from p2ptrain.errors import check_above_0
from p2ptrain.ids import Address, PeerId, Seconds, Ticket


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

    What concerns one part alone is that part's own method, under the name that it has there.

    Args:
        me: this peer's first record; a link whose speed is given is not measured.
        schedule: the algorithm's, if it has one.
        state_contribution: this peer's scalars for a group, when it grants its slot.
        view: which of the others it knows; None: everyone.
    """

    def __init__(
        self,
        me: Member,
        config: ProtocolConfig,
        rng: Random,
        schedule: Schedule | None = None,
        state_contribution: Callable[[Purpose], Contribution] = lambda _: MODEL,
        view: PartialView | None = None,
    ) -> None:
        self.has_model = True
        """False until this peer has the model that it goes on with: until then it refuses to join
        groups, since what it has may be noise."""
        self._effects: list[Effect] = []
        self._unsettled: list[effects.MemberChanged] = []  # of which the groups have not been told
        self.membership = Membership(me, config.membership, rng, self._note, view)
        self.participants, self.trainees = self.membership.participants, self.membership.trainees
        self.contribution = state_contribution
        self.groups = PeerGroups(
            me.peer,
            me.incarnation,
            config.lock,
            config.barrier_resend_s,
            schedule,
            self,
            self._note,
            TimeoutPolicy(config.lock),
            SlotCredit(),
        )
        self.expects = self.groups.lock.expects
        self.epochs = Epochs(
            me.peer, config.membership.probe_period_s, self.membership.reachable, self._note
        )
        self.repair = Repair(me.peer, config.repair, self._is_alive, self.expects, self._note)
        self.heard = self.repair.heard
        self._views = self.participants(), self.trainees()
        self._link = None if me.link_mbit else LinkMeter()

    # --- what can happen --------------------------------------------------------------------------

    def request(
        self,
        candidates: Sequence[PeerId],
        needed: int,
        now: Seconds,
        purpose: Purpose = GOSSIP,
        purposes: Mapping[PeerId, Purpose] = SAME_FOR_ALL,
    ) -> Ticket:
        """The algorithm claims a group with `needed` of `candidates`, which it prefers in order.

        Ends in a `GroupEnded` with this ticket. `purposes` is as of `GroupLock.request`.
        """
        with self.groups.at(now):
            return self.groups.lock.request(candidates, needed, now, purpose, purposes)

    def release_trainer(self) -> None:
        """The trainer goes on before the barrier's group that it is in is over."""
        self.groups.barrier.release()

    def arrive(self, version: int, lineage: int, now: Seconds) -> None:
        """The trainer waits to average `version` with everyone; ends in `VersionEnded`."""
        with self.groups.at(now):
            self.groups.barrier.arrive(version, lineage, now)

    def arrive_at(self, version: int, now: Seconds, *, waits: bool) -> None:
        """The trainer is at a version of the schedule; if it waits, that ends in `VersionEnded`."""
        with self.groups.at(now):
            self.groups.wait_avoiding.arrive(version, now, waits=waits)

    def describe(self, now: Seconds, *, phase: Phase, steps: int, samples: int) -> None:
        """Update our own record; a new phase is announced to everyone at once."""
        changed = phase is not self.membership.me.phase
        self.membership.describe(phase=phase, steps=steps, samples=samples)
        if changed:
            self.membership.announce()
        self._settle(now)

    def move(self, address: Address, now: Seconds) -> None:
        """Others call this peer at `address` from now on: send them its new record."""
        self.membership.move(address)
        self._settle(now)

    def outlive(self, incarnation: int) -> None:
        """Take an incarnation above `incarnation`, if others remember us under that."""
        self.membership.outlive(incarnation)
        self.groups.lock.incarnation = self.membership.born

    def learn(self, members: Sequence[Member], now: Seconds, why: str) -> None:
        """Merge the records of a peer that joined, or that we joined."""
        self.membership.learn(members, now, why)
        self._settle(now)

    def receive(self, source: PeerId, message: Message, now: Seconds) -> None:
        if isinstance(message, MembershipMessage):
            self.membership.receive(source, message, now)
            self._settle(now)
            return
        self.membership.spoke(source)
        if isinstance(message, RepairMessage):
            self.repair.receive(source, message, now)
        elif isinstance(message, SettingsChange):
            self.epochs.receive(source, message, now)
            self._maybe_suspend(now)
        else:
            self.groups.receive(source, message, now)

    def propose(self, text: str, why: str, now: Seconds) -> SettingsChange:
        """Change the settings of the whole swarm, for a reason in one sentence."""
        change = self.epochs.propose(text, why, now)
        self._maybe_suspend(now)
        return change

    def know(self, change: SettingsChange, now: Seconds) -> None:
        """The peer that let us in works with these settings."""
        self.epochs.receive(change.by, change, now)
        self._maybe_suspend(now)

    def change(self, change: SettingsChange, schedule: Schedule | None, now: Seconds) -> None:
        """We work with these settings from now on, whose algorithm has this schedule.

        We are in no group, and our trainer stands at a boundary.
        """
        self.epochs.adopt(change)
        self.groups.change(change.epoch, schedule, now)
        self._maybe_suspend(now)

    def unreachable(self, peer: PeerId, why: str, now: Seconds) -> None:
        self.membership.unreachable(peer, why, now)
        self._settle(now)

    def ended(self, ending: Ending, now: Seconds) -> None:
        match ending:
            case effects.AverageBroke(ticket=ticket, complete=complete, without=without):
                self.repair.broke(ticket, now, complete=complete, without=without)
            case effects.AverageEnded(ticket=ticket, outcome=outcome, why=why):
                self.repair.ended(ticket, now, done=outcome is Outcome.DONE)
                if outcome is Outcome.DONE and self._link:
                    self._link.note(ending.moved_bytes, ending.moving_s)
                    if self._link.mbit != self.membership.me.link_mbit:
                        self.membership.describe(link_mbit=self._link.mbit)
                self.groups.average_ended(ticket, outcome, why, now)
            case effects.StateTransferred(version=version, taken=taken):
                with self.groups.at(now):
                    self.groups.barrier.state_transferred(version, now, taken=taken)

    def withdraw(self, now: Seconds) -> None:
        """The trainer stops: no new groups, except those that others claim."""
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

    def is_over(self, ticket: Ticket) -> bool:
        """True if no chunks can come under `ticket` any more, here."""
        return self.groups.lock.is_over(ticket.root) or self.repair.is_over(ticket)

    def next_deadline(self) -> Seconds | None:
        parts = self.membership, self.groups, self.repair
        return min((at for part in parts if (at := part.next_deadline()) is not None), default=None)

    def take_effects(self) -> list[Effect]:
        taken, self._effects = self._effects, []
        return taken

    def check(self) -> None:
        """Raise InvariantViolation if the parts contradict themselves or each other."""
        for part in (self.membership, self.groups, self.repair, self.epochs):
            part.check()

    def weigh(self, members: Sequence[PeerId]) -> tuple[int, ...]:
        known = [self.membership.member(peer) for peer in members]
        return weights_of([member.link_mbit if member else 0 for member in known])

    def outside_samples(self, members: Sequence[PeerId]) -> int:
        """Samples of everyone but `members`, as far as we know."""
        known = [self.membership.member(peer) for peer in members]
        return self.membership.samples - sum(member.samples for member in known if member)

    # --- inside -----------------------------------------------------------------------------------

    def _note(self, effect: Effect) -> None:
        self._effects.append(effect)
        match effect:
            case effects.MemberChanged():
                self._unsettled.append(effect)
            case effects.Average(ticket=ticket, members=members, what=what):
                whole = what is What.GRADIENTS
                self.repair.formed(ticket, members, self.groups.now, whole=whole)
            case effects.Abandon(ticket=ticket):
                self.repair.ended(ticket, self.groups.now, done=False)
            case effects.Resolve(again=Ticket() as again, members=members):
                self.groups.lock.regroup(again.root, members)
            case _:
                pass

    def _maybe_suspend(self, now: Seconds) -> None:
        if self.epochs.is_due and not self.groups.is_suspended:
            self.groups.suspend(now)

    def _is_alive(self, peer: PeerId) -> bool:
        member = self.membership.member(peer)
        return member is not None and member.state is MemberState.ALIVE

    def _settle(self, now: Seconds) -> None:
        """Tell the groups what membership has just decided."""
        self.groups.lock.incarnation = self.membership.born
        unsettled, self._unsettled = self._unsettled, []
        for change in unsettled:
            peer, why = change.peer, change.why
            if change.state is MemberState.SUSPECT:
                self.repair.doubted(peer, now)
            elif change.state is MemberState.DEAD:
                if left := self.repair.peer_dead(peer, why):
                    self.groups.lock.regroup(*left)
                self.groups.peer_out(peer, why, now, crashed=True)
            elif change.state is MemberState.LEFT:
                # It has finished its groups; our side of them ends by itself.
                self.groups.peer_out(peer, why, now, crashed=False)
        views, seen = (self.participants(), self.trainees()), self._views
        others, trainees = views[0] is not seen[0], views[1] is not seen[1]
        if others or trainees:
            self._views = views
            self.groups.view_changed(now, participants=others, trainees=trainees)
