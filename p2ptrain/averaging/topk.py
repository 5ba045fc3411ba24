"""Top-k SGD: each peer sends the numbers of largest magnitude in its gradient to all others.

    a_i    <-  n_i g_i + residual_i               n_i: samples of its step
    s_i    <-  the k numbers of a_i with the largest magnitudes; residual_i <- a_i - s_i
    G      <-  sum of all s_i / sum of all n_i     an all-gather of indices and numbers
    x      <-  x - lr * update(G)

What is not sent stays in the residual and goes into a later mean: error feedback (Stich et al.,
NeurIPS 2018), so every number is delivered once. All peers apply the same mean and stay equal. Each
receives 2 k (P - 1) words, k entries of every other peer, and the sum has up to k P numbers: with
many peers it is dense again. This is the rival that `ok_topk` is measured against (Li and Hoefler,
PPoPP 2022, section 2: "TopkA"): simpler, and little slower with few peers.

Momentum, Adam and clipping come after the mean, as with `allreduce`. A peer that dies takes its
residual with it: at a density of 1 %, numbers of some hundred steps. A newcomer begins with none.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from p2ptrain.averaging import CompressedGradients, ConfigError, Entries, GradientSum


class TopK(CompressedGradients):
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config(CompressedGradients.Config):
        """How much of a gradient travels."""

        density: float = 0.01
        """Share of the gradient's n numbers, over all parameters, that a peer sends in a step:
        k = density * n. Too small: numbers wait for many steps, and learning suffers; too large:
        few bytes are saved."""

        def __post_init__(self) -> None:
            CompressedGradients.Config.__post_init__(self)
            if not 0 < self.density <= 1:
                raise ConfigError(f"density = {self.density} must be above 0 and at most 1")

    async def sum(self, group: GradientSum) -> tuple[Entries, Entries]:
        own = await group.largest(max(1, round(self.config.density * group.size)))
        everyone: Sequence[Entries] = await group.send([own] * len(group.members))
        return own, await group.add(everyone)
