"""A group in memory: what its members send each other in rounds goes from queue to queue."""

import asyncio

from p2ptrain.runtime.rounds import RoundsExchange


class Mail:
    """Stands for the streams of a group: strings go from queue to queue."""

    def __init__(self) -> None:
        self.queues: dict[tuple[str, str], asyncio.Queue[bytes]] = {}

    def between(self, source: str, target: str) -> asyncio.Queue[bytes]:
        return self.queues.setdefault((source, target), asyncio.Queue())


class Member(RoundsExchange):
    """One member's side of it."""

    def __init__(self, me: str, mail: Mail) -> None:
        self._me, self._mail = me, mail

    async def swap(self, strings, awaited):
        for peer, content in strings.items():
            self._mail.between(self._me, peer).put_nowait(content)
        return {peer: await self._mail.between(peer, self._me).get() for peer in awaited}


async def inline(function):
    return function()


class Liar(Member):
    """Sends something else in one of its rounds."""

    def __init__(self, me: str, mail: Mail, turn: int, lie: bytes) -> None:
        super().__init__(me, mail)
        self._turns, self._lie = turn, lie

    async def swap(self, strings, awaited):
        if self._turns == 0:
            strings = dict.fromkeys(strings, self._lie)
        self._turns -= 1
        return await super().swap(strings, awaited)
