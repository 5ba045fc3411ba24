"""p2ptrain: peers of unequal speed train one PyTorch model together, without a server."""

from typing import TYPE_CHECKING, Any

from p2ptrain.averaging.base import Algorithm, GroupResult, Swarm, known_algorithms
from p2ptrain.errors import (
    ConfigError,
    P2PTrainError,
    ProtocolError,
    RefusedError,
    StateError,
    TransportError,
)

if TYPE_CHECKING:
    from p2ptrain.runtime.peer import Peer
    from p2ptrain.runtime.settings import PeerConfig, StopConfig

__version__ = "0.1.0"

__all__ = [
    # what a program holds
    "Peer",
    "PeerConfig",
    "StopConfig",
    # what an algorithm is written against
    "Algorithm",
    "GroupResult",
    "Swarm",
    "known_algorithms",
    # what can go wrong
    "ConfigError",
    "P2PTrainError",
    "ProtocolError",
    "RefusedError",
    "StateError",
    "TransportError",
]


def __getattr__(name: str) -> Any:  # Any: a class
    """Import torch only when a `Peer` is wanted: the protocol and the simulator do without it."""
    if name == "Peer":
        from p2ptrain.runtime.peer import Peer

        return Peer
    if name in ("PeerConfig", "StopConfig"):
        from p2ptrain.runtime import settings

        return getattr(settings, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
