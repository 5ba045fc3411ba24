"""What the driver does with averages that are abandoned at awkward moments."""

import asyncio

import numpy as np

from p2ptrain.core.messages import Begin, Claim, Release
from p2ptrain.ids import PeerId, Ticket
from p2ptrain.net.wire import Envelope
from p2ptrain.sim.replica import VectorReplica
from p2ptrain.sim.world import World

A, B = PeerId("a"), PeerId("b")


async def test_an_average_that_is_abandoned_before_it_starts_leaves_nothing_behind():
    """`Begin` and `Release` arrive in one breath: the task is cancelled before its first line."""
    world = World()
    for name in (A, B):
        await world.add(name, VectorReplica(np.zeros(4, np.float32)), "ad_psgd")
    await asyncio.sleep(0.1)
    driver, ticket = world.peers[B].driver, Ticket(A, 1, 1)
    for message in (Claim(ticket, 1), Begin(ticket, (A, B)), Release(ticket)):
        driver.handle_message(Envelope(A, driver.digest, message))
    assert driver.averages.running
    await asyncio.sleep(0.1)
    assert not driver.averages.running
    before = asyncio.get_running_loop().time()
    await driver.leave(5.0)
    assert asyncio.get_running_loop().time() - before < 0.5
