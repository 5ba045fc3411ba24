"""What a member states beside the vectors that it puts into a group.

A member states these scalars with the grant of its slot; `Begin` tells all members those of all.
They are never numbers inside a vector: so they are exact whatever codec the vectors travel with.
"""

from dataclasses import dataclass

SPEED_S = 1_000_000
"""Over so many seconds a speed counts samples: whole numbers say enough of a slow peer, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """One member's scalars under one ticket; the default is that of a member that averages models.

    The group's mean is sum(weight_i * x_i) / sum(weight_i).
    """

    weight: int = 1
    """Of its vector in the mean: 1 for models; for gradients the samples that they are of. 0: it
    takes part without a say (its gradients overflowed, it has just caught up, it has none)."""

    usual: int = 1
    """Samples of one of its steps, whether or not it contributes any now; 0 before the first, which
    counts as the others' mean, and of a member that only serves. Stale gradients are divided by the
    sum of these, so that a gradient weighs the same whenever it comes."""

    samples: int = 0
    """Samples of all its lives, this step's included."""

    wants_to_end: bool = False
    """Its vote: it has come to the end of its run."""

    wants_checkpoint: bool = False
    """Its vote: a checkpoint is due by its clock. All write one after this version, if none of them
    still writes."""

    writes_checkpoint: bool = False
    """Its last checkpoint is not on its disk yet."""

    gradient_mask: bytes = b""
    """One bit for each parameter, in order, lowest bit first: set where it has a gradient."""

    rule: int = 0
    """A digest of how it makes its update (`compute/contract.py`); 0 where that is its own."""

    progress: int = 0
    """Samples of the whole swarm, as far as it knows. Of models: 0 if it shares no estimate, since
    it has enough or has none."""

    begun: int = 0
    """A digest of the exchange that began behind its backward pass, if what it put into that still
    holds (`runtime/overlap.py`); 0 if not. The group finishes it where all state the same."""

    history: int = 0
    """Of a pseudo-gradient: a digest of all outer steps of the model that it is measured from."""

    outer_steps: int = 0
    """How many those were."""

    together: int = 0
    """How many buckets are to travel together in the next version, as it would have it
    (`runtime/bucket_tuner.py`); 0 if none do."""

    speed: int = 0
    """Samples that it computes in `SPEED_S`, waits left out; 0 if it does not know yet, or does not
    divide batches by speed (`core/batches.py`)."""


MODEL = Contribution()
"""A member that averages models, each of which weighs the same."""
