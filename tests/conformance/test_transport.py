"""One body of tests, two transports: what the port promises holds on both, or neither is believed.

Over gRPC it takes real time and real sockets; over the simulated network the same waits are free.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from p2ptrain.compute.codec import load_codec
from p2ptrain.core.messages import Arrive, Member
from p2ptrain.errors import RefusedError, TransportError
from p2ptrain.ids import Address, PeerId, Ticket
from p2ptrain.net.grpc_config import GrpcConfig
from p2ptrain.net.grpc_transport import GrpcTransport
from p2ptrain.net.transport import ChunkStream, Transport
from p2ptrain.net.wire import (
    MAX_CHUNK_BYTES,
    AverageOpening,
    Envelope,
    Hello,
    JoinReply,
    Opening,
    StateOpening,
)
from p2ptrain.runtime.exchange import Exchange
from p2ptrain.runtime.mix import Bucket
from p2ptrain.runtime.streams import GroupBroken
from p2ptrain.sim.network import SimNetwork
from p2ptrain.vectors import Buffers, Vector
from tests.helpers.rounds import Gathering
from tests.helpers.tls import make_swarm

OPENING = StateOpening("swarm", PeerId("caller"), 7)
NOBODY = {"sim": Address("sim:9999")}
LARGE, SMALL = 16 << 20, 1 << 20
"""Numbers of vectors: one that does not fit in between, and one that does not take long."""

SOON_S = 0.2
"""Long enough for a message to cross; nothing that is expected waits for it."""

Serve = Callable[[Opening, ChunkStream], Awaitable[None]]


class Recorder:
    """A handler that notes what it is told, and serves streams as its test says."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.messages: list[Envelope] = []
        self.broken: list[tuple[Address, str]] = []
        self.joined: list[Hello] = []
        self.openings: list[Opening] = []
        self.cancelled = asyncio.Event()
        self.serve: Serve | None = None
        self.address = Address("")

    def hello(self) -> Hello:
        me = Member(peer=PeerId(self.name), address=self.address, incarnation=1)
        return Hello((1, 0), "ad_psgd", "model", 10, me)

    def handle_message(self, envelope: Envelope) -> None:
        self.messages.append(envelope)

    def handle_broken(self, address: Address, why: str) -> None:
        self.broken.append((address, why))

    async def handle_join(self, hello: Hello) -> JoinReply:
        self.joined.append(hello)
        return JoinReply("", (self.hello().me,))

    def handle_identify(self) -> Hello:
        return self.hello()

    async def handle_stream(self, opening: Opening, stream: ChunkStream) -> None:
        assert self.serve
        self.openings.append(opening)
        try:
            await self.serve(opening, stream)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


class Net:
    """Makes transports of one kind, and closes them."""

    def __init__(self, kind: str, config: GrpcConfig) -> None:
        self.kind = kind
        self._config = config
        self.nobody = NOBODY.get(kind, Address("127.0.0.1:1"))
        self._network = SimNetwork(seed=0)
        self._open: list[Transport] = []
        self._behind: list[Address] = []
        self._ways: list[TcpWay] = []
        self._callable: list[Address] = []  # where those that only dial out register

    async def start(
        self, name: str, serve: Serve | None = None, behind_a_way: bool = False
    ) -> tuple[Transport, Recorder]:
        """A transport and its handler, which others may reach across a way that can stall."""
        handler = Recorder(name)
        handler.serve = serve
        transport = await self._made(name)
        handler.address = await transport.start(handler)
        self._open.append(transport)
        if self._is_carried():
            await self._introduce(transport, handler.address, behind_a_way)
        elif behind_a_way and self.kind == "sim":
            self._behind.append(handler.address)
        elif behind_a_way:
            handler.address = await self._lead_across_a_way(handler.address)
            if sockets := transport._sockets:  # another machine, then: nothing but TCP reaches it
                port = await self._lead_across_a_way(f"127.0.0.1:{sockets.paths.port}")
                number = int(port.rpartition(":")[2])
                sockets.paths = replace(sockets.paths, port=number, machine="")
        return transport, handler

    def _is_carried(self) -> bool:
        return self.kind in ("reversed", "relayed")

    async def _made(self, name: str) -> Transport:
        """One of this kind: reversed, all but the first only dial out; relayed, all do."""
        if self.kind == "sim":
            return self._network.transport()
        config = self._config
        if self.kind == "relayed" and not self._callable:
            relay = GrpcTransport("127.0.0.1:0", config=replace(config, relay_mbit=1e5))
            self._open.append(relay)
            self._callable.append(await relay.start(Recorder("relay")))
        if self._is_carried():
            config = replace(config, dial_out=bool(self._callable))
        return GrpcTransport("127.0.0.1:0", config=config, name=name)

    async def _introduce(
        self, transport: GrpcTransport, address: Address, behind_a_way: bool
    ) -> None:
        """Let those that only dial out know of the one that can be called, as membership does."""
        if not transport._config.dial_out:
            self._callable.append(address)
        for known in self._callable:
            there = await self._lead_across_a_way(known) if behind_a_way else known
            transport.expect(there)

    async def _lead_across_a_way(self, target: str) -> Address:
        self._ways.append(TcpWay(Address(target)))
        return await self._ways[-1].start()

    def stall(self) -> None:
        """Nothing passes the ways any more, and nobody is told."""
        if self._behind:
            self._network.partition(self._behind)
        for way in self._ways:
            way.is_open.clear()

    def go_on(self) -> None:
        """Everything passes again."""
        if self._behind:
            self._network.heal()
        for way in self._ways:
            way.is_open.set()

    async def die(self, transport: Transport, handler: Recorder) -> None:
        """The nearest thing to kill -9 that leaves this process alive."""
        if self.kind == "sim":
            self._network.crash(handler.address)
        else:
            await transport._server.stop(grace=None)
            if transport._sockets:
                await transport._sockets.close()

    async def close(self) -> None:
        for transport in self._open:
            await transport.close(0.2)
        for way in self._ways:
            await way.close()


class TcpWay:
    """What lies between two real peers: passes bytes on, unless it stands still."""

    def __init__(self, target: Address) -> None:
        self.is_open = asyncio.Event()
        self.is_open.set()
        self._target = target
        self._pumps: list[asyncio.Task[None]] = []

    async def start(self) -> Address:
        self._server = await asyncio.start_server(self._pass, "127.0.0.1", 0)
        return Address(f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}")

    async def close(self) -> None:
        self._server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._target.rpartition(":")
        there = await asyncio.open_connection(host, int(port))
        for source, sink in ((reader, there[1]), (there[0], writer)):
            self._pumps.append(asyncio.create_task(self._pump(source, sink)))

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(1 << 16):
                await self.is_open.wait()
                sink.write(data)
                await sink.drain()
        finally:
            sink.close()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that other tasks bring about."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what is waited for does not know us
            await asyncio.sleep(0.005)


MAX_STRING = 5 << 20
"""More than travels in one message."""


class Averager:
    """A peer that is in several averages at once, each of a pair."""

    def __init__(self, name: str) -> None:
        self.name = PeerId(name)
        self.exchanges: dict[int, Exchange] = {}
        self.gatherings: dict[int, Gathering] = {}
        self.may_read = asyncio.Event()
        self.may_read.set()

    async def start(self, net: Net) -> None:
        self._transport, handler = await net.start(self.name, self._serve)
        self.address = handler.address

    def average(
        self, number: int, other: "Averager", contributed_V: np.ndarray, content: bytes = b""
    ) -> asyncio.Task[Vector]:
        """Start to average with `other`; both call it."""
        vector_V = self._transport.vector(len(contributed_V))
        vector_V[:] = contributed_V

        async def open_stream(peer: PeerId, opening: Opening) -> ChunkStream:
            stream = await self._transport.open(other.address, opening)
            return Stalled(stream, self.may_read)

        both = min(self.name, other.name), max(self.name, other.name)
        gathering = self.gatherings[number] = Gathering(self.name, both, content, MAX_STRING)
        self.exchanges[number] = Exchange(
            self.name,
            Ticket(PeerId("a"), 1, number),
            tuple(sorted((self.name, other.name))),
            [
                Bucket(
                    name="gradients",
                    vector_V=vector_V,
                    codec=load_codec("fp32"),
                    chunk_size=1 << 18,
                    divisor=2,
                ),
                gathering.item,
            ],
            buffers=Buffers(self._transport.vector),
            slots=Buffers(lambda size: np.empty(size, np.float32)),
            executor=inline,
            swarm="swarm",
            open_stream=open_stream,
            clock=asyncio.get_running_loop().time,
        )
        return asyncio.create_task(self._run(self.exchanges[number], vector_V))

    async def _run(self, exchange: Exchange, vector_V: Vector) -> Vector:
        await exchange.run()
        return vector_V

    async def _serve(self, opening: Opening, stream: ChunkStream) -> None:
        assert isinstance(opening, AverageOpening)
        await self.exchanges[opening.ticket.number].accept(opening, Stalled(stream, self.may_read))


class Stalled:
    """A stream whose owner reads nothing before it may."""

    def __init__(self, stream: ChunkStream, may_read: asyncio.Event) -> None:
        self._stream, self._may_read = stream, may_read

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    async def receive(self, into: memoryview | None = None) -> memoryview | None:
        await self._may_read.wait()
        return await self._stream.receive(into)


async def inline(function: Callable[[], object]) -> object:
    return function()


def message(number: int) -> Envelope:
    return Envelope(PeerId("a"), "swarm", Arrive(number))


async def echo(opening: Opening, stream: ChunkStream) -> None:
    while (payload := await stream.receive()) is not None:
        await stream.send(payload)


async def drain(stream: ChunkStream) -> list[bytes]:
    slices = []
    while (payload := await stream.receive()) is not None:
        slices.append(bytes(payload))
    return slices


async def read_elsewhere(how_it_ended: list[object], stream: ChunkStream) -> None:
    """Read in a task of its own, as an exchange does; `how_it_ended` gets an error or None."""
    try:
        how_it_ended.append((await drain(stream))[-1:] and None)
    except TransportError as error:
        how_it_ended.append(error)


class TransportContract:
    """What every transport must do; `kind` is set below."""

    kind = ""

    @pytest.fixture
    def config(self) -> GrpcConfig:
        way = {"sim": "auto", "reversed": "grpc", "relayed": "grpc"}.get(self.kind, self.kind)
        return GrpcConfig(data=way)

    @pytest.fixture
    async def net(self, config):
        net = Net(self.kind, config)
        yield net
        await net.close()

    # --- messages ---------------------------------------------------------------------------------

    async def test_messages_arrive(self, net):
        a, _ = await net.start("a")
        _, at_b = await net.start("b")
        for number in range(100):
            a.send(at_b.address, message(number))
        await until(lambda: len(at_b.messages) == 100)
        numbers = sorted(envelope.message.version for envelope in at_b.messages)
        assert numbers == list(range(100))

    async def test_a_peer_can_send_to_itself(self, net):
        a, at_a = await net.start("a")
        a.send(at_a.address, message(1))
        await until(lambda: at_a.messages == [message(1)])

    async def test_sending_to_nobody_tells_the_handler_and_never_raises(self, net):
        a, at_a = await net.start("a")
        for number in range(5):
            a.send(net.nobody, message(number))
        await until(lambda: bool(at_a.broken))
        address, why = at_a.broken[0]
        assert address == net.nobody
        assert net.nobody in why
        assert "\n" not in why

    async def test_a_peer_that_dies_is_noticed_by_the_next_message(self, net):
        a, at_a = await net.start("a")
        b, at_b = await net.start("b")
        a.send(at_b.address, message(1))
        await until(lambda: bool(at_b.messages))
        await net.die(b, at_b)
        a.send(at_b.address, message(2))
        await until(lambda: bool(at_a.broken))
        assert at_b.messages == [message(1)]

    async def test_what_was_sent_before_closing_arrives(self, net):
        a, _ = await net.start("a")
        _, at_b = await net.start("b")
        a.send(at_b.address, message(1))
        await a.close(1.0)
        await until(lambda: at_b.messages == [message(1)])

    async def test_after_closing_nothing_is_sent_any_more(self, net):
        a, at_a = await net.start("a")
        _, at_b = await net.start("b")
        await a.close(0.2)
        a.send(at_b.address, message(1))
        await asyncio.sleep(SOON_S)
        assert at_b.messages == []
        assert at_a.broken == []

    async def test_a_forgotten_address_can_be_used_again(self, net):
        a, _ = await net.start("a")
        _, at_b = await net.start("b")
        a.forget(at_b.address)
        a.send(at_b.address, message(1))
        await until(lambda: at_b.messages == [message(1)])
        a.forget(at_b.address)
        a.send(at_b.address, message(2))
        await until(lambda: at_b.messages == [message(1), message(2)])

    # --- calls ------------------------------------------------------------------------------------

    async def test_a_host_hears_the_hello_and_its_join_reply_comes_back(self, net):
        a, at_a = await net.start("a")
        _, at_b = await net.start("b")
        reply = await a.join(at_b.address, at_a.hello(), 5.0)
        assert reply == JoinReply("", (at_b.hello().me,))
        assert at_b.joined == [at_a.hello()]

    async def test_who_is_asked_says_who_it_is(self, net):
        a, _ = await net.start("a")
        _, at_b = await net.start("b")
        assert await a.identify(at_b.address, 5.0) == at_b.hello()

    async def test_calling_nobody_names_the_address_and_the_phase(self, net):
        a, at_a = await net.start("a")
        with pytest.raises(TransportError, match=f"{net.nobody} while joining"):
            await a.join(net.nobody, at_a.hello(), 2.0)
        with pytest.raises(TransportError, match=f"{net.nobody} while asking who it is"):
            await a.identify(net.nobody, 2.0)

    # --- streams ----------------------------------------------------------------------------------

    async def test_a_stream_is_ordered_both_ways_and_ends(self, net):
        a, _ = await net.start("a")
        _, at_b = await net.start("b", echo)
        stream = await a.open(at_b.address, OPENING)
        sent = [bytes([number]) * (1 + 37 * number) for number in range(50)]

        async def send_all() -> None:
            for payload in sent:
                await stream.send(memoryview(payload))
            await stream.finish()

        sending = asyncio.create_task(send_all())
        assert await drain(stream) == sent
        await sending
        assert at_b.openings == [OPENING]

    async def test_the_largest_chunk_passes_both_ways(self, net):
        a, _ = await net.start("a")
        _, at_b = await net.start("b", echo)
        stream = await a.open(at_b.address, OPENING)
        payload = bytes(range(256)) * (MAX_CHUNK_BYTES // 256)
        await stream.send(memoryview(payload))
        await stream.finish()
        assert await drain(stream) == [payload]

    async def test_a_payload_may_be_reused_once_it_was_sent(self, net):
        a, _ = await net.start("a")
        _, at_b = await net.start("b", echo)
        stream = await a.open(at_b.address, OPENING)
        payload = bytearray(b"first")
        await stream.send(memoryview(payload))
        payload[:] = b"later"
        await stream.finish()
        assert await drain(stream) == [b"first"]

    async def test_a_stream_that_is_begun_arrives_before_anything_is_sent_on_it(self, net):
        a, _ = await net.start("a")
        _, at_b = await net.start("b", echo)
        stream = await a.open(at_b.address, OPENING)
        await stream.begin()
        await until(lambda: at_b.openings == [OPENING])
        await stream.begin()
        await stream.send(memoryview(b"later"), last=True)
        assert await drain(stream) == [b"later"]
        assert at_b.openings == [OPENING]

    async def test_an_empty_chunk_is_not_the_end(self, net):
        a, _ = await net.start("a")
        _, at_b = await net.start("b", echo)
        stream = await a.open(at_b.address, OPENING)
        await stream.send(memoryview(b""))
        await stream.finish()
        assert await drain(stream) == [b""]

    async def test_the_callee_ends_the_stream_by_returning(self, net):
        async def serve(opening: Opening, stream: ChunkStream) -> None:
            await stream.send(memoryview(b"all there is"))

        a, _ = await net.start("a")
        _, at_b = await net.start("b", serve)
        stream = await a.open(at_b.address, OPENING)
        assert await drain(stream) == [b"all there is"]

    async def test_a_refusal_arrives_in_words(self, net):
        async def serve(opening: Opening, stream: ChunkStream) -> None:
            raise RefusedError("b is not in a#7")

        a, _ = await net.start("a")
        _, at_b = await net.start("b", serve)
        stream = await a.open(at_b.address, OPENING)
        with pytest.raises(RefusedError, match=r"^b is not in a#7$"):
            await stream.receive()

    async def test_an_abort_by_the_callee_is_seen_by_the_caller_in_words(self, net):
        async def serve(opening: Opening, stream: ChunkStream) -> None:
            await stream.receive()
            stream.abort("numbers that are not finite")
            stream.abort("said twice")
            with pytest.raises(TransportError, match="not finite"):
                await stream.send(memoryview(b"more"))
            with pytest.raises(TransportError, match="not finite"):
                await stream.receive()

        a, _ = await net.start("a")
        _, at_b = await net.start("b", serve)
        stream = await a.open(at_b.address, OPENING)
        await stream.send(memoryview(b"x"))
        with pytest.raises(TransportError, match="numbers that are not finite"):
            await drain(stream)

    async def test_an_abort_by_the_caller_cancels_the_callee(self, net):
        async def serve(opening: Opening, stream: ChunkStream) -> None:
            await stream.receive()
            await asyncio.Event().wait()

        a, _ = await net.start("a")
        _, at_b = await net.start("b", serve)
        stream = await a.open(at_b.address, OPENING)
        await stream.send(memoryview(b"x"))
        await asyncio.sleep(SOON_S)
        stream.abort("the group is over")
        stream.abort("said twice")
        async with asyncio.timeout(5):
            await at_b.cancelled.wait()

    async def test_after_its_own_abort_the_caller_is_told_why(self, net):
        a, _ = await net.start("a")
        _, at_b = await net.start("b", echo)
        stream = await a.open(at_b.address, OPENING)
        receiving = asyncio.create_task(stream.receive())
        await asyncio.sleep(SOON_S)
        stream.abort("the group is over")
        with pytest.raises(TransportError, match="the group is over"):
            await receiving
        for use in (stream.receive(), stream.send(memoryview(b"x")), stream.finish()):
            with pytest.raises(TransportError, match="the group is over"):
                await use

    @pytest.mark.parametrize("sent", [1, 3])
    async def test_a_caller_that_aborts_never_looks_like_one_that_said_all(self, net, sent):
        how_it_ended: list[object] = []
        tasks = []

        async def serve(opening: Opening, stream: ChunkStream) -> None:
            tasks.append(asyncio.create_task(read_elsewhere(how_it_ended, stream)))
            await asyncio.Event().wait()

        a, _ = await net.start("a")
        _, at_b = await net.start("b", serve)
        stream = await a.open(at_b.address, OPENING)
        for _ in range(sent):
            await stream.send(memoryview(b"x"))
        await until(lambda: bool(tasks))
        await asyncio.sleep(SOON_S)
        stream.abort("the group is over")
        await until(lambda: bool(how_it_ended))
        assert isinstance(how_it_ended[0], TransportError)

    async def test_a_caller_that_dies_never_looks_like_one_that_said_all(self, net):
        how_it_ended: list[object] = []
        tasks = []

        async def serve(opening: Opening, stream: ChunkStream) -> None:
            tasks.append(asyncio.create_task(read_elsewhere(how_it_ended, stream)))
            await asyncio.Event().wait()

        a, at_a = await net.start("a")
        _, at_b = await net.start("b", serve)
        stream = await a.open(at_b.address, OPENING)
        await stream.send(memoryview(b"x"))
        await until(lambda: bool(tasks))
        await (net.die(a, at_a) if net.kind == "sim" else a.close(0.1))
        await until(lambda: bool(how_it_ended))
        assert isinstance(how_it_ended[0], TransportError)

    async def test_a_callee_that_dies_in_the_middle_fails_the_stream(self, net):
        async def serve(opening: Opening, stream: ChunkStream) -> None:
            await stream.send(memoryview(b"first"))
            await asyncio.Event().wait()

        a, _ = await net.start("a")
        b, at_b = await net.start("b", serve)
        stream = await a.open(at_b.address, OPENING)
        assert bytes(await stream.receive() or b"") == b"first"
        await net.die(b, at_b)
        with pytest.raises(TransportError):
            await stream.receive()
        with pytest.raises(TransportError):
            await stream.send(memoryview(b"x"))

    async def test_a_stream_to_nobody_fails_at_the_latest_when_it_is_used(self, net):
        a, _ = await net.start("a")

        async def open_and_use() -> None:
            stream = await a.open(net.nobody, OPENING)
            await stream.receive()

        with pytest.raises(TransportError):
            await open_and_use()

    async def test_a_receiver_that_does_not_read_makes_its_sender_wait_and_no_other(self, net):
        async def serve(opening: Opening, stream: ChunkStream) -> None:
            assert isinstance(opening, StateOpening)
            if opening.version is None:
                await asyncio.Event().wait()
            await echo(opening, stream)

        a, at_a = await net.start("a")
        _, at_b = await net.start("b", serve)
        megabyte = memoryview(bytes(1 << 20))
        stuck = await a.open(at_b.address, StateOpening("swarm", PeerId("a"), None))
        sent = 0

        async def flood() -> None:
            nonlocal sent
            with suppress(TransportError):
                while True:
                    await stuck.send(megabyte)
                    sent += 1

        flooding = asyncio.create_task(flood())
        before = -1
        while sent != before:  # until what fits in between is full
            before = sent
            await asyncio.sleep(0.5)
        assert not flooding.done()
        assert 0 < sent < 32, "chunks pile up in front of a receiver that does not read"
        other = await a.open(at_b.address, OPENING)
        for _ in range(8):
            await other.send(megabyte)
            payload = await other.receive()
            assert payload is not None
            assert payload.nbytes == 1 << 20
        await other.finish()
        assert await drain(other) == []
        a.send(at_b.address, message(1))
        await until(lambda: at_b.messages == [message(1)])
        assert not flooding.done()
        assert sent < 32, "what others send must not widen this stream's way without end"
        stuck.abort("enough")
        await flooding
        assert at_a.broken == []

    async def test_a_stalled_receiver_stalls_only_its_own_group(self, net):
        """Whole averages: b opens its stream and sends, and reads nothing before it may."""
        a, b, c = averagers = [Averager(name) for name in "abc"]
        for peer in averagers:
            await peer.start(net)
        b.may_read.clear()
        stalled = [a.average(1, b, np.full(LARGE, 1.0)), b.average(1, a, np.full(LARGE, 3.0))]
        number, sent_before = 1, -1
        while (sent_bytes := a.exchanges[1].sent_bytes) > sent_before:  # until all between is full
            number, sent_before = number + 1, sent_bytes
            ours, theirs = np.full(SMALL, 1.0), np.full(SMALL, -1.0)
            for mean_V in await asyncio.gather(
                a.average(number, c, ours), c.average(number, a, theirs)
            ):
                assert not mean_V.any()
        assert not any(average.done() for average in stalled)
        assert b.exchanges[1].received_bytes == 0
        if net.kind != "memory":  # nothing is copied there: b would read a's own vector
            assert 0 < sent_bytes < 3 * LARGE, "chunks pile up in front of b"  # of 4 * LARGE
        b.may_read.set()
        for mean_V in await asyncio.gather(*stalled):
            assert (mean_V == 2).all()

    async def test_strings_of_any_length_travel_beside_vectors_under_one_ticket(self, net):
        a, b = averagers = [Averager(name) for name in "ab"]
        for peer in averagers:
            await peer.start(net)
        for number, strings in enumerate([(b"", b"x"), (b"a" * MAX_STRING, b""), (b"1", b"23")]):
            means = await asyncio.gather(
                a.average(number, b, np.full(SMALL, 1.0), strings[0]),
                b.average(number, a, np.full(SMALL, 3.0), strings[1]),
            )
            assert all((mean_V == 2).all() for mean_V in means)
            for peer in averagers:
                assert peer.gatherings[number].gathered == strings
                assert peer.gatherings[number].echoes == strings[::-1]

    async def test_members_meet_while_they_still_make_their_first_strings(self, net):
        """Choosing from the gradients of a large model may take longer than streams are awaited."""
        a, b = averagers = [Averager(name) for name in "ab"]
        for peer in averagers:
            await peer.start(net)
        averages = [a.average(1, b, np.empty(0), b"1"), b.average(1, a, np.empty(0), b"2")]
        made = [peer.gatherings[1].hold() for peer in averagers]
        await until(lambda: a.exchanges[1].arrivals.keys() == {"b"})
        assert not any(average.done() for average in averages)
        for one in made:
            one.set()
        await asyncio.gather(*averages)
        assert a.gatherings[1].gathered == b.gatherings[1].gathered == (b"1", b"2")

    async def test_a_string_that_is_too_long_breaks_the_group(self, net):
        a, b = averagers = [Averager(name) for name in "ab"]
        for peer in averagers:
            await peer.start(net)
        runs = a.average(1, b, np.ones(9), b"x" * (MAX_STRING + 1)), b.average(1, a, np.ones(9))
        ends = await asyncio.gather(*runs, return_exceptions=True)
        assert all(isinstance(end, GroupBroken) for end in ends)
        assert str(ends[1]) == (
            f"a sends a string of {MAX_STRING + 1} bytes, at most {MAX_STRING} of indices"
        )

    async def test_many_streams_at_once_keep_apart(self, net):
        a, _ = await net.start("a")
        _, at_b = await net.start("b", echo)

        async def talk(number: int) -> list[bytes]:
            stream = await a.open(at_b.address, OPENING)
            for _ in range(3):
                await stream.send(memoryview(bytes([number]) * 1000))
            await stream.finish()
            return await drain(stream)

        answers = await asyncio.gather(*(talk(number) for number in range(20)))
        assert answers == [[bytes([number]) * 1000] * 3 for number in range(20)]

    async def test_peers_can_open_streams_to_each_other_at_the_same_time(self, net):
        a, at_a = await net.start("a", echo)
        b, at_b = await net.start("b", echo)

        async def talk(source: Transport, target: Address, word: bytes) -> list[bytes]:
            stream = await source.open(target, OPENING)
            for _ in range(50):
                await stream.send(memoryview(word))
                answer = await stream.receive()
                assert answer is not None
                assert bytes(answer) == word
            await stream.finish()
            return await drain(stream)

        ends = await asyncio.gather(
            *(talk(a, at_b.address, b"to b") for _ in range(3)),
            *(talk(b, at_a.address, b"to a") for _ in range(3)),
        )
        assert ends == [[]] * 6

    async def test_the_last_chunk_can_say_that_it_is_the_last(self, net):
        async def serve(opening: Opening, stream: ChunkStream) -> None:
            for payload in await drain(stream):
                await stream.send(memoryview(payload))
            await stream.send(memoryview(b"and that was all"), last=True)

        a, _ = await net.start("a")
        _, at_b = await net.start("b", serve)
        stream = await a.open(at_b.address, OPENING)
        await stream.send(memoryview(b"one"))
        await stream.send(memoryview(b"two"), last=True)
        await stream.finish()  # says nothing new
        assert await drain(stream) == [b"one", b"two", b"and that was all"]
        assert await stream.receive() is None

    async def test_a_callee_that_has_heard_enough_lets_the_caller_finish(self, net):
        async def serve(opening: Opening, stream: ChunkStream) -> None:
            await stream.receive()

        a, _ = await net.start("a")
        _, at_b = await net.start("b", serve)
        stream = await a.open(at_b.address, OPENING)
        for _ in range(100):
            await stream.send(memoryview(bytes(10_000)))
        await stream.finish()
        assert await drain(stream) == []

    async def test_a_caller_that_only_sends_is_stopped_by_a_refusal(self, net):
        """In words only if it listens: gRPC forgets them when a write meets the end of its call."""

        async def serve(opening: Opening, stream: ChunkStream) -> None:
            raise RefusedError("b is not in a#7")

        a, _ = await net.start("a")
        _, at_b = await net.start("b", serve)
        stream = await a.open(at_b.address, OPENING)

        async def send_on() -> None:
            async with asyncio.timeout(10):
                while True:
                    await stream.send(memoryview(bytes(10_000)))

        with pytest.raises((RefusedError, TransportError)):
            await send_on()

    async def test_what_is_refused_leaves_the_way_open_for_what_is_not(self, net):
        async def serve(opening: Opening, stream: ChunkStream) -> None:
            assert isinstance(opening, StateOpening)
            if opening.version == 0:
                raise RefusedError("not this one")
            await echo(opening, stream)

        a, at_a = await net.start("a")
        _, at_b = await net.start("b", serve)
        kept = await a.open(at_b.address, OPENING)
        await kept.send(memoryview(b"before"))
        assert bytes(await kept.receive() or b"") == b"before"
        for _ in range(3):
            refused = await a.open(at_b.address, StateOpening("swarm", PeerId("a"), 0))
            with pytest.raises(RefusedError, match="not this one"):
                await refused.receive()
        await kept.send(memoryview(b"after"), last=True)
        assert await drain(kept) == [b"after"]
        assert at_a.broken == []

    async def test_a_stream_across_a_way_that_stands_still_goes_on_where_it_was(self, net):
        a, _ = await net.start("a")
        _, at_b = await net.start("b", echo, behind_a_way=True)
        stream = await a.open(at_b.address, OPENING)
        heard: list[int] = []

        async def talk() -> None:
            for number in range(1000):
                await stream.send(memoryview(number.to_bytes(2, "big")))
                answer = await stream.receive()
                assert answer is not None
                heard.append(int.from_bytes(answer, "big"))

        talking = asyncio.create_task(talk())
        await until(lambda: len(heard) > 10)
        net.stall()
        await asyncio.sleep(SOON_S)
        before = len(heard)
        await asyncio.sleep(5 * SOON_S)
        assert len(heard) == before < 1000
        assert not talking.done()
        net.go_on()
        await talking
        assert heard == list(range(1000))


class TestSimTransport(TransportContract):
    kind = "sim"


@pytest.mark.sockets
class TestGrpcTransport(TransportContract):
    kind = "grpc"


@pytest.fixture(scope="module")
def swarm(tmp_path_factory) -> GrpcConfig:
    return make_swarm(tmp_path_factory.mktemp("tls") / "swarm")


@pytest.mark.sockets
class TestGrpcWithTls(TransportContract):
    kind = "grpc"

    @pytest.fixture
    def config(self, swarm) -> GrpcConfig:
        return replace(swarm, data="grpc")


@pytest.mark.sockets
class TestReversedGrpc(TransportContract):
    """The callee only dials out."""

    kind = "reversed"


@pytest.mark.sockets
class TestRelayedGrpc(TransportContract):
    """Both only dial out."""

    kind = "relayed"


@pytest.mark.sockets
class TestSocketsBesideGrpc(TransportContract):
    kind = "sockets"


@pytest.mark.sockets
class TestEncryptedSocketsBesideGrpc(TransportContract):
    kind = "sockets"

    @pytest.fixture
    def config(self, swarm) -> GrpcConfig:
        return replace(swarm, data="sockets")


@pytest.mark.sockets
class TestSharedMemoryBesideGrpc(TransportContract):
    kind = "memory"
