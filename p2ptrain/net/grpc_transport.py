"""Implement the `Transport` port by gRPC over one TCP port.

One server accepts all connections. To each other peer there are two channels, each with a separate
connection: one with a long `Talk` call for control messages, one with a `Move` call per stream of
chunks. On a shared connection a message would queue behind the chunks that the kernel has accepted,
which take a slow link seconds, and peers would take each other for silent. Messages are bytes to
gRPC: `net/wire.py` encodes and decodes, so a chunk is copied once when sent and not at all when
received.

* Control messages wait in a bounded queue per peer, the oldest dropped first (best effort). A call
  that breaks is reported to the handler, and opened again by the next message, after a pause that
  grows with failures (`net/grpc_link.py`). Addresses that have not answered yet are dialled at a
  bounded rate, however many are heard of.
* A `Move` call carries streams one after the other, since a new call costs eight times as much as a
  message on an open one. So the end of a stream is a message of the stream, with its last chunk.
  That also tells it from the end of a call, which looks the same to a callee if its caller died.
* gRPC raises CancelledError where a call, not a task, was cancelled. That becomes an ordinary error
  here, or the awaiting task would look cancelled.

**Budgets.** Each connection that calls us has two: one of messages, by their number and size, and
one of calls. A caller that has spent it is not refused but read later: its messages wait in its own
connection, and HTTP/2 makes it stop sending.

Keepalive is one setting for both sides: a server that expects fewer pings than its clients send
closes their connections ("too many pings"), so `grpc_config.py` derives one from the other. Port
sharing is off: a port in use is an error, not half of the traffic.
"""

import asyncio
import functools
import logging
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio
import numpy as np
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from p2ptrain.core.budgets import Budgets, Rate
from p2ptrain.core.redial import Redial
from p2ptrain.errors import CodecError, ConfigError, P2PTrainError, RefusedError, TransportError
from p2ptrain.ids import Address, Seconds
from p2ptrain.net import wire
from p2ptrain.net.carrying import WINDOW, Carrying
from p2ptrain.net.gate import CallEndedError, Gate, caller
from p2ptrain.net.grpc_config import GrpcConfig, channel_arguments
from p2ptrain.net.grpc_errors import GONE, hung_up, is_cancelled, translate
from p2ptrain.net.grpc_link import SERVICE, Link
from p2ptrain.net.grpc_waits import cancellable, first_write
from p2ptrain.net.key_service import SERVICE as KEYS
from p2ptrain.net.key_service import KeyService
from p2ptrain.net.loopback import is_loopback
from p2ptrain.net.probe import why_hung_up
from p2ptrain.net.registry import GARBAGE_COSTS
from p2ptrain.net.shared_vectors import SharedVectors, this_machine
from p2ptrain.net.sockets import SocketServer
from p2ptrain.net.tls import Security
from p2ptrain.net.transport import ChunkStream, Handler, Service
from p2ptrain.net.wire import Envelope, Hello, JoinReply, Opening
from p2ptrain.vectors import Vector

MAX_IGNORED = 256
LARGE_BYTES = 1 << 16
"""An opening does not travel with a larger chunk: it would arrive only with all of the chunk,
seconds later on a slow link, and a member that waits for the stream would time out."""

MESSAGES = Rate(2000, 4000)
"""What one connection may say: a message costs 1, and 1 more for each `BYTES_PER_TOKEN`."""

BYTES_PER_TOKEN = 512

CALLS = Rate(50, 200)
"""What one connection may ask for: calls, and conversations and rows of streams that it begins."""

DIALS = Rate(16, 128)
"""Addresses that have not answered yet, dialled because a message is due there."""

MOST_REDIALS = 4096
"""Addresses that failed, and are remembered."""

EXPORTED_BYTES = 1 << 20
"""Of a model's file, in one piece."""

EXPORT_SILENCE_S: Seconds = 30.0
"""A caller that takes no piece for so long gets no more."""


T = TypeVar("T")


def _is_worth_telling(record: logging.LogRecord) -> bool:
    """False for gRPC's reports of cancelled calls, which are normal when peers leave."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, asyncio.CancelledError)


logging.getLogger("grpc._cython.cygrpc").addFilter(_is_worth_telling)


class GrpcTransport:
    """Implements `Transport` on the running event loop.

    Args:
        listen: ``host:port`` to listen on; port 0 takes a free one.
        advertise: the address for others; by default the address that is listened on. Port 0
            stands for the port that was found.
        security: of connections; by default what the configuration says.
        name: of the peer; needed where it only dials out.
        keys: answers what others ask about keys, where the swarm has some.

    Raises:
        ConfigError: if a file for TLS is invalid.
    """

    def __init__(
        self,
        listen: str,
        advertise: str = "",
        config: GrpcConfig | None = None,
        *,
        security: Security | None = None,
        keys: KeyService | None = None,
        name: str = "",
    ) -> None:
        self._listen = listen
        self._name = name
        self._advertise = advertise
        self._config = config or GrpcConfig()
        self._chunk_options = channel_arguments(self._config, carries_chunks=True)
        self._security = security or self._config.security()
        self._keys = keys
        self._gate = Gate(self._security)
        options = {False: channel_arguments(self._config), True: self._chunk_options}
        self._carrying = Carrying(self._security, options, self._pay, self._config.relay_mbit)
        self._vectors = SharedVectors()
        self._sockets: SocketServer | None = None
        self._server: grpc.aio.Server | None = None
        self._links: dict[Address, Link] = {}
        self._redials: dict[Address, Redial] = {}
        self._dials: Budgets[str] = Budgets(DIALS)
        self._messages: Budgets[str] = Budgets(MESSAGES)
        self._calls: Budgets[str] = Budgets(CALLS)
        self._dropping: list[asyncio.Task[None]] = []
        self._closed = False
        self._handler: Handler | None = None
        self.listens_at = Address("")
        """Where this machine reaches it, and others where it does not only dial out."""
        self.refused_bytes = 0
        """The number of calls with bytes that did not decode."""
        self.service: Service | None = None
        """Answers non-members; without one their calls are refused."""

    # --- the port ---------------------------------------------------------------------------------

    async def start(self, handler: Handler) -> Address:
        host, _ = _split("listen", self._listen)
        advertised, port_advertised = _split("advertise", self._advertise or f"{host}:0")
        self._handler = handler
        checks = health.aio.HealthServicer()
        is_carried = self._config.dial_out or self._config.relay_mbit
        window = WINDOW if is_carried else ()
        server = grpc.aio.server(options=[*self._chunk_options, *window])
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        asked = [self._service(), *([self._keys.handler(self._gate)] if self._keys else [])]
        server.add_generic_rpc_handlers(tuple(asked))
        try:
            port = self._security.serve(server, self._listen)
        except RuntimeError as error:
            await server.stop(None)
            raise _cannot_listen(self._listen) from error
        me = self.listens_at = wire.address(f"{advertised}:{int(port_advertised) or port}")
        if self._config.dial_out:
            me = self._carrying.dial_out_only(self._name, server)
        for name in ("", SERVICE):
            await checks.set(name, health_pb2.HealthCheckResponse.SERVING)
        await server.start()  # last: from here on the handler is called
        self._server = server
        if self._config.data != "grpc":
            self._sockets = SocketServer(
                handler.handle_stream, self._vectors, self._security, self._gate
            )
            self._sockets.start(host.strip("[]"))
        return me

    def send(self, target: Address, envelope: Envelope) -> None:
        if not self._closed:
            self._link(target).send(wire.encode_envelope(envelope))

    async def join(self, host: Address, hello: Hello, timeout_s: Seconds) -> JoinReply:
        answer = await self._ask(host, "Join", wire.encode_hello(hello), timeout_s, "joining")
        return wire.decode_join_reply(answer)

    async def ask_keys(
        self, address: Address, method: str, data: bytes, timeout_s: Seconds
    ) -> bytes:
        """Ask another member about keys. Raises TransportError, RefusedError."""
        phase = "asking about keys"
        return await self._ask(address, method, data, timeout_s, phase, service=KEYS)

    def expel(self, name: str) -> None:
        """End all that a member has open here; it may not call again."""
        self._gate.expel(name)
        if self._sockets:
            self._sockets.expel(name)

    async def identify(self, address: Address, timeout_s: Seconds) -> Hello:
        answer = await self._ask(address, "Identify", b"", timeout_s, "asking who it is")
        return wire.decode_hello(answer)

    async def open(self, target: Address, opening: Opening) -> ChunkStream:
        link = self._link(target)
        await self._carrying.find(target)
        try:
            if sockets := await link.sockets(self._config.data, self._vectors):
                return await sockets.open(opening, target)
        except TransportError:
            link.forget_sockets()
        return _CallerStream(link, target, opening)

    def vector(self, size: int) -> Vector:
        shares = self._config.data in ("auto", "memory") and this_machine()
        return self._vectors.take(size) if shares else np.empty(size, np.float32)

    def forget(self, address: Address) -> None:
        link = self._links.pop(address, None)
        if link or self._carrying.knows(address):
            self._dropping = [task for task in self._dropping if not task.done()]
            dropping = self._drop(address, link)
            self._dropping.append(asyncio.get_running_loop().create_task(dropping))

    async def _drop(self, address: Address, link: Link | None) -> None:
        if link:
            await link.drop()
        if address not in self._links:  # meanwhile it may be used again
            await self._carrying.leave(address)

    def expect(self, address: Address) -> None:
        self._redials.pop(address, None)
        self._carrying.visit(address)

    async def close(self, grace_s: Seconds) -> None:
        self._closed = True
        links, self._links = list(self._links.values()), {}
        await asyncio.gather(*(link.close(grace_s) for link in links), *self._dropping)
        await self._carrying.close()
        if self._sockets:
            await self._sockets.close()
        if self._server:
            await self._server.stop(grace=0.2)

    # --- serving ----------------------------------------------------------------------------------

    def _service(self) -> grpc.GenericRpcHandler:
        unary, guard = grpc.unary_unary_rpc_method_handler, self._gate.guard
        talk = grpc.stream_unary_rpc_method_handler(guard("Talk", self._serve_talk))
        move = grpc.stream_stream_rpc_method_handler(guard("Move", self._serve_move))
        export = grpc.unary_stream_rpc_method_handler(guard("Export", self._serve_export))
        asked = {
            "Join": self._serve_join,
            "Paths": self._serve_paths,
            "Identify": self._serve_identify,
            "Status": self._serve_status,
            "Set": self._serve_set,
            "DialBack": self._serve_dial_back,
        }
        answers = {name: unary(guard(name, serve)) for name, serve in asked.items()}
        answers |= self._carrying.registry.handlers(guard)
        return grpc.method_handlers_generic_handler(
            SERVICE, answers | {"Talk": talk, "Move": move, "Export": export}
        )

    async def _serve_join(self, request: bytes, context: Any) -> bytes:  # Any: grpc is untyped
        assert self._handler
        await self._pay(context)
        try:
            hello = wire.decode_hello(request)
        except CodecError as error:
            await self._reject(context, error)
        caller().check(hello.me.peer)
        try:
            return wire.encode_join_reply(await self._handler.handle_join(hello))
        except TransportError as error:
            raise CallEndedError(str(error), grpc.StatusCode.RESOURCE_EXHAUSTED) from error

    async def _serve_identify(self, _: bytes, context: Any) -> bytes:  # Any: grpc is untyped
        assert self._handler
        await self._pay(context)
        return wire.encode_hello(self._handler.handle_identify())

    async def _serve_paths(self, _: bytes, context: Any) -> bytes:  # Any: grpc is untyped
        await self._pay(context)
        if self._sockets is None:
            raise CallEndedError("chunks travel by gRPC here")
        return wire.encode_paths(self._sockets.paths_for(caller()))

    async def _serve_talk(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        assert self._handler
        await self._pay(context)
        came, peer, clock = caller(), context.peer(), asyncio.get_running_loop().time
        async for data in requests:
            costs = 1 + len(data) / BYTES_PER_TOKEN
            if (wait_s := self._messages.charge(peer, clock(), costs)) > 0:
                await asyncio.sleep(wait_s)
            try:
                envelope = wire.decode_envelope(data)
            except wire.UnknownMessage:
                continue  # a newer peer says it, and does not depend on an answer
            except CodecError as error:
                await self._reject(context, error)
            came.check(envelope.source)
            self._handler.handle_message(envelope)
        return b""

    async def _serve_move(self, requests: AsyncIterator[bytes], context: Any) -> None:
        assert self._handler
        await self._pay(context)
        aborted = ""
        try:
            while not aborted and (data := await anext(requests, None)) is not None:
                first = wire.decode_chunk(data)
                if first.opening is None:
                    raise CodecError("a stream that does not begin with an opening")
                caller().check(first.opening.sender)
                stream = _CalleeStream(requests, context, first)
                await self._handler.handle_stream(first.opening, stream)
                await stream.close()
                aborted = stream.aborted
        except CodecError as error:
            await self._reject(context, error)
        except RefusedError as error:
            raise CallEndedError(str(error)) from error
        except TransportError:
            return  # the caller hung up, which the handler has seen
        if aborted:
            raise CallEndedError(aborted, grpc.StatusCode.ABORTED)

    async def _serve_status(self, _: bytes, context: Any) -> bytes:  # Any: grpc is untyped
        await self._pay(context)
        if self.service is None:
            raise CallEndedError("this peer is still starting; ask again soon")
        return wire.encode_report(self.service.report())

    async def _serve_set(self, request: bytes, context: Any) -> bytes:  # Any: grpc is untyped
        await self._pay(context)
        try:
            asked = wire.decode_set(request)
        except CodecError as error:
            await self._reject(context, error)
        if self.service is None:
            raise CallEndedError("this peer takes no settings")
        try:
            return wire.encode_set_reply(self.service.set(self._is_member(context), asked))
        except RefusedError as error:
            raise CallEndedError(str(error)) from error

    def _is_member(self, context: Any) -> bool:  # Any: grpc is untyped
        """Whether the caller may do what members may, or what a process of this machine can."""
        return self._security.is_encrypted or is_loopback(self._ip_of(context))

    async def _serve_export(self, _: bytes, context: Any) -> None:  # Any: grpc is untyped
        await self._pay(context)
        if self.service is None:
            raise CallEndedError("this peer exports nothing")
        try:
            file = memoryview(await self.service.export(self._is_member(context)))
        except (RefusedError, TransportError) as error:
            raise CallEndedError(str(error)) from error
        for start in range(0, len(file), EXPORTED_BYTES):
            stop = start + EXPORTED_BYTES
            piece = wire.Chunk(file[start:stop], last=stop >= len(file))
            async with asyncio.timeout(EXPORT_SILENCE_S):  # the model is held until then
                await context.write(wire.encode_chunk(piece))

    async def _serve_dial_back(self, request: bytes, context: Any) -> bytes:  # Any: as above
        await self._pay(context)
        try:
            asked = wire.decode_dial_back(request)
        except CodecError as error:
            await self._reject(context, error)
        caller_ip = self._ip_of(context)
        if self.service is None or not caller_ip:
            raise CallEndedError("this peer does not call back")
        try:
            return wire.encode_dialed_back(await self.service.dial_back(caller_ip, asked))
        except RefusedError as error:
            raise CallEndedError(str(error)) from error

    async def _reject(self, context: Any, error: CodecError) -> NoReturn:  # Any: grpc is untyped
        self.refused_bytes += 1
        await self._pay(context, GARBAGE_COSTS)
        raise CallEndedError(str(error), grpc.StatusCode.INVALID_ARGUMENT)

    async def _pay(self, context: Any, calls: float = 1) -> None:  # Any: grpc is untyped
        """The caller's budget of calls pays; waits until it can."""
        now = asyncio.get_running_loop().time()
        if (wait_s := self._calls.charge(context.peer(), now, calls)) > 0:
            await asyncio.sleep(wait_s)

    def _ip_of(self, context: Any) -> str:  # Any: grpc is untyped
        """The caller's IP address; empty where it is not known, as of a carried connection."""
        source = urllib.parse.unquote(context.peer())
        return "" if self._carrying.is_carried(source) else _ip_of(source)

    # --- calling ----------------------------------------------------------------------------------

    def _link(self, address: Address) -> Link:
        if self._closed:
            raise TransportError(f"no connection to {address}: this peer has closed its own")
        if address not in self._links:
            assert self._handler, "start the transport first"
            make_channel = functools.partial(self._carrying.channel, address)
            self._links[address] = Link(address, self, make_channel, self._security)
            self._carrying.visit(address)
        return self._links[address]

    def may_dial(self, link: Link) -> bool:
        now, redial = asyncio.get_running_loop().time(), self._redials.get(link.address)
        if redial and now < redial.again_at:
            return False
        return link.is_proven or self._dials.take("", now)

    async def find(self, link: Link) -> None:
        await self._carrying.find(link.address)

    def handle_broken(self, link: Link, why: str, lasted_s: Seconds) -> Seconds:
        assert self._handler
        self._carrying.broken(link.address)
        now = asyncio.get_running_loop().time()
        redial = Redial.after(self._redials.pop(link.address, None), lasted_s, now)
        self._redials[link.address] = redial
        if len(self._redials) > MOST_REDIALS:
            del self._redials[next(iter(self._redials))]
        self._handler.handle_broken(link.address, why)
        return redial.again_at - now

    async def _ask(
        self,
        address: Address,
        method: str,
        data: bytes,
        timeout_s: Seconds,
        phase: str,
        *,
        service: str = SERVICE,
    ) -> bytes:
        link = self._link(address)
        await self._carrying.find(address)
        try:
            answer = await link.unary(method, service)(data, timeout=timeout_s)
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                link.failed()
            told = translate(error, address, phase)
            if not hung_up(error):
                raise told from error
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            raise TransportError(f"no connection to {address} while {phase}: it broke") from error
        else:
            self.expect(address)
            return answer
        raise TransportError(f"{told}; {await why_hung_up(address, self._security.is_encrypted)}")


class _CallerStream:
    """The side that opened a stream; the opening travels with its first message."""

    def __init__(self, link: Link, address: Address, opening: Opening) -> None:
        self._link = link
        self._call, self._is_new = link.take_call()
        self._address = address
        self._opening: Opening | None = opening
        self._writing = asyncio.Lock()
        """Two writes at a time break a call; the first one of all waits for the connection."""
        self._said_all = False
        self._heard_all = False
        self._over = False
        self._aborted = ""

    @property
    def is_local(self) -> bool:
        return False

    @property
    def caller(self) -> str:
        return ""

    async def begin(self) -> None:
        if self._opening:
            await asyncio.sleep(0)  # a send may follow at once, and carries the opening
        if self._opening:
            await self._say(None, last=False)

    async def send(self, payload: memoryview, last: bool = False) -> None:
        await self._say(payload, last)

    async def refer(self, payload: memoryview, last: bool = False) -> bool:
        """No memory is shared here."""
        return False

    async def receive(self, into: memoryview | None = None) -> memoryview | None:
        await self.begin()
        if self._heard_all:
            return None
        data = await self._use(self._call.read, "receiving chunks")
        if data is grpc.aio.EOF:
            raise await self._what_ended_it()
        heard = wire.decode_chunk(data)
        self._heard_all = heard.last
        self._maybe_put_back()
        return heard.payload

    async def finish(self) -> None:
        if not self._said_all:
            await self._say(None, last=True)

    async def release(self) -> None:
        """No effect: received chunks are copies."""

    async def _say(self, payload: memoryview | None, last: bool) -> None:
        async with self._writing:
            if payload is None and not last and not self._opening:
                return  # said meanwhile, with a chunk
            if self._opening and payload is not None and len(payload) > LARGE_BYTES:
                await self._write(None, last=False)
            await self._write(payload, last)
        self._said_all = last
        self._maybe_put_back()

    async def _write(self, payload: memoryview | None, last: bool) -> None:
        data = wire.encode_chunk(wire.Chunk(payload, last, self._opening))
        self._opening = None
        is_first, self._is_new = self._is_new, False
        write = functools.partial(first_write, self._call) if is_first else self._call.write
        await self._use(lambda: write(data), "sending chunks")

    def _maybe_put_back(self) -> None:
        if self._said_all and self._heard_all and not self._over:
            self._over = True
            self._link.put_back(self._call)

    def abort(self, why: str) -> None:
        if not self._over:
            self._over = True
            self._aborted = why
            self._call.cancel()

    async def _use(self, operation: Callable[[], Awaitable[T]], phase: str) -> T:
        """Run one operation on the call; its end is raised as an error of the project."""
        if self._aborted:
            raise TransportError(self._aborted)
        try:
            with cancellable():
                return await operation()
        except grpc.RpcError as error:
            raise translate(error, self._address, phase) from error
        except asyncio.InvalidStateError as error:
            raise await self._what_ended_it() from error
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            raise TransportError(self._aborted or "the connection was closed here") from error

    async def _what_ended_it(self) -> P2PTrainError:
        code, details = await self._call.code(), await self._call.details()
        if code is grpc.StatusCode.OK:
            return TransportError(f"{self._address} ended the call in the middle of a stream")
        ended = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)
        return translate(ended, self._address, "moving chunks")


class _CalleeStream:
    """The side of a stream that was called; `first` came with the opening."""

    def __init__(
        self, requests: AsyncIterator[bytes], context: Any, first: wire.Chunk
    ) -> None:  # Any: grpc is untyped
        self._requests = requests
        self._context = context
        self._first: wire.Chunk | None = first
        self._said_all = False
        self._heard_all = False
        self.aborted = ""

    @property
    def is_local(self) -> bool:
        return False

    @property
    def caller(self) -> str:
        return str(self._context.peer())

    async def begin(self) -> None:
        """No effect: it was opened."""

    async def send(self, payload: memoryview, last: bool = False) -> None:
        await self._say(wire.Chunk(payload, last))

    async def refer(self, payload: memoryview, last: bool = False) -> bool:
        """No memory is shared here."""
        return False

    async def receive(self, into: memoryview | None = None) -> memoryview | None:
        first, self._first = self._first, None
        heard = first
        if first is None or (first.payload is None and not first.last):
            if self._heard_all:
                return None
            heard = wire.decode_chunk(await self._read())
        assert heard is not None
        self._heard_all = heard.last
        return heard.payload

    async def finish(self) -> None:
        """Nothing: the stream ends for the caller when `handle_stream` returns."""

    async def release(self) -> None:
        """No effect: received chunks are copies."""

    async def close(self) -> None:
        """Send the end, and discard what the caller still sends."""
        if not self._said_all and not self.aborted:
            await self._say(wire.Chunk(last=True))
        for _ in range(MAX_IGNORED):
            if self._heard_all or self.aborted:
                return
            await self.receive()
        self.abort(f"more than {MAX_IGNORED} chunks that no group waits for")

    async def _say(self, content: wire.Chunk) -> None:
        if self.aborted:
            raise TransportError(self.aborted)
        try:
            await self._context.write(wire.encode_chunk(content))
        except GONE as error:
            raise TransportError("the caller hung up") from error
        self._said_all = content.last

    async def _read(self) -> bytes:
        """The next message. Raises TransportError if there is none: a caller says when it ends."""
        if self.aborted:
            raise TransportError(self.aborted)
        try:
            return await anext(self._requests)
        except (StopAsyncIteration, *GONE) as error:
            raise TransportError("the caller hung up") from error
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            raise TransportError("the caller hung up") from error

    def abort(self, why: str) -> None:
        self.aborted = self.aborted or why


def _ip_of(peer: str) -> str:
    """The IP address in gRPC's ``ipv4:1.2.3.4:567`` or ``ipv6:[::1]:567``; empty for others."""
    kind, _, rest = peer.partition(":")
    return rest.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else ""


def _split(setting: str, text: str) -> tuple[str, str]:
    host, _, port = text.rpartition(":")
    try:
        wire.address(f"{host}:{int(port) or 1}" if wire.is_port(port) else text)
    except CodecError as error:
        raise ConfigError(
            f"{setting} = {text!r} is not an address; write host:port, port 0 for a free one"
        ) from error
    return host, port


def _cannot_listen(listen: str) -> ConfigError:
    return ConfigError(
        f"cannot listen on {listen}: the port is in use or the address is not this machine's; "
        f"choose another port, or 0 for a free one"
    )
