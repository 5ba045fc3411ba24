"""The boundary: the one place where the trainer meets the protocol, once per step.

`Boundary.step` is a coroutine that runs *on the trainer's side*: in the user's thread for real, in
the simulator's trainer task otherwise. It is the same loop body in both. Where the algorithm wants
the trainer to wait, it awaits `cross(...)`, which carries a coroutine over to the protocol and
brings its result back; where it does not, nothing is awaited and no thread is switched.
"""

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

import numpy as np

from p2ptrain.averaging.base import Swarm
from p2ptrain.core.messages import Phase
from p2ptrain.ids import Seconds
from p2ptrain.runtime.accounts import TrainerTotals
from p2ptrain.runtime.driver import Driver
from p2ptrain.runtime.metrics import Metrics


class Cross(Protocol):
    """Carries work from the trainer's side to the protocol's."""

    def call(self, work: Coroutine[Any, Any, Any]) -> Awaitable[Any]:  # Any: the work's result
        """Run `work` over there and wait for its result."""
        ...

    def post(self, function: Callable[[], None]) -> None:
        """Run `function` over there soon; do not wait."""
        ...


class Boundary:
    """One trainer's side of its peer."""

    def __init__(
        self,
        driver: Driver,
        swarm: Swarm,
        cross: Cross,
        metrics: Metrics,
        clock: Callable[[], Seconds],
    ) -> None:
        self._driver = driver
        self._swarm = swarm
        self._cross = cross
        self._metrics = metrics
        self._clock = clock
        self._since = clock()
        self.totals = TrainerTotals()

    def begin(self) -> None:
        """The first step begins now."""
        if self._driver.algorithm.averages == "gradients":
            model_M = np.empty(self._driver.replica.model_size, np.float32)
            self._driver.replica.snapshot(model_M)
            self._driver.agreed.begin(model_M)
        self._since = self._clock()
        self._tell(Phase.TRAINING)

    async def step(
        self, samples: int, loss: float | None, optimizer_step: Callable[[], None]
    ) -> None:
        """End one step: average gradients if the algorithm does, update, take in what others gave.

        Args:
            samples: how many this step's gradients are of.
            loss: of this step's batch, for the record.
            optimizer_step: changes the live parameters from the gradients; runs under the step
            lock.

        Raises:
            StateError: if what this trainer contributed cannot be averaged (not finite).
        """
        algorithm, driver = self._driver.algorithm, self._driver
        stale = algorithm.averages == "gradients" and not algorithm.in_step
        computed_at = self._clock()
        if driver.failure:
            raise driver.failure
        if algorithm.trainer_waits and algorithm.acts("after_backward"):
            driver.agreed.averaged_anything = False
            driver.agreed.samples_of_step = samples
            await self._cross.call(self._average_gradients(stale))
            if not driver.agreed.averaged_anything and not stale:
                if driver.stopping:
                    return  # a step that nobody averaged is not made: we would differ from the rest
                optimizer_step = _nothing  # nobody had gradients; the version counts all the same
        waited_s = self._clock() - computed_at
        if stale:
            self._take_in_pending(optimizer_step)
        else:
            driver.replica.update(optimizer_step)
        self._count(samples, loss, computed_at, waited_s)
        if algorithm.trainer_waits and algorithm.acts("after_update"):
            before = self._clock()
            await self._cross.call(algorithm.after_update(self._swarm))
            driver.replica.settle()  # the next step begins with what it waited for
            self.totals.wait_s += self._clock() - before
        self._since = self._clock()

    def end(self) -> None:
        """The trainer has stopped; the peer serves the others."""
        self._tell(Phase.DONE)

    async def _average_gradients(self, stale: bool) -> None:
        """The protocol's side; stale gradients go with the next version, exactly once."""
        if stale:
            await self._driver.hand_in_gradients()
        await self._driver.algorithm.after_backward(self._swarm)

    def _take_in_pending(self, optimizer_step: Callable[[], None]) -> None:
        """Update from all means of gradients that have come since the last boundary."""
        choose = self._driver.algorithm.take_in
        stated = self._driver.averages.pending.take_in(choose, optimizer_step)
        if stated is not None:
            self._driver.agreed.take_in(*stated)

    def _count(
        self, samples: int, loss: float | None, computed_at: Seconds, waited_s: Seconds
    ) -> None:
        compute_s = self._clock() - self._since - waited_s
        self.totals.count(samples, loss, compute_s, waited_s, self._metrics)
        self._tell(Phase.TRAINING)

    def _tell(self, phase: Phase) -> None:
        steps, samples = self.totals.steps, self.totals.samples
        self._cross.post(lambda: self._driver.describe(phase, steps, samples))


def _nothing() -> None:
    """An update that changes nothing."""
