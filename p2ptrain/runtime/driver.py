"""Drive one peer's machine: effects become I/O, endings become events. Feed, pump, re-arm.

It owns the machine (`core/peer_machine.py`) and is the only one that talks to it. Everything runs
on one event loop: the protocol's own thread for real, the virtual loop in the simulator, the same
code in both. What differs comes in as ports: the `Transport`, the `Replica`, and `executor`, which
runs a copy of a vector on a worker thread for real and inline in the simulator.
"""

import asyncio
import functools
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from random import Random
from typing import Any, assert_never

from p2ptrain.averaging.base import Algorithm, GroupResult, Swarm
from p2ptrain.compute.replica import Replica
from p2ptrain.core import effects
from p2ptrain.core.effects import Ending, Outcome, What
from p2ptrain.core.messages import Ack as AckMessage
from p2ptrain.core.messages import (
    AlgorithmMessage,
    Member,
    MembershipUpdates,
    MemberState,
    Message,
    Phase,
    Ping,
)
from p2ptrain.core.peer_machine import PeerMachine, ProtocolConfig
from p2ptrain.core.transfers import ARRIVAL_S
from p2ptrain.errors import RefusedError, RemoteProtocolError, TransportError
from p2ptrain.ids import Address, PeerId, Seconds, Ticket
from p2ptrain.net.transport import ChunkStream, Transport
from p2ptrain.net.wire import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    AverageOpening,
    Envelope,
    Hello,
    JoinReply,
    Opening,
    StateOpening,
)
from p2ptrain.runtime.accounts import Accounts, Attempt
from p2ptrain.runtime.admission import (
    cannot_reach,
    objection,
    request_join,
    successor,
    swarm_digest,
)
from p2ptrain.runtime.agreed_state import AgreedState
from p2ptrain.runtime.averages import Averages
from p2ptrain.runtime.buffers import Buffers
from p2ptrain.runtime.copy_executor import CopyExecutor
from p2ptrain.runtime.exchange import (
    ExchangeConfig,
)
from p2ptrain.runtime.metrics import Metrics, TeeMetrics
from p2ptrain.runtime.protocol_log import ProtocolLog
from p2ptrain.runtime.silence import Watch
from p2ptrain.runtime.state_transfer import StateTransfer


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
        executor: CopyExecutor,
        clock: Callable[[], Seconds],
        metrics: Metrics,
    ) -> None:
        self.name = name
        self.rng = rng
        self.replica = replica
        self.algorithm = algorithm
        self._log = ProtocolLog(name, clock)
        self._watch = Watch(self)
        self.metrics: Metrics = TeeMetrics(self._watch, metrics, self._log)
        self.accounts = Accounts()
        self.agreed = AgreedState()
        self.stopping = False
        self.failure: BaseException | None = None  # the trainer is told where it waits, or next
        self._incarnation = incarnation
        self._link_mbit = exchange.link_mbit
        self._algorithm_name = algorithm_name
        self._codecs = exchange.codec, exchange.gradient_codec
        self.digest = swarm_digest(algorithm_name, replica.fingerprint, *self._codecs)
        self._transport = transport
        self._protocol = protocol
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._deadline: Seconds = 0.0
        self._tasks: list[asyncio.Task[Any]] = []  # Any: results are not used
        self._claiming = asyncio.Lock()  # one claim at a time; the next one waits
        self.averages = Averages(
            self,
            replica,
            self.agreed,
            config=exchange,
            buffers=Buffers(transport.vector),
            executor=executor,
        )
        self.state_transfer = StateTransfer(
            self, replica, self.agreed, config=exchange, executor=executor
        )
        self._claims: dict[Ticket, asyncio.Future[GroupResult]] = {}
        self._version: asyncio.Future[GroupResult] | None = None
        self._swarm: Swarm | None = None
        self._changed = asyncio.Event()
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
        me = Member(
            peer=self.name,
            address=address,
            incarnation=self._incarnation,
            link_mbit=self._link_mbit,
        )
        schedule = self.algorithm.schedule if self.algorithm.acts("schedule") else None
        self._machine = PeerMachine(
            me, self._protocol, self.rng, schedule, self.averages.contribution
        )
        return address

    async def join(self, hosts: Sequence[Address], timeout_s: Seconds) -> None:
        """Ask `hosts` in turn until one lets us in.

        Until `take_model` or `keep_model` this peer refuses to join groups. If others
        remember a former life of ours, this one counts from above it, wherever our clock stands.

        Raises:
            RefusedError: if one says no, or nothing can be above what it remembers.
            TransportError: if none answered within `timeout_s`.
        """
        self._machine.has_model = False
        hello = self._hello()
        host, told, us = await request_join(self._transport, hosts, hello, timeout_s, self._clock)
        self._machine.outlive(us.incarnation)
        self._machine.learn(told, self.now, f"admitted by {host}")
        if us.samples:  # we have been here before, and go on counting
            self.agreed.samples_before = us.samples
            self.describe(Phase.ARRIVING, steps=0, samples=0)
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
                    await self.wait_for_change()
        except TimeoutError as error:
            here = ", ".join((self.name, *self._machine.membership.choosable()))
            raise TransportError(
                f"{count} peers were to start together; after {timeout_s:g} s there are: {here}"
            ) from error

    async def take_model(self) -> PeerId | None:
        """If others already train, take the model of one of them; returns whose."""
        donor = None
        if not self.algorithm.in_step:  # or we catch up at our first average
            donor = await self.state_transfer.take_model()
        self.keep_model()
        return donor

    def keep_model(self) -> None:
        """Go on with the model that we have: from now on others average with it."""
        self._machine.has_model = True

    def begin_background(self, swarm: Swarm) -> None:
        """Run the algorithm's own loop beside the trainer, and give it its messages."""
        self._swarm = swarm
        self.start_activity(self.algorithm.background(swarm))

    async def wait_until_all_done(self) -> None:
        """Serve the others until nobody who is here trains any more, or we are to stop."""
        while not self.stopping and any(
            peer != self.name for peer in self._machine.membership.participants()
        ):
            await self.wait_for_change()

    async def leave(self, grace_s: Seconds) -> None:
        """Let a running average end, say goodbye, close everything."""
        self.withdraw()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while self.averages.running:
                    await self.wait_for_change()
        self._machine.leave(self.now)
        self._pump()
        await self.close(min(1.0, grace_s))

    def kill(self) -> None:
        """Die in the middle of everything, as a killed process does (for simulated worlds)."""
        for task in (*self._tasks, *self.averages.running):
            task.cancel()
        self._watch.stop()
        if self._timer:
            self._timer.cancel()

    async def close(self, grace_s: Seconds = 0.2) -> None:
        """End everything that runs; whatever is queued for others is sent within `grace_s`."""
        tasks = [*self._tasks, *self.averages.running]
        self.kill()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._transport.close(grace_s)

    # --- what the trainer says --------------------------------------------------------------------

    @_or_fail
    def describe(self, phase: Phase, steps: int, samples: int) -> None:
        """The trainer is in `phase` and has done so much in this life."""
        samples += self.agreed.samples_before
        self._machine.describe(self.now, phase=phase, steps=steps, samples=samples)
        membership = self._machine.membership
        if phase is Phase.ARRIVING or self.algorithm.averages == "models":
            self.agreed.progress = membership.samples
        self._updates_done = steps
        self._updated.set()
        self._watch.look()
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
        self.averages.asked_at[ticket] = self.now
        self._pump()
        try:
            result = await ended
        finally:
            self._claims.pop(ticket, None)
            asked_at = self.averages.asked_at.pop(ticket, None)
        if asked_at is not None:  # the group was never formed
            attempt = Attempt(ticket, result.members, What.MODELS, asked_at, self.now)
            attempt.outcome, attempt.why = result.outcome, result.why
            self.accounts.close(attempt, self.now, self.metrics)
        return result

    async def average_gradients(self) -> GroupResult:
        self._version = self._loop.create_future()
        self._machine.arrive(self.replica.updates, self.agreed.lineage, self.now)
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
        contributes, self.agreed.contributes = self.agreed.contributes, True
        await self.averages.pending.hand_in(self.agreed.samples_of_step, contributes=contributes)

    async def wait_for_update(self, count: int) -> int:
        while self._updates_done < count:
            self._updated.clear()
            await self._updated.wait()
        return self._updates_done

    # --- feed -------------------------------------------------------------------------------------

    @_or_fail
    def handle_message(self, envelope: Envelope) -> None:
        known = self._machine.membership.member(envelope.source)
        introduces_itself = isinstance(envelope.message, (Ping, AckMessage, MembershipUpdates))
        if envelope.swarm != self.digest or (known is None and not introduces_itself):
            return  # a stranger, or a peer of another swarm: nothing to answer
        if envelope.source == self.name:
            return
        self._log.message("<-", envelope.source, envelope.message)
        if isinstance(envelope.message, AlgorithmMessage):
            self._give_to_algorithm(envelope.source, envelope.message)
        else:
            self._machine.receive(envelope.source, envelope.message, self.now)
            self._pump()

    def _give_to_algorithm(self, source: PeerId, message: AlgorithmMessage) -> None:
        if self._swarm is None:
            return  # as good as lost: we have not begun
        try:
            self.algorithm.handle_message(self._swarm, source, message)
        except RemoteProtocolError as error:
            if not self.accounts.messages_refused[source]:
                self.metrics.record("warning", text=f"ignored: {error}")
            self.accounts.messages_refused[source] += 1
        self._changed.set()

    @_or_fail
    def handle_broken(self, address: Address, why: str) -> None:
        for member in self._machine.membership.others:
            if member.address == address:
                self._machine.unreachable(member.peer, why, self.now)
        self._pump()

    def handle_identify(self) -> Hello:
        return self._hello()

    async def handle_join(self, hello: Hello) -> JoinReply:
        refusal = objection(self.name, self._hello(), hello) or await cannot_reach(
            self._transport, self._machine.membership, hello.me
        )
        if refusal:
            self.metrics.record("warning", text=f"refused {hello.me.peer}: {refusal}")
            return JoinReply(refusal, ())
        membership = self._machine.membership
        newcomer = successor(hello.me, membership.member(hello.me.peer))
        self._machine.learn([newcomer], self.now, "it joined here")
        self._pump()
        return JoinReply("", (membership.me, *membership.others))

    async def handle_stream(self, opening: Opening, stream: ChunkStream) -> None:
        if opening.swarm != self.digest:
            raise RefusedError(f"{opening.sender} is of another swarm than {self.name}")
        match opening:
            case AverageOpening():
                await self.averages.accept(opening, stream)
            case StateOpening():
                await self.state_transfer.serve(opening, stream)

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
            self._log.decided(effect)
            match effect:
                case effects.Send(target=target, message=message):
                    self.send(target, message)
                case effects.Average():
                    self.averages.start(effect)
                case effects.Abandon() | effects.Break() | effects.Resolve():
                    self.averages.handle(effect)
                case effects.TakeState():
                    self.start_activity(self.state_transfer.catch_up(effect))
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
        self._changed.set()

    def _rearm(self, deadline: Seconds | None) -> None:
        if self._timer and deadline == self._deadline:
            return  # most messages change no deadline
        if self._timer:
            self._timer.cancel()
        self._timer = None
        if deadline is not None:
            self._deadline = deadline
            self._timer = self._loop.call_at(deadline, self._handle_timer)

    def send(self, target: PeerId, message: Message | AlgorithmMessage) -> None:
        member = self._machine.membership.member(target)
        if member:
            self._log.message("->", target, message)
            self._transport.send(member.address, Envelope(self.name, self.digest, message))

    def _group_ended(self, effect: effects.GroupEnded) -> None:
        ended = self._claims.get(effect.ticket)
        if ended and not ended.done():
            ended.set_result(GroupResult(effect.outcome, effect.why, effect.members))

    def _member_changed(self, effect: effects.MemberChanged) -> None:
        self.metrics.record(
            "member", member=effect.peer, state=effect.state.name.lower(), why=effect.why
        )
        self._watch.look()
        member = self._machine.membership.member(effect.peer)
        if member and effect.state >= MemberState.DEAD:
            # Not at once: the last chunks of one that leaves may be on the way.
            self._loop.call_later(ARRIVAL_S, self._forget, member)

    def _forget(self, member: Member) -> None:
        now = self._machine.membership.member(member.peer)
        if now is None or now.address != member.address or now.state >= MemberState.DEAD:
            self._transport.forget(member.address)

    # --- slow work --------------------------------------------------------------------------------

    def start_activity(
        self, coroutine: Coroutine[Any, Any, None]
    ) -> None:  # Any: asyncio's own types
        self._tasks = [task for task in self._tasks if not task.done()]
        self._tasks.append(self.watched(coroutine))

    def watched(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:  # Any: asyncio's
        """A task whose error is a bug, here or in an algorithm; see `_or_fail`."""
        task = self._loop.create_task(coroutine)
        task.add_done_callback(lambda t: self.fail(None if t.cancelled() else t.exception()))
        return task

    # --- who is who -------------------------------------------------------------------------------

    def _hello(self) -> Hello:
        return Hello(
            (PROTOCOL_MAJOR, PROTOCOL_MINOR),
            self._algorithm_name,
            self.replica.fingerprint,
            self.replica.model_size,
            self.me,
            *self._codecs,
        )

    # --- small things -----------------------------------------------------------------------------

    async def open_stream(self, peer: PeerId, opening: Opening) -> ChunkStream:
        member = self._machine.membership.member(peer)
        if member is None:
            raise TransportError(f"{self.name} does not know where {peer} is")
        return await self._transport.open(member.address, opening)

    def heard(self, ticket: Ticket, peer: PeerId) -> None:
        self._machine.heard(ticket, peer)

    def over(self, ending: Ending) -> None:
        self._machine.ended(ending, self.now)
        self._pump()

    def _complete(self, count: int) -> bool:
        membership = self._machine.membership
        return membership.anyone_has_begun or len(membership.choosable()) + 1 >= count

    def notify_change(self) -> None:
        self._changed.set()

    async def wait_for_change(self, most_s: Seconds | None = None) -> None:
        """Raises the failure of this peer, if there is one and we wait for so long at most."""
        self._changed.clear()
        if most_s is None:
            await self._changed.wait()
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                await self._changed.wait()
        if self.failure:
            raise self.failure

    def fail(self, error: BaseException | None) -> None:
        """This peer cannot go on: the trainer gets `error` where it waits, or at its next step."""
        if error is None or self.failure:
            return
        self.failure = error
        self.stopping = True
        self.metrics.record("warning", text=f"{type(error).__name__}: {error}")
        if self._version and not self._version.done():
            self._version.set_exception(error)
        self._changed.set()
