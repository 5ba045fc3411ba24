"""Peers of a simulated swarm whose data are dealt: told at once, repeated, caught up with."""

import asyncio
from collections import Counter

import pytest

from p2ptrain.core.data_ledger import DataPlan
from p2ptrain.core.messages import Phase
from p2ptrain.errors import ConfigError
from p2ptrain.ids import PeerId
from p2ptrain.sim.link import Link
from p2ptrain.sim.loop import virtual_loop
from p2ptrain.sim.world import SimPeer
from tests.helpers.worlds import build

PLAN = DataPlan(samples=300, part_size=10)
BATCH = 10


class Diary:
    """What peers have trained, dead or alive, by epoch and place."""

    def __init__(self, steps: int, plan: DataPlan = PLAN) -> None:
        self.steps, self.plan = steps, plan
        self.often: Counter[tuple[int, int]] = Counter()
        self.lives: list[SimPeer] = []

    async def train(self, peer: SimPeer) -> None:
        self.lives.append(peer)
        dealing = peer.lifecycle.deal(self.plan)
        await dealing.catch_up()
        peer.lifecycle.begin()
        for _ in range(self.steps):
            while dealing.taken < BATCH:
                dealing.take()
            await asyncio.sleep(0.1)
            await peer.boundary.step(BATCH, None, peer.replica.descend)
        await peer.boundary.end()

    def count(self) -> None:
        for peer in self.lives:
            for record in peer.metrics.records:
                for epoch, start, stop in record.get("trained", ()):
                    self.often.update((epoch, at) for at in range(start, stop))

    def of_epoch(self, epoch: int) -> list[int]:
        return [self.often[epoch, at] for at in range(self.plan.samples)]


@pytest.mark.parametrize("algorithm", ["allreduce", "ad_psgd"])
async def test_each_sample_of_finished_epochs_is_trained_once_although_messages_are_lost(algorithm):
    link = Link(latency_s=0.002, jitter_s=0.002, loss=0.05, duplication=0.05)
    world, diary = await build(4, algorithm, equal=True, link=link), Diary(40)
    await world.run(diary.train)
    dealing = world.peers[PeerId("p0")].driver.dealing
    assert dealing is not None
    finished = [count for count in dealing.counts() if not count.never]
    diary.count()
    await world.close()
    assert len(finished) >= 3
    for count in finished:
        often = diary.of_epoch(count.epoch)
        assert min(often) == 1
        assert count.trained == sum(often), "the ledger agrees with the records"
    assert sum(count.again for count in finished) <= 0.05 * PLAN.samples * len(finished)


async def test_a_peer_that_dies_and_comes_back_leaves_no_sample_out():
    world, diary = await build(3, "ad_psgd", equal=True), Diary(60)
    backs: list[asyncio.Task[SimPeer]] = []

    def come_back() -> None:
        backs.append(asyncio.ensure_future(world.restart("p1")))

    virtual_loop().call_later(1.25, lambda: world.crash("p1"))
    virtual_loop().call_later(4.0, come_back)
    await world.run(diary.train)
    dealing = world.peers[PeerId("p0")].driver.dealing
    assert dealing is not None
    finished = [count for count in dealing.counts(99) if not count.never]
    diary.count()
    await world.close()
    assert len(backs) == 1
    assert len(finished) >= 4
    for count in finished:
        assert min(diary.of_epoch(count.epoch)) == 1
        assert max(diary.of_epoch(count.epoch)) <= 2
    again = sum(often > 1 for count in finished for often in diary.of_epoch(count.epoch))
    assert again <= 2 * BATCH, "what it had in hand when it died, at most"


async def test_a_newcomer_knows_what_was_trained_before_it_takes_anything():
    world, diary = await build(2, "ad_psgd", equal=True), Diary(10)
    await world.run(diary.train)
    first = world.peers[PeerId("p0")].driver
    first.describe(Phase.TRAINING, steps=10, samples=100)
    await asyncio.sleep(1.0)
    world.crash("p1")
    again = await world.restart("p1")
    dealing = again.lifecycle.deal(PLAN)
    assert first.dealing
    before = first.dealing.counts()
    await dealing.catch_up()
    assert dealing.counts() == before
    assert before[0].trained == 2 * 10 * BATCH
    await world.close()


async def test_peers_that_deal_other_data_say_so_once_and_each_deals_alone():
    world = await build(2, "ad_psgd", equal=True)
    one, other = world.peers[PeerId("p0")], world.peers[PeerId("p1")]
    one.lifecycle.deal(PLAN)
    other.lifecycle.deal(DataPlan(samples=200, part_size=10))
    for peer in (one, other):
        peer.lifecycle.begin()
    await asyncio.sleep(0.1)
    for _ in range(3):
        assert one.driver.dealing
        one.driver.dealing.take()
        await asyncio.sleep(0.1)
    warnings = [r["text"] for r in other.metrics.records if r["kind"] == "warning"]
    assert len([text for text in warnings if "each deals alone" in text]) == 1
    assert other.driver.dealing
    assert not other.driver.dealing.counts()
    await world.close()


async def test_a_peer_deals_one_kind_of_data():
    world = await build(1, "ad_psgd", equal=True)
    peer = world.peers[PeerId("p0")]
    assert peer.lifecycle.deal(PLAN) is peer.lifecycle.deal(PLAN)
    with pytest.raises(ConfigError, match="one ElasticSampler for each peer"):
        peer.lifecycle.deal(DataPlan(samples=200, part_size=10))
    await world.close()
