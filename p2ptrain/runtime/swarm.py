"""What an algorithm holds: the `Swarm` port, on top of a driver."""

import asyncio
from collections.abc import Mapping, Sequence
from random import Random

from p2ptrain.averaging.base import GroupResult
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

    def choosable(self) -> tuple[PeerId, ...]:
        return self._driver.choosable()

    def met(self) -> Mapping[PeerId, int]:
        return self._driver.accounts.met

    async def average_models(self, others: Sequence[PeerId]) -> GroupResult:
        return await self._driver.average_with_any(others, len(others))

    async def average_with_any(self, candidates: Sequence[PeerId], count: int = 1) -> GroupResult:
        return await self._driver.average_with_any(candidates, count)

    async def average_in_turn(self) -> GroupResult:
        return await self._driver.average_in_turn()

    async def average_gradients(self) -> GroupResult:
        return await self._driver.average_gradients()

    @property
    def version(self) -> int:
        return self._driver.machine.groups.wait_avoiding.version

    async def average_at(self, version: int) -> GroupResult:
        return await self._driver.average_at(version)

    def pass_by(self, version: int) -> None:
        self._driver.arrive_at(version, waits=False)

    async def hand_in_gradients(self) -> None:
        await self._driver.hand_in_gradients()

    def forget_all_but_latest(self) -> None:
        self._driver.averages.late.forget_all_but_latest()

    async def add_late_average(self) -> bool:
        return await self._driver.averages.kept.add()

    async def wait_for_update(self, count: int) -> int:
        return await self._driver.wait_for_update(count)

    async def pause(self, duration_s: Seconds) -> None:
        await asyncio.sleep(duration_s)
