"""All groups of a handful of peers, and messages between them that the test pushes by hand.

Each peer is a whole `PeerGroups`: its slot, its barrier and its share of the schedule. Nothing
moves by itself: what a peer sends waits until the test delivers, drops or repeats it, and an
average ends when the test says so. Every peer's clock shows something else, so that a time that
crosses the wire by mistake is found out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from p2ptrain.core.contribution import MODEL, Contribution
from p2ptrain.core.effects import (
    Abandon,
    Average,
    Effect,
    GroupEnded,
    Outcome,
    Send,
    TakeState,
    VersionEnded,
)
from p2ptrain.core.groups import PeerGroups
from p2ptrain.core.lock_state import InGroup, LockConfig
from p2ptrain.core.messages import FormationMessage
from p2ptrain.core.purpose import Formation, Purpose
from p2ptrain.core.wait_avoiding import Schedule
from p2ptrain.ids import PeerId, Seconds, Ticket

RESEND_S = 0.25
"""Of barriers and wait-avoiding groups."""

CLOCKS = {"a": 0.0, "b": 1024.0, "c": 17.5, "d": 300.25, "e": 4096.0, "f": 64.5}  # exact in binary


@dataclass
class InFlight:
    source: str
    target: str
    message: FormationMessage

    def __str__(self) -> str:
        return f"{self.source} -> {self.target} {type(self.message).__name__}"


@dataclass
class Guest:
    """One peer, what it asks of everything else (`GroupEnvironment`), and what it asked for."""

    name: PeerId
    view: list[str]
    groups: PeerGroups = field(init=False)
    has_model: bool = True
    states: Contribution = MODEL
    outside: int = 0
    """Samples of all others, as it knows."""
    averages: list[Average] = field(default_factory=list)
    entered: set[Ticket] = field(default_factory=set)
    """The groups of those averages that `Meeting.check` has looked at."""
    begun: float = -math.inf
    """The newest version of the schedule among them."""
    abandoned: list[tuple[Ticket, Outcome]] = field(default_factory=list)
    ended: list[tuple[int, Outcome]] = field(default_factory=list)
    """Of versions: of the barrier and of the schedule."""
    requests: dict[Ticket, Outcome] = field(default_factory=dict)
    taking: list[TakeState] = field(default_factory=list)

    def participants(self) -> Sequence[PeerId]:
        return tuple(PeerId(name) for name in sorted({*self.view, self.name}))

    trainees = participants

    def contribution(self, purpose: Purpose) -> Contribution:
        return self.states

    def weigh(self, members: Sequence[PeerId]) -> tuple[int, ...]:
        return ()

    def outside_samples(self, members: Sequence[PeerId]) -> int:
        return self.outside

    @property
    def group(self) -> InGroup | None:
        """What its slot is in."""
        state = self.groups.lock.state
        return state if isinstance(state, InGroup) else None


class Meeting:
    """Peers named ``a``, ``b``, ``c``, ...; `wire` is what has been sent and has not arrived."""

    def __init__(
        self, names: str, schedule: Schedule | None = None, config: LockConfig | None = None
    ) -> None:
        self.time: Seconds = 0.0
        self.config = config or LockConfig()
        self.schedule = schedule
        self.wire: list[InFlight] = []
        self.said: list[str] = []
        """Every message that was sent, as ``"a -> b Arrive"``."""
        self.guests: dict[str, Guest] = {}
        self._agreed: dict[Ticket, tuple[object, ...]] = {}
        for name in names:
            self.add(name, names)

    def __getitem__(self, name: str) -> Guest:
        return self.guests[name]

    def add(self, name: str, view: str, incarnation: int = 1) -> None:
        """A peer begins; the others have to be told (`see`)."""
        guest = Guest(PeerId(name), list(view))
        guest.groups = PeerGroups(
            guest.name,
            incarnation,
            self.config,
            RESEND_S,
            self.schedule,
            guest,
            lambda effect: self._note(guest, effect),
        )
        self.guests[name] = guest

    # --- what trainers do -------------------------------------------------------------------------

    def arrive(self, names: str, version: int, lineage: int = 0) -> None:
        """They wait at the barrier, one after the other."""
        for name in names:
            with self[name].groups.at(self.clock(name)):
                self[name].groups.barrier.arrive(version, lineage, self.clock(name))

    def arrive_at(self, names: str, version: int, *, waits: bool = True) -> None:
        """They are at a version of the schedule."""
        for name in names:
            groups, now = self[name].groups, self.clock(name)
            with groups.at(now):
                groups.wait_avoiding.arrive(version, now, waits=waits)

    def request(self, name: str, candidates: str, needed: int = 0) -> Ticket:
        """``request("a", "bc")``: a claims the group a, b, c; or itself and `needed` of them."""
        groups, now = self[name].groups, self.clock(name)
        with groups.at(now):
            return groups.lock.request(
                [PeerId(c) for c in candidates], needed or len(candidates), now
            )

    def finish(self, names: str, outcome: Outcome = Outcome.DONE) -> None:
        """The averages that these are in end at them."""
        for name in names:
            group = self[name].group
            assert group is not None, f"{name} is in no group: {self.states()}"
            self.end(name, group.ticket, outcome)

    def end(self, name: str, ticket: Ticket, outcome: Outcome = Outcome.DONE) -> None:
        """The average of this ticket ends at `name`, or has ended before."""
        self[name].groups.average_ended(ticket, outcome, outcome.value, self.clock(name))

    def run(self, names: str, version: int) -> None:
        """They all arrive at this version of the schedule, run it and are done with it."""
        self.arrive_at(names, version)
        self.settle()
        self.finish(names)
        self.settle()

    def take_state(self, name: str, version: int) -> None:
        """It holds the state that it was told to take over."""
        self._transferred(name, version, taken=True)

    def miss_state(self, name: str, version: int) -> None:
        """The state cannot be had."""
        self._transferred(name, version, taken=False)

    def withdraw(self, name: str) -> None:
        self[name].groups.withdraw("stopping", self.clock(name))

    # --- what membership says ---------------------------------------------------------------------

    def see(self, name: str, view: str) -> None:
        """Membership tells `name` who is here."""
        self[name].view[:] = view
        self[name].groups.view_changed(self.clock(name), participants=True, trainees=True)

    def die(self, name: str) -> None:
        """Everybody else hears of it at once; what was sent to it is lost."""
        del self.guests[name]
        self.wire = [sent for sent in self.wire if sent.target != name]
        for other in tuple(self.guests):
            self.hear_dead(other, name)

    def hear_dead(self, name: str, gone: str) -> None:
        """Membership tells `name` that `gone` crashed."""
        guest = self[name]
        view = "".join(guest.view).replace(gone, "")
        guest.view[:] = view
        guest.groups.peer_out(PeerId(gone), f"{gone} is gone", self.clock(name), crashed=True)
        self.see(name, view)

    def hear_left(self, name: str, left: str) -> None:
        """Membership tells `name` that `left` said goodbye."""
        guest = self[name]
        view = "".join(guest.view).replace(left, "")
        guest.view[:] = view
        guest.groups.peer_out(PeerId(left), f"{left} left", self.clock(name), crashed=False)
        self.see(name, view)

    def join(self, name: str) -> None:
        """A newcomer, of whom everybody hears at once."""
        view = "".join(self.guests) + name
        self.add(name, view)
        for other in self.guests:
            if other != name:
                self.see(other, view)

    # --- what the network does --------------------------------------------------------------------

    def deliver(self, source: str, target: str) -> None:
        """The oldest message from `source` to `target` arrives."""
        self._arrive(self.take(source, target))

    def deliver_at(self, index: int) -> None:
        """The message at this place on the wire arrives."""
        self._arrive(self.wire.pop(index))

    def deliver_all(self, kind: type[FormationMessage]) -> None:
        """Every message of this kind arrives, and those that this causes."""
        while found := [sent for sent in self.wire if isinstance(sent.message, kind)]:
            self.wire.remove(found[0])
            self._arrive(found[0])

    def take(self, source: str, target: str) -> InFlight:
        """Take the oldest message from `source` to `target` off the wire."""
        for index, sent in enumerate(self.wire):
            if (sent.source, sent.target) == (source, target):
                return self.wire.pop(index)
        raise AssertionError(f"nothing from {source} to {target} in {self.on_wire()}")

    def release(self, sent: InFlight) -> None:
        """What was taken off the wire arrives after all, or once more."""
        self._arrive(sent)

    def say(self, source: str, target: str, message: FormationMessage) -> None:
        """`target` hears this, whether or not `source` has said it."""
        self._arrive(InFlight(source, target, message))

    def settle(self) -> None:
        """Everything on its way arrives, and what that causes, and so on."""
        for _ in range(10_000):
            if not self.wire:
                return
            self.deliver_at(0)
        raise AssertionError(f"the peers talk for ever: {self.on_wire()[:20]}")

    def advance(self, duration_s: Seconds, *, delivering: bool = True) -> None:
        """Time passes, timers fire; by default, what is sent meanwhile arrives at once."""
        until = self.time + duration_s
        while True:
            at, name = min(self.due(), default=(until + 1, ""))
            if at > until:
                break
            self.time = max(self.time, at)
            self.fire(name)
            if delivering:
                self.settle()
        self.time = until

    def due(self) -> list[tuple[Seconds, str]]:
        deadlines = [(guest.groups.next_deadline(), name) for name, guest in self.guests.items()]
        return [(at - CLOCKS[name], name) for at, name in deadlines if at is not None]

    def fire(self, name: str) -> None:
        """Its timer fires, if it is due."""
        groups = self[name].groups
        deadline = groups.next_deadline()
        if deadline is not None and deadline - CLOCKS[name] <= self.time:
            groups.handle_timer(max(self.clock(name), deadline))
            self.check()

    # --- what a test sees -------------------------------------------------------------------------

    def clock(self, name: str) -> Seconds:
        return CLOCKS[name] + self.time

    def groups(self) -> dict[str, str]:
        """``{"a": "2:ab", "c": "cd"}``: a is in version 2 with b; c in a claimed group with d."""
        found = {}
        for name, guest in self.guests.items():
            if guest.group:
                purpose = guest.group.begin.purpose
                members = "".join(guest.group.members)
                is_claimed = purpose.formation is Formation.CLAIMED
                found[name] = members if is_claimed else f"{purpose.version}:{members}"
        return found

    def together(self, names: str) -> Ticket:
        """All of `names` are in one group of exactly them; its ticket."""
        groups = [self[name].group for name in names]
        assert all(groups), self.states()
        assert {group.members for group in groups if group} == {tuple(sorted(names))}
        (ticket,) = {group.ticket for group in groups if group}
        return ticket

    def complete(self) -> dict[Ticket, tuple[PeerId, ...]]:
        """The groups all of whose members are in them, with those: their averages can end."""
        inside: dict[Ticket, list[str]] = {}
        members: dict[Ticket, tuple[PeerId, ...]] = {}
        for name, guest in self.guests.items():
            if guest.group:
                inside.setdefault(guest.group.ticket, []).append(name)
                members[guest.group.ticket] = guest.group.members
        return {t: members[t] for t, here in inside.items() if sorted(here) == sorted(members[t])}

    def states(self) -> dict[str, str]:
        """Each peer's slot in words."""
        return {name: str(guest.groups.lock.state) for name, guest in self.guests.items()}

    def on_wire(self) -> list[str]:
        """``["a -> b Request", ...]`` in the order of sending."""
        return [str(sent) for sent in self.wire]

    def versions(self, name: str) -> list[int]:
        """The versions of the schedule that began at `name`, in order."""
        averages = [average.purpose for average in self[name].averages]
        return [p.version for p in averages if p.formation is Formation.WAIT_AVOIDING]

    def is_catching_up(self, name: str) -> bool:
        return isinstance(self[name].groups.barrier.state, TakeState)

    def check(self) -> None:
        """What must hold whatever happened."""
        for name, guest in self.guests.items():
            guest.groups.check()
            for average in guest.averages[len(guest.entered) :]:  # the others were looked at
                assert average.ticket not in guest.entered, f"{name}: {average.ticket} twice"
                guest.entered.add(average.ticket)
                if average.purpose.formation is Formation.WAIT_AVOIDING:
                    version = average.purpose.version
                    assert version > guest.begun, f"{name} ran {version} after {guest.begun}"
                    guest.begun = version
                scalars = average.weights, average.contributions, average.outside_samples
                told = average.members, average.purpose, *scalars
                assert self._agreed.setdefault(average.ticket, told) == told, "told differently"

    # --- inside -----------------------------------------------------------------------------------

    def _transferred(self, name: str, version: int, *, taken: bool) -> None:
        groups, now = self[name].groups, self.clock(name)
        with groups.at(now):
            groups.barrier.state_transferred(version, now, taken=taken)

    def _arrive(self, sent: InFlight) -> None:
        if sent.target in self.guests:
            groups = self[sent.target].groups
            groups.receive(PeerId(sent.source), sent.message, self.clock(sent.target))
            self.check()

    def _note(self, guest: Guest, effect: Effect) -> None:
        match effect:
            case Send(target=target, message=message):
                sent = InFlight(guest.name, target, message)  # type: ignore[arg-type]
                assert sent.source != sent.target, f"{sent} to itself"
                self.said.append(str(sent))
                self.wire.append(sent)
            case Average():
                guest.averages.append(effect)
            case Abandon(ticket=ticket, outcome=outcome):
                guest.abandoned.append((ticket, outcome))
            case VersionEnded(version=version, outcome=outcome):
                guest.ended.append((version, outcome))
            case GroupEnded(ticket=ticket, outcome=outcome):
                assert ticket not in guest.requests, f"{ticket} ended twice"
                guest.requests[ticket] = outcome
            case TakeState():
                guest.taking.append(effect)
            case _:
                raise AssertionError(f"groups do not emit {effect}")
