"""What claiming a group is like for an algorithm: it waits where it must, and never spins."""

import asyncio

from p2ptrain.averaging.base import GroupResult
from p2ptrain.core.effects import Outcome
from p2ptrain.core.lock_state import LockConfig
from p2ptrain.ids import PeerId
from p2ptrain.sim.link import Link
from p2ptrain.sim.loop import virtual_loop
from p2ptrain.sim.world import SimPeer, World
from tests.helpers.worlds import build

P0, P1, P2, P3 = (PeerId(f"p{i}") for i in range(4))
RESEND_S = LockConfig().resend_s


async def gathered(count: int) -> World:
    """Peers that know each other and do nothing by themselves."""
    world = await build(count, "ad_psgd")
    await asyncio.sleep(1.0)
    return world


async def ask_for(duration_s: float, peer: SimPeer) -> list[GroupResult]:
    """What an algorithm gets that asks all the time for any other peer."""
    results: list[GroupResult] = []
    until = virtual_loop().now + duration_s
    while virtual_loop().now < until:
        results.append(await peer.swarm.form(peer.swarm.alive(), 1))
    return results


async def test_the_first_that_is_free_is_met_and_the_result_says_who():
    """Two answers are there before that of the third, which has a longer way."""
    world = await gathered(4)
    far = world.peers[P1].address
    world.network.set_link(far, world.peers[P0].address, Link(latency_s=0.01))
    result = await world.peers[P0].swarm.form([P1, P2, P3], 1)
    assert result == GroupResult(Outcome.DONE, "", (P0, P2))
    assert world.peers[P0].swarm.met() == {P0: 1, P2: 1}
    await world.close()


async def test_particular_members_are_waited_for():
    world = await gathered(3)
    busy = asyncio.create_task(world.peers[P1].swarm.form([P2]))
    await asyncio.sleep(0.0025)
    result = await world.peers[P0].swarm.form([P1, P2])
    assert busy.done()
    assert result == GroupResult(Outcome.DONE, "", (P0, P1, P2))
    await world.close()


async def test_a_claim_waits_while_its_own_peer_is_in_somebody_elses_group():
    world = await gathered(3)
    busy = asyncio.create_task(world.peers[P1].swarm.form([P0]))
    await asyncio.sleep(0.0025)
    result = await world.peers[P0].swarm.form([P2], 1)
    assert busy.done()
    assert result.done
    assert result.members == (P0, P2)
    await world.close()


async def test_two_claims_of_one_peer_take_turns():
    world = await gathered(3)
    swarm = world.peers[P0].swarm
    both = await asyncio.gather(swarm.form([P1]), swarm.form([P2]))
    assert [result.members for result in both] == [(P0, P1), (P0, P2)]
    assert all(result.done for result in both)
    await world.close()


async def test_alone_one_may_ask_all_the_time_without_spinning():
    world = await gathered(1)
    results = await ask_for(10.0, world.peers[P0])
    assert {result.outcome for result in results} == {Outcome.BUSY}
    assert results[0].why == "0 candidates for a group with 1 others"
    assert 10.0 / RESEND_S / 2 < len(results) < 10.0 / RESEND_S + 2
    await world.close()


async def test_who_stops_may_ask_on_without_spinning_and_gets_no_group():
    world = await gathered(2)
    peer = world.peers[P0]
    peer.driver.withdraw()
    results = await ask_for(5.0, peer)
    assert {result.outcome for result in results} == {Outcome.WITHDRAWN}
    assert len(results) < 5.0 / RESEND_S + 2
    await world.close()


async def test_who_stops_while_it_waits_is_told_so():
    world = await gathered(2)
    world.network.cut(world.peers[P0].address, world.peers[P1].address)
    asking = asyncio.create_task(world.peers[P0].swarm.form([P1], 1))
    await asyncio.sleep(0.3)
    world.peers[P0].driver.withdraw()
    assert (await asking).outcome is Outcome.WITHDRAWN
    await world.close()


async def test_when_no_group_forms_the_record_says_who_was_asked():
    world = await gathered(4)
    for other in (P1, P2):
        world.network.cut(world.peers[P0].address, world.peers[other].address)
    result = await world.peers[P0].swarm.form([P2, P1])
    assert result.outcome in (Outcome.LATE, Outcome.LOST)
    (record,) = world.peers[P0].metrics.of("group")
    assert record["members"] == [P0, P1, P2] == list(result.members)
    assert record["exchange_s"] == 0
    await world.close()


async def test_peers_that_ask_all_the_time_all_meet_and_none_is_left_out():
    """On a way that always takes as long they dance in step, and some never meet."""
    world = await gathered(5)
    world.network.link = Link(latency_s=0.001, jitter_s=0.001)
    asking = [peer.process.start(ask_for(1.5, peer)) for peer in world.peers.values()]
    results = await asyncio.gather(*asking)
    met = {r.members for own in results for r in own if r.done}
    assert len(met) == 10
    assert min(peer.driver.accounts.groups_formed for peer in world.peers.values()) > 50
    await world.close()


async def test_a_group_with_nobody_is_not_asked_for_and_ends_no_peer():
    world = await gathered(2)
    result = await world.peers[P0].swarm.form([])
    assert result.outcome is Outcome.BUSY
    assert world.peers[P0].driver.failure is None
    await world.close()
