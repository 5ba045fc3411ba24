"""A peer's way through a swarm: it listens, joins, trains, serves the others, departs.

This is the only place that puts a peer together: a real one (`runtime/peer.py`), those of simulated
worlds (`sim/peer.py`, `sim/world.py`) and those of benchmarks. What differs comes in as ports: the
replica, the `Environment`, the transport and the metrics.

::

    listen ─► join ─► begin ──► boundary.step, step, ..., end ──► depart ──► record_end
    protocol  protocol  trainer   trainer                         protocol   trainer

Below each stands on whose side it runs: coroutines of the protocol belong on its event loop, what
is the trainer's is called where the loop of training runs (see `runtime/boundary.py`). After `join`
a peer is ready, and others average with it; one without a trainer stays there, and claims its
groups by hand through `driver.swarm`.
"""

import asyncio
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from p2ptrain.averaging.base import Algorithm, load_algorithm
from p2ptrain.compute.buckets import Buckets
from p2ptrain.compute.replica import Replica, StateOwner
from p2ptrain.compute.snapshots import SnapshotWriter
from p2ptrain.core.data_ledger import MOST_CLOSED, DataPlan
from p2ptrain.core.messages import Member, Phase
from p2ptrain.core.partial_view import KEY_BYTES, PartialView
from p2ptrain.core.peer_machine import PeerMachine
from p2ptrain.errors import CodecError, ConfigError, TransportError
from p2ptrain.ids import Address, PeerId, Seconds
from p2ptrain.net import wire
from p2ptrain.net.transport import Transport
from p2ptrain.runtime.accounts import record_end
from p2ptrain.runtime.admission import refusals, request_join
from p2ptrain.runtime.batches import check_divides
from p2ptrain.runtime.boundary import Boundary
from p2ptrain.runtime.data_dealing import DataDealing
from p2ptrain.runtime.driver import Driver
from p2ptrain.runtime.live_settings import check_algorithm, check_serves
from p2ptrain.runtime.metrics import Metrics
from p2ptrain.runtime.settings import Environment, PeerConfig
from p2ptrain.runtime.silence import ATTEMPTS

LOOKS_AGAIN_S: Seconds = 5.0
"""Most of what a peer waits for is news; that one is gone for long is a matter of time."""


@dataclass(eq=False, repr=False)
class PeerLifecycle:
    """One life of one peer; another one under the same name is another object.

    Raises:
        ConfigError: for an unknown algorithm, an option or a relation that cannot work.
    """

    config: PeerConfig
    """The peer's; its name is not empty."""
    replica: Replica
    environment: Environment
    driver: Driver = field(init=False)
    """From `listen` on, as is the next."""
    boundary: Boundary = field(init=False)
    owners: dict[str, StateOwner] = field(default_factory=dict, init=False)
    """What the program has registered for checkpoints, by name."""

    def __post_init__(self) -> None:
        config = self.config
        algorithm = load_algorithm(config.algorithm, config.algorithm_options)
        if config.peers > 1:  # otherwise it is not known how many will come
            algorithm.check_swarm(config.peers)
        check_algorithm(config, algorithm, config.algorithm, config.exchange.gradient_codec)
        if not config.trains:
            check_serves(config.algorithm, algorithm)
        self.name = PeerId(config.name)
        self.address = Address("")
        self.began_at: Seconds | None = None
        """When the first step began."""
        self.why_stopped = ""
        self._first_algorithm = algorithm
        self.dealing: DataDealing | None = None
        self._writer: SnapshotWriter | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._leaves_by = math.inf  # a running average may last until then
        self._grace: asyncio.Timeout | None = None

    # --- what a loop asks, before the peer listens too --------------------------------------------

    @property
    def algorithm(self) -> Algorithm:
        """That the peer works with at this moment."""
        return self.driver.algorithm if self.is_listening else self._first_algorithm

    @property
    def buckets(self) -> Buckets | None:
        """What the backward pass fills, where the algorithm overlaps."""
        overlap = self.driver.averages.overlap if self.is_listening else None
        return overlap.buckets if overlap else None

    @property
    def is_listening(self) -> bool:
        """Whether there is a driver yet."""
        return hasattr(self, "driver")

    @property
    def progress(self) -> int:
        """Samples of the whole swarm so far; see `Peer.progress`."""
        if not self.is_listening:
            return 0
        membership = self.driver.machine.membership
        known, heard = self.driver.agreed.progress, membership.samples
        agreed = self.algorithm.averages == "gradients"  # in each average of them
        if agreed:
            return known
        if not membership.knows_all:
            heard = 0  # of a sample of the peers
        elif membership.me.phase is Phase.DONE and membership.others_are_done():
            return heard  # no estimate any more
        return max(known + self.driver.growth.correction, heard, self.boundary.totals.samples)

    def batch_size(self, usual: int) -> int:
        """Samples of the next step; see `Peer.batch_size`."""
        if self.is_listening and self.driver.live.epoch and not self.algorithm.in_step:
            return usual  # as the program had it when the swarm had another algorithm
        check_divides(self.config.algorithm, self.algorithm)
        return self.driver.batches.size(usual) if self.is_listening else usual

    def deal(self, plan: DataPlan) -> DataDealing:
        """Deal these data from now on; see `Peer.deal`."""
        if view := self.config.protocol.membership.view:
            raise ConfigError(
                f"membership view = {view}: to deal data peers have to know everyone; let each "
                "draw its own, or take view = 0"
            )
        if self.dealing is None:
            self.dealing = DataDealing(plan, self.name, self.environment.incarnation)
            if self.is_listening:
                self._bind(self.dealing)
        if self.dealing.plan != plan:
            raise ConfigError(
                f"{self.name} deals {self.dealing.plan} already and cannot deal {plan}, too; use "
                "one ElasticSampler for each peer"
            )
        return self.dealing

    def _bind(self, dealing: DataDealing) -> None:
        self.driver.dealing = dealing
        dealing.bind(self.driver)

    @property
    def should_stop(self) -> bool:
        """True when the run has reached its end, or somebody asked for it."""
        self.why_stopped = self.why_stopped or self._reason_to_stop()
        return bool(self.why_stopped)

    def stop(self, why: str) -> None:
        """Ask the loop to end, from any thread; a wait in a step ends."""
        self.why_stopped = self.why_stopped or why
        if self.is_listening:
            self.environment.post(self.driver.withdraw)

    @property
    def _is_over(self) -> bool:
        """Whether the run has lasted as long as it may."""
        limit_s, began_at = self.config.stop.seconds, self.began_at
        if not limit_s or began_at is None:
            return False
        return self.environment.clock() - began_at >= limit_s

    def _reason_to_stop(self) -> str:
        if not self.is_listening:
            return ""
        stop, agreed = self.config.stop, self.driver.agreed
        if stop.samples is not None and self.progress >= stop.samples:
            return f"the swarm has trained {self.progress} samples"
        if agreed.agreed_to_end:
            return "the swarm agreed to end"
        if not self.config.trains and not self.algorithm.in_step:
            return "it serves the others"
        if agreed.others_have_ended:
            return "no peer trains any more"
        if not self._is_over:
            return ""
        if self.algorithm.averages == "gradients":
            agreed.wants_to_end = True  # all will know with the next average
            return ""
        return f"{stop.seconds:g} s are over"

    def _end_if_in_vain(self) -> None:
        """Averages fail one after the other: beyond its time a trainer waits for no further one.

        Where all average in each step they end together, with an average; here there is none.
        """
        if self._is_over and self.driver.me.phase is Phase.TRAINING and not self.why_stopped:
            limit_s = self.config.stop.seconds
            self.stop(f"{limit_s:g} s are over, and none of the last {ATTEMPTS} averages succeeded")

    # --- from the first word to the last ----------------------------------------------------------

    async def listen(self, transport: Transport, metrics: Metrics) -> Address:
        """Put the parts together and open up for others; `metrics` takes the records.

        Raises ConfigError if the address to listen on is not available.
        """
        config, environment, algorithm = self.config, self.environment, self.algorithm
        driver = Driver(
            config, environment, algorithm, self.replica, transport, metrics, self.owners
        )
        driver.in_vain = self._end_if_in_vain
        self.driver, self.boundary = driver, Boundary(driver)
        resumes = await self._find_checkpoint()
        if self.dealing:
            self._bind(self.dealing)
        self.address = await transport.start(driver)
        me = Member(
            peer=self.name,
            address=self.address,
            incarnation=environment.incarnation,
            link_mbit=config.exchange.link_mbit,
            resumes=resumes[0] if resumes else 0,
            resumes_before=resumes[1:],
        )
        schedule = algorithm.schedule if algorithm.acts("schedule") else None
        driver.machine = PeerMachine(
            me,
            config.protocol,
            driver.rng,
            schedule,
            driver.averages.contribution,
            self._partial_view(),
        )
        return self.address

    def _partial_view(self) -> PartialView | None:
        """Which of the others we shall know, if we are not to know everyone."""
        config = self.config
        if not (size := config.protocol.membership.view):
            return None
        return PartialView(size, self.environment.chance.randbytes(KEY_BYTES), config.peers)

    def move(self, address: str) -> None:
        """Have others call this peer at `address` from now on, as `Peer.advertise` says.

        Raises:
            ConfigError: if it is no address, or this peer cannot be called or has not started.
        """
        name, config = self.name, self.config
        if not self.is_listening:
            raise ConfigError(
                f"{name} has not started; give it advertise = {address!r}, or call advertise later"
            )
        if config.network.dial_out:
            raise ConfigError(
                f"{name} only dials out, so it advertises no address; start it without dial_out"
            )
        try:
            there = wire.address(address)
        except CodecError as error:
            raise ConfigError(f"{name} cannot advertise {error}") from error
        if there != self.address:
            self.address = there
            self.environment.post(partial(self.driver.move, there))

    async def _find_checkpoint(self) -> tuple[int, ...]:
        """How far those are that we may go on from, the newest first.

        Raises:
            ConfigError: if there are some, and we do not go on from them.
            StateError: if it is of another model or algorithm.
        """
        checkpoints = self.driver.checkpoints
        if checkpoints and self.config.resume:
            disk = self.environment.disk or self.environment.executor
            return await disk(checkpoints.find)
        if checkpoints and checkpoints.has_any():
            raise ConfigError(
                f"checkpoint = {self.config.checkpoint!r} holds some of {self.name} already; add "
                "resume = true to go on from them, or name another folder"
            )
        return ()

    async def join(self, hosts: Sequence[str] = (), *, keeps_model: bool = False) -> None:
        """Take a place in the swarm, and its model; then this peer is ready.

        Args:
            hosts: to ask for a place; those of the configuration, if none are given.
            keeps_model: go on with the replica as it is, as after a checkpoint.

        Raises:
            RefusedError: if the others refuse this peer.
            TransportError: if none is here in time.
            StateError: if its model does not fit, or our frozen parameters are not its own.
        """
        config, environment, driver = self.config, self.environment, self.driver
        driver.metrics.record(
            "started",
            unix_s=environment.unix_clock(),
            peer=self.name,
            address=self.address,
            algorithm=config.algorithm,
            device=environment.device,
            model_size=self.replica.saved_size,
            fingerprint=self.replica.fingerprint,
        )
        if driver.checkpoints:
            driver.checkpoints.tell()
        asked = [Address(host) for host in hosts or config.join if host != self.address]
        if asked:
            await self.enter(asked, config.join_timeout_s)
        count = config.together or config.peers
        if view := config.protocol.membership.view:
            count = min(count, 1 + view)  # who knows some waits for some
        again = await self.start_again(count)
        await self.take_model(count, founds=not asked, keep=keeps_model or again)
        if again or not driver.machine.membership.trains_already():
            self.begin_after_former_versions()
        for other in driver.machine.membership.donors()[:1]:
            await driver.contract.compare_frozen(other, driver.rule_of)
        if again or not (keeps_model or driver.machine.membership.samples):
            await self.wait_for_models(count)
        if again and driver.checkpoints:
            driver.checkpoints.take_over_those_who_are_lost()
        if self.dealing:
            await self.dealing.catch_up()
        driver.metrics.record("ready", members=[self.name, *driver.machine.membership.alive()])
        if config.out and config.snapshot_every_s:
            self._writer = SnapshotWriter(
                Path(config.out) / f"{self.name}.snapshots",
                self.replica,
                driver.metrics.record,
                driver.averages.whole,
                environment.unix_clock,
                config.snapshot_every_s,
                config.snapshot_mb * 1e6,
                driver.wait_for_change if self.algorithm.in_step else None,
            )
            self._writing = asyncio.ensure_future(self._writer.repeat())

    async def enter(self, hosts: Sequence[Address], timeout_s: Seconds) -> None:
        """Ask `hosts` in turn until one lets us in; until `take_model`, refuse to join groups.

        If others remember a former life of ours, this one counts from above it, wherever our clock
        stands.
        """
        driver, machine = self.driver, self.driver.machine
        machine.has_model = False
        hello = replace(driver.handle_identify(), tensors=driver.contract.tensors)
        ask = request_join(driver.transport, hosts, hello, timeout_s, self.environment.clock)
        host, told, us, settings = await ask
        machine.outlive(us.incarnation)
        machine.learn(told, driver.now, f"admitted by {host}")
        if us.samples:  # we have been here before, and go on counting
            driver.agreed.samples_before = us.samples
            driver.describe(Phase.ARRIVING, steps=0, samples=0)
        machine.membership.announce()
        if settings:
            machine.know(settings, driver.now)
            await driver.live.change()
        driver.pump()

    async def start_again(self, count: int) -> bool:
        """Whether the swarm starts again, from checkpoints, and ours is loaded.

        Raises:
            TransportError: if fewer than `count` are here in time, and none of them trains.
        """
        checkpoints, membership = self.driver.checkpoints, self.driver.machine.membership
        if not checkpoints or not checkpoints.found:
            return False
        self.driver.machine.has_model = False
        try:
            async with asyncio.timeout(self.config.join_timeout_s):
                while len(membership.alive()) + 1 < count:
                    if membership.trains_already():
                        return False
                    await self.driver.wait_for_change()
        except TimeoutError as error:
            here = ", ".join((self.name, *membership.alive()))
            text = f"{count} peers were to start again; after {self.config.join_timeout_s:g} s "
            raise TransportError(f"{text}there are: {here}") from error
        return not membership.trains_already() and await checkpoints.start_again()

    async def take_model(
        self, count: int = 1, *, founds: bool = False, keep: bool = False
    ) -> PeerId | None:
        """Take over the state of a peer that has the model; returns whose, or None for our own.

        From then on others average with what we have: with `keep`, the model that we came with.
        """
        donor, membership = None, self.driver.machine.membership
        while not (keep or donor or await self.wait_for_members(count, founds=founds)):
            if self.algorithm.in_step and membership.samples:
                break  # we catch up at our first average
            donor = await self.driver.state_transfer.take_model()
        self.driver.describe(Phase.ARRIVING, steps=0, samples=0)  # from here on it knows progress
        self.driver.machine.has_model = True
        self.driver.averages.pending.is_newcomer = donor is not None
        return donor

    def begin_after_former_versions(self) -> None:
        """The swarm begins, perhaps again: all versions up to those of its checkpoints have run.

        For peers without a checkpoint, too: one that met the others at version 1 would make them
        wait for as many of its steps as there are between two versions.
        """
        driver, membership = self.driver, self.driver.machine.membership
        if self.algorithm.acts("schedule"):
            reach = max(member.resumes for member in (membership.me, *membership.others))
            with driver.machine.groups.at(driver.now):
                driver.machine.groups.wait_avoiding.begin_after(reach)

    async def wait_for_members(self, count: int, *, founds: bool) -> bool:
        """Wait until another peer has the model; returns true if ours is the one to begin with.

        That is the one of the first by name, once `count` are here; where it is not known how many
        start together (1), or peers know only some, that of the peer which `founds` the swarm. The
        dead are not waited for.
        """
        membership, timeout_s = self.driver.machine.membership, self.config.join_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                while not membership.donors():
                    others, first = membership.alive(), membership.participants()[0]
                    if not membership.knows_all:
                        is_ours = founds
                    else:
                        is_ours = first == self.name if count > 1 else founds or not others
                    if membership.holders():
                        is_ours = False  # a checkpoint is more than what a newcomer begins with
                    if is_ours and len(others) + 1 >= count:
                        return True
                    await self.driver.wait_for_change()
        except TimeoutError as error:
            here = ", ".join((self.name, *membership.alive()))
            why = await refusals(self.driver.transport, (membership.me, *membership.others))
            start = f"{count} peers were to start together; " * (count > 1)
            text = f"after {timeout_s:g} s there are: {here}; none of them is ready{why}"
            raise TransportError(start + text) from error
        return False

    async def wait_for_models(self, count: int) -> None:
        """Say that we have the model, and wait until all `count` have it that start together."""
        driver, membership = self.driver, self.driver.machine.membership
        participants, trainees = membership.participants, membership.trainees
        driver.describe(Phase.TRAINING, steps=0, samples=0)
        try:
            async with asyncio.timeout(self.config.join_timeout_s):
                # A suspect is missing, too: the first version would run without it.
                while len(membership.names()) + 1 < count or len(participants()) > len(trainees()):
                    if membership.samples and len(trainees()) >= count:
                        break  # only a newcomer is missing
                    await driver.wait_for_change()
        except TimeoutError:
            missing = ", ".join(sorted({*participants()} - {*trainees()})) or "some unheard of"
            text = f"begins without those that did not take the model over in time: {missing}"
            driver.metrics.record("warning", text=text)

    def begin(self) -> None:
        """The first step begins now, and the algorithm's own loop beside it."""
        self.began_at = self.environment.clock()
        self.boundary.begin()
        self.environment.post(self.driver.live.begin)

    async def depart(self, serve: bool) -> None:
        """Serve the others until they are done, if we may; say goodbye; close everything."""
        if serve:
            await self.wait_until_all_done()
        if self.driver.checkpoints:
            await self.driver.checkpoints.settle()
        await self.leave(self.config.leave_grace_s)
        await self.environment.executor(self.replica.settle)
        if self._writer:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
            await self._writer.write()

    async def wait_until_all_done(self) -> None:
        """Serve the others until no peer that is here trains any more, or we are to stop.

        Where peers do not know everyone, one that is done may not tell us, since it has forgotten
        us: so we speak to those that seem to train, and who does not know us answers.
        """
        driver, membership = self.driver, self.driver.machine.membership
        speaks_at = driver.now + LOOKS_AGAIN_S
        while not driver.stopping:
            has_ended = self._is_over or membership.others_have_ended(driver.now)
            if not membership.others_train() and (self.config.trains or has_ended):
                return
            if not membership.knows_all and driver.now >= speaks_at:
                speaks_at = driver.now + LOOKS_AGAIN_S
                membership.announce([one for one in membership.participants() if one != self.name])
                driver.pump()
            await driver.wait_for_change(LOOKS_AGAIN_S)

    async def leave(self, grace_s: Seconds) -> None:
        """Let a running average end, say goodbye, close everything.

        All of that once: who asks again while it goes on (Ctrl-C) waits for it, and may only make
        it shorter. A gRPC server that is stopped twice at the same time is a crash.
        """
        loop = asyncio.get_running_loop()
        self._leaves_by = min(self._leaves_by, loop.time() + grace_s)
        if self._leaving is None:
            self._leaving = loop.create_task(self._leave(grace_s))
        elif self._grace:
            self._grace.reschedule(self._leaves_by)
        await asyncio.shield(self._leaving)

    async def _leave(self, grace_s: Seconds) -> None:
        driver = self.driver
        try:
            driver.withdraw()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._leaves_by) as self._grace:
                    while driver.averages.running or driver.pushes.running:
                        await driver.wait_for_change()
            self._grace = None
            driver.machine.leave(driver.now)
            driver.pump()
        finally:  # whatever else fails: what stays open would hang the next peer of this process
            await driver.close(min(1.0, grace_s))

    def kill(self) -> None:
        """Die in the middle of everything, as a killed process does (for simulated worlds)."""
        self.driver.kill()
        if self._writer:
            self._writing.cancel()

    async def abandon(self) -> None:
        """Joining failed: close whatever was opened."""
        if self.is_listening:
            await self.driver.close()

    def record_end(self, why: str) -> None:
        """The last record: totals, and a sentence."""
        data = self.dealing.counts(MOST_CLOSED) if self.dealing else None
        record_end(self.driver.metrics, self.boundary.totals, self.driver.accounts, why, data)
