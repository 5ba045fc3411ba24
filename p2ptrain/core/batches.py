"""Divide the samples of one step of a group among its members, by their speeds.

Peers in step wait for the slowest. With equal batches a peer that is eight times slower than the
others sets the pace of all; with a batch of an eighth it needs as long as they do (OmniLearn, arXiv
2503.17469, 2025). The gradients are the same mean, since each weighs as many samples as it is of.

The division is a pure function of what all members have stated for one average, so that all
compute the same one and nothing has to be sent:

* the total is fixed, and each batch is at least 1;
* batches are as the speeds, rounded by largest remainder;
* a member that has not stated a speed yet counts as the mean of the others, so that its batch is
  the usual one and the others keep theirs among themselves;
* batches stay as they are, unless others would shorten the step by `WORTH_A_CHANGE`.

**Why it settles.** A step lasts ``a + c * batch``: a fixed part, and one for each sample. So the
speed that was measured at one batch, ``batch / (a + c * batch)``, is a little too low for a larger
one. It rises with the batch and never falls: divisions approach the point where all steps last
equally long from one side, and do not swing around it.
"""

from collections.abc import Sequence
from fractions import Fraction

WORTH_A_CHANGE = Fraction(1, 10)
"""How much shorter the slowest member's step has to become. Smaller: noise in the speeds changes
batches all the time. Larger: more of a difference in speed is left as it is."""


def next_batches(total: int, present: Sequence[int], speeds: Sequence[int]) -> list[int]:
    """The batches of the members' next steps.

    Args:
        total: samples of one step of all members; at least one for each.
        present: samples of each member's last step.
        speeds: samples that each member computes in some fixed time; 0 if that is not known.
    """
    known = [speed for speed in speeds if speed > 0]
    if not known:
        return divide(total, [1] * len(speeds))
    # In units of 1 / len(known), in which the mean of the known is a whole number.
    weights = [speed * len(known) if speed > 0 else sum(known) for speed in speeds]
    best, kept = divide(total, weights), divide(total, [max(1, samples) for samples in present])
    limit = (1 - WORTH_A_CHANGE) * _slowest(kept, weights)
    return best if _slowest(best, weights) < limit else kept


def divide(total: int, weights: Sequence[int]) -> list[int]:
    """Whole numbers that add up to `total` and are as `weights`, but at least 1.

    Those who would get less than 1 get 1, and the others share the rest by largest remainder; of
    equal remainders the first one is rounded up. Weights are above 0.
    """
    batches, sharing, left = [1] * len(weights), list(range(len(weights))), total
    while True:
        sum_of_weights = sum(weights[i] for i in sharing)
        enough = [i for i in sharing if left * weights[i] >= sum_of_weights]
        if len(enough) == len(sharing):
            break
        left -= len(sharing) - len(enough)
        sharing = enough
    for i in sharing:
        batches[i] = left * weights[i] // sum_of_weights
    over = total - sum(batches)
    by_remainder = sorted(sharing, key=lambda i: -(left * weights[i] % sum_of_weights))
    for i in by_remainder[:over]:
        batches[i] += 1
    return batches


def _slowest(batches: Sequence[int], speeds: Sequence[int]) -> Fraction:
    """How long the step of the slowest member takes."""
    return max(Fraction(samples, speed) for samples, speed in zip(batches, speeds, strict=True))
