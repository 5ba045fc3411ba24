"""Manage all streams of one ticket: openings, progress, and their common end.

**A member ends when all have the result**: a member that serves a stream ends it only when it has
all of the result itself, of all buckets, and so does the caller that is not called. Callers without
a shard have no streams among each other: the owner that serves them ends all of theirs when all of
them have the result. So a member that has committed knows that every other member could, and after
a break all can adopt what one of them has committed (`core/repair.py`).
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any

from p2ptrain.core.effects import Outcome
from p2ptrain.core.transfers import ARRIVAL_S, STALL_S
from p2ptrain.errors import CodecError, RefusedError, TransportError
from p2ptrain.ids import PeerId, Seconds, Ticket
from p2ptrain.net.transport import ChunkStream
from p2ptrain.net.wire import AverageOpening
from p2ptrain.runtime.scope import Scope

SHORTEST_S: Seconds = 0.01
"""Less is not worth a timer, and may be too little for the clock to show."""

OpenStream = Callable[[PeerId, AverageOpening], Awaitable[ChunkStream]]
Incoming = tuple[asyncio.Future[ChunkStream], asyncio.Event]  # it has come, and has been served
Move = Callable[[PeerId, ChunkStream], Coroutine[Any, Any, None]]  # Any: asyncio's own types


class AttemptOver(Exception):
    """An attempt has come to nothing here."""


class GroupBroken(Exception):
    """The group cannot finish; says how it ended, because of whom, and in which phase."""

    def __init__(self, outcome: Outcome, why: str) -> None:
        super().__init__(why)
        self.outcome = outcome


@dataclass(eq=False)
class Streams:
    """One member's streams of one ticket."""

    me: PeerId
    ticket: Ticket
    members: tuple[PeerId, ...]
    _: KW_ONLY
    swarm: str
    """The digest that openings carry."""
    clock: Callable[[], Seconds]
    """For the times that messages of failure state."""
    heard: Callable[[PeerId], None] = lambda _: None
    """Called whenever anything has come from a member."""
    open_stream: OpenStream
    arrival_s: Seconds = ARRIVAL_S
    """How long to wait for a member's stream; it may still be in another group."""
    stall_s: Seconds = STALL_S
    """A group in which nothing has moved for so long is broken."""
    most_s: Seconds = STALL_S
    """The same for who has all: it waits for those who have not, and who see whether it moves."""
    is_awaited: bool = True
    """False: trainers compute meanwhile, and silence is no failure; until `await_from_now`."""

    def __post_init__(self) -> None:
        self.others = tuple(peer for peer in self.members if peer != self.me)
        self.later = tuple(peer for peer in self.others if peer > self.me)
        self.sent_bytes = self.received_bytes = 0
        self.arrivals: dict[PeerId, Seconds] = {}
        """How long after the group's beginning each one's stream came, of those that open one."""
        self.has_all = asyncio.Event()
        """Set: all of the result is here, whether or not all others have it."""
        self.ended_well, self.moving_s = False, 0.0
        """All streams have, and so all members have the result; how long it took."""
        self.means_may_leave = asyncio.Event()
        """Set: what this member has reduced goes out to the others."""
        self.hands_out = 1.0
        """How many whole vectors leave the member that sends the most results, and at least 1. Who
        has all waits `most_s` for each: transports take megabytes for every member at once, which
        then share one link, and their sender does not learn how far they are.
        """
        self.due = 0
        """Parts of the result that are yet to come."""
        self.scope = Scope()
        self._awaited = asyncio.Event()
        if self.is_awaited:
            self._awaited.set()
        self._started = self._moved_at = self.clock()
        self._link_sent_bytes = self._link_received_bytes = 0  # what left the machine, or may have
        self._openings: dict[str, AverageOpening] = {}
        self._incoming: dict[tuple[str, PeerId], Incoming] = {}
        self._shardless: dict[str, dict[PeerId, asyncio.Event]] = {}  # set: it has all
        self._met: dict[PeerId, None] = {}
        self._streams: list[ChunkStream] = []

    @property
    def moved_bytes(self) -> int:
        """What went over a link, in the direction in which more did."""
        return max(self._link_sent_bytes, self._link_received_bytes)

    @property
    def silent_s(self) -> Seconds:
        """How long ago anything has moved here, or the exchange was made."""
        return self.clock() - self._moved_at

    @property
    def missing_s(self) -> Seconds:
        """For how long a member's stream has been waited for in vain."""
        is_missing = any(peer not in self.arrivals for _, peer in self._incoming)
        return self.clock() - self._started if is_missing else 0.0

    def await_from_now(self, heard: Callable[[PeerId], None]) -> None:
        """All trainers wait for this from now on; `heard` is called whenever anything comes."""
        self.heard, self._moved_at = heard, self.clock()
        self._awaited.set()

    async def watch(self) -> None:
        """Break the group when nothing has moved for too long."""
        await self._awaited.wait()
        while True:
            is_met = len(self._met) == len(self.others)
            waits_s = self.stall_s if is_met else self.arrival_s
            if self.has_all.is_set():
                waits_s = self.most_s * self.hands_out
            allowed_s = max(self.stall_s, waits_s)
            if self.silent_s >= allowed_s:
                why = f"nothing has moved for {self.silent_s:.1f} s"
                self.scope.fail(GroupBroken(Outcome.LATE, why))
                return
            # Not for longer: meanwhile all may have come, and it is the shorter one that holds.
            left_s = max(allowed_s - self.silent_s, SHORTEST_S)
            await asyncio.sleep(min(left_s, self.stall_s))

    def expect(
        self,
        bucket: str,
        size: int,
        chunk_size: int,
        codec: str,
        callers: Iterable[PeerId],
        shardless: Iterable[PeerId] = (),
    ) -> None:
        """`callers` open a stream each for this bucket, whose sizes and codec must be these.

        Those of them that are `shardless` have no streams among each other.
        """
        self._openings[bucket] = AverageOpening(
            self.swarm, self.me, self.ticket, size, chunk_size, codec, bucket
        )
        for peer in callers:
            came = asyncio.get_running_loop().create_future()
            self._incoming[bucket, peer] = came, asyncio.Event()
        self._shardless[bucket] = {peer: asyncio.Event() for peer in shardless}

    async def accept(self, opening: AverageOpening, stream: ChunkStream) -> None:
        """A member's stream has come; returns when it has been served, or all is over.

        Raises:
            RefusedError: if the opening does not fit this group.
        """
        theirs, mine = opening, self._openings.get(opening.bucket)
        if mine is None:
            raise RefusedError(f"{self.ticket} has no bucket {opening.bucket!r} at {self.me}")
        if theirs.codec != mine.codec:
            raise RefusedError(
                f"{opening.sender} sends {theirs.codec} and {self.me} {mine.codec}; "
                f"give all peers the same codec"
            )
        came, served = self._incoming.get((opening.bucket, opening.sender), (None, None))
        if came is None or served is None or came.done():
            raise RefusedError(f"{self.ticket} does not wait for a stream of {opening.sender}")
        if (theirs.vector_size, theirs.chunk_size) != (mine.vector_size, mine.chunk_size):
            raise RefusedError(
                f"{opening.sender} averages {theirs.vector_size} numbers in chunks of "
                f"{theirs.chunk_size}, {self.me} {mine.vector_size} in chunks of {mine.chunk_size}"
            )
        self._streams.append(stream)
        self.arrivals.setdefault(opening.sender, self.clock() - self._started)
        self._hear(opening.sender)
        came.set_result(stream)
        await served.wait()

    async def exchange(
        self, bucket: str, peer: PeerId, send: Move, take: Move, *, calls: bool, ends: bool = True
    ) -> None:
        """Send and take on one stream, from its beginning to its end.

        The side that `calls` opens it; if it `ends` its own direction, it does so when it has all.
        `take` returns when the memory of what came is not needed any more.
        """
        if calls:
            with self.while_it_is(peer, "opening its stream"):
                stream = await self.open_stream(peer, self._openings[bucket])
            self._streams.append(stream)
        else:
            stream = await self._called_by(bucket, peer)
        sending = self.scope.start(send(peer, stream))
        await take(peer, stream)
        await sending
        if calls and ends:
            await self.has_all.wait()
        with self.while_it_is(peer, "ending its stream"):
            if calls and ends:
                await stream.finish()
            await stream.release()
            extra = await stream.receive()
        if extra is not None:
            raise GroupBroken(Outcome.BROKEN, f"{peer} sent more chunks than its share has")
        if not calls:
            await self.has_all.wait()
            await self._others_have_all(bucket, peer)
            self._incoming[bucket, peer][1].set()

    async def _others_have_all(self, bucket: str, peer: PeerId) -> None:
        """`peer` has ended its side. If it is shardless, wait for all others that are.

        They end theirs without waiting for anything but chunks, so no cycle of waits can exist.
        """
        shardless = self._shardless[bucket]
        if peer in shardless:
            shardless[peer].set()
            for has_all in shardless.values():
                await has_all.wait()

    def exchange_directly(self, bucket: str, send: Move, take: Move) -> None:
        """Send to all what they all get, on one stream per pair that the later one opens."""
        for peer in self.others:
            self.scope.start(self.exchange(bucket, peer, send, take, calls=peer not in self.later))

    async def _called_by(self, bucket: str, peer: PeerId) -> ChunkStream:
        try:
            async with asyncio.timeout(self.arrival_s if self.is_awaited else None):
                return await self._incoming[bucket, peer][0]
        except TimeoutError as error:
            why = f"{peer} opened no stream within {self.arrival_s:g} s"
            raise GroupBroken(Outcome.LATE, why) from error

    # --- messages of a stream ---------------------------------------------------------------------

    async def begin(self, peer: PeerId, stream: ChunkStream) -> None:
        """Let the member know of the stream before there is anything to send on it."""
        with self.while_it_is(peer, "opening its stream"):
            await stream.begin()

    async def send(
        self, peer: PeerId, stream: ChunkStream, payload: memoryview, *, last: bool = False
    ) -> None:
        with self.while_it_is(peer, "taking chunks"):
            await stream.send(payload, last)
        self.sent_bytes += payload.nbytes
        self._link_sent_bytes += 0 if stream.is_local else payload.nbytes
        self._moved_at = self.clock()

    async def refer(
        self, peer: PeerId, stream: ChunkStream, payload: memoryview, *, last: bool
    ) -> bool:
        """Send all of a shard at once, if the owner can read it where it stands."""
        with self.while_it_is(peer, "taking chunks"):
            referred = await stream.refer(payload, last)
        self.sent_bytes += payload.nbytes if referred else 0
        return referred

    async def receive(
        self,
        peer: PeerId,
        stream: ChunkStream,
        phase: str,
        due: int | None = None,
        into: memoryview | None = None,
    ) -> memoryview:
        """The next message, which has `due` bytes if that is known; see `ChunkStream.receive`."""
        with self.while_it_is(peer, phase):
            payload = await stream.receive(into)
        if payload is None or payload.nbytes != (payload.nbytes if due is None else due):
            got = "the end" if payload is None else f"{payload.nbytes} bytes"
            was_due = "string" if due is None else f"chunk of {due} bytes"
            why = f"{peer} sent {got} where a {was_due} was due"
            raise GroupBroken(Outcome.BROKEN, why)
        self.received_bytes += payload.nbytes
        self._link_received_bytes += 0 if stream.is_local else payload.nbytes
        self._hear(peer)
        return payload

    def arrived(self) -> None:
        """One more part of the result is here."""
        self.due -= 1
        if not self.due:
            self.has_all.set()

    @contextmanager
    def while_it_is(self, peer: PeerId, phase: str) -> Iterator[None]:
        """An error of `peer`'s stream breaks the group, in a sentence."""
        try:
            yield
        except (TransportError, RefusedError, CodecError) as error:
            waited = self.clock() - self._started
            outcome = Outcome.REFUSED if isinstance(error, RefusedError) else Outcome.LOST
            why = f"{peer}, {phase}, after {waited:.2f} s: {error}"
            raise GroupBroken(outcome, why) from error

    def close(self, broken: str) -> None:
        """Everything is over; if something `broken` it, the streams are aborted."""
        if not broken:
            self.ended_well, self.moving_s = True, self.clock() - self._started
        for stream in self._streams if broken else ():
            stream.abort(broken)
        for _, served in self._incoming.values():
            served.set()

    def _hear(self, peer: PeerId) -> None:
        self._met[peer] = None
        self._moved_at = self.clock()
        self.heard(peer)
