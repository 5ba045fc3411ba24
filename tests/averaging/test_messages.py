"""What an algorithm tells itself on another peer: best effort, and no hostile word harms anyone."""

import sys
import types
from typing import Any

import pytest

from p2ptrain.averaging import Algorithm, AlgorithmMessage, PeerId, RemoteProtocolError, Swarm
from p2ptrain.errors import CodecError, LocalProtocolError
from p2ptrain.net._pb import peer_pb2 as pb
from p2ptrain.net.wire import decode_envelope
from p2ptrain.sim.link import Link
from p2ptrain.sim.world import World
from tests.helpers.worlds import build, steps_of

P0, P1 = PeerId("p0"), PeerId("p1")


class Counts(Algorithm):
    """Tells everyone how many updates it has had."""

    heard: dict[PeerId, int]

    async def background(self, swarm: Swarm) -> None:
        updates = 0
        while True:
            updates = await swarm.wait_for_update(updates + 1)
            for peer in swarm.choosable():
                swarm.tell(peer, AlgorithmMessage("updates", (updates,), (swarm.me,)))

    def handle_message(self, swarm: Swarm, source: PeerId, message: AlgorithmMessage) -> None:
        match message:
            case AlgorithmMessage("updates", (updates,), (name,)) if name == source:
                self.heard = {**getattr(self, "heard", {}), source: updates}
            case _:
                raise RemoteProtocolError(f"{source} says {message}")


@pytest.fixture(autouse=True)
def counts(monkeypatch: pytest.MonkeyPatch) -> str:
    module = types.ModuleType("counting")
    vars(module)["Counts"] = type("Counts", (Counts,), {"__module__": "counting"})
    monkeypatch.setitem(sys.modules, "counting", module)
    return "counting:Counts"


def heard(world: World, peer: PeerId) -> dict[PeerId, int]:
    algorithm = world.peers[peer].driver.algorithm
    assert isinstance(algorithm, Counts)
    return algorithm.heard


async def test_what_an_algorithm_tells_itself_arrives(counts: str):
    world = await build(3, counts)
    await world.train(10, steps_of(0.1))
    assert heard(world, P0) == {"p1": 10, "p2": 10}
    await world.close()


async def test_it_may_be_lost_and_nothing_else_is(counts: str):
    world = await build(3, counts, link=Link(latency_s=0.01, loss=0.3, duplication=0.3))
    await world.train(40, steps_of(0.1))
    assert all(30 < updates <= 40 for updates in heard(world, P0).values())
    assert all(peer.boundary.totals.steps == 40 for peer in world.peers.values())
    await world.close()


@pytest.mark.parametrize("algorithm", ["counting:Counts", "ad_psgd", "ripples"])
async def test_what_it_would_never_say_is_counted_told_once_and_changes_nothing(algorithm: str):
    world = await build(2, algorithm)
    peer = world.peers[P1]

    def lie(one: object, step: int) -> None:
        if one is peer and step >= 5:
            peer.swarm.tell(P0, AlgorithmMessage("hello", (1, 2, 3)))

    await world.train(20, steps_of(0.1), lie)
    first = world.peers[P0]
    assert first.driver.accounts.messages_refused == {"p1": 15}
    warnings = [record["text"] for record in first.metrics.of("warning")]
    assert len(warnings) == 1
    assert warnings[0].startswith("ignored: p1 says ")
    assert first.boundary.totals.steps == 20
    assert first.driver.failure is None
    await world.close()


@pytest.mark.parametrize(
    ("message", "mistake"),
    [
        (("k" * 33,), "a message with 33 characters, 0 numbers and 0 names; 32, 64 and 4,096 are"),
        (("kind", (0,) * 65), "4 characters, 65 numbers and 0 names"),
        (("kind", (), (P0,) * 4097), "4 characters, 0 numbers and 4097 names"),
        (("kind", (-1,)), r"a message with \(-1,\); write numbers from 0 to 2\^62"),
        (("kind", (1 << 63,)), "write numbers from 0 to"),
    ],
)
def test_a_message_that_the_others_would_not_take_is_refused_before_it_is_sent(
    message: tuple[Any, ...], mistake: str
):
    with pytest.raises(LocalProtocolError, match=mistake):
        AlgorithmMessage(*message)


@pytest.mark.parametrize(
    "packed",
    [
        pb.AlgorithmMessage(kind="k" * 33),
        pb.AlgorithmMessage(kind="k", numbers=[1] * 65),
        pb.AlgorithmMessage(kind="k", numbers=[1 << 63]),
        pb.AlgorithmMessage(kind="k", peers=["p0"] * 4097),
        pb.AlgorithmMessage(kind="k", peers=["no name"]),
    ],
)
def test_hostile_bytes_do_not_decode(packed: Any):
    with pytest.raises(CodecError):
        decode_envelope(pb.Envelope(source="p1", swarm="x", algorithm=packed).SerializeToString())


async def test_before_it_has_begun_a_peer_hears_nothing(counts: str):
    world = await build(2, counts)
    world.peers[P1].swarm.tell(P0, AlgorithmMessage("hello"))
    await world.settle()
    assert world.peers[P0].driver.accounts.messages_refused == {}
    await world.close()


async def test_ripples_without_a_generator_takes_no_proposals():
    world = await build(2, "ripples", schedule="decentral")
    proposal = AlgorithmMessage("propose", (1, 1), (P0, P1))
    await world.train(10, steps_of(0.1), lambda peer, _: peer.swarm.tell(P0, proposal))
    assert world.peers[P0].driver.accounts.messages_refused == {"p1": 10}
    await world.close()
