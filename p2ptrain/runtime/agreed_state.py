"""Compute what all members of a synchronous group agree on, each from the same `Contribution`s.

Whether any wants to end, so that all end after the same version; progress, so that all follow the
same schedule; whether any had gradients, so that all make the update or none does; whether all
write a checkpoint, so that there are versions of which all have one.

**Lineage.** Equal models that take in the same mean stay equal. So a model's *lineage* is a digest
of some numbers of the model that it began with, then of each average that went into it: its ticket
and some numbers of the mean. Peers with one lineage have one model; two parts of a swarm that went
on apart have two, from their first average on. That costs 0.1 ms at 25 million numbers. Rounding
that differs between devices does not change a lineage, nor do changes of parameters between steps.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from p2ptrain.compute.replica import Vector
from p2ptrain.core.contribution import Contribution
from p2ptrain.ids import PeerId, Ticket

SAMPLED = 1024
"""Numbers of a vector that go into a lineage."""


@dataclass(slots=True)
class AgreedState:
    """What one peer brings into it, and the outcome."""

    contributes: bool = True
    """False: our gradients have no say in the next average."""
    averaged_anything: bool = True
    """False: no peer's gradients had."""
    anyone_trains: bool = True
    """Some member of the last average makes steps with samples, perhaps without gradients now."""
    others_have_ended: bool = False
    """We only serve, and those that we served train no more."""
    samples_of_step: int = 0
    """Of the step whose gradients are to be averaged."""
    samples_before: int = 0
    """Of our former lives, as far as the others had heard, and `samples_of_lost`."""
    samples_of_lost: int = 0
    """Of peers that did not come back from a checkpoint, which this one counts on."""
    wants_to_end: bool = False
    """Our vote."""
    agreed_to_end: bool = False
    agreed_to_write: bool = False
    """All members of the last average write a checkpoint of what it made."""
    progress: int = 0
    """Samples of the whole swarm, as all agreed; of models, an estimate (`docs/membership.md`)."""
    restored_progress: int = 0
    """The same where the state comes from that this peer begins with: a checkpoint, a donor."""
    lineage: int = 0
    """Where our model comes from, in 64 bits."""

    def begin(self, model_M: Vector) -> None:
        """The first step begins with this model."""
        self.lineage = digest_of(b"", model_M)

    def follow(self, ticket: Ticket, mean_V: Vector) -> None:
        """The mean of this attempt goes into our model."""
        words = self.lineage, ticket.initiator, ticket.incarnation, ticket.number, ticket.attempt
        self.lineage = digest_of(repr(words).encode(), mean_V)

    def fork(self, name: PeerId) -> None:
        """Part of the last mean is missing in our model: it is like no other one."""
        self.lineage = digest_of(f"{self.lineage} of {name}".encode(), np.empty(0, np.float32))

    def take_in(self, contributions: Sequence[Contribution], outside_samples: int) -> None:
        """An average is done: what its members stated, and the samples of all who are not in it."""
        self.averaged_anything = any(one.weight for one in contributions)
        self.anyone_trains = any(one.usual for one in contributions)
        self.agreed_to_end = any(one.wants_to_end for one in contributions)
        due = any(one.wants_checkpoint for one in contributions)
        self.agreed_to_write = due and not any(one.writes_checkpoint for one in contributions)
        samples = sum(one.samples for one in contributions) + outside_samples
        self.progress = max(self.progress, samples, *(one.progress for one in contributions))


def union(masks: Iterable[bytes]) -> bytes:
    """A mask that has the bits of all; `Contribution.gradient_mask` says what they mean."""
    bits, size = 0, 0
    for mask in masks:
        bits, size = bits | int.from_bytes(mask, "little"), max(size, len(mask))
    return bits.to_bytes(size, "little")


def usual_samples(contributions: Sequence[Contribution]) -> float:
    """Samples of one step of all members; one that has made none yet counts as their mean."""
    known = [one.usual for one in contributions if one.usual]
    return sum(known) * len(contributions) / max(1, len(known))


def digest_of(before: bytes, vector_V: Vector) -> int:
    """64 bits for what was there before, and some numbers of a vector."""
    sample = vector_V[:: max(1, len(vector_V) // SAMPLED)].astype("<f4").tobytes()
    return int.from_bytes(hashlib.blake2b(before + sample, digest_size=8).digest())
