"""Load one snapshot of a state from several peers at once, chunk by chunk.

The first donor gives the manifest. From then on every peer that has chunks of the same snapshot is
a *source*: members at the same barrier, and peers that load it too, which the sources name. Each
source has one stream, and a few requests (`WINDOW`) under way on it:

    this peer   ── StateRequest 17, 4, news ──►  source
                ◄── chunk 17, chunk 4, StateNews ──

* **Which chunk.** One that the source advises: a donor advises each loader to ask for other chunks,
  so that they soon have something to share, and each chunk leaves the donor a few times at most.
  Else the one that the fewest sources have (rarest first, Cohen 2003), in an order of this peer's
  own; never one that another source was asked for.
* **Checks.** A chunk counts if it has its hash. A source that sends another one is named in a
  warning and not asked again, and the chunk comes from elsewhere.
* **Death.** What a source has not sent when it ends, or is silent for too long, is asked of others.
  If none is left the download fails; the chunks stay here (`runtime/state_snapshots.py`), and the
  next one begins with those of them that it needs.
* **Slow sources.** A chunk that is several times as late as usual is asked of another source as
  well, once that one has nothing else to do. No other chunk is sent twice.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from random import Random
from typing import TYPE_CHECKING

from p2ptrain.compute.replica import State
from p2ptrain.compute.state_file import StateFile
from p2ptrain.errors import CodecError, P2PTrainError, TransportError
from p2ptrain.ids import PeerId, Seconds
from p2ptrain.net.transport import ChunkStream
from p2ptrain.net.wire import StateOpening
from p2ptrain.net.wire_state import StateManifest, decode_news, encode_request, hash_of
from p2ptrain.runtime.copy_executor import CopyExecutor
from p2ptrain.runtime.state_snapshots import Snapshot, Snapshots

if TYPE_CHECKING:
    from p2ptrain.runtime.driver import Driver

WINDOW = 2
"""Requests to one source under way: one chunk travels while the next is asked for."""

MOST_UNDER_WAY = 4
"""Where a short state has small chunks, and there is one source only. More: both sides of a stream
could wait for each other to read."""

MOST_SOURCES = 8
"""More add streams, not speed."""

NEWS_S: Seconds = 0.25
"""How often a source is asked what it has and who else loads the snapshot."""

LEAST_LATE_S: Seconds = 2.0
LATE = 4
"""A chunk is late if it takes so many times as long as others of its source, and the least."""

CONSIDERED = 64
"""Chunks among which the rarest is looked for."""

FAREWELL_S: Seconds = 1.0

HOPE_S: Seconds = 5.0
"""Where no source has what is missing, one may still get it from a peer that we do not know."""

PATIENCE = 8
"""A source that says so often that it has a chunk, and has not, is left."""


@dataclass(eq=False)
class Source:
    """One peer that has chunks, and what it was asked for."""

    name: PeerId
    stream: ChunkStream | None = None
    have: frozenset[int] = frozenset()
    advised: tuple[int, ...] = ()
    asked: deque[tuple[int | None, Seconds]] = field(default_factory=deque)
    """In order, without an answer so far, and when; None: news."""
    news_at: Seconds = 0.0
    """When it is next asked for news."""
    sent_bytes: int = 0
    took_s: Seconds = 0.0
    """For one chunk, on average."""
    empty: int = 0
    rests_until: Seconds = 0.0
    """From what it has not advised; 0: it does not rest."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a download came to."""

    state: State
    bytes_of: dict[PeerId, int]
    """What each source has sent."""
    again_bytes: int
    """Sent twice."""


class StateDownload:
    """One download of one snapshot.

    Args:
        opening: with which streams are opened, for the chunks of `manifest`.
        timeout_s: a source that is silent for so long is left.
        helpers: peers that may have the same snapshot.
    """

    def __init__(
        self,
        host: "Driver",
        opening: StateOpening,
        manifest: StateManifest,
        snapshots: Snapshots,
        executor: CopyExecutor,
        *,
        timeout_s: Seconds,
        helpers: Sequence[PeerId] = (),
    ) -> None:
        self._host, self._manifest = host, manifest
        self._opening = replace(opening, snapshot=manifest.digest)
        self._snapshots, self._executor, self._timeout_s = snapshots, executor, timeout_s
        self._helpers = helpers
        usual_bytes = 1024 * host.config.exchange.chunk_kib
        self._of_one = min(MOST_UNDER_WAY, WINDOW * usual_bytes // manifest.chunk_size)
        """Requests under way where there is one source; no more bytes than of a long state."""
        self._places: dict[tuple[bytes, int], list[int]] = {}
        """Of equal chunks, by hash and size."""
        for number in range(len(manifest.hashes)):
            self._places.setdefault(self._kind(number), []).append(number)
        self._missing: dict[int, None] = {}
        """In this peer's order; of equal chunks only the first one is loaded."""
        self._asked: dict[int, tuple[Source, Seconds]] = {}
        """Of the missing ones: which source, and when."""
        self._holders: Counter[int] = Counter()
        self._sources: dict[PeerId, Source] = {}
        self._tasks: dict[PeerId, asyncio.Task[None]] = {}
        self._error: P2PTrainError | None = None
        self._again_bytes = 0
        self._came_at: Seconds = host.now
        self._changed = asyncio.Event()
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, donor: PeerId, stream: ChunkStream) -> Loaded:
        """Load all of it; `stream` is the one on which `donor` has sent the manifest.

        Raises:
            OSError: if there is no room for it.
            P2PTrainError: if no source is left.
        """
        try:
            self._snapshot = self._snapshots.get(self._manifest.digest) or await self._begin()
        except BaseException:
            stream.abort("it cannot be kept")
            raise
        order = [one[0] for one in self._places.values() if one[0] not in self._snapshot.have]
        Random(f"{self._host.name}").shuffle(order)
        self._missing = dict.fromkeys(order)
        if not self._missing:
            self._over.set_result(None)
        with self._snapshots.loading(self._snapshot, self._host.name):
            self._add(Source(donor, stream, frozenset(range(len(self._manifest.hashes)))))
            for helper in self._helpers:
                self._invite(helper)
            try:
                await self._over
            finally:
                await self._close()
        sent = {one.name: one.sent_bytes for one in self._sources.values() if one.sent_bytes}
        state = self._snapshot.read(0, self._manifest.size)
        return Loaded(state, sent, self._again_bytes)

    async def _begin(self) -> Snapshot:
        """Room for all of it, with the chunks that are here already."""
        manifest = self._manifest
        file = await self._executor(partial(StateFile, manifest.size))
        snapshot = Snapshot(manifest, file.read, set(), file.write)
        known = self._snapshots.chunks()
        for (hashed, size), places in self._places.items():
            if hashed in known:
                there, number = known[hashed]
                chunk = there.chunk(number)
                if chunk.nbytes == size:
                    await self._executor(partial(self._keep, snapshot, places, chunk))
        return self._snapshots.hold(snapshot)

    def _kind(self, number: int) -> tuple[bytes, int]:
        return self._manifest.hashes[number], self._manifest.span(number).size

    def _keep(self, snapshot: Snapshot, places: Iterable[int], chunk: memoryview) -> None:
        """Write a chunk wherever it belongs."""
        assert snapshot.write
        for number in places:
            snapshot.write(self._manifest.span(number).start, chunk)
            snapshot.have.add(number)

    # --- sources ----------------------------------------------------------------------------------

    def _invite(self, name: PeerId) -> None:
        """Load from there, too, if it can be reached and there is something to share."""
        is_new = name not in self._sources and len(self._tasks) < MOST_SOURCES
        if is_new and len(self._missing) > 1 and name in self._host.machine.membership.reachable():
            self._add(Source(name))

    def _add(self, source: Source) -> None:
        self._sources[source.name] = source
        self._holders.update(source.have)
        task = asyncio.get_running_loop().create_task(self._load_from(source))
        self._tasks[source.name] = task
        task.add_done_callback(partial(self._ended, source))

    def _ended(self, source: Source, task: asyncio.Task[None]) -> None:
        del self._tasks[source.name]
        self._holders.subtract(source.have)
        for number, _ in source.asked:
            if number is not None and self._is_asked(number, source):
                del self._asked[number]
        self._stir()
        if task.cancelled() or self._over.done():
            return
        if error := task.exception():
            self._over.set_exception(error)
        elif not self._tasks:
            self._over.set_exception(self._error or TransportError(f"{source.name} has ended"))

    async def _close(self) -> None:
        """Let idle streams end; break off the others."""
        self._stir()
        tasks = dict(self._tasks)
        if tasks and not self._missing:
            waits = [n for n, one in self._sources.items() if all(x is None for x, _ in one.asked)]
            ending = [task for name, task in tasks.items() if name in waits]
            with suppress(TimeoutError):
                async with asyncio.timeout(FAREWELL_S):
                    await asyncio.gather(*ending, return_exceptions=True)
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def _load_from(self, source: Source) -> None:
        """Ask this source for chunks until all are here, or it fails."""
        stream, why = source.stream, "has all"
        try:
            if stream is None:
                stream = source.stream = await self._host.open_stream(source.name, self._opening)
            while self._missing:
                await self._ask(source, stream)
                if source.asked:
                    await self._receive(source, stream)
                else:
                    self._give_up_if_stalled()
                    await self._wait(source)
            async with asyncio.timeout(FAREWELL_S):
                await stream.finish()
                while await stream.receive() is not None:
                    pass
            source.asked.clear()
        except P2PTrainError as error:
            why = str(error)
            if self._missing:
                self._error = error
        except TimeoutError:
            pass  # all is here
        finally:
            if stream and (source.asked or self._missing):
                stream.abort(why)

    async def _ask(self, source: Source, stream: ChunkStream) -> None:
        """Ask for as many chunks as may be under way, and for news from time to time."""
        now, waits = self._host.now, [number for number, _ in source.asked]
        is_first = not source.news_at
        if len(self._places) > WINDOW and now >= source.news_at and None not in waits:
            source.news_at, source.advised = now + NEWS_S, ()
            await self._request(source, stream, None)
            if is_first:
                return  # what it advises comes first
        window = max(WINDOW, self._of_one // len(self._tasks))
        while sum(number is not None for number, _ in source.asked) < window:
            number = self._next_for(source)
            if number is None:
                return
            self._asked[number] = source, now
            await self._request(source, stream, number)

    async def _request(self, source: Source, stream: ChunkStream, number: int | None) -> None:
        source.asked.append((number, self._host.now))
        await stream.send(memoryview(encode_request(number)))

    def _next_for(self, source: Source) -> int | None:
        """A chunk that this source has, and no other one was asked for; else one that is late."""
        free = [n for n in source.advised if n in self._missing and n not in self._asked]
        if free:
            source.news_at = self._host.now if len(free) == 1 else source.news_at  # for more advice
            return free[0]
        others = (n for n in self._missing if n in source.have and n not in self._asked)
        if considered := list(islice(others, CONSIDERED)):
            rarest = min(considered, key=lambda number: self._holders[number])
            return rarest if self._may_burden(source) else None
        late = (n for n in self._missing if n in source.have and self._is_late(n, source))
        return None if source.asked else next(late, None)

    def _is_full(self, source: Source) -> bool:
        return len(source.have) == len(self._manifest.hashes)

    def _may_burden(self, source: Source) -> bool:
        """A donor is asked for what it has not advised only after a while, if others load, too."""
        if not self._is_full(source) or all(map(self._is_full, self._here())):
            return True
        now = self._host.now
        source.rests_until = source.rests_until or now + max(NEWS_S, source.took_s)
        if source.asked or now < source.rests_until:
            return False
        source.rests_until = 0.0
        return True

    def _is_late(self, number: int, source: Source) -> bool:
        other, since = self._asked[number]
        usual_s = other.took_s or source.took_s
        return other is not source and self._host.now - since > LEAST_LATE_S + LATE * usual_s

    def _is_asked(self, number: int, source: Source) -> bool:
        return number in self._asked and self._asked[number][0] is source

    async def _receive(self, source: Source, stream: ChunkStream) -> None:
        """Take the answer to the first request under way.

        Raises:
            CodecError: for what is none.
            OSError: if there is no room.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                payload = await stream.receive()
        except TimeoutError as error:
            why = f"{source.name} has sent nothing of its state for {self._timeout_s:g} s"
            raise TransportError(why) from error
        if payload is None:
            raise TransportError(f"{source.name} sends no more of its state")
        self._host.machine.membership.spoke(source.name)
        number, since = source.asked.popleft()
        if number is None:
            self._take_news(source, payload)
        elif not payload.nbytes:
            self._lacks(source, number)
        else:
            await self._take_chunk(source, number, payload, since)
        self._stir()

    def _take_news(self, source: Source, payload: memoryview) -> None:
        news = decode_news(payload, len(self._manifest.hashes))
        self._holders.subtract(source.have)
        self._holders.update(news.have)
        source.have, source.advised = news.have, news.advised
        for name in news.others:
            self._invite(name)

    def _lacks(self, source: Source, number: int) -> None:
        """It has not what it was asked for."""
        self._holders[number] -= number in source.have
        source.have -= {number}
        source.empty += 1
        if self._is_asked(number, source):
            del self._asked[number]
        if source.empty >= PATIENCE:
            raise CodecError(f"{source.name} does not have what it says")

    async def _take_chunk(
        self, source: Source, number: int, payload: memoryview, since: Seconds
    ) -> None:
        hashed, size = self._kind(number)
        if payload.nbytes != size or await self._executor(partial(hash_of, payload)) != hashed:
            text = f"{source.name} sends chunk {number} of a state, which has another hash or size"
            self._host.metrics.record("warning", text=f"{text}; it is taken from elsewhere")
            source.asked.appendleft((number, since))
            raise CodecError(text)
        source.sent_bytes += payload.nbytes
        if number not in self._missing:
            self._again_bytes += payload.nbytes
            return
        await self._executor(
            partial(self._keep, self._snapshot, self._places[hashed, size], payload)
        )
        now = self._host.now
        source.took_s = (source.took_s + now - since) / 2 if source.took_s else now - since
        self._came_at = now
        self._missing.pop(number, None)
        self._asked.pop(number, None)
        if not self._missing and not self._over.done():
            self._over.set_result(None)

    def _give_up_if_stalled(self) -> None:
        """The donor is gone, and none of those that are left has what is missing.

        Raises TransportError.
        """
        if self._asked or any(
            number in one.have for one in self._here() for number in self._missing
        ):
            return
        usual_s = max((one.took_s for one in self._here()), default=0.0)
        if self._host.now - self._came_at > HOPE_S + LATE * usual_s:
            why = f"{len(self._missing)} chunks of the state are nowhere any more"
            raise self._error or TransportError(why)

    def _here(self) -> list[Source]:
        return [self._sources[name] for name in self._tasks]

    async def _wait(self, source: Source) -> None:
        """Until something changes, or this source may be asked for news again."""
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.01, source.news_at - self._host.now)):
                await self._changed.wait()

    def _stir(self) -> None:
        self._changed.set()
