"""How long a group waits for its members to come, and for anything to move.

A group's slices move at whatever speed its links have, and while they move nobody hurries them: an
average has no deadline of its own. What has one is *silence*. It follows what was seen
(`core/deadlines.py`), so that nobody has to know how fast the links are:

* `arrival_s`: members learn of their group one after the other; so long they wait for each other's
  streams. At first `ARRIVAL_S`, and never less; more where words take longer.
* `stall_s`: a group in which nothing has moved for as long as whole groups of its kind usually take
  is broken. Of its kind are those that average the same and are about as large. Never less than
  `STALL_S`, and, until enough were seen, as long as the ceiling.

The ceiling of both is `average_timeout_s`.

**Slow is not broken.** A member that lets its slices drip makes its group as slow as it is itself,
as a trainer that computes for long does. A claimed group ends with its lease. A scheduled one has
no bound beside this one: to break what moves would free nobody, since all its members are alive and
the same ones meet again, and whatever is done of it would have to be done once more.

**Slower.** A link that becomes ten times slower breaks a group only if nothing of it arrives for
longer than whole groups took, and then one group: whoever has waited for more than half of its
deadline when another member gives up does not trust what it has seen either.
"""

from p2ptrain.core.deadlines import Deadline
from p2ptrain.core.effects import What
from p2ptrain.ids import Seconds

ARRIVAL_S: Seconds = 2.0
"""Members of a group are not late before."""

STALL_S: Seconds = 5.0
"""A busy peer, or a worker thread that copies a large model, may be silent for so long."""


class Transfers:
    """What one peer has seen of the groups it was in; `most_s` is the ceiling of all it says."""

    def __init__(self, most_s: Seconds) -> None:
        self._most_s = most_s
        self._arrivals = Deadline(min(ARRIVAL_S, most_s), most_s, min(ARRIVAL_S, most_s))
        self._kinds: dict[tuple[What, int], Deadline] = {}

    @property
    def arrival_s(self) -> Seconds:
        """A member whose stream is not here so long after the group began is late."""
        return self._arrivals.seconds

    def arrived(self, after_s: Seconds) -> None:
        self._arrivals.took(after_s)

    def stall_s(self, what: What, size: int) -> Seconds:
        """A group of so many members in which nothing moves for so long is broken."""
        return self._of(what, size).seconds

    def done(self, what: What, size: int, after_s: Seconds) -> None:
        """A group has come to its end."""
        self._of(what, size).took(after_s)

    def broke(self, what: What, size: int, silent_s: Seconds, missing_s: Seconds) -> None:
        """A group has broken: nothing had moved for `silent_s`.

        And for `missing_s` one had been waited for that never came.
        """
        stall = self._of(what, size)
        late = self._arrivals.broke(missing_s)
        if stall.broke(silent_s) or late:  # where slices have become slow, so have words
            stall.missed()
            self._arrivals.missed()

    def _of(self, what: What, size: int) -> Deadline:
        kind = what, size.bit_length()
        if kind not in self._kinds:
            self._kinds[kind] = Deadline(min(STALL_S, self._most_s), self._most_s, self._most_s)
        return self._kinds[kind]
