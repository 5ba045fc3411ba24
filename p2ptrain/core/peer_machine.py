"""Everything that one peer decides, as one machine: membership, the group lock, the rendezvous.

::

    trainer, algorithm ──request, arrive, describe──►┌─────────────┐
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

from p2ptrain.core.effects import Effect, MemberChanged
from p2ptrain.core.events import AverageEnded, Ending, StateNotTaken, StateTaken
from p2ptrain.core.group_lock import GroupLock
from p2ptrain.core.lock_state import InGroup as InLockGroup
from p2ptrain.core.lock_state import LockConfig
from p2ptrain.core.membership import Membership, MembershipConfig
from p2ptrain.core.messages import (
    Ack,
    Arrive,
    Assemble,
    Begin,
    Busy,
    CatchUp,
    Claim,
    Grant,
    Inquire,
    Member,
    MemberState,
    Message,
    Phase,
    Ping,
    Release,
    Rumours,
)
from p2ptrain.core.rendezvous import InGroup as InScheduledGroup
from p2ptrain.core.rendezvous import Rendezvous
from p2ptrain.errors import ConfigError, InvariantViolation
from p2ptrain.ids import PeerId, Seconds, Ticket


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtocolConfig:
    """Deadlines of everything that a peer decides."""

    membership: MembershipConfig = field(default_factory=MembershipConfig)
    lock: LockConfig = field(default_factory=LockConfig)

    rendezvous_resend_s: Seconds = 0.25
    """A waiting peer says so again after this long. Too short: needless messages beside a
    straggler; too long: a lost message delays everyone."""

    def __post_init__(self) -> None:
        if not 0 < self.rendezvous_resend_s < math.inf:
            raise ConfigError(f"rendezvous_resend_s = {self.rendezvous_resend_s} must be above 0")


class PeerMachine:
    """One peer's decisions; the module's docstring states the duties of whoever drives it."""

    def __init__(self, me: Member, config: ProtocolConfig, rng: Random) -> None:
        self._effects: list[Effect] = []
        self.membership = Membership(me, config.membership, rng, self._note)
        self.lock = GroupLock(me.peer, me.incarnation, config.lock, self._note)
        self.rendezvous = Rendezvous(
            me.peer,
            me.incarnation,
            config.rendezvous_resend_s,
            self.membership.participants,
            self._note,
        )
        self._participants = self.membership.participants()

    # --- what can happen --------------------------------------------------------------------------

    def request(self, candidates: Sequence[PeerId], needed: int, now: Seconds) -> Ticket:
        """The algorithm claims a group with `needed` of `candidates`, which it prefers in order.

        Ends in a `GroupEnded` with this ticket.
        """
        return self.lock.request(candidates, needed, now)

    def arrive(self, version: int, now: Seconds) -> None:
        """The trainer waits to average `version` with everyone; ends in `VersionEnded`."""
        self.rendezvous.arrive(version, now)

    def describe(self, now: Seconds, *, phase: Phase, steps: int, samples: int) -> None:
        """The trainer is in `phase` and has done so much; everyone hears of a new phase at once."""
        changed = phase is not self.membership.me.phase
        self.membership.describe(phase=phase, steps=steps, samples=samples)
        if changed:
            self.membership.announce()
        self._settle(now)

    def learn(self, members: Sequence[Member], now: Seconds, why: str) -> None:
        """Somebody who joined, or whom we joined, told us of members."""
        self.membership.learn(members, now, why)
        self._settle(now)

    def receive(self, source: PeerId, message: Message, now: Seconds) -> None:
        match message:
            case Ping() | Ack() | Rumours():
                self.membership.receive(source, message, now)
                self._settle(now)
            case Claim() | Grant() | Busy() | Begin() | Release() | Inquire():
                self.lock.receive(source, message, now)
            case Arrive() | Assemble() | CatchUp():
                self.rendezvous.receive(source, message, now)

    def unreachable(self, peer: PeerId, why: str, now: Seconds) -> None:
        """A connection to `peer` broke."""
        self.membership.unreachable(peer, why, now)
        self._settle(now)

    def ended(self, ending: Ending, now: Seconds) -> None:
        match ending:
            case AverageEnded(ticket=ticket, outcome=outcome, why=why):
                self.lock.average_ended(ticket, outcome, why, now)
                self.rendezvous.average_ended(ticket, outcome, now)
            case StateTaken(version=version):
                self.rendezvous.state_taken(version, now)
            case StateNotTaken(version=version):
                self.rendezvous.state_not_taken(version, now)

    def withdraw(self, now: Seconds) -> None:
        """The trainer stops: no new groups, except those that others claim."""
        self.rendezvous.withdraw()
        self.lock.withdraw("stopping", now)

    def leave(self, now: Seconds) -> None:
        """Say goodbye to everyone. Call it when no group is held any more."""
        self.withdraw(now)
        self.membership.leave()

    def handle_timer(self, now: Seconds) -> None:
        self.membership.handle_timer(now)
        self._settle(now)
        self.lock.handle_timer(now)
        self.rendezvous.handle_timer(now)

    # --- what the driver asks ---------------------------------------------------------------------

    def holds(self, ticket: Ticket, now: Seconds) -> bool:
        """The fence: slices and results under any other ticket are refused."""
        return self.lock.holds(ticket, now) or self.rendezvous.holds(ticket)

    def next_deadline(self) -> Seconds | None:
        parts = (self.membership, self.lock, self.rendezvous)
        deadlines = [deadline for part in parts if (deadline := part.next_deadline()) is not None]
        return min(deadlines, default=None)

    def take_effects(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    def check(self) -> None:
        """Raise InvariantViolation if the parts contradict themselves or each other."""
        self.membership.check()
        self.lock.check()
        self.rendezvous.check()
        if isinstance(self.lock.state, InLockGroup) and isinstance(
            self.rendezvous.state, InScheduledGroup
        ):
            raise InvariantViolation(f"{self.membership.me.peer} is in two groups")

    # --- inside -----------------------------------------------------------------------------------

    def _note(self, effect: Effect) -> None:
        self._effects.append(effect)

    def _settle(self, now: Seconds) -> None:
        """Tell the groups what membership has just decided."""
        for effect in tuple(self._effects):
            match effect:
                case MemberChanged(peer=peer, state=MemberState.GONE, why=why):
                    self.lock.peer_gone(peer, why, now)
                    self.rendezvous.peer_gone(peer, why, now)
                case MemberChanged(peer=peer, state=MemberState.LEFT, why=why):
                    # It has finished its groups; our side of them ends by itself.
                    self.lock.peer_left(peer, why, now)
                    self.rendezvous.peer_left(peer)
                case _:
                    pass
        participants = self.membership.participants()
        if participants is not self._participants:
            self._participants = participants
            self.rendezvous.view_changed()
