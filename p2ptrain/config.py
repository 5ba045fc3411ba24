"""One peer's whole configuration, and TOML into dataclasses with errors that help.

Each part lives beside its owner; this module only composes them. `from_mapping` serves the
launcher's scenarios too: unknown keys are errors with a suggestion, values are checked by pydantic,
relations by the dataclasses' own ``__post_init__``. A value has the type of its field: ``"8"`` is
no number and ``1`` is no boolean; a whole number is good where any number is.
"""

import dataclasses
import json
import tomllib
import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from p2ptrain.averaging.base import load_algorithm
from p2ptrain.compute.device_name import parse_device
from p2ptrain.compute.step_timing import StepTiming
from p2ptrain.compute.training_config import TrainingConfig
from p2ptrain.errors import CodecError, ConfigError
from p2ptrain.named import suggestion
from p2ptrain.net import wire
from p2ptrain.runtime.batches import check_divides
from p2ptrain.runtime.settings import PeerConfig, StopConfig

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(PeerConfig):
    """A peer and the built-in task that it trains: what ``p2ptrain peer --config`` reads."""

    task: str = "digits"
    """A file of `p2ptrain/compute/tasks`, or ``package.module:function``."""

    task_options: dict[str, Any] = field(default_factory=dict)  # Any: the task checks
    """The task's own; `docs/tasks.md` lists them."""

    rank: int = 0
    """Rank among `peers`, from 0: which shard of the data is this peer's, and how it is paced."""

    device: str = "auto"
    """What to compute on: ``auto``, ``cpu``, ``cuda``, ``cuda:1``, ``mps`` or ``xpu``. ``auto`` is
    the accelerator that is there, or the processor. Without an index, the peers of one machine take
    its devices in turn, by ``LOCAL_RANK`` in the environment or else by `rank`."""

    discover: str = ""
    """``host:port`` of a name that stands for all peers, each at that port: join the peers that are
    there (`console/discover.py`). Or the names of all, with commas between them. Instead of `join`;
    `listen` is only needed where several of the addresses are of one machine."""

    advertise_ip: bool = False
    """Look the host of `advertise` up at the start, and every half minute from then on, and
    advertise the address behind it. For where a name stands for another address after a while, or
    when its peer starts again: others would go on asking the old one, since connections remember
    for half a minute what a name stood for."""

    training: TrainingConfig = field(default_factory=TrainingConfig)
    pace: StepTiming = field(default_factory=StepTiming)

    def __post_init__(self) -> None:
        PeerConfig.__post_init__(self)
        self._check_discover()
        parse_device(self.device)
        if not 0 <= self.rank < self.peers:
            raise ConfigError(
                f"rank = {self.rank} must be between 0 and {self.peers - 1} (peers = {self.peers})"
            )
        self.pace.check(self.peers)
        self.training.check(self.stop.samples)

    def check_batches(self) -> None:
        """Refuse batches by speed where they make no sense.

        Raises:
            ConfigError: naming the algorithm; also if there is no such algorithm or option.
        """
        if self.training.batches == "by_speed":
            algorithm = load_algorithm(self.algorithm, self.algorithm_options)
            check_divides(self.algorithm, algorithm)

    def _check_discover(self) -> None:
        if self.discover and self.join:
            raise ConfigError(
                f"discover = {self.discover!r} and join = {list(self.join)}; give one of them"
            )
        try:
            for name in self.discovered_names:
                wire.address(name)
        except CodecError as error:
            raise ConfigError(f"discover = {error}") from error

    @property
    def discovered_names(self) -> tuple[str, ...]:
        """The names in `discover`."""
        return tuple(self.discover.split(",")) if self.discover else ()


__all__ = [
    "RunConfig",
    "StopConfig",
    "changed",
    "from_mapping",
    "load_toml",
    "read_toml",
    "to_toml",
]


def load_toml(kind: type[T], path: Path) -> T:
    """Read a `kind` from a TOML file.

    Raises:
        ConfigError: if the file cannot be read, is not TOML, or does not fit `kind`.
    """
    return from_mapping(kind, read_toml(path), str(path))


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises ConfigError if it cannot be read or is not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def from_mapping(kind: type[T], mapping: Mapping[str, Any], source: str) -> T:
    """Build the dataclass `kind` from plain values; `source` names where they came from.

    Raises:
        ConfigError: one sentence that names `source`, the key and the value.
    """
    _check_keys(kind, mapping, source, "")
    try:
        # As JSON: there strict types still take an array for a tuple and a table for a dataclass.
        return TypeAdapter(kind).validate_json(json.dumps(mapping, default=str), strict=True)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = _dotted(first["loc"])
        if first["type"] == "missing":
            raise ConfigError(f"{source}: {where} is missing") from error
        raise ConfigError(
            f"{source}: {where} = {first['input']!r}: {first['msg'].lower()}"
        ) from error


def to_toml(value: object, without: Collection[str] = ()) -> str:
    """Write a configuration dataclass as TOML that `load_toml` reads back; None is left out."""
    assert dataclasses.is_dataclass(value)
    assert not isinstance(value, type)
    table = {key: item for key, item in dataclasses.asdict(value).items() if key not in without}
    return "\n".join(_toml_lines(table, "")) + "\n"


def changed(config: T, changes: Mapping[str, Any], source: str) -> T:
    """The configuration with other values; in `changes` a table has only the keys that differ.

    Raises:
        ConfigError: as `from_mapping`.
    """
    assert dataclasses.is_dataclass(config)
    assert not isinstance(config, type)
    return from_mapping(type(config), _merged(dataclasses.asdict(config), changes), source)


def _merged(table: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**table, **changes}
    for key, value in changes.items():
        if isinstance(value, Mapping) and isinstance(table.get(key), Mapping):
            merged[key] = _merged(table[key], value)
    return merged


def _toml_lines(table: Mapping[str, Any], prefix: str) -> list[str]:
    simple, nested = [], []
    for name, value in table.items():
        key = _toml_key(str(name))
        if isinstance(value, Mapping):
            nested += [f"\n[{prefix}{key}]", *_toml_lines(value, f"{prefix}{key}.")]
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], Mapping):
            for item in value:
                nested += [f"\n[[{prefix}{key}]]", *_toml_lines(item, f"{prefix}{key}.")]
        elif value is not None:
            simple.append(f"{key} = {_toml_value(value)}")
    return simple + nested


def _toml_key(name: str) -> str:
    bare = name.isascii() and name.replace("-", "").replace("_", "").isalnum()
    return name if bare else _toml_value(name)


def _toml_value(value: Any) -> str:  # Any: whatever a configuration field may hold
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    escaped = "".join(
        {"\\": "\\\\", '"': '\\"'}.get(c, c if c.isprintable() else f"\\U{ord(c):08x}")
        for c in str(value)
    )
    return f'"{escaped}"'


RENAMED = {"slice_kib": "chunk_kib"}
"""Keys of former versions, and what they are called now."""


def _check_keys(kind: Any, mapping: object, source: str, prefix: str) -> None:
    """Raise for the first key that `kind` does not have, anywhere inside."""
    if not dataclasses.is_dataclass(kind) or not isinstance(mapping, Mapping):
        return
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    for key, value in mapping.items():
        if key not in names:
            advice = suggestion(str(key), names) or f"known keys: {', '.join(names)}"
            if key in RENAMED:
                advice = f"it is called {RENAMED[key]!r} now"
            raise ConfigError(f"{source}: unknown key {prefix + str(key)!r}; {advice}")
        for inner in _dataclasses_within(hints[key]):
            if isinstance(value, (list, tuple)):
                for index, item in enumerate(value):
                    _check_keys(inner, item, source, f"{prefix}{key}[{index}].")
            else:
                _check_keys(inner, value, source, f"{prefix}{key}.")


def _dataclasses_within(hint: Any) -> list[Any]:
    """The dataclass in ``X``, ``X | None``, ``tuple[X, ...]`` or ``list[X]``, if there is one."""
    if dataclasses.is_dataclass(hint):
        return [hint]
    if typing.get_origin(hint) in (typing.Union, types.UnionType, tuple, list):
        return [found for part in typing.get_args(hint) for found in _dataclasses_within(part)]
    return []


def _dotted(location: tuple[int | str, ...]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text
