"""A mean of models that a member has taken away from its group, to add it later."""

from dataclasses import dataclass

import numpy as np

from p2ptrain.compute.replica import Replica, Vector
from p2ptrain.runtime.copy_executor import CopyExecutor
from p2ptrain.vectors import Buffers


@dataclass(slots=True)
class PendingMean:
    """Implements `Mean`, of the S numbers from `start` on."""

    mean_S: Vector
    start: int
    replica: Replica
    buffers: Buffers
    executor: CopyExecutor

    async def add(self, share: float) -> None:
        own_S = self.buffers.take(len(self.mean_S))
        await self.executor(lambda: self.replica.snapshot(own_S, self.start))
        self.mean_S -= own_S
        self.mean_S *= np.float32(share)
        for vector in (own_S, self.replica.add_delta(self.mean_S, self.start)):
            self.buffers.give(vector)
