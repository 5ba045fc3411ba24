"""Keep the last quarter of an hour of a swarm: every second a point, and a letter per peer.

A peer's letters are its timeline. A digit says how much of the second its trainer waited (``0``:
nothing, ``9``: nearly all); the others are in `LETTERS`.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

from p2ptrain.ids import Seconds

KEPT = 900
"""Seconds."""

LETTERS = {
    "joins": "j",
    "done": "d",
    "silent": "!",
    "suspect": "s",
    "no answer": "n",
    "dead": "x",
    "left": "l",
}

NOTHING = " "
"""The letter of a peer that was not known yet."""

Point = tuple[float | None, ...]
"""When, samples/s, steps/s, waiting, loss, consensus distance, averages/s, peers that answer."""

POINT = ("at", "samples_per_s", "steps_per_s", "waiting", "loss", "distance", "averages_per_s")


class History:
    """Points and letters, the oldest first."""

    def __init__(self) -> None:
        self.points: deque[Point] = deque(maxlen=KEPT)
        self._lanes: deque[str] = deque(maxlen=KEPT)

    def add(self, point: Point, lanes: str) -> None:
        """One second: the figures of the swarm, and the letter of each peer in order."""
        self.points.append(point)
        self._lanes.append(lanes)

    def samples_per_s(self, begin: Seconds, end: Seconds) -> float | None:
        """The mean over the seconds that ended in (begin, end]; None if there was none."""
        rates = [p[1] or 0.0 for p in self.points if begin < (p[0] or 0.0) <= end]
        return sum(rates) / len(rates) if rates else None

    def as_json(self) -> dict[str, Any]:  # Any: whatever JSON can hold
        """All points, and the letters of each second."""
        return {"points": list(self.points), "lanes": list(self._lanes)}


def letter(state: str, wait_share: float) -> str:
    """The letter of one peer in one second."""
    return LETTERS.get(state) or str(min(9, max(0, int(wait_share * 10))))


def mean(values: Sequence[float | None]) -> float | None:
    """Of those that are known."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
