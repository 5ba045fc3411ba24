"""Divide a vector into one shard per member, and each shard into chunks.

The owner of a shard receives it from all other members, reduces it and sends the mean back, so each
member sends and receives 2 n (g - 1) / g numbers, the minimum for an all-reduce (Patarasuk and
Yuan, JPDC 2009). Where links differ, so do shards (`core/links.py`). A shard travels in chunks, in
order, so that one chunk is on the wire while another is being reduced; both sides cut alike, so a
chunk needs no header.

A group with a short vector uses the *direct exchange*: each member sends its whole vector to every
other one and reduces everything itself. That takes half of the messages and one hop less, for
n (g - 1) numbers: what it moves in addition has to cost less than the messages do. A pair moves the
same bytes either way; with a lossy codec it uses the direct exchange, since then no mean has to be
rounded. Where parts have servers, those alone reduce.
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


DIRECT_CHUNKS = 2
"""The direct exchange is used if the vector has at most so many chunks, and what each member then
moves in addition half as many: one of 256 KiB is 2 ms of a link of 1 Gbit/s and 0.1 s of one of
20 Mbit/s. Larger: bytes that a slow link feels; smaller: more messages, each of which costs as much
as tens of thousands of numbers."""


PIPELINED = 4
"""Chunks of a shard, at least, unless they became too small."""

SMALLEST_PART = 4
"""Of the largest chunk: below that, work per chunk costs more than waiting for a longer one."""


def is_direct(vector_size: int, member_count: int, chunk_size: int, *, lossy: bool) -> bool:
    """True for the direct exchange; the same at all members, since it follows from sizes."""
    if lossy and member_count == 2:
        return vector_size > 0
    least = 2 * vector_size * (member_count - 1) // member_count
    extra = vector_size * (member_count - 1) - least
    return 0 < max(vector_size, 2 * extra) <= DIRECT_CHUNKS * chunk_size


def shard(vector_size: int, member_count: int, index: int, weights: Sequence[int] = ()) -> Span:
    """The shard of member `index`; shards are proportional to `weights` and cover the vector.

    Without weights they are equal, up to one number by rounding.
    """
    if not 0 <= index < member_count:
        raise LocalProtocolError(f"there is no member {index} among {member_count}")
    if not weights:
        weights = (1,) * member_count
    if len(weights) != member_count or min(weights) < 0 or not any(weights):
        raise LocalProtocolError(f"{member_count} members cannot share by {tuple(weights)}")
    whole, before = sum(weights), sum(weights[:index])
    return Span(vector_size * before // whole, vector_size * (before + weights[index]) // whole)


def chunk_size_of(vector_size: int, member_count: int, largest: int) -> int:
    """Numbers per chunk: `largest`, but fewer for small shards.

    A shard of few chunks would be sent, then reduced, then sent back, one after the other.
    """
    wanted = vector_size // member_count // PIPELINED
    return max(1, min(largest, max(wanted, largest // SMALLEST_PART)))


def chunks(span: Span, chunk_size: int) -> tuple[Span, ...]:
    """Cut `span` into chunks of `chunk_size` numbers, the last one possibly shorter."""
    if chunk_size < 1:
        raise LocalProtocolError(f"a chunk of {chunk_size} numbers")
    starts = range(span.start, span.stop, chunk_size)
    return tuple(Span(start, min(start + chunk_size, span.stop)) for start in starts)
