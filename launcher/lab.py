"""Carry out ``p2plab run``: from the names on the command line to a folder of results."""

import fcntl
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console
from rich.text import Text

from launcher.backends import known_backends
from launcher.backends.base import Backend
from launcher.collect import Json, write_json
from launcher.compare import compare, means, print_comparison
from launcher.evaluate import TaskEvaluator
from launcher.live import open_display
from launcher.machine import describe_machine
from launcher.plot import plot_comparison
from launcher.report import write_report
from launcher.run import Run, run_scenario, seeded
from launcher.scenario import LeftOut, Scenario, with_changes
from p2ptrain.errors import ConfigError


def run_lab(
    scenario: Scenario,
    left_out: Sequence[LeftOut],
    place: Backend,
    backend: str,
    folder: Path,
    *,
    were_asked: bool,
) -> Json:
    """Run what `place` can of a scenario, write everything down, and return the comparison.

    `left_out` is what the command line left out of it; with `were_asked` the user named its
    algorithms, so that none of them may be left out here.

    Raises:
        ConfigError: if `place` cannot run it as it is written.
    """
    names, without = _there(place, backend, scenario, were_asked=were_asked)
    chosen, unchecked = with_changes(scenario, algorithms=names)
    left_out = [*left_out, *unchecked, *without, *place.check(chosen)]
    with _prepared(folder):
        console = Console(highlight=False)
        by_seed = [
            _carry_out(one, place, backend, _folder_of(one, chosen, folder), console)
            for one in seeded(chosen)
        ]
        finished, summaries = by_seed[0], means([[each for _, each in one] for one in by_seed])
        (folder / "scenario.toml").write_text(chosen.written(), encoding="utf-8")
        comparison = compare(chosen, summaries)
        write_json(folder / "comparison.json", comparison)
        plot_comparison(folder / "comparison.png", chosen, [run for run, _ in finished])
        machine = describe_machine()
        write_report(folder / "report.html", chosen, finished, comparison, machine, left_out)
    _report(console, finished, comparison, left_out, folder)
    return comparison


def _there(
    place: Backend, backend: str, scenario: Scenario, *, were_asked: bool
) -> tuple[tuple[str, ...], tuple[LeftOut, ...]]:
    """The algorithms that `place` can run, and those of the scenario that it cannot run.

    Raises:
        ConfigError: if one of the latter was asked for, or none is left to run.
    """
    names = scenario.algorithms
    reasons = {name: place.refusal(scenario.settings_of(name).algorithm) for name in names}
    able = tuple(name for name in names if not reasons[name])
    unable = tuple(LeftOut(name, f"{name} {why}") for name, why in reasons.items() if why)
    if unable and (were_asked or not able):
        there_are = ", ".join(known_backends())
        raise ConfigError(f"{unable[0].why}; use another --backend than {backend!r} ({there_are})")
    return able, unable


@contextmanager
def _prepared(folder: Path) -> Iterator[None]:
    """Lock the folder for this run, and remove the files of an earlier comparison.

    They would not belong to this run.

    Raises:
        ConfigError: if it cannot be written to, or another run writes to it.
    """
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((folder / ".lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for name in ("comparison.json", "comparison.png", "report.html"):
                (folder / name).unlink(missing_ok=True)
        except BlockingIOError:
            why = f"another run writes to {folder}; give this one another folder with --out"
            raise ConfigError(why) from None
        except OSError as error:
            raise ConfigError(f"cannot write to {folder}: {error.strerror}") from error
        yield


def _folder_of(one: Scenario, whole: Scenario, folder: Path) -> Path:
    """The first seed's results are where those of a single seed are; others have subfolders."""
    return folder if one.seed == whole.seed else folder / "seeds" / str(one.seed)


def _carry_out(
    scenario: Scenario, backend: Backend, name: str, folder: Path, console: Console
) -> list[tuple[Run, Json]]:
    console.print(Text(f"{scenario.name}: {scenario.text}" if scenario.text else scenario.name))
    evaluator = TaskEvaluator(scenario.task, scenario.seed, scenario.task_options)
    with open_display(console) as display:
        return run_scenario(scenario, backend, name, folder, evaluator, display)


def _report(
    console: Console,
    finished: Sequence[tuple[Run, Json]],
    comparison: Json,
    left_out: Sequence[LeftOut],
    folder: Path,
) -> None:
    for one, _ in finished:
        for note in one.notes:
            console.print(Text(f"{one.algorithm}: {note}", style="yellow"))
    print_comparison(console, comparison, left_out)
    console.print(Text(f"written: {folder}/report.html, comparison.json and more"))
