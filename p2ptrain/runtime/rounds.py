"""Let the members of a group send each other strings, round after round, on one stream per pair.

Where what travels depends on what came, a payload cannot be laid out in advance: a member knows
what to send only when it has read the round before. Rounds are one item of a payload, beside its
vectors and under the same ticket, with the same end: streams end when all have the result of all.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from p2ptrain.core.effects import Outcome
from p2ptrain.core.shards import Span, chunks
from p2ptrain.errors import CodecError
from p2ptrain.ids import PeerId
from p2ptrain.net.transport import ChunkStream
from p2ptrain.runtime.streams import GroupBroken, Streams

HEADER_BYTES = 8
"""A string's length goes before it, in the same message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """One named item of a payload: what is done in rounds, and how long strings may be."""

    name: str
    work: Callable[["RoundsExchange"], Coroutine[Any, Any, None]]  # Any: asyncio's own types
    """Calls `swap`; the result is complete when it returns. It may raise CodecError."""
    most_bytes: int
    """Of one string. A longer one breaks the group."""
    chunk_bytes: int
    """Of a string that travel at a time: on a slow link too, something moves within seconds."""


class RoundsExchange:
    """One member's side of the rounds of one payload."""

    def __init__(self, streams: Streams, own: Rounds) -> None:
        self._streams, self._own = streams, own
        others = streams.others
        self._sends = {peer: asyncio.Queue[bytes | None]() for peer in others}
        self._takes = {peer: asyncio.Queue[asyncio.Future[bytes] | None]() for peer in others}
        streams.due += 1
        streams.expect(own.name, 0, own.chunk_bytes, "bytes", streams.later)

    def start(self) -> None:
        """Begin, in the scope of the streams."""
        self._streams.exchange_directly(self._own.name, self._send, self._take)
        self._streams.scope.start(self._work())

    async def swap(
        self, strings: Mapping[PeerId, bytes], awaited: Iterable[PeerId]
    ) -> dict[PeerId, bytes]:
        """Send each of these members its string; wait for one of each that is `awaited`."""
        for peer, content in strings.items():
            self._sends[peer].put_nowait(content)
        loop = asyncio.get_running_loop()
        coming = {peer: loop.create_future() for peer in awaited}
        for peer, string in coming.items():
            self._takes[peer].put_nowait(string)
        return {peer: await string for peer, string in coming.items()}

    async def _work(self) -> None:
        try:
            await self._own.work(self)
        except CodecError as error:
            raise GroupBroken(Outcome.BROKEN, f"{self._own.name}: {error}") from error
        for peer in self._streams.others:
            self._sends[peer].put_nowait(None)
            self._takes[peer].put_nowait(None)
        self._streams.arrived()

    async def _send(self, peer: PeerId, stream: ChunkStream) -> None:
        while (content := await self._sends[peer].get()) is not None:
            whole, first = memoryview(content), self._own.chunk_bytes - HEADER_BYTES
            head = len(content).to_bytes(HEADER_BYTES, "little") + whole[:first]
            await self._streams.send(peer, stream, memoryview(head))
            for span in chunks(Span(first, len(whole)), self._own.chunk_bytes):
                await self._streams.send(peer, stream, whole[span.start : span.stop])

    async def _take(self, peer: PeerId, stream: ChunkStream) -> None:
        # Before a first string is made, which of a large model may take longer than its member is
        # waited for.
        await self._streams.begin(peer, stream)
        while (string := await self._takes[peer].get()) is not None:
            content = await self._receive(peer, stream)
            if not string.cancelled():
                string.set_result(content)

    async def _receive(self, peer: PeerId, stream: ChunkStream) -> bytes:
        phase = "sending its string"
        whole = bytearray(await self._streams.receive(peer, stream, phase))
        due = HEADER_BYTES + int.from_bytes(whole[:HEADER_BYTES], "little")
        if due - HEADER_BYTES > self._own.most_bytes or len(whole) != min(
            due, self._own.chunk_bytes
        ):
            why = f"a string of {due - HEADER_BYTES} bytes, at most {self._own.most_bytes}"
            raise GroupBroken(Outcome.BROKEN, f"{peer} sends {why} of {self._own.name}")
        for span in chunks(Span(len(whole), due), self._own.chunk_bytes):
            whole += await self._streams.receive(peer, stream, phase, span.size)
        return bytes(memoryview(whole)[HEADER_BYTES:])
