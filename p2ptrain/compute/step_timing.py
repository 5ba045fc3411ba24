"""How long a step is made to last: devices that this machine does not have.

A peer here may stand for a slower or a busier machine. Its step gets a **price**, a minimum
duration in which the processor is free, as while a GPU computes::

    min_step_ms            every step alike
    mean_ms, deviation_ms  log-normal, drawn for each step of each peer from the shared seed
    trace_ms, trace_file   measured durations, over and over; each peer begins at a place of its own

A price is that of a step of `batch_size` samples, and a step of more or fewer costs in proportion.

A **straggler**'s step is then stretched, by a factor or by milliseconds, always or for exactly k
peers drawn at each step from a seed that all peers and all compared algorithms share, so that every
algorithm meets the same delays. The draw depends on seed and step number alone, not on how slow the
drawn ones will be: raising a factor slows the same peers at the same steps.

Everything here is arithmetic; the training loop sleeps. In a simulated world computing takes no
time at all, and a step lasts exactly as long as its price.
"""

import math
from dataclasses import dataclass
from functools import cache
from math import isfinite
from pathlib import Path
from random import Random

from p2ptrain.errors import ConfigError
from p2ptrain.ids import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """Which peers are slow, how much, and how often."""

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
class StepTiming:
    """The duration of one peer's steps."""

    min_step_ms: float = 0.0
    """A step lasts at least this long; the rest is slept, so that the processor is free, as while a
    GPU computes. Too small beside the real compute time: it has no effect."""

    mean_ms: float = 0.0
    """Mean of a log-normal duration, drawn for each step of each peer; 0 is none."""

    deviation_ms: float = 0.0
    """Its standard deviation. Most steps are a little shorter than the mean, a few much longer: the
    larger this is beside `mean_ms`, the longer."""

    trace_ms: tuple[float, ...] = ()
    """Durations of steps, gone through again and again. Too few: what was chance in them becomes a
    rhythm."""

    trace_file: str = ""
    """A text file of such durations, one to a line; found from the working directory."""

    slowdown_file: str = ""
    """A file with one number, a factor for every step as long as the file is there. It is read at
    each step, so writing it slows a running peer down, and removing it lets the peer recover."""

    stragglers: tuple[Straggler, ...] = ()
    """Each stretches the steps as the ones before it left them; empty: no peer is slow."""

    def __post_init__(self) -> None:
        for name in ("min_step_ms", "mean_ms", "deviation_ms"):
            value = getattr(self, name)
            if not (isfinite(value) and value >= 0):
                raise ConfigError(f"pace {name} = {value} must be a number, 0 or more")
        if self.deviation_ms and not self.mean_ms:
            raise ConfigError(f"pace deviation_ms = {self.deviation_ms} needs mean_ms above 0")
        given = [key for key in ("mean_ms", "trace_ms", "trace_file") if getattr(self, key)]
        if len(given) > 1:
            raise ConfigError(f"pace has {' and '.join(given)}: give at most one of them")
        _check_durations(self.trace_ms, "pace trace_ms")

    @property
    def is_priced(self) -> bool:
        """True if a step costs time even where computing costs none."""
        return bool(self.min_step_ms or self.mean_ms or self.trace_ms or self.trace_file)

    @property
    def takes_time(self) -> bool:
        """True if a step is made to last longer than computing takes."""
        return bool(self.is_priced or self.stragglers or self.slowdown_file)

    def check(self, peers: int) -> None:
        """Refuse stragglers that do not exist among `peers` peers, and a trace that is none.

        Raises:
            ConfigError: naming the ranks and how many peers there are, or the file.
        """
        if self.trace_file:
            _durations_of(self.trace_file)
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

    def step_s(
        self,
        compute_s: Seconds,
        rank: int,
        step: int,
        peers: int,
        seed: int,
        share: float = 1.0,
    ) -> Seconds:
        """How long the step lasts as a whole, given the compute time it really took.

        The price is that of a usual batch; a step of a larger or smaller one costs `share` of it.
        """
        price_s = max(self.min_step_ms, self._drawn_ms(rank, step, peers, seed)) * share / 1000
        duration = max(compute_s, price_s)
        for straggler in self.stragglers:
            if straggler.is_slow(rank, step, peers, seed):
                duration = duration * straggler.factor + straggler.extra_ms / 1000
        return duration * _factor_in(self.slowdown_file) if self.slowdown_file else duration

    def _drawn_ms(self, rank: int, step: int, peers: int, seed: int) -> float:
        """The duration by chance or by trace, if there is one."""
        if self.mean_ms:
            variance = math.log1p((self.deviation_ms / self.mean_ms) ** 2)
            chance = Random(f"pace/{seed}/{rank}/{step}")
            return self.mean_ms * math.exp(chance.gauss(-variance / 2, math.sqrt(variance)))
        trace = _durations_of(self.trace_file) if self.trace_file else self.trace_ms
        return trace[(rank * len(trace) // peers + step) % len(trace)] if trace else 0.0


def _factor_in(file: str) -> float:
    """The number in a file; 1 if there is none, or something that is no factor."""
    try:
        factor = float(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 1.0
    return factor if isfinite(factor) and factor > 0 else 1.0


@cache
def _durations_of(file: str) -> tuple[float, ...]:
    """The numbers in a file. Raises ConfigError if there are none, or something else is in it."""
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
        durations = tuple(float(line) for line in lines if line.strip())
    except OSError as error:
        raise ConfigError(f"cannot read the pace's trace_file {file}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"trace_file {file} must hold one number to a line: {error}") from error
    if not durations:
        raise ConfigError(f"trace_file {file} is empty; write one duration in ms to a line")
    _check_durations(durations, f"trace_file {file}")
    return durations


def _check_durations(durations: tuple[float, ...], where: str) -> None:
    for duration in durations:
        if not (isfinite(duration) and duration > 0):
            raise ConfigError(f"{where} has a duration of {duration} ms; it must be above 0")
