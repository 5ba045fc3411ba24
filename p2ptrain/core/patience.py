"""How long a peer waits for others, and how much of that is its own fault.

Lifeguard (Dadgar, Phillips, Currey, DSN 2018): most false suspicions come from the accuser. A peer
that is overloaded, paused or cut off misses the answers of healthy ones. So it doubts itself first:

* `doubt` counts signs that something is wrong *here*: a probe that failed although nobody bears us
  out, a timer that fired late, a suspicion of ourselves that we had to refute. Every answer in time
  takes one away. Whatever we wait for others stretches with it.
* A suspicion that nobody shares lasts long; with each member that could not reach the suspect
  either (its *accusers*), it shrinks to its least.

And all of it follows what answers take in this swarm (`core/deadlines.py`): where they take twice
as long as expected, everything here lasts twice as long, so that the nesting of deadlines stays as
it was checked at the start.
"""

import math

from p2ptrain.core.deadlines import Deadline
from p2ptrain.ids import Seconds

MOST_DOUBT = 4
"""At its worst a peer waits five times as long as others."""


class Patience:
    """Of one peer.

    Args:
        answer_s, answer_most_s: floor and ceiling of how long an answer may take.
        suspicion_s, suspicion_most_s: how long a suspicion lasts that many share, and one that
            nobody does, where answers take no longer than `answer_s`.
    """

    def __init__(
        self,
        answer_s: Seconds,
        answer_most_s: Seconds,
        suspicion_s: Seconds,
        suspicion_most_s: Seconds,
    ) -> None:
        self.doubt = 0
        """0: as far as we can tell, nothing is wrong with us."""
        self._answers = Deadline(answer_s, answer_most_s, answer_s)
        self._floor_s = answer_s
        self._suspicion_s = suspicion_s
        self._suspicion_most_s = suspicion_most_s

    @property
    def answer_s(self) -> Seconds:
        """Whoever is asked now should have answered after so long."""
        return self._answers.seconds * (1 + self.doubt)

    def suspicion_s(self, accusers: int, needed: int) -> Seconds:
        """How long a suspect has to refute that so many share; `needed` of them are enough."""
        share = 1.0 if accusers >= needed else math.log(accusers) / math.log(needed)
        longest, least = self._suspicion_most_s, self._suspicion_s
        return (longest - share * (longest - least)) * self._answers.seconds / self._floor_s

    def answered(self, after_s: Seconds, *, in_time: bool) -> None:
        """Somebody whom we asked has answered."""
        self._answers.took(after_s)
        if in_time:
            self.doubt = max(0, self.doubt - 1)

    def blame_ourselves(self) -> None:
        """Something went wrong, and most likely here."""
        self.doubt = min(MOST_DOUBT, self.doubt + 1)
