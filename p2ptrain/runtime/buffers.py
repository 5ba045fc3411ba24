"""Vectors that are used again: fresh memory costs a page fault per 4 KiB, as much as copying it."""

import threading
from collections.abc import Callable

from p2ptrain.compute.replica import Vector

KEPT = 2
"""Vectors of one size that are kept: what is contributed and what comes of it."""


class Buffers:
    """Lends float32 vectors, from any thread; those that nobody gives back are simply forgotten."""

    def __init__(self, make: Callable[[int], Vector]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._idle: dict[int, list[Vector]] = {}

    def take(self, size: int) -> Vector:
        """A vector of `size` numbers, contents arbitrary."""
        with self._lock:
            idle = self._idle.get(size)
            return idle.pop() if idle else self._make(size)

    def give(self, vector: Vector) -> None:
        """Take a vector back; nobody else may use it any more."""
        with self._lock:
            idle = self._idle.setdefault(len(vector), [])
            if len(idle) < KEPT and vector.flags.writeable:
                idle.append(vector)
