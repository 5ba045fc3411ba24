"""Read the JSON files in the folder of a run: what is missing or damaged there is one sentence.

A file is checked for what tables, report and comparison read of it, by the dataclasses below; what
it holds beside that is left as it is.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from p2plab.scenario import LeftOut
from p2ptrain.errors import ConfigError

Table = dict[str, Any]  # Any: JSON that is only passed on
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Final:
    loss: float | None
    accuracy: float | None
    consensus_distance: float | None


@dataclass(frozen=True, slots=True)
class _Row:
    """What the rows of a comparison and the summaries have in common."""

    algorithm: str
    samples: float
    samples_per_s: float
    wall_s: float
    averages_per_peer: float
    failed_share: float | None
    time_to_target_s: float | None
    final: _Final


@dataclass(frozen=True, slots=True)
class _Peer:
    peer: str
    state: str
    why: str
    steps: int | None
    samples: int | None
    compute_s: float | None
    wait_s: float | None
    comm_s: float | None
    sent_bytes: int | None
    received_bytes: int | None
    groups_formed: int | None
    groups_failed: dict[str, int] | None
    staleness_p50: float | None
    staleness_p99: float | None


@dataclass(frozen=True, slots=True)
class _Faults:
    instances: list[Table]
    present: float | None
    kept: float | None
    kept_of_present: float | None


@dataclass(frozen=True, slots=True)
class Summary(_Row):
    """``summary.json`` of an algorithm."""

    backend: str
    steps: int
    bytes_per_peer: float | None
    longest_gap_s: float | None
    silences: list[str]
    notes: list[str]
    faults: _Faults
    peers: list[_Peer]


@dataclass(frozen=True, slots=True)
class Point:
    """Of ``curve.json``, a list; null where a number was not finite."""

    wall_s: float
    samples: int
    loss: float | None
    accuracy: float | None
    consensus_distance: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """``comparison.json`` of a run."""

    scenario: str
    peers: int
    backend: str
    rows: list[_Row]
    partial: str | None


@dataclass(frozen=True, slots=True)
class Beginning:
    """``begun.json``, written before the first algorithm starts; a comparison has it all, too."""

    left_out: list[LeftOut]
    machine: Table
    why_partial: str | None = None


def read_json(path: Path, kind: type[T], remedy: str) -> Any:  # Any: JSON of that kind
    """The JSON in `path` as it stands there, or None if there is no such file.

    Args:
        path: of the file.
        kind: what it must have the values of.
        remedy: what makes the file anew, as the end of a sentence.

    Raises:
        ConfigError: if it cannot be read, or is not of that kind.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        TypeAdapter(kind).validate_python(found)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        raise ConfigError(f"{path} is damaged: {_first_of(error)}; {remedy}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {error}; {remedy}") from error
    return found


def _first_of(error: ValidationError) -> str:
    """The first value that is wrong, and where it stands."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        return f"{where} is missing"
    value = f"{first['input']!r:.40}"
    return f"{where} = {value} is of another kind" if where else f"it holds {value}"


def check_is_a_folder(folder: Path) -> None:
    """Refuse what is no folder, before anything is looked for in it.

    Raises:
        ConfigError: naming the folder that a file is in.
    """
    if folder.is_file():
        raise ConfigError(f"{folder} is a file; give the folder of the run, {folder.parent}")
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}; give one that a run wrote")


def check_is_a_run(folder: Path) -> None:
    """Refuse the folder of something else.

    Raises:
        ConfigError: if it holds no run.
    """
    check_is_a_folder(folder)
    if not (folder / "scenario.toml").exists():
        raise ConfigError(f"{folder} holds no run: there is no scenario.toml in it")


def no_results(folder: Path) -> ConfigError:
    """The mistake of asking for the results of a run that has none yet."""
    return ConfigError(f"{folder} holds no results: no algorithm has a summary.json yet")


def check_has_results(folder: Path) -> None:
    """Refuse a folder of which there is nothing to report.

    Raises:
        ConfigError: if it holds no run, or none of its algorithms has ended.
    """
    check_is_a_run(folder)
    if not any(folder.glob("*/summary.json")):
        raise no_results(folder)
