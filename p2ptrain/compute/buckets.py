"""Cut the gradient vector into buckets, each final while the backward pass still runs.

A backward pass makes the gradients of the last layers first. So the vector of G numbers is cut from
its end: a bucket holds neighbouring parameters, whole, and is final when all of these are::

    G numbers:  | layer 1, 2 | layer 3 | layer 4, 5, 6 | buffers |
    buckets:         2            1            0            3

Buffers come last: a forward pass that is repeated within the backward pass changes them again.
Which parameters share a bucket follows from the model and the size alone, so all peers cut alike;
*when* a bucket is final may differ from peer to peer.

What a bucket held when it was taken must still hold at the boundary, or it counts for nothing: a
program may clip, unscale or add to its gradients in between, or go backward once more.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from p2ptrain.core.shards import Span
from p2ptrain.errors import StateError
from p2ptrain.vectors import Vector

MOST_NUMBERS = 25 << 16
"""Numbers of a bucket where no size is given. Several travel together then: four at first, 25 MiB,
as much as with torch's DDP (`runtime/bucket_tuner.py`). Larger: too few to choose from."""

USUAL_COUNT = 64
"""A smaller model has so many buckets."""

LEAST_NUMBERS = 1 << 14
"""A bucket has so many numbers, at least."""


def bucket_size(size: int, mib: float) -> int:
    """Numbers of a bucket, of `size` numbers in all; `mib` is what was asked for, or 0."""
    if mib:
        return max(1, round(mib * (1 << 18)))
    return min(MOST_NUMBERS, max(LEAST_NUMBERS, -(-size // USUAL_COUNT)))


def cut(sizes: Sequence[int], most: int) -> list[range]:
    """Which parameters of these `sizes` share a bucket of about `most` numbers, from the last on.

    One without numbers is in the bucket of its neighbours.
    """
    groups: list[range] = []
    stop, held = len(sizes), 0
    for index in reversed(range(len(sizes))):
        held += sizes[index]
        if held >= most or (held and not any(sizes[:index])):
            groups.append(range(index, stop))
            stop, held = index, 0
    if groups and stop:
        groups[-1] = range(groups[-1].stop)
    return groups


class Buckets(ABC):
    """The buckets of one replica, during one step after the other.

    The trainer's side fills them: by itself as gradients become final, or, where a step is made to
    last (`compute/step_timing.py`), as far as it is `reach`ed. The protocol's side says where they
    go. Subclasses know the numbers.
    """

    def __init__(self, gradients: Sequence[Span], buffers: Span) -> None:
        self.spans = (*gradients, buffers) if buffers.size else tuple(gradients)
        """Of the G numbers, in the order in which they are final; the last one may be buffers."""
        self.has_buffers = bool(buffers.size)
        sizes = [span.size for span in self.spans]
        self.shares = [sum(sizes[: index + 1]) / sum(sizes) for index in range(len(sizes))]
        """How much of the vector is final with each bucket, from above 0 to 1."""
        self._gradients = len(gradients)  # so many of them, the first ones
        self.is_held = False
        """They wait for `reach`, although they are final."""
        self._lock = threading.RLock()
        self._into_G: Vector | None = None
        self._weight = 0
        self._taken: Callable[[int], object] = lambda _: None
        self._has_taken: set[int] = set()
        self._is_good = False

    def together(self, count: int) -> tuple[Sequence[Span], Sequence[int]]:
        """Neighbours joined, `count` at a time; buffers stay alone.

        Returns:
            The joined spans, in the order in which they are final; for each bucket, its own one's
            place among them.
        """
        starts = range(0, self._gradients, count)
        last = [self.spans[min(start + count, self._gradients) - 1] for start in starts]
        joined = [
            Span(low.start, self.spans[start].stop) for start, low in zip(starts, last, strict=True)
        ]
        places = [index // count for index in range(self._gradients)]
        if self.has_buffers:
            places.append(len(joined))
            joined.append(self.spans[-1])
        return joined, places

    @property
    def in_forward_order(self) -> Sequence[tuple[int, float]]:
        """Each bucket, and how much of the forward pass has gone by when it is needed.

        Buffers are needed first.
        """
        order = [(index, 1 - share) for index, share in enumerate(self.shares)]
        return sorted(order, key=lambda one: (one[0] < self._gradients, one[1]))

    def begin(self, into_G: Vector, weight: int, taken: Callable[[int], object]) -> None:
        """From now on buckets go into `into_G`, times `weight`; `taken` says which one is there."""
        with self._lock:
            self._into_G, self._weight, self._taken = into_G, weight, taken
            self._has_taken, self._is_good = set(), True

    def stop(self) -> None:
        """Nothing is written any more once this returns."""
        with self._lock:
            self._into_G, self._is_good = None, False

    def close(self) -> None:
        """These buckets are not filled any more."""
        self.stop()

    def reach(self, share: float) -> None:
        """So much of the backward pass is done."""
        for index, reached in enumerate(self.shares):
            if reached <= share + 1e-9 and index < self._gradients:
                self.take(index)

    def take(self, index: int) -> None:
        """This bucket is final: write it, unless it is there or nothing has begun."""
        with self._lock:
            if not self._is_good or self._into_G is None or index in self._has_taken:
                return
            span = self.spans[index]
            try:
                is_there = self._write(index, self._into_G[span.start : span.stop], self._weight)
            except StateError:
                self._is_good = False  # the boundary finds it again, and says so
                return
            self._has_taken.add(index)
            if is_there:
                self._taken(index)

    def finish(self) -> bool:
        """The backward pass is over: write what is left; true if all that was written still holds.

        Trainer waits.
        """
        with self._lock:
            if self._into_G is None:
                return False
            self._is_good = self._is_good and all(map(self._holds, self._has_taken))
            for index in range(len(self.spans)):
                self.take(index)
            return self._is_good

    @abstractmethod
    def _write(self, index: int, into_S: Vector, weight: int) -> bool:
        """Write `weight` times this bucket. Raises StateError if a number is not finite.

        False if it is under way, and `_taken` is called by itself.
        """

    @abstractmethod
    def _holds(self, index: int) -> bool:
        """True if what was written of this bucket is what there is."""
