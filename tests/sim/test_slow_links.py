"""An average has no deadline of its own: on a slow link it takes as long as it takes."""

import asyncio
from typing import Any

import pytest

from p2ptrain.averaging.base import known_algorithms
from p2ptrain.core.effects import Outcome
from p2ptrain.runtime.exchange import ExchangeConfig
from p2ptrain.sim.link import Link
from p2ptrain.sim.world import SimPeer
from tests.helpers.variants import WHOLE
from tests.helpers.worlds import Books, build, steps_of, until

MIXED = "tests.helpers.mixed:Mixed"

SLOW_BYTES_S = 20_000.0

OFTEN_AND_WHOLE = {
    **WHOLE,
    "local_sgd": {"period": 1},
    "diloco": {"period": 1},
    "auto": {"now": "ad_psgd", "margin": 1e6},
}


@pytest.mark.parametrize("algorithm", [*known_algorithms(), MIXED])
async def test_an_average_that_takes_long_because_of_a_slow_link_succeeds(algorithm: str):
    """A group had a lease, which was not renewed while its chunks moved: 17.6 s, and it was over.

    Each peer of a pair sends its model once: 800 kB, at 20 kB/s, which takes 40 s.
    """
    world = await build(
        4,
        algorithm,
        size=200_000,
        equal=True,  # as after a start: nothing but averages is on the links
        link=Link(bandwidth_bytes_s=SLOW_BYTES_S),
        exchange=ExchangeConfig(chunk_kib=16),
        **OFTEN_AND_WHOLE.get(algorithm, {}),
    )
    training = asyncio.create_task(world.train(6, steps_of(20.0), Books(world).injecting(6)))
    await until(lambda: all(len(formed(peer)) > 1 for peer in world.peers.values()), within_s=320.0)
    for peer in world.peers.values():
        peer.driver.withdraw()
    await training
    for name, peer in world.peers.items():
        groups = formed(peer)
        assert len(groups) >= 2, f"{name} was in {len(groups)} groups"
        failed = [(r["ticket"], r["exchange_s"], r["reason"]) for r in groups if not _is_done(r)]
        assert failed == [], f"{name}: {failed}"
        assert max(record["exchange_s"] for record in groups) > 40.0
    await world.close()


def formed(peer: SimPeer) -> list[dict[str, Any]]:
    """Records of a peer's groups that have exchanged anything."""
    return [r for r in peer.metrics.of("group") if r["sent_bytes"] or r["exchange_s"]]


def _is_done(record: dict[str, object]) -> bool:
    return record["outcome"] == Outcome.DONE
