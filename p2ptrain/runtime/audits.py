"""Audit the owners of shards: is the mean that they hand out that of what they got?

In a reduce-scatter only the owner of a shard sees what its mean is of. So with
`audited_owners` each member draws for each group, after its own secret, whether it audits a chunk
of another owner, and which. Nobody else knows of it before the group is over:

* each member keeps a copy of what it contributes;
* each owner hands out, after its means, a *table*: the digests of all contributions that it
  reduced, its own included;
* when the group has ended well, the auditor asks the others for the chunk, and computes the mean
  as the owner should have, to the last bit.

**What proves a lie.** An owner is named if its table has another digest of the auditor's own
contribution than that has; if it shows another contribution of its own than its table says; or if
all chunks are those of the table and their mean is not what it handed out. If anything else does
not fit, either of two members may have lied, and no member is named. Only the owner's own word
counts, and what the auditor has computed: so one liar cannot have an honest owner named.

**What proves nothing.** A wrong mean may hide in the owner's own chunk, which no other member has
seen. With `norm_limit` the record says so if that is out by the factor; but one member's chunk of
one group may be, among honest ones (`tests/worlds`, seed 122), so the audit is left open.

**What it fails on.** A member that has not kept the chunk any more, does not answer, or is gone
leaves the audit open. A member shows at most one chunk of a ticket to each other member.

Whom an auditor has named it votes against from then on (`core/offenders.py`).

Legend of shapes: ``V`` numbers of a bucket's vector, ``S`` of a chunk.
"""

import asyncio
import hashlib
import struct
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

import numpy as np

from p2ptrain.compute.codec import PLAIN
from p2ptrain.compute.replica import Vector
from p2ptrain.core.offenders import Judge
from p2ptrain.core.shards import Span
from p2ptrain.errors import CodecError, RefusedError, TransportError
from p2ptrain.ids import PeerId, Seconds, Ticket
from p2ptrain.net.transport import ChunkStream
from p2ptrain.net.wire import MAX_CHUNK_BYTES, AverageOpening
from p2ptrain.runtime.mix import Bucket, mean_of
from p2ptrain.runtime.robust import exact_squares

if TYPE_CHECKING:
    from p2ptrain.runtime.driver import Driver

OF = "audit of "
"""Before the name of a bucket: what a stream is for."""

REQUEST = struct.Struct("<QQ")
"""The span that is asked for."""

DIGEST_BYTES = 16
KEPT = 2
"""Groups whose contributions are kept, the last ones."""

ASK_S: Seconds = 5.0
"""How long a member has to show its chunk."""

LEAST_MEMBERS = 3
"""Of two, each knows what the other's mean has to be of: an audit would find nothing new."""

Open = (TransportError, RefusedError, CodecError, TimeoutError)
"""Why an audit may come to nothing."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """What this member audits of a group."""

    owner: PeerId
    at: int
    """Its rank among the owner's chunks."""
    span: Span


class Watched:
    """One member's side of the audits of one bucket of a group.

    Args:
        chunks: of each owner, as it reduces them; ours included.
        chosen: what we audit, if anything.
    """

    def __init__(
        self,
        ticket: Ticket,
        bucket: Bucket,
        me: PeerId,
        members: tuple[PeerId, ...],
        chunks: Mapping[PeerId, Sequence[Span]],
        chosen: Chosen | None,
    ) -> None:
        self.ticket, self.members, self.chosen, self.name = ticket, members, chosen, bucket.name
        self.size = len(bucket.vector_V)
        self.most = bucket.chunk_size
        self.shown_to: set[PeerId] = set()
        self.vote, self.codec = bucket.vote, bucket.codec
        self.divisor, self.trimmed, self.clips = bucket.divisor, bucket.trimmed, bucket.clips
        self._me, self._chunks = me, chunks
        self._kept_V = np.empty(self.size, np.float32)
        self._is_kept: dict[tuple[int, int], None] = {}
        self._digests: dict[int, Sequence[bytes]] = {}
        self.heard_S: Vector | None = None
        """The mean that was handed out of what is audited."""
        self.row: Sequence[bytes] = ()
        """What its owner says that this was of."""

    # --- while the group runs ---------------------------------------------------------------------

    def keep(self, span: Span, vector_V: Vector) -> None:
        """We contribute these numbers of the vector."""
        at = slice(span.start, span.stop)
        self._kept_V[at] = vector_V[at]
        self._is_kept[span.start, span.stop] = None

    def note(self, index: int, parts_S: Sequence[Vector]) -> None:
        """We reduce these parts, in the members' order, to a chunk of ours."""
        self._digests[index] = [digest(part_S) for part_S in parts_S]

    def table_bytes(self, owner: PeerId) -> int:
        """0 if its table would be too long to travel."""
        size = len(self._chunks.get(owner, ())) * len(self.members) * DIGEST_BYTES
        return size if size <= MAX_CHUNK_BYTES else 0

    @property
    def table(self) -> memoryview:
        """All that we reduce is noted: what we say of it."""
        rows = (self._digests[index] for index in range(len(self._digests)))
        return memoryview(b"".join(one for row in rows for one in row))

    def hear(self, owner: PeerId, span: Span, mean_S: Vector) -> None:
        """An owner has handed this out."""
        if self.chosen and (self.chosen.owner, self.chosen.span) == (owner, span):
            self.heard_S = mean_S.copy()

    def read(self, owner: PeerId, table: memoryview) -> None:
        """An owner's table has come."""
        if self.chosen and self.chosen.owner == owner:
            count = len(self.members)
            start = self.chosen.at * count * DIGEST_BYTES
            starts = range(start, start + count * DIGEST_BYTES, DIGEST_BYTES)
            self.row = [bytes(table[at : at + DIGEST_BYTES]) for at in starts]

    # --- afterwards -------------------------------------------------------------------------------

    def kept(self, span: Span) -> Vector:
        """What we have contributed of a chunk. Raises RefusedError if it is none of ours."""
        if (span.start, span.stop) not in self._is_kept:
            raise RefusedError(
                f"{self._me} has contributed no chunk from {span.start} in this group"
            )
        own_S: Vector = self._kept_V[span.start : span.stop]
        return own_S

    def judge(self, shown: Mapping[PeerId, Vector], norm_limit: float) -> tuple[str, str]:
        """What all members have shown: ``sound``, ``wrong`` or ``open``, and a sentence."""
        assert self.chosen is not None
        assert self.heard_S is not None
        owner, span = self.chosen.owner, self.chosen.span
        where = f"of {self.ticket}, numbers {span.start:,} to {span.stop:,}"
        wrong = [
            peer
            for peer, said in zip(self.members, self.row, strict=True)
            if digest(shown[peer]) != said
        ]
        if self._me in wrong:
            return "wrong", f"{owner} says that {self._me} contributed what it did not ({where})"
        if owner in wrong:
            return "wrong", f"{owner} shows another contribution than it says it made ({where})"
        if wrong:
            return "open", f"{owner} and {wrong[0]} say different things ({where})"
        parts = [shown[peer] for peer in self.members]
        with np.errstate(all="ignore"):
            mean_S = mean_of(parts, self.codec, self.divisor, self.trimmed, clips=self.clips)
        if mean_S.tobytes() != self.heard_S.tobytes():
            return "wrong", f"{owner} handed out another mean than that of what it got ({where})"
        if times := self._is_out(parts, norm_limit):
            what = f"has {times:.3g} times the usual norm in its own shard"
            return "open", f"what {owner} contributes {what} ({where})"
        return "sound", ""

    def _is_out(self, parts: Sequence[Vector], norm_limit: float) -> float:
        """By how many times the owner's own chunk is out; 0 if it is not."""
        assert self.chosen is not None
        if not norm_limit or self.vote is None or self.vote.of_models:
            return 0.0
        norms = [
            float(np.sqrt(exact_squares(part_S))) / unit
            for part_S, unit in zip(parts, self.vote.units, strict=True)
        ]
        own = norms.pop(self.members.index(self.chosen.owner))
        usual = sorted(norms)[(len(norms) - 1) // 2]
        return own / usual if usual and not own <= norm_limit * usual else 0.0


class Audits:
    """All audits of one peer: what it keeps for those of others, and its own.

    Args:
        share: of groups that each member audits.
        chance: draws which; no other peer can foresee it.
        judge: learns who is named.
    """

    def __init__(self, host: "Driver", share: float, chance: Random, judge: Judge) -> None:
        self._host, self._share, self._chance, self._judge = host, share, chance, judge
        self._watched: dict[Ticket, dict[str, Watched]] = {}

    def watch(
        self,
        ticket: Ticket,
        bucket: Bucket,
        members: tuple[PeerId, ...],
        chunks: Mapping[PeerId, Sequence[Span]],
    ) -> Watched:
        """A group begins, whose bucket is reduced by these owners in these chunks."""
        me = self._host.name
        chosen = self._choose({peer: spans for peer, spans in chunks.items() if peer != me})
        watched = Watched(ticket, bucket, me, members, chunks, chosen)
        self._watched.setdefault(ticket, {})[bucket.name] = watched
        while len(self._watched) > KEPT:
            del self._watched[next(iter(self._watched))]
        return watched

    def _choose(self, chunks: Mapping[PeerId, Sequence[Span]]) -> Chosen | None:
        owners = [peer for peer, spans in chunks.items() if spans]
        if not owners or self._chance.random() >= self._share:
            return None
        owner = self._chance.choice(owners)
        at = self._chance.randrange(len(chunks[owner]))
        return Chosen(owner, at, chunks[owner][at])

    def begin(self, watched: Watched) -> None:
        """The group has ended well: audit what was chosen, beside whatever follows."""
        if watched.chosen and watched.heard_S is not None and watched.row:
            self._host.start(self._audit(watched, watched.chosen))

    async def _audit(self, watched: Watched, chosen: Chosen) -> None:
        host, others = self._host, [peer for peer in watched.members if peer != self._host.name]
        try:
            asked = (self._ask(peer, watched, chosen.span) for peer in others)
            shown = dict(zip(others, await asyncio.gather(*asked), strict=True))
            shown[host.name] = watched.kept(chosen.span)
            outcome, why = watched.judge(shown, self._judge.norm_limit)
        except Open as error:
            outcome, why = "open", str(error) or f"a member showed nothing within {ASK_S:g} s"
        host.metrics.record(
            "audit", ticket=str(watched.ticket), owner=chosen.owner, outcome=outcome, why=why
        )
        if outcome == "wrong":
            self._judge.catch(chosen.owner)
            host.warn(("audit", chosen.owner), why)

    async def _ask(self, peer: PeerId, watched: Watched, span: Span) -> Vector:
        host = self._host
        opening = AverageOpening(
            host.digest,
            host.name,
            watched.ticket,
            watched.size,
            span.size,
            PLAIN,
            OF + watched.name,
        )
        async with asyncio.timeout(ASK_S):
            stream = await host.open_stream(peer, opening)
            with ExitStack() as unfinished:
                unfinished.callback(stream.abort, "the audit has failed")
                await stream.send(memoryview(REQUEST.pack(span.start, span.stop)), True)
                payload = await stream.receive()
                if payload is None or payload.nbytes != 4 * span.size:
                    raise CodecError(f"{peer} showed something else than its chunk")
                shown_S = np.frombuffer(bytes(payload), "<f4")
                await stream.release()
                await stream.receive()
                unfinished.pop_all()
            return shown_S

    async def accept(self, opening: AverageOpening, stream: ChunkStream) -> None:
        """A member audits an owner: show it what we have contributed.

        Raises:
            RefusedError: if it may not see it, or it is not there any more.
        """
        me, sender = self._host.name, opening.sender
        try:
            async with asyncio.timeout(ASK_S):
                request = await stream.receive()
                if request is None or request.nbytes != REQUEST.size:
                    raise RefusedError(f"{sender} asks {me} for no chunk")
                start, stop = REQUEST.unpack(request)
                watched = self._watched.get(opening.ticket, {}).get(opening.bucket.removeprefix(OF))
                if watched is None:
                    raise RefusedError(f"{me} does not keep what it contributed any more")
                if sender not in watched.members or sender == me or sender in watched.shown_to:
                    raise RefusedError(
                        f"{me} shows {sender} nothing, or nothing more, of this group"
                    )
                own_S = watched.kept(Span(start, stop))
                watched.shown_to.add(sender)
                await stream.send(own_S.data.cast("B"), True)
                await stream.release()
        except TimeoutError as error:
            raise RefusedError(f"{sender} asks {me} for a chunk and takes none") from error


def digest(part_S: Vector) -> bytes:
    """Of one member's numbers."""
    numbers_S = np.ascontiguousarray(part_S, "<f4")
    return hashlib.blake2b(numbers_S.data.cast("B"), digest_size=DIGEST_BYTES).digest()
