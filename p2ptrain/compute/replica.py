"""The port behind which a peer's model lives: float32 vectors on the host, in and out.

The runtime and the simulator see a model as this and nothing more, so neither imports torch. The
real one is `compute/torch_replica.py`; the simulator has one of plain numpy.

Legend of shapes: ``M`` numbers that models average over (parameters, then floating-point buffers),
``G`` numbers that gradients average over (see `Replica.export_gradients`),
``S`` successive ones of them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from p2ptrain.compute.buckets import Buckets
from p2ptrain.compute.contract import UpdateRule
from p2ptrain.compute.tensor_file import Data
from p2ptrain.core.shards import Span
from p2ptrain.vectors import Vector as Vector  # the port's own word

State = bytes | memoryview
"""A replica's state as bytes, in memory or mapped from a file."""


class StateOwner(Protocol):
    """Has a part of what a continued run needs (`runtime/state_owners.py`)."""

    def state_dict(self) -> Mapping[str, Any]:  # Any: plain values, and arrays
        """All of it."""
        ...

    def load_state_dict(self, state: Any, /) -> object:  # Any: what `state_dict` gave
        """Go on where `state_dict` was taken. Raises StateError if that does not fit."""
        ...


class Replica(Protocol):
    """One peer's model and optimizer.

    Two threads meet here. The trainer's thread calls `update`; every other method may be called
    from a worker thread at any time, unless its docstring says otherwise.
    """

    version: int
    """Of stale gradients: the last version whose mean the live parameters have had. It is part of
    the state; a change of parameters and version is made within one `update`."""

    @property
    def model_size(self) -> int:
        """M."""
        ...

    @property
    def saved_size(self) -> int:
        """So many of the M numbers, the first ones, are the model; others are averaged with it."""
        ...

    @property
    def gradient_size(self) -> int:
        """G."""
        ...

    @property
    def buffer_size(self) -> int:
        """So many of the G numbers, the last ones, are buffers; gradients stand before them."""
        ...

    @property
    def gradient_shapes(self) -> Sequence[Sequence[int]]:
        """Of the parameters whose gradients are among the G numbers, in their order."""
        ...

    @property
    def fingerprint(self) -> str:
        """Names the model's shape: equal exactly when names, shapes, dtypes and ties are equal."""
        ...

    @property
    def tensors(self) -> Sequence[str]:
        """What the fingerprint stands for, a short line for each tensor."""
        ...

    @property
    def update_rule(self) -> UpdateRule:
        """How an update is made of gradients at this moment. Trainer waits."""
        ...

    @property
    def updates(self) -> int:
        """How many optimizer updates the live parameters have had."""
        ...

    def snapshot(self, into_S: Vector, start: int = 0) -> int:
        """Copy live + pending, from number `start` on, into all of `into_S`.

        Returns `updates` as it was at that moment. Excluded by `update` only, and for the duration
        of one copy.
        """
        ...

    def is_finite(self) -> bool:
        """True if no live number is infinite or not a number."""
        ...

    def add_delta(self, delta_S: Vector, start: int = 0) -> Vector:
        """Add `delta_S` to pending, from number `start` on; the next boundary adds that to live.

        `delta_S` may be kept; what is returned, of the same shape or empty, is the caller's in its
        place. Never waits for a step.
        """
        ...

    def take_idle(self) -> Vector:
        """The memory of M numbers in which nothing is pending any more; empty if there is none.

        It is the caller's from now on.
        """
        ...

    def update(self, optimizer_step: Callable[[], None]) -> None:
        """The boundary of a step: run `optimizer_step`, then take the pending delta in.

        Trainer's thread only. Counts one update. Raises StateError if a parameter's storage was
        replaced behind our back (named), before anything changes.
        """
        ...

    def update_settings(self) -> object:
        """The settings of an update at this moment, for pieces of it that are made later."""
        ...

    def update_piece(
        self, span: Span, mean_G: Vector, mask: bytes, settings: object, scale: float
    ) -> None:
        """The update of the parameters and buffers in one span of the G numbers, from their means.

        Counts nothing: `update` does, once all pieces are made. Any thread.
        """
        ...

    def settle(self) -> None:
        """Take the pending delta in without an update: the trainer is done, or waits.

        Raises StateError as `update` does.
        """
        ...

    def gradient_mask(self) -> bytes:
        """Which parameters have a gradient, one bit each (`Contribution`). Trainer waits."""
        ...

    def export_gradients(self, into_G: Vector, weight: int) -> None:
        """Write `weight` times what a gradient average needs: gradients, floating-point buffers.

        With weight 0 all of it is zero: this peer takes part without a say (its gradients
        overflowed, or it has just caught up). Trainer waits.

        Raises StateError naming the parameter if a contributed number is not finite; `into_G` is
        zero then.
        """
        ...

    def import_gradients(self, mean_G: Vector, mask: bytes) -> None:
        """Set gradients and buffers from the group's mean.

        `mask` is the union of the members' masks: a parameter that had no gradient anywhere gets
        ``None``. Afterwards gradients and buffers are the same bits on every peer. Trainer waits.

        Raises StateError, with nothing changed, if the mean is not finite.
        """
        ...

    def buckets(self, mib: float) -> Buckets:
        """The G numbers in buckets of about so many MiB, filled as the backward pass makes them.

        0: of a size that follows from how many there are.
        """
        ...

    def export_state(self, *, whole: bool = True, bare: bool = False) -> State:
        """Parameters, buffers, optimizer state, `updates` and `version` of one boundary.

        Excludes `update` until it is written. Without `whole`, an optimizer whose state cannot
        travel is left out; if it is `bare`, every optimizer.
        """
        ...

    @property
    def most_state_bytes(self) -> int:
        """No state that fits this replica is longer."""
        ...

    def write_state(self, write: Callable[[Data], None], is_held: Callable[[], object]) -> None:
        """Write what `export_state` gives, piece by piece, without a copy of it.

        Calls `is_held` once no update can begin any more until all is written. Raises OSError as
        `write` does.
        """
        ...

    def model_file(self, mean_M: Vector, about: Mapping[str, str]) -> State:
        """A file of safetensors: the model with these numbers in place of its own; any thread.

        What is not averaged (integer buffers) is this replica's. `about` is the file's metadata.
        Raises StateError if there is no room for it.
        """
        ...

    @property
    def owners(self) -> Mapping[str, StateOwner]:
        """What a continued run needs beside the state: the process's random generators."""
        ...

    def import_state(self, state: State, *, whole: bool = True) -> str:
        """Take over what `export_state` of another peer gave. Trainer waits.

        Without `whole` this replica keeps its hyperparameters, and its optimizer's state if the
        other one does not fit; returns why, or nothing.

        Raises StateError, with this replica unchanged, if the bytes are not such a state or do
        not fit.
        """
        ...

    def state_digest(self) -> int:
        """64 bits for the values of all that is taken over without `whole`."""
        ...


def clip_scale(norm: float, clip: float) -> float:
    """What gradients of this norm are multiplied by, so that it is `clip` at most; a float32."""
    return min(1.0, float(np.float32(clip / (norm + 1e-6))))


def no_update() -> None:
    """Instead of an optimizer's step, where there is nothing to learn from."""
