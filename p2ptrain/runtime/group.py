"""What an algorithm holds in a formed group: the `Group` port, on top of `Averages`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from p2ptrain.averaging.base import Mean
from p2ptrain.compute.replica import Replica, Vector
from p2ptrain.core.effects import Average, Resolve
from p2ptrain.core.purpose import Formation
from p2ptrain.runtime.accounts import Attempt
from p2ptrain.runtime.buffers import Buffers
from p2ptrain.runtime.copy_executor import CopyExecutor

if TYPE_CHECKING:
    from p2ptrain.runtime.averages import Averages


class AttemptOver(Exception):
    """An attempt has come to nothing here; `resolution` says how it goes on, if it does."""

    def __init__(self, resolution: Resolve | None = None) -> None:
        super().__init__()
        self.resolution = resolution


class FormedGroup:
    """Implements `Group` for one attempt."""

    def __init__(self, averages: "Averages", attempt: Attempt, effect: Average) -> None:
        purpose = effect.purpose
        self.members = attempt.members
        self.what = attempt.what
        self.version = None if purpose.formation is Formation.CLAIMED else purpose.version
        self.awaited = effect.awaited
        self._averages = averages
        self._attempt = attempt
        self._effect = effect

    async def reduce(self) -> None:
        await self._averages.reduce(self._attempt, self._effect)

    async def commit(self) -> None:
        await self._averages.commit(self._attempt, self._effect)

    async def keep(self) -> Mean:
        self._attempt.keeps_mean = True
        await self.reduce()
        return self._averages.keep(self._attempt)


@dataclass(slots=True)
class PendingMean:
    """Implements `Mean`."""

    mean_M: Vector
    replica: Replica
    buffers: Buffers
    executor: CopyExecutor

    async def add(self, share: float) -> None:
        own_M = self.buffers.take(len(self.mean_M))
        await self.executor(lambda: self.replica.snapshot(own_M))
        self.mean_M -= own_M
        self.mean_M *= np.float32(share)
        for vector in (own_M, self.replica.add_delta(self.mean_M)):
            self.buffers.give(vector)
