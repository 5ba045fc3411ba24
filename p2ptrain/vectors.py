"""The one kind of array that peers exchange, and memory for it that is used again.

Fresh memory costs a page fault per 4 KiB, as much as copying it.
"""

import threading
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float32]
"""float32, one-dimensional, on the host."""

NO_NUMBERS: Vector = np.empty(0, np.float32)

LONG = 1 << 25
"""Numbers. Memory counts for a vector of so many, and fresh memory for it takes little of the time
that its average takes: none is kept that is not needed now."""

KEPT = 3
"""Vectors that are kept, the last ones given: what is contributed, and what is handed out."""

MADE = 6
"""Vectors that are known again when they come back, for each that is kept."""


class Buffers:
    """Lends float32 vectors, from any thread; those that nobody gives back are simply forgotten."""

    def __init__(self, make: Callable[[int], Vector], kept: int = KEPT) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._idle: deque[Vector] = deque(maxlen=kept)
        self._made: deque[int] = deque(maxlen=MADE * kept)  # where they stand

    def take(self, size: int) -> Vector:
        """A vector of `size` numbers, contents arbitrary."""
        with self._lock:
            for index, vector in enumerate(self._idle):
                if len(vector) == size:
                    del self._idle[index]
                    return vector
            made = self._make(size)
            self._made.append(made.ctypes.data)
            return made

    def give(self, vector: Vector) -> None:
        """Take a vector back that nobody uses any more, or one in its place if that is ours."""
        with self._lock:
            if vector.ctypes.data in self._made:
                idle = [one.ctypes.data for one in self._idle]
                assert vector.ctypes.data not in idle, "it was given back before"
                self._idle.append(vector)

    def clear(self) -> None:
        """Keep none of the idle ones: nothing more will be averaged."""
        with self._lock:
            self._idle.clear()
