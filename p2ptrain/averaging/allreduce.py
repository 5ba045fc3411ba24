"""Synchronous all-reduce SGD: at every step all peers average their gradients.

    g  <-  sum over peers i of n_i g_i / sum of n_i      n_i: samples of its step
    x  <-  x - lr * update(g)

All peers start with equal models, apply the same mean and stay equal: P peers behave like one peer
with all of their batches. A step lasts as long as that of the slowest peer. This is the baseline of
all other algorithms (Li et al., PyTorch Distributed, VLDB 2020, section 2.2).

The group is scheduled, not claimed: all living peers, once per version (`core/barrier.py`).
Reduce-scatter and all-gather move 2 n (P - 1) / P words (`core/shards.py`). If a member dies during
an average, the others repeat it once, without that member.

With ``overlap = "backward"`` gradients travel in buckets, each as soon as the backward pass has
made it (section 3.2.3 there; `runtime/overlap.py`). The result is the same to the last bit.
"""

from dataclasses import dataclass

from p2ptrain.averaging import Algorithm, ConfigError, Swarm, check_bucket

OVERLAPS = "none", "backward"


class AllReduce(Algorithm):
    averages = "gradients"
    trainer_waits = True
    in_step = True

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """What the exchange of gradients is hidden behind."""

        overlap: str = "none"
        """``none``: gradients travel when the backward pass is over; ``backward``: while it runs.
        That pays where the exchange takes a good part of a step."""

        bucket_mib: float = 0.0
        """With overlap: MiB of gradients that travel together; 0: tuned while training, from a
        sixteenth of them on. Too small: messages cost more than they hide; too large: little is
        hidden."""

        def __post_init__(self) -> None:
            if self.overlap not in OVERLAPS:
                raise ConfigError(f"overlap = {self.overlap!r}; there are: {', '.join(OVERLAPS)}")
            check_bucket(self.bucket_mib)

    @property
    def overlaps(self) -> str:
        return str(self.config.overlap)

    async def after_backward(self, swarm: Swarm) -> None:
        await swarm.form_everyone()
