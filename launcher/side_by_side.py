"""Show two runs beside each other, and say in what they differ beside their figures.

Figures of runs that are not alike may be compared, too, as long as the reader knows: each
difference of the scenario, the number of peers, the backend and its clock, the algorithms and the
samples is one sentence above the table.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from p2plab.harness.claims import Json
from p2plab.report.words import is_virtual
from p2plab.result_files import Comparison, check_is_a_folder, check_is_a_run, read_json
from p2plab.run import EQUAL
from p2plab.scenario import Scenario, load_scenario, metric_of
from p2ptrain.errors import ConfigError

_FIGURES = {
    "samples per second": ("samples_per_s", ",.0f"),
    "samples": ("samples", ",.0f"),
    "seconds to the target": ("time_to_target_s", ".1f"),
    "accuracy": ("final.accuracy", ".4f"),
    "loss": ("final.loss", ".4f"),
    "consensus distance": ("final.consensus_distance", ".3g"),
    "averages per peer": ("averages_per_peer", ",.0f"),
    "failed share": ("failed_share", ".1%"),
    "seconds of the run": ("wall_s", ".1f"),
}

_TOLD_APART = ("name", "text", "peers", "algorithms", "compare", "options", "stop", "claims")
"""Keys of a scenario whose differences another sentence tells, or that change no figure."""


def print_beside(folders: Sequence[Path]) -> None:
    """Print in what two runs differ, and their figures, algorithm by algorithm.

    Raises:
        ConfigError: if a folder holds no comparison, or both have no algorithm in common.
    """
    console = Console(highlight=False)
    both = [_comparison(folder) for folder in folders]
    headings = headings_of(folders)
    first, second = (by_name(one) for one in both)
    common = [name for name in first if name in second]
    if not common:
        raise ConfigError(f"{folders[0]} and {folders[1]} have no algorithm in common")
    for heading, one in zip(headings, both, strict=True):
        note = f" ({one['partial']})" if one["partial"] else ""
        console.print(Text(f"{heading}: {_in_short(one)}{note}"))
    for sentence in (*differences(both, headings), *_of_settings(folders, both, common)):
        console.print(Text(sentence, style="yellow"))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", style="bold", no_wrap=True)
    table.add_column("", no_wrap=True)
    for heading in headings:
        table.add_column(Text(heading), justify="right", overflow="fold")
    table.add_column("ratio", justify="right", no_wrap=True)
    for name in common:
        _add_figures(table, name, first[name], second[name])
    console.print(table)


def headings_of(folders: Sequence[Path]) -> list[str]:
    """Of each folder the last parts of its path, as few as tell both apart.

    Raises:
        ConfigError: if both are one folder.
    """
    parts = [folder.resolve().parts for folder in folders]
    for count in range(1, 1 + max(map(len, parts))):
        one, other = (Path(*path[-count:]) for path in parts)
        if one != other:
            return [str(one), str(other)]
    raise ConfigError(f"{folders[0]} and {folders[1]} are one folder; give those of two runs")


def by_name(comparison: Json) -> dict[str, Json]:
    """The rows of a comparison."""
    return {row["algorithm"]: row for row in comparison["rows"]}


def differences(both: Sequence[Json], headings: Sequence[str]) -> Iterator[str]:
    """What differs between two comparisons beside their figures, in a sentence each."""
    one, other = both
    if one["scenario"] != other["scenario"]:
        yield f"The scenarios differ: {one['scenario']} and {other['scenario']}."
    if one["peers"] != other["peers"]:
        yield f"The numbers of peers differ: {one['peers']:,} and {other['peers']:,}."
    clocks = [_clock(comparison) for comparison in both]
    if clocks[0] != clocks[1]:
        yield (
            f"The backends differ, and their clocks: {one['backend']} in {clocks[0]} and "
            f"{other['backend']} in {clocks[1]}; seconds of one are not those of the other."
        )
    elif one["backend"] != other["backend"]:
        yield f"The backends differ: {one['backend']} and {other['backend']}."
    rows, others = by_name(one), by_name(other)
    only = [[name for name in rows if name not in others]]
    only += [[name for name in others if name not in rows]]
    for heading, names in zip(headings, only, strict=True):
        if names:
            yield f"Only {heading} has {', '.join(names)}."
    trained = [(n, rows[n]["samples"], others[n]["samples"]) for n in rows if n in others]
    unequal = [one for one in trained if abs(one[1] - one[2]) > EQUAL * max(one[1:])]
    if unequal:
        said = ", ".join(
            f"{name} {before:,.0f} and {after:,.0f}" for name, before, after in unequal
        )
        yield f"The samples differ: {said}."


def _of_settings(
    folders: Sequence[Path], both: Sequence[Json], common: Sequence[str]
) -> Iterator[str]:
    """Scenarios of one name may still have other values: a changed file, another seed."""
    if both[0]["scenario"] != both[1]["scenario"]:
        return
    paths = [folder / "scenario.toml" for folder in folders]
    missing = [str(path) for path in paths if not path.exists()]
    if missing:
        yield f"Settings are not compared, since there is no {' and no '.join(missing)}."
        return
    one, other = (load_scenario(str(path)) for path in paths)
    differ = [
        key.name
        for key in dataclasses.fields(Scenario)
        if key.name not in _TOLD_APART and getattr(one, key.name) != getattr(other, key.name)
    ]
    differ += [name for name in common if one.settings_of(name) != other.settings_of(name)]
    if differ:
        yield f"Both are of {one.name}, but with other values of {', '.join(differ)}."


def _in_short(comparison: Json) -> str:
    peers = f"{comparison['peers']:,} peer{'' if comparison['peers'] == 1 else 's'}"
    return f"{comparison['scenario']}, {peers}, {comparison['backend']} ({_clock(comparison)})"


def _clock(comparison: Json) -> str:
    return "virtual time" if is_virtual(comparison["rows"][0]) else "real time"


def _add_figures(table: Table, name: str, one: Json, other: Json) -> None:
    for what, (metric, form) in _FIGURES.items():
        values = [metric_of(row, metric) for row in (one, other)]
        if any(value is not None for value in values):
            table.add_row(name, what, *_cells(values, form))
            name = ""  # it stands in the first line of its figures
    table.add_section()


def _cells(values: Sequence[float | None], form: str) -> list[str]:
    before, after = values
    ratio = after / before if before and after is not None else None
    cells = ["-" if value is None else format(value, form) for value in values]
    return [*cells, "-" if ratio is None else f"{ratio:.2f}"]


def _comparison(folder: Path) -> Json:
    check_is_a_folder(folder)
    remedy = f"p2plab report {folder} makes it again"
    found: Json | None = read_json(folder / "comparison.json", Comparison, remedy)
    if found is None:
        check_is_a_run(folder)
        raise ConfigError(f"{folder} holds no comparison; p2plab report {folder} makes it")
    if not found["rows"]:
        raise ConfigError(f"{folder}/comparison.json is damaged: it has no rows; {remedy}")
    return found
