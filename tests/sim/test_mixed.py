"""Groups of several formations at once, and averages that take long: what issue H found."""

import asyncio

import pytest

from p2ptrain.averaging.base import known_algorithms
from p2ptrain.core.events import Outcome
from p2ptrain.runtime.exchange import ExchangeConfig
from p2ptrain.sim.link import Link
from p2ptrain.sim.world import World
from tests.helpers.mixed import EVERY_UPDATES
from tests.helpers.worlds import Books, build, steps_of

MIXED = "tests.helpers.mixed:Mixed"

STEPS = 60

SLOW_BYTES_S = 20_000.0


async def train_for(world: World, duration_s: float, steps: int, step_s: float) -> None:
    """Let all trainers make `steps`, and look at them after so long."""
    training = asyncio.create_task(
        world.train(steps, steps_of(step_s), Books(world).injecting(steps))
    )
    await asyncio.sleep(duration_s)
    made = {name: peer.steps for name, peer in world.peers.items()}
    doing = {name: str(p.driver.machine.groups.lock.state) for name, p in world.peers.items()}
    for peer in world.peers.values():
        peer.driver.withdraw()
    await training
    assert made == dict.fromkeys(world.peers, steps), f"stuck, each peer's slot: {doing}"


@pytest.mark.parametrize("seed", range(6))
async def test_an_algorithm_that_claims_groups_and_meets_at_versions_is_never_stuck(seed: int):
    """The two had a slot each, so that each could wait for the other for ever."""
    world = await build(4, MIXED, seed=seed)
    await train_for(world, 30.0, STEPS, 0.1)
    for peer in world.peers.values():
        versions = peer.driver.machine.groups.wait_avoiding.version
        assert versions == STEPS // EVERY_UPDATES
        done = [r for r in peer.metrics.of("group") if r["outcome"] == Outcome.DONE]
        claimed = [record for record in done if len(record["members"]) == 2]
        assert len([record for record in done if len(record["members"]) == 4]) == versions
        assert len(claimed) >= STEPS // 2, "gossip goes on meanwhile"
    await world.close()


@pytest.mark.parametrize("algorithm", [*known_algorithms(), MIXED])
async def test_an_average_that_takes_long_because_of_a_slow_link_succeeds(algorithm: str):
    """A group had a lease, which was not renewed while its chunks moved: 17.6 s, and it was over.

    Each peer of a pair sends its model once: 800 kB, at 20 kB/s, which takes 40 s.
    """
    world = await build(
        4,
        algorithm,
        size=200_000,
        link=Link(bandwidth_bytes_s=SLOW_BYTES_S),
        exchange=ExchangeConfig(slice_kib=16),
    )
    training = asyncio.create_task(world.train(6, steps_of(20.0), Books(world).injecting(6)))
    await asyncio.sleep(900.0)
    for peer in world.peers.values():
        peer.driver.withdraw()
    await training
    for name, peer in world.peers.items():
        formed = [r for r in peer.metrics.of("group") if r["sent_bytes"] or r["exchange_s"]]
        assert len(formed) >= 3, f"{name} was in {len(formed)} groups"
        failed = [(r["ticket"], r["exchange_s"], r["reason"]) for r in formed if not _is_done(r)]
        assert failed == [], f"{name}: {failed}"
        assert max(record["exchange_s"] for record in formed) > 40.0
    await world.close()


def _is_done(record: dict[str, object]) -> bool:
    return record["outcome"] == Outcome.DONE
