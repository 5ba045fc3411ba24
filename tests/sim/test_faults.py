"""What can go wrong in a world: each fault does what it says, for as long as it says."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from p2ptrain.averaging.base import known_algorithms
from p2ptrain.core.effects import Outcome
from p2ptrain.errors import ConfigError
from p2ptrain.ids import PeerId, Seconds
from p2ptrain.runtime.exchange import ExchangeConfig
from p2ptrain.sim.faults import (
    Crash,
    Drift,
    Fault,
    Hold,
    Partition,
    Pause,
    SlowDown,
    Throttle,
    random_plan,
)
from p2ptrain.sim.link import Link
from p2ptrain.sim.loop import run
from p2ptrain.sim.trace import Trace
from p2ptrain.sim.world import World
from tests.helpers.worlds import Books, build, consensus_distance, models, steps_of


def times_of(world: World, what: str) -> list[Seconds]:
    """When the trace has a line that ends so."""
    return [float(line[2:].split("s ")[0]) for line in world.trace.lines if line.endswith(what)]


async def trained(
    plan: Sequence[Fault],
    *,
    peers: int = 4,
    steps: int = 30,
    algorithm: str = "ad_psgd",
    link: Link | None = None,
    step_s: Seconds = 0.1,
    learns: int = 0,
) -> World:
    """A world whose peers have trained while `plan` was carried out; they learn for some steps."""
    world = await build(peers, algorithm, equal=True, link=link, trace=Trace(keep=None))
    carrying_out = asyncio.create_task(world.carry_out(plan))
    await world.train(steps, steps_of(step_s), Books(world).injecting(learns))
    await carrying_out
    return world


# --- crash and restart ----------------------------------------------------------------------------


@pytest.mark.parametrize("keeps_model", [False, True])
@pytest.mark.parametrize("algorithm", ["ad_psgd", "allreduce"])
async def test_who_crashed_comes_back_under_a_new_incarnation_and_makes_the_rest_of_its_steps(
    algorithm: str, keeps_model: bool
):
    crash = Crash(peer="p2", at_step=5, for_s=0.5, keeps_model=keeps_model)
    world = await trained([crash], algorithm=algorithm)
    assert not world.dead
    again = world.peers[PeerId("p2")]
    assert again.driver.me.incarnation == 5, "the fifth life of this world"
    assert (again.steps_before, again.steps) == (5, 30)
    assert world.peers[PeerId("p0")].driver.machine.membership.member(PeerId("p2")) is not None
    assert again.driver.accounts.groups_formed > 0
    assert consensus_distance(world) < 1e-3
    await world.close()


@pytest.mark.parametrize("algorithm", ["ad_psgd", "allreduce", "eager"])
async def test_what_was_trained_before_a_crash_counts_when_its_peer_is_back(algorithm: str):
    world = await trained([Crash(peer="p2", at_step=20, for_s=0.5)], algorithm=algorithm, steps=40)
    await asyncio.sleep(5.0)  # so all have heard all
    for peer in world.peers.values():
        known = peer.driver.machine.membership.samples
        assert 4 * 40 - 2 <= known <= 4 * 40, "what nobody had heard of is not known"
    back = world.peers[PeerId("p2")].lifecycle
    again = back.driver
    late = (
        4 if algorithm == "eager" else 0
    )  # its members state what they hand over, and hand in more
    assert 0 <= again.machine.membership.samples - back.progress <= late
    assert again.me.steps == 20, "steps are those of a life"
    await world.close()


async def test_who_comes_back_with_its_model_has_it_and_who_does_not_has_anothers():
    for keeps_model, expected in ((True, 7.0), (False, 3.0)):
        world = await build(3, "ad_psgd", equal=True)
        for name, peer in world.peers.items():
            peer.replica.live[:] = 7.0 if name == "p2" else 3.0
            peer.boundary.begin()
            await peer.boundary.step(1, None, lambda: None)
        await asyncio.sleep(2.0)
        world.crash("p2")
        await asyncio.sleep(1.0)
        again = await world.restart("p2", keeps_model=keeps_model)
        assert set(again.model()) == {expected}
        await world.close()


async def test_who_is_cut_off_when_it_comes_back_tries_until_it_is_let_in():
    plan = [
        Crash(peer="p2", at_s=1.0, for_s=0.5),
        Partition(parts=(("p2",),), at_s=1.2, for_s=20.0),
    ]
    world = await trained(plan, steps=20)
    assert PeerId("p2") in world.peers
    assert times_of(world, "! p2 is back")[0] > 21.2
    assert any("! p2 cannot come back: no peer answered" in line for line in world.trace.lines)
    await world.close()


async def test_only_who_crashed_starts_again():
    world = await build(2, "ad_psgd")
    with pytest.raises(ConfigError, match="p1 has not crashed; only who crashed starts again"):
        await world.restart("p1")
    await world.close()


# --- pause ----------------------------------------------------------------------------------------


async def test_a_paused_peer_does_nothing_and_then_all_that_it_had_to_do():
    world = await trained([Pause(peer="p1", at_s=1.0, for_s=3.0)])
    steps = [record["t"] for record in world.peers[PeerId("p1")].metrics.of("step")]
    assert not [t for t in steps if 1.0 < t < 4.0]
    assert len(steps) == 30
    others = [record["t"] for record in world.peers[PeerId("p0")].metrics.of("step")]
    assert len([t for t in others if 1.0 < t < 4.0]) > 15
    await world.close()


async def test_a_pause_costs_a_computation_as_long_as_it_lasts():
    world = await trained([Pause(peer="p0", at_s=0.55, for_s=3.0)], peers=2, steps=10)
    steps = [record["t"] for record in world.peers[PeerId("p0")].metrics.of("step")]
    gaps = np.diff(steps)
    assert gaps.max() == pytest.approx(3.1, abs=0.01)
    assert sorted(gaps)[-2] < 0.11
    await world.close()


async def test_messages_to_a_paused_peer_wait_for_it():
    world = await build(2, "ad_psgd", trace=Trace(keep=None))
    await asyncio.sleep(1.0)
    world._loop.pause(world.peers[PeerId("p1")].process)
    await asyncio.sleep(2.0)
    resumed = asyncio.get_running_loop().time()
    world._loop.resume(world.peers[PeerId("p1")].process)
    await asyncio.sleep(1e-6)
    heard = [line for line in world.trace.lines if line.startswith(f"t={resumed:.6f}s p0 -> p1 ")]
    assert len(heard) >= 5, "probes of two seconds"
    await world.close()


async def test_who_was_paused_for_longer_than_its_lease_has_no_group_any_more():
    """Its late messages are read before its timers fire: deadlines have to bind by themselves."""
    world = await build(
        2,
        "ad_psgd",
        size=20_000,
        link=Link(latency_s=0.05, bandwidth_bytes_s=1e5),
        exchange=ExchangeConfig(chunk_kib=1),
    )
    await asyncio.sleep(1.0)
    asker = world.peers[PeerId("p0")]
    asking = asyncio.create_task(asker.swarm.form([PeerId("p1")], 1))
    await asyncio.sleep(0.3)
    assert asker.driver.averages.running
    before = models(world)
    await world.carry_out([Pause(peer="p1", at_s=0.0, for_s=60.0)])
    await asyncio.sleep(2.0)
    assert (await asking).outcome is Outcome.LOST
    assert not any(peer.driver.averages.running for peer in world.peers.values())
    assert np.array_equal(models(world), before)
    await world.close()


# --- speed and clocks -----------------------------------------------------------------------------


async def test_a_slow_peer_computes_slowly_until_it_recovers():
    world = await trained([SlowDown(peer="p0", at_s=1.05, for_s=2.0, factor=4.0)])
    steps = [record["t"] for record in world.peers[PeerId("p0")].metrics.of("step")]
    assert len([t for t in steps if 1.1 < t < 3.1]) == 5
    assert len([t for t in steps if t <= 1.1]) == 10
    await world.close()


async def test_a_fast_clock_fires_its_timers_early_and_computes_no_faster():
    world = await build(2, "ad_psgd")
    peer, loop = world.peers[PeerId("p1")], world._loop
    before = loop.now

    async def ten_seconds_on_its_clock() -> tuple[Seconds, Seconds]:
        await asyncio.sleep(10.0)
        slept = loop.now - before
        await loop.work(10.0)
        return slept, loop.now - before - slept

    sleeping = peer.process.start(ten_seconds_on_its_clock())
    await world.carry_out([Drift(peer="p1", rate=1.25, at_s=0.0, for_s=100.0)])
    assert await sleeping == pytest.approx((8.0, 10.0), rel=0.02)
    assert peer.driver.now - loop.now == pytest.approx(25.0)
    await world.close()


async def test_a_timer_that_was_armed_before_its_clock_changed_follows_the_clock():
    world = await build(2, "ad_psgd")
    peer, loop = world.peers[PeerId("p1")], world._loop
    before = loop.now
    sleeping = peer.process.start(asyncio.sleep(10.0))
    await asyncio.sleep(5.0)
    loop.set_rate(peer.process, 0.5)
    await sleeping
    assert loop.now - before == pytest.approx(15.0)
    await world.close()


@pytest.mark.parametrize("rate", [0.98, 1.02])
async def test_peers_whose_clocks_drift_train_on_together(rate: float):
    drifts = [Drift(peer="p1", rate=rate, at_s=0.0), Drift(peer="p2", rate=1 / rate, at_s=0.0)]
    world = await trained(drifts, algorithm="allreduce")
    for name, peer in world.peers.items():
        assert len(peer.metrics.of("step")) == 30, name
        states = {record["state"] for record in peer.metrics.of("member")}
        assert states == {"alive"}
    await world.close()


# --- the network ----------------------------------------------------------------------------------


async def test_a_partition_divides_and_heals():
    world = await trained([Partition(parts=(("p0", "p1"),), at_s=1.0, for_s=5.0)], steps=100)
    across = [
        record["t"]
        for record in world.peers[PeerId("p0")].metrics.of("group")
        if record["outcome"] == "done" and not {"p2", "p3"}.isdisjoint(record["members"])
    ]
    assert not [t for t in across if 1.2 < t < 6.0]
    assert [t for t in across if t < 1.0]
    assert [t for t in across if t > 6.0]
    await world.close()


async def test_partitions_at_a_time_count_together_and_each_heals_alone():
    plan = [
        Partition(parts=(("p0",),), at_s=1.0, for_s=3.0),
        Partition(parts=(("p0", "p1"),), at_s=2.0, for_s=4.0),
    ]
    world = await trained(plan, steps=100)
    groups = world.peers[PeerId("p0")].metrics.of("group")
    met = [(g["t"], set(g["members"])) for g in groups if g["outcome"] == "done"]
    assert not [t for t, _ in met if 1.2 < t < 4.0], "p0 is alone"
    assert {"p0", "p1"} in [members for t, members in met if 4.0 < t < 6.0]
    assert not [t for t, members in met if 4.0 < t < 6.0 and members - {"p0", "p1"}]
    assert [t for t, members in met if t > 6.5 and members - {"p0", "p1"}]
    await world.close()


async def test_of_faults_of_a_kind_at_a_time_the_severest_counts_until_it_ends():
    plan = [
        Pause(peer="p0", at_s=1.0, for_s=1.0),
        Pause(peer="p0", at_s=1.5, for_s=1.5),
        SlowDown(peer="p1", at_s=1.0, for_s=2.0, factor=2.0),
        SlowDown(peer="p1", at_s=1.0, for_s=1.0, factor=5.0),
    ]
    world = await trained(plan, steps=60)
    peers = [world.peers[PeerId(name)] for name in ("p0", "p1")]
    paused, slow = ([step["t"] for step in peer.metrics.of("step")] for peer in peers)
    assert not [t for t in paused if 1.01 < t < 2.99]
    gaps = [round(later - sooner, 1) for sooner, later in pairwise(slow)]
    assert list(dict.fromkeys(gaps)) == [0.1, 0.5, 0.2], gaps
    assert gaps[-10:] == [0.1] * 10
    await world.close()


async def test_what_is_held_arrives_when_it_is_released():
    world = await trained([Hold(source="p0", target="p1", at_s=1.0, for_s=1.0)])
    came = [
        float(line[2:].split("s ")[0])
        for line in world.trace.lines
        if " p0 -> p1 " in line and " after " in line and not line.endswith("after 0.001000s")
    ]
    assert came
    assert set(came) == {2.0}
    await world.close()


async def test_a_throttled_peer_averages_slowly():
    throttle = Throttle(peer="p1", bytes_s=400, at_s=0.0)
    for plan, fast in (([], True), ([throttle], False)):
        world = await trained(plan, peers=2)
        lasted = [r["exchange_s"] for r in world.peers[PeerId("p0")].metrics.of("group")]
        assert bool(np.median(lasted) < 0.1) is fast
        await world.close()


# --- plans ----------------------------------------------------------------------------------------


async def test_a_fault_waits_for_a_step_of_the_peer_that_it_names():
    plan = [
        Pause(peer="p1", of="p0", at_step=10, for_s=0.1),
        Partition(parts=(("p2",),), of="p3", at_step=12, for_s=0.1),
    ]
    world = await trained(plan)
    assert times_of(world, "! p1 is paused for 0.1 s") == times_of(world, " p0 step 9")
    assert times_of(world, "! nothing passes between p2 | all others for 0.1 s") == times_of(
        world, " p3 step 11"
    )
    await world.close()


async def test_a_fault_that_finds_its_peer_dead_says_so():
    plan = [Crash(peer="p1", at_s=1.0), Pause(peer="p1", at_s=2.0, for_s=1.0)]
    world = await trained(plan)
    assert times_of(world, "! p1 is paused for 1 s: no, it is dead") == [2.0]
    await world.close()


async def test_a_plan_with_a_stranger_is_refused_before_anything_happens():
    world = await build(2, "ad_psgd")
    with pytest.raises(ConfigError, match="no peer 'p7' in this world; there are: p0, p1"):
        await world.carry_out([Crash(peer="p1", at_s=0.0), Pause(peer="p7", at_s=5.0)])
    assert PeerId("p1") in world.peers
    await world.close()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Pause(peer="p1"), "Pause: at_s = None, at_step = None; give exactly one"),
        (lambda: Pause(peer="p1", at_s=1, at_step=1), "Pause: at_s = 1, at_step = 1; give exactly"),
        (lambda: Crash(peer="p1", at_s=-1.0), "Crash: at_s = -1.0 must be 0 or more"),
        (lambda: SlowDown(peer="p1", at_s=0, factor=0), "SlowDown: factor = 0 must be above 0"),
        (lambda: Drift(peer="p1", at_s=0, rate=-1), "Drift: rate = -1 must be above 0; 1.001 is"),
        (lambda: Throttle(peer="p1", at_s=0, bytes_s=0), "Throttle: bytes_s = 0 must be above 0"),
        (
            lambda: Partition(parts=(("a",), ("b",)), at_step=3),
            "Partition: at_step = 3 of which peer\\? Name it in `of`",
        ),
    ],
)
def test_a_fault_that_cannot_be_is_refused(make, message: str):
    with pytest.raises(ConfigError, match=message):
        make()


# --- as long as people's last ---------------------------------------------------------------------

STEP_S: Seconds = 0.5
STEPS = 150
STEPS_OF_MOMENTUM = 300
"""Until an outer momentum of 0.9 has died away, by which models go on apart."""


async def trained_long(fault: Fault, algorithm: str) -> World:
    """After 30 steps there is nothing to learn any more, and models have to meet."""
    steps = STEPS_OF_MOMENTUM if algorithm == "diloco" else STEPS
    world = await trained([fault], algorithm=algorithm, steps=steps, step_s=STEP_S, learns=30)
    await asyncio.sleep(10.0)  # virtual time
    assert {peer.steps for peer in world.peers.values()} == {steps}
    for name, peer in world.peers.items():
        assert len(peer.swarm.choosable()) == 3, f"{name} misses somebody"
    assert consensus_distance(world) < 0.01
    await world.close()
    return world


def share_of_steps(world: World, name: str, since: Seconds, until: Seconds) -> float:
    """Of those that a peer would have made in this time without a fault."""
    times = [record["t"] for record in world.peers[PeerId(name)].metrics.of("step")]
    step_s = steps_of(STEP_S)(PeerId(name))
    return sum(since < t < until for t in times) * step_s / (until - since)


@pytest.mark.parametrize("algorithm", known_algorithms())
async def test_a_peer_that_stands_still_for_30_s_costs_the_others_seconds(algorithm: str):
    world = await trained_long(Pause(peer="p2", at_s=2.0, for_s=30.0), algorithm)
    assert share_of_steps(world, "p2", 2.0, 32.0) == 0
    for name in ("p0", "p1", "p3"):
        assert share_of_steps(world, name, 2.0, 32.0) > 0.8


@pytest.mark.parametrize("algorithm", known_algorithms())
async def test_two_halves_that_are_cut_off_for_20_s_go_on_and_meet_again(algorithm: str):
    cut = Partition(parts=(("p0", "p1"),), at_s=2.0, for_s=20.0)
    world = await trained_long(cut, algorithm)
    for name in world.peers:
        assert share_of_steps(world, name, 2.0, 22.0) > 0.7


# --- chance ---------------------------------------------------------------------------------------

NAMES = [f"p{number}" for number in range(6)]


def test_random_plans_have_all_kinds_of_faults_and_end_in_time():
    kinds = set()
    for seed in range(50):
        plan = random_plan(seed, NAMES, until_s=30.0)
        assert plan == random_plan(seed, NAMES, until_s=30.0)
        kinds |= {type(fault) for fault in plan}
        for fault in plan:
            assert fault.at_s is not None
            assert fault.for_s is not None
            assert fault.at_s + fault.for_s <= 30.0 + 1e-9
    assert kinds == {Crash, Drift, Hold, Partition, Pause, SlowDown, Throttle}


def test_random_plans_leave_more_than_half_of_the_peers_alive():
    for seed in range(200):
        crashes = [f for f in random_plan(seed, NAMES, until_s=60.0) if isinstance(f, Crash)]
        for one in crashes:
            at_once = [c for c in crashes if c.at_s <= one.at_s < c.at_s + c.for_s]
            assert 2 * len(at_once) < len(NAMES)


@pytest.mark.parametrize("algorithm", ["ad_psgd", "allreduce"])
@pytest.mark.parametrize("seed", range(3))
def test_after_any_random_plan_everyone_has_trained_to_the_end(algorithm: str, seed: int):
    async def work() -> str:
        world = await build(5, algorithm, equal=True, seed=seed)
        plan = random_plan(seed, sorted(world.peers), until_s=12.0)
        carrying_out = asyncio.create_task(world.carry_out(plan))
        await world.train(120, steps_of(0.1), Books(world).injecting(60))
        await carrying_out
        await asyncio.sleep(10.0)
        assert len(world.peers) == 5
        assert {peer.steps for peer in world.peers.values()} == {120}
        for name, peer in world.peers.items():
            assert len(peer.swarm.choosable()) == 4, f"{name} misses somebody"
        await world.close()
        return world.trace.hash

    first = run(work())
    if seed == 0:
        assert run(work()) == first
