"""Version vectors say what a copy contains (Parker et al., IEEE TSE 1983).

A *history* is what one server adds, in order, while it serves; its n-th addition is *version* n.
A copy that was taken from one server and went on at another one contains versions of both; its
vector says so.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Self

from p2ptrain.ids import Ticket

MOST_HISTORIES = 1 << 8
"""In a vector; the oldest are left out."""

MOST_VERSION = 1 << 53
"""The highest one that is accepted; those of all histories add up to less than a clock may say."""


def history_of(ticket: Ticket) -> int:
    """The number of a history that has a ticket for itself."""
    name = f"{ticket.initiator} {ticket.incarnation} {ticket.number}"
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class VersionVector:
    """Of each history the last version that a copy contains; it contains all before, too."""

    last: Mapping[int, int]

    @property
    def total(self) -> int:
        """How many additions it contains."""
        return sum(self.last.values())

    def next(self, history: int) -> Self:
        """With the next version of a history."""
        return self.including(history, self.last.get(history, 0) + 1)

    def including(self, history: int, version: int) -> Self:
        """With this version of a history, and no later one; 0: with nothing of it."""
        last = dict(self.without(history).last)
        if version:
            last[history] = version
        return type(self)(dict(list(last.items())[-MOST_HISTORIES:]))

    def without(self, history: int) -> Self:
        """Of all other histories."""
        return type(self)({one: last for one, last in self.last.items() if one != history})


NO_VERSIONS = VersionVector({})
