"""The real transport against real sockets: strangers, garbage, addresses that are no peer's."""

import asyncio
import gc
import logging
import socket
import threading
from contextlib import asynccontextmanager, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import TracebackType

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from p2ptrain.core.budgets import Rate
from p2ptrain.core.messages import Arrive, Member
from p2ptrain.core.redial import Redial
from p2ptrain.errors import CodecError, ConfigError, RefusedError, TransportError
from p2ptrain.ids import Address, PeerId
from p2ptrain.net import grpc_link, grpc_transport, wire
from p2ptrain.net.grpc_config import CHUNKS_KEEPALIVE_MS, GrpcConfig, channel_arguments
from p2ptrain.net.grpc_errors import translate
from p2ptrain.net.grpc_link import SERVICE
from p2ptrain.net.grpc_transport import GrpcTransport
from p2ptrain.net.wire import Envelope, Hello, JoinReply, StateOpening

pytestmark = pytest.mark.sockets

OPENING = StateOpening("swarm", PeerId("a"), 7)


class Handler:
    """Notes messages; echoes streams."""

    def __init__(self) -> None:
        self.messages: list[Envelope] = []
        self.broken: list[str] = []

    def handle_message(self, envelope):
        self.messages.append(envelope)

    def handle_broken(self, address, why):
        self.broken.append(why)

    async def handle_join(self, hello):
        return JoinReply("", (hello.me,))

    def handle_identify(self):
        return hello()

    async def handle_stream(self, opening, stream):
        while (payload := await stream.receive()) is not None:
            await stream.send(payload)


def hello() -> Hello:
    return Hello((1, 0), "ad_psgd", "model", 1, Member(peer="a", address="h:1", incarnation=1))


def message(number: int = 1) -> Envelope:
    return Envelope(PeerId("a"), "swarm", Arrive(number))


@asynccontextmanager
async def started(config: GrpcConfig | None = None):
    """A transport that listens, its handler and its address."""
    transport, handler = GrpcTransport("127.0.0.1:0", config=config), Handler()
    address = await transport.start(handler)
    try:
        yield transport, handler, address
    finally:
        await transport.close(0.2)


async def until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what is waited for does not know us
            await asyncio.sleep(0.005)


async def test_a_task_that_is_cancelled_as_its_stream_fails_is_cancelled():
    """It would take the failure for a reason to try again, and never end."""
    async with started() as (transport, _, _):
        stream = await transport.open(Address("127.0.0.1:1"), OPENING)
        reading = asyncio.create_task(stream.receive())
        sending = asyncio.create_task(stream.send(memoryview(b"with the opening")))
        stream._call.add_done_callback(lambda _: reading.cancel())
        with pytest.raises(asyncio.CancelledError):
            await reading
        with pytest.raises(TransportError):
            await sending


@pytest.mark.parametrize("end", ["abort", "forget", "close"])
async def test_what_is_sent_while_it_connects_fails_when_the_stream_is_ended(end):
    """gRPC's own write would wait for ever: the call has ended, and does not connect any more."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.setblocking(False)
        there = Address(f"127.0.0.1:{silent.getsockname()[1]}")
        async with started() as (transport, _, _):
            stream = await transport.open(there, OPENING)
            sending = asyncio.create_task(stream.send(memoryview(b"a chunk")))
            connection, _ = await asyncio.get_running_loop().sock_accept(silent)
            if end == "abort":
                stream.abort("we have enough")
            elif end == "forget":
                transport.forget(there)
            else:
                await transport.close(0.0)
            with pytest.raises(TransportError, match=r"we have enough|gRPC says: cancelled"):
                await asyncio.wait_for(sending, 1.0)
            connection.close()


@pytest.fixture
def silent(caplog, capfd):
    """Fails if anything was logged or printed: strangers must not fill anybody's terminal."""
    with caplog.at_level(logging.DEBUG, logger="grpc"):
        yield
    noise = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert noise == []
    assert capfd.readouterr() == ("", "")


# --- listening ------------------------------------------------------------------------------------


async def test_a_port_in_use_is_one_sentence():
    async with started() as (_, _, address):
        with pytest.raises(ConfigError, match=f"cannot listen on {address}: the port is in use"):
            await GrpcTransport(address).start(Handler())


@pytest.mark.parametrize("listen", ["", "4000", "host:", ":4000", "host:port", "host:70000"])
async def test_what_is_no_address_to_listen_on_is_one_sentence(listen):
    with pytest.raises(ConfigError, match="is not an address; write host:port, port 0 for a free"):
        await GrpcTransport(listen).start(Handler())


async def test_an_address_of_another_machine_cannot_be_listened_on():
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:0"):
        await GrpcTransport("192.0.2.1:0").start(Handler())


async def test_a_free_port_is_found_and_advertised():
    async with started() as (_, _, address):
        assert address.startswith("127.0.0.1:")
        assert wire.address(address) == address


async def test_port_0_of_the_advertised_address_stands_for_the_real_port():
    transport = GrpcTransport("127.0.0.1:0", advertise="localhost:0")
    address = await transport.start(Handler())
    try:
        assert address.startswith("localhost:")
        assert (await transport.identify(address, 5.0)) == hello()
    finally:
        await transport.close(0.2)


async def test_an_advertised_address_that_is_none_is_one_sentence():
    transport = GrpcTransport("127.0.0.1:0", advertise="my machine")
    with pytest.raises(ConfigError, match="advertise = 'my machine' is not an address"):
        await transport.start(Handler())
    await transport.close(0.2)


async def test_the_standard_health_service_says_that_a_peer_serves():
    async with started() as (_, _, address), grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


# --- garbage --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(range(256)),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\x00" * 10_000,
        b"",
    ],
    ids=["http", "broken http2", "tls", "zeros", "hang up"],
)
async def test_garbage_over_tcp_costs_its_sender_the_connection_and_nobody_else(silent, garbage):
    async with started() as (transport, handler, address):
        host, port = address.split(":")
        for _ in range(3):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(garbage)
            await writer.drain()
            writer.close()
        transport.send(address, message())
        await until(lambda: handler.messages == [message()])


MALFORMED = [b"\xff\xff\xff", b"", b"\x0a\x01a", b"\x52\x00", b"\x0b" * 200]


@pytest.mark.parametrize("method", ["Join", "Talk", "Move"])
async def test_malformed_messages_are_refused_counted_and_forgotten(silent, method):
    async with started() as (transport, handler, address):
        async with grpc.aio.insecure_channel(address) as channel:
            for data in MALFORMED:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await _call(channel, method, data)
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert transport.refused_bytes == len(MALFORMED)
        transport.send(address, message())
        await until(lambda: handler.messages == [message()])


async def test_a_refused_call_keeps_nothing_that_it_passed(silent):
    calls = 16
    async with started() as (transport, _, address):
        async with grpc.aio.insecure_channel(address) as channel:
            gc.collect()
            gc.disable()
            try:
                before = _tracebacks()
                for number in range(calls):
                    call = channel.stream_unary(f"/{SERVICE}/Talk")()
                    with suppress(grpc.RpcError, asyncio.InvalidStateError):
                        for _ in range(8):
                            await call.write(MALFORMED[number % len(MALFORMED)])
                        await call
                    call.cancel()
                del call
                await until(lambda: transport.refused_bytes == calls)
                kept = _tracebacks() - before
            finally:
                gc.enable()
        assert kept < 2 * calls


def _tracebacks() -> int:
    return sum(isinstance(one, TracebackType) for one in gc.get_objects())


async def _call(channel, method: str, data: bytes) -> None:
    path = f"/{SERVICE}/{method}"
    if method == "Join":
        await channel.unary_unary(path)(data)
    elif method == "Talk":
        await channel.stream_unary(path)(iter([data]))
    else:
        call = channel.stream_stream(path)(iter([data]))
        while await call.read() is not grpc.aio.EOF:
            pass


async def test_garbage_in_the_middle_of_a_conversation_ends_it_and_keeps_what_came_before(silent):
    async with started() as (transport, handler, address):
        async with grpc.aio.insecure_channel(address) as channel:
            good = wire.encode_envelope(message())
            with pytest.raises(grpc.aio.AioRpcError):
                await channel.stream_unary(f"/{SERVICE}/Talk")(iter([good, b"\xff", good]))
        assert handler.messages == [message()]
        assert transport.refused_bytes == 1


async def test_garbage_in_the_middle_of_a_stream_ends_that_stream(silent):
    async with started() as (transport, _, address):
        async with grpc.aio.insecure_channel(address) as channel:
            opening = wire.encode_chunk(wire.Chunk(opening=OPENING))
            call = channel.stream_stream(f"/{SERVICE}/Move")(iter([opening, b"\x12\x00"]))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert transport.refused_bytes == 1


async def test_who_is_asked_ignores_what_comes_with_the_question(silent):
    async with started() as (_, _, address), grpc.aio.insecure_channel(address) as channel:
        answer = await channel.unary_unary(f"/{SERVICE}/Identify")(b"\xff\xff")
        assert wire.decode_hello(answer) == hello()


async def test_a_method_that_does_not_exist_is_unimplemented(silent):
    async with started() as (_, _, address), grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(f"/{SERVICE}/Nonsense")(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


# --- sizes ----------------------------------------------------------------------------------------


async def test_a_chunk_above_the_limit_fails_its_stream_and_nothing_else(silent):
    async with started() as (transport, handler, address):
        stream = await transport.open(address, OPENING)
        with pytest.raises(TransportError):
            await _send_and_receive(stream, bytes(wire.MAX_CHUNK_BYTES + 2000))
        transport.send(address, message())
        await until(lambda: handler.messages == [message()])


async def _send_and_receive(stream, payload: bytes) -> None:
    await stream.send(memoryview(payload))
    await stream.receive()


# --- calling what is no peer ----------------------------------------------------------------------


@contextmanager
def tcp_server_that_says_nothing():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


@contextmanager
def http_server():
    class Quiet(BaseHTTPRequestHandler):
        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Quiet) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def closed_port():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    yield f"127.0.0.1:{port}"


@asynccontextmanager
async def grpc_server(behaviour=None):
    """A gRPC server without our service, or with `behaviour` for every method of it."""
    server = grpc.aio.server()
    if behaviour:
        methods = {
            "Join": grpc.unary_unary_rpc_method_handler(behaviour),
            "Identify": grpc.unary_unary_rpc_method_handler(behaviour),
            "Talk": grpc.stream_unary_rpc_method_handler(behaviour),
        }
        handlers = grpc.method_handlers_generic_handler(SERVICE, methods)
        server.add_generic_rpc_handlers((handlers,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield Address(f"127.0.0.1:{port}")
    finally:
        await server.stop(None)


@pytest.mark.parametrize(
    ("no_peer", "says"),
    [
        (closed_port, "no connection to {} while joining"),
        (tcp_server_that_says_nothing, "{}.* while joining"),
        (http_server, "no connection to {} while joining"),
    ],
)
async def test_joining_what_is_no_peer_ends_in_time_and_names_it(silent, no_peer, says):
    async with started() as (transport, _, _):
        with no_peer() as address:
            before = asyncio.get_running_loop().time()
            with pytest.raises(TransportError, match=says.format(address)) as caught:
                await transport.join(Address(address), hello(), 0.5)
            assert asyncio.get_running_loop().time() - before < 2.0
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("details", "says"),
    [
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.7:4000: "
            "Failed to connect to remote host: connect: Connection refused (111)",
            "no connection to 10.0.0.7:4000 while telling: nothing listens there",
        ),
        (
            "recvmsg:Connection reset by peer",
            "no connection to 10.0.0.7:4000 while telling: it broke off",
        ),
        (
            "DNS resolution failed for host:4000: C-ares status is not ARES_SUCCESS",
            "no connection to 10.0.0.7:4000 while telling: its name stands for no address",
        ),
    ],
)
def test_why_there_is_no_connection_is_said_in_our_words(details, says):
    nothing, code = grpc.aio.Metadata(), grpc.StatusCode.UNAVAILABLE
    error = grpc.aio.AioRpcError(code, nothing, nothing, details)
    assert str(translate(error, Address("10.0.0.7:4000"), "telling")) == says


async def test_joining_another_grpc_server_says_that_it_is_no_peer():
    async with started() as (transport, _, _), grpc_server() as address:
        with pytest.raises(TransportError, match=f"{address} answers, but not as a p2ptrain peer"):
            await transport.join(address, hello(), 5.0)


async def test_an_answer_that_does_not_decode_is_an_error_of_ours():
    async def answer_rubbish(request, context):
        return b"\xff\xff"

    async with started() as (transport, _, _), grpc_server(answer_rubbish) as address:
        with pytest.raises(CodecError):
            await transport.join(address, hello(), 5.0)
        with pytest.raises(CodecError):
            await transport.identify(address, 5.0)


async def test_a_server_that_ends_every_conversation_at_once_is_not_called_in_a_storm():
    calls = 0

    async def end_at_once(request, context):
        nonlocal calls
        calls += 1
        return b""

    async with started() as (transport, handler, _), grpc_server(end_at_once) as address:
        transport.send(address, message())
        await until(lambda: bool(handler.broken))
        await asyncio.sleep(3 * grpc_link.RETRY_S)
        assert calls <= 2
        # It answers one call where a conversation is due: gRPC may call that an internal error.
        assert "ended the conversation" in handler.broken[0] or "internal" in handler.broken[0]


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", list(grpc.StatusCode), ids=lambda code: code.name)
def test_every_status_code_becomes_one_sentence_that_names_the_address(code):
    details = "several\nlines of\n details"
    metadata = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(code, metadata, metadata, details)
    ours = translate(error, Address("h:1"), "joining")
    assert "\n" not in str(ours)
    if isinstance(ours, RefusedError):
        assert str(ours) == "several lines of details"
    else:
        assert isinstance(ours, TransportError)
        assert "h:1" in str(ours)


# --- keepalive ------------------------------------------------------------------------------------


def test_servers_expect_at_least_twice_the_pings_that_clients_send():
    for period_s in (0.001, 0.5, 10.0, 3600.0):
        options = dict(channel_arguments(GrpcConfig(keepalive_s=period_s)))
        allowed = options["grpc.http2.min_recv_ping_interval_without_data_ms"]
        assert 2 * allowed <= max(2, options["grpc.keepalive_time_ms"])
        assert options["grpc.keepalive_permit_without_calls"] == 1
        assert options["grpc.http2.max_pings_without_data"] == 0


@pytest.mark.parametrize("carries_chunks", [False, True])
def test_no_probe_of_the_bandwidth_closes_a_connection_before_its_chunks_have_moved(carries_chunks):
    options = dict(channel_arguments(GrpcConfig(), carries_chunks=carries_chunks))
    assert options["grpc.http2.ping_timeout_ms"] == CHUNKS_KEEPALIVE_MS


async def test_an_idle_connection_with_eager_keepalive_is_not_closed_for_too_many_pings(silent):
    eager = GrpcConfig(keepalive_s=0.05, keepalive_timeout_s=1.0)
    async with started(eager) as (a, at_a, _), started(eager) as (_, at_b, address):
        a.send(address, message(1))
        stream = await a.open(address, OPENING)
        await asyncio.sleep(3.0)
        a.send(address, message(2))
        await stream.send(memoryview(b"still here"))
        assert bytes(await stream.receive() or b"") == b"still here"
        await stream.finish()
        assert await stream.receive() is None
        await until(lambda: at_b.messages == [message(1), message(2)])
        assert at_a.broken == []


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["keepalive_s", "keepalive_timeout_s"])
def test_a_keepalive_that_cannot_work_is_refused(name, value):
    with pytest.raises(ConfigError, match=f"network {name} = {value} must be above 0"):
        GrpcConfig(**{name: value})


# --- closing --------------------------------------------------------------------------------------


async def test_closing_twice_and_closing_what_never_started_is_harmless():
    await GrpcTransport("127.0.0.1:0").close(0.1)
    transport = GrpcTransport("127.0.0.1:0")
    await transport.start(Handler())
    await transport.close(0.1)
    await transport.close(0.1)


async def test_after_closing_calls_and_streams_fail_in_words():
    async with started() as (_, _, address):
        transport = GrpcTransport("127.0.0.1:0")
        await transport.start(Handler())
        await transport.close(0.1)
        for call in (
            transport.join(address, hello(), 1.0),
            transport.identify(address, 1.0),
            transport.open(address, OPENING),
        ):
            with pytest.raises(TransportError, match="this peer has closed its own"):
                await call


async def test_forgetting_an_address_ends_its_streams_with_an_error_not_a_cancellation():
    async with started() as (transport, _, address):
        stream = await transport.open(address, OPENING)
        receiving = asyncio.create_task(stream.receive())
        await asyncio.sleep(0.05)
        transport.forget(address)
        with pytest.raises(TransportError, match="the connection was closed here"):
            await receiving


async def test_messages_wait_in_a_bounded_queue(silent):
    async with started() as (transport, _, _):
        with tcp_server_that_says_nothing() as address:
            for number in range(10 * grpc_link.QUEUE):
                transport.send(Address(address), message(number))
            assert len(transport._links[address]._queue) == grpc_link.QUEUE


async def test_messages_and_chunks_have_connections_of_their_own():
    """On one connection a message waits behind chunks that the kernel has taken: for seconds."""
    relayed: list[asyncio.Task[None]] = []

    async def carry(reader, writer):
        while data := await reader.read(1 << 16):
            writer.write(data)

    async with started() as (_, handler, address):

        async def relay(reader, writer):
            relayed.append(asyncio.current_task())
            host, _, port = address.rpartition(":")
            there, out = await asyncio.open_connection(host, int(port))
            try:
                await asyncio.gather(carry(reader, out), carry(there, writer))
            finally:
                writer.transport.abort()
                out.transport.abort()

        server = await asyncio.start_server(relay, "127.0.0.1", 0)
        near = Address(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        async with started(GrpcConfig(data="grpc")) as (other, _, _):
            other.send(near, message())
            await until(lambda: handler.messages)
            assert len(relayed) == 1
            stream = await other.open(near, OPENING)
            await stream.send(memoryview(b"abc"), last=True)
            assert await stream.receive() == b"abc"
            other.send(near, message(2))
            await until(lambda: len(handler.messages) == 2)
            assert len(relayed) == 2
        server.close()
        for task in relayed:
            task.cancel()
        await asyncio.gather(*relayed, return_exceptions=True)


@pytest.mark.parametrize("size", [3, 200_000])
async def test_a_stream_is_read_and_written_before_its_connection_is_there(size: int):
    """Two writes at a time, the opening's and the first chunk's, broke the call."""
    async with started() as (_, _, address), started(GrpcConfig(data="grpc")) as (other, _, _):
        stream = await other.open(address, OPENING)
        heard = asyncio.create_task(stream.receive())
        for _ in range(3):
            await asyncio.sleep(0)  # it has nothing to read, and says the opening
        await stream.send(memoryview(bytes(size)), last=True)
        assert await heard == bytes(size)


# --- budgets --------------------------------------------------------------------------------------


@contextmanager
def hangs_up_at_once():
    """A TCP server that hangs up on all that connect; yields its address, and notes them."""
    connected: list[str] = []
    listening = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            try:
                accepted, _ = listening.accept()
            except OSError:
                return
            connected.append(str(accepted))
            accepted.close()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield Address(f"127.0.0.1:{listening.getsockname()[1]}"), connected
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join()


async def test_an_address_that_does_not_answer_is_not_dialled_for_ever():
    with hangs_up_at_once() as (address, connected):
        async with started() as (transport, handler, _):
            transport.send(address, message())
            await until(lambda: bool(handler.broken))
            with pytest.raises(TransportError):
                await transport.identify(address, 1.0)
            transport.forget(address)
            dialled = len(connected)
            await asyncio.sleep(2.5)  # gRPC by itself would dial again and again
            assert len(connected) == dialled


async def test_messages_to_an_address_that_is_gone_dial_more_and_more_seldom():
    with hangs_up_at_once() as (address, connected):
        async with started() as (transport, _, _):
            transport._redials[address] = Redial(
                since=asyncio.get_running_loop().time() - 1000.0, again_at=0.0
            )
            for _ in range(100):
                transport.send(address, message())
                await asyncio.sleep(0.01)
            assert len(connected) == 1
            transport.forget(address)
            transport.send(address, message())
            await asyncio.sleep(0.2)
            assert len(connected) == 1, "that a dead peer was forgotten is no sign of life"
            transport.expect(address)
            transport.send(address, message())
            await until(lambda: len(connected) == 2)


async def test_made_up_addresses_are_dialled_at_a_bounded_rate():
    async with started() as (transport, _, _):
        for number in range(2000):
            transport.send(Address(f"127.0.0.1:{1 + number}"), message())
        talking = [link for link in transport._links.values() if link._task]
        assert len(talking) <= 1.5 * grpc_transport.DIALS.burst


async def test_one_that_says_much_is_read_later_and_the_others_at_once(monkeypatch):
    monkeypatch.setattr(grpc_transport, "MESSAGES", Rate(20.0, 40.0))
    async with (
        started() as (_, handler, address),
        started() as (loud, _, _),
        started() as (b, _, _),
    ):
        for number in range(1, 200):
            loud.send(address, message(number))
        await until(lambda: len(handler.messages) >= 20)
        b.send(address, Envelope(PeerId("b"), "swarm", Arrive(1)))
        await until(lambda: any(one.source == "b" for one in handler.messages))
        assert len(handler.messages) < 100


async def test_a_caller_that_sends_garbage_pays_for_it(monkeypatch):
    monkeypatch.setattr(grpc_transport, "CALLS", Rate(20.0, 15.0))
    async with started() as (transport, _, address), grpc.aio.insecure_channel(address) as channel:
        began = asyncio.get_running_loop().time()
        for _ in range(2):
            with pytest.raises(grpc.RpcError):
                await channel.unary_unary(f"/{SERVICE}/Join")(b"\xff\xff", timeout=5.0)
        assert asyncio.get_running_loop().time() - began > 0.3
        assert transport.refused_bytes == 2
