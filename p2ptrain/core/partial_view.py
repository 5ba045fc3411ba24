"""Choose which members a peer keeps a record of, in a swarm that is too large to know all.

A peer *chooses* `size` members: of all that have ever answered it and that are here, those of the
lowest rank. A rank is a keyed hash of the name, and each peer has a key of its own, so what it
chooses is a uniform random sample of them, whatever the order in which it hears of members and
however often. The graph of who has chosen whom is a random one; those mix in O(log P) rounds. Pings
carry records of members, so each peer soon hears of all; one that it would choose it asks whether
it is there. Names that no one answers for are never chosen.

It probes those that it has chosen, in rounds. About as many others have chosen this peer, and probe
it. It keeps those, too, since it has to answer them. A *stranger*, who is kept but not chosen, is
forgotten after `PATIENCE` rounds of silence, or makes room when there are more than `KEPT` times
`size` records: the one that was silent for longest, or one that has not answered yet if many have
not.

Invariant: a member that is here and chosen is not forgotten.

Source: min-wise sampling, Brahms (Bortnikov, Gurevich, Keidar, Kliot, Shraer, Computer Networks
2009), section 4; as there, samples are validated.
"""

import hashlib
from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import chain, takewhile

from p2ptrain.ids import PeerId

KEPT = 3
"""Records, over those that are chosen. With room for fewer than choose this peer (about as many as
it chooses) it would forget some of them again and again."""

PATIENCE = 10
"""Rounds. Those of a peer that doubts itself last up to five times as long as ours."""

KEY_BYTES, RANK_BYTES = 16, 7


class PartialView:
    """Which of the members are chosen, and which make room.

    Args:
        size: members to choose; 1 or more.
        key: of the ranks; secret, at most 64 bytes. Others could choose names by it.
        peers: of the whole swarm, about.
    """

    def __init__(self, size: int, key: bytes, peers: int = 0) -> None:
        self.size = size
        self.peers = peers
        self._key = key
        self._ranks: list[int] = []  # of members that are here and have answered, sorted
        self._rank_of: dict[PeerId, int] = {}  # of all members
        self._unmet: dict[PeerId, None] = {}  # members that have not answered
        self._spoke: dict[PeerId, int] = {}  # all others: in which round, who spoke last at the end
        self._round = 0

    @property
    def most(self) -> int:
        """Records that are kept."""
        return KEPT * self.size

    def wants(self, peer: PeerId) -> bool:
        """True if one that we do not know would be chosen, were it a member that is here."""
        return len(self._ranks) < self.size or self._rank(peer) < self._ranks[self.size - 1]

    def has_chosen(self, peer: PeerId) -> bool:
        """Whether a member is here, has answered, and is known for its rank."""
        at, rank = self._place(peer)
        return at < self.size and self._ranks[at : at + 1] == [rank]

    def keep(self, peer: PeerId, *, is_here: bool, is_met: bool) -> None:
        """A member is here from now on or not any more, and has answered us or not."""
        at, rank = self._place(peer)
        self._rank_of[peer] = rank
        if is_met and peer not in self._spoke:
            self._unmet.pop(peer, None)
            self._spoke[peer] = self._round
        elif not is_met and peer not in self._spoke:
            self._unmet[peer] = None
        if (self._ranks[at : at + 1] == [rank]) is (is_here and is_met):
            return
        if is_here and is_met:
            insort(self._ranks, rank)
        else:
            del self._ranks[at]

    def spoke(self, peer: PeerId) -> None:
        """A member has sent us something."""
        if peer not in self._unmet:
            self._spoke.pop(peer, None)
            self._spoke[peer] = self._round

    def forget(self, peer: PeerId) -> None:
        """There is no record of it any more."""
        self.keep(peer, is_here=False, is_met=False)
        self._spoke.pop(peer, None)
        self._unmet.pop(peer, None)
        del self._rank_of[peer]

    def begin_round(self) -> list[PeerId]:
        """A round of probes begins; returns the strangers that were silent for too long."""
        self._round += 1
        last = self._round - PATIENCE
        silent = takewhile(lambda peer: self._spoke[peer] < last, self._spoke)
        return [peer for peer in silent if not self.has_chosen(peer)]

    def strangers(self) -> Iterator[PeerId]:
        """Members that are not chosen, in the order in which they make room."""
        silent = (peer for peer in self._spoke if not self.has_chosen(peer))
        are_many = len(self._unmet) > self.size // 2
        return chain(self._unmet, silent) if are_many else chain(silent, self._unmet)

    def _place(self, peer: PeerId) -> tuple[int, int]:
        rank = self._rank(peer)
        return bisect_left(self._ranks, rank), rank

    def _rank(self, peer: PeerId) -> int:
        if (known := self._rank_of.get(peer)) is not None:
            return known
        digest = hashlib.blake2b(peer.encode(), digest_size=RANK_BYTES, key=self._key).digest()
        return int.from_bytes(digest)
