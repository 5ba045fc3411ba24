"""Fragments of models where links are slow for them: they keep links busy, and lose nothing."""

import asyncio

import numpy as np
import pytest

from p2ptrain.core.fragments import FIRST
from p2ptrain.ids import PeerId
from p2ptrain.runtime.exchange import ExchangeConfig
from p2ptrain.sim.link import Link
from p2ptrain.sim.replica import VectorReplica
from p2ptrain.sim.world import World
from tests.helpers.variants import Options
from tests.helpers.worlds import build, steps_of

SIZE = 16 * FIRST
MODEL_S = 4.0
"""As long as a link takes for a model, and a step for a quarter of it."""

LINK = Link(latency_s=0.005, bandwidth_bytes_s=4 * SIZE / MODEL_S)

BY_GROUPS: dict[str, Options] = {
    "ad_psgd": {},
    "ripples": {"group_size": 2},
    "ripples, decentral": {"schedule": "decentral", "group_size": 2},
}


async def in_fragments(algorithm: str) -> World:
    """Four peers, an average of a fragment lasts a quarter of a step."""
    name, options = algorithm.split(",")[0], BY_GROUPS[algorithm]
    exchange = ExchangeConfig(chunk_kib=64)
    return await build(
        4, name, size=SIZE, equal=True, link=LINK, exchange=exchange, fragment_s=0.25, **options
    )


@pytest.mark.parametrize("algorithm", BY_GROUPS)
async def test_a_fragment_follows_the_other_without_waiting_for_the_next_step(algorithm: str):
    """There was one group per step of a trainer: of the time links carried 22 to 46 %."""
    world = await in_fragments(algorithm)
    await world.train(24, steps_of(1.0))
    passed_s = asyncio.get_running_loop().time()
    for peer in world.peers.values():
        busy_s = peer.driver.accounts.sent_bytes / LINK.bandwidth_bytes_s
        assert busy_s > passed_s / 2
    await world.close()


@pytest.mark.parametrize("algorithm", ["ad_psgd", "ripples"])
async def test_a_peer_on_a_slow_link_does_not_set_the_pace_of_those_on_fast_ones(algorithm: str):
    """Ripples had all four in each group, in fragments as small as the slow link needs."""
    numbers, stands_for = 1_024, 25_000
    link = Link(latency_s=0.02, bandwidth_bytes_s=20e6 / 8)  # a model takes 40 s
    world = World(1, link, exchange=ExchangeConfig(chunk_kib=1))
    world.network.stands_for = stands_for
    for name in ("p0", "p1", "p2", "p3"):
        replica = VectorReplica(np.ones(numbers, np.float32))
        await world.add(name, replica, algorithm, fragment_s=1)
    world.network.throttle(world.address_of(PeerId("p3")), 5e6 / 8)
    await world.train(24, steps_of(2.5))
    averaged = {
        name: sum(1 / group["fragments"] for group in peer.metrics.of("group"))
        for name, peer in world.peers.items()
    }
    slow = averaged.pop(PeerId("p3"))
    assert slow > 0
    assert min(averaged.values()) > 1.5 * slow
    await world.close()
