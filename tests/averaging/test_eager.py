"""Eager-SGD: who is waited for, that no gradient is lost or old, and what late peers take in."""

import asyncio
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from p2ptrain.averaging.base import load_algorithm
from p2ptrain.core.effects import What
from p2ptrain.core.wait_avoiding import Rule
from p2ptrain.ids import PeerId, Seconds
from p2ptrain.sim.link import Link
from p2ptrain.sim.replica import VectorReplica
from p2ptrain.sim.world import SimPeer, World
from tests.helpers.worlds import (
    LEARNING_RATE,
    Books,
    build,
    consensus_distance,
    models,
    steps_of,
    sum_of,
)

RULES = ["solo", "majority", "quorum"]
P4 = tuple(PeerId(f"p{i}") for i in range(4))


# --- the schedule ---------------------------------------------------------------------------------


def test_everyone_is_in_every_group_and_models_are_averaged_now_and_then():
    algorithm = load_algorithm("eager", {"average_models_every": 3})
    rounds = [algorithm.schedule(version, P4, P4[1]) for version in range(1, 9)]
    assert {here.members for here in rounds} == {P4}
    late, all_four = What.STALE_GRADIENTS, Rule(waiting=4)
    assert [here.what for here in rounds] == [late, late, late, What.MODELS] * 2
    assert [here.rule == all_four for here in rounds] == [False, False, False, True] * 2


@pytest.mark.parametrize(("quorum", "arrivals"), [(0.5, 2), (0.51, 3), (1.0, 4), (0.01, 1)])
def test_a_quorum_is_a_share_of_those_who_train_rounded_up(quorum: float, arrivals: int):
    algorithm = load_algorithm("eager", {"rule": "quorum", "quorum": quorum})
    assert algorithm.schedule(1, P4, P4[0]).rule == Rule(arrivals, limiter=32)


def test_a_majoritys_initiator_is_drawn_anew_for_each_version_and_alike_by_everyone():
    algorithm = load_algorithm("eager", {"rule": "majority", "seed": 7})
    drawn = Counter()
    for version in range(1, 101):
        rules = {algorithm.schedule(version, P4, me).rule for me in P4}
        assert len(rules) == 1
        drawn[rules.pop().initiator] += 1
    assert set(drawn) == set(P4)
    assert min(drawn.values()) > 10
    other = load_algorithm("eager", {"rule": "majority", "seed": 8})
    assert [algorithm.schedule(v, P4, P4[0]).rule for v in range(1, 20)] != [
        other.schedule(v, P4, P4[0]).rule for v in range(1, 20)
    ]


def test_solo_waits_for_nobody_but_those_who_are_far_behind():
    algorithm = load_algorithm("eager", {"rule": "solo", "limiter": 5})
    assert algorithm.schedule(1, P4, P4[0]).rule == Rule(waiting=1, limiter=5)


# --- who is in a version --------------------------------------------------------------------------


async def on_the_beat(
    world: World,
    steps: int,
    skew_s: Seconds = 0.0,
    gradient: Callable[[SimPeer], object] | None = None,
    beat_s: Seconds = 0.1,
) -> list[int]:
    """Peer i ends each step i * `skew_s` after the beat. How many had a say in each mean, by p0."""
    said = []
    loop = asyncio.get_running_loop()

    async def trainer(peer: SimPeer) -> None:
        own = int(peer.driver.name[1:])

        def update() -> None:
            if own == 0:
                said.append(int((peer.replica.gradient > 0).sum()))
            peer.replica.descend()

        peer.boundary.begin()
        for step in range(steps):
            due = beat_s * (step + 1) + own * skew_s
            await asyncio.sleep(max(0.0, due - loop.time()))
            peer.replica.gradient = np.zeros_like(peer.replica.live)
            if gradient:
                gradient(peer)
            else:
                peer.replica.gradient[own] = 1
            await peer.boundary.step(1, None, update)
        await peer.boundary.end()

    await world.run(trainer)
    return said


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("count", [2, 3, 5])
async def test_if_nobody_is_late_it_is_sgd_on_one_large_batch(count: int, rule: str):
    world = await build(count, "eager", equal=True, rule=rule, average_models_every=10)
    expected = models(world)[0]

    def downhill(peer: SimPeer) -> None:
        peer.replica.gradient = peer.replica.live - np.float32(int(peer.driver.name[1:]))

    await on_the_beat(world, 25, gradient=downhill)
    for _ in range(25):
        expected -= LEARNING_RATE * np.mean([expected - own for own in range(count)], axis=0)
    np.testing.assert_allclose(models(world), np.tile(expected, (count, 1)), rtol=1e-5)
    assert consensus_distance(world) < 1e-6
    await world.close()


async def test_who_does_not_wait_for_a_running_version_waits_less_and_is_later():
    """Averages last about as long as steps."""
    latest, waited_s = {}, {}
    for waits in (True, False):
        options = {"rule": "solo", "waits_for_running": waits}
        world = await build(4, "eager", equal=True, link=Link(latency_s=0.02), **options)
        await world.train(60, steps_of(0.1, p3=0.17))
        latest[waits] = lateness(world)
        waited_s[waits] = sum(peer.boundary.totals.wait_s for peer in world.peers.values())
        await world.close()
    assert latest == {True: 1, False: 2}
    assert waited_s[True] > waited_s[False]


async def test_with_a_quorum_of_all_stragglers_cost_time_and_change_nothing():
    world = await build(3, "eager", equal=True, rule="quorum", quorum=1.0)
    expected = models(world)[0]

    def downhill(peer: SimPeer, _: int) -> None:
        peer.replica.gradient = peer.replica.live - np.float32(int(peer.driver.name[1:]))

    await world.train(25, steps_of(0.1, p1=0.3), downhill)
    for _ in range(25):
        expected -= LEARNING_RATE * np.mean([expected - own for own in range(3)], axis=0)
    np.testing.assert_allclose(models(world), np.tile(expected, (3, 1)), rtol=1e-5)
    await world.close()


LINEAR = {"rule": "solo"}, {"rule": "quorum", "quorum": 0.5}, {"rule": "quorum", "quorum": 0.75}


@pytest.mark.parametrize("options", LINEAR, ids=str)
async def test_as_many_have_a_say_as_the_rule_asks_for_when_all_are_skewed(
    options: dict[str, object],
):
    """Invariant 15: every peer a little later than the one before it, by more than an average."""
    world = await build(8, "eager", equal=True, average_models_every=1000, **options)
    said = await on_the_beat(world, 20, skew_s=0.02, beat_s=0.4)
    fresh = said[0]  # later means have what was late in the one before, too
    assert fresh == max(1, round(8 * float(options.get("quorum", 0))))  # type: ignore[arg-type]
    assert min(said) == fresh
    await world.close()


async def test_a_drawn_initiator_has_half_of_all_with_it_on_average():
    world = await build(8, "eager", equal=True, rule="majority", average_models_every=1000)
    in_time = []
    seen = dict.fromkeys(world.peers, 0)

    def look(peer: SimPeer) -> None:
        version = peer.swarm.version
        in_time.append(version == seen[peer.driver.name])  # else one has begun without it
        seen[peer.driver.name] = version + in_time[-1]

    await on_the_beat(world, 60, skew_s=0.02, beat_s=0.4, gradient=look)
    share = sum(in_time) / len(in_time)
    assert 0.4 < share < 0.7, "4.5 of 8 if each is drawn as often"
    await world.close()


# --- nothing lost, nothing old --------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
async def test_every_gradient_is_in_every_model_once_however_late(rule: str):
    """Invariant 17, through a world: a slow peer, a bad network, and time to deliver the rest."""
    link = Link(latency_s=0.02, jitter_s=0.1, loss=0.05, duplication=0.2)
    world = await build(4, "eager", equal=True, link=link, rule=rule, average_models_every=20)
    books = Books(world)
    await world.train(80, steps_of(0.1, p2=0.35), books.injecting(15))
    np.testing.assert_allclose(sum_of(world), books.due_M, rtol=1e-5)
    assert consensus_distance(world) < 1e-5
    await world.close()


async def test_peers_that_take_in_every_mean_are_equal_and_those_that_take_the_latest_are_not():
    """Nobody averages models here."""
    far_apart = {}
    for missed in ("every", "latest"):
        world = await build(4, "eager", equal=True, rule="solo", missed=missed)
        books = Books(world)
        await world.train(80, steps_of(0.1, p2=0.35), books.injecting(15))
        far_apart[missed] = consensus_distance(world)
        await world.close()
    assert far_apart["every"] < 1e-6
    assert far_apart["latest"] > 1e-3


async def test_averaging_models_brings_peers_together():
    world = await build(3, "eager", learning_rate=0.0, average_models_every=5)
    before, mean_M = consensus_distance(world), models(world).mean(axis=0)
    await world.train(8, steps_of(0.1, p1=0.12))
    assert consensus_distance(world) < 1e-6 < 1e-2 < before
    np.testing.assert_allclose(models(world), np.tile(mean_M, (3, 1)), rtol=1e-6)
    await world.close()


def lateness(world: World) -> int:
    """The most versions that any gradient was late."""
    records = [r for peer in world.peers.values() for r in peer.metrics.of("group")]
    return max(r["staleness_steps"] for r in records if r["what"] == What.STALE_GRADIENTS)


@pytest.mark.parametrize("limiter", [2, 4, 8])
async def test_no_gradient_is_later_than_the_limiter_allows(limiter: int):
    world = await build(3, "eager", equal=True, rule="solo", limiter=limiter)
    await world.train(30, steps_of(0.1, p1=2.5))
    assert 1 <= lateness(world) <= limiter
    await world.close()
    world = await build(3, "eager", equal=True, rule="solo", limiter=1000)
    await world.train(30, steps_of(0.1, p1=2.5))
    assert lateness(world) > 10
    await world.close()


async def test_nobody_waits_for_a_slow_peer_that_keeps_coming():
    world = await build(4, "eager", equal=True)
    await world.train(60, steps_of(0.05, p3=0.25))
    for name in P4[:3]:
        peer = world.peers[name]
        assert peer.metrics.of("step")[-1]["t"] < 60 * 0.05 * 1.2 + 1.0
    slow = world.peers[P4[3]]
    assert slow.boundary.totals.wait_s < 60 * 0.25 * 0.2
    assert slow.replica.updates > 50, "it makes the updates of the others too"
    await world.close()


# --- coming and going -----------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("victim", ["p0", "p2"])
async def test_whenever_a_member_dies_the_others_train_on(victim: str, rule: str):
    for crash_at_s in (1.0, 1.03, 1.07) if victim == "p2" else (1.01, 1.05):
        link = Link(latency_s=0.01)
        world = await build(4, "eager", link=link, rule=rule, average_models_every=15)
        loop = asyncio.get_running_loop()
        loop.call_later(float(crash_at_s) - loop.time() % 1, world.crash, victim)
        began = loop.time()
        await world.train(50, steps_of(0.05))
        assert all(peer.boundary.totals.steps == 50 for peer in world.peers.values())
        assert loop.time() - began < 20
        assert consensus_distance(world) < 1e-5, "models were averaged after the break"
        await world.close()


async def test_a_newcomer_is_heard_and_equal_after_the_next_average_of_models():
    world = await build(3, "eager", equal=True, average_models_every=20)
    loop = asyncio.get_running_loop()

    async def come_late() -> None:
        await asyncio.sleep(1.05)
        replica = VectorReplica(np.ones(24), LEARNING_RATE)
        peer = await world.add("p9", replica, "eager", average_models_every=20)
        await peer.process.start(peer.lifecycle.take_model())
        await peer.process.start(peer.train(40, 0.1))

    late = loop.create_task(come_late())
    await world.train(60, steps_of(0.1))
    await late
    await world.settle()
    newcomer = world.peers[PeerId("p9")]
    assert newcomer.replica.updates > 30
    assert consensus_distance(world) < 1e-6
    await world.close()


async def test_all_peers_hear_of_the_same_progress():
    world = await build(3, "eager", equal=True)
    await world.train(40, steps_of(0.1, p1=0.2))
    fast = world.peers[P4[0]].driver.agreed.progress
    assert 60 < fast <= 120
    await world.close()
