"""A handful of group locks, and messages between them that the test pushes by hand.

Nothing moves by itself: what a lock sends waits until the test delivers, drops or repeats it. Every
peer's clock shows something else, so that a time that crosses the wire by mistake is found out.

A peer that offers its slot says so as a formation would: at once, with `Arrive` or `Activate`, and
again when the test lets it.
"""

from dataclasses import dataclass

from p2ptrain.core.contribution import MODEL, Contribution
from p2ptrain.core.effects import Abandon, Average, Effect, GroupEnded, Outcome, Send
from p2ptrain.core.group_lock import GroupLock
from p2ptrain.core.lock_state import Granted, InGroup, LockConfig, Offered
from p2ptrain.core.messages import Activate, Arrive, Begin, Grant, SlotMessage
from p2ptrain.core.purpose import GOSSIP, Formation, Purpose, What
from p2ptrain.ids import PeerId, Seconds, Ticket
from tests.helpers.everyone import AnyGroup

CLOCKS = {"a": 0.0, "b": 1024.0, "c": 17.5, "d": 300.25, "e": 4096.0}  # exact in binary

BARRIER = Purpose(Formation.BARRIER, What.GRADIENTS, version=3, lineage=7)


def of_schedule(version: int) -> Purpose:
    """What a trainer waits for at this version of a schedule."""
    return Purpose(Formation.WAIT_AVOIDING, What.MODELS, version)


class Choice(AnyGroup):
    """What one peer takes part in and what it states, as the test says."""

    def __init__(self) -> None:
        self.refused: list[Purpose] = []
        self.stated: dict[Purpose, Contribution] = {}
        self.asked: list[Purpose] = []
        """For what it was asked to state something, in order."""
        self.weights: tuple[int, ...] = ()
        self.samples_of_others = 0

    def admits(self, source: PeerId, purpose: Purpose) -> bool:
        return purpose not in self.refused

    def contribution(self, purpose: Purpose) -> Contribution:
        self.asked.append(purpose)
        return self.stated.get(purpose, MODEL)

    def weigh(self, members: object) -> tuple[int, ...]:
        return self.weights

    def outside_samples(self, members: object) -> int:
        return self.samples_of_others


@dataclass
class InFlight:
    source: str
    target: str
    message: SlotMessage | Arrive | Activate

    def __str__(self) -> str:
        return f"{self.source} -> {self.target} {type(self.message).__name__}"


class Trio:
    """Locks named ``a``, ``b``, ``c``, ...; `wire` is what has been sent and not arrived."""

    def __init__(self, names: str = "abc", config: LockConfig | None = None) -> None:
        self.config = config or LockConfig()
        self.time: Seconds = 0.0
        self.wire: list[InFlight] = []
        self.locks: dict[str, GroupLock] = {}
        self.choices: dict[str, Choice] = {}
        self.paused: dict[str, None] = {}
        self.entered: list[tuple[str, Ticket]] = []
        self.averages: dict[tuple[str, Ticket], Average] = {}
        self.abandoned: dict[tuple[str, Ticket], Outcome] = {}
        self.ended: dict[Ticket, Outcome] = {}
        self.reasons: dict[Ticket, str] = {}
        self._granted: dict[tuple[str, Ticket], None] = {}
        self._offered: dict[Ticket, str] = {}  # to whom
        self._said: dict[str, Ticket] = {}  # each peer's last offer that is on its way, or was
        self._lives: dict[str, int] = {}
        for name in names:
            self.start(name)

    # --- what a test does -------------------------------------------------------------------------

    def start(self, name: str) -> None:
        """(Re)start a peer: it knows nothing, and counts under a new incarnation."""
        self._lives[name] = self._lives.get(name, 0) + 1
        self._said.pop(name, None)
        self.choices[name] = Choice()
        self.locks[name] = GroupLock(
            PeerId(name),
            self._lives[name],
            self.config,
            lambda effect: self._note(name, effect),
            self.choices[name],
            self.choices[name].admits,
        )

    def crash(self, name: str) -> None:
        """The peer is no more; what it has sent may still arrive, what was sent to it is lost."""
        del self.locks[name]
        self.paused.pop(name, None)
        self.wire = [sent for sent in self.wire if sent.target != name]
        self.entered = [entry for entry in self.entered if entry[0] != name]  # of this life only

    def request(
        self, name: str, candidates: str, needed: int = 0, purpose: Purpose = GOSSIP
    ) -> Ticket:
        """``request("a", "bc")``: a wants the group a, b, c; or itself and `needed` of them."""
        peers = [PeerId(c) for c in candidates]
        count = needed or len(candidates)
        return self.locks[name].request(peers, count, self.clock(name), purpose)

    def offer(self, name: str, to: str, purpose: Purpose = BARRIER) -> None:
        """The trainer of `name` waits, and offers its slot to the coordinator `to`."""
        self.locks[name].offer(PeerId(to), purpose, self.clock(name))
        self._follow(name)

    def say_again(self, name: str) -> None:
        """What a trainer that waits does from time to time, since its word may be lost."""
        self._said.pop(name, None)
        self._follow(name)

    def withdraw_offer(self, name: str) -> None:
        """The trainer of `name` does not wait any more."""
        self.locks[name].withdraw_offer(self.clock(name))

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
            self._follow(name)
            if delivering:
                self.settle()
        self.time = until

    def finish(self, ticket: Ticket, outcome: Outcome = Outcome.DONE, by: str = "") -> None:
        """The average of `ticket` ends at the peers `by`, or at all that are in it."""
        for name in by or tuple(self.locks):
            self.locks[name].average_ended(ticket, outcome, outcome.value, self.clock(name))
            self._follow(name)

    def hear_dead(self, name: str, dead: str) -> None:
        """Membership tells `name` that `dead` crashed."""
        self.locks[name].peer_out(PeerId(dead), f"{dead} is gone", self.clock(name), crashed=True)
        self._follow(name)

    def hear_left(self, name: str, left: str) -> None:
        """Membership tells `name` that `left` said goodbye."""
        self.locks[name].peer_out(PeerId(left), f"{left} left", self.clock(name), crashed=False)
        self._follow(name)

    def withdraw(self, name: str) -> None:
        self.locks[name].withdraw("stopping", self.clock(name))
        self._follow(name)

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
        return self.locks[name].holds(ticket)

    def members(self, name: str, ticket: Ticket) -> str:
        """With whom `name` has entered that group."""
        return "".join(self.averages[name, ticket].members)

    def on_wire(self) -> list[str]:
        """``["a -> b Request", ...]`` in the order of sending."""
        return [str(message) for message in self.wire]

    def said(self, source: str, target: str) -> SlotMessage | Arrive | Activate:
        """The oldest message from `source` to `target` that has not arrived."""
        return next(m.message for m in self.wire if (m.source, m.target) == (source, target))

    def clock(self, name: str) -> Seconds:
        return CLOCKS[name] + self.time

    def check(self) -> None:
        """What must hold whatever happened."""
        for lock in self.locks.values():
            lock.check()
        assert len(set(self.entered)) == len(self.entered), f"entered twice: {self.entered}"

    # --- inside -----------------------------------------------------------------------------------

    def _due_at(self, name: str) -> Seconds | None:
        deadline = self.locks[name].next_deadline()
        return None if deadline is None else deadline - CLOCKS[name]

    def _take(self, source: str, target: str) -> InFlight:
        for index, message in enumerate(self.wire):
            if (message.source, message.target) == (source, target):
                return self.wire.pop(index)
        raise AssertionError(f"nothing from {source} to {target} in {self.on_wire()}")

    def _arrive(self, sent: InFlight) -> None:
        if sent.target in self.locks:
            source, message, lock = PeerId(sent.source), sent.message, self.locks[sent.target]
            before = lock.state
            match message:
                case Arrive(version=version, lineage=lineage, offer=Ticket() as offer):
                    purpose = Purpose(Formation.BARRIER, What.GRADIENTS, version, lineage)
                    lock.note_offer(source, offer, purpose, message.contribution)
                case Activate(version=version, offer=Ticket() as offer):
                    lock.note_offer(source, offer, of_schedule(version), message.contribution)
                case Arrive() | Activate():
                    pass
                case _:
                    lock.receive(source, message, self.clock(sent.target))
            if isinstance(message, Begin) and lock.holds(message.ticket):
                self._check_entry(sent.target, before, message)
            self._follow(sent.target)
        self.check()

    def _check_entry(self, name: str, before: object, begin: Begin) -> None:
        """`name` is in this group because it is promised to it, or offers just what was taken."""
        match before:
            case Granted(request=request):
                assert (request.ticket, request.purpose) == (begin.ticket, begin.purpose)
            case Offered(ticket=offer, purpose=purpose):
                assert offer == begin.offer
                assert begin.purpose.fulfils(purpose)
            case _:
                assert isinstance(before, InGroup), f"{name} was {before} and is in {begin.ticket}"
                assert before.ticket == begin.ticket

    def _follow(self, name: str) -> None:
        """A new offer is told to its coordinator at once."""
        state = self.locks[name].state
        if not isinstance(state, Offered) or self._said.get(name) == state.ticket:
            return
        self._said[name] = state.ticket
        self._offered[state.ticket] = state.to
        version, lineage, stated = state.purpose.version, state.purpose.lineage, state.contribution
        message: Arrive | Activate
        if state.purpose.formation is Formation.BARRIER:
            message = Arrive(version, lineage, state.ticket, stated)
        else:
            message = Activate(version, waits=True, offer=state.ticket, contribution=stated)
        self.wire.append(InFlight(name, state.to, message))

    def _note(self, name: str, effect: Effect) -> None:
        match effect:
            case Send(target=target, message=message):
                if isinstance(message, Grant):
                    self._granted[name, message.ticket] = None
                if isinstance(message, Begin) and message.offer:
                    assert message.offer.initiator == target
                    assert self._offered[message.offer] == name
                elif isinstance(message, Begin):
                    assert (target, message.ticket) in self._granted
                self.wire.append(InFlight(name, target, message))  # type: ignore[arg-type]
            case Average(ticket=ticket, purpose=purpose):
                self.entered.append((name, ticket))
                self.averages[name, ticket] = effect
                offering = self.locks[name]._offering
                if offering and purpose.fulfils(offering[1]):
                    self.locks[name].stop_offering()
            case Abandon(ticket=ticket, outcome=outcome):
                self.abandoned[name, ticket] = outcome
            case GroupEnded(ticket=ticket, outcome=outcome, why=why):
                assert ticket not in self.ended, f"{ticket} ended twice"
                self.ended[ticket] = outcome
                self.reasons[ticket] = why
            case _:
                raise AssertionError(f"a lock does not emit {effect}")
