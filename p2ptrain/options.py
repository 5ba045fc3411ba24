"""Options of an algorithm or a task: fields of a dataclass of its own, checked by name and type.

A name or a value that does not fit is refused in one sentence before anything starts. What goes
beyond types, a range or a relation, is the business of the dataclass.
"""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from p2ptrain.errors import ConfigError


def check_options(
    owner: str,
    kind: type[Any] | None,  # Any: a dataclass; None if there are no options
    options: Mapping[str, Any],  # Any: this checks
) -> None:
    """Raise ConfigError if one of the options of `owner`, ``task 'digits'``, does not fit."""
    known = [field.name for field in dataclasses.fields(kind)] if kind else []
    hints = typing.get_type_hints(kind) if kind else {}
    for key, value in options.items():
        if key not in known:
            advice = suggestion(key, known) or f"its options: {', '.join(known) or 'none'}"
            raise ConfigError(f"{owner} has no option {key!r}; {advice}")
        hint = hints[key]
        choices = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
        wanted = type(choices[0]) if choices else hint
        if not _fits(value, wanted):
            name = getattr(wanted, "__name__", str(wanted))
            raise ConfigError(f"{owner}: {key} = {value!r} must be of type {name}")
        if choices and value not in choices:
            there_are = ", ".join(map(str, choices))
            raise ConfigError(f"{owner}: {key} = {value!r}; there are: {there_are}")


def suggestion(wrong: str, known: Iterable[str]) -> str:
    """What was meant, as a question for a message; empty if nothing is near."""
    near = difflib.get_close_matches(wrong, list(known), n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else ""


def _fits(value: object, hint: Any) -> bool:  # Any: whatever stands behind a field's colon
    """True if a value out of TOML fits the hint; hints that TOML cannot tell apart are let pass."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in typing.get_args(hint))
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint in (int, str, bool, types.NoneType):
        return type(value) is hint
    return True
