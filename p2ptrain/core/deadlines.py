"""Deadlines that set themselves: how long something may take follows how long it took.

::

    deadline = median + DEVIATIONS * max(median absolute deviation, median / 8)

of the last `WINDOW` durations, and never less than a floor nor more than a ceiling, which their
owners state and explain. Median and median absolute deviation because a few outliers move neither:
one straggler among many does not make everybody wait, and one lucky transfer hurries nobody. The
eighth of the median stands in where durations hardly vary, which would otherwise leave no room at
all: the deadline is at least twice the median.

**Slower.** A duration that misses its deadline is never seen whole, so that no amount of looking at
the others says how long to wait. After a miss the past is no guide any more: it is forgotten, and
the ceiling holds until enough has been seen again. So a link that becomes ten times slower breaks
one average, not one after the other. **Faster.** The window is short, so that deadlines shrink
again as soon as most of it is new.

Nothing here knows what is timed, and nothing reads a clock.
"""

from collections import deque
from statistics import median

from p2ptrain.ids import Seconds

WINDOW = 32
"""Durations that count."""

FEWEST = 4
"""So many say nothing yet about the next one."""

DEVIATIONS = 8
"""Of normally distributed durations, fewer than one in ten million is so far from the median."""


class Deadline:
    """How long one kind of thing may take.

    Args:
        floor_s: never less.
        ceiling_s: never more.
        first_s: while too few have been seen.
    """

    def __init__(self, floor_s: Seconds, ceiling_s: Seconds, first_s: Seconds) -> None:
        self._floor_s = floor_s
        self._ceiling_s = ceiling_s
        self._first_s = first_s
        self._took_s: deque[Seconds] = deque(maxlen=WINDOW)
        self._seconds: Seconds | None = first_s

    @property
    def seconds(self) -> Seconds:
        """The deadline of whatever begins now, from its beginning."""
        if self._seconds is None:
            self._seconds = min(max(self._floor_s, self._estimate()), self._ceiling_s)
        return self._seconds

    def took(self, duration_s: Seconds) -> None:
        """One was done in time."""
        self._took_s.append(duration_s)
        self._seconds = None

    def missed(self) -> None:
        """One was not: what was seen before says nothing of how long the next one takes."""
        self._took_s.clear()
        self._first_s = self._seconds = self._ceiling_s

    def broke(self, after_s: Seconds) -> bool:
        """One came to nothing, by this deadline or not.

        If it had lasted longer than half of it, longer than most do, it may have been about to miss
        it: of several who wait for one thing the first one gives up for all. True if so.
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
