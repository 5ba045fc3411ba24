"""Hold what this peer can give of states: snapshots of its own, and others that it loads itself.

A *snapshot* is the state of one peer at one moment; its manifest names the hash of each chunk, and
the digest of the manifest names the snapshot. Chunks are never mixed from two snapshots.

* A snapshot of a version at a barrier is one of many: all members that wait there have the same
  bits, so each of them makes the same snapshot, and serves it under the same digest.
* Where models differ, a snapshot exists once. Peers that load it while it is young (`SHARED_S`)
  load the same one, and pass its chunks on to each other; so many newcomers cost its maker little
  more than one.
* What a peer has loaded, whole or in part, is kept for `KEPT_S` after its last use. Who begins
  again takes from there the chunks that it needs, from whatever donor they came.

At most `MOST_KEPT` snapshots of one thing are kept at a time; long ones are in files.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from p2ptrain.compute.replica import State
from p2ptrain.errors import RefusedError
from p2ptrain.ids import PeerId, Seconds
from p2ptrain.net.wire_state import StateManifest, manifest_of
from p2ptrain.runtime.copy_executor import CopyExecutor

KEPT_S: Seconds = 10.0
"""A snapshot is dropped when it was not used for so long. Shorter: newcomers that finish early pass
less on; longer: it takes room on the disk."""

SHARED_S: Seconds = 10.0
"""The state of a peer that trains is given to others that come while it is loaded, up to this age:
a newcomer's model is older by as much at most."""

MOST_KEPT = 3

Read = Callable[[int, int], memoryview]
"""Bytes of a state, from one position to another."""

Write = Callable[[int, memoryview], None]
"""Bytes at a position. Raises OSError if there is no room."""


@dataclass(eq=False)
class Snapshot:
    """One state, or those chunks of it that are here."""

    manifest: StateManifest
    read: Read
    have: set[int]
    """Chunks that are here, by number."""
    write: Write | None = None
    """Where it is loaded from others."""
    kind: tuple[str, ...] | tuple[str, int, int] = ()
    """What it is of; empty: of another peer's state."""
    version: int = 0
    """Of the replica, or a later one."""
    born: Seconds = 0.0
    loaders: Counter[PeerId] = field(default_factory=Counter)
    """Who has streams open to it now; we ourselves count while we load it."""
    uses: int = 0
    """So far."""
    _advised: int = 0

    def advise(self, most: int) -> tuple[int, ...]:
        """Chunks for one loader to begin with, in turn: so loaders have different ones to share."""
        count = len(self.manifest.hashes)
        if len(self.have) < count:
            return ()
        first, self._advised = self._advised, (self._advised + most) % count
        return tuple(number % count for number in range(first, first + min(most, count)))

    def chunk(self, number: int) -> memoryview:
        """One chunk that is here."""
        span = self.manifest.span(number)
        return self.read(span.start, span.stop)


class Snapshots:
    """All of one peer.

    Args:
        clock: in seconds.
        chunk_bytes: of the chunks of snapshots that are made here; see `manifest_of`.
        executor: for hashing.
    """

    def __init__(
        self, clock: Callable[[], Seconds], chunk_bytes: int, executor: CopyExecutor
    ) -> None:
        self._clock, self._chunk_bytes, self._executor = clock, chunk_bytes, executor
        self._held: dict[bytes, Snapshot] = {}
        self._making = asyncio.Lock()

    def get(self, digest: bytes) -> Snapshot | None:
        """That one, if it is here."""
        return self._held.get(digest)

    async def make(
        self,
        kind: tuple[str, ...] | tuple[str, int, int],
        state: Callable[[], Awaitable[State]],
        *,
        version: int = 0,
        is_one: bool = False,
        loader: PeerId | None = None,
    ) -> Snapshot:
        """A snapshot of this kind: one that is loaded by others already, or a new one.

        Args:
            kind: equal for states that may stand for each other; first what it is of.
            state: makes a new one; its errors are raised from here.
            version: of the replica now; a snapshot that was made before it is not taken.
            is_one: of this kind there is only one state, at all peers and at all times.
            loader: who wants it; one that loads another state of this kind has to end that first,
                so that it cannot keep out all others.

        Raises:
            RefusedError: if too many are loaded now.
        """
        async with self._making:
            for one in self._held.values():
                is_young = one.loaders and self._clock() - one.born <= SHARED_S
                if one.kind == kind and one.version >= version and (is_one or is_young):
                    return one
            self._make_room(kind[0], loader)
            born, contents = self._clock(), await state()
            manifest = await self._executor(partial(manifest_of, contents, self._chunk_bytes))
            view, every = memoryview(contents), set(range(len(manifest.hashes)))

            def read(start: int, stop: int) -> memoryview:
                return view[start:stop]

            new = Snapshot(manifest, read, every, kind=kind, version=version, born=born)
            return self.hold(new)

    def _make_room(self, what: str, loader: PeerId | None) -> None:
        own = [one for one in self._held.values() if one.kind and one.kind[0] == what]
        if loader and any(loader in one.loaders for one in own):
            raise RefusedError(f"{loader} loads another state from here already")
        idle = [one for one in own if not one.loaders]
        for one in idle[: max(0, len(own) - MOST_KEPT + 1)]:
            self._drop(one)
        if len(own) - len(idle) >= MOST_KEPT:
            raise RefusedError(f"{len(own)} states are being loaded from here already")

    def hold(self, snapshot: Snapshot) -> Snapshot:
        """Keep it, for as long as it is used and a little longer."""
        self._held[snapshot.manifest.digest] = snapshot
        self._drop_later(snapshot)
        return snapshot

    @contextmanager
    def loading(self, snapshot: Snapshot, peer: PeerId) -> Iterator[None]:
        """`peer` loads it inside."""
        snapshot.loaders[peer] += 1
        snapshot.uses += 1
        try:
            yield
        finally:
            snapshot.loaders[peer] -= 1
            snapshot.loaders += Counter()  # without those that are at 0
            self._drop_later(snapshot)

    def chunks(self) -> dict[bytes, tuple[Snapshot, int]]:
        """All chunks that are here, by their hashes."""
        held = self._held.values()
        return {one.manifest.hashes[n]: (one, n) for one in held for n in sorted(one.have)}

    def _drop_later(self, snapshot: Snapshot) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(KEPT_S, self._maybe_drop, snapshot, snapshot.uses)

    def _maybe_drop(self, snapshot: Snapshot, uses: int) -> None:
        if not snapshot.loaders and snapshot.uses == uses:
            self._drop(snapshot)

    def _drop(self, snapshot: Snapshot) -> None:
        if self._held.get(snapshot.manifest.digest) is snapshot:
            del self._held[snapshot.manifest.digest]
