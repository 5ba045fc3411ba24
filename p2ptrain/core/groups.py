"""All groups of one peer: one slot, and the ways to form a group on top of it.

::

    claimed ───────────────► ┌──────────┐
    barrier ──── offer ────► │   slot   │ ──► Average: formed
    wait-avoiding ─ request ─►└──────────┘ ──► GroupEnded: over, formed or not

The slot (`core/group_lock.py`) arbitrates; a formation (`core/scheduled.py`) decides when to offer
and when to request, and says what this peer admits. It hears of a group's end before the slot goes
on to the next group, and of a request that came to nothing when the slot has.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from p2ptrain.core.barrier import Barrier
from p2ptrain.core.effects import Abandon, Average, Effect, GroupEnded, Outcome
from p2ptrain.core.group_lock import GroupLock
from p2ptrain.core.lock_state import GroupEnvironment, LockConfig, TimeoutPolicy
from p2ptrain.core.messages import Activate, Arrive, CatchUp, FormationMessage, Past
from p2ptrain.core.purpose import Formation, Purpose
from p2ptrain.core.scheduled import Scheduled
from p2ptrain.core.slot_credit import SlotCredit
from p2ptrain.core.wait_avoiding import Schedule, WaitAvoiding
from p2ptrain.ids import PeerId, Seconds, Ticket


class PeerGroups:
    """One peer's groups. Effects are handed to `emit`."""

    def __init__(
        self,
        me: PeerId,
        incarnation: int,
        config: LockConfig,
        resend_s: Seconds,
        schedule: Schedule | None,
        environment: GroupEnvironment,
        emit: Callable[[Effect], None],
        timeouts: TimeoutPolicy | None = None,
        credit: SlotCredit | None = None,
    ) -> None:
        self._environment = environment
        self._emit = emit
        self.epoch = 0
        """Of the settings that our groups have in common."""
        self.is_suspended = False
        """Other settings are due: no group begins until `change`."""
        self._withdrawn = False
        self._ended: list[GroupEnded] = []  # requests whose formations do not know
        self._now: Seconds = 0.0
        self.lock = GroupLock(
            me, incarnation, config, self._note, environment, self._admits, timeouts, credit
        )
        self._me, self._resend_s = me, resend_s
        self._make_formations(schedule)

    def _make_formations(self, schedule: Schedule | None) -> None:
        """Formations that wait for nothing, and have seen no version."""
        me, resend_s, environment = self._me, self._resend_s, self._environment
        self.barrier = Barrier(me, resend_s, environment.participants, self.lock, self._emit)
        self.wait_avoiding = WaitAvoiding(
            me, resend_s, environment.trainees, self.lock, self._emit, schedule
        )
        self.barrier.epoch = self.wait_avoiding.epoch = self.epoch

    def suspend(self, now: Seconds) -> None:
        """Other settings are due: end waits and requests, refuse groups, let a formed one end.

        A state that is being transferred comes first, whole.
        """
        with self.at(now):
            self.is_suspended = True
            self.lock.withdraw("the settings of the swarm change", now)
            for part in self._formations.values():
                part.stop_waiting(now)

    def change(self, epoch: int, schedule: Schedule | None, now: Seconds) -> None:
        """From now on groups are of this epoch; versions begin anew. We are in no group."""
        with self.at(now):
            self.epoch, self.is_suspended = epoch, False
            self._make_formations(schedule)
            if self._withdrawn:
                for part in self._formations.values():
                    part.withdraw(now)

    @contextmanager
    def at(self, now: Seconds) -> Iterator[None]:
        """Whatever is asked of a part must be asked within this, as the methods below do.

        Afterwards the formations hear what has become of their requests, and of the slot.
        """
        self._now = now
        yield
        formations = self._formations.values()
        while self._ended:
            ended = self._ended.pop(0)
            for part in formations:
                part.request_ended(ended.ticket, ended.outcome, now)
        for part in formations:
            part.follow(now)

    @property
    def now(self) -> Seconds:
        """When something happened last; effects are of this moment."""
        return self._now

    def receive(self, source: PeerId, message: FormationMessage, now: Seconds) -> None:
        with self.at(now):
            match message:
                case Arrive() | CatchUp():
                    self.barrier.receive(source, message, now)
                case Activate() if not self._environment.has_model:
                    pass  # we are about to begin; then somebody is asked again
                case Activate() | Past():
                    self.wait_avoiding.receive(source, message, now)
                case _:
                    self.lock.receive(source, message, now)

    def average_ended(self, ticket: Ticket, outcome: Outcome, why: str, now: Seconds) -> None:
        """Our own average under `ticket` is over."""
        with self.at(now):
            self._group_over(ticket, outcome)
            self.lock.average_ended(ticket, outcome, why, now)

    def peer_out(self, peer: PeerId, why: str, now: Seconds, *, crashed: bool) -> None:
        """A peer crashed or is cut off, or said goodbye."""
        with self.at(now):
            for part in self._formations.values():
                part.peer_out(peer)
            self.lock.peer_out(peer, why, now, crashed=crashed)

    def view_changed(self, now: Seconds, *, participants: bool, trainees: bool) -> None:
        """Membership has changed."""
        with self.at(now):
            if participants:
                self.barrier.view_changed(now)
            if trainees:
                self.wait_avoiding.view_changed(now)

    def withdraw(self, why: str, now: Seconds) -> None:
        """The trainer stops: no new groups, except those that others request."""
        with self.at(now):
            self._withdrawn = True
            self.lock.withdraw(why, now)  # first: whom it grants next keeps the grant
            for part in self._formations.values():
                part.withdraw(now)

    def handle_timer(self, now: Seconds) -> None:
        with self.at(now):
            for part in (self.lock, self.barrier, self.wait_avoiding):
                part.handle_timer(now)

    def next_deadline(self) -> Seconds | None:
        parts = self.lock, self.barrier, self.wait_avoiding
        return min((at for part in parts if (at := part.next_deadline()) is not None), default=None)

    def check(self) -> None:
        """Raise InvariantViolation if the parts contradict themselves or each other."""
        for part in (self.lock, self.barrier, self.wait_avoiding):
            part.check()

    @property
    def _formations(self) -> dict[Formation, Scheduled]:
        return {Formation.BARRIER: self.barrier, Formation.WAIT_AVOIDING: self.wait_avoiding}

    def _admits(self, source: PeerId, purpose: Purpose) -> bool:
        if not self._environment.has_model:
            return False  # our model is not what they want to average with
        if self.is_suspended or purpose.epoch != self.epoch:
            return False
        part = self._formations.get(purpose.formation)
        return part is None or part.admits(source, purpose)

    def _note(self, effect: Effect) -> None:
        match effect:
            case Average(purpose=purpose):
                if part := self._formations.get(purpose.formation):
                    effect = part.formed(effect)
            case GroupEnded():
                self._ended.append(effect)
            case Abandon(ticket=ticket, outcome=outcome):
                self._group_over(ticket, outcome)
            case _:
                pass
        self._emit(effect)

    def _group_over(self, ticket: Ticket, outcome: Outcome) -> None:
        for part in self._formations.values():
            part.group_over(ticket, outcome, self._now)
