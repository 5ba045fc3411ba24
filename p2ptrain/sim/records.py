"""Buffer the records of a world's peers on their way to files.

A world may have more peers than a process may have open files, and writes much faster than a real
swarm. So lines are kept in memory, and appended to the files before they are read.

Records about peers that arrive together, and about peers that leave at the end, are left out: for a
thousand peers they would be two million lines without information.
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
        self._is_in = False

    def record(self, kind: str, **fields: Any) -> None:  # Any: whatever JSON can hold
        """Keep one line."""
        if kind in ("started", "ready"):
            self._is_in = kind == "ready"
        if kind == "member" and self._is_expected(fields["state"]):
            return
        self._lines.append(json.dumps({"kind": kind, "t": self._clock(), **fields}))

    def flush(self) -> None:
        """Append the kept lines to the file."""
        if self._lines:
            with self._path.open("a", encoding="utf-8") as file:
                file.write("\n".join(self._lines) + "\n")
            self._lines.clear()

    def _is_expected(self, state: str) -> bool:
        return state == "left" or (state == "alive" and not self._is_in)
