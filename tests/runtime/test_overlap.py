"""Gradients travel during the backward pass, and nothing else changes."""

import asyncio

import numpy as np
import pytest

from p2ptrain.core.effects import Outcome
from p2ptrain.errors import ConfigError
from p2ptrain.runtime.exchange import ExchangeConfig
from p2ptrain.sim.link import Link
from p2ptrain.sim.loop import virtual_loop
from tests.helpers.worlds import build, models, steps_of

STEPS = 12
SIZE = 4000
BUCKETS = {"bucket_mib": 0.002}
"""Of 524 numbers: eight of gradients."""
OVERLAP = {"overlap": "backward", **BUCKETS}
WAYS = pytest.mark.parametrize(
    ("algorithm", "options"), [("allreduce", OVERLAP), ("dear", BUCKETS)], ids=["backward", "dear"]
)
SLOW = Link(latency_s=0.001, bandwidth_bytes_s=320_000)
"""Averaging takes as long as a backward pass: 67 ms."""


async def trained(options, *, algorithm="allreduce", count=3, disturb=None, samples=None):
    """Peers that descend random gradients; the world, and how long it took."""
    world = await build(
        count,
        algorithm,
        equal=True,
        size=SIZE,
        link=SLOW,
        exchange=ExchangeConfig(chunk_kib=1),
        **options,
    )
    chances = {name: np.random.default_rng(rank) for rank, name in enumerate(world.peers)}

    def descend(peer, step: int) -> None:
        name = peer.driver.name
        peer.replica.gradient = chances[name].standard_t(3, SIZE).astype(np.float32)
        if samples and step in samples.get(name, {}):
            given = samples[name][step]
            step_of = peer.boundary.step
            peer.boundary.step = lambda _, loss, update: step_of(given, loss, update)
        elif "step" in vars(peer.boundary):
            del peer.boundary.step
        if disturb:
            disturb(peer, step)

    await world.train(STEPS, steps_of(0.1), descend)
    totals = world.peers["p0"].boundary.totals
    return world, totals.compute_s + totals.wait_s


def overlapped(world) -> dict[str, int]:
    """Of each peer, how many groups finished what had begun."""
    return {
        name: sum(
            is_overlapped(r) for r in peer.metrics.of("group") if r["outcome"] == Outcome.DONE
        )
        for name, peer in world.peers.items()
    }


def is_overlapped(record) -> bool:
    return record["overlap_s"] is not None and record["sent_bytes"] > 0


@WAYS
@pytest.mark.parametrize("count", [1, 2, 3, 5])
async def test_models_are_bitwise_those_without_overlap(algorithm, options, count: int):
    rows = []
    for name, given in (("allreduce", {}), (algorithm, options)):
        world, _ = await trained(given, algorithm=name, count=count)
        rows.append(models(world))
        await world.close()
    assert np.array_equal(rows[0], rows[1])
    assert np.array_equal(rows[1], np.tile(rows[1][0], (count, 1)))


@WAYS
async def test_the_exchange_is_hidden(algorithm, options):
    plain, plain_s = await trained({})
    world, took_s = await trained(options, algorithm=algorithm)
    assert took_s < 0.75 * plain_s
    assert sum(overlapped(world).values()) == 3 * (STEPS - 1), "all but the first step"
    assert bytes_of(world) == pytest.approx(bytes_of(plain), rel=0.01)
    await plain.close()
    await world.close()


def bytes_of(world) -> int:
    return sum(r["sent_bytes"] for p in world.peers.values() for r in p.metrics.of("group"))


@WAYS
async def test_a_straggler_is_waited_for_and_silence_meanwhile_is_no_failure(algorithm, options):
    slow = await build(3, algorithm, equal=True, size=SIZE, link=SLOW, **options)
    began = virtual_loop().now
    await slow.train(STEPS, steps_of(0.1, p2=12.0), lambda *_: None)
    assert sum(overlapped(slow).values()) == 3 * (STEPS - 1)
    assert virtual_loop().now - began < STEPS * 12.0 * (1 + 2 / 37) + STEPS * 0.1
    groups = [r for p in slow.peers.values() for r in p.metrics.of("group")]
    assert all(r["outcome"] == Outcome.DONE for r in groups), (
        "silence while others compute is no failure"
    )
    await slow.close()


@WAYS
async def test_other_samples_than_announced_cost_the_overlap_of_that_step(algorithm, options):
    samples = {"p1": {4: 7}, "p0": {8: 3}}
    rows, worlds = [], []
    for name, given in (("allreduce", {}), (algorithm, options)):
        world, _ = await trained(given, algorithm=name, samples=samples)
        rows.append(models(world))
        worlds.append(world)
    assert np.array_equal(rows[0], rows[1])
    lost = 4  # the step with another number, and the one after it, twice
    assert set(overlapped(worlds[1]).values()) == {STEPS - 1 - lost}
    for world in worlds:
        await world.close()


@WAYS
async def test_a_gradient_that_changes_after_it_has_left_counts_as_it_is_at_last(
    algorithm, options
):
    def clip(peer, step: int) -> None:
        """As a program does between the backward pass and the boundary."""
        if step == 5:
            gradient = peer.replica.gradient
            inner = peer.boundary.step

            async def stepped(*args):
                peer.boundary.step = inner
                peer.replica.gradient = gradient / 2
                await inner(*args)

            peer.boundary.step = stepped

    rows = []
    for name, given in (("allreduce", {}), (algorithm, options)):
        world, _ = await trained(given, algorithm=name, disturb=clip)
        rows.append(models(world))
        await world.close()
    assert np.array_equal(rows[0], rows[1])


@pytest.mark.parametrize("at_s", [0.52, 0.56, 0.6, 0.65])
@WAYS
async def test_a_member_that_dies_in_any_phase_leaves_equal_models(algorithm, options, at_s: float):
    world = await build(
        4,
        algorithm,
        equal=True,
        size=SIZE,
        link=SLOW,
        exchange=ExchangeConfig(chunk_kib=1),
        **options,
    )  # fmt: skip
    asyncio.get_running_loop().call_later(at_s, world.crash, "p2")
    chances = {name: np.random.default_rng(rank) for rank, name in enumerate(world.peers)}

    def descend(peer, step: int) -> None:
        peer.replica.gradient = chances[peer.driver.name].standard_t(3, SIZE).astype(np.float32)

    await world.train(16, steps_of(0.1), descend)
    rows = models(world)
    assert np.array_equal(rows, np.tile(rows[0], (3, 1)))
    last = [p.metrics.of("group")[-5:] for p in world.peers.values()]
    assert all(is_overlapped(r) and len(r["members"]) == 3 for records in last for r in records)
    await world.close()


@WAYS
async def test_a_newcomer_takes_part_in_the_overlap_from_its_second_step_on(algorithm, options):
    world = await build(3, algorithm, equal=True, size=SIZE, link=SLOW, **options)

    async def come_back() -> None:
        await asyncio.sleep(1.05)
        world.crash("p1")
        await asyncio.sleep(1.0)
        await world.restart("p1")

    back = asyncio.get_running_loop().create_task(come_back())
    await world.train(60, steps_of(0.1), lambda *_: None)
    await back
    rows = models(world)
    assert np.array_equal(rows, np.tile(rows[0], (3, 1)))
    for peer in world.peers.values():
        together = [r for r in peer.metrics.of("group") if len(r["members"]) == 3]
        assert all(is_overlapped(record) for record in together[-20:])
    await world.close()


@WAYS
async def test_memory_is_given_back_step_after_step(algorithm, options):
    world, _ = await trained(options, algorithm=algorithm)
    for peer in world.peers.values():
        assert len(peer.driver.averages.buffers._made) <= 9
    await world.close()


async def test_a_lossy_gradient_codec_does_not_go_with_overlap():
    with pytest.raises(ConfigError, match="gradient_codec = 'int8': allreduce with overlap"):
        await build(2, "allreduce", exchange=ExchangeConfig(gradient_codec="int8"), **OVERLAP)
