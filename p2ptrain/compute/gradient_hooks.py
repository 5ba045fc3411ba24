"""Tell when the gradients of a bucket are final: torch's hooks, counted.

A parameter's gradient is final when as many backward passes have added to it as in the step before
(gradient accumulation, modules that run twice are one pass each). That is a guess; what comes after
it is found at the boundary, and costs that step its overlap. A bucket with a parameter that had no
gradient in the step before does not wait for it.

From a GPU a bucket leaves on a stream of its own (`compute/staging.py`): the hook notes what is to
leave, a worker thread waits for it, and the backward pass for neither.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import accumulate

import torch
from torch import Tensor

from p2ptrain.compute.buckets import Buckets, cut
from p2ptrain.compute.flat import is_finite
from p2ptrain.compute.gradients import GradientVector
from p2ptrain.core.shards import Span
from p2ptrain.vectors import Vector

Seen = tuple[int, int] | None
"""Which memory a gradient is in, and how often that was written; None without a gradient."""


class TorchBuckets(Buckets):
    """The buckets of one gradient vector, of about `most` numbers each."""

    def __init__(self, gradients: GradientVector, most: int) -> None:
        sizes = [parameter.numel() for parameter in gradients.parameters]
        ends = [0, *accumulate(sizes)]
        self._of_bucket = cut(sizes, most)  # which parameters
        spans = [Span(ends[own.start], ends[own.stop]) for own in self._of_bucket]
        super().__init__(spans, Span(ends[-1], gradients.size))
        self._vector, self.parameters = gradients, gradients.parameters
        self.bucket_of = {i: b for b, own in enumerate(self._of_bucket) for i in own}
        """Which bucket each parameter is in."""
        self._fired = [0] * len(sizes)
        self._due = [1] * len(sizes)
        self._missing = [0] * len(spans)
        self._seen: dict[int, list[Seen]] = {}
        self._count_due()
        self._worker = ThreadPoolExecutor(1, "gradients") if gradients.stages else None
        self._leaving: list[Future[None]] = []
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]  # torch's
                self._hook(index)
            )
            for index, parameter in enumerate(self.parameters)
        ]

    def stop(self) -> None:
        super().stop()
        leaving = self._all_that_leave()
        wait([one for one in leaving if not one.cancel()])

    def finish(self) -> bool:
        super().finish()
        for one in self._all_that_leave():
            one.result()
        with self._lock:
            good = self._is_good
            if any(self._fired):
                self._due = self._fired
            self._fired = [0] * len(self.parameters)
            self._count_due()
        return good

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        def final(_: Tensor) -> None:
            self._fired[index] += 1
            if self._fired[index] == self._due[index]:
                bucket = self.bucket_of[index]
                self._missing[bucket] -= 1
                if not self._missing[bucket] and not self.is_held:
                    self.take(bucket)

        return final

    def _count_due(self) -> None:
        self._missing = [sum(self._due[i] > 0 for i in own) for own in self._of_bucket]

    def close(self) -> None:
        """Nothing follows."""
        for hook in self._hooks:
            hook.remove()
        if self._worker:
            self._worker.shutdown()

    def _write(self, index: int, into_S: Vector, weight: int) -> bool:
        if index < len(self._of_bucket):
            self._seen[index] = self._look(index)
        if self._worker is None:
            self._vector.export_span(self.spans[index], into_S, weight)
            return True
        self._vector.meet(into_S)
        leaving, taken = self._vector.leave_span(self.spans[index]), self._taken

        def bring() -> None:
            into = torch.from_numpy(into_S)
            leaving.bring(into, weight)
            if is_finite(into):
                taken(index)
            else:
                self._is_good = False

        self._leaving.append(self._worker.submit(bring))
        return False

    def _all_that_leave(self) -> list[Future[None]]:
        with self._lock:
            leaving, self._leaving = self._leaving, []
        return leaving

    def _holds(self, index: int) -> bool:
        return index == len(self._of_bucket) or self._seen[index] == self._look(index)

    def _look(self, index: int) -> list[Seen]:
        grads = (self.parameters[i].grad for i in self._of_bucket[index])
        return [None if grad is None else (grad.data_ptr(), grad._version) for grad in grads]
