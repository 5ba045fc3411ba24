"""Synchronous all-reduce SGD: at every step all peers average their gradients.

    g  <-  sum over peers i of n_i g_i / sum of n_i      n_i: samples of its step
    x  <-  x - lr * update(g)

All peers start with equal models, apply the same mean and stay equal: P peers behave like one peer
with all of their batches. A step lasts as long as that of the slowest peer. This is the baseline of
all other algorithms (Li et al., PyTorch Distributed, VLDB 2020, section 2.2).

The group is scheduled, not claimed: all living peers, once per version (`core/barrier.py`).
Reduce-scatter and all-gather move 2 n (P - 1) / P words (`core/shards.py`). If a member dies during
an average, the others repeat it once, without that member.
"""

from p2ptrain.averaging import Algorithm, Swarm


class AllReduce(Algorithm):
    averages = "gradients"
    trainer_waits = True
    in_step = True

    async def after_backward(self, swarm: Swarm) -> None:
        await swarm.form_everyone()
