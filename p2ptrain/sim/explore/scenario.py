"""What is explored: who may ask whom for a group, how time runs, and how much may go wrong."""

import math
from dataclasses import dataclass
from enum import StrEnum

from p2ptrain.core.lock_state import LockConfig
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One exploration. Each peer's name is a letter."""

    name: str
    asks: tuple[Ask, ...]
    config: LockConfig
    peers: str = "abc"
    faults: int = 0
    kinds: tuple[Fault, ...] = tuple(Fault)

    rates: tuple[int, ...] = (1,)
    """The slowest and the fastest clock, in seconds per tick; one rate: all clocks agree."""

    latency_ticks: Ticks | None = 0
    """How long a message takes at most, unless a fault holds it back; None: for ever. 0 is not as
    little as it seems: what arrives in which order is open, and timers fire before and after."""

    leases: tuple[Seconds, ...] = ()
    """What the claims of each peer ask for; none: as configured."""

    copies: int = 2
    """How many messages that are alike can be in flight at once."""

    def __str__(self) -> str:
        asks = "; ".join(map(str, self.asks))
        faults = f"{self.faults} fault{'' if self.faults == 1 else 's'}"
        drift = ", clocks drift" if len(self.rates) > 1 else ""
        late = ", messages as late as they like" if self.latency_ticks is None else ""
        return f"{len(self.peers)} peers: {asks}; {faults}{drift}{late}"

    @property
    def bounds(self) -> tuple[Ticks, Ticks, Ticks]:
        """How long it may take until everyone is free, once faults have stopped.

        After no fault: no time at all. After a message was lost, repeated or held back, or an
        average has broken: until things are said again, once. After a crash or a pause: until a
        lease ends, once for each of them, and until each claim that waited so long is given up.
        """
        config = self.config
        grave_s = self.faults * config.lease_s + len(self.asks) * config.acquire_timeout_s
        return (0, self.longest(config.resend_s), self.longest(grave_s))

    def lease_s(self, peer: str) -> Seconds:
        """What the claims of `peer` ask for."""
        return self.leases[self.peers.index(peer)] if self.leases else self.config.lease_s

    def longest(self, duration_s: Seconds) -> Ticks:
        """So long on the slowest clock, rounded up to whole ticks."""
        return math.ceil(duration_s / min(self.rates))

    def shortest(self, duration_s: Seconds) -> Ticks:
        """So long on the fastest clock, rounded up to whole ticks."""
        return math.ceil(duration_s / max(self.rates))
