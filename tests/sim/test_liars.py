"""One of eight peers sends garbage: what robust means make of it, and how votes name it."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from p2ptrain.core import shards as shards_module
from p2ptrain.core.shards import Span
from p2ptrain.errors import ConfigError
from p2ptrain.runtime import audits as audits_module
from p2ptrain.runtime import exchange as exchange_module
from p2ptrain.runtime.audits import Watched
from p2ptrain.runtime.exchange import BucketExchange, Exchange, ExchangeConfig
from p2ptrain.runtime.mix import Bucket, Mix
from p2ptrain.sim.replica import VectorReplica
from p2ptrain.sim.world import SimPeer, World
from tests.helpers.worlds import SIZE, steps_of

PEERS, STEPS, RATE, LIAR = 8, 16, 0.4, "p5"
TRIMMED, CLIPPED = ExchangeConfig(trimmed_share=0.125), ExchangeConfig(robust_mean="clipped")
ROBUST = pytest.mark.parametrize("robust", [TRIMMED, CLIPPED], ids=["trimmed", "clipped"])
VOTES = ExchangeConfig(norm_limit=10, opposed_groups=3)
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
    audits: list[dict[str, Any]]
    """Records of all audits by honest peers."""

    @property
    def caught(self) -> set[str]:
        """Owners that audits name."""
        return {audit["owner"] for audit in self.audits if audit["outcome"] == "wrong"}


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
            assert ("trimmed_l2" in group) == (exchange.trimmed(PEERS) > 0)
            assert ("clipped_l2" in group) == exchange.clips(PEERS)
            for name in group.get("offenders", ()):
                named[name] = min(named.get(name, number), number)
    told = [one["text"] for one in world.peers[LIAR].metrics.of("warning")]
    warned = [one["text"] for one in world.peers["p0"].metrics.of("warning")]
    models = [peer.model() for peer in honest.values()]
    audits = [audit for peer in honest.values() for audit in peer.metrics.of("audit")]
    await world.close()
    final_loss = float(np.mean([loss(model) for model in models]))
    return Outcome(final_loss, named, told, warned, audits)


@pytest.fixture
def in_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors are reduced by the owners of shards, however short they are."""
    monkeypatch.setattr(shards_module, "DIRECT_CHUNKS", -1)


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
async def test_votes_name_a_liar_where_each_member_sees_a_shard_of_its_own(lie, in_shards):
    seen = await outcome("allreduce", lie, VOTES, size=240)
    assert list(seen.named) == [LIAR]
    assert seen.named[LIAR] < 10


async def test_votes_name_a_liar_among_models():
    seen = await outcome("local_sgd", "random", VOTES, period=1)
    assert list(seen.named) == [LIAR]
    assert seen.named[LIAR] < 10


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [("allreduce", {}), ("local_sgd", {"period": 2}), ("wagma", {"group_size": 4}), ("eager", {})],
)
async def test_no_honest_peer_is_named(algorithm, options):
    for seed in range(2):
        assert (await outcome(algorithm, HONEST, VOTES, seed=seed, **options)).named == {}


def test_limits_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match=r"norm_limit = 0.5 must be above 1"):
        ExchangeConfig(norm_limit=0.5)
    with pytest.raises(ConfigError, match=r"opposed_groups = -1 must be a number of groups"):
        ExchangeConfig(opposed_groups=-1)


# --- audits ---------------------------------------------------------------------------------------

AUDITS = ExchangeConfig(audited_owners=0.5)
OFTEN = ExchangeConfig(audited_owners=1)


class WrongMeans(Mix):
    """Hands out other means of its shard than it has reduced."""

    def handed_out(self, span: Span) -> memoryview:
        handed = np.frombuffer(super().handed_out(span), np.float32)
        return memoryview((handed + np.float32(1)).tobytes())


class LyingOwner(BucketExchange):
    """One member hands out wrong means."""

    def __init__(self, exchange: Exchange, bucket: Bucket) -> None:
        super().__init__(exchange, bucket)
        if exchange.me == LIAR:
            self.mix.__class__ = WrongMeans


class WrongParts(BucketExchange):
    """One member reduces its shard without what another has contributed, and says it was so."""

    def _reduce(self, index: int, in_order: list[np.ndarray]) -> float:
        if self._exchange.me == LIAR:
            in_order[2] = np.zeros_like(in_order[2])
        return super()._reduce(index, in_order)


class WrongShow(Watched):
    """One member shows another contribution than it has made."""

    def kept(self, span: Span) -> np.ndarray:
        return super().kept(span) + np.float32(self._me == LIAR)


async def test_audits_name_an_owner_that_hands_out_wrong_means_and_the_others_vote_it_out(
    monkeypatch, in_shards
):
    monkeypatch.setattr(exchange_module, "BucketExchange", LyingOwner)
    seen = await outcome("allreduce", HONEST, OFTEN)
    assert seen.caught == {LIAR}
    assert list(seen.named) == [LIAR]
    assert any("audits have found means that it handed out wrong" in text for text in seen.told)


async def test_audits_of_half_of_the_groups_name_a_liar_within_twenty(monkeypatch, in_shards):
    monkeypatch.setattr(exchange_module, "BucketExchange", LyingOwner)
    seen = await outcome("allreduce", HONEST, AUDITS)
    assert STEPS < 20
    assert seen.caught == {LIAR}


async def test_an_owner_is_named_by_the_member_whose_part_it_denies(monkeypatch, in_shards):
    monkeypatch.setattr(exchange_module, "BucketExchange", WrongParts)
    seen = await outcome("allreduce", HONEST, OFTEN)
    assert seen.caught == {LIAR}
    assert {audit["outcome"] for audit in seen.audits} >= {"sound", "open", "wrong"}


async def test_who_shows_another_contribution_has_no_honest_owner_named(monkeypatch, in_shards):
    monkeypatch.setattr(audits_module, "Watched", WrongShow)
    seen = await outcome("allreduce", HONEST, AUDITS)
    assert seen.caught <= {LIAR}, "it contradicts its own table where it is the owner"
    assert {audit["outcome"] for audit in seen.audits if audit["owner"] != LIAR} == {"open"}


@pytest.mark.parametrize(
    ("algorithm", "more"),
    [
        ("allreduce", {"robust_mean": "clipped", "gradient_codec": "int8"}),
        ("allreduce", {"robust_mean": "trimmed", "norm_limit": 10}),
        ("local_sgd", {"codec": "bf16"}),
        ("dear", {}),
    ],
)
async def test_audits_of_honest_owners_find_all_sound(algorithm, more, in_shards):
    options = {"period": 2} if algorithm == "local_sgd" else {}
    exchange = replace(AUDITS, **more)
    seen = await outcome(algorithm, HONEST, exchange, **options)
    assert seen.audits
    assert {(audit["outcome"], audit["why"]) for audit in seen.audits} == {("sound", "")}
    assert seen.named == {}


def test_a_share_of_audits_that_cannot_be_is_refused():
    with pytest.raises(ConfigError, match=r"audited_owners = 2 must be from 0 to 1"):
        ExchangeConfig(audited_owners=2)
