"""Swarms that were killed as a whole start again, from their checkpoints."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from p2ptrain.averaging.base import known_algorithms, load_algorithm
from p2ptrain.ids import PeerId, Seconds
from p2ptrain.runtime.checkpoint_folder import CheckpointFolder, Document
from p2ptrain.runtime.checkpoints import in_common
from p2ptrain.runtime.exchange_config import ExchangeConfig
from p2ptrain.sim.files import Crashed
from p2ptrain.sim.loop import virtual_loop
from p2ptrain.sim.replica import VectorReplica
from p2ptrain.sim.world import SimPeer, World
from tests.helpers.variants import OFTEN
from tests.helpers.worlds import LEARNING_RATE, SIZE, models, steps_of

EVERY_S = 0.4
STEP_S = 0.1
ALGORITHMS = known_algorithms()


async def build(
    count: int, algorithm: str, seed: int = 0, exchange: ExchangeConfig | None = None
) -> World:
    world = World(seed, exchange=exchange, checkpoint_every_s=EVERY_S)
    for number in range(count):
        replica = VectorReplica(np.full(SIZE, 10.0, np.float32), LEARNING_RATE)
        await world.add(f"p{number}", replica, algorithm, **OFTEN.get(algorithm, {}))
    return world


def gradient_of(peer: SimPeer, _: int) -> None:
    """Follows from the peer and its model's updates alone, as data at a position do."""
    updates = peer.replica.updates
    value = (int(peer.driver.name[1:]) * 7 + updates * 5) % 16 - 8
    peer.replica.gradient = np.full_like(peer.replica.live, value)


async def train(world: World, steps: int) -> None:
    await world.train(steps, steps_of(STEP_S), gradient_of)


def kill_all(world: World) -> None:
    for name in [*world.peers]:
        world.crash(name)


def fresh(count: int) -> dict[str, VectorReplica]:
    """New processes: noise, which no checkpoint may leave in a model."""
    noise = {f"p{n}": np.full(SIZE, -1e6 - n, np.float32) for n in range(count)}
    return {name: VectorReplica(start_M, LEARNING_RATE) for name, start_M in noise.items()}


def progress(world: World) -> list[int]:
    return [peer.lifecycle.progress for peer in world.peers.values()]


def heard(world: World) -> set[int]:
    """What each peer knows of all members' samples, together."""
    return {peer.driver.machine.membership.samples for peer in world.peers.values()}


def named(world: World) -> set[PeerId]:
    groups = [one for peer in world.peers.values() for one in peer.metrics.of("group")]
    return {name for group in groups for name in group.get("offenders", ())}


def newest(world: World) -> dict[str, Document]:
    """The newest checkpoint of each peer: what it says of itself."""
    folders = [CheckpointFolder(Path("/disk") / n, 3, world.disks[n]) for n in world.peers]
    return {one.folder.name: one.read(max(one.numbers())).document for one in folders}


KINDS = ["allreduce", "ad_psgd", "eager", "wagma", "diloco"]
CASES = [(a, 2) for a in ALGORITHMS] + [(a, count) for a in KINDS for count in (4, 6)]


@pytest.mark.parametrize(("algorithm", "after"), CASES)
async def test_a_swarm_that_was_killed_goes_on_with_as_many_fewer_or_more(algorithm, after):
    world = await build(4, algorithm)
    await train(world, 12)
    model_M, cuts = models(world).mean(axis=0), newest(world)
    kill_all(world)
    await world.start_again(fresh(after))
    old_M = models(world)[:4]
    assert old_M.min() > -1e5, "noise of a new process is in a model"
    drift = np.abs(old_M.mean(axis=0) - model_M).max()
    # Each misses a checkpoint's interval and the end, at most 6 of 12 steps of at most 1/8.
    assert drift <= 8 * LEARNING_RATE * 8
    go_on = [cut for name, cut in cuts.items() if name in world.peers]
    counted = max(cuts["p0"]["progress"], sum(cut["samples"] for cut in go_on))
    estimates = counted, *(cut["progress"] for cut in cuts.values())
    assert max(progress(world)) <= max(estimates)
    if load_algorithm(algorithm).averages == "models":
        assert min(progress(world)) >= min(estimates), (
            "a newcomer begins with what its donor counts"
        )
    await train(world, 10)
    assert heard(world) == {counted + 10 * after}
    assert min(progress(world)) >= counted + 10 * after - 2 * len(world.peers)
    assert models(world).min() > -1e5
    await world.close()


async def test_who_starts_with_them_meets_them_at_the_version_after_their_checkpoints():
    world = await build(2, "local_sgd")
    await train(world, 30)
    reach = max(cut["version"] for cut in newest(world).values())
    kill_all(world)
    await world.start_again(fresh(4))
    groups = [peer.driver.machine.groups for peer in world.peers.values()]
    assert [one.wait_avoiding.version for one in groups] == [reach] * 4
    assert reach > 1
    await world.close()


async def test_votes_after_a_new_start_know_the_norms_of_before():
    async def train_with(p0: float, others: float, steps: int) -> None:
        def before_step(peer: SimPeer, _: int) -> None:
            peer.replica.gradient[:] = p0 if peer.driver.name == "p0" else others

        await world.train(steps, steps_of(STEP_S), before_step)

    async def start_again() -> None:
        kill_all(world)
        await world.start_again(fresh(3))

    world = await build(3, "allreduce", exchange=ExchangeConfig(norm_limit=10))
    await train_with(p0=1.0, others=1.0, steps=10)
    await start_again()
    await train_with(p0=1.0, others=0.01, steps=10)
    assert named(world) == set()
    await start_again()
    await train_with(p0=50.0, others=0.01, steps=10)
    assert named(world) == {"p0"}
    await world.close()


@pytest.mark.parametrize("algorithm", ["allreduce", "eager", "ad_psgd"])
async def test_samples_of_peers_that_are_lost_once_and_are_back_the_next_time_count_once(algorithm):
    world = await build(4, algorithm)
    await train(world, 12)
    kill_all(world)
    await world.start_again(fresh(2))
    await train(world, 10)
    cut = newest(world)["p0"]
    assert cut["samples"] == 12 + 10
    assert cut["progress"] >= 60
    kill_all(world)
    await world.start_again(fresh(4))
    await train(world, 10)
    assert heard(world) == {cut["progress"] + 40}
    await world.close()


async def test_samples_of_one_whose_checkpoint_is_not_used_count_on():
    world = await build(3, "allreduce")
    await train(world, 24)
    for name, lost in (("p0", slice(-1, None)), ("p1", slice(0, -1))):
        folder = CheckpointFolder(Path("/disk") / name, 3, world.disks[PeerId(name)])
        for number in sorted(folder.numbers())[lost]:
            folder._remove(number)
    kill_all(world)
    await world.start_again(fresh(2))
    await train(world, 10)
    assert [peer.replica.updates for peer in world.peers.values()] == [34, 34]
    assert heard(world) == {3 * 24 + 2 * 10}
    await world.close()


@pytest.mark.parametrize("algorithm", [a for a in ALGORITHMS if load_algorithm(a).in_step])
async def test_peers_in_step_have_bitwise_the_models_of_a_run_without_a_break(algorithm):
    whole = await build(3, algorithm)
    await train(whole, 30)
    world = await build(3, algorithm)
    await train(world, 17)
    kill_all(world)
    await world.start_again(fresh(3))
    restored = [peer.replica.updates for peer in world.peers.values()]
    assert len(set(restored)) == 1
    assert 17 - 2 * EVERY_S / STEP_S <= restored[0] <= 17
    await train(world, 30 - restored[0])
    assert models(world).tolist() == models(whole).tolist()
    assert progress(world) == progress(whole)
    await whole.close()
    await world.close()


async def test_peers_in_step_begin_from_the_newest_version_that_all_have():
    world = await build(3, "allreduce")
    await train(world, 17)
    kill_all(world)
    disk = world.disks[PeerId("p1")]
    newest = max(name for path in disk.contents if (name := path.parent.name).isdecimal())
    for path in [path for path in disk.contents if path.parent.name == newest]:
        disk.contents[path][3] ^= 1
    await world.start_again(fresh(3))
    updates = {peer.replica.updates for peer in world.peers.values()}
    assert len(updates) == 1
    (warning,) = world.peers[PeerId("p1")].metrics.of("warning")[:1]
    assert "is not what was written; the one before it is used" in warning["text"]
    await train(world, 10)
    assert len({tuple(row) for row in models(world)}) == 1
    await world.close()


def written(world: World) -> dict[str, list[int]]:
    """Of each peer, the updates of the models of its checkpoints."""
    peers = world.peers.items()
    return {name: [r["updates"] for r in peer.metrics.of("checkpoint")] for name, peer in peers}


def slow_disk(peer: SimPeer, takes_s: Seconds) -> None:
    """Each checkpoint of this peer takes so long to come to its disk."""

    async def disk(function):
        await asyncio.sleep(takes_s)
        return function()

    peer.driver.environment = replace(peer.driver.environment, disk=disk)


@pytest.mark.parametrize("algorithm", ["allreduce", "dear", "eager"])
async def test_peers_that_average_gradients_write_at_the_same_versions(algorithm):
    """Also one that came back in between, by a clock of its own."""
    world = await build(3, algorithm)
    training = asyncio.ensure_future(train(world, 40))
    await asyncio.sleep(1.05)
    world.crash("p2")
    await asyncio.sleep(0.33)
    await world.restart("p2")
    await training
    # The last one is written at a peer's own end, which under `eager` is not at one version.
    versions = {name: before_the_end[:-1] for name, before_the_end in written(world).items()}
    assert versions["p0"] == versions["p1"]
    assert len(versions["p2"]) >= 3
    assert versions["p2"] == versions["p0"][-len(versions["p2"]) :]
    await world.close()


async def test_a_slow_disk_costs_checkpoints_and_no_time():
    world = await build(3, "allreduce")
    slow_disk(world.peers[PeerId("p1")], 2.5 * EVERY_S)
    began = virtual_loop().now
    await train(world, 40)
    last_s = 2.5 * EVERY_S  # the end waits for the last one
    assert virtual_loop().now - began < 40 * STEP_S * 1.1 + last_s
    versions = written(world)
    assert versions["p0"] == versions["p2"]
    assert versions["p1"] == versions["p0"][:4]  # its last one is still on the way
    await world.close()


async def test_a_disk_that_hangs_keeps_the_others_from_few_checkpoints():
    world = await build(3, "allreduce")
    slow_disk(world.peers[PeerId("p1")], 12.0)
    await train(world, 60)
    versions = written(world)
    assert versions["p0"] == versions["p2"]
    assert len(versions["p0"]) >= 10
    assert len(versions["p1"]) <= 2
    await world.close()


async def test_peers_in_step_begin_from_one_version_whichever_they_lost():
    """One had ended on its own, another was killed before its newest checkpoint was whole."""
    world = await build(3, "allreduce")
    await train(world, 24)
    has = {name: updates[-3:] for name, updates in written(world).items()}
    assert has["p0"] == has["p1"] == has["p2"]
    lost = {"p0": has["p0"][0], "p1": has["p0"][2]}
    for name, updates in lost.items():
        folder = CheckpointFolder(Path("/disk") / name, 3, world.disks[PeerId(name)])
        (number,) = [n for n in folder.numbers() if folder.read(n).updates == updates]
        folder._remove(number)
    kill_all(world)
    await world.start_again(fresh(3))
    restored = {name: peer.replica.updates for name, peer in world.peers.items()}
    assert restored == dict.fromkeys(restored, has["p0"][1])
    await world.close()


@pytest.mark.parametrize(
    ("held", "version"),
    [
        ([[30, 20, 10], [20, 10], [30, 20]], 20),
        ([[30], [30, 20]], 30),
        ([[17, 10], [30, 20, 10]], 10),
        ([[30], [20], [20]], 20),
        ([[30], [20]], 30),
    ],
    ids=["one was late", "all whole", "one ended early", "none of all", "each its own"],
)
def test_the_newest_version_that_all_have_or_else_most(held, version):
    assert in_common(held) == version


@pytest.mark.parametrize("algorithm", ["allreduce", "ad_psgd", "eager"])
async def test_one_that_comes_back_takes_the_model_of_those_that_train(algorithm):
    world = await build(3, algorithm)
    training = asyncio.ensure_future(train(world, 40))
    await asyncio.sleep(1.05)
    world.crash("p2")
    for name in ("p0", "p1"):
        world.peers[PeerId(name)].replica.live += 1000
    await asyncio.sleep(0.5)
    peer = await world.restart("p2")
    if algorithm != "allreduce":  # that one catches up at its first average
        assert peer.model().min() > 900
    await training
    assert models(world).min() > 900
    await world.close()


async def test_a_disk_that_is_full_costs_checkpoints_and_one_warning():
    world = await build(2, "allreduce")
    disk = world.disks[PeerId("p0")]

    def full(path):
        raise OSError(28, "No space left on device")

    usual, disk.create = disk.create, full
    await train(world, 12)
    (warning,) = world.peers[PeerId("p0")].metrics.of("warning")
    assert "cannot write a checkpoint" in warning["text"]
    disk.create = usual
    await train(world, 12)
    assert world.peers[PeerId("p0")].metrics.of("checkpoint")
    await world.close()


def test_a_crash_is_no_error_that_a_handler_takes():
    assert not issubclass(Crashed, Exception)


async def test_an_outer_step_is_in_model_and_anchor_of_a_checkpoint_or_in_none():
    world = await build(2, "diloco")
    await train(world, 12)
    driver = world.peers[PeerId("p0")].driver
    averages, usual = driver.averages, driver.averages.executor

    async def behind_an_outer_step(function):
        averages.executor = usual
        averages.outer.anchor_M += 64
        driver.replica.live += 64
        return await usual(function)

    averages.executor = behind_an_outer_step
    await driver.checkpoints.cut({})
    await driver.checkpoints.settle()
    model = fresh(1)["p0"]
    folder = CheckpointFolder(Path("/disk/p0"), 3, world.disks[PeerId("p0")])
    cut = folder.read(max(folder.numbers()))
    model.import_state(cut.model)
    (anchor_M,) = (vector for name, vector in cut.vectors.items() if name.endswith("/anchor"))
    assert (anchor_M - model.live).tolist() == (
        averages.outer.anchor_M - driver.replica.live
    ).tolist()
    assert anchor_M.min() > 50
    await world.close()
