"""Drive one peer's machine: effects become I/O, endings become events. Feed, pump, re-arm.

It owns the machine (`core/peer_machine.py`); only the driver and its `DriverSwarm` tell the machine
anything. Everything runs on one event loop: the protocol's own thread for real, the virtual loop in
the simulator, the same code in both. What differs comes in as ports: the `Transport`, the
`Replica`, and the `Environment` with its clock and its `CopyExecutor`.
"""

import asyncio
from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any, assert_never

from p2ptrain.averaging.base import Algorithm, GroupResult
from p2ptrain.compute.contract import Contract, Description
from p2ptrain.compute.replica import Replica, StateOwner
from p2ptrain.core import effects
from p2ptrain.core.budgets import Budgets, Rate
from p2ptrain.core.effects import Ending
from p2ptrain.core.growth import Growth
from p2ptrain.core.messages import (
    OF_ONE_EPOCH,
    Ack,
    AlgorithmMessage,
    AnyMessage,
    LedgerUpdate,
    Member,
    MembershipMessage,
    MembershipUpdates,
    MemberState,
    Phase,
    Ping,
)
from p2ptrain.core.peer_machine import PeerMachine
from p2ptrain.core.repeats import Repeats
from p2ptrain.core.transfers import ARRIVAL_S
from p2ptrain.errors import RefusedError, RemoteProtocolError, TransportError
from p2ptrain.ids import Address, PeerId, Seconds
from p2ptrain.net import wire
from p2ptrain.net.transport import ChunkStream, Transport
from p2ptrain.runtime import audits
from p2ptrain.runtime.accounts import Accounts
from p2ptrain.runtime.admission import Admissions, ask, cannot_reach, kind_of, successor
from p2ptrain.runtime.agreed_state import AgreedState
from p2ptrain.runtime.averages import Averages
from p2ptrain.runtime.batches import Batches
from p2ptrain.runtime.checkpoints import Checkpoints
from p2ptrain.runtime.consensus import Consensus
from p2ptrain.runtime.data_dealing import DataDealing
from p2ptrain.runtime.gauges import Gauges
from p2ptrain.runtime.live_settings import LiveSettings
from p2ptrain.runtime.metrics import Metrics, TeeMetrics
from p2ptrain.runtime.parameters import HANDED_ON, UPDATE, HandedOn, Parameters
from p2ptrain.runtime.protocol_log import ProtocolLog
from p2ptrain.runtime.pushes import Pushes
from p2ptrain.runtime.settings import Environment, PeerConfig
from p2ptrain.runtime.shares import SHARE, Shares
from p2ptrain.runtime.silence import Watch
from p2ptrain.runtime.state_transfer import StateTransfer
from p2ptrain.runtime.swarm import DriverSwarm
from p2ptrain.vectors import Buffers

RECORDS_OF_UNMET = Rate(0.2, 256.0)
"""Records of members that we know only from others: made-up ones must not fill the file."""


class _Feeding:
    """Tell the machine something inside; then pump.

    The driver's top: an unexpected error inside is a bug; it ends the peer, never hangs it. A class
    and not a generator: every message and every timer passes here.
    """

    def __init__(self, driver: "Driver") -> None:
        self._driver = driver

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> bool:
        if error is None:
            try:
                self._driver.pump()
            except Exception as raised:  # noqa: BLE001 - see above
                self._driver.fail(raised)
        elif isinstance(error, Exception):
            self._driver.fail(error)
        return isinstance(error, Exception)


@dataclass(eq=False, repr=False)
class Driver:
    """Drives one peer; implements `Handler` for the transport."""

    config: PeerConfig
    environment: Environment
    algorithm: Algorithm
    replica: Replica
    transport: Transport
    metrics: Metrics
    owners: Mapping[str, StateOwner] = field(default_factory=dict)
    """What the program has registered for checkpoints."""
    machine: PeerMachine = field(init=False)
    """From the moment that the peer listens."""

    def __post_init__(self) -> None:
        config, exchange = self.config, self.config.exchange
        self.name = PeerId(config.name)
        self.rng = Random(f"{config.seed}/{self.name}")
        self._log = ProtocolLog(self.name, self.environment.clock)
        self._watch = Watch(self)
        self.gauges = Gauges(self)
        self.metrics = TeeMetrics(self._watch, self.gauges, self.metrics, self._log)
        self.accounts = Accounts()
        self.agreed, self.growth = AgreedState(), Growth()
        self._beginners: set[tuple[PeerId, int]] | None = None
        """Lives of others that had not begun when this peer did, and have not since."""
        self.batches = Batches()
        self.dealing: DataDealing | None = None
        """Of this peer's data, if they are dealt."""
        self.stopping = False
        self.in_vain: Callable[[], object] = lambda: None
        """Called at a failure where none of the last averages succeeded (`silence.py`)."""
        self.failure: BaseException | None = None  # the trainer gets it where it waits, or next
        self.refused = ""  # whom we have refused last, and why
        self.contract = Contract(self.name, config, self.algorithm, self.replica, wire.PROTOCOL)
        self.digest = self.contract.digest
        """Of the swarm; every message and opening carries it."""
        self._admissions = Admissions()
        self._repeats = Repeats()
        self._records_of_unmet: Budgets[str] = Budgets(RECORDS_OF_UNMET)
        self._dialled: dict[PeerId, Address] = {}
        """Where members were called when they last changed."""
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._deadline: Seconds = 0.0
        self._tasks: list[asyncio.Task[None]] = []
        self._changed, self._stepped = asyncio.Event(), asyncio.Event()
        self._feeding = _Feeding(self)
        replica, executor = self.replica, self.environment.executor
        buffers = Buffers(self.transport.vector)
        self.averages = Averages(
            self, replica, self.agreed, config=exchange, buffers=buffers, executor=executor
        )
        self.state_transfer = StateTransfer(
            self, replica, self.agreed, config=exchange, executor=executor
        )
        self.pushes = Pushes(self)
        self.begin_pushes()
        self.swarm = DriverSwarm(self)
        self.consensus = Consensus(self)
        self.checkpoints = Checkpoints(self, self.owners) if self.config.checkpoint else None
        self.live = LiveSettings(self)

    @property
    def now(self) -> Seconds:
        """On the clock of the loop's timers (uvloop's own `time` is cut to milliseconds)."""
        return self.environment.clock()

    @property
    def me(self) -> Member:
        return self.machine.membership.me

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
        await self.transport.close(grace_s)
        self.averages.buffers.clear()

    def begin_pushes(self) -> None:
        """The algorithm begins: this peer's model has weight 1, and nothing is on its way."""
        self.shares, self.parameters, self.growth = Shares(self), Parameters(self), Growth()
        handed_on = HandedOn(self.parameters)
        self.pushes.begin({SHARE: self.shares, UPDATE: self.parameters, HANDED_ON: handed_on})

    def describe(self, phase: Phase, steps: int, samples: int) -> None:
        """The trainer is in `phase` and has done so much in this life."""
        with self._feeding:
            membership, before = self.machine.membership, self.me.samples
            samples += self.agreed.samples_before
            self.machine.describe(self.now, phase=phase, steps=steps, samples=samples)
            if phase is Phase.ARRIVING:
                self.agreed.progress = max(self.agreed.restored_progress, membership.samples)
            elif self.algorithm.averages == "models":  # as if all had done so; averages share it
                step = samples - before
                everyone = step * (1 + self._others_that_train())
                self.agreed.progress += round(everyone / self.shares.counted_weight)
                if phase is Phase.DONE:
                    self.growth.ended()
                else:
                    self.growth.trained(step, self.agreed.progress, samples, *self._surroundings())
            self._watch.look()
        self._stepped.set()

    @property
    def shared_progress(self) -> int:
        """What this peer states in averages of models: its estimate of all samples, or 0.

        0 once it has enough: its estimate is final then. If averages still lowered it, the samples
        by which it fell would be made by no peer.
        """
        known, enough = self.agreed.progress, self.config.stop.samples
        return 0 if enough and known + self.growth.correction >= enough else known

    def share_progress(self, change: int, partners: int) -> None:
        """An average of models, with so many others, has changed the estimate of all samples."""
        self.agreed.progress += change
        self.growth.averaged(
            self.agreed.progress, self.me.samples, *self._surroundings(), partners=partners
        )

    def _surroundings(self) -> tuple[int, Seconds]:
        return self._others_that_train(), self.now

    def _others_that_train(self) -> int:
        """How many others make steps while this peer makes one.

        Newcomers do not before they have loaded a model; then they begin with what all have made.
        Those that begin together with this peer do, though it has not heard so yet. One that only
        serves counts where others average with it.
        """
        membership, arriving = self.machine.membership, set[tuple[PeerId, int]]()
        if len(membership.alive()) > len(membership.choosable()):
            arriving = {
                (one.peer, one.incarnation)
                for one in membership.others
                if one.phase is Phase.ARRIVING and one.state is MemberState.ALIVE
            }
        self._beginners = arriving if self._beginners is None else self._beginners & arriving
        only_serve, are_averaged_with = 0, self.algorithm.servers((self.name,))
        if len(membership.choosable()) >= len(membership.trainees()) and not are_averaged_with:
            alive = (one for one in membership.others if one.state is MemberState.ALIVE)
            only_serve = sum(one.only_serves for one in alive)
        train = len(membership.choosable()) - only_serve + len(self._beginners)
        return membership.of_all_others(train, len(membership.reachable()))

    def count_lost(self, samples: int) -> None:
        """Count on what others have trained that are lost: no estimate of progress grows."""
        self.agreed.samples_of_lost, before = samples, self.agreed.samples_before
        self.agreed.samples_before = before + samples
        with self._feeding:
            phase, counted = self.me.phase, self.agreed.samples_before
            self.machine.describe(self.now, phase=phase, steps=0, samples=counted)
            self.machine.membership.announce()

    def move(self, address: Address) -> None:
        """Others call this peer at `address` from now on."""
        with self._feeding:
            self.machine.move(address, self.now)

    def withdraw(self) -> None:
        """The trainer stops: whatever it waits for ends now."""
        self.stopping = True
        if self.averages.overlap:
            self.averages.overlap.drop(f"{self.name} stops")
        with self._feeding:
            self.machine.withdraw(self.now)

    # --- feed -------------------------------------------------------------------------------------

    def handle_message(self, envelope: wire.Envelope) -> None:
        source, message = envelope.source, envelope.message
        introduces_itself = isinstance(message, (Ping, Ack, MembershipUpdates))
        known = self.machine.membership.member(source)
        is_stranger = known is None and not introduces_itself
        if envelope.swarm != self.digest or is_stranger or source == self.name:
            return  # a stranger, or a peer of another swarm: nothing to answer
        self._log.message("<-", source, message)
        if introduces_itself and known:
            self.transport.expect(known.address)  # it reaches us: perhaps we reach it again
        if isinstance(message, MembershipMessage):
            self._hear_of_members(envelope, message)
            return
        with self._feeding:
            if isinstance(message, OF_ONE_EPOCH) and envelope.epoch != self.live.epoch:
                pass  # of other settings than ours
            elif isinstance(message, LedgerUpdate):
                if self.dealing:
                    self.dealing.receive(source, message)
            elif not isinstance(message, AlgorithmMessage):
                self.machine.receive(source, message, self.now)
            elif self.me.phase is not Phase.ARRIVING:  # else as good as lost: we have not begun
                self._give_to_algorithm(source, message)
            self.machine.epochs.heard(source, envelope.epoch, self.now)

    def _hear_of_members(self, envelope: wire.Envelope, message: MembershipMessage) -> None:
        """As `_Feeding`; wakes those who wait only if something changed: most probes tell nothing.

        In a large swarm nearly all messages are of this kind.
        """
        machine, source, now = self.machine, envelope.source, self.now
        changes = machine.membership.changes
        try:
            machine.receive(source, message, now)
            machine.epochs.heard(source, envelope.epoch, now)
            told = self._carry_out(machine.take_effects())
        except Exception as error:  # noqa: BLE001 - the driver's top, see `_Feeding`
            self.fail(error)
            return
        if told or changes != machine.membership.changes:
            self._changed.set()

    def tell_of_push(self, source: PeerId, clock: int) -> None:
        """The algorithm hears of a share that was taken in."""
        self._give_to_algorithm(source, clock)

    def _give_to_algorithm(self, source: PeerId, said: AlgorithmMessage | int) -> None:
        """A message, or the clock of a push."""
        try:
            if isinstance(said, AlgorithmMessage):
                self.algorithm.handle_message(self.swarm, source, said)
            else:
                self.algorithm.handle_push(self.swarm, source, said)
        except RemoteProtocolError as error:
            self.warn(("ignored", source), f"ignored: {error}")
            self.accounts.messages_refused[source] += 1

    def handle_broken(self, address: Address, why: str) -> None:
        with self._feeding:
            for member in self.machine.membership.others:
                if member.address == address:
                    self.machine.unreachable(member.peer, why, self.now)

    def handle_identify(self) -> wire.Hello:
        return wire.Hello(
            wire.PROTOCOL,
            self.live.choice.algorithm,
            self.replica.fingerprint,
            self.replica.model_size,
            self.me,
            self.contract.settings,
            self.contract.rule,
            refused=self.refused,
        )

    async def rule_of(self, peer: PeerId) -> Description:
        """How `peer` makes updates; nothing if it does not answer."""
        member = self.machine.membership.member(peer)
        there = await ask(self.transport, member) if member else None
        return there.rule if there else {}

    async def handle_join(self, hello: wire.Hello) -> wire.JoinReply:
        membership, peer = self.machine.membership, hello.me.peer
        refusal = self.contract.objection(peer, hello)
        if not refusal:
            async with self._admissions.one():
                refusal = await cannot_reach(self.transport, membership, hello.me)
        if refusal:
            self.refused = f"{self.name} refused {peer}: {refusal}"
            self.warn(("refused", *kind_of(refusal, hello.me)), self.refused)
            self._forget_stranger(hello.me.address)
            return wire.JoinReply(refusal, ())
        newcomer = successor(hello.me, membership.member(peer))
        self.machine.learn([newcomer], self.now, "it joined here")
        self.pump()
        known = self.machine.epochs.known
        members = (membership.me, *membership.others)
        return wire.JoinReply("", members, known if known.epoch else None)

    async def handle_stream(self, opening: wire.Opening, stream: ChunkStream) -> None:
        if opening.swarm != self.digest:
            raise RefusedError(f"{opening.sender} is of another swarm than {self.name}")
        match opening:
            case wire.AverageOpening(bucket=kind) if kind in self.pushes.takers:
                await self.pushes.accept(opening, stream)
            case wire.AverageOpening(bucket=bucket) if bucket.startswith(audits.OF):
                await self.averages.show(opening, stream)
            case wire.AverageOpening():
                await self.averages.accept(opening, stream)
            case wire.StateOpening():
                await self.state_transfer.serve(opening, stream)

    def _handle_timer(self) -> None:
        self._timer = None
        with self._feeding:
            # A loop may fire a little early. The machine would find nothing due, and be asked again
            # at the same moment; where time is virtual, for ever.
            self.machine.handle_timer(max(self.now, self._deadline))

    def over(self, ending: Ending) -> None:
        """An effect has come to its end: tell the machine."""
        self.machine.ended(ending, self.now)
        self.pump()

    # --- pump, re-arm -----------------------------------------------------------------------------

    def pump(self) -> None:
        """Carry out what the machine has decided; due whenever it was told something."""
        self._carry_out(self.machine.take_effects())
        self._changed.set()

    def _carry_out(self, decided: Sequence[effects.Effect]) -> bool:
        """Carry these out and re-arm; returns whether there was more than messages to send."""
        told = False
        for effect in decided:
            if isinstance(effect, effects.Send):  # most of them
                self.send(effect.target, effect.message)
                continue
            told = True
            self._log.decided(effect)
            match effect:
                case effects.MemberChanged():
                    self._member_changed(effect)
                case effects.Average():
                    self.averages.start(effect)
                case effects.Abandon() | effects.Break() | effects.Resolve():
                    self.averages.handle(effect)
                case effects.TakeState():
                    self.start(self.state_transfer.catch_up(effect))
                case effects.GroupEnded(ticket=ticket, outcome=outcome, why=why, members=members):
                    self.swarm.ended(ticket, GroupResult(outcome, why, members))
                case effects.SettingsKnown():
                    self.live.follow()
                case effects.VersionEnded(outcome=outcome):
                    self.swarm.ended(None, GroupResult(outcome, ""))
                case _:
                    assert_never(effect)
        self._rearm(self.machine.next_deadline())
        return told

    def _rearm(self, deadline: Seconds | None) -> None:
        if self._timer and deadline == self._deadline:
            return  # most messages change no deadline
        if self._timer:
            self._timer.cancel()
        self._timer = None
        if deadline is not None:
            self._deadline = deadline
            self._timer = self._loop.call_at(deadline, self._handle_timer)

    def send(self, target: PeerId, message: AnyMessage) -> None:
        """Best effort; to one who is not known any more, nothing."""
        member = self.machine.membership.member(target)
        if member:
            self._log.message("->", target, message)
            envelope = wire.Envelope(self.name, self.digest, message, self.live.epoch)
            self.transport.send(member.address, envelope)

    def _member_changed(self, effect: effects.MemberChanged) -> None:
        member = self.machine.membership.member(effect.peer)
        has_moved = self._follow_address(effect.peer, member)
        if member is None and not self.machine.membership.knows_all:
            return  # one of many that we need not know
        met = self.machine.membership.has_met(effect.peer) and not has_moved
        if met or self._records_of_unmet.take(effect.peer if has_moved else "", self.now):
            state = effect.state.name.lower()
            self.metrics.record("member", member=effect.peer, state=state, why=effect.why)
        self._watch.look()
        if member and effect.state is MemberState.ALIVE:
            self.transport.expect(member.address)
        if member and effect.state >= MemberState.DEAD:
            # Not at once: the last chunks of one that leaves may be on the way.
            self._loop.call_later(ARRIVAL_S, self._forget, member)

    def _follow_address(self, peer: PeerId, member: Member | None) -> bool:
        """Whether `peer` is called at another address than before; its old one is given up."""
        before = self._dialled.pop(peer, None)
        if member and member.state < MemberState.DEAD:
            self._dialled[peer] = member.address
        if before is None or (member and before == member.address):
            return False
        self._loop.call_later(ARRIVAL_S, self._forget_stranger, before)  # not at once, as above
        return member is not None

    def _forget_stranger(self, address: Address) -> None:
        """Leave no connection to an address that is no member's: it would go on dialling."""
        if address not in self._dialled.values():
            self.transport.forget(address)

    def _forget(self, member: Member) -> None:
        now = self.machine.membership.member(member.peer)
        if now is None or now.address != member.address or now.state >= MemberState.DEAD:
            self.transport.forget(member.address)

    # --- slow work --------------------------------------------------------------------------------

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:  # Any: asyncio's
        """Run this until the peer ends; an error in it is a bug and ends it, as in `_Feeding`."""
        task = self._loop.create_task(work)
        task.add_done_callback(lambda t: self.fail(None if t.cancelled() else t.exception()))
        self._tasks = [*(other for other in self._tasks if not other.done()), task]
        return task

    async def open_stream(self, peer: PeerId, opening: wire.Opening) -> ChunkStream:
        """Raises TransportError if `peer` cannot be reached."""
        member = self.machine.membership.member(peer)
        if member is None:
            raise TransportError(f"{self.name} does not know where {peer} is")
        return await self.transport.open(member.address, opening)

    def warn(self, key: Hashable, text: str) -> None:
        """Record a warning; one that others can cause at will, once per minute and `key`."""
        if said := self._repeats.said(key, text, self.now):
            self.metrics.record("warning", text=said)

    def notify_change(self) -> None:
        """Wake all who wait for news."""
        self._changed.set()

    async def wait_for_step(self) -> None:
        """Wait until the trainer has made one more step. Messages do not end this wait."""
        self._stepped.clear()
        await self._stepped.wait()

    async def wait_for_change(self, most_s: Seconds | None = None) -> None:
        """Until anything may have changed, or so long."""
        self._changed.clear()
        if most_s is None:
            await self._changed.wait()
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                await self._changed.wait()

    def fail(self, error: BaseException | None) -> None:
        """This peer cannot go on: the trainer gets `error` where it waits, or at its next step.

        No group begins that reads gradients: a trainer that catches the error may change them.
        """
        if error is None or self.failure:
            return
        self.failure = error
        self.metrics.record("warning", text=f"{type(error).__name__}: {error}")
        self.swarm.fail(error)
        if self.averages.deferred:
            self.averages.deferred.give_up()
        self.withdraw()
