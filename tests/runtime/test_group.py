"""What an algorithm may do in a formed group: reduce, commit, keep, or nothing."""

import asyncio
import sys
import types
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import pytest

from p2ptrain.averaging import Algorithm, Group, Mean, Outcome, PeerId, Swarm, What
from p2ptrain.core.effects import Abandon
from p2ptrain.runtime.exchange import Exchange
from p2ptrain.runtime.formed_group import FormedGroup
from p2ptrain.runtime.pending_mean import PendingMean
from p2ptrain.sim.link import Link
from p2ptrain.sim.replica import VectorReplica
from p2ptrain.sim.world import World
from p2ptrain.vectors import Buffers
from tests.helpers.worlds import Books, build, models, steps_of, sum_of

T = TypeVar("T")
SIZE = 4
P0, P1 = PeerId("p0"), PeerId("p1")


class Watches(Algorithm):
    """Gossips in pairs, and writes down what it is told of its groups."""

    seen: list[tuple[tuple[PeerId, ...], What, int | None, bool]]

    def __init__(self, config: object = None) -> None:
        super().__init__(config)
        self.seen = []

    async def background(self, swarm: Swarm) -> None:
        updates = 0
        while True:
            updates = await swarm.wait_for_update(updates + 1)
            await swarm.form(swarm.choosable(), 1)

    async def average(self, group: Group) -> None:
        self.seen.append((group.members, group.what, group.version, group.awaited))
        await super().average(group)


class TakesNothing(Watches):
    async def average(self, group: Group) -> None:
        await group.reduce()


class Keeps(Watches):
    """Keeps every mean, and goes half of the way to it afterwards."""

    conserves_mean = False
    mean: Mean | None = None

    async def average(self, group: Group) -> None:
        self.mean = await group.keep()

    async def background(self, swarm: Swarm) -> None:
        await swarm.wait_for_update(1)
        if swarm.me == P0:
            await swarm.form([P1])
        while self.mean is None:
            await swarm.pause(0.01)
        await self.mean.add(0.5)


@pytest.fixture(autouse=True)
def watching(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("watching")
    for kind in (Watches, TakesNothing, Keeps):
        vars(module)[kind.__name__] = type(kind.__name__, (kind,), {"__module__": "watching"})
    monkeypatch.setitem(sys.modules, "watching", module)


def outcomes(world: World) -> set[str]:
    return {r["outcome"] for peer in world.peers.values() for r in peer.metrics.of("group")}


async def test_every_member_is_told_of_its_group_and_takes_the_result_in():
    world = await build(3, "watching:Watches")
    books = Books(world)
    await world.train(20, steps_of(0.1), books.injecting(20))
    for name, peer in world.peers.items():
        algorithm = peer.driver.algorithm
        assert isinstance(algorithm, Watches)
        assert len(algorithm.seen) >= peer.driver.accounts.groups_formed > 5
        for members, what, version, awaited in algorithm.seen:
            assert name in members
            assert list(members) == sorted(members)
            assert (what, version, awaited) == (What.MODELS, None, False)
    np.testing.assert_allclose(sum_of(world), books.due_M, rtol=1e-5)
    await world.close()


async def test_a_group_that_breaks_is_begun_again_with_those_who_are_left():
    world = await build(3, "watching:Watches", link=Link(latency_s=0.05))
    loop = asyncio.get_running_loop()
    loop.call_later(1.02, world.crash, "p2")
    await world.train(30, steps_of(0.1))
    assert all(peer.boundary.totals.steps == 30 for peer in world.peers.values())
    assert world.peers[P0].metrics.of("group")[-1]["outcome"] == Outcome.DONE
    await world.close()


async def test_what_is_being_applied_is_not_abandoned_in_a_second_attempt_either(monkeypatch):
    """A group is abandoned by its first ticket, whichever attempt is under way."""
    take_in, applied = FormedGroup._take_in, []

    async def slowly(group: FormedGroup, exchange: Exchange) -> list[np.ndarray]:
        if group.ticket.attempt:
            group._averages.handle(Abandon(group.ticket.root, Outcome.LATE, "too late"))
            await asyncio.sleep(0.01)
            applied.append(group)
        return await take_in(group, exchange)

    monkeypatch.setattr(FormedGroup, "_take_in", slowly)
    world = World(link=Link(latency_s=0.05))
    for name in "abc":
        await world.add(PeerId(name), VectorReplica(np.zeros(SIZE, np.float32)), "ad_psgd")
    a, *others = (PeerId(name) for name in "abc")
    await asyncio.sleep(1.0)
    asking = asyncio.create_task(world.peers[a].driver.swarm.form(others, 2))
    while not world.peers[PeerId("c")].driver.averages.running:  # noqa: ASYNC110 - virtual time
        await asyncio.sleep(0.001)
    world.crash("c")
    async with asyncio.timeout(30):
        assert (await asking).done
    assert applied
    assert {group.outcome for group in applied} == {Outcome.DONE}
    await world.close()


async def test_an_algorithm_that_takes_no_result_in_is_named_and_changes_nothing():
    world = await build(2, "watching:TakesNothing", learning_rate=0.0)
    before = models(world)
    await world.train(5, steps_of(0.1))
    assert outcomes(world) <= {Outcome.WITHDRAWN, Outcome.LOST}, "it leaves, and others hear of it"
    records = [record for peer in world.peers.values() for record in peer.metrics.of("group")]
    reasons = {record["reason"] for record in records if record["outcome"] == Outcome.WITHDRAWN}
    assert reasons == {"TakesNothing did not take the result in"}
    assert np.array_equal(models(world), before)
    await world.close()


async def test_a_mean_that_is_kept_is_added_when_the_algorithm_says_so():
    world = await build(2, "watching:Keeps", learning_rate=0.0)
    zero, one = models(world)
    await world.train(5, steps_of(0.1))
    assert outcomes(world) == {Outcome.DONE}
    mean = (zero + one) / 2
    np.testing.assert_allclose(models(world), [(zero + mean) / 2, (one + mean) / 2], rtol=1e-5)
    await world.close()


async def test_a_kept_mean_is_added_to_the_model_of_that_moment():
    async def inline(function: Callable[[], T], /) -> T:
        return function()

    replica = VectorReplica(np.full(SIZE, 8.0), learning_rate=1.0)
    buffers = Buffers(lambda size: np.empty(size, np.float32))
    kept = PendingMean(np.full(SIZE, 4.0, np.float32), 0, replica, buffers, inline)
    await kept.add(3 / 4)
    replica.settle()
    assert replica.live.tolist() == [(3 * 4.0 + 8.0) / 4] * SIZE
