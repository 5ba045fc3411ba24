"""Fragments of models where links are slow for them: they keep links busy, and lose nothing."""

import asyncio

import numpy as np
import pytest

from p2ptrain.core.fragments import FIRST
from p2ptrain.core.shards import shard
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


@pytest.mark.parametrize(
    ("algorithm", "options"), [("ad_psgd", {}), ("ripples", {"peers_per_machine": 2})]
)
async def test_groups_within_a_data_centre_and_between_two_last_about_as_long_as_asked(
    algorithm: str, options: Options
):
    """Sized by the fastest of a peer's last groups, a whole model went between the two."""
    numbers, stands_for, lasts_s = 256, 25_000, 1.0  # as 25 MB
    world = World(1, Link(latency_s=1e-4), exchange=ExchangeConfig(chunk_kib=1))
    world.network.stands_for = stands_for
    for centre in ("left", "right"):
        inner = Link(latency_s=1e-4, bandwidth_bytes_s=1e9 / 8)  # two share what goes out
        world.network.machine(centre, 20e6 / 8, inner)
    for place in range(4):
        name, replica = f"p{place}", VectorReplica(np.ones(numbers, np.float32))
        await world.add(name, replica, algorithm, fragment_s=lasts_s, **options)
        world.network.place(world.address_of(PeerId(name)), ("left", "right")[place // 2])
    await world.train(90, steps_of(1.0))
    averaged = np.zeros(numbers, int)
    for peer in world.peers.values():
        done = [one for one in peer.metrics.of("group") if one["outcome"] == "done"]
        inside, between = (
            [one for one in done if (centres(one["members"]) > 1) is crosses]
            for crosses in (False, True)
        )
        assert {one["fragments"] for one in inside[10:]} == {1}, "whole models, in 0.2 s"
        for one in between[10:]:
            assert lasts_s / 4 < one["exchange_s"] < 3 * lasts_s
        for one in between:
            span = shard(numbers, one["fragments"], one["fragment"])
            averaged[span.start : span.stop] += 1
    assert averaged.min() >= 4, "each number in its turn"
    await world.close()


def centres(members: list[PeerId]) -> int:
    """In how many of the two these are."""
    return len({int(peer[1:]) // 2 for peer in members})
