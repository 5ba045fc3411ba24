"""Rounds in which each member sends one string to all others, and then what it got."""

import asyncio

from p2ptrain.ids import PeerId
from p2ptrain.runtime.rounds import Rounds, RoundsExchange


class Gathering:
    """Two rounds: everyone's string, then everyone's echo of what came from the next one."""

    def __init__(
        self, me: str, members: tuple[str, ...], content: bytes, most_bytes: int = 8
    ) -> None:
        self.item = Rounds(
            name="indices", work=self._work, most_bytes=most_bytes, chunk_bytes=1 << 20
        )
        self._me, self._members, self._content = me, members, content
        self.gathered: tuple[bytes, ...] = ()
        self.echoes: tuple[bytes, ...] = ()
        self._may_begin = asyncio.Event()
        self._may_begin.set()

    def hold(self) -> asyncio.Event:
        """Make nothing to send before this is set."""
        self._may_begin.clear()
        return self._may_begin

    async def _work(self, rounds: RoundsExchange) -> None:
        await self._may_begin.wait()
        self.gathered = await self._gather(rounds, self._content)
        after = (self._members.index(self._me) + 1) % len(self._members)
        self.echoes = await self._gather(rounds, self.gathered[after])

    async def _gather(self, rounds: RoundsExchange, content: bytes) -> tuple[bytes, ...]:
        others = [PeerId(peer) for peer in self._members if peer != self._me]
        came = await rounds.swap(dict.fromkeys(others, content), others)
        came[PeerId(self._me)] = content
        return tuple(came[PeerId(peer)] for peer in self._members)
