"""Who reduces which part of a vector, and in which order its slices travel.

A vector of n numbers is cut into one contiguous *part of the vector* per member, its *share*: the
member that owns a share receives it from everyone else, reduces it and sends the mean back. So each
member sends and receives 2 n (g - 1) / g numbers, the least that an all-reduce can do (Patarasuk
and Yuan, JPDC 2009); where links differ, so do shares (`core/links.py`). A share travels in slices,
in order, so that one slice is on the wire while another is being reduced; both sides cut alike, so
a slice needs no header.

A group whose vector is short *swaps* instead: each member sends its whole vector to each other one
and reduces everything itself. That is half of the messages and one hop less for n (g - 1) numbers,
which for a short vector costs less than a message does. A pair moves the same bytes either way; it
swaps if its codec is lossy, since nobody hands out a rounded mean then.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from p2ptrain.errors import LocalProtocolError


@dataclass(frozen=True, slots=True)
class Span:
    """The numbers [start, stop) of a vector."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


SWAP_SLICES = 2
"""A group swaps if its vector, and what each member then moves in addition, are at most so many
slices. Larger: bytes that a slow link feels; smaller: more messages, each of which costs what ten
thousands of numbers do."""


PIPELINED = 4
"""Slices that a share is cut into, at least, unless they became too small."""

SMALLEST_PART = 4
"""Of the largest slice: below that, work per slice costs more than waiting for a longer one."""


def is_swapped(vector_size: int, member_count: int, slice_size: int, *, lossy: bool) -> bool:
    """True if members swap whole vectors; the same at all of them, since it follows from sizes."""
    if lossy and member_count == 2:
        return vector_size > 0
    least = 2 * vector_size * (member_count - 1) // member_count
    extra = vector_size * (member_count - 1) - least
    return 0 < max(vector_size, extra) <= SWAP_SLICES * slice_size


def share(vector_size: int, member_count: int, index: int, weights: Sequence[int] = ()) -> Span:
    """What member `index` owns; shares are as large as `weights` say, and cover the vector.

    Without weights they are equal. By rounding they differ by at most one number.
    """
    if not 0 <= index < member_count:
        raise LocalProtocolError(f"there is no member {index} among {member_count}")
    if not weights:
        weights = (1,) * member_count
    if len(weights) != member_count or min(weights) < 0 or not any(weights):
        raise LocalProtocolError(f"{member_count} members cannot share by {tuple(weights)}")
    whole, before = sum(weights), sum(weights[:index])
    return Span(vector_size * before // whole, vector_size * (before + weights[index]) // whole)


def slice_size_of(vector_size: int, member_count: int, largest: int) -> int:
    """How many numbers travel at a time: `largest`, but less where shares are small.

    A share of few slices would be sent, then reduced, then sent back, one after the other.
    """
    wanted = vector_size // member_count // PIPELINED
    return max(1, min(largest, max(wanted, largest // SMALLEST_PART)))


def slices(span: Span, slice_size: int) -> tuple[Span, ...]:
    """Cut `span` into slices of `slice_size` numbers, the last one possibly shorter."""
    if slice_size < 1:
        raise LocalProtocolError(f"a slice of {slice_size} numbers")
    starts = range(span.start, span.stop, slice_size)
    return tuple(Span(start, min(start + slice_size, span.stop)) for start in starts)
