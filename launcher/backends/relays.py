"""Relay bytes between processes of one machine, and block or delay them on request.

This is a separate program, which `p2plab.backends.cables` starts and controls: inside a launcher
that evaluates models it would wait for the interpreter's lock so often that peers suspect each
other. It uses the standard library only, so that it starts in a tenth of a second.

::

    p01 ──> relay of p00 ──> p00        cut: nothing passes between the two any more, in either
                                        direction, and neither gets an error

*The caller* is not named in the bytes. The relay asks the kernel which peer's process owns the
caller's end of a connection. Connections of other processes (``p2ptrain status``) are never cut.

*Cut* bytes are kept, not lost, and arrive after the healing, as in a network that retransmits
unacknowledged data. A connection opened meanwhile is accepted and carries nothing; one whose other
end dies is closed only after the healing.

*Narrow*: all connections of a peer share its rate and take turns, in pieces of `PIECE_S`, so that a
small message of one connection passes between the chunks of others as it would between packets.

Orders are lines of JSON on standard input, each answered by an empty line; the program ends with
its input.
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
"""How long one connection may occupy a narrow link at a time."""

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
        """Listen; return the addresses by rank."""
        ways = [partial(self._serve, rank) for rank in range(len(self._ports))]
        servers = [await asyncio.start_server(way, LOOPBACK, 0) for way in ways]
        self._servers = servers  # they end when no reference is left
        return [f"{LOOPBACK}:{server.sockets[0].getsockname()[1]}" for server in servers]

    def obey(self, order: str, ranks: Sequence[int], value: float | None) -> None:
        """Carry out an order.

        ``pid``: `value` is the process of a peer. ``cut`` and ``heal``: the ranks, from all others.
        ``rate``: a peer sends at most `value` Mbit/s; None: no limit.
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
        """Serve one connection to the peer `rank`."""
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
        """Relay in both directions until either side closes and the other may be told."""
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
        """Relay one direction until its source closes; a cut delays the close, too."""
        with contextlib.suppress(OSError):
            while data := await reader.read(self._piece_bytes(source)):
                await self._take_turn(source, len(data))
                await self._may_pass(source, target)
                writer.write(data)
                await writer.drain()
        await self._may_pass(source, target)

    async def _may_pass(self, source: int | None, target: int | None) -> None:
        """Wait until the two are not cut off from each other; None is never cut off."""
        while None not in (source, target) and self._is_cut(source, target):
            await self._changed.wait()

    def _is_cut(self, source: int | None, target: int | None) -> bool:
        return any((source in cut) != (target in cut) for cut in self._cuts)

    def _piece_bytes(self, source: int | None) -> int:
        """The size of one piece that takes its turn."""
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
        """The rank that owns the far end of a connection from `port`; None if no peer does."""
        link = f"socket:[{inode_of(port, to_port)}]"
        ranks = (rank for rank, pid in self._pids.items() if _holds(pid, link))
        return next(ranks, None)


def inode_of(port: int, to_port: int) -> str:
    """The socket that connects these ports; empty if there is none any more."""
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
