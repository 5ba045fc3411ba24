"""Rows of a peer's model over time, on disk, so that others evaluate them off the peers' clock.

**Versions.** A mean of several peers' models says something only if all are of one moment. So a row
has a version, by which the rows of peers are put together. Where peers make the same steps together
(`changed` is given) it is the number of updates in the row. Otherwise it is a *tick*: ticks are the
multiples of `period_s` on the wall clock, at which all peers write, whatever step they are in.
Versions are multiples of powers of two, so that peers that write less often than others still
write the same ones.

**Budgets.** Of each start, the file holds `most_bytes`, or two rows; then a new row takes the place
of the oldest. Copying and writing a row may last `TIME_SHARE` of the time between two, or rows
become rarer.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from p2ptrain.compute.replica import Replica
from p2ptrain.errors import reason_of
from p2ptrain.ids import Seconds

TIME_SHARE = 0.2


@dataclass(eq=False)
class SnapshotWriter:
    """Appends the model as one row of little-endian float32, now and every so often.

    Rows that are there already stay, as records do: a peer that starts again goes on behind them.
    The file is open while a row is written and no longer: a simulated world has more peers than a
    process may have files open.
    """

    path: Path
    replica: Replica
    record: Callable[..., None]
    """Writes a record of a kind, with fields."""
    on_copy_thread: Callable[[Callable[[], int]], Awaitable[int]]
    clock: Callable[[], Seconds]
    """A wall clock."""
    period_s: Seconds
    most_bytes: float
    changed: Callable[[], Awaitable[object]] | None = None
    """Returns when there may have been an update, where peers make the same steps together."""

    def __post_init__(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        row_bytes = 4 * self.replica.saved_size
        size = self.path.stat().st_size if self.path.exists() else 0
        self._first = size // row_bytes
        self._kept = max(2, int(self.most_bytes // row_bytes))
        self._count = 0
        self._is_failing = False
        self._tick = 0
        self._stride = 1
        self._slower = 1
        self._wrote_at = self.clock()

    async def repeat(self) -> None:
        """Write a row now, and whenever one is due."""
        while True:
            await self.write()
            await (self._next_update() if self.changed else self._next_tick())

    async def write(self) -> None:
        """Write one row; it is complete on disk before its record says so."""
        began = self.clock()
        self._tick = max(self._tick, int(began // self.period_s))
        row = self._row(self._count)
        try:
            step = await self.on_copy_thread(lambda: self._write_row(row))
        except OSError as error:  # it will be written over
            self._say(f"cannot write a snapshot to {self.path} ({reason_of(error)})")
            return
        self._is_failing = False
        tick = None if self.changed else self._tick
        frees = self._row(self._count + 1) if self._count + 1 >= self._kept else None
        self.record("snapshot", row=row, step=step, tick=tick, frees=frees)
        self._count += 1
        self._set_pace(self.clock() - began, self.clock() - self._wrote_at)
        self._wrote_at = self.clock()

    def _say(self, what: str) -> None:
        if not self._is_failing:
            self.record("warning", text=f"{what}; training goes on, and tries again")
        self._is_failing = True

    def _row(self, count: int) -> int:
        return self._first + count % self._kept

    def _set_pace(self, lasted_s: Seconds, since_s: Seconds) -> None:
        share = lasted_s / (self.period_s * self._slower)
        if share > TIME_SHARE:
            self._slower *= 2
        elif share < TIME_SHARE / 4 and self._slower > 1:
            self._slower //= 2
        wanted_s = self.period_s * self._slower
        if self.changed is None:
            self._stride = self._slower
        elif since_s < wanted_s / 2:
            self._stride *= 2
        elif since_s > wanted_s * 2 and self._stride > 1:
            self._stride //= 2

    async def _next_tick(self) -> None:
        now = int(self.clock() // self.period_s)
        if now >= self._tick - self._stride:  # or else the clock was set back, and is followed
            now = max(self._tick, now)
        tick = (now // self._stride + 1) * self._stride
        await asyncio.sleep(max(0.0, tick * self.period_s - self.clock()))
        self._tick = tick

    async def _next_update(self) -> None:
        assert self.changed is not None  # or else rows are of ticks
        target = (self.replica.updates // self._stride + 1) * self._stride
        while self.replica.updates < target:
            await self.changed()

    def _write_row(self, number: int) -> int:
        vector_M = np.empty(self.replica.model_size, np.float32)
        step = self.replica.snapshot(vector_M)
        row = vector_M[: self.replica.saved_size]
        with self.path.open("r+b" if self.path.exists() else "wb", buffering=0) as file:
            file.seek(number * row.nbytes)  # over a row of which a killed peer wrote a part
            file.write(row.astype("<f4", copy=False).data)
        return step
