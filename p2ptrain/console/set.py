"""Change the settings of a running swarm (`p2ptrain set`)."""

import json
from collections.abc import Sequence

from p2ptrain.core.choice import settings_of
from p2ptrain.core.epochs import count_of
from p2ptrain.errors import ConfigError
from p2ptrain.ids import Address, Seconds
from p2ptrain.net.ask import asking
from p2ptrain.net.grpc_config import GrpcConfig
from p2ptrain.net.wire import SetRequest


async def set_settings(
    address: Address, words: Sequence[str], why: str, timeout_s: Seconds, network: GrpcConfig
) -> str:
    """Ask the peer at `address` to change the swarm; returns what it says.

    Raises:
        ConfigError: for settings that cannot be.
        TransportError, RefusedError, CodecError: if it does not answer, or refuses us.
    """
    request = SetRequest(json.dumps(settings_of(words)), why)
    async with asking(address, network) as asker:
        reply = await asker.set(request, timeout_s)
    if reply.refusal:
        raise ConfigError(reply.refusal)
    return f"change {count_of(reply.epoch)}: the swarm works with {reply.settings} from now on"
