"""Change the algorithm of a running peer: the one place that does.

What the swarm works with is agreed in `core/epochs.py`. A peer follows at a boundary: its trainer
stands still (or there is none), no average of it runs, and no update is deferred. Then in one go,
on the protocol's side, the algorithm, its schedule and what depends on its declarations are
replaced, and what ran beside the trainer is cancelled and started anew.

**Nothing is lost.**

* A trainer that waits for an average which is not to be goes on with the gradients that it has: the
  new algorithm averages them, or its peer makes the update alone.
* Gradients that no mean has delivered yet (late ones, residuals) go with the next mean of
  gradients, or into the next step of this peer, where models are averaged.
* Optimizer state stays with each peer. From models to gradients of peers in step, each model is a
  lineage of its own: at the first barrier all take parameters and optimizer state of one of them
  (`core/barrier.py`). Between two algorithms of peers in step, lineages go on.
* An outer optimizer begins anew, from a peer's own model; peers with other anchors take over those
  of the first step (`runtime/outer.py`).

A change that this peer cannot carry out (an option that it does not know) ends it with that
sentence: it could not average with the others any more.
"""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from p2ptrain.averaging.base import Algorithm, known_algorithms, load_algorithm
from p2ptrain.compute.codec import PLAIN, load_codec
from p2ptrain.core.choice import Choice, choice_of
from p2ptrain.core.messages import Phase, SettingsChange
from p2ptrain.errors import CodecError, ConfigError
from p2ptrain.ids import PeerId
from p2ptrain.runtime.settings import PeerConfig

if TYPE_CHECKING:
    from p2ptrain.runtime.driver import Driver


class SettingsDue(Exception):
    """What an algorithm waits for is not to be: the swarm has other settings."""


def check_choice(config: PeerConfig, choice: Choice) -> Algorithm:
    """Build the algorithm of a choice, as this peer would have it.

    A class from elsewhere is taken only if this peer was configured with it: no message makes a
    peer import anything.

    Raises:
        ConfigError: for what is unknown, or cannot work together.
    """
    name = choice.algorithm
    if name != config.algorithm and name not in known_algorithms():
        raise ConfigError(
            f"algorithm {name!r} is not of a running swarm's choice; there are: "
            f"{', '.join(known_algorithms())}"
        )
    algorithm = load_algorithm(name, choice.options)
    load_codec(choice.codec)
    check_algorithm(config, algorithm, name, load_codec(choice.gradient_codec).name)
    return algorithm


def check_algorithm(
    config: PeerConfig, algorithm: Algorithm, name: str, gradient_codec: str
) -> None:
    """Refuse an algorithm that does not go with this peer's other settings, with ConfigError."""
    check_view(config, name, algorithm)
    if config.average_momentum and algorithm.averages == "gradients":
        raise ConfigError(
            f"average_momentum: {name} averages gradients, so that momenta are "
            "alike anyway; leave it out"
        )
    if algorithm.overlaps != "none" and gradient_codec != PLAIN:
        raise ConfigError(
            f"gradient_codec = {gradient_codec!r}: {name} with overlap sends gradients as "
            f"they are; leave one of the two out"
        )


def check_view(config: PeerConfig, name: str, algorithm: Algorithm) -> None:
    """Refuse what needs peers that know everyone where each is to know some, with ConfigError."""
    view = config.protocol.membership.view
    if view and algorithm.needs_all:
        raise ConfigError(
            f"membership view = {view}: {name} needs peers that know everyone; take view = 0, or "
            "ad_psgd on its random graph, or noloco"
        )
    if view and config.peers == 1:
        raise ConfigError(
            f"membership view = {view}: a peer that knows some of a swarm has to be told how many "
            "there are, about: set peers"
        )
    if view and config.checkpoint:
        raise ConfigError(
            f"membership view = {view}: to start again from checkpoint = {config.checkpoint!r} "
            "peers have to know everyone; leave one of the two out"
        )


def check_serves(name: str, algorithm: Algorithm, who: str = "trains = false") -> None:
    """Refuse a peer that only serves where nothing is served, with ConfigError; `who` begins it."""
    if not (algorithm.in_step or algorithm.servers((PeerId("any"),))):
        why = "averages models, and one that is not trained would hold the others back"
        if algorithm.averages == "gradients":
            why = "does not keep its peers in step, so one without samples serves no one"
        raise ConfigError(
            f"{who}: {name} {why}; take parameter_server, or an algorithm whose peers are in step"
        )


def is_stale(algorithm: Algorithm) -> bool:
    """Whether its gradients may be delivered late."""
    return algorithm.averages == "gradients" and not algorithm.in_step


class LiveSettings:
    """The settings that one peer works with; all of it on the protocol's side."""

    def __init__(self, driver: "Driver") -> None:
        self._driver = driver
        config = driver.config
        self.choice = Choice(
            config.algorithm,
            config.algorithm_options,
            config.exchange.codec,
            config.exchange.gradient_codec,
        )
        """What this peer works with."""
        self.trains = False
        """Its trainer comes to boundaries: changes wait for one."""
        self._beside: list[asyncio.Task[None]] = []
        self._begun: Algorithm | None = None  # what runs beside the trainer is of this one
        self._changing = asyncio.Lock()

    @property
    def epoch(self) -> int:
        """Of the settings that this peer works with."""
        return self._driver.machine.epochs.current.epoch

    @property
    def is_due(self) -> bool:
        """Whether the swarm has other settings than this peer."""
        return self._driver.machine.epochs.is_due

    @property
    def words(self) -> str:
        """What this peer works with, in few words; of ``auto``, also what that has chosen."""
        choice, now = self.choice, self._driver.algorithm.now
        if now:
            choice = replace(choice, options={**choice.options, "now": now})
        return str(choice)

    def propose(self, choice: Choice, why: str) -> SettingsChange:
        """Change the settings of the swarm. Raises ConfigError for a choice that cannot work."""
        driver = self._driver
        algorithm = check_choice(driver.config, choice)
        here = driver.machine.participants()
        algorithm.check_swarm(len(here))
        for peer in here:
            if peer == driver.name:
                self._check_serves(choice, algorithm)
            elif driver.swarm.only_serves(peer):
                check_serves(choice.algorithm, algorithm, f"{peer} only serves")
        change = driver.machine.propose(choice.text, why, driver.now)
        driver.pump()
        return change

    def _check_serves(self, choice: Choice, algorithm: Algorithm) -> None:
        """Refuse an algorithm that would average what this peer has not trained."""
        if not self._driver.config.trains and self._driver.me.phase is not Phase.DONE:
            check_serves(choice.algorithm, algorithm)

    def start(self, activity: Coroutine[Any, Any, None]) -> None:  # Any: asyncio's own types
        """Run an activity of the algorithm's, until that is replaced or the peer ends."""
        self._beside = [task for task in self._beside if not task.done()]
        self._beside.append(task := self._driver.start(_until_due(activity)))
        task.add_done_callback(lambda _: activity.close())  # if it was cancelled before it began

    def begin(self) -> None:
        """The trainer begins, or has another algorithm: so does what runs beside it."""
        driver = self._driver
        if self._begun is driver.algorithm:
            return
        is_change, self._begun = self._begun is not None, driver.algorithm
        if driver.algorithm.servers((driver.name,)):
            has_trained = self.trains and driver.me.phase is not Phase.DONE
            driver.parameters.begin(has_trained=is_change and has_trained)
        self.start(driver.algorithm.background(driver.swarm))

    def follow(self) -> None:
        """Other settings are known: without a trainer, change at once."""
        if not self.trains:
            self._driver.start(self._follow())

    async def _follow(self) -> None:
        await self.quiesce()
        if not self.trains:
            await self.change()

    async def quiesce(self) -> None:
        """Wait until no average of this peer runs."""
        driver = self._driver
        while (driver.averages.running or driver.pushes.running) and not driver.failure:
            await driver.wait_for_change()

    async def change(self) -> None:
        """Work with the settings of the swarm from now on; the trainer stands, nothing runs."""
        async with self._changing:
            while self.is_due and not self._driver.failure:
                change = self._driver.machine.epochs.known
                await self._change(change)

    async def _change(self, change: SettingsChange) -> None:
        driver = self._driver
        try:
            choice = choice_of(change.text)
            algorithm = check_choice(driver.config, choice)
            self._check_serves(choice, algorithm)
        except (CodecError, ConfigError) as error:
            text = f"the swarm changed to settings that {driver.name} cannot follow: {error}"
            driver.fail(ConfigError(text))
            raise driver.failure or error from error
        before, self.choice = driver.algorithm, choice
        tasks, self._beside = self._beside, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        driver.algorithm = algorithm
        config = replace(
            driver.averages.config, codec=choice.codec, gradient_codec=choice.gradient_codec
        )
        driver.averages.change(algorithm, config)
        driver.begin_pushes()
        schedule = algorithm.schedule if algorithm.acts("schedule") else None
        driver.machine.change(change, schedule, driver.now)
        self._carry_over(before, algorithm)
        driver.metrics.record(
            "settings",
            epoch=change.epoch,
            algorithm=choice.algorithm,
            settings=str(choice),
            by=change.by,
            why=change.why,
        )
        if self.trains or (driver.me.phase is Phase.DONE and algorithm.servers((driver.name,))):
            self.begin()  # one that is done serves on
        driver.pump()

    def _carry_over(self, before: Algorithm, after: Algorithm) -> None:
        driver = self._driver
        averages, agreed, replica = driver.averages, driver.agreed, driver.replica
        if not is_stale(after):
            averages.residual.hold(*averages.pending.release(replica.buffer_size))
        averages.pending.samples = driver.me.samples - agreed.samples_before
        replica.version = 0  # versions of a schedule begin anew
        if after.averages == "gradients" and not (before.in_step and after.in_step):
            model_M = np.empty(replica.model_size, np.float32)
            replica.snapshot(model_M)
            agreed.begin(model_M)
        if averages.outer and self.trains:
            averages.outer.begin(driver.me.samples)


async def _until_due(activity: Coroutine[Any, Any, None]) -> None:  # Any: asyncio's own types
    with suppress(SettingsDue):
        await activity
