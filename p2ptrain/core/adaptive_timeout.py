"""Adapt the timeouts of failure detection to observed answer times and to this peer's own health.

* `doubt` (Lifeguard's local health multiplier) counts signs that *this* peer is at fault: a probe
  that failed although no helper confirms it, a timer that fired late, a suspicion of itself that it
  refuted. Each answer in time takes one away. All timeouts towards others stretch with it, since
  most false suspicions come from an accuser that is overloaded, paused or cut off.
* A suspicion without other accusers has the longest timeout; each member that could not reach the
  suspect either shortens it, down to the minimum.
* Both scale with the observed answer times (`core/deadlines.py`): where answers take twice as long
  as configured, every timeout here doubles, so their nesting stays as checked at the start.

Source: Lifeguard (Dadgar, Phillips, Currey, DSN 2018).
"""

import math

from p2ptrain.core.deadlines import Deadline
from p2ptrain.ids import Seconds

MOST_DOUBT = 4
"""At most, a peer waits five times as long as a healthy one."""


class AdaptiveTimeout:
    """The timeouts of one peer.

    Args:
        answer_s, answer_most_s: floor and ceiling of the timeout for an answer.
        suspicion_s, suspicion_most_s: how long a suspicion lasts with enough accusers, and with one
            alone, where answers take no longer than `answer_s`.
    """

    def __init__(
        self,
        answer_s: Seconds,
        answer_most_s: Seconds,
        suspicion_s: Seconds,
        suspicion_most_s: Seconds,
    ) -> None:
        self.doubt = 0
        """0: no sign that this peer is at fault."""
        self._answers = Deadline(answer_s, answer_most_s, answer_s)
        self._floor_s = answer_s
        self._suspicion_s = suspicion_s
        self._suspicion_most_s = suspicion_most_s

    @property
    def answer_s(self) -> Seconds:
        """The timeout for a request that is sent now."""
        return self._answers.seconds * (1 + self.doubt)

    def suspicion_s(self, accusers: int, needed: int) -> Seconds:
        """How long a suspect may take to refute; from `needed` accusers on it is the minimum."""
        share = 1.0 if accusers >= needed else math.log(accusers) / math.log(needed)
        longest, least = self._suspicion_most_s, self._suspicion_s
        return (longest - share * (longest - least)) * self._answers.seconds / self._floor_s

    def answered(self, after_s: Seconds, *, in_time: bool) -> None:
        """An answer took so long."""
        self._answers.took(after_s)
        if in_time:
            self.doubt = max(0, self.doubt - 1)

    def blame_ourselves(self) -> None:
        """Count a sign that this peer is at fault."""
        self.doubt = min(MOST_DOUBT, self.doubt + 1)
