"""Averages are carried out: contribute, exchange, take in, each under its ticket.

The machine says who averages what under which ticket, and may abandon it; until a result is being
applied, an abandoned average leaves no trace. Whatever happens, the machine learns how it ended,
and one record is written for each attempt.

The payload of a group is one bucket, ``models``, or ``gradients`` and ``buffers``: two where they
have different divisors or codecs. `docs/data-plane.md` has the table of weights.

Legend of shapes: ``M`` numbers of a model, ``G`` of gradients and buffers, ``V`` of what travels: M
or G.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from p2ptrain.averaging.base import Algorithm
from p2ptrain.compute.replica import Replica
from p2ptrain.compute.sparse import Residual
from p2ptrain.core.contribution import MODEL, Contribution
from p2ptrain.core.effects import Abandon, Average, AverageEnded, Break, Resolve, What
from p2ptrain.core.links import weights_left
from p2ptrain.core.purpose import Purpose
from p2ptrain.core.transfers import Transfers
from p2ptrain.errors import RefusedError
from p2ptrain.ids import PeerId, Seconds, Ticket
from p2ptrain.net.transport import ChunkStream
from p2ptrain.net.wire import AverageOpening
from p2ptrain.runtime.agreed_state import AgreedState, union
from p2ptrain.runtime.audits import Audits
from p2ptrain.runtime.ballots import LEAST_MEMBERS, Vote
from p2ptrain.runtime.copy_executor import CopyExecutor
from p2ptrain.runtime.deferred import DeferredUpdate
from p2ptrain.runtime.exchange import Exchange, ExchangeConfig
from p2ptrain.runtime.formed_group import WHOLE_MODELS, FormedGroup
from p2ptrain.runtime.mix import Bucket
from p2ptrain.runtime.outer import Outer
from p2ptrain.runtime.overlap import Overlap
from p2ptrain.runtime.parked import ParkedStreams
from p2ptrain.runtime.pending_gradients import PendingGradients
from p2ptrain.runtime.rounds import Rounds
from p2ptrain.vectors import Buffers

if TYPE_CHECKING:
    from p2ptrain.runtime.driver import Driver

SHORT = 1 << 18
"""Copying so many numbers takes less time than a hop to the worker thread and back."""

SLOTS = 16
"""Places for chunks to arrive in that are kept; with chunks of 1 MiB as many MiB."""

T = TypeVar("T")


@dataclass(eq=False)
class Averages:
    """All averages of one peer, those that run and those that wind down, and what they share."""

    host: "Driver"
    replica: Replica
    agreed: AgreedState
    _: KW_ONLY
    config: ExchangeConfig
    buffers: Buffers
    executor: CopyExecutor

    def __post_init__(self) -> None:
        self.slots = Buffers(lambda size: np.empty(size, np.float32), SLOTS)
        self.pending = PendingGradients(self.replica, self.buffers, self.copy)
        self.residual = Residual()
        self._deferred: DeferredUpdate | None = None
        self.overlap: Overlap | None = None
        self._prepare(self.host.algorithm)
        self.transfers = Transfers(self.config.average_timeout_s)
        self.asked_at: dict[Ticket, Seconds] = {}
        """When we asked for the groups that we hope for."""
        self.update_lock = threading.RLock()
        self._groups: dict[Ticket, FormedGroup] = {}  # by first ticket, the present attempt
        self.parked = ParkedStreams(self.host)

    def _prepare(self, algorithm: Algorithm) -> None:
        """Make what an algorithm declares that it needs."""
        self.judge = self.config.judge  # norms of another algorithm are of another kind
        share, chance = self.config.audited_owners, self.host.environment.chance
        self.audits = Audits(self.host, share, chance, self.judge) if share and self.judge else None
        self.overlap = Overlap(self, algorithm.bucket_mib) if algorithm.overlaps != "none" else None
        self.outer = Outer(algorithm.outer, self.replica) if algorithm.outer else None

    def change(self, algorithm: Algorithm, config: ExchangeConfig) -> None:
        """Another algorithm and codecs from now on; no average runs, no update waits."""
        if self.overlap:
            self.overlap.close()
        self.config, self._deferred = config, None
        self._prepare(algorithm)

    @property
    def deferred(self) -> DeferredUpdate | None:
        """The update that is still to be made, or completed."""
        last = self._deferred
        return last if last and not last.is_made else None

    @property
    def norm_of(self) -> int:
        """How many numbers the norm of the gradients is of: all but the buffers.

        0 where updates wait for all means anyway: then members do not state their squares.
        """
        both = self.host.algorithm.overlaps == "both"
        return self.replica.gradient_size - self.replica.buffer_size if both else 0

    @property
    def running(self) -> tuple[asyncio.Task[None], ...]:
        """Those that run, or wind down."""
        return tuple(group.task for group in self._groups.values())

    def is_in(self, what: What) -> bool:
        """Whether an average of this kind runs here, or winds down."""
        return any(group.what is what for group in self._groups.values())

    def start(self, effect: Average) -> None:
        """Carry out one average; report its end to the machine."""

        def over(_: asyncio.Task[None]) -> None:
            # Here and not in the task: one that is cancelled before it starts runs nothing.
            ended = self._groups.pop(effect.ticket)
            del ended.task  # its cancellation has a traceback, and so the group
            self.host.notify_change()

        group = FormedGroup(self, effect, effect.ticket, effect.members)
        group.task = self.host.start(self._average(group))
        self._groups[effect.ticket] = group
        group.task.add_done_callback(over)

    def handle(self, effect: Abandon | Break | Resolve) -> None:
        """The machine has decided something about an average that may still run."""
        group = self._groups.get(effect.ticket.root)
        if group and not group.is_committing:  # then there is no way back
            self._groups[effect.ticket.root] = group.handle(effect)

    async def accept(self, opening: AverageOpening, stream: ChunkStream) -> None:
        """A member's stream has come, perhaps before the word that forms its group.

        Returns when it has been served.

        Raises:
            RefusedError: if we are not in that group, or too many streams wait for theirs.
        """
        host, ticket = self.host, opening.ticket
        until = host.now + self.transfers.arrivals.seconds  # or for as long as we may yet be in it
        try:
            with self.parked.place(opening, stream) as place:
                while (exchange := self._exchange_of(ticket)) is None:
                    place.check()
                    # What begins after a group may come while that ends here.
                    expected = host.machine.expects(ticket) or ticket.root in self._groups
                    async with asyncio.timeout(None if expected else until - host.now):
                        await host.wait_for_change()
        except (TimeoutError, KeyError) as error:
            raise RefusedError(f"{host.name} is not in {ticket}") from error
        await exchange.accept(opening, stream)

    async def show(self, opening: AverageOpening, stream: ChunkStream) -> None:
        """A member audits another one. Raises RefusedError if we have nothing to show."""
        if self.audits is None:
            raise RefusedError(f"{self.host.name} takes part in no audits")
        await self.audits.accept(opening, stream)

    def _exchange_of(self, ticket: Ticket) -> Exchange | None:
        """That of this attempt, once there is one. Raises KeyError if there will be none."""
        if self.overlap and (begun := self.overlap.exchange_of(ticket)):
            return begun
        if self.host.machine.is_over(ticket):
            raise KeyError(ticket)
        group = self._groups.get(ticket.root)
        return group.exchange if group and group.ticket == ticket else None

    async def _average(self, group: FormedGroup) -> None:
        """Carry out one `Average`: as many attempts as it takes; then tell the machine."""
        self.asked_at.pop(group.ticket, None)
        states_bytes = self.host.state_transfer.sent_bytes
        try:
            while following := await group.run():
                group = following
        finally:
            self.pending.give_back()
        if not group.is_abandoned:
            beside_bytes = self.host.state_transfer.sent_bytes - states_bytes
            self.host.over(self._on_the_link(group.ending, beside_bytes))

    def _on_the_link(self, ending: AverageEnded, beside_bytes: int) -> AverageEnded:
        """With all that the link carried meanwhile: a link that serves a newcomer is not slower."""
        moved_bytes = ending.moved_bytes and ending.moved_bytes + beside_bytes
        return replace(ending, moved_bytes=moved_bytes * self.host.environment.stands_for)

    def contribution(self, purpose: Purpose) -> Contribution:
        """What this peer states beside its vectors when it grants or offers its slot.

        Each call for stale gradients promises all that is held: call it once per grant or offer.
        """
        agreed, membership = self.agreed, self.host.machine.membership
        if purpose.what in WHOLE_MODELS:
            weight = 0 if purpose.what is What.CONSENSUS and self._only_served() else MODEL.weight
            return replace(MODEL, weight=weight, progress=self.host.shared_progress)
        if purpose.what is What.PSEUDO_GRADIENTS and self.outer:
            stated = self.outer.state(purpose, membership.me.samples)
            return replace(stated, progress=self.host.shared_progress)
        if purpose.what is What.STALE_GRADIENTS:
            own, before = self.pending.promise(), agreed.samples_before
        else:
            of_step = agreed.samples_of_step
            weight = of_step if agreed.contributes else 0
            mask = self.replica.gradient_mask() if weight else b""
            mask = union((mask, self.residual.mask))
            own = Contribution(weight=weight, usual=of_step, samples=of_step, gradient_mask=mask)
            own = replace(own, rule=self.host.contract.state_rule(), speed=self.host.batches.speed)
            if self.overlap:
                own = replace(own, begun=self.overlap.stated, together=self.overlap.wish)
            before = membership.me.samples
        checkpoints = self.host.checkpoints
        return replace(
            own,
            samples=before + own.samples,
            wants_to_end=agreed.wants_to_end,
            wants_checkpoint=checkpoints is not None and checkpoints.wants_one(),
            writes_checkpoint=checkpoints is not None and checkpoints.is_writing(),
            progress=agreed.progress,
        )

    def _only_served(self) -> bool:
        """Whether this peer only serves, and another one that is here has trained."""
        membership = self.host.machine.membership
        if self.host.config.trains:
            return False
        here = (membership.member(peer) for peer in membership.alive())
        return any(member is not None and member.samples for member in here)

    def shards_of(self, effect: Average, members: tuple[PeerId, ...]) -> tuple[int, ...]:
        """The weights of the members' shards in an attempt; none: equal shards."""
        if servers := self.host.algorithm.servers(members):
            return tuple(servers.count(peer) for peer in members)
        return weights_left(effect.members, effect.weights, members)

    def vote_on(
        self, purpose: Purpose, stated: Sequence[Contribution], *, gathers: bool = False
    ) -> Vote | None:
        """How a group of members that state this votes on what they contribute, if it does.

        Args:
            purpose: of the group.
            stated: by its members.
            gathers: contributed are models that become an anchor, and not pseudo-gradients.
        """
        if self.judge is None or len(stated) < LEAST_MEMBERS or purpose.what is What.CONSENSUS:
            return None
        of_gradients = purpose.what in (What.GRADIENTS, What.STALE_GRADIENTS)
        size = self.replica.gradient_size - self.replica.buffer_size
        span = purpose.span(self.replica.model_size)
        what = "anchors" if gathers else purpose.what.name
        return Vote(
            judge=self.judge,
            kind=f"{what} {span.start}:{span.stop}",
            weights=[1 if gathers else one.weight or one.usual for one in stated],
            of_models=gathers or purpose.what is What.MODELS,
            size=size if of_gradients else span.size,
            of_progress=not gathers and purpose.what is What.PSEUDO_GRADIENTS,
            only_here=gathers,
        )

    def exchange(
        self,
        ticket: Ticket,
        members: tuple[PeerId, ...],
        payload: Sequence[Bucket | Rounds],
        shards: Sequence[int],
        **more: Any,  # Any: fields of Exchange
    ) -> Exchange:
        """An exchange of this peer, which has not begun."""
        host, most_s = self.host, self.config.average_timeout_s
        more = {"most_s": most_s, "stall_s": most_s, **more}
        return Exchange(
            host.name,
            ticket,
            members,
            payload,
            buffers=self.buffers,
            slots=self.slots,
            executor=self.executor,
            swarm=host.digest,
            open_stream=host.open_stream,
            clock=lambda: host.now,
            shards=shards,
            has_servers=bool(host.algorithm.servers(members)),
            audits=self.audits,
            **more,
        )

    async def whole(self, function: Callable[[], T]) -> T:
        """Run this on the worker thread when no update is half made; of the model, if it copies."""

        def attempt() -> list[T]:
            with self.update_lock:
                half_made = self.deferred and self.deferred.is_partial
                return [] if half_made else [function()]

        while not (result := await self.executor(attempt)):
            if deferred := self.deferred:
                await deferred.until_all()
                await self.executor(deferred.make)
        return result[0]

    async def reuse_idle(self, size: int) -> None:
        """Where nothing is pending, lend that memory next: a large model has no other beside."""
        if size > SHORT and size == self.replica.model_size:
            self.buffers.give(await self.executor(self.replica.take_idle))

    async def copy(self, function: Callable[[], T]) -> T:
        """Copy gradients: no other thread wants them now, so a short copy is made here."""
        short = self.replica.gradient_size <= SHORT
        return function() if short else await self.executor(function)
