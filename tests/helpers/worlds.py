"""Worlds of simulated peers whose trainers do what a test can add up by hand."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from p2ptrain.core.peer_machine import ProtocolConfig
from p2ptrain.ids import PeerId, Seconds
from p2ptrain.runtime.exchange import ExchangeConfig
from p2ptrain.sim.link import Link
from p2ptrain.sim.replica import VectorReplica
from p2ptrain.sim.trace import Trace
from p2ptrain.sim.world import SimPeer, World
from tests.helpers.variants import OFTEN, Variant

SIZE = 24
LEARNING_RATE = 1 / 64

Exact = NDArray[np.float64]


class Books:
    """What a world should hold in the end: where it began, and every update since."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.start_M: Exact = sum_of(world)
        self.updates_M: Exact = np.zeros_like(self.start_M)
        self.injected = 0

    def injecting(self, until_step: int) -> Callable[[SimPeer, int], None]:
        """Give each peer random gradients up to `until_step`, zero afterwards; note them down."""

        def before_step(peer: SimPeer, step: int) -> None:
            peer.replica.gradient = np.zeros_like(peer.replica.live)
            if step < until_step:
                gradient = peer.driver.rng.randrange(-64, 64)
                peer.replica.gradient += np.float32(gradient)
                self.injected += 1
                self.updates_M -= peer.replica.learning_rate * gradient

        return before_step

    @property
    def due_M(self) -> Exact:
        """What the sum of all models has to be, but for what waits in residuals."""
        due_M = self.start_M + self.updates_M
        for peer in self.world.peers.values():
            waits_M = peer.driver.averages.residual.vector(peer.replica.model_size)
            due_M = due_M + peer.replica.learning_rate * waits_M
        return due_M


async def build(
    count: int,
    algorithm: str | Variant,
    *,
    seed: int = 0,
    size: int = SIZE,
    equal: bool = False,
    learning_rate: float = LEARNING_RATE,
    link: Link | None = None,
    protocol: ProtocolConfig | None = None,
    exchange: ExchangeConfig | None = None,
    trace: Trace | None = None,
    **options: Any,  # the algorithm's own
) -> World:
    """Peers p0, p1, ... at random starting points around (10, 10, ...)."""
    if isinstance(algorithm, str):
        algorithm = Variant(algorithm, options={**OFTEN.get(algorithm, {}), **options})
    world = World(seed, link, protocol, exchange, trace)
    chance = np.random.default_rng(seed)
    start_M = 10 + chance.normal(size=size)
    for i in range(count):
        if not equal:
            start_M = 10 + chance.normal(size=size)
        replica = VectorReplica(start_M, learning_rate)
        await world.add(f"p{i}", replica, algorithm.algorithm, **algorithm.options)
    return world


def models(world: World) -> Exact:
    """One row per peer."""
    return np.array([peer.model() for peer in world.peers.values()], np.float64)


def sum_of(world: World) -> Exact:
    total_M: Exact = models(world).sum(axis=0)
    return total_M


def consensus_distance(world: World) -> float:
    """The largest distance of a number from its mean over the peers, relative to that mean."""
    rows = models(world)
    mean_M = rows.mean(axis=0)
    return float((np.abs(rows - mean_M) / np.abs(mean_M).max()).max())


def steps_of(step_s: Seconds, **others: Seconds) -> Callable[[PeerId], Seconds]:
    """``steps_of(0.1, p2=0.4)``: all peers take 0.1 s for a step, p2 takes 0.4 s.

    Nobody is in step with anybody by accident: each is a little slower than the one before it.
    """
    return lambda peer: others.get(peer, step_s) * (1 + int(peer[1:]) / 37)


async def until(holds: Callable[[], bool], *, within_s: Seconds) -> None:
    """Return as soon as it holds, or when this time is over: what comes after costs a processor."""
    loop = asyncio.get_running_loop()
    end = loop.time() + within_s
    while loop.time() < end and not holds():  # noqa: ASYNC110 - virtual time
        await asyncio.sleep(0.25)


async def lively(algorithm: str, seed: int) -> Trace:
    """Eight peers on a bad network, one of which dies and comes back; the trace of all of it."""
    link = Link(latency_s=0.005, jitter_s=0.01, loss=0.02, duplication=0.02, bandwidth_bytes_s=1e6)
    world = await build(8, algorithm, equal=True, seed=seed, link=link, trace=Trace(keep=None))

    async def die_and_come_back() -> None:
        await asyncio.sleep(1.05)
        world.crash("p2")
        await asyncio.sleep(0.5)
        await world.restart("p2")

    back = asyncio.get_running_loop().create_task(die_and_come_back())
    await world.train(30, steps_of(0.1), Books(world).injecting(20))
    await back
    await world.close()
    return world.trace
