"""Price algorithms for a fleet: samples per second, times what a sample teaches. Pure arithmetic.

**Speed.** A step of peer i computes t_i seconds on average, with a standard deviation s_i; all
numbers of a model take l_i seconds one way on its link, as float32. An average moves m models one
way, of which a codec leaves the share c: 2 (P - 1) / P of everyone, 1 of a pair and of push-sum,
P - 1 on the link of a single parameter server, through which all others send.

* All wait for all: the slowest step decides. Of P random durations the largest is about
  t + s sqrt(2 ln P), after H steps H t + s sqrt(2 H ln P) (the bound for sub-Gaussian ones). Then
  comes the part of the average, m c max l, that computing does not hide: of a step a third is the
  forward pass, and two thirds are the backward pass.
* All wait for half: the median step instead of the slowest, of an even number the lower one.
* Peers wait for the transfers of their group, and for no slow peer: t_i + m c max l each.
* No trainer waits: t_i each.

**What a sample teaches**, over synchronous gradients. Constants of `CANDIDATES`, from simulated
runs (`make compare`): small models, short runs.

Where models are averaged they are apart: by a share a of a model's norm after one update and, since
momenta persist, by a H after H updates without an average (measured: 11 times as far after 16
updates). A mean of models that are d from each other teaches 1 / (1 + (d / `APART`)^2) (from the
same runs: at 0.03 nothing was lost, at 0.13 and more much).

Where no trainer waits, averages that take m c l seconds are old by as many updates as are made
meanwhile; `OLD` is lost of as many as there are from one average to the next. A fragment's average
is over in about `fragment_s`, so it is not as old; each number still waits for its turn, and means
of models that are `RARE` teach less. Behind an outer optimizer rare means do not: how far models
have come apart is what it measures. Where the loss rises that is not believed, and it counts half.

Where half of the peers wait for no one else, gradients of the others are late. They are right for a
model that has moved on: with a share s of them, 1 / (1 + (s / `LATE`)^2) is left of what is
learned. One that is late by less than a median step counts as that part of one (measured, one of 4
peers 1.2 and 1.5 times slower: nothing was lost; twice: much). Steps that vary are late by what a
normal distribution says.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist, fmean, median_low
from typing import Literal

from p2ptrain.averaging import Algorithm, Seconds

APART = 0.1
"""At this distance of models, over their norm, half of what is learned is lost in their means."""

FORWARD, BACKWARD = 1 / 3, 2 / 3
"""Shares of a step."""

CODEC = {"fp32": 1.0, "bf16": 0.5, "fp16": 0.5, "int8": 0.25, "int4": 0.125}
"""The bytes that are left."""

OLD = 0.3
"""What is lost if an average is on its way for as long as there is from one to the next."""

RARE = 0.25
"""What is lost for each update that a model makes while its mean is on its way (from the same runs:
of `wan/*`, where models take as long as 2 to 16 updates)."""

LATE = 0.12
"""At this share of late gradients half of what is learned is lost (from the same runs: at 0.08
nothing was lost, at 0.25 and more much)."""

UNLIKE = 0.2
"""Of what is learned, the share that means of models keep where peers have unlike data (measured,
one of 4 peers four times slower: of 3.3 times the samples per second nothing was left)."""

FIRST = "ad_psgd fragment_s=1"
"""What a swarm begins with, before its links are measured: no average takes much longer than a
second. Where a model moves within a second, averages are of whole models."""

USUAL = NormalDist()

Waits = Literal["all", "half", "group", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One peer, as it was measured."""

    step_s: Seconds
    spread_s: Seconds = 0
    samples: int = 1
    """Of a step."""
    model_s: Seconds = 0
    """Seconds for all numbers of a model, one way, as float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Peers that train."""

    peers: Sequence[Load]
    apart: float = 0
    """How far an update drives models apart, over their norm; 0: not known."""
    unlike: bool = False
    """Peers have unlike data."""
    factors: Mapping[int, float] = field(default_factory=dict)
    """By rank, the share of a gradient's numbers that its factors have; not known: all of them."""
    loss_rises: bool = False
    unheard: int = 0
    """Further ones, of which nothing is known yet."""

    @property
    def slowest_link_s(self) -> Seconds:
        return max(peer.model_s for peer in self.peers)

    def all_done_s(self, steps: int) -> Seconds:
        """Until all have made so many steps."""
        late = math.sqrt(2 * steps * math.log(max(2, len(self.peers))))
        return max(steps * peer.step_s + late * peer.spread_s for peer in self.peers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to train."""

    now: str
    """As `p2ptrain set` has it: ``diloco period=16``."""
    waits: Waits
    teaches: float
    """A sample, over one of synchronous gradients, as long as models are near each other."""
    averages: Literal["gradients", "models"] = "models"
    period: int = 1
    """Updates from one average to the next."""
    size: int = 0
    """Peers of a group; 0: all of them."""
    hides: tuple[float, float] = (0, 0)
    """Shares of a step behind which the two halves of an average travel."""
    rank: int = 0
    """Of the factors of gradients that travel, instead of all their numbers; 0: those travel."""
    has_outer: bool = False
    """Means are of pseudo-gradients, for an outer step that all make."""
    servers: int = 0
    """Peers that reduce a part each (`parameter_server`); 0: all peers."""
    fragment_s: Seconds = math.inf
    """Each average moves a part of the model that takes this long; infinite: the whole model."""
    codec: str = "fp32"

    def __str__(self) -> str:
        """As `now`, with the codec if numbers do not travel as they are."""
        return self.now if self.codec == "fp32" else f"{self.now} codec={self.codec}"

    @property
    def codecs(self) -> tuple[str, str]:
        """Of models, and of gradients and pseudo-gradients."""
        of_gradients = self.averages == "gradients" or self.has_outer
        return ("fp32", self.codec) if of_gradients else (self.codec, "fp32")

    def average_s(self, fleet: Fleet, link_s: Seconds) -> Seconds:
        """On a link where a model takes so long."""
        peers = len(fleet.peers)
        size = min(self.size or peers, peers)
        owners = min(self.servers or size, size)
        # One of n owners sends its means to P - 1 peers, and its own numbers to n - 1 owners.
        moved = 1.0 if size == 2 else (size + owners - 2) / owners
        sent = fleet.factors.get(self.rank, 1.0)
        return moved * sent * CODEC[self.codec] * link_s


CANDIDATES = (
    Candidate(now=FIRST, waits="none", size=2, fragment_s=1, teaches=1.05),
    Candidate(now=FIRST, waits="none", size=2, fragment_s=1, codec="int8", teaches=0.95),
    Candidate(now="wagma", waits="group", size=2, teaches=0.9),
    Candidate(
        now="diloco period=16 fragments=4 outer_momentum=0.5",
        waits="none",
        period=16,
        has_outer=True,
        codec="int8",
        teaches=0.6,
    ),
    Candidate(now="allreduce", waits="all", averages="gradients", teaches=1.0),
    Candidate(
        now="dear", waits="all", averages="gradients", hides=(BACKWARD, FORWARD), teaches=1.0
    ),
    Candidate(now="allreduce", waits="all", averages="gradients", codec="int8", teaches=0.98),
    Candidate(now="sgp", waits="all", size=2, teaches=1.05),
    Candidate(now="parameter_server", waits="all", averages="gradients", servers=1, teaches=1.0),
    Candidate(now="powersgd", waits="all", averages="gradients", rank=4, teaches=0.85),
    Candidate(now="powersgd rank=1", waits="all", averages="gradients", rank=1, teaches=0.65),
    Candidate(now="eager", waits="half", averages="gradients", teaches=0.85),
)
"""What `auto` chooses from; of equal ones the first.

Not `parameter_server` under ``asp`` and ``ssp``: they are as fast as `ad_psgd` at best, and teach
less (simulated, `one_slow`: after 10,000 samples a loss of 0.49, `ad_psgd` 0.29)."""


@dataclass(frozen=True, slots=True)
class Price:
    """What one candidate is worth."""

    candidate: Candidate
    samples_per_s: float
    teaches: float

    @property
    def worth(self) -> float:
        """Samples of synchronous gradients per second that would teach as much."""
        return self.samples_per_s * self.teaches


def candidate_of(now: str, algorithm: Algorithm, codecs: tuple[str, str]) -> Candidate:
    """What the swarm trains with, by its table entry or by what its algorithm declares."""
    for one in CANDIDATES:
        if (one.now, one.codecs) == (now, codecs):
            return one
    of_gradients = algorithm.averages == "gradients"
    has_outer = algorithm.outer is not None and algorithm.acts("schedule")
    waits: Waits = "half" if of_gradients else "group"
    if algorithm.in_step:
        waits = "all"
    elif not algorithm.trainer_waits:
        waits = "none"
    return Candidate(
        now=now,
        waits=waits,
        teaches=0.9,
        averages="gradients" if of_gradients else "models",
        period=getattr(algorithm.config, "period", 1),
        has_outer=has_outer,
        size=0 if of_gradients else 2,
        servers=getattr(algorithm.config, "servers", 0),
        codec=codecs[of_gradients or has_outer],
    )


def price(candidate: Candidate, fleet: Fleet) -> Price:
    """What a candidate is worth for a fleet of one or more peers."""
    return Price(candidate, _samples_per_s(candidate, fleet), _teaches(candidate, fleet))


def ranked(fleet: Fleet, candidates: Sequence[Candidate] = CANDIDATES) -> list[Price]:
    """The best first; of equal ones, the first."""
    return sorted((price(one, fleet) for one in candidates), key=lambda found: -found.worth)


def drift(candidate: Candidate, fleet: Fleet) -> float:
    """How many times further apart models are under this candidate than after one update."""
    return max(candidate.period, 1.0, _transfer_updates(candidate, fleet))


def _samples_per_s(candidate: Candidate, fleet: Fleet) -> float:
    peers = fleet.peers
    average_s = candidate.average_s(fleet, fleet.slowest_link_s)
    match candidate.waits:
        case "none":
            return sum(peer.samples / peer.step_s for peer in peers)
        case "group":
            return sum(peer.samples / (peer.step_s + average_s) for peer in peers)
        case "half":
            median_s = median_low(peer.step_s for peer in peers)
            return sum(p.samples / (max(p.step_s, median_s) + average_s) for p in peers)
        case "all":
            steps_s = fleet.all_done_s(candidate.period)
            hidden_s = [steps_s * share for share in candidate.hides]
            seen_s = sum(max(0.0, average_s / 2 - one) for one in hidden_s)
            made = candidate.period * sum(peer.samples for peer in peers)
            return made / (steps_s + seen_s)


def _teaches(candidate: Candidate, fleet: Fleet) -> float:
    if candidate.averages == "gradients":
        late = _late_share(fleet) if candidate.waits == "half" else 0.0
        return candidate.teaches / (1 + (late / LATE) ** 2)
    unlike = UNLIKE if fleet.unlike else 1.0
    old = _transfer_updates(candidate, fleet, candidate.fragment_s) / candidate.period
    worth = unlike * candidate.teaches / (1 + OLD * old)
    if candidate.has_outer:
        return worth / 2 if fleet.loss_rises else worth
    rare = RARE * _transfer_updates(candidate, fleet)
    apart = fleet.apart * drift(candidate, fleet)
    return worth / ((1 + rare) * (1 + (apart / APART) ** 2))


def _late_share(fleet: Fleet) -> float:
    """Of all gradients, how many come too late where half of the peers do not wait."""
    median_s = median_low(peer.step_s for peer in fleet.peers)
    made = [peer.samples / max(peer.step_s, median_s) for peer in fleet.peers]
    late = [_rounds_late(peer, median_s) * one for peer, one in zip(fleet.peers, made, strict=True)]
    return sum(late) / sum(made)


def _rounds_late(peer: Load, round_s: Seconds) -> float:
    """How late a gradient of this peer is on average, where one counts for no more than a round."""
    return (_excess_s(peer, round_s) - _excess_s(peer, 2 * round_s)) / round_s


def _excess_s(peer: Load, over_s: Seconds) -> Seconds:
    """The mean of what a step takes beyond so many seconds; shorter ones take nothing beyond."""
    longer_s = peer.step_s - over_s
    if peer.spread_s <= 0:
        return max(0.0, longer_s)
    deviations = longer_s / peer.spread_s
    return longer_s * USUAL.cdf(deviations) + peer.spread_s * USUAL.pdf(deviations)


def _transfer_updates(candidate: Candidate, fleet: Fleet, most_s: Seconds = math.inf) -> float:
    """Updates that a peer makes while its model is on its way, the mean over all peers.

    Args:
        candidate: how it is averaged.
        fleet: all peers.
        most_s: no longer than this.
    """
    if candidate.waits != "none":
        return 0.0
    moving = [min(most_s, candidate.average_s(fleet, peer.model_s)) for peer in fleet.peers]
    return fmean(one / peer.step_s for one, peer in zip(moving, fleet.peers, strict=True))
