"""What a way costs: latency, bandwidth that streams share, and messages that overtake."""

import asyncio

import pytest

from p2ptrain.core.messages import Arrive, Member
from p2ptrain.errors import ConfigError, TransportError
from p2ptrain.ids import Address, PeerId, Seconds
from p2ptrain.net.transport import ChunkStream
from p2ptrain.net.wire import Envelope, Hello, JoinReply, Opening, StateOpening
from p2ptrain.sim.link import Link
from p2ptrain.sim.network import GIVEN_UP_S, RETRY_S, SimNetwork, SimTransport

OPENING = StateOpening("swarm", PeerId("caller"), 7)
KB = 1000


class Sink:
    """A handler that notes when what came, and reads all streams to their end."""

    def __init__(self) -> None:
        self.heard: list[tuple[Seconds, int]] = []
        self.broken: list[str] = []
        self.read_at: list[Seconds] = []
        self.ended_at: list[Seconds] = []

    def handle_message(self, envelope: Envelope) -> None:
        assert isinstance(envelope.message, Arrive)
        self.heard.append((now(), envelope.message.version))

    def handle_broken(self, address: Address, why: str) -> None:
        self.broken.append(why)

    async def handle_join(self, hello: Hello) -> JoinReply:
        return JoinReply("", ())

    def handle_identify(self) -> Hello:
        raise AssertionError("nobody asks")

    async def handle_stream(self, opening: Opening, stream: ChunkStream) -> None:
        while await stream.receive() is not None:
            self.read_at.append(now())
        self.ended_at.append(now())


class Net:
    """Peers a, b, c, ... in one network."""

    def __init__(self, link: Link) -> None:
        self.network = SimNetwork(0, link)
        self.sinks: dict[str, Sink] = {}
        self.transports: dict[str, SimTransport] = {}

    async def start(self, *names: str) -> None:
        for name in names:
            self.sinks[name] = Sink()
            self.transports[name] = self.network.transport(f"{name}:1")
            await self.transports[name].start(self.sinks[name])

    def say(self, source: str, target: str, number: int = 0) -> None:
        envelope = Envelope(PeerId(source), "swarm", Arrive(number))
        self.transports[source].send(Address(f"{target}:1"), envelope)

    async def pour(self, source: str, target: str, size: int, chunks: int = 10) -> Seconds:
        """Send `size` bytes on one stream; returns when the last of them was read."""
        stream = await self.transports[source].open(Address(f"{target}:1"), OPENING)
        for number in range(chunks):
            payload = memoryview(bytes(size // chunks))
            await stream.send(payload, last=number == chunks - 1)
        assert await stream.receive() is None
        return now()


async def net(link: Link, *names: str) -> Net:
    made = Net(link)
    await made.start(*(names or ("a", "b", "c")))
    return made


def now() -> Seconds:
    return asyncio.get_running_loop().time()


# --- bandwidth ------------------------------------------------------------------------------------


async def test_without_a_limit_bytes_cost_nothing_but_latency():
    n = await net(Link(latency_s=0.5))
    assert await n.pour("a", "b", 4000 * KB, chunks=2) == pytest.approx(1.0)


async def test_a_stream_takes_as_long_as_its_bytes_at_the_bandwidth():
    n = await net(Link(latency_s=0.0, bandwidth_bytes_s=1000 * KB))
    assert await n.pour("a", "b", 4000 * KB) == pytest.approx(4.0, rel=0.001)


async def test_two_streams_that_leave_one_peer_share_its_uplink_equally():
    n = await net(Link(latency_s=0.0, bandwidth_bytes_s=1000 * KB))
    ends = await asyncio.gather(
        n.pour("a", "b", 2000 * KB, chunks=50), n.pour("a", "c", 1000 * KB, chunks=25)
    )
    assert ends == pytest.approx([3.0, 2.0], rel=0.03)


async def test_a_short_stream_does_not_wait_for_a_long_one():
    n = await net(Link(latency_s=0.0, bandwidth_bytes_s=1000 * KB))
    long = asyncio.create_task(n.pour("a", "b", 5000 * KB, chunks=100))
    await asyncio.sleep(1.0)
    assert await n.pour("a", "c", 100 * KB, chunks=2) == pytest.approx(1.2, abs=0.1)
    assert await long == pytest.approx(5.1, rel=0.01)


async def test_a_chunk_that_stands_for_many_bytes_takes_turns_as_many_chunks_would():
    n = await net(Link(latency_s=0.0, bandwidth_bytes_s=1000 * KB))
    n.network.stands_for = 1000
    long = asyncio.create_task(n.pour("a", "b", 40 * KB, chunks=2))
    await asyncio.sleep(1.0)
    assert await n.pour("a", "c", 12 * KB, chunks=1) == pytest.approx(1.0 + 2 * 12, abs=1.0)
    assert await long == pytest.approx(52.0, rel=0.01)


async def test_streams_that_leave_different_peers_do_not_slow_each_other_down():
    n = await net(Link(latency_s=0.0, bandwidth_bytes_s=1000 * KB))
    ends = await asyncio.gather(n.pour("a", "c", 1000 * KB), n.pour("b", "c", 1000 * KB))
    assert ends == pytest.approx([1.0, 1.0], rel=0.01)


async def test_peers_of_one_machine_share_its_uplink_and_not_what_stays_inside():
    n = await net(Link(latency_s=0.0), "a", "b", "c")
    n.network.machine("m", uplink_bytes_s=1000 * KB, inner=Link(latency_s=0.1))
    for name in ("a", "b"):
        n.network.place(Address(f"{name}:1"), "m")
    out_a, out_b, inside, back = await asyncio.gather(
        n.pour("a", "c", 1000 * KB, chunks=20),
        n.pour("b", "c", 1000 * KB, chunks=20),
        n.pour("a", "b", 1000 * KB, chunks=2),
        n.pour("c", "a", 1000 * KB, chunks=2),
    )
    assert (out_a, out_b) == pytest.approx((2.0, 2.0), rel=0.05)
    assert inside == pytest.approx(0.2)
    assert back < 0.11


async def test_one_way_can_be_narrower_than_the_uplink_before_it():
    n = await net(Link(latency_s=0.0, bandwidth_bytes_s=1000 * KB))
    narrow = Link(latency_s=0.0, bandwidth_bytes_s=100 * KB)
    n.network.set_link(Address("a:1"), Address("b:1"), narrow)
    ends = await asyncio.gather(
        n.pour("a", "b", 100 * KB, chunks=20), n.pour("a", "c", 900 * KB, chunks=180)
    )
    assert ends == pytest.approx([1.0, 1.0], rel=0.05)
    n.network.set_link(Address("a:1"), Address("b:1"), None)
    before = now()
    assert await n.pour("a", "b", 100 * KB) - before == pytest.approx(0.1, rel=0.05)


async def test_a_throttled_uplink_is_slow_until_it_recovers():
    n = await net(Link(latency_s=0.0))
    n.network.throttle(Address("a:1"), 100 * KB)
    assert await n.pour("a", "b", 100 * KB) == pytest.approx(1.0, rel=0.01)
    n.network.throttle(Address("a:1"), None)
    assert await n.pour("a", "b", 100 * KB) == pytest.approx(1.0, rel=0.01)


async def test_messages_that_wait_at_a_throttled_uplink_leave_at_once_when_it_recovers():
    n = await net(Link(latency_s=0.0, bandwidth_bytes_s=100 * KB))
    n.network.throttle(Address("a:1"), 10)
    for number in range(100):
        n.say("a", "b", number)
    await asyncio.sleep(5.0)
    assert 0 < len(n.sinks["b"].heard) < 10
    n.network.throttle(Address("a:1"), None)
    await asyncio.sleep(5.0)
    assert [number for _, number in n.sinks["b"].heard] == list(range(100))
    assert await n.pour("a", "b", 100 * KB) == pytest.approx(11.0, abs=0.1), "streams, too"


async def test_a_message_takes_its_bytes_time_and_overtakes_streams():
    n = await net(Link(latency_s=0.0, bandwidth_bytes_s=100 * KB))
    pouring = asyncio.create_task(n.pour("a", "b", 100 * KB, chunks=2))
    await asyncio.sleep(0.1)
    for number in range(100):
        n.say("a", "b", number)
    ended = await pouring
    first, last = n.sinks["b"].heard[0][0], n.sinks["b"].heard[-1][0]
    assert first < 0.101, "it waited for a chunk of half a second"
    assert first < last < 0.13, "messages wait for each other"
    assert [number for _, number in n.sinks["b"].heard] == list(range(100))
    assert ended == pytest.approx(1.0 + last - 0.1, rel=0.01), "messages came for nothing"


async def test_a_window_that_is_full_makes_the_sender_wait_for_the_uplink():
    n = await net(Link(latency_s=0.0, bandwidth_bytes_s=100 * KB))
    stream = await n.transports["a"].open(Address("b:1"), OPENING)
    for _ in range(6):
        await stream.send(memoryview(bytes(10 * KB)))
    assert now() == pytest.approx(0.2, rel=0.01), "of six chunks four fit in between"


# --- ways that do not work ------------------------------------------------------------------------


async def test_a_partitioned_stream_stalls_and_goes_on_where_it_was():
    n = await net(Link(latency_s=0.01))
    pouring = asyncio.create_task(n.pour("a", "b", 1000 * KB, chunks=100))
    await asyncio.sleep(0.105)
    n.network.partition([Address("a:1")], [Address("b:1"), Address("c:1")])
    read = len(n.sinks["b"].read_at)
    assert await n.pour("b", "c", 10 * KB, chunks=1) < 0.2, "one part is whole"
    await asyncio.sleep(5.0)
    assert 0 < read == len(n.sinks["b"].read_at) < 100
    healed = now()
    n.network.heal()
    await pouring
    assert len(n.sinks["b"].read_at) == 100
    assert n.sinks["b"].read_at[read] == pytest.approx(healed + RETRY_S)


async def test_a_stream_over_which_nothing_passes_for_long_is_given_up_on_both_sides():
    n = await net(Link(latency_s=0.01))
    pouring = asyncio.create_task(n.pour("a", "b", 1000 * KB, chunks=100))
    await asyncio.sleep(0.1)
    n.network.cut(Address("a:1"), Address("b:1"))
    with pytest.raises(TransportError, match="nothing passed to or from b:1 for 15 s"):
        await pouring
    assert now() == pytest.approx(0.1 + GIVEN_UP_S, rel=0.01)
    n.network.heal()
    await asyncio.sleep(1.0)
    assert n.sinks["b"].ended_at == []


async def test_messages_across_a_partition_are_lost_and_nobody_is_told():
    n = await net(Link(latency_s=0.01))
    n.network.partition([Address("a:1")])
    n.say("a", "b")
    n.say("b", "c", 1)
    await asyncio.sleep(1.0)
    n.network.heal()
    await asyncio.sleep(1.0)
    assert (n.sinks["b"].heard, n.sinks["a"].broken) == ([], [])
    assert len(n.sinks["c"].heard) == 1


async def test_held_messages_and_chunks_arrive_in_order_when_they_are_released():
    n = await net(Link(latency_s=0.01))
    n.network.hold(Address("a:1"), Address("b:1"))
    pouring = asyncio.create_task(n.pour("a", "b", 10 * KB))
    for number in range(5):
        n.say("a", "b", number)
    n.say("b", "a", 9)
    await asyncio.sleep(10.0)
    assert (n.sinks["b"].heard, n.sinks["b"].read_at) == ([], [])
    assert len(n.sinks["a"].heard) == 1, "only one way is held"
    n.network.release(Address("a:1"), Address("b:1"))
    await pouring
    assert n.sinks["b"].heard == [(10.0, number) for number in range(5)]


async def test_a_call_across_a_partition_ends_with_its_time():
    n = await net(Link(latency_s=0.01))
    n.network.partition([Address("a:1")])
    with pytest.raises(TransportError, match="b:1 did not answer in time while joining"):
        await n.transports["a"].join(Address("b:1"), hello(), 2.0)
    assert now() == pytest.approx(2.0)


async def test_loss_costs_a_call_time_and_not_its_answer():
    n = await net(Link(latency_s=0.01, loss=0.5))
    lasted = []
    for _ in range(50):
        before = now()
        await n.transports["a"].join(Address("b:1"), hello(), 100.0)
        lasted.append(now() - before)
    assert min(lasted) == pytest.approx(0.02)
    assert max(lasted) > 4 * RETRY_S


async def test_the_word_of_a_death_travels_no_faster_than_a_message():
    n = await net(Link(latency_s=0.2))
    stream = await n.transports["a"].open(Address("b:1"), OPENING)
    await asyncio.sleep(1.0)
    n.network.crash(Address("b:1"))
    with pytest.raises(TransportError, match="b:1 reset the connection"):
        await stream.receive()
    assert now() == pytest.approx(1.2)


async def test_a_message_to_a_process_that_has_died_meanwhile_is_not_for_its_successor():
    n = await net(Link(latency_s=0.2))
    n.say("a", "b")
    n.network.crash(Address("b:1"))
    await n.start("b")
    await asyncio.sleep(1.0)
    assert n.sinks["b"].heard == []
    assert n.sinks["a"].broken == ["no connection to b:1: it is not there"]


# --- what cannot be a link ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"latency_s": -1.0}, "link latency_s = -1.0 must be 0 or more"),
        ({"loss": 1.5}, "link loss = 1.5 is a share; it must be from 0 to 1"),
        ({"bandwidth_bytes_s": 0.0}, "link bandwidth_bytes_s = 0.0 must be above 0; leave it out"),
    ],
)
def test_a_link_that_cannot_be_is_refused(values: dict[str, float], message: str):
    with pytest.raises(ConfigError, match=message):
        Link(**values)


async def test_a_machine_that_nobody_has_made_is_refused():
    n = await net(Link())
    n.network.machine("m0")
    with pytest.raises(ConfigError, match="no machine 'm1' in this network; there are: m0"):
        n.network.place(Address("a:1"), "m1")


def hello() -> Hello:
    me = Member(peer=PeerId("a"), address=Address("a:1"), incarnation=1)
    return Hello((1, 0), "ad_psgd", "model", 10, me)
