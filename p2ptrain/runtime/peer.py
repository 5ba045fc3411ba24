"""`Peer`: what a program holds. The protocol has a thread of its own; the loop stays the user's.

::

    main thread                          protocol thread (uvloop)              one worker thread
    forward, backward                    machine, driver, gRPC, algorithm      copies of vectors
    peer.step() ── boundary ──cross──►   averages, joins, serves others   ──►  snapshot, delta

The main thread waits for the protocol only where the algorithm says so, inside `step`.
"""

import asyncio
import difflib
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path
from random import Random
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import uvloop

from p2ptrain.averaging.base import load_algorithm
from p2ptrain.compute.torch_replica import TorchReplica
from p2ptrain.core.messages import Phase
from p2ptrain.core.peer_machine import ProtocolConfig
from p2ptrain.errors import CodecError, ConfigError, LocalProtocolError
from p2ptrain.ids import Address, PeerId, Seconds
from p2ptrain.net import wire
from p2ptrain.net.grpc_transport import GrpcConfig, GrpcTransport
from p2ptrain.net.wire import MAX_NAME
from p2ptrain.runtime.board import Board
from p2ptrain.runtime.boundary import Boundary
from p2ptrain.runtime.desk import DriverDesk
from p2ptrain.runtime.driver import Driver
from p2ptrain.runtime.exchange import ExchangeConfig
from p2ptrain.runtime.metrics import JsonlMetrics, Metrics, TeeMetrics
from p2ptrain.runtime.prometheus import PrometheusMetrics
from p2ptrain.runtime.snapshots import SnapshotWriter
from p2ptrain.runtime.swarm import DriverSwarm
from p2ptrain.runtime.tensorboard import TensorBoardMetrics

if TYPE_CHECKING:
    from torch import nn
    from torch.amp import GradScaler
    from torch.optim import Optimizer

T = TypeVar("T")

INTERRUPTED_GRACE_S = 0.5
"""Whoever presses Ctrl-C in a peer that leaves is not made to wait longer."""

_Sink = JsonlMetrics | PrometheusMetrics | TensorBoardMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class StopConfig:
    """When a run ends by itself; whatever comes first."""

    samples: int | None = None
    """Samples of the whole swarm."""

    seconds: Seconds | None = None
    """Seconds from this peer's first step."""

    def __post_init__(self) -> None:
        for name in ("samples", "seconds"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"stop {name} = {value} must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerConfig:
    """Everything about a peer that is not its model."""

    name: str = ""
    """Unique in the swarm; by default host and process number."""

    algorithm: str = "ad_psgd"
    """A file of `p2ptrain/averaging`, or ``package.module:Class``."""

    algorithm_options: dict[str, Any] = field(default_factory=dict)  # Any: the algorithm checks

    listen: str = "127.0.0.1:0"
    """``host:port`` to listen on; port 0 takes a free one."""

    advertise: str = ""
    """What other peers should use, if it is not `listen`; port 0 stands for the real port."""

    join: tuple[str, ...] = ()
    """Addresses of peers that are in; one that answers is enough. Empty: the first of a swarm."""

    join_timeout_s: Seconds = 30.0
    """How long to try to join, and to wait for `peers`."""

    peers: int = 1
    """How many start together: the first step waits until so many are here, or others train."""

    seed: int = 0
    """Of this peer's choices; mixed with its name."""

    serve: bool = True
    """After its own training, serve the others until all are done."""

    out: str = ""
    """Folder for ``<name>.jsonl`` and ``<name>.snapshots``; empty: no files."""

    metrics_port: int | None = None
    """Port of a Prometheus endpoint on the host of `listen`; 0 takes a free one. None: no endpoint.
    Whoever reaches it can read it: there is no password."""

    tensorboard: str = ""
    """Folder for TensorBoard scalars, one run (``<name>``) per peer; empty: none."""

    snapshot_every_s: Seconds = 0.5
    """How often a row is added to the snapshots. Too small: the disk; too large: a coarse curve."""

    leave_grace_s: Seconds = 5.0
    """How long a leaving peer lets a running average end."""

    stop: StopConfig = field(default_factory=StopConfig)
    protocol: ProtocolConfig = field(default_factory=ProtocolConfig)
    exchange: ExchangeConfig = field(default_factory=ExchangeConfig)
    network: GrpcConfig = field(default_factory=GrpcConfig)

    def __post_init__(self) -> None:
        if any(c.isspace() or not c.isprintable() or c in "/\\" for c in self.name):
            raise ConfigError(f"name = {self.name!r} must be printable, without spaces or slashes")
        if len(self.name) > MAX_NAME:
            raise ConfigError(f"name = {self.name!r} must be at most {MAX_NAME} characters long")
        for host in self.join:
            try:
                wire.address(host)
            except CodecError as error:
                raise ConfigError(f"join = {error}") from error
        if self.peers < 1:
            raise ConfigError(f"peers = {self.peers} must be 1 or more")
        if self.metrics_port is not None and not 0 <= self.metrics_port < 65536:
            raise ConfigError(f"metrics_port = {self.metrics_port} is no port; write 0 to 65535")
        for key in ("join_timeout_s", "snapshot_every_s", "leave_grace_s"):
            value = getattr(self, key)
            if not 0 < value < math.inf:
                raise ConfigError(f"{key} = {value} must be above 0")
        if self.listen.startswith(("0.0.0.0:", "[::]:")) and not self.advertise:
            raise ConfigError(
                f"listen = {self.listen!r} is every address and none that others can use; "
                "add advertise = 'host:port' as they reach this peer"
            )


class Peer:
    """One peer of a swarm, around your model and your optimizer.

    ::

        with p2ptrain.Peer(model, optimizer, join=["10.0.0.5:4000"]) as peer:
            for inputs, targets in loader:
                loss_function(model(inputs), targets).backward()
                peer.step(samples=len(inputs))          # where optimizer.step() stood
                optimizer.zero_grad()

    Args:
        model: its parameters become views of one vector; do not move or replace them afterwards.
        optimizer: any torch optimizer over parameters of `model`.
        config: a `PeerConfig`; or give its fields as keyword arguments.
        metrics: where records go, beside the files of `config.out`.

    Raises:
        ConfigError: for a setting that cannot work, an unknown algorithm or option.
        StateError: for a model that cannot be averaged.
    """

    def __init__(
        self,
        model: "nn.Module",
        optimizer: "Optimizer",
        config: PeerConfig | None = None,
        *,
        metrics: Metrics | None = None,
        **settings: Any,  # Any: the fields of PeerConfig
    ) -> None:
        self.config = config or _config_from(settings)
        self.name = PeerId(self.config.name or f"{socket.gethostname()}-{os.getpid()}")
        self.replica = TorchReplica(model, optimizer)
        self._algorithm = load_algorithm(self.config.algorithm, self.config.algorithm_options)
        self._sinks = self._open_sinks()
        self._board = Board(time.monotonic)
        self._metrics = TeeMetrics(self._board, *([metrics] if metrics else []), *self._sinks)
        self._protocol = _ProtocolThread()
        self._stop_why = ""
        self._steps_after_stop = 0
        self._accumulated = 0
        self._began_at: Seconds | None = None
        self._old_handler: Any = None  # Any: what signal.signal returns
        self.address = Address("")
        self.metrics_address = Address("")
        """Where Prometheus may ask; empty without `metrics_port`."""

    # --- a program's side -------------------------------------------------------------------------

    @property
    def progress(self) -> int:
        """Samples of the whole swarm so far, as far as this peer knows; for LR schedules.

        Known from the first step on, for a peer that comes late too. Under a synchronous algorithm
        all peers see the same number at the same version; under others a peer's own samples count
        at once, those of others when they are heard of.
        """
        known = self._driver.progress
        return known if self._is_synchronous else max(known, self._boundary.totals.samples)

    @property
    def _is_synchronous(self) -> bool:
        return self._algorithm.averages == "gradients"

    @property
    def averages(self) -> str:
        """What this peer's algorithm averages: ``models`` or ``gradients``."""
        return self._algorithm.averages

    @property
    def should_stop(self) -> bool:
        """True when the run has reached its end, or the process was asked to end (SIGTERM).

        Under a synchronous algorithm peers agree on the last step, and make it together.
        """
        if not self._stop_why:
            self._stop_why = self._reason_to_stop()
        return bool(self._stop_why)

    def _reason_to_stop(self) -> str:
        stop, driver = self.config.stop, self._driver
        if stop.samples is not None and self.progress >= stop.samples:
            return f"the swarm has trained {self.progress} samples"
        if driver.agreed_to_end:
            return "the swarm agreed to end"
        began = time.monotonic() if self._began_at is None else self._began_at
        late = stop.seconds is not None and time.monotonic() - began >= stop.seconds
        if late and self._is_synchronous:
            driver.wants_to_end = True  # all will know with the next average
            return ""
        return f"{stop.seconds:g} s are over" if late else ""

    def step(
        self,
        *,
        samples: int = 1,
        loss: float | None = None,
        clip: float | None = None,
        scaler: "GradScaler | None" = None,
    ) -> None:
        """End a step; stands where `optimizer.step()` stood.

        Args:
            samples: how many samples the gradients are of.
            loss: for the record.
            clip: norm to clip gradients to, after they were averaged.
            scaler: of mixed precision; unscaled before averaging, updated after it.

        Raises:
            StateError: if gradients or parameters are not finite, or a parameter was replaced.
            SystemExit: if the process was asked to end and the loop does not look at `should_stop`.
            LocalProtocolError: outside of the with block.
        """
        if self._began_at is None:
            raise LocalProtocolError("step belongs inside `with peer:`, where the peer has joined")
        if self._driver.stopping:
            self._steps_after_stop += 1
            if self._steps_after_stop > 1:
                raise SystemExit(0)
        finite = self.replica.unscale(scaler) if scaler else True
        if self._is_synchronous:
            self._driver.contributes = self._driver.contributes and finite
        update = self.replica.optimizer_step if finite or self._is_synchronous else _no_update
        samples, self._accumulated = samples + self._accumulated, 0
        _run_here(self._boundary.step(samples, loss, lambda: update(clip)))
        if scaler:
            scaler.update()

    def accumulate(self, *, samples: int = 1) -> None:
        """Count a backward pass whose gradients wait for the next `step`."""
        self._accumulated += samples

    def stop(self, why: str) -> None:
        """Ask the loop to end, from any thread or a signal handler; a wait in `step` ends."""
        self._stop_why = self._stop_why or why
        self._protocol.post(self._driver.withdraw)

    # --- life -------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            self._serve_metrics()
        except ConfigError:
            self._close_sinks()
            raise
        self._protocol.start()
        try:
            self._protocol.run(self._arrive())
        except BaseException:
            self._protocol.run(self._abandon())
            self._protocol.stop()
            self._close_sinks()
            raise
        if threading.current_thread() is threading.main_thread():
            self._old_handler = signal.signal(signal.SIGTERM, self._on_sigterm)
        self._began_at = time.monotonic()
        self._boundary.begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._boundary.end()
        asked = self._driver.stopping
        why = f"{type(error).__name__}: {error}" if error else self._stop_why or "the loop ended"
        try:
            self._protocol.run(self._depart(serve=not error and not asked and self.config.serve))
        except BaseException:  # interrupted: no server may outlive its loop, and others should know
            self._protocol.run(self._driver.leave(INTERRUPTED_GRACE_S))
            raise
        finally:
            if self._old_handler is not None:
                signal.signal(signal.SIGTERM, self._old_handler)
            self._protocol.stop()
            self._record_end(why)
            self._close_sinks()

    async def _arrive(self) -> None:
        config = self.config
        transport = GrpcTransport(config.listen, config.advertise, config.network)
        self._driver = Driver(
            self.name,
            incarnation=time.time_ns() // 1_000_000,
            algorithm=self._algorithm,
            algorithm_name=config.algorithm,
            replica=self.replica,
            transport=transport,
            protocol=config.protocol,
            exchange=config.exchange,
            rng=Random(f"{config.seed}/{self.name}"),
            offload=self._protocol.offload,
            clock=time.monotonic,
            metrics=self._metrics,
        )
        swarm = DriverSwarm(self._driver)
        self._boundary = Boundary(
            self._driver, swarm, self._protocol, self._metrics, time.monotonic
        )
        self.address = await self._driver.start()
        transport.desk = DriverDesk(self._driver, self._board, transport, time.time, time.monotonic)
        self._record_start()
        hosts = [Address(host) for host in config.join if host != self.address]
        if hosts:
            await self._driver.join(hosts, config.join_timeout_s)
        await self._driver.wait_for_members(config.peers, config.join_timeout_s)
        donor = await self._driver.take_over_model()
        if donor:
            self._metrics.record("warning", text=f"took over the model of {donor}")
        self._driver.describe(Phase.ARRIVING, steps=0, samples=0)  # from here on it knows progress
        self._metrics.record("ready", members=[self.name, *self._driver.choosable()])
        self._driver.begin_background(swarm)
        self._snapshots = self._snapshot_writer()
        if self._snapshots:
            self._writing = asyncio.ensure_future(self._snapshots.repeat(config.snapshot_every_s))

    async def _depart(self, serve: bool) -> None:
        if serve:
            await self._driver.wait_until_all_done()
        await self._driver.leave(self.config.leave_grace_s)
        await self._protocol.offload(self.replica.settle)
        if self._snapshots:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
            await self._snapshots.write()
            self._snapshots.close()

    async def _abandon(self) -> None:
        """Entering failed: close whatever was opened."""
        if hasattr(self, "_driver"):
            await self._driver.close()

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        self.stop("asked to end by SIGTERM")

    # --- records ----------------------------------------------------------------------------------

    def _open_sinks(self) -> list[_Sink]:
        """Where records go by configuration."""
        config = self.config
        sinks: list[_Sink] = []
        if config.out:
            sinks.append(JsonlMetrics(Path(config.out) / f"{self.name}.jsonl", time.monotonic))
        if config.metrics_port is not None:
            sinks.append(PrometheusMetrics(self.name))
        if config.tensorboard:
            sinks.append(TensorBoardMetrics(Path(config.tensorboard) / self.name))
        return sinks

    def _serve_metrics(self) -> None:
        """Open the Prometheus endpoint, if there is one."""
        for sink in self._sinks:
            if isinstance(sink, PrometheusMetrics) and self.config.metrics_port is not None:
                host = self.config.listen.rpartition(":")[0].strip("[]")
                self.metrics_address = sink.serve(host, self.config.metrics_port)

    def _close_sinks(self) -> None:
        for sink in self._sinks:
            sink.close()

    def _snapshot_writer(self) -> SnapshotWriter | None:
        if not self.config.out:
            return None
        path = Path(self.config.out) / f"{self.name}.snapshots"
        return SnapshotWriter(path, self.replica, self._metrics, self._protocol.offload)

    def _record_start(self) -> None:
        self._metrics.record(
            "started",
            unix_s=time.time(),
            peer=self.name,
            address=self.address,
            algorithm=self.config.algorithm,
            device=self.replica.device,
            model_size=self.replica.model_size,
            fingerprint=self.replica.fingerprint,
        )

    def _record_end(self, why: str) -> None:
        trainer, protocol = self._boundary.totals, self._driver.accounts
        self._metrics.record(
            "ended",
            steps=trainer.steps,
            samples=trainer.samples,
            compute_s=trainer.compute_s,
            wait_s=trainer.wait_s,
            comm_s=protocol.comm_s,
            sent_bytes=protocol.sent_bytes,
            received_bytes=protocol.received_bytes,
            groups_formed=protocol.groups_formed,
            groups_failed=dict(protocol.groups_failed),
            staleness_p50=protocol.staleness_percentile(50),
            staleness_p99=protocol.staleness_percentile(99),
            why=why,
        )


class _ProtocolThread:
    """An event loop on its own thread, and one worker thread for copies; implements `Cross`."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._workers = ThreadPoolExecutor(1, thread_name_prefix="p2ptrain-copies")
        self._thread = threading.Thread(target=self._main, name="p2ptrain-protocol", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:  # Any: asyncio's own types
        """Run `work` over there; block until its result is here."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def call(self, work: Coroutine[Any, Any, T]) -> Awaitable[T]:  # Any: as above
        return _Crossing(asyncio.run_coroutine_threadsafe(work, self._loop))

    def post(self, function: Callable[[], None]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function)

    def offload(self, function: Callable[[], T], /) -> Awaitable[T]:
        return self._loop.run_in_executor(self._workers, function)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._workers.shutdown()
        self._loop.close()


class _Crossing(Awaitable[T]):
    """Awaiting it hands a future of the other thread to `_run_here`."""

    def __init__(self, future: "Future[T]") -> None:
        self._future = future

    def __await__(self) -> Generator["Future[T]", T, T]:
        result = yield self._future
        return result


def _run_here(coroutine: Coroutine["Future[Any]", Any, T]) -> T:  # Any: whatever it awaits
    """Run a coroutine on this thread, without a loop: what it awaits are futures of another one."""
    try:
        waiting = coroutine.send(None)
        while True:
            try:
                result = waiting.result()
            except BaseException as error:  # noqa: BLE001 - it belongs to the coroutine
                waiting = coroutine.throw(error)
            else:
                waiting = coroutine.send(result)
    except StopIteration as ended:
        value: T = ended.value
        return value


def _config_from(settings: dict[str, Any]) -> PeerConfig:  # Any: the fields of PeerConfig
    known = [f.name for f in fields(PeerConfig)]
    for key in settings:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            advice = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise ConfigError(f"Peer has no setting {key!r}; {advice}")
    if not isinstance(settings.get("join", ()), str):
        return PeerConfig(**{**settings, "join": tuple(settings.get("join", ()))})
    return PeerConfig(**{**settings, "join": (settings["join"],)})


def _no_update(clip: float | None) -> None:
    """Gradients overflowed: nothing to learn from."""
