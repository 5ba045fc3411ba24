"""Fragments of models where links are slow for them: they keep links busy, and lose nothing."""

import asyncio

import pytest

from p2ptrain.core.fragments import FIRST
from p2ptrain.runtime.exchange import ExchangeConfig
from p2ptrain.sim.link import Link
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
