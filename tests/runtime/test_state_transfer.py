"""States come from several peers at once, checked chunk by chunk, and go on when a donor dies.

One byte on these links stands for 2,500: the model has 100 MB and its chunks 2.6 MB, on links of
2.5 Gbit/s.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from p2ptrain.core.effects import TakeState
from p2ptrain.errors import ConfigError, RefusedError, TransportError
from p2ptrain.ids import PeerId, Seconds
from p2ptrain.net.wire import StateOpening
from p2ptrain.net.wire_state import decode_manifest, encode_request, hash_of
from p2ptrain.runtime.exchange import ExchangeConfig
from p2ptrain.runtime.state_snapshots import KEPT_S, MOST_KEPT, SHARED_S, Snapshot
from p2ptrain.sim.link import Link
from p2ptrain.sim.replica import VectorReplica
from p2ptrain.sim.world import SimPeer, World

SIZE = 10_000
STATE_BYTES = 16 + 4 * SIZE
CHUNK_BYTES = 1024
BYTES_S = 2500e6 / 8
STEP_S: Seconds = 0.4
ONE_S = 0.32
"""For which a link carries the model."""


def model(value: float) -> VectorReplica:
    return VectorReplica(np.full(SIZE, value, np.float32) + np.arange(SIZE, dtype=np.float32) % 97)


async def trained(algorithm: str, count: int, share: float = 0.25, seed: int = 1) -> World:
    """So many peers, each with a model of its own."""
    exchange = ExchangeConfig(chunk_kib=1, link_mbit=2500, state_share=share)
    world = World(seed, Link(latency_s=0.001, bandwidth_bytes_s=BYTES_S), exchange=exchange)
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


def groups_of(world: World, name: str) -> list[dict[str, Any]]:
    return world.peers[PeerId(name)].metrics.of("group")


def made_within(begin: Seconds, end: Seconds, spans: Iterable[tuple[Seconds, Seconds]]) -> float:
    """How many of `spans` lie in this time; of one that crosses an end, the part inside counts."""
    return sum(max(0.0, min(end, to) - max(begin, at)) / (to - at) for at, to in spans)


def averages_of(world: World, names: list[str]) -> list[tuple[Seconds, Seconds]]:
    done = [r for name in names for r in groups_of(world, name) if r["outcome"] == "done"]
    return [(one["t"] - one["exchange_s"], one["t"]) for one in done]


def steps_of(world: World, names: list[str]) -> list[tuple[Seconds, Seconds]]:
    ends = [[one["t"] for one in world.peers[PeerId(name)].metrics.of("step")] for name in names]
    return [step for one in ends for step in pairwise(one)]


async def joining(count: int, seed: int = 1) -> tuple[Seconds, float, float, int]:
    """So many join eight that train: until all are in, the eight's speed, and what donors send.

    Their speed in steps and in averages, over that before.
    """
    world, names = await trained("ad_psgd", 8, seed=seed), [f"p{number}" for number in range(8)]
    now = asyncio.get_running_loop().time
    with training(world, 1000, STEP_S):
        await asyncio.sleep(14.0)
        began = now()
        newcomers = await join(world, "ad_psgd", *(f"n{number:02}" for number in range(count)))
        lasted = now() - began
        await asyncio.sleep(1.0)  # steps and averages that ran then have ended
    ended, averages = began + lasted, averages_of(world, names)
    speed = made_within(began, ended, steps_of(world, names)) / lasted / (8 / STEP_S)
    before = made_within(began - 12.0, began, averages) / 12.0
    ratio = made_within(began, ended, averages) / lasted / before
    in_vain = [r for n in names for r in groups_of(world, n) if r["outcome"] == "refused"]
    assert not in_vain, "none is asked into a group while it loads its model"
    (records,) = zip(*(newcomer.metrics.of("state") for newcomer in newcomers), strict=True)
    sent = sum(record["sources"].get(name, 0) for record in records for name in names)
    for record in records:
        assert sum(record["sources"].values()) <= STATE_BYTES + record["again_bytes"]
        assert record["again_bytes"] <= CHUNK_BYTES
    return lasted, speed, ratio, sent


@pytest.mark.timeout(300)
async def test_twenty_newcomers_are_in_soon_and_slow_the_swarm_little():
    one_s, *_ = await joining(1)
    speeds = []
    for seed in (1, 2):
        all_s, speed, averages, sent = await joining(20, seed)
        figures = f"one {one_s:.2f} s, twenty {all_s:.2f} s, speed {speed:.2f}"
        print(f"{figures}, averages {averages:.3f}, copies {sent / STATE_BYTES:.2f}")
        assert all_s < 3 * one_s, (all_s, one_s)
        assert speed >= 0.9
        assert sent < 3 * STATE_BYTES, "one donor; they give most of it to each other"
        speeds.append(averages)
    # It lasts as long as some 30 averages, so chance moves this by 0.05 in one world alone.
    assert sum(speeds) / len(speeds) >= 0.9, speeds


async def swarm_with_a_short_state(latency_s: Seconds, mbit_s: float) -> World:
    """One peer, on links of this speed; its model of 4 MB is 4 chunks of the usual size."""
    link = Link(latency_s=latency_s, bandwidth_bytes_s=mbit_s * 1e6 / 8)
    world = World(1, link, exchange=ExchangeConfig())
    await world.add("p0", VectorReplica(np.arange(1e6, dtype=np.float32)), "ad_psgd")
    return world


async def take_it_over(world: World, *names: str) -> Seconds:
    """How long until all of these have it."""
    now = asyncio.get_running_loop().time
    began, blank = now(), partial(VectorReplica, np.zeros(1_000_000, np.float32))
    add = partial(world.add, algorithm="ad_psgd", keeps_model=False)
    with training(world, 1000, 100.0):
        await asyncio.gather(*(add(name, blank()) for name in names))
    return now() - began


async def test_seven_that_take_a_short_state_over_at_once_load_most_of_it_from_each_other():
    world = await swarm_with_a_short_state(latency_s=0.001, mbit_s=100)
    lasted_s = await take_it_over(world, *(f"n{number}" for number in range(7)))
    assert world.peers[PeerId("p0")].driver.state_transfer.sent_bytes <= 2 * 4e6
    assert lasted_s <= 0.7, "one of them alone takes 0.32 s"


async def test_one_source_of_a_short_state_is_asked_for_several_of_its_small_chunks_at_a_time():
    world = await swarm_with_a_short_state(latency_s=0.1, mbit_s=1000)
    assert await take_it_over(world, "n0") <= 3.0, "two at a time take 4.2 s"


async def test_a_donor_that_trains_gives_its_share_of_the_link():
    world = await trained("ad_psgd", 1, share=0.1)
    with training(world, 1000, 100.0):
        await asyncio.sleep(1.0)
        began = asyncio.get_running_loop().time()
        await join(world, "ad_psgd", "n")
        assert asyncio.get_running_loop().time() - began == pytest.approx(ONE_S / 0.1, rel=0.1)


async def test_a_link_that_serves_a_state_is_measured_as_fast_as_it_is():
    """Its averages take longer meanwhile, and a share of a link is one of all of it."""
    exchange = ExchangeConfig(chunk_kib=1, state_share=0.5)
    world = World(1, Link(latency_s=0.001, bandwidth_bytes_s=BYTES_S), exchange=exchange)
    world.network.stands_for = 2500
    for number in range(2):
        await world.add(f"p{number}", model(number), "ad_psgd", fragment_s=0.02)
    with training(world, 10_000, 0.01):  # averages follow each other
        await asyncio.sleep(10.0)
        donor, other = world.peers.values()
        await other.driver.state_transfer.download(PeerId("p0"))
    assert donor.driver.me.link_mbit == pytest.approx(2500, rel=0.15)


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


async def test_all_chunks_that_are_here_count_when_a_transfer_begins_again():
    world = await trained("ad_psgd", 2)
    p0, p1 = world.peers.values()
    transfer = p1.driver.state_transfer
    loading = asyncio.ensure_future(transfer.download(PeerId("p0")))
    await until(lambda: any(len(one.have) > 12 for one in loaded_by(p1, "p1")), 0.001)
    (partly,) = loaded_by(p1, "p1")
    p0.driver.transport.die()
    with pytest.raises(TransportError):
        await loading
    assert 12 < len(partly.have) < len(partly.manifest.hashes)
    missing = STATE_BYTES - len(partly.have) * CHUNK_BYTES
    p0.driver.transport.handler = p0.driver
    assert await transfer.download(PeerId("p0")) == p0.replica.export_state()
    (record,) = p1.metrics.of("state")
    assert record["sources"] == {"p0": missing}


async def test_what_is_no_request_ends_the_stream_with_a_sentence():
    world = await trained("ad_psgd", 2)
    p0, p1 = world.peers.values()
    for request, why in ((encode_request(99), "a chunk of a state out of range: 99"), (b"x", "")):
        opening = StateOpening(p0.driver.digest, PeerId("p1"), None)
        stream = await p1.driver.transport.open(p0.address, opening)
        manifest = decode_manifest(await stream.receive())
        assert manifest.size == STATE_BYTES
        await stream.send(memoryview(request))
        with pytest.raises(RefusedError, match=f"p0 does not understand: .*{why}"):
            await stream.receive()


async def test_a_snapshot_is_kept_a_little_longer_than_it_is_used_and_few_are_at_a_time():
    world = await trained("ad_psgd", MOST_KEPT + 2)
    p0, *others = world.peers.values()
    streams = []
    for peer in others[:MOST_KEPT]:
        opening = StateOpening(p0.driver.digest, peer.driver.name, None)
        streams.append(await peer.driver.transport.open(p0.address, opening))
        assert await streams[-1].receive()
        await asyncio.sleep(SHARED_S + 1)  # the next one is too young for it
        p0.replica.live += 1
    opening = StateOpening(p0.driver.digest, others[-1].driver.name, None)
    refused = await others[-1].driver.transport.open(p0.address, opening)
    with pytest.raises(RefusedError, match=f"{MOST_KEPT} states are being loaded"):
        await refused.receive()
    for stream in streams:
        await stream.finish()
    held = p0.driver.state_transfer.snapshots._held
    await asyncio.sleep(KEPT_S - 1)
    assert len(held) == MOST_KEPT
    await asyncio.sleep(2)
    assert not held


async def test_one_peer_cannot_keep_others_out_by_loading_several_states():
    world = await trained("ad_psgd", 2)
    p0, p1 = world.peers.values()
    opening = StateOpening(p0.driver.digest, PeerId("p1"), None)
    first = await p1.driver.transport.open(p0.address, opening)
    assert await first.receive()
    await asyncio.sleep(SHARED_S + 1)
    second = await p1.driver.transport.open(p0.address, opening)
    with pytest.raises(RefusedError, match="p1 loads another state from here already"):
        await second.receive()
    await first.finish()


async def test_a_chunk_that_is_longer_than_its_place_is_refused_although_it_has_its_hash():
    world = await trained("ad_psgd", 2)
    lies = []

    def lying(honest):
        async def make(*args, **more):
            made = await honest(*args, **more)
            if lies:
                return made
            lies.append(made)
            chunks = [bytes(made.chunk(n)) + b"x" for n in range(len(made.manifest.hashes))]
            hashes = tuple(map(hash_of, chunks))
            size = made.manifest.chunk_size
            return replace(
                made,
                manifest=replace(made.manifest, hashes=hashes),
                read=lambda start, stop: memoryview(chunks[start // size]),
            )

        return make

    for peer in world.peers.values():
        snapshots = peer.driver.state_transfer.snapshots
        snapshots.make = lying(snapshots.make)
    with training(world, 1000, 100.0):
        await asyncio.sleep(1.0)
        (newcomer,) = await join(world, "ad_psgd", "n")
    texts = [record["text"] for record in newcomer.metrics.of("warning")]
    assert "another hash or size; it is taken from elsewhere" in texts[0]
    (record,) = newcomer.metrics.of("state")
    np.testing.assert_array_equal(newcomer.model(), world.peers[record["donor"]].model())


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5])
def test_a_share_of_a_link_is_a_share(share: float):
    with pytest.raises(ConfigError, match=f"state_share = {share} must be above 0 and at most 1"):
        ExchangeConfig(state_share=share)
