"""What a group is for: stated with its ticket from the first request to the end.

Nothing of it is derived a second time from a view, which another peer may not share.
"""

from dataclasses import dataclass
from enum import IntEnum, StrEnum

from p2ptrain.core.shards import Span, shard

MOST_FRAGMENTS = 1 << 16
"""A group with less of a model than that would cost more messages than numbers."""


class What(StrEnum):
    """Which vectors a group averages."""

    MODELS = "models"
    GRADIENTS = "gradients"
    """Of this step: all members wait for the mean."""

    STALE_GRADIENTS = "stale gradients"
    """Whatever a member has not delivered yet, of no step or of several."""

    PSEUDO_GRADIENTS = "pseudo-gradients"
    """How far each member has come from the model that all began from (`runtime/outer.py`)."""

    CONSENSUS = "consensus"
    """Models, whose mean all members keep beside their own (`runtime/consensus.py`)."""


class Formation(IntEnum):
    """How a group comes together."""

    CLAIMED = 0
    """One peer chooses the others."""
    BARRIER = 1
    """Everyone who trains meets once per version (`core/barrier.py`)."""
    WAIT_AVOIDING = 2
    """The group of a version runs when its rule is met (`core/wait_avoiding.py`)."""


@dataclass(frozen=True, slots=True)
class Purpose:
    """How a group is formed, and what it averages."""

    formation: Formation = Formation.CLAIMED
    what: What = What.MODELS
    version: int = 0
    """Of the barrier or the schedule."""
    lineage: int = 0
    """At a barrier: where the members' models come from."""
    fragment: int = 0
    """Which of as many equal parts of the model it is about, from 0 on."""
    fragments: int = 1
    """How many parts; 1: the whole model."""
    epoch: int = 0
    """Of the settings that the members have in common (`core/epochs.py`)."""

    def span(self, size: int) -> Span:
        """The numbers of a model of `size` that it is about."""
        return shard(size, self.fragments, self.fragment)

    def fulfils(self, waited_for: "Purpose") -> bool:
        """True if a peer that waits for `waited_for` gets it from such a group.

        A version of a schedule stands for the ones before it; at a barrier nothing does.
        """
        if self.formation is Formation.WAIT_AVOIDING and self.what is waited_for.what:
            is_of_it = (waited_for.formation, waited_for.epoch) == (self.formation, self.epoch)
            return is_of_it and waited_for.version <= self.version
        return self == waited_for and self.formation is not Formation.CLAIMED


GOSSIP = Purpose()
"""Models of a group that one peer chose."""
