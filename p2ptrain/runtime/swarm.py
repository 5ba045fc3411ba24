"""What an algorithm holds: the `Swarm` port, on top of a driver."""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from random import Random
from typing import Any

from p2ptrain.averaging.base import GroupResult
from p2ptrain.core.messages import AlgorithmMessage, Phase
from p2ptrain.ids import PeerId, Seconds
from p2ptrain.runtime.driver import Driver


class DriverSwarm:
    """Implements `Swarm`: the vocabulary of algorithms, and no way around it."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    @property
    def me(self) -> PeerId:
        return self._driver.name

    @property
    def rng(self) -> Random:
        return self._driver.rng

    @property
    def updates(self) -> int:
        return self._driver.replica.updates

    @property
    def now(self) -> Seconds:
        return self._driver.now

    @property
    def incarnation(self) -> int:
        return self._driver.machine.membership.born

    @property
    def trains(self) -> bool:
        return not self._driver.stopping and self._driver.me.phase is not Phase.DONE

    def choosable(self) -> tuple[PeerId, ...]:
        return self._driver.choosable()

    def trainees(self) -> tuple[PeerId, ...]:
        return self._driver.machine.membership.trainees()

    def met(self) -> Mapping[PeerId, int]:
        return self._driver.accounts.met

    async def form(self, candidates: Sequence[PeerId], count: int | None = None) -> GroupResult:
        most = len(candidates) if count is None else count
        return await self._driver.average_with_any(candidates, most)

    async def form_everyone(self) -> GroupResult:
        return await self._driver.average_gradients()

    @property
    def version(self) -> int:
        return self._driver.machine.groups.wait_avoiding.version

    async def form_at(self, version: int) -> GroupResult:
        return await self._driver.average_at(version)

    def pass_by(self, version: int) -> None:
        self._driver.arrive_at(version, waits=False)

    async def wait_for_update(self, count: int) -> int:
        return await self._driver.wait_for_update(count)

    async def wait_for_change(self, most_s: Seconds) -> None:
        await self._driver.wait_for_change(most_s)

    def tell(self, peer: PeerId, message: AlgorithmMessage) -> None:
        self._driver.send(peer, message)  # lost: the algorithm says what that costs

    def start(self, activity: Coroutine[Any, Any, None]) -> None:  # Any: asyncio's own types
        self._driver.start_activity(activity)

    async def pause(self, duration_s: Seconds) -> None:
        await asyncio.sleep(duration_s)
