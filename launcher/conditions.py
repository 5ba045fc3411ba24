"""Define the conditions of a scenario: ``[link]``, ``[machines]``, ``[[devices]]``, ``[[faults]]``.

Units are the usual ones of networks. Only a backend with a network of its own can enforce a link,
and only one with its own time can let clocks drift; other backends refuse such a scenario instead
of running something else.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from p2ptrain.compute.device_name import parse_device
from p2ptrain.errors import ConfigError
from p2ptrain.ids import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """One direction between two peers, the same for all pairs; by default a quiet local network."""

    latency_ms: float = 0.2
    """One way."""

    jitter_ms: float = 0.0
    """The maximum that is added, drawn for each message. If it exceeds the gap between two
    messages, they can be reordered."""

    loss: float = 0.0
    """Fraction of control messages that are lost. Chunks travel on streams, which lose nothing."""

    duplication: float = 0.0
    """Fraction of control messages that arrive twice."""

    bandwidth_mbit_s: float = 1000.0
    """The rate at which one peer can send, to all others together."""

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
    """Peers that share machines: the first `peers` by rank share the first machine, and so on.

    Two peers of one machine are connected by the scenario's link.
    """

    peers: int
    """On each machine; the last one may have fewer."""

    uplink_mbit_s: float
    """The rate at which all peers of one machine together can send to others. Each peer's own limit
    applies as well."""

    latency_ms: float | None = None
    """One way to a peer of another machine. None: that of the link."""

    def __post_init__(self) -> None:
        if self.peers < 1:
            raise ConfigError(f"machines peers = {self.peers} must be 1 or more")
        if not 0 < self.uplink_mbit_s < float("inf"):
            raise ConfigError(f"machines uplink_mbit_s = {self.uplink_mbit_s} must be above 0")
        if self.latency_ms is not None and not 0 <= self.latency_ms < float("inf"):
            raise ConfigError(f"machines latency_ms = {self.latency_ms} must be 0 or more")

    def of(self, rank: int) -> str:
        """The name of the machine that `rank` is on."""
        return f"m{rank // self.peers:02}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """What each of `peers` has of its own.

    Containers limit processor, memory and uplink; a simulation has links and the uplink; processes
    have `device` only.
    """

    peers: tuple[int, ...]
    """Ranks."""

    device: str = ""
    """What it computes on, as `device` of ``[peer]``: ``cuda:1``, say. Empty: that one. For real
    peers; a container is given this GPU and no other."""

    cpus: float | None = None
    """Processor time, over all processors: 0.5 is half of one. None: no limit."""

    memory_mb: int | None = None
    """A peer that needs more is killed. Below 400 no peer can start."""

    uplink_mbit_s: float | None = None
    """The rate at which it can send, to all others together. None: that of the link."""

    downlink_mbit_s: float | None = None
    """The rate at which each other peer can send to it. None: that of the link. Simulation only,
    as the next two."""

    latency_ms: float | None = None
    """One way, between it and any other peer. None: that of the link."""

    loss: float | None = None
    """Fraction of control messages that are lost, to it and from it. None: that of the link."""

    def __post_init__(self) -> None:
        if not self.peers or min(self.peers) < 0:
            raise ConfigError(f"devices peers = {list(self.peers)} must be ranks, from 0")
        if self.device:
            parse_device(self.device)
        for name in ("cpus", "memory_mb", "uplink_mbit_s", "downlink_mbit_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"devices {name} = {value} must be above 0")
        if self.latency_ms is not None and not 0 <= self.latency_ms < float("inf"):
            raise ConfigError(f"devices latency_ms = {self.latency_ms} must be 0 or more")
        if self.loss is not None and not 0 <= self.loss < 1:
            raise ConfigError(f"devices loss = {self.loss} is a share: at least 0 and below 1")

    @property
    def limits(self) -> Mapping[str, float]:
        """What it is to have less of than there is, by name."""
        names = ("cpus", "memory_mb", "uplink_mbit_s", "downlink_mbit_s", "latency_ms", "loss")
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def own_link(self) -> Mapping[str, float]:
        """What is other about its links, in both directions: by names of `LinkConfig`."""
        own = {"latency_ms": self.latency_ms, "loss": self.loss}
        return {name: value for name, value in own.items() if value is not None}


Kind = Literal["crash", "pause", "slow", "drift", "throttle", "partition", "leave", "join"]

_NEEDS: dict[Kind, str] = {"slow": "factor", "drift": "rate", "throttle": "mbit_s"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultConfig:
    """A fault of each of `peers`; a partition separates them from the others."""

    kind: Kind
    """``crash``: kill -9. ``pause``: SIGSTOP. ``slow``: computing takes `factor` times as long.
    ``drift``: the clock advances by `rate` seconds per second. ``throttle``: the peer can send no
    more than `mbit_s`. ``partition``: nothing passes to or from any other peer. ``leave``: a clean
    leave. ``join``: the peer starts only then; until then it is absent."""

    peers: tuple[int, ...]
    """Ranks."""

    at_s: Seconds | None = None
    """Begins this long after the first step of the run."""

    at_step: int | None = None
    """Or as soon as the peer has made this many steps; of a partition, the first of `peers`."""

    for_s: Seconds | None = None
    """Ends this much later: a peer that crashed or left starts again, a paused one goes on. None:
    never."""

    factor: float | None = None
    """Of ``slow``: how many times as long a step takes."""

    rate: float | None = None
    """Of ``drift``: seconds on the clock per second."""

    mbit_s: float | None = None
    """Of ``throttle``: the rate at which the peer can still send."""

    def __post_init__(self) -> None:
        if not self.peers or min(self.peers) < 0:
            raise ConfigError(f"{self}: peers = {list(self.peers)} must be ranks, from 0")
        if (self.at_s is None) == (self.at_step is None):
            raise ConfigError(f"{self}: give exactly one of at_s and at_step")
        if self.at_s is not None and not 0 <= self.at_s < float("inf"):
            raise ConfigError(f"{self}: at_s = {self.at_s} must be a number, 0 or more")
        if self.at_step is not None and self.at_step < 1:
            raise ConfigError(
                f"{self}: at_step = {self.at_step} must be 1 or more; at_s = 0 is the first step"
            )
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
        """Format for the beginning of a sentence."""
        return f"fault {self.kind!r}"
