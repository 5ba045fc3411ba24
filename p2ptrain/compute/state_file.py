"""A state as it arrives from another peer: in memory while it is small, otherwise in a file.

A state may be several times as large as the model, whose memory alone is budgeted. Its file has no
name, so that nothing of it stays behind.
"""

import mmap
import tempfile

from p2ptrain.compute.replica import State

SMALL_BYTES = 1 << 20
"""Smaller states stay in memory: a simulated world has more peers than file descriptors."""


def contents(file: "tempfile.SpooledTemporaryFile[bytes]") -> State:
    """All that was written; it survives the file."""
    if file.tell() > SMALL_BYTES:
        file.flush()  # a mapping shows what the file has, not what its buffer has
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    file.seek(0)
    return file.read()
