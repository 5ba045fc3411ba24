"""How long a step is made to last: devices that this machine does not have.

A peer here may stand for a slower or a busier machine. Its step gets a minimum duration, in which
the processor is free, as while a GPU computes; and a **straggler**'s step is stretched, by a factor
of its own compute time or by milliseconds, always or for exactly k peers drawn at each step from a
seed that all peers and all compared algorithms share, so that every algorithm meets the same
delays. The draw depends on seed and step number alone, not on how slow the drawn ones will be:
raising a factor slows the same peers at the same steps.

Everything here is arithmetic; the training loop sleeps.
"""

from dataclasses import dataclass
from math import isfinite
from random import Random

from p2ptrain.errors import ConfigError
from p2ptrain.ids import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """Who is slow, how much, and how often."""

    factor: float = 1.0
    """Duration of a slow step over that of the same step undisturbed. 1 is no delay."""

    extra_ms: float = 0.0
    """Milliseconds added to a slow step, after the factor."""

    peers: tuple[int, ...] = ()
    """Ranks that are slow at every step; leave empty when `random_peers` draws them."""

    random_peers: int = 0
    """Exactly this many ranks, drawn anew for each step number from the shared seed."""

    def __post_init__(self) -> None:
        if not (isfinite(self.factor) and self.factor > 0):
            raise ConfigError(
                f"straggler factor = {self.factor} must be a number above 0; "
                f"1 is no delay, 4 is four times slower"
            )
        if not (isfinite(self.extra_ms) and self.extra_ms >= 0):
            raise ConfigError(f"straggler extra_ms = {self.extra_ms} must be a number, 0 or more")
        if self.random_peers < 0:
            raise ConfigError(f"straggler random_peers = {self.random_peers} must be 0 or more")
        if bool(self.peers) == bool(self.random_peers):
            raise ConfigError(
                f"straggler has peers = {list(self.peers)} and "
                f"random_peers = {self.random_peers}: give exactly one of them"
            )

    def is_slow(self, rank: int, step: int, peers: int, seed: int) -> bool:
        """True if `rank` is slow at its own step number `step` (from 0)."""
        if self.peers:
            return rank in self.peers
        drawn = Random(f"straggler/{seed}/{step}").sample(range(peers), self.random_peers)
        return rank in drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The duration of one peer's steps."""

    min_step_ms: float = 0.0
    """A step lasts at least this long; the rest is slept, so that the processor is free, as while a
    GPU computes. Too small beside the real compute time: it has no effect."""

    stragglers: tuple[Straggler, ...] = ()
    """Each stretches what those before it left; empty: nobody is slow."""

    def __post_init__(self) -> None:
        if not (isfinite(self.min_step_ms) and self.min_step_ms >= 0):
            raise ConfigError(f"pace min_step_ms = {self.min_step_ms} must be a number, 0 or more")

    def check(self, peers: int) -> None:
        """Refuse stragglers that do not exist among `peers` peers.

        Raises:
            ConfigError: naming the ranks and how many peers there are.
        """
        for straggler in self.stragglers:
            if not all(0 <= rank < peers for rank in straggler.peers):
                raise ConfigError(
                    f"straggler peers = {list(straggler.peers)}: "
                    f"there are {peers} peers, ranks 0 to {peers - 1}"
                )
            if straggler.random_peers > peers:
                raise ConfigError(
                    f"straggler random_peers = {straggler.random_peers} "
                    f"is more than the {peers} peers there are"
                )

    def step_s(self, compute_s: Seconds, rank: int, step: int, peers: int, seed: int) -> Seconds:
        """How long the step lasts as a whole, given the compute time it really took."""
        duration = max(compute_s, self.min_step_ms / 1000)
        for straggler in self.stragglers:
            if straggler.is_slow(rank, step, peers, seed):
                duration = duration * straggler.factor + straggler.extra_ms / 1000
        return duration
