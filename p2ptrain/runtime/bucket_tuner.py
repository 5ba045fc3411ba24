"""Find out how many buckets should travel together.

Small ones leave early, and each costs messages; large ones are cheap, and the last one hides behind
nothing. Which is better follows from links, processors and the model, so it is tried: for some
versions twice as many together, then half as many, and on in that direction while steps become
shorter. What was found is tried again later, and at once if steps last much longer than they did.

All members must cut alike. So each states what it wishes for the next version
(`Contribution.together`), and all do as the first one in the group says. The others follow its
choice with their own tuners, and one of them goes on from there when it is the first.
"""

from collections.abc import Sequence
from statistics import median

from p2ptrain.core.contribution import Contribution
from p2ptrain.ids import Seconds

USUAL = 4
"""Buckets that travel together at first: of 64, a sixteenth of the gradients."""

TRIED = 8
"""Steps with one size before the median of their durations counts. Smaller: chance decides; larger:
it takes long to find the best."""

BETTER = 0.98
"""Another size is better if a step lasts at most so much of what it did. Larger: it wanders."""

RESTS = 500
"""Steps before all is tried again: fleets and links change."""

CHANGED = 1.25
"""It is tried again at once if steps last so many times what they did, or that much less."""


class BucketTuner:
    """What one peer would choose.

    Args:
        count: buckets that there are; buffers not counted.
    """

    def __init__(self, count: int) -> None:
        self.wish = min(USUAL, count)
        """So many are to travel together in the next version."""
        self._count = count
        self._best, self._best_s = self.wish, 0.0
        self._directions: list[int] = []
        self._seen: list[Seconds] = []
        self._rests = False
        self._explore()

    def agreed(self, contributions: Sequence[Contribution]) -> int:
        """How many travel together after these were stated; the same number at all members."""
        return max(1, min(contributions[0].together, self._count))

    def saw(self, together: int, step_s: Seconds, *, was_ours: bool) -> None:
        """A step lasted so long with so many buckets together; `was_ours`: by our own wish."""
        if not was_ours:
            self.wish = self._best = together
            self._explore()
            return
        if together != self.wish:
            return  # it was wished for before
        self._seen.append(step_s)
        if self._rests:
            self._watch()
        elif len(self._seen) == TRIED:
            lasts_s = median(self._seen)
            self._seen = []
            self._decide(lasts_s)

    def _explore(self) -> None:
        """Measure the best one again, then its neighbours."""
        self._directions, self._seen, self._rests, self._best_s = [2, -2], [], False, 0.0

    def _decide(self, lasts_s: Seconds) -> None:
        """The present size was measured: which one is next?"""
        if not self._best_s:
            self._best_s = lasts_s
        elif lasts_s < BETTER * self._best_s:
            # On in this direction; the other one is worse, as the last one was.
            self._best, self._best_s = self.wish, lasts_s
            self._directions = self._directions[:1]
        else:
            self._directions = self._directions[1:]
        while self._directions:
            if (next_ := self._beside(self._directions[0])) != self._best:
                self.wish = next_
                return
            self._directions = self._directions[1:]
        self.wish, self._rests = self._best, True

    def _beside(self, direction: int) -> int:
        """Twice as many, or half as many, as far as there are any."""
        found = self._best * 2 if direction > 0 else self._best // 2
        return max(1, min(found, self._count))

    def _watch(self) -> None:
        """Nothing is tried now: has anything changed?"""
        recent_s = median(self._seen[-TRIED:])
        has_changed = not self._best_s / CHANGED < recent_s < self._best_s * CHANGED
        if len(self._seen) >= RESTS or (len(self._seen) >= TRIED and has_changed):
            self._explore()
