"""Which device a peer computes on, what the host asks of it, and what is said when it fails.

All questions to ``torch.accelerator`` are asked here and by the lane of `compute/staging.py`, so
CUDA, ROCm (whose devices torch calls ``cuda``), XPU and MPS are one path. A function that decides
takes what there is as an argument (`Accelerators`), so that tests decide for machines with GPUs on
one without.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from p2ptrain.compute.device_name import AUTO, parse_device
from p2ptrain.errors import ConfigError, DeviceError

CPU = torch.device("cpu")

_WITH_STREAMS = ("cuda", "xpu")
"""Kinds on which copies may run beside the trainer's kernels; MPS has one queue."""

_SHOWN = 160
"""Characters of what torch says, in our sentence."""


@dataclass(frozen=True, slots=True)
class Accelerators:
    """What this machine has, as far as this build of torch can use it."""

    kind: str = ""
    """As torch names it; empty: none."""

    count: int = 0

    def __str__(self) -> str:
        """For the end of a sentence."""
        if not self.count:
            return "this machine has no accelerator that its build of torch can use"
        last = f" to {self.kind}:{self.count - 1}" if self.count > 1 else ""
        return f"this machine has {self.kind}:0{last}"


def accelerators() -> Accelerators:
    """Those of this machine."""
    if not torch.accelerator.is_available():
        return Accelerators()
    device = torch.accelerator.current_accelerator()
    return Accelerators(device.type, torch.accelerator.device_count()) if device else Accelerators()


def choose_device(wanted: str, local_rank: int, there: Accelerators) -> torch.device:
    """The device that `wanted` stands for.

    Args:
        wanted: as in `compute/device_name.py`. Without an index, peers of one machine take its
            devices in turn.
        local_rank: this peer's place among those of its machine, from 0.
        there: what the machine has.

    Raises:
        ConfigError: if there is no such device.
    """
    kind, index = parse_device(wanted)
    if kind == "cpu" or (kind == AUTO and not there.count):
        return CPU
    if kind not in (AUTO, there.kind):
        raise ConfigError(f"device = {wanted!r}: {there}; write auto or cpu")
    if index is not None and index >= there.count:
        raise ConfigError(f"device = {wanted!r}: {there}; write one of them, or auto")
    return torch.device(there.kind, local_rank % there.count if index is None else index)


def is_far(device: torch.device) -> bool:
    """True if the host reaches it by copies."""
    return device.type != "cpu"


def has_streams(device: torch.device) -> bool:
    """True if copies can run beside what the trainer computes there."""
    return device.type in _WITH_STREAMS


def wait_for(device: torch.device) -> None:
    """Wait until `device` has done all that was asked of it, on every stream."""
    if is_far(device):
        torch.accelerator.synchronize(device)


def failure_of_device(error: BaseException) -> DeviceError | None:
    """What to say of an error that a device, or the host's memory, has caused; or None."""
    said = " ".join(str(error).split())
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in said:
        what, remedy = "no memory is left", "take smaller batches, or a smaller model"
    elif isinstance(error, torch.AcceleratorError):
        what, remedy = "the device has failed", "start this peer again"
    else:
        return None
    shown = f"{said[:_SHOWN]}..." if len(said) > _SHOWN else said
    return DeviceError(f"{what} ({shown or type(error).__name__}); {remedy}")


@contextmanager
def explained(peer: str = "") -> Iterator[None]:
    """Inside, an error that a device has caused becomes one sentence, with `peer` in front.

    Raises:
        DeviceError: in place of such an error; others pass through.
    """
    try:
        yield
    except (RuntimeError, MemoryError, DeviceError) as error:
        failure = error if isinstance(error, DeviceError) else failure_of_device(error)
        if failure is None:
            raise
        raise DeviceError(f"{peer}: {failure}" if peer else str(failure)) from error
