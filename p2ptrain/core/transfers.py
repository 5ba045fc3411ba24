"""Derive how long a group waits for its members' streams, and for any progress.

An average has no deadline of its own: while its chunks move it is waited for. Deadlines apply to
*silence*, and follow observations (`core/deadlines.py`), so the speed of links is not configured:

* `arrivals`: how long members, which learn of their group one after the other, wait for each
  other's streams. At first, and at least, `ARRIVAL_S`; more where messages take longer.
* `stall`: a group breaks if nothing has moved for as long as whole groups of its kind (the same
  payload, about as many members) usually take. At least `STALL_S`; until enough were observed, the
  ceiling, which is `average_timeout_s` for both.

**Slow is not broken.** A member that lets its chunks drip slows its group down to its own speed, as
a trainer that computes for long does. Breaking a group that moves would free no peer: its members
are alive, meet again, and would have to repeat what is done.

**A link becomes ten times slower.** It breaks a group only if nothing arrives for longer than whole
groups took, and then only one: a member that has waited for more than half of its deadline when
another one gives up distrusts its own observations, too.
"""

from p2ptrain.core.deadlines import Deadline
from p2ptrain.core.effects import What
from p2ptrain.ids import Seconds

ARRIVAL_S: Seconds = 2.0
"""The least time to wait for a member's stream."""

STALL_S: Seconds = 5.0
"""A busy peer, or a copy of a large model, may cause silence for this long."""


class Transfers:
    """One peer's observations of its groups; `most_s` is the ceiling of all deadlines."""

    def __init__(self, most_s: Seconds) -> None:
        self._most_s, least_s = most_s, min(ARRIVAL_S, most_s)
        self._kinds: dict[tuple[What, int], Deadline] = {}
        self.arrivals = Deadline(least_s, most_s, least_s)
        """How long after a group's beginning a member's stream may come."""

    def stall(self, what: What, size: int) -> Deadline:
        """How long nothing may move in a group of `size` members, since whole ones take so long."""
        kind = what, size.bit_length()
        if kind not in self._kinds:
            self._kinds[kind] = Deadline(min(STALL_S, self._most_s), self._most_s, self._most_s)
        return self._kinds[kind]

    def broke(self, what: What, size: int, silent_s: Seconds, missing_s: Seconds) -> None:
        """A group broke after a silence of `silent_s`, and after `missing_s` without a stream."""
        stall = self.stall(what, size)
        late = self.arrivals.broke(missing_s)
        if stall.broke(silent_s) or late:  # slow chunks mean slow messages, too
            stall.missed()
            self.arrivals.missed()
