"""What lies between the peers of a scenario, ``[link]`` and ``[machines]``, and ``[[faults]]``.

Units are those in which people speak of networks. Only a backend that makes its own network can
keep to a link, and only one that makes its own time can let clocks drift; others say so instead of
running something else.
"""

from dataclasses import dataclass
from typing import Literal

from p2ptrain.errors import ConfigError
from p2ptrain.ids import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """One way from a peer to another, the same for all; by default a quiet local network."""

    latency_ms: float = 0.2
    """One way."""

    jitter_ms: float = 0.0
    """Up to so much is added, for each message anew. More than the gap between two messages: they
    overtake each other."""

    loss: float = 0.0
    """Share of control messages that vanish. Chunks travel on streams, which lose nothing."""

    duplication: float = 0.0
    """Share of control messages that arrive twice."""

    bandwidth_mbit_s: float = 1000.0
    """What one peer can send in a second, to all others together."""

    def __post_init__(self) -> None:
        for name in ("latency_ms", "jitter_ms"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ConfigError(f"link {name} = {value} must be a number, 0 or more")
        for name in ("loss", "duplication"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ConfigError(f"link {name} = {value} is a share: at least 0 and below 1")
        if not 0 < self.bandwidth_mbit_s < float("inf"):
            raise ConfigError(f"link bandwidth_mbit_s = {self.bandwidth_mbit_s} must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class MachinesConfig:
    """Peers that share machines: the first `peers` by rank the first one, and so on.

    Between two of one machine there is the scenario's link.
    """

    peers: int
    """On each machine; the last one may have fewer."""

    uplink_mbit_s: float
    """What leaves a machine in a second, for all of its peers together. Each peer's own limit holds
    as well."""

    def __post_init__(self) -> None:
        if self.peers < 1:
            raise ConfigError(f"machines peers = {self.peers} must be 1 or more")
        if not 0 < self.uplink_mbit_s < float("inf"):
            raise ConfigError(f"machines uplink_mbit_s = {self.uplink_mbit_s} must be above 0")

    def of(self, rank: int) -> str:
        """The name of the machine that `rank` is on."""
        return f"m{rank // self.peers:02}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """What each of `peers` may use of the machine; only containers can be held to all of it."""

    peers: tuple[int, ...]
    """Ranks."""

    cpus: float | None = None
    """Of its processors, in any mixture: 0.5 is half of one. None: no limit."""

    memory_mb: int | None = None
    """A peer that wants more is killed. Below 400 none can start."""

    uplink_mbit_s: float | None = None
    """What leaves it in a second, to all others together. None: what the link gives."""

    def __post_init__(self) -> None:
        if not self.peers or min(self.peers) < 0:
            raise ConfigError(f"devices peers = {list(self.peers)} must be ranks, from 0")
        for name in ("cpus", "memory_mb", "uplink_mbit_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"devices {name} = {value} must be above 0")


Kind = Literal["crash", "pause", "slow", "drift", "throttle", "partition", "leave", "join"]

_NEEDS: dict[Kind, str] = {"slow": "factor", "drift": "rate", "throttle": "mbit_s"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultConfig:
    """Something that goes wrong with each of `peers`; a partition parts them from the others."""

    kind: Kind
    """``crash``: kill -9. ``pause``: SIGSTOP. ``slow``: computing takes `factor` times as long.
    ``drift``: a clock shows `rate` seconds for each that passes. ``throttle``: no more than
    `mbit_s` leave it. ``partition``: nothing passes to or from anybody else. ``leave``: a clean
    farewell. ``join``: it comes only then; until then it is not there."""

    peers: tuple[int, ...]
    """Ranks."""

    at_s: Seconds | None = None
    """Begins so long after the first step; in a simulation, after the world began."""

    at_step: int | None = None
    """Or as soon as it has made so many steps; of a partition, the first of `peers`."""

    for_s: Seconds | None = None
    """Ends so much later: one that crashed or left starts again, a paused one goes on. None:
    never."""

    factor: float | None = None
    rate: float | None = None
    mbit_s: float | None = None

    def __post_init__(self) -> None:
        if not self.peers or min(self.peers) < 0:
            raise ConfigError(f"{self}: peers = {list(self.peers)} must be ranks, from 0")
        if (self.at_s is None) == (self.at_step is None):
            raise ConfigError(f"{self}: give exactly one of at_s and at_step")
        for name in ("at_s", "at_step"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ConfigError(f"{self}: {name} = {value} must be a number, 0 or more")
        if self.for_s is not None and not 0 < self.for_s < float("inf"):
            raise ConfigError(
                f"{self}: for_s = {self.for_s} must be a number above 0; leave it out if it is not "
                "to end"
            )
        if self.kind == "join" and (self.for_s is not None or self.at_s is None):
            raise ConfigError(f"{self}: give at_s and no for_s; a second fault can take it away")
        for name in ("factor", "rate", "mbit_s"):
            value, is_needed = getattr(self, name), _NEEDS.get(self.kind) == name
            if (value is not None) != is_needed:
                raise ConfigError(f"{self}: it {'needs' if is_needed else 'has no'} {name}")
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{self}: {name} = {value} must be above 0")

    def __str__(self) -> str:
        """As in the beginning of a sentence."""
        return f"fault {self.kind!r}"
