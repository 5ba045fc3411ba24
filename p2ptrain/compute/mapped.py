"""What is long, and needed once or twice: in a file without a name, mapped from there.

It takes room on the disk (in ``TMPDIR``), and not memory beside the model: the kernel can write it
out and drop it.
"""

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from numpy.typing import NDArray

from p2ptrain.compute.tensor_file import Data
from p2ptrain.errors import StateError
from p2ptrain.vectors import LONG, Vector


@contextmanager
def file_place() -> Iterator[Path]:
    """A place for one file; what is mapped from there outlives it. Raises StateError."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder) / "state"
    except (OSError, safetensors.SafetensorError) as error:  # reading has caught the latter
        where, line = tempfile.gettempdir(), first_line(error)
        raise StateError(
            f"a replica's state cannot be kept in {where} ({line}); make room there, "
            f"or name another folder in TMPDIR"
        ) from error


def mapped(write_all: Callable[[Callable[[Data], object]], object]) -> memoryview:
    """What is written by this, in a file that is mapped. Raises StateError if the disk is full."""
    with file_place() as path:
        with path.open("wb") as file:
            write_all(file.write)
        with path.open("rb") as written:
            return memoryview(mmap.mmap(written.fileno(), 0, access=mmap.ACCESS_READ))


def vector_beside(size: int) -> Vector:
    """A float32 vector of `size` numbers, contents arbitrary; if it is long, in a file.

    Raises StateError if the disk is full.
    """
    if size < LONG:
        return np.empty(size, np.float32)
    with file_place() as path, path.open("w+b") as file:
        os.posix_fallocate(file.fileno(), 0, 4 * size)  # or a full disk would kill who writes
        return np.frombuffer(mmap.mmap(file.fileno(), 4 * size), np.float32)


def copy_beside(array: NDArray[Any]) -> NDArray[Any]:  # Any: of any dtype
    """A copy; if it is long, in a file. Raises what `vector_beside` does."""
    if array.nbytes < 4 * LONG:
        return array.copy()
    memory = vector_beside(-(-array.nbytes // 4)).view(np.uint8)[: array.nbytes]
    copy = memory.view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def first_line(error: BaseException) -> str:
    """What a sentence has room for."""
    return str(error).split("\n", 1)[0][:200]
