"""The boundary: the one place where the trainer meets the protocol, once per step.

`Boundary.step` is a coroutine that runs *on the trainer's side*: in the user's thread for real, in
the simulator's trainer task otherwise. It is the same loop body in both. Where the algorithm wants
the trainer to wait, it awaits `Environment.call`, which carries a coroutine over to the protocol
and brings its result back; where it does not, nothing is awaited and no thread is switched.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np

from p2ptrain.compute.replica import no_update
from p2ptrain.core.messages import Phase
from p2ptrain.errors import ConfigError
from p2ptrain.ids import Seconds
from p2ptrain.runtime.accounts import TrainerTotals
from p2ptrain.runtime.agreed_state import union
from p2ptrain.runtime.driver import Driver
from p2ptrain.runtime.live_settings import SettingsDue, is_stale

PAUSE_S: Seconds = 0.2
"""Of a peer that only serves, after a step in which no member had samples: they have not heard yet
that all of them only serve."""

LOOKS_AGAIN_S: Seconds = 1.0
"""A peer that only serves, and serves no one, looks so often whether it should stop."""


class Boundary:
    """One trainer's side of its peer."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._since: Seconds = driver.now
        self._waited_s: Seconds = 0.0  # since then
        self.totals = TrainerTotals()

    def begin(self) -> None:
        """The first step begins now."""
        driver = self._driver
        if driver.checkpoints:
            driver.checkpoints.load_own()
        if driver.algorithm.averages == "gradients":
            model_M = np.empty(driver.replica.model_size, np.float32)
            driver.replica.snapshot(model_M)
            driver.agreed.begin(model_M)
        if driver.averages.outer:
            driver.averages.outer.begin(driver.me.samples)
        self._since = driver.now
        driver.live.trains = True
        self._tell(Phase.TRAINING)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """What is done here is the protocol's time, not the trainer's. May be nested."""
        began, waited_s = self._driver.now, self._waited_s
        try:
            yield
        finally:
            self._waited_s = waited_s + self._driver.now - began

    async def before_forward(self, index: int) -> None:
        """The forward pass is about to use the parameters of this bucket."""
        driver = self._driver
        deferred, overlap = driver.averages.deferred, driver.averages.overlap
        if deferred is None or overlap is None:
            return
        wanted = overlap.buckets.spans[index]
        if deferred.is_made_of(wanted):
            return
        if not deferred.is_here(wanted):
            with self._waiting():
                await driver.environment.call(deferred.until(wanted))
        deferred.make(wanted)

    async def finish_update(self) -> None:
        """Make what is left of the last update, once it is here."""
        deferred = self._driver.averages.deferred
        if deferred is None:
            return
        with self._waiting():
            await self._driver.environment.call(deferred.until_all())
        deferred.make()

    async def step(
        self,
        samples: int,
        loss: float | None,
        optimizer_step: Callable[[], None],
        *,
        clip: float | None = None,
        needs_all: bool = False,
    ) -> None:
        """End one step: average gradients if the algorithm does, update, take in what others gave.

        Args:
            samples: how many this step's gradients are of.
            loss: of this step's batch, for the record.
            optimizer_step: changes the live parameters from the gradients, under the step lock.
            clip: to this norm of all gradients, as `optimizer_step` does, where it is deferred.
            needs_all: of them; so it cannot be deferred.

        Raises:
            StateError: if what this trainer contributed cannot be averaged (not finite).
            ConfigError: if it would make another update than most peers in step with it.
        """
        driver, agreed = self._driver, self._driver.agreed
        await self.finish_update()
        if driver.failure:
            raise driver.failure
        if not driver.config.trains and not await self._has_to_serve(samples):
            return
        with self._waiting():
            if await self._gather(samples):
                if driver.stopping:
                    return  # a step that was not averaged is not made: we would differ
                optimizer_step = no_update  # no peer had gradients; the version counts all the same
            algorithm = driver.algorithm
            if not driver.config.trains and algorithm.averages == "models":
                optimizer_step = no_update  # there are no gradients of its own
            stale = is_stale(algorithm)
            deferred = driver.averages.deferred
            if deferred:
                deferred.clip = clip
            if deferred and needs_all:
                await driver.environment.call(deferred.until_all())
        waited_s, self._waited_s = self._waited_s, 0.0
        if deferred and needs_all:
            deferred.make_whole(optimizer_step)
        elif deferred:
            pass  # it is made behind the next forward pass
        elif not stale:
            driver.replica.update(optimizer_step)
        elif stated := driver.averages.pending.take_in(algorithm.take_in, optimizer_step):
            agreed.take_in(*stated)
        compute_s = driver.now - self._since - waited_s
        spans = driver.dealing.trained(samples) if driver.dealing else None
        self.totals.count(samples, loss, compute_s, waited_s, driver.metrics, spans)
        driver.batches.measure(samples, compute_s)
        self._tell(Phase.TRAINING)
        self._since = driver.now
        with self._waiting():  # the next step's record has it
            if algorithm.trainer_waits and algorithm.acts("after_update"):
                with suppress(SettingsDue):
                    await driver.environment.call(algorithm.after_update(driver.swarm))
                driver.replica.settle()  # the next step begins with what it waited for
            await self._maybe_change(optimizer_step)
            if driver.checkpoints and driver.checkpoints.is_due():
                await self._checkpoint()

    async def _checkpoint(self) -> None:
        """Note everything for a checkpoint; the model goes to the disk beside the next step."""
        driver = self._driver
        assert driver.checkpoints
        await self.finish_update()
        await driver.environment.call(driver.checkpoints.cut(driver.checkpoints.of_trainer()))

    async def end(self, *, well: bool = True) -> None:
        """The trainer has stopped; the peer serves the others. `well`: not by an error."""
        with self._waiting():
            await self.finish_update()
            checkpoints = self._driver.checkpoints
            if checkpoints and well and self.totals.steps and checkpoints.is_behind():
                await self._checkpoint()
        self.totals.wait_s, self._waited_s = self.totals.wait_s + self._waited_s, 0.0
        self._tell(Phase.DONE)
        live = self._driver.live
        live.trains = False
        self._driver.environment.post(lambda: live.follow() if live.is_due else None)

    async def _has_to_serve(self, samples: int) -> bool:
        """Whether others make the step that a peer without samples is in; waits a while for them.

        Raises:
            ConfigError: if the step has samples.
        """
        driver = self._driver
        if samples:
            raise ConfigError(
                f"step: samples = {samples}, and trains = false says that {driver.name} only "
                "serves; give samples = 0, or let it train"
            )
        with self._waiting():
            if await driver.environment.call(self._others_train()):
                return True
            await self._maybe_change(no_update)
        return False

    async def _others_train(self) -> bool:
        """The protocol's side."""
        driver, membership = self._driver, self._driver.machine.membership
        if not driver.agreed.anyone_trains and not driver.stopping:
            await asyncio.sleep(PAUSE_S)
        if not membership.others_train() and not driver.stopping:
            driver.agreed.others_have_ended = membership.others_have_ended(driver.now)
            if not driver.agreed.others_have_ended and not driver.live.is_due:
                await driver.wait_for_change(LOOKS_AGAIN_S)
        return membership.others_train() and not driver.stopping

    async def _gather(self, samples: int) -> bool:
        """Average the gradients of this step, if the algorithm does. True: no peer had any.

        If other settings are due before they were averaged, it is done as those have it.
        """
        driver, agreed = self._driver, self._driver.agreed
        while True:
            algorithm = driver.algorithm
            if not algorithm.in_step:
                self._add_residual(samples)
            if not (algorithm.trainer_waits and algorithm.acts("after_backward")):
                return False
            agreed.averaged_anything = False
            agreed.samples_of_step = samples
            await driver.environment.call(self._average_gradients(is_stale(algorithm)))
            if agreed.averaged_anything or is_stale(algorithm):
                return False
            if not driver.live.is_due or driver.stopping:
                return True
            await self._change()

    def _add_residual(self, samples: int) -> None:
        """What no mean has delivered goes into this peer's own step."""
        driver = self._driver
        replica, residual = driver.replica, driver.averages.residual
        if not residual.mask or not driver.agreed.contributes or samples < 1:
            return
        vector_G, size = np.empty(replica.gradient_size, np.float32), replica.buffer_size
        mask = union((replica.gradient_mask(), residual.mask))
        replica.export_gradients(vector_G, samples)
        if taken := residual.take():
            vector_G[: len(vector_G) - size] += taken[0]
        vector_G /= np.float32(samples)
        replica.import_gradients(vector_G, mask)

    async def _maybe_change(self, optimizer_step: Callable[[], None]) -> None:
        """Change to the settings of the swarm, if they are other ones; this step is over."""
        driver = self._driver
        if not driver.live.is_due or driver.stopping:
            return
        await self.finish_update()
        await driver.environment.call(driver.live.quiesce())
        if is_stale(driver.algorithm):
            take_in = driver.algorithm.take_in
            if stated := driver.averages.pending.take_in(take_in, optimizer_step):
                driver.agreed.take_in(*stated)
        driver.replica.settle()
        await self._change()

    async def _change(self) -> None:
        driver = self._driver
        await driver.environment.call(driver.live.quiesce())
        await driver.environment.call(driver.live.change())

    async def _average_gradients(self, stale: bool) -> None:
        """The protocol's side; stale gradients go with the next version, exactly once."""
        driver, agreed = self._driver, self._driver.agreed
        pending = driver.averages.pending
        if stale:
            contributes, agreed.contributes = agreed.contributes, True
            await pending.hand_in(agreed.samples_of_step, contributes=contributes)
        if overlap := driver.averages.overlap:
            await overlap.settle(agreed.samples_of_step, contributes=agreed.contributes)
        with suppress(SettingsDue):
            await driver.algorithm.after_backward(driver.swarm)
        if stale and pending.missed:
            await driver.state_transfer.take_model(pending.missed)
            pending.is_newcomer = False
        try:
            if text := await driver.contract.compare_rules(driver.replica.updates, driver.rule_of):
                driver.metrics.record("warning", text=text)
        except ConfigError as error:
            driver.fail(error)
            raise

    def _tell(self, phase: Phase) -> None:
        steps, samples = self.totals.steps, self.totals.samples
        self._driver.environment.post(lambda: self._driver.describe(phase, steps, samples))
