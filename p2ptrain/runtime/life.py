"""A peer's way through a swarm: it listens, joins, trains, serves the others, departs.

The same way for real (`runtime/peer.py`) and in a simulated world (`sim/peer.py`). What differs
comes in as ports: the transport, and the `Surroundings`.

::

    listen ──► join ──► begin ──► step, step, ... ──► end ──► depart ──► record_end
    protocol   protocol  trainer   trainer            trainer  protocol   trainer

Below each stands on whose side it runs: coroutines of the protocol belong on its event loop, what
is the trainer's is called where the loop of training runs (see `runtime/boundary.py`).
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from p2ptrain.averaging.base import Algorithm
from p2ptrain.compute.replica import Replica
from p2ptrain.core.messages import Phase
from p2ptrain.errors import ConfigError
from p2ptrain.ids import Address, PeerId, Seconds
from p2ptrain.net.transport import Transport
from p2ptrain.runtime.accounts import record_end
from p2ptrain.runtime.boundary import Boundary, Cross
from p2ptrain.runtime.driver import Driver
from p2ptrain.runtime.metrics import Metrics
from p2ptrain.runtime.offload import Offload
from p2ptrain.runtime.settings import PeerConfig
from p2ptrain.runtime.snapshots import SnapshotWriter
from p2ptrain.runtime.swarm import DriverSwarm


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a life finds around it: clocks, and how its two sides reach each other."""

    clock: Callable[[], Seconds]
    """Of the event loop's timers."""

    unix_clock: Callable[[], Seconds]
    """What a wall clock shows; in a simulated world, the same as `clock`."""

    incarnation: int
    """Larger than that of any earlier life under the same name."""

    cross: Cross
    offload: Offload


class Life:
    """One life of one peer; another one under the same name is another object.

    Args:
        config: the peer's; `name` stands for an empty one.
        algorithm: loaded by the configuration.
        replica: the model; `device` is where it lives, for the record.
        metrics: takes the records.
        around: clocks, and how the two sides reach each other.
        snapshots: whether rows of the model are written to `config.out`.
    """

    def __init__(
        self,
        name: PeerId,
        config: PeerConfig,
        algorithm: Algorithm,
        replica: Replica,
        metrics: Metrics,
        around: Surroundings,
        *,
        device: str,
        snapshots: bool,
    ) -> None:
        if config.average_momentum and algorithm.averages == "gradients":
            raise ConfigError(
                f"average_momentum: {config.algorithm} averages gradients, so that momenta are "
                "alike anyway; leave it out"
            )
        self.name = name
        self.why_stopped = ""
        self._config = config
        self._algorithm = algorithm
        self._replica = replica
        self._device = device
        self._metrics = metrics
        self._around = around
        self._writes_snapshots = snapshots
        self._snapshots: SnapshotWriter | None = None
        self._began_at: Seconds | None = None

    # --- what a loop asks -------------------------------------------------------------------------

    @property
    def progress(self) -> int:
        """Samples of the whole swarm so far; see `Peer.progress`."""
        known = self.driver.accord.progress
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
        self._around.cross.post(self.driver.withdraw)

    def _reason_to_stop(self) -> str:
        stop, driver, now = self._config.stop, self.driver, self._around.clock()
        if stop.samples is not None and self.progress >= stop.samples:
            return f"the swarm has trained {self.progress} samples"
        if driver.accord.agreed_to_end:
            return "the swarm agreed to end"
        began = now if self._began_at is None else self._began_at
        late = stop.seconds is not None and now - began >= stop.seconds
        if late and self.averages == "gradients":
            driver.accord.wants_to_end = True  # all will know with the next average
            return ""
        return f"{stop.seconds:g} s are over" if late else ""

    # --- from the first word to the last ----------------------------------------------------------

    async def listen(self, transport: Transport) -> Address:
        """Open up for others. Raises ConfigError if that is not possible."""
        config, around = self._config, self._around
        self.driver = Driver(
            self.name,
            incarnation=around.incarnation,
            algorithm=self._algorithm,
            algorithm_name=config.algorithm,
            replica=self._replica,
            transport=transport,
            protocol=config.protocol,
            exchange=config.exchange,
            rng=Random(f"{config.seed}/{self.name}"),
            offload=around.offload,
            clock=around.clock,
            metrics=self._metrics,
        )
        self._swarm = DriverSwarm(self.driver)
        self.boundary = Boundary(
            self.driver, self._swarm, around.cross, self._metrics, around.clock
        )
        self.address = await self.driver.start()
        return self.address

    async def join(self) -> None:
        """Take a place in the swarm, and the model of one who is ahead.

        Raises:
            RefusedError: if the others will not have us.
            TransportError: if they are not here in time.
        """
        config, driver = self._config, self.driver
        self._record_start()
        hosts = [Address(host) for host in config.join if host != self.address]
        if hosts:
            await driver.join(hosts, config.join_timeout_s)
        await driver.wait_for_members(config.together or config.peers, config.join_timeout_s)
        donor = await driver.take_over_model()
        if donor:
            self._metrics.record("warning", text=f"took over the model of {donor}")
        driver.describe(Phase.ARRIVING, steps=0, samples=0)  # from here on it knows progress
        self._metrics.record("ready", members=[self.name, *driver.choosable()])
        driver.begin_background(self._swarm)
        if self._writes_snapshots:
            path = Path(config.out) / f"{self.name}.snapshots"
            offload = self._around.offload
            self._snapshots = SnapshotWriter(path, self._replica, self._metrics, offload)
            self._writing = asyncio.ensure_future(self._snapshots.repeat(config.snapshot_every_s))

    def begin(self) -> None:
        """The first step begins now."""
        self._began_at = self._around.clock()
        self.boundary.begin()

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
        await self._around.offload(self._replica.settle)
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
            unix_s=self._around.unix_clock(),
            peer=self.name,
            address=self.address,
            algorithm=self._config.algorithm,
            device=self._device,
            model_size=self._replica.saved_size,
            fingerprint=self._replica.fingerprint,
        )

    def record_end(self, why: str) -> None:
        """The last record: totals, and a sentence."""
        record_end(self._metrics, self.boundary.totals, self.driver.accounts, why)
