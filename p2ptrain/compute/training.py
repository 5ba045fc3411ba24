"""How built-in tasks are trained: forward and backward of a batch, by a schedule of rates.

The loop around it is `compute/steps.py`; `train` runs it on the caller's thread. The optimizer's
step is not here: it is the peer's, which does what its algorithm asks before and after it
(`Replica.update`). Clock and sleep are arguments, so that a test runs a slow fleet in no time; a
program passes ``time.perf_counter`` and ``time.sleep``.
"""

import math
import zlib
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from p2ptrain.compute.buckets import Buckets
from p2ptrain.compute.dealt import DealsData
from p2ptrain.compute.devices import explained
from p2ptrain.compute.elastic_sampler import ElasticSampler
from p2ptrain.compute.replica import StateOwner
from p2ptrain.compute.resized import Resized
from p2ptrain.compute.step_timing import StepTiming
from p2ptrain.compute.steps import TrainingPeer, serve_others, take_steps
from p2ptrain.compute.tasks import Batch, IndexedTask, Task
from p2ptrain.compute.training_config import TrainingConfig
from p2ptrain.errors import ConfigError, InvariantViolation, StateError
from p2ptrain.ids import PeerId, Seconds


class SteppingPeer(TrainingPeer, DealsData, Protocol):
    """What the loop needs of a peer whose steps block."""

    def before_forward(self, bucket: int) -> None:
        """The forward pass is about to use the parameters of this bucket."""
        ...

    def register_for_checkpoint(self, name: str, owner: StateOwner) -> None:
        """Keep the state of `owner` in checkpoints, and give it back when a run goes on."""
        ...

    def step(self, *, samples: int, loss: float | None = None, clip: float | None = None) -> None:
        """The boundary: average, clip, update, count. Gradients are ready."""
        ...


def build_optimizer(model: nn.Module, config: TrainingConfig) -> Optimizer:
    """The optimizer that `config` describes."""
    if config.optimizer == "adamw":
        return AdamW(
            model.parameters(),
            lr=config.learning_rate,
            betas=(config.momentum, config.second_momentum),
            weight_decay=config.weight_decay,
        )
    return SGD(
        model.parameters(),
        lr=config.learning_rate,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
    )


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """Give all parameters the same learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate


class Learner:
    """Gradients of one peer's batches; implements `Work`.

    Args:
        task: gives the batches of `rank` among `peers`, drawn from `seed`; where batches go by
            speed, those of all data, in an order that `me` decides.
        model: a replica of the task's model.
        optimizer: over `model`; here its gradients are zeroed and its learning rate is set.
        config: batch size and learning rate; the rest went into `optimizer`.
        me: names this peer in errors.
        rank: this peer's place in shards, 0 to ``peers - 1``.
        peers: how many there are by the run's plan.
        seed: the run's, shared by all peers.
        end_samples: of the whole swarm, when the run ends by them; where the schedule leads.

    Raises:
        ConfigError: if there are more peers than samples, or the schedule does not fit the end.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        optimizer: Optimizer,
        config: TrainingConfig,
        *,
        me: PeerId,
        rank: int,
        peers: int,
        seed: int,
        end_samples: int | None,
    ) -> None:
        config.check(end_samples)
        self._task = task
        self._model = model
        self._optimizer = optimizer
        self._config = config
        self._me = me
        self._end_samples = end_samples
        self.batch_size = config.batch_size
        self.by_speed = config.batches == "by_speed"
        if self.by_speed and config.data == "shards":
            # shards of one size would give the data of fast peers more say
            rank, peers, seed = 0, 1, zlib.crc32(f"{seed}/{me}".encode())
        self._seed = seed
        self._sampler: ElasticSampler | None = None
        self._dealt: tuple[IndexedTask, Iterator[int]] | None = None
        if config.data == "elastic" and not isinstance(task, IndexedTask):
            raise ConfigError(
                f"data = 'elastic': the samples of {type(task).__name__} have no numbers; give it "
                "`samples` and `batch_of`, or leave data = 'shards'"
            )
        self._data, self._taken = [rank, peers, config.batch_size, seed], 0
        self._batches = task.batches(rank, peers, config.batch_size, seed)
        self._resized = Resized(self._batches)

    def draw_from(self, peer: DealsData) -> None:
        """Draw samples from the data that `peer` deals, if the configuration says so."""
        if self._config.data == "elastic":
            assert isinstance(self._task, IndexedTask)
            self._sampler = ElasticSampler(self._task.samples, peer, seed=self._seed)
            self._dealt = self._task, self._sampler.endless()

    def state_dict(self) -> dict[str, Any]:  # Any: plain values
        """How far it is in its data, and whose data that is; of dealt data, what was trained."""
        if self._sampler:
            return {"dealt": self._sampler.state_dict()}
        return {"data": self._data, "taken": self._taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # Any: as above
        """Go on behind the samples that were taken.

        Another place among another number of peers has other data, which begin anew; so do data
        that are dealt now and were not, or the other way round.
        """
        if self._sampler and "dealt" in state:
            self._sampler.load_state_dict(state["dealt"])
        if self._sampler or state.get("data") != self._data:
            return
        left = state["taken"] - self._taken
        while left > 0:
            left -= len(self._take(min(left, self.batch_size))[1])

    @explained()
    def compute(self, step: int, samples: int) -> tuple[int, float | None]:
        """Forward and backward of the next batch; its samples, and its loss.

        Raises:
            StateError: if the loss is not finite; no such gradient has left this peer.
            ConfigError: if there is no batch of so many samples.
            DeviceError: if there is no memory left for it, or the device has failed.
        """
        batch = self._take(samples)
        self._optimizer.zero_grad()
        loss = self._task.loss(self._model, batch)
        value = float(loss.detach())
        if not math.isfinite(value):
            rate = float(self._optimizer.param_groups[0]["lr"])
            raise StateError(
                f"{self._me}: the loss of step {step} is {value}; "
                f"lower learning_rate (now {rate:g})"
            )
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types here
        return len(batch[1]), value

    def _take(self, samples: int) -> Batch:
        if self._dealt:
            task, indices = self._dealt
            return task.batch_of(list(islice(indices, samples)), self._seed)
        batch = self._resized.take(samples) if self.by_speed else next(self._batches)
        self._taken += len(batch[1])
        return batch

    def prepare(self, progress: int) -> None:
        """Set the rate anew, whatever rate came with another peer's optimizer state."""
        set_rate(self._optimizer, self._config.rate_at(progress, self._end_samples))


def train(
    task: Task,
    model: nn.Module,
    optimizer: Optimizer,
    peer: SteppingPeer,
    config: TrainingConfig,
    pace: StepTiming,
    *,
    me: PeerId,
    rank: int,
    peers: int,
    seed: int,
    end_samples: int | None = None,
    clock: Callable[[], Seconds],
    sleep: Callable[[Seconds], None],
    trains: bool = True,
) -> None:
    """Train until the peer should stop, on this thread; arguments as of `Learner`, `take_steps`.

    `peer` is the one around `model`; its `step` is called once for each batch, gradients ready.
    `sleep` blocks for so many of the clock's seconds, and leaves the processor free. Unless it
    `trains`, the peer only serves.

    Raises:
        StateError: if the loss is not finite.
        ConfigError: if `rank`, `peers` or the stragglers do not fit together, or the schedule and
            the end.
    """
    where = {"rank": rank, "peers": peers, "seed": seed}
    pace.check(peers)
    learner = Learner(task, model, optimizer, config, me=me, end_samples=end_samples, **where)
    learner.draw_from(peer)
    peer.register_for_checkpoint("task", learner)

    async def nap(duration_s: Seconds) -> None:
        sleep(duration_s)

    calling = _Calling(peer, config.clip)
    with threads(config.threads):
        if trains:
            _at_once(take_steps(learner, calling, pace, **where, clock=clock, sleep=nap))
        else:
            _at_once(serve_others(learner, calling))


class _Calling:
    """A peer whose step blocks, as one that is awaited."""

    def __init__(self, peer: SteppingPeer, clip: float | None) -> None:
        self._peer = peer
        self._clip = clip

    @property
    def should_stop(self) -> bool:
        return self._peer.should_stop

    @property
    def progress(self) -> int:
        return self._peer.progress

    @property
    def buckets(self) -> Buckets | None:
        return self._peer.buckets

    def batch_size(self, usual: int) -> int:
        return self._peer.batch_size(usual)

    async def before_forward(self, bucket: int) -> None:
        self._peer.before_forward(bucket)

    async def step(self, samples: int, loss: float | None) -> None:
        self._peer.step(samples=samples, loss=loss, clip=self._clip)


def _at_once(work: Coroutine[Any, Any, None]) -> None:  # Any: it never yields, nor is sent anything
    """Run a coroutine that blocks where others would wait: it ends before it yields anything."""
    try:
        work.send(None)
    except StopIteration:
        return
    raise InvariantViolation("a loop on the caller's thread waited for an event loop")


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Set torch's threads, and give the process back its own afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
