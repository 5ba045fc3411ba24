"""Run the scenarios of slow links (``make wan``), and write their figures into a page of the docs.

Each file of `launcher/scenarios/wan` runs in the simulator, two at a time. Some steps are really
computed there and all links are priced, so figures are virtual: a busy machine finds the same ones.
One scenario is for processes and runs alone (`p2plab run wan/four_homes_relays`).

``--page`` replaces what the page has under `HEADING`, and leaves the rest of it alone.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from p2plab.harness.bench import Bench, Quick, run_bench
from p2plab.harness.claims import Json, bound_of, claims_table
from p2plab.harness.processes import side_by_side
from p2plab.paper import Experiment, Outcome, carry_out, figure, markdown_row
from p2plab.scenario import BUNDLED, load_scenario
from p2ptrain.errors import ConfigError

FOLDER = "wan"
FOR_REAL = "four_homes_relays"
"""Of these files, the one that is not simulated."""

QUICK = "four_homes"
HEADING = "## Measured"

ALONE, TOGETHER = "no communication", "allreduce"
"""The rows that speeds and losses are compared with, where a scenario has them."""

_COLUMNS = (
    "",
    "samples/s",
    "of the speed alone",
    "loss",
    "over all-reduce's",
    "MB sent per step",
    "averages per peer",
    "longest without one, s",
)


def experiments(names: Sequence[str] = (), *, quick: bool = False) -> list[Experiment]:
    """The scenarios of these names, by default all.

    Raises:
        ConfigError: if there is none of a name, or it is not simulated.
    """
    there = sorted(path.stem for path in (BUNDLED / FOLDER).glob("*.toml"))
    there.remove(FOR_REAL)
    for name in names:
        if name not in there:
            raise ConfigError(f"no scenario {name!r} to simulate; there are: {', '.join(there)}")
    return [_experiment(name, quick) for name in names or ([QUICK] if quick else there)]


def _experiment(name: str, quick: bool) -> Experiment:
    scenario = load_scenario(f"{FOLDER}/{name}")
    command: tuple[str, ...] = ("-m", "p2plab", "run", f"{FOLDER}/{name}", "--backend", "sim")
    if quick:
        command += ("--quick", "--algorithms", scenario.algorithms[0])
    return Experiment(name, command, "comparison.json", (scenario.peers * scenario.seeds,))


def page(before: str, outcomes: Sequence[Outcome]) -> str:
    """The page with these figures under `HEADING`; those of other scenarios stay."""
    top, _, rest = before.partition(f"{HEADING}\n")
    below, mark, after = rest.partition("\n## ")
    parts = _by_title(below)
    parts |= {outcome.name: _section(outcome) for outcome in outcomes}
    sections = [f"### {name}\n\n{parts[name]}" for name in sorted(parts)]
    return "\n".join([top + HEADING, "", "\n\n".join(sections), mark + after]).rstrip("\n") + "\n"


def _by_title(text: str) -> dict[str, str]:
    found = (part.partition("\n") for part in f"\n{text}".split("\n### ")[1:])
    return {title.strip(): body.strip("\n") for title, _, body in found}


def _section(outcome: Outcome) -> str:
    scenario = load_scenario(f"{FOLDER}/{outcome.name}")
    rows = {row["algorithm"]: row for row in outcome.rows}
    lines = [markdown_row(_COLUMNS), "|" + "---|" * len(_COLUMNS)]
    lines += [markdown_row(_figures(row, rows)) for row in outcome.rows]
    claims = [
        f"* {claim['text']}: **{figure(claim['measured'])}** (asked {bound_of(claim)}"
        f"{'' if claim['holds'] else '; not met'})"
        for claim in outcome.claims
    ]
    seeds = "one seed" if scenario.seeds == 1 else f"{scenario.seeds} seeds"
    link = f"[`{FOLDER}/{outcome.name}`](../launcher/scenarios/{FOLDER}/{outcome.name}.toml)"
    said = f"{scenario.text} ({link}, {seeds})."
    return "\n\n".join([said, "\n".join(lines), *(["\n".join(claims)] if claims else [])])


def _figures(row: Json, rows: Mapping[str, Json]) -> list[str]:
    alone, together = rows.get(ALONE), rows.get(TOGETHER)
    loss = row["final"]["loss"]
    sent, gap_s = row["bytes_per_step"], row["longest_gap_s"]
    return [
        row["algorithm"],
        figure(row["samples_per_s"]),
        f"{row['samples_per_s'] / alone['samples_per_s']:.3f}" if alone else "",
        figure(loss),
        f"{loss / together['final']['loss']:.3f}" if together and loss else "",
        figure(sent / 1e6 if sent else sent),
        figure(row["averages_per_peer"]),
        f"{gap_s:,.0f}" if gap_s is not None and row["averages_per_peer"] else "",
    ]


def main(
    names: Annotated[
        list[str] | None, typer.Argument(help="Only these of launcher/scenarios/wan.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of all results.")] = Path("runs/wan"),
    to: Annotated[Path | None, typer.Option("--page", help="Markdown file for the tables.")] = None,
    quick: Quick = False,
) -> None:
    """Run the scenarios of slow links; exit with 3 if a claim does not hold."""
    bench = Bench(out, check=True, quick=quick)
    chosen = experiments(names or (), quick=quick)
    with bench.progress("slow links", len(chosen)) as told:
        work = partial(carry_out, out=out)
        found = side_by_side(work, chosen, lambda one: told(one.name), 2)
    claims = [claim for outcome in found for claim in outcome.claims]
    of = [outcome.name for outcome in found for _ in outcome.claims]
    bench.console.print(claims_table(claims, "Slow links", of))
    if to is not None:
        before = to.read_text(encoding="utf-8") if to.exists() else ""
        to.write_text(page(before, found), encoding="utf-8")
    bench.enforce(claims)


if __name__ == "__main__":
    run_bench(main)
