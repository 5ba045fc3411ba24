"""What the driver does with averages that are abandoned at awkward moments."""

import asyncio

import numpy as np
import pytest

from p2ptrain.core.links import MAX_MBIT
from p2ptrain.core.messages import Begin, Relinquish, Request
from p2ptrain.errors import ConfigError
from p2ptrain.ids import PeerId, Seconds, Ticket
from p2ptrain.net.wire import Envelope
from p2ptrain.runtime.exchange import ExchangeConfig
from p2ptrain.runtime.formed_group import FormedGroup
from p2ptrain.sim.link import Link
from p2ptrain.sim.replica import VectorReplica
from p2ptrain.sim.world import SimPeer, World

A, B = PeerId("a"), PeerId("b")


async def test_an_average_that_is_abandoned_before_it_starts_leaves_nothing_behind():
    """`Begin` and `Relinquish` come in one breath: the task is cancelled before its first line."""
    world = World()
    for name in (A, B):
        await world.add(name, VectorReplica(np.zeros(4, np.float32)), "ad_psgd")
    await asyncio.sleep(0.1)
    driver, ticket = world.peers[B].driver, Ticket(A, 1, 1)
    for message in (Request(ticket, 1), Begin(ticket, (A, B)), Relinquish(ticket)):
        driver.handle_message(Envelope(A, driver.digest, message))
    assert driver.averages.running
    await asyncio.sleep(0.1)
    assert not driver.averages.running
    before = asyncio.get_running_loop().time()
    await world.peers[B].lifecycle.leave(5.0)
    assert asyncio.get_running_loop().time() - before < 0.5


async def test_a_slow_link_is_found_out_in_pairs_and_then_does_not_reduce_for_four():
    """Three links of 100 MB/s and one of 10: with equal shares the slow one moves half as much."""
    world = World(link=Link(bandwidth_bytes_s=100e6))
    names = [PeerId(name) for name in "abcd"]
    for name in names:
        vector_M = np.full(1_000_000, ord(name), np.float32)
        await world.add(name, VectorReplica(vector_M), "ad_psgd")
    a, b, c, d = (world.peers[name] for name in names)
    world.network.throttle(d.address, 10e6)
    now = asyncio.get_running_loop().time

    async def average(initiator: SimPeer, *others: SimPeer) -> Seconds:
        before = now()
        await initiator.swarm.form([other.driver.name for other in others], len(others))
        for member in (initiator, *others):
            await asyncio.gather(*member.driver.averages.running)
        lasted_s = now() - before
        await asyncio.sleep(1.0)  # for what they tell
        return lasted_s

    equal_s = await average(a, b, c, d)
    assert {peer.driver.me.link_mbit for peer in (a, b, c, d)} < set(range(70, 100))
    for _ in range(3):
        for pair in ((a, b), (b, c), (c, a), (d, a)):
            await average(*pair)
    assert all(700 < peer.driver.me.link_mbit < 800 for peer in (a, b, c))
    assert d.driver.me.link_mbit <= 120
    weighted_s = await average(b, a, c, d)
    assert 1.4 < equal_s / weighted_s < 1.6
    await world.close()


async def test_groups_share_the_estimates_of_progress_and_lose_none_of_them():
    world, names = World(), [PeerId(name) for name in "abc"]
    for name in names:
        await world.add(name, VectorReplica(np.zeros(4, np.float32)), "ad_psgd")
    a, b, c = peers = [world.peers[name] for name in names]
    a.driver.agreed.progress, b.driver.agreed.progress, c.driver.agreed.progress = 100, 3, 1
    for initiator, *others in ((a, b, c), (b, a), (c, b), (a, c)):
        await initiator.swarm.form([other.driver.name for other in others], len(others))
        for member in (initiator, *others):
            await asyncio.gather(*member.driver.averages.running)
        assert sum(peer.driver.agreed.progress for peer in peers) == 104
    assert {peer.driver.agreed.progress for peer in peers} <= {34, 35}
    await world.close()


async def test_a_mean_that_is_adopted_counts_although_its_exchange_broke_here(monkeypatch):
    """Else the same fragment was the next one again, while others were in no average for minutes.

    Of an exchange that broke nothing is learned.
    """
    monkeypatch.setattr(FormedGroup, "_learn", lambda *_: None)
    world = World()
    for name in (A, B):
        await world.add(name, VectorReplica(np.zeros(4, np.float32)), "ad_psgd")
    await world.peers[A].swarm.form([B], 1, fragment_s=1)
    await asyncio.gather(*world.peers[B].driver.averages.running)
    assert [peer.swarm.rounds for peer in world.peers.values()] == [1, 1]
    await world.close()


async def test_a_link_whose_speed_was_given_is_told_from_the_start():
    world = World(exchange=ExchangeConfig(link_mbit=50))
    for name in (A, B):
        await world.add(name, VectorReplica(np.zeros(4, np.float32)), "ad_psgd")
    await asyncio.sleep(1.0)
    known = world.peers[A].driver.machine.membership.member(B)
    assert known is not None
    assert known.link_mbit == 50
    await world.close()


@pytest.mark.parametrize("mbit", [-1, MAX_MBIT + 1])
def test_a_link_that_cannot_be_is_refused(mbit: int):
    with pytest.raises(ConfigError, match=f"link_mbit = {mbit} must be between 1 and 10000000, or"):
        ExchangeConfig(link_mbit=mbit)
