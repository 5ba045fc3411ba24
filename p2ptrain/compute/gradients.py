"""What peers exchange to average gradients: float32 numbers, each times the member's weight.

Legend of shapes: the vector has ``G`` numbers::

    gradients | floating-point buffers

A member of weight w contributes w times each of its numbers; one of weight 0 writes zeros only. The
group divides the sum by the sum of the weights (`core/contribution.py`), so with the samples of a
step as the weight the result is the mean over all samples, as of one process with all the batches:

* a parameter for which a contributor has no gradient counts as zero there, as an unused branch does
  in all-reduce training;
* where no contributor had one (the union of their masks), the gradient is None for everybody, so
  that optimizers skip it (weight decay and momentum included) on all peers or on none;
* buffers become the contributors' mean for everybody, contributor or not. A peer without a say in
  the gradients (overflow, just caught up) has none in the statistics either.

Afterwards all peers hold the same bits: each reads them from the same vector and the same mask.

Where gradients are delivered late (`runtime/pending_gradients.py`), a peer's vector is the sum of
those that wait, of one step, several or none, and its weight the sum of their samples.

Numbers of 16 bits travel as float32 and are rounded once, after the mean.

A call of torch costs some microseconds, whatever it works on. So thousands of small tensors are
moved together, through a piece of memory that has a view for each, and what is not finite is looked
for once, in all that was written; only then does somebody ask for names.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, compress, groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from p2ptrain.compute.devices import is_far
from p2ptrain.compute.flat import FlatModel, check_vector, is_finite
from p2ptrain.compute.replica import Vector
from p2ptrain.compute.staging import Arrival, Leaving, Stage, lane_of, meet
from p2ptrain.core.shards import Span
from p2ptrain.errors import StateError

SMALL = 1 << 14
"""Numbers of a tensor that moves together with others. Larger: a copy more for nothing; smaller:
calls that take longer than what they do."""

BATCH = 1 << 20
"""Numbers that move together: in a cache, and as much memory beside the model at most as small
tensors take."""

Flags = NDArray[np.uint8]
"""For each gradient, in order: 1 if somebody has it."""


@dataclass(frozen=True, slots=True)
class _Part:
    """What a parameter's gradient, or a buffer, has among the G numbers."""

    name: str
    tensor: Tensor
    is_gradient: bool
    at: slice

    @property
    def values(self) -> Tensor | None:
        """What there is now."""
        return self.tensor.grad if self.is_gradient else self.tensor

    @property
    def what(self) -> str:
        """For messages."""
        kind = "the gradient of parameter" if self.is_gradient else "buffer"
        return f"{kind} {self.name}"

    def gather(self) -> Tensor | None:
        """What there is now, in one piece on its device."""
        values = self._dense()
        return None if values is None else values.reshape(-1)

    def write(self, into: Tensor, weight: int) -> None:
        values, there = self._dense(), into[self.at]
        if values is None:
            there.zero_()
            return
        there = there.view(values.shape)
        if (values.dtype, values.device) == (into.dtype, into.device):
            torch.mul(values, weight, out=there)  # at once: gradients do not fit into a cache
        else:
            there.copy_(values).mul_(weight)

    def _dense(self) -> Tensor | None:
        values = self.values
        if values is not None and values.layout != torch.strided:
            raise StateError(
                f"{self.what} is sparse, which cannot be averaged; build it with sparse=False"
            )
        return None if values is None else values.detach()

    def read(self, mean_G: Vector, flags: Flags) -> None:
        if self.is_gradient and not flags[0]:
            self.tensor.grad = None
        else:
            self.take(mean_G)

    def take(self, mean_G: Vector) -> None:
        """Take the mean, rounded once and, if it can be, without memory beside."""
        values, mean = self.ready().detach(), mean_G[self.at].reshape(self.tensor.shape)
        if values.dtype == torch.float32 and values.device.type == "cpu":
            np.copyto(values.numpy(), mean)
        else:
            values.copy_(_as_tensor(mean))

    def ready(self) -> Tensor:
        """The tensor that takes the mean; made if there is none, or it is sparse or expanded."""
        values = self.values
        if values is None or values.layout != torch.strided or 0 in values.stride():
            self.tensor.grad = values = torch.empty_like(self.tensor)
        return values

    @property
    def count(self) -> int:
        """So many parts."""
        return 1


class _Batch:
    """Small parts of one kind, dtype and device, moved together."""

    def __init__(self, parts: Sequence[_Part]) -> None:
        self._parts = parts
        self.at = slice(parts[0].at.start, parts[-1].at.stop)
        self._is_gradient = parts[0].is_gradient
        self._tensors = [part.tensor for part in parts]
        rows = {tensor.shape[1:] if tensor.dim() else None for tensor in self._tensors}
        self._row = rows.pop() if len(rows) == 1 else None  # of all, where they can be one stack
        self._room: Tensor | None = None
        self._views: list[Tensor] = []

    @property
    def count(self) -> int:
        """So many parts."""
        return len(self._parts)

    def gather(self) -> Tensor:
        """What there is now, in one piece on its device; overwritten the next time."""
        room, values = self._made(), self._values()
        try:
            if len(values) < len(self._parts):
                has = [part.values is not None for part in self._parts]
                room.zero_()
                if values:
                    torch._foreach_copy_(list(compress(self._views, has)), values)
            elif self._row is not None and values[0].dtype == room.dtype:
                torch.cat(values, out=room.view(-1, *self._row))  # three times as fast
            else:
                torch._foreach_copy_(self._views, values)
        except RuntimeError as error:
            raise StateError("one of these gradients is sparse, or of another kind") from error
        return room

    def write(self, into: Tensor, weight: int) -> None:
        there = into[self.at]
        try:
            room = self.gather()
        except StateError:  # named there, like whatever else it is
            for part in self._parts:
                part.write(into, weight)
            return
        if room.device == into.device:
            torch.mul(room, weight, out=there)
        else:
            there.copy_(room).mul_(weight)

    def read(self, mean_G: Vector, flags: Flags) -> None:
        room, mean, parts, views = self._made(), mean_G[self.at], self._parts, self._views
        if self._is_gradient and not flags.all():
            for part in compress(parts, 1 - flags):
                part.tensor.grad = None
            parts, views = list(compress(parts, flags)), list(compress(views, flags))
        if room.device.type == "cpu":
            np.copyto(room.numpy(), mean)
        else:
            room.copy_(_as_tensor(mean))
        values = self._values()
        if len(values) < len(parts):
            values = [part.ready() for part in parts]
        try:
            torch._foreach_copy_(values, views)
        except RuntimeError:  # one of them is sparse, or expanded, or there are none
            for part in parts:
                part.take(mean_G)

    def _values(self) -> list[Tensor]:
        """What there is now; shorter than the parts where gradients are missing."""
        if not self._is_gradient:
            return self._tensors
        return [grad for tensor in self._tensors if (grad := tensor.grad) is not None]

    def _made(self) -> Tensor:
        """The memory between, made at the first use: not every peer averages gradients."""
        if self._room is None:
            device, first = self._tensors[0].device, self.at.start
            self._room = torch.empty(self.at.stop - first, dtype=torch.float32, device=device)
            for part in self._parts:
                at = slice(part.at.start - first, part.at.stop - first)
                self._views.append(self._room[at].view(part.tensor.shape))
        return self._room


class GradientVector:
    """Exports and imports the gradients of one flat model. The trainer waits meanwhile."""

    def __init__(
        self, flat: FlatModel, *, staged: Callable[[torch.device], bool] | None = None
    ) -> None:
        self._flat, self._staged = flat, staged or is_far
        self._parts = list(_parts(flat))
        self.parameters = [part.tensor for part in self._parts if part.is_gradient]
        """Those whose gradients these are, in order."""
        count = len(self.parameters)
        self._gradients = list(_moves(self._parts[:count]))
        self._buffers = list(_moves(self._parts[count:]))
        self._spans: dict[Span, Sequence[_Part | _Batch]] = {}
        self._arrivals: dict[Span, Mapping[torch.device, Arrival]] = {}
        self.size: int = self._parts[-1].at.stop
        """G."""
        self.buffer_size: int = self.size - self._parts[count - 1].at.stop
        """So many of the G numbers, the last ones, are buffers."""

    def mask(self) -> bytes:
        """Which parameters have a gradient, as `Contribution.gradient_mask` has it."""
        here = [parameter.grad is not None for parameter in self.parameters]
        return np.packbits(here, bitorder="little").tobytes()

    def export(self, into_G: Vector, weight: int) -> None:
        """Write this peer's numbers times `weight`; with 0 whatever they are does not matter.

        Raises:
            StateError: if a number is not finite, or a gradient is sparse: naming the parameter.
                `into_G` is all zero then.
        """
        check_vector(into_G, self.size, "the gradients' buffer")
        if not weight:
            into_G.fill(0)
            return
        self._flat.synchronize()
        self.meet(into_G)
        into = torch.from_numpy(into_G)
        try:
            with torch.no_grad():
                for move in chain(self._gradients, self._buffers):
                    move.write(into, weight)
            self._refuse_infinite(into)
        except StateError:
            into_G.fill(0)
            raise

    @cached_property
    def stages(self) -> Mapping[torch.device, Stage]:
        """Lanes of devices that gradients leave by; none where all are on the host."""
        devices = {tensor.device for tensor in self.parameters}
        return {device: Stage(lane_of(device)) for device in devices if self._staged(device)}

    def meet(self, vector_G: Vector) -> None:
        """Memory of the host by which gradients leave their devices, or means come."""
        meet(self.stages, vector_G)

    def leave_span(self, span: Span) -> Leaving:
        """The whole parts (gradients or buffers) in one span, as they are on the caller's stream.

        They leave in its `bring`, on another thread. One at a time of each span.

        Raises:
            StateError: if a gradient is sparse.
        """
        with torch.no_grad():
            return Leaving(self.stages, [(move.at, move.gather()) for move in self._of(span)])

    def export_span(self, span: Span, into_S: Vector, weight: int) -> None:
        """As `export`, of the whole parts in one span of the G numbers."""
        check_vector(into_S, span.size, "the bucket")
        into = torch.from_numpy(into_S)
        with torch.no_grad():
            for move in self._of(span):
                move.write(into, weight)
        if not is_finite(into):
            raise StateError("a number of this bucket is not finite")

    def _of(self, span: Span) -> Sequence[_Part | _Batch]:
        """How the parts of a span are moved; `at` is among its numbers."""
        if span not in self._spans:
            shifted = (
                replace(p, at=slice(p.at.start - span.start, p.at.stop - span.start))
                for p in self._parts[self._in(span)]
            )
            self._spans[span] = list(_moves(shifted))
        return self._spans[span]

    def load(self, mean_G: Vector, mask: bytes) -> None:
        """Set gradients and buffers from the group's mean.

        Args:
            mean_G: read only, not kept.
            mask: which parameters anybody had a gradient for; the others get None.

        Raises:
            StateError: if dtype or shape differ, or the mean is not finite.
        """
        check_vector(mean_G, self.size, "the mean of gradients")
        if not (np.isfinite(mean_G.min()) and np.isfinite(mean_G.max())):  # a NaN is both of them
            raise StateError("the mean of gradients is not finite; it was not applied")
        flags = np.unpackbits(
            np.frombuffer(mask, np.uint8), count=len(self.parameters), bitorder="little"
        )
        self.meet(mean_G)
        with torch.no_grad():
            for move in self._gradients:
                move.read(mean_G, flags[: move.count])
                flags = flags[move.count :]
            with self._flat.step_lock:
                for move in self._buffers:
                    move.read(mean_G, flags)
        self._flat.synchronize()

    @contextmanager
    def lent(self, span: Span, mean_G: Vector, mask: bytes) -> Iterator[list[Tensor]]:
        """Set the gradients and buffers in one span from their means.

        Yields the parameters that have one; afterwards gradients are as they were.
        """
        flags = np.unpackbits(
            np.frombuffer(mask, np.uint8), count=len(self.parameters), bitorder="little"
        )
        at = self._in(span)
        here = self._parts[at]
        parts = [p for i, p in enumerate(here, at.start) if p.is_gradient and flags[i]]
        before = [part.tensor.grad for part in parts]
        rooms = self._send(span, mean_G)
        with torch.no_grad():
            for part in parts:
                part.tensor.grad = None
                if (room := rooms.get(part.tensor.device)) is None:
                    part.take(mean_G)
                else:
                    mean = room[part.at.start - span.start : part.at.stop - span.start]
                    part.tensor.grad = mean.view(part.tensor.shape).to(part.tensor.dtype)
            for part in here:
                if not part.is_gradient:
                    part.take(mean_G)
        try:
            yield [part.tensor for part in parts]
        finally:
            for part, grad in zip(parts, before, strict=True):
                part.tensor.grad = grad
            for device in rooms:
                self.stages[device].lane.after()  # the rooms are free when the update is made

    def _send(self, span: Span, mean_G: Vector) -> Mapping[torch.device, Tensor]:
        """The means of one span on each device that has a lane; the caller's stream waits there."""
        self.meet(mean_G)
        if span not in self._arrivals:
            self._arrivals[span] = {
                device: Arrival(stage, span.size, device) for device, stage in self.stages.items()
            }
        arrivals = self._arrivals[span]
        return {
            device: arrival.take(torch.from_numpy(mean_G[span.start : span.stop]))
            for device, arrival in arrivals.items()
        }

    def _in(self, span: Span) -> slice:
        """The parts in one span; it begins and ends with whole ones."""
        ends = span.start, span.stop
        return slice(
            *(bisect_left(self._parts, end, key=lambda part: part.at.start) for end in ends)
        )

    def _refuse_infinite(self, into: Tensor) -> None:
        if is_finite(into):
            return
        for part in self._parts:
            if not is_finite(into[part.at]):
                raise StateError(
                    f"{part.what} is not finite; lower the learning rate, clip, or use a gradient "
                    f"scaler"
                )


def _as_tensor(mean: Vector) -> Tensor:
    """To be read; torch warns of memory that cannot be written to."""
    return torch.from_numpy(mean if mean.flags.writeable else mean.copy())


def _parts(flat: FlatModel) -> Iterator[_Part]:
    """A gradient for each `Parameter` object, as those that share memory have their own; buffers.

    One after the other among the G numbers.
    """
    start = 0
    for slot in sorted(flat.slots, key=lambda slot: not slot.is_parameter):
        for tensor in slot.parameters if slot.is_parameter else [slot.tensor]:
            stop = start + tensor.numel()
            yield _Part(slot.name, tensor, slot.is_parameter, slice(start, stop))
            start = stop


def _moves(parts: Iterable[_Part]) -> Iterator[_Part | _Batch]:
    """How the parts are moved, in their order: large ones alone, small neighbours together."""
    for is_small, alike in groupby(parts, _kind):
        if not is_small:
            yield from alike
            continue
        together: list[_Part] = []
        for part in alike:
            if together and part.at.stop - together[0].at.start > BATCH:
                yield _Batch(together)
                together = []
            together.append(part)
        yield _Batch(together)


def _kind(part: _Part) -> tuple[object, ...]:
    """Equal for parts that may move together; empty for one that moves alone."""
    tensor = part.tensor
    return () if tensor.numel() > SMALL else (tensor.dtype, tensor.device)
