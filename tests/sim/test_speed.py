"""Links that become slower, and faster again: deadlines follow, and break at most one average.

The vectors are small for their chunks, so that nothing is heard of an average for as long as its
chunks take: otherwise a slow link would break none at all, since whatever moves is waited for.
"""

import asyncio

import pytest

from p2ptrain.core.deadlines import WINDOW
from p2ptrain.core.effects import What
from p2ptrain.ids import PeerId, Seconds
from p2ptrain.runtime.exchange import ExchangeConfig
from p2ptrain.sim.faults import Throttle
from p2ptrain.sim.link import Link
from p2ptrain.sim.world import World
from tests.helpers.worlds import build

FAST_BYTES_S = 1e5
TRIO = ["p0", "p1", "p2"]


async def fleet(*, size: int = 20_000, chunk_kib: int = 1024) -> World:
    """Three peers that have averaged often enough to know how long that takes."""
    world = await build(
        3,
        "ad_psgd",
        size=size,
        link=Link(bandwidth_bytes_s=FAST_BYTES_S),
        exchange=ExchangeConfig(chunk_kib=chunk_kib),
    )
    await asyncio.sleep(5.0)
    assert await averages(world, 6) == [True] * 6
    return world


async def averages(world: World, count: int) -> list[bool]:
    """All three average so often, one after the other asks for it: which of them were done?"""
    done = []
    for turn in range(count):
        asker, *others = (PeerId(TRIO[(turn + k) % 3]) for k in range(3))
        result = await world.peers[asker].swarm.form(others, 2)
        await asyncio.sleep(1.0)  # the last one commits a little later
        done.append(result.done)
    return done


def late(world: World) -> int:
    """Attempts that a deadline has broken, at any peer."""
    records = (record for peer in world.peers.values() for record in peer.metrics.of("group"))
    return sum(record["outcome"] == "late" for record in records)


def stalls(world: World) -> list[Seconds]:
    """How long each of them waits for something to move in a group of three."""
    peers = world.peers.values()
    return [peer.driver.averages.transfers.stall(What.MODELS, 3).seconds for peer in peers]


async def slow_down(world: World) -> None:
    """What p1 sends takes ten times as long from now on."""
    await world.carry_out([Throttle(peer="p1", at_s=0.0, bytes_s=FAST_BYTES_S / 10)])


def recover(world: World) -> None:
    """It is as fast as before."""
    world.network.throttle(world.address_of(PeerId("p1")), None)


async def test_a_link_that_becomes_ten_times_slower_breaks_one_average_and_then_none():
    world = await fleet()
    assert max(stalls(world)) < 10.0
    await slow_down(world)
    assert (await averages(world, 1)) == [True], "it was repaired"
    broken = late(world)
    assert broken > 0
    assert await averages(world, 8) == [True] * 8
    assert late(world) == broken
    await world.close()


async def test_a_link_that_recovers_is_waited_for_less_long_again():
    world = await fleet()
    before = stalls(world)
    await slow_down(world)
    await averages(world, 8)
    assert all(3 * was < slowly for was, slowly in zip(before, stalls(world), strict=True))
    recover(world)
    await averages(world, WINDOW)
    assert stalls(world) == pytest.approx(before, rel=0.1)
    await world.close()


async def test_a_group_in_which_chunks_move_is_not_broken_however_long_it_takes():
    world = await fleet(chunk_kib=4)
    waits_s = max(stalls(world))
    await slow_down(world)
    assert await averages(world, 3) == [True] * 3
    lasted = [record["exchange_s"] for record in world.peers[PeerId("p0")].metrics.of("group")]
    assert min(lasted[-3:]) > 2 * waits_s
    assert late(world) == 0
    await world.close()
