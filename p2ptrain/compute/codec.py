"""Chunks of a vector as bytes and back: float32 as it is, or fewer bytes and a little rounding.

=====  ===============================================  =========  ================================
name   what stands in the bytes (little-endian)         bytes per  how far a number moves at most
                                                        number
=====  ===============================================  =========  ================================
fp32   the numbers                                      4          not at all
bf16   the upper half of each, rounded                  2          2^-8 of itself
fp16   a scale for every 256 numbers, a half for each   2.02       2^-11 of itself, or 2^-39 of the
                                                                   largest of the 256
int8   a scale for every 256 numbers, a byte for each   1.02       1/254 of the largest of the 256
int4   the upper half of a scale for every 64 numbers,  0.53       1/14 of the largest of the 64
       then two numbers in each byte
=====  ===============================================  =========  ================================

Every conversion rounds to nearest, ties to even, in operations that IEEE 754 defines to the last
bit: each machine makes the same bytes of the same numbers, and the same numbers of the same bytes.
It is numpy, not torch: torch may use instructions that flush the smallest numbers to zero, starts
threads beside the trainer's, and is not there in the simulator.

**What is too large.** A half ends at 65504, which a sum of gradients passes easily, and a smaller
number than 2^-24 would be nothing. So halves are scaled, by a power of two, which costs no
precision. What rounds beyond the end of float32 itself becomes infinite.

**What is not finite** stays so and is refused by the receiver: bf16 has infinities and NaN of its
own, a block of fp16, int8 or int4 that holds one gets NaN as its scale.

**Four bits.** There are 15 levels, from -7 to 7, stored as 1 to 15; the first of two numbers is in
the lower half of its byte, and an odd last one has a zero beside it. A scale is a float32 cut to
its upper half: so the largest of a block is at most 7.06 scales, which rounds to 7, and 7 scales
are finite. Blocks of 64 err less than blocks of 128 with whole scales, which take as many bytes:
by 9 % where gradients are normal, by 20 % where they are of Student's t with 3 degrees of freedom.

**A lossy codec in an average.** Let Q be encode and decode. Members contribute Q(s), the owner of a
share computes the mean m of those and hands out Q(m). Each member adds Q(m) - Q(s), and the owner
m - Q(m) once for each member, to what it has then. That sums to zero, so nothing is lost: what
rounding takes from a message stays with its sender. To add Q(m) - s instead loses most of what
training does, whose steps are smaller than what rounding erases (`tests/compute/test_codec.py`).
What stays with senders keeps them apart: a member by what one rounding takes, an owner in a group
of g by g times as much. With four bits that is up to g/14 of the largest weight of a block, so
int4 is for gradients, of which all members receive the same bits.

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

INT8_LARGEST = np.float32(127)
INT4_LARGEST = np.float32(7)
INT4_BLOCK = 64
"""Of int4, whose numbers of a block are coarse if one of them is large; `BATCH` is a multiple."""

INT4_ZERO = 8
"""What stands for 0."""

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

    `block` is how many numbers share a scale, `scale_kind` the dtype of a scale in the bytes.

    Args:
        kind: the dtype of a number in the bytes; of `_Packed`, of two.
        scales_of: the scales of blocks, given the largest magnitude in each; no quotient of a
            number and its scale may be beyond `kind`, after rounding.
    """

    is_exact = False
    block = BLOCK
    scale_kind: np.dtype[np.generic] = np.dtype("<f4")

    def __init__(self, name: str, kind: str, scales_of: Callable[[Vector], Vector]) -> None:
        self.name = name
        self._kind = np.dtype(kind)
        self._scales_of = scales_of

    def encoded_size(self, count: int) -> int:
        return self._scales_size(count) + self._kind.itemsize * count

    def encode(self, values_S: Vector, into: memoryview) -> None:
        _check_size(self, into, len(values_S))
        scales, numbers = self._parts(into, len(values_S))
        scratch = np.empty(min(BATCH, len(values_S)), np.float32)
        with np.errstate(all="ignore"):  # a block that is not finite is marked by its scale
            for at, blocks_at in self._batches(len(values_S)):
                scaled = scratch[: at.stop - at.start]
                self._write_scales(self._scale(values_S[at], scaled), scales[blocks_at])
                self._write(scaled, numbers, at)

    def _scale(self, values: Vector, scaled: Vector) -> Vector:
        """Fill `scaled`; returns the scales of the blocks."""
        np.abs(values, out=scaled)
        # Not `max(axis=1)`, which takes twice as long for rows of 64.
        largest = np.maximum.reduceat(scaled, np.arange(0, len(values), self.block))
        scales = self._scales_of(largest)
        factors = np.where(scales > 0, np.float32(1) / scales, np.float32(0))
        np.multiply(self._rows(values), factors[:, np.newaxis], out=self._rows(scaled))
        return np.where(np.isfinite(largest), scales, np.float32(np.nan))

    def decode(self, payload: memoryview, into_S: Vector) -> None:
        _check_size(self, payload, len(into_S))
        written, numbers = self._parts(payload, len(into_S))
        scales = self._read_scales(written)
        if not (scales >= 0).all() or np.isinf(scales).any():  # the first fails for NaN too
            raise CodecError(f"{self.name} with a scale that cannot be one: numbers not finite")
        with np.errstate(all="ignore"):  # a hostile scale may overflow: numbers to be checked
            for at, blocks_at in self._batches(len(into_S)):
                self._read(numbers, at, into_S[at])
                rows = self._rows(into_S[at])
                np.multiply(rows, scales[blocks_at, np.newaxis], out=rows)

    # How scales and numbers stand in the bytes.

    def _write_scales(self, scales: Vector, into: NDArray[np.generic]) -> None:
        into[:] = scales

    def _read_scales(self, written: NDArray[np.generic]) -> Vector:
        return written.astype(np.float32, copy=False)

    def _write(self, scaled: Vector, numbers: NDArray[np.generic], at: slice) -> None:
        """Those of a batch, which `at` says among all; `scaled` may be overwritten."""
        if self._kind.kind == "i":
            np.rint(scaled, out=scaled)
        numbers[at] = scaled

    def _read(self, numbers: NDArray[np.generic], at: slice, into: Vector) -> None:
        into[:] = numbers[at]

    # What belongs together.

    def _parts(
        self, data: memoryview, count: int
    ) -> tuple[NDArray[np.generic], NDArray[np.generic]]:
        scales = np.frombuffer(data, self.scale_kind, count=self._block_count(count))
        numbers = np.frombuffer(data, self._kind, offset=self._scales_size(count))
        return scales, numbers

    def _scales_size(self, count: int) -> int:
        return self.scale_kind.itemsize * self._block_count(count)

    def _block_count(self, count: int) -> int:
        return -(-count // self.block)

    def _batches(self, count: int) -> Iterator[tuple[slice, slice]]:
        """Numbers and blocks to work on together: whole blocks, then what is left."""
        block = self.block
        whole = count // block * block
        for start in range(0, whole, BATCH):
            stop = min(start + BATCH, whole)
            yield slice(start, stop), slice(start // block, stop // block)
        if whole < count:
            yield slice(whole, count), slice(whole // block, whole // block + 1)

    def _rows(self, values: Vector) -> Rows:
        """The blocks of a batch: whole ones, or the last of a chunk, possibly shorter."""
        is_whole = len(values) % self.block == 0
        return values.reshape(-1, self.block) if is_whole else values.reshape(1, -1)


class _Packed(_Scaled):
    """The same with two numbers in a byte, and scales that are the upper halves of float32."""

    block = INT4_BLOCK
    scale_kind = np.dtype("<u2")

    def __init__(self, name: str) -> None:
        super().__init__(name, "u1", _int4_scales)

    def encoded_size(self, count: int) -> int:
        return self._scales_size(count) + -(-count // 2)

    def _write_scales(self, scales: Vector, into: NDArray[np.generic]) -> None:
        into[:] = scales.view(np.uint32) >> 16

    def _read_scales(self, written: NDArray[np.generic]) -> Vector:
        return (written.astype(np.uint32) << 16).view(np.float32)

    def _write(self, scaled: Vector, numbers: NDArray[np.generic], at: slice) -> None:
        np.rint(scaled, out=scaled)
        np.add(scaled, INT4_ZERO, out=scaled)
        pairs = np.full(-(-len(scaled) // 2), INT4_ZERO << 8, "<u2")
        pairs.view(np.uint8)[: len(scaled)] = scaled
        numbers[_bytes_at(at)] = (pairs | pairs >> 4).astype(np.uint8)

    def _read(self, numbers: NDArray[np.generic], at: slice, into: Vector) -> None:
        pairs = numbers[_bytes_at(at)].astype("<u2")
        levels = ((pairs | pairs << 4) & 0x0F0F).view(np.int8)
        into[:] = levels[: len(into)] - np.int8(INT4_ZERO)


def _bytes_at(at: slice) -> slice:
    """Where numbers of 4 bits are; they start with an even one."""
    return slice(at.start // 2, -(-at.stop // 2))


def _int8_scales(largest: Vector) -> Vector:
    scales = largest / INT8_LARGEST
    scales[scales < SMALLEST_NORMAL] = 0  # its reciprocal would be infinite
    return scales


def _int4_scales(largest: Vector) -> Vector:
    scales = largest / INT4_LARGEST
    scales[scales < SMALLEST_NORMAL] = 0
    scales.view(np.uint32)[:] &= np.uint32(0xFFFF0000)
    return scales


def _half_scales(largest: Vector) -> Vector:
    _, exponents = np.frexp(largest)
    lowered = np.clip(exponents - HALF_EXPONENT, LOWEST_EXPONENT, None)
    scales: Vector = np.ldexp(np.float32(1), lowered)
    return scales


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
        _Scaled("int8", "i1", _int8_scales),
        _Packed("int4"),
    )
}
