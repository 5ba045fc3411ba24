"""Files in memory, for simulated worlds, which may crash after any change.

What was written and not brought to the disk (`OpenFile.finish`) may be there after a crash, or a
part of it, or nothing: `crash` draws that.
"""

from collections.abc import Sequence
from pathlib import Path
from random import Random

from p2ptrain.compute.replica import State
from p2ptrain.compute.tensor_file import Data


class Crashed(BaseException):
    """The process ends here; no handler of errors may go on."""


class MemoryFiles:
    """Implements `Files`."""

    def __init__(self) -> None:
        self.contents: dict[Path, bytearray] = {}
        self._loose: set[Path] = set()
        self.changes = 0
        """How many there have been."""
        self.crash_after: int | None = None
        """The process crashes after so many changes."""

    def crash(self, chance: Random) -> None:
        """Lose of each file that was not finished what the disk may not have."""
        for path in sorted(self._loose & self.contents.keys()):
            data = self.contents[path]
            del data[chance.randint(0, len(data)) :]
        self._loose.clear()
        self.crash_after = None

    def names(self, folder: Path) -> Sequence[str]:
        depth = len(folder.parts)
        return sorted({path.parts[depth] for path in self._within(folder)})

    def _within(self, folder: Path) -> list[Path]:
        """The files in it and in its folders."""
        parts = folder.parts
        depth = len(parts)  # `folder in path.parents` would make a path of each folder above
        return [path for path in self.contents if path.parts[:depth] == parts and path != folder]

    def create(self, path: Path) -> "MemoryFile":
        if path in self.contents:
            raise FileExistsError(17, "File exists", str(path))
        self.contents[path] = bytearray()
        return self.overwrite(path)

    def overwrite(self, path: Path) -> "MemoryFile":
        self._loose.add(path)
        self._changed()
        return MemoryFile(self, path)

    def read(self, path: Path) -> State:
        if path not in self.contents:
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return bytes(self.contents[path])

    def rename(self, old: Path, new: Path) -> None:
        for path in self._within(old):
            self.contents[new / path.relative_to(old)] = self.contents.pop(path)
        self._changed()

    def remove(self, path: Path) -> None:
        del self.contents[path]
        self._changed()

    def remove_folder(self, folder: Path) -> None:
        for path in self._within(folder):
            self.remove(path)

    def write(self, path: Path, at: int, data: Data) -> None:
        """In two pieces, between which it may crash."""
        data, half = bytes(data), len(data) // 2
        for piece in (data[:half], data[half:]):
            self.contents[path][at : at + len(piece)] = piece
            at += len(piece)
            self._changed()

    def finish(self, path: Path, size: int) -> None:
        """It survives a crash."""
        del self.contents[path][size:]
        self._loose.discard(path)
        self._changed()

    def _changed(self) -> None:
        self.changes += 1
        if self.changes == self.crash_after:
            raise Crashed


class MemoryFile:
    """Implements `OpenFile`."""

    def __init__(self, files: MemoryFiles, path: Path) -> None:
        self._files = files
        self._path = path
        self._at = 0

    def write(self, data: Data) -> None:
        self._files.write(self._path, self._at, data)
        self._at += memoryview(data).nbytes

    def finish(self) -> None:
        self._files.finish(self._path, self._at)
