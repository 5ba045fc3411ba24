"""Cables between processes of one machine, which can be cut, healed and narrowed.

Processes have no network of their own to cut. So where a scenario does something to the network,
each peer advertises the end of a *cable* instead of its own port: a relay of the launcher's, which
carries bytes both ways between whoever connects there and the peer behind it.

::

    p01 ──> cable of p00 ──> p00        cut: nothing is carried between the two any more, in either
                                        direction; nobody is told, as behind a cut cable

*Who calls* is not in the bytes. It is asked of the kernel: the caller's end of a connection is a
socket in the hands of one of the peers. A stranger (``p2ptrain status``) is nobody's neighbour: its
connections are never cut.

*Cut* bytes are kept, not lost, and arrive after the healing: that is what a network that sends
again what was not acknowledged looks like from above. A connection begun meanwhile is accepted and
goes nowhere; one whose other end dies is not closed before the healing.

*Narrow*: what leaves a peer waits for its turn, all of its connections together.

Cables run on a thread of their own, and are gone with the launcher; so are the peers.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from p2ptrain.ids import Seconds

CHUNK_BYTES = 1 << 16
LOOPBACK = "127.0.0.1"
TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
"""The kernel's connections; an IPv4 one may be in either."""

_LOCAL, _REMOTE, _INODE = 1, 2, 9
"""Columns of these tables."""


def can_lay() -> bool:
    """True where the kernel says whose a connection is."""
    return TABLES[0].exists()


class Cables:
    """One cable to each peer.

    Args:
        ports: where the peers listen, by rank.
        pids: the peers that run now: process numbers by rank; called from another thread.
    """

    def __init__(self, ports: Sequence[int], pids: Callable[[], Mapping[int, int]]) -> None:
        self._ports = ports
        self._pids = pids
        self._cuts: list[frozenset[int]] = []
        self._rates: dict[int, float] = {}
        self._free_at: dict[int, Seconds] = {}
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Event()
        self._carrying: set[asyncio.Task[None]] = set()
        self._servers = [self._lay(rank) for rank in range(len(ports))]
        self._thread = threading.Thread(target=self._loop.run_forever, name="cables", daemon=True)
        self._thread.start()

    @property
    def addresses(self) -> list[str]:
        """What peers are to advertise, by rank."""
        return [f"{LOOPBACK}:{server.sockets[0].getsockname()[1]}" for server in self._servers]

    def cut_off(self, ranks: Sequence[int]) -> None:
        """Carry nothing between `ranks` and all other peers."""
        self._change(partial(self._cuts.append, frozenset(ranks)))

    def heal(self, ranks: Sequence[int]) -> None:
        """Take back one `cut_off` of the same ranks."""
        self._change(partial(self._cuts.remove, frozenset(ranks)))

    def throttle(self, rank: int, mbit_s: float | None) -> None:
        """Let no more than this leave a peer; None: as much as there is."""
        if mbit_s is None:
            self._change(partial(self._rates.pop, rank, None))
        else:
            self._change(partial(self._rates.update, {rank: mbit_s}))

    def close(self) -> None:
        """Take all cables away. May be called again."""
        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._take_away(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    # --- on the thread of the cables --------------------------------------------------------------

    def _lay(self, rank: int) -> asyncio.Server:
        serve = asyncio.start_server(partial(self._serve, rank), LOOPBACK, 0)
        return self._loop.run_until_complete(serve)

    def _change(self, change: Callable[[], object]) -> None:
        """Change what the cables let pass, and wake whoever waits for that."""

        async def carry_out() -> None:
            change()
            self._changed.set()
            self._changed = asyncio.Event()

        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(carry_out(), self._loop).result()

    async def _take_away(self) -> None:
        for server in self._servers:
            server.close()
        for task in self._carrying:
            task.cancel()
        await asyncio.gather(*self._carrying, return_exceptions=True)

    async def _serve(
        self, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """One connection to the peer `rank`, from its beginning to its end."""
        task = asyncio.current_task()
        assert task is not None  # whoever serves is one
        self._carrying.add(task)
        try:
            theirs, ours = (writer.get_extra_info(end)[1] for end in ("peername", "sockname"))
            caller = self._caller(theirs, ours)
            await self._may_pass(caller, rank)
            with contextlib.suppress(OSError):
                there = await asyncio.open_connection(LOOPBACK, self._ports[rank])
                await self._join(caller, rank, (reader, writer), there)
        except asyncio.CancelledError:
            pass  # the cables are taken away: asyncio would tell of a task that ends so
        finally:
            writer.transport.abort()
            self._carrying.discard(task)

    async def _join(
        self,
        caller: int | None,
        rank: int,
        here: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        there: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        """Carry both ways until either side closes, and the other may hear of it."""
        ways = (
            self._carry(here[0], there[1], caller, rank),
            self._carry(there[0], here[1], rank, caller),
        )
        tasks = [self._loop.create_task(way) for way in ways]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            there[1].transport.abort()

    async def _carry(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        source: int | None,
        target: int | None,
    ) -> None:
        """One way, until its source has closed: the news of that, too, passes only where it may."""
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
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

    async def _take_turn(self, source: int | None, size: int) -> None:
        """Wait until `size` bytes more may have left `source`."""
        if source is None or source not in self._rates:
            return
        now = self._loop.time()
        free_at = max(now, self._free_at.get(source, now)) + size * 8e-6 / self._rates[source]
        self._free_at[source] = free_at
        await asyncio.sleep(free_at - now)

    def _caller(self, port: int, to_port: int) -> int | None:
        """Whose the far end of a connection from `port` is; None if no peer's."""
        link = f"socket:[{_inode_of(port, to_port)}]"
        for rank, pid in self._pids().items():
            with contextlib.suppress(OSError):  # it has just died
                for file in Path(f"/proc/{pid}/fd").iterdir():
                    with contextlib.suppress(OSError):  # it has just been closed
                        if str(file.readlink()) == link:
                            return rank
        return None


def _inode_of(port: int, to_port: int) -> str:
    """The socket that connects these ports; nothing if there is none any more."""
    near, far = f":{port:04X}", f":{to_port:04X}"
    for table in TABLES:
        with contextlib.suppress(OSError):
            for line in table.read_text(encoding="ascii").splitlines()[1:]:
                columns = line.split()
                if columns[_LOCAL].endswith(near) and columns[_REMOTE].endswith(far):
                    return columns[_INODE]
    return ""
