"""Decide when an address that could not be reached may be dialled again.

The pause grows with the time for which an address has failed: it is a quarter of that, at least
`SHORTEST_S` and at most `LONGEST_S`. So a link that was cut for `t` seconds is back within `t / 4`,
and an address that is gone for good costs one attempt per minute. A conversation that has lasted
`STEADY_S` ends a row of failures: an address that accepts and hangs up at once is no better than
one that does not answer.
"""

from dataclasses import dataclass

from p2ptrain.ids import Seconds

SHORTEST_S: Seconds = 0.1
LONGEST_S: Seconds = 60.0
STEADY_S: Seconds = 5.0


@dataclass(slots=True)
class Redial:
    """What is known of one address that has failed."""

    since: Seconds
    """The first failure of the present row."""
    again_at: Seconds

    @classmethod
    def after(cls, before: "Redial | None", lasted_s: Seconds, now: Seconds) -> "Redial":
        """A conversation, or an attempt at one, has ended after `lasted_s`."""
        since = before.since if before and lasted_s < STEADY_S else now
        pause_s = min(LONGEST_S, max(SHORTEST_S, (now - since) / 4))
        return cls(since, now + pause_s)
