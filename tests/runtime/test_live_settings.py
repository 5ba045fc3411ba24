"""A running swarm changes its algorithm: all follow, no group mixes two, and nothing is lost."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from p2ptrain.core.choice import Choice
from p2ptrain.core.effects import Outcome
from p2ptrain.core.messages import SettingsChange
from p2ptrain.errors import ConfigError, RefusedError
from p2ptrain.net.wire import SetRequest
from p2ptrain.runtime.live_settings import check_choice
from p2ptrain.runtime.set_settings import answer
from p2ptrain.sim.link import Link
from p2ptrain.sim.world import SimPeer, World
from tests.helpers.worlds import Books, build, consensus_distance, models, steps_of, sum_of

STEPS = 60


def propose(world: World, name: str, choice: Choice) -> None:
    async def work(peer: SimPeer) -> None:
        peer.driver.live.propose(choice, "a test wants it")

    peer = world.peers[name]
    peer.process.start(work(peer))


async def trained(
    world: World, *changes: tuple[float, str, Choice], inject: int = STEPS // 2
) -> Books:
    """All train, with these changes: when, by whom, to what."""
    books = Books(world)

    async def change() -> None:
        for after_s, name, choice in changes:
            await asyncio.sleep(after_s)
            propose(world, name, choice)

    changing = asyncio.create_task(change())
    async with asyncio.timeout(60):
        await world.train(STEPS, steps_of(0.1, p2=0.25), books.injecting(inject))
    await changing
    return books


async def world_of(algorithm: str, seed: int = 1, **options: object) -> World:
    return await build(3, algorithm, seed=seed, equal=True, link=Link(latency_s=0.005), **options)


PAIRS = [
    ("ad_psgd", Choice("wagma")),
    ("wagma", Choice("ad_psgd", {"fragment_s": 0.01})),
    ("ad_psgd", Choice("eager", {"average_models_every": 5})),
    ("eager", Choice("local_sgd", {"period": 2})),
    ("eager", Choice("eager", {"rule": "solo", "average_models_every": 5})),
    ("topk", Choice("ad_psgd")),
    ("dear", Choice("ripples")),
    ("ripples", Choice("d_psgd")),
]


@pytest.mark.parametrize(("first", "then"), PAIRS, ids=lambda one: str(one))
async def test_no_update_is_lost_on_the_way_from_one_algorithm_to_another(first: str, then: Choice):
    world = await world_of(first)
    books = await trained(world, (1.05, "p1", then))
    names = {peer.driver.live.choice.algorithm for peer in world.peers.values()}
    assert names == {then.algorithm}
    np.testing.assert_allclose(sum_of(world), books.due_M, rtol=1e-5)
    assert consensus_distance(world) < 0.05
    assert all(len(peer.metrics.of("settings")) == 1 for peer in world.peers.values())
    await world.close()


@pytest.mark.parametrize("then", ["allreduce", "dear"])
async def test_from_models_to_gradients_all_go_on_with_one_model_and_state(then: str):
    world = await world_of("ad_psgd")
    await trained(world, (1.05, "p1", Choice(then)))
    first, *others = models(world)
    for other in others:
        np.testing.assert_array_equal(first, other)
    taken = [r["text"] for p in world.peers.values() for r in p.metrics.of("warning")]
    assert not any("could not" in text for text in taken)
    await world.close()


async def test_between_peers_in_step_no_model_is_taken_over():
    world = await world_of("allreduce")
    books = await trained(world, (1.05, "p1", Choice("dear")), (1.5, "p0", Choice("allreduce")))
    for peer in world.peers.values():
        texts = [record["text"] for record in peer.metrics.of("warning")]
        assert not any("took over" in text for text in texts)
        assert peer.driver.live.choice.algorithm == "allreduce"
    first, *others = models(world)
    for other in others:
        np.testing.assert_array_equal(first, other)
    assert books.injected
    await world.close()


async def test_no_group_has_members_of_two_settings():
    world = await world_of("ad_psgd")
    await trained(world, (1.0, "p1", Choice("wagma")), (1.0, "p0", Choice("ad_psgd")))
    seen: dict[str, set[str]] = {}
    for peer in world.peers.values():
        settings = "ad_psgd at first"
        for record in peer.metrics.records:
            if record["kind"] == "settings":
                settings = f"{record['settings']} of {record['epoch']}"
            elif record["kind"] == "group" and record["outcome"] == Outcome.DONE:
                seen.setdefault(record["ticket"], set()).add(settings)
    assert len(seen) > 20
    assert all(len(settings) == 1 for settings in seen.values())
    await world.close()


async def test_two_proposals_at_one_moment_end_in_one():
    world = await world_of("ad_psgd")
    await trained(world, (1.0, "p0", Choice("wagma")), (0.0, "p2", Choice("ripples")))
    assert len({peer.driver.live.epoch for peer in world.peers.values()}) == 1
    assert len({str(peer.driver.live.choice) for peer in world.peers.values()}) == 1
    await world.close()


async def test_a_peer_that_starts_again_works_with_the_settings_of_the_others():
    world = await world_of("ad_psgd")

    async def come_back() -> None:
        await asyncio.sleep(1.0)
        world.crash("p1")
        propose(world, "p0", Choice("wagma"))
        await asyncio.sleep(1.0)
        await world.restart("p1")

    back = asyncio.create_task(come_back())
    await trained(world)
    await back
    assert {peer.driver.live.choice.algorithm for peer in world.peers.values()} == {"wagma"}
    await world.close()


async def test_a_peer_whose_training_is_over_follows_too():
    world = await world_of("ad_psgd")
    await trained(world)
    propose(world, "p0", Choice("noloco"))
    await asyncio.sleep(2.0)
    assert {peer.driver.live.choice.algorithm for peer in world.peers.values()} == {"noloco"}
    await world.close()


# --- what may be asked for ------------------------------------------------------------------------


async def test_settings_that_cannot_work_are_refused_before_anybody_hears_of_them():
    world = await world_of("ad_psgd")
    live = world.peers["p0"].driver.live
    for choice, said in (
        (Choice("wagma", {"tau": 0}), "tau"),
        (Choice("wagma", {"group_size": 8}), "group_size = 8 is more than the 3 peers"),
        (Choice("nothing"), "not of a running"),
        (Choice("os:path"), "not of a running"),
        (Choice("ad_psgd", {}, "zip"), "zip"),
        (Choice("dear", {}, "fp32", "int8"), "gradient_codec"),
    ):
        with pytest.raises(ConfigError, match=said):
            live.propose(choice, "a test wants it")
        assert not live.is_due
    await world.close()


async def served_in_step() -> World:
    """Three peers in step, of which p2 only serves, as all have heard."""
    world = await world_of("allreduce")
    driver = world.peers["p2"].driver
    driver.config = replace(driver.config, trains=False)
    driver.machine.membership.describe(steps=4)
    await asyncio.sleep(2.0)
    return world


@pytest.mark.parametrize(
    ("asked", "said"),
    [("p0", "p2 only serves: ad_psgd averages models"), ("p2", "trains = false: ad_psgd averages")],
)
async def test_where_a_peer_only_serves_no_one_sets_what_would_average_its_model(asked, said):
    world = await served_in_step()
    driver = world.peers[asked].driver
    reply = answer(driver, True, SetRequest('{"algorithm": "ad_psgd"}'))
    assert said in reply.refusal
    assert not driver.live.is_due
    for algorithm in ("dear", "parameter_server"):
        assert not answer(driver, True, SetRequest(f'{{"algorithm": "{algorithm}"}}')).refusal
    await world.close()


async def test_a_peer_that_only_serves_ends_rather_than_have_its_model_averaged():
    """Who proposed that had not heard of it."""
    world = await served_in_step()
    driver = world.peers["p2"].driver
    change = world.peers["p0"].driver.machine.propose(Choice("ad_psgd").text, "", 0.0)
    driver.machine.know(change, 0.0)
    with pytest.raises(ConfigError, match="p2 cannot follow: trains = false: ad_psgd averages"):
        await driver.live.change()


async def test_a_peer_that_cannot_follow_ends_with_the_sentence():
    world = await world_of("ad_psgd")
    driver = world.peers["p0"].driver
    text = Choice("wagma", {"tau": 0}).text
    change: SettingsChange = world.peers["p1"].driver.machine.propose(text, "", 0.0)
    driver.machine.know(change, 0.0)
    with pytest.raises(ConfigError, match="cannot follow: wagma tau = 0"):
        await driver.live.change()


def test_no_message_makes_a_peer_import_anything():
    from p2ptrain.runtime.settings import PeerConfig

    with pytest.raises(ConfigError, match="not of a running swarm"):
        check_choice(PeerConfig(), Choice("tests.helpers.mixed:Mixed"))
    with pytest.raises(ConfigError, match="none of p2ptrain's own algorithms"):
        check_choice(PeerConfig(), Choice("auto", {"now": "tests.helpers.mixed:Mixed"}))
    own = PeerConfig(algorithm="tests.helpers.mixed:Mixed")
    assert check_choice(own, Choice("tests.helpers.mixed:Mixed"))


async def test_status_says_with_what_auto_works_before_it_has_changed_anything():
    world = await world_of("auto", margin=0.5)
    live = world.peers["p0"].driver.live
    assert live.words == "auto margin=0.5 now=ad_psgd fragment_s=1"
    assert live.choice == Choice("auto", {"margin": 0.5}), "it is as it was asked for"
    await world.close()


async def test_set_is_a_members_right():
    world = await world_of("ad_psgd")
    driver = world.peers["p0"].driver
    asked = SetRequest('{"algorithm": "wagma", "tau": 5}')
    with pytest.raises(RefusedError, match="members only"):
        answer(driver, False, asked)
    assert not driver.live.is_due
    reply = answer(driver, True, asked)
    assert (reply.refusal, reply.settings) == ("", "wagma tau=5")
    assert driver.live.is_due
    await world.close()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"tau": 5}', "tau"),
        ('{"algorithm": "wagam"}', "wagam"),
        ('{"algorithm": 5}', "must be a name"),
        ("{}", "NAME=VALUE"),
        ("[1]", "names with plain values"),
        ("{", "no JSON"),
        ('{"every_updates": 1}', "already|option"),
    ],
)
async def test_what_set_cannot_do_it_says_in_a_sentence(text: str, said: str):
    world = await world_of("ad_psgd", every_updates=1)
    driver = world.peers["p0"].driver
    reply = answer(driver, True, SetRequest(text))
    assert any(part in reply.refusal for part in said.split("|")), reply
    assert not driver.live.is_due
    await world.close()
