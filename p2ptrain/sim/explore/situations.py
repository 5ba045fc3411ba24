"""Enumerate all situations of the groups of a few peers: every order of events, with some faults.

A **situation** is everything that decides what can happen next: each peer's groups and its view of
the others, the messages in flight, the requests that were made, the progress of each trainer, the
remaining faults, and each ticket's history (`explore/ticket_history.py`, which also states what
must hold). `Situations.steps` lists all steps that are possible in a situation, and where each
leads; `explore/search.py` searches. Peers, messages and histories are numbered
(`explore/peers.py`); a situation is a row of numbers, packed into bytes.

**What can happen.** Any message in flight arrives, in any order. A peer makes a request that the
scenario gives it, at any moment. Its trainer arrives at the barrier or at a version of the
schedule, at any moment after its last average has ended. A timer that is due fires. An average
ends: successfully if all members have been in the group at one moment, since only then all chunks
can have moved; broken if a member will not come any more. A peer that is sent for the state of
another has received it, if that one still stands at the boundary, or cannot get it. A peer hears
that another one's trainer has ended, and does not wait for it any more. Time passes, to the next
deadline of any peer, and not beyond a deadline of a peer that is awake. And, each for one of the
faults of the budget:

* a message is *lost*, or *arrives and stays in flight* to arrive again, or is *held back*: from
  then on it may arrive at any moment, however late, or never;
* a peer *crashes*, silently; each other one hears of it at any later moment, or never (where there
  are trainers: in the end, since a peer that waits for all depends on membership for this);
* a peer *falls asleep* when its timer is due: time passes, and nothing happens at this peer;
* an average *breaks*, for no reason that the groups can see.

A message that is sent while `copies` equal ones are in flight and not held back joins them: without
this bound the number of situations would be infinite where messages may be late. As the network may
always lose one, nothing impossible is explored.

**Clocks.** Time passes in whole ticks. Each peer's clock runs at one of two `rates`, in every
combination in which not all are equal, if there are two. Safety does not depend on clocks, as this
shows; only durations do. A timer that falls between two ticks fires at the later one, as real ones
do.

**What is left out, because it changes nothing.** A message to a crashed peer. A message about a
ticket that its receiver has left, and to which it does not react now: it never will, since the
memory of a ticket that was left does not change. The same for an offer that no longer exists.
Sentences for humans.
"""

import math
import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
from itertools import product
from typing import NamedTuple

from p2ptrain.core.effects import Average, Outcome, TakeState, VersionEnded
from p2ptrain.core.groups import PeerGroups
from p2ptrain.core.lock_state import InGroup
from p2ptrain.core.messages import Begin
from p2ptrain.core.purpose import Formation
from p2ptrain.core.scheduled import Arrival
from p2ptrain.ids import PeerId, Ticket
from p2ptrain.sim.explore import scenario as plans
from p2ptrain.sim.explore import ticket_history
from p2ptrain.sim.explore.peers import (
    Asks,
    CatchesUp,
    Ends,
    Event,
    HearsDead,
    HearsDone,
    Interned,
    Local,
    Meets,
    Move,
    Peers,
    Sent,
    Visits,
    Wakes,
    say,
)
from p2ptrain.sim.explore.scenario import Fault, Scenario, Ticks
from p2ptrain.sim.explore.ticket_history import Role, TicketHistory, UnsafeError, with_one
from p2ptrain.sim.explore.wire import AGES, Wire, each, grow_old, oldest, put, without


class Trainer(NamedTuple):
    """The progress of one peer's trainer."""

    next: int = 0
    """The version that it arrives at next, or waits with; in a schedule, its index."""
    lineage: int = 0
    waits: bool = False


class Course(NamedTuple):
    """The part of a situation outside of the peers' groups."""

    rates: tuple[int, ...]
    asked: int
    """One bit for each request that was made."""
    trainers: tuple[Trainer, ...]
    """The scenario's trainers, in order."""
    faults: int
    """The number of faults that may still occur."""
    pauses: tuple[Ticks, ...]
    """How long each peer may still sleep; 0: it is awake."""
    grave: bool
    """A peer has crashed or slept."""
    slack: Ticks
    """The ticks that may still pass while another step is possible."""


class Here(NamedTuple):
    """A situation, unpacked."""

    locals: tuple[int, ...]
    histories: int
    course: int
    wire: Wire


class Kind(IntEnum):
    """The kind of a step.

    Once no more faults occur and no more requests are made, the first possible kind in this order
    is taken: the *fair continuation*.
    """

    MAY = 0
    DELIVER = 1
    END = 2
    ARRIVE = 3
    HEAR = 4
    TIMER = 5
    PASS = 6


COULD_GO_ON = (Kind.END, Kind.ARRIVE, Kind.HEAR)
"""As long as such a step is possible, passing time uses up slack."""


class Step(NamedTuple):
    """One possible step, and where it leads."""

    kind: Kind
    after: bytes
    ticks: Ticks
    verb: str
    peer: int
    event: int


class Unsafe(NamedTuple):
    """A step that violates a rule."""

    why: str
    verb: str
    peer: int
    event: int


NOTHING = -1
"""No event of a peer."""


class Situations:
    """The situations of one scenario; its numbers are valid only there.

    Args:
        make_groups: another class of groups; the tests plant bugs in it.
    """

    def __init__(self, scenario: Scenario, make_groups: type[PeerGroups] = PeerGroups) -> None:
        self.scenario = scenario
        self.peers = Peers(scenario, make_groups)
        self._count = len(scenario.peers)
        self._wakes = self.peers.events.number(Wakes())
        self._trains = {
            self.peers.names.index(PeerId(t.peer)): n for n, t in enumerate(scenario.trainers)
        }
        self._histories: Interned[tuple[TicketHistory, ...]] = Interned()
        self._courses: Interned[Course] = Interned()
        self._layouts: list[struct.Struct] = []
        # Caches of computed results.
        self._noted: dict[tuple[int, int, int], int] = {}
        self._idle: dict[tuple[int, int, int], bool] = {}
        self._fewer: dict[tuple[int, Fault], int | None] = {}

    # --- for the search ---------------------------------------------------------------------------

    def roots(self) -> list[bytes]:
        """All peers are free and nothing is in flight; one root for each choice of clocks."""
        choices = list(product(self.scenario.rates, repeat=self._count))
        if len(choices) > 1:
            choices = [rates for rates in choices if len(set(rates)) > 1]
        awake = (0,) * self._count
        trainers = tuple(
            Trainer(plan.first, plan.lineage) if isinstance(plan, plans.Meets) else Trainer()
            for plan in self.scenario.trainers
        )
        faults, slack = self.scenario.faults, self.scenario.slack or 0
        courses = [Course(rates, 0, trainers, faults, awake, False, slack) for rates in choices]
        histories = self._histories.number(())
        fresh = self.peers.fresh
        return [self._pack(fresh, histories, self._courses.number(now), ()) for now in courses]

    def steps(self, key: bytes) -> Iterator[Step | Unsafe]:
        """All possible steps in this situation, always in the same order."""
        here = self._unpack(key)
        yield from self._arrivals(here)
        could_go_on = False
        pauses = self._courses.values[here.course].pauses
        for peer, local in enumerate(here.locals):
            if local != self.peers.dead[peer]:
                for step in self._own_steps(here, peer):
                    if isinstance(step, Step) and step.kind in COULD_GO_ON:
                        could_go_on |= not pauses[peer]
                    yield step
        yield from self._time(here, could_go_on=could_go_on)

    def trouble(self, key: bytes) -> int:
        """Which of the scenario's `bounds` is binding here."""
        now = self._courses.values[self._unpack(key).course]
        return 2 if now.grave else int(now.faults < self.scenario.faults)

    def unfinished(self, key: bytes) -> str:
        """What is unfinished if nothing happens any more; empty if nothing is."""
        here, peers = self._unpack(key), self.peers
        names = peers.names
        waits = [
            f"{n} {w}" for n, at in zip(names, here.locals, strict=True) if (w := peers.waits(at))
        ]
        dead = [names[p] for p, n in enumerate(here.locals) if n == peers.dead[p]]
        trainers = self._courses.values[here.course].trainers
        for plan, trainer in zip(self.scenario.trainers, trainers, strict=True):
            if plan.peer not in dead and not self._has_ended(plan, trainer):
                waits.append(f"the trainer of {plan.peer} does not come to its end")
        histories = self._histories.values[here.histories]
        never = [s.ticket for s in histories if not s.answered and s.ticket.initiator not in dead]
        in_time = self.scenario.latency_ticks is not None and not self.trouble(key)
        if histories and in_time and not any(history.formed for history in histories):
            waits.append("no peer was in a group, and nothing went wrong")
        return "; ".join(waits + [f"the request of {ticket} does not end" for ticket in never])

    def words(self, key: bytes) -> tuple[list[str], list[str], Course]:
        """Each peer's state and each message in flight, in words; and the rest."""
        here, peers = self._unpack(key), self.peers
        states = [_words(peers.locals[number].groups) for number in here.locals]
        sent = [peers.events.values[item // AGES] for item in here.wire]
        wire = [say(message, peers.names) for message in sent if isinstance(message, Sent)]
        return states, wire, self._courses.values[here.course]

    # --- messages ---------------------------------------------------------------------------------

    def _arrivals(self, here: Here) -> Iterator[Step | Unsafe]:
        loses, repeats = self._less(here.course, Fault.LOSE), self._less(here.course, Fault.REPEAT)
        delays = None
        if self.scenario.latency_ticks is not None:
            delays = self._less(here.course, Fault.DELAY)
        for message in each(here.wire):
            event, peer = message.event, self.peers.target(message.event)
            yield self._act(here, Kind.DELIVER, "arrives", peer, event, wire=message.others)
            if loses is not None:
                after = self._pack(here.locals, here.histories, loses, message.others)
                yield Step(Kind.MAY, after, 0, "is lost", peer, event)
            if delays is not None and not message.is_late:
                after = self._pack(here.locals, here.histories, delays, message.late)
                yield Step(Kind.MAY, after, 0, "is held back", peer, event)
            if repeats is not None:
                verb = "arrives, and stays in flight"
                yield self._act(here, Kind.MAY, verb, peer, event, course=repeats)

    def _is_idle(self, event: int, local: int, histories: int) -> bool:
        """True if this message will never have an effect; the module's docstring says why."""
        key = (event, local, histories)
        known = self._idle.get(key)
        if known is None:
            known = self._idle[key] = self._does_nothing(event, local, histories)
        return known

    def _does_nothing(self, event: int, local: int, histories: int) -> bool:
        peer, sent = self.peers.locals[local].peer, self.peers.events.values[event]
        if local == self.peers.dead[peer]:
            return True
        assert isinstance(sent, Sent)
        return self._is_past(sent, local, histories) and self._changes_nothing(local, event)

    def _is_past(self, sent: Sent, local: int, histories: int) -> bool:
        """True if it concerns a ticket or an offer which its receiver has left for good."""
        peer, ticket = self.peers.locals[local].peer, sent.ticket
        if ticket is None:
            return False
        for history in self._histories.values[histories]:
            if history.ticket == ticket:
                return history.roles[peer] in (Role.OUT, Role.DONE)
        offer = self.peers.locals[local].offer
        return ticket.initiator == self.peers.names[peer] and (not offer or offer[0] != ticket)

    def _changes_nothing(self, local: int, event: int) -> bool:
        try:
            return self.peers.move(local, event).changes_nothing(local)
        except UnsafeError:
            return False

    # --- what a peer does, and what happens to it
    # ----------------------------------------------------

    def _own_steps(self, here: Here, peer: int) -> Iterator[Step | Unsafe]:
        local = self.peers.locals[here.locals[peer]]
        if local.held:
            yield from self._ends(here, local)
        if local.taking:
            yield self._catches_up(here, local)
        is_due = local.due_in is not None and local.due_in <= 0
        if is_due:
            yield self._act(here, Kind.TIMER, "", peer, self._wakes)
        now = self._courses.values[here.course]
        for number, ask in enumerate(self.scenario.asks):
            if ask.peer == self.peers.names[peer] and not now.asked >> number & 1:
                event = self.peers.events.number(Asks(number))
                asked = self._courses.number(now._replace(asked=now.asked | 1 << number))
                yield self._act(here, Kind.MAY, "", peer, event, course=asked)
        if peer in self._trains:
            yield from self._goes_on(here, peer, now)
        for other, number in enumerate(here.locals):
            if number == self.peers.dead[other]:
                yield from self._hears_gone(here, peer, other)
            elif other != peer and other in self._trains:
                yield from self._hears_done(here, peer, other, now)
        yield from self._mishaps(here, peer, is_due=is_due)

    def _ends(self, here: Here, local: Local) -> Iterator[Step | Unsafe]:
        histories = self._histories.values[here.histories]
        history = next(history for history in histories if history.ticket == local.held)
        number = self.peers.events.number
        if history.moved:
            event = number(Ends(history.ticket, Outcome.DONE))
            yield self._act(here, Kind.END, "", local.peer, event)
        event = number(Ends(history.ticket, Outcome.LOST))
        if any(self._stays_out(here, history, m) for m in history.members if m != local.peer):
            # Its streams are refused or fail, or nothing is heard of it.
            kind = Kind.MAY if history.moved else Kind.END
            yield self._act(here, kind, "", local.peer, event)
        elif (breaks := self._less(here.course, Fault.BREAK)) is not None:
            yield self._act(here, Kind.MAY, "", local.peer, event, course=breaks)

    def _stays_out(self, here: Here, history: TicketHistory, member: int) -> bool:
        """True if `member` has left the group, or will never enter it."""
        if history.roles[member] is not Role.NONE:
            return history.roles[member] in (Role.OUT, Role.DEAD)
        values = self.peers.events.values  # it has offered its slot: has it had the answer?
        for item in here.wire:
            sent = values[item // AGES]
            assert isinstance(sent, Sent)
            is_begin = isinstance(sent.message, Begin) and sent.ticket == history.ticket
            if is_begin and sent.target == member:
                return False
        return True

    def _catches_up(self, here: Here, local: Local) -> Step | Unsafe:
        """A donor gives its state as long as it stands at the boundary.

        That one is dead may be found out at once, but need not before membership says so: else it
        could be asked for its state again and again in no time.
        """
        assert local.taking
        version, lineage = local.taking.version, local.taking.lineage
        number = self.peers.names.index(local.taking.donor)
        donor = self.peers.locals[here.locals[number]].groups
        taken = donor is not None and donor.barrier.waits_with(version, lineage)
        is_news = donor is None and self.peers.knows(here.locals[local.peer], number)
        event = self.peers.events.number(CatchesUp(version, taken))
        course = self._courses.values[here.course]
        if taken:
            place = self._trains[local.peer]
            trainer = course.trainers[place]._replace(next=version, lineage=lineage)
            course = course._replace(trainers=with_one(course.trainers, place, trainer))
        kind = Kind.MAY if is_news else Kind.END
        return self._act(here, kind, "", local.peer, event, course=self._courses.number(course))

    def _goes_on(self, here: Here, peer: int, now: Course) -> Iterator[Step | Unsafe]:
        """The trainer has computed, and arrives."""
        place = self._trains[peer]
        plan, trainer = self.scenario.trainers[place], now.trainers[place]
        if trainer.waits or self._has_ended(plan, trainer):
            return
        event: Event
        if isinstance(plan, plans.Meets):
            event, arrived = Meets(trainer.next, trainer.lineage), trainer._replace(waits=True)
        else:
            event = Visits(plan.versions[trainer.next], plan.waits)
            arrived = trainer._replace(waits=True)
            if not plan.waits:
                arrived = trainer._replace(next=trainer.next + 1)
        course = now._replace(trainers=with_one(now.trainers, place, arrived))
        numbers = self.peers.events.number(event), self._courses.number(course)
        yield self._act(here, Kind.ARRIVE, "", peer, numbers[0], course=numbers[1])

    def _has_ended(self, plan: plans.Meets | plans.Visits, trainer: Trainer) -> bool:
        if isinstance(plan, plans.Meets):
            return trainer.next > plan.last
        return trainer.next == len(plan.versions)

    def _hears_gone(self, here: Here, peer: int, other: int) -> Iterator[Step | Unsafe]:
        """Let a peer hear of a crash, once that changes something."""
        event = self.peers.events.number(HearsDead(other))
        if self._trains:
            if self.peers.knows(here.locals[peer], other):
                yield self._act(here, Kind.HEAR, "", peer, event)
        elif not self._changes_nothing(here.locals[peer], event):
            yield self._act(here, Kind.MAY, "", peer, event)

    def _hears_done(
        self, here: Here, peer: int, other: int, now: Course
    ) -> Iterator[Step | Unsafe]:
        place = self._trains[other]
        ended = self._has_ended(self.scenario.trainers[place], now.trainers[place])
        if ended and self.peers.knows(here.locals[peer], other):
            event = self.peers.events.number(HearsDone(other))
            yield self._act(here, Kind.HEAR, "", peer, event)

    def _mishaps(self, here: Here, peer: int, *, is_due: bool) -> Iterator[Step]:
        locals_, histories, course, wire = here
        if (crashed := self._less(course, Fault.CRASH)) is not None:
            now = self._courses.values[crashed]
            now = now._replace(grave=True, pauses=with_one(now.pauses, peer, 0))
            told = tuple(
                ticket_history.mark_dead(history, peer)
                for history in self._histories.values[histories]
            )
            after = self._pack(
                with_one(locals_, peer, self.peers.dead[peer]),
                self._histories.number(told),
                self._courses.number(now),
                without(wire, lambda event: self.peers.target(event) == peer),
            )
            yield Step(Kind.MAY, after, 0, "crashes", peer, NOTHING)
        sleeps = self._less(course, Fault.PAUSE)
        if is_due and sleeps is not None and not self._courses.values[course].pauses[peer]:
            now = self._courses.values[sleeps]
            pauses = with_one(now.pauses, peer, self._longest_pause)
            asleep = self._courses.number(now._replace(pauses=pauses, grave=True))
            after = self._pack(locals_, histories, asleep, wire)
            yield Step(Kind.MAY, after, 0, "falls asleep", peer, NOTHING)

    @property
    def _longest_pause(self) -> Ticks:
        """The longest pause, in which every deadline of a peer can pass."""
        config = self.scenario.config
        return self.scenario.longest(config.lease_s + config.resend_s)

    # --- time -------------------------------------------------------------------------------------

    def _time(self, here: Here, *, could_go_on: bool) -> Iterator[Step]:
        """Let time pass to the next moment at which a peer has something to do."""
        now = self._courses.values[here.course]
        ticks = self._next_moment(here, now)
        slack = now.slack - ticks if could_go_on and self.scenario.slack is not None else now.slack
        if ticks <= 0 or slack < 0:
            return
        later = tuple(
            self.peers.later(number, ticks * rate)
            for number, rate in zip(here.locals, now.rates, strict=True)
        )
        course, wire = here.course, here.wire
        if any(now.pauses) or slack != now.slack:
            pauses = tuple(max(0, pause - ticks) for pause in now.pauses)
            course = self._courses.number(now._replace(pauses=pauses, slack=slack))
        if wire and self.scenario.latency_ticks is not None:
            wire = grow_old(wire, ticks, lambda event: self._sleeps(event, now))
        after = self._pack(later, here.histories, course, wire)
        yield Step(Kind.PASS, after, ticks, "time passes", NOTHING, ticks)

    def _next_moment(self, here: Here, now: Course) -> Ticks:
        """The ticks until the next moment; 0 if a peer can act now, or none ever can."""
        moments = []
        for peer, number in enumerate(here.locals):
            due_in = self.peers.locals[number].due_in
            if now.pauses[peer]:  # it may wake up at any moment
                moments.append(self.scenario.shortest(self.scenario.config.resend_s))
            elif due_in is not None:
                moments.append(math.ceil(due_in / now.rates[peer]))
        latency = self.scenario.latency_ticks
        if moments and here.wire and latency is not None:
            age = oldest(here.wire, lambda event: self._sleeps(event, now))
            if age >= 0:
                moments.append(latency - age)
        return min(moments, default=0)

    def _sleeps(self, event: int, now: Course) -> bool:
        return now.pauses[self.peers.target(event)] > 0

    # --- one peer acts ----------------------------------------------------------------------------

    def _act(
        self,
        here: Here,
        kind: Kind,
        verb: str,
        peer: int,
        event: int,
        *,
        course: int | None = None,
        wire: Wire | None = None,
    ) -> Step | Unsafe:
        """Apply `event` to `peer`, with another course and other remaining messages if given."""
        locals_, histories = here.locals, here.histories
        before = locals_[peer]
        course = here.course if course is None else course
        wire = here.wire if wire is None else wire
        try:
            move = self.peers.move(before, event)
            locals_ = with_one(locals_, peer, move.after)
            if move.is_news:
                histories = self._note(histories, before, event, move, locals_)
            for average in move.averages:
                self._check_wait(average, before, course)
            for ended in move.versions:
                course = self._version_ended(course, peer, ended)
        except UnsafeError as error:
            return Unsafe(str(error), verb, peer, event)
        now = self._courses.values[course]
        if now.pauses[peer]:
            course = self._courses.number(now._replace(pauses=with_one(now.pauses, peer, 0)))
        if move.sent:
            wire = put(wire, move.sent, self.scenario.copies)
        if wire:
            target = self.peers.target
            wire = without(wire, lambda e: self._is_idle(e, locals_[target(e)], histories))
        return Step(kind, self._pack(locals_, histories, course, wire), 0, verb, peer, event)

    def _note(
        self, histories: int, before: int, event: int, move: Move, locals_: tuple[int, ...]
    ) -> int:
        """Continue the histories of the tickets that one peer's move concerns."""
        key = (histories, before, event)
        known = self._noted.get(key)
        if known is None or move.averages:  # an average depends on the other peers too
            told = list(self._histories.values[histories])
            known_tickets = [history.ticket for history in told]
            new = [ticket for ticket in move.requested if ticket not in known_tickets]
            told += [ticket_history.begun(ticket, self._count) for ticket in new]
            told.sort(key=lambda history: history.ticket)
            told = [self._continue(history, before, event, move) for history in told]
            if move.averages:
                told = [self._together(history, locals_) for history in told]
            known = self._noted[key] = self._histories.number(tuple(told))
        return known

    def _continue(
        self, history: TicketHistory, number: int, event: int, move: Move
    ) -> TicketHistory:
        before, after = self.peers.locals[number], self.peers.locals[move.after]
        peer, ticket, names = before.peer, history.ticket, self.peers.names
        moved_on = before.current != after.current
        if moved_on and before.current == ticket:
            happened = self.peers.events.values[event]
            how = happened.outcome if isinstance(happened, Ends) else move.abandoned
            history = ticket_history.leave(history, peer, how, names)
        if moved_on and after.current == ticket:
            history = ticket_history.promise(history, peer, names)
        for average in move.averages:
            if average.ticket == ticket:
                if ticket.initiator != names[peer] and before.current != ticket:
                    self._check_offer(before, ticket)
                offered = _offered(after, names)
                lapsed = before.lapsed and before.current == ticket
                history = ticket_history.enter(
                    history, peer, average, names, offered=offered, lapsed=lapsed
                )
        for _ in range(move.answered.count(ticket)):
            history = ticket_history.answer(history)
        return history

    def _check_offer(self, before: Local, ticket: Ticket) -> None:
        if not before.offer or before.offer[1] != ticket.initiator:
            name = self.peers.names[before.peer]
            raise UnsafeError(f"{name} enters {ticket} without being promised to it")

    def _check_wait(self, average: Average, number: int, course: int) -> None:
        """Check that a barrier's members wait with its version; other versions begin once."""
        purpose, before = average.purpose, self.peers.locals[number]
        name, groups = self.peers.names[before.peer], before.groups
        if purpose.formation is Formation.BARRIER:
            trainer = self._courses.values[course].trainers[self._trains[before.peer]]
            if trainer != (purpose.version, purpose.lineage, True):
                raise UnsafeError(f"{name} enters {average.ticket} and does not wait for it")
        begun = groups.wait_avoiding.begun if groups else 0
        if purpose.formation is Formation.WAIT_AVOIDING and purpose.version <= begun:
            raise UnsafeError(f"version {purpose.version} begins at {name} again")

    def _version_ended(self, number: int, peer: int, ended: VersionEnded) -> int:
        """End the wait of the trainer of `peer`."""
        course, place, name = (
            self._courses.values[number],
            self._trains[peer],
            self.peers.names[peer],
        )
        plan, trainer = self.scenario.trainers[place], course.trainers[place]
        if not trainer.waits:
            raise UnsafeError(f"an arrival of {name} ends twice")
        after = trainer.next + 1
        if isinstance(plan, plans.Meets) and (ended.version, ended.outcome) != (
            trainer.next,
            Outcome.DONE,
        ):
            raise UnsafeError(f"{name} waits with {trainer.next}, and is told {ended}")
        trainer = trainer._replace(next=after, waits=False)
        return self._courses.number(
            course._replace(trainers=with_one(course.trainers, place, trainer))
        )

    def _together(self, history: TicketHistory, locals_: tuple[int, ...]) -> TicketHistory:
        """Record that all members are in their group at one moment, so chunks can move."""
        members = [self.peers.locals[locals_[member]] for member in history.members]
        if members and all(member.held == history.ticket for member in members):
            return history._replace(moved=True)
        return history

    # --- numbers ----------------------------------------------------------------------------------

    def _less(self, course: int, fault: Fault) -> int | None:
        """The course with one such fault fewer to come; None if there is none left."""
        key = (course, fault)
        if key not in self._fewer:
            now = self._courses.values[course]
            fewer = None
            if now.faults and fault in self.scenario.kinds:
                fewer = self._courses.number(now._replace(faults=now.faults - 1))
            self._fewer[key] = fewer
        return self._fewer[key]

    def _layout(self, count: int) -> struct.Struct:
        while len(self._layouts) <= count:
            self._layouts.append(struct.Struct(f"{len(self._layouts)}I"))
        return self._layouts[count]

    def _pack(self, locals_: tuple[int, ...], histories: int, course: int, wire: Wire) -> bytes:
        numbers = (*locals_, histories, course, *wire)
        return self._layout(len(numbers)).pack(*numbers)

    def _unpack(self, key: bytes) -> Here:
        numbers, count = self._layout(len(key) // 4).unpack(key), self._count
        return Here(numbers[:count], numbers[count], numbers[count + 1], numbers[count + 2 :])


def _offered(local: Local, names: Sequence[PeerId]) -> tuple[int, ...]:
    """The members of this initiator's group by an offer."""
    assert local.groups
    state = local.groups.lock.state
    offers = state.offers if isinstance(state, InGroup) else ()
    return tuple(names.index(offer.initiator) for offer in offers)


def _words(groups: PeerGroups | None) -> str:
    """``free, waiting at 1``."""
    if groups is None:
        return "has crashed"
    words = [str(groups.lock.state)]
    match groups.barrier.state:
        case Arrival(version=version):
            words.append(f"waiting at {version}")
        case TakeState(version=version):
            words.append(f"catching up with {version}")
        case _:
            pass
    if arrival := groups.wait_avoiding.arrival:
        words.append(f"{'waiting for' if arrival.waits else 'at'} version {arrival.version}")
    return ", ".join(words)
