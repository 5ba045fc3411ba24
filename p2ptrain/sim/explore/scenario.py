"""What is explored: who asks and waits for which groups, how time runs, how much may go wrong."""

import math
from dataclasses import dataclass
from enum import StrEnum

from p2ptrain.core.lock_state import LockConfig
from p2ptrain.core.purpose import What
from p2ptrain.core.wait_avoiding import NOBODY, Rule
from p2ptrain.errors import ConfigError
from p2ptrain.ids import Seconds

Ticks = int
"""True time; a clock of rate 1 counts a second in each."""


class Fault(StrEnum):
    """What a fault of the budget may be spent on."""

    LOSE = "lose"
    REPEAT = "repeat"
    DELAY = "delay"
    BREAK = "break"
    CRASH = "crash"
    PAUSE = "pause"


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that `peer` makes once, at any moment, for any `needed` of `candidates`."""

    peer: str
    candidates: str
    needed: int

    def __str__(self) -> str:
        if self.needed == len(self.candidates):
            return f"{self.peer} asks for {' and '.join(self.candidates)}"
        return f"{self.peer} asks for {self.needed} of {', '.join(self.candidates)}"


@dataclass(frozen=True, slots=True)
class Meets:
    """The trainer of `peer` arrives at the barrier with each version from `first` to `last`."""

    peer: str
    first: int = 1
    last: int = 1
    lineage: int = 0

    def __str__(self) -> str:
        versions = f"{self.first}" if self.first == self.last else f"{self.first} to {self.last}"
        lineage = f" on lineage {self.lineage}" if self.lineage else ""
        return f"{self.peer} meets at {versions}{lineage}"


@dataclass(frozen=True, slots=True)
class Visits:
    """The trainer of `peer` arrives at each of these versions of the schedule."""

    peer: str
    versions: tuple[int, ...] = (1,)
    waits: bool = True

    def __str__(self) -> str:
        passing = "" if self.waits else " and does not wait"
        return f"{self.peer} visits {' and '.join(map(str, self.versions))}{passing}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The schedule of wait-avoiding groups."""

    groups: tuple[str, ...] = ()
    """Of the versions, in turn, one letter for each member of the group in which everyone there is;
    who is not in it is alone. None: everyone, always."""

    what: What = What.STALE_GRADIENTS
    rule: Rule = NOBODY


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One exploration. Each peer's name is a letter."""

    name: str
    config: LockConfig
    asks: tuple[Ask, ...] = ()
    trainers: tuple[Meets | Visits, ...] = ()
    """One of each peer at most; a trainer that has come to its end is not waited for any more."""

    plan: Plan = Plan()
    peers: str = "abc"
    faults: int = 0
    kinds: tuple[Fault, ...] = tuple(Fault)

    slack: Ticks | None = None
    """So many ticks may pass while somebody could go on: while an average could end, a trainer
    compute no longer, or a peer hear that another one is gone; None: as many as they like. With
    trainers it must be bounded: a coordinator repeats its request for as long as it waits, each
    time under another ticket, so that there would be no end of situations."""

    rates: tuple[int, ...] = (1,)
    """The slowest and the fastest clock, in seconds per tick; one rate: all clocks agree."""

    latency_ticks: Ticks | None = 0
    """How long a message takes at most, unless a fault holds it back; None: for ever. 0 is not as
    little as it seems: what arrives in which order is open, and timers fire before and after."""

    copies: int = 2
    """How many messages that are alike can be in flight at once."""

    def __post_init__(self) -> None:
        if self.trainers and self.slack is None:
            raise ConfigError(f"scenario {self.name}: with trainers, slack must be bounded")

    def __str__(self) -> str:
        who = "; ".join(map(str, (*self.asks, *self.trainers)))
        faults = f"{self.faults} fault{'' if self.faults == 1 else 's'}"
        drift = ", clocks drift" if len(self.rates) > 1 else ""
        late = ", messages as late as they like" if self.latency_ticks is None else ""
        return f"{len(self.peers)} peers: {who}; {faults}{drift}{late}"

    @property
    def barrier_resend_s(self) -> Seconds:
        """Those who wait say so again this often."""
        return self.config.resend_s

    @property
    def bounds(self) -> tuple[Ticks, Ticks, Ticks]:
        """How long it may take until everyone is free, once faults have stopped.

        After no fault: no time at all. After a message was lost, repeated or held back, or an
        average has broken: until things are said again, once. After a crash or a pause: until a
        lease ends, once for each of them, and until each request that waited so long is given up.
        """
        config = self.config
        requests = len(self.asks) + len(self.trainers)
        grave_s = self.faults * config.lease_s + requests * config.acquire_timeout_s
        return (0, self.longest(config.resend_s), self.longest(grave_s))

    def longest(self, duration_s: Seconds) -> Ticks:
        """So long on the slowest clock, rounded up to whole ticks."""
        return math.ceil(duration_s / min(self.rates))

    def shortest(self, duration_s: Seconds) -> Ticks:
        """So long on the fastest clock, rounded up to whole ticks."""
        return math.ceil(duration_s / max(self.rates))
