"""Drive one peer's machine: effects become I/O, endings become events. Feed, pump, re-arm.

It owns the machine (`core/peer_machine.py`); nobody tells the machine anything but the driver and
its `DriverSwarm`. Everything runs on one event loop: the protocol's own thread for real, the
virtual loop in the simulator, the same code in both. What differs comes in as ports: the
`Transport`, the `Replica`, and the `Environment` with its clock and its `CopyExecutor`.
"""

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from random import Random
from typing import Any, assert_never

from p2ptrain.averaging.base import Algorithm, GroupResult
from p2ptrain.compute.replica import Replica
from p2ptrain.core import effects
from p2ptrain.core.events import Ending
from p2ptrain.core.messages import (
    Ack,
    AlgorithmMessage,
    Member,
    MembershipUpdates,
    MemberState,
    Message,
    Phase,
    Ping,
)
from p2ptrain.core.peer_machine import PeerMachine
from p2ptrain.core.silence import Silence
from p2ptrain.core.transfers import ARRIVAL_S
from p2ptrain.errors import RefusedError, RemoteProtocolError, TransportError
from p2ptrain.ids import Address, PeerId, Seconds
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
from p2ptrain.runtime.accounts import Accounts
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
from p2ptrain.runtime.metrics import Metrics, TeeMetrics
from p2ptrain.runtime.protocol_log import ProtocolLog
from p2ptrain.runtime.settings import Environment, PeerConfig
from p2ptrain.runtime.state_transfer import StateTransfer
from p2ptrain.runtime.swarm import DriverSwarm
from p2ptrain.runtime.watch import Watch


class Driver:
    """Drives one peer; implements `Handler` for the transport."""

    machine: PeerMachine
    """From `listen` on."""

    def __init__(
        self,
        config: PeerConfig,
        environment: Environment,
        algorithm: Algorithm,
        replica: Replica,
        transport: Transport,
        metrics: Metrics,
    ) -> None:
        exchange, executor = config.exchange, environment.executor
        self.name = PeerId(config.name)
        self.rng = Random(f"{config.seed}/{self.name}")
        self.config = config
        self.algorithm = algorithm
        self.replica = replica
        self._log = ProtocolLog(self.name, environment.clock)
        self.metrics: Metrics = TeeMetrics(metrics, self._log)
        self.accounts = Accounts(silence=Silence(self.name))
        self.agreed = AgreedState()
        self.stopping = False
        self.failure: BaseException | None = None  # the trainer is told where it waits, or next
        self._codecs = exchange.codec, exchange.gradient_codec
        self.digest = swarm_digest(config.algorithm, replica.fingerprint, *self._codecs)
        """Of the swarm; every message and opening carries it."""
        self._environment = environment
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._deadline: Seconds = 0.0
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._watch = Watch(self)
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
        self.swarm = DriverSwarm(self)
        self._algorithm_hears = False

    # --- life -------------------------------------------------------------------------------------

    @property
    def now(self) -> Seconds:
        """On the clock of the loop's timers (uvloop's own `time` is cut to milliseconds)."""
        return self._environment.clock()

    @property
    def me(self) -> Member:
        return self.machine.membership.me

    async def listen(self) -> Address:
        """Open up for others. Raises ConfigError if that is not possible."""
        address = await self._transport.start(self)
        me = Member(
            peer=self.name,
            address=address,
            incarnation=self._environment.incarnation,
            link_mbit=self.config.exchange.link_mbit,
        )
        schedule = self.algorithm.schedule if self.algorithm.acts("schedule") else None
        self.machine = PeerMachine(
            me, self.config.protocol, self.rng, schedule, self.averages.contribution
        )
        return address

    async def join(self, hosts: Sequence[Address], timeout_s: Seconds) -> None:
        """Ask `hosts` in turn until one lets us in.

        Until `take_model` this peer refuses to join groups. If others remember a former life of
        ours, this one counts from above it, wherever our clock stands.

        Raises:
            RefusedError: if one says no, or nothing can be above what it remembers.
            TransportError: if none answered within `timeout_s`.
        """
        self.machine.has_model = False
        hello, clock = self.handle_identify(), self._environment.clock
        host, told, us = await request_join(self._transport, hosts, hello, timeout_s, clock)
        self.machine.outlive(us.incarnation)
        self.machine.learn(told, self.now, f"admitted by {host}")
        if us.samples:  # we have been here before, and go on counting
            self.agreed.samples_before = us.samples
            self.describe(Phase.ARRIVING, steps=0, samples=0)
        self.machine.membership.announce()
        self.pump()

    async def wait_for_members(self, count: int, timeout_s: Seconds) -> None:
        """Wait until `count` peers are here, ourselves included, or others already train.

        Raises:
            TransportError: if they are not here within `timeout_s`; says who is.
        """
        membership = self.machine.membership
        try:
            async with asyncio.timeout(timeout_s):
                while not membership.anyone_has_begun and len(membership.choosable()) + 1 < count:
                    await self.wait_for_change()
        except TimeoutError as error:
            here = ", ".join((self.name, *membership.choosable()))
            raise TransportError(
                f"{count} peers were to start together; after {timeout_s:g} s there are: {here}"
            ) from error

    async def take_model(self, *, keep: bool = False) -> PeerId | None:
        """If others already train, take the model of one of them; returns whose.

        From then on others average with what we have: with `keep`, the model that we came with.
        """
        donor = None
        if not keep and not self.algorithm.in_step:  # or we catch up at our first average
            donor = await self.state_transfer.take_model()
        self.machine.has_model = True
        return donor

    def begin_background(self) -> None:
        """Run the algorithm's own loop beside the trainer, and give it its messages."""
        self._algorithm_hears = True
        if self.algorithm.acts("background"):
            self.start_activity(self.algorithm.background(self.swarm))

    async def wait_until_all_done(self) -> None:
        """Serve the others until nobody who is here trains any more, or we are to stop."""
        participants = self.machine.membership.participants
        while not self.stopping and any(peer != self.name for peer in participants()):
            await self.wait_for_change()

    async def leave(self, grace_s: Seconds) -> None:
        """Let a running average end, say goodbye, close everything."""
        self.withdraw()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while self.averages.running:
                    await self.wait_for_change()
        self.machine.leave(self.now)
        self.pump()
        await self.close(min(1.0, grace_s))

    def kill(self) -> None:
        """Die in the middle of everything, as a killed process does (for simulated worlds)."""
        for task in self._tasks:
            task.cancel()
        self._watch.stop()
        if self._timer:
            self._timer.cancel()

    async def close(self, grace_s: Seconds = 0.2) -> None:
        """End everything that runs; whatever is queued for others is sent within `grace_s`."""
        self.kill()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._transport.close(grace_s)

    # --- what the trainer says --------------------------------------------------------------------

    def describe(self, phase: Phase, steps: int, samples: int) -> None:
        """The trainer is in `phase` and has done so much in this life."""
        with self._feeding():
            samples += self.agreed.samples_before
            self.machine.describe(self.now, phase=phase, steps=steps, samples=samples)
            if phase is Phase.ARRIVING or self.algorithm.averages == "models":
                self.agreed.progress = self.machine.membership.samples
            self._watch.look()

    def withdraw(self) -> None:
        """The trainer stops: whatever it waits for ends now."""
        self.stopping = True
        with self._feeding():
            self.machine.withdraw(self.now)

    # --- feed -------------------------------------------------------------------------------------

    @contextmanager
    def _feeding(self) -> Iterator[None]:
        """Tell the machine something inside; then pump.

        The driver's top: an unexpected error here is a bug; it ends the peer, never hangs it.
        """
        try:
            yield
            self.pump()
        except Exception as error:  # noqa: BLE001 - see above
            self.fail(error)

    def handle_message(self, envelope: Envelope) -> None:
        source, message = envelope.source, envelope.message
        known = self.machine.membership.member(source)
        introduces_itself = isinstance(message, (Ping, Ack, MembershipUpdates))
        if envelope.swarm != self.digest or (known is None and not introduces_itself):
            return  # a stranger, or a peer of another swarm: nothing to answer
        if source == self.name:
            return
        self._log.message("<-", source, message)
        with self._feeding():
            if isinstance(message, AlgorithmMessage):
                self._give_to_algorithm(source, message)
            else:
                self.machine.receive(source, message, self.now)

    def _give_to_algorithm(self, source: PeerId, message: AlgorithmMessage) -> None:
        if not self._algorithm_hears:
            return  # as good as lost: we have not begun
        try:
            self.algorithm.handle_message(self.swarm, source, message)
        except RemoteProtocolError as error:
            if not self.accounts.messages_refused[source]:
                self.metrics.record("warning", text=f"ignored: {error}")
            self.accounts.messages_refused[source] += 1

    def handle_broken(self, address: Address, why: str) -> None:
        with self._feeding():
            for member in self.machine.membership.others:
                if member.address == address:
                    self.machine.unreachable(member.peer, why, self.now)

    def handle_identify(self) -> Hello:
        return Hello(
            (PROTOCOL_MAJOR, PROTOCOL_MINOR),
            self.config.algorithm,
            self.replica.fingerprint,
            self.replica.model_size,
            self.me,
            *self._codecs,
        )

    async def handle_join(self, hello: Hello) -> JoinReply:
        membership = self.machine.membership
        refusal = objection(self.name, self.handle_identify(), hello) or await cannot_reach(
            self._transport, membership, hello.me
        )
        if refusal:
            self.metrics.record("warning", text=f"refused {hello.me.peer}: {refusal}")
            return JoinReply(refusal, ())
        newcomer = successor(hello.me, membership.member(hello.me.peer))
        self.machine.learn([newcomer], self.now, "it joined here")
        self.pump()
        return JoinReply("", (membership.me, *membership.others))

    async def handle_stream(self, opening: Opening, stream: ChunkStream) -> None:
        if opening.swarm != self.digest:
            raise RefusedError(f"{opening.sender} is of another swarm than {self.name}")
        match opening:
            case AverageOpening():
                await self.averages.accept(opening, stream)
            case StateOpening():
                await self.state_transfer.serve(opening, stream)

    def _handle_timer(self) -> None:
        self._timer = None
        with self._feeding():
            # A loop may fire a little early. The machine would find nothing due, and be asked again
            # at the same moment; where time is virtual, for ever.
            self.machine.handle_timer(max(self.now, self._deadline))

    def over(self, ending: Ending) -> None:
        """An effect has come to its end: the machine is told."""
        self.machine.ended(ending, self.now)
        self.pump()

    # --- pump, re-arm -----------------------------------------------------------------------------

    def pump(self) -> None:
        """Carry out what the machine has decided; due whenever it was told something."""
        for effect in self.machine.take_effects():
            self._log.decided(effect)
            match effect:
                case effects.Send(target=target, message=message):
                    self.send(target, message)
                case effects.Average():
                    self.averages.start(effect)
                case effects.Abandon():
                    self.averages.abandon(effect)
                case effects.Break():
                    self.averages.call_off(effect)
                case effects.Resolve():
                    self.averages.resolve(effect)
                case effects.TakeState():
                    self.start_activity(self.state_transfer.catch_up(effect))
                case effects.GroupEnded(ticket=ticket, outcome=outcome, why=why, members=members):
                    self.swarm.ended(ticket, GroupResult(outcome, why, members))
                case effects.VersionEnded(outcome=outcome):
                    self.swarm.ended(None, GroupResult(outcome, ""))
                case effects.MemberChanged():
                    self._member_changed(effect)
                case _:
                    assert_never(effect)
        self._rearm(self.machine.next_deadline())
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
        """Best effort; to one who is not known any more, nothing."""
        member = self.machine.membership.member(target)
        if member:
            self._log.message("->", target, message)
            self._transport.send(member.address, Envelope(self.name, self.digest, message))

    def _member_changed(self, effect: effects.MemberChanged) -> None:
        self.metrics.record(
            "member", member=effect.peer, state=effect.state.name.lower(), why=effect.why
        )
        self._watch.look()
        member = self.machine.membership.member(effect.peer)
        if member and effect.state >= MemberState.DEAD:
            # Not at once: the last chunks of one that leaves may be on the way.
            self._loop.call_later(ARRIVAL_S, self._forget, member)

    def _forget(self, member: Member) -> None:
        now = self.machine.membership.member(member.peer)
        if now is None or now.address != member.address or now.state >= MemberState.DEAD:
            self._transport.forget(member.address)

    # --- slow work --------------------------------------------------------------------------------

    def start_activity(
        self, coroutine: Coroutine[Any, Any, None]
    ) -> asyncio.Task[None]:  # Any: asyncio's own types
        """Run this beside everything else until the peer ends.

        An error in it is a bug, here or in an algorithm, and ends the peer, as in `_feeding`.
        """
        task = self._loop.create_task(coroutine)
        task.add_done_callback(lambda t: self.fail(None if t.cancelled() else t.exception()))
        self._tasks = [*(other for other in self._tasks if not other.done()), task]
        return task

    async def open_stream(self, peer: PeerId, opening: Opening) -> ChunkStream:
        """Raises TransportError if `peer` cannot be reached."""
        member = self.machine.membership.member(peer)
        if member is None:
            raise TransportError(f"{self.name} does not know where {peer} is")
        return await self._transport.open(member.address, opening)

    def notify_change(self) -> None:
        """Wake all who wait for news."""
        self._changed.set()

    async def wait_for_change(self) -> None:
        """Until anything may have changed."""
        self._changed.clear()
        await self._changed.wait()

    def fail(self, error: BaseException | None) -> None:
        """This peer cannot go on: the trainer gets `error` where it waits, or at its next step."""
        if error is None or self.failure:
            return
        self.failure = error
        self.stopping = True
        self.metrics.record("warning", text=f"{type(error).__name__}: {error}")
        self.swarm.ended(None, error)
        self._changed.set()
