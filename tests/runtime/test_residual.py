"""Error feedback: what a codec takes from gradients is in a later mean, and all stay equal."""

import asyncio

import numpy as np
import pytest

from p2ptrain.core.effects import Outcome
from p2ptrain.runtime.exchange import ExchangeConfig
from tests.helpers.worlds import build, models, steps_of

STEPS = 40


async def trained(codec: str, count: int, size: int, *, crash: bool = False):
    """Peers that descend random gradients; what their models had to be, all of it in float64."""
    exchange = ExchangeConfig(gradient_codec=codec, chunk_kib=1)
    world = await build(count, "allreduce", equal=True, size=size, exchange=exchange)
    due_M = models(world)[0]
    chances = {name: np.random.default_rng(rank) for rank, name in enumerate(world.peers)}

    def descend(peer, _: int) -> None:
        gradient = chances[peer.driver.name].standard_t(3, size).astype(np.float32)
        peer.replica.gradient = gradient
        due_M[:] -= peer.replica.learning_rate * gradient.astype(np.float64) / count

    if crash:
        asyncio.get_running_loop().call_later(1.05, world.crash, "p1")
    await world.train(STEPS, steps_of(0.1), descend)
    return world, due_M


def residuals(world, size: int) -> np.ndarray:
    peers = world.peers.values()
    return np.array([peer.driver.averages.residual.vector(size) for peer in peers], np.float64)


@pytest.mark.parametrize(
    ("codec", "count", "size"),
    [
        *((codec, 3, 4000) for codec in ("bf16", "fp16", "int8", "int4")),
        *(("int4", *other) for other in ((2, 700), (3, 7), (5, 4000))),
        ("bf16", 3, 7),
    ],
)
async def test_what_a_codec_takes_from_gradients_comes_later(codec: str, count: int, size: int):
    world, due_M = await trained(codec, count, size)
    rows, left = models(world), residuals(world, size)
    assert np.array_equal(rows, np.tile(rows[0], (count, 1)))
    assert left.any(), "a lossy codec takes something"
    rate = next(iter(world.peers.values())).replica.learning_rate
    owed_M = due_M + rate * left.sum(axis=0) / count
    assert np.abs(rows[0] - owed_M).max() < 1e-4
    assert np.abs(rows[0] - due_M).max() < rate * np.abs(left).max() + 1e-4
    await world.close()


async def test_an_exact_codec_leaves_nothing():
    world, due_M = await trained("fp32", 3, 4000)
    assert not residuals(world, 4000).any()
    np.testing.assert_allclose(models(world)[0], due_M, rtol=1e-5)
    await world.close()


async def test_a_broken_group_changes_no_residual_and_the_others_stay_equal():
    world, _ = await trained("int8", 3, 4000, crash=True)
    rows = models(world)
    assert len(rows) == 2
    assert np.array_equal(rows[0], rows[1])
    done = [r for r in world.peers["p0"].metrics.of("group") if r["outcome"] == Outcome.DONE]
    assert {len(record["members"]) for record in done} == {2, 3}
    await world.close()


async def test_alone_nothing_is_rounded():
    world, due_M = await trained("int8", 1, 500)
    assert not residuals(world, 500).any()
    np.testing.assert_allclose(models(world)[0], due_M, rtol=1e-5)
    await world.close()
