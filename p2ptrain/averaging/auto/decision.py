"""Decide whether the swarm should train in another way, from what its peers report. Pure.

A report is a few whole numbers. A peer that has been silent for longer than one lost report would
explain counts as computing for all that time; where all peers wait for all, this holds only until
its first report. Once most of the swarm has reported, `decide` ranks all candidates (`costs.py`)
and proposes the best one if it is worth a `margin` more than the present one: a measurement that
wavers changes nothing. A peer that has not reported yet may be slow by any factor. Where no peer
waits for it, it counts for nothing, and the swarm does not begin to wait for it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from p2ptrain.averaging import Measured, PeerId, RemoteProtocolError, Seconds
from p2ptrain.averaging.auto.costs import (
    APART,
    CANDIDATES,
    Candidate,
    Fleet,
    Load,
    Price,
    drift,
    price,
    ranked,
)

LEAST_STEPS = 5
"""Before the first decision; each of them is reported. Fewer: one slow step decides; more: the
swarm trains badly for longer."""

LEAST_WAITED = 2
"""Steps before the first decision if they lasted as long as `LEAST_STEPS` steps of computing: the
peer that decides waited for others, and those have reported as many."""

NONE_KNOWN: Mapping[int, float] = MappingProxyType({})

MICRO = 1_000_000

RISEN = 2.0
"""A loss that is so many times the lowest one: models are too far apart, or worse."""

MOST = 10**12
"""Of a number in a report: a step of eleven days."""


def report_of(measured: Measured) -> tuple[int, ...]:
    """What a peer reports, in millionths: step, spread, samples, model, distance, 1 + loss."""
    loss = measured.loss
    known = loss is not None and math.isfinite(loss) and loss >= 0
    numbers = (
        measured.step_s * MICRO,
        measured.spread_s * MICRO,
        measured.samples,
        measured.model_s * MICRO,
        measured.apart * MICRO,
        1 + loss * MICRO if known and loss is not None else 0,
    )
    return tuple(min(MOST, max(0, round(number))) for number in numbers)


def measured_of(source: PeerId, numbers: Sequence[int]) -> Measured:
    """What a report says. Raises RemoteProtocolError if no peer would send it."""
    if len(numbers) != 6 or max(numbers) > MOST or min(numbers[0], numbers[2]) < 1:
        raise RemoteProtocolError(f"{source} reports {tuple(numbers)[:8]}, which is no measurement")
    step, spread, samples, model, apart, loss = numbers
    return Measured(
        step_s=step / MICRO,
        spread_s=spread / MICRO,
        samples=samples,
        model_s=model / MICRO,
        apart=apart / MICRO,
        loss=(loss - 1) / MICRO if loss else None,
    )


@dataclass(frozen=True, slots=True)
class Decision:
    """Train like this from now on."""

    candidate: Candidate
    apart: float
    """How far an update drives models apart, as far as known."""
    why: str


@dataclass(frozen=True, slots=True)
class Report:
    """The last one of a peer."""

    measured: Measured
    at: Seconds
    period_s: Seconds
    """The next one follows after the next step, or after this time if steps are shorter."""
    number: int
    """Of this peer's reports, from 1."""

    def silent_s(self, now: Seconds) -> Seconds:
        """How long the peer has computed, by its silence; 0: one lost report would explain that."""
        passed_s = now - self.at
        is_due = passed_s > 2 * max(self.period_s, self.measured.step_s)
        return passed_s - self.period_s if is_due else 0.0


@dataclass(slots=True)
class Reports:
    """The last report of each peer."""

    since: Seconds
    """When these settings began."""
    last: dict[PeerId, Report] = field(default_factory=dict)
    lowest_loss: float = math.inf
    """Of means over all peers, under these settings."""

    def take(self, source: PeerId, measured: Measured, now: Seconds, period_s: Seconds) -> None:
        """A peer has reported.

        Args:
            source: the peer.
            measured: what it reports.
            now: when it does.
            period_s: between two reports, if steps are shorter. Each of the first `LEAST_STEPS`
                steps is reported.
        """
        before = self.last.get(source)
        number = before.number + 1 if before else 1
        is_early = number < LEAST_STEPS and now - self.since <= period_s
        self.last[source] = Report(measured, now, 0.0 if is_early else period_s, number)

    @property
    def fewest(self) -> int:
        """How many reports there are of the peer that has sent the fewest; it may still compute."""
        return min((report.number for report in self.last.values()), default=0)

    def fleet(
        self,
        trainees: Sequence[PeerId],
        now: Seconds,
        present: Candidate,
        apart: float,
        *,
        unlike: bool,
        factors: Mapping[int, float] = NONE_KNOWN,
    ) -> Fleet | None:
        """Those that train; None while fewer than half of them, or fewer than two, have reported.

        Args:
            trainees: all that train.
            now: when they are looked at.
            present: what they train with.
            apart: how far an update drove models apart, when that was known last.
            unlike: their data are.
            factors: the share of a gradient's numbers that its factors have, by rank.
        """
        self.last = {peer: self.last[peer] for peer in trainees if peer in self.last}
        known = [report.measured for report in self.last.values()]
        if 2 * len(known) < len(trainees) or len(known) < 2:
            return None
        usual = sorted(known, key=lambda one: one.step_s)[len(known) // 2]
        loads, all_wait = [], present.waits == "all"
        for peer in trainees:
            report = self.last.get(peer)
            if report:  # while all wait for all, its silence may be that of another peer
                silent_s = 0.0 if all_wait else report.silent_s(now)
                loads.append(_load(report.measured, silent_s))
            elif all_wait:
                loads.append(_load(usual, now - self.since))
        unheard = len(trainees) - len(loads)
        fleet = Fleet(peers=loads, apart=apart, unlike=unlike, factors=factors, unheard=unheard)
        distances = sorted(one.apart for one in known if one.apart)
        if not distances or present.averages == "gradients":
            return fleet
        return replace(fleet, apart=distances[len(distances) // 2] / drift(present, fleet))

    def loss_rises(self) -> bool:
        """Whether the mean of all losses is far above what it was under these settings."""
        reported = [report.measured.loss for report in self.last.values()]
        losses = [loss for loss in reported if loss is not None]
        if not losses:
            return False
        loss = sum(losses) / len(losses)
        self.lowest_loss = min(self.lowest_loss, loss)
        return loss > RISEN * self.lowest_loss


def _load(one: Measured, silent_s: Seconds) -> Load:
    step_s = max(one.step_s, silent_s)
    return Load(step_s=step_s, spread_s=one.spread_s, samples=one.samples, model_s=one.model_s)


def decide(
    now: Candidate,
    fleet: Fleet,
    *,
    rises: bool = False,
    margin: float = 0.15,
    among: Sequence[Candidate] = CANDIDATES,
) -> Decision | None:
    """What to change to; None: nothing is worth it.

    Args:
        now: what the swarm trains with.
        fleet: all that train.
        rises: the loss has risen; that counts while models are apart.
        margin: a change must be worth so much more: 0.15 is 15 %.
        among: what this swarm may have.
    """
    if fleet.unheard:
        among = [one for one in among if one.waits != "all"]
    if not among:
        return None
    rises = rises and now.averages == "models" and fleet.apart * drift(now, fleet) > APART / 4
    weighed = fleet
    if rises:  # perhaps models are too far apart
        weighed = replace(fleet, apart=2 * fleet.apart, loss_rises=True)
    best, present = ranked(weighed, among)[0], price(now, weighed)
    if best.candidate == now or best.worth < (1 + margin) * present.worth:
        return None
    return Decision(best.candidate, fleet.apart, _why(best, present, fleet, rises=rises))


def _why(best: Price, present: Price, fleet: Fleet, *, rises: bool) -> str:
    steps = sorted(peer.step_s for peer in fleet.peers)
    link_s = fleet.slowest_link_s
    reasons = [
        f"{best.candidate} should make {best.samples_per_s:.3g} samples/s and "
        f"{present.candidate} {present.samples_per_s:.3g}",
        f"a sample teaches {best.teaches:.2f} and {present.teaches:.2f} of a synchronous one",
        f"steps take {steps[0]:.2g} to {steps[-1]:.2g} s, a model {link_s:.2g} s on a link",
    ]
    if rises:
        reasons.append("the loss rose")
    return "; ".join(reasons)
