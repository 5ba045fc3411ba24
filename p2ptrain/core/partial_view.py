"""Choose which members a peer keeps a record of, in a swarm that is too large to know all.

A peer *chooses* `size` members: of all that it has ever heard of and that are here, those of the
lowest rank. A rank is a keyed hash of the name, and each peer has a key of its own, so what it
chooses is a uniform random sample, whatever the order in which it hears of members and however
often: no gossip can bias it, and the graph of who has chosen whom is one of random graphs, which
mix in O(log P) rounds. Pings carry records of members, so each peer soon hears of all.

It probes those, in rounds. About as many others have chosen this peer, and probe it. It keeps
those, too, since it has to answer them: one that it has not chosen is forgotten when it was silent
for two rounds, or makes room when there are more than `KEPT` times `size` records.

Invariant: a member that is here and chosen is not forgotten.

Source: min-wise sampling, Brahms (Bortnikov, Gurevich, Keidar, Kliot, Shraer, Computer Networks
2009), section 4.
"""

import hashlib
from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import takewhile

from p2ptrain.ids import PeerId

KEPT = 3
"""Records, over those that are chosen. With room for fewer than choose this peer (about as many as
it chooses) it would forget some of them again and again."""

KEY_BYTES, RANK_BYTES = 16, 7


class PartialView:
    """Which of the members are chosen, and which one is to make room.

    Args:
        size: members to choose; 1 or more.
        key: of the ranks; secret, at most 64 bytes. Others could choose names by it.
        peers: of the whole swarm, about.
    """

    def __init__(self, size: int, key: bytes, peers: int = 0) -> None:
        self.size = size
        self._peers = peers
        self._key = key
        self._ranks: list[int] = []  # of members that are here, sorted
        self._spoke: dict[PeerId, int] = {}  # in which round, the one that spoke last at the end
        self._round = 0

    @property
    def most(self) -> int:
        """Records that are kept."""
        return KEPT * self.size

    def of_all_others(self, of_known: int) -> int:
        """About what a number is that is summed over all others, given its sum over those here."""
        here = len(self._ranks)
        return round(of_known * max(here, self._peers - 1) / here) if here else of_known

    def wants(self, peer: PeerId) -> bool:
        """True if one that we do not know would be chosen, were it a member that is here."""
        return len(self._ranks) < self.size or self._rank(peer) < self._ranks[self.size - 1]

    def keep(self, peer: PeerId, *, is_here: bool) -> None:
        """A member is here from now on, or is not any more."""
        rank = self._rank(peer)
        at = bisect_left(self._ranks, rank)
        if (self._ranks[at : at + 1] == [rank]) is is_here:
            return
        if is_here:
            insort(self._ranks, rank)
        else:
            del self._ranks[at]

    def spoke(self, peer: PeerId) -> None:
        """We have heard from a member itself, or of it for the first time."""
        self._spoke.pop(peer, None)
        self._spoke[peer] = self._round

    def forget(self, peer: PeerId) -> None:
        """There is no record of it any more."""
        self._spoke.pop(peer, None)

    def begin_round(self) -> Sequence[PeerId]:
        """A round of probes begins; returns who was silent for two, and need not be known."""
        self._round += 1
        silent = takewhile(lambda peer: self._spoke[peer] < self._round - 2, self._spoke)
        return [peer for peer in silent if not self.has_chosen(peer)]

    def one_too_many(self) -> PeerId | None:
        """The member that makes room for another one; None: all of them are chosen."""
        return next((peer for peer in self._spoke if not self.has_chosen(peer)), None)

    def has_chosen(self, peer: PeerId) -> bool:
        """Of a member that is here: whether it is known for its rank."""
        return len(self._ranks) <= self.size or self._rank(peer) <= self._ranks[self.size - 1]

    def _rank(self, peer: PeerId) -> int:
        digest = hashlib.blake2b(peer.encode(), digest_size=RANK_BYTES, key=self._key).digest()
        return int.from_bytes(digest)
