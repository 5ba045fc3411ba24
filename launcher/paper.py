"""Run the papers' experiments (``make paper``, ``make paper-real``) and compare the figures.

Every scenario of `launcher/scenarios/paper` runs in the simulator, and so does the benchmark of a
single collective (`p2plab.bench.skewed`): each in a separate process, two at a time, the largest
first. Figures are virtual, so a busy machine takes longer and finds the same ones. A scenario is
trained if it claims something about a model; otherwise its steps are only priced.

With ``--backend process`` those run that this machine can carry (`FOR_REAL`), one after the other:
the same files and claims, in processes that really train and exchange; their steps sleep for the
rest of their duration. Nothing else should run meanwhile.

Their claims become one table; ``--page`` also writes it into a page of the docs, where experiments
that were not run this time keep their rows.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from runpy import run_module
from typing import Annotated

import typer

from p2plab.harness.bench import Bench, Quick, run_bench
from p2plab.harness.claims import Json, bound_of, claims_table
from p2plab.harness.processes import side_by_side
from p2plab.machine import describe_machine
from p2plab.scenario import BUNDLED, Scenario, load_scenario
from p2plab.signals import end_by_exceptions
from p2ptrain.compute.training import threads
from p2ptrain.errors import ConfigError, P2PTrainError

FOLDER = "paper"
SKEWED = "skewed_collective"
"""The one experiment that is not a scenario."""

FOR_REAL = ("one_of_16", "one_of_8_050", "one_of_8_075", "one_of_8_100")
"""Those that are about speed, with up to 16 peers: their steps sleep, so two cores carry them."""

QUICK = "one_of_8_050"
"""The scenario of a quick run: one, with fewer peers that take a few steps."""

_PAGE = """\
# Published and measured

The experiments of the papers behind our algorithms. The scenarios are in
[`launcher/scenarios/paper`](../launcher/scenarios/paper); each says at its top what it is about,
and runs alone as `p2plab run paper/NAME`. The skewed collective is
[`launcher/bench/skewed.py`](../launcher/bench/skewed.py). All algorithms of a scenario meet the
same delays. `published` is what the paper reports, on its own machines; `asked` is what we hold
ourselves to. Both commands print their table, write it here, and exit with 3 if a claim does not
hold.

"""


@dataclass(frozen=True, slots=True)
class Place:
    """A backend that experiments run on, and its section of the page."""

    backend: str
    heading: str
    text: str
    side_by_side: int
    """Simultaneous experiments."""

    is_real: bool
    """Figures depend on the machine and the day, and the page names both. Runs are short and meant
    for speed: what they learn in a few steps of one sample is meaningless, and is not shown."""

    @property
    def tables(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Claims, then figures of all rows: the heading and the columns of each."""
        on = ("measured on",) if self.is_real else ()
        return (
            (f"## {self.heading}", (*_CLAIMED, *on)),
            (f"### All rows, {self.heading.lower()}", (*_SPEEDS, *(on or _LEARNT))),
        )


_CLAIMED = ("scenario", "claim", "published", "asked", "measured", "holds")
_SPEEDS = ("scenario", "algorithm", "samples/s", "versions/s")
_LEARNT = ("accuracy", "loss")

SIMULATED = Place(
    backend="sim",
    heading="Simulated",
    text="""\
`make paper`, in the [simulator](simulator.md). Where steps were only priced there is no accuracy
and no loss.""",
    side_by_side=2,
    is_real=False,
)
REAL = Place(
    backend="process",
    heading="For real",
    text="""\
`make paper-real`: one process per peer, all on one machine and over its loopback, which nothing
shapes. They train and exchange what they would elsewhere; a step then sleeps until its price is
over, which is how so many fit on a few cores. So an average costs processor time instead of a link.
With 8 peers on two cores (`one_of_8_100`) that was 0.09 d for a version of eager (simulated: 0.07)
and 0.20 d for a step of all-reduce (simulated: 0.09), whose peers all work at the same moment: so
its rivals come out better here than there, and a part of their lead is of two crowded cores. A
scenario that is missing here was not run in this form.""",
    side_by_side=1,
    is_real=True,
)
PLACES = (SIMULATED, REAL)


@dataclass(frozen=True, slots=True)
class Experiment:
    """One experiment to run, and where its results are."""

    name: str
    command: tuple[str, ...]
    results: str
    """The file with its claims, in its folder."""

    size: tuple[int, ...]
    """Its peers, and what else it has many of: large experiments run first."""

    @property
    def is_simulated(self) -> bool:
        """False for peers and benchmarks, which start processes."""
        return SIMULATED.backend in self.command


@dataclass(frozen=True, slots=True)
class Outcome:
    name: str
    claims: Sequence[Json]
    rows: Sequence[Json]


def place_of(backend: str) -> Place:
    """The place with this `backend`.

    Raises:
        ConfigError: if papers' experiments do not run there.
    """
    for place in PLACES:
        if place.backend == backend:
            return place
    there_are = ", ".join(place.backend for place in PLACES)
    raise ConfigError(f"backend = {backend!r}; the experiments of papers run on: {there_are}")


def experiments(
    names: Sequence[str] = (), place: Place = SIMULATED, *, quick: bool = False
) -> list[Experiment]:
    """All experiments of `place`, or those named, the largest first; reduced if `quick`.

    Raises:
        ConfigError: if there is no scenario of a name, or it does not run there.
    """
    scenarios = sorted(path.stem for path in (BUNDLED / FOLDER).glob("*.toml"))
    all_there = FOR_REAL if place is REAL else (SKEWED, *scenarios)
    if quick:
        all_there = (QUICK,) if place is REAL else (SKEWED, QUICK)
    found = [_experiment(name, place, quick) for name in names or all_there]
    return sorted(found, key=lambda one: one.size, reverse=True)


def _experiment(name: str, place: Place, quick: bool) -> Experiment:
    if place is REAL and name not in FOR_REAL:
        there_are = ", ".join(FOR_REAL)
        raise ConfigError(f"{name!r} is only simulated; for real there are: {there_are}")
    if name == SKEWED:
        less = ("--quick",) if quick else ()
        return Experiment(name, ("-m", "p2plab.bench.skewed", *less), "bench.json", (0,))
    scenario = load_scenario(f"{FOLDER}/{name}")
    prices = () if place is REAL or _learns(scenario) else ("--no-gradients",)
    command = ("-m", "p2plab", "run", f"{FOLDER}/{name}", "--backend", place.backend, *prices)
    if quick:
        command += ("--peers", "2", "--samples", "8", "--algorithms", ",".join(_FEW))
    return Experiment(name, command, "comparison.json", (scenario.peers * scenario.seeds,))


_FEW = ("allreduce", "eager")
"""Algorithms of a quick run."""


def _learns(scenario: Scenario) -> bool:
    return any(claim.needs_a_model for claim in scenario.claims)


def carry_out(experiment: Experiment, out: Path) -> Outcome:
    """Run one experiment, in a process that runs nothing else.

    What is simulated runs in this process: it has imported torch, which takes longer than many a
    world. Peers and benchmarks start processes of their own, so they get a new one.

    Raises:
        P2PTrainError: with the end of its output, if it failed.
    """
    end_by_exceptions()  # so that its own process ends with this one
    folder = out / experiment.name
    folder.mkdir(parents=True, exist_ok=True)
    command, said = [*experiment.command, "--out", str(folder)], folder / "output.txt"
    code = _run_here(command, said) if experiment.is_simulated else _run_apart(command, said)
    if code:
        end = said.read_text(encoding="utf-8").strip()[-500:]
        raise P2PTrainError(f"{experiment.name} ended with {code}: {end}")
    return outcome_of(experiment, out)


def _run_apart(command: Sequence[str], said: Path) -> int:
    with said.open("w", encoding="utf-8") as file:
        return subprocess.run([sys.executable, *command], stdout=file, stderr=file).returncode


def _run_here(command: Sequence[str], said: Path) -> int:
    """As ``python -m MODULE ...``, up to its exit code."""
    _, module, *arguments = command
    sys.argv = [module, *arguments]
    with (
        said.open("w", encoding="utf-8") as file,
        redirect_stdout(file),
        redirect_stderr(file),
        threads(1),
    ):
        try:
            run_module(module, run_name="__main__")
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else 0
    return 0


def outcome_of(experiment: Experiment, out: Path) -> Outcome:
    """What came of an experiment that has run."""
    text = (out / experiment.name / experiment.results).read_text(encoding="utf-8")
    results = json.loads(text)
    return Outcome(experiment.name, results["claims"], results["rows"])


def page(before: str, place: Place, outcomes: Sequence[Outcome], *, whole: bool = True) -> str:
    """The page of the docs with new measurements from `place`; no table without rows.

    Args:
        before: the page as it was; all rows of the other place stay.
        place: where `outcomes` were measured.
        outcomes: in the order of the page.
        whole: these are all experiments of the place; else rows of others stay as well.
    """
    on = (_today(),) if place.is_real else ()
    claims = [markdown_row([o.name, *_cells(claim), *on]) for o in outcomes for claim in o.claims]
    rows = [(o.name, row) for o in outcomes for row in o.rows if "algorithm" in row]
    figures = [markdown_row([name, *_speeds(row), *(on or _learnt(row))]) for name, row in rows]
    ran = {outcome.name for outcome in outcomes}
    parts = [_PAGE.rstrip("\n")]
    for each in PLACES:
        for (heading, columns), fresh in zip(each.tables, (claims, figures), strict=True):
            lines = _rows_under(before, heading)
            if each is place:
                kept = [] if whole else [line for line in lines if _scenario_of(line) not in ran]
                lines = sorted(kept + fresh, key=_scenario_of)
            text = [each.text] if heading.startswith("## ") else []
            rule = "|" + "---|" * len(columns)
            if lines:
                parts += [heading, *text, "\n".join([markdown_row(columns), rule, *lines])]
    return "\n\n".join(parts) + "\n"


def _rows_under(text: str, heading: str) -> list[str]:
    """The rows of the table under a heading; none if there is no such heading."""
    _, _, rest = text.partition(f"{heading}\n")
    section = rest.partition("\n#")[0]
    return [line for line in section.splitlines() if line.startswith("| ")][1:]


def _scenario_of(row: str) -> str:
    return row.split("|")[1].strip()


def _today() -> str:
    machine = describe_machine()
    return f"{machine['date'][:10]}, {machine['cores']} cores"


def markdown_row(cells: Sequence[str]) -> str:
    """A row of a table of the docs."""
    return "| " + " | ".join(cells) + " |"


def _cells(claim: Json) -> list[str]:
    """Claim, published, asked, measured, holds."""
    figures = [figure(claim["published"]), bound_of(claim), figure(claim["measured"])]
    return [claim["text"], *figures, "yes" if claim["holds"] else "**no**"]


def _speeds(row: Json) -> list[str]:
    return [f"`{row['algorithm']}`", figure(row["samples_per_s"]), figure(row["versions_per_s"])]


def _learnt(row: Json) -> list[str]:
    return [figure(row["final"]["accuracy"]), figure(row["final"]["loss"])]


def figure(value: float | None) -> str:
    """A cell of it: four digits."""
    return "" if value is None else f"{value:.4g}"


def main(
    names: Annotated[
        list[str] | None, typer.Argument(help="Only these of launcher/scenarios/paper.")
    ] = None,
    backend: Annotated[
        str, typer.Option(help="sim, or process: what this machine can carry, for real.")
    ] = SIMULATED.backend,
    out: Annotated[Path, typer.Option(help="Folder of all results.")] = Path("runs/paper"),
    to: Annotated[Path | None, typer.Option("--page", help="Markdown file for the table.")] = None,
    quick: Quick = False,
) -> None:
    """Run the papers' experiments; exit with 3 if a claim does not hold."""
    bench = Bench(out, check=True, quick=quick)
    place = place_of(backend)
    chosen = experiments(names or (), place, quick=quick)
    with bench.progress("papers", len(chosen)) as told:
        work = partial(carry_out, out=out)
        found = side_by_side(work, chosen, lambda one: told(one.name), place.side_by_side)
    outcomes = sorted(found, key=lambda one: one.name)
    claims = [claim for outcome in outcomes for claim in outcome.claims]
    title = f"Published beside measured, {place.heading.lower()}"
    of = [outcome.name for outcome in outcomes for _ in outcome.claims]
    bench.console.print(claims_table(claims, title, of))
    if to is not None:
        before = to.read_text(encoding="utf-8") if to.exists() else ""
        text = page(before, place, outcomes, whole=not names and not quick)
        to.write_text(text, encoding="utf-8")
    bench.enforce(claims)


if __name__ == "__main__":
    run_bench(main)
