"""``p2plab``: run fleets of peers and compare algorithms.

Only this module parses arguments. `p2ptrain.exit_codes` says what each outcome is.
"""

import fcntl
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from launcher.backends import known_backends, load_backend
from launcher.backends.base import Backend
from launcher.backends.docker import clean as clean_docker
from launcher.collect import Json, write_json
from launcher.compare import compare, do_all_hold, means, print_comparison
from launcher.compose import compose_file, to_yaml
from launcher.evaluate import TaskEvaluator
from launcher.live import open_display
from launcher.machine import describe_machine
from launcher.plot import plot_comparison
from launcher.report import write_report
from launcher.run import Run, run_scenario, seeded
from launcher.scenario import LeftOut, Scenario, load_scenario, peer_names, with_changes
from p2ptrain import exit_codes
from p2ptrain.cli import HELP, VERSION
from p2ptrain.config import to_toml
from p2ptrain.errors import ConfigError, P2PTrainError

app = typer.Typer(context_settings=HELP, pretty_exceptions_enable=False, no_args_is_help=True)


@app.callback()
def _root(version: Annotated[bool, VERSION] = False) -> None:
    """Run fleets of p2ptrain peers and compare algorithms."""


@app.command()
def run(
    scenario: Annotated[
        str, typer.Argument(help="A .toml file, or the name of a bundled scenario.")
    ],
    backend: Annotated[str, typer.Option(help="Where the peers run.")] = "process",
    algorithms: Annotated[
        str, typer.Option(help="Comma-separated; the first is what the others are compared with.")
    ] = "",
    peers: Annotated[int | None, typer.Option(help="How many peers start together.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of model, data and delays.")] = None,
    samples: Annotated[
        int | None, typer.Option(help="Samples of the whole swarm after which it stops.")
    ] = None,
    gradients: Annotated[
        bool,
        typer.Option("--gradients/--no-gradients", help="Off: price steps, train nothing (sim)."),
    ] = True,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the results.", show_default="runs/NAME")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Exit with 3 if a claim does not hold.")
    ] = False,
) -> None:
    """Run each algorithm of a scenario and compare them; what is not given the scenario gives."""
    place = load_backend(backend)
    asked = tuple(name.strip() for name in algorithms.split(",") if name.strip())
    whole = load_scenario(scenario)
    names, without = _there(place, backend, whole, asked)
    chosen, left_out = with_changes(
        whole, algorithms=names, peers=peers, seed=seed, samples=samples, gradients=gradients
    )
    left_out += without
    chosen.check_algorithms()
    place.check(chosen)
    folder = Path("runs", chosen.name) if out is None else out
    with _prepared(folder):
        console = Console(highlight=False, quiet=quiet)
        by_seed = [
            _carry_out(one, place, backend, _folder_of(one, chosen, folder), console)
            for one in seeded(chosen)
        ]
        finished, summaries = by_seed[0], means([[each for _, each in one] for one in by_seed])
        (folder / "scenario.toml").write_text(to_toml(chosen), encoding="utf-8")
        comparison = compare(chosen, summaries)
        write_json(folder / "comparison.json", comparison)
        plot_comparison(folder / "comparison.png", chosen, [run for run, _ in finished])
        machine = describe_machine()
        write_report(folder / "report.html", chosen, finished, comparison, machine, left_out)
    _report(console, finished, comparison, left_out, folder)
    if check and not do_all_hold(comparison):
        raise typer.Exit(exit_codes.CLAIM_FAILED)


@app.command()
def compose(
    scenario: Annotated[
        str, typer.Argument(help="A .toml file, or the name of a bundled scenario.")
    ],
    peers: Annotated[int | None, typer.Option(help="How many peers.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the results.", show_default="runs/NAME")
    ] = None,
) -> None:
    """Print the Compose file with which `run --backend docker` starts the first algorithm."""
    chosen, _ = with_changes(load_scenario(scenario), peers=peers)
    folder = (Path("runs", chosen.name) if out is None else out) / chosen.algorithms[0]
    names = peer_names(chosen.peers)
    print(to_yaml(compose_file(chosen, names, folder, f"p2plab-{chosen.name}")), end="")


@app.command()
def clean() -> None:
    """Remove every container and network of the lab, those of a run in progress too."""
    removed = clean_docker()
    print(f"removed: {', '.join(removed)}" if removed else "nothing was left")


def _there(
    place: Backend, backend: str, scenario: Scenario, asked: Sequence[str]
) -> tuple[tuple[str, ...], tuple[LeftOut, ...]]:
    """The algorithms that `place` can run, and those of the scenario that it cannot run.

    Raises:
        ConfigError: if one of the latter was asked for explicitly, or none is left to run.
    """
    names = tuple(asked) or scenario.algorithms
    reasons = {name: place.refusal(name) for name in names}
    able = tuple(name for name in names if not reasons[name])
    unable = tuple(LeftOut(name, f"{name} {why}") for name, why in reasons.items() if why)
    if unable and (asked or not able):
        asked_for = unable[0].what
        others = [one for one in known_backends() if not load_backend(one).refusal(asked_for)]
        raise ConfigError(f"{unable[0].why}; use --backend {' or '.join(others)}")
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


def main() -> NoReturn:
    """Run the command line; every outcome is an exit code."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    try:
        app(prog_name="p2plab")
    except P2PTrainError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(exit_codes.MISTAKE)
    except KeyboardInterrupt:
        sys.exit(exit_codes.INTERRUPTED)
    sys.exit(0)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """Turn a signal into an exception, so that every ``finally`` runs."""
    sys.exit(128 + number)
