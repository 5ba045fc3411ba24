"""How long a lock waits for what: as configured at first, then as it was seen to take.

A lock tells how long each of three waits lasted (`Wait`). From that follow, each within a quarter
of what is configured and all of it (`core/deadlines.py`):

* `resend_s`: a request without an answer is sent again. Of a lost one less time is lost where
  answers are quick; what is sent again for the third time waits as configured.
* `acquire_s`: a request is given up. Not before requests are usually granted, and not before an
  average is usually over, since candidates may be in one: else a large group might be given up each
  time before the last of its members is free.
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
    """From a request to the first word of somebody who was asked."""
    GRANTS = auto()
    """From a request to its last grant."""
    AVERAGE = auto()
    """From a request, or the grant, to the end of our time in the group."""


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
        """A request that begins now is given up after so long."""
        return self._config.acquire_timeout_s

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
