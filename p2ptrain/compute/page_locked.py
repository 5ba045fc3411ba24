"""Memory of the host that devices copy to and from by themselves, since it came more than once.

From ordinary memory a copy goes through pieces of pinned memory, and the host's part of it is the
slow one: one thread copies 4 to 11 GB/s, PCIe 5 carries 55. Page-locking makes memory that is there
already as good as pinned memory. It takes 40 us per megabyte, so that it pays for vectors that come
again: those of an exchange are used in turns, as long as the peer lives.

An entry lives as long as the array that owns the memory, and goes before the memory does. Memory
that cannot be locked (a limit of the system) is copied by pieces, as before.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from p2ptrain.compute.replica import Vector

LEAST_BYTES = 1 << 20
"""Smaller ones are copied by a piece or two."""


@dataclass(slots=True)
class _Owner:
    """An array that has come; its address is its key."""

    size_bytes: int
    is_locked: bool = False


class PageLocked:
    """What has come once, and what is locked; any thread.

    Args:
        lock: locks the pages of an address and a size in bytes; False: it cannot.
        unlock: takes that back.
    """

    def __init__(self, lock: Callable[[int, int], bool], unlock: Callable[[int], object]) -> None:
        self._lock_pages, self._unlock_pages = lock, unlock
        self._owners: dict[int, _Owner] = {}
        self._one_by_one = threading.Lock()
        self._is_refused = False

    def meet(self, vector: Vector) -> None:
        """Lock the memory of `vector`, all that its owner has, if it comes for the second time."""
        owner = vector
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        if owner.nbytes < LEAST_BYTES or not owner.flags.writeable or self._is_refused:
            return
        at = owner.ctypes.data
        with self._one_by_one:
            known = self._owners.get(at)
            if known is None:
                self._owners[at] = _Owner(owner.nbytes)
                weakref.finalize(owner, self._forget, at).atexit = False
            elif not known.is_locked:
                known.is_locked = self._lock_pages(at, known.size_bytes)
                self._is_refused = not known.is_locked

    def covers(self, tensor: Tensor) -> bool:
        """True if all of it is in memory that is locked."""
        first, size_bytes = tensor.data_ptr(), tensor.nbytes
        return any(
            one.is_locked and at <= first and first + size_bytes <= at + one.size_bytes
            for at, one in tuple(self._owners.items())
        )

    def _forget(self, at: int) -> None:
        """Its memory is about to go."""
        if self._owners.pop(at).is_locked:
            self._unlock_pages(at)


def _lock_by_cuda(at: int, size_bytes: int) -> bool:
    locked = torch.cuda.cudart().cudaHostRegister(at, size_bytes, 0)  # type: ignore[no-untyped-call]  # torch's
    if int(locked) == 0:
        return True
    with contextlib.suppress(RuntimeError):
        torch.empty(1, device="cuda").zero_()  # or the next kernel would report this error
    return False


def _unlock_by_cuda(at: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(at)  # type: ignore[no-untyped-call]  # torch's


BY_CUDA = PageLocked(_lock_by_cuda, _unlock_by_cuda)
"""That of this process, for all its CUDA devices (ROCm's, too)."""
