"""Locks and generators of peers a, b, c, ...; messages wait until the test lets them through."""

from dataclasses import dataclass, field
from random import Random

from p2ptrain.core.effects import Abandon, Average, Effect, GroupEnded, Send, TurnEnded
from p2ptrain.core.events import Outcome
from p2ptrain.core.group_book import GroupBook
from p2ptrain.core.group_generator import GroupGenerator
from p2ptrain.core.group_lock import GroupLock
from p2ptrain.core.lock_state import InGroup, LockConfig
from p2ptrain.core.messages import Ask, Propose, Settle
from p2ptrain.ids import PeerId, Seconds, Ticket

RESEND_S = 0.25
LAPSE_S = 20.0


@dataclass
class Seat:
    """One peer."""

    lock: GroupLock
    generator: GroupGenerator
    view: list[PeerId]
    turns: list[Outcome] = field(default_factory=list)
    groups: list[tuple[PeerId, ...]] = field(default_factory=list)


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
            self[name].generator.follow(self.time)

    def deliver(self, index: int = 0, *, keep: bool = False) -> None:
        source, target, message = self.wire[index] if keep else self.wire.pop(index)
        if target not in self.seats:
            return
        seat = self[target]
        if isinstance(message, Ask | Propose | Settle):
            seat.generator.receive(PeerId(source), message, self.time)
        else:
            seat.lock.receive(PeerId(source), message, self.time)  # type: ignore[arg-type]
        seat.generator.follow(self.time)

    def settle(self) -> None:
        """Everything is delivered, in order, and every average ends."""
        while self.wire or self.complete():
            while self.wire:
                self.deliver()
            for ticket in self.complete():
                self.finish(ticket)

    def complete(self) -> list[Ticket]:
        """The groups all of whose members are in them: their slices can arrive."""
        tickets: dict[Ticket, list[str]] = {}
        for name, seat in self.seats.items():
            if isinstance(seat.lock.state, InGroup):
                tickets.setdefault(seat.lock.state.ticket, []).append(name)
        states = {t: self[names[0]].lock.state for t, names in tickets.items()}
        return [t for t, s in states.items() if sorted(tickets[t]) == sorted(s.members)]  # type: ignore[union-attr]

    def finish(self, ticket: Ticket) -> None:
        for seat in self.seats.values():
            if seat.lock.holds(ticket, self.time):
                seat.groups.append(seat.lock.state.members)  # type: ignore[union-attr]
                seat.lock.average_ended(ticket, Outcome.DONE, "", self.time)
                seat.generator.average_ended(Outcome.DONE)
                seat.generator.follow(self.time)

    def tick(self) -> None:
        """The next timer fires."""
        at = min((at for seat in self.seats.values() for at in self._due(seat)), default=self.time)
        self.time = max(self.time, at)
        for seat in tuple(self.seats.values()):
            if min(self._due(seat), default=self.time + 1) <= self.time:
                seat.lock.handle_timer(self.time)
                seat.generator.handle_timer(self.time)
                seat.generator.follow(self.time)

    def die(self, name: str) -> None:
        """Everybody hears of it at once."""
        del self.seats[name]
        for seat in self.seats.values():
            if PeerId(name) in seat.view:
                seat.view.remove(PeerId(name))
            seat.lock.peer_gone(PeerId(name), f"{name} is gone", self.time)
            seat.generator.view_changed(self.time)
            seat.generator.follow(self.time)

    def check(self) -> None:
        for seat in self.seats.values():
            seat.lock.check()
            seat.generator.check()

    # --- inside -----------------------------------------------------------------------------------

    def _seat(self, name: PeerId, view: str, rng: Random, book: GroupBook) -> None:
        here = [PeerId(other) for other in view]

        def note(effect: Effect) -> None:
            match effect:
                case Send(target=target, message=message):
                    self.wire.append((name, target, message))
                case TurnEnded(outcome=outcome):
                    self[name].turns.append(outcome)
                case GroupEnded():
                    self[name].generator.claim_ended(effect)
                case Average() | Abandon():
                    pass
                case _:
                    raise AssertionError(f"neither a lock nor a generator emits {effect}")

        lock = GroupLock(name, 1, LockConfig(), note)
        generator = GroupGenerator(
            name,
            1,
            RESEND_S,
            LAPSE_S,
            book,
            lambda: tuple(here),
            lambda members, now: lock.request(members, len(members), now),
            note,
            rng,
        )
        self.seats[name] = Seat(lock, generator, here)

    def _due(self, seat: Seat) -> list[Seconds]:
        deadlines = (seat.lock.next_deadline(), seat.generator.next_deadline())
        return [at for at in deadlines if at is not None]
