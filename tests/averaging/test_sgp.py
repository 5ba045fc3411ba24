"""SGP: shares of models go one way, and the weighted mean of all stays what it is."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from p2ptrain.averaging import AlgorithmMessage, RemoteProtocolError
from p2ptrain.averaging.sgp import ROUND, Sgp, neighbour
from p2ptrain.core.effects import Outcome
from p2ptrain.errors import RefusedError
from p2ptrain.ids import PeerId, Ticket
from p2ptrain.net.wire import AverageOpening
from p2ptrain.runtime.exchange import ExchangeConfig
from p2ptrain.runtime.pushes import HEADER
from p2ptrain.runtime.shares import SHARE, Shares
from p2ptrain.sim.link import Link
from p2ptrain.sim.world import World
from tests.helpers.worlds import build, consensus_distance, models, steps_of
from tests.worlds.spec import spec_of
from tests.worlds.world import carry_out

PEERS = [PeerId(f"p{i}") for i in range(6)]


def weights(world: World) -> list[float]:
    return [peer.driver.shares.weight for peer in world.peers.values()]


@pytest.mark.parametrize("count", [2, 3, 5, 6])
def test_in_each_round_each_peer_sends_to_one_and_hears_of_one(count: int):
    peers = PEERS[:count]
    for number in range(1, 8):
        sends = {me: neighbour("exponential", number, peers, me, 1) for me in peers}
        assert sorted(sends.values()) == peers
        for me, receiver in sends.items():
            assert receiver != me
            assert neighbour("exponential", number, peers, receiver, -1) == me


def test_an_update_reaches_all_peers_in_as_many_rounds_as_there_are_hops():
    reached = {PEERS[0]}
    for number in range(1, 4):
        reached |= {neighbour("exponential", number, PEERS, peer, 1) for peer in reached}
    assert reached == set(PEERS)


async def test_in_step_all_weights_are_one_and_models_are_the_mean_of_all():
    world = await build(8, "sgp", learning_rate=0.0, link=Link(latency_s=0.01))
    mean_M = models(world).mean(axis=0)
    await world.train(15, steps_of(0.1))
    np.testing.assert_allclose(models(world), np.tile(mean_M, (8, 1)), rtol=1e-5)
    assert sum(weights(world)) == pytest.approx(8)
    await world.close()


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
async def test_the_weighted_mean_stays_whatever_is_lost_and_rounded(codec: str):
    link = Link(latency_s=0.01, jitter_s=0.05, loss=0.05, duplication=0.1)
    exchange = ExchangeConfig(codec=codec)
    world = await build(
        5, "sgp", learning_rate=0.0, link=link, exchange=exchange, overlap=2, seed=3
    )
    mean_M = models(world).mean(axis=0)
    await world.train(40, steps_of(0.05, p3=0.15))
    part = np.array(weights(world)) / 5
    assert part.sum() == pytest.approx(1)
    assert part.std() > 0.01  # peers end one after the other
    np.testing.assert_allclose(part @ models(world), mean_M, rtol=1e-5)
    assert consensus_distance(world) < 0.02
    await world.close()


async def test_no_trainer_waits_for_shares_that_are_overlapped():
    slow = Link(latency_s=0.15)
    waits = []
    for overlap in (0, 3):
        world = await build(4, "sgp", equal=True, link=slow, overlap=overlap)
        await world.train(20, steps_of(0.2))
        waits.append(max(peer.boundary.totals.wait_s for peer in world.peers.values()))
        await world.close()
    assert waits[0] > 20 * 0.15
    assert waits[1] < waits[0] / 5


async def test_a_share_for_a_peer_that_cannot_be_reached_comes_back():
    more = ExchangeConfig(chunk_kib=1)  # chunks than are under way at a time
    world = await build(2, "sgp", learning_rate=0.0, size=3000, exchange=more)
    p0, p1 = world.peers.values()
    before_M = p0.model()
    world.crash(p1.driver.name)
    result = await p0.process.start(p0.swarm.push(p1.driver.name, 0.5, 1))
    assert not result.done
    assert p0.driver.shares.weight == 1
    assert not p0.driver.shares.on_the_way
    assert np.array_equal(p0.model(), before_M)
    await world.close()


async def test_what_no_peer_would_push_is_refused_and_changes_nothing():
    world = await build(2, "sgp", learning_rate=0.0)
    p0, p1 = world.peers.values()
    before_M, size, life = p1.model(), p1.replica.model_size, p1.driver.machine.membership.born
    good = np.zeros(size, "<f4")

    async def push(head: tuple[float, ...], vector: np.ndarray, count: int = size) -> None:
        ticket = Ticket(p0.driver.name, 1, 900)
        opening = AverageOpening(
            p0.driver.digest, p0.driver.name, ticket, count, 256, "fp32", SHARE
        )
        stream = await p0.driver.open_stream(p1.driver.name, opening)
        await stream.send(memoryview(HEADER.pack(*head)))
        await stream.send(memoryview(vector.tobytes()), True)
        await stream.receive()

    bad = good.copy()
    bad[3] = np.nan
    for head, vector, count, why in (
        ((-1.0, 1, 0, 0, life, 0, 1), good, size, "weight -1"),
        ((float("nan"), 1, 0, 0, life, 0, 1), good, size, "weight nan"),
        ((2.5, 1, 0, 0, life, 0, 1), good, size, "a weight of 2.5, and all have 2"),
        ((0.5, 1, 0, 9, life, 0, 1), good, size, "other settings"),
        ((0.5, 1, 0, 0, life - 1, 0, 1), good, size, "earlier life"),
        ((0.5, 1, 0, 0, life, 0, 1), good, size + 1, "numbers to p1"),
        ((0.5, 1, 0, 0, life, 0, 1), bad, size, "not finite"),
        ((0.5, 1, 0, 0, life, 0, 1), good[1:], size, "bytes where"),
    ):
        with pytest.raises(RefusedError, match=why):
            await p0.process.start(push(head, vector, count))
    assert np.array_equal(p1.model(), before_M)
    assert p1.driver.shares.weight == 1
    await world.close()


async def test_a_share_that_is_refused_comes_back():
    world = await build(2, "sgp", learning_rate=0.0)
    p0, p1 = world.peers.values()

    def refuse(*_: object) -> None:
        raise RefusedError("p1 works with other settings")

    p1.driver.shares.check = refuse
    result = await p0.process.start(p0.swarm.push(p1.driver.name, 0.5, 1))
    assert (result.outcome, result.why) == (Outcome.LOST, "p1 works with other settings")
    assert (p0.driver.shares.weight, p1.driver.shares.weight) == (1, 1)
    assert not p0.driver.shares.on_the_way
    await world.close()


def test_a_round_that_no_peer_can_be_in_is_refused():
    for message in (
        AlgorithmMessage(ROUND, ((1 << 60) + 1,)),
        AlgorithmMessage(ROUND, ()),
        AlgorithmMessage("step", (3,)),
    ):
        with pytest.raises(RemoteProtocolError):
            Sgp().handle_message(None, PeerId("p1"), message)


async def test_the_last_round_that_can_be_said_stops_nobody():
    world = await build(3, "sgp", equal=True, link=Link(latency_s=0.01))
    peers = tuple(world.peers.values())
    said = AlgorithmMessage(ROUND, (1 << 60,))
    for peer in peers[:2]:
        peer.driver.algorithm.handle_message(peer.driver.swarm, PeerId("p2"), said)
    await world.train(20, steps_of(0.1))
    assert [peer.replica.updates for peer in peers] == [20, 20, 20]
    await world.close()


async def test_peers_that_were_cut_off_go_on_together():
    world = await build(4, "sgp", equal=True, link=Link(latency_s=0.01))
    loop = asyncio.get_running_loop()
    loop.call_later(1.0, world.crash, "p3")
    loop.call_later(3.0, lambda: loop.create_task(world.restart("p3")))
    await world.train(70, steps_of(0.1))
    rounds = [peer.driver.algorithm.round for peer in world.peers.values()]
    assert min(rounds) > 60  # p3 has made fewer steps
    assert consensus_distance(world) < 1e-5
    await world.close()


# --- the checkers ---------------------------------------------------------------------------------


def broken() -> str:
    """The rule that is broken first in a world without faults."""
    spec = replace(spec_of(3, "sgp"), plan=(), all_die=False, checkpoint_every_s=0, options={})
    found = carry_out(spec).violations
    return found[0].rule if found else ""


def test_weight_that_is_made_is_found(monkeypatch):
    assert broken() == ""
    take = Shares.take

    async def greedy(self: Shares, *arguments: object, **more: object) -> object:
        self.weight += 0.01
        return await take(self, *arguments, **more)

    monkeypatch.setattr(Shares, "take", greedy)
    assert broken() == "the weights"


def test_a_mean_that_is_off_is_found(monkeypatch):
    merge = Shares._merge

    def halfway(self: Shares, theirs_M: object, weight: float) -> float:
        return merge(self, theirs_M, weight / 2)

    monkeypatch.setattr(Shares, "_merge", halfway)
    assert broken() == "the mean"


async def test_progress_is_what_all_have_trained_although_weights_differ():
    world = await build(4, "sgp", seed=1, link=Link(latency_s=0.01))
    await world.train(800, steps_of(0.1, p3=0.4))
    for peer in world.peers.values():
        assert peer.lifecycle.progress == pytest.approx(4 * 800, rel=0.02)
    await world.close()
