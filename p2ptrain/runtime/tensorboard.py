"""A peer's records as TensorBoard scalars: the extra ``p2ptrain[tensorboard]``.

Scalars of the trainer stand over its own steps, those of groups over groups done, and all of them
over wall time as TensorBoard does for every event. Start it with ``tensorboard --logdir DIR``: each
peer is a run of its own.
"""

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
        """Write the scalars of one record."""
        match kind:
            case "step":
                self._write_step(fields)
            case "group" if fields["outcome"] == "done":
                self._write_group(fields)
            case _:
                pass

    def close(self) -> None:
        """Write what is buffered and close. Idempotent."""
        self._writer.close()

    def _write_step(self, fields: dict[str, Any]) -> None:
        step, lasted_s = fields["step"], fields["compute_s"] + fields["wait_s"]
        self._samples += fields["samples"]
        self._writer.add_scalar("trainer/samples", self._samples, step)
        self._writer.add_scalar("trainer/compute_seconds", fields["compute_s"], step)
        self._writer.add_scalar("trainer/wait_seconds", fields["wait_s"], step)
        if fields["loss"] is not None:
            self._writer.add_scalar("trainer/loss", fields["loss"], step)
        if lasted_s > 0:
            rate = fields["samples"] / lasted_s
            self._writer.add_scalar("trainer/samples_per_second", rate, step)

    def _write_group(self, fields: dict[str, Any]) -> None:
        for field, tag in _GROUP_SCALARS.items():
            if fields[field] is not None:
                self._writer.add_scalar(f"group/{tag}", fields[field], self._groups)
        self._groups += 1


_GROUP_SCALARS = {
    "wait_s": "wait_seconds",
    "exchange_s": "exchange_seconds",
    "sent_bytes": "sent_bytes",
    "consensus_distance_l2": "consensus_distance_l2",
    "staleness_steps": "staleness_steps",
}
