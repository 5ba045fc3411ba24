"""The consensus model: one exact mean of the models of all who are in, and each of them keeps it.

When training ends under an algorithm that averages models, peers differ. Once no peer trains any
more, the first by name claims one group with all others; its payload is all numbers of their
models, live and pending, in float32. The mean is kept beside the models, which do not change: so a
group that breaks costs nothing, and is claimed again with those that are left. All members hold the
same bits, and know of which models they are the mean.

While peers train, a mean is made for who asks for it (`p2ptrain export`): the same group, of the
models as they are when it runs, and its mean is kept by the member that was asked.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from p2ptrain.compute.replica import Vector
from p2ptrain.core.contribution import MODEL, Contribution
from p2ptrain.core.purpose import Purpose, What
from p2ptrain.errors import LocalProtocolError, TransportError
from p2ptrain.ids import PeerId, Seconds

if TYPE_CHECKING:
    from p2ptrain.runtime.driver import Driver

PURPOSE = Purpose(what=What.CONSENSUS)
AGAIN_S: Seconds = 0.1
"""The pause after a claim that came to nothing."""


@dataclass(frozen=True, slots=True)
class MeanModel:
    """What a group has yielded."""

    mean_M: Vector
    weights: Mapping[PeerId, int]
    """Of the models in it: all members' but for those that only serve."""


ASKED_FOR = replace(PURPOSE, version=1)
"""While peers train: only the member that has claimed the group keeps its mean."""


class Consensus:
    """One peer's side. On the protocol's side, but for `count`."""

    def __init__(self, host: "Driver") -> None:
        self._host = host
        self._latest: MeanModel | None = None
        self._asked: MeanModel | None = None
        self.count = 0
        """Means that this peer has kept."""

    def take(
        self, members: Sequence[PeerId], stated: Sequence[Contribution], mean_M: Vector
    ) -> None:
        """A group is done; `mean_M` is ours, and this keeps it."""
        self._latest = MeanModel(mean_M, _weights(members, stated))
        weights = [one.weight for one in stated]
        self.count += 1
        self._host.metrics.record("consensus", members=members, weights=weights)
        self._host.notify_change()

    async def reach(self, before: int, timeout_s: Seconds | None) -> MeanModel:
        """Wait until no peer trains any more, and for the mean of all, the caller's from now on.

        Args:
            before: `count` when our own training ended.
            timeout_s: None: for as long as others train.

        Raises:
            TransportError: if it takes longer, or this peer is asked to end.
            LocalProtocolError: if it does not know everyone.
        """
        host, membership = self._host, self._host.machine.membership
        if not membership.knows_all:
            raise LocalProtocolError(f"no consensus: {self._knows_some}; take state_dict()")
        try:
            async with asyncio.timeout(timeout_s):
                while self.count == before:
                    if host.failure:
                        raise host.failure
                    if host.stopping:
                        raise TransportError(f"no consensus: {host.name} was asked to end")
                    others, here = membership.alive(), membership.reachable()
                    trains = any(peer != host.name for peer in membership.participants())
                    if trains or len(others) < len(here):  # a suspect is in, or is dead soon
                        await host.wait_for_change()
                    elif host.averages.is_in(What.CONSENSUS):
                        await host.wait_for_change()  # others may have their mean, and leave
                    elif not others:
                        await self._take_own(before)
                    elif host.name < others[0]:
                        await self._claim(others)
                    else:
                        await host.wait_for_change()
        except TimeoutError as error:
            late = ", ".join(peer for peer in membership.participants() if peer != host.name)
            why = f"{late} still trains" if late else "no group of all came about"
            raise TransportError(f"no consensus after {timeout_s:g} s: {why}") from error
        latest, self._latest = self._latest, None
        assert latest
        return latest

    @property
    def _knows_some(self) -> str:
        name = self._host.name
        return f"{name} knows only some of its swarm (membership view), not whose mean it would be"

    def take_asked(
        self, members: Sequence[PeerId], stated: Sequence[Contribution], mean_M: Vector
    ) -> None:
        """A group that we were asked for is done; `mean_M` is ours, and this keeps it."""
        self._asked = MeanModel(mean_M, _weights(members, stated))

    async def now(self, timeout_s: Seconds) -> MeanModel:
        """The mean of the models as they are, while peers train or after that.

        Under averages of gradients it is this peer's model, which is that of all at its version.

        Raises:
            TransportError: if no group of all comes about in that time, or none can.
        """
        host, membership = self._host, self._host.machine.membership
        if not membership.knows_all:
            raise TransportError(f"no model: {self._knows_some}")
        try:
            async with asyncio.timeout(timeout_s):
                while host.algorithm.averages == "models" and (others := membership.alive()):
                    if host.stopping:
                        raise TransportError(f"no model: {host.name} was asked to end")
                    result = await host.swarm.claim(others, len(others), ASKED_FOR)
                    if result.done and (mean := self._asked):
                        self._asked = None
                        return mean
                    await asyncio.sleep(AGAIN_S)
        except TimeoutError as error:
            raise TransportError(
                f"no group of all {len(others) + 1} peers came about in {timeout_s:g} s; ask again"
            ) from error
        return MeanModel(await self._own(), {host.name: MODEL.weight})

    async def _claim(self, others: Sequence[PeerId]) -> None:
        result = await self._host.swarm.claim(others, len(others), PURPOSE)
        if not result.done:
            await asyncio.sleep(AGAIN_S)

    async def _take_own(self, before: int) -> None:
        own_M = await self._own()
        if self.count == before:  # or else a group has ended meanwhile
            self.take((self._host.name,), (MODEL,), own_M)

    async def _own(self) -> Vector:
        replica = self._host.replica
        model_M = np.empty(replica.model_size, np.float32)
        await self._host.averages.whole(lambda: replica.snapshot(model_M))
        return model_M


def _weights(members: Sequence[PeerId], stated: Sequence[Contribution]) -> Mapping[PeerId, int]:
    return {peer: one.weight for peer, one in zip(members, stated, strict=True) if one.weight}
