"""Move a formed group's payload: named buckets, all in flight under one ticket.

A *bucket* is a vector of its own codec and divisor, or a string of bytes. A vector is reduced by
reduce-scatter and all-gather over streams, pipelined. Every member opens one stream to every other
member, the *owner* of a shard (`core/shards.py`). Up the stream go the caller's chunks of that
shard, down it come their means:

    caller i  ── chunks of shard j, one by one ──►  owner j   waits for chunk k of all members,
              ◄── means of the same chunks ───────            reduces it, sends the mean to all

In the direct exchange members send each other whole vectors (or strings) over one stream per pair,
opened by the later by name, and each member reduces all chunks itself.

While chunk k is being reduced, later ones are on the wire; a receiver that falls behind by `WINDOW`
chunks stops reading, so memory is bounded and only this group waits.

Only a complete result of all buckets counts: a broken group changes no model. All members hold
bitwise the same mean, since each chunk is reduced in the order of the members' names wherever it
is. The arithmetic, and that of codecs, is in `runtime/mix.py`; streams, and why a member ends only
when all have the result, in `runtime/streams.py`.

Legend of shapes: ``V`` numbers of a bucket's vector, ``S`` of one chunk.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TypeVar

import numpy as np

from p2ptrain.compute.codec import Codec, load_codec
from p2ptrain.compute.replica import Vector
from p2ptrain.core.events import Outcome
from p2ptrain.core.links import MAX_MBIT
from p2ptrain.core.shards import Span, chunks, is_direct, shard
from p2ptrain.errors import ConfigError, check_above_0
from p2ptrain.ids import PeerId, Seconds
from p2ptrain.net.transport import ChunkStream
from p2ptrain.net.wire import MAX_CHUNK_BYTES
from p2ptrain.runtime.copy_executor import CopyExecutor
from p2ptrain.runtime.mix import Mix, NotFinite
from p2ptrain.runtime.scope import Scope
from p2ptrain.runtime.streams import GroupBroken, OpenStream, Streams

WINDOW = 4
"""Chunks of one member that wait to be reduced, at most."""

MEANS, RAW = WINDOW, WINDOW + 1
"""Where a mean arrives, or bytes that are still to be decoded; before them, `WINDOW` parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeConfig:
    """How vectors travel."""

    chunk_kib: int = 1024
    """Size of one chunk as float32, at most; small shards travel in smaller ones. Too small: work
    per chunk dominates; too large: nothing overlaps, a chunk does not stay in a core's cache
    between arriving and being reduced, and gRPC holds several of them for each stream."""

    codec: str = "fp32"
    """How models travel: ``fp32`` as they are, ``bf16`` or ``fp16`` in half of the bytes, ``int8``
    in a quarter. Nothing of what training does is lost, but peers differ by a little rounding, and
    it costs computing: worth it on links below some 10 Gbit/s. All peers of a swarm must use the
    same."""

    gradient_codec: str = "fp32"
    """How gradients travel, as above; all members get the same bits with every codec. What rounding
    takes from a gradient is lost: too coarse a codec trains worse. Statistics (buffers) always
    travel as they are. All peers of a swarm must use the same."""

    average_timeout_s: Seconds = 60.0
    """A group in which nothing moves for so long is broken, or sooner where less was seen to be
    enough (`core/transfers.py`). A net under the other deadlines, not a tuning knob: dead members
    end a group at once, silent ones within seconds (`core/repair.py`)."""

    link_mbit: int = 0
    """How many Mbit/s this peer's link carries in each direction; peers with slow links reduce
    less. 0: find out from the groups we are in, which is not possible where everyone is in every
    group. Too small: others do our work; too large: they wait for our link."""

    def __post_init__(self) -> None:
        if not 1 <= self.chunk_kib <= MAX_CHUNK_BYTES // 1024:
            most = MAX_CHUNK_BYTES // 1024
            raise ConfigError(f"chunk_kib = {self.chunk_kib} must be between 1 and {most}")
        load_codec(self.codec)
        load_codec(self.gradient_codec, "gradient_codec")
        if not 0 <= self.link_mbit <= MAX_MBIT:
            raise ConfigError(
                f"link_mbit = {self.link_mbit} must be between 1 and {MAX_MBIT}, or 0 to measure it"
            )
        check_above_0("", self, "average_timeout_s")


T = TypeVar("T")

HEADER_BYTES = 8
"""A string's length goes before it."""


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
    divisor: float
    """The sum of the members' weights; with 0 nobody contributes, and the result is the sum."""
    delta: bool = False
    """The group averages models, each of which weighs 1."""
    keeps_mean: bool = False
    """This member wants the mean, even with `delta`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteString:
    """One named string of a payload; every member gets those of all, whatever their lengths."""

    name: str
    content: bytes
    most_bytes: int
    """Of one member's string. A longer one breaks the group."""


@dataclass(eq=False)
class Exchange(Streams):
    """One member's side of one group's payload, all buckets of it."""

    payload: Sequence[Bucket | ByteString]
    """In the same order at all members; empty vectors are skipped."""
    _: KW_ONLY
    lend: Callable[[int], Vector]
    """Gives memory for so many numbers, from where chunks travel best."""
    lend_slot: Callable[[int], Vector]
    """Gives memory for chunks to arrive in."""
    executor: CopyExecutor
    """Runs what takes long on a worker thread."""
    shards: Sequence[int] = ()
    """The weights of the members' shards, in their order; none: equal shards."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._moving: asyncio.Task[None] | None = None
        self.buckets: list[BucketExchange] = []
        self.strings: dict[str, StringExchange] = {}
        for one in self.payload:
            if isinstance(one, ByteString):
                self.strings[one.name] = StringExchange(self, one)
            elif len(one.vector_V):
                self.buckets.append(BucketExchange(self, one))
        self._parts: list[BucketExchange | StringExchange]
        self._parts = [*self.buckets, *self.strings.values()]

    # --- for the driver ---------------------------------------------------------------------------

    @property
    def square_sum(self) -> float:
        """Of the results' numbers: with `delta`, how far this member was from the mean, squared."""
        return sum(bucket.square_sum for bucket in self.buckets)

    @property
    def lent(self) -> list[Vector]:
        """What was borrowed; nobody needs it once the exchange is complete."""
        return [vector for bucket in self.buckets for vector in bucket.mix.lent]

    @property
    def may_reuse(self) -> bool:
        """After a break that all drop: whether memory that we lent or read may be used again.

        Others may still read it, in an attempt that they do not know is over. They read what they
        read: as long as we have not said that we have all, nobody commits that. A member that
        decodes does it on threads that cannot be cancelled; that memory is left alone.
        """
        return not self.is_complete and all(bucket.codec.is_exact for bucket in self.buckets)

    @property
    def slots(self) -> list[Vector]:
        """Where chunks arrived; once the exchange is over nothing does, but a thread may decode."""
        idle = [b for b in self.buckets if self.is_complete or b.codec.is_exact]
        return [slot_S for bucket in idle for slot_S in bucket.slots.values()]

    async def run(self, open_stream: OpenStream) -> None:
        """All-reduce: both verbs below, pipelined; the result is complete when this returns.

        Raises:
            GroupBroken: if any member vanished, refused, or sent what cannot be averaged.
        """
        self.means_may_leave.set()
        await self._move(open_stream)

    async def reduce_scatter(self, open_stream: OpenStream) -> None:
        """Returns when this member's shard of each bucket is reduced, in place.

        The others get it with `all_gather`, which must follow. Raises GroupBroken, as `run`.
        """
        moving = self._moving = asyncio.get_running_loop().create_task(self._move(open_stream))
        reduced = asyncio.gather(*(f for bucket in self.buckets for f in bucket.reduced))
        moving.add_done_callback(lambda _: reduced.cancel())
        try:
            await reduced
        except asyncio.CancelledError:
            if moving.done():
                moving.result()  # it broke, and that is why
            moving.cancel()
            await asyncio.gather(moving, return_exceptions=True)
            raise

    async def all_gather(self) -> None:
        """Hand out the means of this member's shards; returns when all of the result is here.

        Raises GroupBroken, as `run`.
        """
        assert self._moving is not None
        self.means_may_leave.set()
        await self._moving

    async def _move(self, open_stream: OpenStream) -> None:
        broken = "the average was abandoned"
        try:
            async with Scope() as scope:
                if not self.due:
                    self.has_all.set_result(None)
                for part in self._parts:
                    await part.start(scope, open_stream)
            broken = ""
        except GroupBroken as error:
            broken = error.why
            raise
        finally:
            self.close(broken)


class StringExchange:
    """All-gather of byte strings whose lengths differ: the direct exchange of one bucket."""

    def __init__(self, streams: Streams, own: ByteString) -> None:
        self._streams, self._own, self._me = streams, own, streams.me
        self._gathered = {self._me: own.content}
        others = [peer for peer in streams.members if peer != self._me]
        streams.due += len(others)
        callers = (peer for peer in others if peer > self._me)
        streams.expect(own.name, 0, own.most_bytes, "bytes", callers)

    @property
    def gathered(self) -> tuple[bytes, ...]:
        """All members' strings in their order, once the exchange is complete."""
        return tuple(self._gathered[peer] for peer in self._streams.members)

    async def start(self, scope: Scope, open_stream: OpenStream) -> None:
        """Begin to move, in tasks of `scope`."""
        for peer in self._streams.members:
            if peer != self._me:
                name, send, take = self._own.name, self._send, self._take
                scope.start(self._streams.exchange(scope, name, peer, open_stream, send, take))

    async def _send(self, peer: PeerId, stream: ChunkStream) -> None:
        content = memoryview(self._own.content)
        header = memoryview(len(content).to_bytes(HEADER_BYTES, "little"))
        await self._streams.send(peer, stream, header)
        for span in chunks(Span(0, len(content)), MAX_CHUNK_BYTES):
            await self._streams.send(peer, stream, content[span.start : span.stop])

    async def _take(self, peer: PeerId, stream: ChunkStream) -> None:
        phase, content = "sending its string", bytearray()
        header = await self._streams.receive(peer, stream, phase, HEADER_BYTES)
        due = int.from_bytes(header, "little")
        if due > self._own.most_bytes:
            why = f"{peer} sends {due} bytes of {self._own.name}, at most {self._own.most_bytes}"
            raise GroupBroken(Outcome.BROKEN, why)
        for span in chunks(Span(0, due), MAX_CHUNK_BYTES):
            content += await self._streams.receive(peer, stream, phase, span.size)
        self._gathered[peer] = bytes(content)
        self._streams.arrived()


class BucketExchange:
    """One member's side of one bucket's reduction."""

    def __init__(self, exchange: Exchange, bucket: Bucket) -> None:
        self._streams = exchange
        self._me, self._members = exchange.me, exchange.members
        self._name = bucket.name
        self._weights = exchange.shards
        self._size = len(bucket.vector_V)
        self.codec = bucket.codec
        self._chunk_size = bucket.chunk_size
        self._on_copy_thread = exchange.executor
        self._lend_slot = exchange.lend_slot
        self.square_sum = 0.0
        """Of the result's numbers."""
        loop, members, lossy = asyncio.get_running_loop(), self._members, not self.codec.is_exact
        self._is_direct = is_direct(self._size, len(members), self._chunk_size, lossy=lossy)
        self._mine = chunks(self._shard(self._me), self._chunk_size)
        self.mix = Mix(
            bucket.vector_V,
            len(members),
            members.index(self._me),
            self._shard(self._me),
            is_direct=self._is_direct,
            delta=bucket.delta,
            keeps_mean=bucket.keeps_mean,
            codec=self.codec,
            divisor=bucket.divisor,
            lend=exchange.lend,
        )
        self._parts: list[dict[PeerId, Vector]] = [{} for _ in self._mine]
        self.reduced = [loop.create_future() for _ in self._mine]
        """One for each chunk of this member's shard."""
        self._writing = asyncio.Lock()
        self._written: dict[
            int, tuple[memoryview, int]
        ] = {}  # direct exchange: and how many wait for it
        self.slots: dict[tuple[PeerId, int], Vector] = {}
        """Where chunks arrive."""
        others = [peer for peer in members if peer != self._me]
        owners = () if self._is_direct else [peer for peer in others if self._shard(peer).size]
        exchange.due += len(owners) + len(self._mine)
        callers = (peer for peer in others if not (self._is_direct and peer < self._me))
        exchange.expect(self._name, self._size, self._chunk_size, self.codec.name, callers)

    async def start(self, scope: Scope, open_stream: OpenStream) -> None:
        """Begin to move, in tasks of `scope`."""
        if not self._is_direct or len(self._members) == 1:
            for index in range(len(self._mine)):
                await self._contribute_own(index)
        for peer in self._members:
            if peer != self._me and self._is_direct:
                send, take = self._send_whole, self._take_parts
                moving = self._streams.exchange(scope, self._name, peer, open_stream, send, take)
                scope.start(moving)
            elif peer != self._me:
                self._reduce_scatter(scope, peer, open_stream)

    # --- whole vectors ----------------------------------------------------------------------------

    async def _send_whole(self, peer: PeerId, stream: ChunkStream) -> None:
        for index in range(len(self._mine)):
            payload = await self._encoded_own(index)
            await self._streams.send(peer, stream, payload)

    async def _encoded_own(self, index: int) -> memoryview:
        """Our chunk as everyone gets it; kept until the last one has."""
        async with self._writing:
            if index not in self._written:
                span = self._mine[index]
                payload = await self._part(span)
                self._written[index] = payload, len(self._members) - 1
                await self._contribute_own(index)
            payload, waiting = self._written[index]
            self._written[index] = payload, waiting - 1
            if waiting == 1:
                del self._written[index]
            return payload

    # --- our part of others' shares ---------------------------------------------------------------

    def _reduce_scatter(self, scope: Scope, peer: PeerId, open_stream: OpenStream) -> None:
        if self._shard(peer).size:
            scope.start(self._ask_owner(scope, peer, open_stream))
        if self._mine:
            scope.start(self._serve_caller(scope, peer))

    async def _ask_owner(self, scope: Scope, owner: PeerId, open_stream: OpenStream) -> None:
        spans = chunks(self._shard(owner), self._chunk_size)
        stream = await self._streams.call(self._name, owner, open_stream)
        sending = scope.start(self._send_parts(owner, stream, spans))
        for span in spans:
            mean_S = await self._receive(owner, stream, span, MEANS, "sending means")
            await self._take_mean(owner, span, mean_S)
        self._streams.arrived()
        await sending
        if not self._mine:  # nobody asks us, so nobody would hear that we have all
            await self._streams.has_all
            await self._streams.say_all(owner, stream)
        await self._streams.end(owner, stream)

    async def _send_parts(
        self, owner: PeerId, stream: ChunkStream, spans: tuple[Span, ...]
    ) -> None:
        last = bool(self._mine)
        whole = self.mix.part(self._shard(owner)) if self.codec.is_exact else None
        if whole is not None and await self._streams.refer(owner, stream, whole, last=last):
            return
        for span in spans:
            payload = await self._part(span)
            await self._streams.send(owner, stream, payload, last=last and span is spans[-1])

    async def _part(self, span: Span) -> memoryview:
        """Our part of a chunk, as it travels."""
        try:
            return await self._compute(lambda: self.mix.part(span))
        except NotFinite as error:
            raise self._own_fault() from error

    async def _take_mean(self, owner: PeerId, span: Span, mean_S: Vector) -> None:
        try:
            self.square_sum += await self._compute(lambda: self.mix.take(span, mean_S))
        except NotFinite as error:
            why = f"{owner} sent numbers that are not finite"
            raise GroupBroken(Outcome.BROKEN, why) from error

    # --- our own shard ----------------------------------------------------------------------------

    async def _serve_caller(self, scope: Scope, caller: PeerId) -> None:
        stream = await self._streams.called_by(self._name, caller)
        returning = scope.start(self._return_means(caller, stream))
        await self._take_parts(caller, stream)
        await returning
        await self._streams.end(caller, stream)
        await self._streams.has_all
        self._streams.mark_served(self._name, caller)

    async def _take_parts(self, peer: PeerId, stream: ChunkStream) -> None:
        # In a pair a chunk is reduced when it comes, in memory that is still in the core's cache.
        slots = 1 if len(self._members) == 2 and not self._is_direct else WINDOW
        for index, span in enumerate(self._mine):
            if index >= slots:
                await self.reduced[index - slots]
            chunk_S = await self._receive(peer, stream, span, index % slots, "sending its part")
            await self._contribute(index, peer, chunk_S)

    async def _contribute_own(self, index: int) -> None:
        span = self._mine[index]
        await self._contribute(index, self._me, self.mix.vector_V[span.start : span.stop])

    async def _contribute(self, index: int, member: PeerId, chunk_S: Vector) -> None:
        """Take one member's chunk in; the last one reduces it."""
        parts = self._parts[index]
        parts[member] = chunk_S
        if len(parts) < len(self._members):
            return
        in_order = [parts[peer] for peer in self._members]
        try:
            reduced = await self._compute(lambda: self.mix.reduce(self._mine[index], in_order))
        except NotFinite as error:
            raise self._not_finite(in_order) from error
        self.square_sum += reduced
        parts.clear()
        self.reduced[index].set_result(None)
        self._streams.arrived()

    def _not_finite(self, parts: Sequence[Vector]) -> GroupBroken:
        for member, part in zip(self._members, parts, strict=True):
            if member != self._me and not np.isfinite(part).all():
                return GroupBroken(Outcome.BROKEN, f"{member} sent numbers that are not finite")
        return self._own_fault()

    def _own_fault(self) -> GroupBroken:
        why = f"{self._me} got an overflow, or its own numbers are not finite"
        return GroupBroken(Outcome.BROKEN, why)

    async def _return_means(self, caller: PeerId, stream: ChunkStream) -> None:
        for index, span in enumerate(self._mine):
            await self.reduced[index]
            await self._streams.means_may_leave.wait()
            await self._streams.send(caller, stream, self.mix.handed_out(span))

    # --- one chunk --------------------------------------------------------------------------------

    async def _receive(
        self, peer: PeerId, stream: ChunkStream, span: Span, slot: int, phase: str
    ) -> Vector:
        """One chunk of the right size; it may alias the transport's memory, or this `slot`'s."""
        due = self.codec.encoded_size(span.size)
        slot_S = self._slot(peer, slot)[: span.size]
        into_S = slot_S if self.codec.is_exact else self._slot(peer, RAW)
        into = into_S.data.cast("B")[:due]
        payload = await self._streams.receive(peer, stream, phase, due, into)
        with self._streams.while_it_is(peer, phase):
            return await self._compute(lambda: self.mix.read(payload, slot_S))

    def _slot(self, peer: PeerId, slot: int) -> Vector:
        key = peer, slot
        if key not in self.slots:
            self.slots[key] = self._lend_slot(self._chunk_size)
        return self.slots[key]

    async def _compute(self, function: Callable[[], T]) -> T:
        """Where a chunk as it is takes less than the way to a worker thread and back."""
        return function() if self.codec.is_exact else await self._on_copy_thread(function)

    # --- small things -----------------------------------------------------------------------------

    def _shard(self, peer: PeerId) -> Span:
        """What `peer` reduces."""
        if self._is_direct:
            return Span(0, self._size)
        rank, count = self._members.index(peer), len(self._members)
        return shard(self._size, count, rank, self._weights)
