"""Simulate streams of chunks between peers: ordered, reliable and bounded, like TCP's.

Latency, bandwidth, partitions and crashes affect them; loss does not. A sent chunk is placed at
once in the other side's `_coming`, in order; its arrival is an event that makes one more of them
readable. So no chunk can overtake another, whatever the network does to single arrivals.

A side that hangs up, or dies, has ended the stream at once; the other side learns of it one network
delay later.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial

from p2ptrain.errors import P2PTrainError, RefusedError, TransportError
from p2ptrain.net import wire
from p2ptrain.net.transport import Handler
from p2ptrain.net.wire import Chunk, Opening

WINDOW_CHUNKS = 4
"""The most chunks that a side has sent and the other has not read. Reading one makes room at once:
real transports widen their windows to hide the way back."""

MAX_IGNORED = 256
"""Chunks that a callee ignores after its return, before it hangs up."""

Carry = Callable[[int, Callable[[], None]], None]
"""``carry(size, arrive)``: carry `size` bytes to the other side, then call `arrive`. Size 0: a
signal, which does not queue behind bytes."""


class SimStream:
    """One side of a stream; implements `ChunkStream`.

    Args:
        carry: to the other side.
        when_over: called once, with a sentence if the stream has failed.
        stands_for: how many bytes on the link one byte of a payload stands for.
    """

    def __init__(
        self,
        carry: Carry,
        when_over: "Callable[[SimStream, str], None]",
        stands_for: int = 1,
    ) -> None:
        self.other: SimStream
        self.serving: asyncio.Task[None] | None = None
        """The task that serves this stream, on the called side."""
        self._carry = carry
        self._when_over = when_over
        self._stands_for = stands_for
        self._coming: deque[bytes] = deque()
        self._here = 0  # the number of them that have arrived
        self._unread = 0  # chunks of ours that the other side has not read
        self._said_all = False
        self._heard_all = False
        self._error: P2PTrainError | None = None
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None

    # --- the port ---------------------------------------------------------------------------------

    @property
    def is_local(self) -> bool:
        return False

    @property
    def caller(self) -> str:
        return ""

    async def begin(self) -> None:
        """No effect: openings travel at once."""

    async def send(self, payload: memoryview, last: bool = False) -> None:
        await self._say(Chunk(payload, last))

    async def refer(self, payload: memoryview, last: bool = False) -> bool:
        """No memory is shared here."""
        return False

    async def receive(self, into: memoryview | None = None) -> memoryview | None:
        while not self._here and not self._heard_all and not self._error:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if self._error:
            raise self._error
        if self._heard_all:
            return None
        self._here -= 1
        heard = wire.decode_chunk(self._coming.popleft())
        self.other._was_read()
        if heard.last:
            self._heard_all = True
            self._maybe_over()
        return heard.payload

    async def finish(self) -> None:
        if self.serving is None:  # a callee ends by returning
            await self.say_all()

    async def release(self) -> None:
        """No effect: received chunks are copies."""

    def abort(self, why: str) -> None:
        if self.fail(TransportError(why)):
            self._carry(0, partial(self.other.hear_end, TransportError(why)))

    # --- for the network --------------------------------------------------------------------------

    @property
    def sends(self) -> bool:
        """True while sent chunks are in flight."""
        return self._unread > 0 and self._error is None

    async def say_all(self) -> None:
        """Send the end of this side, if it was not sent."""
        if not self._said_all:
            await self._say(Chunk(last=True))

    def refuse(self, error: RefusedError) -> None:
        """Refuse the stream with a sentence."""
        if self.fail(error):
            self._carry(0, partial(self.other.hear_end, error))

    def fail(self, error: P2PTrainError) -> bool:
        """End this side; false if it had ended before."""
        if self._error or self._is_over:
            return False
        self._error = error
        self._coming.clear()
        self._stir(self._reader)
        self._stir(self._writer)
        self._when_over(self, str(error))
        return True

    def hear_end(self, error: P2PTrainError) -> None:
        """The other side has ended the stream."""
        if self.fail(error) and self.serving:
            self.serving.cancel()

    async def serve(self, handler: Handler, opening: Opening) -> None:
        """Serve the called side: run `handler`, then send the end."""
        try:
            await handler.handle_stream(opening, self)
            await self.say_all()
            for _ in range(MAX_IGNORED):
                if self._heard_all:
                    return
                await self.receive()
            self.abort(f"more than {MAX_IGNORED} chunks that no group waits for")
        except RefusedError as error:
            self.refuse(error)
        except TransportError:
            pass  # the other side ended, or the stream was aborted here

    def arrive(self) -> None:
        """One more chunk has arrived."""
        self._here += 1
        self._stir(self._reader)

    # --- inside -----------------------------------------------------------------------------------

    @property
    def _is_over(self) -> bool:
        return self._said_all and self._heard_all

    async def _say(self, content: Chunk) -> None:
        while self._unread >= WINDOW_CHUNKS and not self._error:
            self._writer = asyncio.get_running_loop().create_future()
            await self._writer
        if self._error:
            raise self._error
        data = wire.encode_chunk(content)
        self._unread += 1
        self.other._coming.append(data)
        payload_bytes = content.payload.nbytes if content.payload is not None else 0
        self._carry(len(data) + (self._stands_for - 1) * payload_bytes, self.other.arrive)
        if content.last:
            self._said_all = True
            self._maybe_over()

    def _was_read(self) -> None:
        self._unread -= 1
        self._stir(self._writer)

    def _maybe_over(self) -> None:
        if self._is_over:
            self._when_over(self, "")

    def _stir(self, waiting: asyncio.Future[None] | None) -> None:
        if waiting and not waiting.done():
            waiting.set_result(None)
