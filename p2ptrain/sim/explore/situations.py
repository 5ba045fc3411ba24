"""All that can happen to a few group locks: every order of events, within a budget of faults.

A **situation** is everything that decides what can happen next: each peer's lock, the messages in
flight, the requests that were made, the faults that are left, and each ticket's story
(`explore/story.py`, which also says what must hold). `Situations.steps` lists all that can happen
in a situation, and where each step leads; `explore/search.py` searches. Locks, messages and stories
are numbered (`explore/locks.py`); a situation is a row of numbers, packed into bytes.

**What can happen.** Any message in flight arrives, in any order. A peer makes a request that the
scenario gives it, at any moment. A timer that is due fires. An average ends: done if all members
have been in the group at one moment, since only then all slices can have moved; broken if a member
will not come any more. Time passes, to the next deadline of anybody, and not beyond a deadline of
somebody who is awake. And, each for one of the faults of the budget:

* a message is *lost*, or *arrives and stays in flight* to arrive again, or is *held back*: from
  then on it may arrive at any moment, however late, or never;
* a peer *crashes*, silently; each other one hears that it is gone at any later moment, or never;
* a peer *falls asleep* when its timer is due: time passes, and nothing happens at this peer;
* an average *breaks*, for no reason that the lock can see.

A message that is sent while `copies` like it are in flight joins them: without this bound there
would be no end of situations where messages may be late. As the network may always lose one,
nothing impossible is explored.

**Clocks.** Time passes in whole ticks. In an exploration with drift each peer's clock runs at one
of two `rates`, the extremes that `clock_drift` allows, in every combination in which not all are
equal. Extremes suffice: every deadline is a sum of durations, each measured on one clock, so what
one of them leaves of another is linear in each rate, and is least at an end of its range. A timer
that falls between two ticks fires at the later one, as real ones do; `holds` is not rounded.

**What is left out, because it changes nothing.** A message to somebody who has crashed. A message
about a ticket that its receiver has left, and to which it does not react now: it never will, since
what is remembered of a ticket that was left does not change. Words for people.
"""

import math
import struct
from collections.abc import Iterator
from enum import IntEnum
from itertools import product
from typing import NamedTuple

from p2ptrain.core.events import Outcome
from p2ptrain.core.group_lock import GroupLock
from p2ptrain.ids import Ticket
from p2ptrain.sim.explore import story as stories_
from p2ptrain.sim.explore.locks import (
    Asks,
    Ends,
    HearsGone,
    Interned,
    Local,
    Locks,
    Move,
    Sent,
    Wakes,
    say,
)
from p2ptrain.sim.explore.scenario import Fault, Scenario, Ticks
from p2ptrain.sim.explore.story import Role, Story, UnsafeError, with_one
from p2ptrain.sim.explore.wire import AGES, Wire, each, grow_old, oldest, put, without


class Course(NamedTuple):
    """The part of a situation that is nobody's state."""

    rates: tuple[int, ...]
    asked: int
    """One bit for each request that was made."""
    faults: int
    """So many may still come."""
    pauses: tuple[Ticks, ...]
    """How long each peer may sleep on; 0: it is awake."""
    grave: bool
    """A peer has crashed or slept."""


class Here(NamedTuple):
    """A situation, unpacked."""

    locals: tuple[int, ...]
    stories: int
    course: int
    wire: Wire


class Kind(IntEnum):
    """What kind of step it is.

    When no more faults come and nobody asks any more, what goes on is the first that is possible of
    DELIVER, END, TIMER and PASS, in this order: the *fair continuation*.
    """

    MAY = 0
    DELIVER = 1
    END = 2
    TIMER = 3
    PASS = 4


class Step(NamedTuple):
    """One thing that can happen, and where it leads."""

    kind: Kind
    after: bytes
    ticks: Ticks
    verb: str
    peer: int
    event: int


class Unsafe(NamedTuple):
    """A step into something that must not be."""

    why: str
    verb: str
    peer: int
    event: int


NOTHING = -1
"""No event of a lock: it is not asked."""


class Situations:
    """The situations of one scenario; its numbers mean nothing to another one.

    Args:
        make_lock: another class of locks; the tests plant bugs in it.
    """

    def __init__(self, scenario: Scenario, make_lock: type[GroupLock] = GroupLock) -> None:
        self.scenario = scenario
        self.locks = Locks(scenario, make_lock)
        self._count = len(scenario.peers)
        self._wakes = self.locks.events.number(Wakes())
        self._stories: Interned[tuple[Story, ...]] = Interned()
        self._lapsed: list[tuple[Ticket, ...]] = []  # for each of the stories: its lapsed leases
        self._courses: Interned[Course] = Interned()
        self._layouts: list[struct.Struct] = []
        # What was worked out once is looked up from then on.
        self._noted: dict[tuple[int, int, int], int] = {}
        self._aged: dict[tuple[int, Ticks, tuple[int, ...]], int] = {}
        self._idle: dict[tuple[int, int, int], bool] = {}
        self._fewer: dict[tuple[int, Fault], int | None] = {}

    # --- for the search ---------------------------------------------------------------------------

    def roots(self) -> list[bytes]:
        """Everyone is free and nothing is in flight; one root for each choice of clocks."""
        choices = list(product(self.scenario.rates, repeat=self._count))
        if len(choices) > 1:
            choices = [rates for rates in choices if len(set(rates)) > 1]
        awake = (0,) * self._count
        courses = [Course(rates, 0, self.scenario.faults, awake, False) for rates in choices]
        stories = self._number_of_stories(())
        fresh = self.locks.fresh
        return [self._pack(fresh, stories, self._courses.number(now), ()) for now in courses]

    def steps(self, key: bytes) -> Iterator[Step | Unsafe]:
        """All that can happen in this situation, always in the same order."""
        here = self._unpack(key)
        yield from self._arrivals(here)
        for peer, local in enumerate(here.locals):
            if local != self.locks.dead[peer]:
                yield from self._own_steps(here, peer)
        yield from self._time(here)

    def trouble(self, key: bytes) -> int:
        """Which of the scenario's `bounds` is binding here."""
        now = self._courses.values[self._unpack(key).course]
        return 2 if now.grave else int(now.faults < self.scenario.faults)

    def unfinished(self, key: bytes) -> str:
        """What is missing if nothing happens any more; empty: nothing."""
        here, locks = self._unpack(key), self.locks
        states = zip(locks.names, self.words(key)[0], here.locals, strict=True)
        waits = [f"{name} is {state}" for name, state, n in states if not locks.is_free(n)]
        dead = [locks.names[p] for p, n in enumerate(here.locals) if n == locks.dead[p]]
        stories = self._stories.values[here.stories]
        never = [s.ticket for s in stories if not s.answered and s.ticket.initiator not in dead]
        in_time = self.scenario.latency_ticks is not None and not self.trouble(key)
        if stories and in_time and not any(story.formed for story in stories):
            waits.append("nobody was in a group, and nothing went wrong")
        return "; ".join(waits + [f"the request of {ticket} does not end" for ticket in never])

    def words(self, key: bytes) -> tuple[list[str], list[str], Course]:
        """Each peer's state and each message in flight, in words; and the rest."""
        here, locks = self._unpack(key), self.locks
        states = [
            str(lock.state) if (lock := locks.locals[number].lock) else "has crashed"
            for number in here.locals
        ]
        sent = [locks.events.values[item // AGES] for item in here.wire]
        wire = [say(message, locks.names) for message in sent if isinstance(message, Sent)]
        return states, wire, self._courses.values[here.course]

    # --- messages ---------------------------------------------------------------------------------

    def _arrivals(self, here: Here) -> Iterator[Step | Unsafe]:
        loses, repeats = self._less(here.course, Fault.LOSE), self._less(here.course, Fault.REPEAT)
        delays = None
        if self.scenario.latency_ticks is not None:
            delays = self._less(here.course, Fault.DELAY)
        for message in each(here.wire):
            event, peer = message.event, self.locks.target(message.event)
            yield self._act(here, Kind.DELIVER, "arrives", peer, event, wire=message.others)
            if loses is not None:
                after = self._pack(here.locals, here.stories, loses, message.others)
                yield Step(Kind.MAY, after, 0, "is lost", peer, event)
            if delays is not None and not message.is_late:
                after = self._pack(here.locals, here.stories, delays, message.late)
                yield Step(Kind.MAY, after, 0, "is held back", peer, event)
            if repeats is not None:
                verb = "arrives, and stays in flight"
                yield self._act(here, Kind.MAY, verb, peer, event, course=repeats)

    def _is_idle(self, event: int, local: int, stories: int) -> bool:
        """True if this message will never do anything; the module's docstring says why."""
        key = (event, local, stories)
        known = self._idle.get(key)
        if known is None:
            known = self._idle[key] = self._does_nothing(event, local, stories)
        return known

    def _does_nothing(self, event: int, local: int, stories: int) -> bool:
        peer, sent = self.locks.locals[local].peer, self.locks.events.values[event]
        if local == self.locks.dead[peer]:
            return True
        assert isinstance(sent, Sent)
        told = self._stories.values[stories]
        roles = [story.roles[peer] for story in told if story.ticket == sent.message.ticket]
        has_left = roles[0] in (Role.OUT, Role.DONE)
        return has_left and self.locks.move(local, event).changes_nothing(local)

    # --- what a peer does, and what befalls it ----------------------------------------------------

    def _own_steps(self, here: Here, peer: int) -> Iterator[Step | Unsafe]:
        local = self.locks.locals[here.locals[peer]]
        if local.averages:
            yield from self._ends(here, local)
        is_due = local.due_in is not None and local.due_in <= 0
        if is_due:
            yield self._act(here, Kind.TIMER, "", peer, self._wakes)
        now = self._courses.values[here.course]
        for number, ask in enumerate(self.scenario.asks):
            if ask.peer == self.locks.names[peer] and not now.asked >> number & 1:
                event = self.locks.events.number(Asks(number))
                asked = self._courses.number(now._replace(asked=now.asked | 1 << number))
                yield self._act(here, Kind.MAY, "", peer, event, course=asked)
        for other, number in enumerate(here.locals):
            if number == self.locks.dead[other]:
                yield from self._rumour(here, peer, other)
        yield from self._mishaps(here, peer, is_due=is_due)

    def _ends(self, here: Here, local: Local) -> Iterator[Step | Unsafe]:
        stories = self._stories.values[here.stories]
        story = next(story for story in stories if story.ticket == local.current)
        number = self.locks.events.number
        if story.moved and local.held == story.ticket:
            event = number(Ends(story.ticket, Outcome.DONE))
            yield self._act(here, Kind.END, "", local.peer, event)
        event = number(Ends(story.ticket, Outcome.LOST))
        others = [story.roles[member] for member in story.members if member != local.peer]
        if Role.OUT in others:  # its streams are refused
            kind = Kind.MAY if story.moved else Kind.END
            yield self._act(here, kind, "", local.peer, event)
        elif Role.DEAD in others:  # its streams fail, or nothing is heard of it
            yield self._act(here, Kind.MAY, "", local.peer, event)
        elif (breaks := self._less(here.course, Fault.BREAK)) is not None:
            yield self._act(here, Kind.MAY, "", local.peer, event, course=breaks)

    def _rumour(self, here: Here, peer: int, other: int) -> Iterator[Step | Unsafe]:
        """Hearing of a crash can wait until it changes something."""
        event = self.locks.events.number(HearsGone(other))
        if not self.locks.move(here.locals[peer], event).changes_nothing(here.locals[peer]):
            yield self._act(here, Kind.MAY, "", peer, event)

    def _mishaps(self, here: Here, peer: int, *, is_due: bool) -> Iterator[Step]:
        locals_, stories, course, wire = here
        if (crashed := self._less(course, Fault.CRASH)) is not None:
            now = self._courses.values[crashed]
            now = now._replace(grave=True, pauses=with_one(now.pauses, peer, 0))
            told = tuple(stories_.bury(story, peer) for story in self._stories.values[stories])
            after = self._pack(
                with_one(locals_, peer, self.locks.dead[peer]),
                self._number_of_stories(told),
                self._courses.number(now),
                without(wire, lambda event: self.locks.target(event) == peer),
            )
            yield Step(Kind.MAY, after, 0, "crashes", peer, NOTHING)
        sleeps = self._less(course, Fault.PAUSE)
        if is_due and sleeps is not None and not self._courses.values[course].pauses[peer]:
            now = self._courses.values[sleeps]
            pauses = with_one(now.pauses, peer, self._longest_pause)
            asleep = self._courses.number(now._replace(pauses=pauses, grave=True))
            after = self._pack(locals_, stories, asleep, wire)
            yield Step(Kind.MAY, after, 0, "falls asleep", peer, NOTHING)

    @property
    def _longest_pause(self) -> Ticks:
        """So long that every deadline of a peer can pass while it sleeps."""
        config = self.scenario.config
        return self.scenario.longest(config.lease_s + config.resend_s)

    # --- time -------------------------------------------------------------------------------------

    def _time(self, here: Here) -> Iterator[Step | Unsafe]:
        """Time passes to the next moment at which somebody has something to do."""
        now = self._courses.values[here.course]
        ticks = self._next_moment(here, now)
        if ticks <= 0:
            return
        later = tuple(
            self.locks.later(number, ticks * rate)
            for number, rate in zip(here.locals, now.rates, strict=True)
        )
        stories = self._grow_old(here.stories, ticks, now.rates)
        if why := self._overstays(later, stories):
            yield Unsafe(why, "time passes", NOTHING, ticks)
            return
        course, wire = here.course, here.wire
        if any(now.pauses):
            pauses = tuple(max(0, pause - ticks) for pause in now.pauses)
            course = self._courses.number(now._replace(pauses=pauses))
        if wire and self.scenario.latency_ticks is not None:
            wire = grow_old(wire, ticks, lambda event: self._sleeps(event, now))
        after = self._pack(later, stories, course, wire)
        yield Step(Kind.PASS, after, ticks, "time passes", NOTHING, ticks)

    def _next_moment(self, here: Here, now: Course) -> Ticks:
        """In how many ticks; none: somebody has something to do now, or never."""
        moments = []
        for peer, number in enumerate(here.locals):
            due_in = self.locks.locals[number].due_in
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
        return now.pauses[self.locks.target(event)] > 0

    def _grow_old(self, stories: int, ticks: Ticks, rates: tuple[int, ...]) -> int:
        key = (stories, ticks, rates)
        if key not in self._aged:
            told = self._stories.values[stories]
            durations_s = [ticks * rate for rate in rates]
            old = tuple(stories_.grow_old(story, durations_s) for story in told)
            self._aged[key] = self._number_of_stories(old)
        return self._aged[key]

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
        """`event` happens to `peer`, in another course and with other messages left if given."""
        locals_, stories = here.locals, here.stories
        before = locals_[peer]
        course = here.course if course is None else course
        wire = here.wire if wire is None else wire
        try:
            move = self.locks.move(before, event)
            locals_ = with_one(locals_, peer, move.after)
            if move.is_news:
                stories = self._note(stories, before, event, move, locals_)
        except UnsafeError as error:
            return Unsafe(str(error), verb, peer, event)
        if why := self._overstays(locals_, stories):
            return Unsafe(why, verb, peer, event)
        now = self._courses.values[course]
        if now.pauses[peer]:
            course = self._courses.number(now._replace(pauses=with_one(now.pauses, peer, 0)))
        if move.sent:
            wire = put(wire, move.sent, self.scenario.copies)
        if wire:
            target = self.locks.target
            wire = without(wire, lambda e: self._is_idle(e, locals_[target(e)], stories))
        return Step(kind, self._pack(locals_, stories, course, wire), 0, verb, peer, event)

    def _note(
        self, stories: int, before: int, event: int, move: Move, locals_: tuple[int, ...]
    ) -> int:
        """Continue the stories of the tickets with which one peer has just had to do."""
        key = (stories, before, event)
        known = self._noted.get(key)
        if known is None or move.averages:  # an average depends on the other peers too
            told = list(self._stories.values[stories])
            if move.requested:
                told.append(stories_.begun(move.requested, self._count))
            told = [self._continue(story, before, event, move) for story in told]
            if move.averages:
                told = [self._together(story, locals_) for story in told]
            known = self._noted[key] = self._number_of_stories(tuple(told))
        return known

    def _continue(self, story: Story, number: int, event: int, move: Move) -> Story:
        before, after = self.locks.locals[number], self.locks.locals[move.after]
        peer, ticket, names = before.peer, story.ticket, self.locks.names
        moved_on = before.current != after.current
        if moved_on and before.current == ticket:
            happened = self.locks.events.values[event]
            how = happened.outcome if isinstance(happened, Ends) else move.abandoned
            story = stories_.leave(story, peer, how, names)
        if moved_on and after.current == ticket:
            story = stories_.promise(story, peer, self.scenario.lease_s(ticket.initiator), names)
        for average in move.averages:
            if average.ticket == ticket:
                members = tuple(names.index(member) for member in average.members)
                story = stories_.enter(story, peer, members, names)
        for _ in range(move.answered.count(ticket)):
            story = stories_.answer(story)
        return story

    def _together(self, story: Story, locals_: tuple[int, ...]) -> Story:
        """Once all members are in their group at one moment, the slices can move."""
        members = [self.locks.locals[locals_[member]] for member in story.members]
        if members and all(member.held == story.ticket for member in members):
            return story._replace(moved=True)
        return story

    def _overstays(self, locals_: tuple[int, ...], stories: int) -> str:
        """Who holds a ticket of which a lease has lapsed; empty: nobody."""
        for ticket in self._lapsed[stories]:
            for peer, number in enumerate(locals_):
                if self.locks.locals[number].held == ticket:
                    told = self._stories.values[stories]
                    left = next(story.left for story in told if story.ticket == ticket)
                    holder, whose = self.locks.names[peer], self.locks.names[left.index(0)]
                    return f"{holder} holds {ticket} when the lease of {whose} has lapsed"
        return ""

    # --- numbers ----------------------------------------------------------------------------------

    def _number_of_stories(self, stories: tuple[Story, ...]) -> int:
        number = self._stories.number(stories)
        if number == len(self._lapsed):
            self._lapsed.append(tuple(story.ticket for story in stories if 0 in story.left))
        return number

    def _less(self, course: int, fault: Fault) -> int | None:
        """The course with one fault less to come; None if there is no such fault to come."""
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

    def _pack(self, locals_: tuple[int, ...], stories: int, course: int, wire: Wire) -> bytes:
        numbers = (*locals_, stories, course, *wire)
        return self._layout(len(numbers)).pack(*numbers)

    def _unpack(self, key: bytes) -> Here:
        numbers, count = self._layout(len(key) // 4).unpack(key), self._count
        return Here(numbers[:count], numbers[count], numbers[count + 1], numbers[count + 2 :])
