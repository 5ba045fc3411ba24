"""Choose the timeouts of the group lock: as configured at first, then from observed durations.

The lock reports how long each of three waits lasted. Two timeouts follow, each between a quarter of
what is configured and all of it (`core/deadlines.py`):

* `resend_s`: when a request without an answer is sent again. Where answers are quick a lost message
  costs less; from the third repetition on it is as configured.
* `acquire_s`: when a request is given up. It covers the usual time to be granted and the usual
  duration of an average, since candidates may be in one: or a large group might be given up each
  time before the last of its members is free.
"""

from p2ptrain.core.deadlines import Deadline
from p2ptrain.core.lock_state import LockConfig
from p2ptrain.ids import Seconds

LEAST_SHARE = 0.25
"""The least fraction of what is configured."""


class TimeoutPolicy:
    """The timeouts of one lock, by its own observations.

    Args:
        least_share: 1.0: all timeouts stay as configured.
    """

    def __init__(self, config: LockConfig, least_share: float = LEAST_SHARE) -> None:
        most_s, resend_s = config.acquire_timeout_s, config.resend_s
        least_s = min(most_s, max(least_share * most_s, 2 * resend_s))
        self.answers = Deadline(least_share * resend_s, resend_s, resend_s)
        """From a request to the first word of somebody who was asked."""
        self.grants = Deadline(least_s, most_s, most_s)
        """From a request to its last grant."""
        self.averages = Deadline(least_s, most_s, most_s)
        """From a request, or the grant, to the end of our time in the group."""

    @property
    def resend_s(self) -> Seconds:
        """When a message that is sent for the first time now is sent again."""
        return self.answers.seconds

    @property
    def acquire_s(self) -> Seconds:
        """When a request that begins now is given up."""
        return max(self.grants.seconds, self.averages.seconds)
