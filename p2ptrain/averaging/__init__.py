"""All that an algorithm needs, by one import; `docs/your-own-algorithm.md` writes one.

Neither this nor an algorithm imports torch, numpy, asyncio or grpc.
"""

from p2ptrain.averaging.base import (
    Algorithm,
    CompressedGradients,
    Entries,
    Factors,
    GradientSum,
    Group,
    GroupResult,
    Mean,
    Measured,
    OuterRule,
    Part,
    Swarm,
    check_bucket,
    check_fragment,
    in_turn,
    known_algorithms,
    load_algorithm,
    meet_someone,
)
from p2ptrain.core.choice import Choice, settings_of
from p2ptrain.core.effects import Outcome, What
from p2ptrain.core.messages import AlgorithmMessage
from p2ptrain.core.wait_avoiding import NOBODY, Round, Rule
from p2ptrain.errors import ConfigError, RemoteProtocolError, StateError
from p2ptrain.ids import PeerId, Seconds, Ticket

__all__ = ["Algorithm", "Swarm"]  # what an algorithm is, and what it may ask for
__all__ += ["Group", "GroupResult", "Mean", "Outcome", "What"]  # groups
__all__ += ["OuterRule"]  # what becomes of their means
__all__ += ["CompressedGradients", "GradientSum"]  # sums of a part of the gradients
__all__ += ["Entries", "Factors", "Part"]  # and what such a part is
__all__ += ["check_bucket"]  # gradients that travel behind the passes that make them
__all__ += ["check_fragment"]  # averages of a part of the model
__all__ += ["NOBODY", "Round", "Rule"]  # schedules
__all__ += ["AlgorithmMessage"]  # what algorithms tell each other
__all__ += ["in_turn", "meet_someone"]  # whom they ask first
__all__ += ["ConfigError", "RemoteProtocolError", "StateError"]  # mistakes
__all__ += ["PeerId", "Seconds", "Ticket"]  # plain types
__all__ += ["Choice", "Measured", "settings_of"]  # settings that change while a swarm trains
__all__ += ["known_algorithms", "load_algorithm"]  # by name
