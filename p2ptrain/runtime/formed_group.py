"""One attempt of a group that is formed: contribute, reduce, take in, or break.

What a member contributes is copied when the group is formed, and becomes the result in place. It
counts when it is whole and the ticket still holds, so a group that breaks leaves its members as
they were. `docs/data-plane.md` has the table of weights, and `runtime/averages.py` starts and ends
attempts.

Legend of shapes: ``M`` numbers of a model, ``G`` of gradients and buffers, ``V`` of what travels: M
or G, ``S`` of a fragment.
"""

import asyncio
import math
from collections.abc import Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

from p2ptrain.averaging.base import Algorithm, GroupResult, Mean, SumRule
from p2ptrain.compute.codec import PLAIN, load_codec
from p2ptrain.compute.replica import Vector
from p2ptrain.compute.sparse import NOTHING
from p2ptrain.core.contribution import MODEL
from p2ptrain.core.effects import Abandon, Average, AverageBroke, Break, Outcome, Resolve, What
from p2ptrain.core.purpose import Formation
from p2ptrain.core.shards import SMALLEST_PART, chunk_size_of
from p2ptrain.errors import InvariantViolation, StateError
from p2ptrain.ids import PeerId, Ticket
from p2ptrain.runtime.accounts import Attempt
from p2ptrain.runtime.agreed_state import union, usual_samples
from p2ptrain.runtime.deferred import DeferredUpdate
from p2ptrain.runtime.exchange import Exchange
from p2ptrain.runtime.gradient_sum import GroupGradientSum
from p2ptrain.runtime.mix import Bucket
from p2ptrain.runtime.outer import OuterPart
from p2ptrain.runtime.pending_mean import PendingMean
from p2ptrain.runtime.rounds import Rounds
from p2ptrain.runtime.streams import AttemptOver, GroupBroken
from p2ptrain.vectors import LONG, NO_NUMBERS

if TYPE_CHECKING:
    from p2ptrain.runtime.averages import Averages

LEAVES_FIRST = 4
"""Turns of the loop before a model is copied, so that what was just said leaves: the others wait
for the word that forms the group, and the copy may have the only core."""

WITH_RESIDUAL = What.GRADIENTS, What.PSEUDO_GRADIENTS
"""What a lossy codec takes from these goes into the next ones."""

WHOLE_MODELS = What.MODELS, What.CONSENSUS


class FormedGroup(Attempt):
    """Carries out one attempt of an `Average`; implements `Group`."""

    task: asyncio.Task[None]
    """That of the whole average."""
    vector_V: Vector
    """What this member contributes, all buckets in one."""

    def __init__(
        self, averages: "Averages", effect: Average, ticket: Ticket, members: tuple[PeerId, ...]
    ) -> None:
        now = averages.host.now
        purpose, models = effect.purpose, (MODEL,) * len(effect.members)
        super().__init__(ticket, members, purpose, averages.asked_at.get(ticket, now), now)
        stated = dict(zip(effect.members, effect.contributions or models, strict=True))
        self.version = None if purpose.formation is Formation.CLAIMED else purpose.version
        self.awaited = effect.awaited
        self.next: FormedGroup | None = None
        """The attempt that follows when this one has broken, if any does."""
        self.is_committing = False
        """Its result is being applied: no way back."""
        self.is_abandoned = False
        """The machine has forgotten it, and our trainer was released already."""
        self._deferred: DeferredUpdate | None = None
        self._is_over = self._is_counted = self._has_given_back = False
        self.span = purpose.span(averages.replica.model_size)
        self._averages = averages
        self._effect = effect
        self._contributions = tuple(stated[peer] for peer in members)
        self._keeps_mean = False
        self._has_residual = False  # it is in the gradients that we contribute
        self._left_G: Vector | None = None  # what a codec takes from what we contribute
        self._outer: OuterPart | None = None
        self._updates = 0  # of the model that was contributed
        self._called_off: GroupBroken | None = None
        self._adopts: asyncio.Future[bool] | None = None  # it broke, and waits for this

    # --- for `Averages` ---------------------------------------------------------------------------

    def handle(self, effect: Abandon | Break | Resolve) -> "FormedGroup":
        """Do what the machine has decided; returns the attempt that is the present one then."""
        match effect:
            case Abandon() if self._deferred:
                self.is_abandoned = True
                self._break(GroupBroken(effect.outcome, effect.why))
                if self._adopts and not self._adopts.done():
                    self._adopts.set_result(False)
            case Abandon():
                self.task.cancel(effect)
            case Break(ticket=self.ticket, why=why):
                self._break(GroupBroken(Outcome.LOST, why))
            case Resolve(ticket=self.ticket) if self._adopts and not self._adopts.done():
                if effect.again:
                    averages, members = self._averages, effect.members
                    self.next = FormedGroup(averages, self._effect, effect.again, members)
                    self.next.task = self.task
                self._adopts.set_result(effect.adopt)
            case _:
                pass  # of an attempt that is over
        return self.next or self

    def _break(self, why: GroupBroken) -> None:
        self._called_off = why
        if self.exchange:
            self.exchange.scope.fail(why)

    async def run(self) -> "FormedGroup | None":
        """Do what the algorithm does in a group; returns the attempt that follows, if any does."""
        host, running, self.outcome = self._averages.host, self._averages.running, Outcome.WITHDRAWN
        try:
            # An abandoned average may still be winding down; it reads the same gradients.
            older = [asyncio.shield(task) for task in running if task is not self.task]
            await asyncio.gather(*older, return_exceptions=True)
            try:
                usual = self.what is not What.CONSENSUS
                await (host.algorithm if usual else Algorithm()).average(self)
                if self.outcome is Outcome.WITHDRAWN:
                    self.why = f"{type(host.algorithm).__name__} did not take the result in"
            except AttemptOver:
                pass
            if self.outcome is not Outcome.DONE and self.next is None:
                await self._check_model()
        except StateError as error:
            self.outcome, self.why = Outcome.BROKEN, str(error)
            host.fail(error)
        except asyncio.CancelledError as cancelled:
            self.outcome, self.why = Outcome.LOST, "the peer left"
            for abandon in cancelled.args:  # none if it is not the machine that ended it
                self.outcome, self.why = abandon.outcome, abandon.why
            raise
        finally:
            if self._deferred:
                self._deferred.give_up()  # nothing more will come
            host.accounts.close(self, host.now, host.metrics)
            self._is_counted = True
            self._forget()
        return self.next

    def _forget(self) -> None:
        """The attempt is over and counted: let go of vectors, and of what refers to this group.

        So their memory is free now, and not when Python looks for cycles.
        """
        if self._deferred and not self._deferred.is_made:
            return  # the update that is still to be made needs the means, and calls this
        if self.exchange:
            self.exchange.forget()
        self.vector_V, self._left_G, self.sum = NO_NUMBERS, None, None
        self._deferred = self._called_off = self._outer = None

    # --- for the algorithm ------------------------------------------------------------------------

    async def reduce(self, rule: SumRule | None = None) -> None:
        exchange = await self._contribute(rule)
        await self._until_broken(exchange, exchange.run())

    async def reduce_scatter(self) -> None:
        exchange = await self._contribute(None)
        await self._until_broken(exchange, exchange.reduce_scatter())

    async def all_gather(self) -> None:
        assert self.exchange is not None
        await self._until_broken(self.exchange, self.exchange.all_gather())

    async def _until_broken(self, exchange: Exchange, moves: Coroutine[Any, Any, None]) -> None:
        try:
            await moves
        except GroupBroken as broken:
            self._learn(exchange)
            await self._resolve(exchange, self._vote_out(exchange) or broken)
        except asyncio.CancelledError:
            self._learn(exchange)
            raise
        else:
            if exchange.ended_well:
                self._learn(exchange)
                exchange.audit()
                if voted_out := self._vote_out(exchange):
                    await self._resolve(exchange, voted_out)

    def _vote_out(self, exchange: Exchange) -> GroupBroken | None:
        """Name members whose contribution does not count; why the attempt breaks, if any are.

        Where the trainer is beyond this version, the contribution counts all the same.
        """
        if not exchange.has_all.is_set():
            return None
        self.offenders = exchange.offenders
        for peer, why in self.offenders.items():
            self._averages.host.warn(("offender", peer), why)
        if self._deferred or not self.offenders:
            return None
        return GroupBroken(Outcome.BROKEN, "; ".join(self.offenders.values()))

    async def _resolve(self, exchange: Exchange, broken: GroupBroken) -> None:
        """Returns if our result counts all the same; raises AttemptOver if not."""
        self.outcome, self.why = broken.outcome, str(broken)
        without = tuple(self.offenders)
        if broken.outcome is Outcome.BROKEN and not self._deferred and not without:
            raise AttemptOver from broken  # who sends such numbers would send them again
        if not self.is_abandoned:
            self._adopts = asyncio.get_running_loop().create_future()
            has_all = exchange.has_all.is_set()
            self._averages.host.over(AverageBroke(self.ticket, has_all, without))
            adopts = await self._adopts
        if self._deferred:
            self.next = None  # the trainer is beyond this version: what has come counts
            if self._deferred.give_up():
                self._averages.agreed.fork(self._averages.host.name)
        elif not adopts:
            exchange.give_back(self.vector_V)
            raise AttemptOver from broken

    def release_trainer(self) -> None:
        averages, host, stated = self._averages, self._averages.host, self._contributions
        exchange, replica, vector_G = self.exchange, averages.replica, self.vector_V
        if exchange is None or len(stated) == 1 or not any(one.weight for one in stated):
            return
        self._check_held()
        if self._has_residual:
            self._settle_residual()  # the mean has it
        self._deferred = averages._deferred = DeferredUpdate(
            replica,
            vector_G,
            union(one.gradient_mask for one in stated),
            exchange.buckets[0],
            averages.update_lock,
            lambda: host.environment.post(self._give_back),
        )
        self._agree(NO_NUMBERS)
        host.machine.release_trainer()
        host.swarm.ended(None, GroupResult(Outcome.DONE, ""))

    def _give_back(self) -> None:
        """The update is made, or the group is over: once both are, memory is free."""
        if not (self._deferred and self._deferred.is_made):
            return
        if self.exchange and self._is_over and not self._has_given_back:
            self._has_given_back = True  # memory that is given back twice is lent to two averages
            self.exchange.give_back(self.vector_V)
        if self._is_counted:
            self._forget()

    async def commit(self) -> None:
        if self._deferred:
            self.outcome, self._is_over = Outcome.DONE, True
            self._give_back()
            return
        exchange = self._count()
        exchange.give_back(*await self._take_in(exchange))

    async def keep(self) -> Mean:
        self._keeps_mean = True
        await self.reduce()
        self._count().give_back()
        averages = self._averages
        return PendingMean(
            self.vector_V,
            self.span.start,
            averages.replica,
            averages.buffers,
            averages.executor,
        )

    # --- inside -----------------------------------------------------------------------------------

    async def _contribute(self, rule: SumRule | None) -> Exchange:
        """Make the exchange, with what we put into it."""
        averages, host, effect = self._averages, self._averages.host, self._effect
        has_weight = any(one.weight for one in self._contributions)
        if self.what is What.CONSENSUS and not has_weight:
            self.outcome, self.why = Outcome.BROKEN, "no member that is left has trained its model"
            raise AttemptOver
        if self._finishes_what_began():
            assert self.exchange is not None
            return self.exchange
        began = host.now
        await self._fill()
        if rule and self.what is What.GRADIENTS and len(self.members) > 1:
            accumulated_G = self._gradients_of(self.vector_V)
            shapes = averages.replica.gradient_shapes
            self.sum = GroupGradientSum(
                rule, self.members, host.name, accumulated_G, shapes, averages.copy
            )
        self.snapshot_s = host.now - began
        self.exchange = averages.exchange(
            self.ticket,
            self.members,
            self._payload(),
            averages.shards_of(effect, self.members),
            heard=partial(host.machine.heard, self.ticket),
            arrival_s=averages.transfers.arrivals.seconds,
            stall_s=averages.transfers.stall(self.what, len(self.members)).seconds,
        )
        if self._called_off:
            self.exchange.scope.fail(self._called_off)  # before anything moves
        host.notify_change()
        return self.exchange

    def _finishes_what_began(self) -> bool:
        """True if our vector travels already, behind the backward passes of all members."""
        overlap, host = self._averages.overlap, self._averages.host
        if overlap is None or self.what is not What.GRADIENTS:
            return False
        if self.ticket.attempt:
            overlap.drop("its group tries again")
            return False
        taken = overlap.taken(self.members, self._contributions)
        if taken is None:
            return False
        self.vector_V, self.exchange, self.overlap_s = taken
        self.exchange.await_from_now(partial(host.machine.heard, self.ticket))
        if self._called_off:
            self.exchange.scope.fail(self._called_off)
        host.notify_change()
        return True

    async def _fill(self) -> None:
        """Copy what we put into the group, on a worker thread."""
        averages, replica, purpose = self._averages, self._averages.replica, self._effect.purpose
        rank = self.members.index(averages.host.name)
        is_outer = averages.outer and self.what is not What.CONSENSUS
        if averages.outer and is_outer and purpose.formation is not Formation.BARRIER:
            self._outer = averages.outer.part(purpose, self.members, self._contributions, rank)
        if self._outer and self.what is What.PSEUDO_GRADIENTS:
            await averages.reuse_idle(self.span.size)
            outer, vector_S = self._outer, averages.buffers.take(self.span.size)
            self.vector_V, self._updates = vector_S, replica.updates
            await averages.executor(lambda: outer.fill(vector_S))
            return
        if self.what in WHOLE_MODELS:
            await averages.reuse_idle(self.span.size)
            vector_S, start = averages.buffers.take(self.span.size), self.span.start
            self.vector_V = vector_S
            for _ in range(LEAVES_FIRST):
                await asyncio.sleep(0)
            self._updates = await averages.executor(lambda: replica.snapshot(vector_S, start))
            if self._outer:
                self._outer.fill_model(vector_S)
            if not self._contributions[rank].weight:  # of a consensus, where it has only served
                vector_S[:] = 0
            return
        vector_G = self.vector_V = averages.buffers.take(replica.gradient_size)
        weight = self._contributions[rank].weight
        if self.what is What.GRADIENTS:
            await averages.copy(lambda: replica.export_gradients(vector_G, weight))
            self._has_residual = averages.residual.add_to(self._gradients_of(vector_G))
        elif (taken := await averages.pending.contribute(vector_G)) != weight:
            raise InvariantViolation(f"{self.ticket}: stated {weight} samples, holds {taken}")

    def _gradients_of(self, vector_G: Vector) -> Vector:
        """Without the buffers that stand behind them."""
        return vector_G[: len(vector_G) - self._averages.replica.buffer_size]

    def _payload(self) -> list[Bucket | Rounds]:
        """The items of what we contribute; the same names and sizes at all members."""
        vector_V, config, stated = self.vector_V, self._averages.config, self._contributions
        gathers = False
        weight, codec = sum(one.weight for one in stated), config.gradient_codec
        divisor = usual_samples(stated) if self.what is What.STALE_GRADIENTS else weight
        cut = len(vector_V) - self._averages.replica.buffer_size
        if self._outer and self.what is What.PSEUDO_GRADIENTS:
            cut, divisor = len(vector_V), self._outer.divisor
            gathers = self._outer.gathers
            codec = PLAIN if gathers else codec
        if self.what in WITH_RESIDUAL and not self.sum and codec != PLAIN:
            if len(self.members) == 1:
                codec = PLAIN  # nothing travels
            else:
                self._left_G = self._averages.buffers.take(cut)
        parts: list[tuple[str, Vector, str, float]] = [
            ("gradients", vector_V[:cut], codec, divisor),
            ("buffers", vector_V[cut:], PLAIN, weight),
        ]
        if self.sum:
            del parts[0]
        elif self.what is What.MODELS:
            parts = [("models", vector_V, config.codec, weight)]
        elif self.what is What.PSEUDO_GRADIENTS:
            parts = [("gradients", vector_V, codec, divisor)]
        elif self.what is What.CONSENSUS:
            parts = [("models", vector_V, PLAIN, weight)]
        elif divisor == weight and codec == PLAIN:
            parts = [("gradients", vector_V, PLAIN, weight)]
        vote = self._averages.vote_on(self._effect.purpose, stated, gathers=gathers)
        is_robust, count = self.what is not What.CONSENSUS, len(self.members)
        buckets = [
            Bucket(
                name=name,
                vector_V=part_V,
                codec=load_codec(codec),
                chunk_size=chunk_size_of(len(part_V), len(self.members), config.chunk_kib * 256),
                divisor=divisor,
                delta=self.what is What.MODELS,
                trimmed=config.trimmed(count) if is_robust else 0,
                clips=is_robust and config.clips(count),
                vote=vote if name != "buffers" else None,
                keeps_mean=self._keeps_mean,
                left_V=self._left_G if name == "gradients" else None,
                norm_of=self._averages.norm_of if name == "gradients" else 0,
            )
            for name, part_V, codec, divisor in parts
        ]
        return (
            [self.sum.rounds(config.chunk_kib * 1024 // SMALLEST_PART), *buckets]
            if self.sum
            else [*buckets]
        )

    def _learn(self, exchange: Exchange) -> None:
        """What this attempt tells of how long to wait in others; nothing if trainers computed."""
        if not exchange.is_awaited:
            return
        transfers, kind = self._averages.transfers, (self.what, len(self.members))
        for after_s in exchange.arrivals.values():
            transfers.arrivals.took(after_s)
        if exchange.ended_well:
            transfers.stall(*kind).took(exchange.moving_s)
            if self._moves_models:
                swarm, parts = self._averages.host.swarm, self._effect.purpose.fragments
                others = [peer for peer in self.members if peer != swarm.me]
                swarm.fragments.took(parts, exchange.moving_s, others)
        else:
            transfers.broke(*kind, exchange.silent_s, exchange.missing_s)

    def _count(self) -> Exchange:
        """From here on the result counts. Raises AttemptOver if the group is over meanwhile."""
        assert self.exchange is not None
        self._check_held()
        self.outcome, self.why = Outcome.DONE, self.why and f"adopted: {self.why}"
        self.is_committing = True
        host, stated = self._averages.host, self._contributions
        if host.algorithm.averages == "models":  # and so are the estimates of progress
            sharing = [one.progress for one in stated if one.progress]
            rank = self.members.index(host.name)
            if own := stated[rank].progress:  # what a division leaves over is not lost
                before = sum(one.progress > 0 for one in stated[:rank])
                share = (sum(sharing) + before) // len(sharing)
                host.share_progress(share - own, len(sharing) - 1)
        if self._moves_models:  # also where it was adopted: else the same fragment would be next
            purpose = self._effect.purpose
            host.swarm.fragments.averaged(purpose.fragment, purpose.fragments)
        return self.exchange

    @property
    def _moves_models(self) -> bool:
        return self.what is What.MODELS and len(self.members) > 1

    def _check_held(self) -> None:
        if not self._averages.host.machine.holds(self.ticket):
            self.outcome = Outcome.LATE
            self.why = f"{self.ticket} was over before its result was there"
            raise AttemptOver

    def _agree(self, mean_V: Vector) -> None:
        """The version stands: what its members stated, and the next exchange, which may begin."""
        averages, effect, stated = self._averages, self._effect, self._contributions
        agreed = averages.agreed
        agreed.take_in(stated, effect.outside_samples)
        averages.host.contract.stated = dict(zip(self.members, stated, strict=True))
        averages.host.batches.take_in(self.members.index(averages.host.name), stated)
        agreed.follow(self.ticket, mean_V)
        agreed.contributes = True
        if averages.overlap:
            shards = averages.shards_of(effect, self.members)
            averages.overlap.begin(self.ticket, self.members, stated, shards)

    async def _take_in(self, exchange: Exchange) -> list[Vector]:
        """Take the result in; returns memory that is not needed any more."""
        averages, vector_V, stated = self._averages, self.vector_V, self._contributions
        replica, outside = averages.replica, self._effect.outside_samples
        began, free = averages.host.now, [vector_V]
        match self.what:
            case What.GRADIENTS:
                mask = union(one.gradient_mask for one in stated)
                await averages.copy(self._settle_residual)
                # Alone, gradients are their own mean, in whatever dtype they have.
                is_own = len(stated) == 1 and not self._has_residual
                if any(one.weight for one in stated) and not is_own:
                    await averages.copy(lambda: replica.import_gradients(vector_V, mask))
                self._agree(vector_V)
            case What.STALE_GRADIENTS:
                version, free = self._effect.purpose.version, []
                self.staleness_steps = averages.pending.delivered(
                    version, vector_V, stated, outside
                )
            case What.PSEUDO_GRADIENTS:
                free = await self._make_outer_step(vector_V)
            case What.CONSENSUS if not self._effect.purpose.version:
                averages.host.consensus.take(self.members, stated, vector_V)
                free = []  # the mean is that memory
            case What.CONSENSUS if self.ticket.initiator == averages.host.name:
                averages.host.consensus.take_asked(self.members, stated, vector_V)
                free = []
            case What.CONSENSUS:
                pass  # another member was asked for it
            case What.MODELS:
                start, parts = self.span.start, self._effect.purpose.fragments
                outer = self._outer

                def add() -> Vector:  # at once: a checkpoint has both or none
                    delta_V = outer.take_in_model(vector_V) if outer else vector_V
                    return replica.add_delta(delta_V, start)

                free = [await averages.executor(add)]
                if len(free[0]) > LONG:
                    free = []  # while one is pending, no second one is kept for later
                self.consensus_distance_l2 = math.sqrt(parts * exchange.square_sum)
                self.staleness_steps = replica.updates - self._updates
        self.apply_s = averages.host.now - began
        return free

    async def _make_outer_step(self, mean_S: Vector) -> list[Vector]:
        averages, left_S, outer = self._averages, self._left_G, self._outer
        assert outer is not None
        start, replica = self.span.start, averages.replica

        def step() -> Vector:
            delta_S = outer.take_in(self.ticket, mean_S, left_S)
            return mean_S if delta_S is None else replica.add_delta(delta_S, start)

        free = _kept(await averages.executor(step))
        parts = self._effect.purpose.fragments
        self.consensus_distance_l2 = math.sqrt(parts) * outer.distance_l2
        self.staleness_steps = replica.updates - self._updates
        if outer.is_behind:
            fragment = self._effect.purpose.fragment
            others = [peer for peer in outer.leads if peer != averages.host.name]
            averages.host.state_transfer.follow(fragment, outer.after, others)
        return free if left_S is None else [*free, left_S]

    def _settle_residual(self) -> None:
        """What was not delivered is left; of the sum of a part, the vector becomes the mean."""
        averages, part, left_G = self._averages, self.sum, self._left_G
        weight = sum(one.weight for one in self._contributions)
        mask = self._contributions[self.members.index(averages.host.name)].gradient_mask
        if not weight and part:
            part.accumulated_G.fill(0)  # no member had a say: nothing is delivered
        elif weight and part:
            averages.residual.keep(part.accumulated_G, part.delivered, mask)
            part.total.write(part.accumulated_G, weight)
        elif weight and left_G is not None:
            averages.residual.keep(left_G, NOTHING, mask)
            averages.buffers.give(left_G)
        elif weight:
            averages.residual.keep(self._gradients_of(self.vector_V), None, b"")

    async def _check_model(self) -> None:
        """Raise StateError if an average failed by our own model.

        Looked for when that may be so: results are checked anyway, and contributions cost as much.
        """
        averages, replica = self._averages, self._averages.replica
        if self.what is What.MODELS and not await averages.executor(replica.is_finite):
            raise StateError(
                f"the model of {averages.host.name} is not finite any more after "
                f"{replica.updates} updates; lower the learning rate or clip gradients"
            )


def _kept(spare: Vector) -> list[Vector]:
    """What `add_delta` gives back, to be lent again; while one is pending, no second long one."""
    return [spare] if len(spare) <= LONG else []
