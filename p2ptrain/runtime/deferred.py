"""Make an update piece by piece, while its gradients still arrive behind the next forward pass.

All members have agreed that a version stands; reduce-scatter has ended or is about to, and the
all-gather brings means, bucket by bucket. A piece of the update needs its own means alone. So the
trainer goes on, and each piece is made just before the forward pass needs it (Zhang et al., DeAR,
2302.12445). Whatever else wants the model (a newcomer, a snapshot, a checkpoint, the boundary)
waits until all pieces are there and makes those that are left: an early piece changes nothing for a
forward pass that has not come to it.

The optimizer's settings are those of the boundary, wherever a schedule has moved them meanwhile.

**If the all-gather breaks**, pieces whose means never came are left out, and this peer's model is
of another lineage than that of the peers that have all: at the next barrier those that differ take
over the model of one (`core/barrier.py`). So a death in between leaves all survivors with one.
"""

import threading
from collections.abc import Callable, Sequence

from p2ptrain.compute.replica import Replica, clip_scale, no_update
from p2ptrain.core.shards import Span
from p2ptrain.runtime.exchange import BucketExchange, Piece
from p2ptrain.vectors import NO_NUMBERS, Vector


class DeferredUpdate:
    """The pieces of one update. `until` is of the protocol's side; pieces are made on any thread.

    Args:
        replica: whose.
        vector_G: becomes the means; `release` is called when it is not needed any more.
        mask: which parameters any member had a gradient for.
        bucket: of the exchange that brings the means.
        lock: held while a piece is made.
    """

    def __init__(
        self,
        replica: Replica,
        vector_G: Vector,
        mask: bytes,
        bucket: BucketExchange,
        lock: threading.RLock,
        release: Callable[[], object],
    ) -> None:
        self._replica, self._vector_G, self._mask = replica, vector_G, mask
        self._pieces: Sequence[Piece] = bucket.pieces
        self._norm, self._lock = bucket.norm, lock
        self._release: Callable[[], object] | None = release
        self.clip: float | None = None
        """To this norm; to be set before the first piece is made."""
        self._settings = replica.update_settings()
        self._made: set[Span] = set()
        self._lost: set[Span] = set()
        self.is_made = False
        """All of it."""

    async def until(self, wanted: Span) -> None:
        """Wait for the means of these numbers."""
        await self._until(self._of(wanted))

    async def until_all(self) -> None:
        """Wait for all of them."""
        await self._until(self._pieces)

    async def _until(self, pieces: Sequence[Piece]) -> None:
        if self.clip is not None:
            await self._norm.is_here.wait()
        for piece in pieces:
            await piece.is_here.wait()

    def give_up(self) -> bool:
        """What has not come by now never will; true if there was any such."""
        missing = [piece for piece in self._pieces if not piece.is_here.is_set()]
        self._lost.update(piece.span for piece in missing)
        for piece in missing:
            piece.is_here.set()
        self._norm.is_here.set()  # where it is missing, so are the means of an owner
        return bool(missing)

    @property
    def is_partial(self) -> bool:
        """Some pieces are made, and others not."""
        return bool(self._made) and not self.is_made

    def is_here(self, wanted: Span) -> bool:
        """Whether nothing is to be waited for, to make the update of these numbers."""
        if self.is_made:
            return True
        waits = self.clip is not None and not self._norm.is_here.is_set()
        return not waits and all(piece.is_here.is_set() for piece in self._of(wanted))

    def is_made_of(self, wanted: Span) -> bool:
        """Whether nothing is left to do for these numbers."""
        return self.is_made or all(p.span in self._made for p in self._of(wanted))

    def make(self, wanted: Span | None = None) -> None:
        """Make the update of these numbers, or of all; what they need is here."""
        with self._lock:
            if self.is_made:
                return
            wanted_now = self._pieces if wanted is None else self._of(wanted)
            scale = self._scale()
            for span in [piece.span for piece in wanted_now if piece.span not in self._made]:
                if span not in self._lost and scale is not None:
                    self._replica.update_piece(
                        span, self._vector_G, self._mask, self._settings, scale
                    )
                self._made.add(span)
            if len(self._made) == len(self._pieces):
                self._replica.update(no_update)  # it counts
                self._finish()

    def make_whole(self, optimizer_step: Callable[[], None]) -> None:
        """All of it at once, where a step needs all gradients; all means are here."""
        with self._lock:
            if self.give_up():
                optimizer_step = no_update
            else:
                self._replica.import_gradients(self._vector_G, self._mask)
            self._replica.update(optimizer_step)
            self._finish()

    def _finish(self) -> None:
        """All of it is made: the means are not needed any more, and are not held."""
        self.is_made, release, self._release = True, self._release, None
        self._vector_G = NO_NUMBERS
        if release:
            release()

    def _scale(self) -> float | None:
        """What clipping multiplies gradients by; None: the norm never came."""
        if self.clip is None:
            return 1.0
        return None if self._norm.value is None else clip_scale(self._norm.value, self.clip)

    def _of(self, wanted: Span) -> list[Piece]:
        return [
            piece
            for piece in self._pieces
            if piece.span.start < wanted.stop and wanted.start < piece.span.stop
        ]
