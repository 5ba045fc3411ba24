"""Approximate the gradients of matrices by products of two factors of few columns.

A matrix of R x C numbers becomes left @ right.T, with R x r and C x r numbers, if those are fewer;
all other parameters travel whole. A tensor of more axes is the matrix of its first one and the rest
(Vogels et al., PowerSGD, 1905.13727, section 3). What a product leaves out stays in the residual
(`compute/sparse.py`).

Members with unlike processors must write the same bits. So a product that all write is made of
multiplications and additions, number by number; matrix multiplications, whose last bits differ from
machine to machine, are for what one member makes alone: its own factors, and a basis for all.

Legend of shapes: ``G`` numbers of gradients without buffers, ``L`` of all left factors and, behind
them, of what has no factors, ``N`` of all right factors.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from p2ptrain.compute.replica import Vector
from p2ptrain.errors import CodecError

LARGEST = float(np.finfo(np.float32).max)

Columns = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Matrix:
    """One matrix in the vectors."""

    at: slice
    """Of the G numbers."""
    rows: int
    columns: int
    left: slice
    """Of the L numbers."""
    right: slice
    """Of the N numbers."""


class Layout:
    """Which of the G numbers have factors of this rank, and where those stand in their vectors.

    Args:
        shapes: of the parameters, in the order of the G numbers.
        rank: columns of a factor.
    """

    def __init__(self, shapes: Sequence[Sequence[int]], rank: int) -> None:
        self.rank = rank
        self.matrices: list[_Matrix] = []
        whole: list[slice] = []
        self.size = left = right = 0
        for shape in shapes:
            size, rows = math.prod(shape), shape[0] if len(shape) > 1 else 1
            at = slice(self.size, self.size + size)
            self.size += size
            columns = size // max(1, rows)
            if rank * (rows + columns) >= size:
                whole.append(at)
                continue
            matrix = _Matrix(
                at,
                rows,
                columns,
                left=slice(left, left + rank * rows),
                right=slice(right, right + rank * columns),
            )
            self.matrices.append(matrix)
            left, right = matrix.left.stop, matrix.right.stop
        self.factors_stop = self.left_size = left
        self.whole: list[tuple[slice, slice]] = []
        """What has no factors: of the G numbers, and of the L numbers."""
        for at in whole:
            place = slice(self.left_size, self.left_size + at.stop - at.start)
            self.whole.append((at, place))
            self.left_size = place.stop
        self.right_size = right

    @property
    def share(self) -> float:
        """Of the G numbers, as many travel in each direction."""
        return (self.left_size + self.right_size) / max(1, self.size)

    def begin(self, seed: int) -> Vector:
        """N numbers to begin with."""
        return np.random.default_rng(seed).random(self.right_size, np.float32) - np.float32(0.5)

    def times(self, accumulated_G: Vector, right_N: Vector) -> Vector:
        """Each matrix times its right factor, and all that has no factors: L numbers."""
        left_L = np.empty(self.left_size, np.float32)
        with np.errstate(over="ignore", invalid="ignore"):  # their sum is checked
            for matrix in self.matrices:
                right = self.columns(right_N[matrix.right])
                left = self.columns(left_L[matrix.left])
                np.matmul(self.rows(accumulated_G, matrix), right, out=left)
        for at, place in self.whole:
            left_L[place] = accumulated_G[at]
        return left_L

    def transposed_times(self, accumulated_G: Vector, left_L: Vector) -> Vector:
        """Each matrix, transposed, times its left factor: N numbers."""
        right_N = np.empty(self.right_size, np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            for matrix in self.matrices:
                left = self.columns(left_L[matrix.left])
                right = self.columns(right_N[matrix.right])
                np.matmul(self.rows(accumulated_G, matrix).T, left, out=right)
        return right_N

    def shares(self, count: int) -> list[slice]:
        """The L numbers in about equal parts that split no factor."""
        ends = [0, *(matrix.left.stop for matrix in self.matrices)]
        edges = [self.left_size * part // count for part in range(count + 1)]
        near = [
            edge if edge >= self.factors_stop else min(ends, key=lambda end: abs(end - edge))
            for edge in edges
        ]
        return [slice(start, stop) for start, stop in pairwise(near)]

    def make_basis(self, share: slice, left_S: Vector) -> None:
        """Make the columns of each factor in this share of the L numbers orthonormal, in place."""
        for matrix in self.matrices:
            if share.start <= matrix.left.start < share.stop:
                at = slice(matrix.left.start - share.start, matrix.left.stop - share.start)
                left = self.columns(left_S[at])
                left[:] = np.linalg.qr(left.astype(np.float64))[0]

    def rows(self, vector_G: Vector, matrix: _Matrix) -> NDArray[np.float32]:
        """That matrix: R x C numbers."""
        return vector_G[matrix.at].reshape(matrix.rows, matrix.columns)

    def columns(self, numbers: Vector) -> Columns:
        """One factor: R x r numbers, or C x r."""
        return numbers.reshape(-1, self.rank)


@dataclass(frozen=True, slots=True)
class Factors:
    """The factors of one side, of all matrices; implements the port's."""

    layout: Layout
    numbers: Vector
    """L of the left ones, N of the right ones."""


@dataclass(frozen=True, slots=True)
class Product:
    """What factors stand for; what has none stands behind the left ones. Implements `Part`."""

    layout: Layout
    left_L: Vector
    right_N: Vector

    def delivered_by(self, total: object) -> "Product":
        """All of it."""
        return self

    def remove_from(self, accumulated_G: Vector) -> None:
        """What is left; nothing where there are no factors."""
        for matrix in self.layout.matrices:
            left, right = self._factors(matrix)
            numbers = self.layout.rows(accumulated_G, matrix)
            numbers -= left @ right.T
        for at, _ in self.layout.whole:
            accumulated_G[at] = 0

    def write(self, into_G: Vector, divisor: float) -> None:
        """`into_G` becomes this, divided; the same bits on every machine."""
        for matrix in self.layout.matrices:
            left, right = self._factors(matrix)
            numbers = self.layout.rows(into_G, matrix)
            np.multiply(left[:, :1], right[:, 0], out=numbers)
            for rank in range(1, self.layout.rank):
                numbers += left[:, rank : rank + 1] * right[:, rank]
        for at, place in self.layout.whole:
            into_G[at] = self.left_L[place]
        into_G /= np.float32(divisor)

    def check(self) -> None:
        """Raise CodecError if a number of the product may be too large for a float32."""
        largest = float(np.abs(self.right_N).max(initial=0))
        if not largest * self.layout.rank < LARGEST:  # numbers of a basis are up to 1
            raise CodecError("factors whose product is not finite")

    def _factors(self, matrix: _Matrix) -> tuple[Columns, Columns]:
        columns = self.layout.columns
        return columns(self.left_L[matrix.left]), columns(self.right_N[matrix.right])
