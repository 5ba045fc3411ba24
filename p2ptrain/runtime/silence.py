"""Detect that a peer's averages have stopped succeeding: one sentence says since when, and why.

A peer averages at an interval of its own: the median of the last intervals between two successes. A
peer is *silent* once it has had no success for `TIMES_USUAL` such intervals and at least `LEAST_S`;
before the first success, for `LEAST_S`. Time counts only while the peer is watched: its trainer
trains, and there is somebody to average with.

A silence is reported when it begins and when it ends, and not in between. `Silence` decides;
`Watch` feeds it with the records of a driver, and records what it says.
"""

import asyncio
import re
from collections import Counter, deque
from statistics import median
from typing import TYPE_CHECKING, Any

from p2ptrain.core.effects import NO_FAILURE
from p2ptrain.core.messages import Phase
from p2ptrain.ids import PeerId, Seconds
from p2ptrain.runtime.service import doing

if TYPE_CHECKING:
    from p2ptrain.runtime.driver import Driver

TIMES_USUAL = 10
LEAST_S: Seconds = 30.0
INTERVALS = 31
"""Intervals in the median."""

ATTEMPTS = 9
"""Failed attempts that are considered for the reason, and after which more are in vain."""

_VARIES = re.compile(r"\d+(\.\d+)? s\b|#[\d.]+")
"""What differs between two sentences that state one reason: durations and tickets."""


class Silence:
    """Takes the outcomes of attempts; `deadline` says when to `ask` for a report."""

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self._since: Seconds | None = None  # the last success, or since it is watched
        self._succeeded_at: Seconds | None = None  # None if it was not watched since
        self._intervals: deque[Seconds] = deque(maxlen=INTERVALS)
        self._failures: deque[tuple[str, bool]] = deque(maxlen=ATTEMPTS)
        self.is_silent = False
        """True from the report of a silence to that of its end."""

    @property
    def deadline(self) -> Seconds | None:
        """When to `ask`, if no average succeeds by then; None if never."""
        if self._since is None or self.is_silent:
            return None
        usual_s = median(self._intervals) if self._intervals else 0.0
        return self._since + max(LEAST_S, TIMES_USUAL * usual_s)

    def watch(self, now: Seconds, *, counts: bool) -> str:
        """Start or stop counting time; returns the report of a silence that this ends."""
        if counts:
            self._since = now if self._since is None else self._since
            return ""
        ended = self._end(now, "stops averaging")
        self._since = self._succeeded_at = None
        return ended

    def succeeded(self, now: Seconds) -> str:
        """An average succeeded; returns the report of a silence that this ends."""
        ended = self._end(now, "averages again")
        if self._since is not None:
            if self._succeeded_at is not None:
                self._intervals.append(now - self._succeeded_at)
            self._since = self._succeeded_at = now
        self._failures.clear()
        return ended

    def failed(self, why: str, *, is_usual: bool) -> None:
        """An attempt failed; usual reasons (a busy partner) rank behind all others."""
        self._failures.append((why, is_usual))

    @property
    def is_in_vain(self) -> bool:
        """Of the last `ATTEMPTS` none has succeeded, and no partner was only busy."""
        return len(self._failures) == ATTEMPTS and not any(usual for _, usual in self._failures)

    def ask(self, now: Seconds, doing: str) -> str:
        """The report of a silence, or nothing; `doing` is what the peer does (``trains``)."""
        if self._since is None or self.deadline is None or now < self.deadline:
            return ""
        self.is_silent = True
        usually = "never yet" if self._succeeded_at is None else "once so far"
        if self._intervals:
            usually = f"usually every {median(self._intervals):.2g} s"
        return f"{self._me} has not averaged for {now - self._since:.0f} s ({usually}): " + (
            self._reason() if self._failures else f"no attempt has ended; it {doing}"
        )

    def _reason(self) -> str:
        """The commonest of the last failures, in the words of its latest."""
        kinds = [(_VARIES.sub("", why), is_usual) for why, is_usual in self._failures]
        kind, count = max(Counter(kinds).items(), key=lambda item: (not item[0][1], item[1]))
        latest = max(index for index, other in enumerate(kinds) if other == kind)
        of = f"{count} of the last {len(kinds)} attempts" if len(kinds) > 1 else "its only attempt"
        return f"{self._failures[latest][0]}, {of}"

    def _end(self, now: Seconds, how: str) -> str:
        was_silent, self.is_silent = self.is_silent, False
        if self._since is None or not was_silent:
            return ""
        return f"{self._me} {how} after {now - self._since:.0f} s"


class Watch:
    """Implements `Metrics`; `look` whenever the trainer or its view of the others has changed."""

    def __init__(self, driver: "Driver") -> None:
        self._driver = driver
        self._silence = Silence(driver.name)
        self._timer: asyncio.TimerHandle | None = None

    def record(self, kind: str, **fields: Any) -> None:  # Any: whatever JSON can hold
        if kind == "group" and fields["outcome"] == "done":
            self._tell(self._silence.succeeded(self._driver.now))
        elif kind == "group":
            is_usual = fields["outcome"] in NO_FAILURE
            self._silence.failed(fields["reason"] or fields["outcome"], is_usual=is_usual)
            if self._silence.is_in_vain:
                self._driver.in_vain()

    def look(self) -> None:
        """Count time only while the trainer trains and there is somebody to average with."""
        driver, membership = self._driver, self._driver.machine.membership
        trains = membership.me.phase is Phase.TRAINING
        counts = trains and len(membership.participants()) > 1
        self._tell(self._silence.watch(driver.now, counts=counts))
        if self._timer is None and (deadline := self._silence.deadline) is not None:
            # Averages that succeed meanwhile do not move the timer: it finds out when it fires.
            self._timer = asyncio.get_running_loop().call_at(deadline, self._ask, deadline)

    def stop(self) -> None:
        if self._timer:
            self._timer.cancel()

    def _ask(self, due: Seconds) -> None:
        self._timer, machine, now = None, self._driver.machine, max(self._driver.now, due)
        does = doing(machine)
        if does == "trains" and machine.membership.me.steps == 0:
            self._silence.watch(now, counts=False)  # the first step may take minutes, as to compile
        self._tell(self._silence.ask(now, does))
        self.look()

    def _tell(self, said: str) -> None:
        if said:
            self._driver.metrics.record("warning", text=said, silent=self._silence.is_silent)
