"""Do the arithmetic of an exchange: parts become means, and means become this member's deltas.

Memory is what bounds an average. All work is done *in place*: the vector that a member contributes
becomes its result, chunk by chunk, in blocks that stay in the processor's cache while they are
reduced, turned into a delta (mean - own) and checked. A part of ours may be overwritten once its
owner's answer is there, since the owner has read it.

What an owner hands out for its shard:

* of gradients the mean, which is its own result too;
* of models the mean, from memory beside the vector, where its own result is;
* in a pair its delta: the other adds the opposite, so the two add up to nothing, to the last bit;
* with a lossy codec Q the bytes of Q(mean).

**A lossy codec loses nothing.** Members contribute Q(s), and add Q(mean) - Q(s): what rounding
takes from a part stays with its sender. An owner's own part does not travel, and is taken as it is.
The owner also adds what Q took from the mean, once for each member. So the deltas of a group add
up to nothing, as they do without a codec. In the direct exchange every member has all Q(s), so the
mean is not rounded. (`tests/runtime/test_mix.py` has 2,000 steps of it.) Of gradients all apply the
same Q(mean); what Q took goes into `left_V`, and into the member's next gradient.

**Robust means** (`runtime/robust.py`) give extreme numbers less say, so their deltas do not add up
to nothing: the sum of all models moves by what was left out, which is written down.

Legend of shapes: ``V`` numbers of the vector, ``S`` of one chunk, ``B`` of one block, ``N``
members.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from p2ptrain.compute.codec import Codec
from p2ptrain.compute.replica import Vector
from p2ptrain.core.shards import Span
from p2ptrain.errors import CodecError
from p2ptrain.runtime.ballots import Vote
from p2ptrain.runtime.robust import BLOCK, blocks, clipped_sum, trimmed_sum

HALF = np.float32(0.5)


class NotFinite(Exception):
    """A result would be infinite or not a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """One named vector of a payload; the group computes sum(vectors) / divisor of it."""

    name: str
    vector_V: Vector
    """What this member contributes, float32. It becomes the result: the mean, or with `delta` the
    mean minus what this member contributed. Worthless after a break."""
    codec: Codec
    chunk_size: int
    """Numbers that travel at a time."""
    at: int = 0
    """Where its vector begins in all that this member contributes."""
    divisor: float
    """The sum of the members' weights; with 0 no member contributes, and the result is the sum."""
    delta: bool = False
    """The group averages models, each of which weighs 1."""
    trimmed: int = 0
    """So many of the members' numbers are left out at each end, number by number."""
    clips: bool = False
    """Members' parts are clipped to where most of them are; nothing is left out then."""
    vote: Vote | None = None
    """How members vote on each other's contributions; None: they do not."""
    keeps_mean: bool = False
    """This member wants the mean, even with `delta`."""
    left_V: Vector | None = None
    """Becomes what a lossy codec took: from this member's parts, and from the sums of its shard."""
    cuts: Sequence[Span] = ()
    """Of `vector_V`, which they cover: what is filled, sharded and handed out one after the other.
    None: all of it at once."""
    filled: Sequence[asyncio.Event] = ()
    """Set when a cut is; none: all are, from the beginning."""
    norm_of: int = 0
    """Owners tell each other the squares of their means, of the first so many numbers of the
    vector: before any of them is needed, all know the norm of the whole. 0: they do not."""
    last_means_first: bool = False
    """The means of the last cut are handed out first: a forward pass needs those first."""


class Mix:
    """One member's vector on its way from contribution to result.

    Methods for different chunks may run on different threads. Parts of the `count` members come in
    their order, ours at `own_at`; `mine` is the shard that we reduce; `lend` gives memory for so
    many numbers, from where chunks travel best.
    """

    def __init__(
        self,
        bucket: Bucket,
        count: int,
        own_at: int,
        mine: Span,
        *,
        is_direct: bool,
        lend: Callable[[int], Vector],
    ) -> None:
        vector_V, delta, codec = bucket.vector_V, bucket.delta, bucket.codec
        self.vector_V, self._codec, self._left_V = vector_V, codec, bucket.left_V
        self._divisor = np.float32(bucket.divisor or 1)  # no member has a say: the sum is nothing
        self._own_at = own_at
        self._trimmed, self.clips = bucket.trimmed, bucket.clips
        self.robust_squares: list[float] = []
        """Of what robust means have added to the members' sum, or taken from it."""
        self._delta = delta and not bucket.keeps_mean
        self._rounds_mean = not is_direct and not codec.is_exact
        self._opposes = delta and count == 2 and not is_direct and codec.is_exact
        self._parts_V = vector_V  # what others read of us
        if is_direct and codec.is_exact:
            self._parts_V = lend(len(vector_V))
            self._parts_V[:] = vector_V
        self._handed_V, self._handed_at = vector_V, 0  # what others get of our shard, from where
        if delta and not is_direct and codec.is_exact and not (self._opposes and self._delta):
            self._handed_V, self._handed_at = lend(mine.size), mine.start
        self._encoded: dict[int, memoryview] = {}  # the same with a lossy codec, chunk by chunk

    def refill(self, cut: Span) -> None:
        """This part of the vector has been filled since; nothing of it has been reduced."""
        if self._parts_V is not self.vector_V:
            at = slice(cut.start, cut.stop)
            self._parts_V[at] = self.vector_V[at]

    @property
    def lent(self) -> list[Vector]:
        """What was borrowed; it is not needed once the exchange is complete."""
        return [one_V for one_V in (self._parts_V, self._handed_V) if one_V is not self.vector_V]

    def part(self, span: Span) -> memoryview:
        """Our part of a chunk, as it travels; with a lossy codec we contribute what that says."""
        part_S = self._parts_V[span.start : span.stop]
        if self._codec.is_exact:
            return part_S.data.cast("B")
        if self._left_V is None:
            return self._encode(part_S, part_S)
        left_S = self._left_V[span.start : span.stop]
        left_S[:] = part_S
        encoded = self._encode(part_S, part_S)
        np.subtract(left_S, part_S, out=left_S)
        return encoded

    def read(self, payload: memoryview, into_S: Vector) -> Vector:
        """The numbers that came; they may alias `payload`. Raises CodecError."""
        if self._codec.is_exact:
            return np.frombuffer(payload, "<f4")
        self._codec.decode(payload, into_S)
        return into_S

    def handed_out(self, span: Span) -> memoryview:
        """What the others get for a reduced chunk of our shard."""
        return self._encoded[span.start] if self._rounds_mean else self._handed(span).data.cast("B")

    def reduce(self, span: Span, parts: Sequence[Vector]) -> float:
        """Average one chunk of all members; returns the sum of its squares. Raises NotFinite."""
        with np.errstate(all="ignore"):
            if self._rounds_mean:
                return self._reduce_rounded(span, parts)
            own_S, handed_S, square_sum = self._own(span), self._handed(span), 0.0
            hands_result = self._handed_V is self.vector_V
            if self.clips:  # whole chunks are clipped, not blocks
                mean_S = np.empty(span.size, np.float32) if hands_result else handed_S
                self._average(parts, mean_S)
                self._put(mean_S, own_S)
                return squares(own_S)
            scratch_B = np.empty(min(BLOCK, span.size), np.float32)
            for at in blocks(span.size):
                own_B, handed_B, parts_B = own_S[at], handed_S[at], [part_S[at] for part_S in parts]
                if self._opposes:  # half of the way to the other one, to add here, subtract there
                    np.subtract(parts_B[1 - self._own_at], own_B, out=handed_B)
                    np.multiply(handed_B, HALF, out=handed_B)
                    if not hands_result:
                        np.add(own_B, handed_B, out=own_B)
                else:
                    mean_B = scratch_B[: len(own_B)] if hands_result else handed_B
                    self._average(parts_B, mean_B)
                    self._put(mean_B, own_B)
                square_sum += squares(own_B)
        return square_sum

    def take(self, span: Span, handed_S: Vector) -> float:
        """Take in what the owner of a chunk handed out; returns and raises what `reduce` does."""
        own_S, square_sum = self._own(span), 0.0
        with np.errstate(all="ignore"):
            for at in blocks(span.size):
                own_B, handed_B = own_S[at], handed_S[at]
                if not self._opposes:
                    self._put(handed_B, own_B)
                elif self._delta:
                    np.negative(handed_B, out=own_B)
                else:
                    np.subtract(own_B, handed_B, out=own_B)
                square_sum += squares(own_B)
        return square_sum

    def _average(self, parts_B: Sequence[Vector], into_B: Vector) -> None:
        squares = _average(parts_B, into_B, self._divisor, self._trimmed, clips=self.clips)
        if squares is not None:
            self.robust_squares.append(squares)

    def _put(self, mean_B: Vector, own_B: Vector) -> None:
        if self._delta:
            np.subtract(mean_B, own_B, out=own_B)
        else:
            own_B[:] = mean_B

    def _reduce_rounded(self, span: Span, parts: Sequence[Vector]) -> float:
        """As `reduce`, where what the others get is the mean, rounded."""
        own_S = self._own(span)
        mean_S, rounded_S = np.empty(span.size, np.float32), np.empty(span.size, np.float32)
        self._average(parts, mean_S)
        self._encoded[span.start] = self._encode(mean_S, rounded_S)
        self._put(rounded_S, own_S)
        if self._delta:
            np.subtract(mean_S, rounded_S, out=mean_S)
            np.multiply(mean_S, self._divisor, out=mean_S)
            np.add(own_S, mean_S, out=own_S)
        if self._left_V is not None:
            left_S = self._left_V[span.start : span.stop]
            np.subtract(mean_S, rounded_S, out=left_S)
            np.multiply(left_S, self._divisor, out=left_S)
        return squares(own_S)

    def _own(self, span: Span) -> Vector:
        return self.vector_V[span.start : span.stop]

    def _handed(self, span: Span) -> Vector:
        return self._handed_V[span.start - self._handed_at : span.stop - self._handed_at]

    def _encode(self, numbers_S: Vector, into_S: Vector) -> memoryview:
        """The bytes of Q(numbers); `into_S`, which may be the same, becomes Q(numbers)."""
        encoded = memoryview(bytearray(self._codec.encoded_size(len(numbers_S))))
        self._codec.encode(numbers_S, encoded)
        try:
            self._codec.decode(encoded, into_S)
        except CodecError as error:  # so it says that numbers are not finite
            raise NotFinite from error
        return encoded


def squares(vector_B: Vector) -> float:
    """The sum of the squares. Raises NotFinite.

    It is results that are checked: shared memory may change under a second look.
    """
    square_sum = float(np.dot(vector_B, vector_B))
    if not math.isfinite(square_sum) and not np.isfinite(vector_B).all():
        raise NotFinite
    return square_sum


def mean_of(
    parts_S: Sequence[Vector], codec: Codec, divisor: float, trimmed: int, *, clips: bool
) -> Vector:
    """What the owner of a chunk hands out for these parts, to the last bit; not in a pair."""
    mean_S = np.empty(len(parts_S[0]), np.float32)
    _average(parts_S, mean_S, np.float32(divisor or 1), trimmed, clips=clips)
    if not codec.is_exact:
        encoded = memoryview(bytearray(codec.encoded_size(len(mean_S))))
        codec.encode(mean_S, encoded)
        codec.decode(encoded, mean_S)
    return mean_S


def _average(
    parts_B: Sequence[Vector], into_B: Vector, divisor: np.float32, trimmed: int, *, clips: bool
) -> float | None:
    """The squares of what a robust mean has changed of the sum; None for a plain mean."""
    changed = None
    if clips:
        changed = clipped_sum(parts_B, into_B)
    elif trimmed:
        changed = trimmed_sum(parts_B, trimmed, into_B)
    elif len(parts_B) == 1:
        into_B[:] = parts_B[0]
    else:
        np.add(parts_B[0], parts_B[1], out=into_B)
        for part_B in parts_B[2:]:
            np.add(into_B, part_B, out=into_B)
    np.divide(into_B, divisor, out=into_B)
    return changed
