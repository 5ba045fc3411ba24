"""Accept connections for as long as a socket listens."""

import asyncio
import socket
from collections.abc import AsyncIterator

from p2ptrain.ids import Seconds

PAUSE_S: Seconds = 0.1
"""Before the next try where none can be accepted: most likely there is no descriptor left."""


async def connections(listening: socket.socket) -> AsyncIterator[socket.socket]:
    """Each connection that comes to a socket which does not block; ends with its task."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            accepted, _ = await loop.sock_accept(listening)
        except OSError:
            await asyncio.sleep(PAUSE_S)
        else:
            yield accepted
