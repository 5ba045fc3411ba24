"""The real locks, asked once: what does a lock in this state do at this event?

Nothing of the protocol is written down here a second time. What a `GroupLock` does at an event is a
function of its `frozen` state; so a clone of it is asked once, and the answer is looked up from
then on. States of locks and events are numbered.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar, assert_never

from p2ptrain.core.effects import Abandon, Average, Effect, GroupEnded, Send
from p2ptrain.core.events import Outcome
from p2ptrain.core.group_lock import GroupLock
from p2ptrain.core.lock_state import Free, InGroup, LockConfig
from p2ptrain.core.messages import Busy, LockMessage, Message
from p2ptrain.core.pace import Pace
from p2ptrain.ids import PeerId, Seconds, Ticket
from p2ptrain.sim.explore.scenario import Scenario
from p2ptrain.sim.explore.story import UnsafeError

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Sent:
    """A message, in flight and arriving. Peers are numbers here."""

    source: int
    target: int
    message: LockMessage


@dataclass(frozen=True, slots=True)
class Asks:
    """A peer makes the request of this number."""

    number: int


@dataclass(frozen=True, slots=True)
class Ends:
    """A peer's average ends."""

    ticket: Ticket
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class HearsGone:
    """A peer hears that another one has crashed."""

    other: int


@dataclass(frozen=True, slots=True)
class Wakes:
    """A peer's timer fires."""


Event = Sent | Asks | Ends | HearsGone | Wakes


class Local(NamedTuple):
    """One peer's lock at one moment of its clock, and what of it matters to the others."""

    peer: int
    lock: GroupLock | None
    """Never touched, only cloned; None: crashed."""
    now: Seconds
    due_in: Seconds | None
    current: Ticket | None
    """What it claims, is promised to, or averages in."""
    held: Ticket | None
    averages: bool


class Move(NamedTuple):
    """What a lock in one state did at one event."""

    after: int
    sent: tuple[int, ...]
    averages: tuple[Average, ...]
    answered: tuple[Ticket, ...]
    requested: Ticket | None
    abandoned: Outcome | None
    """It left its group by itself, and why."""
    is_news: bool
    """A story has to be continued."""

    def changes_nothing(self, before: int) -> bool:
        return self.after == before and not self.sent and not self.is_news


class Interned(Generic[T]):
    """Numbers values in the order in which they turn up."""

    def __init__(self) -> None:
        self.values: list[T] = []
        self._numbers: dict[T, int] = {}

    def number(self, value: T) -> int:
        number = self._numbers.setdefault(value, len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number


class _Asking(Pace):
    """As configured, but for the lease that claims ask for."""

    def __init__(self, config: LockConfig, lease_s: Seconds) -> None:
        super().__init__(config)
        self._lease_s = lease_s

    @property
    def lease_s(self) -> Seconds:
        return self._lease_s


class Locks:
    """All states of all locks that have turned up."""

    def __init__(self, scenario: Scenario, make_lock: type[GroupLock]) -> None:
        self.names = tuple(PeerId(name) for name in scenario.peers)
        self.locals: list[Local] = []
        self.events: Interned[Event] = Interned()
        self._asks = scenario.asks
        self._numbers: dict[Hashable, int] = {}
        self._moves: list[dict[int, Move]] = []  # for each of `locals`, by event
        self._later: list[dict[Seconds, int]] = []  # for each of `locals`, by duration
        peers = range(len(self.names))
        self.dead = tuple(self._number(peer, None, 0.0) for peer in peers)
        paces = [_Asking(scenario.config, scenario.lease_s(name)) for name in self.names]
        # Each clock shows something else: a time that crosses the wire by mistake is found out.
        self.fresh = tuple(
            self._number(
                peer, make_lock(name, 1, scenario.config, _nobody, pace=pace), 1024.0 * peer
            )
            for peer, (name, pace) in enumerate(zip(self.names, paces, strict=True))
        )

    def move(self, number: int, event: int) -> Move:
        """What this lock does at this event.

        Raises:
            UnsafeError: if it raises anything.
        """
        known = self._moves[number].get(event)
        if known is None:
            known = self._moves[number][event] = self._ask(self.locals[number], event)
        return known

    def later(self, number: int, duration_s: Seconds) -> int:
        """This lock when so much time has passed on its clock."""
        known = self._later[number].get(duration_s)
        if known is None:
            local = self.locals[number]
            known = number
            if local.lock:
                known = self._number(local.peer, local.lock, local.now + duration_s)
            self._later[number][duration_s] = known
        return known

    def is_free(self, number: int) -> bool:
        lock = self.locals[number].lock
        return lock is None or isinstance(lock.state, Free)

    def target(self, event: int) -> int:
        """To whom this message goes."""
        sent = self.events.values[event]
        assert isinstance(sent, Sent)
        return sent.target

    # --- inside -----------------------------------------------------------------------------------

    def _ask(self, before: Local, event: int) -> Move:
        assert before.lock
        effects: list[Effect] = []
        lock = before.lock.clone(effects.append)
        try:
            requested = self._happen(lock, self.events.values[event], before.now)
            lock.check()
        except Exception as error:
            raise UnsafeError(f"{type(error).__name__}: {error}") from error
        after = self._number(before.peer, lock, before.now)
        averages = tuple(effect for effect in effects if isinstance(effect, Average))
        answered = tuple(effect.ticket for effect in effects if isinstance(effect, GroupEnded))
        moved_on = self.locals[after].current != before.current
        return Move(
            after,
            tuple(
                self._sent(before.peer, effect) for effect in effects if isinstance(effect, Send)
            ),
            averages,
            answered,
            requested,
            next((effect.outcome for effect in effects if isinstance(effect, Abandon)), None),
            moved_on or bool(averages or answered or requested),
        )

    def _happen(self, lock: GroupLock, event: Event, now: Seconds) -> Ticket | None:
        match event:
            case Sent(source=source, message=message):
                lock.receive(self.names[source], message, now)
            case Asks(number=number):
                ask = self._asks[number]
                return lock.request([PeerId(c) for c in ask.candidates], ask.needed, now)
            case Ends(ticket=ticket, outcome=outcome):
                lock.average_ended(ticket, outcome, outcome.value, now)
            case HearsGone(other=other):
                lock.peer_gone(self.names[other], "it crashed", now)
            case Wakes():
                lock.handle_timer(now)
            case _:
                assert_never(event)
        return None

    def _sent(self, source: int, effect: Send) -> int:
        target = self.names.index(effect.target)
        return self.events.number(Sent(source, target, _essence(effect.message)))

    def _number(self, peer: int, lock: GroupLock | None, now: Seconds) -> int:
        frozen = (peer, lock.frozen(now) if lock else None)
        number = self._numbers.setdefault(frozen, len(self.locals))
        if number == len(self.locals):
            self.locals.append(_look(peer, lock, now))
            self._moves.append({})
            self._later.append({})
        return number


def say(sent: Sent, names: Sequence[PeerId]) -> str:
    """``Claim of a#1 from a to b``."""
    kind, ticket = type(sent.message).__name__, sent.message.ticket
    return f"{kind} of {ticket} from {names[sent.source]} to {names[sent.target]}"


def _look(peer: int, lock: GroupLock | None, now: Seconds) -> Local:
    if lock is None:
        return Local(peer, None, now, None, None, None, False)
    state, deadline = lock.state, lock.next_deadline()
    current = None if isinstance(state, Free) else state.ticket
    return Local(
        peer,
        lock,
        now,
        None if deadline is None else deadline - now,
        current,
        current if current and lock.holds(current, now) else None,
        isinstance(state, InGroup),
    )


def _essence(message: Message) -> LockMessage:
    """The message without words for people, on which nothing depends."""
    if isinstance(message, Busy):
        return Busy(message.ticket, "")
    return message  # type: ignore[return-value]  # a lock sends nothing else


def _nobody(effect: Effect) -> None:
    raise AssertionError(f"a lock that is no clone was touched: {effect}")
