"""``python -m p2ptrain.sim.explore``: explore and report; exit code 1 if a rule is violated."""

import resource
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from p2ptrain.sim.explore.scenario import Scenario
from p2ptrain.sim.explore.scenarios import large, small
from p2ptrain.sim.explore.search import Counterexample, Findings, Progress, Search
from p2ptrain.sim.explore.situations import Situations
from p2ptrain.sim.explore.transcript import transcript

COMMAND = "python -m p2ptrain.sim.explore"


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Only these scenarios.")] = None,
    full: Annotated[bool, typer.Option("--full", help="The large scenarios too.")] = False,
    most: Annotated[int, typer.Option(help="Situations of one scenario.")] = 5_000_000,
    replay: Annotated[str, typer.Option(help="Print this way through the named one.")] = "",
) -> None:
    """Explore the group lock exhaustively."""
    known = {scenario.name: scenario for scenario in (*small(), *large())}
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise typer.BadParameter(f"there is no scenario {unknown[0]}, only {', '.join(known)}")
    chosen = [known[name] for name in names or ()]
    chosen = chosen or [*small(), *(large() if full else ())]
    if replay:
        path, _, turn = replay.partition("+")
        _print_transcript(chosen[0], tuple(map(int, path.split(","))), int(turn) if turn else None)
        return
    found = [_explore(scenario, most) for scenario in chosen]
    situations = sum(findings.situations for findings in found)
    stuck = sum(findings.stuck_count for findings in found)
    unsafe = sum(findings.unsafe is not None for findings in found)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{situations:,} states, {stuck} stuck, {unsafe} unsafe; {peak_mib:,.0f} MiB at most")
    sys.exit(not all(findings.all_is_well for findings in found))


def _explore(scenario: Scenario, most: int) -> Findings:
    situations = Situations(scenario)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(scenario.name)
        findings = Search(situations, most).run(lambda progress: _tell(bar, task, progress))
        elapsed_s = bar.tasks[task].elapsed or 0.0
    rate = findings.situations / max(elapsed_s, 0.001)
    print(f"{scenario.name}: {scenario}")
    print(
        f"  {findings.situations:,} states, {findings.steps:,} steps, at most {findings.depth} "
        f"in a row; {elapsed_s:,.0f} s, {rate:,.0f} states/s"
    )
    if findings.counterexample:
        _print_counterexample(scenario, findings.counterexample)
    elif not findings.complete:
        print(f"  more than {most:,} states: not all were visited; raise --most")
    else:
        waits = " / ".join(
            f"{ticks} of {bound}"
            for ticks, bound in zip(findings.waits, scenario.bounds, strict=True)
        )
        print(f"  longest until all are free, no fault / repaired / grave: {waits} ticks")
    return findings


def _tell(bar: Bar, task: TaskID, progress: Progress) -> None:
    rate = progress.situations / max(bar.tasks[task].elapsed or 0.0, 0.001)
    name = bar.tasks[task].description.split(":")[0]
    bar.update(
        task,
        description=f"{name}: {progress.situations:,} states, {progress.frontier:,} in front, "
        f"depth {progress.depth}, {rate:,.0f}/s",
    )


def _print_counterexample(scenario: Scenario, found: Counterexample) -> None:
    print(f"  {found.why}")
    _print_transcript(scenario, found.path, found.turn)
    turn = "" if found.turn is None else f"+{found.turn}"
    path = ",".join(map(str, found.path))
    print(f"  replay: {COMMAND} {scenario.name} --replay {path}{turn}")


def _print_transcript(scenario: Scenario, path: tuple[int, ...], turn: int | None) -> None:
    for line in transcript(Situations(scenario), path, turn):
        print(f"    {line}")


if __name__ == "__main__":
    typer.run(main)
