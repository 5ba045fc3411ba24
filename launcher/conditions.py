"""What lies between the peers of a scenario: ``[link]``.

Units are those in which people speak of networks. Only a backend that makes its own network can
keep to them; others say so instead of running something else.
"""

from dataclasses import dataclass

from p2ptrain.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """One way from a peer to another, the same for all; by default a quiet local network."""

    latency_ms: float = 0.2
    """One way."""

    jitter_ms: float = 0.0
    """Up to so much is added, for each message anew. More than the gap between two messages: they
    overtake each other."""

    loss: float = 0.0
    """Share of control messages that vanish. Slices travel on streams, which lose nothing."""

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
