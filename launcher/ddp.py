"""Run torch's DistributedDataParallel on Gloo, the external baseline of every speed claim.

``python -m p2plab.ddp --config peer.toml`` is one rank. It reads the same `RunConfig` as a peer,
takes task, model, optimizer, shards and pace from `p2ptrain.compute`, and writes the same records
(`p2ptrain.runtime.metrics`), so that tables, claims and reports treat ``ddp`` like any other row.
This is the one file outside `p2ptrain.compute` that imports torch.

**Fair to DDP.** DDP keeps its overlap: its own reducer reduces gradients in buckets during the
backward pass. Nothing else is sent, with one exception: if the run ends after a number of seconds,
ranks must agree on the end, so one number is reduced beside each step, off its critical path.

**Where a straggler sleeps.** A stretched step sleeps between forward and backward, and the backward
pass is not interrupted: its buckets leave late, as from a slow device, and overlap as usual. The
duration of the backward pass must then be known before it runs; that of the last step is the
estimate, so that a step without a network would last as long as `StepTiming.step_s` says.
(Rejected: sleeping after the backward pass. The gradients would already be in flight, and the slow
rank would slow no other rank.)

**What is waiting.** DDP asks a hook to reduce each bucket. The moment at which the last bucket is
handed over is the end of computing; from there to the end of ``backward`` the rank waits for its
network and for others (``wait_s``). The hook is torch's own all-reduce, with a clock before it::

    forward ── sleep ── backward ........................ optimizer
                          bucket 1 ▸ ... last bucket ▸
                          └──────── exchange_s ────────┘
                                                └wait_s┘

``exchange_s`` of a group record lasts from the first bucket to the end, so it contains the wait for
the slowest rank, which Gloo does not report separately. Bytes are those of a ring, ``2 (n-1)/n`` of
the gradients each way; Gloo does not count them.

**Losing a rank.** DDP cannot continue: the other ranks fail in their next reduction, and the run
ends with one sentence and exit code 1.
"""

import argparse
import asyncio
import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket  # torch.distributed's own, with types
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from p2ptrain import exit_codes
from p2ptrain.compute.devices import accelerators, choose_device
from p2ptrain.compute.snapshots import SnapshotWriter
from p2ptrain.compute.steps import SLICE_S
from p2ptrain.compute.tasks import Batch, Task, load_task
from p2ptrain.compute.torch_replica import TorchReplica
from p2ptrain.compute.training import build_optimizer, set_rate, threads
from p2ptrain.config import RunConfig, load_toml
from p2ptrain.errors import P2PTrainError, StateError
from p2ptrain.ids import Seconds
from p2ptrain.runtime.accounts import Accounts, TrainerTotals, record_end
from p2ptrain.runtime.metrics import JsonlMetrics
from p2ptrain.runtime.settings import StopConfig

RANK_LOST = 1

_LAST_WORDS_S: Seconds = 1.0
"""How long after a broken connection this rank's own SIGTERM may arrive: the launcher signals ranks
in turn."""


class RankLost(P2PTrainError):
    """Another rank was lost; DDP cannot go on."""


@dataclass(slots=True)
class BucketClock:
    """Reduces buckets as DDP itself would, and keeps the times and bytes of one backward pass."""

    group: dist.ProcessGroup
    handed_over: list[Seconds] = field(default_factory=list)
    sent_bytes: int = 0

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """DDP's communication hook."""
        self.handed_over.append(time.monotonic())
        buffer = bucket.buffer()
        gradient_bytes = buffer.numel() * buffer.element_size()
        ranks = self.group.size()
        self.sent_bytes += 2 * gradient_bytes * (ranks - 1) // ranks
        return allreduce_hook(self.group, bucket)

    def begin(self) -> None:
        """A backward pass begins."""
        self.handed_over.clear()
        self.sent_bytes = 0


class Rank:
    """One rank of a DDP run: the loop of `p2ptrain.compute.training.train`, with DDP in it."""

    def __init__(self, config: RunConfig, group: dist.ProcessGroup) -> None:
        self._config = config
        self._task: Task = load_task(config.task, config.task_options)
        device = choose_device(config.device, config.rank, accelerators())
        model = self._task.build_model(config.seed).to(device)
        self._optimizer = build_optimizer(model, config.training)
        # The same flat vector as in a peer's snapshots; DDP wraps its views.
        self.replica = TorchReplica(model, self._optimizer)
        self._clock = BucketClock(group)
        self._ddp = _wrap(model, self._clock)
        self._end = End(config.stop, config.training.batch_size * config.peers)
        self._metrics = JsonlMetrics(Path(config.out) / f"{config.name}.jsonl", time.monotonic)
        self._backward_s: Seconds = 0.0
        self._updated = threading.Event()
        self.totals = TrainerTotals()
        self._accounts = Accounts()

    def run(self) -> None:
        """Train to the end and write all records."""
        config, path = self._config, Path(self._config.out) / f"{self._config.name}.snapshots"
        self._record_start()
        writer = SnapshotWriter(
            path,
            self.replica,
            self._metrics.record,
            _at_once,
            time.time,
            config.snapshot_every_s,
            config.snapshot_mb * 1e6,
            self._wait_for_update,
        )
        dist.barrier()
        self._metrics.record("ready", members=_names(config))
        with threads(config.training.threads), _snapshots(writer):
            self._train()
        record_end(self._metrics, self.totals, self._accounts, self._end.why or "the loop ended")
        self._metrics.close()

    async def _wait_for_update(self) -> None:
        await asyncio.to_thread(self._updated.wait, SLICE_S)
        self._updated.clear()

    def _train(self) -> None:
        config = self._config
        batches = self._task.batches(
            config.rank, config.peers, config.training.batch_size, config.seed
        )
        self._end.begin()
        while not self._end.is_reached(self.totals.steps):
            if not self._step(next(batches)):
                return

    def _step(self, batch: Batch) -> bool:
        """One step; False if this rank was asked to leave in the middle of it."""
        began = time.monotonic()
        self._optimizer.zero_grad()
        loss = self._task.loss(self._ddp, batch)
        value = self._checked(loss)
        forward_s = time.monotonic() - began
        if not self._sleep_until(began + self._duration_s(forward_s) - self._backward_s):
            return False
        backward_at = time.monotonic()
        if not self._backward(loss):
            return False
        reduced_at = time.monotonic()
        computed_at = self._clock.handed_over[-1]
        self._backward_s = computed_at - backward_at
        self._update()
        wait_s = reduced_at - computed_at
        compute_s = time.monotonic() - began - wait_s
        self.totals.count(len(batch[1]), value, compute_s, wait_s, self._metrics)
        self._record_group(reduced_at - self._clock.handed_over[0])
        return True

    def _update(self) -> None:
        training, stop = self._config.training, self._config.stop
        progress = self.totals.samples * self._config.peers
        set_rate(self._optimizer, training.rate_at(progress, stop.samples))
        self.replica.update(lambda: self.replica.optimizer_step(training.clip))
        self._updated.set()

    def _checked(self, loss: Tensor) -> float:
        value = float(loss.detach())
        if not math.isfinite(value):
            raise StateError(
                f"{self._config.name}: the loss of step {self.totals.steps} is {value}; "
                f"lower learning_rate (now {self._config.training.learning_rate:g})"
            )
        return value

    def _backward(self, loss: Tensor) -> bool:
        """Average the gradients; False if that failed because all ranks are leaving."""
        self._clock.begin()
        try:
            loss.backward()  # type: ignore[no-untyped-call]  # torch has no types here
        except RuntimeError as error:
            if self._end.was_asked_within(_LAST_WORDS_S):
                return False
            raise RankLost(
                f"a rank was lost after {self.totals.steps} steps, and "
                f"DistributedDataParallel cannot go on without it ({_first_line(error)})"
            ) from error
        return True

    def _duration_s(self, forward_s: Seconds) -> Seconds:
        config, step = self._config, self.totals.steps
        compute_s = forward_s + self._backward_s
        return config.pace.step_s(compute_s, config.rank, step, config.peers, config.seed)

    def _sleep_until(self, end: Seconds) -> bool:
        while (left_s := end - time.monotonic()) > 0:
            if self._end.was_asked:
                return False
            time.sleep(min(left_s, SLICE_S))
        return True

    def _record_group(self, exchange_s: Seconds) -> None:
        accounts, sent_bytes = self._accounts, self._clock.sent_bytes
        self._metrics.record(
            "group",
            ticket=f"ddp#{self.totals.steps}",
            members=_names(self._config),
            what="gradients",
            outcome="done",
            reason="",
            wait_s=0.0,
            exchange_s=exchange_s,
            sent_bytes=sent_bytes,
            received_bytes=sent_bytes,
            consensus_distance_l2=None,
            staleness_steps=None,
        )
        accounts.groups_formed += 1
        accounts.comm_s += exchange_s
        accounts.sent_bytes += sent_bytes
        accounts.received_bytes += sent_bytes

    def _record_start(self) -> None:
        config = self._config
        self._metrics.record(
            "started",
            unix_s=time.time(),
            peer=config.name,
            rank=config.rank,
            address=_master(config),
            algorithm=config.algorithm,
            device=self.replica.device,
            model_size=self.replica.model_size,
            fingerprint=self.replica.fingerprint,
        )


class End:
    """Decides the last step: the same step for all ranks, or at once on SIGTERM."""

    def __init__(self, stop: StopConfig, samples_per_step: int) -> None:
        self._steps = None if stop.samples is None else math.ceil(stop.samples / samples_per_step)
        self._samples_per_step = samples_per_step
        self._seconds = stop.seconds
        self._vote: tuple[Tensor, dist.Work] | None = None
        self._began: Seconds = 0.0
        self._asked = threading.Event()
        self.why = ""

    def begin(self) -> None:
        """The first step begins; from now on SIGTERM ends the run."""
        signal.signal(signal.SIGTERM, self._on_sigterm)
        self._began = time.monotonic()

    @property
    def was_asked(self) -> bool:
        """True once this process was asked to leave."""
        return self._asked.is_set()

    def was_asked_within(self, seconds: Seconds) -> bool:
        """Wait this long for a request to leave."""
        return self._asked.wait(seconds)

    def is_reached(self, steps: int) -> bool:
        """True if no step is to follow the first `steps`."""
        if self._asked.is_set():
            return True
        if self._steps is not None and steps >= self._steps:
            self.why = f"the swarm has trained {steps * self._samples_per_step} samples"
        elif self._seconds is not None and self._are_seconds_over(self._seconds):
            self.why = f"{self._seconds:g} s are over"
        return bool(self.why)

    def _are_seconds_over(self, limit_s: Seconds) -> bool:
        """Ask all ranks whether the time of one is over.

        The answer is that to the previous step's question, so that no rank waits for it.
        """
        before, is_over = self._vote, time.monotonic() - self._began >= limit_s
        flag = torch.tensor([float(is_over)])
        work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, async_op=True)
        assert work is not None  # an asynchronous operation always has a handle
        self._vote = (flag, work)
        if before is None:
            return False
        before[1].wait()
        return bool(before[0].item())

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        self.why = "asked to end by SIGTERM"
        self._asked.set()


def run_rank(config: RunConfig) -> None:
    """Join the other ranks, train, and leave.

    Raises:
        RankLost: if another rank is lost.
        P2PTrainError: for a mistake of the user's, in one sentence.
    """
    # Otherwise Gloo looks up the machine's own name, which may not resolve.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{_master(config)}",
        rank=config.rank,
        world_size=config.peers,
    )
    assert dist.group.WORLD is not None  # it was just made
    Rank(config, dist.group.WORLD).run()
    dist.destroy_process_group()


def _wrap(model: nn.Module, clock: BucketClock) -> DistributedDataParallel:
    def hook(state: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        return clock.reduce(bucket)  # torch insists on a function with these two names

    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, hook)
    return ddp


def _master(config: RunConfig) -> str:
    """The rendezvous address: the backend lets the first rank listen there."""
    return config.join[0] if config.join else config.listen


def _names(config: RunConfig) -> list[str]:
    """All ranks' names; the launcher gives all of them the same length."""
    digits = len(config.name) - 1
    return [f"p{rank:0{digits}}" for rank in range(config.peers)]


@contextmanager
def _snapshots(writer: SnapshotWriter) -> Iterator[None]:
    """Write rows, and one at the end; on a thread, as peers do."""
    done = threading.Event()

    async def write() -> None:
        writing = asyncio.ensure_future(writer.repeat())
        await asyncio.to_thread(done.wait)
        writing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await writing
        await writer.write()

    with ThreadPoolExecutor(1, "ddp-snapshots") as executor:
        written = executor.submit(asyncio.run, write())
        try:
            yield
        finally:
            done.set()
        written.result()  # raises what kept a row from being written


async def _at_once(function: Callable[[], int]) -> int:
    """In place of a copy executor, for a thread without other work."""
    return function()


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def main() -> None:
    """Entry point of ``python -m p2plab.ddp``."""
    parser = argparse.ArgumentParser(description="One rank of DistributedDataParallel on Gloo.")
    parser.add_argument("--config", type=Path, required=True, help="a peer's TOML file")
    try:
        run_rank(load_toml(RunConfig, parser.parse_args().config))
    except P2PTrainError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        # Not sys.exit: threads of a broken Gloo may keep the interpreter from ending.
        os._exit(RANK_LOST if isinstance(error, RankLost) else exit_codes.MISTAKE)


if __name__ == "__main__":
    main()
