"""A peer's records as TensorBoard scalars: the extra ``p2ptrain[tensorboard]``.

Scalars of the trainer stand over its own steps, those of groups over groups done, and all of them
over wall time as TensorBoard does for every event. Start it with ``tensorboard --logdir DIR``: each
peer is a run of its own.
"""

import re
from pathlib import Path
from typing import Any

from p2ptrain.errors import ConfigError


class TensorBoardMetrics:
    """Implements `Metrics`: writes events into a folder.

    Raises:
        ConfigError: if tensorboard is not installed, or the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "tensorboard is not installed; pip install 'p2ptrain[tensorboard]'"
            ) from error
        try:
            self._writer: Any = SummaryWriter(str(folder))  # Any: an optional library
        except OSError as error:
            raise ConfigError(f"cannot write to {folder}: {error.strerror}") from error
        self._samples = 0
        self._groups = 0

    def record(self, kind: str, **fields: Any) -> None:  # Any: whatever JSON can hold
        if kind == "step":
            lasted_s = fields["compute_s"] + fields["wait_s"]
            self._samples += fields["samples"]
            rate = fields["samples"] / lasted_s if lasted_s > 0 else None
            sums = {"samples": self._samples, "samples_per_second": rate}
            self._write("trainer", {**fields, **sums}, fields["step"])
        elif kind == "group" and fields["outcome"] == "done":
            self._write("group", fields, self._groups)
            self._groups += 1

    def close(self) -> None:
        """Write what is buffered and close. Idempotent."""
        self._writer.close()

    def _write(self, prefix: str, fields: dict[str, Any], at: int) -> None:  # Any: as above
        for field in _SCALARS[prefix]:
            if fields[field] is not None:
                tag = re.sub("_s$", "_seconds", field)
                self._writer.add_scalar(f"{prefix}/{tag}", fields[field], at)


_SCALARS = {
    "trainer": ("samples", "compute_s", "wait_s", "loss", "samples_per_second"),
    "group": ("wait_s", "exchange_s", "sent_bytes", "consensus_distance_l2", "staleness_steps"),
}
