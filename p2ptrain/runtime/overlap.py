"""Exchange gradients while the backward pass still makes them.

Peers that take the same steps know, when a version ends, who will be in the next one. So its
*exchange begins* at once, among the same members, without a group: each bucket travels as soon as
the backward pass has made it (`compute/buckets.py`), and costs no message of its own. It is a bet
on the next step: the same members, each with as many samples as before, and gradients that stay as
they are between the backward pass and the boundary. At the boundary each trainer arrives at the
barrier as ever. If its bet holds, it states the digest of what has begun; where all state the same,
the group finishes that exchange, under the rules of any other. Otherwise it averages as if none had
begun::

    trainer    | forward |      backward      | boundary |
    buckets              1 ──►  2 ──►  3 ──►      ◄── the rest
    barrier                                   Arrive(begun) ──► Begin ──► finished, or anew

So the bet may be lost at any moment, by any member, and costs no more than its bytes: what decides
is the group. Nothing is changed by an exchange that has begun, and every number is added up in the
order of the members' names wherever it is reduced, so the result is the same to the last bit.
"""

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from p2ptrain.compute.buckets import Buckets
from p2ptrain.compute.codec import PLAIN, load_codec
from p2ptrain.core.contribution import Contribution
from p2ptrain.core.effects import Outcome
from p2ptrain.core.purpose import Purpose, What
from p2ptrain.core.shards import chunk_size_of
from p2ptrain.ids import PeerId, Seconds, Ticket
from p2ptrain.runtime.bucket_tuner import BucketTuner
from p2ptrain.runtime.exchange import Exchange
from p2ptrain.runtime.mix import Bucket
from p2ptrain.runtime.streams import GroupBroken
from p2ptrain.vectors import Vector

if TYPE_CHECKING:
    from p2ptrain.runtime.averages import Averages

NEXT = 1 << 20
"""Added to the attempt of a version's ticket: the exchange that begins after it. No group tries
again so often."""

OF_GRADIENTS = Purpose(what=What.GRADIENTS)


@dataclass(slots=True)
class _Begun:
    """An exchange that has begun."""

    members: tuple[PeerId, ...]
    weight: int
    """Samples that we bet on."""
    vector_G: Vector
    exchange: Exchange
    at: Seconds
    together: int
    """So many buckets travel together."""
    is_taken: bool = False
    """A group finishes it."""

    @property
    def digest(self) -> int:
        words = repr((self.exchange.ticket, self.members)).encode()
        return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest())


class Filled:
    """Buckets that travel together: they leave when all of them are there."""

    def __init__(self, count: int) -> None:
        self.all = asyncio.Event()
        self._missing = count

    def one_more(self) -> None:
        """One of them is there."""
        self._missing -= 1
        if not self._missing:
            self.all.set()


class Overlap:
    """What one peer exchanges behind its backward pass; all of it on the protocol's side."""

    def __init__(self, averages: "Averages", bucket_mib: float) -> None:
        self._averages = averages
        self.buckets: Buckets = averages.replica.buckets(bucket_mib)
        count = len(self.buckets.spans) - self.buckets.has_buffers
        self._tuner = None if bucket_mib else BucketTuner(count)
        self.stated = 0
        """What this peer states at its boundary."""
        self._begun: _Begun | None = None
        self._last: tuple[PeerId, Seconds, int] | None = None
        """Of the last one that a group has finished: first member, beginning, `together`."""

    @property
    def wish(self) -> int:
        """So many buckets are to travel together, if it is up to us."""
        return self._tuner.wish if self._tuner else 1

    def exchange_of(self, ticket: Ticket) -> Exchange | None:
        """The exchange under this ticket, if it has begun."""
        begun = self._begun
        return begun.exchange if begun and begun.exchange.ticket == ticket else None

    def begin(
        self,
        after: Ticket,
        members: tuple[PeerId, ...],
        contributions: Sequence[Contribution],
        shards: Sequence[int],
    ) -> None:
        """A version has ended, of these members; the exchange of the next one begins."""
        self.drop("another one begins")
        averages, host = self._averages, self._averages.host
        weights = [one.weight for one in contributions]
        if len(members) < 2 or not all(weights) or averages.agreed.agreed_to_end:
            return
        vector_G = averages.buffers.take(averages.replica.gradient_size)
        chunk = averages.config.chunk_kib * 256
        together = self._choose(members, contributions)
        spans, index_of = self.buckets.together(together)
        filled = [Filled(index_of.count(index)) for index in range(len(spans))]
        bucket = Bucket(
            name="gradients behind backward",
            vector_V=vector_G,
            codec=load_codec(PLAIN),
            chunk_size=chunk_size_of(max(span.size for span in spans), len(members), chunk),
            divisor=sum(weights),
            trimmed=averages.config.trimmed(len(members)),
            clips=averages.config.clips(len(members)),
            vote=averages.vote_on(OF_GRADIENTS, contributions),
            cuts=spans,
            filled=[one.all for one in filled],
            norm_of=averages.norm_of,
            last_means_first=host.algorithm.overlaps == "both",
        )
        ticket = replace(after, attempt=after.attempt + NEXT)
        exchange = averages.exchange(ticket, members, [bucket], shards, is_awaited=False)
        weight = weights[members.index(host.name)]
        begun = self._begun = _Begun(members, weight, vector_G, exchange, host.now, together)
        if host.algorithm.overlaps == "backward":
            exchange.means_may_leave.set()
        exchange.start()
        host.start(self._carry(begun))
        post = host.environment.post
        self.buckets.begin(vector_G, weight, lambda i: post(filled[index_of[i]].one_more))

    async def settle(self, samples: int, *, contributes: bool) -> None:
        """Our trainer is at its boundary, with gradients of so many samples: does the bet hold?"""
        begun, self.stated = self._begun, 0
        holds = await self._averages.copy(self.buckets.finish)
        if begun is None or begun is not self._begun:
            return
        has_more = self._averages.residual.mask  # of other settings; it goes with a usual group
        if holds and contributes and samples == begun.weight and not has_more:
            self.stated = begun.digest
        else:
            self.drop("another gradient than was announced")

    def taken(
        self, members: tuple[PeerId, ...], contributions: Sequence[Contribution]
    ) -> tuple[Vector, Exchange, Seconds] | None:
        """The group has formed: what it is to finish, and how long ago that has begun.

        None if not all bet on that.
        """
        begun, stated, self.stated = self._begun, self.stated, 0
        if begun is None:
            return None
        agreed = stated and all(one.begun == stated for one in contributions)
        if not agreed or members != begun.members:
            self.drop("others average another gradient, or are others")
            return None
        self._begun, begun.is_taken = None, True
        self._last = begun.members[0], begun.at, begun.together
        return begun.vector_G, begun.exchange, self._averages.host.now - begun.at

    def drop(self, why: str) -> None:
        """What has begun counts for nothing; the other members learn it by their streams."""
        begun, self._begun, self.stated = self._begun, None, 0
        if begun:
            self.buckets.stop()
            begun.exchange.scope.fail(GroupBroken(Outcome.WITHDRAWN, why))
            if begun.exchange.ended_well:
                begun.exchange.give_back(begun.vector_G)
            if begun.exchange.is_over:
                begun.exchange.forget()

    def close(self) -> None:
        """The swarm has another algorithm: nothing travels behind passes any more."""
        self.drop("the settings of the swarm change")
        self.buckets.close()

    def _choose(self, members: tuple[PeerId, ...], contributions: Sequence[Contribution]) -> int:
        """How many buckets travel together from here on: what the first member wished for."""
        last, self._last = self._last, None
        if self._tuner is None:
            return 1
        if last:
            host = self._averages.host
            first, at, count = last
            self._tuner.saw(count, host.now - at, was_ours=first == host.name)
        return self._tuner.agreed(contributions)

    async def _carry(self, begun: _Begun) -> None:
        """Until it is over; if it breaks, a group that is to finish it breaks as well."""
        try:
            await begun.exchange.wait()
        except GroupBroken:
            if self._begun is begun and not self.stated:
                self._begun = None
                self.buckets.stop()
            if not begun.is_taken and self._begun is not begun:
                begun.exchange.give_back(begun.vector_G)
                begun.exchange.forget()
