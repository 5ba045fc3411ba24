"""Write safetensors piece by piece: no tensor is copied on the way to its file.

The library writes a file of tensors that it has all at once, each in memory of its own; a replica's
would be there twice. The format is a length, a header of JSON, and the numbers
(https://huggingface.co/docs/safetensors/index#format); the library reads what is written here.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from p2ptrain.errors import StateError

Data = bytes | memoryview

ALIGNMENT = 8
"""Bytes; the numbers begin at a multiple of it."""

DTYPES = {
    "complex64": ("C64", 8),
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint64": ("U64", 8),
    "uint32": ("U32", 4),
    "uint16": ("U16", 2),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}
"""By numpy's and torch's word: that of the format, and the bytes of a number."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor, of which the numbers are asked for when it is their turn."""

    dtype: str
    """A key of `DTYPES`."""
    shape: Sequence[int]
    numbers: Callable[[], Data]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise StateError(f"a file of tensors cannot hold numbers of {self.dtype}")

    @property
    def size(self) -> int:
        """In bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype][1]


def entry_of(array: NDArray[np.generic]) -> Entry:
    """Of numpy's numbers, of one of the `DTYPES`."""
    ordered = np.ascontiguousarray(array).reshape(-1)
    return Entry(array.dtype.name, array.shape, lambda: bytes_of(ordered))


def bytes_of(numbers: NDArray[Any]) -> memoryview:  # Any: of any kind
    """The memory of contiguous numbers."""
    return numbers.view(np.uint8).data


def write_entries(
    entries: Mapping[str, Entry], metadata: Mapping[str, str], write: Callable[[Data], object]
) -> None:
    """Give the file to `write`, in order: the header first, then each tensor's numbers.

    Those with the widest numbers first, so that each begins at a multiple of its number's size.
    """
    entries = dict(sorted(entries.items(), key=lambda one: -DTYPES[one[1].dtype][1]))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for name, entry in entries.items():
        code, end = DTYPES[entry.dtype][0], at + entry.size
        header[name] = {"dtype": code, "shape": list(entry.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    write(len(text).to_bytes(8, "little") + text)
    for entry in entries.values():
        if entry.size:
            write(entry.numbers())
