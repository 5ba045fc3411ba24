"""Run peers in a virtual world, all in this process, on a simulated clock.

They run the code of real peers, from the boundary to the protocol (`p2ptrain.sim`), and write the
same files. The world stands still except inside `SimFleet.let_pass`, which advances it by a slice
of virtual time. The slices are the same however fast the machine is, since the launcher's decisions
between two of them (a target is reached, the run ends) must fall on the same virtual moment in
every run. So one seed has one trace.

Computing takes no virtual time: a step costs what the scenario's pace says. Gradients are computed
inline, on one thread, unless the scenario goes without them (`p2ptrain.sim.compute`).
"""

import asyncio
import dataclasses
import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from launcher.backends.base import Fleet, PeerStatus
from launcher.backends.ring import SPEC, ring_s
from launcher.conditions import FaultConfig, LinkConfig
from launcher.external_baselines import EXTERNAL_BASELINES, PRICES
from launcher.faults import FaultInstance, Schedule, left_of
from launcher.records import PeerHistory
from launcher.scenario import LeftOut, Scenario
from p2ptrain.compute.tasks import Task, load_task
from p2ptrain.compute.torch_replica import TorchReplica
from p2ptrain.compute.training import Learner, build_optimizer, threads
from p2ptrain.config import RunConfig
from p2ptrain.console.training import data_seed
from p2ptrain.errors import ConfigError, InvariantViolation, P2PTrainError
from p2ptrain.ids import Address, PeerId, Seconds
from p2ptrain.net.grpc_config import GrpcConfig
from p2ptrain.runtime.metrics import Metrics, TeeMetrics
from p2ptrain.sim.compute import (
    STANDS_FOR,
    PricedMetrics,
    PricedWork,
    priced_exchange,
    priced_replica,
)
from p2ptrain.sim.faults import Crash, Drift, Fault, Partition, Pause, SlowDown, Throttle
from p2ptrain.sim.fleet import FleetWorld, address_of
from p2ptrain.sim.link import Link
from p2ptrain.sim.loop import VirtualLoop, virtual_loop
from p2ptrain.sim.peer import LivingPeer, Trainee
from p2ptrain.sim.records import RecordFile
from p2ptrain.sim.trace import TraceMetrics

SLICE_S: Seconds = 0.25
"""The virtual time between two polls of a small world."""

PEERS_PER_SLICE = 256
"""Larger worlds are polled less often, since reading the records of all peers takes time."""

CALLBACKS = 100_000
"""After this many callbacks, a few seconds of real time, the display needs an update."""


_GOINGS = ("leave", "join")


class SimBackend:
    """Simulates fleets."""

    def refusal(self, algorithm: str) -> str:
        """External baselines are separate programs."""
        return "cannot be simulated" if algorithm in EXTERNAL_BASELINES else ""

    def check(self, scenario: Scenario) -> Sequence[LeftOut]:
        """Refuse steps without a price; see `launcher.backends.base.Backend`."""
        if not scenario.pace.is_priced:
            raise ConfigError(
                f"{scenario.name} cannot be simulated: computing takes no virtual time, and its "
                "[pace] gives a step no price; set pace.min_step_ms, mean_ms, trace_ms or "
                "trace_file"
            )
        for device in scenario.devices:
            if device.cpus is not None or device.memory_mb is not None:
                raise ConfigError(
                    f"{scenario.name}: a simulation has no processors and no memory to divide; "
                    "say with pace.stragglers who is slow, or use --backend docker"
                )
        _refuse_overlaps(scenario)
        ways = {scenario.configs(name, Path())[0].network.data for name in scenario.algorithms}
        return tuple(
            LeftOut(f"network.data = {way!r}", "a simulation prices no transport, only the [link]")
            for way in sorted(ways - {GrpcConfig().data})
        )

    def start(self, scenario: Scenario, configs: Sequence[RunConfig]) -> Fleet:
        """Build a world of one peer per configuration."""
        return SimFleet(scenario, configs)


def _refuse_overlaps(scenario: Scenario) -> None:
    """Raises ConfigError for overlapping faults of a kind: a world would end both with one."""
    latest: dict[str, FaultConfig] = {}
    timed = [(fault.at_s, fault) for fault in scenario.faults if fault.at_s is not None]
    for at_s, fault in sorted(timed, key=lambda one: one[0]):
        for what in _states(fault):
            before = latest.get(what)
            if before and (before.at_s or 0.0) + (before.for_s or math.inf) > at_s:
                raise ConfigError(
                    f"{scenario.name}: {fault} at {at_s:g} s begins before that at "
                    f"{before.at_s:g} s has ended, and a simulation would end both at once; let "
                    "one end first, or use --backend process"
                )
            latest[what] = fault


def _states(fault: FaultConfig) -> list[str]:
    """The states of the world that `fault` changes for a while."""
    match fault.kind:
        case "partition":
            return ["network"]
        case "pause" | "slow" | "drift" | "throttle":
            return [f"{fault.kind} {rank}" for rank in fault.peers]
        case _:
            return []


class SimFleet:
    """The peers of one run, and their world."""

    def __init__(self, scenario: Scenario, configs: Sequence[RunConfig]) -> None:
        self._seed = scenario.seed
        self._slice_s = SLICE_S * max(1, len(configs) // PEERS_PER_SLICE)
        self._names = [PeerId(config.name) for config in configs]
        self._files: list[RecordFile] = []
        self._plan = _plan(scenario, self._names)
        self._schedule = Schedule(scenario.faults)
        self._returns: dict[PeerId, bool] = {}
        """The peers that have left, and whether each returns."""
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
            self._was_interrupted = True  # in the middle of a callback: it cannot go on
            raise

    def apply_faults(self, histories: Sequence[PeerHistory], started_at: Seconds | None) -> None:
        """Record the faults that the world, which has the plan, has applied."""
        for instance, what in self._schedule.take_due(histories, 0.0, self.now()):
            at_step, for_s = instance.fault.at_step, instance.fault.for_s
            if what == "revert":
                instance.ended = (instance.began or 0.0) + (for_s or 0.0)
            elif at_step is None:
                instance.began = instance.fault.at_s
            elif at_step:
                instance.began = histories[instance.ranks[0]].steps[at_step - 1].at

    @property
    def instances(self) -> Sequence[FaultInstance]:
        """The faults of the peers, in virtual time."""
        return self._schedule.instances

    def poll(self) -> Sequence[PeerStatus]:
        """Return the state of every peer, after writing all records so far to disk."""
        for file in self._files:
            file.flush()
        for task in self._applying:
            if task.done() and not task.cancelled():
                task.result()  # a plan that could not be carried out is an error
        return [self._status(name) for name in self._names]

    def facts(self) -> dict[str, Any]:  # Any: JSON
        """The seed and the hash of the trace, for repeating the simulation."""
        return {"seed": self._seed, "trace_hash": self._world.trace.hash}

    def stop(self, grace_s: Seconds) -> None:
        """Ask all peers to leave, let the world run for `grace_s`, then end it."""
        if self._loop.is_closed():
            return
        try:
            for task in self._applying:
                task.cancel()
            end = self.now() + grace_s
            for peer in self._living():
                peer.stop("asked to end by the launcher")
            while not self._was_interrupted and self._living() and self.now() < end:
                self.let_pass()
        finally:
            self._loop.set_exception_handler(lambda loop, context: None)  # not reported
            self._world.trace.close()
            self._loop.run_until_complete(_cancel_all())
            self._loop.close()

    # --- inside -----------------------------------------------------------------------------------

    def _living(self) -> list[LivingPeer]:
        return [peer for peer in self._world.lives.values() if not peer.task.done()]

    def _status(self, name: PeerId) -> PeerStatus:
        """As from a process's exit code; a peer that is to restart counts as running."""
        if name not in self._world.lives:
            goes_on = not self._loop.is_closed() and bool(self._living())
            return PeerStatus(name) if goes_on else PeerStatus(name, "lost", "was not there")
        task = self._world.lives[name].task
        returns = any(isinstance(f, Crash) and f.peer == name and f.for_s for f in self._plan)
        if not task.done() or (task.cancelled() and returns and not self._loop.is_closed()):
            return PeerStatus(name)
        if name in self._returns and task.exception() is None:
            is_to_come = self._returns[name] and not self._loop.is_closed() and self._living()
            return PeerStatus(name) if is_to_come else PeerStatus(name, "left", "left")
        if task.cancelled():
            return PeerStatus(name, "lost", "was killed")
        error = task.exception()
        if error is None:
            return PeerStatus(name, "ended", "ended its run")
        if isinstance(error, P2PTrainError):
            return PeerStatus(name, "refused", str(error))
        raise error

    async def _populate(self, scenario: Scenario, configs: Sequence[RunConfig]) -> None:
        task = load_task(scenario.task, scenario.task_options)
        link = _link(scenario.link or LinkConfig())
        if configs[0].algorithm in PRICES:
            configs = _priced(scenario, configs, task)
            link = dataclasses.replace(link, bandwidth_bytes_s=None)
        world = self._world = FleetWorld(scenario.seed, link)
        world.network.stands_for = 1 if scenario.gradients else STANDS_FOR
        _place(world, scenario, self._names)
        train = partial(_learning, task) if scenario.gradients else _pricing(task, configs[0])
        everyone = tuple(address_of(name) for name in self._names)
        for config in configs:
            file = RecordFile(Path(config.out) / f"{config.name}.jsonl", self.now)
            self._files.append(file)
            metrics = TeeMetrics(file, TraceMetrics(world.trace, PeerId(config.name)))
            placed = dataclasses.replace(config, listen=address_of(config.name))
            is_late = config.rank in scenario.late
            life = partial(_life, train, placed, everyone, metrics, is_late)
            world.expect(PeerId(config.name), life)
            if not is_late:
                world.live(PeerId(config.name))
        goings = [fault for fault in scenario.faults if fault.kind in _GOINGS]
        self._applying = [
            world.apply_faults(self._plan),
            *(asyncio.create_task(self._come_or_go(f, rank)) for f in goings for rank in f.peers),
        ]

    async def _come_or_go(self, fault: FaultConfig, rank: int) -> None:
        """Start a late peer, or let a peer leave and start it again."""
        world, loop, name = self._world, self._loop, self._names[rank]
        if fault.at_s is not None:
            await loop.wait(fault.at_s)
        else:
            await world.trace.wait_for_step(name, fault.at_step or 0)
        if fault.kind == "join":
            world.trace.note(loop.now, f"! {name} comes")
            world.live(name)
        elif world.process_of(name) is not None:
            world.trace.note(loop.now, f"! {name} is asked to leave")
            self._returns[name] = fault.for_s is not None
            world.lives[name].stop("asked to leave by the scenario")
            if fault.for_s is not None:
                await loop.wait(fault.for_s)
                await asyncio.gather(world.lives[name].task, return_exceptions=True)
                world.trace.note(loop.now, f"! {name} comes again")
                del self._returns[name]
                world.live(name)


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Collect garbage less often: a large world has millions of objects to traverse."""
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


Train = Callable[[RunConfig, Metrics, int], LivingPeer]
"""Makes a peer from its configuration, its metrics and the number of its restarts."""


def _life(
    train: Train,
    config: RunConfig,
    everyone: Sequence[Address],
    metrics: Metrics,
    is_late: bool,
    number: int,
) -> LivingPeer:
    """Start one peer: initially all join the first one; a later peer asks all others."""
    others = tuple(address for address in everyone if address != config.listen)
    first = tuple(address for address in everyone[:1] if address != config.listen)
    hosts = others if is_late or number > 1 else first
    placed = dataclasses.replace(config, join=hosts, stop=left_of(config.stop, virtual_loop().now))
    return train(placed, metrics, number)


def _learning(task: Task, config: RunConfig, metrics: Metrics, number: int) -> LivingPeer:
    """A peer that computes its gradients."""
    training = config.training
    model = task.build_model(config.seed)
    optimizer = build_optimizer(model, training)
    replica = TorchReplica(model, optimizer, average_momentum=config.average_momentum)
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
    trainee = Trainee(replica, learner, partial(replica.optimizer_step, training.clip))
    return LivingPeer(config, trainee, config.pace, config.rank, metrics, number)


def _pricing(task: Task, config: RunConfig) -> Train:
    """Makes peers whose steps are only priced, for a model as large as the task's."""
    size = _model_size(task, config)

    def make(config: RunConfig, metrics: Metrics, number: int) -> LivingPeer:
        replica = priced_replica(size)
        trainee = Trainee(replica, PricedWork(config.training.batch_size), replica.descend)
        exchange = priced_exchange(config.exchange)
        config = dataclasses.replace(config, exchange=exchange, out="")  # no model to write
        to = PricedMetrics(metrics, size)
        return LivingPeer(config, trainee, config.pace, config.rank, to, number)

    return make


def _model_size(task: Task, config: RunConfig) -> int:
    model = task.build_model(config.seed)
    optimizer = build_optimizer(model, config.training)
    return TorchReplica(model, optimizer, average_momentum=config.average_momentum).model_size


def _priced(scenario: Scenario, configs: Sequence[RunConfig], task: Task) -> tuple[RunConfig, ...]:
    """The same peers, with an algorithm that only waits."""
    options = {"lasts_s": ring_s(scenario, 4 * _model_size(task, configs[0]))}
    return tuple(
        dataclasses.replace(config, algorithm=SPEC, algorithm_options=options) for config in configs
    )


def _place(world: FleetWorld, scenario: Scenario, names: Sequence[PeerId]) -> None:
    """Assign peers to their machines, if they share any. A price includes its uplinks."""
    machines = scenario.machines
    if machines is None or world.network.link.bandwidth_bytes_s is None:
        return
    uplink_bytes_s = machines.uplink_mbit_s * 1e6 / 8
    for machine in dict.fromkeys(machines.of(rank) for rank in range(len(names))):
        world.network.machine(machine, uplink_bytes_s)
    for rank, name in enumerate(names):
        world.network.place(address_of(name), machines.of(rank))


def _plan(scenario: Scenario, names: Sequence[PeerId]) -> list[Fault]:
    """The faults of a scenario as those of a world; a narrow uplink is a fault without an end."""
    plan: list[Fault] = [
        Throttle(peer=names[rank], bytes_s=device.uplink_mbit_s * 1e6 / 8, at_s=0.0)
        for device in scenario.devices
        if device.uplink_mbit_s is not None
        for rank in device.peers
    ]
    for fault in scenario.faults:
        if fault.kind in _GOINGS:
            continue  # not faults of a world: `SimFleet` starts and stops these peers
        victims = [names[rank] for rank in fault.peers]
        if fault.kind == "partition":
            of = victims[0] if fault.at_step is not None else ""
            plan.append(Partition(parts=(tuple(victims),), of=of, **_when(fault)))
        else:
            plan += [_of_peer(fault, victim) for victim in victims]
    return plan


def _of_peer(fault: FaultConfig, peer: PeerId) -> Fault:
    match fault.kind:
        case "crash":
            return Crash(peer=peer, **_when(fault))
        case "pause":
            return Pause(peer=peer, **_when(fault))
        case "slow":
            return SlowDown(peer=peer, factor=fault.factor or 1.0, **_when(fault))
        case "drift":
            return Drift(peer=peer, rate=fault.rate or 1.0, **_when(fault))
        case "throttle":
            return Throttle(peer=peer, bytes_s=(fault.mbit_s or 0.0) * 1e6 / 8, **_when(fault))
        case "partition" | "leave" | "join":
            raise InvariantViolation(f"{fault} does not hit one peer of a world")


def _when(fault: FaultConfig) -> dict[str, Any]:  # Any: seconds or a number of steps
    return {"at_s": fault.at_s, "at_step": fault.at_step, "for_s": fault.for_s}


def _link(config: LinkConfig) -> Link:
    return Link(
        latency_s=config.latency_ms / 1000,
        jitter_s=config.jitter_ms / 1000,
        loss=config.loss,
        duplication=config.duplication,
        bandwidth_bytes_s=config.bandwidth_mbit_s * 1e6 / 8,
    )
