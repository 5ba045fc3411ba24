"""Decide which samples this peer trains next: an epoch's parts, dealt by rendezvous hashing.

Each part of an epoch belongs to one of the peers that train, the one with the highest hash of part
and name (Thaler and Ravishankar, "A name-based mapping scheme for rendezvous", 1996). Nothing is
agreed on: the deal follows from the view, and when a peer comes or goes, only its own parts move.

**Once.** A peer claims a part by an open share in the ledger (`core/data_ledger.py`), of which all
hear, a step before it trains it. Others leave the part alone as long as its peer lives. If two
claim one part at the same time, both hear of it before either trains it, and the one that it
belongs to less gives it up. When a peer dies, the rest of its part is dealt again, from the last
sample on that it told of. So a sample is trained twice only if its peer died before others heard of
it, if messages took longer than a step, or if a peer was thought dead that was not.

**At least once.** A peer that has none of its own parts left helps others: it takes of those parts
that their owners have not begun and will not take next. Which helper takes which part follows from
the ledger and the view, too, since peers in step choose at the same moment, before they can hear of
each other. With none of these it goes on with the next epoch. When it would be `AHEAD` epochs
beyond an open one, it takes what others have begun there and not ended: they may be stuck.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from p2ptrain.core.data_ledger import MOST_AHEAD, DataLedger, Share
from p2ptrain.ids import PeerId

AHEAD = 2
"""How many epochs beyond an open one a peer goes before it trains what others have begun."""


@dataclass(frozen=True, slots=True)
class Dealt:
    """Samples to train: the places [start, stop) of this epoch's order."""

    epoch: int
    start: int
    stop: int


class Dealer:
    """One peer's dealing, on its ledger.

    Args:
        ledger: what is known of the swarm's training; this object adds our own shares to it.
        me: this peer.
        life: above all earlier ones of this name.
    """

    def __init__(self, ledger: DataLedger, me: PeerId, life: int) -> None:
        self.ledger = ledger
        self.me = me
        self.life = life
        self._claims: deque[Share] = deque()  # to be taken next, in order
        self._taken: deque[Share] = deque()  # not yet trained to their ends, in order
        self._told: list[Share] = []
        self._number = 0
        self._late: set[int] = set()  # numbers of claims to what others are at, knowingly
        self._fresh = 0  # samples that were taken since some were trained
        self._ahead = 0  # samples that are claimed ahead: those of a step
        self._owners: dict[int, Sequence[PeerId]] = {}  # by epoch, of each part, in this view
        self._orders: dict[int, Sequence[int]] = {}  # by epoch
        self._view: Sequence[PeerId] = ()

    @property
    def taken(self) -> int:
        """Samples that were taken and are not trained yet."""
        return sum(map(self._left, self._taken))

    def take_told(self) -> tuple[Share, ...]:
        """Our shares that are new since the last call: for the others to hear."""
        told, self._told = self._told, []
        return tuple(told)

    def take(self, view: Sequence[PeerId], only: int | None = None) -> Dealt | None:
        """The next samples to train.

        Args:
            view: the peers that train, sorted, with this one.
            only: an epoch; None is returned if it has nothing left for us.
        """
        self._look_at(view)
        self._drop_lost()
        if not self._claims:
            self._claim()
        share = self._claims[0]
        if only is not None and share.epoch != only:
            return None
        self._claims.popleft()
        self._late.discard(share.number)
        self._taken.append(share)
        self._fresh += self._left(share)
        while sum(map(self._left, self._claims)) < self._ahead:
            self._claim()
        offset = share.part * self.ledger.plan.part_size
        stop = offset + self.ledger.plan.size_of(share.part)
        return Dealt(share.epoch, offset + share.start, stop)

    def heard(self, view: Sequence[PeerId]) -> None:
        """The ledger has new shares of others: what they have is not claimed by us any more."""
        self._look_at(view)
        for _ in range(self._drop_lost()):
            self._claim()

    def trained(self, samples: int) -> tuple[Dealt, ...]:
        """So many of the samples that were taken, in order, are trained; which those are.

        Fewer than `samples`, if fewer were taken.
        """
        spans = []
        self._ahead, self._fresh = self._fresh or self._ahead, 0
        while samples > 0 and self._taken:
            share = self._taken.popleft()
            size = min(samples, self._left(share))
            stop = share.stop + size
            whole = stop == self.ledger.plan.size_of(share.part)
            offset = share.part * self.ledger.plan.part_size
            spans.append(Dealt(share.epoch, offset + share.stop, offset + stop))
            samples -= size
            share = replace(share, stop=stop, is_open=not whole)
            self._tell(share)
            if not whole:
                self._taken.appendleft(share)
        return tuple(spans)

    def give_back(self) -> None:
        """What was taken and is not trained will not be, by us, unless we take it again."""
        if self._taken:
            for share in (*self._taken, *self._claims):  # what is left over comes before the rest
                self._tell(replace(share, is_open=False))
            self.forget_taken()

    def forget_taken(self) -> None:
        """What was taken and claimed is of another ledger: it is as good as never taken."""
        self._taken.clear()
        self._claims.clear()

    # --- inside -----------------------------------------------------------------------------------

    def _tell(self, share: Share) -> None:
        self.ledger.merge(share)
        self._told.append(share)

    def _left(self, share: Share) -> int:
        return self.ledger.plan.size_of(share.part) - share.stop

    def _look_at(self, view: Sequence[PeerId]) -> None:
        if view != self._view:
            self._view, self._owners = view, {}

    def _claim(self) -> None:
        epoch, part, is_late = self._next()
        if is_late:
            self._late.add(self._number)
        start = min(self.ledger.reach(epoch, part), self.ledger.plan.size_of(part) - 1)
        share = Share(epoch, part, self.me, self.life, self._number, start, start)
        self._number += 1
        self._claims.append(share)
        self._tell(share)

    def _drop_lost(self) -> int:
        """Give up what we have claimed and others have, or have trained; how many those are."""
        kept = [share for share in self._claims if not self._is_lost(share)]
        lost = [share for share in self._claims if share not in kept]
        self._claims = deque(kept)
        for share in lost:
            self._tell(replace(share, is_open=False))
        return len(lost)

    def _is_lost(self, ours: Share) -> bool:
        epoch, part = ours.epoch, ours.part
        if ours.number in self._late:
            return False  # or else two that claim the same would do so for ever
        if epoch < self.ledger.begin or self.ledger.reach(epoch, part) > ours.start:
            return True
        here, owners = set(self._view), self._owners_of(epoch)

        def nearness(peer: PeerId) -> tuple[bool, int]:
            return owners[part] == peer, self._score(epoch, peer)(part)

        return any(
            self._is_at(other, here) and nearness(other.peer) > nearness(self.me)
            for other in self.ledger.shares(epoch, part)
            if other.peer != self.me
        )

    def _next(self) -> tuple[int, int, bool]:
        """The epoch and the part to claim next, and whether others are at it."""
        here = {peer for peer in self._view if peer != self.me}
        first = self.ledger.finished
        for epoch in range(first, self.ledger.begin + MOST_AHEAD):
            if epoch == first + AHEAD and (late := self._untrained(first)):
                return first, self._some(late), True
            found = self._of_epoch(epoch, here)
            if found is not None:
                return epoch, found, False
        late = self._untrained(first) or range(self.ledger.plan.parts)
        return first, self._some(late), True

    def _some(self, parts: Sequence[int]) -> int:
        """One of these, others for other peers and the next time."""
        return parts[self._score(self._number, self.me)(0) % len(parts)]

    def _of_epoch(self, epoch: int, here: set[PeerId]) -> int | None:
        """Our next part of this epoch; None if it has none for us."""
        owners, held = self._owners_of(epoch), self._held(epoch)
        free: defaultdict[PeerId, list[int]] = defaultdict(list)
        for part in self._by_hash(epoch):
            is_ours = part in held
            if not is_ours and self.ledger.reach(epoch, part) == self.ledger.plan.size_of(part):
                continue
            shares = self.ledger.shares(epoch, part)
            if is_ours or not any(self._is_at(share, here) for share in shares):
                free[owners[part]].append(part)
        for peer, parts in free.items():  # each in an order of its own, should views differ
            parts.sort(key=self._score(epoch, peer))
        if own := [part for part in free[self.me] if part not in held]:
            return own[0]
        left = [part for parts in free.values() for part in parts[1:]]  # a peer has its next one
        helpers = [peer for peer in self._view if not free[peer]]
        if self.me not in helpers:
            helpers.append(self.me)  # it holds parts of its own, and has no other
        left.sort(key=self._score(epoch, ""))
        helpers.sort(key=lambda peer: self._score(epoch, peer)(0))
        ours = left[helpers.index(self.me) :: len(helpers)]
        return next((part for part in ours if part not in held), None)

    def _untrained(self, epoch: int) -> Sequence[int]:
        """Parts of an epoch that are not trained to their ends, without ours."""
        ledger, plan, held = self.ledger, self.ledger.plan, self._held(epoch)
        return [
            part
            for part in self._by_hash(epoch)
            if ledger.reach(epoch, part) < plan.size_of(part) and part not in held
        ]

    def _held(self, epoch: int) -> set[int]:
        ours = (*self._taken, *self._claims)
        return {share.part for share in ours if share.epoch == epoch}

    def _is_at(self, share: Share, others: set[PeerId]) -> bool:
        """Whether another peer is at this share, and goes on with it."""
        if not share.is_open or share.peer not in others:
            return False
        return share.life == self.ledger.life_of(share.peer)

    def _owners_of(self, epoch: int) -> Sequence[PeerId]:
        """To which peer each part of an epoch belongs, in this view."""
        if epoch not in self._owners:
            scores = [(self._score(epoch, peer), peer) for peer in self._view]
            self._owners = {one: them for one, them in self._owners.items() if one >= epoch - AHEAD}
            self._owners[epoch] = [
                max((score(part), peer) for score, peer in scores)[1]
                for part in range(self.ledger.plan.parts)
            ]
        return self._owners[epoch]

    def _by_hash(self, epoch: int) -> Sequence[int]:
        """The parts of an epoch, in the order in which each peer takes its own."""
        if epoch not in self._orders:
            self._orders = {one: them for one, them in self._orders.items() if one >= epoch - AHEAD}
            parts = range(self.ledger.plan.parts)
            self._orders[epoch] = sorted(parts, key=self._score(epoch, ""))
        return self._orders[epoch]

    def _score(self, epoch: int, peer: str) -> "_Score":
        return _Score(f"{self.ledger.plan.seed}/{epoch}/{peer}")


class _Score:
    """A hash of a part for one peer and epoch: 64 bits, mixed as in splitmix64 (Steele 2014)."""

    def __init__(self, text: str) -> None:
        self._key = int.from_bytes(blake2b(text.encode(), digest_size=8).digest())

    def __call__(self, part: int) -> int:
        mask = (1 << 64) - 1
        mixed = (self._key + part * 0x9E3779B97F4A7C15) & mask
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & mask
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & mask
        return mixed ^ mixed >> 31
