"""Measure the contributions to a bucket, and exchange votes on them.

Each member that reduces measures the parts of all in what it reduces (`core/offenders.py` decides),
and sends its *ballot*, one float32 per member, as the last message of each stream on which it hands
out means; in the direct exchange, of each stream. A ballot is a part of the result: no member has
all without those of all voters. So when a group has ended well, all count the same votes.

Norms are per number and per unit of weight, so shards and batches of unequal size compare; progress
of more samples than usual, which a peer contributes after it has missed steps, may be larger by as
much: where all updates point the same way, it is. Of models the norm is that of the difference to
this member's own; directions are of gradients only.

Legend of shapes: ``S`` numbers of a chunk, ``B`` of one block, ``N`` members.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from p2ptrain.compute.replica import Vector
from p2ptrain.core.effects import Outcome
from p2ptrain.core.offenders import Judge, Measured, offenders
from p2ptrain.ids import PeerId
from p2ptrain.runtime.robust import blocks
from p2ptrain.runtime.streams import GroupBroken

LEAST_MEMBERS = 3
"""Two do not show which one is wrong."""

ROUNDING = 1e-6
"""The part of a square that is lost to rounding."""


@dataclass(frozen=True, slots=True)
class Vote:
    """How the members of a group vote on what they contribute to a bucket."""

    judge: Judge
    kind: str
    """Norms of equal kinds are compared."""
    weights: Sequence[int]
    """Of the members' contributions, in their order."""
    of_models: bool
    size: int
    """Only the first so many numbers of the vector are measured: what follows has other units."""
    of_progress: bool = False
    """Contributions are what so many samples have added up to, and no means over samples."""
    only_here: bool = False
    """There are no such contributions but in this group (`core/offenders.py`)."""

    @property
    def units(self) -> list[float]:
        """By what the norm of each contribution is divided."""
        weights = [max(1, weight) for weight in self.weights]
        usual = sorted(weights)[(len(weights) - 1) // 2]
        longer = [max(1.0, weight / usual) if self.of_progress else 1.0 for weight in weights]
        return [weight * times for weight, times in zip(weights, longer, strict=True)]


class _Chunk(NamedTuple):
    """What was measured of one chunk."""

    numbers: int
    squares_N: Sequence[float]
    dots_N: Sequence[float]
    """Of each part with the sum of all."""
    sum_squares: float
    """Of the sum of all parts; of models, of this member's own."""


class Ballots:
    """Of one bucket of one group, at one member; chunks may be measured on several threads."""

    def __init__(self, vote: Vote, me: PeerId, members: tuple[PeerId, ...]) -> None:
        self._vote, self._me, self._members = vote, me, members
        self._own_at = members.index(me)
        self._compares_directions = vote.judge.opposed_groups > 0 and not vote.of_models
        self._chunks: list[_Chunk] = []
        self._ballots: dict[PeerId, Sequence[float]] = {}
        self._layout = struct.Struct(f"<{len(members)}f")
        self.size = self._layout.size
        """Bytes of a ballot."""

    def measure(self, start: int, parts_S: Sequence[Vector]) -> None:
        """Take these numbers of all members into account, from `start` of the vector on."""
        if not self._vote.judge.measures:
            return
        count, counted = len(parts_S), min(len(parts_S[0]), max(0, self._vote.size - start))
        squares_N, dots_N, sum_squares = [0.0] * count, [0.0] * count, 0.0
        for at in blocks(counted):
            parts_B = [part_S[at.start : min(at.stop, counted)] for part_S in parts_S]
            if self._vote.of_models:
                own_B = parts_B[self._own_at]
                parts_B = [part_B - own_B for part_B in parts_B]
                sum_squares += float(np.dot(own_B, own_B))
            squares_N = _plus_dots(squares_N, parts_B, parts_B)
            if self._compares_directions:
                sum_B = np.add.reduce(parts_B)
                dots_N = _plus_dots(dots_N, parts_B, [sum_B] * count)
                sum_squares += float(np.dot(sum_B, sum_B))
        self._chunks.append(_Chunk(counted, squares_N, dots_N, sum_squares))

    def cast(self) -> memoryview:
        """All of ours is measured: this member's ballot, as it travels."""
        measured = Measured([None] * len(self._members))
        if self._chunks:
            cosines = self._cosines() if self._compares_directions else ()
            only_here = self._vote.only_here
            measured = Measured(self._norms(), self._own_model(), cosines, only_here)
        ballot = self._vote.judge.vote(self._vote.kind, self._members, measured)
        packed = self._layout.pack(*(min(one, 1e30) for one in ballot))
        self._ballots[self._me] = self._layout.unpack(packed)
        return memoryview(packed)

    def take(self, voter: PeerId, payload: memoryview) -> None:
        """Raises GroupBroken for what is no ballot."""
        ballot = self._layout.unpack(payload)
        if any(math.isnan(one) for one in ballot):
            raise GroupBroken(Outcome.BROKEN, f"{voter} sent a ballot that is none")
        self._ballots[voter] = ballot

    @property
    def offenders(self) -> dict[PeerId, str]:
        """Whom the votes that are here name, each with a sentence."""
        return offenders(self._members, self._ballots)

    def _norms(self) -> list[float | None]:
        numbers = sum(chunk.numbers for chunk in self._chunks)
        return [
            math.sqrt(squares / numbers) / unit if squares else None
            for squares, unit in zip(self._squares(), self._vote.units, strict=True)
        ]

    def _own_model(self) -> float | None:
        """Its norm, per number; None if it is gradients that are measured."""
        numbers = sum(chunk.numbers for chunk in self._chunks)
        squares = sum(chunk.sum_squares for chunk in self._chunks)
        return math.sqrt(squares / numbers) if self._vote.of_models and numbers else None

    def _cosines(self) -> list[float | None]:
        """Of each contribution with the sum of the others."""
        sum_squares = sum(chunk.sum_squares for chunk in self._chunks)
        dots_N = [sum(dots) for dots in zip(*(chunk.dots_N for chunk in self._chunks), strict=True)]
        return [
            _cosine(squares, dot, sum_squares)
            for squares, dot in zip(self._squares(), dots_N, strict=True)
        ]

    def _squares(self) -> list[float]:
        return [sum(all_) for all_ in zip(*(one.squares_N for one in self._chunks), strict=True)]


def _cosine(squares: float, dot: float, sum_squares: float) -> float | None:
    """Of a part with the rest of a sum; None where too little of either is left to say."""
    rest_squares = sum_squares - 2 * dot + squares
    if not math.isfinite(rest_squares) or rest_squares <= ROUNDING * max(sum_squares, squares):
        return None
    return (dot - squares) / math.sqrt(squares * rest_squares) if squares else None


def _plus_dots(
    totals_N: Sequence[float], ones: Sequence[Vector], others: Sequence[Vector]
) -> list[float]:
    pairs = zip(totals_N, ones, others, strict=True)
    return [total + float(np.dot(one_B, other_B)) for total, one_B, other_B in pairs]
