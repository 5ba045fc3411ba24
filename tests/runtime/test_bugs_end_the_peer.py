"""An unexpected error, here or in somebody's algorithm, reaches the trainer; it never hangs it."""

import asyncio

import numpy as np
import pytest

from p2ptrain.averaging.base import Algorithm, Swarm
from p2ptrain.sim.replica import VectorReplica
from p2ptrain.sim.world import World


class FailsInTheBackground(Algorithm):
    async def background(self, swarm: Swarm) -> None:
        await swarm.wait_for_update(3)
        raise ZeroDivisionError("a slip in somebody's algorithm")


async def test_an_algorithm_that_raises_ends_the_step_with_its_error():
    world = World()
    peer = await world.add("p00", VectorReplica(np.ones(3)), f"{__name__}:FailsInTheBackground")
    with pytest.raises(ZeroDivisionError, match="a slip"):
        await peer.train(steps=10, step_s=1.0)
    assert peer.boundary.totals.steps == 3


async def test_a_bug_while_the_trainer_waits_ends_its_wait():
    world = World()
    first = await world.add("p00", VectorReplica(np.ones(3)), "allreduce")
    await world.add("p01", VectorReplica(np.ones(3)), "allreduce")  # never arrives
    bug = RuntimeError("a bug in here")
    asyncio.get_running_loop().call_later(5.0, first.driver.fail, bug)
    with pytest.raises(RuntimeError, match="a bug in here"):
        await first.train(steps=2, step_s=1.0)
    assert asyncio.get_running_loop().time() == pytest.approx(5.0, abs=0.01)
