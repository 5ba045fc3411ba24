"""Run a peer without a trainer, whose groups and model a benchmark controls directly."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from time import perf_counter
from typing import Any, TypeVar

import torch

from p2plab.harness.claims import Json
from p2ptrain.compute.torch_replica import TorchReplica
from p2ptrain.core.effects import Outcome
from p2ptrain.ids import Address, PeerId, Seconds
from p2ptrain.net.enrolment import found
from p2ptrain.net.grpc_config import GrpcConfig
from p2ptrain.net.grpc_transport import GrpcTransport
from p2ptrain.net.tokens import SwarmKey
from p2ptrain.runtime.exchange import ExchangeConfig
from p2ptrain.runtime.lifecycle import PeerLifecycle
from p2ptrain.runtime.metrics import MemoryMetrics
from p2ptrain.runtime.settings import Environment, PeerConfig

T = TypeVar("T")


class FilledModel(torch.nn.Module):
    """One parameter, `numbers` times the same number."""

    def __init__(self, numbers: int, value: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((numbers,), float(value)))


class Claimer:
    """One real peer on the running loop; `groups` holds the record of each group, as it ends.

    Args:
        name: the peer's name.
        numbers: the size of its model.
        value: the value of each number.
        way: how chunks travel: ``memory``, ``sockets`` or ``grpc``.
        codec: the codec of its averages.
        host: the host to listen on.
        peers: how many peers must be present before this one is ready.
        limit_s: the timeout of joining.
        key: of its swarm, if connections are to be encrypted.
    """

    def __init__(
        self,
        name: str,
        numbers: int,
        value: float,
        way: str,
        *,
        codec: str = "fp32",
        host: str = "127.0.0.1",
        peers: int = 1,
        limit_s: Seconds = 120.0,
        key: SwarmKey | None = None,
    ) -> None:
        self.name = PeerId(name)
        self.groups: asyncio.Queue[Json] = asyncio.Queue()
        self._model, self._limit_s = FilledModel(numbers, value), limit_s
        optimizer = torch.optim.SGD(self._model.parameters(), lr=0.1)
        self._replica = TorchReplica(self._model, optimizer)
        config = PeerConfig(
            name=name,
            listen=f"{host}:0",
            join_timeout_s=limit_s,
            peers=peers,
            leave_grace_s=1.0,
            exchange=ExchangeConfig(codec=codec),
            network=GrpcConfig(data=way),
        )
        environment = Environment(
            clock=perf_counter,
            unix_clock=time.time,
            incarnation=1,
            call=lambda work: work,
            post=lambda function: function(),
            executor=_on_a_worker,
            device=self._replica.device,
        )
        self._lifecycle = PeerLifecycle(config, self._replica, environment)
        security = found(self.name, time.time, key=key) if key else None
        self._transport = GrpcTransport(config.listen, config=config.network, security=security)

    async def listen(self) -> Address:
        """Listen for other peers."""
        return await self._lifecycle.listen(self._transport, _GroupMetrics(self.groups))

    async def join(self, *hosts: str) -> None:
        """Join the swarm of `hosts`, or start one, and wait until it is complete."""
        await self._lifecycle.join(hosts, keeps_model=True)

    async def average(self, others: Sequence[PeerId]) -> None:
        """Average with all of `others`; retries while one is still in the previous group.

        Raises:
            TimeoutError: if no group has been formed within the limit.
        """
        async with asyncio.timeout(self._limit_s):
            while (await self._lifecycle.driver.swarm.form(others)).outcome is Outcome.BUSY:
                pass

    async def next_group(self) -> Json:
        """The record of the next group that has ended. Raises TimeoutError."""
        async with asyncio.timeout(self._limit_s):
            return await self.groups.get()

    async def settle(self) -> None:
        """Wait until no group runs, apply its result, clear the records. Raises TimeoutError."""
        driver = self._lifecycle.driver
        async with asyncio.timeout(self._limit_s):
            while driver.averages.running:
                await driver.wait_for_change()
        self._replica.settle()
        while not self.groups.empty():
            self.groups.get_nowait()

    def fill(self, value: float) -> None:
        """Set all numbers of the model."""
        self._replica.settle()
        with torch.no_grad():
            self._model.weight.fill_(value)

    def mean(self) -> float:
        """The mean of the model's numbers, with all results applied."""
        self._replica.settle()
        return float(self._model.weight.detach().mean(dtype=torch.float64))

    async def leave(self) -> None:
        """Leave the swarm and close everything."""
        await self._lifecycle.depart(serve=False)


class _GroupMetrics(MemoryMetrics):
    """Forwards the records of formed groups, with the time at which each ended."""

    def __init__(self, groups: "asyncio.Queue[Json]") -> None:
        super().__init__(perf_counter)
        self._groups = groups

    def record(self, kind: str, **fields: Any) -> None:  # Any: whatever JSON can hold
        if kind == "group" and fields["outcome"] != Outcome.BUSY.value:
            self._groups.put_nowait({"t": perf_counter(), **fields})


def _on_a_worker(function: Callable[[], T], /) -> Awaitable[T]:
    return asyncio.get_running_loop().run_in_executor(None, function)
