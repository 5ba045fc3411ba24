"""DiLoCo: many local steps, then one outer step of what all have trained (arXiv 2311.08105).

Each peer trains from the same model x0 with its own optimizer, `period` updates. The mean of what
they have trained is the gradient of an *outer* optimizer, SGD with Nesterov momentum:

    d   =   mean of (x0 - x_i), weighted by samples
    m   <-  mu m + d
    x0  <-  x0 - lr (d + mu m)
    x_i <-  x0

All send 2 / `period` of a model per update, so a link that carries a model in the time of many
updates is enough. With `fragments` (Streaming DiLoCo, arXiv 2501.18512) the model has parts with
outer steps of their own, one after the other: the link is busy all the time and never for long.

* `sync = "step"`: as published. All make `period` updates and wait for each other; with `delay`
  they go on for so many updates while the mean is on its way.
* `sync = "elastic"`: no peer waits. The first that has made `period` updates (or the `quorum`, and
  a `grace_s` later) begins the outer step, and all contribute what they have trained by then. So a
  slow peer makes fewer updates between two steps, as many as its speed allows (dynamic local
  updates, arXiv 2401.09135), weighs less (as in Decoupled DiLoCo), and delays no other.

Differences from the papers, and why:

* *Delta form.* Each peer adds x0 - (what it had contributed) to its live model: what it trains
  while the mean is on its way is kept, and is part of its next pseudo-gradient. With `alpha` above
  0 a peer keeps that share of its own model, as Streaming DiLoCo does (0.5 there).
* *Nothing is late.* Contributions are taken where a trainer is, so each step has those of all. A
  peer that missed a step follows the others' x0 and m, and contributes to the next what it has
  trained (`runtime/outer.py`); a newcomer does too. Papers whose late pseudo-gradients make steps
  of their own have to delay the momentum.
* *Models that differ at first*, as where a swarm changes to DiLoCo from gossip. If no more than
  half of them are equal, their mean, as float32, becomes the model from which all make their first
  outer step; else the others follow those that are.
* *Codecs* (`gradient_codec`) apply to pseudo-gradients, with error feedback; four bits are enough.
* *Alone*, a peer makes no outer step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from p2ptrain.averaging import (
    Algorithm,
    ConfigError,
    Group,
    OuterRule,
    PeerId,
    Round,
    Rule,
    Seconds,
    Swarm,
    What,
)

LONG_S: Seconds = 1.0
"""A wait for news, at most; then it is looked again."""


class DiLoCo(Algorithm):
    averages = "models"

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """How often there is an outer step, how large it is, and who waits for it."""

        period: int = 50
        """Updates of the fastest peer between two outer steps of a number (H in the papers, 50 to
        500 there). Too small: more bytes, and little for a momentum to go by; too large: models
        drift apart."""

        fragments: int = 1
        """Parts of the model, each with outer steps of its own, in turn. More: the link is busy for
        shorter times, and more messages are sent."""

        outer_learning_rate: float = 0.7
        """Of the outer step. 1, without momentum, is the mean of models."""

        outer_momentum: float = 0.9
        """Of the outer step. Towards 1 it carries on for longer."""

        sync: Literal["elastic", "step"] = "elastic"
        """``elastic``: no peer waits. ``step``: as published, all make as many updates and wait; so
        one slow peer slows all."""

        quorum: int = 1
        """Under ``elastic``: so many peers must have made their updates. Too large: slow peers
        decide when there is an outer step."""

        grace_s: Seconds = 0
        """Under ``elastic``: how long the others may still come then."""

        delay: int = 0
        """Under ``step``: updates that are made while an outer step is on its way. Too small: the
        trainer waits for the link; too large: means are old."""

        alpha: float = 0
        """The share of its own model that a peer keeps at an outer step. Too large: models do not
        come together."""

        def __post_init__(self) -> None:
            for name in ("period", "fragments", "quorum"):
                if getattr(self, name) < 1:
                    raise ConfigError(f"diloco {name} = {getattr(self, name)} must be 1 or more")
            if self.fragments > self.period:
                raise ConfigError(
                    f"diloco fragments = {self.fragments} must be at most period = {self.period}, "
                    "or some fragment has no update of its own"
                )
            if not 0 <= self.delay < self.interval:
                raise ConfigError(
                    f"diloco delay = {self.delay} must be below period / fragments = "
                    f"{self.interval}, and 0 or more: one outer step is under way at a time"
                )
            check_outer("diloco", self.outer_learning_rate, self.outer_momentum)
            if not 0 <= self.alpha < 1:
                raise ConfigError(f"diloco alpha = {self.alpha} must be at least 0 and below 1")
            if not 0 <= self.grace_s < math.inf:
                raise ConfigError(f"diloco grace_s = {self.grace_s} must be 0 or more")

        @property
        def interval(self) -> int:
            """Updates between two outer steps, whichever fragments they are of."""
            return self.period // self.fragments

    _swarm: Swarm | None = None
    _due = 0  # the next outer step, when so many updates have been made in this life
    _under_way = False

    @property
    def trainer_waits(self) -> bool:
        return bool(self.config.sync == "step")

    @property
    def conserves_mean(self) -> bool:
        """Not by momentum."""
        return False

    @property
    def outer(self) -> OuterRule:
        config = self.config
        return OuterRule(
            learning_rate=config.outer_learning_rate,
            momentum=config.outer_momentum,
            fragments=config.fragments,
            alpha=config.alpha,
        )

    async def background(self, swarm: Swarm) -> None:
        self._swarm, self._due = swarm, self.config.interval
        while not self.trainer_waits:
            updates = await swarm.wait_for_update(self._due)
            if updates >= self._due:  # or else others have begun a step meanwhile
                await self._step(swarm, updates)

    async def after_update(self, swarm: Swarm) -> None:
        updates = await swarm.wait_for_update(0)
        self._due = self._due or self.config.interval
        if updates >= self._due and not self._under_way:
            self._under_way = True
            swarm.start(self._step(swarm, updates))
        while self._under_way and updates >= self._due - self.config.interval + self.config.delay:
            await swarm.wait_for_change(LONG_S)

    async def _step(self, swarm: Swarm, updates: int) -> None:
        self._due = updates + self.config.interval
        try:
            if len(swarm.trainees()) > 1:
                await swarm.form_at(swarm.version + 1)
        finally:
            self._under_way = False

    async def average(self, group: Group) -> None:
        if self._swarm and not self.trainer_waits:
            self._due = await self._swarm.wait_for_update(0) + self.config.interval
        await super().average(group)

    def schedule(self, version: int, peers: Sequence[PeerId], me: PeerId) -> Round:
        config, everyone = self.config, len(peers)
        waiting = everyone if config.sync == "step" else min(config.quorum, everyone)
        rule = Rule(waiting, grace_s=config.grace_s if config.sync == "elastic" else 0)
        fragment = version % config.fragments
        return Round(tuple(peers), What.PSEUDO_GRADIENTS, rule, fragment, config.fragments)

    def check_swarm(self, peers: int) -> None:
        if self.config.quorum > peers:
            raise ConfigError(
                f"diloco quorum = {self.config.quorum} is more than the {peers} peers of the "
                "swarm; make it smaller"
            )


def check_outer(algorithm: str, learning_rate: float, momentum: float) -> None:
    """Refuse what is no rate or no momentum of an outer optimizer."""
    if not 0 < learning_rate < math.inf:
        raise ConfigError(f"{algorithm} outer_learning_rate = {learning_rate} must be above 0")
    if not 0 <= momentum < 1:
        raise ConfigError(f"{algorithm} outer_momentum = {momentum} must be at least 0 and below 1")
