"""Run a world of simulated peers on virtual time.

Simulated are the network (`sim/network.py`), the clock (`sim/loop.py`) and the price of compute: a
trainer's step is a wait of so many virtual seconds. Everything that decides is production code.

Each peer is a process (`sim/process.py`): its tasks belong to it, read its clock, and stop while it
is paused. The actions of a test or a plan of faults belong to the world.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any, TypeVar

import numpy as np

from p2ptrain.compute.replica import State, Vector
from p2ptrain.compute.steps import FORWARD
from p2ptrain.core.peer_machine import ProtocolConfig
from p2ptrain.errors import ConfigError
from p2ptrain.ids import Address, PeerId, Seconds
from p2ptrain.runtime.boundary import Boundary
from p2ptrain.runtime.driver import Driver
from p2ptrain.runtime.exchange import ExchangeConfig
from p2ptrain.runtime.lifecycle import PeerLifecycle
from p2ptrain.runtime.metrics import MemoryMetrics, Metrics, TeeMetrics
from p2ptrain.runtime.settings import PeerConfig
from p2ptrain.runtime.swarm import DriverSwarm
from p2ptrain.sim.faults import Fault, carry_out
from p2ptrain.sim.files import MemoryFiles
from p2ptrain.sim.link import Link
from p2ptrain.sim.loop import virtual_loop
from p2ptrain.sim.network import SimNetwork
from p2ptrain.sim.peer import simulated_environment
from p2ptrain.sim.process import Process
from p2ptrain.sim.replica import VectorReplica
from p2ptrain.sim.trace import Trace, TraceMetrics

T = TypeVar("T")


class SimPeer:
    """One peer of a world: its lifecycle, and a trainer whose steps cost virtual time."""

    def __init__(
        self,
        process: Process,
        lifecycle: PeerLifecycle,
        replica: VectorReplica,
        metrics: MemoryMetrics,
    ) -> None:
        self.process = process
        self.lifecycle = lifecycle
        self.replica = replica
        self.metrics = metrics
        self.trainer: asyncio.Task[None] | None = None
        self.steps_before = 0
        """Steps of this peer before its last restart."""

    @property
    def driver(self) -> Driver:
        return self.lifecycle.driver

    @property
    def swarm(self) -> DriverSwarm:
        return self.driver.swarm

    @property
    def boundary(self) -> Boundary:
        return self.lifecycle.boundary

    @property
    def address(self) -> Address:
        return self.lifecycle.address

    @property
    def steps(self) -> int:
        """Steps over all restarts."""
        return self.steps_before + self.boundary.totals.steps

    async def train(
        self,
        steps: int,
        step_s: Seconds,
        before_step: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Train until step `steps`, of `step_s` each, then serve; `before_step` sets gradients."""
        self.lifecycle.begin()
        for step in range(self.steps_before, steps):
            await self.pass_through(step_s, partial(before_step, step))
            await self.boundary.step(1, None, self.replica.descend)
        await self.boundary.end()

    async def pass_through(self, step_s: Seconds, set_gradient: Callable[[], None]) -> None:
        """Forward and backward, of `step_s`, with what travels behind them."""
        buckets, work, passed = self.lifecycle.buckets, virtual_loop().work, 0.0
        if buckets is None:
            await work(step_s)
            set_gradient()
            return
        for bucket, share in buckets.in_forward_order:
            await work(step_s * FORWARD * (share - passed))
            passed = share
            await self.boundary.before_forward(bucket)
        await work(step_s * FORWARD * (1 - passed))
        set_gradient()
        reached = 0.0
        for share in buckets.shares:
            await work(step_s * (1 - FORWARD) * (share - reached))
            buckets.reach(reached := share)

    def model(self) -> Vector:
        """Live + pending."""
        vector_M = np.empty(self.replica.model_size, np.float32)
        self.replica.snapshot(vector_M)
        return vector_M


Trainer = Callable[[SimPeer], Coroutine[Any, Any, None]]  # Any: asyncio's own types
"""One peer's trainer, from its first step (since its last start) to its last."""


@dataclass(frozen=True, slots=True)
class _Birth:
    """The arguments with which a peer was started; a restart uses them too."""

    algorithm: str
    options: dict[str, Any]  # Any: the algorithm checks
    state: State
    metrics: tuple[Metrics, ...]


class World:
    """Peers, the network between them, and one seed for all random decisions.

    Args:
        seed: decides the network's losses, the peers' choices, and the order of processes that
            are ready at one moment.
        trace: by default one that keeps its last lines.
        watch: called with every peer that starts or restarts, before it sends anything.
        checkpoint_every_s: how often each peer writes a checkpoint to its disk; 0: never.
        peers: as in each one's settings.
    """

    def __init__(
        self,
        seed: int = 0,
        link: Link | None = None,
        protocol: ProtocolConfig | None = None,
        exchange: ExchangeConfig | None = None,
        trace: Trace | None = None,
        watch: Callable[[SimPeer], None] = lambda _: None,
        checkpoint_every_s: Seconds = 0.0,
        peers: int = 1,
    ) -> None:
        self._expected = peers
        self.trace = trace or Trace()
        self.network = SimNetwork(seed, link, self.trace)
        self.peers: dict[PeerId, SimPeer] = {}
        self.dead: dict[PeerId, SimPeer] = {}
        """Peers that crashed and have not restarted, in their last state."""
        self._loop = virtual_loop()
        self._loop.shuffle(Random(f"{seed}/order"))
        self._loop.trace_tail = self.trace.trace_tail
        self._births: dict[PeerId, _Birth] = {}
        self._lives = 0
        self._seed = seed
        self._protocol = protocol or ProtocolConfig()
        self._exchange = exchange or ExchangeConfig()
        self._watch = watch
        self._checkpoint_every_s = checkpoint_every_s
        self.disks: defaultdict[PeerId, MemoryFiles] = defaultdict(MemoryFiles)
        """They outlive processes."""
        self._trainer: Trainer | None = None
        self._trainers: list[asyncio.Task[None]] = []

    # --- who is here ------------------------------------------------------------------------------

    async def add(
        self,
        name: str,
        replica: VectorReplica,
        algorithm: str,
        *,
        metrics: Metrics | None = None,
        keeps_model: bool = True,
        **options: Any,  # Any: the algorithm checks
    ) -> SimPeer:
        """Start a peer and let it join with its replica as it is; the first peer joins no other.

        Its records, over all restarts, go to memory and to the trace, and to `metrics` if given.
        Without `keeps_model` it takes another peer's model; if the others train, so does it then.

        Raises:
            RefusedError: if the others refuse it.
        """
        sinks = (metrics,) if metrics else ()
        self._births[PeerId(name)] = _Birth(algorithm, options, replica.export_state(), sinks)
        peer = await self._start(PeerId(name), replica, "", keeps_model=keeps_model)
        if self._trainer and not keeps_model:
            self._begin(peer, self._trainer)
        return peer

    def crash(self, name: str) -> None:
        """Kill -9."""
        peer = self.peers.pop(PeerId(name))
        self.dead[PeerId(name)] = peer
        self._loop.resume(peer.process)  # a dead process is not paused
        self.network.crash(peer.address)
        peer.driver.kill()
        if peer.trainer:
            peer.trainer.cancel()

    async def restart(self, name: str, *, keeps_model: bool = False) -> SimPeer:
        """Restart a crashed peer: a new process, under a new incarnation, at its old address.

        With `keeps_model` it has its last model, as from a checkpoint; otherwise its initial one,
        and it takes another peer's as every late newcomer does.

        Raises:
            ConfigError: if it has not crashed.
            RefusedError, TransportError: if the others refuse it, or none answers.
        """
        before = self.dead.get(PeerId(name))
        if before is None:
            raise ConfigError(f"{name} has not crashed; only who crashed starts again")
        if not keeps_model:
            before.replica.import_state(self._births[PeerId(name)].state)
        peer = await self._start(
            PeerId(name), before.replica, before.address, keeps_model=keeps_model
        )
        del self.dead[PeerId(name)]
        peer.steps_before = before.steps
        if self._trainer:
            self._begin(peer, self._trainer)
        return peer

    async def start_again(self, replicas: Mapping[str, VectorReplica]) -> None:
        """After all have crashed: start these together, each from its checkpoint, if it has one.

        Raises:
            P2PTrainError: if they do not find together.
        """
        before, usual = {**self.dead}, next(iter(self._births.values()))
        made: list[SimPeer] = []
        for name, replica in replicas.items():
            peer, process = PeerId(name), Process(name)
            self._births.setdefault(peer, replace(usual, state=replica.export_state(), metrics=()))
            address = before[peer].address if peer in before else ""
            more = {"peers": len(replicas), "join_timeout_s": 30.0}
            made.append(await process.start(self._make(peer, replica, address, process, **more)))
        first = made[0].address
        await asyncio.gather(
            *(
                peer.process.start(peer.lifecycle.join([first][: n > 0]))
                for n, peer in enumerate(made)
            )
        )
        for one in made:
            name = one.driver.name
            self.peers[name] = one
            if name in self.dead:
                one.steps_before = self.dead.pop(name).steps if self._trainer else 0
            if self._trainer:
                self._begin(one, self._trainer)

    async def kill_all_and_start_again(self, names: Sequence[PeerId]) -> None:
        """SIGKILL for all while they train; then these of them start, from their checkpoints."""
        alive: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._trainers.append(alive)  # type: ignore[arg-type]  # `run` waits for it, as for them
        for name in [*self.peers]:
            self.crash(name)
        for name in names:  # a new process has nothing of the old one's memory
            self.dead[name].replica.import_state(self._births[name].state)
        try:
            await self.start_again({name: self.dead[name].replica for name in names})
        finally:
            alive.set_result(None)

    # --- what a plan of faults asks ---------------------------------------------------------------

    async def carry_out(self, plan: Sequence[Fault]) -> None:
        """Carry out `plan`; returns when its last fault has ended. Raises ConfigError."""
        await carry_out(plan, self)

    def address_of(self, name: PeerId) -> Address:
        """A peer's address, also after a crash. Raises ConfigError for an unknown peer."""
        peer = self.peers.get(name) or self.dead.get(name)
        if peer is None:
            known = ", ".join(sorted([*self.peers, *self.dead])) or "none"
            raise ConfigError(f"no peer {name!r} in this world; there are: {known}")
        return peer.address

    def process_of(self, name: PeerId) -> Process | None:
        """None for a peer that has crashed."""
        peer = self.peers.get(name)
        return peer.process if peer else None

    # --- training ---------------------------------------------------------------------------------

    async def train(
        self,
        steps: int,
        step_s: Callable[[PeerId], Seconds],
        before_step: Callable[[SimPeer, int], None] = lambda _, __: None,
    ) -> None:
        """Let all peers train until all living ones have ended and no group averages any more."""
        await self.run(
            lambda peer: peer.train(steps, step_s(peer.driver.name), partial(before_step, peer))
        )

    async def run(self, trainer: Trainer) -> None:
        """Run `trainer` on all peers, also on those that restart meanwhile; then all serve.

        Raises:
            BaseException: whatever a trainer raised, with the end of the trace as a note.
        """
        self._trainer = trainer
        for peer in self.peers.values():
            self._begin(peer, trainer)
        while self._trainers:
            try:
                await self._trainers.pop(0)
            except asyncio.CancelledError:
                if (task := asyncio.current_task()) and task.cancelling():
                    raise
            except BaseException as error:
                error.add_note(self.trace.trace_tail())
                raise
        self._trainer = None
        here = self.peers.values()
        await asyncio.gather(*(p.process.start(p.lifecycle.wait_until_all_done()) for p in here))
        await self.settle()

    async def settle(self, quiet_s: Seconds = 0.5) -> None:
        """Wait until no group has averaged for this long; then all have applied the same ones."""
        quiet = 0
        while quiet < 10:
            await asyncio.sleep(quiet_s / 10)
            quiet = (
                0
                if any(
                    peer.driver.averages.running or peer.driver.pushes.running
                    for peer in self.peers.values()
                )
                else quiet + 1
            )

    async def close(self) -> None:
        """Let all peers leave."""
        for peer in self.peers.values():
            self._loop.resume(peer.process)
            await peer.process.start(peer.lifecycle.depart(serve=False))
        self.trace.close()

    # --- inside -----------------------------------------------------------------------------------

    async def _start(
        self, name: PeerId, replica: VectorReplica, address: str, *, keeps_model: bool
    ) -> SimPeer:
        """A new process of `name`, which has joined the others."""
        process = Process(name)
        hosts = [other.address for other in self.peers.values()]
        peer = await process.start(self._make(name, replica, address, process))
        try:
            await process.start(peer.lifecycle.join(hosts, keeps_model=keeps_model))
        except BaseException:
            await process.start(peer.lifecycle.abandon())
            raise
        self.peers[name] = peer
        return peer

    async def _make(
        self,
        name: PeerId,
        replica: VectorReplica,
        address: str,
        process: Process,
        **more: Any,  # Any: fields of PeerConfig
    ) -> SimPeer:
        """Assemble a peer and let it listen, on behalf of its process."""
        birth, memory = self._births[name], MemoryMetrics(lambda: virtual_loop().now)
        self._lives += 1  # a peer that comes back counts under a new incarnation
        config = PeerConfig(
            name=name,
            algorithm=birth.algorithm,
            algorithm_options=birth.options,
            seed=self._seed,
            leave_grace_s=1.0,
            protocol=self._protocol,
            exchange=self._exchange,
            **{"join_timeout_s": 10.0, "peers": self._expected, **more},
        )
        if self._checkpoint_every_s:
            config = replace(
                config,
                checkpoint="/disk",
                checkpoint_every_s=self._checkpoint_every_s,
                resume=bool(self.disks[name].contents),
            )
        environment = simulated_environment(
            process, self._lives, self.disks[name], stands_for=self.network.stands_for
        )
        lifecycle = PeerLifecycle(config, replica, environment)
        metrics = TeeMetrics(memory, TraceMetrics(self.trace, name), *birth.metrics)
        await lifecycle.listen(self.network.transport(address, name), metrics)
        peer = SimPeer(process, lifecycle, replica, memory)
        self._watch(peer)
        return peer

    def _begin(self, peer: SimPeer, trainer: Trainer) -> None:
        peer.trainer = peer.process.start(trainer(peer))
        self._trainers.append(peer.trainer)
