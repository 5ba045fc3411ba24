"""Ok-Topk: a sparse all-reduce whose bytes do not grow with the number of peers.

Li and Hoefler, PPoPP 2022 (arXiv 2201.07598), section 3. As in `topk`, each peer adds its gradient
to its residual and chooses the k = density * n numbers of the largest magnitudes. But instead of
sending them to all others, peers reduce them together:

1. *Choose.* All accumulated numbers above a local threshold: about k. The threshold is used again
   in the next step, corrected by a little, and computed exactly only now and then.
2. *Regions of equal load.* The indices are divided into P regions, one for each member, its owner,
   so that about as many chosen numbers fall into each: members gather quantiles of their indices.
3. *Split and reduce.* Each peer sends what it has chosen to the owners of the regions, and adds up
   what comes for its own. It begins with the owner after it by name, so that none is hit by all.
4. *Choose again.* Of all sums, the k of the largest magnitudes are the result. Owners gather
   histograms of magnitudes, and each finds how many of its own belong to them.
5. *Balance and gather.* If one owner has many more of these than others, the surplus moves first;
   then each sends an equal share of the result to all others.

Each peer sends about 2 k (P - 1) / P words in 3, the same in 5, and at most the same for the
surplus: within the paper's bound of 6 k (P - 1) / P, where a dense all-reduce has
2 n (P - 1) / P and `topk` 2 k (P - 1). What a peer has not sent, or has sent and the result does
not hold, stays in its residual: sent + residual = accumulated, number by number.

All peers apply the same mean, the sum divided by the samples of the step, and stay equal. Momentum,
Adam and clipping come after it. If a member dies, the others begin the sum again without it:
regions follow from the members that are left. The residual of the dead one is lost, those of the
others are not touched. A newcomer begins with an empty residual.

Differences from the paper and its released code, and why:

* *Histograms instead of a global threshold that is used again.* The number of results is k in every
  step. In the released code, steps that compute it anew cost up to (P + 1) / 3 times the bound.
* *Regions follow from the present step*, not from one up to 64 steps ago: 64 quantiles of 4 bytes
  for each other member are little beside k entries, and a newcomer needs no regions of others.
* *The residual is exact.* The released code looks up delivered indices in an array that is ordered
  otherwise on threshold steps, so that some numbers are sent twice.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from p2ptrain.averaging import CompressedGradients, ConfigError, Entries, GradientSum, Group

QUANTILES = 64
"""Of a member's indices. More: bytes; fewer: regions of less equal load."""

UNEVEN = 1.25
"""The surplus moves if an owner has so many times its share of the results. Smaller: one round more
in most steps; larger: the busiest owner sends more."""

NEAR = 1.25
"""The local threshold is computed exactly if it chooses so many times k, or k by that."""

CORRECTION = 1.025
"""Of the local threshold, after each step (as in the paper's code for BERT)."""


class OkTopk(CompressedGradients):
    state_names = ("threshold",)

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config(CompressedGradients.Config):
        """How much of a gradient travels."""

        density: float = 0.01
        """Share of the gradient's n numbers, over all parameters, that a peer sends, and that the
        result holds: k = density * n. Too small: numbers wait for many steps, and learning suffers;
        too large: few bytes are saved."""

        exact_every: int = 64
        """Versions between two exact computations of the local threshold. Too small: they cost
        computing; too large: nothing but the correction holds it near k."""

        def __post_init__(self) -> None:
            CompressedGradients.Config.__post_init__(self)
            if not 0 < self.density <= 1:
                raise ConfigError(f"density = {self.density} must be above 0 and at most 1")
            if self.exact_every < 1:
                raise ConfigError(f"exact_every = {self.exact_every} must be 1 or more")

    threshold = 0.0
    """Of magnitudes of what we accumulate; 0: not known."""

    async def average(self, group: Group) -> None:
        if (group.version or 0) % self.config.exact_every == 0:
            self.threshold = 0.0
        await super().average(group)

    async def sum(self, group: GradientSum) -> tuple[Entries, Entries]:
        k, count = max(1, round(self.config.density * group.size)), len(group.members)
        chosen = await self._choose(group, k)

        shift = (group.rank + 0.5) / count  # so that equal members give P times as many places
        quantiles = await group.all_gather(chosen.quantiles(QUANTILES, shift))
        parts = await group.send(chosen.cut(equal_load(quantiles, group.size)))
        reduced = await group.add(parts)

        histograms = await group.all_gather(reduced.histogram())
        counts = shares_of(histograms, k)
        block = reduced.largest(counts[group.rank])
        if max(counts) * count > UNEVEN * sum(counts):
            moves = balanced(counts)
            due = [row[group.rank] for row in moves]
            block = group.join(await group.send(block.split(moves[group.rank]), due))
            counts = [sum(column) for column in zip(*moves, strict=True)]
        return chosen, group.join(await group.send([block] * count, counts))

    async def _choose(self, group: GradientSum, k: int) -> Entries:
        """About `k` numbers of the largest magnitudes."""
        chosen = await group.above(self.threshold) if self.threshold else None
        if chosen is None or not k / NEAR <= len(chosen) <= k * NEAR:
            is_more = chosen is not None and len(chosen) > k
            chosen = chosen.largest(k) if chosen and is_more else await group.largest(k)
            self.threshold = chosen.least
        elif len(chosen) != k:
            self.threshold *= CORRECTION if len(chosen) > k else 1 / CORRECTION
        return chosen


def equal_load(quantiles: Sequence[Sequence[int]], size: int) -> list[int]:
    """Where regions begin, but for the first: about as many chosen indices fall into each.

    Args:
        quantiles: of each member's indices, behind how many those are.
        size: of the vector; regions are equal if no member has chosen anything.
    """
    count = len(quantiles)
    loads = sorted((place, number) for number, *places in quantiles for place in places if number)
    if not loads:
        return [size * region // count for region in range(1, count)]
    sums = list(accumulate(number for _, number in loads))
    wanted = [sums[-1] * region // count for region in range(1, count)]
    return [loads[bisect_right(sums, load)][0] for load in wanted]


def shares_of(histograms: Sequence[Sequence[int]], k: int) -> list[int]:
    """How many of the `k` largest sums each owner has; all, if there are no more than `k`.

    From the highest bin down all are taken; in the last one, each owner's by its share of that bin.

    Args:
        histograms: of each owner, as `Entries.histogram` gives them.
        k: numbers of the result.
    """
    bins: dict[int, list[int]] = {}
    for owner, (top, *numbers) in enumerate(histograms):
        for below, number in enumerate(numbers):
            bins.setdefault(top - below, [0] * len(histograms))[owner] += number
    taken, left = [0] * len(histograms), k
    for place in sorted(bins, reverse=True):
        here = bins[place]
        if (total := sum(here)) > left:
            here = _in_proportion(here, total, left)
        taken = [before + more for before, more in zip(taken, here, strict=True)]
        left = k - sum(taken)
    return taken


def _in_proportion(numbers: Sequence[int], total: int, left: int) -> list[int]:
    """`left` of `total`, divided as `numbers` are; none gets more than it has."""
    starts = [left * before // total for before in accumulate(numbers, initial=0)]
    return [stop - start for start, stop in pairwise(starts)]


def balanced(counts: Sequence[int]) -> list[list[int]]:
    """How many entries each owner gives to each rank, so that all have equal shares, in order."""
    total, peers = sum(counts), range(len(counts))
    has = list(accumulate(counts, initial=0))
    gets = [total * rank // len(counts) for rank in (*peers, len(counts))]
    return [
        [max(0, min(has[a + 1], gets[b + 1]) - max(has[a], gets[b])) for b in peers] for a in peers
    ]
