"""A peer that gets another address while it trains stays a member and goes on averaging."""

import asyncio

import pytest

from p2ptrain.core.effects import Outcome
from p2ptrain.core.messages import MemberState
from p2ptrain.ids import PeerId
from p2ptrain.sim.world import SimPeer, World
from tests.helpers.worlds import build

MOVER = PeerId("p1")
STEP_S = 0.1


def move(world: World, peer: SimPeer) -> None:
    peer.lifecycle.move(world.network.move(peer.address))


def others(world: World) -> list[SimPeer]:
    return [peer for name, peer in world.peers.items() if name != MOVER]


@pytest.mark.parametrize("algorithm", ["ad_psgd", "allreduce", "sgp"])
async def test_a_peer_that_moves_twice_stays_a_member_and_goes_on_averaging(algorithm):
    world = await build(4, algorithm)
    mover, old = world.peers[MOVER], world.peers[MOVER].address
    training = asyncio.create_task(world.train(60, lambda _: STEP_S))
    for _ in range(2):
        await asyncio.sleep(1.5)
        move(world, mover)
        await asyncio.sleep(0.5)
        assert world.network.at(old) is None
        assert [p.driver.machine.membership.member(MOVER).address for p in others(world)] == [
            mover.address
        ] * 3
    moved_at = asyncio.get_running_loop().time()
    await training
    for peer in others(world):
        said = [record for record in peer.metrics.of("member") if record["member"] == MOVER]
        assert {record["state"] for record in said} <= {"alive", "suspect"}
        assert sum("it is at" in record["why"] for record in said) == 2
    groups = [group for group in mover.metrics.of("group") if group["t"] > moved_at]
    assert any(group["outcome"] == Outcome.DONE for group in groups)
    await world.close()


async def test_peers_that_missed_the_news_hear_it_from_the_peer_itself_at_its_next_probe():
    world = await build(4, "ad_psgd")
    mover = world.peers[MOVER]
    await asyncio.sleep(2.0)
    new = world.network.move(mover.address)
    for peer in others(world):
        world.network.cut(new, peer.address)
    mover.lifecycle.move(new)
    await asyncio.sleep(0.2)
    assert all(p.driver.machine.membership.member(MOVER).address != new for p in others(world))
    world.network.heal()
    await asyncio.sleep(10.0)
    for peer in others(world):
        record = peer.driver.machine.membership.member(MOVER)
        assert (record.address, record.state) == (mover.address, MemberState.ALIVE)
    await world.close()
