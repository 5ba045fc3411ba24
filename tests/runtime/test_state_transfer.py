"""States come from several peers at once, checked chunk by chunk, and go on when a donor dies.

One byte on these links stands for 2,500: the model has 100 MB and its chunks 2.6 MB, on links of
2.5 Gbit/s.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from p2ptrain.core.effects import TakeState
from p2ptrain.ids import PeerId, Seconds
from p2ptrain.runtime.exchange import ExchangeConfig
from p2ptrain.runtime.state_snapshots import Snapshot
from p2ptrain.sim.link import Link
from p2ptrain.sim.replica import VectorReplica
from p2ptrain.sim.world import SimPeer, World

SIZE = 10_000
STATE_BYTES = 16 + 4 * SIZE
CHUNK_BYTES = 1024
BYTES_S = 2500e6 / 8
ONE_S = 0.32
"""For which a link carries the model."""


def model(value: float) -> VectorReplica:
    return VectorReplica(np.full(SIZE, value, np.float32) + np.arange(SIZE, dtype=np.float32) % 97)


async def trained(algorithm: str, count: int, share: float = 0.25) -> World:
    """So many peers, each with a model of its own."""
    exchange = ExchangeConfig(chunk_kib=1, link_mbit=1, state_share=share)
    world = World(1, Link(latency_s=0.001, bandwidth_bytes_s=BYTES_S), exchange=exchange)
    world.network.stands_for = 2500
    equal = algorithm != "ad_psgd"
    for number in range(count):
        await world.add(f"p{number}", model(0.0 if equal else number), algorithm)
    return world


@contextmanager
def training(world: World, steps: int, step_s: Seconds) -> Iterator[None]:
    task = asyncio.ensure_future(world.train(steps, lambda _: step_s))
    try:
        yield
    finally:
        task.cancel()


async def join(world: World, algorithm: str, *names: str) -> list[SimPeer]:
    add = world.add
    return await asyncio.gather(
        *(add(name, model(500.0), algorithm, keeps_model=False) for name in names)
    )


def loaded_by(peer: SimPeer, name: str) -> list[Snapshot]:
    """What `name` loads from `peer` at this moment."""
    held = peer.driver.state_transfer.snapshots._held.values()
    return [one for one in held if PeerId(name) in one.loaders]


async def until(is_so: Callable[[], bool], every_s: Seconds = 0.1) -> None:
    for _ in range(10_000):
        if is_so():
            return
        await asyncio.sleep(every_s)
    raise AssertionError("it never was")


def groups_done(world: World, names: list[str]) -> int:
    return sum(
        record["outcome"] == "done"
        for name in names
        for record in world.peers[PeerId(name)].metrics.of("group")
    )


async def joining(count: int) -> tuple[Seconds, float, int]:
    """So many join eight that train: until all are in, the eight's speed, and what donors send."""
    world, names = await trained("ad_psgd", 8), [f"p{number}" for number in range(8)]
    now = asyncio.get_running_loop().time
    with training(world, 1000, 0.4):
        await asyncio.sleep(10.0)
        before = groups_done(world, names) / 10.0
        began, done = now(), groups_done(world, names)
        newcomers = await join(world, "ad_psgd", *(f"n{number:02}" for number in range(count)))
        lasted = now() - began
        speed = (groups_done(world, names) - done) / lasted / before
    (records,) = zip(*(newcomer.metrics.of("state") for newcomer in newcomers), strict=True)
    sent = sum(record["sources"].get(name, 0) for record in records for name in names)
    for record in records:
        assert sum(record["sources"].values()) <= STATE_BYTES + record["again_bytes"]
        assert record["again_bytes"] <= CHUNK_BYTES
    return lasted, speed, sent


async def test_twenty_newcomers_are_in_soon_and_slow_the_swarm_little():
    one_s, *_ = await joining(1)
    all_s, speed, sent = await joining(20)
    print(f"one {one_s:.2f} s, twenty {all_s:.2f} s, speed {speed:.2f}, {sent / STATE_BYTES:.2f}")
    assert all_s < 3 * one_s, (all_s, one_s)
    assert speed >= 0.9
    assert sent < 5 * STATE_BYTES, "they give most of it to each other"


async def test_a_donor_that_trains_gives_its_share_of_the_link():
    world = await trained("ad_psgd", 1, share=0.1)
    with training(world, 1000, 100.0):
        await asyncio.sleep(1.0)
        began = asyncio.get_running_loop().time()
        await join(world, "ad_psgd", "n")
        assert asyncio.get_running_loop().time() - began == pytest.approx(ONE_S / 0.1, rel=0.1)


@pytest.mark.parametrize("dies", ["donor", "helper"])
async def test_when_a_donor_of_several_dies_the_others_give_what_is_missing(dies: str):
    world = await trained("allreduce", 4)
    with training(world, 1000, 0.1):
        await asyncio.sleep(5.0)
        (newcomer,) = await join(world, "allreduce", "n")
        await until(lambda: any(len(one.have) > 12 for one in loaded_by(newcomer, "n")), 0.001)
        taking = newcomer.driver.machine.groups.barrier.state
        assert isinstance(taking, TakeState)
        helper = next(n for n in ("p1", "p2") if n != taking.donor)
        donor = taking.donor
        world.crash(donor if dies == "donor" else helper)
        await until(lambda: bool(newcomer.metrics.of("state")))
    (record,) = newcomer.metrics.of("state")
    assert record["donor"] == donor
    assert len(record["sources"]) > 2
    assert sum(record["sources"].values()) <= STATE_BYTES + CHUNK_BYTES
    assert not newcomer.metrics.of("warning")


async def test_a_chunk_with_another_hash_is_refused_and_taken_from_elsewhere():
    world = await trained("allreduce", 4)
    liar = world.peers[PeerId("p2")].driver.state_transfer.snapshots
    honest = liar.make

    async def make(*args, **more):
        made = await honest(*args, **more)
        made.read = lambda start, stop: memoryview(b"x" * (stop - start))
        return made

    liar.make = make
    with training(world, 1000, 0.1):
        await asyncio.sleep(2.0)
        (newcomer,) = await join(world, "allreduce", "n")
        await until(lambda: bool(newcomer.metrics.of("state")))
    texts = [record["text"] for record in newcomer.metrics.of("warning")]
    assert len(texts) == 1, texts
    assert "p2 sends chunk" in texts[0]
    assert "it is taken from elsewhere" in texts[0]
    (record,) = newcomer.metrics.of("state")
    assert sum(record["sources"].values()) == STATE_BYTES
    np.testing.assert_array_equal(newcomer.model(), world.peers[PeerId("p0")].model())


async def test_where_models_differ_the_next_donor_gives_all_of_its_own():
    world = await trained("ad_psgd", 3)
    with training(world, 1000, 100.0):
        await asyncio.sleep(1.0)
        joins = asyncio.ensure_future(join(world, "ad_psgd", "n"))
        await asyncio.sleep(1.0)
        (first,) = [name for name, peer in world.peers.items() if loaded_by(peer, "n")]
        world.crash(first)
        (newcomer,) = await joins
    (record,) = newcomer.metrics.of("state")
    assert record["donor"] != first
    np.testing.assert_array_equal(newcomer.model(), world.peers[record["donor"]].model())
