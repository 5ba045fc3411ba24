"""What an algorithm holds in a formed group: the `Group` port, on top of `Averages`."""

from typing import TYPE_CHECKING

import numpy as np

from p2ptrain.averaging.base import Mean
from p2ptrain.compute.replica import Replica, Vector
from p2ptrain.core.effects import Average, Mend, What
from p2ptrain.core.purpose import Formation
from p2ptrain.ids import PeerId
from p2ptrain.runtime.accounts import Attempt
from p2ptrain.runtime.buffers import Buffers
from p2ptrain.runtime.offload import Offload

if TYPE_CHECKING:
    from p2ptrain.runtime.averages import Averages


class AttemptOver(Exception):
    """An attempt has come to nothing here; `mend` says how it goes on, if it does."""

    def __init__(self, mend: Mend | None = None) -> None:
        super().__init__()
        self.mend = mend


class FormedGroup:
    """Implements `Group` for one attempt."""

    def __init__(self, averages: "Averages", attempt: Attempt, effect: Average) -> None:
        self._averages = averages
        self._attempt = attempt
        self._effect = effect

    @property
    def members(self) -> tuple[PeerId, ...]:
        return self._attempt.members

    @property
    def what(self) -> What:
        return self._attempt.what

    @property
    def version(self) -> int | None:
        purpose = self._effect.purpose
        return None if purpose.formation is Formation.CLAIMED else purpose.version

    @property
    def awaited(self) -> bool:
        return self._effect.awaited

    async def reduce(self) -> None:
        await self._averages.reduce(self._attempt, self._effect)

    async def commit(self) -> None:
        await self._averages.commit(self._attempt, self._effect)

    async def keep(self) -> Mean:
        self._attempt.keeps_mean = True
        await self.reduce()
        return self._averages.keep(self._attempt)


class KeptMean:
    """Implements `Mean`."""

    def __init__(
        self, mean_M: Vector, replica: Replica, buffers: Buffers, offload: Offload
    ) -> None:
        self._mean_M = mean_M
        self._replica = replica
        self._buffers = buffers
        self._offload = offload

    async def add(self, share: float) -> None:
        """Add it; it must not be used again."""
        mean_M, own_M = self._mean_M, self._buffers.take(len(self._mean_M))
        await self._offload(lambda: self._replica.snapshot(own_M))
        mean_M -= own_M
        mean_M *= np.float32(share)
        for vector in (own_M, self._replica.add_delta(mean_M)):
            self._buffers.give(vector)
