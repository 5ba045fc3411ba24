"""Say which peers are slow, and why: their compute, their link, or waiting for others.

A cause is a comparison with the median of the swarm. **Compute**: the rate at which a peer trains
while it does not wait. **Link**: what membership measured of it. **Waiting**: the share of its time
that its trainer waits; this is rarely the peer's own fault, so the other causes come first.
"""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Cause = Literal["compute", "link", "waiting"]

SLOWER = 1.5
"""A peer that computes this many times slower than the median is slow."""

NARROWER = 2.0
"""A link with the median's speed divided by this is narrow."""

WAITS = 0.3
"""A peer that waits this share of its time is worth a sentence."""

TOGETHER = 3
"""More peers than this that wait share one sentence."""

_ALWAYS = 0.98  # above this share of waiting a rate of computing cannot be told


@dataclass(frozen=True, slots=True)
class Figures:
    """What a peer that trains has reported."""

    samples_per_s: float
    wait_share: float
    link_mbit: int
    """0: not known."""

    @property
    def compute_rate(self) -> float | None:
        """Samples per second of computing; None if it does hardly anything but wait."""
        if self.samples_per_s <= 0 or self.wait_share > _ALWAYS:
            return None
        return self.samples_per_s / (1 - self.wait_share)


@dataclass(frozen=True, slots=True)
class Slowness:
    """Why one peer is slow."""

    cause: Cause
    sentence: str
    """The rest of a sentence that begins with the peer's name."""

    factor: float
    """How many times slower than the median; for waiting the share."""


def diagnose(peers: Mapping[str, Figures]) -> dict[str, Slowness]:
    """The slow ones of the peers that train, by name."""
    compute = _median(rate for one in peers.values() if (rate := one.compute_rate))
    link = _median(one.link_mbit for one in peers.values() if one.link_mbit)
    found = {name: _slowness(one, compute, link) for name, one in peers.items()}
    return {name: slowness for name, slowness in found.items() if slowness}


def _slowness(one: Figures, compute: float, link: float) -> Slowness | None:
    rate = one.compute_rate
    if rate and compute / rate >= SLOWER:
        text = f"computes {compute / rate:.1f} times slower than the median"
        return Slowness("compute", text, compute / rate)
    if one.link_mbit and link / one.link_mbit >= NARROWER:
        text = f"has a link of {one.link_mbit:,} Mbit/s; the median is {link:,.0f}"
        return Slowness("link", text, link / one.link_mbit)
    if one.wait_share >= WAITS:
        text = f"waits for others {one.wait_share:.0%} of its time"
        return Slowness("waiting", text, one.wait_share)
    return None


def sentences(found: Mapping[str, Slowness], peers: Mapping[str, Figures]) -> list[str]:
    """One sentence per slow peer, worst cause first; many peers that wait share one."""
    slow = sorted(found, key=lambda name: -found[name].factor)
    own = [f"{name} {found[name].sentence}" for name in slow if found[name].cause != "waiting"]
    waiting = [name for name, one in found.items() if one.cause == "waiting"]
    if len(waiting) <= TOGETHER:
        return own + [f"{name} {found[name].sentence}" for name in waiting]
    share = statistics.median(peers[name].wait_share for name in waiting)
    return [
        *own,
        f"{len(waiting)} of {len(peers)} peers wait for others, {share:.0%} of their time",
    ]


def _median(values: Iterable[float]) -> float:
    known = list(values)
    return statistics.median(known) if known else 0.0
