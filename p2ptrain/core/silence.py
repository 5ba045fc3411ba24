"""Detect that a peer's averages have stopped succeeding: one sentence says since when, and why.

A peer averages at an interval of its own: the median of the last intervals between two successes. A
peer is *silent* once it has had no success for `TIMES_USUAL` such intervals and at least `LEAST_S`;
before the first success, for `LEAST_S`. Time counts only while the peer is watched: its trainer
trains, and there is somebody to average with.

A silence is reported when it begins and when it ends, and not in between.
"""

import re
from collections import Counter, deque
from statistics import median

from p2ptrain.ids import Seconds

TIMES_USUAL = 10
LEAST_S: Seconds = 30.0
INTERVALS = 31
"""Intervals in the median."""

ATTEMPTS = 9
"""Failed attempts that are considered for the reason."""

_VARIES = re.compile(r"\d+(\.\d+)? s\b|#[\d.]+")
"""What differs between two sentences that state one reason: durations and tickets."""


class Silence:
    """Takes the outcomes of attempts; `deadline` says when to `ask` for a report."""

    def __init__(self, me: str = "this peer") -> None:
        self._me = me
        self._since: Seconds | None = None  # the last success, or since it is watched
        self._succeeded_at: Seconds | None = None  # None if it was not watched since
        self._intervals: deque[Seconds] = deque(maxlen=INTERVALS)
        self._failures: deque[tuple[str, bool]] = deque(maxlen=ATTEMPTS)
        self._silent_since: Seconds | None = None

    @property
    def is_silent(self) -> bool:
        """True from the report of a silence to that of its end."""
        return self._silent_since is not None

    @property
    def deadline(self) -> Seconds | None:
        """When to `ask`, if no average succeeds by then; None if never."""
        if self._since is None or self.is_silent:
            return None
        usual_s = median(self._intervals) if self._intervals else 0.0
        return self._since + max(LEAST_S, TIMES_USUAL * usual_s)

    def watch(self, now: Seconds, *, counts: bool) -> str:
        """Start or stop counting time; returns the report of a silence that this ends."""
        if not counts:
            self._since = self._succeeded_at = None
            return self._end(now, "stops averaging")
        self._since = now if self._since is None else self._since
        return ""

    def succeeded(self, now: Seconds) -> str:
        """An average succeeded; returns the report of a silence that this ends."""
        if self._since is not None:
            if self._succeeded_at is not None:
                self._intervals.append(now - self._succeeded_at)
            self._since = self._succeeded_at = now
        self._failures.clear()
        return self._end(now, "averages again")

    def failed(self, why: str, *, is_usual: bool) -> None:
        """An attempt failed; usual reasons (a busy partner) rank behind all others."""
        self._failures.append((why, is_usual))

    def ask(self, now: Seconds, doing: str) -> str:
        """The report of a silence, or nothing; `doing` is what the peer does (``trains``)."""
        deadline = self.deadline
        if deadline is None or now < deadline:
            return ""
        assert self._since is not None
        self._silent_since = self._since
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
        since, self._silent_since = self._silent_since, None
        return "" if since is None else f"{self._me} {how} after {now - since:.0f} s"
