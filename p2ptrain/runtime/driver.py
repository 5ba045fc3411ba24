"""The driver: effects become I/O, endings become events. Feed, pump, re-arm.

It owns the machine (`core/peer_machine.py`) and is the only one that talks to it. Everything runs
on one event loop: the protocol's own thread for real, the virtual loop in the simulator, the same
code in both. What differs comes in as ports: the `Transport`, the `Replica`, and `offload`, which
runs a copy of a vector on a worker thread for real and inline in the simulator.
"""

import asyncio
import functools
import math
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from random import Random
from typing import Any, TypeVar, assert_never

import numpy as np

from p2ptrain.averaging.base import Algorithm, GroupResult
from p2ptrain.compute.replica import Replica, Vector
from p2ptrain.core import effects
from p2ptrain.core.effects import What
from p2ptrain.core.events import AverageEnded, Outcome, StateNotTaken, StateTaken
from p2ptrain.core.messages import Ack as AckMessage
from p2ptrain.core.messages import Member, MemberState, Phase, Ping, Rumours
from p2ptrain.core.peer_machine import PeerMachine, ProtocolConfig
from p2ptrain.core.slices import Span, slices
from p2ptrain.errors import (
    CodecError,
    P2PTrainError,
    RefusedError,
    StateError,
    TransportError,
)
from p2ptrain.ids import Address, PeerId, Seconds, Ticket
from p2ptrain.net.transport import SliceStream, Transport
from p2ptrain.net.wire import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    AverageOpening,
    Envelope,
    Hello,
    Opening,
    StateOpening,
    Welcome,
)
from p2ptrain.runtime.accounts import Accounts, Attempt
from p2ptrain.runtime.admission import cannot_reach, knock, objection, swarm_digest
from p2ptrain.runtime.buffers import Buffers
from p2ptrain.runtime.exchange import (
    ARRIVAL_S,
    Exchange,
    ExchangeConfig,
    GroupBroken,
    is_finite,
)
from p2ptrain.runtime.late import KeptMean, LateGradients
from p2ptrain.runtime.metrics import Metrics
from p2ptrain.runtime.offload import Offload

SHORT = 1 << 18
"""Copying so many numbers takes less time than a hop to the worker thread and back."""

MAX_PARKED = 64
MAX_STATE_BYTES = 1 << 36

T = TypeVar("T")


def _or_fail(method: Callable[..., None]) -> Callable[..., None]:
    """The driver's top: an unexpected error here is a bug; it ends the peer, never hangs it."""

    @functools.wraps(method)
    def guarded(self: "Driver", *args: Any, **kwargs: Any) -> None:  # Any: the method's own
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - see above
            self.fail(error)

    return guarded


class Driver:
    """Drives one peer; implements `Handler` for the transport and the verbs behind `Swarm`."""

    def __init__(
        self,
        name: PeerId,
        *,
        incarnation: int,
        algorithm: Algorithm,
        algorithm_name: str,
        replica: Replica,
        transport: Transport,
        protocol: ProtocolConfig,
        exchange: ExchangeConfig,
        rng: Random,
        offload: Offload,
        clock: Callable[[], Seconds],
        metrics: Metrics,
    ) -> None:
        self.name = name
        self.rng = rng
        self.replica = replica
        self.algorithm = algorithm
        self.metrics = metrics
        self.accounts = Accounts()
        self.progress = 0  # samples of the whole swarm, as far as we know, or as all agreed
        self.contributes = True  # false: our gradients have no say in the next average
        self.averaged_anything = True  # false: nobody's gradients had
        self.stopping = False
        self.samples_of_step = 0  # of the step whose gradients are to be averaged
        self.wants_to_end = False  # our vote; a synchronous swarm ends at one version, together
        self.agreed_to_end = False
        self.failure: BaseException | None = None  # the trainer is told where it waits, or next
        self._incarnation = incarnation
        self._algorithm_name = algorithm_name
        self._digest = swarm_digest(algorithm_name, replica.fingerprint)
        self._transport = transport
        self._protocol = protocol
        self._exchange_config = exchange
        self._offload = offload
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._deadline: Seconds = 0.0
        self._tasks: list[asyncio.Task[Any]] = []  # Any: results are not used
        self._averages: dict[Ticket, asyncio.Task[None]] = {}
        self._exchanges: dict[Ticket, Exchange] = {}
        self._committing: dict[Ticket, None] = {}  # their result is being applied: no way back
        self._parked = 0
        self._claiming = asyncio.Lock()  # one claim at a time; the next one waits
        self._buffers = Buffers(transport.vector)
        self.late = LateGradients(replica, self._buffers, self._copy)
        self.kept = KeptMean(replica, self._buffers, offload)
        self._claims: dict[Ticket, asyncio.Future[GroupResult]] = {}
        self._asked_at: dict[Ticket, Seconds] = {}
        self._version: asyncio.Future[GroupResult] | None = None
        self._news = asyncio.Event()
        self._updates_done = 0
        self._updated = asyncio.Event()

    # --- life -------------------------------------------------------------------------------------

    @property
    def now(self) -> Seconds:
        """On the clock of the loop's timers (uvloop's own `time` is cut to milliseconds)."""
        return self._clock()

    @property
    def me(self) -> Member:
        return self._machine.membership.me

    @property
    def machine(self) -> PeerMachine:
        """For those who only look."""
        return self._machine

    async def start(self) -> Address:
        """Listen. Raises ConfigError if that is not possible."""
        address = await self._transport.start(self)
        me = Member(peer=self.name, address=address, incarnation=self._incarnation)
        schedule = self.algorithm.schedule if self.algorithm.acts("schedule") else None
        self._machine = PeerMachine(me, self._protocol, self.rng, schedule)
        return address

    async def join(self, hosts: Sequence[Address], timeout_s: Seconds) -> None:
        """Ask `hosts` in turn until one lets us in.

        Raises:
            RefusedError: if one says no.
            TransportError: if none answered within `timeout_s`.
        """
        host, welcome = await knock(self._transport, hosts, self._hello(), timeout_s, self._clock)
        self._machine.learn(welcome.members, self.now, f"welcomed by {host}")
        self._machine.membership.announce()
        self._pump()

    async def wait_for_members(self, count: int, timeout_s: Seconds) -> None:
        """Wait until `count` peers are here, ourselves included, or others already train.

        Raises:
            TransportError: if they are not here within `timeout_s`; says who is.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not self._complete(count):
                    await self._wait_for_news()
        except TimeoutError as error:
            here = ", ".join((self.name, *self._machine.membership.choosable()))
            raise TransportError(
                f"{count} peers were to start together; after {timeout_s:g} s there are: {here}"
            ) from error

    async def take_over_model(self) -> PeerId | None:
        """If others already train, take the model of one of them; returns whose."""
        others = self._machine.membership.others
        donors = [m.peer for m in others if m.state is MemberState.ALIVE and m.steps]
        algorithm = self.algorithm
        copies = algorithm.averages == "models" or algorithm.acts("schedule")
        for donor in donors if copies else []:  # others catch up at their first average
            try:
                data = await self._download(donor, None)
            except (TransportError, RefusedError, CodecError, GroupBroken):
                continue
            theirs_M = np.frombuffer(data, dtype="<f4")
            if len(theirs_M) == self.replica.model_size and np.isfinite(theirs_M).all():
                own_M = np.empty(self.replica.model_size, np.float32)
                self.replica.snapshot(own_M)
                self.replica.add_delta(theirs_M - own_M)
                self.replica.settle()
                return donor
        return None

    def begin_background(self, swarm: Any) -> None:  # Any: the Swarm port, built by the caller
        """Run the algorithm's own loop beside the trainer."""
        if self.algorithm.acts("background"):
            self._start(self.algorithm.background(swarm))

    async def wait_until_all_done(self) -> None:
        """Serve the others until nobody who is here trains any more, or we are to stop."""
        while not self.stopping and any(
            peer != self.name for peer in self._machine.membership.participants()
        ):
            await self._wait_for_news()

    async def leave(self, grace_s: Seconds) -> None:
        """Let a running average end, say goodbye, close everything."""
        self.withdraw()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while self._averages:
                    await self._wait_for_news()
        self._machine.leave(self.now)
        self._pump()
        await self.close(min(1.0, grace_s))

    def kill(self) -> None:
        """Die in the middle of everything, as a killed process does (for simulated worlds)."""
        for task in (*self._tasks, *self._averages.values()):
            task.cancel()
        if self._timer:
            self._timer.cancel()

    async def close(self, grace_s: Seconds = 0.2) -> None:
        """End everything that runs; whatever is queued for others is sent within `grace_s`."""
        tasks = [*self._tasks, *self._averages.values()]
        self.kill()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._transport.close(grace_s)

    # --- what the trainer says --------------------------------------------------------------------

    @_or_fail
    def describe(self, phase: Phase, steps: int, samples: int) -> None:
        """The trainer is in `phase` and has done so much."""
        self._machine.describe(self.now, phase=phase, steps=steps, samples=samples)
        membership = self._machine.membership
        if phase is Phase.ARRIVING or self.algorithm.averages == "models":
            self.progress = membership.samples
        self._updates_done = steps
        self._updated.set()
        self._pump()

    @_or_fail
    def withdraw(self) -> None:
        """The trainer stops: whatever it waits for ends now."""
        self.stopping = True
        self._machine.withdraw(self.now)
        self._pump()

    # --- the verbs behind `Swarm` -----------------------------------------------------------------

    def choosable(self) -> tuple[PeerId, ...]:
        return self._machine.membership.choosable()

    async def average_with_any(self, candidates: Sequence[PeerId], count: int) -> GroupResult:
        async with self._claiming:
            if not self.stopping and len(candidates) >= count:
                return await self._claim(candidates, count)
            await asyncio.sleep(self._protocol.lock.resend_s)  # whoever asks on must not spin
        if self.stopping:
            return GroupResult(Outcome.WITHDRAWN, f"{self.name} stops")
        why = f"{len(candidates)} candidates for a group with {count} others"
        return GroupResult(Outcome.BUSY, why)

    async def _claim(self, candidates: Sequence[PeerId], count: int) -> GroupResult:
        ended: asyncio.Future[GroupResult] = self._loop.create_future()
        ticket = self._machine.request(candidates, count, self.now)
        self._claims[ticket] = ended
        self._asked_at[ticket] = self.now
        self._pump()
        try:
            result = await ended
        finally:
            self._claims.pop(ticket, None)
            asked_at = self._asked_at.pop(ticket, None)
        if asked_at is not None:  # the group was never formed
            attempt = Attempt(ticket, result.members, What.MODELS, asked_at, self.now)
            attempt.outcome, attempt.why = result.outcome, result.why
            self.accounts.close(attempt, self.now, self.metrics)
        return result

    async def average_gradients(self) -> GroupResult:
        self._version = self._loop.create_future()
        self._machine.arrive(self.replica.updates, self.now)
        self._pump()
        return await self._version

    async def average_at(self, version: int) -> GroupResult:
        self._version = self._loop.create_future()
        self.arrive_at(version, waits=True)
        return await self._version

    def arrive_at(self, version: int, *, waits: bool) -> None:
        self._machine.arrive_at(version, self.now, waits=waits)
        self._pump()

    async def hand_in_gradients(self) -> None:
        contributes, self.contributes = self.contributes, True
        await self.late.hand_in(self.samples_of_step, contributes=contributes)

    async def wait_for_update(self, count: int) -> int:
        while self._updates_done < count:
            self._updated.clear()
            await self._updated.wait()
        return self._updates_done

    @property
    def averages(self) -> bool:
        """True while an average runs, or winds down."""
        return bool(self._averages)

    # --- feed -------------------------------------------------------------------------------------

    @_or_fail
    def handle_message(self, envelope: Envelope) -> None:
        known = self._machine.membership.member(envelope.source)
        introduces_itself = isinstance(envelope.message, (Ping, AckMessage, Rumours))
        if envelope.swarm != self._swarm() or (known is None and not introduces_itself):
            return  # a stranger, or a peer of another swarm: nothing to answer
        if envelope.source != self.name:
            self._machine.receive(envelope.source, envelope.message, self.now)
            self._pump()

    @_or_fail
    def handle_broken(self, address: Address, why: str) -> None:
        for member in self._machine.membership.others:
            if member.address == address:
                self._machine.unreachable(member.peer, why, self.now)
        self._pump()

    def handle_identify(self) -> Hello:
        return self._hello()

    async def handle_join(self, hello: Hello) -> Welcome:
        refusal = objection(self.name, self._hello(), hello) or await cannot_reach(
            self._transport, self._machine.membership, hello.me
        )
        if refusal:
            self.metrics.record("warning", text=f"refused {hello.me.peer}: {refusal}")
            return Welcome(refusal, ())
        self._machine.learn([hello.me], self.now, "it joined here")
        self._pump()
        membership = self._machine.membership
        return Welcome("", (membership.me, *membership.others))

    async def handle_stream(self, opening: Opening, stream: SliceStream) -> None:
        if opening.swarm != self._swarm():
            raise RefusedError(f"{opening.sender} is of another swarm than {self.name}")
        match opening:
            case AverageOpening():
                exchange = await self._exchange_of(opening.ticket)
                await exchange.accept(opening, stream)
            case StateOpening():
                await self._serve_state(opening, stream)

    @_or_fail
    def _handle_timer(self) -> None:
        self._timer = None
        # A loop may fire a little early. The machine would find nothing due, and be asked again at
        # the same moment; where time is virtual, for ever.
        self._machine.handle_timer(max(self.now, self._deadline))
        self._pump()

    # --- pump, re-arm -----------------------------------------------------------------------------

    def _pump(self) -> None:
        for effect in self._machine.take_effects():
            match effect:
                case effects.Send(target=target, message=message):
                    self._send(target, message)
                case effects.Average():
                    self._start_average(effect)
                case effects.Abandon(ticket=ticket):
                    if ticket in self._averages and ticket not in self._committing:
                        self._averages[ticket].cancel(effect)
                case effects.TakeState():
                    self._start(self._take_state(effect))
                case effects.GroupEnded():
                    self._group_ended(effect)
                case effects.VersionEnded(outcome=outcome):
                    if self._version and not self._version.done():
                        self._version.set_result(GroupResult(outcome, ""))
                case effects.MemberChanged():
                    self._member_changed(effect)
                case _:
                    assert_never(effect)
        self._rearm(self._machine.next_deadline())
        self._news.set()

    def _rearm(self, deadline: Seconds | None) -> None:
        if self._timer and deadline == self._deadline:
            return  # most messages change no deadline
        if self._timer:
            self._timer.cancel()
        self._timer = None
        if deadline is not None:
            self._deadline = deadline
            self._timer = self._loop.call_at(deadline, self._handle_timer)

    def _send(self, target: PeerId, message: Any) -> None:  # Any: core's union of messages
        member = self._machine.membership.member(target)
        if member:
            self._transport.send(member.address, Envelope(self.name, self._swarm(), message))

    def _group_ended(self, effect: effects.GroupEnded) -> None:
        ended = self._claims.get(effect.ticket)
        if ended and not ended.done():
            ended.set_result(GroupResult(effect.outcome, effect.why, effect.members))

    def _member_changed(self, effect: effects.MemberChanged) -> None:
        self.metrics.record(
            "member", member=effect.peer, state=effect.state.name.lower(), why=effect.why
        )
        member = self._machine.membership.member(effect.peer)
        if member and effect.state >= MemberState.GONE:
            # Not at once: the last slices of one that leaves may be on the way.
            self._loop.call_later(ARRIVAL_S, self._forget, member)

    def _forget(self, member: Member) -> None:
        now = self._machine.membership.member(member.peer)
        if now is None or now.address != member.address or now.state >= MemberState.GONE:
            self._transport.forget(member.address)

    # --- slow work --------------------------------------------------------------------------------

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:  # Any: asyncio's own types
        self._tasks = [task for task in self._tasks if not task.done()]
        self._tasks.append(self._watched(coroutine))

    def _watched(
        self, coroutine: Coroutine[Any, Any, None]
    ) -> asyncio.Task[None]:  # Any: asyncio's
        """A task whose error is a bug, here or in an algorithm; see `_or_fail`."""
        task = self._loop.create_task(coroutine)
        task.add_done_callback(lambda t: self.fail(None if t.cancelled() else t.exception()))
        return task

    def _start_average(self, effect: effects.Average) -> None:
        def over(_: asyncio.Task[None]) -> None:
            # Here and not in the task: one that is cancelled before it starts runs nothing.
            self._averages.pop(effect.ticket, None)
            self._news.set()

        task = self._watched(self._average(effect))
        self._averages[effect.ticket] = task
        task.add_done_callback(over)

    async def _average(self, effect: effects.Average) -> None:
        """Carry out one `Average`: contribute, exchange, apply if the ticket is still held."""
        now = self.now
        asked_at = self._asked_at.pop(effect.ticket, now)
        attempt = Attempt(effect.ticket, effect.members, effect.what, asked_at, now)
        try:
            await self._end_of_older_averages(effect.ticket)
            async with asyncio.timeout(self._exchange_config.average_timeout_s):
                await self._exchange(attempt, held=effect.held)
        except GroupBroken as broken:
            attempt.outcome, attempt.why = broken.outcome, broken.why
        except TimeoutError:
            waited = self._exchange_config.average_timeout_s
            attempt.outcome, attempt.why = Outcome.LATE, f"it was not over after {waited:g} s"
        except StateError as error:
            attempt.outcome, attempt.why = Outcome.BROKEN, str(error)
            self.fail(error)
        except asyncio.CancelledError as cancelled:
            attempt.outcome, attempt.why = Outcome.LOST, "the peer left"
            for abandon in cancelled.args:  # none if it is not the machine that ended it
                attempt.outcome, attempt.why = abandon.outcome, abandon.why
            raise
        finally:
            self.late.give_back()
            self._exchanges.pop(effect.ticket, None)
            self._committing.pop(effect.ticket, None)
            self.accounts.close(attempt, self.now, self.metrics)
        self._machine.ended(AverageEnded(effect.ticket, attempt.outcome, attempt.why), self.now)
        self._pump()

    async def _end_of_older_averages(self, ticket: Ticket) -> None:
        """An abandoned average may still be winding down; it reads the same gradients."""
        averages = self._averages.items()
        older = [asyncio.shield(task) for other, task in averages if other != ticket]
        await asyncio.gather(*older, return_exceptions=True)

    async def _exchange(self, attempt: Attempt, *, held: bool) -> None:
        ticket, what = attempt.ticket, attempt.what
        began, version = self.now, self._machine.activation.version_of(ticket)
        vector_V, updates = await self._contribution(what, attempt.members)
        attempt.snapshot_s = self.now - began
        result_V = self._buffers.take(len(vector_V))
        attempt.exchange = exchange = Exchange(
            self.name,
            ticket,
            attempt.members,
            vector_V,
            result_V,
            delta=what is What.MODELS and not held,
            slice_size=self._exchange_config.slice_kib * 256,
            swarm=self._swarm(),
            clock=self._clock,
            arrival_s=ARRIVAL_S if version is None else self._exchange_config.average_timeout_s,
        )
        self._exchanges[ticket] = exchange
        self._news.set()
        await exchange.run(self._open)
        if not self._machine.holds(ticket, self.now):
            raise GroupBroken(Outcome.LATE, f"{ticket} was over before its result was there")
        self._committing[ticket] = None
        averaged = self.now
        idle = [vector_V, result_V]
        if what is What.GRADIENTS:
            self.averaged_anything = await self._copy(
                lambda: self.replica.import_gradients(result_V[:-2])
            )
            self.agreed_to_end = bool(result_V[-2] > 0)
            self.progress = round(float(result_V[-1]))
            self.contributes = True
        elif what is What.LATE_GRADIENTS:
            assert version is not None
            attempt.staleness_steps = self.late.delivered(version, idle.pop())
        elif held:
            self.kept.keep(idle.pop(), len(attempt.members))
        else:
            idle[1] = await self._offload(lambda: self.replica.add_delta(result_V))
            attempt.disagreement_l2 = math.sqrt(exchange.square_sum)
            attempt.staleness_steps = self.replica.updates - updates
        attempt.apply_s = self.now - averaged
        for vector in idle:  # not after a break: streams may still read them
            self._buffers.give(vector)

    async def _contribution(self, what: What, members: tuple[PeerId, ...]) -> tuple[Vector, int]:
        """What we put into the group, copied on a worker thread, and of which update it is."""
        if what is not What.MODELS:
            # Two numbers ride along whose mean all members see alike: who wants to end, so that all
            # end after the same version, and progress, so that all follow the same schedule.
            vector_V = self._buffers.take(self.replica.gradient_size + 2)
            vector_V[-2:] = self.wants_to_end, self._progress_of(what, members)
            if what is What.LATE_GRADIENTS:
                await self.late.contribute(vector_V[:-2])
                return vector_V, self.replica.updates
            contributes = self.contributes
            await self._copy(lambda: self.replica.export_gradients(vector_V[:-2], contributes))
            return vector_V, self.replica.updates
        vector_M = self._buffers.take(self.replica.model_size)
        updates, finite = await self._offload(lambda: self._snapshot(vector_M))
        if not finite:
            raise StateError(
                f"the model of {self.name} is not finite any more after {updates} updates; "
                "lower the learning rate or clip gradients"
            )
        return vector_M, updates

    def _snapshot(self, into_M: Vector) -> tuple[int, bool]:
        return self.replica.snapshot(into_M), is_finite(into_M)

    async def _copy(self, function: Callable[[], T]) -> T:
        """Copy gradients: nobody else wants them now, so a short copy is made here and at once."""
        short = self.replica.gradient_size <= SHORT
        return function() if short else await self._offload(function)

    def _progress_of(self, what: What, members: tuple[PeerId, ...]) -> int:
        """A number whose mean over `members` is the samples of the swarm, this step's included."""
        membership = self._machine.membership
        waits = what is What.GRADIENTS
        own = membership.me.samples + self.samples_of_step if waits else self.late.samples
        known = [member for peer in members if (member := membership.member(peer))]
        outside = membership.samples - sum(member.samples for member in known)
        return len(members) * own + outside

    async def _take_state(self, effect: effects.TakeState) -> None:
        """Catch up: take over the state of one that waits ahead of us."""
        why = ""
        try:
            async with asyncio.timeout(self._exchange_config.average_timeout_s):
                state = await self._download(effect.donor, effect.version)
                await self._offload(lambda: self.replica.import_state(state))
        except (P2PTrainError, GroupBroken, TimeoutError) as error:
            why = str(error) or "it took too long"
        if not why and self.replica.updates != effect.version:
            why = f"{effect.donor} gave the state of version {self.replica.updates}"
        if why:
            text = f"could not catch up with {effect.donor} at version {effect.version}: {why}"
            self.metrics.record("warning", text=text)
            await asyncio.sleep(0.1)
            self._machine.ended(StateNotTaken(effect.version, why), self.now)
        else:
            self.contributes = False
            self._machine.ended(StateTaken(effect.version), self.now)
        self._pump()

    async def _download(self, donor: PeerId, version: int | None) -> bytes:
        stream = await self._open(donor, StateOpening(self._swarm(), self.name, version))
        await stream.finish()
        data = bytearray()
        while (payload := await stream.receive()) is not None:
            data += payload
            if len(data) > MAX_STATE_BYTES:
                stream.abort("too much")
                raise CodecError(f"{donor} sends a state of more than {MAX_STATE_BYTES} bytes")
        return bytes(data)

    async def _serve_state(self, opening: StateOpening, stream: SliceStream) -> None:
        if opening.version is None:
            vector_M = np.empty(self.replica.model_size, np.float32)
            await self._offload(lambda: self.replica.snapshot(vector_M))
            state = vector_M.tobytes()
        else:
            self._refuse_unless_waiting(opening.version)
            state = await self._offload(self.replica.export_state)
            self._refuse_unless_waiting(opening.version)
        size = self._exchange_config.slice_kib * 1024
        for span in slices(Span(0, len(state)), size):
            await stream.send(memoryview(state)[span.start : span.stop])

    def _refuse_unless_waiting(self, version: int) -> None:
        if not self._machine.rendezvous.waits_with(version):
            raise RefusedError(f"{self.name} does not stand still at version {version}")

    # --- who is who -------------------------------------------------------------------------------

    def _hello(self) -> Hello:
        return Hello(
            (PROTOCOL_MAJOR, PROTOCOL_MINOR),
            self._algorithm_name,
            self.replica.fingerprint,
            self.replica.model_size,
            self.me,
        )

    def _swarm(self) -> str:
        return self._digest

    # --- small things -----------------------------------------------------------------------------

    async def _open(self, peer: PeerId, opening: Opening) -> SliceStream:
        member = self._machine.membership.member(peer)
        if member is None:
            raise TransportError(f"{self.name} does not know where {peer} is")
        return await self._transport.open(member.address, opening)

    async def _exchange_of(self, ticket: Ticket) -> Exchange:
        """The exchange of `ticket`; a stream may come before the word that forms its group."""
        if self._parked >= MAX_PARKED:
            raise RefusedError(f"{self.name} has {MAX_PARKED} streams waiting for their groups")
        self._parked += 1
        until = self.now + ARRIVAL_S  # or for as long as another group keeps us from that one
        try:
            while ticket not in self._exchanges and not self._machine.is_over(ticket):
                expected = self._machine.expects(ticket)
                async with asyncio.timeout(None if expected else until - self.now):
                    await self._wait_for_news()
            return self._exchanges[ticket]
        except (TimeoutError, KeyError) as error:
            raise RefusedError(f"{self.name} is not in {ticket}") from error
        finally:
            self._parked -= 1

    def _complete(self, count: int) -> bool:
        membership = self._machine.membership
        return membership.anyone_has_begun or len(membership.choosable()) + 1 >= count

    async def _wait_for_news(self) -> None:
        self._news.clear()
        await self._news.wait()

    def fail(self, error: BaseException | None) -> None:
        """This peer cannot go on: the trainer gets `error` where it waits, or at its next step."""
        if error is None or self.failure:
            return
        self.failure = error
        self.stopping = True
        self.metrics.record("warning", text=f"{type(error).__name__}: {error}")
        if self._version and not self._version.done():
            self._version.set_exception(error)
        self._news.set()
