"""How long a lock waits for what: as configured at first, then as it was seen to take.

A lock tells how long each of three waits lasted (`Wait`). From that follow, each within a quarter
of what is configured and all of it (`core/deadlines.py`):

* `resend_s`: a claim without an answer is sent again. Of a lost one less time is lost where answers
  are quick; what is sent again for the third time is in no hurry, and waits as configured.
* `acquire_s`: a claim is given up. Not before claims are usually granted, and not before an average
  is usually over, since candidates may be in one: else a large group might be given up each time
  before the last of its members is free.
* `lease_s`: what a claim asks those for whom it asks: the time that they and we usually are in a
  group, and as much more as collecting grants and clocks that differ may take. It travels with the
  claim. **Whoever grants, promises just that; whoever enters the group leaves it by that**: however
  differently two peers have seen groups last, the time in a group ends before the promise, as
  `core/group_lock.py` has it for any one lease.

A quarter is enough to mend a broken group under the defaults, and bounds what a run of short
averages can do to a long one: one that is cut off, after which the ceilings hold again.
"""

from enum import Enum, auto

from p2ptrain.core.deadlines import Deadline
from p2ptrain.core.lock_state import LockConfig
from p2ptrain.ids import Seconds

LEAST_SHARE = 0.25
"""Of what is configured, a deadline is never less."""


class Wait(Enum):
    """What a lock waits for."""

    ANSWER = auto()
    """From a claim to the first word of somebody who was asked."""
    GRANTS = auto()
    """From a claim to its last grant."""
    AVERAGE = auto()
    """From a claim, or the grant, to the end of our time in the group."""


class Pace:
    """As configured, whatever is seen; `ObservedPace` follows it."""

    def __init__(self, config: LockConfig) -> None:
        self._config = config

    @property
    def resend_s(self) -> Seconds:
        """What is said for the first time now is said again after so long."""
        return self._config.resend_s

    @property
    def acquire_s(self) -> Seconds:
        """A claim that begins now is given up after so long."""
        return self._config.acquire_timeout_s

    @property
    def lease_s(self) -> Seconds:
        """What a claim that begins now asks for."""
        return self._config.lease_s

    def note(self, wait: Wait, lasted_s: Seconds) -> None:
        """One wait has ended well."""

    def missed(self, wait: Wait) -> None:
        """One has outlasted its deadline."""

    def broke(self, wait: Wait, after_s: Seconds) -> None:
        """One has ended, for another reason, before it could end well."""


class ObservedPace(Pace):
    """Of one lock, as it has seen itself and others."""

    def __init__(self, config: LockConfig) -> None:
        super().__init__(config)
        self._answer = _within(config.resend_s, LEAST_SHARE * config.resend_s)
        most_s = config.acquire_timeout_s
        least_s = min(most_s, max(LEAST_SHARE * most_s, 2 * config.resend_s))
        self._grants = _within(most_s, least_s)
        self._busy = _within(most_s, least_s)
        longest_s = config.time_in_group_s(config.lease_s)
        self._average = _within(longest_s, LEAST_SHARE * longest_s)
        self._deadlines = {
            Wait.ANSWER: (self._answer,),
            Wait.GRANTS: (self._grants,),
            Wait.AVERAGE: (self._busy, self._average),
        }

    @property
    def resend_s(self) -> Seconds:
        return self._answer.seconds

    @property
    def acquire_s(self) -> Seconds:
        return max(self._grants.seconds, self._busy.seconds)

    @property
    def lease_s(self) -> Seconds:
        return min(self._config.lease_s, self._config.lease_for_s(self._average.seconds))

    def note(self, wait: Wait, lasted_s: Seconds) -> None:
        for deadline in self._deadlines[wait]:
            deadline.took(lasted_s)

    def missed(self, wait: Wait) -> None:
        for deadline in self._deadlines[wait]:
            deadline.missed()

    def broke(self, wait: Wait, after_s: Seconds) -> None:
        for deadline in self._deadlines[wait]:
            deadline.broke(after_s)


def _within(most_s: Seconds, least_s: Seconds) -> Deadline:
    return Deadline(least_s, most_s, most_s)
