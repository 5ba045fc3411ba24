"""Answer `p2ptrain set`: change the settings of the whole swarm, for who may.

It is a member's right, or that of who has a token for members. Where traffic is plain, a caller
from another machine is a stranger and is refused; one on this machine could stop the peer as well.
"""

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from p2ptrain.core.choice import Choice
from p2ptrain.errors import ConfigError, RefusedError
from p2ptrain.net.wire import SetReply, SetRequest
from p2ptrain.runtime.live_settings import check_choice

if TYPE_CHECKING:
    from p2ptrain.runtime.driver import Driver

NAMED = ("algorithm", "codec", "gradient_codec")
"""All other names are options of the algorithm."""


def answer(driver: "Driver", is_member: bool, request: SetRequest) -> SetReply:
    """Carry a request out; the reply has the sentence of what was wrong, or what was changed.

    Raises:
        RefusedError: for a stranger.
    """
    if not is_member:
        raise RefusedError(
            f"{driver.name} takes settings from members only, and in plain text it knows none: "
            "ask on the machine of the peer, or start the swarm with a token"
        )
    try:
        choice = changed(driver.live.choice, _values_of(request.text))
        check_choice(driver.config, choice)
        if choice.text == driver.live.choice.text and not driver.live.is_due:
            return SetReply(f"the swarm works with {choice} already")
        change = driver.live.propose(choice, request.why or f"{driver.name} was asked to")
    except ConfigError as error:
        return SetReply(str(error))
    return SetReply("", str(choice), change.epoch)


def changed(before: Choice, values: dict[str, Any]) -> Choice:  # Any: JSON
    """`before` with other values; another algorithm begins with its own defaults.

    Raises:
        ConfigError: for nothing, or a value of another type.
    """
    if not values:
        raise ConfigError("nothing is set; write NAME=VALUE, such as algorithm=wagma")
    named = {name: values[name] for name in NAMED if name in values}
    for name, value in named.items():
        if not isinstance(value, str):
            raise ConfigError(f"{name} = {value!r} must be a name")
    options = {name: value for name, value in values.items() if name not in NAMED}
    if named.get("algorithm", before.algorithm) == before.algorithm:
        options = {**before.options, **options}
    return replace(before, **named, options=options)


def _values_of(text: str) -> dict[str, Any]:  # Any: JSON
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"settings that are no JSON: {error}") from error
    plain = (str, int, float, bool)
    if not isinstance(values, dict) or not all(isinstance(v, plain) for v in values.values()):
        raise ConfigError("settings are names with plain values")
    return values
