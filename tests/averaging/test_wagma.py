"""WAGMA: its butterflies, and what its two ways of synchronising and of being late do to models."""

import asyncio
from itertools import product
from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.averaging.base import load_algorithm
from p2ptrain.averaging.wagma import butterfly, default_group_size
from p2ptrain.core.effects import Outcome, What
from p2ptrain.core.wait_avoiding import NOBODY, Rule
from p2ptrain.errors import ConfigError
from p2ptrain.ids import PeerId
from p2ptrain.sim.link import Link
from p2ptrain.sim.replica import VectorReplica
from p2ptrain.sim.world import SimPeer, World
from tests.helpers.worlds import (
    LEARNING_RATE,
    SIZE,
    Books,
    build,
    consensus_distance,
    models,
    steps_of,
    sum_of,
)

COUNTS = [*range(1, 34), 63, 64, 100]
SIZES = [2, 4, 8, 16]


def names(count: int) -> tuple[PeerId, ...]:
    return tuple(PeerId(f"p{i:03}") for i in range(count))


def log2(number: int) -> int:
    return number.bit_length() - 1


# --- groups ---------------------------------------------------------------------------------------


def test_eight_peers_in_fours_meet_as_in_the_papers_example():
    assert butterfly(0, 8, 4) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert butterfly(1, 8, 4) == ((0, 1, 4, 5), (2, 3, 6, 7))


def test_five_peers_in_pairs_share_four_slots():
    assert butterfly(0, 5, 2) == ((0, 1, 2), (3, 4))
    assert butterfly(1, 5, 2) == ((0, 1, 3), (2, 4))


@pytest.mark.parametrize("size", SIZES)
def test_the_groups_of_a_version_are_a_partition_and_of_the_size_asked_for(size: int):
    for count, version in product(COUNTS, range(12)):
        groups = butterfly(version, count, size)
        assert sorted(place for group in groups for place in group) == list(range(count))
        for group in groups:
            assert list(group) == sorted(group)
            assert min(size, count) <= len(group) <= 2 * size


@pytest.mark.parametrize("size", SIZES)
def test_a_power_of_two_makes_groups_of_exactly_that_size(size: int):
    for count in [2**k for k in range(1, 8)]:
        sizes = {len(g) for version in range(9) for g in butterfly(version, count, size)}
        assert sizes == {min(size, count)}


@pytest.mark.parametrize("size", SIZES)
def test_an_update_reaches_everyone_in_as_few_versions_as_are_possible(size: int):
    for count, first in product(COUNTS, range(5)):
        reached = np.eye(count, dtype=bool)
        for version in range(first, first + ceil(log2(count) / log2(size))):
            for group in butterfly(version, count, size):
                reached[list(group)] = reached[list(group)].any(axis=0)
        assert reached.all(), f"{count} peers from version {first} on"


@pytest.mark.parametrize(
    ("count", "size"),
    [(1, 2), (2, 2), (4, 2), (5, 2), (8, 2), (10, 4), (16, 4), (64, 8), (256, 16), (1024, 32)],
)
def test_by_default_a_group_is_about_the_square_root_of_the_swarm(count: int, size: int):
    assert default_group_size(count) == size


@given(version=st.integers(1, 10**9), count=st.integers(1, 40), sync=st.sampled_from(["elastic"]))
def test_all_members_of_a_group_name_the_same_group(version: int, count: int, sync: str):
    algorithm, peers = load_algorithm("wagma", {"sync": sync}), names(count)
    rounds = {me: algorithm.schedule(version, peers, me) for me in peers}
    for me, here in rounds.items():
        assert me in here.members
        assert here.what is What.MODELS
        assert {rounds[peer].members for peer in here.members} == {here.members}
        assert algorithm.schedule(version, list(peers), me) == here, "and always the same"


def test_every_tau_versions_everyone_is_in_one_group():
    peers = names(8)
    for sync, rule in (("elastic", NOBODY), ("step", Rule(waiting=8))):
        algorithm = load_algorithm("wagma", {"tau": 5, "sync": sync})
        for version in range(1, 21):
            here = algorithm.schedule(version, peers, peers[3])
            assert (here.members == peers) == (version % 5 == 0)
            assert here.rule == (rule if version % 5 == 0 else NOBODY)


def test_in_fragments_each_part_is_averaged_once_by_each_group_and_then_the_groups_change():
    peers, algorithm = names(8), load_algorithm("wagma", {"fragments": 3, "tau": 4})
    for me in peers:
        for turn in range(1, 9):
            rounds = [algorithm.schedule(3 * (turn - 1) + part, peers, me) for part in range(1, 4)]
            assert [here.fragment for here in rounds] == [0, 1, 2]
            assert {here.fragments for here in rounds} == {3}
            assert len({here.members for here in rounds}) == 1
            assert (rounds[0].members == peers) == (turn % 4 == 0)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"fragments": 0}, "wagma fragments = 0 must be 1 or more"),
        ({"tau": 0}, "wagma tau = 0 must be 1 or more"),
        ({"waits": False, "sync": "step"}, "sync = 'step' is a rule for trainers that wait"),
        ({"waits": False, "late": "paper"}, "late = 'paper' is a rule for trainers that wait"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, object], sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        load_algorithm("wagma", options)


# --- behind the trainer ---------------------------------------------------------------------------


@pytest.mark.parametrize("fragments", [1, 2])
async def test_behind_the_trainer_a_slow_link_costs_no_step_and_no_update(fragments: int):
    """A model takes as long as some steps on the link."""
    link = Link(bandwidth_bytes_s=20_000)
    world = await build(4, "wagma", link=link, waits=False, fragments=fragments, size=2000)
    books = Books(world)
    await world.train(100, steps_of(0.1), books.injecting(100))
    for peer in world.peers.values():
        assert peer.boundary.totals.wait_s == 0
        done = [r for r in peer.metrics.of("group") if r["outcome"] == Outcome.DONE]
        assert 5 <= len(done) < 100, "as many as the link can carry"
    np.testing.assert_allclose(sum_of(world), books.due_M, rtol=1e-5)
    await world.close()


# --- nobody slow ----------------------------------------------------------------------------------


def together(_: PeerId) -> float:
    """All peers take exactly as long for a step."""
    return 0.1


@pytest.mark.parametrize(("count", "size", "versions"), [(8, 2, 3), (8, 4, 2), (16, 4, 2)])
async def test_models_are_equal_after_as_many_versions_as_an_update_needs_to_reach_everyone(
    count: int, size: int, versions: int
):
    world = await build(count, "wagma", learning_rate=0.0, group_size=size, tau=1000)
    mean_M = models(world).mean(axis=0)
    await world.train(versions, together)
    np.testing.assert_allclose(models(world), np.tile(mean_M, (count, 1)), rtol=1e-6)
    await world.close()


@pytest.mark.parametrize("sync", ["elastic", "step"])
@pytest.mark.parametrize("count", [2, 3, 4])
async def test_a_group_of_everyone_is_sgd_on_one_large_batch_if_nobody_is_late(
    count: int, sync: str
):
    world = await build(count, "wagma", equal=True, group_size=4, sync=sync)
    expected = models(world)[0]

    async def on_the_beat(peer: SimPeer) -> None:
        peer.boundary.begin()
        for step in range(25):
            await asyncio.sleep(0.1 * (step + 1) - asyncio.get_running_loop().time())
            peer.replica.gradient = peer.replica.live - np.float32(int(peer.driver.name[1:]))
            await peer.boundary.step(1, None, peer.replica.descend)
        await peer.boundary.end()

    await world.run(on_the_beat)
    for _ in range(25):
        expected -= LEARNING_RATE * np.mean([expected - own for own in range(count)], axis=0)
    np.testing.assert_allclose(models(world), np.tile(expected, (count, 1)), rtol=1e-5)
    await world.close()


# --- somebody slow --------------------------------------------------------------------------------


async def test_nobody_waits_for_a_slow_peer_and_its_groups_do_not_break():
    world = await build(8, "wagma")
    await world.train(40, steps_of(0.05, p3=0.25))
    for name, peer in world.peers.items():
        assert peer.boundary.totals.wait_s < 40 * 0.02, "only for transfers"
        assert name == "p3" or peer.metrics.of("step")[-1]["t"] < 40 * 0.05 * 1.2 + 1.0
    formed = world.peers[PeerId("p3")].driver.accounts.groups_formed
    assert formed > 40, "the others run its versions, one for each step of theirs"
    await world.close()


async def test_a_slow_peer_is_heard_by_everyone():
    """Its target is one of four: the mean must come to rest where all four are heard."""
    world = await build(4, "wagma", equal=True, learning_rate=0.1)

    def downhill(peer: SimPeer, _: int) -> None:
        peer.replica.gradient = peer.replica.live - np.float32(peer.driver.name == "p3")

    await world.train(200, steps_of(0.1, p3=0.4), downhill)
    here = models(world)[:3].mean()
    assert 0.04 < here < 0.25, "a quarter if it were as fast as the others"
    await world.close()


@pytest.mark.parametrize("sync", ["elastic", "step"])
@pytest.mark.parametrize("seed", range(3))
async def test_a_bad_network_and_a_slow_peer_cost_time_and_no_update(seed: int, sync: str):
    link = Link(latency_s=0.02, jitter_s=0.1, loss=0.05, duplication=0.2)
    world = await build(5, "wagma", seed=seed, link=link, tau=4, sync=sync)
    books = Books(world)
    await world.train(60, steps_of(0.1, p2=0.4), books.injecting(60))
    np.testing.assert_allclose(sum_of(world), books.due_M, rtol=1e-5)
    assert books.injected == 300
    await world.close()


async def test_in_the_papers_synchronisation_nobody_is_more_than_tau_steps_ahead():
    world = await build(4, "wagma", sync="step", tau=5)
    gaps = []

    def look(_: SimPeer, __: int) -> None:
        steps = [peer.boundary.totals.steps for peer in world.peers.values()]
        gaps.append(max(steps) - min(steps))

    await world.train(30, steps_of(0.05, p3=0.25), look)
    assert 4 <= max(gaps) <= 5
    for peer in world.peers.values():
        assert peer.metrics.of("step")[-1]["t"] > 25 * 0.25, "one slow peer slows all"
        assert peer.driver.machine.groups.wait_avoiding.version == 30
    await world.close()


async def test_in_elastic_synchronisation_a_slow_peer_slows_nobody():
    world = await build(4, "wagma", sync="elastic", tau=5)
    await world.train(30, steps_of(0.05, p3=0.25))
    ended = [peer.metrics.of("step")[-1]["t"] for peer in world.peers.values()]
    assert max(ended[:3]) < 30 * 0.05 * 1.2 + 0.5 < ended[3]
    await world.close()


async def test_all_models_are_equal_after_the_papers_synchronisation():
    world = await build(4, "wagma", sync="step", tau=5)
    books = Books(world)
    await world.train(30, steps_of(0.05, p3=0.2), books.injecting(30))
    assert consensus_distance(world) < 1e-6
    np.testing.assert_allclose(sum_of(world), books.due_M, rtol=1e-5)
    await world.close()


async def test_a_version_that_a_member_refuses_runs_nowhere_and_stops_nobody():
    world = await build(2, "wagma", learning_rate=0.0)
    before = models(world)
    world.peers[PeerId("p1")].driver.machine.groups.wait_avoiding.withdraw(0.0)
    await world.train(3, steps_of(0.1))
    peer = world.peers[PeerId("p0")]
    assert peer.metrics.of("group") == [], "no group was formed"
    assert peer.driver.machine.groups.wait_avoiding.version == 3
    assert np.array_equal(models(world), before)
    await world.close()


# --- the paper's rule for late peers --------------------------------------------------------------


async def late_by_one_step(late: str, steps: int, **options: object) -> World:
    """P1 is still in its first step when p0 runs version 1; nothing is learnt."""
    world = await build(2, "wagma", learning_rate=0.0, late=late, **options)
    await world.train(steps, lambda peer: 0.1 if peer == "p0" else 0.15)
    return world


async def test_by_the_papers_rule_a_late_peer_adds_its_model_once_more_and_the_mean_moves():
    world = await late_by_one_step("paper", 0)
    zero, one = models(world)
    await world.close()
    world = await late_by_one_step("paper", 1)
    mean = (zero + one) / 2
    np.testing.assert_allclose(models(world)[0], mean, rtol=1e-5)
    np.testing.assert_allclose(models(world)[1], (zero + one + one) / 3, rtol=1e-5)
    assert abs(models(world).mean(axis=0) - mean).max() > 1e-3
    await world.close()


async def test_in_delta_form_a_late_peer_has_the_mean_too():
    world = await late_by_one_step("delta", 1)
    assert consensus_distance(world) < 1e-6
    await world.close()


async def test_the_papers_synchronisation_makes_models_equal_again_and_does_not_mend_the_mean():
    world = await build(4, "wagma", late="paper", sync="step", tau=5)
    books = Books(world)
    await world.train(20, steps_of(0.05, p1=0.2), books.injecting(20))
    assert consensus_distance(world) < 1e-6
    assert abs(sum_of(world) - books.due_M).max() > 1e-3
    await world.close()


# --- coming and going -----------------------------------------------------------------------------


@pytest.mark.parametrize("sync", ["elastic", "step"])
async def test_a_newcomer_falls_into_step(sync: str):
    world = await build(3, "wagma", equal=True, sync=sync, tau=4)
    loop = asyncio.get_running_loop()

    async def come_late() -> None:
        await asyncio.sleep(1.05)
        peer = await world.add("p9", VectorReplica(np.ones(SIZE)), "wagma", sync=sync, tau=4)
        await peer.process.start(peer.lifecycle.take_model())
        await peer.process.start(peer.train(30, 0.1))

    late = loop.create_task(come_late())
    await world.train(50, steps_of(0.1))
    await late
    await world.settle()
    newcomer = world.peers[PeerId("p9")]
    assert newcomer.driver.accounts.groups_formed > 15
    assert newcomer.driver.machine.groups.wait_avoiding.version > 30
    assert consensus_distance(world) < 1e-6
    await world.close()


@pytest.mark.parametrize("sync", ["elastic", "step"])
@pytest.mark.parametrize("crash_at_s", np.linspace(1.0, 1.2, 5))
async def test_whenever_a_member_dies_the_others_train_on(sync: str, crash_at_s: float):
    world = await build(5, "wagma", sync=sync, tau=4, link=Link(latency_s=0.01))
    loop = asyncio.get_running_loop()
    loop.call_later(float(crash_at_s), world.crash, "p0")
    await world.train(40, steps_of(0.05))
    for peer in world.peers.values():
        assert peer.boundary.totals.steps == 40
        lost = [r for r in peer.metrics.of("group") if r["outcome"] != Outcome.DONE]
        assert len(lost) <= 3
    assert loop.time() < 15
    assert consensus_distance(world) < 1e-5
    await world.close()
