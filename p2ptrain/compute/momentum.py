"""Momentum that is averaged: optimizer state beside the model, in the same vector.

By default only models are averaged, and every peer keeps its own momentum: after an average it
pushes on in the direction in which its model was going before. With ``average_momentum = true``
whatever the optimizer keeps in the shape of its parameters goes along: momentum of SGD, the first
and second moments of Adam and AdamW. It is averaged as the model is, in delta form, so that nothing
is lost either.

**What it costs.** The vector has M + k P numbers instead of M, P being those of the parameters and
k the tensors that the optimizer keeps for each: 1 for SGD with momentum, 2 for Adam and AdamW. What
is sent, copied and kept grows alike, to two or three times as much.

**The state must be there before the first step**, since all peers average one vector from the
beginning. Optimizers make theirs at the first step; so one is made here, with a rate of 0 and
gradients of 0, and what it left is put back to 0. That is right for state that begins at 0, and
`BEGINS_AT_ZERO` names what is known to. An optimizer that has other state must have made a step
before.

A second moment cannot be below 0, and a delta was computed for an older one: what would take it
there waits, as with a ``running_var`` (`compute/flat.py`).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from p2ptrain.errors import StateError

BEGINS_AT_ZERO = (
    "step",
    "momentum_buffer",
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "exp_inf",
    "square_avg",
    "grad_avg",
)
NEVER_NEGATIVE = ("exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg")


class Moments(nn.Module):
    """An optimizer's state in the shape of its parameters, as the buffers of a module.

    Raises:
        StateError: if there is no such state, or it cannot be made before the first step.
    """

    def __init__(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        super().__init__()
        for optimizer in optimizers:
            _fill(optimizer)
        owners = {p: o for o in optimizers for group in o.param_groups for p in group["params"]}
        self._places: list[tuple[Optimizer, nn.Parameter, str, Tensor]] = []
        for name, parameter in module.named_parameters():
            state = owners[parameter].state.get(parameter, {}) if parameter in owners else {}
            for key, value in _shaped_like(parameter, state):
                self._places.append((owners[parameter], parameter, key, value))
                self.register_buffer(f"{key}/{name.replace('.', '/')}", value)
        if not self._places:
            kinds = " and ".join(type(optimizer).__name__ for optimizer in optimizers)
            raise StateError(
                f"{kinds} keeps nothing in the shape of its parameters that "
                "could be averaged; leave average_momentum out, or give it momentum"
            )

    def adopt(self) -> None:
        """Have the optimizer use our tensors again, with its numbers, if somebody replaced them.

        ``load_state_dict`` does. Hold the step lock.

        Raises:
            StateError: if it has thrown some of its state away.
        """
        for optimizer, parameter, key, tensor in self._places:
            state = optimizer.state[parameter]
            current = state.get(key)
            if current is tensor:
                continue
            if not isinstance(current, Tensor) or current.shape != tensor.shape:
                raise StateError(
                    f"the optimizer's {key} was there when the peer was built and is gone; keep "
                    "the optimizer's state, or leave average_momentum out"
                )
            tensor.detach().copy_(current)
            state[key] = tensor


def is_never_negative(name: str) -> bool:
    """True for a buffer whose numbers mean nothing below 0."""
    return name.endswith("running_var") or name.split("/")[0] in NEVER_NEGATIVE


def _shaped_like(
    parameter: Tensor,
    state: dict[str, Any],  # Any: torch's own type of an entry
) -> Iterator[tuple[str, Tensor]]:
    for key in sorted(state):
        value = state[key]
        is_tensor = isinstance(value, Tensor) and value.is_floating_point()
        if key != "step" and is_tensor and value.shape == parameter.shape:
            yield key, value


def _fill(optimizer: Optimizer) -> None:
    """Have the optimizer make the state that it does not have yet; parameters stay as they are."""
    groups = optimizer.param_groups
    trained = [p for group in groups for p in group["params"] if p.requires_grad]
    empty = [parameter for parameter in trained if not optimizer.state.get(parameter)]
    if not empty:
        return
    gradients = [parameter.grad for parameter in trained]
    values = [parameter.detach().clone() for parameter in empty]
    rates = [group["lr"] for group in groups]
    for parameter in trained:
        is_empty = any(parameter is one for one in empty)
        parameter.grad = torch.zeros_like(parameter) if is_empty else None
    for group in groups:
        group["lr"] = 0.0
    try:
        optimizer.step()
    except TypeError as error:
        raise StateError(
            f"{type(optimizer).__name__} cannot make a step by itself, so its momentum cannot be "
            "averaged; leave average_momentum out"
        ) from error
    finally:
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.grad = gradient
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        for parameter, value in zip(empty, values, strict=True):
            parameter.detach().copy_(value)
    for parameter in empty:
        _begin_at_zero(optimizer, optimizer.state[parameter])


def _begin_at_zero(
    optimizer: Optimizer,
    state: dict[str, Any],  # Any: torch's own type of an entry
) -> None:
    for key, value in state.items():
        if value is not None and key not in BEGINS_AT_ZERO:
            raise StateError(
                f"the {key} of {type(optimizer).__name__} begins in an unknown way; make a step "
                "before the peer is built, or leave average_momentum out"
            )
        if isinstance(value, Tensor):
            value.zero_()
        elif value is not None:
            state[key] = 0
