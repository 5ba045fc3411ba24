"""Run a configured peer in a world: the counterpart of `Peer` and ``p2ptrain peer``.

Its lifecycle (`runtime/lifecycle.py`) and its loop (`compute/steps.py`) are those of a real peer.
Trainer and protocol share one event loop, so nothing passes between threads, and copies are made
inline.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from p2ptrain.compute.buckets import Buckets
from p2ptrain.compute.replica import Replica
from p2ptrain.compute.step_timing import StepTiming
from p2ptrain.compute.steps import Work, serve_others, take_steps
from p2ptrain.errors import P2PTrainError
from p2ptrain.ids import Address, PeerId, Seconds
from p2ptrain.net.transport import Transport
from p2ptrain.runtime.files import Files
from p2ptrain.runtime.lifecycle import PeerLifecycle
from p2ptrain.runtime.metrics import Metrics
from p2ptrain.runtime.settings import Environment, PeerConfig
from p2ptrain.sim.compute import WorkClock
from p2ptrain.sim.files import MemoryFiles
from p2ptrain.sim.loop import virtual_loop
from p2ptrain.sim.process import Process

T = TypeVar("T")

SLICE_S: Seconds = 1.0
"""The interval at which a simulated step checks whether it should stop: longer than a real one's,
since in a large world most events would be such checks."""


@dataclass(frozen=True, slots=True)
class Trainee:
    """A model, the computation of a step on it, and its update."""

    replica: Replica
    work: Work
    update: Callable[[], None]
    clip: float | None = None
    """The norm to which `update` clips gradients."""


class LivingPeer:
    """One peer of a simulated fleet.

    Args:
        config: as a real peer's; its name is not empty.
        trainee: its model and steps.
        pace: the price of a step.
        rank: its rank in the pace.
        metrics: receives the records.
        incarnation: larger than any earlier one of this name.
        stands_for: how many bytes on the link one byte of its model stands for.
    """

    def __init__(
        self,
        config: PeerConfig,
        trainee: Trainee,
        pace: StepTiming,
        rank: int,
        metrics: Metrics,
        incarnation: int,
        *,
        stands_for: int = 1,
    ) -> None:
        self.name = PeerId(config.name)
        self.address = Address("")
        self._config = config
        self._rank = rank
        self._trainee = trainee
        self._pace = pace
        self.process = Process(config.name)
        self.task: asyncio.Task[None]
        """Its main task; there is none before `begin`."""
        self._metrics = metrics
        self._life = PeerLifecycle(
            config,
            trainee.replica,
            simulated_environment(self.process, incarnation, stands_for=stands_for),
        )
        trainee.work.draw_from(self._life)

    @property
    def should_stop(self) -> bool:
        return self._life.should_stop

    @property
    def progress(self) -> int:
        return self._life.progress

    @property
    def buckets(self) -> Buckets | None:
        return self._life.buckets

    def batch_size(self, usual: int) -> int:
        """Samples of the next step, where batches are divided by speed."""
        return self._life.batch_size(usual)

    async def before_forward(self, bucket: int) -> None:
        """The forward pass is about to use this bucket."""
        await self._life.boundary.before_forward(bucket)

    async def step(self, samples: int, loss: float | None) -> None:
        """The boundary."""
        await self._life.boundary.step(samples, loss, self._trainee.update, clip=self._trainee.clip)

    def stop(self, why: str) -> None:
        """Ask it to leave, like SIGTERM."""
        self.process.context().run(self._life.stop, why)

    def begin(self, transport: Transport) -> None:
        """Start, in a process of its own."""
        self.task = self.process.start(self._live(transport))

    def die(self) -> None:
        """Stop at once, like a killed process."""
        if self.address:
            self._life.kill()
        self.task.cancel()

    async def _live(self, transport: Transport) -> None:
        """Join, train, serve, leave.

        Raises:
            P2PTrainError: the error with which a real peer would end; it has left cleanly.
        """
        life, error = self._life, None
        self.address = await life.listen(transport, self._metrics)
        try:
            await life.join()
        except P2PTrainError:
            await life.abandon()
            raise
        life.begin()
        try:
            await self._train()
        except P2PTrainError as raised:
            error = raised
        await life.boundary.end()
        await life.depart(serve=not error and not life.driver.stopping and self._config.serve)
        life.record_end(f"{type(error).__name__}: {error}" if error else life.why_stopped)
        if error:
            raise error

    async def _train(self) -> None:
        config, working = self._config, WorkClock()
        if not config.trains:
            await serve_others(self._trainee.work, self)
            return
        await take_steps(
            self._trainee.work,
            self,
            self._pace,
            rank=self._rank,
            peers=config.peers,
            seed=config.seed,
            clock=working.worked,
            sleep=working.work,
            slice_s=SLICE_S,
        )


def simulated_environment(
    process: Process, incarnation: int, files: Files | None = None, *, stands_for: int = 1
) -> Environment:
    """The environment of a simulated peer: its own clock, one loop, copies made inline.

    Wall clocks agree; what drifts is the clock of timers.
    """
    loop = virtual_loop()
    return Environment(
        clock=loop.clock_of(process),
        unix_clock=lambda: loop.now,
        incarnation=incarnation,
        call=lambda work: work,
        post=lambda function: function(),
        executor=inline,
        device="simulated",
        files=files or MemoryFiles(),
        chance=Random(f"{process.name}/{incarnation}"),
        stands_for=stands_for,
    )


async def inline(function: Callable[[], T], /) -> T:
    """There are no threads here: compute runs inline."""
    return function()
