"""The few plain types that every layer shares."""

from dataclasses import dataclass, replace
from typing import NewType

PeerId = NewType("PeerId", str)
"""A peer's name, unique in its swarm; peers are ordered by it."""

Address = NewType("Address", str)
"""``host:port``, as others reach it."""

Seconds = float
"""A duration, or a moment on the clock that governs the caller."""


@dataclass(frozen=True, slots=True, order=True)
class Ticket:
    """Names one attempt of one group, for ever: a restarted peer counts under a new incarnation."""

    initiator: PeerId
    incarnation: int
    number: int
    attempt: int = 0
    """Above 0 where a broken group tries again; see `core/repair.py`."""

    @property
    def root(self) -> "Ticket":
        """The ticket under which the group was formed."""
        return replace(self, attempt=0) if self.attempt else self

    def __str__(self) -> str:
        """Print as in logs, ``p03#17``, and ``p03#17.5`` where the group tries again."""
        again = f".{self.attempt}" if self.attempt else ""
        return f"{self.initiator}#{self.number}{again}"
