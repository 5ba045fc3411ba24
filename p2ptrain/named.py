"""What is found by name, algorithms and tasks: a module of a package, or ``package.module:Thing``.

Their options are the fields of a dataclass of their own. A name or a value that does not fit is
refused in one sentence before anything starts; what goes beyond types, a range or a relation, is
the business of the dataclass.
"""

import dataclasses
import difflib
import importlib
import pkgutil
import sys
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any

from p2ptrain.errors import ConfigError


def modules_of(package: str, *, but: Collection[str]) -> tuple[str, ...]:
    """The names of all modules of a package, sorted, `but` those that help the others."""
    names = [
        module.name for module in pkgutil.iter_modules(importlib.import_module(package).__path__)
    ]
    return tuple(sorted(name for name in names if name not in but))


def module_of(
    kind: str, name: str, package: str, known: Collection[str]
) -> tuple[types.ModuleType, str]:
    """Import the module of a `kind` of thing, ``task``, and say how the thing in it is called.

    Raises:
        ConfigError: if `name` is none of the `known` ones of our `package`, or of no module.
    """
    module_name, colon, thing = name.partition(":")
    if colon and "" not in sys.path:
        sys.path.append("")  # as `python -m` does: a user's file lies beside the user
    elif not colon:
        if name not in known:
            advice = f"{suggestion(name, known)} there are: {', '.join(known)}".lstrip()
            remedy = f"your own {kind} is named package.module:name"
            raise ConfigError(f"unknown {kind} {name!r}; {advice}; {remedy}")
        module_name, thing = f"{package}.{name}", name
    try:
        return importlib.import_module(module_name), thing
    except (ImportError, ValueError, TypeError) as error:  # the last two: no name of a module
        raise ConfigError(f"{kind} {name!r}: cannot import {module_name!r}: {error}") from error


def check_options(
    owner: str,
    kind: type[Any] | None,  # Any: a dataclass; None if there are no options
    options: Mapping[str, Any],  # Any: this checks
) -> None:
    """Raise ConfigError if one of the options of `owner`, ``task 'digits'``, does not fit."""
    known = [field.name for field in dataclasses.fields(kind)] if kind else []
    hints: dict[str, Any] = {}  # Any: whatever stands behind a field's colon
    with suppress(NameError):  # of a type that is imported for checkers only: anything passes
        hints = typing.get_type_hints(kind) if kind and options else {}
    for key, value in options.items():
        if key not in known:
            advice = suggestion(key, known) or f"its options: {', '.join(known) or 'none'}"
            raise ConfigError(f"{owner} has no option {key!r}; {advice}")
        hint = hints.get(key, Any)
        choices = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
        wanted = type(choices[0]) if choices else hint
        if not _fits(value, wanted):
            name = getattr(wanted, "__name__", str(wanted))
            raise ConfigError(f"{owner}: {key} = {value!r} must be of type {name}")
        if choices and value not in choices:
            there_are = ", ".join(map(str, choices))
            raise ConfigError(f"{owner}: {key} = {value!r}; there are: {there_are}")


def check_types(
    owner: str,
    kind: type[Any],  # Any: a dataclass
    values: Mapping[str, Any],  # Any: this checks
) -> None:
    """Raise ConfigError if one of the values of `kind`, which ``Peer`` was given, does not fit."""
    hints = typing.get_type_hints(kind)
    for key, value in values.items():
        if not _fits(value, hints[key]):
            wanted = _described(hints[key])
            raise ConfigError(f"{owner}: {key} = {value!r} must be {wanted}")


def whole_in(what: str, value: Any) -> int:  # Any: a number of Python, numpy or torch
    """`value` as an int, 0 or more. Raises ConfigError, which names it `what`, if it is none."""
    number = number_in(what, value)
    if not (number >= 0 and number.is_integer()):
        raise ConfigError(f"{what} = {value} must be a whole number, 0 or more")
    return int(number)


def number_in(what: str, value: Any) -> float:  # Any: as above
    """`value` as a float; a tensor of one element, too. Raises ConfigError if it is no number."""
    try:
        if not isinstance(value, str):
            return float(value.detach() if hasattr(value, "detach") else value)
        raise TypeError("a text")
    except (TypeError, ValueError, RuntimeError) as error:
        shown = " ".join(repr(value).split())[:80]
        raise ConfigError(f"{what} = {shown} must be one number") from error


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
    if typing.get_origin(hint) is tuple:
        return isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value)
    return not dataclasses.is_dataclass(hint) or isinstance(value, typing.cast("type", hint))


def _described(hint: Any) -> str:  # Any: as above
    """What fits the hint, in words."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(map(_described, typing.get_args(hint)))
    if dataclasses.is_dataclass(hint):
        first = dataclasses.fields(hint)[0]
        return f"{getattr(hint, '__name__', hint)}({first.name}=...)"
    words = {int: "a whole number", float: "a number", str: "a text", bool: "True or False"}
    if typing.get_origin(hint) is tuple:
        return "a list of texts"
    return words.get(hint, "None" if hint is types.NoneType else str(hint))
