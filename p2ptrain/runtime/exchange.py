"""A formed group moves its slices: reduce-scatter and all-gather over streams, pipelined.

Every member opens one stream to every other member, the *owner* of a share (`core/slices.py`). Up
the stream go the caller's slices of that share, down it come their means:

    caller i  ── slices of share j, one by one ──►  owner j   waits for slice k of all members,
              ◄── means of the same slices ───────            reduces it, sends the mean to all

Where members swap whole vectors, one stream per pair does, opened by the later by name, and each
member reduces all slices itself.

While slice k is being reduced, later ones are on the wire; a receiver that falls behind by `WINDOW`
slices stops reading, so memory is bounded and only this group waits.

What is done to the numbers, and with a codec to the bytes, is in `runtime/mix.py`. Only a complete
result counts: a broken group leaves no trace in any model. **A member is through when all are**:
whoever serves a stream ends it only when it has all of the result itself, and so does the caller
where one stream serves both. So whoever has committed knows that every other member could, and
after a break all can adopt what one of them has committed (`core/repair.py`).

All members hold bitwise the same mean, since each slice is reduced in the order of the members'
names, wherever it is.

Legend of shapes: ``V`` numbers of the vector, ``S`` of one slice.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from p2ptrain.compute.codec import Codec, load_codec
from p2ptrain.compute.replica import Vector
from p2ptrain.core.events import Outcome
from p2ptrain.core.links import MAX_MBIT
from p2ptrain.core.slices import Span, is_swapped, share, slices
from p2ptrain.core.transfers import ARRIVAL_S
from p2ptrain.errors import CodecError, ConfigError, RefusedError, TransportError
from p2ptrain.ids import PeerId, Seconds, Ticket
from p2ptrain.net.transport import SliceStream
from p2ptrain.net.wire import MAX_SLICE_BYTES, AverageOpening
from p2ptrain.runtime.mix import Mix, NotFinite
from p2ptrain.runtime.offload import Offload
from p2ptrain.runtime.scope import Scope

WINDOW = 4
"""Slices of one member that wait to be reduced, at most."""

MEANS, RAW = WINDOW, WINDOW + 1
"""Where a mean arrives, or bytes that are still to be decoded; before them, `WINDOW` parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeConfig:
    """How vectors travel."""

    slice_kib: int = 1024
    """Size of one slice as float32, at most; small shares travel in smaller ones. Too small: work
    per slice dominates; too large: nothing overlaps, a slice does not stay in a core's cache
    between arriving and being reduced, and gRPC holds several of them for each stream."""

    codec: str = "fp32"
    """How models travel: ``fp32`` as they are, ``bf16`` or ``fp16`` in half of the bytes, ``int8``
    in a quarter. Nothing of what training does is lost, but peers differ by a little rounding, and
    it costs computing: worth it on links below some 10 Gbit/s. Gradients always travel as they are:
    counts ride in their vector. All peers of a swarm must use the same."""

    average_timeout_s: Seconds = 60.0
    """A group in which nothing moves for so long is broken, or sooner where less was seen to be
    enough (`core/transfers.py`). A net under the other deadlines, not a tuning knob: claimed groups
    end with their lease, dead members end a group at once."""

    link_mbit: int = 0
    """How many Mbit/s this peer's link carries in each direction; peers with slow links reduce
    less. 0: find out from the groups we are in, which is not possible where everyone is in every
    group. Too small: others do our work; too large: they wait for our link."""

    def __post_init__(self) -> None:
        if not 1 <= self.slice_kib <= MAX_SLICE_BYTES // 1024:
            most = MAX_SLICE_BYTES // 1024
            raise ConfigError(f"slice_kib = {self.slice_kib} must be between 1 and {most}")
        load_codec(self.codec)
        if not 0 <= self.link_mbit <= MAX_MBIT:
            raise ConfigError(
                f"link_mbit = {self.link_mbit} must be between 1 and {MAX_MBIT}, or 0 to measure it"
            )
        if not 0 < self.average_timeout_s < math.inf:
            raise ConfigError(f"average_timeout_s = {self.average_timeout_s} must be above 0")


class GroupBroken(Exception):
    """The group cannot finish; says how it ended, because of whom, and in which phase."""

    def __init__(self, outcome: Outcome, why: str) -> None:
        super().__init__(why)
        self.outcome = outcome
        self.why = why


T = TypeVar("T")

OpenStream = Callable[[PeerId, AverageOpening], Awaitable[SliceStream]]


class Exchange:
    """One member's side of one group's average.

    Args:
        vector_V: what this member contributes. It becomes the result: the mean, or with `delta`
            the mean minus what this member contributed. Worthless after a break.
        delta: whether the group averages models.
        keeps_mean: this member wants the mean, even with `delta`.
        lend: gives memory for so many numbers, from where slices travel best.
        lend_slot: gives memory for slices to arrive in.
        offload: runs what takes long on a worker thread.
        swarm: the digest that openings carry.
        clock: for the times that messages of failure state.
        heard: is told whenever anything has come from a member.
        weights: of the members' shares, in their order; none: equal shares.
        arrival_s: how long to wait for a member's stream; it may still be in another group.
    """

    def __init__(
        self,
        me: PeerId,
        ticket: Ticket,
        members: tuple[PeerId, ...],
        vector_V: Vector,
        *,
        delta: bool,
        keeps_mean: bool = False,
        codec: Codec,
        slice_size: int,
        lend: Callable[[int], Vector],
        lend_slot: Callable[[int], Vector],
        offload: Offload,
        swarm: str,
        clock: Callable[[], Seconds],
        heard: Callable[[PeerId], None] = lambda _: None,
        arrival_s: Seconds = ARRIVAL_S,
        weights: Sequence[int] = (),
    ) -> None:
        self._me = me
        self._ticket = ticket
        self._members = members
        self._weights = weights
        self.vector_V = vector_V
        self._size = len(vector_V)
        self._codec = codec
        self._slice_size = slice_size
        self._offload = offload
        self._swarm = swarm
        self._clock = clock
        self._tell_heard = heard
        self._started = self._moved_at = clock()
        self.arrival_s = arrival_s
        self.sent_bytes = 0
        self.received_bytes = 0
        self._link_sent_bytes = self._link_received_bytes = 0  # what left the machine, or may have
        self.square_sum = 0.0
        """Of the result's numbers: with `delta`, how far this member was from the mean, squared."""
        loop = asyncio.get_running_loop()
        lossy = not codec.is_exact
        self._swaps = is_swapped(self._size, len(members), slice_size, lossy=lossy)
        self._mine = slices(self._share(me), slice_size)
        self.mix = Mix(
            vector_V,
            len(members),
            members.index(me),
            self._share(me),
            swaps=self._swaps,
            delta=delta,
            keeps_mean=keeps_mean,
            codec=codec,
            lend=lend,
        )
        self._parts: list[dict[PeerId, Vector]] = [{} for _ in self._mine]
        self._reduced = [loop.create_future() for _ in self._mine]
        self._writing = asyncio.Lock()
        self._written: dict[int, tuple[memoryview, int]] = {}  # swapped: and how many wait for it
        self._lend_slot = lend_slot
        self._slots: dict[tuple[PeerId, int], Vector] = {}  # where slices arrive
        callers = (peer for peer in members if peer != me and not (self._swaps and peer < me))
        self._incoming: dict[PeerId, asyncio.Future[SliceStream]] = {
            peer: loop.create_future() for peer in callers
        }
        self._served = {peer: loop.create_future() for peer in self._incoming}
        self.arrivals: dict[PeerId, Seconds] = {}
        """How long after the group's beginning each one's stream came, of those that open one."""
        self._heard: dict[PeerId, None] = {}
        self._streams: list[SliceStream] = []
        owners = () if self._swaps else (p for p in members if p != me and self._share(p).size)
        self._due = len(tuple(owners)) + len(self._mine)
        self._has_all: asyncio.Future[None] = loop.create_future()

    # --- for the driver ---------------------------------------------------------------------------

    @property
    def is_complete(self) -> bool:
        """True once all of the result is here, whether or not all others have it."""
        return self._has_all.done() and not self._has_all.cancelled()

    @property
    def memory_left(self) -> list[Vector]:
        """After a break that all drop: vectors that may be used again at once.

        Others may still read them, in an attempt that they do not know is over. They read what they
        read: as long as we have not said that we have all, nobody commits that. Whoever decodes
        does it on threads that cannot be cancelled; that memory is left alone.
        """
        if self.is_complete or not self._codec.is_exact:
            return []
        return [self.vector_V, *self.mix.lent]

    @property
    def slots(self) -> list[Vector]:
        """Where slices arrived; once the exchange is over nothing does, but a thread may decode."""
        idle = self.is_complete or self._codec.is_exact
        return list(self._slots.values()) if idle else []

    @property
    def moved_bytes(self) -> int:
        """What went over a link, in the direction in which more did."""
        return max(self._link_sent_bytes, self._link_received_bytes)

    @property
    def silent_s(self) -> Seconds:
        """How long ago anything has moved here, or the exchange was made."""
        return self._clock() - self._moved_at

    @property
    def is_met(self) -> bool:
        """True once something of every other member has come."""
        return len(self._heard) == len(self._members) - 1

    @property
    def missing(self) -> tuple[PeerId, ...]:
        """Who has not opened its stream yet."""
        return tuple(peer for peer in self._incoming if peer not in self.arrivals)

    async def run(self, open_stream: OpenStream) -> None:
        """Move all slices; the result is complete when this returns.

        Raises:
            GroupBroken: if any member vanished, refused, or sent what cannot be averaged.
        """
        broken = "the average was abandoned"
        try:
            async with Scope() as scope:
                if not self._swaps or len(self._members) == 1:
                    for index in range(len(self._mine)):
                        await self._contribute_own(index)
                for peer in self._members:
                    if peer != self._me and self._swaps:
                        scope.start(self._swap(scope, peer, open_stream))
                    elif peer != self._me:
                        self._reduce_scatter(scope, peer, open_stream)
            broken = ""
        except GroupBroken as error:
            broken = error.why
            raise
        finally:
            self._close(broken)

    async def accept(self, opening: AverageOpening, stream: SliceStream) -> None:
        """A member's stream to our share has come; returns when it has been served, or all is over.

        Raises:
            RefusedError: if the opening does not fit this group.
        """
        mine, theirs = self._opening(), opening
        if theirs.codec != mine.codec:
            raise RefusedError(
                f"{opening.sender} sends {theirs.codec} and {self._me} {mine.codec}; "
                f"give all peers the same codec"
            )
        waiting = self._incoming.get(opening.sender)
        if waiting is None or waiting.done():
            raise RefusedError(f"{self._ticket} does not wait for a stream of {opening.sender}")
        if (theirs.vector_size, theirs.slice_size) != (mine.vector_size, mine.slice_size):
            raise RefusedError(
                f"{opening.sender} averages {theirs.vector_size} numbers in slices of "
                f"{theirs.slice_size}, {self._me} {mine.vector_size} in slices of {mine.slice_size}"
            )
        self._streams.append(stream)
        self.arrivals[opening.sender] = self._clock() - self._started
        self._hear(opening.sender)
        waiting.set_result(stream)
        await asyncio.shield(self._served[opening.sender])

    # --- whole vectors ----------------------------------------------------------------------------

    async def _swap(self, scope: Scope, peer: PeerId, open_stream: OpenStream) -> None:
        waits = peer in self._incoming
        stream = await (self._called_by(peer) if waits else self._call(peer, open_stream))
        sending = scope.start(self._send_whole(peer, stream))
        await self._take_parts(peer, stream)
        await asyncio.gather(sending, self._has_all)
        if not waits:
            await self._say_all(peer, stream)
        await self._end(peer, stream)
        if waits:
            self._served[peer].set_result(None)

    async def _send_whole(self, peer: PeerId, stream: SliceStream) -> None:
        for index in range(len(self._mine)):
            payload = await self._swapped(index)
            await self._send(peer, stream, payload, last=False)

    async def _swapped(self, index: int) -> memoryview:
        """Our slice as everyone gets it; kept until the last one has."""
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
        if self._share(peer).size:
            scope.start(self._ask_owner(scope, peer, open_stream))
        if self._mine:
            scope.start(self._serve_caller(scope, peer))

    async def _ask_owner(self, scope: Scope, owner: PeerId, open_stream: OpenStream) -> None:
        spans = slices(self._share(owner), self._slice_size)
        stream = await self._call(owner, open_stream)
        sending = scope.start(self._send_parts(owner, stream, spans))
        for span in spans:
            mean_S = await self._receive(owner, stream, span, MEANS, "sending means")
            await self._take_mean(owner, span, mean_S)
        self._arrived()
        await sending
        if not self._mine:  # nobody asks us, so nobody would hear that we have all
            await self._has_all
            await self._say_all(owner, stream)
        await self._end(owner, stream)

    async def _call(self, peer: PeerId, open_stream: OpenStream) -> SliceStream:
        try:
            stream = await open_stream(peer, self._opening())
        except (TransportError, RefusedError) as error:
            raise self._broken(peer, "opening its stream", error) from error
        self._streams.append(stream)
        return stream

    async def _called_by(self, peer: PeerId) -> SliceStream:
        try:
            async with asyncio.timeout(self.arrival_s):
                return await self._incoming[peer]
        except TimeoutError as error:
            why = f"{peer} opened no stream within {self.arrival_s:g} s"
            raise GroupBroken(Outcome.LATE, why) from error

    async def _send_parts(
        self, owner: PeerId, stream: SliceStream, spans: tuple[Span, ...]
    ) -> None:
        last = bool(self._mine)
        if self._codec.is_exact and await self._refer(owner, stream, last=last):
            return
        for span in spans:
            payload = await self._part(span)
            await self._send(owner, stream, payload, last=last and span is spans[-1])

    async def _refer(self, owner: PeerId, stream: SliceStream, *, last: bool) -> bool:
        """Send all of a share at once, if the owner can read it where it stands."""
        part = self.mix.part(self._share(owner))
        try:
            referred = await stream.refer(part, last)
        except (TransportError, RefusedError) as error:
            raise self._broken(owner, "taking slices", error) from error
        self.sent_bytes += part.nbytes if referred else 0
        return referred

    async def _part(self, span: Span) -> memoryview:
        """Our part of a slice, as it travels."""
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

    # --- our own share ----------------------------------------------------------------------------

    async def _serve_caller(self, scope: Scope, caller: PeerId) -> None:
        stream = await self._called_by(caller)
        returning = scope.start(self._return_means(caller, stream))
        await self._take_parts(caller, stream)
        await returning
        await self._end(caller, stream)
        await self._has_all
        self._served[caller].set_result(None)

    async def _take_parts(self, peer: PeerId, stream: SliceStream) -> None:
        # In a pair a slice is reduced when it comes, in memory that is still in the core's cache.
        slots = 1 if len(self._members) == 2 and not self._swaps else WINDOW
        for index, span in enumerate(self._mine):
            if index >= slots:
                await self._reduced[index - slots]
            slice_S = await self._receive(peer, stream, span, index % slots, "sending its part")
            await self._contribute(index, peer, slice_S)

    async def _contribute_own(self, index: int) -> None:
        span = self._mine[index]
        await self._contribute(index, self._me, self.mix.vector_V[span.start : span.stop])

    async def _contribute(self, index: int, member: PeerId, slice_S: Vector) -> None:
        """Take one member's slice in; the last one reduces it."""
        parts = self._parts[index]
        parts[member] = slice_S
        if len(parts) < len(self._members):
            return
        in_order = [parts[peer] for peer in self._members]
        try:
            reduced = await self._compute(lambda: self.mix.reduce(self._mine[index], in_order))
        except NotFinite as error:
            raise self._not_finite(in_order) from error
        self.square_sum += reduced
        parts.clear()
        self._reduced[index].set_result(None)
        self._arrived()

    def _arrived(self) -> None:
        """One more part of the result is here."""
        self._due -= 1
        if not self._due:
            self._has_all.set_result(None)

    def _not_finite(self, parts: Sequence[Vector]) -> GroupBroken:
        for member, part in zip(self._members, parts, strict=True):
            if member != self._me and not np.isfinite(part).all():
                return GroupBroken(Outcome.BROKEN, f"{member} sent numbers that are not finite")
        return self._own_fault()

    def _own_fault(self) -> GroupBroken:
        why = f"{self._me} got an overflow, or its own numbers are not finite"
        return GroupBroken(Outcome.BROKEN, why)

    async def _return_means(self, caller: PeerId, stream: SliceStream) -> None:
        for index, span in enumerate(self._mine):
            await self._reduced[index]
            payload = self.mix.handed_out(span)
            await self._send(caller, stream, payload, last=False)

    # --- one slice --------------------------------------------------------------------------------

    async def _send(
        self, peer: PeerId, stream: SliceStream, payload: memoryview, *, last: bool
    ) -> None:
        try:
            await stream.send(payload, last)
        except (TransportError, RefusedError) as error:
            raise self._broken(peer, "taking slices", error) from error
        self.sent_bytes += payload.nbytes
        self._link_sent_bytes += 0 if stream.is_local else payload.nbytes
        self._moved_at = self._clock()

    async def _receive(
        self, peer: PeerId, stream: SliceStream, span: Span, slot: int, phase: str
    ) -> Vector:
        """One slice of the right size; it may alias the transport's memory, or this `slot`'s."""
        due = self._codec.encoded_size(span.size)
        slot_S = self._slot(peer, slot)[: span.size]
        into_S = slot_S if self._codec.is_exact else self._slot(peer, RAW)
        try:
            payload = await stream.receive(into_S.data.cast("B")[:due])
            if payload is None or payload.nbytes != due:
                got = "the end" if payload is None else f"{payload.nbytes} bytes"
                why = f"{peer} sent {got} where a slice of {due} bytes was due"
                raise GroupBroken(Outcome.BROKEN, why)
            self.received_bytes += due
            self._link_received_bytes += 0 if stream.is_local else due
            self._hear(peer)
            return await self._compute(lambda: self.mix.read(payload, slot_S))
        except (TransportError, RefusedError, CodecError) as error:
            raise self._broken(peer, phase, error) from error

    def _hear(self, peer: PeerId) -> None:
        self._heard[peer] = None
        self._moved_at = self._clock()
        self._tell_heard(peer)

    def _slot(self, peer: PeerId, slot: int) -> Vector:
        key = peer, slot
        if key not in self._slots:
            self._slots[key] = self._lend_slot(self._slice_size)
        return self._slots[key]

    async def _compute(self, function: Callable[[], T]) -> T:
        """Where a slice as it is takes less than the way to a worker thread and back."""
        return function() if self._codec.is_exact else await self._offload(function)

    async def _say_all(self, peer: PeerId, stream: SliceStream) -> None:
        try:
            await stream.finish()
        except (TransportError, RefusedError) as error:
            raise self._broken(peer, "ending its stream", error) from error

    async def _end(self, peer: PeerId, stream: SliceStream) -> None:
        """Both sides have said and read all: only then is the average complete for this pair."""
        try:
            await stream.release()
            extra = await stream.receive()
        except (TransportError, RefusedError, CodecError) as error:
            raise self._broken(peer, "ending its stream", error) from error
        if extra is not None:
            raise GroupBroken(Outcome.BROKEN, f"{peer} sent more slices than its share has")

    # --- small things -----------------------------------------------------------------------------

    def _share(self, peer: PeerId) -> Span:
        """What `peer` reduces."""
        if self._swaps:
            return Span(0, self._size)
        place, count = self._members.index(peer), len(self._members)
        return share(self._size, count, place, self._weights)

    def _opening(self) -> AverageOpening:
        return AverageOpening(
            self._swarm,
            self._me,
            self._ticket,
            self._size,
            self._slice_size,
            self._codec.name,
        )

    def _broken(self, peer: PeerId, phase: str, error: Exception) -> GroupBroken:
        waited = self._clock() - self._started
        outcome = Outcome.REFUSED if isinstance(error, RefusedError) else Outcome.LOST
        return GroupBroken(outcome, f"{peer}, {phase}, after {waited:.2f} s: {error}")

    def _close(self, broken: str) -> None:
        if broken:
            for stream in self._streams:
                stream.abort(broken)
        for served in self._served.values():
            if not served.done():
                served.set_result(None)
