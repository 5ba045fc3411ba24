"""Derive a deadline from observed durations.

::

    deadline = median + DEVIATIONS * max(median absolute deviation, median / 8)

of the last `WINDOW` durations, between a floor and a ceiling that the owner states and explains.
Both medians are robust: one straggler among many does not lengthen the deadline, and one
lucky transfer does not shorten it. An eighth of the median replaces a deviation near zero, so the
deadline is at least twice the median.

A duration that misses its deadline is never observed in full. So a miss clears the window, and the
ceiling applies until enough new durations are known: a link that becomes ten times slower breaks
one average, not one after the other. The window is short, so deadlines shrink soon where it is
faster.
"""

from collections import deque
from statistics import median

from p2ptrain.ids import Seconds

WINDOW = 32
"""Durations that are kept."""

FEWEST = 4
"""Below this many durations there is no estimate."""

DEVIATIONS = 8
"""Of normally distributed durations, fewer than one in ten million is so far from the median."""


class Deadline:
    """The deadline for one kind of operation; `first_s` while there are too few observations."""

    def __init__(self, floor_s: Seconds, ceiling_s: Seconds, first_s: Seconds) -> None:
        self._floor_s = floor_s
        self._ceiling_s = ceiling_s
        self._first_s = first_s
        self._took_s: deque[Seconds] = deque(maxlen=WINDOW)
        self._seconds: Seconds | None = first_s

    @property
    def seconds(self) -> Seconds:
        """The deadline of an operation that begins now, from its beginning."""
        if self._seconds is None:
            self._seconds = min(max(self._floor_s, self._estimate()), self._ceiling_s)
        return self._seconds

    def took(self, duration_s: Seconds) -> None:
        """An operation ended in time."""
        self._took_s.append(duration_s)
        self._seconds = None

    def missed(self) -> None:
        """An operation missed its deadline: forget all observations."""
        self._took_s.clear()
        self._first_s = self._seconds = self._ceiling_s

    def broke(self, after_s: Seconds) -> bool:
        """An operation failed after so long, by this deadline or for another reason.

        After more than half of the deadline, longer than most take, it counts as a miss: of several
        peers that wait for one thing the first to give up ends it for all. Returns whether it does.
        """
        missed = after_s > self.seconds / 2
        if missed:
            self.missed()
        return missed

    def _estimate(self) -> Seconds:
        if len(self._took_s) < FEWEST:
            return self._first_s
        middle = median(self._took_s)
        deviation = median(abs(took - middle) for took in self._took_s)
        return middle + DEVIATIONS * max(deviation, middle / DEVIATIONS)
