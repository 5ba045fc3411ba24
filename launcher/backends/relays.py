"""Carries the bytes between processes of one machine, and holds back what may not pass.

A program of its own, which `launcher.backends.cables` starts and speaks to: beside a launcher that
evaluates models it would wait for the interpreter's lock so often that peers suspect each other.
Standard library only, so that it starts in a tenth of a second.

::

    p01 ──> relay of p00 ──> p00        cut: nothing is carried between the two any more, in either
                                        direction; nobody is told, as behind a cut cable

*Who calls* is not in the bytes. It is asked of the kernel: the caller's end of a connection is a
socket in the hands of one of the peers. A stranger (``p2ptrain status``) is nobody's neighbour: its
connections are never cut.

*Cut* bytes are kept, not lost, and arrive after the healing: that is what a network that sends
again what was not acknowledged looks like from above. A connection begun meanwhile is accepted and
goes nowhere; one whose other end dies is not closed before the healing.

*Narrow*: what leaves a peer waits for its turn, all of its connections together, in pieces of
`PIECE_S`, so that a small message of one connection passes between the chunks of others as it does
between packets.

Orders come as lines of JSON on standard input, each answered by an empty line; it ends with it.
"""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import TypeAlias

Reader: TypeAlias = asyncio.StreamReader
Writer: TypeAlias = asyncio.StreamWriter
End: TypeAlias = tuple[Reader, Writer]

CHUNK_BYTES = 1 << 16
PIECE_S = 0.02
"""Of a narrow way, what one connection may take up at a time."""

LEAST_PIECE_BYTES = 1500
LOOPBACK = "127.0.0.1"
TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
"""The kernel's connections; an IPv4 one may be in either."""

_LOCAL, _REMOTE, _INODE = 1, 2, 9
"""Columns of these tables."""


class Relays:
    """One relay in front of each peer.

    Args:
        ports: where the peers listen, by rank.
    """

    def __init__(self, ports: Sequence[int]) -> None:
        self._ports = ports
        self._pids: dict[int, int] = {}
        self._cuts: list[frozenset[int]] = []
        self._rates: dict[int, float] = {}
        self._free_at: dict[int, float] = {}
        self._changed = asyncio.Event()

    async def start(self) -> list[str]:
        """Listen; where, by rank."""
        ways = [partial(self._serve, rank) for rank in range(len(self._ports))]
        servers = [await asyncio.start_server(way, LOOPBACK, 0) for way in ways]
        self._servers = servers  # they end with what refers to them
        return [f"{LOOPBACK}:{server.sockets[0].getsockname()[1]}" for server in servers]

    def obey(self, order: str, ranks: Sequence[int], value: float | None) -> None:
        """Carry out an order.

        ``pid``: `value` is the process of a peer. ``cut`` and ``heal``: the ranks, from all others.
        ``rate``: no more than `value` Mbit/s leave a peer; None: as much as there is.
        """
        match order:
            case "pid" if value is not None:
                self._pids[ranks[0]] = int(value)
            case "cut":
                self._cuts.append(frozenset(ranks))
            case "heal":
                self._cuts.remove(frozenset(ranks))
            case "rate" if value is not None:
                self._rates[ranks[0]] = value
            case "rate":
                self._rates.pop(ranks[0], None)
            case _:
                raise ValueError(f"no such order: {order}")
        self._changed.set()
        self._changed = asyncio.Event()

    async def _serve(self, rank: int, reader: Reader, writer: Writer) -> None:
        """One connection to the peer `rank`, from its beginning to its end."""
        try:
            theirs, ours = (writer.get_extra_info(end)[1] for end in ("peername", "sockname"))
            caller = self._caller(theirs, ours)
            await self._may_pass(caller, rank)
            with contextlib.suppress(OSError):
                there = await asyncio.open_connection(LOOPBACK, self._ports[rank])
                await self._join(caller, rank, (reader, writer), there)
        finally:
            writer.transport.abort()

    async def _join(self, caller: int | None, rank: int, here: End, there: End) -> None:
        """Carry both ways until either side closes, and the other may hear of it."""
        ways = (
            self._carry(here[0], there[1], caller, rank),
            self._carry(there[0], here[1], rank, caller),
        )
        tasks = [asyncio.ensure_future(way) for way in ways]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            there[1].transport.abort()

    async def _carry(
        self, reader: Reader, writer: Writer, source: int | None, target: int | None
    ) -> None:
        """One way, until its source has closed: the news of that, too, passes only where it may."""
        with contextlib.suppress(OSError):
            while data := await reader.read(self._piece_bytes(source)):
                await self._take_turn(source, len(data))
                await self._may_pass(source, target)
                writer.write(data)
                await writer.drain()
        await self._may_pass(source, target)

    async def _may_pass(self, source: int | None, target: int | None) -> None:
        """Wait until nothing is cut between the two; of a stranger nothing ever is."""
        while None not in (source, target) and self._is_cut(source, target):
            await self._changed.wait()

    def _is_cut(self, source: int | None, target: int | None) -> bool:
        return any((source in cut) != (target in cut) for cut in self._cuts)

    def _piece_bytes(self, source: int | None) -> int:
        """How much may wait for its turn in one piece."""
        rate = None if source is None else self._rates.get(source)
        if rate is None:
            return CHUNK_BYTES
        return min(CHUNK_BYTES, max(LEAST_PIECE_BYTES, int(rate * 125e3 * PIECE_S)))

    async def _take_turn(self, source: int | None, size: int) -> None:
        """Wait until `size` bytes more may have left `source`."""
        if source is None or source not in self._rates:
            return
        now = asyncio.get_running_loop().time()
        free_at = max(now, self._free_at.get(source, now)) + size * 8e-6 / self._rates[source]
        self._free_at[source] = free_at
        await asyncio.sleep(free_at - now)

    def _caller(self, port: int, to_port: int) -> int | None:
        """Whose the far end of a connection from `port` is; None if no peer's."""
        link = f"socket:[{inode_of(port, to_port)}]"
        ranks = (rank for rank, pid in self._pids.items() if _holds(pid, link))
        return next(ranks, None)


def inode_of(port: int, to_port: int) -> str:
    """The socket that connects these ports; nothing if there is none any more."""
    near, far = f":{port:04X}", f":{to_port:04X}"
    for table in TABLES:
        with contextlib.suppress(OSError), open(table, encoding="ascii") as lines:
            for line in lines:
                columns = line.split()
                if columns[_LOCAL].endswith(near) and columns[_REMOTE].endswith(far):
                    return columns[_INODE]
    return ""


def _holds(pid: int, link: str) -> bool:
    """True if one of the open files of a process is `link`."""
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):  # it has just died
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):  # it has just been closed
                if os.readlink(f"{folder}/{name}") == link:
                    return True
    return False


async def main() -> None:
    """Relay until standard input ends."""
    relays = Relays(json.loads(sys.argv[1]))
    print(json.dumps(await relays.start()), flush=True)
    orders = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(orders)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    while line := await orders.readline():
        relays.obey(*json.loads(line))
        print(flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
