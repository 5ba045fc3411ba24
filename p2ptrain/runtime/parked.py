"""Hold streams that have come before the word that forms their group, each sender its share."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from p2ptrain.core.budgets import FairRoom
from p2ptrain.errors import RefusedError
from p2ptrain.net.transport import ChunkStream
from p2ptrain.net.wire import AverageOpening

if TYPE_CHECKING:
    from p2ptrain.runtime.driver import Driver

MAX_PARKED = 64
"""Streams that wait for their groups, at most; five of each member if those are more: two groups of
two buckets, and what begins before its group. In a large swarm all streams come before the word
that forms their group. If there are more, those of the sender that has most are refused."""


@dataclass(eq=False, slots=True)
class Place:
    """Of one stream that waits."""

    why_not: str = ""
    """Another stream has more right to it."""

    def check(self) -> None:
        """Raise RefusedError if the stream may wait no longer."""
        if self.why_not:
            raise RefusedError(self.why_not)


class ParkedStreams:
    """The streams of one peer that wait."""

    def __init__(self, host: "Driver") -> None:
        self._host = host
        self._room: FairRoom[Place] = FairRoom()

    def __len__(self) -> int:
        return len(self._room)

    @contextmanager
    def place(self, opening: AverageOpening, stream: ChunkStream) -> Iterator[Place]:
        """While a stream waits. All strangers have the share of one sender."""
        host, membership, place = self._host, self._host.machine.membership, Place()
        most = max(MAX_PARKED, 5 * len(membership.participants()))
        known = membership.member(opening.sender)
        name = known.peer if known else ""
        if victim := self._room.enter(name, stream.caller, place, most):
            why = f"{host.name} has {most} streams waiting for their groups"
            victim.why_not = f"{why}, most of them from where this one comes"
            host.notify_change()
        try:
            yield place
        finally:
            self._room.leave(name, stream.caller, place)
