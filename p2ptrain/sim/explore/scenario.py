"""Define what is explored: requests and trainers, the clocks, and the budget of faults."""

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
    """The kinds of faults in the budget."""

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
    """The groups of the versions in turn, one letter per member; a peer that is in none of them is
    alone. None: all peers, always."""

    what: What = What.STALE_GRADIENTS
    rule: Rule = NOBODY


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One exploration. Each peer's name is a letter."""

    name: str
    config: LockConfig
    asks: tuple[Ask, ...] = ()
    trainers: tuple[Meets | Visits, ...] = ()
    """At most one per peer; no peer waits for a trainer that has ended."""

    plan: Plan = Plan()
    peers: str = "abc"
    faults: int = 0
    kinds: tuple[Fault, ...] = tuple(Fault)

    slack: Ticks | None = None
    """The total number of ticks that may pass while a step other than a timer is possible: while an
    average could end, a trainer arrive, or a peer hear that another one has crashed; None: no
    limit. With trainers it must be bounded: a coordinator repeats its request for as long as it
    waits, each time under another ticket, so the number of situations would be infinite."""

    rates: tuple[int, ...] = (1,)
    """The slowest and the fastest clock, in seconds per tick; one rate: all clocks agree."""

    latency_ticks: Ticks | None = 0
    """The most a message takes, unless a fault holds it back; None: no limit. 0 is less restrictive
    than it seems: the order of arrivals is open, and timers fire before and after."""

    copies: int = 2
    """The most equal messages in flight at once."""

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
        """The interval at which a waiting trainer repeats its arrival."""
        return self.config.resend_s

    @property
    def bounds(self) -> tuple[Ticks, Ticks, Ticks]:
        """The most time until all peers are free, once faults have stopped.

        Without a fault: no time at all. After a message was lost, repeated or held back, or an
        average has broken: until messages are repeated, once. After a crash or a pause: until a
        lease ends, once for each of them, and until each request that waited so long is given up.
        """
        config = self.config
        requests = len(self.asks) + len(self.trainers)
        grave_s = self.faults * config.lease_s + requests * config.acquire_timeout_s
        return (0, self.longest(config.resend_s), self.longest(grave_s))

    def longest(self, duration_s: Seconds) -> Ticks:
        """This duration on the slowest clock, rounded up to whole ticks."""
        return math.ceil(duration_s / min(self.rates))

    def shortest(self, duration_s: Seconds) -> Ticks:
        """This duration on the fastest clock, rounded up to whole ticks."""
        return math.ceil(duration_s / max(self.rates))
