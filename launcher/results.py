"""Present the results of a run, and read them again from its folder.

A run writes ``scenario.toml`` and ``begun.json`` (what it leaves out, and where it runs) before its
first algorithm starts, and ``summary.json`` and ``curve.json`` of each algorithm as soon as it has
ended. So whatever ends a run, Ctrl-C, an error or a lost backend, the algorithms that ended keep
their table, report and pictures; these say that they are *partial*, and why. After a kill
`present_again` makes them, without the reason: a process that is killed writes none down.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from p2plab.backends.base import PeerStatus
from p2plab.collect import write_json
from p2plab.compare import compare, means
from p2plab.consensus import CurvePoint
from p2plab.harness.claims import Json
from p2plab.machine import describe_machine
from p2plab.plot import plot_comparison
from p2plab.report import write_report
from p2plab.result_files import Beginning, Point, Summary, no_results, read_json
from p2plab.run import Run, seeded
from p2plab.scenario import (
    LeftOut,
    Scenario,
    folder_of_algorithm,
    load_scenario,
    with_changes,
)
from p2ptrain.errors import ConfigError, P2PTrainError

Finished = list[tuple[Run, Json]]
"""The algorithms of one seed that ended, each with its summary."""


def folder_of(one: Scenario, whole: Scenario, folder: Path) -> Path:
    """The first seed's results are where those of a single seed are; others have subfolders."""
    return folder if one.seed == whole.seed else folder / "seeds" / str(one.seed)


def write_down(scenario: Scenario, folder: Path, left_out: Sequence[LeftOut]) -> None:
    """Write what is about to run and what is not; take away what an earlier run of it yielded."""
    for one in seeded(scenario):
        for algorithm in scenario.algorithms:
            place = folder_of_algorithm(folder_of(one, scenario, folder), algorithm)
            (place / "summary.json").unlink(missing_ok=True)
    write_json(folder / "begun.json", _beginning(left_out, describe_machine()))
    (folder / "scenario.toml").write_text(scenario.written(), encoding="utf-8")


def _beginning(left_out: Sequence[LeftOut], machine: Json) -> Json:
    told = [{"what": one.what, "why": one.why, "is_claim": one.is_claim} for one in left_out]
    return {"left_out": told, "machine": machine}


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
    comparison |= {"peers": shown.peers, "backend": first[0][1]["backend"]}
    comparison["partial"] = _partial(scenario, whole, why_partial)
    comparison["why_partial"] = why_partial or None
    comparison |= _beginning(left_out, machine)
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
        ConfigError: if no algorithm of the run in it has ended, or a file is damaged.
    """
    scenario = load_scenario(str(folder / "scenario.toml"))
    by_seed = [_read_seed(one, folder_of(one, scenario, folder)) for one in seeded(scenario)]
    if not by_seed[0]:
        raise no_results(folder)
    before = _said_before(folder)
    is_whole = all(len(one) == len(scenario.algorithms) for one in by_seed)
    why_partial = before.get("why_partial") or "the run ended before all had"
    comparison, left_out = present(
        folder,
        scenario,
        by_seed,
        [LeftOut(**one) for one in before.get("left_out", ())],
        machine=before.get("machine"),
        why_partial="" if is_whole else why_partial,
    )
    return by_seed[0], comparison, left_out


def _said_before(folder: Path) -> Json:
    """What the run said of itself at its end, or else at its beginning; a damaged file is none."""
    for name in ("comparison.json", "begun.json"):
        with suppress(ConfigError):
            found: Json | None = read_json(folder / name, Beginning, "")
            if found is not None:
                return found
    return {}


_RUN_AGAIN = "run the scenario again"


def _read_seed(scenario: Scenario, folder: Path) -> Finished:
    places = {name: folder_of_algorithm(folder, name) for name in scenario.algorithms}
    found = {
        name: read_json(place / "summary.json", Summary, _RUN_AGAIN)
        for name, place in places.items()
    }
    return [
        (_read_run(scenario, name, places[name], summary), summary)
        for name, summary in found.items()
        if summary is not None
    ]


def _read_run(scenario: Scenario, algorithm: str, folder: Path, summary: Json) -> Run:
    """A run that is over, as its records and results say."""
    run = Run(scenario, algorithm, folder)
    run.statuses = [PeerStatus(p["peer"], p["state"], p["why"]) for p in summary["peers"]]
    if len(run.statuses) != len(run.histories):
        raise ConfigError(
            f"{folder}/summary.json is of {len(run.statuses)} peers and scenario.toml of "
            f"{len(run.histories)}; {_RUN_AGAIN}"
        )
    for history, status in zip(run.histories, run.statuses, strict=True):
        history.read()
        history.close(lost=status.state == "lost")
    curve = read_json(folder / "curve.json", list[Point], _RUN_AGAIN)
    if curve is None:
        raise ConfigError(f"{folder} has a summary.json and no curve.json; {_RUN_AGAIN}")
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
