"""What is told on, to whom it may concern: records within a fixed number of bytes.

Whatever a peer sends to another one of the membership carries its own record, what it thinks of
the receiver, then the news, least told first, then all others in turn. News is told a few times,
`RETELL` for each doubling of the swarm, which reaches everyone with high probability; after that
its record comes with its turn, as everybody's does. So the cost of a message does not grow with the
swarm, and what a message missed (a partition, say) arrives with some later turn.
"""

import math
from itertools import islice

from p2ptrain.core.messages import Member
from p2ptrain.core.roster import Roster
from p2ptrain.ids import PeerId

RETELL = 3
"""Each piece of news is told so often, times the logarithm of the swarm's size."""

RECORD_BYTES = 59
"""Of a record on the wire, beside its texts, at most (`net/wire.py`; a test compares)."""


class Gossip:
    """What one peer tells of the others in `roster`, `budget` bytes at a time."""

    def __init__(self, roster: Roster, budget: int) -> None:
        self._roster = roster
        self._budget = budget
        self._news: dict[PeerId, int] = {}  # peer -> how often its record is still to be told
        self._news_by: dict[int, dict[PeerId, None]] = {}  # how often -> these peers, in order
        self._turn = 0  # whose record fills the next message

    @property
    def news(self) -> dict[PeerId, int]:
        """How often whose record is still to be told; to be read."""
        return self._news

    def spread(self, peer: PeerId, *, is_known: bool) -> None:
        """There is news of `peer`; `is_known` if its owner has told everyone already."""
        rounds = 1 if is_known else math.ceil(math.log2(len(self._roster.others) + 2))
        self._tell(peer, RETELL * rounds)

    def forget(self, peer: PeerId) -> None:
        """There is nothing to tell of `peer`."""
        self._tell(peer, 0)

    def records(self, me: Member, *about: PeerId) -> tuple[Member, ...]:
        """Ourselves, what we think of `about`, the news, then the others in turn.

        However long names are, one record beside those of `about` has room.
        """
        others = self._roster.others
        chosen = {peer: others[peer] for peer in about if peer in others}
        left = self._budget - size_of(me) - sum(map(size_of, chosen.values()))
        least = len(chosen) + 1
        for peer in self._first_news(left // RECORD_BYTES + 1):
            if peer in chosen:
                continue
            left -= size_of(others[peer])
            if left < 0 and len(chosen) >= least:
                break
            chosen[peer] = others[peer]
        names = self._roster.names.sorted
        for _ in names:
            peer = names[self._turn % len(names)]
            if peer not in chosen:
                left -= size_of(others[peer])
                if left < 0 and len(chosen) >= least:
                    break
                chosen[peer] = others[peer]
            self._turn += 1
        for peer in chosen:
            if peer in self._news:
                self._tell(peer, self._news[peer] - 1)
        return (me, *chosen.values())

    def _first_news(self, count: int) -> list[PeerId]:
        """Up to `count` peers of whom there is news, the least told first."""
        first: list[PeerId] = []
        for often in sorted(self._news_by, reverse=True):
            first += islice(self._news_by[often], max(0, count - len(first)))
        return first

    def _tell(self, peer: PeerId, often: int) -> None:
        """The record of `peer` is to be told so often from now on."""
        before = self._news.pop(peer, 0)
        if before:
            del self._news_by[before][peer]
            if not self._news_by[before]:
                del self._news_by[before]
        if often > 0:
            self._news[peer] = often
            self._news_by.setdefault(often, {})[peer] = None


def size_of(member: Member) -> int:
    """Bytes of a record on the wire, at most."""
    size = RECORD_BYTES + _bytes(member.peer) + _bytes(member.address)
    return size + sum(2 + _bytes(accuser) for accuser in member.accusers)


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else 4 * len(text)
