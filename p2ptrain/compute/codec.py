"""Chunks of a vector as bytes and back: float32 as it is, or fewer bytes and a little rounding.

=====  ===============================================  =========  ================================
name   what stands in the bytes (little-endian)         bytes per  how far a number moves at most
                                                        number
=====  ===============================================  =========  ================================
fp32   the numbers                                      4          not at all
bf16   the upper half of each, rounded                  2          2^-8 of itself
fp16   a scale for every 256 numbers, a half for each   2.02       2^-11 of itself, or 2^-40 of the
                                                                   largest of the 256
int8   a scale for every 256 numbers, a byte for each   1.02       1/254 of the largest of the 256
=====  ===============================================  =========  ================================

Every conversion rounds to nearest, ties to even, in operations that IEEE 754 defines to the last
bit: each machine makes the same bytes of the same numbers, and the same numbers of the same bytes.
It is numpy, not torch: torch may use instructions that flush the smallest numbers to zero, starts
threads beside the trainer's, and is not there in the simulator.

**What is too large.** A half ends at 65504, which a sum of gradients passes easily, and a smaller
number than 2^-24 would be nothing. So halves are scaled, by a power of two, which costs no
precision. What rounds beyond the end of float32 itself becomes infinite.

**What is not finite** stays so and is refused by the receiver: bf16 has infinities and NaN of its
own, a block of fp16 or int8 that holds one gets NaN as its scale.

**A lossy codec in an average.** Let Q be encode and decode. Members contribute Q(s), the owner of a
share computes the mean m of those and hands out Q(m). Each member adds Q(m) - Q(s), and the owner
m - Q(m) once for each member, to what it has then. That sums to zero, so nothing is lost: what
rounding takes from a message stays with its sender. To add Q(m) - s instead loses most of what
training does, whose steps are smaller than what rounding erases (`tests/compute/test_codec.py`).

Legend of shapes: ``S`` numbers of a chunk.
"""

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from p2ptrain.compute.replica import Vector
from p2ptrain.errors import CodecError, ConfigError

PLAIN = "fp32"
"""Numbers as they are."""

BLOCK = 256
"""Numbers that share a scale. Larger: a few bytes less; smaller: less rounding beside a large one.
"""

BATCH = 1 << 15
"""Numbers that are worked on at a time, in a core's cache; a multiple of `BLOCK`."""

SCALE_BYTES = 4
INT8_LARGEST = np.float32(127)
SMALLEST_NORMAL = np.finfo(np.float32).smallest_normal
BF16_NAN = 0x7FC0
HALF_EXPONENT = 15
"""Scaled halves lie below 2 to this power."""

LOWEST_EXPONENT = -126
"""Of a float32 with all its digits, and so of a scale."""

Rows = NDArray[np.float32]
"""Blocks, one per row; there are no more than `BATCH` numbers."""


class Codec(Protocol):
    """One way to write float32 numbers down. Has no state; any thread may use it."""

    @property
    def name(self) -> str:
        """As in a configuration."""
        ...

    @property
    def is_exact(self) -> bool:
        """True if what is decoded is what was encoded."""
        ...

    def encoded_size(self, count: int) -> int:
        """Bytes that `count` numbers take."""
        ...

    def encode(self, values_S: Vector, into: memoryview) -> None:
        """Write all of `values_S` into the bytes of `into`.

        Raises:
            CodecError: if `into` does not have `encoded_size(S)` bytes.
        """
        ...

    def decode(self, payload: memoryview, into_S: Vector) -> None:
        """Read as many numbers as `into_S` has; `payload` is only read, and not kept.

        Numbers that are not finite are the caller's to check.

        Raises:
            CodecError: if `payload` does not have `encoded_size(S)` bytes, or says in a scale that
                its sender's numbers are not finite. `into_S` holds anything then.
        """
        ...


def load_codec(name: str, setting: str = "codec") -> Codec:
    """The codec of that name, which is the value of `setting`. Raises ConfigError."""
    if name not in CODECS:
        raise ConfigError(f"{setting} = {name!r} is unknown; choose one of {', '.join(CODECS)}")
    return CODECS[name]


class _Plain:
    """float32 as it is."""

    name = "fp32"
    is_exact = True

    def encoded_size(self, count: int) -> int:
        return 4 * count

    def encode(self, values_S: Vector, into: memoryview) -> None:
        _check_size(self, into, len(values_S))
        np.frombuffer(into, "<f4")[:] = values_S

    def decode(self, payload: memoryview, into_S: Vector) -> None:
        _check_size(self, payload, len(into_S))
        into_S[:] = np.frombuffer(payload, "<f4")


class _UpperHalf:
    """bfloat16: the upper half of a float32."""

    name = "bf16"
    is_exact = False

    def encoded_size(self, count: int) -> int:
        return 2 * count

    def encode(self, values_S: Vector, into: memoryview) -> None:
        _check_size(self, into, len(values_S))
        halves_S = np.frombuffer(into, "<u2")
        scratch = np.empty(min(BATCH, len(values_S)), np.uint32)
        for start in range(0, len(values_S), BATCH):
            values = values_S[start : start + BATCH]
            bits, rounded = values.view(np.uint32), scratch[: len(values)]
            # Half of the last place that stays, less one bit unless that place is odd: the carry
            # rounds to nearest, ties to even. It would run through a NaN to zero.
            np.right_shift(bits, 16, out=rounded)
            np.bitwise_and(rounded, 1, out=rounded)
            np.add(rounded, 0x7FFF, out=rounded)
            np.add(rounded, bits, out=rounded)
            np.right_shift(rounded, 16, out=rounded)
            rounded[np.isnan(values)] = BF16_NAN
            halves_S[start : start + BATCH] = rounded

    def decode(self, payload: memoryview, into_S: Vector) -> None:
        _check_size(self, payload, len(into_S))
        bits_S, halves_S = into_S.view(np.uint32), np.frombuffer(payload, "<u2")
        for start in range(0, len(into_S), BATCH):
            bits = bits_S[start : start + BATCH]
            bits[:] = halves_S[start : start + BATCH]
            np.left_shift(bits, 16, out=bits)


class _Scaled:
    """A scale for every block, then all numbers in units of their block's scale.

    Args:
        kind: the dtype of a number in the bytes.
        scales_of: the scales of blocks, given the largest magnitude in each; no quotient of a
            number and its scale may be beyond `kind`.
    """

    is_exact = False

    def __init__(self, name: str, kind: str, scales_of: Callable[[Vector], Vector]) -> None:
        self.name = name
        self._kind = np.dtype(kind)
        self._scales_of = scales_of

    def encoded_size(self, count: int) -> int:
        return SCALE_BYTES * _block_count(count) + self._kind.itemsize * count

    def encode(self, values_S: Vector, into: memoryview) -> None:
        _check_size(self, into, len(values_S))
        scales, numbers_S = self._parts(into, len(values_S))
        scratch = np.empty(min(BATCH, len(values_S)), np.float32)
        for at, blocks_at in _batches(len(values_S)):
            scales[blocks_at] = self._encode(values_S[at], scratch, numbers_S[at])

    def _encode(self, values: Vector, scratch: Vector, numbers: NDArray[np.generic]) -> Vector:
        """Fill `numbers`; returns the scales of the blocks."""
        scaled = _rows(scratch[: len(values)])
        with np.errstate(all="ignore"):  # a block that is not finite is marked by its scale
            np.abs(_rows(values), out=scaled)
            largest = scaled.max(axis=1)
            scales = self._scales_of(largest)
            factors = np.where(scales > 0, np.float32(1) / scales, np.float32(0))
            np.multiply(_rows(values), factors[:, np.newaxis], out=scaled)
            if self._kind.kind == "i":
                np.rint(scaled, out=scaled)
            numbers[:] = scaled.reshape(-1)
        return np.where(np.isfinite(largest), scales, np.float32(np.nan))

    def decode(self, payload: memoryview, into_S: Vector) -> None:
        _check_size(self, payload, len(into_S))
        scales, numbers_S = self._parts(payload, len(into_S))
        if not (scales >= 0).all() or np.isinf(scales).any():  # the first fails for NaN too
            raise CodecError(f"{self.name} with a scale that cannot be one: numbers not finite")
        with np.errstate(all="ignore"):  # a hostile scale may overflow: numbers to be checked
            for at, blocks_at in _batches(len(into_S)):
                into_S[at] = numbers_S[at]
                rows = _rows(into_S[at])
                np.multiply(rows, scales[blocks_at, np.newaxis], out=rows)

    def _parts(self, data: memoryview, count: int) -> tuple[Vector, NDArray[np.generic]]:
        blocks = _block_count(count)
        scales = np.frombuffer(data, "<f4", count=blocks)
        return scales, np.frombuffer(data, self._kind, offset=SCALE_BYTES * blocks)


def _integer_scales(largest: Vector) -> Vector:
    scales = largest / INT8_LARGEST
    scales[scales < SMALLEST_NORMAL] = 0  # its reciprocal would be infinite
    return scales


def _half_scales(largest: Vector) -> Vector:
    _, exponents = np.frexp(largest)
    lowered = np.clip(exponents - HALF_EXPONENT, LOWEST_EXPONENT, None)
    scales: Vector = np.ldexp(np.float32(1), lowered)
    return scales


def _rows(values: Vector) -> Rows:
    """The blocks of a batch: whole ones, or the last of a chunk, possibly shorter."""
    return values.reshape(-1, BLOCK) if len(values) % BLOCK == 0 else values.reshape(1, -1)


def _batches(count: int) -> Iterator[tuple[slice, slice]]:
    """Numbers and blocks to work on together: whole blocks, then what is left."""
    whole = count // BLOCK * BLOCK
    for start in range(0, whole, BATCH):
        stop = min(start + BATCH, whole)
        yield slice(start, stop), slice(start // BLOCK, stop // BLOCK)
    if whole < count:
        yield slice(whole, count), slice(whole // BLOCK, whole // BLOCK + 1)


def _block_count(count: int) -> int:
    return -(-count // BLOCK)


def _check_size(codec: Codec, data: memoryview, count: int) -> None:
    due = codec.encoded_size(count)
    if data.nbytes != due:
        raise CodecError(f"{data.nbytes} bytes of {codec.name} where {count} numbers take {due}")


CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        _Plain(),
        _UpperHalf(),
        _Scaled("fp16", "<f2", _half_scales),
        _Scaled("int8", "i1", _integer_scales),
    )
}
