"""The port to a file system that checkpoints are written through, and the real one.

Every change of the disk is one call, so that a test can end the process after any of them
(`sim/files.py`).
"""

import mmap
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

from p2ptrain.compute.replica import State
from p2ptrain.compute.tensor_file import Data


class OpenFile(Protocol):
    """A file that is being written."""

    def write(self, data: Data) -> None:
        """Append all of it."""
        ...

    def finish(self) -> None:
        """Bring all of it to the disk, and close."""
        ...


class Files(Protocol):
    """What may be done with files; everything raises OSError."""

    def names(self, folder: Path) -> Sequence[str]:
        """What is in a folder, sorted; nothing if there is none."""
        ...

    def create(self, path: Path) -> OpenFile:
        """A new file, empty; its folder is made."""
        ...

    def overwrite(self, path: Path) -> OpenFile:
        """A file that is there, from its beginning on; `finish` cuts off what is left of it.

        Its room on the disk and in memory is used again. What has another name for it keeps it.
        """
        ...

    def read(self, path: Path) -> State:
        """All of a file."""
        ...

    def rename(self, old: Path, new: Path) -> None:
        """Rename a folder; on the disk, with all that is in it, when this returns."""
        ...

    def remove(self, path: Path) -> None:
        """A file."""
        ...

    def remove_folder(self, folder: Path) -> None:
        """With all that is in it."""
        ...


class _DiskFile:
    def __init__(self, path: Path, mode: Literal["xb", "r+b"]) -> None:
        self._file = path.open(mode, buffering=0)

    def write(self, data: Data) -> None:
        left = memoryview(data).cast("B")
        while left.nbytes:
            left = left[self._file.write(left) :]

    def finish(self) -> None:
        self._file.truncate()
        os.fsync(self._file.fileno())
        self._file.close()


class DiskFiles:
    """Implements `Files` on the disk."""

    def names(self, folder: Path) -> Sequence[str]:
        return sorted(os.listdir(folder)) if folder.is_dir() else ()

    def create(self, path: Path) -> OpenFile:
        _make_lasting(path.parent.parent)  # what is in it lasts once it is renamed
        path.parent.mkdir(exist_ok=True)
        return _DiskFile(path, "xb")

    def overwrite(self, path: Path) -> OpenFile:
        if path.stat().st_nlink == 1:
            return _DiskFile(path, "r+b")
        path.unlink()
        return _DiskFile(path, "xb")

    def read(self, path: Path) -> State:
        with path.open("rb") as file:
            if not os.fstat(file.fileno()).st_size:
                return b""
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    def rename(self, old: Path, new: Path) -> None:
        _sync_folder(old)
        old.rename(new)
        _sync_folder(new.parent)

    def remove(self, path: Path) -> None:
        path.unlink()

    def remove_folder(self, folder: Path) -> None:
        shutil.rmtree(folder)


def _make_lasting(folder: Path) -> None:
    """Make this folder, on the disk, if there is none: a file in a folder that is lost is lost."""
    if not folder.is_dir():
        _make_lasting(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
