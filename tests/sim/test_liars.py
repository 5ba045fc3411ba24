"""One of eight peers sends garbage: what robust means make of it, and how votes name it."""

from dataclasses import dataclass

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
VOTES = ExchangeConfig(norm_limit=10, opposed_groups=3)
IN_SHARDS = ExchangeConfig(norm_limit=10, opposed_groups=3, chunk_kib=1)
LARGE = 16_384
"""Numbers of a model that is reduced in shards, if chunks are of 1 KiB."""

LIES = {
    "random": lambda gradient, rng: np.float32(rng.uniform(-50, 50)),
    "negated": lambda gradient, rng: -gradient,
    "x1000": lambda gradient, rng: gradient * 1000,
}
WILD = {
    **LIES,
    "random": lambda gradient, rng: np.float32(rng.uniform(-500, 500)),
    "1e30": lambda gradient, rng: np.float32(1e30),
}
HONEST = ""


def optimum(name: str, size: int = SIZE) -> np.ndarray:
    """Where the data of this peer would have the model."""
    return np.random.default_rng(int(name[1:])).normal(3.0, 1.0, size).astype(np.float32)


def loss(model_M: np.ndarray) -> float:
    """Of all honest peers' data."""
    honest = [f"p{n}" for n in range(PEERS) if f"p{n}" != LIAR]
    return float(
        np.mean([np.square(model_M - optimum(name, len(model_M))).mean() for name in honest])
    )


@dataclass(frozen=True)
class Outcome:
    """Of one run, as the honest peers have it."""

    loss: float
    named: dict[str, int]
    """By name, in which of a peer's groups at the earliest."""
    told: list[str]
    """Warnings of the liar."""
    warned: list[str]
    """Warnings of an honest one."""


async def outcome(
    algorithm: str,
    lie: str,
    exchange: ExchangeConfig,
    *,
    seed: int = 0,
    size: int = SIZE,
    **options,
) -> Outcome:
    world, begin = World(seed, exchange=exchange), np.zeros(size, np.float32)
    for number in range(PEERS):
        await world.add(f"p{number}", VectorReplica(begin, RATE), algorithm, **options)

    def before_step(peer: SimPeer, _: int) -> None:
        replica, name = peer.replica, peer.driver.name
        gradient = replica.live - optimum(name, size)
        if name == LIAR and lie:
            gradient = np.full_like(gradient, 1) * WILD[lie](gradient, peer.driver.rng)
        replica.gradient = gradient

    await world.train(STEPS, steps_of(0.1), before_step)
    honest = {name: peer for name, peer in world.peers.items() if name != LIAR}
    named: dict[str, int] = {}
    for peer in honest.values():
        for number, group in enumerate(peer.metrics.of("group")):
            assert ("trimmed_l2" in group) == (exchange is TRIMMED)
            assert ("clipped_l2" in group) == (exchange is CLIPPED)
            for name in group.get("offenders", ()):
                named[name] = min(named.get(name, number), number)
    told = [one["text"] for one in world.peers[LIAR].metrics.of("warning")]
    warned = [one["text"] for one in world.peers["p0"].metrics.of("warning")]
    models = [peer.model() for peer in honest.values()]
    await world.close()
    return Outcome(float(np.mean([loss(model) for model in models])), named, told, warned)


CLEAN = loss(np.mean([optimum(f"p{n}") for n in range(PEERS)], axis=0))
"""Where a run ends in which all are honest: it has the data of all eight."""


# --- robust means ---------------------------------------------------------------------------------


@ROBUST
@pytest.mark.parametrize("lie", LIES)
async def test_with_robust_means_one_liar_of_eight_costs_at_most_a_twentieth(lie, robust):
    assert (await outcome("allreduce", lie, robust)).loss <= 1.05 * CLEAN


@ROBUST
async def test_robust_means_hold_for_models_as_for_gradients(robust):
    assert (await outcome("local_sgd", "random", robust, period=1)).loss <= 1.05 * CLEAN


async def test_without_them_it_ruins_the_model_of_all():
    assert (await outcome("allreduce", "random", ExchangeConfig())).loss > 1.2 * CLEAN


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


# --- votes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lie", WILD)
async def test_votes_name_a_liar_within_ten_groups_and_its_groups_go_on_without_it(lie):
    seen = await outcome("allreduce", lie, VOTES)
    assert seen.named == {LIAR: seen.named[LIAR]}
    assert seen.named[LIAR] < 10
    assert seen.loss <= 1.05 * CLEAN
    told = "points against the others" if lie == "negated" else "times the usual norm"
    for warnings in (seen.told, seen.warned):
        assert any(f"{LIAR} is left out by 7 of 7 votes" in one and told in one for one in warnings)


@pytest.mark.parametrize("lie", ["random", "negated"])
async def test_votes_name_a_liar_where_each_member_sees_a_shard_of_its_own(lie):
    seen = await outcome("allreduce", lie, IN_SHARDS, size=LARGE)
    assert list(seen.named) == [LIAR]
    assert seen.named[LIAR] < 10


async def test_votes_name_a_liar_among_models():
    seen = await outcome("local_sgd", "random", VOTES, period=1)
    assert list(seen.named) == [LIAR]
    assert seen.named[LIAR] < 10


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("algorithm", "options"),
    [("allreduce", {}), ("local_sgd", {"period": 2}), ("wagma", {"group_size": 4}), ("eager", {})],
)
async def test_no_honest_peer_is_named(algorithm, options, seed):
    seen = await outcome(algorithm, HONEST, VOTES, seed=seed, **options)
    assert seen.named == {}


def test_limits_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match=r"norm_limit = 0.5 must be above 1"):
        ExchangeConfig(norm_limit=0.5)
    with pytest.raises(ConfigError, match=r"opposed_groups = -1 must be a number of groups"):
        ExchangeConfig(opposed_groups=-1)
