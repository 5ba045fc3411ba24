"""Carry out a rule for sums of gradients: `GradientSum`, on top of the rounds of one payload.

Legend of shapes: ``G`` numbers of gradients without buffers, ``S`` of a share of a vector.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import cast

import numpy as np

from p2ptrain.averaging.base import Entries as Chosen
from p2ptrain.averaging.base import Factors as OneSide
from p2ptrain.averaging.base import SumRule
from p2ptrain.compute import sparse
from p2ptrain.compute.low_rank import Factors, Layout, Product
from p2ptrain.compute.replica import Vector
from p2ptrain.compute.sparse import ENTRY_BYTES, Entries, Part, entries_of
from p2ptrain.errors import CodecError
from p2ptrain.ids import PeerId
from p2ptrain.runtime.copy_executor import CopyExecutor
from p2ptrain.runtime.rounds import Rounds, RoundsExchange

NUMBER_BYTES = 4
"""Of a number that members gather, or of a factor."""


class GroupGradientSum:
    """Implements `GradientSum` for one attempt.

    Args:
        rule: the algorithm's.
        members: of the group, sorted.
        me: one of them.
        accumulated_G: samples * gradient + residual, of this member.
        shapes: of the parameters, in the order of the G numbers.
        executor: for what takes longer than a hop to another thread.
    """

    def __init__(
        self,
        rule: SumRule,
        members: tuple[PeerId, ...],
        me: PeerId,
        accumulated_G: Vector,
        shapes: Sequence[Sequence[int]],
        executor: CopyExecutor,
    ) -> None:
        self.members, self.rank, self.size = members, members.index(me), len(accumulated_G)
        self.accumulated_G = accumulated_G
        self._others = [*members[self.rank + 1 :], *members[: self.rank]]
        """The next one first, so that not all send to the same one at the same time."""
        self.sent_words = self.received_words = 0
        """Two for each entry, one for each number of a factor; of 4 bytes. All other bytes are
        counts, quantiles and headers."""
        self.chosen: Part
        self.total: Part
        self._rule, self._shapes, self._executor = rule, shapes, executor
        self._rounds: RoundsExchange

    @property
    def delivered(self) -> Part:
        """Of this member's accumulated numbers, what the sum holds."""
        return self.chosen.delivered_by(self.total)

    def rounds(self, chunk_bytes: int) -> Rounds:
        """The item of the payload."""
        most = ENTRY_BYTES * self.size + NUMBER_BYTES * len(self.members) ** 2 + (1 << 16)
        return Rounds(name="gradients", work=self._work, most_bytes=most, chunk_bytes=chunk_bytes)

    async def _work(self, rounds: RoundsExchange) -> None:
        self._rounds = rounds
        try:
            self.chosen, self.total = cast(tuple[Part, Part], await self._rule(self))
        finally:
            del self._rounds  # it refers to this sum: the numbers would outlive their group

    # --- for the rule -----------------------------------------------------------------------------

    async def all_gather(self, numbers: Sequence[int]) -> list[Sequence[int]]:
        own = np.array(numbers, "<u4").tobytes()
        came = await self._rounds.swap(dict.fromkeys(self._others, own), self._others)
        for peer, content in came.items():
            if len(content) != len(own):
                why = f"{len(content)} bytes where {len(numbers)} numbers were due"
                raise CodecError(f"{peer} sends {why}")
        came[self.members[self.rank]] = own
        return [np.frombuffer(came[peer], "<u4").tolist() for peer in self.members]

    # --- for the rule: entries --------------------------------------------------------------------

    async def largest(self, count: int) -> Entries:
        return await self._executor(lambda: sparse.largest_of(self.accumulated_G, count))

    async def above(self, threshold: float) -> Entries:
        return await self._executor(lambda: sparse.above(self.accumulated_G, threshold))

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

    # --- for the rule: factors --------------------------------------------------------------------

    def random_factors(self, columns: int) -> Factors:
        layout = Layout(self._shapes, columns)
        return Factors(layout, layout.begin(columns))

    async def times(self, right: OneSide) -> Factors:
        layout, right_N = _parts(right)
        return await self._made(layout, lambda: layout.times(self.accumulated_G, right_N))

    async def transposed_times(self, left: OneSide) -> Factors:
        layout, left_L = _parts(left)
        return await self._made(layout, lambda: layout.transposed_times(self.accumulated_G, left_L))

    async def basis(self, left: OneSide) -> Factors:
        layout, left_L = _parts(left)
        shares = layout.shares(len(self.members))
        return Factors(layout, await self._reduce(left_L, shares, layout.make_basis))

    async def all_reduce(self, right: OneSide) -> Factors:
        layout, right_N = _parts(right)
        count = len(self.members)
        edges = [len(right_N) * part // count for part in range(count + 1)]
        shares = [slice(*pair) for pair in pairwise(edges)]
        return Factors(layout, await self._reduce(right_N, shares, lambda share, total_S: None))

    def product(self, left: OneSide, right: OneSide) -> Product:
        (layout, left_L), (_, right_N) = _parts(left), _parts(right)
        product = Product(layout, left_L, right_N)
        product.check()
        return product

    async def _made(self, layout: Layout, function: Callable[[], Vector]) -> Factors:
        return Factors(layout, await self._executor(function))

    async def _reduce(
        self,
        numbers: Vector,
        shares: Sequence[slice],
        finish: Callable[[slice, Vector], object],
    ) -> Vector:
        """All-reduce: each member adds up its share, finishes it, and sends it to all."""
        share, count = shares[self.rank], len(self.members)
        parts = await self._swap([numbers[one] for one in shares], [_size(share)] * count)

        def total() -> Vector:
            total_S: Vector = np.add.reduce(parts, dtype=np.float64).astype(np.float32)
            if not np.isfinite(total_S).all():
                raise CodecError("factors whose sum is not finite")
            finish(share, total_S)
            return total_S

        total_S = await self._executor(total)
        wholes = await self._swap([total_S] * count, list(map(_size, shares)))
        return await self._executor(lambda: np.concatenate(wholes))

    async def _swap(self, parts: Sequence[Vector], due: Sequence[int]) -> list[Vector]:
        """Send each rank its numbers, if there are any; so many come from each."""
        given = dict(zip(self.members, parts, strict=True))
        wanted = dict(zip(self.members, due, strict=True))
        leaves = [peer for peer in self._others if len(given[peer])]
        out = await self._executor(lambda: {p: given[p].astype("<f4").tobytes() for p in leaves})
        came = await self._rounds.swap(out, [peer for peer in self._others if wanted[peer]])

        def read() -> dict[PeerId, Vector]:
            numbers = {peer: np.empty(0, np.float32) for peer in self._others}
            for peer, content in came.items():
                if len(content) != NUMBER_BYTES * wanted[peer]:
                    why = f"{len(content)} bytes where {wanted[peer]} numbers were due"
                    raise CodecError(f"{peer} sends {why}")
                numbers[peer] = np.frombuffer(content, "<f4").astype(np.float32, copy=False)
                if not np.isfinite(numbers[peer]).all():
                    raise CodecError(f"{peer} sends factors that are not finite")
            return numbers

        numbers = await self._executor(read)
        numbers[self.members[self.rank]] = given[self.members[self.rank]]
        self.sent_words += sum(len(content) for content in out.values()) // NUMBER_BYTES
        self.received_words += sum(wanted[peer] for peer in came)
        return [numbers[peer] for peer in self.members]


def _size(share: slice) -> int:
    return int(share.stop - share.start)


def _parts(side: OneSide) -> tuple[Layout, Vector]:
    """An algorithm has no factors but those that it got here."""
    own = cast(Factors, side)
    return own.layout, own.numbers


def _own(parts: Sequence[Chosen]) -> Sequence[Entries]:
    """An algorithm has no entries but those that it got here."""
    return cast(Sequence[Entries], parts)
