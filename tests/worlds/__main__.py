"""``python -m tests.worlds --seeds 10000 --first 0``: as many worlds, on all cores.

Its last line counts the violations; each is printed with the one command that replays it. A single
world also leaves its trace.
"""

import ast
import multiprocessing
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from p2ptrain.sim.checkers import Violation
from tests.worlds.spec import Options, Spec, spec_of
from tests.worlds.world import Verdict, carry_out

AT_A_TIME = 25
"""Worlds that a process is given at a time."""

TRACES = Path("runs/worlds")


def main(
    seeds: Annotated[int, typer.Option(min=1, help="How many worlds.")] = 1000,
    first: Annotated[int, typer.Option(min=0, help="The first one's seed.")] = 0,
    algorithm: Annotated[str, typer.Option(help="Of all worlds; by default it is drawn.")] = "",
    option: Annotated[
        list[str] | None, typer.Option(help="Of all worlds, as sync=ssp; by default all are drawn.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = os.cpu_count() or 1,
) -> None:
    """Run worlds of consecutive seeds; exit with 1 if a rule was broken in any."""
    console = Console(soft_wrap=True, highlight=False)
    asked = dict(map(parsed, option or ()))
    if seeds == 1:
        verdicts = iter([replayed(first, algorithm, asked, console)])
    else:
        verdicts = _all(range(first, first + seeds), algorithm, asked, jobs, console)
    violations = groups = partial = 0
    for verdict in verdicts:
        groups, partial = groups + verdict.groups, partial + verdict.partial
        violations += len(verdict.violations)
        for line in told(verdict):
            console.print(line, markup=False)
    console.print(f"{groups} groups, of which {partial} were finished by some members only")
    console.print(f"{seeds} worlds, {violations} violations")
    sys.exit(1 if violations else 0)


def told(verdict: Verdict) -> Iterator[str]:
    """What a reader has to know of a world in which a rule was broken."""
    for violation in verdict.violations:
        yield f"{verdict.spec}: {violation}"
        seed, algorithm = verdict.spec.seed, verdict.spec.algorithm
        asked = "" if spec_of(seed).algorithm == algorithm else f" ALGORITHM={algorithm}"
        drawn = spec_of(seed, algorithm).options
        others = [f"{k}={v}" for k, v in verdict.spec.options.items() if drawn.get(k) != v]
        if others:
            asked = f' ALGORITHM={algorithm} OPTIONS="{" ".join(others)}"'
        yield f"  replay: make worlds SEEDS=1 FIRST={seed}{asked}"


def parsed(option: str) -> tuple[str, Any]:  # Any: the algorithm checks
    """``period=5``: a name and a number, or a word."""
    name, _, value = option.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value


def replayed(seed: int, algorithm: str, asked: Options, console: Console) -> Verdict:
    """One world, with all that there is to read of it."""
    path = TRACES / f"world-{seed}.txt"
    verdict = carry_out(spec_of(seed, algorithm, **asked), path)
    console.print(f"{verdict.spec}; all of it is in {path}", markup=False)
    if verdict.violations:
        console.print(verdict.trace_tail, markup=False)
    return verdict


def _all(
    seeds: range, algorithm: str, asked: Options, jobs: int, console: Console
) -> Iterator[Verdict]:
    parts = [seeds[at : at + AT_A_TIME] for at in range(0, len(seeds), AT_A_TIME)]
    forked = multiprocessing.get_context("fork")
    columns = (TextColumn("worlds"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with (
        Progress(*columns, console=console, transient=True) as progress,
        ProcessPoolExecutor(jobs, mp_context=forked) as pool,
    ):
        done = progress.add_task("worlds", total=len(seeds))
        for part in as_completed([pool.submit(_some, part, algorithm, asked) for part in parts]):
            progress.advance(done, len(part.result()))
            yield from part.result()


def _some(seeds: range, algorithm: str, asked: Options) -> list[Verdict]:
    return [_one(spec_of(seed, algorithm, **asked)) for seed in seeds]


def _one(spec: Spec) -> Verdict:
    """An error of one world says which one it is, and costs no others their verdicts."""
    try:
        return carry_out(spec)
    except Exception as error:  # noqa: BLE001 - a verdict, whatever it is
        return Verdict(spec, (Violation("it runs to its end", repr(error), 0.0),))


if __name__ == "__main__":
    typer.run(main)
