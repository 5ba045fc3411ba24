"""Rows of a peer's model over time, on disk, so that others evaluate them off the peers' clock."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from p2ptrain.compute.replica import Replica
from p2ptrain.ids import Seconds
from p2ptrain.runtime.copy_executor import CopyExecutor
from p2ptrain.runtime.metrics import Metrics


@dataclass(eq=False)
class SnapshotWriter:
    """Appends the model as one row of little-endian float32, now and every so often.

    Rows that are there already stay, as records do: a peer that starts again goes on behind them.
    The file is open while a row is written and no longer: a simulated world has more peers than a
    process may have files open.
    """

    path: Path
    replica: Replica
    metrics: Metrics
    on_copy_thread: CopyExecutor

    def __post_init__(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        size = self.path.stat().st_size if self.path.exists() else 0
        self._row = size // (4 * self.replica.saved_size)

    async def repeat(self, period_s: Seconds) -> None:
        while True:
            await self.write()
            await asyncio.sleep(period_s)

    async def write(self) -> None:
        """Write one row; it is complete on disk before its record says so."""
        step = await self.on_copy_thread(self._write_row)
        self.metrics.record("snapshot", row=self._row, step=step)
        self._row += 1

    def _write_row(self) -> int:
        vector_M = np.empty(self.replica.model_size, np.float32)
        step = self.replica.snapshot(vector_M)
        row = vector_M[: self.replica.saved_size]
        with self.path.open("r+b" if self.path.exists() else "wb", buffering=0) as file:
            file.seek(self._row * row.nbytes)  # over a row of which a killed peer wrote a part
            file.write(row.astype("<f4", copy=False).data)
        return step
