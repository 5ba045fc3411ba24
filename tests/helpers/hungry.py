"""A task whose device has no memory left after a few steps."""

import torch
from torch import Tensor, nn

from p2ptrain.compute.tasks.base import Batch
from p2ptrain.compute.tasks.classification import Classification
from p2ptrain.compute.tasks.digits import Config, digits

STEPS = 5
MORE_THAN_ANY = 1 << 50
"""Numbers, that no device has memory for."""


class Hungry:
    """`digits`, until it is over."""

    def __init__(self, task: Classification) -> None:
        self._task, self._left = task, STEPS
        self.build_model, self.batches = task.build_model, task.batches
        self.evaluate = task.evaluate

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        self._left -= 1
        if self._left < 0:
            torch.empty(MORE_THAN_ANY, device=next(model.parameters()).device)
        return self._task.loss(model, batch)


def hungry() -> Hungry:
    return Hungry(digits(Config()))
