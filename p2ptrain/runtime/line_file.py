"""A file of lines that has whole ones only, also on a disk that is full for a while."""

import errno
import os
from pathlib import Path


class LineFile:
    """Appends lines, unbuffered: a killed process loses none that was appended.

    Raises:
        OSError: if the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self.size = 0
        """Bytes in the file."""
        self._open()

    def append(self, lines: str) -> None:
        """Append all of these, or nothing.

        Raises:
            OSError: naming the file, which is as it was before.
        """
        data = lines.encode()
        try:
            descriptor = self._open() if self._descriptor is None else self._descriptor
            written = os.write(descriptor, data)
            if written < len(data):
                os.ftruncate(descriptor, self.size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error
        self.size += written

    def close(self) -> None:
        """Close the file; `append` opens it, or a new one, again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._descriptor = os.open(self._path, flags, 0o666)
        self.size = os.fstat(self._descriptor).st_size
        return self._descriptor
