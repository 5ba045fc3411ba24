"""Cut a model into fragments, so that a group lasts about as long as asked on any link.

A group of gossip that moves a whole model holds the slots of its members, and their links, for as
long as the model is large. One that moves a *fragment* is over soon, its mean is of numbers that
are not old, and the next one meets others (DivShare, arXiv 2410.12918). Each peer takes the
fragment that was averaged longest ago, in a group of its own or of another peer, so that no number
waits much longer than another one. When each number was in a group, a *round* is over.

The number of fragments is a power of two, and follows from how long groups took: twice as many if
they last too long, unless that was seen to help little (then they last as long as messages do);
half as many if those would not last too long either. The fastest of the last groups counts: one
peer on a slow link would else keep fragments small where all other links are fast. Sizes are
compared by groups of about the same time: on a link that has become slower since, as beside a
newcomer that loads a model, small fragments would seem to take as long as large ones took before.
"""

import math
from collections import defaultdict, deque

from p2ptrain.core.purpose import MOST_FRAGMENTS
from p2ptrain.ids import Seconds

FIRST = 1 << 16
"""Numbers of the first fragment, while nothing is known: a second on 2 Mbit/s."""

REMEMBERED = 5
"""Groups of a size of which the fastest counts."""

RECENT = 16
"""After so many groups it is open again how long those of another size take."""

ENOUGH = 3
"""Groups of a size that all last too long before smaller ones are made again: one alone may have
been with a peer on a slow link."""

TOO_LONG = math.sqrt(2)
"""More than that times as long as asked."""

HELPS = 0.75
"""Half of the numbers in at most this part of the time: numbers count, not messages."""


class Fragments:
    """Which part of a model of `size` numbers one peer averages next.

    Args:
        stands_for: how many numbers on a link each of them is.
    """

    def __init__(self, size: int, stands_for: int = 1) -> None:
        self._most = max(1, min(size, MOST_FRAGMENTS))  # a part of a model may have no numbers
        first = round(math.log2(max(1, size * stands_for / FIRST)))
        self._count = 1 << min(first, self._most.bit_length() - 1)
        self._took: dict[int, deque[tuple[int, Seconds]]] = defaultdict(
            lambda: deque(maxlen=REMEMBERED)
        )
        """By the number of fragments: in which group that was timed, and how long it took."""
        self._timed = 0
        self._groups = 0
        self.rounds = 0
        """How often each number was averaged."""
        self._began = 0
        """In which group this round began: in a later one than that each number is to be."""
        self._last = [0]
        """In which group each part was last, as many equal parts as any group had fragments."""

    def next(self, lasts_s: Seconds) -> tuple[int, int]:
        """Which fragment is next, of how many, for a group of about so many seconds."""
        self._count = self._wanted(lasts_s)
        self._refine(self._count)
        parts = len(self._last) // self._count
        oldest = self._last.index(min(self._last)) // parts  # at its oldest number
        return oldest, self._count

    def took(self, count: int, seconds: Seconds) -> None:
        """A group has moved one of so many in this time."""
        self._timed += 1
        self._took[count].append((self._timed, seconds))

    def averaged(self, fragment: int, count: int) -> None:
        """A group's mean of this one of so many counts, however it came about."""
        if count & (count - 1) or count > self._most:
            return  # another algorithm's: no parts of ours
        self._groups += 1
        self._refine(count)
        parts = len(self._last) // count
        self._last[fragment * parts : (fragment + 1) * parts] = [self._groups] * parts
        if min(self._last) > self._began:
            self.rounds, self._began = self.rounds + 1, self._groups

    def _refine(self, count: int) -> None:
        if len(self._last) < count:
            each = count // len(self._last)
            self._last = [last for last in self._last for _ in range(each)]

    def _wanted(self, lasts_s: Seconds) -> int:
        count = self._count
        if not (last := self._lately(count)):
            return count
        here_s = min(last)
        helps = self._helps(count // 2, count) and self._helps(count, 2 * count)
        is_known = len(last) >= ENOUGH or not self._lately(2 * count)
        if is_known and here_s > lasts_s * TOO_LONG and 2 * count <= self._most and helps:
            self._took[2 * count].clear()  # links may have changed since
            return 2 * count
        if count > 1 and (2 * here_s <= lasts_s or not self._helps(count // 2, count)):
            self._took[count // 2].clear()
            return count // 2
        return count

    def _helps(self, few: int, many: int) -> bool:
        """False if it was seen that groups of smaller fragments last nearly as long."""
        known = self._lately(few), self._lately(many)
        return not all(known) or min(known[1]) <= HELPS * min(known[0])

    def _lately(self, count: int) -> list[Seconds]:
        """How long the last groups of one of so many fragments took."""
        return [took_s for timed, took_s in self._took[count] if self._timed - timed < RECENT]
