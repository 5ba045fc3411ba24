"""Choose the timeouts of the group lock: as configured at first, then from observed durations.

The lock reports how long each of three waits lasted (`Wait`). Two timeouts follow, each between a
quarter of what is configured and all of it (`core/deadlines.py`):

* `resend_s`: when a request without an answer is sent again. Where answers are quick a lost message
  costs less; from the third repetition on it is as configured.
* `acquire_s`: when a request is given up. It covers the usual time to be granted and the usual
  duration of an average, since candidates may be in one: or a large group might be given up each
  time before the last of its members is free.
"""

from enum import Enum, auto

from p2ptrain.core.deadlines import Deadline
from p2ptrain.core.lock_state import LockConfig
from p2ptrain.ids import Seconds

LEAST_SHARE = 0.25
"""The least fraction of what is configured."""


class Wait(Enum):
    """What a lock waits for."""

    ANSWER = auto()
    """From a request to the first word of somebody who was asked."""
    GRANTS = auto()
    """From a request to its last grant."""
    AVERAGE = auto()
    """From a request, or the grant, to the end of our time in the group."""


class TimeoutPolicy:
    """The timeouts as configured; `ObservedTimeoutPolicy` adapts them."""

    def __init__(self, config: LockConfig) -> None:
        self._config = config

    @property
    def resend_s(self) -> Seconds:
        """When a message that is sent for the first time now is sent again."""
        return self._config.resend_s

    @property
    def acquire_s(self) -> Seconds:
        """When a request that begins now is given up."""
        return self._config.acquire_timeout_s

    def note(self, wait: Wait, lasted_s: Seconds) -> None:
        """A wait has ended well."""

    def missed(self, wait: Wait) -> None:
        """A wait has exceeded its timeout."""

    def broke(self, wait: Wait, after_s: Seconds) -> None:
        """A wait has ended early, for another reason."""


class ObservedTimeoutPolicy(TimeoutPolicy):
    """The timeouts of one lock, by its own observations."""

    def __init__(self, config: LockConfig) -> None:
        super().__init__(config)
        most_s, resend_s = config.acquire_timeout_s, config.resend_s
        least_s = min(most_s, max(LEAST_SHARE * most_s, 2 * resend_s))
        self._deadlines = {
            Wait.ANSWER: Deadline(LEAST_SHARE * resend_s, resend_s, resend_s),
            Wait.GRANTS: Deadline(least_s, most_s, most_s),
            Wait.AVERAGE: Deadline(least_s, most_s, most_s),
        }

    @property
    def resend_s(self) -> Seconds:
        return self._deadlines[Wait.ANSWER].seconds

    @property
    def acquire_s(self) -> Seconds:
        return max(self._deadlines[wait].seconds for wait in (Wait.GRANTS, Wait.AVERAGE))

    def note(self, wait: Wait, lasted_s: Seconds) -> None:
        self._deadlines[wait].took(lasted_s)

    def missed(self, wait: Wait) -> None:
        self._deadlines[wait].missed()

    def broke(self, wait: Wait, after_s: Seconds) -> None:
        self._deadlines[wait].broke(after_s)
