"""p2ptrain: peers of unequal speed train one PyTorch model together, without a server."""

from p2ptrain.averaging.base import Algorithm, GroupResult, Swarm, known_algorithms
from p2ptrain.errors import (
    ConfigError,
    P2PTrainError,
    ProtocolError,
    RefusedError,
    StateError,
    TransportError,
)
from p2ptrain.runtime.peer import Peer, PeerConfig, StopConfig

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
