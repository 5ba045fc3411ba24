"""All that an algorithm needs, by one import; `docs/your-own-algorithm.md` writes one.

Neither this nor an algorithm imports torch, numpy, asyncio or grpc.
"""

from p2ptrain.averaging.base import (
    Algorithm,
    Group,
    GroupResult,
    Mean,
    Swarm,
    known_algorithms,
    load_algorithm,
)
from p2ptrain.averaging.order import in_turn
from p2ptrain.core.effects import Outcome, What
from p2ptrain.core.messages import AlgorithmMessage
from p2ptrain.core.wait_avoiding import NOBODY, Round, Rule
from p2ptrain.errors import ConfigError, RemoteProtocolError, StateError
from p2ptrain.ids import PeerId, Seconds, Ticket

__all__ = [
    # what an algorithm is, and what it may ask for
    "Algorithm",
    "Swarm",
    # groups: while they are formed, and how they ended
    "Group",
    "Mean",
    "GroupResult",
    "Outcome",
    "What",
    # schedules
    "Round",
    "Rule",
    "NOBODY",
    # what algorithms tell each other
    "AlgorithmMessage",
    "in_turn",
    # plain types and mistakes
    "PeerId",
    "Seconds",
    "Ticket",
    "ConfigError",
    "RemoteProtocolError",
    "StateError",
    # by name
    "known_algorithms",
    "load_algorithm",
]
