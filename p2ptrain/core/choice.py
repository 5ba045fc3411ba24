"""What a swarm may change while it runs: its algorithm, that one's options, and the codecs.

`Choice.text` is how a choice travels and how epochs are told apart (`core/epochs.py`): JSON with
sorted keys, so that equal choices have equal texts.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from p2ptrain.core.messages import MOST_SETTINGS_TEXT
from p2ptrain.errors import CodecError, ConfigError

KEYS = ("algorithm", "options", "codec", "gradient_codec")


@dataclass(frozen=True, slots=True)
class Choice:
    """One set of settings."""

    algorithm: str
    options: Mapping[str, Any] = field(default_factory=dict)  # Any: the algorithm checks
    codec: str = "fp32"
    """Of models."""
    gradient_codec: str = "fp32"

    @property
    def text(self) -> str:
        """As JSON. Raises ConfigError if it is too long to send, or has values without JSON."""
        try:
            text = json.dumps(
                {key: getattr(self, key) for key in KEYS},
                sort_keys=True,
                default=dict,
                allow_nan=False,
            )
        except (TypeError, ValueError) as error:
            raise ConfigError(f"options of {self.algorithm}: {error}; write plain values") from None
        if len(text) > MOST_SETTINGS_TEXT:
            raise ConfigError(
                f"settings of {len(text)} characters; at most {MOST_SETTINGS_TEXT} travel: shorten "
                "the options"
            )
        return text

    def __str__(self) -> str:
        """In few words: ``wagma tau=5, codec int8``."""
        words = [self.algorithm, *(f"{name}={value}" for name, value in self.options.items())]
        codecs = [
            f", {name} {value}"
            for name, value in (("codec", self.codec), ("gradient_codec", self.gradient_codec))
            if value != "fp32"
        ]
        return " ".join(words) + "".join(codecs)


def choice_of(text: str) -> Choice:
    """The choice that a text says. Raises CodecError for any other text."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CodecError(f"settings that are no JSON: {error}") from error
    if not isinstance(values, dict) or sorted(values) != sorted(KEYS):
        raise CodecError(f"settings without exactly {', '.join(KEYS)}: {text[:100]}")
    options = values["options"]
    texts = (values["algorithm"], values["codec"], values["gradient_codec"])
    if not isinstance(options, dict) or not all(isinstance(one, str) for one in texts):
        raise CodecError(f"settings of other types than they have: {text[:100]}")
    plain = (str, int, float, bool, type(None))
    if not all(isinstance(value, plain) for value in options.values()):
        raise CodecError(f"options that are no plain values: {text[:100]}")
    return Choice(texts[0], options, texts[1], texts[2])


def settings_of(words: Sequence[str]) -> dict[str, Any]:  # Any: plain JSON values
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
