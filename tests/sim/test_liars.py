"""One of eight peers sends garbage: what robust means make of it."""

import numpy as np
import pytest

from p2ptrain.errors import ConfigError
from p2ptrain.runtime.exchange import ExchangeConfig
from p2ptrain.sim.replica import VectorReplica
from p2ptrain.sim.world import SimPeer, World
from tests.helpers.worlds import SIZE, steps_of

PEERS, STEPS, RATE, LIAR = 8, 16, 0.4, "p5"
TRIMMED, CLIPPED = ExchangeConfig(trimmed_share=0.125), ExchangeConfig(robust_mean="clipped")
ROBUST = pytest.mark.parametrize("robust", [TRIMMED, CLIPPED], ids=["trimmed", "clipped"])
LIES = {
    "random": lambda gradient, rng: np.float32(rng.uniform(-50, 50)),
    "negated": lambda gradient, rng: -gradient,
    "x1000": lambda gradient, rng: gradient * 1000,
}


def optimum(name: str) -> np.ndarray:
    """Where the data of this peer would have the model."""
    return np.random.default_rng(int(name[1:])).normal(3.0, 1.0, SIZE).astype(np.float32)


def loss(model_M: np.ndarray) -> float:
    """Of all honest peers' data."""
    honest = [f"p{n}" for n in range(PEERS) if f"p{n}" != LIAR]
    return float(np.mean([np.square(model_M - optimum(name)).mean() for name in honest]))


async def final_loss(algorithm: str, lie: str, exchange: ExchangeConfig, **options) -> float:
    world = World(0, exchange=exchange)
    for number in range(PEERS):
        replica = VectorReplica(np.zeros(SIZE, np.float32), RATE)
        await world.add(f"p{number}", replica, algorithm, **options)

    def before_step(peer: SimPeer, _: int) -> None:
        replica, name = peer.replica, peer.driver.name
        gradient = replica.live - optimum(name)
        if name == LIAR:
            gradient = np.full_like(gradient, 1) * LIES[lie](gradient, peer.driver.rng)
        replica.gradient = gradient

    await world.train(STEPS, steps_of(0.1), before_step)
    models = [peer.model() for name, peer in world.peers.items() if name != LIAR]
    last = world.peers["p0"].metrics.of("group")[-1]
    assert ("trimmed_l2" in last) == (exchange is TRIMMED)
    assert ("clipped_l2" in last) == (exchange is CLIPPED)
    await world.close()
    return float(np.mean([loss(model) for model in models]))


CLEAN = loss(np.mean([optimum(f"p{n}") for n in range(PEERS)], axis=0))
"""Where a run ends in which all are honest: it has the data of all eight."""


@ROBUST
@pytest.mark.parametrize("lie", LIES)
async def test_with_robust_means_one_liar_of_eight_costs_at_most_a_twentieth(lie, robust):
    assert await final_loss("allreduce", lie, robust) <= 1.05 * CLEAN


@ROBUST
async def test_robust_means_hold_for_models_as_for_gradients(robust):
    assert await final_loss("local_sgd", "random", robust, period=1) <= 1.05 * CLEAN


async def test_without_them_it_ruins_the_model_of_all():
    assert await final_loss("allreduce", "random", ExchangeConfig()) > 1.2 * CLEAN


def test_as_many_are_left_out_as_the_share_says_and_none_of_small_groups():
    robust = ExchangeConfig(trimmed_share=0.25)
    assert [robust.trimmed(count) for count in (2, 3, 4, 7, 8, 16)] == [0, 0, 1, 1, 2, 4]
    assert ExchangeConfig().trimmed(8) == 0
    assert ExchangeConfig(robust_mean="trimmed").trimmed(8) == 1
    with pytest.raises(ConfigError, match=r"trimmed_share = 0.5 must be from 0 to below 0.5"):
        ExchangeConfig(trimmed_share=0.5)


def test_there_is_one_kind_of_robust_mean_at_a_time_and_none_of_small_groups():
    assert [CLIPPED.clips(count) for count in (2, 3, 4, 8)] == [False, False, True, True]
    assert CLIPPED.trimmed(8) == 0
    assert not TRIMMED.clips(8)
    with pytest.raises(ConfigError, match="two kinds of mean"):
        ExchangeConfig(robust_mean="clipped", trimmed_share=0.1)
    with pytest.raises(ConfigError, match=r"robust_mean = 'mode' must be one of: none, trimmed"):
        ExchangeConfig(robust_mean="mode")
