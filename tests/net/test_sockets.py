"""Sockets and shared memory beside gRPC: who gets in, what is believed, what is left behind."""

import asyncio
import errno
import gc
import os
import socket
import weakref
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from p2ptrain.errors import CodecError, ConfigError, TransportError
from p2ptrain.ids import PeerId
from p2ptrain.net import sockets, wire
from p2ptrain.net.grpc_config import GrpcConfig
from p2ptrain.net.grpc_transport import GrpcTransport
from p2ptrain.net.shared_vectors import REFERENCE, SHARED_NAME, SharedVectors, this_machine
from p2ptrain.net.sockets import (
    HEADER,
    SHARED_BYTES,
    Connection,
    Kind,
    SocketCaller,
    SocketServer,
    SocketStream,
)
from p2ptrain.net.wire import MAX_CHUNK_BYTES, SECRET_BYTES, Opening, Paths, StateOpening

pytestmark = pytest.mark.sockets

OPENING = StateOpening("swarm", PeerId("caller"), 7)
NUMBERS = SHARED_BYTES // 4


class Callee:
    """A server whose streams do what a test says."""

    def __init__(self) -> None:
        self.vectors = SharedVectors()
        self.served: list[Opening] = []
        self.heard: list[memoryview] = []
        self.errors: list[Exception] = []

    async def serve(self, opening, stream) -> None:
        self.served.append(opening)
        try:
            while (payload := await stream.receive()) is not None:
                self.heard.append(payload)
        except (TransportError, CodecError) as error:
            self.errors.append(error)
            raise


@pytest.fixture
async def callee():
    callee = Callee()
    callee.server = SocketServer(callee.serve, callee.vectors)
    callee.server.start("127.0.0.1")
    yield callee
    await callee.server.close()


@pytest.fixture(params=["near", "far"])
async def caller(request, callee):
    vectors = SharedVectors()
    near = request.param == "near"
    caller = SocketCaller(callee.server.paths, "127.0.0.1", vectors, near=near)
    caller.vectors = vectors
    yield caller
    caller.close()


async def knock(callee: Callee, *said: bytes) -> bytes:
    """Say `said` on a fresh TCP connection; what comes back until it ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", callee.server.paths.port)
    for data in said:
        writer.write(data)
    async with asyncio.timeout(5):
        answer = await reader.read()
    writer.close()
    return answer


def frame(kind: int, payload: bytes) -> bytes:
    return HEADER.pack(kind, len(payload)) + payload


OPENED = frame(Kind.OPENING, wire.encode_chunk(wire.Chunk(opening=OPENING)))


async def test_who_does_not_know_the_secret_is_hung_up_on(callee):
    assert await knock(callee, bytes(SECRET_BYTES), OPENED) == b""
    assert callee.served == []


@pytest.mark.parametrize(
    "said",
    [
        frame(99, b""),
        HEADER.pack(Kind.CHUNK, MAX_CHUNK_BYTES + 1),
        HEADER.pack(Kind.OPENING, 1 << 31),
        frame(Kind.CHUNK, b"before any opening"),
        frame(Kind.OPENING, b"no opening at all"),
        frame(Kind.OPENING, wire.encode_chunk(wire.Chunk(memoryview(b"x")))),
    ],
    ids=["unknown kind", "long chunk", "long opening", "chunk first", "garbage", "no opening"],
)
async def test_what_is_no_stream_ends_the_connection_and_nothing_else(callee, caller, said):
    assert await knock(callee, callee.server.paths.secret, said) == b""
    assert callee.served == []
    stream = await caller.open(OPENING, "b")
    await stream.finish()
    assert await stream.receive() is None, "others are served as before"


@pytest.mark.parametrize(
    "reference",
    [b"short", REFERENCE.pack(0, 1, 0, 8), REFERENCE.pack(1 << 31, 1, 1 << 62, 1 << 62)],
)
async def test_memory_cannot_be_referred_to_over_a_network(callee, reference):
    await knock(callee, callee.server.paths.secret, OPENED, frame(Kind.SHARED, reference))
    assert "memory that cannot be shared" in str(callee.errors[0])


async def test_a_reference_opens_no_other_file_of_the_sender(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("mine")
    here, there = socket.socketpair(socket.AF_UNIX)
    connection = Connection(here, SharedVectors())
    with secret.open() as file, pytest.raises(CodecError, match="not a shared vector"):
        connection.resolve(memoryview(REFERENCE.pack(file.fileno(), 1, 0, 4)))
    with pytest.raises(CodecError, match="cannot be mapped"):
        connection.resolve(memoryview(REFERENCE.pack(9999, 1, 0, 4)))
    connection.close()
    there.close()


def resolve(vectors: SharedVectors, reference: bytes) -> memoryview:
    """What the other side of a connection of this machine finds by `reference`."""
    here, there = socket.socketpair(socket.AF_UNIX)
    connection = Connection(here, vectors)
    try:
        return connection.resolve(memoryview(reference))
    finally:
        connection.close()
        there.close()


@pytest.mark.parametrize("shrinks", [0, 4])
async def test_shared_memory_cannot_be_cut_off_under_its_readers(shrinks):
    vectors = SharedVectors()
    vector = vectors.take(NUMBERS)
    vector[:] = 7
    reference = vectors.find(vector.data.cast("B"))
    assert reference is not None
    mapped = resolve(SharedVectors(), reference)
    with pytest.raises(PermissionError):
        os.ftruncate(REFERENCE.unpack(reference)[0], shrinks)
    assert np.frombuffer(mapped, np.float32)[-1] == 7, "a read beyond the end would have killed us"


async def test_memory_that_its_owner_could_cut_off_is_not_mapped():
    file = os.memfd_create(f"{SHARED_NAME}-1", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, SHARED_BYTES)
    with pytest.raises(CodecError, match="its owner could cut off"):
        resolve(SharedVectors(), REFERENCE.pack(file, 1, 0, SHARED_BYTES))
    os.close(file)


@pytest.fixture
async def referred() -> AsyncIterator[tuple[Connection, bytes]]:
    """A connection, and a reference to all of a vector of the other side."""
    vectors = SharedVectors()
    vector = vectors.take(NUMBERS)
    reference = vectors.find(vector.data.cast("B"))
    assert reference is not None
    here, there = socket.socketpair(socket.AF_UNIX)
    connection = Connection(here, SharedVectors())
    yield connection, reference
    connection.close()
    there.close()


async def test_a_reference_beyond_the_vector_is_refused(referred):
    connection, reference = referred
    file, number, _, size_bytes = REFERENCE.unpack(reference)
    with pytest.raises(CodecError, match=f"a reference to {size_bytes} bytes of"):
        connection.resolve(memoryview(REFERENCE.pack(file, number, 8, size_bytes)))


@pytest.mark.parametrize(("kept_bytes", "stays"), [(4 * NUMBERS, True), (4 * NUMBERS - 1, False)])
async def test_a_long_vector_of_the_other_side_is_mapped_for_one_stream(
    referred, kept_bytes, stays, monkeypatch
):
    monkeypatch.setattr(sockets, "KEPT_BYTES", kept_bytes)
    connection, reference = referred
    mapped = weakref.ref(connection.resolve(memoryview(reference)).obj)
    connection.let_go()
    assert (mapped() is not None) == stays


async def test_chunks_of_a_long_vector_count_as_memory_of_the_reader_until_they_are_read(
    callee, monkeypatch
):
    def mapped_kib() -> int:
        rollup = Path("/proc/self/smaps").read_text(encoding="ascii").split(SHARED_NAME)[1:]
        return sum(int(part.split("Rss:")[1].split()[0]) for part in rollup)

    chunk, count = SHARED_BYTES, 64
    monkeypatch.setattr(sockets, "KEPT_BYTES", chunk)
    vectors, kib = SharedVectors(), list[int]()
    vector = vectors.take(count * chunk // 4)
    vector[:] = np.arange(len(vector))
    before = mapped_kib()

    async def serve(opening, stream):
        into = memoryview(bytearray(chunk))
        for index in range(count):
            heard = np.frombuffer(await stream.receive(into), np.float32)
            assert heard[-1] == (index + 1) * chunk // 4 - 1
            kib.append(mapped_kib() - before)
        assert await stream.receive() is None

    callee.server._serve = serve
    caller = SocketCaller(callee.server.paths, "127.0.0.1", vectors, near=True)
    stream = await caller.open(OPENING, "b")
    assert await stream.refer(vector.data.cast("B"), last=True)
    await stream.release()
    assert await stream.receive() is None
    caller.close()
    assert 0 < max(kib) <= (sockets.READ_LATELY + 2) * chunk // 1024


async def test_a_near_peer_reads_our_own_memory_and_cannot_write_it(callee):
    vectors = SharedVectors()
    caller = SocketCaller(callee.server.paths, "127.0.0.1", vectors, near=True)
    vector = vectors.take(NUMBERS)
    vector[:] = 3
    stream = await caller.open(OPENING, "b")
    await stream.send(vector.data.cast("B"), last=True)
    await stream.release()
    assert await stream.receive() is None
    heard = np.frombuffer(callee.heard[0], np.float32)
    assert heard.tolist() == [3.0] * NUMBERS
    assert callee.heard[0].readonly
    vector[0] = 5
    assert heard[0] == 5, "it is the same memory"
    caller.close()


async def test_the_end_comes_only_after_the_other_side_has_read_what_it_shares(callee):
    vectors = SharedVectors()
    caller = SocketCaller(callee.server.paths, "127.0.0.1", vectors, near=True)
    reading = asyncio.Event()

    async def serve(opening, stream):
        await stream.receive()
        await reading.wait()

    callee.serve = serve
    callee.server._serve = serve
    vector = vectors.take(NUMBERS)
    stream = await caller.open(OPENING, "b")
    await stream.send(vector.data.cast("B"), last=True)
    await stream.release()
    ended = asyncio.create_task(stream.receive())
    await asyncio.sleep(0.1)
    assert not ended.done(), "the vector is still being read"
    reading.set()
    assert await ended is None
    caller.close()


async def test_a_vector_that_takes_the_place_of_another_is_not_mistaken_for_it(callee):
    vectors = SharedVectors()
    caller = SocketCaller(callee.server.paths, "127.0.0.1", vectors, near=True)
    for round_number in range(8):
        vector = vectors.take(NUMBERS)  # very likely the same file number each time
        vector[:] = round_number
        stream = await caller.open(OPENING, "b")
        await stream.send(vector.data.cast("B"), last=True)
        await stream.release()
        assert await stream.receive() is None
        assert np.frombuffer(callee.heard[-1], np.float32)[0] == round_number
        del vector
    caller.close()


def test_memory_is_given_back_with_the_last_array_on_it():
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    vectors = SharedVectors()
    gc.collect()
    before = open_files()
    vector = vectors.take(NUMBERS)
    part = vector[10:20]
    assert open_files() > before
    del vector
    gc.collect()
    part[:] = 7  # still ours
    del part
    gc.collect()
    assert open_files() == before


async def test_chunks_land_where_they_are_wanted(callee, caller):
    wanted = np.zeros(10, np.float32)

    async def serve(opening, stream):
        await stream.send(np.arange(10, dtype=np.float32).data.cast("B"), last=True)

    callee.server._serve = serve
    stream = await caller.open(OPENING, "b")
    payload = await stream.receive(wanted.data.cast("B"))
    assert payload is not None
    assert np.shares_memory(np.frombuffer(payload, np.float32), wanted)
    assert wanted.tolist() == list(range(10))


async def test_a_connection_carries_one_stream_after_the_other(callee, caller):
    await caller.connect()
    for _ in range(5):
        stream = await caller.open(OPENING, "b")
        await stream.send(memoryview(b"x" * 100), last=True)
        assert await stream.receive() is None
        assert await stream.receive() is None, "asked again, it says the same"
    assert callee.errors == []
    assert len(callee.served) == 5
    assert len(caller._all) == 1


async def test_a_connection_that_breaks_is_told_in_words(caller):
    await caller.connect()
    (connection,) = caller._all
    sentence = r"^the connection broke: Connection reset by peer$"
    with pytest.raises(TransportError, match=sentence), connection:
        raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")


async def test_a_port_that_says_nothing_is_told_in_words(caller, monkeypatch):
    async def wait(connecting: socket.socket) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(caller, "_introduce", wait)
    monkeypatch.setattr("p2ptrain.net.sockets.CONNECT_S", 0.01)
    with pytest.raises(TransportError, match=r"^no socket to .*: no answer within 0.01 s$"):
        await caller.connect()


async def test_closing_leaves_no_socket_open(callee):
    caller = SocketCaller(callee.server.paths, "127.0.0.1", SharedVectors(), near=False)
    stream = await caller.open(OPENING, "b")
    receiving = asyncio.create_task(stream.receive())
    await asyncio.sleep(0.05)
    caller.close()
    with pytest.raises(TransportError):
        await receiving
    assert all(connection._socket.fileno() == -1 for connection in caller._all)


# --- beside gRPC ----------------------------------------------------------------------------------


class Echo:
    """A handler that sends back what it hears."""

    async def handle_stream(self, opening, stream) -> None:
        while (payload := await stream.receive()) is not None:
            await stream.send(payload)


async def pair_of(one: str, other: str) -> tuple[GrpcTransport, GrpcTransport, str]:
    a, b = (GrpcTransport("127.0.0.1:0", config=GrpcConfig(data=way)) for way in (one, other))
    await a.start(Echo())
    return a, b, await b.start(Echo())


async def way_of(a: GrpcTransport, address: str) -> type:
    """What kind of stream carries an echo."""
    stream = await a.open(address, OPENING)
    await stream.send(memoryview(b"there and back"), last=True)
    assert bytes(await stream.receive() or b"") == b"there and back"
    assert await stream.receive() is None
    return type(stream)


@pytest.mark.parametrize(
    ("one", "other", "fast"),
    [
        ("sockets", "auto", True),
        ("memory", "auto", True),
        ("memory", "memory", True),
        ("grpc", "auto", False),
        ("sockets", "grpc", False),
    ],
)
async def test_a_way_is_taken_where_both_have_it(one, other, fast):
    a, b, address = await pair_of(one, other)
    assert (await way_of(a, address) is SocketStream) == fast
    for transport in (a, b):
        await transport.close(0.1)


async def test_by_itself_a_peer_begins_with_grpc_and_goes_on_with_what_is_faster():
    a, b, address = await pair_of("auto", "auto")
    assert await way_of(a, address) is not SocketStream
    async with asyncio.timeout(5):
        while await way_of(a, address) is not SocketStream:  # noqa: ASYNC110 - not ours to notify
            await asyncio.sleep(0.01)
    for transport in (a, b):
        await transport.close(0.1)


async def test_sockets_that_cannot_be_reached_leave_everything_to_grpc():
    a, b, address = await pair_of("sockets", "auto")
    assert b._sockets
    paths = b._sockets.paths
    b._sockets.paths = Paths(1, paths.secret, "", "")  # nobody listens on port 1
    assert await way_of(a, address) is not SocketStream
    for transport in (a, b):
        await transport.close(0.1)


@pytest.mark.parametrize(
    "paths",
    [Paths(70_000, bytes(32), "", ""), Paths(1, b"short", "", ""), Paths(1, bytes(33), "", "")],
)
def test_paths_that_cannot_be_are_refused(paths):
    with pytest.raises(CodecError, match="paths with port"):
        wire.decode_paths(wire.encode_paths(paths))


def test_a_machine_has_one_name():
    assert this_machine() == this_machine()
    assert bool(this_machine()) == Path("/proc/self/ns/net").exists()


def test_a_way_that_there_is_not_is_named():
    with pytest.raises(ConfigError, match="data = 'pigeon'; there are: auto, memory, sockets"):
        GrpcConfig(data="pigeon")


# --- many chunks with one word --------------------------------------------------------------------


async def test_where_memory_is_shared_a_row_of_chunks_is_sent_with_one_word_and_read_as_wanted(
    callee, caller
):
    vector = caller.vectors.take(3 * NUMBERS)
    vector[:] = np.arange(len(vector))
    heard = []

    async def serve(opening, stream):
        while (payload := await stream.receive(memoryview(bytearray(SHARED_BYTES)))) is not None:
            heard.append(bytes(payload))

    callee.server._serve = serve
    await caller.connect()
    stream = await caller.open(OPENING, "the callee")
    referred = await stream.refer(vector.data.cast("B"), last=True)
    assert referred == (caller._way.family == socket.AF_UNIX)
    await (stream.release() if referred else stream.finish())
    assert await stream.receive() is None
    slices = vector.reshape(3, -1) if referred else ()
    assert heard == [one.tobytes() for one in slices]
