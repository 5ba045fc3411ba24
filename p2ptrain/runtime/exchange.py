"""Move a formed group's payload: named buckets, all in flight under one ticket.

A *bucket* is a vector of its own codec and divisor, reduced by reduce-scatter and all-gather,
pipelined; what travels in any other way has rounds of its own (`runtime/rounds.py`). Every member
opens one stream to every other member, the *owner* of a shard (`core/shards.py`):

    caller i  ── chunks of shard j, one by one ──►  owner j   waits for chunk k of all members,
              ◄── means of the same chunks ───────            reduces it, sends the mean to all

In the direct exchange members send each other whole vectors over one stream per pair, opened by the
later by name, and each member reduces all chunks itself.

A bucket may have *cuts*, which are filled, sharded and handed out one after the other on the same
streams: then a cut travels while the next one is still computed (`runtime/overlap.py`).

While chunk k is being reduced, later ones are on the wire; a receiver that falls behind by `WINDOW`
chunks stops reading, so memory is bounded and only this group waits.

Only a complete result of all buckets counts: a broken group changes no model. All members hold
bitwise the same mean, since each chunk is reduced in the order of the members' names wherever it
is (`runtime/mix.py`).

Legend of shapes: ``V`` numbers of a bucket's vector, ``S`` of one chunk.
"""

import asyncio
import math
import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from p2ptrain.compute.replica import Vector
from p2ptrain.core.effects import Outcome
from p2ptrain.core.shards import Span, chunks, is_direct, shard
from p2ptrain.ids import PeerId
from p2ptrain.net.transport import ChunkStream
from p2ptrain.runtime.audits import LEAST_MEMBERS, Audits, Watched
from p2ptrain.runtime.ballots import Ballots
from p2ptrain.runtime.copy_executor import CopyExecutor
from p2ptrain.runtime.exchange_config import ExchangeConfig as ExchangeConfig
from p2ptrain.runtime.mix import Bucket, Mix, NotFinite
from p2ptrain.runtime.robust import exact_squares
from p2ptrain.runtime.rounds import Rounds, RoundsExchange
from p2ptrain.runtime.streams import GroupBroken, Streams
from p2ptrain.vectors import Buffers

WINDOW = 4
"""Chunks of one member that wait to be reduced, at most."""

MEANS, RAW = WINDOW, WINDOW + 1
"""Where a mean arrives, or bytes that are still to be decoded; before them, `WINDOW` parts."""


SQUARES = struct.Struct("<d")
"""How a sum of squares travels."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Piece:
    """Some numbers of a result, which may be wanted before the others are here."""

    span: Span
    """Of all that this member contributes."""
    is_here: asyncio.Event
    """They are, or will never be."""


class Norm:
    """Of a mean whose shards are at their owners: each tells all others the squares of its own.

    Args:
        owners: sorted, with us if we have a shard.
    """

    def __init__(self, owners: Iterable[PeerId]) -> None:
        self._squares: dict[PeerId, float | None] = dict.fromkeys(owners)
        self.is_here = asyncio.Event()
        """It is, or will never be."""

    def tell(self, owner: PeerId, squares: float) -> None:
        """The squares of this owner's shard."""
        self._squares[owner] = squares
        if self.value is not None:
            self.is_here.set()

    @property
    def value(self) -> float | None:
        """The same bits at all members; None if an owner's squares have not come."""
        squares = [one for one in self._squares.values() if one is not None]
        return math.sqrt(sum(squares)) if len(squares) == len(self._squares) else None


@dataclass(eq=False)
class Exchange(Streams):
    """One member's side of one group's payload, all buckets of it."""

    payload: Sequence[Bucket | Rounds]
    """In the same order at all members; empty vectors are skipped."""
    _: KW_ONLY
    buffers: Buffers
    """Of memory from where chunks travel best."""
    slots: Buffers
    """For chunks to arrive in."""
    executor: CopyExecutor
    shards: Sequence[int] = ()
    """The weights of the members' shards, in their order; none: equal shards."""
    has_servers: bool = False
    """Only members with a shard reduce, however short vectors are."""
    audits: Audits | None = None
    """Of the owners of shards; None: there are none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._moving: asyncio.Task[None] | None = None
        self.buckets: list[BucketExchange] = []
        self._rounds: list[RoundsExchange] = []
        for one in self.payload:
            if isinstance(one, Rounds):
                self._rounds.append(RoundsExchange(self, one))
            elif len(one.vector_V):
                self.buckets.append(BucketExchange(self, one))

    @property
    def robust_l2(self) -> dict[str, float | None]:
        """By how much robust means have changed the members' sum, in what this member reduces.

        Under the name of the record's field; empty where all numbers count. None: not finite.
        """
        mixes = [bucket.mix for bucket in self.buckets]
        if not (squares := [one for mix in mixes for one in mix.robust_squares]):
            return {}
        norm = math.sqrt(sum(squares))
        name = "clipped_l2" if any(mix.clips for mix in mixes) else "trimmed_l2"
        return {name: norm if math.isfinite(norm) else None}

    @property
    def offenders(self) -> dict[PeerId, str]:
        """Members whose contribution is voted out, each with a sentence; all is over."""
        found: dict[PeerId, str] = {}
        for bucket in self.buckets:
            if bucket.ballots:
                found |= bucket.ballots.offenders
        return found

    def audit(self) -> None:
        """All has ended well: the audits of it begin."""
        for bucket in self.buckets:
            if self.audits and bucket.watched:
                self.audits.begin(bucket.watched)

    @property
    def square_sum(self) -> float:
        """Of the results' numbers: with `delta`, how far this member was from the mean, squared."""
        return sum(bucket.square_sum for bucket in self.buckets)

    @property
    def is_over(self) -> bool:
        """Nothing of it moves any more, well or not."""
        return self._moving is not None and self._moving.done()

    def give_back(self, *vectors: Vector) -> None:
        """All is over: memory that is not needed is used again, what was contributed from, too.

        After a break others may still read it, in an attempt that they do not know is over. They
        read what they read: as long as we have not said that we have all, no member commits that. A
        member that decodes does it on threads that cannot be cancelled; that memory is left alone,
        and so are slots that such a thread may still fill.
        """
        is_exact = all(bucket.codec.is_exact for bucket in self.buckets)
        if self.ended_well or (is_exact and not self.has_all.is_set()):
            for vector in (
                *(lent for bucket in self.buckets for lent in bucket.mix.lent),
                *vectors,
            ):
                self.buffers.give(vector)
        for bucket in self.buckets:
            if bucket.codec.is_exact or self.has_all.is_set():
                for slot_S in bucket.slots.values():
                    self.slots.give(slot_S)

    def forget(self) -> None:
        """All is over and counted: what refers to this exchange is let go, and so are its vectors.

        Without that they would stay until Python looks for cycles, which may be many averages away.
        """
        for bucket in self.buckets:
            bucket.forget()
        self.buckets, self._rounds, self.payload, self._moving = [], [], (), None
        self.scope.forget()

    async def run(self) -> None:
        """All-reduce: both verbs below, pipelined; the result is complete when this returns.

        Raises:
            GroupBroken: if any member vanished, refused, or sent what cannot be averaged.
        """
        self.means_may_leave.set()
        if self._moving is None:
            await self._move()
        else:
            await self.wait()

    def start(self) -> None:
        """Begin to move what there is; `run` or `all_gather` waits for the end."""
        self._moving = asyncio.get_running_loop().create_task(self._move())

    async def wait(self) -> None:
        """Until what has been started is over. Raises GroupBroken, as `run`."""
        assert self._moving is not None
        await self._moving

    async def reduce_scatter(self) -> None:
        """Returns when this member's shard of each bucket is reduced, in place.

        The others get it with `all_gather`, which must follow. Raises GroupBroken, as `run`.
        """
        if self._moving is None:
            self.start()
        moving = self._moving
        assert moving is not None
        reduced = asyncio.gather(*(f for bucket in self.buckets for f in bucket.reduced))
        moving.add_done_callback(lambda _: reduced.cancel())
        try:
            await reduced
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) and task.cancelling():
                moving.cancel()
            await moving  # if it broke, that is why
            raise

    async def all_gather(self) -> None:
        """Hand out the means of this member's shards; returns when all of the result is here.

        Raises GroupBroken, as `run`.
        """
        self.means_may_leave.set()
        await self.wait()

    async def _move(self) -> None:
        broken = "the average was abandoned"
        watching = asyncio.get_running_loop().create_task(self.watch())
        try:
            async with self.scope:
                if not self.due:
                    self.has_all.set()
                for rounds in self._rounds:
                    rounds.start()
                for bucket in self.buckets:
                    await bucket.start()
            broken = ""
        except GroupBroken as error:
            broken = str(error)
            raise
        finally:
            watching.cancel()
            self.close(broken)


class BucketExchange:
    """One member's side of one bucket's reduction."""

    def __init__(self, exchange: Exchange, bucket: Bucket) -> None:
        me, members = exchange.me, exchange.members
        self._exchange, self._bucket, self._members = exchange, bucket, members
        self.codec = bucket.codec
        self.square_sum = 0.0
        size, count, chunk_size = len(bucket.vector_V), len(members), bucket.chunk_size
        may_be_direct = is_direct(size, count, chunk_size, lossy=not self.codec.is_exact)
        direct = self._is_direct = may_be_direct and not exchange.has_servers
        lend, lend_slot = exchange.buffers.take, partial(exchange.slots.take, chunk_size)
        self.slots: dict[tuple[PeerId, int], Vector] = defaultdict(lend_slot)
        self._cuts = tuple(bucket.cuts) or (Span(0, size),)
        self._chunks = {peer: self._chunks_of(peer) for peer in members}
        self._mine = self._chunks[me]
        mine = shard(size, count, members.index(me), exchange.shards)
        self.mix = Mix(bucket, count, members.index(me), mine, is_direct=direct, lend=lend)
        self._parts: list[dict[PeerId, Vector]] = [{} for _ in self._mine]
        self.ballots = Ballots(bucket.vote, me, members) if bucket.vote else None
        self.watched: Watched | None = None
        if exchange.audits and not direct and count >= LEAST_MEMBERS:
            spans = {peer: [one.span for one in self._chunks[peer]] for peer in members}
            self.watched = exchange.audits.watch(exchange.ticket, bucket, members, spans)
        loop = asyncio.get_running_loop()
        self.reduced = [loop.create_future() for _ in self._mine]
        """One for each chunk of this member's shard."""
        self._squares = [0.0 for _ in self._mine]  # of the means, chunk by chunk
        self._refilled: set[int] = set()
        self._writing = asyncio.Lock()
        self._written: dict[int, memoryview] = {}
        owners = () if direct else [peer for peer in exchange.others if self._chunks[peer]]
        callers = exchange.later if direct else exchange.others
        self.pieces = [
            Piece(Span(bucket.at + cut.start, bucket.at + cut.stop), asyncio.Event())
            for cut in self._cuts
        ]
        """Of the result, where it is wanted before it is complete."""
        self.norm = Norm(peer for peer in members if peer in owners or (peer == me and self._mine))
        """Of the result, where the bucket asks for it."""
        due = Counter(own.cut for peer in (me, *owners) for own in self._chunks[peer])
        self._missing = [due[cut] for cut in range(len(self._cuts))]
        self._cast = loop.create_future()  # our ballot, if we reduce anything
        if not direct:  # else vectors are short
            weights = exchange.shards or (1,) * count
            most = max(weights) / sum(weights)
            exchange.hands_out = max(exchange.hands_out, (count - 1) * most)
        exchange.due += len(owners) + len(self._mine)
        if direct and self.ballots:
            exchange.due += len(exchange.others)
        shardless = () if direct else [peer for peer in callers if not self._chunks[peer]]
        exchange.expect(bucket.name, size, chunk_size, self.codec.name, callers, shardless)

    def forget(self) -> None:
        """All is over: the errors of streams have tracebacks that refer to this, not to vectors."""
        del self.mix, self._bucket
        self.ballots = self.watched = None
        self.slots.clear()
        self._written.clear()
        self._parts.clear()

    async def start(self) -> None:
        streams, name = self._exchange, self._bucket.name
        if self._is_direct and streams.others:
            streams.exchange_directly(name, self._send_whole, self._take_parts)
            return
        exchange, start = partial(streams.exchange, name), streams.scope.start
        if self._bucket.filled:
            start(self._contribute_all())
        else:
            await self._contribute_all()
        for peer in streams.others:
            if self._chunks[peer]:  # who has no shard is not called
                ends = not self._mine
                start(exchange(peer, self._send_parts, self._take_means, calls=True, ends=ends))
            if self._mine:
                start(exchange(peer, self._return_means, self._take_parts, calls=False))

    async def _contribute_all(self) -> None:
        for index in range(len(self._mine)):
            await self._is_filled(self._mine[index].cut)
            await self._contribute_own(index)

    async def _is_filled(self, cut: int) -> None:
        if not self._bucket.filled:
            return
        await self._bucket.filled[cut].wait()
        if cut not in self._refilled:
            self._refilled.add(cut)
            self.mix.refill(self._cuts[cut])

    async def _send_whole(self, peer: PeerId, stream: ChunkStream) -> None:
        """Direct exchange: our vector, encoded once for all."""
        for index, chunk in enumerate(self._mine):
            await self._is_filled(chunk.cut)
            async with self._writing:
                if index not in self._written:
                    self._written[index] = await self._part(chunk.span)
                    await self._contribute_own(index)
            await self._exchange.send(peer, stream, self._written[index])
            if len(self._members) == 2:
                del self._written[index]  # only in a pair is a vector of many chunks sent whole
        if self.ballots:
            await self._exchange.send(peer, stream, await self._cast)

    async def _send_parts(self, owner: PeerId, stream: ChunkStream) -> None:
        """Our part of the owner's shard; who is called itself ends its side with the last chunk."""
        theirs, ends = self._chunks[owner], bool(self._mine)
        by_cut: dict[int, list[_Chunk]] = defaultdict(list)
        for chunk in theirs:
            by_cut[chunk.cut].append(chunk)
        for number, cut in enumerate(self._cuts):
            await self._is_filled(number)
            shard, own = self._shard(owner, cut), by_cut[number]
            is_last = ends and bool(own) and own[-1] == theirs[-1]
            if own and self.codec.is_exact and not self.watched:
                part = self.mix.part(shard)
                if await self._exchange.refer(owner, stream, part, last=is_last):
                    continue
            for chunk in own:
                last, part = is_last and chunk == theirs[-1], await self._part(chunk.span)
                if self.watched:
                    self.watched.keep(chunk.span, self.mix.vector_V)
                await self._exchange.send(owner, stream, part, last=last)

    async def _take_means(self, owner: PeerId, stream: ChunkStream) -> None:
        theirs = self._chunks[owner]
        if self._bucket.norm_of:
            await self._take_squares(owner, stream)
        for index in self._in_order_of_means(theirs):
            chunk = theirs[index]
            mean_S = await self._receive(owner, stream, chunk.span, MEANS, "sending means")
            if self.watched:
                self.watched.hear(owner, chunk.span, mean_S)
            take = partial(self.mix.take, chunk.span, mean_S)
            squares = await self._compute(take, {owner: mean_S})
            self.square_sum += squares  # not in one: others add meanwhile
            self._is_here(chunk)
        if self.watched and (size := self.watched.table_bytes(owner)):
            table = await self._exchange.receive(owner, stream, "sending digests", size)
            self.watched.read(owner, table)
        await self._take_ballot(owner, stream)
        self._exchange.arrived()

    async def _take_ballot(self, voter: PeerId, stream: ChunkStream) -> None:
        if ballots := self.ballots:
            ballots.take(
                voter, await self._exchange.receive(voter, stream, "sending votes", ballots.size)
            )

    async def _take_squares(self, owner: PeerId, stream: ChunkStream) -> None:
        payload = await self._exchange.receive(owner, stream, "sending squares", SQUARES.size)
        (squares,) = SQUARES.unpack(payload)
        if not 0 <= squares < math.inf:
            raise GroupBroken(Outcome.BROKEN, f"{owner} sent {squares} as its sum of squares")
        self.norm.tell(owner, squares)

    async def _take_parts(self, peer: PeerId, stream: ChunkStream) -> None:
        """Of our shard, or, in the direct exchange, of the whole vector."""
        # In a pair a chunk is reduced when it comes, in memory that is still in the core's cache.
        slots = 1 if len(self._members) == 2 and not self._is_direct else WINDOW
        for index, chunk in enumerate(self._mine):
            if index >= slots:
                await self.reduced[index - slots]
            part_S = await self._receive(
                peer, stream, chunk.span, index % slots, "sending its part"
            )
            await self._contribute(index, peer, part_S)
        for reduced in self.reduced[-slots:]:
            await reduced
        if self._is_direct and self.ballots:
            await self._take_ballot(peer, stream)
            self._exchange.arrived()

    async def _return_means(self, caller: PeerId, stream: ChunkStream) -> None:
        if self._bucket.norm_of:
            await self._exchange.means_may_leave.wait()
            for reduced in self.reduced:
                await reduced
            await self._exchange.send(caller, stream, memoryview(SQUARES.pack(sum(self._squares))))
        for index in self._in_order_of_means(self._mine):
            await self.reduced[index]
            await self._exchange.means_may_leave.wait()
            await self._exchange.send(caller, stream, self.mix.handed_out(self._mine[index].span))
        if self.watched and self.watched.table_bytes(self._exchange.me):
            await self._exchange.send(caller, stream, self.watched.table)
        if self.ballots:
            await self._exchange.send(caller, stream, await self._cast)

    async def _contribute_own(self, index: int) -> None:
        span = self._mine[index].span
        if self.watched:
            self.watched.keep(span, self.mix.vector_V)
        await self._contribute(index, self._exchange.me, self.mix.vector_V[span.start : span.stop])

    async def _contribute(self, index: int, member: PeerId, chunk_S: Vector) -> None:
        """Take one member's chunk in; the last one reduces it."""
        parts = self._parts[index]
        parts[member] = chunk_S
        if len(parts) < len(self._members):
            return
        in_order = [parts[peer] for peer in self._members]
        squares = await self._compute(partial(self._reduce, index, in_order), parts)
        self.square_sum += squares
        parts.clear()
        if self._bucket.norm_of:
            self._squares[index] = self._squares_of(self._mine[index].span)
        self.reduced[index].set_result(None)
        if all(one.done() for one in self.reduced):
            self.norm.tell(self._exchange.me, sum(self._squares))
            if self.ballots:
                self._cast.set_result(self.ballots.cast())
        self._is_here(self._mine[index])
        self._exchange.arrived()

    def _reduce(self, index: int, in_order: Sequence[Vector]) -> float:
        span = self._mine[index].span
        if self.ballots:
            with np.errstate(all="ignore"):
                self.ballots.measure(span.start, in_order)
        if self.watched:
            self.watched.note(index, in_order)
        return self.mix.reduce(span, in_order)

    def _squares_of(self, span: Span) -> float:
        """Of a chunk's means, as far as they count."""
        stop = min(span.stop, self._bucket.norm_of)
        return exact_squares(self.mix.vector_V[span.start : stop])

    def _is_here(self, chunk: "_Chunk") -> None:
        self._missing[chunk.cut] -= 1
        if not self._missing[chunk.cut]:
            self.pieces[chunk.cut].is_here.set()

    async def _part(self, span: Span) -> memoryview:
        return await self._compute(partial(self.mix.part, span), {})

    async def _receive(
        self, peer: PeerId, stream: ChunkStream, span: Span, slot: int, phase: str
    ) -> Vector:
        """One chunk of the right size; it may alias the transport's memory, or this `slot`'s."""
        due = self.codec.encoded_size(span.size)
        slot_S = self.slots[peer, slot][: span.size]
        into_S = slot_S if self.codec.is_exact else self.slots[peer, RAW]
        into = into_S.data.cast("B")[:due]
        payload = await self._exchange.receive(peer, stream, phase, due, into)
        with self._exchange.while_it_is(peer, phase):
            return await self._compute(partial(self.mix.read, payload, slot_S), {})

    async def _compute(self, function: Callable[[], T], given: Mapping[PeerId, Vector]) -> T:
        """Where a chunk as it is takes less than the way to a worker thread and back.

        Raises:
            GroupBroken: if a result is not finite; names who of the others has `given` it.
        """
        try:
            return function() if self.codec.is_exact else await self._exchange.executor(function)
        except NotFinite as error:
            me = self._exchange.me
            why = f"{me} got an overflow, or its own numbers are not finite"
            for peer, part_S in given.items():
                if peer != me and not np.isfinite(part_S).all():
                    why = f"{peer} sent numbers that are not finite"
            raise GroupBroken(Outcome.BROKEN, why) from error

    def _chunks_of(self, peer: PeerId) -> "list[_Chunk]":
        """What `peer` reduces, cut by cut."""
        return [
            _Chunk(number, span)
            for number, cut in enumerate(self._cuts)
            for span in chunks(self._shard(peer, cut), self._bucket.chunk_size)
        ]

    def _shard(self, peer: PeerId, cut: Span) -> Span:
        """What `peer` reduces of this cut."""
        if self._is_direct:
            return cut
        members, shards = self._members, self._exchange.shards
        own = shard(cut.size, len(members), members.index(peer), shards)
        return Span(cut.start + own.start, cut.start + own.stop)

    def _in_order_of_means(self, whose: "Sequence[_Chunk]") -> Sequence[int]:
        order = range(len(whose))
        if not self._bucket.last_means_first:
            return order
        return sorted(order, key=lambda index: -whose[index].cut)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Of this cut, these numbers of the vector."""

    cut: int
    span: Span
