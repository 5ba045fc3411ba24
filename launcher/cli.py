"""``p2plab``: run fleets of peers and compare algorithms.

Only this module parses arguments. What a command needs is imported when it runs, torch only once a
scenario is known to be right. `p2ptrain.exit_codes` says what each outcome is.
"""

from pathlib import Path
from typing import Annotated, NoReturn

import typer

from p2plab.signals import end_by_exceptions
from p2ptrain import exit_codes
from p2ptrain.console.command import HELP, VERSION, run_command

app = typer.Typer(context_settings=HELP, pretty_exceptions_enable=False, no_args_is_help=True)


@app.callback()
def _root(version: Annotated[bool, VERSION] = False) -> None:
    """Run fleets of p2ptrain peers and compare algorithms."""


@app.command()
def run(
    scenario: Annotated[
        str, typer.Argument(help="A .toml file, or the name of a bundled scenario.")
    ],
    backend: Annotated[
        str, typer.Option(help="Where the peers run: process, docker, ray, ssh or sim.")
    ] = "process",
    hosts: Annotated[
        Path | None, typer.Option(help="File with a host on each line, for --backend ssh.")
    ] = None,
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
    quick: Annotated[
        bool, typer.Option("--quick", help="A few steps of each peer: does it run?")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Exit with 3 if a claim does not hold.")
    ] = False,
    ui: Annotated[
        bool, typer.Option("--ui", help="Serve a live page on which peers can be hit by faults.")
    ] = False,
    ui_listen: Annotated[str, typer.Option(help="host:port of that page.")] = "127.0.0.1:9410",
) -> None:
    """Run each algorithm of a scenario and compare them; what is not given the scenario gives."""
    from p2plab.backends import load_backend
    from p2plab.harness.claims import do_all_hold
    from p2plab.lab import run_lab
    from p2plab.scenario import load_scenario, smallest, with_changes

    asked = [name.strip() for name in algorithms.split(",") if name.strip()]
    loaded = load_scenario(scenario)
    loaded, too_long = smallest(loaded, peers) if quick else (loaded, ())
    chosen, left_out = with_changes(
        loaded,
        algorithms=asked,
        peers=None if quick else peers,
        seed=seed,
        samples=samples,
        gradients=gradients,
    )
    chosen.check_algorithms()
    place = load_backend(backend, hosts)
    folder = Path("runs", chosen.name) if out is None else out
    comparison = run_lab(
        chosen,
        (*too_long, *left_out),
        place,
        backend,
        folder,
        were_asked=bool(asked),
        ui_listen=ui_listen if ui else None,
        quiet=quiet,
    )
    if check and not do_all_hold(comparison["claims"]):
        raise typer.Exit(exit_codes.CLAIM_FAILED)


@app.command()
def advise(
    fleet: Annotated[
        str, typer.Argument(help="A scenario, or - for what p2ptrain status --json printed.")
    ],
    algorithms: Annotated[str, typer.Option(help="Comma-separated; by default all.")] = "",
    samples: Annotated[
        int | None, typer.Option(min=1, help="Of the run whose time is expected.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print it for programs.")] = False,
) -> None:
    """Simulate the usual algorithms, and a scenario's own, on a fleet; rank them by their time."""
    from p2plab.advise import advise as give_advice

    names = [name.strip() for name in algorithms.split(",") if name.strip()]
    give_advice(fleet, names, samples, as_json=json_)


@app.command("report")
def report_again(
    folder: Annotated[Path, typer.Argument(help="The folder of a run.")],
) -> None:
    """Make table, report and pictures of a run again, from its records."""
    from p2plab.lab import report_lab

    report_lab(folder)


@app.command("compare")
def compare_runs(
    one: Annotated[Path, typer.Argument(help="The folder of a run.")],
    other: Annotated[Path, typer.Argument(help="The folder of another run.")],
) -> None:
    """Show the figures of two runs beside each other, and in what else the two differ."""
    from p2plab.side_by_side import print_beside

    print_beside((one, other))


@app.command("list")
def list_scenarios() -> None:
    """List the bundled scenarios, each with what it shows."""
    from p2plab.scenario import bundled_scenarios, text_of

    names = bundled_scenarios()
    width = max(map(len, names))
    for name in names:
        print(f"{name:{width}}  {text_of(name)}")


@app.command()
def show(
    scenario: Annotated[
        str, typer.Argument(help="A .toml file, or the name of a bundled scenario.")
    ],
) -> None:
    """Print a scenario with every value it has, also those that its file leaves out."""
    from p2plab.scenario import load_scenario

    print(load_scenario(scenario).written(), end="")


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="Of the scenario; it is written to NAME.toml.")],
) -> None:
    """Write a scenario with comments, which runs, to begin with."""
    from p2plab.scenario import write_new

    print(f"written: {write_new(name)}; try: p2plab run {name}.toml --quick")


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
    from p2plab.compose import compose_file, to_yaml
    from p2plab.scenario import folder_of_algorithm, load_scenario, peer_names, with_changes

    chosen, _ = with_changes(load_scenario(scenario), peers=peers)
    place = Path("runs", chosen.name) if out is None else out
    folder = folder_of_algorithm(place, chosen.algorithms[0])
    names = peer_names(chosen.peers)
    print(to_yaml(compose_file(chosen, names, folder, f"p2plab-{chosen.name}")), end="")


@app.command()
def clean() -> None:
    """Remove every container and network of the lab, those of a run in progress too."""
    from p2plab.backends.docker import clean as clean_docker

    removed = clean_docker()
    print(f"removed: {', '.join(removed)}" if removed else "nothing was left")


def main() -> NoReturn:
    """Run the command line; every outcome is an exit code."""
    end_by_exceptions()
    run_command(app, "p2plab")
