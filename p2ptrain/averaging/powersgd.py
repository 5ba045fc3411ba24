"""PowerSGD: all-reduce of the factors of each gradient matrix, found by one power iteration.

    A_i    <-  n_i g_i + residual_i              n_i: samples of its step; of one matrix, R x C
    left   <-  basis of  sum of all A_i right    an all-reduce of R x r numbers, made orthonormal
    own_i  <-  A_i^T left;  right <- sum of all own_i          an all-reduce of C x r numbers
    G      <-  left right^T / sum of all n_i;  residual_i <- A_i - left own_i^T
    x      <-  x - lr * update(G)

(Vogels et al., NeurIPS 2019, 1905.13727, algorithms 1 and 2.) Each step begins with the right
factor of the last one: so few iterations are enough, spread over steps. Parameters that are no
matrices, or so small that factors would be no fewer numbers, are summed whole. All peers apply the
same mean and stay equal. Momentum, Adam and clipping come after it, as with `allreduce`.

The right factor that a peer begins with may be its own: it decides how good the basis is, and not
whether sums are right. So a newcomer begins with random numbers, and if a group breaks, those that
are left begin the sum again. A peer that dies takes its residual with it.

Each member makes the basis for some matrices, and sends it to the others: orthonormal columns that
differ in their last bits would be models that differ.
"""

from dataclasses import dataclass

from p2ptrain.averaging import CompressedGradients, ConfigError, Factors, GradientSum, Part


class PowerSGD(CompressedGradients):
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config(CompressedGradients.Config):
        """How much of a gradient travels."""

        rank: int = 4
        """Columns of a factor: r (R + C) numbers travel in place of R C. Too small: what is left
        out waits, and learning suffers; too large: few bytes are saved."""

        def __post_init__(self) -> None:
            CompressedGradients.Config.__post_init__(self)
            if self.rank < 1:
                raise ConfigError(f"rank = {self.rank} must be 1 or more")

    right: Factors | None = None
    """Of the last sum."""

    async def sum(self, group: GradientSum) -> tuple[Part, Part]:
        right = self.right
        if right is None:
            right = group.random_factors(self.config.rank)
        left = await group.basis(await group.times(right))
        own = await group.transposed_times(left)
        self.right = await group.all_reduce(own)
        return group.product(left, own), group.product(left, self.right)
