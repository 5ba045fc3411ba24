"""Averages are carried out: contribute, exchange, apply, each under its ticket.

The machine says who averages what under which ticket, and may abandon it; until a result is being
applied, an abandoned average leaves no trace. Whatever happens, the machine is told how it ended,
and one record is written.

The payload of a group is one bucket, ``models``, or ``gradients`` and ``buffers``: two where they
have different divisors or codecs. `docs/data-plane.md` has the table of weights.

Legend of shapes: ``M`` numbers of a model, ``G`` of gradients and buffers, ``V`` of what travels: M
or G.
"""

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from p2ptrain.compute.codec import load_codec
from p2ptrain.compute.replica import Replica, Vector
from p2ptrain.core.contribution import MODEL, Contribution
from p2ptrain.core.effects import Abandon, Average, Break, Resolve, What
from p2ptrain.core.events import AverageBroke, Outcome
from p2ptrain.core.links import weights_left
from p2ptrain.core.purpose import Purpose
from p2ptrain.core.shards import chunk_size_of
from p2ptrain.core.transfers import Transfers
from p2ptrain.errors import InvariantViolation, RefusedError, StateError
from p2ptrain.ids import Seconds, Ticket
from p2ptrain.net.transport import ChunkStream
from p2ptrain.net.wire import AverageOpening
from p2ptrain.runtime.accounts import Attempt
from p2ptrain.runtime.agreed_state import AgreedState, union, usual_samples
from p2ptrain.runtime.buffers import Buffers
from p2ptrain.runtime.copy_executor import CopyExecutor
from p2ptrain.runtime.exchange import Bucket, Exchange, ExchangeConfig
from p2ptrain.runtime.group import AttemptOver, FormedGroup, PendingMean
from p2ptrain.runtime.pending_gradients import PendingGradients
from p2ptrain.runtime.streams import GroupBroken

if TYPE_CHECKING:
    from p2ptrain.runtime.driver import Driver

SHORT = 1 << 18
"""Copying so many numbers takes less time than a hop to the worker thread and back."""

SLOTS = 16
"""Places for chunks to arrive in that are kept; with chunks of 1 MiB as many MiB."""

LEAVES_FIRST = 4
"""Turns of the loop before a model is copied, so that what was just said leaves: the others wait
for the word that forms the group, and the copy may have the only core."""

SHORTEST_S: Seconds = 0.01
"""Less is not worth a timer, and may be too little for the clock to show."""

PLAIN = "fp32"

MAX_PARKED = 64
"""Streams that wait for their groups, at most; four of each member if those are more: two groups of
two buckets. In a large swarm all streams come before the word that forms their group."""

T = TypeVar("T")


class Averages:
    """All averages of one peer, those that run and those that wind down."""

    def __init__(
        self,
        host: "Driver",
        replica: Replica,
        agreed: AgreedState,
        *,
        config: ExchangeConfig,
        buffers: Buffers,
        executor: CopyExecutor,
    ) -> None:
        self.asked_at: dict[Ticket, Seconds] = {}
        """When we asked for the groups that we hope for."""
        self.pending = PendingGradients(replica, buffers, self._copy)
        self._host = host
        self._replica = replica
        self._agreed = agreed
        self._config = config
        self._buffers = buffers
        self._slots = Buffers(lambda size: np.empty(size, np.float32), SLOTS)
        self._on_copy_thread = executor
        self.transfers = Transfers(config.average_timeout_s)
        self._running: dict[Ticket, asyncio.Task[None]] = {}
        self._exchanges: dict[Ticket, Exchange] = {}
        self._attempts: dict[Ticket, asyncio.Task[None]] = {}
        self._called_off: dict[Ticket, str] = {}  # and why
        self._broken: dict[Ticket, asyncio.Future[Resolve]] = {}  # they wait for it
        self._committing: dict[Ticket, None] = {}  # their result is being applied: no way back
        self._parked = 0

    @property
    def running(self) -> tuple[asyncio.Task[None], ...]:
        """Those that run, or wind down."""
        return tuple(self._running.values())

    def start(self, effect: Average) -> None:
        """Carry out one average; its end is told to the machine."""

        def over(_: asyncio.Task[None]) -> None:
            # Here and not in the task: one that is cancelled before it starts runs nothing.
            self._running.pop(effect.ticket, None)
            self._host.notify_change()

        task = self._host.start(self._average(effect))
        self._running[effect.ticket] = task
        task.add_done_callback(over)

    def abandon(self, effect: Abandon) -> None:
        """End this average, unless its result is being applied: then there is no way back."""
        if effect.ticket in self._running and effect.ticket not in self._committing:
            self._running[effect.ticket].cancel(effect)

    def call_off(self, effect: Break) -> None:
        """This attempt breaks, unless its result is being applied: another member cannot finish."""
        if effect.ticket.root in self._running and effect.ticket not in self._committing:
            self._called_off[effect.ticket] = effect.why
            if effect.ticket in self._attempts:
                self._attempts[effect.ticket].cancel()

    def resolve(self, effect: Resolve) -> None:
        """An attempt that broke goes on as this says."""
        verdict = self._broken.get(effect.ticket)
        if verdict and not verdict.done():
            verdict.set_result(effect)

    async def accept(self, opening: AverageOpening, stream: ChunkStream) -> None:
        """A member's stream has come; returns when it has been served.

        Raises:
            RefusedError: if we are not in that group, or too many streams wait for theirs.
        """
        exchange = await self._exchange_of(opening)
        await exchange.accept(opening, stream)

    async def _average(self, effect: Average) -> None:
        """Carry out one `Average`: as many attempts as it takes; then the machine is told."""
        host, ticket, members = self._host, effect.ticket, effect.members
        asked_at = self.asked_at.pop(ticket, host.now)
        while True:
            attempt = Attempt(ticket, members, effect.what, asked_at, host.now)
            resolution = None
            try:
                await self._end_of_older_averages(effect.ticket)
                resolution = await self._attempt(attempt, effect)
                if resolution is None or resolution.again is None:
                    if attempt.outcome is not Outcome.DONE:
                        await self._check_model(effect)
                    break
            except StateError as error:
                attempt.outcome, attempt.why = Outcome.BROKEN, str(error)
                host.fail(error)
                break
            except asyncio.CancelledError as cancelled:
                attempt.outcome, attempt.why = Outcome.LOST, "the peer left"
                for abandon in cancelled.args:  # none if it is not the machine that ended it
                    attempt.outcome, attempt.why = abandon.outcome, abandon.why
                raise
            finally:
                self._close(attempt)
                if resolution is None or resolution.again is None:
                    self.pending.give_back()
            ticket, members, asked_at = resolution.again, resolution.members, host.now
        host.over(attempt.ending)

    def _close(self, attempt: Attempt) -> None:
        """Of an attempt that is over nothing stays."""
        for open_ones in (self._exchanges, self._committing, self._broken, self._called_off):
            open_ones.pop(attempt.ticket, None)
        self._host.accounts.close(attempt, self._host.now, self._host.metrics)

    async def _attempt(self, attempt: Attempt, effect: Average) -> Resolve | None:
        """One attempt, as the algorithm has it; if it breaks, how it goes on, if it does."""
        algorithm, attempt.outcome = self._host.algorithm, Outcome.WITHDRAWN
        try:
            await algorithm.average(FormedGroup(self, attempt, effect))
        except AttemptOver as over:
            return over.resolution
        if attempt.outcome is Outcome.WITHDRAWN:
            attempt.why = f"{type(algorithm).__name__} did not take the result in"
        return None

    # --- what an algorithm does in a group --------------------------------------------------------

    async def reduce(self, attempt: Attempt, effect: Average) -> None:
        """Have the result here; it changes nothing yet.

        Raises:
            AttemptOver: if it cannot be had.
            StateError: if what we contribute cannot be averaged.
        """
        host, ticket = self._host, attempt.ticket
        try:
            await self._contribute(attempt, effect)
            await self._exchange(attempt)
        except GroupBroken as broken:
            attempt.outcome, attempt.why = broken.outcome, broken.why
            if broken.outcome is Outcome.BROKEN:
                raise AttemptOver from broken  # who sends such numbers would send them again
            exchange = attempt.exchange
            self._broken[ticket] = asyncio.get_running_loop().create_future()
            host.over(AverageBroke(ticket, exchange is not None and exchange.is_complete))
            resolution = await self._broken[ticket]
            if not resolution.adopt:
                self._reuse(attempt, after_break=True)
                raise AttemptOver(resolution) from broken
            attempt.adopted = True

    async def commit(self, attempt: Attempt, effect: Average) -> None:
        """Take the result in. Raises AttemptOver if the group is over meanwhile."""
        self._count(attempt)
        await self._take_in(attempt, effect)
        if not attempt.adopted:  # after a break streams may still use our memory
            self._reuse(attempt)

    def keep(self, attempt: Attempt) -> PendingMean:
        """Take the mean away. Raises AttemptOver if the group is over meanwhile."""
        self._count(attempt)
        mean_M, attempt.vector_V = attempt.vector_V, None
        assert mean_M is not None
        if not attempt.adopted:
            self._reuse(attempt)
        return PendingMean(mean_M, self._replica, self._buffers, self._on_copy_thread)

    def _count(self, attempt: Attempt) -> None:
        """From here on the result counts, and there is no way back."""
        host, ticket = self._host, attempt.ticket
        if not host.machine.holds(ticket):
            attempt.outcome = Outcome.LATE
            attempt.why = f"{ticket} was over before its result was there"
            raise AttemptOver
        attempt.outcome, attempt.why = Outcome.DONE, attempt.why and f"adopted: {attempt.why}"
        self._committing[ticket] = None

    # --- inside -----------------------------------------------------------------------------------

    def _reuse(self, attempt: Attempt, *, after_break: bool = False) -> None:
        """No stream reads our vectors any more, or what it reads counts for nobody."""
        exchange, vector_V = attempt.exchange, attempt.vector_V
        if exchange is None:
            return
        if not after_break or exchange.may_reuse:
            for vector in (*exchange.lent, *(() if vector_V is None else (vector_V,))):
                self._buffers.give(vector)  # it is mapped already, and by all
        for slot in exchange.slots:
            self._slots.give(slot)

    async def _end_of_older_averages(self, ticket: Ticket) -> None:
        """An abandoned average may still be winding down; it reads the same gradients."""
        averages = self._running.items()
        older = [asyncio.shield(task) for other, task in averages if other != ticket]
        await asyncio.gather(*older, return_exceptions=True)

    async def _contribute(self, attempt: Attempt, effect: Average) -> None:
        """Make the exchange, with what we put into it."""
        host, ticket = self._host, attempt.ticket
        models = (MODEL,) * len(effect.members)
        stated = dict(zip(effect.members, effect.contributions or models, strict=True))
        attempt.contributions = tuple(stated[peer] for peer in attempt.members)
        began = host.now
        attempt.updates = await self._fill(attempt)
        attempt.snapshot_s = host.now - began
        attempt.exchange = self._exchanges[ticket] = Exchange(
            host.name,
            ticket,
            attempt.members,
            self._payload(attempt, effect),
            lend=self._buffers.take,
            lend_slot=self._slots.take,
            executor=self._on_copy_thread,
            swarm=host.digest,
            clock=lambda: host.now,
            heard=lambda peer: host.machine.heard(ticket, peer),
            arrival_s=self.transfers.arrival_s,
            shards=weights_left(effect.members, effect.weights, attempt.members),
        )
        host.notify_change()

    def _payload(self, attempt: Attempt, effect: Average) -> list[Bucket]:
        """The buckets of what we contribute; the same names and sizes at all members."""
        vector_V, config, stated = attempt.vector_V, self._config, attempt.contributions
        assert vector_V is not None
        weight = sum(one.weight for one in stated)
        if effect.what is What.MODELS:
            models = self._bucket("models", attempt, vector_V, config.codec, weight)
            return [replace(models, delta=True, keeps_mean=attempt.keeps_mean)]
        divisor = weight if effect.what is What.GRADIENTS else usual_samples(stated)
        if divisor == weight and config.gradient_codec == PLAIN:
            return [self._bucket("gradients", attempt, vector_V, PLAIN, weight)]
        cut = len(vector_V) - self._replica.buffer_size
        return [
            self._bucket("gradients", attempt, vector_V[:cut], config.gradient_codec, divisor),
            self._bucket("buffers", attempt, vector_V[cut:], PLAIN, weight),
        ]

    def _bucket(
        self, name: str, attempt: Attempt, vector_V: Vector, codec: str, divisor: float
    ) -> Bucket:
        largest = self._config.chunk_kib * 256
        return Bucket(
            name=name,
            vector_V=vector_V,
            codec=load_codec(codec),
            chunk_size=chunk_size_of(len(vector_V), len(attempt.members), largest),
            divisor=divisor,
        )

    async def _exchange(self, attempt: Attempt) -> None:
        """Move the chunks.

        Raises:
            GroupBroken: if that did not work, nothing moved any more, or it was called off.
        """
        ticket, exchange = attempt.ticket, attempt.exchange
        assert exchange is not None
        if ticket in self._called_off:
            raise GroupBroken(Outcome.LOST, self._called_off[ticket])
        attempt.moving_since = self._host.now
        moving = asyncio.get_running_loop().create_task(exchange.run(self._host.open_stream))
        self._attempts[ticket] = moving
        try:
            await self._while_it_moves(moving, attempt)
            attempt.moving_s = self._host.now - attempt.moving_since
        except asyncio.CancelledError as cancelled:
            if ticket not in self._called_off:
                raise
            raise GroupBroken(Outcome.LOST, self._called_off[ticket]) from cancelled
        finally:
            self._attempts.pop(ticket, None)
            self._learn(attempt)
            moving.cancel()
            await asyncio.gather(moving, return_exceptions=True)

    async def _while_it_moves(self, moving: asyncio.Task[None], attempt: Attempt) -> None:
        """Wait for the exchange.

        Who has all of the result waits for those who have not: they see whether anything moves.

        Raises:
            GroupBroken: if nothing has moved for too long.
        """
        exchange = attempt.exchange
        assert exchange is not None
        stall_s = self.transfers.stall_s(attempt.what, len(attempt.members))
        while not moving.done():
            allowed_s = 0.0 if exchange.is_met else exchange.arrival_s
            allowed_s = self._config.average_timeout_s if exchange.is_complete else allowed_s
            left_s = max(stall_s, allowed_s) - exchange.silent_s
            if left_s <= 0:
                why = f"nothing has moved for {exchange.silent_s:.1f} s"
                raise GroupBroken(Outcome.LATE, why)
            # Not for longer: meanwhile all may have come, and it is the shorter one that holds.
            with suppress(TimeoutError):
                async with asyncio.timeout(min(max(left_s, SHORTEST_S), stall_s)):
                    await asyncio.shield(moving)
        await moving

    def _learn(self, attempt: Attempt) -> None:
        """What this attempt tells of how long to wait in others."""
        exchange, transfers = attempt.exchange, self.transfers
        if exchange is None:
            return
        for after_s in exchange.arrivals.values():
            transfers.arrived(after_s)
        what, size = attempt.what, len(attempt.members)
        if attempt.moving_s:
            transfers.done(what, size, attempt.moving_s)
        else:
            waited_s = self._host.now - attempt.moving_since
            missing_s = waited_s if exchange.missing else 0.0
            transfers.broke(what, size, exchange.silent_s, missing_s)

    async def _take_in(self, attempt: Attempt, effect: Average) -> None:
        """What is needed for longer is taken out of the attempt."""
        ticket, exchange = attempt.ticket, attempt.exchange
        vector_V, stated = attempt.vector_V, attempt.contributions
        assert exchange is not None
        assert vector_V is not None
        began = self._host.now
        match attempt.what:
            case What.GRADIENTS:
                mask = union(one.gradient_mask for one in stated)
                if any(one.weight for one in stated):
                    await self._copy(lambda: self._replica.import_gradients(vector_V, mask))
                self._agreed.take_in(stated, effect.outside_samples)
                self._agreed.follow(ticket, vector_V)
                self._agreed.contributes = True
            case What.STALE_GRADIENTS:
                attempt.vector_V = None
                attempt.staleness_steps = self.pending.delivered(
                    effect.purpose.version, vector_V, stated, effect.outside_samples
                )
            case What.MODELS:
                add_delta = self._replica.add_delta
                attempt.vector_V = await self._on_copy_thread(lambda: add_delta(vector_V))
                attempt.consensus_distance_l2 = math.sqrt(exchange.square_sum)
                attempt.staleness_steps = self._replica.updates - attempt.updates
        attempt.apply_s = self._host.now - began

    def contribution(self, purpose: Purpose) -> Contribution:
        """What this peer states beside its vectors when it grants or offers its slot.

        Each call for stale gradients promises all that is held: call it once per grant or offer.
        """
        if purpose.what is What.MODELS:
            return MODEL
        agreed, membership = self._agreed, self._host.machine.membership
        if purpose.what is What.STALE_GRADIENTS:
            own, samples = self.pending.promise(), agreed.samples_before + self.pending.samples
        else:
            of_step = agreed.samples_of_step
            weight = of_step if agreed.contributes else 0
            mask = self._replica.gradient_mask() if weight else b""
            own = Contribution(weight=weight, usual=of_step, gradient_mask=mask)
            samples = membership.me.samples + of_step
        return replace(own, samples=samples, wants_to_end=agreed.wants_to_end)

    async def _fill(self, attempt: Attempt) -> int:
        """Copy what we put into the group, on a worker thread; returns of which update it is."""
        if attempt.what is What.MODELS:
            vector_M = attempt.vector_V = self._buffers.take(self._replica.model_size)
            for _ in range(LEAVES_FIRST):
                await asyncio.sleep(0)
            return await self._on_copy_thread(lambda: self._replica.snapshot(vector_M))
        vector_G = attempt.vector_V = self._buffers.take(self._replica.gradient_size)
        weight = attempt.contributions[attempt.members.index(self._host.name)].weight
        if attempt.what is What.GRADIENTS:
            await self._copy(lambda: self._replica.export_gradients(vector_G, weight))
        elif (taken := await self.pending.contribute(vector_G)) != weight:
            raise InvariantViolation(f"{attempt.ticket}: stated {weight} samples, holds {taken}")
        return self._replica.updates

    async def _check_model(self, failed: Average) -> None:
        """Raise StateError if an average failed by our own model.

        Looked for when that may be so: results are checked anyway, and contributions cost as much.
        """
        if failed.what is What.MODELS and not await self._on_copy_thread(self._replica.is_finite):
            raise StateError(
                f"the model of {self._host.name} is not finite any more after "
                f"{self._replica.updates} updates; lower the learning rate or clip gradients"
            )

    async def _copy(self, function: Callable[[], T]) -> T:
        """Copy gradients: nobody else wants them now, so a short copy is made here and at once."""
        short = self._replica.gradient_size <= SHORT
        return function() if short else await self._on_copy_thread(function)

    async def _exchange_of(self, opening: AverageOpening) -> Exchange:
        """Where this stream belongs; it may come before the word that forms its group."""
        host, ticket, bucket = self._host, opening.ticket, opening.bucket

        def is_here() -> bool:
            return ticket in self._exchanges and self._exchanges[ticket].has_bucket(bucket)

        most = max(MAX_PARKED, 4 * len(host.machine.membership.participants()))
        if self._parked >= most:
            raise RefusedError(f"{host.name} has {most} streams waiting for their groups")
        self._parked += 1
        until = host.now + self.transfers.arrival_s  # or for as long as we may yet be in it
        try:
            while not is_here() and not host.machine.is_over(ticket):
                expected = host.machine.expects(ticket)
                async with asyncio.timeout(None if expected else until - host.now):
                    await host.wait_for_change()
            return self._exchanges[ticket]
        except (TimeoutError, KeyError) as error:
            raise RefusedError(f"{host.name} is not in {ticket}") from error
        finally:
            self._parked -= 1
