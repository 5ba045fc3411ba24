"""Select membership records to piggyback on a message, within a byte budget.

A message to another member carries the sender's own record, the receiver's, then the pending
updates, least sent first, then all other records in turn. An update is sent `RETRANSMITS` times for
each doubling of the swarm, which reaches everyone with high probability. So the cost of a message
does not grow with the swarm, and a record that was missed (during a partition, say) arrives with a
later turn. Source: SWIM, section 4.1.
"""

import math
from itertools import islice

from p2ptrain.core.messages import Member
from p2ptrain.core.roster import Roster
from p2ptrain.ids import PeerId

RETRANSMITS = 3
"""An update is sent so often, times the logarithm of the swarm's size."""

RECORD_BYTES = 59
"""Of a record on the wire, beside its texts, at most (`net/wire.py`; a test compares)."""


class Gossip:
    """Chooses which records of `roster` one peer sends, `budget` bytes at a time."""

    def __init__(self, roster: Roster, budget: int) -> None:
        self._roster = roster
        self._budget = budget
        self.updates: dict[PeerId, int] = {}
        """How often each record is still to be sent; read only."""
        self._updates_by: dict[int, dict[PeerId, None]] = {}  # how often -> these peers, in order
        self._turn = 0  # whose record fills the next message

    def spread(self, peer: PeerId, *, is_known: bool) -> None:
        """Schedule an update of `peer`; `is_known` if it has sent its record to all itself."""
        rounds = 1 if is_known else math.ceil(math.log2(len(self._roster.records) + 2))
        self._schedule(peer, RETRANSMITS * rounds)

    def forget(self, peer: PeerId) -> None:
        """Drop a pending update of `peer`."""
        self._schedule(peer, 0)

    def records(self, *about: PeerId) -> tuple[Member, ...]:
        """Our record, those of `about`, pending updates, then the others in turn.

        At least one record beside those of `about` is included, however long names are.
        """
        me, known, names = self._roster.me, self._roster.records, self._roster.names
        chosen = {peer: known[peer] for peer in about if peer in known}
        left = self._budget - size_of(me) - sum(map(size_of, chosen.values()))
        least = len(chosen) + 1

        for peer in self._first_updates(left // RECORD_BYTES + 1):
            if peer in chosen:
                continue
            left -= size_of(known[peer])
            if left < 0 and len(chosen) >= least:
                break
            chosen[peer] = known[peer]
        for _ in names:
            peer = names[self._turn % len(names)]
            if peer not in chosen:
                left -= size_of(known[peer])
                if left < 0 and len(chosen) >= least:
                    break
                chosen[peer] = known[peer]
            self._turn += 1
        for peer in chosen:
            if peer in self.updates:
                self._schedule(peer, self.updates[peer] - 1)
        return (me, *chosen.values())

    def _first_updates(self, count: int) -> list[PeerId]:
        """Up to `count` peers with pending updates, least sent first."""
        first: list[PeerId] = []
        for often in sorted(self._updates_by, reverse=True):
            first += islice(self._updates_by[often], max(0, count - len(first)))
        return first

    def _schedule(self, peer: PeerId, often: int) -> None:
        """Set how often the record of `peer` is still to be sent."""
        before = self.updates.pop(peer, 0)
        if before:
            del self._updates_by[before][peer]
            if not self._updates_by[before]:
                del self._updates_by[before]
        if often > 0:
            self.updates[peer] = often
            self._updates_by.setdefault(often, {})[peer] = None


def size_of(member: Member) -> int:
    """Bytes of a record on the wire, at most."""
    size = RECORD_BYTES + _bytes(member.peer) + _bytes(member.address)
    return size + sum(2 + _bytes(accuser) for accuser in member.accusers)


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else 4 * len(text)
