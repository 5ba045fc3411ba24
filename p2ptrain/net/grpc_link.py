"""Hold the connections to one other peer: its channels, and the queue of control messages.

Channels share no connection (`use_local_subchannel_pool`), and connect on first use. A channel that
has failed would go on dialling by itself for as long as it exists. So a conversation that breaks
closes it, and when the address is dialled again is `core/redial.py`'s to say; messages until then
are lost. A call that expects an answer (`unary`) dials at once: its caller decides how often.
"""

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol

import grpc
import grpc.aio

from p2ptrain.core.redial import SHORTEST_S
from p2ptrain.errors import CodecError, TransportError
from p2ptrain.ids import Address, Seconds
from p2ptrain.net import wire
from p2ptrain.net.grpc_errors import translate
from p2ptrain.net.shared_vectors import SharedVectors, this_machine
from p2ptrain.net.sockets import SocketCaller
from p2ptrain.net.tls import Security
from p2ptrain.net.wire_carried import name_at

SERVICE = "p2ptrain.v1.Peer"
QUEUE = 1024
IDLE_CALLS = 8
RETRY_S = SHORTEST_S
"""A broken conversation is begun again after this, at the earliest."""

SOCKETS_RETRY_S: Seconds = 30.0
"""A peer whose sockets could not be reached is tried again after this."""

SOCKETS_TIMEOUT_S: Seconds = 2.0

MakeChannel = Callable[[bool], grpc.aio.Channel]
"""A new channel to the peer, for chunks or not."""


class LinkHost(Protocol):
    """What a link needs of its transport."""

    def may_dial(self, link: "Link") -> bool:
        """Asked before the address is dialled for a message; pays for it."""
        ...

    async def find(self, link: "Link") -> None:
        """Before it connects: is there a way to the address? Raises TransportError."""
        ...

    def handle_broken(self, link: "Link", why: str, lasted_s: Seconds) -> Seconds:
        """A conversation of `lasted_s`, 0 if it was none, has ended; returns the pause after it."""
        ...


class Link:
    """The connections to one peer."""

    def __init__(
        self, address: Address, host: LinkHost, make_channel: MakeChannel, security: Security
    ) -> None:
        """Args: security: of sockets beside gRPC."""
        self.address = address
        self.is_proven = False
        """Somebody has answered there."""
        self._host = host
        self._make_channel = make_channel
        self._security = security
        self._channels: dict[bool, grpc.aio.Channel] = {}  # by whether they carry chunks
        self._closing_channels: list[asyncio.Task[None]] = []
        self._calls: list[Any] = []  # `Move` calls that may carry a stream; Any: grpc is untyped
        self._queue: deque[bytes] = deque(maxlen=QUEUE)
        self._filled = asyncio.Event()
        self._closing = False
        self._began: Seconds = math.inf  # when the present conversation was connected
        self._idle: list[Any] = []  # Any: grpc is untyped
        self._task: asyncio.Task[None] | None = None
        self._sockets: SocketCaller | None = None
        self._looking: asyncio.Task[None] | None = None
        self._look_again_at: Seconds = 0.0

    # --- sockets ----------------------------------------------------------------------------------

    async def sockets(self, way: str, vectors: SharedVectors) -> SocketCaller | None:
        """The other peer's sockets, if they work; ``auto`` looks for them without waiting."""
        loop = asyncio.get_running_loop()
        idle = self._looking is None or self._looking.done()
        if way != "grpc" and self._sockets is None and idle and loop.time() >= self._look_again_at:
            self._look_again_at = loop.time() + SOCKETS_RETRY_S
            self._looking = loop.create_task(self._look_for_sockets(way, vectors))
        if way != "auto" and self._looking:
            await asyncio.shield(self._looking)
        return self._sockets

    def forget_sockets(self) -> None:
        """Use gRPC instead, and try sockets again later."""
        sockets, self._sockets = self._sockets, None
        if sockets:
            sockets.close()

    async def _look_for_sockets(self, way: str, vectors: SharedVectors) -> None:
        try:
            paths = wire.decode_paths(await self.unary("Paths")(b"", timeout=SOCKETS_TIMEOUT_S))
            near = bool(paths.machine) and paths.machine == this_machine() and way != "sockets"
            if near or (way != "memory" and paths.port and name_at(self.address) is None):
                host = self.address.rpartition(":")[0].strip("[]")
                sockets = SocketCaller(paths, host, vectors, near=near, security=self._security)
                await sockets.connect()
                self._sockets = sockets
        except (grpc.RpcError, CodecError, TransportError):
            pass  # use gRPC; tried again later

    # --- calls ------------------------------------------------------------------------------------

    def unary(self, method: str, service: str = SERVICE) -> Callable[..., Awaitable[bytes]]:
        """The caller says `failed` if nobody answers."""
        channel = self._channel(carries_chunks=False)
        call: Callable[..., Awaitable[bytes]] = channel.unary_unary(f"/{service}/{method}")
        return call

    def failed(self) -> None:
        """A call was not answered: stop dialling, unless a conversation goes on."""
        if self._task is None or self._task.done():
            self._hang_up()

    def take_call(self) -> tuple[Any, bool]:  # Any: grpc is untyped
        """Take a `Move` call that carries no stream at present; and whether it is a new one."""
        while self._idle:
            call = self._idle.pop()
            if not call.done():
                return call, False
        call = self._channel(carries_chunks=True).stream_stream(f"/{SERVICE}/Move")()
        self._calls = [known for known in self._calls if not known.done()]
        self._calls.append(call)
        return call, True

    def put_back(self, call: Any) -> None:  # Any: grpc is untyped
        """The stream on `call` is over: another one may use it."""
        if len(self._idle) < IDLE_CALLS and not self._closing:
            self._idle.append(call)
        else:
            call.cancel()

    # --- messages ---------------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        if self._closing:
            return
        if self._task is None or self._task.done():
            if not self._host.may_dial(self):
                return  # best effort: it is lost
            self._task = asyncio.get_running_loop().create_task(self._talk())
        self._queue.append(data)
        self._filled.set()

    async def _talk(self) -> None:
        """Send the queue to the peer, over one call after another, until the link closes."""
        while self._queue:
            self._began = math.inf
            try:
                await self._talk_once()
                why = f"{self.address} ended the conversation"
            except grpc.RpcError as error:
                why = str(translate(error, self.address, "talking"))
            except TransportError as error:
                why = str(error)
            if self._closing:
                return
            self._queue.clear()  # best effort: queued messages are outdated by now
            self._hang_up()
            lasted_s = max(0.0, asyncio.get_running_loop().time() - self._began)
            if self._host.handle_broken(self, why, lasted_s) > RETRY_S:
                self._queue.clear()
                return
            await asyncio.sleep(RETRY_S)  # after that, the next message opens a call again

    async def _talk_once(self) -> None:
        await self._host.find(self)
        call = self._channel(carries_chunks=False).stream_unary(f"/{SERVICE}/Talk")()
        call.add_done_callback(lambda _: self._filled.set())
        try:
            while True:
                while self._queue:
                    await call.write(self._queue.popleft())
                    if self._began == math.inf:
                        self.is_proven, self._began = True, asyncio.get_running_loop().time()
                if call.done():
                    await call  # raises what ended it
                    return
                if self._closing:
                    await call.done_writing()
                    await call
                    return
                self._filled.clear()
                await self._filled.wait()
        except asyncio.InvalidStateError:
            await call  # written to after it ended: raises what ended it
        finally:
            call.cancel()

    # --- the end ----------------------------------------------------------------------------------

    async def drop(self) -> None:
        """Close at once."""
        self._closing = True
        self._end_sockets()
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._close_channels()

    async def close(self, grace_s: Seconds) -> None:
        """Send what is queued, then close."""
        self._closing = True
        self._end_sockets()
        self._filled.set()
        if self._task:
            with suppress(TimeoutError, asyncio.CancelledError):
                await asyncio.wait_for(self._task, grace_s)
        await self._close_channels()

    def _channel(self, *, carries_chunks: bool) -> grpc.aio.Channel:
        if carries_chunks not in self._channels:
            self._channels[carries_chunks] = self._make_channel(carries_chunks)
        return self._channels[carries_chunks]

    def _hang_up(self) -> None:
        """Close the channels, but not under a stream that may still move."""
        moves = [call for call in self._calls if call not in self._idle and not call.done()]
        kinds = [False] if moves else [False, True]
        channels = [self._channels.pop(kind) for kind in kinds if kind in self._channels]
        if not moves:
            self._idle.clear()
        closing = [task for task in self._closing_channels if not task.done()]
        loop = asyncio.get_running_loop()
        self._closing_channels = [
            *closing,
            *(loop.create_task(channel.close()) for channel in channels),
        ]

    async def _close_channels(self) -> None:
        channels, self._channels = list(self._channels.values()), {}
        closing, self._closing_channels = self._closing_channels, []
        await asyncio.gather(*(channel.close() for channel in channels), *closing)

    def _end_sockets(self) -> None:
        if self._looking:
            self._looking.cancel()
        self.forget_sockets()
