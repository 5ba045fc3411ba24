"""What an algorithm holds: the `Swarm` port, on top of a driver and its machine."""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from p2ptrain.averaging.base import GroupResult, Measured
from p2ptrain.core.choice import Choice
from p2ptrain.core.effects import Outcome
from p2ptrain.core.epochs import count_of
from p2ptrain.core.fragments import Fragments
from p2ptrain.core.group_lock import SAME_FOR_ALL
from p2ptrain.core.messages import AlgorithmMessage, Phase
from p2ptrain.core.purpose import Purpose
from p2ptrain.ids import PeerId, Seconds, Ticket
from p2ptrain.runtime.accounts import Attempt
from p2ptrain.runtime.live_settings import SettingsDue

if TYPE_CHECKING:
    from p2ptrain.runtime.driver import Driver


class DriverSwarm:
    """Implements `Swarm`: the vocabulary of algorithms, and no way around it."""

    def __init__(self, driver: "Driver") -> None:
        self.me = driver.name
        self.rng = driver.rng
        self._driver = driver
        self._claiming = asyncio.Lock()  # one claim at a time; the next one waits
        self.fragments = Fragments(driver.replica.model_size, driver.environment.stands_for)
        self._endings: dict[Ticket | None, asyncio.Future[GroupResult]] = {}
        """Of claims, by their tickets; None: of the version that the trainer waits for."""

    def ended(self, ticket: Ticket | None, ending: GroupResult | BaseException) -> None:
        """A claim has ended, or (None) a version; it may be that no one waits for it."""
        awaited = self._endings.get(ticket)
        if awaited is None or awaited.done():
            return
        if isinstance(ending, GroupResult):
            awaited.set_result(ending)
        else:
            awaited.set_exception(ending)

    def fail(self, error: BaseException) -> None:
        """The peer has failed: whatever is waited for ends, and the trainer gets `error`."""
        for ticket in tuple(self._endings):
            self.ended(ticket, GroupResult(Outcome.BROKEN, str(error)) if ticket else error)

    async def _ending_of(self, ticket: Ticket | None) -> GroupResult:
        """Let the driver carry out what was asked of the machine; wait for the end of it."""
        awaited: asyncio.Future[GroupResult] = asyncio.get_running_loop().create_future()
        self._endings[ticket] = awaited
        self._driver.pump()
        try:
            return await awaited
        finally:
            self._endings.pop(ticket, None)

    @property
    def now(self) -> Seconds:
        return self._driver.now

    @property
    def updates(self) -> int:
        return self._driver.replica.updates

    @property
    def incarnation(self) -> int:
        return self._driver.machine.membership.born

    @property
    def trains(self) -> bool:
        return not self._driver.stopping and self._driver.me.phase is not Phase.DONE

    def alive(self) -> tuple[PeerId, ...]:
        return self._driver.machine.membership.alive()

    def choosable(self) -> tuple[PeerId, ...]:
        return self._driver.machine.membership.choosable()

    def trainees(self) -> tuple[PeerId, ...]:
        return self._driver.machine.membership.trainees()

    def only_serves(self, peer: PeerId) -> bool:
        member = self._driver.machine.membership.member(peer)
        return member is not None and member.only_serves

    def participants(self) -> tuple[PeerId, ...]:
        return self._driver.machine.membership.participants()

    def met(self) -> Mapping[PeerId, int]:
        return self._driver.accounts.met

    def link_mbit(self, peer: PeerId) -> int:
        member = self._driver.machine.membership.member(peer)
        return member.link_mbit if member else 0

    @property
    def version(self) -> int:
        return self._driver.machine.groups.wait_avoiding.version

    @property
    def rounds(self) -> int:
        return self.fragments.rounds

    async def form(
        self,
        candidates: Sequence[PeerId],
        count: int | None = None,
        *,
        fragment_s: Seconds = 0,
    ) -> GroupResult:
        driver, count = self._driver, len(candidates) if count is None else count
        async with self._claiming:
            may_begin = not driver.stopping and not driver.live.is_due
            if may_begin and len(candidates) >= max(1, count):
                if fragment_s:
                    return await self._claim_fragment(candidates, count, fragment_s)
                return await self._claim(candidates, count, Purpose())
            await asyncio.sleep(driver.config.protocol.lock.resend_s)  # who asks on must not spin
        if driver.stopping:
            return GroupResult(Outcome.WITHDRAWN, f"{self.me} stops")
        if driver.live.is_due:
            return GroupResult(Outcome.WITHDRAWN, "the settings of the swarm change")
        why = f"{len(candidates)} candidates for a group with {count} others"
        return GroupResult(Outcome.BUSY, why)

    async def _claim_fragment(
        self, candidates: Sequence[PeerId], count: int, lasts_s: Seconds
    ) -> GroupResult:
        """Claim a group for the fragment that fits the links of its members.

        In a pair each candidate is asked for a fragment of the size of that pair. In a group of
        several all need the same: one that fits as many as are needed, and at least half of the
        candidates; slower ones are not asked this time, and claim groups themselves.
        """
        counts = {peer: self.fragments.count(peer, lasts_s) for peer in candidates}
        if count > 1:
            most = sorted(counts.values())[max(count, -(-len(counts) // 2)) - 1]
            fitting = [peer for peer in candidates if counts[peer] <= most]
            return await self._claim(fitting, count, self._next_of(most))
        of = {parts: self._next_of(parts) for parts in set(counts.values())}
        purposes = {peer: of[parts] for peer, parts in counts.items()}
        return await self._claim(candidates, count, purposes[candidates[0]], purposes)

    def _next_of(self, parts: int) -> Purpose:
        return Purpose(fragment=self.fragments.next(parts), fragments=parts)

    async def claim(
        self, candidates: Sequence[PeerId], count: int, purpose: Purpose
    ) -> GroupResult:
        """Claim a group for something that is not the algorithm's; candidates as of `form`."""
        async with self._claiming:
            return await self._claim(candidates, count, purpose)

    async def _claim(
        self,
        candidates: Sequence[PeerId],
        count: int,
        purpose: Purpose,
        purposes: Mapping[PeerId, Purpose] = SAME_FOR_ALL,
    ) -> GroupResult:
        driver, waiting = self._driver, self._driver.averages.asked_at
        purpose = replace(purpose, epoch=driver.live.epoch)
        purposes = {p: replace(one, epoch=driver.live.epoch) for p, one in purposes.items()}
        ticket = driver.machine.request(candidates, count, self.now, purpose, purposes)
        waiting[ticket] = self.now
        try:
            result = await self._ending_of(ticket)
        finally:
            asked_at = waiting.pop(ticket, None)
        if asked_at is not None:  # the group was never formed
            attempt = Attempt(ticket, result.members, purpose, asked_at, self.now)
            attempt.outcome, attempt.why = result.outcome, result.why
            driver.accounts.close(attempt, self.now, driver.metrics)
        return result

    async def form_everyone(self) -> GroupResult:
        driver = self._driver
        may_be_released = driver.algorithm.overlaps == "both"
        while may_be_released and driver.averages.running and not driver.failure:
            await driver.wait_for_change()  # our trainer was released before its group was over
        driver.machine.arrive(driver.replica.updates, driver.agreed.lineage, driver.now)
        return await self._ending_of(None)

    async def form_at(self, version: int) -> GroupResult:
        self._driver.machine.arrive_at(version, self.now, waits=True)
        return await self._ending_of(None)

    def pass_by(self, version: int) -> None:
        self._driver.machine.arrive_at(version, self.now, waits=False)
        self._driver.pump()

    async def push(self, peer: PeerId, share: float, clock: int) -> GroupResult:
        return await self._driver.shares.push(peer, share, clock)

    async def exchange_updates(self, servers: Sequence[PeerId], share: float) -> None:
        await self._driver.parameters.exchange(servers, share)

    async def wait_for_update(self, count: int) -> int:
        while (updates := self._driver.me.steps) < count:
            await self._driver.wait_for_step()
        return updates

    async def wait_for_change(self, most_s: Seconds) -> None:
        """Wait as the port says; what waits here ends with the settings that it belongs to.

        Raises:
            SettingsDue: if the swarm has other settings.
            BaseException: the failure of this peer, if there is one: its trainer may be waiting.
        """
        await self._driver.wait_for_change(most_s)
        if self._driver.failure:
            raise self._driver.failure
        if self._driver.live.is_due:
            raise SettingsDue

    async def pause(self, duration_s: Seconds) -> None:
        await asyncio.sleep(duration_s)

    def tell(self, peer: PeerId, message: AlgorithmMessage) -> None:
        self._driver.send(peer, message)  # lost: the algorithm says what that costs

    def start(self, activity: Coroutine[Any, Any, None]) -> None:  # Any: asyncio's own types
        self._driver.live.start(activity)

    async def measure(self) -> Measured:
        return await self._driver.gauges.measure()

    @property
    def codecs(self) -> tuple[str, str]:
        choice = self._driver.live.choice
        return choice.codec, choice.gradient_codec

    @property
    def settings_changes(self) -> int:
        return count_of(self._driver.live.epoch)

    def change_settings(self, choice: Choice, why: str) -> None:
        self._driver.live.propose(choice, why)
