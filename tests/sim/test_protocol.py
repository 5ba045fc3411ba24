"""What the protocol promises, on virtual time: seconds to notice, to give up, to refuse."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from p2ptrain.core.effects import Outcome
from p2ptrain.errors import ConfigError, RefusedError, TransportError
from p2ptrain.ids import Address, PeerId
from p2ptrain.net.transport import Handler
from p2ptrain.net.wire import Hello
from p2ptrain.runtime.driver import Driver
from p2ptrain.runtime.exchange import ExchangeConfig
from p2ptrain.sim.link import Link
from p2ptrain.sim.network import SimTransport
from p2ptrain.sim.replica import VectorReplica
from p2ptrain.sim.world import World
from tests.helpers.worlds import SIZE, build, models

NOTICED_S = 2.0
"""Issue A: a killed peer stops being chosen within two seconds."""

SILENCE_S = 4.0
"""A silent member is gone: probed, suspect, not refuted. Averages with it end by then."""


def cut_off(world: World, name: str) -> None:
    """The machine of `name` loses its power: nothing comes from it, not even a reset."""
    victim = world.peers[PeerId(name)]
    for other in world.peers.values():
        if other is not victim:
            world.network.cut(victim.address, other.address)


def choosing(world: World, name: str) -> list[str]:
    """Who would still ask `name` into a group."""
    peers = world.peers.items()
    return [n for n, peer in peers if n != name and name in peer.swarm.alive()]


# --- how soon a death is noticed ------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("count", [2, 3, 5, 8])
@pytest.mark.parametrize("algorithm", ["ad_psgd", "allreduce"])
async def test_a_peer_that_dies_silently_is_not_chosen_two_seconds_later(
    algorithm: str, count: int, seed: int
):
    world = await build(count, algorithm, seed=seed)
    await asyncio.sleep(1.1)
    cut_off(world, "p1")
    await asyncio.sleep(NOTICED_S)
    assert set(choosing(world, "p1")) == set()
    await world.close()


@pytest.mark.parametrize("count", [2, 3, 5, 8])
async def test_a_peer_that_is_killed_is_not_chosen_two_seconds_later(count: int):
    world = await build(count, "ad_psgd")
    await asyncio.sleep(1.1)
    world.crash("p1")
    await asyncio.sleep(NOTICED_S)
    assert choosing(world, "p1") == []
    await world.close()


async def test_a_peer_that_is_killed_is_not_chosen_by_whoever_talks_to_it_next():
    world = await build(2, "ad_psgd")
    await asyncio.sleep(1.0)
    world.crash("p1")
    result = await world.peers[PeerId("p0")].swarm.form([PeerId("p1")], 1)
    assert result.outcome in (Outcome.LOST, Outcome.LATE)
    assert choosing(world, "p1") == []
    await world.close()


async def test_a_living_peer_is_never_given_up_on_a_quiet_network():
    world = await build(5, "ad_psgd")
    await asyncio.sleep(120)
    for peer in world.peers.values():
        assert {record["state"] for record in peer.metrics.of("member")} == {"alive"}
    await world.close()


async def test_two_halves_of_a_world_train_on_and_meet_again_when_the_cut_heals():
    world = await build(4, "ad_psgd")
    for one in ("p0", "p1"):
        for other in ("p2", "p3"):
            world.network.cut(world.peers[PeerId(one)].address, world.peers[PeerId(other)].address)
    await asyncio.sleep(10)
    assert choosing(world, "p0") == ["p1"]
    world.network.heal()
    await asyncio.sleep(5)
    for name in world.peers:
        assert len(choosing(world, name)) == 3
    await world.close()


# --- killed in the middle of an average -----------------------------------------------------------


async def averaging(count: int) -> tuple[World, "asyncio.Task[object]"]:
    """A world whose peers are all in the middle of one average that takes about a second."""
    world = await build(
        count,
        "ad_psgd",
        size=10_000 * count,
        link=Link(latency_s=0.05),
        exchange=ExchangeConfig(chunk_kib=1),
    )
    await asyncio.sleep(1.0)
    first, *others = world.peers
    task = asyncio.create_task(world.peers[first].swarm.form(others, len(others)))
    await asyncio.sleep(0.5)
    assert not task.done()
    assert all(peer.driver.averages.running for peer in world.peers.values())
    return world, task


async def test_undisturbed_it_ends_with_the_mean_at_everyone():
    world, task = await averaging(3)
    mean_M = models(world).mean(axis=0)
    assert (await task).done  # type: ignore[attr-defined]
    await world.settle()
    np.testing.assert_allclose(models(world), np.tile(mean_M, (3, 1)), rtol=1e-6)
    await world.close()


@pytest.mark.parametrize("victim", ["p0", "p1"])
@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("death", ["killed", "silent"])
async def test_a_peer_that_dies_mid_average_costs_bounded_time_and_no_update(
    death: str, count: int, victim: str
):
    world, task = await averaging(count)
    before = {name: peer.model() for name, peer in world.peers.items()}
    if death == "killed":
        world.crash(victim)
    else:
        cut_off(world, victim)
    survivors = {name: peer for name, peer in world.peers.items() if name != victim}
    await asyncio.sleep(0.5 if death == "killed" else SILENCE_S)
    for peer in survivors.values():
        record = peer.metrics.of("group")[0]
        assert record["outcome"] == Outcome.LOST, record
        assert record["reason"]
    await world.settle()
    if len(survivors) == 1:
        (name,) = survivors
        assert np.array_equal(world.peers[name].model(), before[name])
    else:  # they have tried again without it, in the same group, and go on
        mean_M = np.mean([before[name] for name in survivors], axis=0)
        for peer in survivors.values():
            np.testing.assert_allclose(peer.model(), mean_M, rtol=1e-6)
            record = peer.metrics.of("group")[-1]
            assert record["members"] == sorted(survivors)
            assert record["ticket"].startswith("p0#1.")
        await asyncio.sleep(NOTICED_S)
        first, *others = survivors
        assert (await survivors[first].swarm.form(others, len(others))).done
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    world.network.heal()
    await world.close()


@pytest.mark.parametrize("crash_at_s", np.linspace(0.1, 1.6, 16))
async def test_whenever_a_third_peer_dies_the_other_two_agree_on_what_was_applied(
    crash_at_s: float,
):
    """Both have the mean of three, or both that of two."""
    world = await build(
        3, "ad_psgd", size=5000, link=Link(latency_s=0.05), exchange=ExchangeConfig(chunk_kib=1)
    )
    await asyncio.sleep(1.0)
    before, mean_M = models(world), models(world).mean(axis=0)
    asking = asyncio.create_task(
        world.peers[PeerId("p0")].swarm.form([PeerId("p1"), PeerId("p2")], 2)
    )
    await asyncio.sleep(float(crash_at_s))
    world.crash("p2")
    await world.settle(quiet_s=5.0)
    pair_M = before[:2].mean(axis=0)
    after = models(world)
    assert any(
        np.allclose(after, np.tile(expected_M, (2, 1)), rtol=1e-6)
        for expected_M in (mean_M, pair_M)
    ), "half of a mean was applied"
    assert asking.done()
    await world.close()


@pytest.mark.parametrize("leaver", ["p0", "p1"])
async def test_who_leaves_right_after_an_average_takes_nothing_away(leaver: str):
    """Its last chunks are still on their way to the other."""
    world, task = await averaging(2)
    mean_M = models(world).mean(axis=0)
    stayer = world.peers[PeerId("p1" if leaver == "p0" else "p0")]
    await world.peers.pop(PeerId(leaver)).lifecycle.leave(5.0)
    await world.settle()
    np.testing.assert_allclose(stayer.model(), mean_M, rtol=1e-6)
    task.cancel()
    await world.close()


# --- who is let in --------------------------------------------------------------------------------


class Elsewhere(SimTransport):
    """Listens at one address and advertises another."""

    advertised = Address("nowhere:1")

    async def start(self, handler: Handler) -> Address:
        await super().start(handler)
        return self.advertised


async def request_join(
    world: World, name: str, *, algorithm: str = "ad_psgd", size: int = SIZE, **hello: object
) -> None:
    """A newcomer joins that says `hello` of itself."""
    made = Driver.handle_identify

    def say(driver: Driver) -> Hello:
        said = made(driver)
        return replace(said, **hello) if driver.name == name else said  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Driver, "handle_identify", say)
        await world.add(name, VectorReplica(np.zeros(size, np.float32)), algorithm)


async def test_a_peer_of_another_protocol_version_is_refused_with_both_versions():
    world = await build(2, "ad_psgd")
    with pytest.raises(
        RefusedError,
        match=r"new speaks protocol version 99\.3 and p0 1\.\d+; install the same release",
    ):
        await request_join(world, "new", protocol=(99, 3))
    await world.close()


async def test_a_peer_with_another_algorithm_is_refused_with_both_names():
    world = await build(2, "ad_psgd")
    with pytest.raises(
        RefusedError,
        match="algorithm is 'allreduce' at new and 'ad_psgd' at p0; start both with the same",
    ):
        await request_join(world, "new", algorithm="allreduce")
    await world.close()


async def test_a_peer_with_another_model_is_refused_with_both_sizes():
    world = await build(2, "ad_psgd")
    with pytest.raises(
        RefusedError,
        match=r"new trains a model of 1,000 numbers \(vector-1000\) "
        r"and p0 one of 24 \(vector-24\): vector float32 \[1000\] instead of vector float32 \[24\]",
    ):
        await request_join(world, "new", size=1000)
    await world.close()


async def test_a_name_in_use_is_refused_with_the_address_of_its_owner():
    world = await build(2, "ad_psgd")
    owner = world.peers[PeerId("p1")]
    with pytest.raises(
        RefusedError,
        match=f"a peer named p1 is already here, at {owner.address}; choose another name",
    ):
        await request_join(world, "p1")
    world.peers[PeerId("p1")] = owner
    await world.close()


async def test_an_advertised_address_that_nobody_can_reach_is_refused(
    monkeypatch: pytest.MonkeyPatch,
):
    world = await build(2, "ad_psgd")
    monkeypatch.setattr(
        world.network, "transport", lambda *_: Elsewhere(world.network, Address("x"))
    )
    with pytest.raises(
        RefusedError,
        match=r"new cannot be reached from p0 at nowhere:1 \(.*\); advertise an address that",
    ):
        await request_join(world, "new")
    await world.close()


async def test_whoever_was_refused_leaves_no_trace():
    world = await build(2, "ad_psgd")
    with pytest.raises(RefusedError):
        await request_join(world, "new", protocol=(99, 3))
    await asyncio.sleep(5)
    assert choosing(world, "new") == []
    assert all(len(peer.swarm.alive()) == 1 for peer in world.peers.values())
    await world.close()


async def test_hosts_that_do_not_answer_are_named_with_the_time_they_were_tried():
    world = await build(1, "ad_psgd")
    lifecycle = world.peers[PeerId("p0")].lifecycle
    before = asyncio.get_running_loop().time()
    with pytest.raises(
        TransportError, match=r"no peer answered at nowhere:1, nowhere:2 within 3 s \(.*refused\)"
    ):
        await lifecycle.enter([Address("nowhere:1"), Address("nowhere:2")], 3.0)
    assert asyncio.get_running_loop().time() - before == pytest.approx(3.0, abs=0.2)
    await world.close()


async def test_an_address_in_use_is_refused():
    world = await build(1, "ad_psgd")
    (peer,) = world.peers.values()
    with pytest.raises(ConfigError, match=f"cannot listen on {peer.address}: it is in use"):
        await SimTransport(world.network, peer.address).start(peer.driver)
    await world.close()


async def test_peers_that_were_to_start_together_and_do_not_come_are_counted():
    world = await build(2, "ad_psgd")
    with pytest.raises(
        TransportError, match="3 peers were to start together; after 10 s there are: p0, p1; none"
    ):
        await world.peers[PeerId("p0")].lifecycle.take_model(3)
    await world.close()
