"""Choose the algorithm while the swarm trains, and choose again when the fleet changes.

The swarm works with one of the other algorithms, at first ``ad_psgd fragment_s=1``: no trainer
waits, step times of all peers are known soon, and an average lasts about a second, also on a slow
link. Where peers have unlike data it is ``eager``: gradients, and no slow peer holds the others up.
Each peer that trains reports what it measures to the first such one by name:

* the mean and the spread of the computing of a step, and its samples,
* how long as many bytes as a model has take in its averages,
* how far its model is from the means of its groups, and its loss.

That peer prices all candidates for the fleet (``costs.py``): samples per second, times what a
sample teaches. If one is worth a `margin` more than the present one, it proposes that, and the
swarm changes by an epoch that all agree on (``core/epochs.py``): no group mixes two settings, and a
newcomer gets them when it joins. Each change is one sentence in the records, the log and `p2ptrain
status`. From models to synchronous gradients, all go on from the model and the optimizer state of
one peer.

**How often.** First after `LEAST_STEPS` steps, or after two if waiting for slower peers made them
as long. Then at most once in `every_s` seconds or `every_steps` steps, whichever is over first.

**What can be lost.** A report: the next one comes within seconds. The peer that decides: the next
one by name takes its place, and hears new reports. Two may decide at one moment, where views of the
membership differ: of two proposals one wins, at all peers the same. A lying member can have the
swarm choose badly; it could change the settings by hand, too.

**What it cannot see.** Whether peers have unlike data: models that train on those apart from each
other teach less than synchronous gradients do, at the same distance. Say so by `data = "unlike"`.

Sources: Sync-Switch (Li et al., ICDCS 2021) and KungFu (Mai et al., OSDI 2020) switch between
synchronous and asynchronous training; how far apart models may be is from Kong et al. (ICML 2021).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from p2ptrain.averaging import (
    Algorithm,
    AlgorithmMessage,
    Choice,
    ConfigError,
    Group,
    Measured,
    OuterRule,
    PeerId,
    Round,
    Seconds,
    Swarm,
    known_algorithms,
    load_algorithm,
    settings_of,
)
from p2ptrain.averaging.auto.costs import CANDIDATES, FIRST, Candidate, candidate_of
from p2ptrain.averaging.auto.decision import (
    LEAST_STEPS,
    LEAST_WAITED,
    Reports,
    decide,
    measured_of,
    report_of,
)

KIND = "auto"
"""Of a report."""

REPORT_S: Seconds = 1.0
"""Between two reports of a peer, after the first ones, in a swarm of up to `REPORTS_PER_S`."""

REPORTS_PER_S = 64


class Auto(Algorithm):
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """What the swarm begins with, what it may choose, and how easily it changes."""

        now: str = ""
        """What the swarm works with, in the words of `p2ptrain set`: ``diloco period=16``. It
        begins with this one; each change writes the new one here. Empty: ``ad_psgd fragment_s=1``;
        where data are unlike, ``eager``, or ``allreduce`` if it may not choose that."""

        among: str = ""
        """Names of algorithms, with commas between them: only these are chosen. Empty: any that
        ``costs.py`` lists."""

        data: Literal["alike", "unlike"] = "alike"
        """``unlike``: the peers' data differ in kind, as where each has its own. Then algorithms
        that average gradients are preferred, and the swarm begins with one. It cannot be measured.
        Where a peer only serves, or batches go by speed, name one in step (``now``, or ``among``).
        """

        rounds: bool = True
        """It may choose averages that are rounded on their way (``int8``). False: where each mean
        has to be exact."""

        margin: float = 0.15
        """A change must be worth so much more than the present settings. Too small: measurements
        that waver change the swarm to and fro; too large: it stays with what is slow."""

        every_s: Seconds = 30
        """Between two changes at least, or `every_steps`."""

        every_steps: int = 50
        """Steps of the peer that decides, between two changes at least, or `every_s`. Too small:
        changes cost more than they bring; too large: a fleet that has changed trains badly for
        long."""

        apart: float = 0.0
        """How far one update drives models apart, over their norm, when that was measured last;
        changes write it here, since it cannot be measured while all models are equal."""

        def __post_init__(self) -> None:
            unknown = set(self.names) - set(known_algorithms()) - {""}
            if unknown:
                raise ConfigError(
                    f"auto among = {self.among!r}: no algorithm {min(unknown)!r}; there are: "
                    f"{', '.join(known_algorithms())}"
                )
            if self.names and not any(one.now.split()[0] in self.names for one in CANDIDATES):
                there_are = ", ".join(dict.fromkeys(one.now.split()[0] for one in CANDIDATES))
                raise ConfigError(f"auto among = {self.among!r}: it chooses from {there_are}")
            for name in ("margin", "every_s", "every_steps", "apart"):
                if not 0 <= getattr(self, name) < 1e12:
                    raise ConfigError(f"auto {name} = {getattr(self, name)} must be 0 or more")

        @property
        def names(self) -> tuple[str, ...]:
            """Of what it may choose; none: any."""
            return tuple(name.strip() for name in self.among.split(",")) if self.among else ()

    def __init__(self, config: Any = None) -> None:  # Any: as the base has it
        super().__init__(config)
        self._now = self.config.now or self._begins()
        if self._now.split()[:1] == ["auto"]:
            raise ConfigError("auto now = 'auto' would choose itself; name another algorithm")
        self.inner = _load(self._now)
        """What the swarm trains with."""
        self.averages, self.compresses = self.inner.averages, self.inner.compresses
        self.pushes_shares = self.inner.pushes_shares
        self._reports = Reports(0.0)
        self._steps = self._begun_at = 0
        self._own: Measured | None = None
        """What this peer has reported to itself: it decides."""
        self._refused: list[Candidate] = []
        """What this swarm cannot have."""
        possible = [one.now for one in CANDIDATES if self._may_be(one)]
        kinds = (self.inner, *map(_load, possible))
        self._conserves = all(
            kind.conserves_mean and kind.averages == self.averages for kind in kinds
        )

    def _begins(self) -> str:
        """What no slow peer holds up, before it is known whether there is one."""
        if self.config.data == "alike":
            able = [one.now for one in CANDIDATES if self._is_named(one)]
            return FIRST if FIRST in able else able[0]
        return "eager" if not self.config.names or "eager" in self.config.names else "allreduce"

    def _is_named(self, candidate: Candidate) -> bool:
        return not self.config.names or candidate.now.split()[0] in self.config.names

    # --- choosing ---------------------------------------------------------------------------------

    async def background(self, swarm: Swarm) -> None:
        self._reports.since = swarm.now
        swarm.start(self._watch(swarm))
        await self.inner.background(swarm)

    async def _watch(self, swarm: Swarm) -> None:
        """Report to the peer that decides, which may be this one."""
        self._begun_at = self._steps = await swarm.wait_for_update(0)
        due, before = 0.0, swarm.now
        while True:
            self._steps = await swarm.wait_for_update(self._steps + 1)
            lasted_s, before = swarm.now - before, swarm.now
            later = swarm.now + lasted_s / 2 < due  # of all steps the one that ends nearest to then
            if self._steps - self._begun_at > LEAST_STEPS and later:
                continue
            trainers = trainers_of(swarm)
            due = swarm.now + period_of(trainers)
            measured = await swarm.measure()
            if not measured.samples:
                continue  # this peer only serves
            numbers = report_of(measured)
            if trainers[0] != swarm.me:
                swarm.tell(trainers[0], AlgorithmMessage(KIND, numbers))  # lost: see above
            elif numbers[0]:
                own, self._own = measured_of(swarm.me, numbers), measured
                self._reports.take(swarm.me, own, swarm.now, period_of(trainers))
                self._maybe_change(swarm, measured)

    def handle_message(self, swarm: Swarm, source: PeerId, message: AlgorithmMessage) -> None:
        if message.kind != KIND:
            self.inner.handle_message(swarm, source, message)
            return
        measured = measured_of(source, message.numbers)
        trainers = trainers_of(swarm)
        if trainers[0] != swarm.me or source not in trainers:
            return  # it or we have heard less of who trains; the next report goes elsewhere
        before = self._reports.fewest
        self._reports.take(source, measured, swarm.now, period_of(trainers))
        if self._own and before < LEAST_WAITED <= self._reports.fewest:
            self._maybe_change(swarm, self._own)  # this one says for whom the first steps waited

    def _maybe_change(self, swarm: Swarm, measured: Measured) -> None:
        if not self._may_change(swarm, measured.step_s):
            return
        now = candidate_of(self._now, self.inner, swarm.codecs)
        fleet = self._reports.fleet(
            trainers_of(swarm),
            swarm.now,
            now,
            self.config.apart,
            unlike=self.config.data == "unlike",
            factors=measured.factors,
        )
        if fleet is None:
            return
        rises, margin = self._reports.loss_rises(), self.config.margin
        while decision := decide(now, fleet, rises=rises, margin=margin, among=self._choosable):
            codec, gradient_codec = decision.candidate.codecs
            options = {"now": decision.candidate.now, "apart": round(decision.apart, 6)}
            choice = Choice("auto", self._set | options, codec, gradient_codec)
            try:
                swarm.change_settings(choice, decision.why)
                return
            except ConfigError:
                self._refused.append(decision.candidate)

    def _may_change(self, swarm: Swarm, step_s: Seconds) -> bool:
        """It is time for the first decision, or for another one."""
        steps, lasted_s = self._steps - self._begun_at, swarm.now - self._reports.since
        if lasted_s >= self.config.every_s or steps >= self.config.every_steps:
            return True
        waited = lasted_s >= LEAST_STEPS * step_s
        waited = waited and min(steps, self._reports.fewest) >= LEAST_WAITED
        return not swarm.settings_changes and (steps >= LEAST_STEPS or waited)

    @property
    def _choosable(self) -> Sequence[Candidate]:
        return [one for one in CANDIDATES if self._may_be(one) and one not in self._refused]

    def _may_be(self, candidate: Candidate) -> bool:
        return self._is_named(candidate) and (self.config.rounds or candidate.codec == "fp32")

    @property
    def _set(self) -> dict[str, Any]:  # Any: plain values
        """The options that are not the default ones."""
        given = {one.name: getattr(self.config, one.name) for one in fields(self.config)}
        usual = self.Config()
        return {name: value for name, value in given.items() if value != getattr(usual, name)}

    # --- training: as the one that is chosen ------------------------------------------------------

    @property
    def now(self) -> str:
        return self._now

    @property
    def trainer_waits(self) -> bool:
        return self.inner.trainer_waits

    @property
    def in_step(self) -> bool:
        return self.inner.in_step

    @property
    def overlaps(self) -> str:
        return self.inner.overlaps

    @property
    def bucket_mib(self) -> float:
        return self.inner.bucket_mib

    @property
    def outer(self) -> OuterRule | None:
        return self.inner.outer

    def servers(self, peers: Sequence[PeerId]) -> Sequence[PeerId]:
        return self.inner.servers(peers)

    @property
    def needs_all(self) -> bool:
        """The first by name of those that train decides."""
        return True

    @property
    def conserves_mean(self) -> bool:
        """Not from one model of many to one of all."""
        return self._conserves

    async def after_backward(self, swarm: Swarm) -> None:
        await self.inner.after_backward(swarm)

    async def after_update(self, swarm: Swarm) -> None:
        await self.inner.after_update(swarm)

    async def average(self, group: Group) -> None:
        await self.inner.average(group)

    def take_in(self, versions: Sequence[int]) -> Sequence[int]:
        return self.inner.take_in(versions)

    def handle_push(self, swarm: Swarm, source: PeerId, clock: int) -> None:
        self.inner.handle_push(swarm, source, clock)

    def schedule(self, version: int, peers: Sequence[PeerId], me: PeerId) -> Round:
        return self.inner.schedule(version, peers, me)

    def check_swarm(self, peers: int) -> None:
        self.inner.check_swarm(peers)

    def state_dict(self) -> dict[str, Any]:  # Any: plain values, as JSON has them
        return self.inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # Any: as above
        self.inner.load_state_dict(state)

    def acts(self, moment: str) -> bool:
        return self.inner.acts(moment)


def trainers_of(swarm: Swarm) -> tuple[PeerId, ...]:
    """All that train, sorted; the first of them decides. All, while none has made a step."""
    trainees = swarm.trainees()
    return tuple(one for one in trainees if not swarm.only_serves(one)) or trainees


def period_of(trainers: Sequence[PeerId]) -> Seconds:
    """About as long between two reports of a peer: they go when a step ends."""
    return REPORT_S * max(1.0, len(trainers) / REPORTS_PER_S)


def _load(now: str) -> Algorithm:
    """The algorithm of ``diloco period=16``."""
    name, *words = now.split() or [""]
    if name not in known_algorithms():  # a change may come from the network: it imports nothing
        raise ConfigError(
            f"auto now = {now!r} is none of p2ptrain's own algorithms; there are: "
            f"{', '.join(known_algorithms())}"
        )
    return load_algorithm(name, settings_of(words))
