"""A state as it arrives from other peers: in memory while it is small, otherwise in a file.

A state may be several times as large as the model, whose memory alone is budgeted. Its file has no
name, so that nothing of it stays behind. Chunks arrive in any order, and each may be read as soon
as it is here, also while others are still missing: peers that load one state pass it on.
"""

import mmap
import os
import tempfile
import weakref

SMALL_BYTES = 1 << 20
"""Smaller states stay in memory: a simulated world has more peers than file descriptors."""


class StateFile:
    """Room for `size` bytes. Raises OSError if there is none on the disk."""

    def __init__(self, size: int) -> None:
        self._memory: bytearray | None = None
        if size <= SMALL_BYTES:
            self._memory = bytearray(size)
            self._view = memoryview(self._memory).toreadonly()
            return
        with tempfile.TemporaryFile() as file:
            file.truncate(size)
            self._view = memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ))
            self._file = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._file)

    def write(self, start: int, payload: memoryview | bytes) -> None:
        """Write these bytes at `start`.

        By a call and not through the mapping, where a full disk would be a signal and no error.

        Raises:
            OSError: if there is no room on the disk.
        """
        if self._memory is not None:
            self._memory[start : start + len(payload)] = payload
            return
        left = memoryview(payload)
        while left:
            written = os.pwrite(self._file, left, start)
            start, left = start + written, left[written:]

    def read(self, start: int, stop: int) -> memoryview:
        """What was written there; it does not change any more."""
        return self._view[start:stop]
