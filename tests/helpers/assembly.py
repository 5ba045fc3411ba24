"""Locks and generators of peers a, b, c, ...; messages wait until the test lets them through."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from p2ptrain.averaging.ripples.book import GroupBook
from p2ptrain.averaging.ripples.generator import GroupGenerator
from p2ptrain.core.effects import Abandon, Average, Effect, GroupEnded, Send
from p2ptrain.core.events import Outcome
from p2ptrain.core.group_lock import GroupLock
from p2ptrain.core.lock_state import InGroup, LockConfig
from p2ptrain.core.messages import AlgorithmMessage
from p2ptrain.core.purpose import GOSSIP
from p2ptrain.ids import PeerId, Seconds, Ticket
from tests.helpers.everyone import AnyGroup

SILENT_S: Seconds = 5.0
"""So long nothing moves in a group before a member gives it up."""


class WatchedGenerator(GroupGenerator):
    """Keeps how its turns ended."""

    turns: list[Outcome]

    def _end_turn(self, outcome: Outcome) -> None:
        if self.turn:
            self.turns.append(outcome)
        super()._end_turn(outcome)


@dataclass
class Seat:
    """One peer."""

    lock: GroupLock
    generator: WatchedGenerator
    view: list[PeerId]
    claims: dict[Ticket, Ticket]
    """A claim, and the proposal that it is for."""
    ended: list[GroupEnded]
    """Claims that the generator has not been told of."""
    groups: list[tuple[PeerId, ...]] = field(default_factory=list)

    @property
    def turns(self) -> list[Outcome]:
        return self.generator.turns


class Assembly:
    """All of them; ``assembly["a"]`` is one."""

    def __init__(self, names: str, *, seed: int = 0, **book: int) -> None:
        self.time: Seconds = 0.0
        self.wire: list[tuple[str, str, object]] = []
        self.seats: dict[str, Seat] = {}
        for number, name in enumerate(names):
            self._seat(PeerId(name), names, Random(seed * 1000 + number), GroupBook(**book))  # type: ignore[arg-type]

    def __getitem__(self, name: str) -> Seat:
        return self.seats[name]

    # --- what a test lets happen ------------------------------------------------------------------

    def ask(self, names: str, updates: int = 1) -> None:
        for name in names:
            self[name].generator.ask(updates, self.time)
            self._follow(self[name])

    def deliver(self, index: int = 0, *, keep: bool = False) -> None:
        source, target, message = self.wire[index] if keep else self.wire.pop(index)
        if target not in self.seats:
            return
        seat = self[target]
        if isinstance(message, AlgorithmMessage):
            seat.generator.receive(PeerId(source), message, self.time)
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
                seat.generator.average_ended()
                self._follow(seat)

    def tick(self) -> None:
        """The next timer fires."""
        at = min((at for seat in self.seats.values() for at in self._due(seat)), default=self.time)
        self.time = max(self.time, at)
        self._break_what_stands_still()
        for seat in tuple(self.seats.values()):
            if min(self._due(seat), default=self.time + 1) <= self.time:
                seat.lock.handle_timer(self.time)
                seat.generator.handle_timer(self.time)
                self._follow(seat)

    def die(self, name: str) -> None:
        """Everybody hears of it at once."""
        del self.seats[name]
        for seat in self.seats.values():
            if PeerId(name) in seat.view:
                seat.view.remove(PeerId(name))
            seat.lock.peer_out(PeerId(name), f"{name} is gone", self.time, crashed=True)
            seat.generator.view_changed(self.time)
            self._follow(seat)

    def check(self) -> None:
        for seat in self.seats.values():
            seat.lock.check()
            seat.generator.check()

    # --- inside -----------------------------------------------------------------------------------

    def _seat(self, name: PeerId, view: str, rng: Random, book: GroupBook) -> None:
        here = [PeerId(other) for other in view]
        claims: dict[Ticket, Ticket] = {}
        ended: list[GroupEnded] = []

        def note(effect: Effect) -> None:
            match effect:
                case Send(target=target, message=message):
                    self.wire.append((name, target, message))
                case GroupEnded():
                    ended.append(effect)
                case Average() | Abandon():
                    pass
                case _:
                    raise AssertionError(f"a lock does not emit {effect}")

        def claim(proposal: Ticket, others: Sequence[PeerId]) -> None:
            claims[lock.request(others, len(others), self.time, GOSSIP)] = proposal

        lock = GroupLock(name, 1, LockConfig(), note, AnyGroup(), AnyGroup().admits)
        generator = WatchedGenerator(
            name,
            1,
            book,
            lambda: tuple(here),
            claim,
            lambda target, message: self.wire.append((name, target, message)),
            rng,
        )
        generator.turns = []
        self.seats[name] = Seat(lock, generator, here, claims, ended)

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
            seat.generator.claim_ended(seat.claims.pop(effect.ticket), effect.outcome, self.time)

    def _due(self, seat: Seat) -> list[Seconds]:
        deadlines = (seat.lock.next_deadline(), seat.generator.next_deadline())
        return [at for at in deadlines if at is not None]
