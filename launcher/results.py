"""Present the results of a run, and read them again from its folder.

A run writes ``scenario.toml`` before its first algorithm starts, and ``summary.json`` and
``curve.json`` of each algorithm as soon as it has ended. So whatever ends a run, Ctrl-C, an error
or a lost backend, the algorithms that ended keep their table, report and pictures; these say that
they are *partial*, and why.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from p2plab.backends.base import PeerStatus
from p2plab.collect import write_json
from p2plab.compare import compare, means
from p2plab.consensus import CurvePoint
from p2plab.harness.claims import Json
from p2plab.machine import describe_machine
from p2plab.plot import plot_comparison
from p2plab.report import write_report
from p2plab.run import Run, seeded
from p2plab.scenario import (
    LeftOut,
    Scenario,
    folder_of_algorithm,
    load_scenario,
    metric_of,
    with_changes,
)
from p2ptrain.errors import ConfigError, P2PTrainError

Finished = list[tuple[Run, Json]]
"""The algorithms of one seed that ended, each with its summary."""

_FIGURES = {
    "samples per second": ("samples_per_s", ",.0f"),
    "seconds to the target": ("time_to_target_s", ".1f"),
    "accuracy": ("final.accuracy", ".4f"),
    "loss": ("final.loss", ".4f"),
    "consensus distance": ("final.consensus_distance", ".3g"),
    "averages per peer": ("averages_per_peer", ",.0f"),
    "failed share": ("failed_share", ".1%"),
    "seconds of the run": ("wall_s", ".1f"),
}


def folder_of(one: Scenario, whole: Scenario, folder: Path) -> Path:
    """The first seed's results are where those of a single seed are; others have subfolders."""
    return folder if one.seed == whole.seed else folder / "seeds" / str(one.seed)


def write_down(scenario: Scenario, folder: Path) -> None:
    """Write what is about to run, and take away what an earlier run of it yielded."""
    for one in seeded(scenario):
        for algorithm in scenario.algorithms:
            place = folder_of_algorithm(folder_of(one, scenario, folder), algorithm)
            (place / "summary.json").unlink(missing_ok=True)
    (folder / "scenario.toml").write_text(scenario.written(), encoding="utf-8")


def why_it_ended(error: BaseException) -> str:
    """Why a run ended before its last algorithm had, as the rest of a sentence after "since"."""
    if isinstance(error, P2PTrainError):
        return str(error)
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return "the run was interrupted"
    return f"the launcher failed ({type(error).__name__}: {error})"


def present(
    folder: Path,
    scenario: Scenario,
    by_seed: Sequence[Finished],
    left_out: Sequence[LeftOut],
    *,
    machine: Json | None = None,
    why_partial: str = "",
) -> tuple[Json, tuple[LeftOut, ...]]:
    """Write comparison, picture and report of what has ended.

    Args:
        folder: of the run.
        scenario: with all algorithms and seeds that were to run.
        by_seed: what has ended of each seed, in order; of the first, one algorithm or more.
        left_out: what was not to run.
        machine: where it ran; None: here and now.
        why_partial: why not all has ended; empty if it has.

    Returns:
        The comparison, and all that is left out of it.
    """
    whole = [one for one in by_seed if len(one) == len(scenario.algorithms)] or by_seed[:1]
    first, machine = whole[0], machine or describe_machine()
    shown, unchecked = with_changes(scenario, algorithms=[run.algorithm for run, _ in first])
    missing = [name for name in scenario.algorithms if name not in shown.algorithms]
    said = (*left_out, *unchecked, *(LeftOut(name, why_partial) for name in missing))
    comparison = compare(shown, means([[summary for _, summary in one] for one in whole]))
    comparison["partial"] = _partial(scenario, whole, why_partial)
    comparison["left_out"] = [{"what": one.what, "why": one.why} for one in left_out]
    comparison["machine"] = machine
    write_json(folder / "comparison.json", comparison)
    plot_comparison(folder / "comparison.png", shown, [run for run, _ in first])
    write_report(folder / "report.html", shown, first, comparison, machine, said)
    return comparison, said


def _partial(scenario: Scenario, whole: Sequence[Finished], why: str) -> str | None:
    if not why:
        return None
    parts = [f"{len(whole[0])} of {len(scenario.algorithms)} algorithms"]
    parts += [f"{len(whole)} of {scenario.seeds} seeds"] if scenario.seeds > 1 else []
    return f"Partial, since {why}: results of {' and '.join(parts)} only."


def present_again(folder: Path) -> tuple[Finished, Json, tuple[LeftOut, ...]]:
    """Make comparison, picture and report again from the summaries and records in `folder`.

    Raises:
        ConfigError: if it holds no run, or no algorithm of the run has ended.
    """
    if not (folder / "scenario.toml").exists():
        raise ConfigError(f"{folder} holds no run: there is no scenario.toml in it")
    scenario = load_scenario(str(folder / "scenario.toml"))
    by_seed = [_read_seed(one, folder_of(one, scenario, folder)) for one in seeded(scenario)]
    if not by_seed[0]:
        raise ConfigError(f"{folder} holds no results: no algorithm has a summary.json yet")
    before = _read_json(folder / "comparison.json") or {}
    is_whole = all(len(one) == len(scenario.algorithms) for one in by_seed)
    comparison, left_out = present(
        folder,
        scenario,
        by_seed,
        [LeftOut(**one) for one in before.get("left_out", ())],
        machine=before.get("machine"),
        why_partial="" if is_whole else "the run ended before all had",
    )
    return by_seed[0], comparison, left_out


def _read_seed(scenario: Scenario, folder: Path) -> Finished:
    places = {name: folder_of_algorithm(folder, name) for name in scenario.algorithms}
    found = {name: _read_json(place / "summary.json") for name, place in places.items()}
    return [
        (_read_run(scenario, name, places[name], summary), summary)
        for name, summary in found.items()
        if summary is not None
    ]


def _read_run(scenario: Scenario, algorithm: str, folder: Path, summary: Json) -> Run:
    """A run that is over, as its records and results say."""
    run = Run(scenario, algorithm, folder)
    run.statuses = [PeerStatus(p["peer"], p["state"], p["why"]) for p in summary["peers"]]
    for history, status in zip(run.histories, run.statuses, strict=True):
        history.read()
        history.close(lost=status.state == "lost")
    curve = json.loads((folder / "curve.json").read_text(encoding="utf-8"))
    run.curve.points = [_point(point) for point in curve]
    run.notes = list(summary["notes"])
    run.notes += [
        f"the first records of {history.name} are gone; it kept the last ones"
        for history in run.histories
        if history.is_cut_short
    ]
    run.is_over = True
    return run


def _point(point: Json) -> CurvePoint:
    """A point as it was before it became JSON, which has no NaN."""
    numbers = {key: math.nan if point[key] is None else point[key] for key in _POINT_NUMBERS}
    return CurvePoint(**{**point, **numbers})


_POINT_NUMBERS = ("loss", "consensus_distance")


def print_beside(folders: Sequence[Path]) -> None:
    """Print the figures of two runs beside each other, algorithm by algorithm.

    Raises:
        ConfigError: if a folder holds no comparison, or both have no algorithm in common.
    """
    console = Console(highlight=False)
    first, second = (_comparison(folder) for folder in folders)
    rows = {row["algorithm"]: row for row in second["rows"]}
    common = [row for row in first["rows"] if row["algorithm"] in rows]
    if not common:
        raise ConfigError(f"{folders[0]} and {folders[1]} have no algorithm in common")
    for one, folder in zip((first, second), folders, strict=True):
        note = f" ({one['partial']})" if one.get("partial") else ""
        console.print(f"{folder}: {one['scenario']}{note}", markup=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", style="bold", no_wrap=True)
    table.add_column("")
    for heading in (folders[0].name, folders[1].name, "ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in common:
        name, beside = row["algorithm"], rows[row["algorithm"]]
        for what, (metric, form) in _FIGURES.items():
            values = [metric_of(one, metric) for one in (row, beside)]
            if any(value is not None for value in values):
                table.add_row(name, what, *_cells(values, form))
                name = ""  # it stands in the first line of its figures
        table.add_section()
    console.print(table)


def _cells(values: Sequence[float | None], form: str) -> list[str]:
    before, after = values
    ratio = after / before if before and after is not None else None
    cells = ["-" if value is None else format(value, form) for value in values]
    return [*cells, "-" if ratio is None else f"{ratio:.2f}"]


def _comparison(folder: Path) -> Json:
    found: Json | None = _read_json(folder / "comparison.json")
    if found is None:
        raise ConfigError(f"{folder} holds no comparison; p2plab report {folder} makes it")
    return found


def _read_json(path: Path) -> Json | None:
    try:
        found: Json = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {error}") from error
    return found
