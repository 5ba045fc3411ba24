"""One world from its beginning to its end: cruel first, then healed, watched all the time."""

import asyncio
import functools
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import numpy as np

from p2ptrain.compute.replica import Vector
from p2ptrain.errors import ConfigError
from p2ptrain.ids import Seconds
from p2ptrain.sim.checkers import Auditor, Violation, partial
from p2ptrain.sim.loop import run, virtual_loop
from p2ptrain.sim.trace import Trace
from p2ptrain.sim.world import SimPeer, World
from tests.worlds.spec import Change, Spec

LEARNING_RATE = 1 / 64

LOOK_EVERY_S: Seconds = 0.05

PROGRESS_S: Seconds = 15.0
"""A healed world has so long to show progress: as long as a few averages that are broken by nothing
but their time-out, and `Spec.models_meet_s` in addition. Most take one or two seconds."""

END_S: Seconds = 25.0
"""So long may it take until nobody averages any more."""

MOST_LINES = 200_000
"""A world in which more happens does not come to rest."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of one world."""

    spec: Spec
    violations: tuple[Violation, ...]
    groups: int = 0
    partial: int = 0
    """Groups that only some members finished."""
    sources: int = 0
    """The most peers from which one peer has loaded a state."""
    virtual_s: Seconds = 0.0
    trace_tail: str = ""


def carry_out(spec: Spec, trace_path: Path | None = None) -> Verdict:
    """Run the world of `spec`. Everything follows from it, to the last message."""
    auditor, trace = Auditor(liar=spec.liar), Trace(path=trace_path)

    async def work() -> Verdict:
        world = World(
            spec.seed,
            spec.link,
            spec.protocol,
            spec.exchange,
            trace,
            watch=auditor.watch,
            checkpoint_every_s=spec.checkpoint_every_s,
        )
        await Fleet(spec, world, auditor).live()
        now = virtual_loop().now
        groups = auditor.groups.values()
        everyone = {**world.dead, **world.peers}.values()
        loaded = [record["sources"] for peer in everyone for record in peer.metrics.of("state")]
        return Verdict(
            spec,
            tuple(auditor.found),
            len(groups),
            partial(groups),
            max(map(len, loaded), default=0),
            now,
            trace.trace_tail(),
        )

    try:
        return run(work())
    finally:
        trace.close()


class Fleet:
    """The peers of one world, and what happens to them."""

    def __init__(self, spec: Spec, world: World, auditor: Auditor) -> None:
        self.spec = spec
        self.world = world
        self.auditor = auditor
        self._is_cruel = True
        self._is_over = False

    async def live(self) -> None:
        """Both phases; stops at the first violation."""
        await self._build()
        loop = asyncio.get_running_loop()
        training = loop.create_task(self.world.run(self._train))
        try:
            await self._apply(training)
            if self.spec.all_die:
                await self._start_again()
            await self._heal(training)
            await self._end(training)
        except _Found:
            return
        finally:
            for name in tuple(self.world.peers):
                self.world.crash(name)
            training.cancel()
            await asyncio.gather(training, return_exceptions=True)

    # --- phases -----------------------------------------------------------------------------------

    async def _build(self) -> None:
        chance = np.random.default_rng(self.spec.seed)
        start_M = 10 + chance.normal(size=self.spec.size).astype(np.float32)
        for name in self.spec.names:
            await self.world.add(
                name,
                self.auditor.replica(name, start_M, LEARNING_RATE),
                self.spec.algorithm,
                metrics=self.auditor.metrics(name),
                **self.spec.options,
            )
        if self.spec.options.get("sync") == "ssp":
            # As `peers = N` does: one that has not heard of the others would count alone.
            founders, count = self.world.peers.values(), len(self.world.peers)
            waits = (p.process.start(p.lifecycle.wait_for_models(count)) for p in founders)
            await asyncio.gather(*waits)

    async def _apply(self, training: asyncio.Task[None]) -> None:
        loop = virtual_loop()
        plan = asyncio.create_task(self.world.carry_out(self.spec.plan))
        changes = asyncio.create_task(self._change_settings())
        newcomers = asyncio.create_task(self._let_newcomers_join())
        try:
            while loop.now < self.spec.cruel_s or not (plan.done() and newcomers.done()):
                if loop.now > self.spec.cruel_s + PROGRESS_S:
                    self._fail("progress", f"not all is over after {PROGRESS_S:g} s")
                await self._pass_time(training)
            await plan
            await changes
            await newcomers
        finally:
            plan.cancel()
            changes.cancel()
            newcomers.cancel()

    async def _let_newcomers_join(self) -> None:
        await virtual_loop().wait(self.spec.newcomers_at_s)
        start_M = np.full(self.spec.size, 1e3, np.float32)  # which no swarm takes in
        await asyncio.gather(*(self._join(name, start_M) for name in self.spec.names_of_newcomers))

    async def _join(self, name: str, start_M: Vector) -> None:
        replica = self.auditor.replica(name, start_M, LEARNING_RATE)
        algorithm, metrics = self.spec.algorithm, self.auditor.metrics(name)
        options = self.spec.options
        await self.world.add(
            name, replica, algorithm, metrics=metrics, keeps_model=False, **options
        )

    async def _change_settings(self) -> None:
        loop, began = virtual_loop(), virtual_loop().now
        for change in self.spec.changes:
            await asyncio.sleep(max(0.0, began + change.at_s - loop.now))
            if names := sorted(self.world.peers):
                peer = self.world.peers[names[change.by % len(names)]]
                peer.process.start(self._propose(peer, change))

    async def _propose(self, peer: SimPeer, change: Change) -> None:
        with suppress(ConfigError):  # groups that are larger than the swarm
            peer.driver.live.propose(change.choice, "it is tried out")

    async def _start_again(self) -> None:
        """All are killed at once, and at least one of them comes back."""
        network, chance = self.world.network, Random(f"{self.spec.seed}/again")
        network.link = replace(network.link, loss=0.0, duplication=0.0, jitter_s=0.0)
        network.heal()
        names = sorted(self.world.peers)
        some = chance.sample(names, chance.choice((len(names), chance.randint(1, len(names)))))
        self.world.trace.note(
            virtual_loop().now, f"! all are killed; {', '.join(some)} start again"
        )
        await self.world.kill_all_and_start_again(some)

    async def _heal(self, training: asyncio.Task[None]) -> None:
        """Nothing goes wrong and nobody learns any more: wait for what has to come."""
        network, loop = self.world.network, virtual_loop()
        network.link = replace(network.link, loss=0.0, duplication=0.0, jitter_s=0.0)
        network.heal()
        self.world.trace.note(loop.now, "! the world is healed")
        since, self._is_cruel = loop.now, False
        patience_s = PROGRESS_S + self.spec.models_meet_s
        while why := self.auditor.missing(self.world, since):
            if loop.now > since + patience_s:
                self._fail("progress", f"{patience_s:.3g} s after healing {why}")
            await self._pass_time(training)

    async def _end(self, training: asyncio.Task[None]) -> None:
        """All trainers stop; then the books have to balance."""
        loop, self._is_over = virtual_loop(), True
        since = loop.now
        while not training.done():
            if loop.now > since + END_S:
                self._fail("progress", f"not all have ended {END_S:g} s after they were to")
            await self._pass_time(training)
        await training
        self.auditor.balance(self.world)

    async def _pass_time(self, training: asyncio.Task[None]) -> None:
        await asyncio.sleep(LOOK_EVERY_S)
        self.auditor.look(self.world)
        if self.world.trace.count > MOST_LINES:
            self._fail("progress", f"more than {MOST_LINES} things have happened")
        if training.done() and (error := training.exception()):
            self._fail("no peer fails", repr(error))
        if self.auditor.found:
            raise _Found

    def _fail(self, rule: str, what: str) -> None:
        self.auditor.note(rule, what)
        raise _Found

    # --- what one trainer does --------------------------------------------------------------------

    async def _train(self, peer: SimPeer) -> None:
        name = peer.driver.name
        usual_s = self.spec.usual_step_s(name)
        chance = Random(f"{self.spec.seed}/{name}/{peer.driver.me.incarnation}")
        peer.lifecycle.begin()
        while not self._is_over:
            step_s = usual_s * (1 + chance.uniform(-1, 1) * self.spec.evenness)
            await peer.pass_through(step_s, functools.partial(self._compute, peer, chance))
            await peer.boundary.step(1, None, peer.replica.descend, clip=self.spec.clip)
        await peer.boundary.end()

    def _compute(self, peer: SimPeer, chance: Random) -> None:
        gradient = chance.randrange(-8, 8) if self._is_cruel else 0
        if peer.driver.name == self.spec.liar:
            gradient *= 512
        peer.replica.gradient = np.full_like(peer.replica.live, gradient)


class _Found(Exception):
    """Something was found; nothing more is to be seen."""
