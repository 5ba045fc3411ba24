"""Robust sums: what a group makes of numbers of which some may be lies.

Both take the members' parts of a chunk, and give the number of members times a robust mean of them:

* **trimmed** (Yin et al., ICML 2018): of each number the largest and the smallest are left out;
* **clipped** (Karimireddy, He and Jaggi, ICML 2021): from a centre v, which is at first the median
  of each number, every part x moves it by at most a radius, ``v += mean(clip(x - v))``, a few
  times. The radius is the median of the parts' distances from v, so half of the parts count as they
  are, and any other counts as if it were no farther away than these.

They give the same bits at every member that has the same parts, on any processor: sums are added in
a fixed order. A part that is not finite has no say.

Each returns the squares of what it has added to the plain sum, or taken from it: for the books.

Legend of shapes: ``S`` numbers of a chunk, ``B`` of one block, ``N`` members.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from p2ptrain.compute.replica import Vector

BLOCK = 1 << 15
"""Numbers that are worked on at a time: a handful of such blocks fits into a core's cache."""

CLIPPINGS = 3
"""Steps of the centre. One bounds what a lie does; more come nearer to the honest mean."""


def trimmed_sum(parts_S: Sequence[Vector], left_out: int, into_S: Vector) -> float:
    """`left_out` are left out at each end; what is not finite is at an end once it is sorted."""
    count, squares = len(parts_S), 0.0
    for at in blocks(len(into_S)):
        parts_NB = np.sort(np.stack([part_S[at] for part_S in parts_S]), axis=0)
        into_B = into_S[at]
        parts_NB[left_out : count - left_out].sum(axis=0, out=into_B)
        np.multiply(into_B, np.float32(count / (count - 2 * left_out)), out=into_B)
        squares += exact_squares(into_B - parts_NB.sum(axis=0))
    return squares


def clipped_sum(parts_S: Sequence[Vector], into_S: Vector) -> float:
    """`into_S` is no memory of a part's."""
    count, squares = len(parts_S), 0.0
    for at in blocks(len(into_S)):
        into_S[at] = _middle([part_S[at] for part_S in parts_S])
    for _ in range(CLIPPINGS):
        distances = [_distance(part_S, into_S) for part_S in parts_S]
        radius = sorted(distances)[count // 2]
        if not 0 < radius < math.inf:
            break  # more than half are where the centre is, or half are not finite
        shares = [min(1.0, radius / distance) if distance else 0.0 for distance in distances]
        for at in blocks(len(into_S)):
            centre_B = into_S[at]
            moved_B = np.zeros_like(centre_B)
            for part_S, share in zip(parts_S, shares, strict=True):
                if share:
                    moved_B += np.float32(share) * (part_S[at] - centre_B)
            centre_B += moved_B / np.float32(count)
    for at in blocks(len(into_S)):
        into_S[at] *= np.float32(count)
        plain_B = np.add.reduce([part_S[at] for part_S in parts_S])
        squares += exact_squares(into_S[at] - plain_B)
    return squares


def blocks(size: int) -> Iterator[slice]:
    return (slice(start, min(start + BLOCK, size)) for start in range(0, size, BLOCK))


def exact_squares(vector_S: Vector) -> float:
    """The sum of the squares, in float64; without BLAS, whose threads would take the trainer's."""
    wide = (np.square(vector_S[at], dtype=np.float64) for at in blocks(len(vector_S)))
    return float(sum(one_B.sum() for one_B in wide))


def _middle(parts_B: Sequence[Vector]) -> Vector:
    """The median of each number; of an even count the mean of the two."""
    sorted_NB, half = np.sort(np.stack(parts_B), axis=0), len(parts_B) // 2
    middle_B: Vector = sorted_NB[half]
    if len(parts_B) % 2 == 0:
        middle_B = (sorted_NB[half - 1] + middle_B) * np.float32(0.5)
    return middle_B


def _distance(part_S: Vector, centre_S: Vector) -> float:
    """Infinite if either is not finite."""
    total = 0.0
    for at in blocks(len(part_S)):
        total += _fixed_sum(np.square(part_S[at] - centre_S[at], dtype=np.float64))
    return math.sqrt(total) if math.isfinite(total) else math.inf


def _fixed_sum(wide_B: NDArray[np.float64]) -> float:
    """In an order that is no processor's own choice."""
    while (size := len(wide_B)) > 1:
        half = (size + 1) // 2
        folded_B = wide_B[:half].copy()
        folded_B[: size - half] += wide_B[half:]
        wide_B = folded_B
    return float(wide_B[0]) if len(wide_B) else 0.0
