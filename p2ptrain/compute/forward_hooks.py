"""Tell when a forward pass is about to use parameters: torch's hooks, on each module.

A module's own parameters and buffers are needed when it runs. A parameter that is used although no
module that has it runs (a functional call, a graph that was compiled before) cannot be seen coming:
then its update must not be deferred. That shows at its gradient, from the first step on.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from p2ptrain.compute.gradient_hooks import TorchBuckets


class ForwardHooks:
    """Calls `need` with a bucket before a module that has parts of it runs."""

    def __init__(
        self, module: nn.Module, buckets: TorchBuckets, need: Callable[[int], None]
    ) -> None:
        self.stray = ""
        """The first parameter that was used while no module that has it ran."""
        self._need, self._ran = need, set[int]()
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        index_of = {id(parameter): i for i, parameter in enumerate(buckets.parameters)}
        self.handles: list[RemovableHandle] = []
        for part in module.modules():
            own = [index_of[id(p)] for p in part.parameters(recurse=False) if id(p) in index_of]
            wanted = sorted({buckets.bucket_of[i] for i in own}, reverse=True)
            if buckets.has_buffers and any(b.is_floating_point() for b in part.buffers(False)):
                wanted.insert(0, len(buckets.spans) - 1)
            if wanted:
                hook = torch.compiler.disable(self._before(own, wanted))  # type: ignore[no-untyped-call]
                self.handles.append(part.register_forward_pre_hook(hook))
        for i, parameter in enumerate(buckets.parameters):
            hook = self._after(i, names.get(id(parameter), "a parameter"))
            handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]  # torch's
            self.handles.append(handle)

    def next_step(self) -> None:
        """A boundary is over."""
        self._ran.clear()

    def _before(self, own: list[int], wanted: list[int]) -> Callable[..., None]:
        def before(*_: object) -> None:
            self._ran.update(own)
            for bucket in wanted:
                self._need(bucket)

        return before

    def _after(self, index: int, name: str) -> Callable[[Tensor], None]:
        def after(_: Tensor) -> None:
            if index not in self._ran:
                self.stray = self.stray or name

        return after


def before_state_dict(owner: nn.Module, flush: Callable[[], None]) -> list[RemovableHandle]:
    """Call `flush` before any part of a module gives its state."""
    parts: Iterable[Any] = owner.modules()  # Any: torch has no types there
    return [part.register_state_dict_pre_hook(lambda *_: flush()) for part in parts]
