"""What those who carry out effects may ask of the driver; the driver implements it."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol

from p2ptrain.averaging.base import Algorithm
from p2ptrain.core.effects import Ending
from p2ptrain.core.peer_machine import PeerMachine
from p2ptrain.ids import PeerId, Seconds, Ticket
from p2ptrain.net.transport import ChunkStream
from p2ptrain.net.wire import Opening
from p2ptrain.runtime.accounts import Accounts
from p2ptrain.runtime.metrics import Metrics


class Host(Protocol):
    """The driver, as its workers see it."""

    name: PeerId
    digest: str
    """Of the swarm; every opening carries it."""
    algorithm: Algorithm
    metrics: Metrics
    accounts: Accounts

    @property
    def now(self) -> Seconds: ...

    @property
    def machine(self) -> PeerMachine:
        """For those who only look."""
        ...

    def over(self, ending: Ending) -> None:
        """An effect has come to its end: the machine is told."""
        ...

    def heard(self, ticket: Ticket, peer: PeerId) -> None:
        """Something of this attempt has come from `peer`."""
        ...

    async def open_stream(self, peer: PeerId, opening: Opening) -> ChunkStream:
        """Raises TransportError if `peer` cannot be reached."""
        ...

    def watched(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:  # Any: asyncio's
        """A task whose error is a bug and ends the peer."""
        ...

    def fail(self, error: BaseException) -> None:
        """This peer cannot go on."""
        ...

    def notify_change(self) -> None:
        """Wake all who wait for news."""
        ...

    async def wait_for_change(self) -> None:
        """Until anything has changed."""
        ...
