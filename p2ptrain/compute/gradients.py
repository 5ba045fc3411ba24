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
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from p2ptrain.compute.flat import FlatModel, check_vector, is_finite
from p2ptrain.compute.replica import Vector
from p2ptrain.compute.slots import Slot
from p2ptrain.errors import StateError


@dataclass(frozen=True, slots=True)
class _Gradient:
    """A parameter and where its gradient lies among the G numbers."""

    name: str
    parameter: Tensor
    at: slice


class GradientVector:
    """Exports and imports the gradients of one flat model. The trainer waits meanwhile."""

    def __init__(self, flat: FlatModel) -> None:
        self._flat = flat
        self._gradients = list(_gradients(flat))
        start = self._gradients[-1].at.stop
        self._buffers: list[tuple[Slot, slice]] = []
        for slot in flat.slots:
            if not slot.is_parameter:
                stop = start + slot.tensor.numel()
                self._buffers.append((slot, slice(start, stop)))
                start = stop
        self.size: int = start
        """G."""
        self.buffer_size: int = start - self._gradients[-1].at.stop
        """So many of the G numbers, the last ones, are buffers."""

    def mask(self) -> bytes:
        """Which parameters have a gradient, as `Contribution.gradient_mask` has it."""
        here = [gradient.parameter.grad is not None for gradient in self._gradients]
        return np.packbits(here, bitorder="little").tobytes()

    def export(self, into_G: Vector, weight: int) -> None:
        """Write this peer's numbers times `weight`; with 0 whatever they are does not matter.

        Raises:
            StateError: if a number is not finite, or a gradient is sparse: naming the parameter.
                `into_G` is all zero then.
        """
        check_vector(into_G, self.size, "the gradients' buffer")
        into_G.fill(0)
        if not weight:
            return
        self._flat.synchronize()
        try:
            self._write(torch.from_numpy(into_G), weight)
        except StateError:
            into_G.fill(0)
            raise

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
            np.frombuffer(mask, np.uint8), count=len(self._gradients), bitorder="little"
        )
        for gradient, flag in zip(self._gradients, flags, strict=True):
            _set_gradient(gradient.parameter, mean_G[gradient.at] if flag else None)
        with self._flat.step_lock:
            for slot, at in self._buffers:
                buffer = torch.from_numpy(mean_G[at].copy())
                slot.tensor.detach().copy_(buffer.view(slot.tensor.shape))
        self._flat.synchronize()

    def _write(self, into: Tensor, weight: int) -> None:
        for gradient in self._gradients:
            grad = gradient.parameter.grad
            if grad is not None:
                what = f"the gradient of parameter {gradient.name}"
                _write(into[gradient.at], grad, weight, what)
        for slot, at in self._buffers:
            _write(into[at], slot.tensor, weight, f"buffer {slot.name}")


def _gradients(flat: FlatModel) -> Iterator[_Gradient]:
    """One for each `Parameter` object: those that share memory have gradients of their own."""
    start = 0
    for slot in flat.slots:
        for parameter in slot.parameters:
            stop = start + parameter.numel()
            yield _Gradient(slot.name, parameter, slice(start, stop))
            start = stop


def _write(into: Tensor, values: Tensor, weight: int, what: str) -> None:
    if values.layout != torch.strided:
        raise StateError(f"{what} is sparse, which cannot be averaged; build it with sparse=False")
    values, there = values.detach(), into.view(values.shape)
    if (values.dtype, values.device) == (into.dtype, into.device):
        torch.mul(values, weight, out=there)  # in one go: gradients do not fit into a cache
    else:
        there.copy_(values).mul_(weight)
    if not is_finite(into):
        raise StateError(
            f"{what} is not finite; lower the learning rate, clip, or use a gradient scaler"
        )


def _set_gradient(parameter: Tensor, mean: Vector | None) -> None:
    """The gradient becomes the mean, rounded once and, if it can be, without memory beside."""
    if mean is None:
        parameter.grad = None
        return
    if parameter.grad is None or parameter.grad.layout != torch.strided:
        parameter.grad = torch.empty_like(parameter)
    grad, mean = parameter.grad.detach(), mean.reshape(parameter.shape)
    if grad.dtype == torch.float32 and grad.device.type == "cpu":
        np.copyto(grad.numpy(), mean)
    else:
        grad.copy_(torch.from_numpy(mean.copy()))
