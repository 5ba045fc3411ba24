"""Batches of any size from those of a task, which have one; no sample is lost or comes twice."""

from collections.abc import Iterator

import torch

from p2ptrain.compute.tasks import Batch
from p2ptrain.errors import ConfigError


class Resized:
    """Cuts and joins the batches of a task, in order."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches
        self._rest: Batch | None = None

    def take(self, samples: int) -> Batch:
        """The next so many samples.

        Raises:
            ConfigError: if the task's batches cannot be joined: their samples differ in shape.
        """
        inputs, targets = self._rest or next(self._batches)
        while len(targets) < samples:
            more_inputs, more_targets = next(self._batches)
            for here, there in ((inputs, more_inputs), (targets, more_targets)):
                if here.shape[1:] != there.shape[1:]:
                    shapes = f"{tuple(here.shape[1:])} and {tuple(there.shape[1:])}"
                    raise ConfigError(
                        f"batches = 'by_speed': samples of this task have unlike shapes, {shapes}, "
                        "and cannot be put into one batch; leave batches = 'equal'"
                    )
            inputs = torch.cat([inputs, more_inputs])
            targets = torch.cat([targets, more_targets])
        has_rest = len(targets) > samples
        self._rest = (inputs[samples:], targets[samples:]) if has_rest else None
        return inputs[:samples], targets[:samples]
