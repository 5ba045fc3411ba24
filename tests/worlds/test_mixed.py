"""An algorithm that mixes verbs trains like the others: no way to form groups blocks another."""

import asyncio

import numpy as np
import pytest

from p2ptrain.sim.link import Link
from tests.helpers.variants import Variant
from tests.helpers.worlds import Books, build, consensus_distance, steps_of, sum_of
from tests.worlds.__main__ import told
from tests.worlds.spec import MIXED, spec_of
from tests.worlds.world import carry_out

KINDS = [Variant(MIXED, "all wait"), Variant(MIXED, "nobody waits", {"waiting": False})]
STEPS = 60


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("variant", KINDS, ids=lambda variant: variant.kind)
async def test_four_peers_on_a_healthy_link_train_to_the_end(variant: Variant, seed: int):
    world = await build(4, variant, seed=seed, link=Link(latency_s=0.01))
    books = Books(world)
    async with asyncio.timeout(10 * STEPS * 0.1):
        await world.train(STEPS, steps_of(0.1), books.injecting(STEPS // 2))
    assert {peer.boundary.totals.steps for peer in world.peers.values()} == {STEPS}
    np.testing.assert_allclose(sum_of(world), books.due_M, rtol=1e-5)
    assert consensus_distance(world) < 0.05
    await world.close()


@pytest.mark.parametrize("first", range(0, 30, 10))
def test_no_rule_is_broken_in_any_world(first: int):
    for seed in range(first, first + 10):
        verdict = carry_out(spec_of(seed, MIXED))
        assert not verdict.violations, "\n".join(told(verdict))
