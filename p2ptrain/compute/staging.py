"""Between a device and the host: small pieces of pinned memory, and a stream of their own.

What a peer contributes leaves the device, and what others contribute comes to it, while the trainer
computes. On the trainer's own stream such a copy would wait for the trainer's kernels, and they for
it; from pageable memory it would hold its thread up, too. So each device has a *lane*: a stream
beside the trainer's, two pieces of pinned memory, and an event for each. While one piece is on its
way, the host works on the other, so that all of a model passes through a few megabytes. Memory of
the host that comes again and again is page-locked (`compute/page_locked.py`): from then on the
device copies to and from it by itself, at the speed of its bus.

**Who waits for whom.**

* The lane waits, on the device, for the trainer's last boundary (`after`): it reads what the
  optimizer has written, and overwrites an arrived delta that has been taken.
* A worker thread waits, on the host, for its own copies.
* Gradients that leave within the backward pass (`Leaving`) wait, on the device, for the kernels
  that made them, and for none that came later.
* The trainer's stream waits, on the device, for a delta that was on its way to it before the
  boundary began (`Arrival.take`), and for nothing that a network does.

Where there is no stream, on the CPU and under MPS, the same code copies at once and waits for
nothing: that is how it is tested everywhere.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from p2ptrain.compute.devices import has_streams
from p2ptrain.compute.page_locked import BY_CUDA
from p2ptrain.compute.replica import Vector

PIECE_BYTES = 1 << 22
"""Larger: memory; smaller: more calls than a copy is worth."""

PIECES = 2

SUM_BYTES = 1 << 20
"""Of the device, in which live and pending numbers are added before they leave it."""


class Mark(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Wait on the host until the work before it is done."""
        ...


class Lane(Protocol):
    """A way between host and device, on which copies follow each other."""

    def memory(self) -> Tensor:
        """`PIECE_BYTES` of the host that the device can copy by itself."""
        ...

    def meet(self, vector: Vector) -> None:
        """Memory of the host that the next copies are from or to."""
        ...

    def reaches(self, here: Tensor) -> bool:
        """True if the device copies to and from this memory of the host by itself."""
        ...

    def copy(self, into: Tensor, source: Tensor, plus: Tensor | None = None) -> Mark:
        """``into = source``, or ``into = float32(source) + plus``, behind everything before.

        No other thread waits. `plus` is where `source` is, float32.
        """
        ...

    def after(self) -> None:
        """Let what comes next wait for all that the caller's stream was asked to do until now."""
        ...

    def now(self) -> Mark:
        """What the caller's stream was asked to do until now."""
        ...

    def follow(self, mark: Mark) -> None:
        """Let what comes next wait for `mark`, on the device."""
        ...

    def hold(self, mark: Mark) -> None:
        """Let the caller's stream wait for `mark`, on the device."""
        ...


class StreamLane:
    """A stream of an accelerator (`torch.accelerator`): CUDA, ROCm, XPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)
        self._locked = BY_CUDA if device.type == "cuda" else None

    def memory(self) -> Tensor:
        return torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)

    def meet(self, vector: Vector) -> None:
        if self._locked:
            self._locked.meet(vector)

    def reaches(self, here: Tensor) -> bool:
        return self._locked is not None and self._locked.covers(here)

    def copy(self, into: Tensor, source: Tensor, plus: Tensor | None = None) -> Mark:
        with _on(self._stream):
            if plus is None and source.dtype == into.dtype:
                into.copy_(source, non_blocking=True)
            else:
                self._copy_sum(into, source, plus)
        return self._stream.record_event()

    def _copy_sum(self, into: Tensor, source: Tensor, plus: Tensor | None) -> None:
        """``into = float32(source) + plus``, made piece by piece in a little memory of the device.

        The stream does one after the other, so that one piece of memory is enough.
        """
        made = torch.empty(SUM_BYTES // 4, dtype=torch.float32, device=self._device)
        for start in range(0, len(source), len(made)):
            at = slice(start, min(start + len(made), len(source)))
            piece = made[: at.stop - at.start].copy_(source[at])
            if plus is not None:
                piece.add_(plus[at])
            into[at].copy_(piece, non_blocking=True)

    def after(self) -> None:
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))

    def now(self) -> Mark:
        return torch.accelerator.current_stream(self._device).record_event()

    def follow(self, mark: Mark) -> None:
        assert isinstance(mark, torch.Event)
        self._stream.wait_event(mark)

    def hold(self, mark: Mark) -> None:
        if isinstance(mark, torch.Event):  # or nothing was copied: an empty tensor
            torch.accelerator.current_stream(self._device).wait_event(mark)


@contextmanager
def _on(stream: torch.Stream) -> Iterator[None]:
    """What this thread asks for inside is asked of `stream`; its device and streams come back."""
    before = torch.accelerator.current_stream(), torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        for one in reversed(before):  # the last one also says which device is the current one
            torch.accelerator.set_stream(one)


class _Done:
    """A mark of what was done before it was made."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class HostLane:
    """No stream: copies are done when they return."""

    def memory(self) -> Tensor:
        return torch.empty(PIECE_BYTES, dtype=torch.uint8)

    def meet(self, vector: Vector) -> None:
        """All memory is the host's."""

    def reaches(self, here: Tensor) -> bool:
        return False

    def copy(self, into: Tensor, source: Tensor, plus: Tensor | None = None) -> Mark:
        into.copy_(source)
        if plus is not None:
            into.add_(plus)
        return _Done()

    def after(self) -> None:
        """Nobody is ahead of us."""

    def now(self) -> Mark:
        return _Done()

    def follow(self, mark: Mark) -> None:
        """It is done."""

    def hold(self, mark: Mark) -> None:
        """Nobody is behind."""


def lane_of(device: torch.device) -> Lane:
    """How the host reaches `device`."""
    return StreamLane(device) if has_streams(device) else HostLane()


class Stage:
    """The lane of one device with its two pieces; any thread, one after the other."""

    def __init__(self, lane: Lane) -> None:
        self.lane, self._lock = lane, threading.Lock()
        self._pieces = [lane.memory() for _ in range(PIECES)]
        self._busy: list[Mark] = [_Done() for _ in range(PIECES)]

    def bring(self, source: Tensor, into: Tensor, *, adds: bool = False) -> None:
        """``into = float32(source)``, or ``into += ...``; all is there when this returns.

        Args:
            source: one-dimensional, on the device.
            into: float32, on the host.
            adds: whether to add to what `into` holds.
        """
        if not adds and self.lane.reaches(into):
            self.lane.copy(into, source).synchronize()
            return
        waiting: tuple[slice, Tensor, Mark] | None = None
        with self._lock:
            for turn, at in _pieces(len(source), source.element_size()):
                piece = self._pieces[turn].view(source.dtype)[: at.stop - at.start]
                self._busy[turn].synchronize()
                self._busy[turn] = self.lane.copy(piece, source[at])
                if waiting:
                    _put(into, *waiting, adds=adds)
                waiting = at, piece, self._busy[turn]
            if waiting:
                _put(into, *waiting, adds=adds)

    def send(self, source: Tensor, into: Tensor) -> Mark:
        """``into = source``, piece by piece; `source` may be changed when this returns.

        Args:
            source: one-dimensional, on the host.
            into: of the same dtype, on the device.
        """
        if source.dtype == into.dtype and self.lane.reaches(source):
            arrived = self.lane.copy(into, source)
            arrived.synchronize()
            return arrived
        last: Mark = _Done()
        with self._lock:
            for turn, at in _pieces(len(source), source.element_size()):
                piece = self._pieces[turn].view(source.dtype)[: at.stop - at.start]
                self._busy[turn].synchronize()
                copy_here(piece, source[at])
                self._busy[turn] = last = self.lane.copy(into[at], piece)
        return last


def meet(stages: Mapping[torch.device, Stage], vector: Vector) -> None:
    """Memory of the host that is about to be copied from or to; may lock it, which takes time."""
    for stage in stages.values():
        stage.lane.meet(vector)


class Leaving:
    """Numbers that leave their devices while the trainer goes on: made by it, brought by a worker.

    Args:
        stages: of the devices that the host reaches by a lane.
        values: one-dimensional, and where among the numbers that are written they go; None: zeros.
    """

    def __init__(
        self, stages: Mapping[torch.device, Stage], values: Sequence[tuple[slice, Tensor | None]]
    ) -> None:
        self._stages, self._values = stages, values
        self._made = {device: stage.lane.now() for device, stage in stages.items()}

    def bring(self, into: Tensor, weight: int) -> None:
        """``into = weight * float32(values)``; `into` is on the host."""
        for device, mark in self._made.items():
            self._stages[device].lane.follow(mark)
        for at, values in self._values:
            if values is None:
                into[at].zero_()
            elif stage := self._stages.get(values.device):
                stage.bring(values, into[at])
            else:
                into[at].copy_(values)
        if weight != 1:
            into.mul_(weight)


class Arrival:
    """Room on a device for `count` numbers on their way to it, and what is known of them."""

    def __init__(self, stage: Stage, count: int, device: torch.device) -> None:
        self._stage = stage
        self._room = torch.empty(count, dtype=torch.float32, device=device)
        self._sent: Mark | None = None

    def send(self, pending: Tensor) -> None:
        """Bring what is pending now to the device, ahead of the boundary that will take it."""
        self._sent = self._stage.send(pending, self._room)

    def bring_sum(self, live: Tensor, pending: Tensor, into: Tensor, at: slice) -> None:
        """``into = float32(live) + pending`` of the numbers `at`, summed on the device.

        `into` is memory that the device reaches; `pending` is whole, as in `send`.
        """
        if self._sent is None:
            self.send(pending)
        self._stage.lane.copy(into, live[at], self._room[at]).synchronize()

    def forget(self) -> None:
        """What was sent is not what is pending any more."""
        self._sent = None

    def take(self, pending: Tensor) -> Tensor:
        """What is pending, on the device; the caller's stream waits until all of it is there."""
        if self._sent is None:
            self.send(pending)
        assert self._sent is not None
        self._stage.lane.hold(self._sent)
        self._sent = None
        return self._room


def _put(into: Tensor, at: slice, piece: Tensor, arrived: Mark, *, adds: bool) -> None:
    arrived.synchronize()
    if adds:
        into[at].add_(piece.float())  # or float64 would add before it rounds
    else:
        copy_here(into[at], piece)


def copy_here(into: Tensor, source: Tensor) -> None:
    """``into = source``, both on the host; with one thread as memcpy, which is twice as fast."""
    if into.dtype == source.dtype == torch.float32 and torch.get_num_threads() == 1:
        np.copyto(into.numpy(), source.detach().numpy())  # it can write past the caches
    else:
        into.copy_(source)


def _pieces(count: int, item_bytes: int) -> Iterator[tuple[int, slice]]:
    """Which piece takes which numbers, in turns."""
    step = PIECE_BYTES // item_bytes
    for number, start in enumerate(range(0, count, step)):
        yield number % PIECES, slice(start, min(start + step, count))
