"""Ripples: its table, its three ways to choose groups, and what they do to models."""

import asyncio
from itertools import combinations, product

import numpy as np
import pytest

from p2ptrain.averaging.base import load_algorithm
from p2ptrain.averaging.ripples import circle, static_groups
from p2ptrain.core.effects import Outcome
from p2ptrain.ids import PeerId
from p2ptrain.sim.link import Link
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

ALL = [*product(("generator", "static", "decentral"), [False, True])]
COUNTS = [1, 2, 3, 5, 8, 10, 13, 16, 32]


def names(count: int) -> tuple[PeerId, ...]:
    return tuple(PeerId(f"p{place:02}") for place in range(count))


# --- the table ------------------------------------------------------------------------------------


def test_two_machines_of_four_meet_as_published():
    assert set(static_groups(0, 8, 4)) == {(0, 4), (1,), (5,), (2, 3), (6, 7)}
    assert set(static_groups(1, 8, 4)) == {(0, 1, 2, 3), (4, 5, 6, 7)}
    assert set(static_groups(2, 8, 4)) == {(1, 5), (2,), (6,), (0, 3), (4, 7)}
    assert static_groups(3, 8, 4) == static_groups(1, 8, 4)
    assert static_groups(4, 8, 4) == static_groups(0, 8, 4)


@pytest.mark.parametrize("each", [1, 2, 3, 4, 5, 8])
def test_at_every_step_all_members_name_the_same_group(each: int):
    algorithm = load_algorithm("ripples", {"schedule": "static", "peers_per_machine": each})
    for count, version in product(COUNTS, range(1, 9)):
        peers = names(count)
        rounds = {me: algorithm.schedule(version, peers, me).members for me in peers}
        for me, members in rounds.items():
            assert me in members
            assert {rounds[peer] for peer in members} == {members}


def period(count: int, each: int) -> np.ndarray:
    """What four steps do to models, as one matrix."""
    product_PP = np.eye(count)
    for step in range(4):
        mix_PP = np.zeros((count, count))
        for group in static_groups(step, count, each):
            mix_PP[np.ix_(group, group)] = 1 / len(group)
        assert np.array_equal(mix_PP, mix_PP.T)
        np.testing.assert_allclose(mix_PP.sum(axis=0), 1)
        product_PP = mix_PP @ product_PP
    return product_PP


@pytest.mark.parametrize("count", [8, 16, 32])
def test_the_published_table_mixes_as_fast_on_any_number_of_machines(count: int):
    eigenvalues = sorted(abs(np.linalg.eigvals(period(count, 4))))
    assert eigenvalues[-1] == pytest.approx(1)
    assert eigenvalues[-2] == pytest.approx(0.5625)


@pytest.mark.parametrize("each", [1, 2, 3, 4, 5, 8])
def test_any_number_of_peers_and_of_peers_on_a_machine_mixes(each: int):
    for count in COUNTS[1:]:
        assert sorted(abs(np.linalg.eigvals(period(count, each))))[-2] < 0.95


# --- among who is free ----------------------------------------------------------------------------


def test_without_machines_anyone_may_be_taken():
    assert circle(3, names(5), names(5)[1], 5, 3) == (tuple(p for p in names(5) if p != "p01"), 2)


def test_one_peer_of_a_machine_at_a_time_takes_others_and_every_second_turn_only():
    peers = names(8)
    for turn in range(16):
        out = [me for me in peers if set(circle(turn, peers, me, 4, 3)[0]) - set(peers[:4])]
        heads = [me for me in out if me in peers[:4]]
        assert len(heads) == (turn % 2)
    heads_of_all_turns = {
        me for turn in range(8) for me in peers[:4] if peers[4] in circle(turn, peers, me, 4, 3)[0]
    }
    assert heads_of_all_turns == set(peers[:4])


def test_at_even_turns_a_whole_machine_meets_and_one_alone_on_its_machine_goes_out():
    peers = names(9)
    assert circle(2, peers, peers[0], 4, 3) == (peers[1:4], 3)
    assert circle(2, peers, peers[8], 4, 3) == (peers[:8], 2)


# --- models ---------------------------------------------------------------------------------------


def groups_of(world: World) -> list[tuple[str, ...]]:
    """Those that were done, once for each member."""
    return [
        tuple(record["members"])
        for peer in world.peers.values()
        for record in peer.metrics.of("group")
        if record["outcome"] == Outcome.DONE
    ]


@pytest.mark.parametrize(("schedule", "waits"), ALL)
async def test_a_bad_network_and_a_slow_peer_cost_time_and_no_update(schedule: str, waits: bool):
    link = Link(latency_s=0.01, jitter_s=0.05, loss=0.05, duplication=0.2)
    world = await build(7, "ripples", link=link, schedule=schedule, waits=waits)
    books = Books(world)
    await world.train(40, steps_of(0.1, p2=0.4), books.injecting(40))
    assert books.injected == 280
    np.testing.assert_allclose(sum_of(world), books.due_M, rtol=1e-5)
    await world.close()


@pytest.mark.parametrize(
    ("schedule", "waits", "each"),
    [(*way, each) for way in ALL for each in ((0, 4) if way[1] else (0, 2))],
)
async def test_models_come_together_whatever_is_on_a_machine(schedule: str, waits: bool, each: int):
    world = await build(
        8, "ripples", learning_rate=0.0, schedule=schedule, waits=waits, peers_per_machine=each
    )
    await world.train(60, steps_of(0.1))
    assert consensus_distance(world) < 1e-4
    await world.close()


@pytest.mark.parametrize("count", [2, 3, 5])
async def test_a_group_of_everyone_is_sgd_on_one_large_batch(count: int):
    """With one straggler, even, which all wait for."""
    options = {"group_size": count, "waits": True, "slowdown": 1000.0}
    world = await build(count, "ripples", equal=True, **options)
    expected = models(world)[0]

    def downhill(peer: SimPeer, _: int) -> None:
        peer.replica.gradient = peer.replica.live - np.float32(int(peer.driver.name[1:]))

    await world.train(25, steps_of(0.1, p1=0.4), downhill)
    for _ in range(25):
        expected -= LEARNING_RATE * np.mean([expected - own for own in range(count)], axis=0)
    last = models(world)  # who ended first left the others' last group
    np.testing.assert_allclose(last, np.tile(expected, (count, 1)), rtol=1e-2)
    np.testing.assert_allclose(last.mean(axis=0), expected, rtol=1e-5)
    await world.close()


@pytest.mark.parametrize("schedule", ["generator", "static"])
async def test_nobody_waits_for_a_slow_peer_and_it_is_heard(schedule: str):
    """Its target is one of four: the mean must come to rest where all four are heard."""
    world = await build(4, "ripples", equal=True, learning_rate=0.1, schedule=schedule)

    def downhill(peer: SimPeer, _: int) -> None:
        peer.replica.gradient = peer.replica.live - np.float32(peer.driver.name == "p3")

    await world.train(200, steps_of(0.1, p3=0.4), downhill)
    assert 0.04 < models(world)[:3].mean() < 0.25, "a quarter if it were as fast as the others"
    assert all(peer.boundary.totals.wait_s == 0 for peer in world.peers.values())
    await world.close()


@pytest.mark.parametrize("schedule", ["generator", "decentral"])
async def test_where_trainers_wait_the_slow_one_is_not_waited_for_for_long(schedule: str):
    world = await build(8, "ripples", schedule=schedule, waits=True)
    await world.train(60, steps_of(0.1, p7=1.0))
    ended = [peer.metrics.of("step")[-1]["t"] for peer in world.peers.values()]
    assert max(ended[:7]) < 60 * 0.1 * 1.3 + 3 * 1.3 < 0.3 * ended[7]
    await world.close()


@pytest.mark.parametrize(("schedule", "waits"), [("generator", False), ("decentral", False)])
async def test_every_pair_meets(schedule: str, waits: bool):
    world = await build(6, "ripples", schedule=schedule, waits=waits)
    await world.train(80, steps_of(0.1, p5=0.5))
    met = {pair for group in groups_of(world) for pair in combinations(group, 2)}
    assert met == set(combinations(sorted(world.peers), 2))
    await world.close()


async def test_every_pair_meets_also_with_the_filter_on():
    world = await build(6, "ripples", waits=True)
    await world.train(120, steps_of(0.1, p5=0.5))
    met = {pair for group in groups_of(world) for pair in combinations(group, 2)}
    assert met == set(combinations(sorted(world.peers), 2))
    await world.close()


async def test_a_peer_is_in_about_one_group_per_update():
    for schedule in ("generator", "decentral"):
        world = await build(9, "ripples", schedule=schedule)
        await world.train(50, steps_of(0.1))
        for peer in world.peers.values():
            assert 30 <= peer.driver.accounts.groups_formed <= 110
        assert np.mean([len(group) for group in groups_of(world)]) == pytest.approx(3, abs=0.3)
        await world.close()


async def test_groups_stay_inside_machines_half_of_the_time():
    world = await build(8, "ripples", peers_per_machine=4)
    await world.train(60, steps_of(0.1))
    machine = {name: place // 4 for place, name in enumerate(sorted(world.peers))}
    inside = [len({machine[PeerId(name)] for name in group}) == 1 for group in groups_of(world)]
    assert 0.6 < np.mean(inside) < 0.95
    await world.close()


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("crash_at_s", np.linspace(1.0, 1.2, 5))
async def test_whenever_the_generator_dies_the_others_train_on(crash_at_s: float, waits: bool):
    world = await build(5, "ripples", waits=waits, link=Link(latency_s=0.01))
    loop = asyncio.get_running_loop()
    loop.call_later(float(crash_at_s), world.crash, "p0")
    await world.train(60, steps_of(0.05))
    for peer in world.peers.values():
        assert peer.boundary.totals.steps == 60
    assert loop.time() < 20
    late = [g for p in world.peers.values() for g in p.metrics.of("group") if g["t"] > 2.5]
    assert late, "groups are still formed"
    assert consensus_distance(world) < 0.05
    await world.close()
