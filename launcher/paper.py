"""``make paper``: the figures of publications beside ours, all of them simulated.

Every scenario of `launcher/scenarios/paper` runs in the simulator, and the benchmark of a
collective alone (`launcher.bench.skewed`), each in a process of its own and two side by side, the
largest first. What they claim becomes one table; ``--page`` also writes it into a page of the docs.
Figures are virtual, so that a busy machine takes longer and finds the same.

A scenario is trained for real if it claims something about a model, else its steps are only priced.
"""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from launcher.collect import Json
from launcher.scenario import BUNDLED, Scenario, load_scenario
from p2ptrain.errors import P2PTrainError

FOLDER = "paper"
SIDE_BY_SIDE = 2
SKEWED = "skewed_collective"
"""The one experiment that is no scenario."""

_PAGE = """\
# Published and measured

`make paper` runs the experiments of the papers behind our algorithms in the
[simulator](simulator.md), prints this table, writes it here, and exits with 3 if a claim does not
hold. The scenarios are in [`launcher/scenarios/paper`](../launcher/scenarios/paper); each says at
its top what it is about, and runs alone as `p2plab run paper/NAME --backend sim`. The skewed
collective is [`launcher/bench/skewed.py`](../launcher/bench/skewed.py). All algorithms of a
scenario meet the same delays. `published` is what the paper reports, on its own machines; `asked`
is what we hold ourselves to.

{table}
## All rows

What else ran in these scenarios. Where steps were only priced there is no accuracy and no loss.

{rows}"""


@dataclass(frozen=True, slots=True)
class Experiment:
    """Something to run, and what came of it."""

    name: str
    command: tuple[str, ...]
    results: str
    """The file with its claims, in its folder."""

    size: int
    """Peers: who is large goes first."""


@dataclass(frozen=True, slots=True)
class Outcome:
    name: str
    claims: Sequence[Json]
    rows: Sequence[Json]


def experiments(names: Sequence[str] = ()) -> list[Experiment]:
    """All there are, or those named; the largest first.

    Raises:
        ConfigError: if there is no scenario of a name.
    """
    wanted = names or [SKEWED, *sorted(p.stem for p in (BUNDLED / FOLDER).glob("*.toml"))]
    found = [_experiment(name) for name in wanted]
    return sorted(found, key=lambda one: -one.size)


def _experiment(name: str) -> Experiment:
    if name == SKEWED:
        return Experiment(name, ("-m", "launcher.bench.skewed"), "bench.json", 0)
    scenario = load_scenario(f"{FOLDER}/{name}")
    prices = () if _learns(scenario) else ("--no-gradients",)
    command = ("-m", "launcher", "run", f"{FOLDER}/{name}", "--backend", "sim", *prices)
    return Experiment(name, command, "comparison.json", scenario.peers * scenario.seeds)


def _learns(scenario: Scenario) -> bool:
    return any(claim.needs_a_model for claim in scenario.claims)


def carry_out(experiment: Experiment, out: Path) -> Outcome:
    """Run one in a process of its own.

    Raises:
        P2PTrainError: with the end of what it said, if it failed.
    """
    folder = out / experiment.name
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, *experiment.command, "--out", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    (folder / "output.txt").write_text(done.stdout + done.stderr, encoding="utf-8")
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-500:]
        raise P2PTrainError(f"{experiment.name} ended with {done.returncode}: {said}")
    results = json.loads((folder / experiment.results).read_text(encoding="utf-8"))
    return Outcome(experiment.name, results["claims"], results["rows"])


def page(outcomes: Sequence[Outcome]) -> str:
    """The page of the docs."""
    rule = "|---|---|---|---|---|---|"
    lines = ["| scenario | claim | published | asked | measured | holds |", rule]
    for outcome in outcomes:
        lines += [_row([outcome.name, *_cells(claim)]) for claim in outcome.claims]
    rows = ["| scenario | algorithm | samples/s | versions/s | accuracy | loss |", rule]
    for outcome in outcomes:
        rows += [_row([outcome.name, *_figures(row)]) for row in outcome.rows if "algorithm" in row]
    return _PAGE.format(table="\n".join(lines) + "\n", rows="\n".join(rows) + "\n")


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cells(claim: Json) -> list[str]:
    """Claim, published, asked, measured, holds."""
    least = claim["at_least"] is not None
    asked = f"≥ {claim['at_least']:g}" if least else f"≤ {claim['at_most']:g}"
    holds = "yes" if claim["holds"] else "**no**"
    return [claim["text"], _number(claim["published"]), asked, _number(claim["measured"]), holds]


def _figures(row: Json) -> list[str]:
    final = row["final"]
    numbers = (row["samples_per_s"], row["versions_per_s"], final["accuracy"], final["loss"])
    return [f"`{row['algorithm']}`", *map(_number, numbers)]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _table(outcomes: Sequence[Outcome]) -> Table:
    table = Table(title="Published beside measured", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("scenario", no_wrap=True)
    table.add_column("claim", ratio=1)
    for heading in ("published", "asked", "measured", "holds"):
        table.add_column(heading, justify="right", no_wrap=True)
    for outcome in outcomes:
        for claim in outcome.claims:
            *cells, _ = _cells(claim)
            holds = Text("yes", "green") if claim["holds"] else Text("no", "bold red")
            table.add_row(outcome.name, *cells, holds)
    return table


def main(
    names: Annotated[
        list[str] | None, typer.Argument(help="Only these of launcher/scenarios/paper.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of all results.")] = Path("runs/paper"),
    to: Annotated[Path | None, typer.Option("--page", help="Markdown file for the table.")] = None,
) -> None:
    """Run the papers' experiments in the simulator; exit with 3 if a claim does not hold."""
    console = Console(highlight=False)
    began = time.monotonic()

    def run(experiment: Experiment) -> Outcome:
        outcome = carry_out(experiment, out)
        console.print(f"{time.monotonic() - began:6.0f} s  {experiment.name}")
        return outcome

    try:
        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            outcomes = sorted(pool.map(run, experiments(names or ())), key=lambda one: one.name)
    except P2PTrainError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    console.print(_table(outcomes))
    if to is not None:
        to.write_text(page(outcomes), encoding="utf-8")
    if not all(claim["holds"] for outcome in outcomes for claim in outcome.claims):
        raise typer.Exit(3)


if __name__ == "__main__":
    typer.run(main)
