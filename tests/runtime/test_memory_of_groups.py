"""Memory of a group is free when the group is over, not when Python looks for cycles."""

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from p2ptrain.runtime import averages as averages_module
from p2ptrain.runtime import formed_group as formed_group_module
from p2ptrain.runtime.formed_group import FormedGroup
from p2ptrain.sim.link import Link
from p2ptrain.sim.replica import VectorReplica
from p2ptrain.sim.world import SimPeer
from p2ptrain.vectors import NO_NUMBERS, Vector
from tests.helpers.worlds import SIZE, Books, build, steps_of

STEPS = 12
ALGORITHMS = ("ad_psgd", "allreduce", "dear", "diloco", "eager", "ok_topk")
BAD_LINK = Link(latency_s=0.005, jitter_s=0.01, loss=0.02, duplication=0.02)


@pytest.fixture(autouse=True)
def _no_garbage_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


class Lent:
    """The vectors that a peer's averages have had made, as long as they are alive."""

    def __init__(self, peer: SimPeer) -> None:
        self.averages = peer.driver.averages
        self._make = self.averages.buffers._make
        self._made: list[weakref.ref[Vector]] = []
        self.sizes: list[int] = []
        self.averages.buffers._make = self._and_watch

    def _and_watch(self, size: int) -> Vector:
        made = self._make(size)
        self.sizes.append(size)
        self._made.append(weakref.ref(made))
        return made

    def held(self) -> int:
        """Those that are neither idle nor in an exchange that has begun behind a pass."""
        assert self._made
        overlap, known = self.averages.overlap, [*self.averages.buffers._idle]
        if overlap and (begun := overlap._begun):
            known += [begun.vector_G, *(v for one in begun.exchange.buckets for v in one.mix.lent)]
        places = [id(vector) for vector in known]
        return sum(ref() is not None and id(ref()) not in places for ref in self._made)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
async def test_no_group_and_none_of_its_vectors_outlives_its_end(algorithm):
    world = await build(4, algorithm, equal=True)
    lent = [Lent(peer) for peer in world.peers.values()]
    await world.train(STEPS, steps_of(0.1), Books(world).injecting(STEPS))
    await asyncio.sleep(1)
    ours = [id(one.averages) for one in lent]
    assert not [
        one for one in gc.get_objects() if type(one) is FormedGroup and id(one._averages) in ours
    ]
    assert [one.held() for one in lent] == [0] * len(lent)
    await world.close()


@pytest.mark.parametrize("algorithm", ["ad_psgd", "allreduce", "dear"])
async def test_no_vector_of_a_group_that_broke_outlives_its_end(algorithm):
    world = await build(4, algorithm, equal=True, link=BAD_LINK)
    lent = [Lent(peer) for name, peer in world.peers.items() if name != "p2"]
    asyncio.get_running_loop().call_later(0.7, world.crash, "p2")
    await world.train(STEPS, steps_of(0.1), Books(world).injecting(STEPS))
    await asyncio.sleep(1)
    assert [one.held() for one in lent] == [0] * len(lent)
    await world.close()


class Handing:
    """Keeps the memory of a delta while that is pending, as a real model does."""

    def __init__(self, replica: VectorReplica) -> None:
        self._add, self._memory = replica.add_delta, NO_NUMBERS
        replica.add_delta, replica.take_idle = self.add_delta, self.take_idle

    def add_delta(self, delta: Vector, start: int = 0) -> Vector:
        self._add(delta.copy(), start)
        spare, self._memory = self._memory, delta
        return spare

    def take_idle(self) -> Vector:
        idle, self._memory = self._memory, NO_NUMBERS
        return idle


@pytest.mark.parametrize("algorithm", ["d_psgd", "diloco"])
async def test_averages_of_a_long_model_are_made_in_the_memory_of_the_last_one(
    algorithm, monkeypatch
):
    monkeypatch.setattr(averages_module, "SHORT", 0)
    monkeypatch.setattr(formed_group_module, "LONG", 0)
    options = {"period": 1, "sync": "step"} if algorithm == "diloco" else {}
    world = await build(2, algorithm, equal=True, **options)
    lent = []
    for peer in world.peers.values():
        Handing(peer.replica)
        lent.append(Lent(peer))
    await world.train(STEPS, steps_of(0.1))
    made = 1 + 1  # what is contributed, and what others read of it, in a pair with short vectors
    assert [one.sizes.count(SIZE) for one in lent] == [made, made]
    await world.close()
