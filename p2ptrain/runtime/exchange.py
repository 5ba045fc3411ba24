"""A formed group moves its slices: reduce-scatter and all-gather over streams, pipelined.

Every member opens one stream to every other member, the *owner* of a share (`core/slices.py`). Up
the stream go the caller's slices of that share, down it come their means:

    caller i  ── slices of share j, one by one ──►  owner j   waits for slice k of all members,
              ◄── means of the same slices ───────            reduces it, sends the mean to all

Where members swap whole vectors, one stream per pair does, opened by the later by name, and each
member reduces all slices itself.

While slice k is being reduced, later ones are on the wire; a receiver that falls behind by `WINDOW`
slices stops reading, so memory is bounded and only this group waits.

The result goes into a buffer of its own, and only a complete one counts: a broken group leaves no
trace in any model. All members hold bitwise the same mean, since each slice is reduced in the order
of the members' names, wherever it is.

Memory is what bounds an average, so each number is touched as rarely as possible: a slice is
checked, reduced and turned into a delta (mean - own) in blocks that stay in the processor's cache,
when it arrives. The owner keeps the means that it still has to hand out where its own part of them
was.

Legend of shapes: ``V`` numbers of the vector, ``S`` of one slice, ``B`` of one block.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from p2ptrain.compute.replica import Vector
from p2ptrain.core.events import Outcome
from p2ptrain.core.links import MAX_MBIT
from p2ptrain.core.slices import Span, is_swapped, share, slices
from p2ptrain.errors import CodecError, ConfigError, RefusedError, TransportError
from p2ptrain.ids import PeerId, Seconds, Ticket
from p2ptrain.net.transport import SliceStream
from p2ptrain.net.wire import MAX_SLICE_BYTES, AverageOpening
from p2ptrain.runtime.scope import Scope

BLOCK = 1 << 15
"""Numbers that are worked on at a time: a handful of such blocks fits into a core's cache."""

WINDOW = 8
"""Slices of one member that wait to be reduced, at most."""

ARRIVAL_S: Seconds = 2.0
"""Members learn of their group within so long of each other: a stream that comes before its group
waits so long, and so does a group for a stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeConfig:
    """How vectors travel."""

    slice_kib: int = 256
    """Size of one slice. Too small: work per slice dominates; too large: nothing overlaps."""

    average_timeout_s: Seconds = 60.0
    """No average lasts longer; it is broken then. A net under the other deadlines, not a tuning
    knob: claimed groups end with their lease, dead members end a group at once."""

    link_mbit: int = 0
    """How many Mbit/s this peer's link carries in each direction; peers with slow links reduce
    less. 0: find out from the groups we are in, which is not possible where everyone is in every
    group. Too small: others do our work; too large: they wait for our link."""

    def __post_init__(self) -> None:
        if not 1 <= self.slice_kib <= MAX_SLICE_BYTES // 1024:
            most = MAX_SLICE_BYTES // 1024
            raise ConfigError(f"slice_kib = {self.slice_kib} must be between 1 and {most}")
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


OpenStream = Callable[[PeerId, AverageOpening], Awaitable[SliceStream]]


class Exchange:
    """One member's side of one group's average.

    Args:
        vector_V: what this member contributes; scratch memory for the exchange from now on.
        result_V: where the result goes, of the same shape: the mean, or with `delta` the mean
            minus what this member contributes.
        swarm: the digest that openings carry.
        clock: for the times that messages of failure state.
        weights: of the members' shares, in their order; none: equal shares.
        arrival_s: how long to wait for a member's stream; it may still be in another group.
    """

    def __init__(
        self,
        me: PeerId,
        ticket: Ticket,
        members: tuple[PeerId, ...],
        vector_V: Vector,
        result_V: Vector,
        *,
        delta: bool,
        slice_size: int,
        swarm: str,
        clock: Callable[[], Seconds],
        arrival_s: Seconds = ARRIVAL_S,
        weights: Sequence[int] = (),
    ) -> None:
        self._me = me
        self._ticket = ticket
        self._members = members
        self._weights = weights
        self._vector_V = vector_V
        self._result_V = result_V
        self._delta = delta
        self._slice_size = slice_size
        self._swarm = swarm
        self._clock = clock
        self._started = clock()
        self._arrival_s = arrival_s
        self.sent_bytes = 0
        self.received_bytes = 0
        self.square_sum = 0.0
        """Of the result's numbers: with `delta`, how far this member was from the mean, squared."""
        loop = asyncio.get_running_loop()
        self._swaps = is_swapped(len(vector_V), len(members), slice_size)
        self._mine = slices(self._share(me), slice_size)
        self._parts: list[dict[PeerId, Vector]] = [{} for _ in self._mine]
        self._reduced = [loop.create_future() for _ in self._mine]
        callers = (peer for peer in members if peer != me and not (self._swaps and peer < me))
        self._incoming: dict[PeerId, asyncio.Future[SliceStream]] = {
            peer: loop.create_future() for peer in callers
        }
        self._served = {peer: loop.create_future() for peer in self._incoming}
        self._streams: list[SliceStream] = []

    # --- for the driver ---------------------------------------------------------------------------

    async def run(self, open_stream: OpenStream) -> None:
        """Move all slices; the result is complete when this returns.

        Raises:
            GroupBroken: if any member vanished, refused, or sent what cannot be averaged.
        """
        broken = "the average was abandoned"
        try:
            async with Scope() as scope:
                for index, span in enumerate(self._mine):
                    self._contribute(index, self._me, self._vector_V[span.start : span.stop])
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
        waiting = self._incoming.get(opening.sender)
        if waiting is None or waiting.done():
            raise RefusedError(f"{self._ticket} does not wait for a stream of {opening.sender}")
        mine, theirs = self._opening(), opening
        if (theirs.vector_size, theirs.slice_size) != (mine.vector_size, mine.slice_size):
            raise RefusedError(
                f"{opening.sender} averages {theirs.vector_size} numbers in slices of "
                f"{theirs.slice_size}, {self._me} {mine.vector_size} in slices of {mine.slice_size}"
            )
        self._streams.append(stream)
        waiting.set_result(stream)
        await asyncio.shield(self._served[opening.sender])

    # --- whole vectors ----------------------------------------------------------------------------

    async def _swap(self, scope: Scope, peer: PeerId, open_stream: OpenStream) -> None:
        waits = peer in self._incoming
        stream = await (self._called_by(peer) if waits else self._call(peer, open_stream))
        sending = scope.start(self._send_all(peer, stream, self._mine))
        await self._take_parts(peer, stream)
        await asyncio.gather(sending, *self._reduced)
        await self._end(peer, stream)
        if waits:
            self._served[peer].set_result(None)

    # --- our part of others' shares ---------------------------------------------------------------

    def _reduce_scatter(self, scope: Scope, peer: PeerId, open_stream: OpenStream) -> None:
        if self._share(peer).size:
            scope.start(self._ask_owner(scope, peer, open_stream))
        if self._mine:
            scope.start(self._serve_caller(scope, peer))

    async def _ask_owner(self, scope: Scope, owner: PeerId, open_stream: OpenStream) -> None:
        spans = slices(self._share(owner), self._slice_size)
        stream = await self._call(owner, open_stream)
        sending = scope.start(self._send_all(owner, stream, spans))
        for span in spans:
            mean_S = await self._receive(owner, stream, span, "sending means")
            self._take_mean(owner, span, mean_S)
        await sending
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
            async with asyncio.timeout(self._arrival_s):
                return await self._incoming[peer]
        except TimeoutError as error:
            why = f"{peer} opened no stream within {self._arrival_s:g} s"
            raise GroupBroken(Outcome.LATE, why) from error

    async def _send_all(self, peer: PeerId, stream: SliceStream, spans: tuple[Span, ...]) -> None:
        for span in spans:
            slice_S = self._vector_V[span.start : span.stop]
            await self._send(peer, stream, slice_S, last=span is spans[-1])

    # --- our own share ----------------------------------------------------------------------------

    async def _serve_caller(self, scope: Scope, caller: PeerId) -> None:
        stream = await self._called_by(caller)
        returning = scope.start(self._return_means(caller, stream))
        await self._take_parts(caller, stream)
        await returning
        await self._end(caller, stream)
        self._served[caller].set_result(None)

    async def _take_parts(self, peer: PeerId, stream: SliceStream) -> None:
        for index, span in enumerate(self._mine):
            if index >= WINDOW:
                await self._reduced[index - WINDOW]
            slice_S = await self._receive(peer, stream, span, "sending its part")
            self._contribute(index, peer, slice_S)

    def _contribute(self, index: int, member: PeerId, slice_S: Vector) -> None:
        """Take one member's slice in; the last one reduces it."""
        parts = self._parts[index]
        parts[member] = slice_S
        if len(parts) == len(self._members):
            self._reduce(self._mine[index], [parts[peer] for peer in self._members])
            parts.clear()
            self._reduced[index].set_result(None)

    def _reduce(self, span: Span, parts: Sequence[Vector]) -> None:
        """Average one slice of all members, in their order."""
        weight = np.float32(len(parts))
        mean_B = np.empty(min(BLOCK, span.size), np.float32)
        for start in range(0, span.size, BLOCK):
            stop = min(start + BLOCK, span.size)
            mean = mean_B[: stop - start]
            with np.errstate(over="ignore", invalid="ignore"):
                mean[:] = parts[0][start:stop]
                for part in parts[1:]:
                    mean += part[start:stop]
                mean /= weight
            if not self._put(span.start + start, mean):
                raise self._not_finite(parts)
            if not self._swaps:  # the others still want this mean, and nobody our part of it
                self._vector_V[span.start + start : span.start + stop] = mean

    def _take_mean(self, owner: PeerId, span: Span, mean_S: Vector) -> None:
        for start in range(0, span.size, BLOCK):
            if not self._put(span.start + start, mean_S[start : start + BLOCK]):
                raise GroupBroken(Outcome.BROKEN, f"{owner} sent numbers that are not finite")

    def _put(self, at: int, mean_B: Vector) -> bool:
        """One block of the mean becomes a block of the result; false if that is not finite.

        The result is what is checked: shared memory may change under whoever looks at it twice.
        """
        result_B = self._result_V[at : at + len(mean_B)]
        with np.errstate(over="ignore", invalid="ignore"):
            if self._delta:
                np.subtract(mean_B, self._vector_V[at : at + len(mean_B)], out=result_B)
            else:
                result_B[:] = mean_B
            square_sum = float(np.dot(result_B, result_B))
        self.square_sum += square_sum
        return math.isfinite(square_sum) or is_finite(result_B)

    def _not_finite(self, parts: Sequence[Vector]) -> GroupBroken:
        for member, part in zip(self._members, parts, strict=True):
            if member != self._me and not np.isfinite(part).all():
                return GroupBroken(Outcome.BROKEN, f"{member} sent numbers that are not finite")
        why = f"{self._me} got an overflow, or its own numbers are not finite"
        return GroupBroken(Outcome.BROKEN, why)

    async def _return_means(self, caller: PeerId, stream: SliceStream) -> None:
        for index, span in enumerate(self._mine):
            await self._reduced[index]
            slice_S = self._vector_V[span.start : span.stop]
            await self._send(caller, stream, slice_S, last=span is self._mine[-1])

    # --- one slice --------------------------------------------------------------------------------

    async def _send(
        self, peer: PeerId, stream: SliceStream, slice_S: Vector, *, last: bool
    ) -> None:
        try:
            await stream.send(slice_S.data.cast("B"), last)
        except (TransportError, RefusedError) as error:
            raise self._broken(peer, "taking slices", error) from error
        self.sent_bytes += slice_S.nbytes

    async def _receive(self, peer: PeerId, stream: SliceStream, span: Span, phase: str) -> Vector:
        """One slice of the right size; it may alias the transport's memory."""
        # Nobody else writes there yet: in a pair and for means, a slice has one place to go.
        alone = len(self._members) == 2 or phase == "sending means"
        into = self._result_V[span.start : span.stop].data.cast("B") if alone else None
        try:
            payload = await stream.receive(into)
        except (TransportError, RefusedError, CodecError) as error:
            raise self._broken(peer, phase, error) from error
        if payload is None or payload.nbytes != 4 * span.size:
            got = "the end" if payload is None else f"{payload.nbytes} bytes"
            raise GroupBroken(
                Outcome.BROKEN, f"{peer} sent {got} where a slice of {4 * span.size} bytes was due"
            )
        self.received_bytes += payload.nbytes
        return np.frombuffer(payload, dtype="<f4")

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
            return Span(0, len(self._vector_V))
        place, count = self._members.index(peer), len(self._members)
        return share(len(self._vector_V), count, place, self._weights)

    def _opening(self) -> AverageOpening:
        return AverageOpening(
            self._swarm, self._me, self._ticket, len(self._vector_V), self._slice_size
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


_ZEROS_B = np.zeros(BLOCK, np.float32)


def is_finite(vector_V: Vector) -> bool:
    """True if none of the numbers is infinite or not a number; reads them once, writes nothing."""
    blocks = (vector_V[at : at + BLOCK] for at in range(0, len(vector_V), BLOCK))
    with np.errstate(invalid="ignore"):
        return all(math.isfinite(np.dot(block_B, _ZEROS_B[: len(block_B)])) for block_B in blocks)
