"""Read what a dataclass says of its fields, and show it wherever they are keyword arguments.

A field's text is the string beneath it. `help(Peer)` and the reference pages read it from here, so
that each setting is described once. Without source files, as in a frozen program, texts are empty.
"""

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import MISSING, Field
from inspect import Parameter
from typing import Any, TypeVar

T = TypeVar("T")


def texts_of(kind: type[Any]) -> dict[str, str]:  # Any: a dataclass
    """The string beneath each field of `kind` and of its bases, by field.

    A field that is a dataclass itself, and has no text, has the first line of that dataclass.
    """
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        for name, hint in inspect.get_annotations(base).items():
            if dataclasses.is_dataclass(hint):
                texts[name] = (inspect.getdoc(hint) or "").partition("\n")[0]
        try:
            (body,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except (OSError, TypeError):  # no source: made in a console, or by a program
            continue
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
            ):
                texts[field.target.id] = inspect.cleandoc(str(text.value.value))
    return texts


def default_of(field: Field[Any]) -> str:  # Any: of whatever type
    """The default of a field as source code; ``required`` if it has none."""
    if field.default is not MISSING:
        return f'"{field.default}"' if isinstance(field.default, str) else repr(field.default)
    if field.default_factory is MISSING:
        return "required"
    made = field.default_factory()
    return f"{type(made).__name__}()" if dataclasses.is_dataclass(made) else repr(made)


def takes_settings(config: type[Any]) -> Callable[[type[T]], type[T]]:  # Any: a dataclass
    """Show the fields of `config` in the signature and the help of a class, instead of ``**``."""

    def documented(kind: type[T]) -> type[T]:
        texts = texts_of(config)
        lines = [
            f"    {field.name}: {_one_line(texts.get(field.name, ''))} Default: {default_of(field)}"
            for field in dataclasses.fields(config)
        ]
        kind.__doc__ = "\n".join([inspect.getdoc(kind) or "", "", "Keyword Args:", *lines])
        init = vars(kind)["__init__"]
        setattr(init, "__signature__", _signature(init, config))  # noqa: B010 - mypy: no such name
        return kind

    return documented


def _signature(init: Callable[..., None], config: type[Any]) -> inspect.Signature:  # Any: as above
    plain = inspect.signature(init)
    kept = [one for one in plain.parameters.values() if one.kind is not Parameter.VAR_KEYWORD]
    shown = [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=_Source(default_of(field)),
            annotation=field.type,
        )
        for field in dataclasses.fields(config)
    ]
    return plain.replace(parameters=[*kept, *shown])


class _Source(str):
    """A default that shows as its source code."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _one_line(text: str) -> str:
    return " ".join(text.split())
