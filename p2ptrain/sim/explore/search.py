"""Search all situations of a scenario, shortest histories first.

Every situation is visited once, breadth first, so that the first path to a situation is a shortest
one. The search looks for two things:

* *Unsafe*: a step that violates a rule (`explore/ticket_history.py`). The search stops there.
* *Stuck*: when all is visited, faults stop, and no peer makes a new request. From each situation
  two *fair continuations* are followed (everything in flight arrives, averages end, timers fire,
  time passes): one that always takes the message and the peer with the lowest number first, and one
  that takes the highest. Both consist of steps that the search has taken anyway, so following them
  from every situation means following one pointer from each. A situation is stuck if it does not
  lead to one in which all peers are free and every request has ended: if it leads to a dead end, or
  into a cycle. Without a fault, some peer must also have been in a group. The time it takes is
  measured, and bounded by `Scenario.bounds`: no time at all without a fault, so timers are needed
  only to recover from faults.

Every order of events leads to some situation, so the continuations begin everywhere. They leave out
schedules that avoid progress forever although every message arrives eventually.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from p2ptrain.sim.explore.scenario import Ticks
from p2ptrain.sim.explore.situations import Kind, Situations, Unsafe

NOWHERE = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Counterexample:
    """A path to a violation."""

    why: str
    path: tuple[int, ...]
    """The number of the root, then of each step among the possible ones."""
    turn: int | None = None
    """The fair continuation from there: lowest (0) or highest (1) first."""


@dataclass(frozen=True, slots=True)
class Findings:
    """What a search has found."""

    situations: int
    steps: int
    depth: int
    complete: bool
    unsafe: Counterexample | None
    stuck: Counterexample | None
    stuck_count: int
    late: Counterexample | None
    waits: tuple[Ticks, Ticks, Ticks]
    """The longest time until all peers are free: without a fault, with a lost or repeated message
    or a broken average, with a crash or a pause."""

    @property
    def counterexample(self) -> Counterexample | None:
        return self.unsafe or self.stuck or self.late

    @property
    def all_is_well(self) -> bool:
        return self.complete and not self.counterexample


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a search."""

    situations: int
    frontier: int
    depth: int


class Search:
    """One search; `run` it once."""

    def __init__(self, situations: Situations, most: int = 5_000_000) -> None:
        self._situations = situations
        self._most = most
        self._numbers: dict[bytes, int] = {}
        self._parents = array("I")
        self._choices = array("H")  # which of its parent's steps led here
        self._trouble = array("B")
        self._next = (array("I"), array("I"))  # along the two fair continuations
        self._ticks = (array("H"), array("H"))
        self._steps = 0
        self._depth = 0
        self._ends: dict[int, str] = {}  # where a fair continuation ends: what is unfinished there
        self._unsafe: Counterexample | None = None

    def run(self, tell: Callable[[Progress], None] = lambda _: None) -> Findings:
        """Visit all situations, or as many as allowed."""
        frontier: list[bytes] = []
        for root in self._situations.roots():
            self._visit(root, NOWHERE, 0, frontier)
        here = 0
        while frontier and not self._unsafe:
            following: list[bytes] = []
            for key in frontier:
                self._expand(here, key, following)
                here += 1
                if here % 4096 == 0:
                    tell(Progress(len(self._numbers), len(following), self._depth))
                if self._unsafe or len(self._numbers) > self._most:
                    break
            else:
                frontier = following
                self._depth += bool(frontier)
                continue
            break
        return self._findings(complete=here == len(self._numbers))

    def _expand(self, here: int, key: bytes, following: list[bytes]) -> None:
        best, first, last = 0, NOWHERE, NOWHERE
        first_ticks = last_ticks = choice = 0
        for choice, step in enumerate(self._situations.steps(key)):
            if isinstance(step, Unsafe):
                self._unsafe = Counterexample(step.why, (*self._path(here), choice))
                break
            kind, after, ticks, *_ = step
            there = self._visit(after, here, choice, following)
            if kind and (not best or kind <= best):
                if kind != best:
                    best, first, first_ticks = kind, there, ticks
                last, last_ticks = there, ticks
        self._steps += choice + 1
        # (A trainer that does not wait for its version repeats its arrival forever.)
        if not best or (best >= Kind.TIMER and not self._situations.unfinished(key)):
            self._ends[here] = self._situations.unfinished(key)
            first, last, first_ticks, last_ticks = here, here, 0, 0
        self._next[0].append(first)
        self._next[1].append(last)
        self._ticks[0].append(first_ticks)
        self._ticks[1].append(last_ticks)

    def _visit(self, key: bytes, parent: int, choice: int, following: list[bytes]) -> int:
        count = len(self._numbers)
        number = self._numbers.setdefault(key, count)
        if number == count:
            self._parents.append(parent)
            self._choices.append(choice)
            self._trouble.append(self._situations.trouble(key))
            following.append(key)
        return number

    def _path(self, number: int) -> tuple[int, ...]:
        """The path to a situation, beginning with the number of the root."""
        path: list[int] = []
        while (parent := self._parents[number]) != NOWHERE:
            path.append(self._choices[number])
            number = parent
        return (number, *reversed(path))

    # --- afterwards -------------------------------------------------------------------------------

    def _findings(self, *, complete: bool) -> Findings:
        stuck, stuck_count = None, 0
        late, waits = None, (0, 0, 0)
        if complete and not self._unsafe:
            ends = [self._continue(turn) for turn in (0, 1)]
            lost = [np.flatnonzero(~is_over) for is_over, _ in ends]
            stuck_count = len(np.union1d(*lost))
            if stuck_count:
                turn = min((0, 1), key=lambda turn: lost[turn].min(initial=NOWHERE))
                stuck = self._stuck(int(lost[turn][0]), turn)
            else:
                late, waits = self._measure([ticks for _, ticks in ends])
        return Findings(
            situations=len(self._numbers),
            steps=self._steps,
            depth=self._depth,
            complete=complete,
            unsafe=self._unsafe,
            stuck=stuck,
            stuck_count=stuck_count,
            late=late,
            waits=waits,
        )

    def _continue(self, turn: int) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Follow one fair continuation from everywhere: whether it ends well, and after how long.

        Each round doubles the number of steps that a pointer spans.
        """
        along = np.frombuffer(self._next[turn], np.uint32).astype(np.int64)
        ticks = np.frombuffer(self._ticks[turn], np.uint16).astype(np.int64)
        is_over = np.zeros(len(along), bool)
        is_over[[number for number, waits in self._ends.items() if not waits]] = True
        for _ in range(len(along).bit_length()):
            if is_over[along].all():
                break
            ticks += ticks[along]
            along = along[along]
        return is_over[along], ticks

    def _measure(
        self, ticks: list[NDArray[np.int64]]
    ) -> tuple[Counterexample | None, tuple[Ticks, Ticks, Ticks]]:
        """The longest waits, and the first one above its bound."""
        late, waits = None, [0, 0, 0]
        trouble = np.frombuffer(self._trouble, np.uint8)
        for grade, bound in enumerate(self._situations.scenario.bounds):
            for turn in (0, 1):
                places = np.flatnonzero(trouble == grade)
                waits[grade] = max(waits[grade], int(ticks[turn][places].max(initial=0)))
                over = places[ticks[turn][places] > bound]
                if over.size and not late:
                    took = int(ticks[turn][over[0]])
                    why = f"until everyone is free it takes {took} ticks, more than {bound}"
                    late = Counterexample(why, self._path(int(over[0])), turn)
        return late, (waits[0], waits[1], waits[2])

    def _stuck(self, number: int, turn: int) -> Counterexample:
        """The path to a stuck situation, and why it is stuck."""
        along, seen = self._next[turn], dict[int, None]()
        place = number
        while place not in seen:
            seen[place] = None
            place = along[place]
        why = (
            self._ends.get(place) or "whatever happens, somebody is never free: it goes in circles"
        )
        return Counterexample(why, self._path(number), turn)
