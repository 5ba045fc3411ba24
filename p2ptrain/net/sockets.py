"""Move streams of chunks over sockets, and by shared memory between peers of one machine.

Besides its gRPC port a peer listens, where it can, on another TCP port and on a Unix socket. gRPC
gives these paths (`Paths`) to other members, with a secret of theirs with which every connection
begins, so only peers that may use gRPC can connect. Where gRPC is encrypted TCP is, too
(`net/sealed.py`); what stays inside the machine needs no encryption.

**Frames.** A connection carries streams one after the other, each a sequence of frames: a byte of
kind, four bytes of length, then as many bytes::

    caller:  Opening, Chunk ... Chunk, End      callee:  Chunk ... Chunk, End, or Refused, Aborted
             └────────── the two directions do not wait for each other ──────────┘

An abort ends the connection; a callee states the reason first.

A chunk goes from the sender's vector into the receiver's without an intermediate copy: the receiver
says where it belongs (`receive(into=...)`).

**Shared memory.** A vector from `SharedVectors` is in memory that other processes of the machine
can map. A chunk of it travels as a reference (`Shared`: which memory, where), and the receiver
reads the sender's own vector (`net/shared_vectors.py`). So `End` means here that this side has sent
all, *and read all*; then the owner may reuse the vector. With copied bytes the `End` travels with
the last chunk.
"""

import asyncio
import contextlib
import secrets
import select
import socket
import ssl
import struct
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, TypeVar

from p2ptrain.errors import CodecError, RefusedError, TransportError, reason_of
from p2ptrain.ids import Seconds
from p2ptrain.net import sealed, wire
from p2ptrain.net.gate import Gate, caller
from p2ptrain.net.listening import connections
from p2ptrain.net.sealed import Seal
from p2ptrain.net.shared_vectors import (
    REFERENCE,
    SharedVectors,
    drop_pages,
    map_vector,
    size_of_mapped,
    this_machine,
)
from p2ptrain.net.tls import NOBODY, Caller, Plain, Security
from p2ptrain.net.transport import ChunkStream
from p2ptrain.net.wire import MAX_CHUNK_BYTES, SECRET_BYTES, Opening, Paths
from p2ptrain.vectors import LONG


class Kind(IntEnum):
    """The kind of a frame."""

    OPENING = 1
    CHUNK = 2
    LAST_CHUNK = 3
    END = 4
    REFUSED = 5
    ABORTED = 6
    SHARED = 7


HEADER = struct.Struct("<BI")
KINDS = frozenset(Kind)
CONNECT_S: Seconds = 2.0
"""The timeout of a connection attempt: a firewall may drop it without an answer."""

SHARED_BYTES = 1 << 16
"""Chunks below this travel as bytes: a reference costs a round trip at the end."""

BUFFER_BYTES = 1 << 22
WAKE_BYTES = 1 << 19
"""Bytes of a chunk that are received at a time; well below the kernel's buffer."""

IDLE_CONNECTIONS = 8
MAX_MAPPED = 4
"""Vectors of the other side that stay mapped: a peer reuses one or two."""

KEPT_BYTES = 4 * LONG
"""Longer vectors are mapped for one stream only, and their pages let go of once they are read: a
half of what both sides map counts as memory of the reader. To map one again costs 70 ms of
processor time per GB, as much as reading it."""

READ_LATELY = 8
"""Chunks of them that are not let go of yet: a group of two works on the last one or two."""

MAX_TEXT = 1024
MAX_CALLERS = 4096
"""Callers with a secret of their own; as many as members."""

T = TypeVar("T")

Serve = Callable[[Opening, ChunkStream], Coroutine[Any, Any, None]]  # Any: asyncio's own types


@dataclass(frozen=True, slots=True)
class _Way:
    """The path to a peer's sockets."""

    family: socket.AddressFamily
    address: str | tuple[str, int]
    secret: bytes
    context: ssl.SSLContext | None = None
    """For calling; None where connections are not encrypted."""


class SocketServer:
    """Listens for streams besides gRPC; `paths` tells callers where."""

    def __init__(
        self,
        serve: Serve,
        vectors: SharedVectors,
        security: Security | None = None,
        gate: Gate | None = None,
    ) -> None:
        self._serve = serve
        self._vectors = vectors
        self._security = security or Plain()
        self._gate = gate or Gate(self._security)
        secret = secrets.token_bytes(SECRET_BYTES)
        self._callers = {secret: NOBODY}  # by the secrets that they were given
        self._listening: list[socket.socket] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._hangups = _Hangups()
        self.paths = Paths(0, secret, "", "")

    def paths_for(self, came: Caller) -> Paths:
        """Where to connect, with a secret of this caller's own."""
        if not came.name:
            return self.paths
        known = [secret for secret, other in self._callers.items() if other.name == came.name]
        secret = known[0] if known else secrets.token_bytes(SECRET_BYTES)
        self._callers = dict([*self._callers.items()][-MAX_CALLERS:]) | {secret: came}
        return replace(self.paths, secret=secret)

    def expel(self, name: str) -> None:
        """The caller may not connect again."""
        self._callers = {s: came for s, came in self._callers.items() if came.name != name}

    def start(self, host: str) -> None:
        """Listen on a free TCP port of `host`, and on a Unix socket where supported."""
        machine, name = this_machine(), ""
        tcp = socket.create_server((host, 0), family=_family_of(host))
        self._listening.append(tcp)
        port = tcp.getsockname()[1]
        if machine:
            name = f"p2ptrain-{secrets.token_hex(8)}"
            unix = socket.socket(socket.AF_UNIX)
            unix.bind(f"\0{name}")
            unix.listen()
            self._listening.append(unix)
        self.paths = replace(self.paths, port=port, machine=machine, unix_name=name)
        for listening in self._listening:
            listening.setblocking(False)
            self._start(self._accept(listening))

    async def close(self) -> None:
        """Stop listening and end every connection."""
        for listening in self._listening:
            listening.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._hangups.close()

    async def _accept(self, listening: socket.socket) -> None:
        async for accepted in connections(listening):
            self._start(self._converse(Connection(accepted, self._vectors)))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:  # Any: asyncio's own types
        self._tasks = [task for task in self._tasks if not task.done()]
        self._tasks.append(asyncio.get_running_loop().create_task(work))

    async def _converse(self, connection: "Connection") -> None:
        """Serve the streams of one connection, one after the other."""
        try:
            async with asyncio.timeout(CONNECT_S):
                came = await self._greet(connection)
            with self._gate.inside(came):
                await self._serve_streams(connection)
        except (TransportError, CodecError, RefusedError, OSError):
            pass  # during a stream its handler sees it; between streams it is a normal end
        finally:
            connection.close()

    async def _greet(self, connection: "Connection") -> Caller:
        """Who has connected. Raises RefusedError, TransportError, OSError."""
        sides = None if connection.is_local else self._security.sides()
        if sides is None:
            told = await connection.receive_exactly(SECRET_BYTES)
        else:
            told, certificate = await connection.answer(sides[0])
        came = self._callers.get(told)
        if came is None:
            raise RefusedError("a secret that was given to no caller")
        if sides is not None:
            self._security.member(certificate).check(came.name)
        return came

    async def _serve_streams(self, connection: "Connection") -> None:
        while True:
            kind, frame = await connection.receive_frame()
            if kind != Kind.OPENING:
                raise CodecError("a stream that does not begin with an opening")
            opening = wire.decode_chunk(bytes(frame)).opening
            if opening is None:
                raise CodecError("an opening that opens nothing")
            caller().check(opening.sender)
            await self._serve_one(opening, SocketStream(connection, None, "the caller"))

    async def _serve_one(self, opening: Opening, stream: "SocketStream") -> None:
        """Serve one stream, and stop if the caller hangs up while nothing reads from it."""
        serving = asyncio.get_running_loop().create_task(self._serve(opening, stream))
        try:
            with self._hangups.watching(stream.connection, serving):
                await serving
            if stream.aborted:
                await stream.connection.send_frame(Kind.ABORTED, stream.aborted.encode()[:MAX_TEXT])
                await stream.connection.hear_out()
            else:
                await stream.end()
        except RefusedError as error:
            await stream.connection.send_frame(Kind.REFUSED, str(error).encode()[:MAX_TEXT])
            await stream.connection.hear_out()
        except asyncio.CancelledError:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            raise


class _Hangups:
    """Detects that a caller hung up on a stream that is not being read."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._watched: dict[int, tuple[Connection, asyncio.Task[None]]] = {}
        asyncio.get_running_loop().add_reader(self._poll.fileno(), self._look)

    def close(self) -> None:
        if not self._poll.closed:
            asyncio.get_running_loop().remove_reader(self._poll.fileno())
            self._poll.close()

    @contextlib.contextmanager
    def watching(self, connection: "Connection", task: asyncio.Task[None]) -> Iterator[None]:
        number = connection.number
        self._watched[number] = (connection, task)
        self._poll.register(number, select.EPOLLRDHUP | select.EPOLLONESHOT)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # closed meanwhile: unregistered with it
                self._poll.unregister(number)
            self._watched.pop(number, None)

    def _look(self) -> None:
        for number, _ in self._poll.poll(0):
            connection, task = self._watched[number]
            if connection.is_dead():  # false while earlier data waits to be read
                task.cancel()


class SocketCaller:
    """Opens streams to one peer; keeps connections that carry none at present."""

    def __init__(
        self,
        paths: Paths,
        host: str,
        vectors: SharedVectors,
        *,
        near: bool,
        security: Security | None = None,
    ) -> None:
        """Args: near: whether to use the Unix socket and shared memory, on the same machine."""
        self._vectors = vectors
        self._idle: list[Connection] = []
        self._all: list[Connection] = []
        self._closed = False
        if near:
            self._way = _Way(socket.AF_UNIX, f"\0{paths.unix_name}", paths.secret)
        else:
            sides = security.sides() if security else None
            context = sides[1] if sides else None
            self._way = _Way(_family_of(host), (host, paths.port), paths.secret, context)

    async def connect(self) -> None:
        """Check that a connection works. Raises TransportError."""
        self._idle.append(await self._connect())

    async def open(self, opening: Opening, name: str) -> "SocketStream":
        """Raises TransportError."""
        connection = None
        while self._idle and connection is None:
            connection = self._idle.pop()
            if connection.is_dead():
                connection.close()
                connection = None
        return SocketStream(connection or await self._connect(), opening, name, self._put_back)

    def close(self) -> None:
        """End all connections, and the streams on them."""
        self._closed = True
        for connection in self._all:
            connection.close()

    def _put_back(self, connection: "Connection") -> None:
        if self._closed or connection.is_worn or len(self._idle) >= IDLE_CONNECTIONS:
            connection.close()
        else:
            self._idle.append(connection)

    async def _connect(self) -> "Connection":
        connecting = socket.socket(self._way.family)
        connecting.setblocking(False)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                await loop.sock_connect(connecting, self._way.address)
                seal = await self._introduce(connecting)
        except (OSError, TransportError) as error:
            connecting.close()
            why = reason_of(error) or f"no answer within {CONNECT_S:g} s"
            raise TransportError(f"no socket to {self._way.address!r}: {why}") from error
        connection = Connection(connecting, self._vectors, seal)
        self._all = [known for known in self._all if not known.closed]
        self._all.append(connection)
        return connection

    async def _introduce(self, connecting: socket.socket) -> Seal | None:
        way = self._way
        if way.context:
            return await sealed.call(connecting, way.context, way.secret)
        await asyncio.get_running_loop().sock_sendall(connecting, way.secret)
        return None


class Connection:
    """Frames on one socket."""

    def __init__(
        self, connected: socket.socket, vectors: SharedVectors, seal: Seal | None = None
    ) -> None:
        self._socket = connected
        self._seal = seal
        self._loop = asyncio.get_running_loop()
        self._header = memoryview(bytearray(HEADER.size))
        self._sealed = memoryview(b"")  # a frame before it is opened
        self._vectors = vectors
        self._mapped: dict[int, memoryview] = {}
        self._peer_process, self._peer_host = 0, ""
        self._busy = 0
        self._wakes_at = 1
        self.closed = False
        self.number = connected.fileno()
        connected.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connected.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
        if connected.family == socket.AF_UNIX:
            told = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            self._peer_process = struct.unpack("3i", told)[0]
        else:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with contextlib.suppress(OSError):  # hung up meanwhile
                self._peer_host = str(connected.getpeername()[0])

    def close(self) -> None:
        """End the connection; the kernel tells both sides."""
        if not self.closed:
            self.closed = True
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._maybe_free()

    def __enter__(self) -> None:
        """Mark as in use: the loop watches the socket's number, which must not be reused."""
        self._busy += 1

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._busy -= 1
        self._maybe_free()
        if isinstance(error, (OSError, ValueError)):
            raise TransportError(f"the connection broke: {reason_of(error)}") from error

    def _maybe_free(self) -> None:
        if self.closed and not self._busy:
            self._socket.close()

    def is_dead(self) -> bool:
        """True if the other side has hung up; asked of a connection that carries no stream."""
        try:
            return self._socket.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    async def answer(self, context: ssl.SSLContext) -> tuple[bytes, bytes]:
        """Be called: the caller's secret and certificate (PEM). Raises OSError, TransportError."""
        with self:
            secret, certificate, self._seal = await sealed.answer(
                self._socket, context, SECRET_BYTES
            )
        return secret, certificate

    @property
    def is_worn(self) -> bool:
        """True if its keys have sealed all that they should."""
        return self._seal is not None and self._seal.is_worn

    @property
    def is_local(self) -> bool:
        """True on a Unix socket: the other side is a process of this machine."""
        return self._peer_process != 0

    @property
    def caller(self) -> str:
        """The process on the other side, if it is of this machine; else the other machine."""
        return f"process {self._peer_process}" if self.is_local else self._peer_host

    def reference(self, payload: memoryview) -> bytes | None:
        """How the other side can find `payload` in our memory; None if it cannot."""
        if not self.is_local or payload.nbytes < SHARED_BYTES:
            return None
        return self._vectors.find(payload)

    def resolve(self, frame: memoryview) -> memoryview:
        """The bytes in the other side's memory that `frame` refers to; they are read only.

        Raises:
            CodecError: if there are none.
        """
        if len(frame) != REFERENCE.size or not self.is_local:
            raise CodecError("a reference to memory that cannot be shared")
        file, number, start, size_bytes = REFERENCE.unpack(frame)
        memory = self._mapped.get(number)
        if memory is None:
            self._mapped = dict(list(self._mapped.items())[1 - MAX_MAPPED :])
            memory = self._mapped[number] = map_vector(self._peer_process, file, number)
        if start + size_bytes > len(memory):
            raise CodecError(f"a reference to {size_bytes} bytes of {len(memory)}")
        return memory[start : start + size_bytes]

    def let_go(self) -> None:
        """A stream is over: nothing of a long vector is read any more."""
        kept = self._mapped.items()
        self._mapped = {number: one for number, one in kept if len(one) <= KEPT_BYTES}

    async def send_frame(self, kind: Kind, payload: memoryview | bytes = b"") -> None:
        """Raises TransportError."""
        size_bytes = len(payload)
        header = HEADER.pack(kind, size_bytes)
        if self._seal:
            payload = memoryview(self._seal.seal(header, payload))
            size_bytes = len(payload)
        with self:
            try:  # header and payload in one call, and mostly at once: the kernel has room
                sent = self._socket.sendmsg([header, payload])
            except BlockingIOError:
                sent = 0
            if sent < HEADER.size:
                await self._loop.sock_sendall(self._socket, header[sent:])
            if sent < HEADER.size + size_bytes:
                rest = memoryview(payload)[max(sent - HEADER.size, 0) :]
                await self._loop.sock_sendall(self._socket, rest)

    async def receive_frame(self, into: memoryview | None = None) -> tuple[Kind, memoryview]:
        """The next frame, in the memory `into` if it is a chunk that fits there exactly.

        Raises:
            TransportError: if the connection ended.
            CodecError: if it is no frame of ours.
        """
        await self._fill(self._header)
        number, size_bytes = HEADER.unpack(self._header)
        is_chunk = number in (Kind.CHUNK, Kind.LAST_CHUNK)
        if number not in KINDS or size_bytes > (MAX_CHUNK_BYTES if is_chunk else MAX_TEXT):
            raise CodecError(f"a frame of kind {number} with {size_bytes} bytes")
        if into is None or not is_chunk or into.nbytes != size_bytes:
            into = memoryview(bytearray(size_bytes))
        if self._seal is None:
            await self._fill(into)
        else:
            await self._unseal(self._seal, into)
        return Kind(number), into

    async def _unseal(self, seal: Seal, into: memoryview) -> None:
        size_bytes = into.nbytes + sealed.TAG_BYTES
        if len(self._sealed) < size_bytes:
            self._sealed = memoryview(bytearray(size_bytes))
        await self._fill(self._sealed[:size_bytes])
        seal.open(bytes(self._header), self._sealed[:size_bytes], into)

    def _wake_at(self, size_bytes: int) -> None:
        """Wake when this much has arrived, or at the end: each wake-up costs the same."""
        if size_bytes != self._wakes_at:
            self._wakes_at = size_bytes
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size_bytes)

    async def receive_exactly(self, size_bytes: int) -> bytes:
        """Raises TransportError."""
        data = bytearray(size_bytes)
        await self._fill(memoryview(data))
        return bytes(data)

    async def hear_out(self) -> None:
        """Let the other side read our last frames before the close."""
        waste = memoryview(bytearray(BUFFER_BYTES))
        with contextlib.suppress(TransportError, TimeoutError):
            async with asyncio.timeout(CONNECT_S):
                while True:
                    await self._receive_into(waste)

    async def _fill(self, memory: memoryview) -> None:
        at = 0
        while at < len(memory):
            at += await self._receive_into(memory[at:])

    async def _receive_into(self, memory: memoryview) -> int:
        with self:
            try:
                got = self._socket.recv_into(memory)
            except BlockingIOError:
                self._wake_at(min(len(memory), WAKE_BYTES))
                got = await self._loop.sock_recv_into(self._socket, memory)
        if got == 0:
            raise TransportError("the other side hung up")
        return got


class SocketStream:
    """One side of a stream; `opening` is None for the side that was called."""

    def __init__(
        self,
        connection: Connection,
        opening: Opening | None,
        name: str,
        put_back: Callable[[Connection], None] = lambda _: None,
    ) -> None:
        self.connection = connection
        self._opening = opening
        self._calls = opening is not None
        self._name = name
        self._put_back = put_back
        self._rest = memoryview(b"")  # the part of a reference that was not received yet
        self._read_lately: deque[memoryview] = deque()  # of long vectors
        self._said_all = False
        self._said_end = False
        self._heard_end = False
        self._over = False
        self.aborted = ""

    @property
    def is_local(self) -> bool:
        return self.connection.is_local

    @property
    def caller(self) -> str:
        return "" if self._calls else self.connection.caller

    async def begin(self) -> None:
        if self._opening is not None:
            await asyncio.sleep(0)  # a send may follow at once, and carries the opening
            await self._maybe_open()

    async def send(self, payload: memoryview, last: bool = False) -> None:
        if await self.refer(payload, last):
            return
        await self._maybe_open()
        await self._say(Kind.LAST_CHUNK if last else Kind.CHUNK, payload)
        self._said_all = self._said_end = last
        self._maybe_put_back()

    async def refer(self, payload: memoryview, last: bool = False) -> bool:
        reference = self.connection.reference(payload)
        if reference is None:
            return False
        await self._maybe_open()
        await self._say(Kind.SHARED, reference)
        self._said_all = last  # the end is sent once all is read, too
        return True

    async def receive(self, into: memoryview | None = None) -> memoryview | None:
        if self._rest:
            await asyncio.sleep(0)  # yield: a long reference must not block the loop
            return self._next_of_rest(into)
        await self.begin()
        if self._heard_end:
            return None
        kind, payload = await self._use(self.connection.receive_frame(into))
        match kind:
            case Kind.CHUNK | Kind.LAST_CHUNK | Kind.END:
                self._heard_end = kind is not Kind.CHUNK
            case Kind.SHARED:
                self._rest = self.connection.resolve(payload)
                payload = self._next_of_rest(into)
            case Kind.REFUSED | Kind.ABORTED:
                why = str(payload, "utf-8", "replace")
                self.abort(why)
                raise RefusedError(why) if kind is Kind.REFUSED else TransportError(why)
            case Kind.OPENING:
                raise CodecError("an opening inside a stream")
        self._maybe_put_back()
        return None if kind is Kind.END else payload

    async def finish(self) -> None:
        if self._opening is not None or not self._said_all:
            await self._maybe_open()
            self._said_all = True
            await self.release()

    async def release(self) -> None:
        if self._said_all and not self._said_end:
            self._said_end = True
            await self._say(Kind.END)
            self._maybe_put_back()

    async def end(self) -> None:
        """The called side has served the stream: send the end, and read the caller's."""
        self._said_all = True
        await self.release()
        while not self._heard_end:
            await self.receive()

    def abort(self, why: str) -> None:
        if not self.aborted and not self._over:
            self.aborted = why
            if self._calls:  # a callee's reason was sent before
                self.connection.close()

    def _next_of_rest(self, into: memoryview | None) -> memoryview:
        size_bytes = len(self._rest) if into is None else into.nbytes
        payload, self._rest = self._rest[:size_bytes], self._rest[size_bytes:]
        if size_of_mapped(payload) > KEPT_BYTES:
            self._read_lately.append(payload)
            if len(self._read_lately) > READ_LATELY:
                drop_pages(self._read_lately.popleft())
        return payload

    async def _maybe_open(self) -> None:
        opening, self._opening = self._opening, None
        if opening is not None:
            await self._say(Kind.OPENING, wire.encode_chunk(wire.Chunk(opening=opening)))

    async def _say(self, kind: Kind, payload: memoryview | bytes = b"") -> None:
        await self._use(self.connection.send_frame(kind, payload))

    async def _use(self, operation: Coroutine[Any, Any, T]) -> T:  # Any: asyncio's own types
        if self.aborted:
            operation.close()
            raise TransportError(self.aborted)
        try:
            return await operation
        except (TransportError, CodecError) as error:
            why = self.aborted or str(error)
            self.abort(why)
            raise TransportError(f"{self._name}: {why}") from error

    def _maybe_put_back(self) -> None:
        if self._said_end and self._heard_end and not self._over:
            self._over = True
            self._read_lately.clear()
            self.connection.let_go()
            self._put_back(self.connection)


def _family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
