"""Decide whether the swarm should train in another way, from what its peers report. Pure.

A report is a few whole numbers. A peer that does not report computes for at least as long as it is
silent, unless that may be one lost report; where all wait for all, only before its first one. Once
most of the swarm has reported, `decide` ranks all candidates (`costs.py`) and proposes the best one
if it is worth a `margin` more than the present one: a measurement that wavers changes nothing.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

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
"""Before the first decision, each of which is reported, or `LEAST_WAITED` that lasted as long: then
the peer that decides has waited for others. Fewer: one slow step decides; more: the swarm trains
badly for longer."""

LEAST_WAITED = 2

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


@dataclass(slots=True)
class Reports:
    """The last report of each peer."""

    since: Seconds
    """When these settings began."""
    last: dict[PeerId, Measured] = field(default_factory=dict)
    heard: dict[PeerId, tuple[Seconds, Seconds]] = field(default_factory=dict)
    """When that was, and how long the next one may take, however short steps are."""
    counts: Counter[PeerId] = field(default_factory=Counter)
    lowest_loss: float = math.inf
    """Of means over all peers, under these settings."""

    def take(self, source: PeerId, measured: Measured, now: Seconds, period_s: Seconds) -> None:
        """A peer has reported.

        Args:
            source: the peer.
            measured: what it reports.
            now: when it does.
            period_s: it reports so often at most, if its steps are shorter; but each of the first
                `LEAST_STEPS` steps.
        """
        self.last[source] = measured
        self.counts[source] += 1
        early = self.counts[source] < LEAST_STEPS and now - self.since <= period_s
        self.heard[source] = now, 0.0 if early else period_s

    def fleet(
        self,
        trainees: Sequence[PeerId],
        now: Seconds,
        present: Candidate,
        apart: float,
        *,
        unlike: bool,
        low_rank: float = 1.0,
    ) -> Fleet | None:
        """All that train; None while fewer than half of them, or fewer than two, have reported.

        Args:
            trainees: all that train.
            now: when they are looked at.
            present: what they train with.
            apart: how far an update drove models apart, when that was known last.
            unlike: their data are.
            low_rank: the share of a gradient's numbers that its factors have.
        """
        known = [self.last[peer] for peer in trainees if peer in self.last]
        if 2 * len(known) < len(trainees) or len(known) < 2:
            return None
        usual = sorted(known, key=lambda one: one.step_s)[len(known) // 2]
        silent = {peer: self._silent_s(peer, usual, now) for peer in trainees}
        if present.waits == "all":
            silent |= dict.fromkeys(self.last, 0.0)  # it waits, perhaps
        loads = [_load(self.last.get(peer, usual), silent[peer]) for peer in trainees]
        fleet = Fleet(peers=loads, apart=apart, unlike=unlike, low_rank=low_rank)
        distances = sorted(one.apart for one in known if one.apart)
        if not distances or present.averages == "gradients":
            return fleet
        return replace(fleet, apart=distances[len(distances) // 2] / drift(present, fleet))

    def _silent_s(self, peer: PeerId, usual: Measured, now: Seconds) -> Seconds:
        """How long it has computed, as it seems; 0: as it says."""
        if peer not in self.last:
            return max(usual.step_s, now - self.since)
        at, period_s = self.heard.get(peer, (now, 0.0))
        one_is_lost = now - at <= 2 * max(period_s, self.last[peer].step_s)
        return 0.0 if one_is_lost else now - at - period_s

    def loss_rises(self) -> bool:
        """Whether the mean of all losses is far above what it was under these settings."""
        losses = [one.loss for one in self.last.values() if one.loss is not None]
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
    if not among:
        return None
    rises = rises and now.averages == "models" and fleet.apart * drift(now, fleet) > APART / 4
    weighed = replace(fleet, apart=2 * fleet.apart) if rises else fleet  # perhaps that is why
    best, present = ranked(weighed, among)[0], price(now, weighed)
    if best.candidate == now or best.worth < (1 + margin) * present.worth:
        return None
    return Decision(best.candidate, fleet.apart, _why(best, present, fleet, rises=rises))


def _why(best: Price, present: Price, fleet: Fleet, *, rises: bool) -> str:
    steps = sorted(peer.step_s for peer in fleet.peers)
    link_s = fleet.slowest_link_s
    reasons = [
        f"{best.candidate.now} should make {best.samples_per_s:.3g} samples/s and "
        f"{present.candidate.now} {present.samples_per_s:.3g}",
        f"a sample teaches {best.teaches:.2f} and {present.teaches:.2f} of a synchronous one",
        f"steps take {steps[0]:.2g} to {steps[-1]:.2g} s, a model {link_s:.2g} s on a link",
    ]
    if rises:
        reasons.append("the loss rose")
    return "; ".join(reasons)
