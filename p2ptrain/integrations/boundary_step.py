"""A framework calls `optimizer.step`; here that call becomes the boundary of a peer's step.

The framework's own loop stays as it is. What it calls is replaced, on the one optimizer it has::

    framework ──► optimizer.step(closure) ──► closure()       forward and backward, if it is given
                                              peer.step()     average, then update:
                                                └─► optimizer.step()    the original, once

A gradient scaler calls `optimizer.step` only if nothing overflowed. So a peer whose gradients
overflowed makes no step at all; under a synchronous algorithm the others wait for its next one.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from p2ptrain.errors import LocalProtocolError, TransportError
from p2ptrain.runtime.peer import Peer

KEPT = "_optimizer_original_step_method", "_optimizer_patched_step_method"
"""The optimizer's `step` where Accelerate keeps it, plain and with a note that it was called."""


class BoundaryStep:
    """Stands where `optimizer.step` stood, from here until `restore`.

    Args:
        peer: entered; its model is the one that `optimizer` trains.
        optimizer: the torch optimizer itself, not a framework's wrapper of it.
        take_samples: called once per step: how many samples its gradients are of.
        wrapper: Accelerate's, of `optimizer`, if there is one. With a gradient scaler it keeps the
            `step` that it found, and puts that back after each step; so it gets this one to keep.
    """

    def __init__(
        self,
        peer: Peer,
        optimizer: Optimizer,
        take_samples: Callable[[], int],
        wrapper: Any = None,  # Any: Accelerate has no types
    ) -> None:
        self.clip: float | None = None
        """Norm to clip gradients to, after they were averaged."""
        self._peer = peer
        self._optimizer = optimizer
        self._take_samples = take_samples
        self._original = optimizer.step
        self._was_instance_attribute = "step" in vars(optimizer)
        self._inside = False
        self._wrapper = None if getattr(wrapper, "scaler", None) is None else wrapper
        self._kept = {name: getattr(wrapper, name) for name in KEPT} if self._wrapper else {}
        if self._wrapper:
            self._give_to_wrapper()
        setattr(optimizer, "step", self)  # noqa: B010 - mypy: a method is assigned to

    def __call__(self, closure: Callable[[], Any] | None = None) -> Any:  # Any: the closure's own
        """Be the framework's `optimizer.step`; while the peer steps, be the original one."""
        if self._inside or self._peer.replica.is_updating:
            return self._original()
        result = closure() if closure else None
        self._inside = True
        try:
            self._peer.step(samples=self._take_samples(), loss=_loss_in(result), clip=self.clip)
        finally:
            self._inside = False
        return result

    def restore(self) -> None:
        """Give the optimizer, and what wraps it, its own `step` back."""
        for name, method in self._kept.items():
            setattr(self._wrapper, name, method)
        if self._was_instance_attribute:  # a scheduler of torch counts the calls through it
            setattr(self._optimizer, "step", self._original)  # noqa: B010 - as above
        else:
            vars(self._optimizer).pop("step", None)

    def _give_to_wrapper(self) -> None:
        from accelerate.optimizer import patch_optimizer_step

        for name, method in zip(
            KEPT, (self, patch_optimizer_step(self._wrapper, self)), strict=True
        ):
            setattr(self._wrapper, name, method)


def leave_with_consensus(peer: Peer) -> None:
    """Leave the swarm, with the mean model of all, if they are waited for, in place of our own."""
    mean: dict[str, Any] = {}  # Any: as torch has it
    try:
        if peer.config.serve:
            mean = peer.consensus()
    except (TransportError, LocalProtocolError):
        pass  # it is asked to end, or cannot wait: then its own model is what there is
    finally:
        peer.__exit__(None, None, None)
    if mean:
        peer.replica.load_state_dict(mean)


def _loss_in(result: object) -> float | None:
    """What a closure returned, if it is a loss on the host; reading one elsewhere would wait."""
    if isinstance(result, Tensor) and result.numel() == 1 and result.device.type == "cpu":
        return float(result.detach())
    return None
