"""Join two byte streams end to end: sockets of this machine, and `Carry` calls of gRPC.

A pipe is one end of a connection that somebody else uses. What it carries is not looked at: it may
be encrypted between others. Memory is bounded: one piece of at most `MOST_CARRIED` bytes is under
way in each direction, and the next one is read when the other side has taken it.
"""

import asyncio
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, Protocol

import grpc
import grpc.aio

from p2ptrain.errors import CodecError, TransportError, reason_of
from p2ptrain.ids import Seconds
from p2ptrain.net.grpc_errors import GONE, is_cancelled
from p2ptrain.net.grpc_waits import cancellable
from p2ptrain.net.wire_carried import MOST_CARRIED, decode_carried, encode_carried

LINGER_S: Seconds = 0.5
"""How long one direction may go on after the other has ended."""

BUFFER_BYTES = 1 << 19
"""Of a socket: the kernel would let megabytes pile up in front of a receiver that does not read."""


Pay = Callable[[int], Awaitable[None]]
"""Waits until so many bytes may be carried."""


class Pipe(Protocol):
    """One end of a connection."""

    async def read(self) -> bytes:
        """What came, at most `MOST_CARRIED` bytes; empty at the end."""
        ...

    async def write(self, data: bytes) -> None:
        """Pass bytes on; waits while the other side is behind. Raises TransportError."""
        ...

    async def end(self) -> None:
        """Nothing more will be written."""
        ...

    def close(self) -> None:
        """End both directions. Idempotent."""
        ...


class SocketPipe:
    """A connected socket of this process."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connected.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
        self._socket = connected
        self._loop = asyncio.get_running_loop()

    async def read(self) -> bytes:
        with suppress(OSError):
            return await self._loop.sock_recv(self._socket, MOST_CARRIED)
        return b""

    async def write(self, data: bytes) -> None:
        try:
            await self._loop.sock_sendall(self._socket, data)
        except OSError as error:
            raise TransportError(f"the connection broke: {reason_of(error)}") from error

    async def end(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._socket.close()


class CallPipe:
    """A `Carry` call of ours."""

    def __init__(self, call: Any) -> None:  # Any: grpc is untyped
        self._call = call

    async def read(self) -> bytes:
        return await _read(self._call.read)

    async def write(self, data: bytes) -> None:
        await _write(self._call.write, data)

    async def end(self) -> None:
        with suppress(*GONE):
            await self._call.done_writing()

    def close(self) -> None:
        self._call.cancel()


class ServedPipe:
    """A `Carry` call that came in; its handler waits for `over`."""

    def __init__(self, requests: AsyncIterator[bytes], context: Any) -> None:  # Any: as above
        self._requests = requests
        self._context = context
        self.over = asyncio.Event()

    async def read(self) -> bytes:
        return await _read(lambda: anext(self._requests, grpc.aio.EOF))

    async def write(self, data: bytes) -> None:
        await _write(self._context.write, data)

    async def end(self) -> None:
        self.over.set()  # the end of a served call is the end of its handler

    def close(self) -> None:
        self.over.set()


async def splice(one: Pipe, other: Pipe, pay: Pay | None = None) -> None:
    """Pass bytes both ways until either side ends, or this is cancelled; then close both."""
    ended = asyncio.Event()

    async def pump(source: Pipe, sink: Pipe) -> None:
        try:
            with suppress(TransportError):
                while data := await source.read():
                    if pay:
                        await pay(len(data))
                    await sink.write(data)
        finally:
            ended.set()
        await sink.end()

    pumps = [_start(pump(one, other)), _start(pump(other, one))]
    try:
        await ended.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                await asyncio.gather(*pumps)
    finally:
        for running in pumps:
            running.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        one.close()
        other.close()


def is_own_process(connected: socket.socket) -> bool:
    """True if this process is on the other side of a Unix socket, too."""
    told = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return bool(struct.unpack("3i", told)[0] == os.getpid())


def _start(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:  # Any: asyncio's own types
    return asyncio.get_running_loop().create_task(work)


async def _read(read: Callable[[], Awaitable[Any]]) -> bytes:  # Any: grpc is untyped
    try:
        with cancellable():
            data = await read()
        return b"" if data is grpc.aio.EOF else decode_carried(data)
    except (CodecError, *GONE):
        return b""
    except asyncio.CancelledError:
        if is_cancelled():
            raise
        return b""  # it is the call that was cancelled


async def _write(write: Callable[[bytes], Awaitable[None]], data: bytes) -> None:
    try:
        await write(encode_carried(data))
    except GONE as error:
        raise TransportError("the other side hung up") from error
    except asyncio.CancelledError as error:
        if is_cancelled():
            raise
        raise TransportError("the other side hung up") from error
