"""How the slow effects of a peer's machine can end."""

from dataclasses import dataclass
from enum import StrEnum

from p2ptrain.ids import Seconds, Ticket


class Outcome(StrEnum):
    """How an attempt to average in a group ended. Only `DONE` changed anybody's parameters."""

    DONE = "done"
    BUSY = "busy"
    """Another claim of ours was under way, or there was nobody to ask."""
    YIELDED = "yielded"
    """We gave way to an older claim that includes us."""
    REFUSED = "refused"
    """A member says that it is not in this group."""
    LOST = "lost"
    """A member vanished, or its connection broke."""
    LATE = "late"
    """A deadline passed, or a version had run before its trainer arrived."""
    BROKEN = "broken"
    """A member sent what cannot be averaged: non-finite numbers, a wrong size."""
    WITHDRAWN = "withdrawn"
    """We left before it was over."""


NO_FAILURE = (Outcome.BUSY, Outcome.YIELDED, Outcome.WITHDRAWN)
"""How an attempt ends every day, without anybody's fault."""


@dataclass(frozen=True, slots=True)
class AverageEnded:
    """An `Average` is over: `DONE` and applied, or not and nothing was changed."""

    ticket: Ticket
    outcome: Outcome
    why: str
    moved_bytes: int = 0
    """Over a link, in the direction in which more did: what stays on one machine does not count."""
    moving_s: Seconds = 0.0


@dataclass(frozen=True, slots=True)
class AverageBroke:
    """One attempt of an `Average` has failed here; it waits for a `Resolve`."""

    ticket: Ticket
    complete: bool
    """All of the result is here, but perhaps not at all members."""


@dataclass(frozen=True, slots=True)
class StateTaken:
    """A `TakeState` is over: we now hold the state of this version."""

    version: int


@dataclass(frozen=True, slots=True)
class StateNotTaken:
    """A `TakeState` is over and nothing was changed."""

    version: int
    why: str


Ending = AverageEnded | AverageBroke | StateTaken | StateNotTaken
