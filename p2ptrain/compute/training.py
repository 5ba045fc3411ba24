"""The loop for built-in tasks: forward, backward, the pace, then the peer.

The optimizer's step is not here: it is the peer's, which does what its algorithm asks before and
after it (`Replica.update`). Clock and sleep are arguments, so that a test runs a slow fleet in no
time; a program passes ``time.perf_counter`` and ``time.sleep``.

A step is cut short only while it sleeps: once the peer should stop, a straggler leaves within
`SLICE_S` seconds, and what it was computing is dropped, for it would have come too late.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from p2ptrain.compute.pace import Pace
from p2ptrain.compute.tasks import Batch, Task
from p2ptrain.errors import ConfigError, StateError
from p2ptrain.ids import PeerId, Seconds

SLICE_S: Seconds = 0.05
"""A sleeping step asks this often whether it should stop."""


class SteppingPeer(Protocol):
    """What the loop needs of a peer."""

    @property
    def should_stop(self) -> bool:
        """True once the run has reached its end."""
        ...

    def step(self, *, samples: int, loss: float | None = None) -> None:
        """The boundary: average, update, count. Gradients are ready."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """How a built-in task is trained: SGD with momentum."""

    batch_size: int = 32
    """Samples of one peer's step. Too small: noisy gradients, and the boundary costs more than the
    step. Too large: fewer updates from the same samples."""

    learning_rate: float = 0.05
    """Too small: slow. Too large: the loss becomes NaN, which ends the run with a message."""

    momentum: float = 0.9
    """0 is plain SGD. Towards 1 updates carry on for longer; lower `learning_rate` with it."""

    weight_decay: float = 0.0
    """Pull of each update towards zero, as a share of the parameter. Too large: underfits."""

    threads: int = 1
    """Processor threads of one peer's torch. More than the cores over the peers of a machine: they
    slow each other down."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "threads"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name} = {value} must be 1 or more")
        for name in ("learning_rate", "weight_decay"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name} = {value} must be a number, 0 or more")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum = {self.momentum} must be at least 0 and below 1")


def build_optimizer(model: nn.Module, config: TrainingConfig) -> Optimizer:
    """The optimizer that `config` describes."""
    return SGD(
        model.parameters(),
        lr=config.learning_rate,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
    )


def train(
    task: Task,
    model: nn.Module,
    optimizer: Optimizer,
    peer: SteppingPeer,
    config: TrainingConfig,
    pace: Pace,
    *,
    me: PeerId,
    rank: int,
    peers: int,
    seed: int,
    clock: Callable[[], Seconds],
    sleep: Callable[[Seconds], None],
) -> None:
    """Train until the peer should stop, on this thread.

    Args:
        task: gives the batches of `rank` among `peers`, drawn from `seed`.
        model: a replica of the task's model, the one behind `peer`.
        optimizer: over `model`; only its gradients are zeroed here.
        peer: `step` is called once for each batch, gradients ready.
        config: batch size and threads; the rest went into `optimizer`.
        pace: how long each step is made to last.
        me: names this peer in errors.
        rank: this peer's place in shards and pace, 0 to ``peers - 1``.
        peers: how many there are by the run's plan.
        seed: the run's, shared by all peers.
        clock: any monotonic clock.
        sleep: waits so many of its seconds and leaves the processor free.

    Raises:
        StateError: if the loss is not finite; no such gradient has left this peer.
        ConfigError: if `rank`, `peers` or the stragglers do not fit together.
    """
    pace.check(peers)
    batches = task.batches(rank, peers, config.batch_size, seed)
    with threads(config.threads):
        step = 0
        while not peer.should_stop:
            started = clock()
            batch = next(batches)
            optimizer.zero_grad()
            loss = _backward(task, model, batch, me, step, optimizer)
            compute_s = clock() - started
            duration_s = pace.step_s(compute_s, rank, step, peers, seed)
            if not _slept_until(started + duration_s, peer, clock, sleep):
                return
            peer.step(samples=len(batch[1]), loss=loss)
            step += 1


def _backward(
    task: Task, model: nn.Module, batch: Batch, me: PeerId, step: int, optimizer: Optimizer
) -> float:
    """Forward and backward of one batch; the loss as a number."""
    loss = task.loss(model, batch)
    value = float(loss.detach())
    if not math.isfinite(value):
        rate = float(optimizer.param_groups[0]["lr"])
        raise StateError(
            f"{me}: the loss of step {step} is {value}; lower learning_rate (now {rate:g})"
        )
    loss.backward()  # type: ignore[no-untyped-call]  # torch has no types here
    return value


def _slept_until(
    end: Seconds,
    peer: SteppingPeer,
    clock: Callable[[], Seconds],
    sleep: Callable[[Seconds], None],
) -> bool:
    """Sleep in slices; False if the peer should stop before `end`."""
    while (left_s := end - clock()) > 0:
        if peer.should_stop:
            return False
        sleep(min(left_s, SLICE_S))
    return True


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Set torch's threads, and give the process back its own afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
