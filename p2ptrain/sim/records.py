"""Records of a world's peers, on their way to files.

A world may have more peers than a process may have files open, and writes much faster than a real
swarm: so lines are kept, and appended when somebody wants to read them.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from p2ptrain.ids import Seconds


class RecordFile:
    """Implements `Metrics`: keeps lines until they are flushed to a file."""

    def __init__(self, path: Path, clock: Callable[[], Seconds]) -> None:
        self._path = path
        self._clock = clock
        self._lines: list[str] = []

    def record(self, kind: str, **fields: Any) -> None:  # Any: whatever JSON can hold
        """Keep one line."""
        self._lines.append(json.dumps({"kind": kind, "t": self._clock(), **fields}))

    def flush(self) -> None:
        """Append what was kept."""
        if self._lines:
            with self._path.open("a", encoding="utf-8") as file:
                file.write("\n".join(self._lines) + "\n")
            self._lines.clear()
