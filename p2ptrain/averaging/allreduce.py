"""Synchronous all-reduce SGD: every step, everyone averages gradients with everyone.

    g  <-  sum over peers i of n_i g_i / sum of n_i      n_i: samples of its step
    x  <-  x - lr * update(g)

All peers start equal, average the same gradients and stay equal: P peers behave as one with all of
their batches. A step lasts as long as the slowest peer's. This is the baseline that every other
algorithm is measured against (Li et al., PyTorch Distributed, VLDB 2020, section 2.2).

The group is scheduled, not claimed: all that are alive, once per version (`core/barrier.py`);
reduce-scatter and all-gather move 2 n (P - 1) / P words (`core/shards.py`). A member that dies in
the middle costs the others one more attempt, without it.
"""

from p2ptrain.averaging import Algorithm, Swarm


class AllReduce(Algorithm):
    averages = "gradients"
    trainer_waits = True
    in_step = True

    async def after_backward(self, swarm: Swarm) -> None:
        await swarm.form_everyone()
