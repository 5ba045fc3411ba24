"""Define how a task is trained: batch size, optimizer, and a schedule of rates.

The learning rate follows the samples of the whole swarm, not this peer's steps: a slow peer and a
newcomer are where everyone is. It is set before each step, so that a rate which came with another
peer's optimizer state does not stay::

    rate ^       learning_rate
         |    .------______                     cosine: falls to a tenth of it at `stop.samples`
         |   /             ----___              constant: stays
         |  /                     ----_____
         +--+----------------------------+----> samples of the swarm
            warmup_samples               stop.samples
"""

import math
from dataclasses import dataclass
from typing import Literal

from p2ptrain.errors import ConfigError

FINAL_SHARE = 0.1
"""Where a cosine schedule ends. Not at 0: the last samples are to be learned from too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """How a task is trained by ``p2ptrain peer`` and the launcher."""

    batch_size: int = 32
    """Samples of one peer's step. Too small: noisy gradients, and the boundary costs more than the
    step. Too large: fewer updates from the same samples. With `by_speed`, their mean."""

    batches: Literal["equal", "by_speed"] = "equal"
    """`by_speed`: a slow peer has a smaller batch and a fast one a larger one, so that their steps
    last equally long; together they have as many samples as with equal ones. For algorithms whose
    peers take the same steps and average gradients. Each peer goes through all of the data: with
    shards, that of a fast peer would have more say. So it is wrong where data has to stay where it
    is, and useless where it changes from step to step who is slow."""

    data: Literal["shards", "elastic"] = "shards"
    """`elastic`: an epoch of all data is dealt among the peers that are there, and dealt again when
    one comes or goes, so that each sample is trained once in each epoch, whatever happens to peers.
    `shards`: each peer has its own share from the start to the end, also while others are missing.
    With `elastic` data must be able to be anywhere; the same at all peers."""

    optimizer: Literal["sgd", "adamw"] = "sgd"
    """`adamw` for transformers; its moments stay with each peer, only parameters are averaged."""

    learning_rate: float = 0.05
    """Too small: slow. Too large: the loss becomes NaN, which ends the run with a message.
    A few thousandths suit `adamw`."""

    momentum: float = 0.9
    """0 is plain SGD. Towards 1 updates carry on for longer; lower `learning_rate` with it. Under
    `adamw` the decay of the first moment (beta 1)."""

    second_momentum: float = 0.99
    """Under `adamw` the decay of the second moment (beta 2). Towards 1: steadier, and slow to
    notice that gradients have shrunk, which a run of a few thousand steps cannot wait for."""

    weight_decay: float = 0.0
    """Pull of each update towards zero, as a share of the parameter. Too large: underfits."""

    clip: float | None = None
    """Norm to which gradients are clipped, after they were averaged. Too small: every step has
    the same length, whatever the gradient says. None: not at all."""

    warmup_samples: int = 0
    """Samples of the swarm over which the rate rises from near 0. Too small: `adamw` throws a
    fresh transformer far off at once. Too large: time lost."""

    schedule: Literal["constant", "cosine"] = "constant"
    """What the rate does after that; `cosine` needs `stop.samples`."""

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
        for name in ("momentum", "second_momentum"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ConfigError(f"{name} = {value} must be at least 0 and below 1")
        if self.clip is not None and not self.clip > 0:
            raise ConfigError(f"clip = {self.clip} must be above 0; leave it out for no clipping")
        if self.warmup_samples < 0:
            raise ConfigError(f"warmup_samples = {self.warmup_samples} must be 0 or more")

    def check(self, end_samples: int | None) -> None:
        """Refuse a schedule that does not fit a run of so many samples.

        Raises:
            ConfigError: naming both values.
        """
        if self.schedule == "cosine" and end_samples is None:
            raise ConfigError(
                "schedule = 'cosine' needs to know the end of the run: set stop.samples"
            )
        if end_samples is not None and self.warmup_samples >= end_samples:
            raise ConfigError(
                f"warmup_samples = {self.warmup_samples} must be below stop.samples = {end_samples}"
            )

    def rate_at(self, progress: int, end_samples: int | None) -> float:
        """The learning rate of a step that begins after `progress` samples of the swarm."""
        if progress < self.warmup_samples:
            # A step of this peer ahead: the first one should move the model too.
            return self.learning_rate * min(1, (progress + self.batch_size) / self.warmup_samples)
        if self.schedule == "constant" or end_samples is None:
            return self.learning_rate
        way = min(1, (progress - self.warmup_samples) / (end_samples - self.warmup_samples))
        share = FINAL_SHARE + (1 - FINAL_SHARE) * (1 + math.cos(math.pi * way)) / 2
        return self.learning_rate * share
