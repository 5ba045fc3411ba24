"""Peers of a virtual world, all in this process, on a clock that jumps.

They run what real peers run, from the boundary to the protocol (`p2ptrain.sim`), and leave the same
files. The world stands still except inside `SimFleet.let_pass`, which moves it on by a slice of its
own time: always the same slices, however fast the machine is, since what the launcher decides
between two of them (a target is reached, the run ends) must be decided at the same virtual moment
in every run. So one seed has one trace.

Computing takes no virtual time: a step costs what the scenario's pace says. Gradients are computed
inline, on one thread, unless the scenario goes without them (`p2ptrain.sim.compute`).
"""

import asyncio
import dataclasses
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from launcher.backends.base import Fleet, PeerStatus
from launcher.conditions import LinkConfig
from launcher.outsiders import OUTSIDERS
from launcher.scenario import Scenario
from p2ptrain.compute.tasks import Task, load_task
from p2ptrain.compute.torch_replica import TorchReplica
from p2ptrain.compute.training import Learner, build_optimizer, threads
from p2ptrain.config import RunConfig
from p2ptrain.console.training import data_seed
from p2ptrain.errors import ConfigError, P2PTrainError
from p2ptrain.ids import Address, PeerId, Seconds
from p2ptrain.runtime.metrics import Metrics, TeeMetrics
from p2ptrain.sim.compute import (
    STANDS_FOR,
    PricedMetrics,
    PricedWork,
    priced_exchange,
    priced_replica,
)
from p2ptrain.sim.link import Link
from p2ptrain.sim.loop import VirtualLoop
from p2ptrain.sim.peer import LivingPeer, Trainee
from p2ptrain.sim.records import RecordFile
from p2ptrain.sim.trace import TraceMetrics
from p2ptrain.sim.world import World

SLICE_S: Seconds = 0.25
"""Of virtual time, between two looks at a small world."""

PEERS_PER_SLICE = 256
"""A world is looked at more rarely the larger it is: reading the records of all peers takes time,
too."""

CALLBACKS = 100_000
"""When so much has happened, a few seconds of real time have passed, and somebody waits to see."""


class SimBackend:
    """Simulates fleets."""

    def refusal(self, algorithm: str) -> str:
        """Outsiders are programs of their own."""
        return "cannot be simulated" if algorithm in OUTSIDERS else ""

    def check(self, scenario: Scenario) -> None:
        """Refuse what has no price; see `launcher.backends.base.Backend`."""
        if not scenario.pace.is_priced:
            raise ConfigError(
                f"{scenario.name} cannot be simulated: computing takes no virtual time, and its "
                "[pace] gives a step no price; set pace.min_step_ms, mean_ms, trace_ms or "
                "trace_file"
            )

    def start(self, scenario: Scenario, configs: Sequence[RunConfig]) -> Fleet:
        """Build a world of one peer per configuration."""
        return SimFleet(scenario, configs)


class SimFleet:
    """The peers of one run, and the world they live in."""

    def __init__(self, scenario: Scenario, configs: Sequence[RunConfig]) -> None:
        self._seed = scenario.seed
        self._slice_s = SLICE_S * max(1, len(configs) // PEERS_PER_SLICE)
        self._files: list[RecordFile] = []
        self._peers: list[LivingPeer] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._names = [config.name for config in configs]
        self._was_interrupted = False
        self._loop = VirtualLoop()
        self._loop.run_until_complete(self._populate(scenario, configs))

    # --- what the launcher asks -------------------------------------------------------------------

    @property
    def is_virtual(self) -> bool:
        """Time passes inside `let_pass` only."""
        return True

    def now(self) -> Seconds:
        """The world's clock, from 0."""
        return self._loop.now

    def let_pass(self) -> None:
        """Move the world on by one slice of its time."""
        try:
            with threads(1), _rare_collections():
                self._loop.run_for(self._slice_s, CALLBACKS)
        except BaseException:
            self._was_interrupted = True  # in the middle of something: it cannot go on
            raise

    def poll(self) -> Sequence[PeerStatus]:
        """Say how every peer is; their records so far are on disk then."""
        for file in self._files:
            file.flush()
        return [_status(name, task) for name, task in zip(self._names, self._tasks, strict=True)]

    def facts(self) -> dict[str, Any]:  # Any: JSON
        """What makes a simulation one that can be repeated."""
        return {"seed": self._seed, "trace_hash": self._trace_hash}

    def stop(self, grace_s: Seconds) -> None:
        """Ask all to leave, let the world go on for `grace_s`, end what is left of it."""
        if self._loop.is_closed():
            return
        try:
            end = self.now() + grace_s
            for peer, task in zip(self._peers, self._tasks, strict=True):
                if not task.done() and peer.address:
                    peer.stop("asked to end by the launcher")
            while not self._was_interrupted and self._anyone_runs() and self.now() < end:
                self.let_pass()
        finally:
            self._end_world()

    # --- inside -----------------------------------------------------------------------------------

    def _anyone_runs(self) -> bool:
        return any(not task.done() for task in self._tasks)

    def _end_world(self) -> None:
        self._trace_hash = self._world.trace.hash
        self._loop.set_exception_handler(lambda loop, context: None)  # nobody is to hear of it
        self._loop.run_until_complete(_cancel_all())
        self._loop.close()

    async def _populate(self, scenario: Scenario, configs: Sequence[RunConfig]) -> None:
        self._world = World(scenario.seed, _link(scenario.link or LinkConfig()))
        task = load_task(scenario.task, scenario.task_options)
        make = partial(_learning, task) if scenario.gradients else _pricing(task, configs[0])
        world, host = self._world, _address(configs[0])
        world.network.stands_for = 1 if scenario.gradients else STANDS_FOR
        for config in configs:
            file = RecordFile(Path(config.out) / f"{config.name}.jsonl", self.now)
            joins = () if config is configs[0] else (host,)
            placed = dataclasses.replace(config, listen=_address(config), join=joins)
            traced = TraceMetrics(world.trace, PeerId(config.name))
            peer = make(placed, TeeMetrics(file, traced))
            self._files.append(file)
            self._peers.append(peer)
            self._tasks.append(peer.start(world.network.transport(_address(config), config.name)))


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Let Python look for garbage less often: a large world has millions of objects to look at."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


async def _cancel_all() -> None:
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


def _address(config: RunConfig) -> Address:
    return Address(f"{config.name}:1")


def _learning(task: Task, config: RunConfig, metrics: Metrics) -> LivingPeer:
    """A peer that computes its gradients."""
    training = config.training
    model = task.build_model(config.seed)
    optimizer = build_optimizer(model, training)
    replica = TorchReplica(model, optimizer)
    learner = Learner(
        task,
        model,
        optimizer,
        training,
        me=PeerId(config.name),
        rank=config.rank,
        peers=config.peers,
        seed=data_seed(config, PeerId(config.name)),
        end_samples=config.stop.samples,
    )
    update = partial(replica.optimizer_step, training.clip)
    trainee = Trainee(replica, learner, update)
    return LivingPeer(config, trainee, config.pace, config.rank, metrics, 1, snapshots=True)


def _pricing(task: Task, config: RunConfig) -> Callable[[RunConfig, Metrics], LivingPeer]:
    """Makes peers whose steps are only priced, for a model as large as the task's."""
    model = task.build_model(config.seed)
    size = TorchReplica(model, build_optimizer(model, config.training)).model_size
    exchange = priced_exchange(config.exchange)

    def make(config: RunConfig, metrics: Metrics) -> LivingPeer:
        replica = priced_replica(size)
        trainee = Trainee(replica, PricedWork(config.training.batch_size), replica.descend)
        config = dataclasses.replace(config, exchange=exchange)
        priced = PricedMetrics(metrics, size)
        return LivingPeer(config, trainee, config.pace, config.rank, priced, 1, snapshots=False)

    return make


def _link(config: LinkConfig) -> Link:
    return Link(
        latency_s=config.latency_ms / 1000,
        jitter_s=config.jitter_ms / 1000,
        loss=config.loss,
        duplication=config.duplication,
        bandwidth_bytes_s=config.bandwidth_mbit_s * 1e6 / 8,
    )


def _status(name: str, task: asyncio.Task[None]) -> PeerStatus:
    """As a process's exit code would tell."""
    if not task.done():
        return PeerStatus(name)
    if task.cancelled():
        return PeerStatus(name, "lost", "was killed")
    error = task.exception()
    if error is None:
        return PeerStatus(name, "ended", "ended its run")
    if isinstance(error, P2PTrainError):
        return PeerStatus(name, "refused", str(error))
    raise error
