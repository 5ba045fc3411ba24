"""Locks and generators of peers a, b, c, ...; messages wait until the test lets them through."""

from collections.abc import Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from types import coroutine
from typing import Any

from p2ptrain.averaging import GroupResult
from p2ptrain.averaging.ripples import Ripples
from p2ptrain.averaging.ripples.generator import GroupGenerator
from p2ptrain.core.effects import Abandon, Average, Effect, GroupEnded, Outcome, Send
from p2ptrain.core.group_lock import GroupLock
from p2ptrain.core.lock_state import InGroup, LockConfig
from p2ptrain.core.messages import AlgorithmMessage
from p2ptrain.core.purpose import GOSSIP
from p2ptrain.ids import PeerId, Seconds, Ticket
from tests.helpers.everyone import AnyGroup

SILENT_S: Seconds = 5.0
"""So long nothing moves in a group before a member gives it up."""


@dataclass
class Seat:
    """One peer: what a generator sees of its `Swarm`, and its lock."""

    assembly: "Assembly"
    me: PeerId
    rng: Random
    view: list[PeerId]
    lock: GroupLock
    incarnation: int = 1
    trains: bool = True
    updates: int = 0
    claims: dict[Ticket, Coroutine[Any, Any, None]] = field(default_factory=dict)
    """Claims of this peer, and the leader that waits for each."""
    ended: list[GroupEnded] = field(default_factory=list)
    """Claims that the generator has not been told of."""
    groups: list[tuple[PeerId, ...]] = field(default_factory=list)
    turns: list[Outcome] = field(default_factory=list)
    """How the generator's turns ended."""
    generator: GroupGenerator = field(init=False)

    @property
    def now(self) -> Seconds:
        return self.assembly.time

    def trainees(self) -> tuple[PeerId, ...]:
        return tuple(self.view)

    def met(self) -> Mapping[PeerId, int]:
        return {self.me: len(self.groups)}

    def link_mbit(self, peer: PeerId) -> int:
        return 0

    def tell(self, peer: PeerId, message: AlgorithmMessage) -> None:
        self.assembly.wire.append((self.me, peer, message))

    @coroutine
    def form(
        self, others: Sequence[PeerId], *, fragment_s: float = 0
    ) -> Generator[Any, Any, GroupResult]:
        return (yield others)

    def start(self, activity: Coroutine[Any, Any, None]) -> None:
        self.go_on(activity, None)

    def go_on(self, leader: Coroutine[Any, Any, None], result: GroupResult | None) -> None:
        """Until it claims the next group, or has none to claim."""
        try:
            others = leader.send(result)
        except StopIteration:
            return
        self.claims[self.lock.request(others, len(others), self.now, GOSSIP)] = leader

    def end_claim(self, ticket: Ticket, outcome: Outcome) -> None:
        """Tell the generator of a claim that is over."""
        self.go_on(self.claims.pop(ticket), GroupResult(outcome, ""))

    def ask(self, updates: int) -> None:
        before = len(self.groups)
        self.updates = updates
        self.generator.ask()
        if self.generator.asks is None and len(self.groups) == before:
            self.turns.append(Outcome.BUSY if self.trains else Outcome.WITHDRAWN)

    def look(self) -> None:
        asked, met = self.generator.asks is not None, self.generator._met
        self.generator.look()
        if asked and self.generator.asks is None:
            done = len(self.groups) > met
            self.turns.append(Outcome.DONE if done else Outcome.WITHDRAWN)

    def hear(self, source: PeerId, message: AlgorithmMessage) -> None:
        asked = self.generator.asks is not None
        self.generator.receive(source, message)
        if asked and self.generator.asks is None:
            self.turns.append(Outcome.BUSY)

    def withdraw(self) -> None:
        """The trainer stops."""
        self.trains = False
        self.look()


class Assembly:
    """All of them; ``assembly["a"]`` is one."""

    def __init__(self, names: str, *, seed: int = 0, **book: int) -> None:
        self.time: Seconds = 0.0
        self.wire: list[tuple[str, str, object]] = []
        self.seats: dict[str, Seat] = {}
        for number, name in enumerate(names):
            rng = Random(seed * 1000 + number)
            seat = self._seat(PeerId(name), names, rng)
            seat.generator = GroupGenerator(seat, Ripples.Config(**book))  # type: ignore[arg-type]

    def __getitem__(self, name: str) -> Seat:
        return self.seats[name]

    # --- what a test lets happen ------------------------------------------------------------------

    def ask(self, names: str, updates: int = 1) -> None:
        for name in names:
            self[name].ask(updates)
            self._follow(self[name])

    def deliver(self, index: int = 0, *, keep: bool = False) -> None:
        source, target, message = self.wire[index] if keep else self.wire.pop(index)
        if target not in self.seats:
            return
        seat = self[target]
        if isinstance(message, AlgorithmMessage):
            seat.hear(PeerId(source), message)
        else:
            seat.lock.receive(PeerId(source), message, self.time)  # type: ignore[arg-type]
        self._follow(seat)

    def settle(self) -> None:
        """Everything is delivered, in order, and every average ends."""
        while self.wire or self.complete():
            while self.wire:
                self.deliver()
            for ticket in self.complete():
                self.finish(ticket)

    def complete(self) -> list[Ticket]:
        """The groups all of whose members are in them: their chunks can arrive."""
        tickets: dict[Ticket, list[str]] = {}
        for name, seat in self.seats.items():
            if isinstance(seat.lock.state, InGroup):
                tickets.setdefault(seat.lock.state.ticket, []).append(name)
        states = {t: self[names[0]].lock.state for t, names in tickets.items()}
        return [t for t, s in states.items() if sorted(tickets[t]) == sorted(s.members)]  # type: ignore[union-attr]

    def finish(self, ticket: Ticket) -> None:
        for seat in self.seats.values():
            if seat.lock.holds(ticket):
                seat.groups.append(seat.lock.state.members)  # type: ignore[union-attr]
                seat.lock.average_ended(ticket, Outcome.DONE, "", self.time)
                seat.look()
                self._follow(seat)

    def tick(self) -> None:
        """The next timer fires."""
        at = min((at for seat in self.seats.values() for at in self._due(seat)), default=self.time)
        self.time = max(self.time, at)
        self._break_what_stands_still()
        for seat in tuple(self.seats.values()):
            if min(self._due(seat), default=self.time + 1) <= self.time:
                seat.lock.handle_timer(self.time)
                seat.look()
                self._follow(seat)

    def die(self, name: str) -> None:
        """Everybody hears of it at once."""
        del self.seats[name]
        for seat in self.seats.values():
            if PeerId(name) in seat.view:
                seat.view.remove(PeerId(name))
            seat.lock.peer_out(PeerId(name), f"{name} is gone", self.time, crashed=True)
            seat.look()
            self._follow(seat)

    def check(self) -> None:
        for seat in self.seats.values():
            seat.lock.check()
            seat.generator.check()

    # --- inside -----------------------------------------------------------------------------------

    def _seat(self, name: PeerId, view: str, rng: Random) -> Seat:
        def note(effect: Effect) -> None:
            match effect:
                case Send(target=target, message=message):
                    self.wire.append((name, target, message))
                case GroupEnded():
                    seat.ended.append(effect)
                case Average() | Abandon():
                    pass
                case _:
                    raise AssertionError(f"a lock does not emit {effect}")

        lock = GroupLock(name, 1, LockConfig(), note, AnyGroup(), AnyGroup().admits)
        seat = self.seats[name] = Seat(self, name, rng, [PeerId(other) for other in view], lock)
        return seat

    def _break_what_stands_still(self) -> None:
        """A group that not all of its members have come into: nothing moves in it."""
        complete = self.complete()
        for seat in self.seats.values():
            state = seat.lock.state
            if not isinstance(state, InGroup) or state.ticket in complete:
                continue
            if self.time >= state.since + SILENT_S:
                seat.lock.average_ended(state.ticket, Outcome.LOST, "silence", self.time)
                self._follow(seat)

    def _follow(self, seat: Seat) -> None:
        """Tell the generator of claims that are over."""
        while seat.ended:
            effect = seat.ended.pop(0)
            seat.end_claim(effect.ticket, effect.outcome)

    def _due(self, seat: Seat) -> list[Seconds]:
        deadlines = (seat.lock.next_deadline(), seat.generator.next_deadline())
        return [at for at in deadlines if at is not None]
