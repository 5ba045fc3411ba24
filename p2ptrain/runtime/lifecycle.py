"""A peer's way through a swarm: it listens, joins, trains, serves the others, departs.

This is the only place that puts a peer together: a real one (`runtime/peer.py`), those of simulated
worlds (`sim/peer.py`, `sim/world.py`) and those of benchmarks. What differs comes in as ports: the
replica, the `Environment`, the transport and the metrics.

::

    assemble ─► listen ─► join ─► begin ──► step, step, ... ──► end ──► depart ──► record_end
    protocol    protocol  protocol  trainer   trainer         trainer  protocol   trainer

Below each stands on whose side it runs: coroutines of the protocol belong on its event loop, what
is the trainer's is called where the loop of training runs (see `runtime/boundary.py`). After `join`
a peer is ready, and others average with it; one without a trainer stays there, and claims its
groups by hand through `swarm`.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from p2ptrain.averaging.base import load_algorithm
from p2ptrain.compute.replica import Replica
from p2ptrain.core.messages import Phase
from p2ptrain.errors import ConfigError
from p2ptrain.ids import Address, PeerId, Seconds
from p2ptrain.net.transport import Transport
from p2ptrain.runtime.accounts import record_end
from p2ptrain.runtime.boundary import Boundary, Cross
from p2ptrain.runtime.copy_executor import CopyExecutor
from p2ptrain.runtime.driver import Driver
from p2ptrain.runtime.metrics import Metrics
from p2ptrain.runtime.settings import PeerConfig
from p2ptrain.runtime.snapshots import SnapshotWriter
from p2ptrain.runtime.swarm import DriverSwarm


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What a peer finds around it: clocks, a device, and how its two sides reach each other."""

    clock: Callable[[], Seconds]
    """Of the event loop's timers."""

    unix_clock: Callable[[], Seconds]
    """What a wall clock shows; in a simulated world, the same as `clock`."""

    incarnation: int
    """Larger than that of any earlier life under the same name."""

    cross: Cross
    executor: CopyExecutor

    device: str
    """Where the replica is, for the record."""


class PeerLifecycle:
    """One life of one peer; another one under the same name is another object.

    Args:
        config: the peer's; its name is not empty.
        replica: the model.
        environment: clocks, and how the two sides reach each other.
        snapshots: whether rows of the model are written to `config.out`.

    Raises:
        ConfigError: for an unknown algorithm, an option or a relation that cannot work.
    """

    driver: Driver
    """From `assemble` on, as are the next two."""
    swarm: DriverSwarm
    boundary: Boundary

    def __init__(
        self,
        config: PeerConfig,
        replica: Replica,
        environment: Environment,
        *,
        snapshots: bool = False,
    ) -> None:
        algorithm = load_algorithm(config.algorithm, config.algorithm_options)
        if config.peers > 1:  # otherwise it is not known how many will come
            algorithm.check_swarm(config.peers)
        if config.average_momentum and algorithm.averages == "gradients":
            raise ConfigError(
                f"average_momentum: {config.algorithm} averages gradients, so that momenta are "
                "alike anyway; leave it out"
            )
        self.name = PeerId(config.name)
        self.address = Address("")
        self.why_stopped = ""
        self._config = config
        self._algorithm = algorithm
        self._replica = replica
        self._environment = environment
        self._writes_snapshots = snapshots
        self._snapshots: SnapshotWriter | None = None
        self._began_at: Seconds | None = None

    # --- what a loop asks -------------------------------------------------------------------------

    @property
    def progress(self) -> int:
        """Samples of the whole swarm so far; see `Peer.progress`."""
        known = self.driver.agreed.progress
        agreed = self.averages == "gradients"  # in each average of them
        return known if agreed else max(known, self.boundary.totals.samples)

    @property
    def averages(self) -> str:
        """``models`` or ``gradients``."""
        return self._algorithm.averages

    @property
    def has_begun(self) -> bool:
        """True from the beginning of the first step."""
        return self._began_at is not None

    @property
    def should_stop(self) -> bool:
        """True when the run has reached its end, or somebody asked for it."""
        if not self.why_stopped:
            self.why_stopped = self._reason_to_stop()
        return bool(self.why_stopped)

    def stop(self, why: str) -> None:
        """Ask the loop to end, from any thread; a wait in a step ends."""
        self.why_stopped = self.why_stopped or why
        self._environment.cross.post(self.driver.withdraw)

    def _reason_to_stop(self) -> str:
        stop, driver, now = self._config.stop, self.driver, self._environment.clock()
        if stop.samples is not None and self.progress >= stop.samples:
            return f"the swarm has trained {self.progress} samples"
        if driver.agreed.agreed_to_end:
            return "the swarm agreed to end"
        began = now if self._began_at is None else self._began_at
        late = stop.seconds is not None and now - began >= stop.seconds
        if late and self.averages == "gradients":
            driver.agreed.wants_to_end = True  # all will know with the next average
            return ""
        return f"{stop.seconds:g} s are over" if late else ""

    # --- from the first word to the last ----------------------------------------------------------

    def assemble(self, transport: Transport, metrics: Metrics) -> None:
        """Put the parts together; `metrics` takes the records. Belongs on the protocol's loop."""
        config, environment = self._config, self._environment
        self._metrics = metrics
        self.driver = Driver(
            self.name,
            incarnation=environment.incarnation,
            algorithm=self._algorithm,
            algorithm_name=config.algorithm,
            replica=self._replica,
            transport=transport,
            protocol=config.protocol,
            exchange=config.exchange,
            rng=Random(f"{config.seed}/{self.name}"),
            executor=environment.executor,
            clock=environment.clock,
            metrics=metrics,
        )
        self.swarm = DriverSwarm(self.driver)
        self.boundary = Boundary(
            self.driver, self.swarm, environment.cross, metrics, environment.clock
        )

    async def listen(self) -> Address:
        """Open up for others. Raises ConfigError if that is not possible."""
        self.address = await self.driver.start()
        return self.address

    async def join(self, hosts: Sequence[str] = (), *, keeps_model: bool = False) -> None:
        """Take a place in the swarm, and the model of one who is ahead; then this peer is ready.

        Args:
            hosts: to ask for a place; those of the configuration, if none are given.
            keeps_model: go on with the replica as it is, as after a checkpoint.

        Raises:
            RefusedError: if the others refuse this peer.
            TransportError: if they are not here in time.
        """
        config, driver = self._config, self.driver
        self._record_start()
        asked = [Address(host) for host in hosts or config.join if host != self.address]
        if asked:
            await driver.join(asked, config.join_timeout_s)
        await driver.wait_for_members(config.together or config.peers, config.join_timeout_s)
        if keeps_model:
            driver.keep_model()
        elif donor := await driver.take_model():
            self._metrics.record("warning", text=f"took over the model of {donor}")
        driver.describe(Phase.ARRIVING, steps=0, samples=0)  # from here on it knows progress
        self._metrics.record("ready", members=[self.name, *driver.choosable()])
        if self._writes_snapshots:
            path = Path(config.out) / f"{self.name}.snapshots"
            executor = self._environment.executor
            self._snapshots = SnapshotWriter(path, self._replica, self._metrics, executor)
            self._writing = asyncio.ensure_future(self._snapshots.repeat(config.snapshot_every_s))

    def begin(self) -> None:
        """The first step begins now, and the algorithm's own loop beside it."""
        self._began_at = self._environment.clock()
        self.boundary.begin()
        self._environment.cross.post(lambda: self.driver.begin_background(self.swarm))

    async def step(
        self, samples: int, loss: float | None, optimizer_step: Callable[[], None]
    ) -> None:
        """End a step; see `Boundary.step`."""
        await self.boundary.step(samples, loss, optimizer_step)

    def end(self) -> None:
        """The trainer has stopped."""
        self.boundary.end()

    async def depart(self, serve: bool) -> None:
        """Serve the others until they are done, if we may; say goodbye; close everything."""
        if serve:
            await self.driver.wait_until_all_done()
        await self.driver.leave(self._config.leave_grace_s)
        await self._environment.executor(self._replica.settle)
        if self._snapshots:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
            await self._snapshots.write()

    async def abandon(self) -> None:
        """Joining failed: close whatever was opened."""
        if hasattr(self, "driver"):
            await self.driver.close()

    # --- records ----------------------------------------------------------------------------------

    def _record_start(self) -> None:
        self._metrics.record(
            "started",
            unix_s=self._environment.unix_clock(),
            peer=self.name,
            address=self.address,
            algorithm=self._config.algorithm,
            device=self._environment.device,
            model_size=self._replica.saved_size,
            fingerprint=self._replica.fingerprint,
        )

    def record_end(self, why: str) -> None:
        """The last record: totals, and a sentence."""
        record_end(self._metrics, self.boundary.totals, self.driver.accounts, why)
