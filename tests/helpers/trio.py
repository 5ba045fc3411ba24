"""A handful of group locks, and messages between them that the test pushes by hand.

Nothing moves by itself: what a lock sends waits until the test delivers, drops or repeats it. Every
peer's clock shows something else, so that a time that crosses the wire by mistake is found out; it
may also run too fast or too slow.
"""

from dataclasses import dataclass

from p2ptrain.core.effects import Abandon, Average, Effect, GroupEnded, Send
from p2ptrain.core.events import Outcome
from p2ptrain.core.group_lock import GroupLock
from p2ptrain.core.lock_state import InGroup, LockConfig
from p2ptrain.core.messages import Grant, LockMessage
from p2ptrain.ids import PeerId, Seconds, Ticket

CLOCKS = {"a": 0.0, "b": 1024.0, "c": 17.5, "d": 300.25, "e": 4096.0}  # exact in binary


@dataclass
class InFlight:
    source: str
    target: str
    message: LockMessage

    def __str__(self) -> str:
        return f"{self.source} -> {self.target} {type(self.message).__name__}"


class Trio:
    """Locks named ``a``, ``b``, ``c``, ...; `wire` is what has been sent and not arrived.

    ``drift={"a": 0.01}``: a's clock gains a hundredth.
    """

    def __init__(
        self,
        names: str = "abc",
        config: LockConfig | None = None,
        drift: dict[str, float] | None = None,
    ) -> None:
        self.config = config or LockConfig()
        self.drift = drift or {}
        self.time: Seconds = 0.0
        self.wire: list[InFlight] = []
        self.locks: dict[str, GroupLock] = {}
        self.paused: dict[str, None] = {}
        self.entered: list[tuple[str, Ticket]] = []
        self.first_lapse_at: dict[Ticket, Seconds] = {}
        """When the earliest lease of a ticket lapses, in true time."""
        self.abandoned: dict[tuple[str, Ticket], Outcome] = {}
        self.ended: dict[Ticket, Outcome] = {}
        self.reasons: dict[Ticket, str] = {}
        self._granted: dict[tuple[str, Ticket], None] = {}
        self._lives: dict[str, int] = {}
        for name in names:
            self.start(name)

    # --- what a test does -------------------------------------------------------------------------

    def start(self, name: str) -> None:
        """(Re)start a peer: it knows nothing, and counts under a new incarnation."""
        self._lives[name] = self._lives.get(name, 0) + 1
        self.locks[name] = GroupLock(
            PeerId(name), self._lives[name], self.config, lambda effect: self._note(name, effect)
        )

    def crash(self, name: str) -> None:
        """The peer is no more; what it has sent may still arrive, what was sent to it is lost."""
        del self.locks[name]
        self.paused.pop(name, None)
        self.wire = [sent for sent in self.wire if sent.target != name]
        self.entered = [entry for entry in self.entered if entry[0] != name]  # of this life only

    def request(self, name: str, candidates: str, needed: int = 0) -> Ticket:
        """``request("a", "bc")``: a claims the group a, b, c; or itself and `needed` of them."""
        return self.locks[name].request(
            [PeerId(c) for c in candidates], needed or len(candidates), self.clock(name)
        )

    def deliver(self, source: str, target: str, count: int = 1) -> None:
        """The oldest messages from `source` to `target` arrive."""
        for _ in range(count):
            self._arrive(self._take(source, target))

    def deliver_last(self, source: str, target: str) -> None:
        """The newest message from `source` to `target` overtakes the others."""
        last = max(i for i, m in enumerate(self.wire) if (m.source, m.target) == (source, target))
        self._arrive(self.wire.pop(last))

    def drop(self, source: str, target: str) -> None:
        """The oldest message from `source` to `target` is lost."""
        self._take(source, target)

    def drop_all(self) -> None:
        """Everything on its way is lost."""
        self.wire.clear()

    def repeat(self, source: str, target: str) -> None:
        """The oldest message from `source` to `target` will arrive twice, the second time last."""
        first = next(m for m in self.wire if (m.source, m.target) == (source, target))
        self.wire.append(first)

    def hold_back(self, source: str, target: str) -> InFlight:
        """Take the oldest message off the wire; `release` lets it arrive much later."""
        return self._take(source, target)

    def release(self, message: InFlight) -> None:
        """What was held back arrives."""
        self._arrive(message)

    def settle(self) -> None:
        """Everything on its way arrives, and what that causes, and so on."""
        while self.wire:
            self._arrive(self.wire.pop(0))

    def advance(self, duration_s: Seconds, *, delivering: bool = True) -> None:
        """Time passes, timers fire; by default, what is sent meanwhile arrives at once.

        Those in `paused` sleep: their timers do not fire.
        """
        until = self.time + duration_s
        while True:
            awake = [name for name in self.locks if name not in self.paused]
            due = [(d, name) for name in awake if (d := self._due_at(name)) is not None]
            at, name = min(due, default=(until + 1, ""))
            if at > until:
                break
            self.time = max(self.time, at)
            lock = self.locks[name]
            lock.handle_timer(max(self.clock(name), lock.next_deadline() or 0.0))
            if delivering:
                self.settle()
        self.time = until

    def finish(self, ticket: Ticket, outcome: Outcome = Outcome.DONE, by: str = "") -> None:
        """The average of `ticket` ends at the peers `by`, or at all that are in it."""
        for name in by or tuple(self.locks):
            self.locks[name].average_ended(ticket, outcome, outcome.value, self.clock(name))

    def hear_gone(self, name: str, gone: str) -> None:
        """Membership tells `name` that `gone` crashed."""
        self.locks[name].peer_gone(PeerId(gone), f"{gone} is gone", self.clock(name))

    def hear_left(self, name: str, left: str) -> None:
        """Membership tells `name` that `left` said goodbye."""
        self.locks[name].peer_left(PeerId(left), f"{left} left", self.clock(name))

    def withdraw(self, name: str) -> None:
        self.locks[name].withdraw("stopping", self.clock(name))

    # --- what a test sees -------------------------------------------------------------------------

    @property
    def groups(self) -> dict[str, Ticket]:
        """Who is in which group, by its own state."""
        states = {name: lock.state for name, lock in self.locks.items()}
        return {name: s.ticket for name, s in states.items() if isinstance(s, InGroup)}

    @property
    def states(self) -> dict[str, str]:
        """Each peer's state in words."""
        return {name: str(lock.state) for name, lock in self.locks.items()}

    def holds(self, name: str, ticket: Ticket) -> bool:
        return self.locks[name].holds(ticket, self.clock(name))

    def on_wire(self) -> list[str]:
        """``["a -> b Claim", ...]`` in the order of sending."""
        return [str(message) for message in self.wire]

    def said(self, source: str, target: str) -> LockMessage:
        """The oldest message from `source` to `target` that has not arrived."""
        return next(m.message for m in self.wire if (m.source, m.target) == (source, target))

    def clock(self, name: str) -> Seconds:
        return CLOCKS[name] + self.time * (1 + self.drift.get(name, 0.0))

    def check(self) -> None:
        """What must hold whatever happened."""
        for lock in self.locks.values():
            lock.check()
        assert len(set(self.entered)) == len(self.entered), f"entered twice: {self.entered}"

    # --- inside -----------------------------------------------------------------------------------

    def _due_at(self, name: str) -> Seconds | None:
        deadline = self.locks[name].next_deadline()
        if deadline is None:
            return None
        return (deadline - CLOCKS[name]) / (1 + self.drift.get(name, 0.0))

    def _take(self, source: str, target: str) -> InFlight:
        for index, message in enumerate(self.wire):
            if (message.source, message.target) == (source, target):
                return self.wire.pop(index)
        raise AssertionError(f"nothing from {source} to {target} in {self.on_wire()}")

    def _arrive(self, sent: InFlight) -> None:
        if sent.target in self.locks:
            target = self.locks[sent.target]
            target.receive(PeerId(sent.source), sent.message, self.clock(sent.target))
        self.check()

    def _note(self, name: str, effect: Effect) -> None:
        match effect:
            case Send(target=target, message=message):
                if isinstance(message, Grant) and (name, message.ticket) not in self._granted:
                    self._granted[name, message.ticket] = None
                    lapse_at = self.time + self.config.lease_s / (1 + self.drift.get(name, 0.0))
                    earliest = self.first_lapse_at.get(message.ticket, lapse_at)
                    self.first_lapse_at[message.ticket] = min(earliest, lapse_at)
                self.wire.append(InFlight(name, target, message))  # type: ignore[arg-type]
            case Average(ticket=ticket, members=members):
                if name == ticket.initiator:
                    others = [member for member in members if member != name]
                    assert all((other, ticket) in self._granted for other in others)
                self.entered.append((name, ticket))
            case Abandon(ticket=ticket, outcome=outcome):
                self.abandoned[name, ticket] = outcome
            case GroupEnded(ticket=ticket, outcome=outcome, why=why):
                assert ticket not in self.ended, f"{ticket} ended twice"
                self.ended[ticket] = outcome
                self.reasons[ticket] = why
            case _:
                raise AssertionError(f"a lock does not emit {effect}")
