"""Check parameter servers in a world: each step of a peer counts at most once in what lives on.

The books know of each peer, and of each part of the model, which steps are in the parameters p that
it has: whoever's model p began with, and how often each step went into it. They follow what moves:

    an update goes in    p <- p + share u         the steps in u count once more
    an answer comes      p <- p'                  p has what the server's had when it answered
    p is handed on       p <- p + (p'' - base)    so do what p'' has, less what the base had

* *once*: no step counts twice, none less than not at all, and p began with one model. Whatever a
  server subtracts of what it is handed has to be a base of its own (`runtime/parameters.py`).
  A step that was pushed again, to another life of a server or another one, may count once for each
  of them, since the first one may have had it;
* *no update is lost*: where one life of a peer has served a part all along, each step that was
  answered is in it. Where a part went on to another server, what is lost is not counted here;
* *the parameters*: numbers change as the books say, and by nothing else.

Under ``bsp`` servers reduce gradients of a group, of which other books are kept.

Legend of shapes: ``M`` numbers of a model, ``S`` of a part.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from p2ptrain.compute.codec import Codec
from p2ptrain.compute.replica import Vector
from p2ptrain.core.shards import Span
from p2ptrain.core.version_vectors import VersionVector
from p2ptrain.ids import PeerId, Ticket
from p2ptrain.runtime.accounts import Attempt
from p2ptrain.runtime.driver import Driver
from p2ptrain.runtime.parameters import (
    HANDED_ON,
    UPDATE,
    HandedOn,
    Parameters,
    Served,
)
from p2ptrain.runtime.pushes import Answer, Delivery, Push
from p2ptrain.sim.share_checkers import Note, is_right


class Step(NamedTuple):
    """What one step of a trainer has changed; number 0: the model that its peer began with."""

    peer: PeerId
    life: int
    number: int

    def __str__(self) -> str:
        return f"step {self.number}" if self.number else "the model at the beginning"


class Place(NamedTuple):
    """A part of the model, under the settings of one epoch."""

    epoch: int
    at: Span


@dataclass(slots=True)
class Held:
    """What one peer has of a part: the numbers, and how often each step is in them."""

    numbers_S: Vector
    counts: Counter[Step]

    def copy(self) -> "Held":
        """As it is now."""
        return Held(self.numbers_S.copy(), self.counts.copy())

    def __add__(self, other: "Held") -> "Held":
        counts = self.counts.copy()
        counts.update(other.counts)
        return Held(self.numbers_S + other.numbers_S, counts)

    def __sub__(self, other: "Held") -> "Held":
        counts = self.counts.copy()
        counts.subtract(other.counts)
        return Held(self.numbers_S - other.numbers_S, counts)


@dataclass(slots=True)
class _Bases:
    """Of a server: what it began with, and its last answer, both with what was handed on."""

    began: Held
    answered: Held


@dataclass(slots=True)
class _Made:
    """An update on its way."""

    update_S: Vector
    steps: tuple[Step, ...]
    ticket: Ticket | None = None


@dataclass(slots=True)
class _History:
    """Of one place."""

    servers: dict[tuple[PeerId, int], None] = field(default_factory=dict)
    """Lives of peers that have served it."""
    answered: dict[Step, None] = field(default_factory=dict)
    went_into: dict[Step, dict[tuple[PeerId, int], None]] = field(default_factory=dict)


class WatchedParameters(Parameters):
    """`Parameters` of which books are kept; exact only with a codec that is, as in worlds."""

    def __init__(self, watched: Parameters, driver: Driver, books: "ServerBooks") -> None:
        self.__dict__.update(vars(watched))
        self._books, self._name, self._life = books, driver.name, driver.machine.membership.born
        self._held: dict[Span, Held] = {}
        self._bases: dict[Span, _Bases] = {}
        self._settled: dict[Span, int] = {}
        """The last of our steps that was answered."""
        self._made: dict[int, _Made] = {}  # by the identity of the update
        self._first = self._host.replica.updates
        self._comes: Held | tuple[Step, ...] = ()

    def begin(self, *, has_trained: bool = False) -> None:
        """As of `Parameters`; the books begin, too."""
        super().begin(has_trained=has_trained)
        for known in (self._held, self._bases, self._settled, self._made):
            known.clear()
        self._first = self._host.replica.updates

    def held(self, at: Span) -> Held:
        """What this peer has of a part."""
        if at not in self._held:
            numbers_S = self._known_M[at.start : at.stop].copy()
            self._held[at] = Held(numbers_S, Counter([Step(self._name, self._life, 0)]))
        return self._held[at]

    def history(self, at: Span) -> _History:
        """Of a part, under our settings."""
        return self._books.histories.setdefault(Place(self._host.live.epoch, at), _History())

    def pushes(self, ticket: Ticket, push: Push, vector_S: Vector) -> None:
        """Something of ours is on its way."""
        at = self._span(push.part, push.parts)
        if made := self._made.get(id(vector_S)):
            made.ticket = ticket
            self._books.updates[ticket] = made.steps
        else:
            self._books.handed_on[ticket] = self.held(at).copy()

    def _update(self, at: Span) -> Vector:
        update_S = super()._update(at)
        numbers = range(self._settled.get(at, self._first) + 1, self._host.replica.updates + 1)
        if not at.size:
            numbers = range(0)  # where a model has fewer numbers than parts, some are the same
        steps = tuple(Step(self._name, self._life, number) for number in numbers)
        self._made[id(update_S)] = _Made(update_S, steps)
        return update_S

    def _take_in(self, at: Span, update_S: Vector, answer_S: Vector) -> None:
        made = self._made.pop(id(update_S))
        assert made.ticket is not None
        super()._take_in(at, update_S, answer_S)
        answer = self._books.answers.pop(made.ticket)
        self._settle(at, made.steps)
        for step in [one for one in made.steps if not answer.counts[one]][:1]:
            if len(self.history(at).servers) == 1:
                self._lost(at, step)
        self._now_holds(at, answer)

    def _settle_own(self, at: Span, update_S: Vector, share: float) -> None:
        made, held = self._made.pop(id(update_S)), self.held(at).copy()
        self._counts(at, made.steps)
        super()._settle_own(at, update_S, share)
        held.numbers_S += np.float32(share) * update_S
        held.counts.update(made.steps)
        self._settle(at, made.steps)
        self._now_holds(at, held)

    def _settle(self, at: Span, steps: tuple[Step, ...]) -> None:
        """These are answered."""
        self.history(at).answered.update(dict.fromkeys(steps))
        if steps:
            self._settled[at] = steps[-1].number

    def _counts(self, at: Span, steps: tuple[Step, ...]) -> None:
        """An update goes in here."""
        for step in steps:
            self.history(at).went_into.setdefault(step, {})[self._name, self._life] = None

    # --- the server's side ------------------------------------------------------------------------

    def _serve(self, part: int, at: Span) -> Served:
        is_new = part not in self._served
        served = super()._serve(part, at)
        self.history(at).servers[self._name, self._life] = None
        if is_new:
            began = self.held(at).copy()
            self._bases[at] = _Bases(began, began)
        return served

    async def take(
        self, source: PeerId, push: Push, vector_S: Vector, attempt: Attempt, *, again: bool
    ) -> Answer:
        """As of `Parameters`; pushes are taken in one after the other."""
        at = self._span(push.part, push.parts)
        self._comes = self._books.updates[attempt.ticket]
        if not again:
            self._counts(at, self._comes)
        answer = await super().take(source, push, vector_S, attempt, again=again)
        self._books.answers[attempt.ticket] = self.held(at).copy()
        self._bases[at].answered = self.held(at).copy()
        return answer

    async def take_parameters(self, push: Push, vector_S: Vector, attempt: Attempt) -> None:
        """As of `Parameters`."""
        self._comes = self._books.handed_on[attempt.ticket]
        await super().take_parameters(push, vector_S, attempt)

    async def _take_beside(
        self, part: int, at: Span, update_S: Vector, answer_S: Vector, versions: VersionVector
    ) -> None:
        made = self._made.pop(id(update_S))
        assert made.ticket is not None
        self._comes = self._books.answers.pop(made.ticket)
        await super()._take_beside(part, at, update_S, answer_S, versions)
        self._settle(at, made.steps)

    def _add(self, at: Span, update_S: Vector, share: float) -> float:
        held, comes = self.held(at).copy(), self._comes
        distance = super()._add(at, update_S, share)
        if isinstance(comes, Held):
            held = self._handed(at, held, comes, update_S)
        else:
            held.numbers_S += np.float32(share) * update_S
            held.counts.update(comes)
        self._now_holds(at, held)
        return distance

    def _handed(self, at: Span, held: Held, handed: Held, newer_S: Vector) -> Held:
        """After what was handed on; numbers tell what was subtracted of it.

        If both bases have the same ones, both are right: counts of the better one are.
        """
        bases = self._bases[at]
        may_be = [
            handed - base
            for base in (bases.began, bases.answered)
            if is_right(base.numbers_S + newer_S, handed.numbers_S)
        ]
        if not may_be:
            why = f"{self._name} adds to numbers {_text(at)} what was handed on, less"
            self._books.note("once", f"{why} what is none of its bases")
            return Held(self._known_M[at.start : at.stop].copy(), held.counts)
        newer = min(may_be, key=lambda one: len(list(self._wrong(at, (held + one).counts))))
        bases.began, bases.answered = bases.began + newer, bases.answered + newer
        return held + newer

    def _wrong(self, at: Span, counts: Counter[Step]) -> Iterable[tuple[Step, int]]:
        """Steps that count too often, or less than not at all."""
        went_into = self.history(at).went_into
        for step, count in counts.items() if at.size else ():
            if not 0 <= count <= max(1, len(went_into.get(step, ()))):
                yield step, count

    def _now_holds(self, at: Span, held: Held) -> None:
        known_S = self._known_M[at.start : at.stop].copy()
        if not is_right(known_S, held.numbers_S):
            off = np.abs(known_S - held.numbers_S).max()
            self._books.note("the parameters", f"numbers {_text(at)} of {self._name} are off {off}")
        held.numbers_S = known_S
        self._held[at] = held
        wrong = list(self._wrong(at, held.counts))
        for step, count in wrong[:1]:
            where = f"numbers {_text(at)} of {self._name}"
            more = f"; {len(wrong) - 1} more count wrongly, too" if len(wrong) > 1 else ""
            what = f"{step} of {step.peer} counts {count} times in {where}{more}"
            self._books.note("once", what)

    def _lost(self, at: Span, step: Step) -> None:
        why = f"{step} of {step.peer} was answered, and is not in numbers {_text(at)}"
        self._books.note("no update is lost", f"{why}, which one peer has served all along")

    def balance(self) -> None:
        """Look for what was answered, where this life has served all along."""
        for at, held in self._held.items():
            history = self.history(at)
            if list(history.servers) == [(self._name, self._life)]:
                for step in [one for one in history.answered if not held.counts[one]][:1]:
                    self._lost(at, step)


class ServerBooks:
    """The parameters of all peers of one world."""

    def __init__(self, note: Note) -> None:
        self.note = note
        self.histories: dict[Place, _History] = {}
        self.updates: dict[Ticket, tuple[Step, ...]] = {}
        """The steps in them, as they were pushed."""
        self.handed_on: dict[Ticket, Held] = {}
        self.answers: dict[Ticket, Held] = {}
        """The last one to each push that was not received yet."""
        self._lives: dict[PeerId, Driver] = {}
        """The last life of each peer."""

    def watch(self, driver: Driver) -> None:
        """A life of a peer begins, or it works with another algorithm."""
        driver.parameters = parameters = WatchedParameters(driver.parameters, driver, self)
        handed_on = HandedOn(parameters)
        driver.pushes.takers.update({UPDATE: parameters, HANDED_ON: handed_on})
        if self._lives.get(driver.name) is not driver:
            self._lives[driver.name] = driver
            self._watch_pushes(driver)

    def balance(self) -> None:
        """Look for what was answered and is nowhere, once nobody pushes any more."""
        for driver in self._lives.values():
            assert isinstance(driver.parameters, WatchedParameters)
            driver.parameters.balance()

    def _watch_pushes(self, driver: Driver) -> None:
        deliver = driver.pushes.deliver

        async def watched(
            kind: str,
            to: PeerId,
            push: Push,
            vector_S: Vector,
            codec: Codec,
            answer_S: Vector | None = None,
            ticket: Ticket | None = None,
        ) -> Delivery:
            parameters = driver.parameters
            if kind in (UPDATE, HANDED_ON) and isinstance(parameters, WatchedParameters):
                ticket = ticket or driver.machine.groups.lock.next_ticket()
                parameters.pushes(ticket, push, vector_S)
            return await deliver(kind, to, push, vector_S, codec, answer_S, ticket)

        setattr(driver.pushes, "deliver", watched)  # noqa: B010 - mypy: a method is assigned to


def _text(at: Span) -> str:
    return f"{at.start} to {at.stop - 1}"
