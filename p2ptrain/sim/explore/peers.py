"""Run the real groups of each peer, and cache their reaction to each event in each state.

The protocol is not written down a second time here. The reaction of a peer's `PeerGroups` to an
event is a function of their `frozen` state (`copies.py`). So a clone is run once, and the answer is
looked up from then on. States of peers and events are numbered.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeVar, assert_never

from p2ptrain.core.contribution import Contribution
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
from p2ptrain.core.lock_state import Free, Granted, InGroup, Offered
from p2ptrain.core.messages import (
    Activate,
    Arrive,
    CatchUp,
    Failed,
    FormationMessage,
    Message,
    Past,
)
from p2ptrain.core.purpose import Purpose
from p2ptrain.core.wait_avoiding import Round, Schedule
from p2ptrain.ids import PeerId, Seconds, Ticket
from p2ptrain.sim.explore import scenario as plans
from p2ptrain.sim.explore.copies import clone, frozen
from p2ptrain.sim.explore.scenario import Plan, Scenario
from p2ptrain.sim.explore.ticket_history import UnsafeError

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Sent:
    """A message, in flight and arriving. Peers are numbers here."""

    source: int
    target: int
    message: FormationMessage

    @property
    def ticket(self) -> Ticket | None:
        """The ticket or offer concerned; None if it concerns a version."""
        match self.message:
            case Arrive() | CatchUp() | Activate() | Past():
                return None
            case _:
                return self.message.ticket


@dataclass(frozen=True, slots=True)
class Asks:
    """A peer makes the request with this number."""

    number: int


@dataclass(frozen=True, slots=True)
class Meets:
    """A peer's trainer arrives at the barrier."""

    version: int
    lineage: int


@dataclass(frozen=True, slots=True)
class Visits:
    """A peer's trainer arrives at a version of the schedule."""

    version: int
    waits: bool


@dataclass(frozen=True, slots=True)
class Ends:
    """A peer's average ends."""

    ticket: Ticket
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class CatchesUp:
    """A peer has received the state that it was sent for, or cannot get it."""

    version: int
    taken: bool


@dataclass(frozen=True, slots=True)
class HearsDead:
    """A peer hears that another one has crashed."""

    other: int


@dataclass(frozen=True, slots=True)
class HearsDone:
    """A peer hears that another one's trainer has come to its end."""

    other: int


@dataclass(frozen=True, slots=True)
class Wakes:
    """A peer's timers fire."""


Event = Sent | Asks | Meets | Visits | Ends | CatchesUp | HearsDead | HearsDone | Wakes


@dataclass(frozen=True, slots=True)
class View:
    """Implements `GroupEnvironment`: one peer's view of the others."""

    number: int
    """This peer."""
    peers: tuple[PeerId, ...]
    meeting: tuple[PeerId, ...]
    """The peers that meet at the barrier."""
    has_model: bool = True

    def without(self, other: PeerId) -> "View":
        peers = tuple(peer for peer in self.peers if peer != other)
        meeting = tuple(peer for peer in self.meeting if peer != other)
        return replace(self, peers=peers, meeting=meeting)

    def participants(self) -> Sequence[PeerId]:
        return self.meeting

    def trainees(self) -> Sequence[PeerId]:
        return self.peers

    def contribution(self, purpose: Purpose) -> Contribution:
        """A different one for each peer, so that a mix-up is detected."""
        return Contribution(weight=self.number + 1)

    def weigh(self, members: Sequence[PeerId]) -> tuple[int, ...]:
        return ()

    def outside_samples(self, members: Sequence[PeerId]) -> int:
        return 0


class Local(NamedTuple):
    """One peer at one moment of its clock, and the parts of it that matter to others."""

    peer: int
    groups: PeerGroups | None
    """Never modified, only cloned; None: crashed."""
    view: View
    taking: TakeState | None
    """The state transfer that it waits for."""
    now: Seconds
    due_in: Seconds | None
    current: Ticket | None
    """The ticket that it collects for, is promised to, or averages in."""
    held: Ticket | None
    offer: tuple[Ticket, PeerId] | None
    """Its offer, and to whom."""
    wanted: tuple[Ticket, ...]
    """Its own requests that wait for their turn."""
    lapsed: bool
    """It is promised, and its lease has lapsed."""


class Move(NamedTuple):
    """The reaction of a peer in one state to one event."""

    after: int
    sent: tuple[int, ...]
    averages: tuple[Average, ...]
    answered: tuple[Ticket, ...]
    requested: tuple[Ticket, ...]
    versions: tuple[VersionEnded, ...]
    abandoned: Outcome | None
    """Why it left its group by itself, if it did."""
    is_news: bool
    """True if a history has to be continued."""

    def changes_nothing(self, before: int) -> bool:
        return self.after == before and not (self.sent or self.is_news or self.versions)


class Interned(Generic[T]):
    """Numbers values in the order of their first use."""

    def __init__(self) -> None:
        self.values: list[T] = []
        self._numbers: dict[T, int] = {}

    def number(self, value: T) -> int:
        number = self._numbers.setdefault(value, len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number


class Peers:
    """All states of all peers so far."""

    def __init__(self, scenario: Scenario, make_groups: type[PeerGroups]) -> None:
        self.names = tuple(PeerId(name) for name in scenario.peers)
        self.locals: list[Local] = []
        self.events: Interned[Event] = Interned()
        self._asks = scenario.asks
        self._lease_s = scenario.config.lease_s
        self._has_views = bool(scenario.trainers)
        self._numbers: dict[Hashable, int] = {}
        self._moves: list[dict[int, Move]] = []  # for each of `locals`, by event
        self._later: list[dict[Seconds, int]] = []  # for each of `locals`, by duration
        meeting = tuple(PeerId(t.peer) for t in scenario.trainers if isinstance(t, plans.Meets))
        views = [View(peer, self.names, meeting) for peer in range(len(self.names))]
        self.dead = tuple(
            self._number(peer, None, view, None, 0.0) for peer, view in enumerate(views)
        )
        schedule = _schedule(scenario.plan)
        # Clocks differ, so that a time sent in a message by mistake is detected.
        self.fresh = tuple(
            self._number(
                peer,
                make_groups(
                    self.names[peer],
                    1,
                    scenario.config,
                    scenario.barrier_resend_s,
                    schedule,
                    view,
                    _nobody,
                ),
                view,
                None,
                1024.0 * peer,
            )
            for peer, view in enumerate(views)
        )

    def move(self, number: int, event: int) -> Move:
        """The reaction of this peer to this event.

        Raises:
            UnsafeError: if it raises anything.
        """
        known = self._moves[number].get(event)
        if known is None:
            known = self._moves[number][event] = self._ask(self.locals[number], event)
        return known

    def later(self, number: int, duration_s: Seconds) -> int:
        """This peer after this much time on its clock."""
        known = self._later[number].get(duration_s)
        if known is None:
            local = self.locals[number]
            known = number
            if local.groups:
                now = local.now + duration_s
                known = self._number(local.peer, local.groups, local.view, local.taking, now)
            self._later[number][duration_s] = known
        return known

    def waits(self, number: int) -> str:
        """What this peer waits for; empty: nothing, it is free."""
        groups = self.locals[number].groups
        if groups is None:
            return ""
        slot = groups.lock.state
        if not isinstance(slot, Free):
            return f"is {slot}"
        if groups.barrier.state:
            return f"is at the barrier: {groups.barrier.state}"
        arrival = groups.wait_avoiding.arrival
        return f"is at {arrival}" if arrival and arrival.waits else ""

    def knows(self, number: int, other: int) -> bool:
        """True if `other` is alive in this peer's view."""
        return self.names[other] in self.locals[number].view.peers

    def target(self, event: int) -> int:
        """The receiver of this message."""
        sent = self.events.values[event]
        assert isinstance(sent, Sent)
        return sent.target

    # --- inside -----------------------------------------------------------------------------------

    def _ask(self, before: Local, number: int) -> Move:
        assert before.groups
        effects: list[Effect] = []
        event = self.events.values[number]
        view = self._see(before.view, event)
        groups = clone(before.groups, effects.append, view)
        try:
            asked = self._happen(groups, event, before.now)
            groups.check()
        except Exception as error:
            raise UnsafeError(f"{type(error).__name__}: {error}") from error
        taking = None if isinstance(event, CatchesUp) else before.taking
        for effect in effects:
            if isinstance(effect, TakeState):
                if taking:
                    raise UnsafeError(f"{self.names[before.peer]} takes two states at once")
                taking = effect
        after = self._number(before.peer, groups, view, taking, before.now)
        averages = tuple(effect for effect in effects if isinstance(effect, Average))
        answered = tuple(effect.ticket for effect in effects if isinstance(effect, GroupEnded))
        now = self.locals[after]
        requested = self._requested(before, now, (*answered, *asked))
        return Move(
            after,
            tuple(
                self._sent(before.peer, effect) for effect in effects if isinstance(effect, Send)
            ),
            averages,
            answered,
            requested,
            tuple(effect for effect in effects if isinstance(effect, VersionEnded)),
            next((effect.outcome for effect in effects if isinstance(effect, Abandon)), None),
            now.current != before.current or bool(averages or answered or requested),
        )

    def _requested(
        self, before: Local, after: Local, mentioned: tuple[Ticket, ...]
    ) -> tuple[Ticket, ...]:
        """Our requests that are new, in order."""
        current = (after.current,) if after.current else ()
        mine = {
            t for t in (*mentioned, *after.wanted, *current) if t.initiator == self._name(after)
        }
        return tuple(sorted(mine - {*before.wanted, before.current}))

    def _name(self, local: Local) -> PeerId:
        return self.names[local.peer]

    def _see(self, view: View, event: Event) -> View:
        """A peer's view after `event`."""
        if self._has_views and isinstance(event, HearsDead | HearsDone):
            return view.without(self.names[event.other])
        return view

    def _happen(self, groups: PeerGroups, event: Event, now: Seconds) -> tuple[Ticket, ...]:
        match event:
            case Sent(source=source, message=message):
                groups.receive(self.names[source], message, now)
            case Asks(number=number):
                ask = self._asks[number]
                candidates = [PeerId(candidate) for candidate in ask.candidates]
                with groups.at(now):
                    return (groups.lock.request(candidates, ask.needed, now),)
            case Meets(version=version, lineage=lineage):
                with groups.at(now):
                    groups.barrier.arrive(version, lineage, now)
            case Visits(version=version, waits=waits):
                with groups.at(now):
                    groups.wait_avoiding.arrive(version, now, waits=waits)
            case Ends(ticket=ticket, outcome=outcome):
                groups.average_ended(ticket, outcome, outcome.value, now)
            case CatchesUp(version=version, taken=taken):
                with groups.at(now):
                    groups.barrier.state_transferred(version, now, taken=taken)
            case HearsDead(other=other):
                groups.peer_out(self.names[other], "it crashed", now, crashed=True)
                if self._has_views:
                    groups.view_changed(now, participants=True, trainees=True)
            case HearsDone():
                groups.view_changed(now, participants=True, trainees=True)
            case Wakes():
                groups.handle_timer(now)
            case _:
                assert_never(event)
        return ()

    def _sent(self, source: int, effect: Send) -> int:
        target = self.names.index(effect.target)
        return self.events.number(Sent(source, target, _essence(effect.message)))

    def _number(
        self,
        peer: int,
        groups: PeerGroups | None,
        view: View,
        taking: TakeState | None,
        now: Seconds,
    ) -> int:
        state = (frozen(groups, now), view, taking) if groups else None
        number = self._numbers.setdefault((peer, state), len(self.locals))
        if number == len(self.locals):
            self.locals.append(_look(peer, groups, view, taking, now, self._lease_s))
            self._moves.append({})
            self._later.append({})
        return number


def say(sent: Sent, names: Sequence[PeerId]) -> str:
    """``Request of a#1 from a to b``."""
    match sent.message:
        case Arrive(version=version, offer=offer) | Activate(version=version, offer=offer):
            what = f" at {version}" + (f" with offer {offer}" if offer else "")
        case CatchUp(version=version) | Past(version=version):
            what = f" to {version}"
        case message:
            what = f" of {message.ticket}"
    return f"{type(sent.message).__name__}{what} from {names[sent.source]} to {names[sent.target]}"


def _look(
    peer: int,
    groups: PeerGroups | None,
    view: View,
    taking: TakeState | None,
    now: Seconds,
    lease_s: Seconds,
) -> Local:
    if groups is None:
        return Local(peer, None, view, None, now, None, None, None, None, (), lapsed=False)
    state, deadline = groups.lock.state, groups.next_deadline()
    return Local(
        peer,
        groups,
        view,
        taking,
        now,
        None if deadline is None else deadline - now,
        None if isinstance(state, Free | Offered) else state.ticket,
        state.ticket if isinstance(state, InGroup) and groups.lock.holds(state.ticket) else None,
        (state.ticket, state.to) if isinstance(state, Offered) else None,
        tuple(wish.ticket for wish in groups.lock._wishes),
        isinstance(state, Granted) and state.granted_at + lease_s <= now,
    )


def _schedule(plan: Plan) -> Schedule:
    def schedule(version: int, view: Sequence[PeerId], me: PeerId) -> Round:
        group = plan.groups[(version - 1) % len(plan.groups)] if plan.groups else None
        together = [peer for peer in view if group is None or peer in group]
        members = tuple(together) if me in together else (me,)
        rule = replace(plan.rule, waiting=min(plan.rule.waiting, len(members)))
        return Round(members, plan.what, rule)

    return schedule


def _essence(message: Message) -> FormationMessage:
    """The message without its sentences, on which nothing depends."""
    if isinstance(message, Failed):
        return replace(message, reason="")
    return message  # type: ignore[return-value]  # groups send nothing else


def _nobody(effect: Effect) -> None:
    raise AssertionError(f"groups that are no clone were touched: {effect}")
