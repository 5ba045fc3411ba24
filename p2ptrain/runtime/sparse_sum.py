"""Carry a sparse rule out: the port `SparseSum`, on top of the rounds of one payload.

Legend of shapes: ``G`` numbers of gradients without buffers.
"""

from collections.abc import Sequence
from typing import cast

import numpy as np

from p2ptrain.averaging.base import Entries as Chosen
from p2ptrain.averaging.base import SparseRule
from p2ptrain.compute import sparse
from p2ptrain.compute.replica import Vector
from p2ptrain.compute.sparse import ENTRY_BYTES, Entries, entries_of
from p2ptrain.errors import CodecError
from p2ptrain.ids import PeerId
from p2ptrain.runtime.copy_executor import CopyExecutor
from p2ptrain.runtime.rounds import Rounds, RoundsExchange

NUMBER_BYTES = 4
"""Of a number that members gather."""


class GroupSparseSum:
    """Implements `SparseSum` for one attempt.

    Args:
        rule: the algorithm's.
        members: of the group, sorted.
        me: one of them.
        accumulated_G: samples * gradient + residual, of this member.
        executor: for what takes longer than a hop to another thread.
    """

    def __init__(
        self,
        rule: SparseRule,
        members: tuple[PeerId, ...],
        me: PeerId,
        accumulated_G: Vector,
        executor: CopyExecutor,
    ) -> None:
        self.members, self.rank, self.size = members, members.index(me), len(accumulated_G)
        self.accumulated_G = accumulated_G
        self._others = [*members[self.rank + 1 :], *members[: self.rank]]
        """The next one first, so that not all send to the same one at the same time."""
        self.sent_words = self.received_words = 0
        """Two for each entry, of 4 bytes; all other bytes are counts, quantiles and headers."""
        self.chosen: Entries
        self.total: Entries
        self._rule, self._executor = rule, executor
        self._rounds: RoundsExchange

    @property
    def delivered(self) -> Entries:
        """Of this member's accumulated numbers, those that the sum holds."""
        return sparse.common(self.chosen, self.total)

    def rounds(self, chunk_bytes: int) -> Rounds:
        """The item of the payload."""
        most = ENTRY_BYTES * self.size + NUMBER_BYTES * len(self.members) ** 2 + (1 << 16)
        return Rounds(name="gradients", work=self._work, most_bytes=most, chunk_bytes=chunk_bytes)

    async def _work(self, rounds: RoundsExchange) -> None:
        self._rounds = rounds
        self.chosen, self.total = cast(tuple[Entries, Entries], await self._rule(self))

    # --- for the rule -----------------------------------------------------------------------------

    async def largest(self, count: int) -> Entries:
        return await self._executor(lambda: sparse.largest_of(self.accumulated_G, count))

    async def above(self, threshold: float) -> Entries:
        return await self._executor(lambda: sparse.above(self.accumulated_G, threshold))

    async def all_gather(self, numbers: Sequence[int]) -> list[Sequence[int]]:
        own = np.array(numbers, "<u4").tobytes()
        came = await self._rounds.swap(dict.fromkeys(self._others, own), self._others)
        for peer, content in came.items():
            if len(content) != len(own):
                why = f"{len(content)} bytes where {len(numbers)} numbers were due"
                raise CodecError(f"{peer} sends {why}")
        came[self.members[self.rank]] = own
        return [np.frombuffer(came[peer], "<u4").tolist() for peer in self.members]

    async def send(
        self, parts: Sequence[Chosen], due: Sequence[int] | None = None
    ) -> list[Entries]:
        given = dict(zip(self.members, _own(parts), strict=True))
        me, ours = self.members[self.rank], given[self.members[self.rank]]
        wanted = dict(zip(self.members, due, strict=True)) if due is not None else {}
        leaves = [peer for peer in self._others if due is None or len(given[peer])]
        out = {peer: given[peer].to_bytes() for peer in leaves}
        awaited = [peer for peer in self._others if wanted.get(peer, 1)]
        came = await self._rounds.swap(out, awaited)
        entries: dict[PeerId, Entries] = {}
        for peer, content in came.items():
            try:
                entries[peer] = entries_of(content, 0, self.size)
            except CodecError as error:
                raise CodecError(f"{peer} sends {error}") from error
            if peer in wanted and len(entries[peer]) != wanted[peer]:
                why = f"{len(entries[peer])} entries where {wanted[peer]} were due"
                raise CodecError(f"{peer} sends {why}")
        self.sent_words += 2 * sum(len(given[peer]) for peer in leaves)
        self.received_words += 2 * sum(map(len, entries.values()))
        entries[me], (nothing,) = ours, ours.split([0])
        return [entries.get(peer, nothing) for peer in self.members]

    async def add(self, parts: Sequence[Chosen]) -> Entries:
        return await self._executor(lambda: sparse.added(_own(parts)))

    def join(self, parts: Sequence[Chosen]) -> Entries:
        return sparse.joined(_own(parts))


def _own(parts: Sequence[Chosen]) -> Sequence[Entries]:
    """An algorithm has no entries but those that it got here."""
    return cast(Sequence[Entries], parts)
