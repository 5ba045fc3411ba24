"""Implement `Replica` with plain numpy: a vector that its trainer moves."""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from safetensors.numpy import save

from p2ptrain.compute.buckets import Buckets, bucket_size
from p2ptrain.compute.contract import FROZEN, NONE, UpdateRule, update_rule
from p2ptrain.compute.replica import State, StateOwner, Vector
from p2ptrain.compute.tensor_file import Data
from p2ptrain.core.shards import Span
from p2ptrain.errors import StateError

HEADER_BYTES = 16
"""Of a state: updates and version."""


class VectorReplica:
    """Implements `Replica` for one float32 vector, trained by plain gradient steps.

    The gradient vector is the gradient and one buffer, G = M + 1. Set `gradient` before a step. The
    buffer is always 1: its mean must be 1, and the last number of a contribution is its weight.
    """

    def __init__(self, start_M: Vector, learning_rate: float = 0.0) -> None:
        self.live = np.array(start_M, dtype=np.float32)
        self.pending = np.zeros_like(self.live)
        self.gradient = np.zeros_like(self.live)
        self.learning_rate = learning_rate
        self.frozen = NONE
        """What stands for frozen parameters, of which there are none."""
        self.stands_for = 1
        """How many numbers of a real model one of these is."""
        rows = math.isqrt(len(self.live))
        matrix, rest = (rows, len(self.live) // max(1, rows)), len(self.live) % max(1, rows)
        self.gradient_shapes: Sequence[Sequence[int]] = (matrix, (rest,))
        """As if the numbers were those of a matrix, and some without factors."""
        self.version = self._updates = 0

    @property
    def model_size(self) -> int:
        return len(self.live)

    @property
    def saved_size(self) -> int:
        return len(self.live)

    @property
    def gradient_size(self) -> int:
        return len(self.live) + 1

    @property
    def buffer_size(self) -> int:
        return 1

    @property
    def fingerprint(self) -> str:
        return f"vector-{len(self.live)}"

    @property
    def tensors(self) -> tuple[str, ...]:
        return (f"vector float32 [{len(self.live)}]",)

    @property
    def update_rule(self) -> UpdateRule:
        return update_rule(
            (FROZEN, self.frozen), ("optimizer", "descent"), ("lr", self.learning_rate)
        )

    @property
    def updates(self) -> int:
        return self._updates

    def snapshot(self, into_S: Vector, start: int = 0) -> int:
        at = slice(start, start + len(into_S))
        np.add(self.live[at], self.pending[at], out=into_S)
        return self._updates

    def is_finite(self) -> bool:
        return bool(np.isfinite(self.live).all())

    def add_delta(self, delta_S: Vector, start: int = 0) -> Vector:
        self.pending[start : start + len(delta_S)] += delta_S
        return delta_S

    def take_idle(self) -> Vector:
        return np.empty(0, np.float32)

    def update(self, optimizer_step: Callable[[], None]) -> None:
        optimizer_step()
        self._updates += 1
        self.settle()

    def descend(self) -> None:
        """Plain gradient descent; pass it to the boundary as the optimizer's step."""
        self.live -= np.float32(self.learning_rate) * self.gradient

    def update_settings(self) -> object:
        return self.learning_rate

    def update_piece(
        self, span: Span, mean_G: Vector, mask: bytes, settings: object, scale: float
    ) -> None:
        stop, rate = min(span.stop, self.model_size), np.float32(settings) * np.float32(scale)  # type: ignore[arg-type]
        self.live[span.start : stop] -= rate * mean_G[span.start : stop]

    def settle(self) -> None:
        self.live += self.pending
        self.pending[:] = 0

    def gradient_mask(self) -> bytes:
        return b"\x01"

    def export_gradients(self, into_G: Vector, weight: int) -> None:
        if weight and not np.isfinite(self.gradient).all():
            raise StateError("the gradient is not finite")
        into_G[:-1] = self.gradient * np.float32(weight) if weight else 0
        into_G[-1] = weight

    def import_gradients(self, mean_G: Vector, mask: bytes) -> None:
        self.gradient = mean_G[:-1].copy()

    def buckets(self, mib: float) -> Buckets:
        return VectorBuckets(self, self.bucket_size(mib))

    def bucket_size(self, mib: float) -> int:
        """Of the numbers that exist."""
        return max(1, bucket_size(self.model_size * self.stands_for, mib) // self.stands_for)

    def export_state(self, *, whole: bool = True, bare: bool = False) -> State:
        model_M = (self.live + self.pending).astype("<f4")
        return np.array([self._updates, self.version], "<i8").tobytes() + model_M.tobytes()

    @property
    def most_state_bytes(self) -> int:
        return HEADER_BYTES + 4 * len(self.live)

    def write_state(self, write: Callable[[Data], None], is_held: Callable[[], object]) -> None:
        is_held()
        write(bytes(self.export_state()))

    @property
    def owners(self) -> dict[str, StateOwner]:
        return {}

    def model_file(self, mean_M: Vector, about: Mapping[str, str]) -> State:
        return bytes(save({"vector": mean_M}, dict(about)))

    def import_state(self, state: State, *, whole: bool = True) -> str:
        if len(state) != self.most_state_bytes:
            raise StateError(f"a state of {len(state)} bytes does not fit")
        live = np.frombuffer(state[HEADER_BYTES:], "<f4").copy()
        if not np.isfinite(live).all():
            raise StateError("this state holds numbers that are not finite")
        self._updates, self.version = map(int, np.frombuffer(state[:HEADER_BYTES], "<i8"))
        self.live = live
        self.pending[:] = 0
        return ""

    def state_digest(self) -> int:
        return int.from_bytes(hashlib.blake2b(self.export_state(), digest_size=8).digest())


class VectorBuckets(Buckets):
    """Of a vector each number is a parameter; its buffer is the last bucket."""

    def __init__(self, replica: VectorReplica, most: int) -> None:
        size = replica.model_size
        spans = [Span(max(0, stop - most), stop) for stop in range(size, 0, -most)]
        super().__init__(spans, Span(size, size + 1))
        self._replica = replica
        self._seen: dict[int, Vector] = {}
        self.is_held = True  # a gradient is there at once; the loop says when it would be

    def _write(self, index: int, into_S: Vector, weight: int) -> bool:
        span, gradient = self.spans[index], self._replica.gradient
        if index == self._gradients:
            into_S[:] = weight
            return True
        if not np.isfinite(gradient).all():
            raise StateError("the gradient is not finite")
        self._seen[index] = gradient
        into_S[:] = gradient[span.start : span.stop] * np.float32(weight)
        return True

    def _holds(self, index: int) -> bool:
        return index == self._gradients or self._seen[index] is self._replica.gradient
