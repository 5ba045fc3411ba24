"""Cut a model into fragments, so that a group lasts about as long as asked on its members' links.

A group of gossip that moves a whole model holds the slots of its members, and their links, for as
long as the model is large. One that moves a *fragment* is over soon, its mean is of numbers that
are not old, and the next one meets others (DivShare, arXiv 2410.12918). Each peer takes the
fragment that was averaged longest ago, in a group of its own or of another peer, so that no number
waits much longer than another one. When each number was in a group, a *round* is over.

**Turns.** A number keeps its turn whichever sizes are mixed: their counts are powers of two, so
that a fragment of any size is several of each smaller size. For the turn among fragments of one
size, groups of much larger ones do not count: those were on faster links, with other partners, and
where whole models move inside a data centre, between two it would be the first fragment's turn for
ever.

**Sizes follow the links of the group.** A peer keeps a `Pace` for each partner: how long the last
groups with it took. Inside a data centre whole models move, between two of them small fragments,
and one peer on a slow link makes no fragments smaller but those that it is sent. A pair has the
size of its pair; a group of several has the smallest size of its members, since the slowest link
paces it. A member of such a group is not taken for slower than it is: times count for the size that
the group had, and a slower member has another size.

**How a size is found.** The first one is small. It grows to what would have lasted as long as asked
at the speed that was seen, and more where latency took a part of that time. It is halved if groups
last too long, unless that was seen to help little (then they last as long as messages do). The
median of the last groups counts, so that one beside a newcomer that loads a model changes nothing.
Sizes are compared by groups of about the same time: on a link that has become slower since, small
fragments would seem to take as long as large ones took before.
"""

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from statistics import median_low

from p2ptrain.core.purpose import MOST_FRAGMENTS
from p2ptrain.ids import PeerId, Seconds

FIRST = 1 << 16
"""Numbers of the first fragment, while nothing is known: a second on 2 Mbit/s."""

REMEMBERED = 5
"""Groups of a size of which the median counts."""

RECENT = 16
"""After so many groups with a partner it is open again how long those of another size take."""

ENOUGH = 3
"""Groups of a size that last too long before smaller ones are made again: one alone may have been
beside other transfers."""

TOO_LONG = math.sqrt(2)
"""More than that times as long as asked."""

HELPS = 0.75
"""Half of the numbers in at most this part of the time: numbers count, not messages."""

MUCH = 4
"""For the turn of fragments, groups of fragments more than so many times as large do not count."""

PARTNERS = 1024
"""So many are remembered, those of the last groups."""


class Fragments:
    """Which part of a model of `size` numbers one peer averages next, and with whom.

    Args:
        stands_for: how many numbers on a link each of them is.
    """

    def __init__(self, size: int, stands_for: int = 1) -> None:
        self._most = max(1, min(size, MOST_FRAGMENTS))  # a part of a model may have no numbers
        first = round(math.log2(max(1, size * stands_for / FIRST)))
        self._first = 1 << min(first, self._most.bit_length() - 1)
        self._paces: dict[PeerId, Pace] = {}  # those of the last groups are last
        self._groups = 0
        self.rounds = 0
        """How often each number was averaged."""
        self._began = 0
        """In which group this round began: in a later one than that each number is to be."""
        self._turns = {1 << power: Turns() for power in range(self._most.bit_length())}
        """By the number of fragments whose turn it is."""

    def count(self, partner: PeerId, lasts_s: Seconds) -> int:
        """How many fragments there are if a pair with `partner` is to last about so long."""
        pace = self._paces.get(partner)
        return pace.count(lasts_s) if pace else self._first

    def next(self, count: int) -> int:
        """Which of so many fragments is next: the one with the number that waits longest."""
        return self._turns[count].next(count)

    def took(self, count: int, seconds: Seconds, partners: Sequence[PeerId]) -> None:
        """A group with these others has moved one of so many in this time."""
        if not self._is_ours(count):
            return
        for partner in partners:
            pace = self._paces.pop(partner, None) or Pace(self._first, self._most)
            pace.took(count, seconds, in_pair=len(partners) == 1)
            self._paces[partner] = pace
        while len(self._paces) > PARTNERS:
            del self._paces[next(iter(self._paces))]

    def averaged(self, fragment: int, count: int) -> None:
        """A group's mean of this one of so many counts, however it came about."""
        if not self._is_ours(count):
            return
        self._groups += 1
        for their_count, turns in self._turns.items():
            if their_count <= MUCH * count:
                turns.averaged(fragment, count, self._groups)
        if self._turns[1].waits_since > self._began:  # of these all groups count
            self.rounds, self._began = self.rounds + 1, self._groups

    def _is_ours(self, count: int) -> bool:
        """False for parts of another algorithm."""
        return not count & (count - 1) and count <= self._most


class Turns:
    """Which numbers wait longest for a group, of those that count."""

    def __init__(self) -> None:
        self._last = [0]
        """In which group each part was last, as many equal parts as any group had fragments."""

    @property
    def waits_since(self) -> int:
        """The last group of the number that waits longest."""
        return min(self._last)

    def next(self, count: int) -> int:
        """Which of so many fragments is next."""
        self._refine(count)
        parts = len(self._last) // count
        return self._last.index(self.waits_since) // parts

    def averaged(self, fragment: int, count: int, group: int) -> None:
        """This group was one for this fragment of so many."""
        self._refine(count)
        parts = len(self._last) // count
        self._last[fragment * parts : (fragment + 1) * parts] = [group] * parts

    def _refine(self, count: int) -> None:
        if len(self._last) < count:
            each = count // len(self._last)
            self._last = [last for last in self._last for _ in range(each)]


class Pace:
    """How long groups with one partner take.

    Args:
        first: fragments of a model while nothing is known.
        most: fragments of which each has a number.
    """

    def __init__(self, first: int, most: int) -> None:
        self._count, self._most = first, most
        self._took: dict[int, deque[tuple[int, Seconds]]] = defaultdict(
            lambda: deque(maxlen=REMEMBERED)
        )
        """By the number of fragments: in which group that was timed, and how long it took."""
        self._timed = 0

    def took(self, count: int, seconds: Seconds, *, in_pair: bool) -> None:
        """A group with the partner has moved one of so many in this time.

        The partner chose it, if we did not, and has seen what we have; but a group of several has
        smaller fragments for another member's sake.
        """
        self._timed += 1
        self._took[count].append((self._timed, seconds))
        if in_pair or count < self._count:
            self._count = count

    def count(self, lasts_s: Seconds) -> int:
        """How many fragments there are for a group of about so many seconds."""
        count = self._count
        if not (last := self._lately(count)):
            return count
        here_s = median_low(last)
        helps = self._helps(count // 2, count) and self._helps(count, 2 * count)
        is_known = len(last) >= ENOUGH or not self._lately(2 * count)
        if is_known and here_s > lasts_s * TOO_LONG and 2 * count <= self._most and helps:
            return self._change(2 * count)
        fewer, grown_s = count, here_s
        while fewer > 1 and 2 * grown_s <= lasts_s:
            fewer, grown_s = fewer // 2, 2 * grown_s
        if count > 1 and not self._helps(count // 2, count):
            fewer = min(fewer, count // 2)
        return self._change(fewer) if fewer < count else count

    def _change(self, count: int) -> int:
        self._took[count].clear()  # links may have changed since
        self._count = count
        return count

    def _helps(self, few: int, many: int) -> bool:
        """False if it was seen that groups of smaller fragments last nearly as long."""
        known = self._lately(few), self._lately(many)
        return not all(known) or min(known[1]) <= HELPS * min(known[0])

    def _lately(self, count: int) -> list[Seconds]:
        """How long the last groups of one of so many fragments took."""
        return [took_s for timed, took_s in self._took[count] if self._timed - timed < RECENT]
