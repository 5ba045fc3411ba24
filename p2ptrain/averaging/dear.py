"""DeAR: all-reduce in two, reduce-scatter behind the backward pass, all-gather behind the forward.

    backward t:     reduce-scatter of each bucket, as soon as the backward pass has made it
    boundary t:     all agree that version t stands
    forward t + 1:  all-gather of each bucket; x <- x - lr * update(g) just before x is needed

The result is that of all-reduce, to the last bit, and so are the bytes: 2 n (P - 1) / P words. What
differs is how much of them a trainer waits for: a step lasts max(backward, reduce-scatter) +
max(forward, all-gather), where overlap with the backward pass alone leaves max(backward,
reduce-scatter + all-gather) + forward (Zhang et al., 2302.12445).

Clipping needs the norm of all gradients: owners of shards tell each other their squares, before
any mean (`runtime/exchange.py`). A member that dies during an all-gather may leave the others with
parts of the result: at the next barrier they take over the model of one of them.
"""

from dataclasses import dataclass

from p2ptrain.averaging import Algorithm, Group, Swarm, check_bucket


class DeAR(Algorithm):
    averages = "gradients"
    trainer_waits = True
    in_step = True
    overlaps = "both"

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """How gradients are cut."""

        bucket_mib: float = 0.0
        """MiB of gradients that travel together; 0: tuned while training, from a sixteenth of them
        on. Too small: messages cost more than they hide; too large: little is hidden."""

        def __post_init__(self) -> None:
            check_bucket(self.bucket_mib)

    async def after_backward(self, swarm: Swarm) -> None:
        await swarm.form_everyone()

    async def average(self, group: Group) -> None:
        await group.reduce_scatter()
        group.release_trainer()
        await group.all_gather()
        await group.commit()
