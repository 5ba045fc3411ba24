"""Keep who has trained which samples of which epoch: the data ledger of a swarm.

An epoch is a permutation of all samples, cut into *parts* of `DataPlan.part_size`. A peer trains a
part in order, so what it has of one is an interval, a *share*. The ledger is the set of all shares
that this peer knows. Merging is a join of a semilattice (of two words about one share the longer
one counts, and "given up" is final), so order and duplication of messages do not matter, and a
share that was lost on the way comes with a later exchange.

**What it says.** Of each epoch how many samples were trained never, once and more often, exactly,
as far as this peer has heard. An epoch is *finished* when each of its samples was trained. Epochs
that were finished `KEPT` epochs ago are *closed*: only their counts are kept, so a ledger's size is
bounded by the parts of the epochs that are open.

**Trust.** A share is its peer's own word; a liar can keep a sample from being trained, and others
cannot know. Bounded are the shares of an epoch (four per part, and some), and the epochs ahead
(`MOST_AHEAD`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from p2ptrain.errors import ConfigError, StateError
from p2ptrain.ids import PeerId

MOST_PARTS = 1 << 14
"""Of an epoch. More: finer dealing, and messages and memory in proportion."""

MOST_SAMPLES = 1 << 48

KEPT = 2
"""Finished epochs of which all shares are kept, since late words about them may come."""

MOST_AHEAD = 64
"""Epochs from the first open one on of which shares are taken in."""

MOST_CLOSED = 4096
"""Closed epochs whose counts are kept."""

FINEST = 1024
"""Parts of an epoch, where a plan does not say how large they are."""

SMALLEST = 16
"""Samples of a part, at least, where a plan does not say how large they are."""


def usual_part(samples: int) -> int:
    """Samples of a part, for data of so many: about a batch, or a thousandth of the data."""
    return max(SMALLEST, -(-samples // FINEST))


@dataclass(frozen=True, slots=True)
class DataPlan:
    """What is dealt; the same at all peers of a swarm.

    Raises:
        ConfigError: if there is nothing to deal, or there are more than `MOST_PARTS` parts.
    """

    samples: int
    """Of an epoch."""
    part_size: int
    """Samples of a part. Larger: fewer messages; one peer's part takes longer, and so does the end
    of an epoch. Smaller: up to `MOST_PARTS` parts."""
    seed: int = 0
    """Of the dealing and of the order of an epoch."""

    def __post_init__(self) -> None:
        if not 1 <= self.samples <= MOST_SAMPLES:
            raise ConfigError(f"{self.samples} samples cannot be dealt; give 1 to {MOST_SAMPLES}")
        if self.part_size < 1:
            raise ConfigError(f"part_size = {self.part_size} must be 1 or more")
        if self.parts > MOST_PARTS:
            least = -(-self.samples // MOST_PARTS)
            raise ConfigError(
                f"part_size = {self.part_size} cuts {self.samples} samples into {self.parts} "
                f"parts, and {MOST_PARTS} are allowed; make it {least} or more"
            )

    @property
    def parts(self) -> int:
        """Of an epoch; the last may be shorter."""
        return -(-self.samples // self.part_size)

    def size_of(self, part: int) -> int:
        """Samples of this part."""
        return min(self.part_size, self.samples - part * self.part_size)


@dataclass(frozen=True, slots=True)
class Share:
    """What one life of one peer has of one part: it has trained the samples [start, stop) of it."""

    epoch: int
    part: int
    peer: PeerId
    life: int
    number: int
    """Of the shares of this life."""
    start: int
    stop: int
    is_open: bool = True
    """It goes on with this part; others leave it alone while the peer lives."""

    @property
    def key(self) -> tuple[PeerId, int, int]:
        """Among the shares of one part."""
        return self.peer, self.life, self.number


@dataclass(frozen=True, slots=True)
class EpochCount:
    """How many samples of one epoch were trained how often."""

    epoch: int
    never: int
    once: int
    again: int
    """More often than once."""
    trained: int
    """Samples that were trained in this epoch, each as often as that."""


class DataLedger:
    """All shares that one peer knows."""

    def __init__(self, plan: DataPlan) -> None:
        self.plan = plan
        self.begin = 0
        """The first epoch whose shares are kept."""
        self.closed: dict[int, EpochCount] = {}
        """Counts of epochs before that, as far as they are known."""
        self._epochs: dict[int, dict[int, dict[tuple[PeerId, int, int], Share]]] = {}
        self._reach: dict[int, dict[int, int]] = {}  # of each part, how far it is trained from 0
        self._full: dict[int, int] = {}  # parts of an epoch that are
        self._sizes: dict[int, int] = {}  # shares of an epoch
        self._lives: dict[PeerId, int] = {}

    # --- what is known ----------------------------------------------------------------------------

    @property
    def finished(self) -> int:
        """The number of finished epochs, without gaps from the first one on."""
        epoch = self.begin
        while self.is_finished(epoch):
            epoch += 1
        return epoch

    def is_finished(self, epoch: int) -> bool:
        """Whether all its samples were trained."""
        return epoch < self.begin or self._full.get(epoch, 0) == self.plan.parts

    def reach(self, epoch: int, part: int) -> int:
        """How many samples of this part were trained, counted from its first one."""
        return self._reach.get(epoch, {}).get(part, 0)

    def shares(self, epoch: int, part: int) -> Iterable[Share]:
        """All that is known of one part."""
        return self._epochs.get(epoch, {}).get(part, {}).values()

    def life_of(self, peer: PeerId) -> int:
        """Its latest life that a share is known of; 0 if none is."""
        return self._lives.get(peer, 0)

    def all_shares(self) -> Iterator[Share]:
        """Those that are kept, epoch by epoch."""
        for epoch in sorted(self._epochs):
            for part in sorted(self._epochs[epoch]):
                yield from self._epochs[epoch][part].values()

    def counts(self, most: int = MOST_CLOSED) -> tuple[EpochCount, ...]:
        """Of the last `most` epochs that have begun, in order."""
        of_open = [count for epoch in sorted(self._epochs) if (count := self.count(epoch)).trained]
        return (*self.closed.values(), *of_open)[-most:]

    def count(self, epoch: int) -> EpochCount:
        """Of one epoch whose shares are kept."""
        once = again = trained = 0
        for shares in self._epochs.get(epoch, {}).values():
            seen, more = _covered([(one.start, one.stop) for one in shares.values()])
            once, again = once + seen - more, again + more
            trained += sum(one.stop - one.start for one in shares.values())
        return EpochCount(epoch, self.plan.samples - once - again, once, again, trained)

    # --- what is new ------------------------------------------------------------------------------

    def merge(self, share: Share) -> bool:
        """Take one share in, ours or another's; true if it says something new."""
        plan, epoch, part = self.plan, share.epoch, share.part
        if not self.begin <= epoch < self.begin + MOST_AHEAD or not 0 <= part < plan.parts:
            return False
        if not 0 <= share.start <= share.stop <= plan.size_of(part):
            return False
        shares = self._epochs.setdefault(epoch, {}).setdefault(part, {})
        known = shares.get(share.key)
        if known is None:
            if self._sizes.get(epoch, 0) >= 4 * plan.parts + MOST_PARTS // 8:
                return False  # of honest peers there are few more than parts
            self._sizes[epoch] = self._sizes.get(epoch, 0) + 1
        else:
            is_open = known.is_open and share.is_open
            start, stop = known.start, max(known.stop, share.stop)
            share = replace(share, start=start, stop=stop, is_open=is_open)
            if share == known:
                return False
        shares[share.key] = share
        self._lives[share.peer] = max(self._lives.get(share.peer, 0), share.life)
        self._extend(epoch, part)
        return True

    def jump(self, begin: int, closed: Iterable[EpochCount]) -> bool:
        """Others have closed all epochs before `begin`; true if this peer had not."""
        if begin <= self.begin:
            return False
        for count in sorted(closed, key=lambda one: one.epoch):
            if self.begin <= count.epoch < begin:
                self._close(count)
        self.begin = begin
        for epoch in [one for one in self._epochs if one < begin]:
            self._drop(epoch)
        return True

    def _extend(self, epoch: int, part: int) -> None:
        reaches = self._reach.setdefault(epoch, {})
        before = reach = reaches.get(part, 0)
        spans = sorted((one.start, one.stop) for one in self._epochs[epoch][part].values())
        for start, stop in spans:
            if start <= reach:
                reach = max(reach, stop)
        reaches[part] = reach
        size = self.plan.size_of(part)
        if before < size == reach:
            self._full[epoch] = self._full.get(epoch, 0) + 1
            while self.finished - self.begin > KEPT:
                self._close(self.count(self.begin))
                self._drop(self.begin)
                self.begin += 1

    def _close(self, count: EpochCount) -> None:
        self.closed[count.epoch] = count
        while len(self.closed) > MOST_CLOSED:
            del self.closed[min(self.closed)]

    def _drop(self, epoch: int) -> None:
        for of_epochs in (self._epochs, self._reach, self._full, self._sizes):
            of_epochs.pop(epoch, None)

    # --- its state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, object]:
        """Everything, in what JSON can hold."""
        plan = self.plan
        return {
            "plan": [plan.samples, plan.part_size, plan.seed],
            "begin": self.begin,
            "closed": [
                [c.epoch, c.never, c.once, c.again, c.trained] for c in self.closed.values()
            ],
            "shares": [
                [s.epoch, s.part, s.peer, s.life, s.number, s.start, s.stop, s.is_open]
                for s in self.all_shares()
            ],
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Replace everything by what `state_dict` has returned, of a ledger of the same plan.

        Raises:
            StateError: if it is of another plan, or no such state; nothing has changed then.
        """
        try:
            plan = DataPlan(*_numbers(state["plan"], 3))
            fresh = DataLedger(plan)
            counts = [EpochCount(*_numbers(one, 5)) for one in _list(state["closed"])]
            (begin,) = _numbers([state["begin"]], 1)
            fresh.jump(begin, counts)
            shares = [_share(_list(one)) for one in _list(state["shares"])]
            if plan != self.plan:
                raise StateError(f"a data ledger of {plan} does not fit one of {self.plan}")
            for share in shares:
                fresh.merge(share)
        except (KeyError, TypeError, ValueError, ConfigError) as error:
            raise StateError(f"this is no state of a data ledger: {error}") from error
        self.__dict__.update(fresh.__dict__)


def _list(value: object) -> Sequence[object]:
    if not isinstance(value, list | tuple):
        raise TypeError(f"{value!r} is no list")
    return value


def _numbers(value: object, count: int) -> list[int]:
    numbers = [one for one in _list(value) if isinstance(one, int)]
    if len(numbers) != count or len(_list(value)) != count or min(numbers) < 0:
        raise ValueError(f"{value!r} are not {count} numbers")
    return numbers


def _share(fields: Sequence[object]) -> Share:
    first, second, peer, *rest = fields
    if not isinstance(peer, str):
        raise TypeError(f"{peer!r} is no name")
    epoch, part, life, number, start, stop, is_open = _numbers([first, second, *rest], 7)
    return Share(epoch, part, PeerId(peer), life, number, start, stop, bool(is_open))


def _covered(spans: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Places that are in one of `spans` or more, and those that are in more than one."""
    ends = sorted([(start, 1) for start, _ in spans] + [(stop, -1) for _, stop in spans])
    depth = before = seen = more = 0
    for at, change in ends:
        seen += (at - before) * (depth >= 1)
        more += (at - before) * (depth >= 2)
        depth, before = depth + change, at
    return seen, more
