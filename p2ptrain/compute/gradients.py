"""What peers exchange to average gradients: one float32 vector with its own book-keeping.

Legend of shapes: the vector has ``G`` numbers::

    gradients | floating-point buffers | one flag for each parameter | weight

A peer that contributes writes its numbers, a flag of 1 where it has a gradient, and weight 1. One
that does not writes zeros only. The group takes the plain mean; since the weight goes through the
same mean, dividing by it gives the mean over the *contributors*, whoever they were:

* a parameter's gradient is the sum of the contributors' gradients over their number (one that has
  no gradient for it counts as zero, as an unused branch does in all-reduce training);
* where no contributor had one, the gradient is None for everybody, so that optimizers skip it
  (weight decay and momentum included) on all peers or on none;
* buffers become the contributors' mean for everybody, contributor or not. A peer without a say in
  the gradients (overflow, just caught up) has none in the statistics either, and afterwards all
  peers hold the same bits: each computes them from the same vector by the same division.

Where gradients are delivered late (`runtime/late.py`), a peer's vector is the sum of those that
wait, of one step, several or none. Weights add up like the rest, so buffers come out as the mean
over all that were delivered; gradients are then divided by the number of *members*, so that each
counts the same whenever it comes.

Numbers of 16 bits travel as float32 and are rounded once, after the mean.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from p2ptrain.compute.flat import FlatModel, Slot, check_vector, is_finite
from p2ptrain.compute.replica import Vector
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
        self._flags = slice(start, start + len(self._gradients))
        self.size: int = self._flags.stop + 1
        """G."""

    def export(self, into_G: Vector, contributes: bool) -> None:
        """Write this peer's part; all zero if it does not contribute.

        Raises:
            StateError: if a number is not finite, or a gradient is sparse: naming the parameter.
                `into_G` is all zero then, as if this peer did not contribute.
        """
        check_vector(into_G, self.size, "the gradients' buffer")
        into_G.fill(0)
        if not contributes:
            return
        self._flat.synchronize()
        try:
            self._write(torch.from_numpy(into_G))
        except StateError:
            into_G.fill(0)
            raise

    def load(self, mean_G: Vector, *, per_member: bool = False) -> bool:
        """Set gradients and buffers from the group's mean.

        Args:
            mean_G: read only, not kept.
            per_member: gradients are the sum over the number of members, not of contributors.

        Returns:
            False, and nothing changed, if nobody contributed.

        Raises:
            StateError: if dtype or shape differ, or the mean is not finite.
        """
        check_vector(mean_G, self.size, "the mean of gradients")
        if not (np.isfinite(mean_G.min()) and np.isfinite(mean_G.max())):  # a NaN is both of them
            raise StateError("the mean of gradients is not finite; it was not applied")
        weight = mean_G[-1]
        if weight <= 0:
            return False
        for gradient, flag in zip(self._gradients, mean_G[self._flags], strict=True):
            mean = mean_G[gradient.at] if flag > 0 else None
            _set_gradient(gradient.parameter, mean, np.float32(1) if per_member else weight)
        with self._flat.step_lock:
            for slot, at in self._buffers:
                buffer = torch.from_numpy(mean_G[at] / weight)
                slot.tensor.detach().copy_(buffer.view(slot.tensor.shape))
        self._flat.synchronize()
        return True

    def _write(self, into: Tensor) -> None:
        flags = into[self._flags]
        for index, gradient in enumerate(self._gradients):
            grad = gradient.parameter.grad
            if grad is not None:
                _write(into[gradient.at], grad, f"the gradient of parameter {gradient.name}")
                flags[index] = 1
        for slot, at in self._buffers:
            _write(into[at], slot.tensor, f"buffer {slot.name}")
        into[-1] = 1


def _gradients(flat: FlatModel) -> Iterator[_Gradient]:
    """One for each `Parameter` object: those that share memory have gradients of their own."""
    start = 0
    for slot in flat.slots:
        for parameter in slot.parameters:
            stop = start + parameter.numel()
            yield _Gradient(slot.name, parameter, slice(start, stop))
            start = stop


def _write(into: Tensor, values: Tensor, what: str) -> None:
    if values.layout != torch.strided:
        raise StateError(f"{what} is sparse, which cannot be averaged; build it with sparse=False")
    into.view(values.shape).copy_(values.detach())
    if not is_finite(into):
        raise StateError(
            f"{what} is not finite; lower the learning rate, clip, or use a gradient scaler"
        )


def _set_gradient(parameter: Tensor, mean: Vector | None, share: np.float32) -> None:
    """The gradient becomes mean / share, rounded once and, if it can be, without memory beside."""
    if mean is None:
        parameter.grad = None
        return
    if parameter.grad is None or parameter.grad.layout != torch.strided:
        parameter.grad = torch.empty_like(parameter)
    grad, mean = parameter.grad.detach(), mean.reshape(parameter.shape)
    if grad.dtype == torch.float32 and grad.device.type == "cpu":
        np.divide(mean, share, out=grad.numpy())
    else:
        grad.copy_(torch.from_numpy(mean / share))
