"""Record a trace: one line per message, stream, fault, step and group, and one hash over all.

A line starts with the world's clock, then names the peer, then the event::

    t=12.041000s p03 -> p05 Request p03#17 after 0.001000s
    t=12.041000s p03 -x p05 Request p03#18 lost
    t=12.042000s p05 => p03 stream 7 opens: average p03#17
    t=12.046000s p05 => p03 stream 7 ends
    t=12.046000s p03 p03#17 done with p05 after 0.004000s
    t=12.500000s p03 step 11
    t=13.000000s ! p05 is paused for 2 s

The hash is sha256 over the lines, each with its newline: for a trace in a file it is what
`sha256sum` prints. Two runs of one world have the same hash, unless something depends on more than
the seed; the first line that differs shows where to look.

Worlds may be large, so the hash is updated as lines come and only the last lines are kept.
"""

import asyncio
import hashlib
from collections import Counter, deque
from pathlib import Path
from typing import Any, TextIO

from p2ptrain.errors import ConfigError
from p2ptrain.ids import PeerId, Seconds
from p2ptrain.runtime.protocol_log import recorded
from p2ptrain.sim.loop import virtual_loop

KEPT = 10_000
BATCH = 256
"""The number of lines that are hashed at a time."""

TAIL = 12
"""The number of lines that a failure shows."""


class Trace:
    """The lines of one world.

    Args:
        keep: how many of the last lines stay in `lines`; None for all.
        path: a file that gets all of them.

    Raises:
        ConfigError: if the file cannot be written.
    """

    def __init__(self, keep: int | None = KEPT, path: Path | None = None) -> None:
        self.lines: deque[str] = deque(maxlen=keep)
        self.count = 0
        self._path = path
        self._file: TextIO | None = None
        self._sha = hashlib.sha256()
        self._batch: list[str] = []
        self._steps: Counter[PeerId] = Counter()
        self._awaited: list[tuple[PeerId, int, asyncio.Future[None]]] = []
        if path:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._file = path.open("w", encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"cannot write a trace to {path}: {error.strerror}") from error

    def note(self, now: Seconds, what: str) -> None:
        """Add one line: at `now` of the world, `what` happened."""
        line = f"t={now:.6f}s {what}"
        self.lines.append(line)
        self._batch.append(line)
        self.count += 1
        if len(self._batch) == BATCH:
            self._flush()

    def step(self, peer: PeerId, number: int) -> None:
        """`peer` has made one more step, of this number since its last start."""
        self.note(virtual_loop().now, f"{peer} step {number}")
        self._steps[peer] += 1
        for awaited, count, reached in tuple(self._awaited):
            if awaited == peer and count <= self._steps[peer]:
                self._awaited.remove((awaited, count, reached))
                if not reached.done():  # otherwise its waiter was cancelled
                    reached.set_result(None)

    async def wait_for_step(self, peer: PeerId, count: int) -> None:
        """Wait until `peer` has made `count` steps, over all its restarts."""
        if self._steps[peer] < count:
            reached = asyncio.get_running_loop().create_future()
            self._awaited.append((peer, count, reached))
            await reached

    @property
    def hash(self) -> str:
        """The hash of all lines so far, in hex."""
        self._flush()
        return self._sha.hexdigest()

    def close(self) -> None:
        """Write the remaining lines; later ones are hashed but not written."""
        self._flush()
        if self._file:
            self._file.close()
            self._file = None

    def trace_tail(self) -> str:
        """The last lines, and how to see more, for the report of a failure."""
        self._flush()
        last = "\n".join([*self.lines][-TAIL:])
        if not self._path or not self.lines:
            return f"the last of {self.count} lines of the trace:\n{last}\n"
        until = time_of(self.lines[-1])
        return (
            f"the last of {self.count} lines of {self._path}:\n{last}\nto see them: "
            f"python -m p2ptrain.sim.diagram {self._path} --from {max(0.0, until - 1):.3f} "
            f"--to {until:.3f} --out failure.svg\n"
        )

    def _flush(self) -> None:
        if self._batch:
            text = "\n".join(self._batch) + "\n"
            self._batch.clear()
            self._sha.update(text.encode())
            if self._file:
                self._file.write(text)
                self._file.flush()


class TraceMetrics:
    """Implements `Metrics`: a peer's steps, groups and views of others become lines."""

    def __init__(self, trace: Trace, peer: PeerId) -> None:
        self._trace = trace
        self._peer = peer

    def record(self, kind: str, **fields: Any) -> None:
        match kind:
            case "step":
                self._trace.step(self._peer, fields["step"])
            case _:
                if what := recorded(self._peer, kind, fields):
                    self._trace.note(virtual_loop().now, f"{self._peer} {what}")


def time_of(line: str) -> Seconds:
    """The time of `line`.

    Raises:
        ConfigError: if it is not a line of a trace.
    """
    stamp = line.partition(" ")[0]
    try:
        return float(stamp.removeprefix("t=").removesuffix("s"))
    except ValueError as error:
        raise ConfigError(f"{line[:80]!r} is not a line of a trace: it begins t=...s") from error
