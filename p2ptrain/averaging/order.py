"""Whom to ask first: an order of candidates that several algorithms share."""

from collections.abc import Mapping, Sequence
from random import Random

from p2ptrain.ids import PeerId

MOST_ASKED = 64
"""A peer has so many candidates for one exchange, at most: one of them will be free soon."""


def in_turn(peers: Sequence[PeerId], met: Mapping[PeerId, int], rng: Random) -> list[PeerId]:
    """Some of `peers`: those never met, then those met longest ago; else in random order."""
    some = rng.sample(list(peers), min(len(peers), MOST_ASKED))
    return sorted(some, key=lambda peer: met.get(peer, -1))
