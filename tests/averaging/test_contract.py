"""What every algorithm must do, whichever files there are: each is found by its name.

Invariants (algorithms.md, section b): the mean is conserved under concurrent updates (1), models
come together (20), a group of everyone equals SGD on a larger batch (21), one peer equals plain SGD
(22), runs can be repeated (23), and a vanished member stops nobody (12).
"""

import ast
import asyncio
import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest

from p2ptrain.core.messages import Phase
from p2ptrain.ids import PeerId
from p2ptrain.sim.link import Link
from p2ptrain.sim.loop import run
from p2ptrain.sim.replica import VectorReplica
from p2ptrain.sim.world import SimPeer
from tests.helpers.variants import DEFAULTS, VARIANTS, Variant, kinds_of, options_of
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

OF_MODELS = [variant for variant in VARIANTS if variant.load().averages == "models"]
SCHEDULED = [variant for variant in VARIANTS if variant.load().acts("schedule")]
SYNCHRONOUS = [variant for variant in VARIANTS if variant.load().in_step]
"""All peers wait for all others, so that they are equal after every step."""

KEEPS_MEAN = [variant for variant in VARIANTS if variant.conserves_mean]
"""All but those whose published rule has a late peer overwrite or forget."""


def of(variants: Sequence[Variant]) -> pytest.MarkDecorator:
    """A test of each of these."""
    return pytest.mark.parametrize("variant", variants, ids=lambda variant: variant.name)


def of_some(variants: Sequence[Variant], **values: Sequence[object]) -> pytest.MarkDecorator:
    """A test of each algorithm with all values, of each other variant with one.

    Values of several parameters go side by side.
    """
    combinations = list(zip(*values.values(), strict=True))
    cases = [
        pytest.param(variant, *combination, id="-".join(map(str, (variant.name, *combination))))
        for number, variant in enumerate(variants)
        for combination in (
            combinations if variant in DEFAULTS else [combinations[number % len(combinations)]]
        )
    ]
    return pytest.mark.parametrize(("variant", *values), cases)


def test_every_option_of_every_algorithm_is_tried_with_a_value_of_its_own():
    for default in DEFAULTS:
        tried = {
            key
            for options in kinds_of(default.algorithm).values()
            for key, value in options.items()
            if value != getattr(default.load().config, key)
        }
        assert tried == options_of(default.algorithm)


def downhill(peer: SimPeer, _: int) -> None:
    """The gradient of half the squared distance to a point of the peer's own."""
    own = sum(map(ord, peer.driver.name)) % 17
    peer.replica.gradient = peer.replica.live - np.float32(own)


@of(VARIANTS)
async def test_one_peer_alone_is_plain_sgd(variant: Variant):
    world = await build(1, variant)
    (peer,) = world.peers.values()
    expected = peer.replica.live.copy()
    await world.train(20, steps_of(0.1), downhill)
    own = np.float32(sum(map(ord, "p0")) % 17)
    for _ in range(20):
        expected -= np.float32(peer.replica.learning_rate) * (expected - own)
    assert np.array_equal(peer.replica.live, expected)
    assert peer.replica.updates == 20
    await world.close()


@of_some(KEEPS_MEAN, count=[2, 3, 5], seed=range(3))
async def test_no_update_is_lost_wherever_it_lands(variant: Variant, count: int, seed: int):
    """Averages last longer than steps, so that updates land in the middle of them.

    What is delivered late is delivered in the last steps, which learn nothing new. Peers that are
    to stay equal begin so, or some would take over the models of others.
    """
    equal = variant in SYNCHRONOUS
    world = await build(count, variant, equal=equal, seed=seed, link=Link(latency_s=0.04))
    books = Books(world)
    await world.train(32, steps_of(0.05), books.injecting(20))
    np.testing.assert_allclose(sum_of(world), books.due_M, rtol=1e-5)
    await world.close()


@of_some(OF_MODELS, count=[2, 3, 5])
async def test_models_come_together_when_nobody_learns(variant: Variant, count: int):
    """Within 60 steps; each peer ends when it finds them together."""
    world = await build(count, variant, learning_rate=0.0)
    before, mean_M = consensus_distance(world), sum_of(world) / count

    async def trainer(peer: SimPeer) -> None:
        peer.lifecycle.begin()
        while peer.steps < 60 and consensus_distance(world) > 1e-6:
            await peer.pass_through(steps_of(0.1)(peer.driver.name), lambda: None)
            await peer.boundary.step(1, None, peer.replica.descend)
        await peer.boundary.end()

    await world.run(trainer)
    assert consensus_distance(world) < 1e-5 < 1e-2 < before
    if variant.conserves_mean:
        np.testing.assert_allclose(models(world), np.tile(mean_M, (count, 1)), rtol=1e-5)
    await world.close()


@of_some(VARIANTS, victim=["p0", "p1", "p3"])
async def test_a_vanished_member_stops_nobody(variant: Variant, victim: str):
    world = await build(4, variant, equal=True, link=Link(latency_s=0.02))
    loop = asyncio.get_running_loop()
    loop.call_later(0.634, world.crash, victim)
    await world.train(24, steps_of(0.05), downhill)
    assert victim not in world.peers
    assert len(world.peers) == 3
    for peer in world.peers.values():
        assert peer.boundary.totals.steps == 24
        assert peer.driver.me.phase is Phase.DONE
    assert loop.time() < 60
    await world.close()


@of(SYNCHRONOUS)
async def test_peers_that_average_gradients_stay_equal_when_a_member_vanishes(variant: Variant):
    first = SYNCHRONOUS.index(variant) % 2  # of seven moments: before, while, and after it is asked
    for crash_at_s in np.linspace(0.6, 0.9, 7)[first::2]:
        world = await build(4, variant, equal=True, link=Link(latency_s=0.01))
        asyncio.get_running_loop().call_later(float(crash_at_s), world.crash, "p2")
        await world.train(12, steps_of(0.1), downhill)
        rows = models(world)
        assert np.array_equal(rows, np.tile(rows[0], (3, 1)))
        await world.close()


@of_some([v for v in SYNCHRONOUS if v.delivers_at_once], count=[2, 3, 5])
async def test_a_group_of_everyone_is_sgd_on_one_large_batch(variant: Variant, count: int):
    """With one straggler, even: it costs time and changes nothing."""
    world = await build(count, variant, equal=True)
    expected = models(world)[0]
    targets = [sum(map(ord, name)) % 17 for name in world.peers]
    await world.train(15, steps_of(0.1, p1=0.4), downhill)
    for _ in range(15):
        expected -= 1 / 64 * np.mean([expected - target for target in targets], axis=0)
    rows = models(world)
    assert np.array_equal(rows, np.tile(rows[0], (count, 1)))
    np.testing.assert_allclose(rows[0], expected, rtol=1e-5)
    assert all(peer.boundary.totals.steps == 15 for peer in world.peers.values())
    await world.close()


@of(VARIANTS)
async def test_a_newcomer_takes_part(variant: Variant):
    steps = 40 if variant.algorithm in ("diloco", "local_sgd") else 24  # they average seldom
    world = await build(2, variant, equal=True)
    loop = asyncio.get_running_loop()

    async def come_late() -> None:
        await asyncio.sleep(0.55)
        peer = await world.add(
            "p9", VectorReplica(np.ones(SIZE), LEARNING_RATE), variant.algorithm, **variant.options
        )
        await peer.lifecycle.take_model()
        peer.lifecycle.begin()
        while peer.replica.updates < steps:
            await asyncio.sleep(0.1)
            downhill(peer, 0)
            await peer.boundary.step(1, None, peer.replica.descend)
            await peer.boundary.finish_update()
        await peer.boundary.end()

    late = loop.create_task(come_late())
    await world.train(steps, steps_of(0.1), downhill)
    await late
    await world.settle()
    assert world.peers[PeerId("p9")].driver.accounts.groups_formed > 5
    assert consensus_distance(world) < (1e-7 if variant in SYNCHRONOUS else 0.2)
    await world.close()


# --- schedules ------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 12])
@of(SCHEDULED)
def test_whom_to_meet_follows_from_version_and_view_alone_and_groups_are_a_partition(
    variant: Variant, count: int
):
    peers = tuple(PeerId(f"p{i:02}") for i in range(count))
    one, other = variant.load(), variant.load()
    for version in range(1, 130):
        rounds = {me: one.schedule(version, peers, me) for me in peers}
        assert rounds == {me: other.schedule(version, list(peers), me) for me in peers[::-1]}
        for me, here in rounds.items():
            assert me in here.members
            assert list(here.members) == sorted(here.members)
            assert all(rounds[peer] == here for peer in here.members)


@of([variant for variant in SCHEDULED if variant.conserves_mean])
async def test_a_bad_network_costs_time_and_no_update(variant: Variant):
    link = Link(latency_s=0.01, jitter_s=0.1, loss=0.05, duplication=0.3)
    world = await build(5, variant, link=link)
    books = Books(world)
    await world.train(40, steps_of(0.1, p3=0.25), books.injecting(26))
    np.testing.assert_allclose(sum_of(world), books.due_M, rtol=1e-5)
    await world.close()


# --- runs can be repeated -------------------------------------------------------------------------


def fingerprint(variant: Variant, seed: int) -> str:
    """Of every message and every bit of one run with faults of all kinds."""

    async def work() -> str:
        link = Link(latency_s=0.01, jitter_s=0.05, loss=0.05, duplication=0.05)
        world = await build(4, variant, equal=True, seed=seed, link=link)
        asyncio.get_running_loop().call_later(0.65, world.crash, "p2")
        await world.train(14, steps_of(0.1), downhill)
        digest = hashlib.sha256(world.trace.hash.encode())
        digest.update(models(world).tobytes())
        await world.close()
        return digest.hexdigest()

    return run(work())


@pytest.fixture(scope="module")
def elsewhere() -> dict[str, str]:
    """Fingerprints from a process that orders sets otherwise and has made other runs before."""
    code = (
        "from tests.averaging.test_contract import VARIANTS, fingerprint\n"
        "print({variant.name: fingerprint(variant, 1) for variant in reversed(VARIANTS)})"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    return ast.literal_eval(ran.stdout)


@pytest.mark.xdist_group("fingerprints")  # one process for all of them
@of(VARIANTS)
def test_the_same_seed_gives_the_same_run_bit_by_bit_in_any_process(
    variant: Variant, elsewhere: dict[str, str]
):
    assert fingerprint(variant, 1) == elsewhere[variant.name]


@pytest.mark.xdist_group("fingerprints")
@of(DEFAULTS)
def test_another_seed_gives_another_run(variant: Variant, elsewhere: dict[str, str]):
    assert elsewhere[variant.name] != fingerprint(variant, 2)
