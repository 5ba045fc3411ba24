"""Hold vectors in memory that other processes of this machine can read, and map theirs.

The memory is an anonymous file (memfd), so a process that dies leaves nothing behind. A receiver
opens it through the sender's entry in /proc, with the process id that the kernel reports for the
connection, and only if it is such a file: no sender can make it open anything else. Where that is
not allowed (containers of different users), chunks travel as bytes. The file is sealed: its size
cannot change any more. A receiver maps no other, since to read memory that its owner has cut off
kills the reader (SIGBUS).
"""

import contextlib
import fcntl
import functools
import mmap
import os
import struct
import weakref
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from p2ptrain.errors import CodecError
from p2ptrain.vectors import Vector

REFERENCE = struct.Struct("<IQQQ")
"""File of the sender's process, number of the vector; where in it, and how many bytes."""

SHARED_NAME = "p2ptrain-vector"

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Of shared memory: its size is final, and so are its seals."""


def this_machine() -> str:
    """Identify the machine and network namespace; empty where nothing can be shared.

    Abstract Unix sockets reach exactly as far.
    """
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    return ""


class SharedVectors:
    """Vectors that other processes of this machine can read."""

    def __init__(self) -> None:
        self._stand: dict[int, _Place] = {}  # by address
        self._made = 0

    def take(self, size: int) -> Vector:
        """A float32 vector of `size` numbers; its memory is freed with the last array on it."""
        self._made += 1
        size_bytes = max(4 * size, 1)
        file = os.memfd_create(f"{SHARED_NAME}-{self._made}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(file, size_bytes)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, SEALS)
        vector: Vector = np.frombuffer(mmap.mmap(file, size_bytes), np.float32, size)
        at = vector.ctypes.data
        self._stand[at] = _Place(file, self._made, size_bytes)
        weakref.finalize(vector, self._forget, at)
        return vector

    def find(self, payload: memoryview) -> bytes | None:
        """A reference to `payload`, if it is in one of our vectors."""
        at = _address(payload)
        for start, place in self._stand.items():
            if start <= at and at + payload.nbytes <= start + place.size_bytes:
                return REFERENCE.pack(place.file, place.number, at - start, payload.nbytes)
        return None

    def _forget(self, at: int) -> None:
        os.close(self._stand.pop(at).file)


@dataclass(frozen=True, slots=True)
class _Place:
    file: int
    number: int  # unlike a file's, never used again
    size_bytes: int


@functools.cache
def _device_of_memory() -> int:
    """That of ordinary anonymous files; huge pages are of another, and may lack at a read."""
    file = os.memfd_create("p2ptrain-probe")
    try:
        return os.fstat(file).st_dev
    finally:
        os.close(file)


def map_vector(process: int, file: int, number: int) -> memoryview:
    """Map another process's shared vector, to read it.

    Raises:
        CodecError: if `file` of `process` is not the sealed memory of its vector `number`.
    """
    path = f"/proc/{process}/fd/{file}"
    try:
        if os.readlink(path) != f"/memfd:{SHARED_NAME}-{number} (deleted)":
            raise CodecError("a reference to a file that is not a shared vector")
        opened = os.open(path, os.O_RDONLY)
        try:
            if not fcntl.fcntl(opened, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise CodecError("a reference to memory that its owner could cut off")
            if os.fstat(opened).st_dev != _device_of_memory():
                raise CodecError("a reference to memory of another kind")
            return memoryview(mmap.mmap(opened, 0, prot=mmap.PROT_READ))
        finally:
            os.close(opened)
    except (OSError, ValueError) as error:
        raise CodecError(f"a reference to memory that cannot be mapped: {error}") from error


def drop_pages(read: memoryview) -> None:
    """Have these bytes of a mapped vector count as its owner's alone; a second look is as good."""
    mapped = read.obj
    if not isinstance(mapped, mmap.mmap):
        return
    at = _address(read) - _address(mapped)
    first, stop = -(-at // mmap.PAGESIZE), (at + read.nbytes) // mmap.PAGESIZE
    if first < stop:
        size_bytes = (stop - first) * mmap.PAGESIZE
        mapped.madvise(mmap.MADV_DONTNEED, first * mmap.PAGESIZE, size_bytes)


def size_of_mapped(read: memoryview) -> int:
    """The bytes of the whole vector that these are of."""
    return len(read.obj) if isinstance(read.obj, mmap.mmap) else read.nbytes


def _address(memory: memoryview | mmap.mmap) -> int:
    at: int = np.frombuffer(memory, np.uint8).ctypes.data
    return at
