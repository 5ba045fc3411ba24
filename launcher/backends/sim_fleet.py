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
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from p2plab.backends.base import PeerStatus
from p2plab.backends.ring import SPEC, ring_s
from p2plab.conditions import DeviceConfig, FaultConfig, LinkConfig
from p2plab.external_baselines import PRICES
from p2plab.faults import FaultInstance, left_of
from p2plab.scenario import Scenario
from p2ptrain.averaging.base import load_algorithm
from p2ptrain.compute.tasks import IndexedTask, Task, load_task
from p2ptrain.compute.torch_replica import TorchReplica
from p2ptrain.compute.training import Learner, build_optimizer, threads
from p2ptrain.config import RunConfig
from p2ptrain.console.training import data_seed
from p2ptrain.core.data_ledger import DataPlan, usual_part
from p2ptrain.errors import InvariantViolation, P2PTrainError
from p2ptrain.ids import Address, PeerId, Seconds
from p2ptrain.runtime.admission import MOST_ADMISSIONS
from p2ptrain.runtime.metrics import Metrics, TeeMetrics
from p2ptrain.sim.compute import (
    STANDS_FOR,
    MadeUpWork,
    PricedMetrics,
    PricedWork,
    priced_exchange,
    priced_replica,
)
from p2ptrain.sim.faults import Drift, LastingFault, Partition, Pause, SlowDown, Throttle
from p2ptrain.sim.fleet import FleetWorld, address_of
from p2ptrain.sim.link import Link
from p2ptrain.sim.loop import VirtualLoop
from p2ptrain.sim.peer import LivingPeer, Trainee
from p2ptrain.sim.records import RecordFile
from p2ptrain.sim.trace import TraceMetrics

SLICE_S: Seconds = 0.25
"""The virtual time between two polls of a small world whose steps last less than a second."""

SLICES_PER_STEP = 2
"""Where steps last longer there is less to see."""

PEERS_PER_SLICE = 256
"""Larger worlds are polled less often, since reading the records of all peers takes time."""

CLEAN_UP_S: Seconds = 60.0
"""The world's time for what peers do when they are cancelled."""

CALLBACKS = 100_000
"""After this many callbacks, a few seconds of real time, the display needs an update."""


class SimFleet:
    """The peers of one run, and their world."""

    def __init__(self, scenario: Scenario, configs: Sequence[RunConfig]) -> None:
        self._seed = scenario.seed
        of_step_s = scenario.pace.min_step_ms / 1000 / SLICES_PER_STEP
        self._slice_s = max(SLICE_S, of_step_s) * max(1, len(configs) // PEERS_PER_SLICE)
        self._names = [PeerId(config.name) for config in configs]
        self._files: list[RecordFile] = []
        self.started_at: Seconds | None = None
        self._away: dict[PeerId, bool] = {}
        """The peers that a fault has sent away, and whether each returns."""
        self._returning: dict[PeerId, asyncio.Task[None]] = {}
        self._was_interrupted = False
        self._rang = self._is_passing = False
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

    def record_clock(self) -> Seconds:
        """The world's clock too."""
        return self._loop.now

    def let_pass(self, until: Seconds | None) -> None:
        """Move the world on by one slice of its time, or to where a fault begins or ends."""
        left_s = self._slice_s if until is None else until - self.now()
        try:
            if not self._rang:  # or else something waits for the launcher to look
                self._is_passing = True
                with threads(1):
                    self._loop.run_for(max(0.0, min(self._slice_s, left_s)), CALLBACKS)
            self._rang = self._is_passing = False
        except BaseException:
            self._was_interrupted = True  # in the middle of a callback: it cannot go on
            raise

    def apply(self, instance: FaultInstance) -> bool:
        """Let a fault begin between two callbacks; False if none of its peers is there."""
        names = [self._names[rank] for rank in instance.ranks]
        is_there = any(self._world.process_of(name) for name in names)
        if not is_there and instance.fault.kind != "join":
            return False
        self._loop.run_until_complete(self._begin(instance.fault, names))
        return True

    def revert(self, instance: FaultInstance) -> None:
        """End a fault."""
        names = [self._names[rank] for rank in instance.ranks]
        self._loop.run_until_complete(self._end(instance.fault, names))

    def poll(self) -> Sequence[PeerStatus]:
        """Return the state of every peer, after writing all records so far to disk."""
        for file in self._files:
            file.flush()
        return [self._status(name) for name in self._names]

    def facts(self) -> dict[str, Any]:  # Any: JSON
        """The seed and the hash of the trace, for repeating the simulation."""
        return {"seed": self._seed, "trace_hash": self._world.trace.hash}

    def stop(self, grace_s: Seconds) -> None:
        """Ask all peers to leave, paused ones too, let the world run for `grace_s`, then end it."""
        if self._loop.is_closed():
            return
        try:
            end = self.now() + grace_s
            self._loop.run_until_complete(self._end_pauses())
            for peer in self._living():
                peer.stop("asked to end by the launcher")
            while not self._was_interrupted and self._living() and self.now() < end:
                self.let_pass(end)
        finally:
            self._loop.set_exception_handler(lambda loop, context: None)  # not reported
            self._world.trace.close()
            self._loop.run_until_complete(_cancel_all())
            self._loop.close()

    # --- inside -----------------------------------------------------------------------------------

    def _ring(self) -> None:
        """Let the launcher look at once."""
        self._rang = True
        if self._is_passing:
            self._loop.stop()

    def _living(self) -> list[LivingPeer]:
        return [peer for peer in self._world.lives.values() if not peer.task.done()]

    def _status(self, name: PeerId) -> PeerStatus:
        """As from a process's exit code; a peer that is to come or return counts as running."""
        life = self._world.lives.get(name)
        if life and not life.task.done():
            return PeerStatus(name)
        if (life is None or self._away.get(name)) and self._goes_on():
            return PeerStatus(name)
        if life is None:
            return PeerStatus(name, "lost", "was not there")
        if life.task.cancelled():
            return PeerStatus(name, "lost", "was killed")
        error = life.task.exception()
        if error is None:
            left = name in self._away
            return PeerStatus(name, *(("left", "left") if left else ("ended", "ended its run")))
        if isinstance(error, P2PTrainError):
            return PeerStatus(name, "refused", str(error))
        raise error

    def _goes_on(self) -> bool:
        """True if another peer trains, or all have crashed and one is to return."""
        if self._loop.is_closed():
            return False
        lives = self._world.lives.items()
        ended = any(peer.task.done() for name, peer in lives if name not in self._away)
        return bool(self._living()) or (not ended and any(self._away.values()))

    async def _populate(self, scenario: Scenario, configs: Sequence[RunConfig]) -> None:
        task = load_task(scenario.task, scenario.task_options)
        link = _link(scenario.link or LinkConfig())
        if configs[0].algorithm in PRICES:
            configs = _priced(scenario, configs, task)
            link = dataclasses.replace(link, bandwidth_bytes_s=None)
        world = self._world = FleetWorld(scenario.seed, link)
        priced = scenario.stands_for if scenario.gradients else _stands_for(configs[0])
        world.network.stands_for = priced
        _place(world, scenario, self._names)
        for device in scenario.devices:
            _connect(world, scenario.link or LinkConfig(), device, self._names)
        train: Train = _pricing(task, configs[0])
        if scenario.gradients:
            train = partial(_learning, task, scenario.stands_for)
        everyone = tuple(address_of(name) for name in self._names)
        early = tuple(one for rank, one in enumerate(everyone) if rank not in scenario.late)
        missing = set(range(scenario.peers)) - scenario.late
        for config in configs:
            file = RecordFile(Path(config.out) / f"{config.name}.jsonl", self.now)
            self._files.append(file)
            sinks: list[Metrics] = [file, TraceMetrics(world.trace, PeerId(config.name))]
            if scenario.faults:
                of_this = [fault for fault in scenario.faults if config.rank in fault.peers]
                at_steps = frozenset(fault.at_step for fault in of_this)
                sinks.append(_Bell(config.rank, at_steps, missing, self._ring))
            metrics = TeeMetrics(*sinks)
            placed = dataclasses.replace(config, listen=address_of(config.name))
            is_late = config.rank in scenario.late
            life = partial(self._life, train, placed, everyone, early, metrics, is_late)
            world.expect(PeerId(config.name), life)
            if not is_late:
                world.live(PeerId(config.name))

    def _life(
        self,
        train: "Train",
        config: RunConfig,
        everyone: Sequence[Address],
        early: Sequence[Address],
        metrics: Metrics,
        is_late: bool,
        number: int,
    ) -> LivingPeer:
        """Start one peer: initially all join the first one; a later peer asks all others.

        Where peers know only some, few join the same one: it dials back so many at a time.
        """
        knows_some = config.protocol.membership.view > 0
        host = early[min(config.rank // MOST_ADMISSIONS, len(early) - 1) if knows_some else 0]
        asked = everyone if is_late or number > 1 else (host,)
        hosts = tuple(address for address in asked if address != config.listen)
        passed_s = 0.0 if self.started_at is None else self.now() - self.started_at
        placed = dataclasses.replace(config, join=hosts, stop=left_of(config.stop, passed_s))
        return train(placed, metrics, number)

    async def _begin(self, fault: FaultConfig, names: Sequence[PeerId]) -> None:
        world, name = self._world, names[0]
        world.trace.note(self.now(), f"! {fault} of {','.join(names)} begins")
        match fault.kind:
            case "join":
                world.live(name)
            case "crash" | "leave":
                self._away[name] = fault.for_s is not None
                if fault.kind == "crash":
                    world.crash(name)
                else:
                    world.lives[name].stop("asked to leave by the scenario")
            case _:
                world.faults.apply(_of_world(fault, names))

    async def _end(self, fault: FaultConfig, names: Sequence[PeerId]) -> None:
        world, name = self._world, names[0]
        world.trace.note(self.now(), f"! {fault} of {','.join(names)} ends")
        if fault.kind not in ("crash", "leave"):
            world.faults.revert(_of_world(fault, names))
        elif self._away.get(name):
            self._returning[name] = asyncio.create_task(self._come_back(name))

    async def _end_pauses(self) -> None:
        self._world.faults.end_pauses()

    async def _come_back(self, name: PeerId) -> None:
        """Start a peer again once its last process has ended."""
        await asyncio.wait([self._world.lives[name].task])
        if self._away.pop(name, False):
            self._world.live(name)


class _Bell:
    """Implements `Metrics`: rings where a fault may begin that no clock announces.

    Args:
        rank: whose records these are.
        at_steps: the numbers of this peer's steps that faults wait for.
        missing: the ranks that have not been ready yet, shared by all bells.
        ring: called when all are ready, and after each of those steps.
    """

    def __init__(
        self,
        rank: int,
        at_steps: frozenset[int | None],
        missing: set[int],
        ring: Callable[[], None],
    ) -> None:
        self._rank = rank
        self._at_steps = at_steps
        self._missing = missing
        self._ring = ring
        self._steps = 0

    def record(self, kind: str, **fields: Any) -> None:  # Any: whatever JSON can hold
        """Ring if this record is awaited."""
        if kind == "step":
            self._steps += 1
            if self._steps in self._at_steps:
                self._ring()
        elif kind == "ready" and self._rank in self._missing:
            self._missing.remove(self._rank)
            if not self._missing:
                self._ring()


async def _cancel_all() -> None:
    """Cancel all tasks; of an interrupted world some may not notice, and are left after a while."""
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left, timeout=CLEAN_UP_S)


Train = Callable[[RunConfig, Metrics, int], LivingPeer]
"""Makes a peer from its configuration, its metrics and the number of its restarts."""


def _learning(
    task: Task, stands_for: int, config: RunConfig, metrics: Metrics, number: int
) -> LivingPeer:
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
    clip = training.clip
    update = partial(replica.optimizer_step, clip)
    trainee = Trainee(replica, learner, update, clip)
    if stands_for > 1:
        exchange = priced_exchange(config.exchange, stands_for)
        config = dataclasses.replace(config, exchange=exchange)
        metrics = PricedMetrics(metrics, replica.saved_size, stands_for)
    return LivingPeer(
        config, trainee, config.pace, config.rank, metrics, number, stands_for=stands_for
    )


def _pricing(task: Task, config: RunConfig) -> Train:
    """Makes peers whose steps are only priced, for a model as large as the task's."""
    whole, stands_for = _replica(task, config), _stands_for(config)
    size, shapes, plan = whole.model_size, whole.gradient_shapes, _plan(task, config)

    def make(config: RunConfig, metrics: Metrics, number: int) -> LivingPeer:
        replica, training = priced_replica(size, stands_for), config.training
        samples, by_speed = training.batch_size, training.batches == "by_speed"
        work = PricedWork(samples, by_speed=by_speed, plan=plan)
        if stands_for == 1:
            replica.gradient_shapes = shapes
            work = MadeUpWork(samples, replica, config.rank, by_speed=by_speed, plan=plan)
        trainee = Trainee(replica, work, replica.descend)
        exchange = priced_exchange(config.exchange, stands_for)
        config = dataclasses.replace(config, exchange=exchange, out="")  # no model to write
        to = PricedMetrics(metrics, size, stands_for, is_trained=False)
        return LivingPeer(
            config, trainee, config.pace, config.rank, to, number, stands_for=stands_for
        )

    return make


def _plan(task: Task, config: RunConfig) -> DataPlan | None:
    """Of the task's data, where they are dealt."""
    if config.training.data != "elastic" or not isinstance(task, IndexedTask):
        return None
    return DataPlan(task.samples, usual_part(task.samples), config.seed)


def _stands_for(config: RunConfig) -> int:
    """So many numbers of a model are one where steps are only priced."""
    algorithm = load_algorithm(config.algorithm, config.algorithm_options)
    return 1 if algorithm.compresses else STANDS_FOR


def _model_size(task: Task, config: RunConfig) -> int:
    return _replica(task, config).model_size


def _replica(task: Task, config: RunConfig) -> TorchReplica:
    model = task.build_model(config.seed)
    optimizer = build_optimizer(model, config.training)
    return TorchReplica(model, optimizer, average_momentum=config.average_momentum)


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
    uplink_bytes_s, inner = machines.uplink_mbit_s * 1e6 / 8, world.network.link
    if machines.latency_ms is not None:
        outer = dataclasses.replace(inner, latency_s=machines.latency_ms / 1000)
        world.network.link = outer
    for machine in dict.fromkeys(machines.of(rank) for rank in range(len(names))):
        world.network.machine(machine, uplink_bytes_s, inner)
    for rank, name in enumerate(names):
        world.network.place(address_of(name), machines.of(rank))


def _connect(
    world: FleetWorld, link: LinkConfig, device: DeviceConfig, names: Sequence[PeerId]
) -> None:
    """Give the peers of a device the uplink and the links that are theirs alone."""
    own = dataclasses.replace(
        _link(dataclasses.replace(link, **device.own_link)), bandwidth_bytes_s=None
    )
    down_bytes_s = device.downlink_mbit_s * 1e6 / 8 if device.downlink_mbit_s else None
    down = dataclasses.replace(own, bandwidth_bytes_s=down_bytes_s)
    for here in (names[rank] for rank in device.peers):
        if device.uplink_mbit_s:
            world.network.throttle(address_of(here), device.uplink_mbit_s * 1e6 / 8)
        for there in (name for name in names if name != here):
            if device.own_link or device.downlink_mbit_s:
                world.network.set_link(address_of(here), address_of(there), own)
                world.network.set_link(address_of(there), address_of(here), down)


def _of_world(fault: FaultConfig, names: Sequence[PeerId]) -> LastingFault:
    """A fault of a scenario as one of a world; the launcher begins and ends it."""
    peer = names[0]
    match fault.kind:
        case "pause":
            return Pause(peer=peer, at_s=0.0)
        case "slow":
            return SlowDown(peer=peer, factor=fault.factor or 1.0, at_s=0.0)
        case "drift":
            return Drift(peer=peer, rate=fault.rate or 1.0, at_s=0.0)
        case "throttle":
            return Throttle(peer=peer, bytes_s=(fault.mbit_s or 0.0) * 1e6 / 8, at_s=0.0)
        case "partition":
            return Partition(parts=(tuple(names),), at_s=0.0)
        case "crash" | "leave" | "join":
            raise InvariantViolation(f"{fault} does not last: it ends or starts a process")


def _link(config: LinkConfig) -> Link:
    return Link(
        latency_s=config.latency_ms / 1000,
        jitter_s=config.jitter_ms / 1000,
        loss=config.loss,
        duplication=config.duplication,
        bandwidth_bytes_s=config.bandwidth_mbit_s * 1e6 / 8,
    )
