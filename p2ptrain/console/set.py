"""Change the settings of a running swarm (`p2ptrain set`)."""

import json
from collections.abc import Sequence
from typing import Any

from p2ptrain.core.epochs import count_of
from p2ptrain.errors import ConfigError
from p2ptrain.ids import Address, Seconds
from p2ptrain.net.ask import asking
from p2ptrain.net.grpc_config import GrpcConfig
from p2ptrain.net.wire import SetRequest


def values_of(words: Sequence[str]) -> dict[str, Any]:  # Any: plain JSON values
    """``tau=5`` and the like as names and values. Raises ConfigError for another form."""
    values: dict[str, Any] = {}
    for word in words:
        name, mark, text = word.partition("=")
        if not (name and mark and text):
            raise ConfigError(f"{word!r} sets nothing; write NAME=VALUE, such as algorithm=wagma")
        if name in values:
            raise ConfigError(f"{name} is given twice; leave one out")
        values[name] = _value_of(text)
    return values


def _value_of(text: str) -> str | int | float | bool:
    """A number or a truth value, if it is one, and else a text."""
    plain = {"true": True, "false": False}.get(text.lower())
    if plain is not None:
        return plain
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


async def set_settings(
    address: Address, words: Sequence[str], why: str, timeout_s: Seconds, network: GrpcConfig
) -> str:
    """Ask the peer at `address` to change the swarm; returns what it says.

    Raises:
        ConfigError: for settings that cannot be.
        TransportError, RefusedError, CodecError: if it does not answer, or refuses us.
    """
    request = SetRequest(json.dumps(values_of(words)), why)
    async with asking(address, network) as asker:
        reply = await asker.set(request, timeout_s)
    if reply.refusal:
        raise ConfigError(reply.refusal)
    return f"change {count_of(reply.epoch)}: the swarm works with {reply.settings} from now on"
