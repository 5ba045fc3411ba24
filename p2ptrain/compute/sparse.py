"""Choose the numbers of a gradient that travel, and keep those that do not (error feedback).

A sparse mean is one of few numbers of each member. What a member does not send, or what the others
leave out, is its *residual*: it is added to its next gradient (Stich et al., NeurIPS 2018), so that
every number is delivered once, sooner or later::

    accumulated  =  n g + residual              n: samples of the gradient g
    residual     =  accumulated - delivered     coordinate by coordinate, exactly

It is numpy on the host, as the codecs are: the simulator runs it too, and the same machine chooses
the same numbers wherever the model is.

Legend of shapes: ``G`` numbers of gradients without buffers, ``K`` chosen ones.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from p2ptrain.compute.replica import Vector
from p2ptrain.errors import CodecError

ENTRY_BYTES = 8
"""An index and a number."""

BINS = 32
"""Of a histogram of magnitudes; four to a power of two, so that they reach eight powers down."""

BIN_SHIFT = 21
"""Of a float32, what is left are its exponent and two more bits."""

MAGNITUDE = np.uint32(0x7FFF_FFFF)

Indices = NDArray[np.uint32]


class Part(Protocol):
    """What a member has sent of what it accumulated, or the sum: entries, or a product."""

    def delivered_by(self, total: Any) -> "Part":  # Any: the sum is of the same kind
        """Of this, what the sum holds."""

    def remove_from(self, accumulated_G: Vector) -> None:
        """What was accumulated becomes what is left without this."""

    def write(self, into_G: Vector, divisor: float) -> None:
        """`into_G` becomes this, divided; the same bits on every machine."""


class Entries:
    """Some numbers of a vector with their indices, which increase; implements the port's."""

    def __init__(self, at_K: Indices, values_K: Vector) -> None:
        self.at_K = at_K
        self.values_K = values_K

    def __len__(self) -> int:
        return len(self.at_K)

    @property
    def least(self) -> float:
        """The smallest magnitude; 0 of none."""
        return float(np.abs(self.values_K).min()) if len(self) else 0.0

    def split(self, counts: Sequence[int]) -> "list[Entries]":
        """The first so many, the next so many, ..."""
        stops = np.cumsum(counts)
        return [self._some(slice(stop - n, stop)) for n, stop in zip(counts, stops, strict=True)]

    def cut(self, edges: Sequence[int]) -> "list[Entries]":
        """Those with indices before the first edge, from there to the second, ..., and the rest."""
        stops = np.searchsorted(self.at_K, np.array(edges, np.int64))
        return self.split(np.diff([0, *stops, len(self)]).tolist())

    def quantiles(self, count: int, offset: float) -> list[int]:
        """How many these are, then `count` of their indices, evenly spaced; 0 if there are none.

        `offset`, from 0 to 1, shifts the places.
        """
        if not len(self):
            return [0] * (1 + count)
        places = ((np.arange(count) + offset) * len(self) / count).astype(np.int64)
        return [len(self), *self.at_K[np.minimum(places, len(self) - 1)].tolist()]

    def largest(self, count: int) -> "Entries":
        """Those of the largest magnitudes; of equal ones, those with the lowest indices."""
        if count >= len(self):
            return self
        return self._some(_largest(np.abs(self.values_K), count))

    def histogram(self) -> list[int]:
        """How many there are by magnitude.

        Returns:
            The highest bin, then how many are in it and in each of the ``BINS - 1`` below it; all
            that are smaller count as of the last one.
        """
        if not len(self):
            return [0] * (1 + BINS)
        bins = (self.values_K.view(np.uint32) & MAGNITUDE) >> BIN_SHIFT
        top = int(bins.max())
        below = np.minimum(top - bins.astype(np.int64), BINS - 1)
        return [top, *np.bincount(below, minlength=BINS).tolist()]

    def delivered_by(self, total: "Entries") -> "Entries":
        """Those of these whose indices the total has too."""
        there = np.isin(self.at_K, total.at_K, assume_unique=True)
        return self._some(np.flatnonzero(there))

    def remove_from(self, accumulated_G: Vector) -> None:
        """These numbers are 0 then."""
        accumulated_G[self.at_K] = 0

    def write(self, into_G: Vector, divisor: float) -> None:
        """`into_G` becomes these numbers, divided; 0 everywhere else."""
        into_G.fill(0)
        into_G[self.at_K] = self.values_K / np.float32(divisor)

    def to_bytes(self) -> bytes:
        """All indices, then all numbers, little-endian."""
        return self.at_K.astype("<u4").tobytes() + self.values_K.astype("<f4").tobytes()

    def _some(self, which: slice | NDArray[np.int64]) -> "Entries":
        return Entries(self.at_K[which], self.values_K[which])


NOTHING = Entries(np.empty(0, np.uint32), np.empty(0, np.float32))


def entries_of(payload: bytes, start: int, stop: int) -> Entries:
    """Read what `Entries.to_bytes` wrote.

    Raises:
        CodecError: if these are no finite numbers at increasing indices from `start` to `stop`.
    """
    if len(payload) % ENTRY_BYTES:
        raise CodecError(f"{len(payload)} bytes, which are no whole number of entries")
    count = len(payload) // ENTRY_BYTES
    at_K = np.frombuffer(payload, "<u4", count).astype(np.uint32, copy=False)
    values_K = np.frombuffer(payload, "<f4", offset=4 * count).astype(np.float32, copy=False)
    if count and not (at_K[0] >= start and at_K[-1] < stop and (at_K[1:] > at_K[:-1]).all()):
        raise CodecError(f"indices that do not increase from {start} to {stop}")
    if not np.isfinite(values_K).all():
        raise CodecError("numbers that are not finite")
    return Entries(at_K, values_K)


def joined(parts: Sequence[Entries]) -> Entries:
    """One after the other. Raises CodecError if the indices do not increase from part to part."""
    ends = [(part.at_K[0], part.at_K[-1]) for part in parts if len(part)]
    if any(start <= before for (_, before), (start, _) in pairwise(ends)):
        raise CodecError("parts of a sum that overlap")
    return Entries(
        np.concatenate([part.at_K for part in parts]),
        np.concatenate([part.values_K for part in parts]),
    )


def added(parts: Sequence[Entries]) -> Entries:
    """The sum, index by index, added up in this order; numbers that cancel out are left out.

    Raises:
        CodecError: if a sum is too large for a float32.
    """
    at, place = np.unique(np.concatenate([part.at_K for part in parts]), return_inverse=True)
    values = np.concatenate([part.values_K for part in parts])
    with np.errstate(over="ignore"):
        sums = np.bincount(place, weights=values, minlength=len(at)).astype(np.float32)
    if not np.isfinite(sums).all():
        raise CodecError("numbers whose sum is not finite")
    there = np.flatnonzero(sums)
    return Entries(at[there].astype(np.uint32, copy=False), sums[there])


def largest_of(vector_G: Vector, count: int) -> Entries:
    """The `count` numbers of the largest magnitudes, or all that are not 0 if those are fewer."""
    magnitudes_G = np.abs(vector_G)
    if count < len(vector_G):
        at = _largest(magnitudes_G, count)
        at = at[magnitudes_G[at] > 0]
    else:
        at = np.flatnonzero(magnitudes_G)
    return Entries(at.astype(np.uint32), vector_G[at])


def above(vector_G: Vector, threshold: float) -> Entries:
    """The numbers of at least that magnitude, which is above 0."""
    at = np.flatnonzero(np.abs(vector_G) >= np.float32(threshold))
    return Entries(at.astype(np.uint32), vector_G[at])


def _largest(magnitudes: Vector, count: int) -> NDArray[np.int64]:
    """Where the `count` largest stand, in order; of equal ones the first. There are more."""
    if not count:
        return np.empty(0, np.int64)
    bound = np.partition(magnitudes, len(magnitudes) - count)[len(magnitudes) - count]
    larger, equal = np.flatnonzero(magnitudes > bound), np.flatnonzero(magnitudes == bound)
    return np.sort(np.concatenate([larger, equal[: count - len(larger)]]))


class Residual:
    """What one peer has not delivered yet of its gradients, each times its samples."""

    def __init__(self) -> None:
        self._left_G: Vector | None = None
        self._mask = b""

    @property
    def mask(self) -> bytes:
        """Which parameters it may have something for, as `Contribution.gradient_mask` has it."""
        return self._mask

    def add_to(self, gradient_G: Vector) -> bool:
        """Accumulate: the gradient becomes gradient + residual. False: there was no residual."""
        if self._left_G is None:
            return False
        gradient_G += self._left_G
        return True

    def keep(self, accumulated_G: Vector, delivered: Part | None, mask: bytes) -> None:
        """A mean is taken in: what was accumulated is left, but for what was delivered.

        Args:
            accumulated_G: read only, not kept.
            delivered: of it, exactly this; None: all of it.
            mask: which parameters the gradients were of.
        """
        if delivered is None:
            self._left_G, self._mask = None, b""
            return
        if self._left_G is None:
            self._left_G = np.empty_like(accumulated_G)
        self._left_G[:] = accumulated_G
        delivered.remove_from(self._left_G)
        self._mask = mask

    def state_dict(self) -> dict[str, Any]:  # Any: a vector or None, and a mask
        """All of it."""
        return {"left": self._left_G, "mask": self._mask}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # Any: as above
        """Go on where `state_dict` was taken."""
        left_G = state["left"]
        self._left_G = None if left_G is None else np.array(left_G, np.float32)
        self._mask = state["mask"]

    def hold(self, left_G: Vector | None, mask: bytes) -> None:
        """Something else was not delivered either; None: nothing."""
        if left_G is None:
            return
        self._left_G = left_G.copy() if self._left_G is None else self._left_G + left_G
        bits = int.from_bytes(self._mask, "little") | int.from_bytes(mask, "little")
        self._mask = bits.to_bytes(max(len(self._mask), len(mask)), "little")

    def take(self) -> tuple[Vector, bytes] | None:
        """The residual and its mask, which is empty from now on; None if it was."""
        left_G, mask, self._left_G, self._mask = self._left_G, self._mask, None, b""
        return None if left_G is None else (left_G, mask)

    def vector(self, size: int) -> Vector:
        """The residual as it is: G numbers."""
        return np.zeros(size, np.float32) if self._left_G is None else self._left_G.copy()
