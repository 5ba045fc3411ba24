"""`Peer`: what a program holds. The protocol has a thread of its own; the loop stays the user's.

::

    main thread                          protocol thread (uvloop)              one worker thread
    forward, backward                    machine, driver, gRPC, algorithm      copies of vectors
    peer.step() ── boundary ──call───►   averages, joins, serves others   ──►  snapshot, delta

The main thread waits for the protocol only where the algorithm says so, inside `step`.
"""

import asyncio
import atexit
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import uvloop

from p2ptrain.compute.buckets import Buckets
from p2ptrain.compute.forward_hooks import ForwardHooks
from p2ptrain.compute.replica import StateOwner, no_update
from p2ptrain.compute.torch_replica import TorchReplica
from p2ptrain.core.data_ledger import DataPlan
from p2ptrain.documented import takes_settings
from p2ptrain.errors import ConfigError, DeviceError, LocalProtocolError, P2PTrainError
from p2ptrain.ids import Address, PeerId
from p2ptrain.named import check_types, number_in, suggestion, whole_in
from p2ptrain.net.grpc_transport import GrpcTransport
from p2ptrain.net.key_service import KeyService
from p2ptrain.runtime.board import Board
from p2ptrain.runtime.checkpoints import RESERVED
from p2ptrain.runtime.data_dealing import DataDealing
from p2ptrain.runtime.entry import asking_with, enter, keyring_of, say, welcome
from p2ptrain.runtime.keys import KeyCare
from p2ptrain.runtime.lifecycle import PeerLifecycle
from p2ptrain.runtime.metrics import JsonlMetrics, Metrics, TeeMetrics, TensorBoardMetrics
from p2ptrain.runtime.prometheus import PrometheusMetrics
from p2ptrain.runtime.service import PeerService
from p2ptrain.runtime.settings import Environment, PeerConfig
from p2ptrain.standard_streams import fill_closed_descriptors
from p2ptrain.ui.server import PageThread, page_of
from p2ptrain.uncaught import hide_our_frames

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.amp import GradScaler
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

T = TypeVar("T")

INTERRUPTED_GRACE_S = 0.5
"""How long a peer that is leaving goes on after Ctrl-C."""


@takes_settings(PeerConfig)
class Peer:
    """One peer of a swarm, around your model and your optimizer.

    ::

        with Peer(model, optimizer, listen="10.0.0.6:4000", join=["10.0.0.5:4000"]) as peer:
            for inputs, targets in loader:
                loss_function(model(inputs), targets).backward()
                peer.step(samples=len(inputs))          # where optimizer.step() stood
                optimizer.zero_grad()

    Leaving the ``with`` waits until all other peers are done as well (`PeerConfig.serve`), since
    a peer that trains may be about to average with this one. Of several peers that one thread has
    entered, only the one that is left last waits.

    Args:
        model: its parameters become views of one vector; do not move or replace them afterwards.
        optimizer: any torch optimizer over parameters of `model`, or several over parts of it.
        config: a `PeerConfig`; or give its fields as the keyword arguments below.
        metrics: where records go, beside the files of `config.out`.

    Raises:
        ConfigError: for a setting that cannot work, an unknown algorithm or option.
        StateError: for a model that cannot be averaged.
    """

    _process = 0
    """In which there was one; gRPC's threads do not outlive a fork."""
    _entered: ClassVar[list["Peer"]] = []
    """The peers of this process that a ``with`` is in."""

    def __init__(
        self,
        model: "nn.Module",
        optimizer: "Optimizer | Sequence[Optimizer]",
        config: PeerConfig | None = None,
        *,
        metrics: Metrics | None = None,
        **settings: Any,  # Any: the fields of PeerConfig
    ) -> None:
        hide_our_frames()
        fill_closed_descriptors()
        if Peer._process not in (0, os.getpid()):
            raise ConfigError(
                "this process was forked from one that has had a peer, whose threads a fork leaves "
                'behind; start processes by spawn (multiprocessing_context="spawn")'
            )
        if config is not None and settings:
            raise ConfigError(
                f"Peer: {next(iter(settings))} is given beside config; put it into the config"
            )
        self.config = config or _config_from(settings)
        self.name = PeerId(self.config.name or f"{socket.gethostname()}-{os.getpid()}")
        self.replica = TorchReplica(model, optimizer, average_momentum=self.config.average_momentum)
        self._protocol = _ProtocolThread()
        self._life = PeerLifecycle(
            replace(self.config, name=self.name),
            self.replica,
            Environment(
                clock=time.monotonic,
                unix_clock=time.time,
                incarnation=time.time_ns() // 1_000_000,
                call=self._protocol.call,
                post=self._protocol.post,
                executor=self._protocol.executor,
                disk=self._protocol.disk,
                device=self.replica.device,
            ),
        )
        if self.replica.needs_closure and self._life.algorithm.averages == "gradients":
            kind = type(optimizer).__name__
            raise ConfigError(
                f"{kind} computes gradients again within a step, of this peer alone, and "
                f"{self.config.algorithm} averages gradients; take one that averages models"
            )
        self._sinks: list[JsonlMetrics | PrometheusMetrics | TensorBoardMetrics | PageThread] = []
        if self.config.out:
            path = Path(self.config.out) / f"{self.name}.jsonl"
            self._sinks.append(JsonlMetrics(path, time.monotonic, self.config.records_mb))
        if self.config.metrics_port is not None:
            self._sinks.append(PrometheusMetrics(self.name))
        if self.config.tensorboard:
            self._sinks.append(
                TensorBoardMetrics(Path(self.config.tensorboard) / self.name, time.monotonic)
            )
        self._board = Board(time.monotonic)
        self._metrics = TeeMetrics(self._board, *([metrics] if metrics else []), *self._sinks)
        self._steps_after_stop = 0
        self._stepping = threading.Lock()
        self._hooks: list[RemovableHandle] = []
        self._forward: ForwardHooks | None = None
        self._hooked_for = self._life.algorithm
        self._warned_of_stray = False
        self._thread = 0
        self._has_left = False
        self._has_ended = False
        self._accumulated = 0
        self._old_handler: Any = None  # Any: what signal.signal returns
        self.address = Address("")
        self.consensus_of: dict[PeerId, int] = {}
        """Of which peers' models `consensus` was the mean, and the weight of each."""
        self.metrics_address = Address("")
        """Where Prometheus may ask; empty without `metrics_port`."""

    # --- a program's side -------------------------------------------------------------------------

    @property
    def progress(self) -> int:
        """Samples of the whole swarm so far, as far as this peer knows; for LR schedules.

        Known from the first step on, for a peer that joins late too. Where gradients are averaged
        all see the same number at the same version; else averages share each peer's estimate.
        """
        return self._life.progress

    @property
    def averages(self) -> str:
        """What this peer's algorithm averages: ``models`` or ``gradients``."""
        return self._life.algorithm.averages

    @property
    def buckets(self) -> Buckets | None:
        """What the backward pass fills, where gradients travel meanwhile (`compute/buckets.py`)."""
        return self._life.buckets

    def batch_size(self, usual: int) -> int:
        """How many samples the next step should have, so that all peers' steps last equally long.

        Args:
            usual: samples of a step of one peer if all were as fast; equal at all peers, and above
                0. The batches of all peers that train add up to so many for each of them.

        Ask before each step: the answer changes when peers come, leave, or become slower. It is
        `usual` until some steps are measured. Until a peer asks, it counts as one of usual speed.

        Raises:
            ConfigError: where peers do not take the same steps, or average models.
        """
        if (whole := whole_in("usual", usual)) < 1:
            raise ConfigError(f"usual = {usual} must be 1 or more")
        return self._life.batch_size(whole)

    def deal(self, plan: DataPlan) -> DataDealing:
        """Deal the samples of these data among the peers that train; for `ElasticSampler`.

        From then on `step` counts as trained what was taken first.

        Raises:
            ConfigError: if this peer deals other data already.
        """
        is_new = self._life.dealing is None
        dealing = self._life.deal(plan)
        if is_new and self._life.began_at is not None:
            self._protocol.run(dealing.catch_up())
        return dealing

    @property
    def should_stop(self) -> bool:
        """True when the run has reached its end, or the process was asked to end (SIGTERM).

        Under a synchronous algorithm peers agree on the last step, and make it together.
        """
        return self._life.should_stop

    def step(
        self,
        *,
        samples: int = 1,
        loss: "float | Tensor | None" = None,
        clip: float | None = None,
        scaler: "GradScaler | None" = None,
        closure: "Callable[[], Any] | None" = None,  # Any: what the optimizer makes of it
    ) -> None:
        """End a step; stands where `optimizer.step()` stood.

        Args:
            samples: how many samples the gradients are the mean of, in any type of number;
                averages weigh them so. Always 0 for a peer that only serves (`PeerConfig.trains`).
            loss: for the record; a tensor of one element, too.
            clip: norm to clip gradients to, after they were averaged.
            scaler: of mixed precision; unscaled before averaging, updated after it.
            closure: computes loss and gradients again, for an optimizer that asks for it (LBFGS).

        Raises:
            ConfigError: for a closure where gradients are averaged, or beside a scaler: what it
                computes would be of this peer alone, and scaled; for LBFGS without one.
            StateError: if gradients or parameters are not finite, or a parameter was replaced.
            SystemExit: if the process was asked to end and the loop does not look at `should_stop`.
            LocalProtocolError: outside of the with block.
        """
        if self._life.began_at is None or self._has_left or os.getpid() != Peer._process:
            raise LocalProtocolError(
                "step belongs inside `with peer:`, in the process where the peer has joined"
            )
        if self._has_ended:
            raise LocalProtocolError("step after consensus, which ends training; call it last")
        count = whole_in("samples", samples)
        shown = None if loss is None else number_in("loss", loss)
        if not self._stepping.acquire(blocking=False):
            error = LocalProtocolError(
                "step is called by two threads at once; call it from the one that trains"
            )
            self._protocol.post(partial(self._life.driver.fail, error))  # a thread's end is no exit
            raise error
        try:
            life = self._life
            if life.driver.stopping and not life.driver.failure:
                self._steps_after_stop += 1
                if self._steps_after_stop > 1:
                    raise SystemExit(0)
            agreed = life.algorithm.averages == "gradients"  # whether there is an update, too
            if closure and (scaler or agreed):
                beside = (
                    "a scaler" if scaler else f"{self.config.algorithm}, which averages gradients"
                )
                raise ConfigError(
                    f"step: a closure computes gradients of this peer alone, unscaled, and cannot "
                    f"go with {beside}; leave it out, or take an algorithm that averages models"
                )
            finite = self.replica.unscale(scaler) if scaler else True
            if agreed:
                life.driver.agreed.contributes = life.driver.agreed.contributes and finite
            update: Callable[[], None] = partial(self.replica.optimizer_step, clip, closure)
            count, self._accumulated = count + self._accumulated, 0
            needs_all = self._uses_what_is_deferred()
            if not finite and not agreed:
                update = no_update
            _run_here(life.boundary.step(count, shown, update, clip=clip, needs_all=needs_all))
            if scaler:
                scaler.update()
            if self._hooked_for is not life.algorithm:
                self._hook()
        finally:
            self._stepping.release()

    def accumulate(self, *, samples: int = 1) -> None:
        """Count a backward pass whose gradients wait for the next `step`."""
        self._accumulated += whole_in("samples", samples)

    def before_forward(self, bucket: int) -> None:
        """The forward pass is about to use the parameters of this bucket; hooks say so."""
        _run_here(self._life.boundary.before_forward(bucket))

    def finish_update(self) -> None:
        """Make what is left of an update that is made behind the forward pass (`dear`).

        Only a program that reads parameters by itself between two steps needs it: forward passes,
        `state_dict` and leaving the ``with`` see the updated model anyway.
        """
        if self._life.is_listening:
            _run_here(self._life.boundary.finish_update())

    def state_dict(self) -> dict[str, Any]:  # Any: as torch has it
        """The model's ``state_dict``, tensors of their own, from any thread and after the end, too.

        Of parameters of 16 bits it has float32: live and pending, so that nothing is rounded away.
        """
        if not self._has_left:
            self.finish_update()
        return self.replica.state_dict()

    def consensus(self, timeout_s: float | None = None) -> dict[str, Any]:  # Any: as torch has it
        """End training, and return the mean model of all who are in, the same at all of them.

        Call it after the loop, inside of the ``with``: it waits until no peer trains any more. It
        is a ``state_dict`` as of `state_dict`, in which integer buffers are this peer's. The model
        itself stays as it is. `consensus_of` says whose models it is the mean of. Its tensors are
        parts of the one vector that was averaged, no copies: ``clone()`` one that you keep alone.

        Args:
            timeout_s: how long to wait; None: for as long as others train.

        Raises:
            TransportError: if others still train then, or this peer is asked to end.
            LocalProtocolError: outside of the with block, or if this peer does not know everyone
                (``view``).
        """
        life = self._life
        if life.began_at is None or self._has_left or os.getpid() != Peer._process:
            raise LocalProtocolError("consensus belongs inside `with peer:`, after the last step")
        if any(other._thread == self._thread and other is not self for other in self._entered):
            raise LocalProtocolError("consensus waits for all peers, and this thread has others")
        before, self._has_ended = life.driver.consensus.count, True
        _run_here(life.boundary.end())
        mean = self._protocol.run(life.driver.consensus.reach(before, timeout_s))
        self.consensus_of = dict(mean.weights)
        return self.replica.state_dict(mean.mean_M)

    def register_for_checkpoint(self, name: str, owner: StateOwner) -> None:
        """Keep the state of `owner` in checkpoints, and give it back on `resume`.

        Args:
            name: unique among those of this program.
            owner: has ``state_dict`` and ``load_state_dict`` of plain values and arrays: a sampler,
                a `GradScaler`, a scheduler. Saved on the thread that trains, and loaded when the
                ``with`` begins or, inside of it, at once.

        Raises:
            ConfigError: for a name that is taken.
            StateError: if `owner` refuses its state.
        """
        if name in self._life.owners or name in RESERVED:
            raise ConfigError(f"register_for_checkpoint: the name {name!r} is taken")
        self._life.owners[name] = owner
        if self._life.began_at is not None and self._life.driver.checkpoints:
            self._life.driver.checkpoints.load_own(name)

    def stop(self, why: str) -> None:
        """Ask the loop to end, from any thread or a signal handler; a wait in `step` ends."""
        self._life.stop(why)

    def advertise(self, address: str) -> None:
        """Have the others call this peer at `address` (``host:port``) from now on, from any thread.

        For a machine that gets another address while the peer trains. It listens where it did, so
        `listen` has to include the new address, as ``0.0.0.0`` does. Averages that run over
        connections to the old address end if that is gone, as when a member dies, and the peer
        stays a member.

        Raises:
            ConfigError: if it is no address, or this peer only dials out or has not started.
        """
        self._life.move(address)
        self.address = self._life.address

    def _uses_what_is_deferred(self) -> bool:
        """Whether the forward pass used a parameter that no module of it brought along."""
        forward = self._forward
        if forward is None:
            return False
        forward.next_step()
        if forward.stray and not self._warned_of_stray:
            self._warned_of_stray = True
            text = f"parameter {forward.stray} is used outside of its module's forward pass, so"
            self._metrics.record("warning", text=f"{text} updates are made at the boundary")
        return bool(forward.stray)

    # --- life -------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self._life.is_listening:
            raise LocalProtocolError("a Peer is for one `with`; make another one")
        Peer._process, self._thread = os.getpid(), threading.get_ident()
        self._protocol.start()
        try:
            self._protocol.run(self._arrive())
        except BaseException:
            self._protocol.run(self._life.abandon())
            self._protocol.stop()
            self._close_sinks()
            raise
        if threading.current_thread() is threading.main_thread():
            self._old_handler = signal.signal(
                signal.SIGTERM, lambda *_: self.stop("asked to end by SIGTERM")
            )
        self._hook()
        self._life.begin()
        self._entered.append(self)
        return self

    def _hook(self) -> None:
        """Hook into the model what the algorithm needs, which may have changed."""
        for hook in self._hooks:
            hook.remove()
        self._hooked_for, self._forward = self._life.algorithm, None
        may_load = self.averages == "models"
        self._hooks = self.replica.refuse_strays(
            lambda: self._stepping.locked() or self.replica.is_updating, may_load=may_load
        )
        if self._life.algorithm.overlaps == "both":
            assert self.buckets is not None
            self._forward = self.replica.defers_updates(
                self.buckets, self.before_forward, self.finish_update
            )
            self._hooks.extend(self._forward.handles)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        life, self._has_left = self._life, True
        if os.getpid() != Peer._process:
            return  # a forked child: nothing of the peer is in it but memory
        for hook in self._hooks:
            hook.remove()
        self._entered.remove(self)
        # One that waited for another of the same thread would wait for ever.
        beside = [peer for peer in self._entered if peer._thread == self._thread]
        _run_here(life.boundary.end(well=not error))
        asked = life.driver.stopping or bool(beside)
        why = f"{type(error).__name__}: {error}" if error else life.why_stopped or "the loop ended"
        try:
            self._protocol.run(life.depart(serve=not error and not asked and self.config.serve))
        except BaseException as other:  # interrupted: no server may outlive its loop
            self._protocol.run(life.leave(INTERRUPTED_GRACE_S))
            if not (error and isinstance(other, P2PTrainError)):
                raise  # or else what the program has raised says it
        finally:
            failure = None if error else life.driver.failure
            try:
                self._protocol.stop()
                life.record_end(f"{type(failure).__name__}: {failure}" if failure else why)
                self._close_sinks()
                with suppress(*((DeviceError,) if error else ())):  # it has said so already
                    self.replica.release()
            finally:  # not before: a second SIGTERM may not keep the end from being written
                if self._old_handler is not None:
                    signal.signal(signal.SIGTERM, self._old_handler)
        if failure:
            raise failure  # it came after the last step: no exit code may hide it

    async def _arrive(self) -> None:
        config, life = self.config, self._life
        for sink in self._sinks:
            if isinstance(sink, PrometheusMetrics):
                host = config.listen.rpartition(":")[0].strip("[]")
                self.metrics_address = sink.serve(host, config.metrics_port or 0)
        entry = await enter(config, self.name, time.time)
        if entry.warning:
            say(entry.warning)
        swarm = keyring_of(entry)
        keys = KeyService(swarm, time.time) if swarm else None
        transport = GrpcTransport(
            config.listen,
            config.advertise,
            config.network,
            security=entry.security,
            keys=keys,
            name=self.name,
        )
        self.address = await life.listen(transport, self._metrics)
        transport.service = PeerService(life.driver, self._board, transport)
        if swarm and keys:
            care = KeyCare(life.driver, transport, swarm, keys.lasts_s)
            keys.find_signers = care.signers
            life.driver.start(care.repeat())
        if entry.token:
            say(welcome(self.address, entry.token))
        if config.ui_port is not None:
            asks = asking_with(entry, config.network)
            page = asyncio.to_thread(page_of, transport.listens_at, config.ui_port, asks)
            self._sinks.append(await page)
        await life.join()

    def _close_sinks(self) -> None:
        for sink in self._sinks:
            with suppress(OSError):  # what it said of that is in the others
                sink.close()


LOOPS_KEPT = 16
"""Event loops of peers that have ended last stay open, as gRPC has one thread per process for the
events of all loops: with one for a loop that is closed that thread ends, and no other peer of the
process hears anything any more."""

_stopped = deque[asyncio.AbstractEventLoop]()


@atexit.register
def _close_stopped() -> None:
    while _stopped:
        _stopped.popleft().close()


class _ProtocolThread:
    """An event loop on its own thread, and one worker thread for copies."""

    _is_over = False

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._workers = ThreadPoolExecutor(1, thread_name_prefix="p2ptrain-copies")
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="p2ptrain-disk")
        self._thread = threading.Thread(target=self._main, name="p2ptrain-protocol", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:  # Any: asyncio's own types
        """Run `work` over there; block until its result is here.

        Raises RuntimeError if the thread has ended.
        """
        if self._is_over:
            work.close()
            raise RuntimeError("the event loop of this peer has ended")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def call(self, work: Coroutine[Any, Any, T]) -> T:  # Any: as above
        return self.run(work)

    def post(self, function: Callable[[], object]) -> None:
        if not self._is_over:
            self._loop.call_soon_threadsafe(function)

    def executor(self, function: Callable[[], T], /) -> Awaitable[T]:
        return self._loop.run_in_executor(self._workers, function)

    def disk(self, function: Callable[[], T], /) -> Awaitable[T]:
        return self._loop.run_in_executor(self._disk, function)

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
        self._disk.shutdown()
        self._is_over = True
        _stopped.append(self._loop)
        if len(_stopped) > LOOPS_KEPT:
            _stopped.popleft().close()


def _run_here(work: Coroutine[Any, Any, T]) -> T:  # Any: asyncio's own types
    """Run a coroutine on this thread, without a loop: what it awaits blocks, as `call` does."""
    try:
        work.send(None)
    except StopIteration as ended:
        result: T = ended.value
        return result
    raise LocalProtocolError(f"{work} waits for an event loop, and this thread has none")


def _config_from(settings: dict[str, Any]) -> PeerConfig:  # Any: the fields of PeerConfig
    known = [f.name for f in fields(PeerConfig)]
    for key in settings:
        if key not in known:
            advice = suggestion(key, known) or f"known: {', '.join(known)}"
            raise ConfigError(f"Peer has no setting {key!r}; {advice}")
    if isinstance(settings.get("join"), str):
        settings["join"] = (settings["join"],)
    check_types("Peer", PeerConfig, settings)
    return PeerConfig(**{**settings, "join": tuple(settings.get("join", ()))})
