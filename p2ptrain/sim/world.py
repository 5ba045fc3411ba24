"""A world of simulated peers, on virtual time.

What is simulated is the network (`sim/network.py`), the clock (`sim/loop.py`) and the price of
compute: a trainer's step is a wait of so many virtual seconds. Everything that decides is the code
that runs in production.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from random import Random
from typing import Any, TypeVar

import numpy as np

from p2ptrain.averaging.base import load_algorithm
from p2ptrain.compute.replica import Vector
from p2ptrain.core.peer_machine import ProtocolConfig
from p2ptrain.ids import Address, PeerId, Seconds
from p2ptrain.runtime.boundary import Boundary
from p2ptrain.runtime.driver import Driver
from p2ptrain.runtime.exchange import ExchangeConfig
from p2ptrain.runtime.metrics import MemoryMetrics
from p2ptrain.runtime.swarm import DriverSwarm
from p2ptrain.sim.network import Link, SimNetwork
from p2ptrain.sim.replica import VectorReplica

T = TypeVar("T")


class SimPeer:
    """One peer of a world: a driver, a replica and a trainer whose steps cost virtual time."""

    def __init__(self, driver: Driver, replica: VectorReplica, metrics: MemoryMetrics) -> None:
        self.driver = driver
        self.replica = replica
        self.metrics = metrics
        self.address = Address("")
        self.trainer: asyncio.Task[None] | None = None
        self.swarm = DriverSwarm(driver)
        self.boundary = Boundary(
            driver, self.swarm, _SameLoop(), metrics, asyncio.get_running_loop().time
        )

    async def train(
        self,
        steps: int,
        step_s: Seconds,
        before_step: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Train `steps` steps of `step_s` each, then serve; `before_step` sets gradients."""
        self.boundary.begin()
        self.driver.begin_background(self.swarm)
        for step in range(steps):
            await asyncio.sleep(step_s)
            before_step(step)
            await self.boundary.step(1, None, self.replica.descend)
        self.boundary.end()

    def model(self) -> Vector:
        """Live + pending."""
        vector_M = np.empty(self.replica.model_size, np.float32)
        self.replica.snapshot(vector_M)
        return vector_M


class World:
    """Peers, the network between them, and one seed for all chance."""

    def __init__(
        self,
        seed: int = 0,
        link: Link | None = None,
        protocol: ProtocolConfig | None = None,
        exchange: ExchangeConfig | None = None,
    ) -> None:
        self.network = SimNetwork(seed, link)
        self.peers: dict[PeerId, SimPeer] = {}
        self._lives = 0
        self._seed = seed
        self._protocol = protocol or ProtocolConfig()
        self._exchange = exchange or ExchangeConfig()

    async def add(
        self, name: str, replica: VectorReplica, algorithm: str, **options: Any
    ) -> SimPeer:
        """Start a peer and let it join; the first one of a world has nobody to join.

        Raises:
            RefusedError: if the others will not have it.
        """
        self._lives += 1  # a peer that comes back counts under a new incarnation
        metrics = MemoryMetrics(asyncio.get_running_loop().time)
        driver = Driver(
            PeerId(name),
            incarnation=self._lives,
            algorithm=load_algorithm(algorithm, options),
            algorithm_name=algorithm,
            replica=replica,
            transport=self.network.transport(),
            protocol=self._protocol,
            exchange=self._exchange,
            rng=Random(f"{self._seed}/{name}"),
            offload=_inline,
            clock=asyncio.get_running_loop().time,
            metrics=metrics,
        )
        peer = SimPeer(driver, replica, metrics)
        peer.address = await driver.start()
        if self.peers:
            await driver.join([p.address for p in self.peers.values()], timeout_s=10.0)
        self.peers[PeerId(name)] = peer
        return peer

    async def train(
        self,
        steps: int,
        step_s: Callable[[PeerId], Seconds],
        before_step: Callable[[SimPeer, int], None] = lambda _, __: None,
    ) -> None:
        """All peers train, until all that live have ended and nobody averages any more."""
        loop = asyncio.get_running_loop()
        for name, peer in self.peers.items():
            training = peer.train(steps, step_s(name), partial(before_step, peer))
            peer.trainer = loop.create_task(training)
        trainers = [peer.trainer for peer in self.peers.values() if peer.trainer]
        ended = await asyncio.gather(*trainers, return_exceptions=True)
        for error in ended:
            if isinstance(error, BaseException) and not isinstance(error, asyncio.CancelledError):
                raise error
        await asyncio.gather(*(p.driver.wait_until_all_done() for p in self.peers.values()))
        await self.settle()

    async def settle(self, quiet_s: Seconds = 0.5) -> None:
        """Wait until nobody has averaged for so long: what one has applied, all have."""
        quiet = 0
        while quiet < 10:
            await asyncio.sleep(quiet_s / 10)
            quiet = 0 if any(peer.driver.averages for peer in self.peers.values()) else quiet + 1

    def crash(self, name: str) -> None:
        """Kill -9."""
        peer = self.peers.pop(PeerId(name))
        self.network.crash(peer.address)
        peer.driver.kill()
        if peer.trainer:
            peer.trainer.cancel()

    async def close(self) -> None:
        """Everyone leaves."""
        for peer in self.peers.values():
            await peer.driver.leave(1.0)


class _SameLoop:
    """Implements `Cross` where trainer and protocol share a loop: nothing is carried anywhere."""

    def call(self, work: Coroutine[Any, Any, T]) -> Awaitable[T]:  # Any: asyncio's own types
        return work

    def post(self, function: Callable[[], None]) -> None:
        function()


async def _inline(function: Callable[[], T], /) -> T:
    """There are no threads here: compute runs inline."""
    return function()
