"""Carry out ``p2plab run``: from the names on the command line to a folder of results."""

import fcntl
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console
from rich.text import Text

from p2plab.backends import known_backends, load_backend
from p2plab.backends.base import Backend
from p2plab.compare import print_comparison
from p2plab.harness.claims import Json
from p2plab.live import open_display
from p2plab.page import ClickedFaults, WatchedDisplay, open_page
from p2plab.result_files import check_has_results
from p2plab.results import (
    Finished,
    folder_of,
    present,
    present_again,
    why_it_ended,
    write_down,
)
from p2plab.run import run_scenario, seeded
from p2plab.scenario import LeftOut, Scenario, with_changes, without_claims_about
from p2ptrain.errors import ConfigError


def run_lab(
    scenario: Scenario,
    left_out: Sequence[LeftOut],
    place: Backend,
    backend: str,
    folder: Path,
    *,
    were_asked: bool,
    ui_listen: str | None = None,
    quiet: bool = False,
) -> Json:
    """Run what `place` can of a scenario, write everything down, and return the comparison.

    `left_out` is what the command line left out of it; with `were_asked` the user named its
    algorithms, so that none of them may be left out here. With `ui_listen`, a ``host:port``, a live
    page shows the run, on which faults can be clicked.

    Raises:
        ConfigError: if `place` cannot run it as it is written.
    """
    names, without = _there(place, backend, scenario, were_asked=were_asked)
    chosen, unchecked = with_changes(scenario, algorithms=names)
    console = Console(highlight=False, quiet=quiet)
    with ExitStack() as stack:
        clicked = None
        if ui_listen is not None:
            url, place, clicked = stack.enter_context(open_page(place, ui_listen))
            console.print(Text(f"live page: {url}"))
        changed = place.check(chosen)
        chosen, unclear = without_claims_about(chosen, changed)
        left_out = [*left_out, *unchecked, *without, *changed, *unclear]
        stack.enter_context(_prepared(folder))  # last: a mistake costs no earlier results
        write_down(chosen, folder, left_out)
        by_seed: list[Finished] = []
        why_partial = ""
        try:
            for one in seeded(chosen):
                by_seed.append([])
                place_of = folder_of(one, chosen, folder)
                _carry_out(one, place, backend, place_of, console, by_seed[-1], clicked)
        except BaseException as error:
            why_partial = why_it_ended(error)
            raise
        finally:
            if by_seed and by_seed[0]:
                comparison, said = present(
                    folder, chosen, by_seed, left_out, why_partial=why_partial
                )
                _report(console, by_seed[0], comparison, said, folder)
    return comparison


def report_lab(folder: Path) -> None:
    """Make table, report and pictures of a run again, from its records.

    Raises:
        ConfigError: if the folder holds no results, or a run writes to it.
    """
    check_has_results(folder)  # before a lock is left in it
    with _locked(folder):
        finished, comparison, left_out = present_again(folder)
    _report(Console(highlight=False), finished, comparison, left_out, folder)


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
        asked_for = scenario.settings_of(unable[0].what).algorithm
        others = [one for one in known_backends() if not load_backend(one).refusal(asked_for)]
        raise ConfigError(f"{unable[0].why}; use --backend {' or '.join(others)}")
    return able, unable


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other commands from writing to the folder meanwhile.

    Raises:
        ConfigError: if it cannot be written to, or a run writes to it.
    """
    with ExitStack() as stack:
        try:
            lock = stack.enter_context((folder / ".lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            why = f"another run writes to {folder}; give this one another folder with --out"
            raise ConfigError(why) from None
        except FileNotFoundError:
            raise ConfigError(f"there is no folder {folder}; give one that a run wrote") from None
        except OSError as error:
            raise ConfigError(f"cannot write to {folder}: {error.strerror}") from error
        yield


@contextmanager
def _prepared(folder: Path) -> Iterator[None]:
    """Lock the folder for a run, and remove an earlier one's results: they are not of this run.

    Raises:
        ConfigError: if it cannot be written to, or another run writes to it.
    """
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_locked(folder))
            for name in ("comparison.json", "comparison.png", "report.html"):
                (folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot write to {folder}: {error.strerror}") from error
        yield


def _carry_out(
    scenario: Scenario,
    backend: Backend,
    name: str,
    folder: Path,
    console: Console,
    finished: Finished,
    clicked: ClickedFaults | None,
) -> None:
    from p2plab.evaluate import TaskEvaluator  # torch

    console.print(Text(f"{scenario.name}: {scenario.text}" if scenario.text else scenario.name))
    evaluator = TaskEvaluator(
        scenario.task,
        scenario.seed,
        scenario.task_options,
        device=scenario.device if name == "process" else "cpu",  # elsewhere it is another machine's
    )
    with open_display(console) as display:
        shown = WatchedDisplay(display, clicked) if clicked else display
        run_scenario(scenario, backend, name, folder, evaluator, shown, finished)


def _report(
    console: Console,
    finished: Finished,
    comparison: Json,
    left_out: Sequence[LeftOut],
    folder: Path,
) -> None:
    for one, _ in finished:
        for note in one.notes:
            console.print(Text(f"{one.algorithm}: {note}", style="yellow"))
    print_comparison(console, comparison, left_out)
    console.print(Text(f"written: {folder}/report.html, comparison.json and more"))
