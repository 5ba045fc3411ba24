"""Measure how long an average takes, compared with Gloo and with a bare gRPC exchange.

``python -m launcher.bench.averages`` runs each system for each size of group and vector, in
separate processes, and writes ``bench.json`` and ``bench.png``. `launcher.bench.systems` defines
the measured systems. All processes share this machine, so only medians and ratios within one run
are meaningful; the machine should be otherwise idle.
"""

import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from launcher.bench import background as costs
from launcher.bench.claims import (
    Quick,
    claim,
    conclude,
    print_claims,
    run_bench,
    some_of,
    write_bench,
)
from launcher.bench.systems import SYSTEMS, Round, run
from launcher.collect import Json
from launcher.plot import FAINT, INK
from p2ptrain.errors import ConfigError
from p2ptrain.ids import Seconds

ROUNDS = 7
QUICK_CELLS = ((2, 1),)
MEGABYTE = 1_000_000
COLOURS = ("#4D4D4D", "#8C8C8C", "#C8C8C8", "#56B4E9", "#009E73", "#D55E00")

Cell = tuple[int, int]
"""Peers in the group, megabytes of float32."""


@dataclass(frozen=True, slots=True)
class Row:
    """Medians of one system in one cell."""

    system: str
    peers: int
    megabytes: int
    whole_s: Seconds
    slowest_s: Seconds
    snapshot_s: Seconds | None
    exchange_s: Seconds | None
    apply_s: Seconds | None
    sent_bytes: float | None


def row_of(system: str, cell: Cell, rounds: Sequence[Round]) -> Row:
    """The medians of `rounds`; None where the system does not report one."""

    def middle(name: str) -> float | None:
        values = [getattr(one, name) for one in rounds]
        return None if None in values else float(median(values))

    wholes = [one.whole_s for one in rounds]
    return Row(
        system,
        *cell,
        whole_s=float(median(wholes)),
        slowest_s=max(wholes),
        snapshot_s=middle("snapshot_s"),
        exchange_s=middle("exchange_s"),
        apply_s=middle("apply_s"),
        sent_bytes=middle("sent_bytes"),
    )


def measure(
    console: Console, systems: Sequence[str], cells: Sequence[Cell], rounds: int = ROUNDS
) -> list[Row]:
    """Run everything, one after the other."""
    context = multiprocessing.get_context("spawn")
    rows = []
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("averages", total=len(cells) * len(systems))
        for cell, system in product(cells, systems):
            peers, megabytes = cell
            progress.update(bar, description=f"{system}, {peers} peers, {megabytes} MB")
            with tempfile.TemporaryDirectory() as folder:
                numbers = megabytes * MEGABYTE // 4
                found = run(context, SYSTEMS[system], peers, numbers, rounds, Path(folder))
            rows.append(row_of(system, cell, found))
            progress.advance(bar)
    return rows


# --- claims ---------------------------------------------------------------------------------------


def claims_of(rows: Sequence[Row]) -> list[Json]:
    """The required ratios for 100 MB in groups of 2 and 4, and the bytes."""
    claims = []
    by_key = {(row.system, row.peers): row for row in rows if row.megabytes == 100}
    for peers in (2, 4):
        if ("gloo", peers) not in by_key:
            continue
        for ours, part, over, at_most in (
            ("p2ptrain memory", "whole_s", "gloo", 0.7),
            ("p2ptrain sockets", "whole_s", "gloo", 1.2),
            ("p2ptrain sockets", "exchange_s", "gloo", 1.0),
            ("p2ptrain grpc", "exchange_s", "bare grpc", 1.2),
        ):
            mine, theirs = by_key.get((ours, peers)), by_key.get((over, peers))
            if mine and theirs:
                ratio = getattr(mine, part) / theirs.whole_s
                what = "whole average" if part == "whole_s" else "exchange"
                text = f"{peers} peers, 100 MB: the {what} of {ours} over {over}"
                claims.append(claim(text, part, ours, ratio, over=over, at_most=at_most))
    for row in rows:
        if row.sent_bytes is not None and row.megabytes >= 10:
            least = 2 * row.megabytes * MEGABYTE * (row.peers - 1) / row.peers
            text = f"{row.peers} peers, {row.megabytes} MB, {row.system}: bytes over the least"
            claims.append(
                claim(text, "sent_bytes", row.system, row.sent_bytes / least, at_most=1.03)
            )
    return claims


# --- output ---------------------------------------------------------------------------------------


def print_rows(console: Console, rows: Sequence[Row]) -> None:
    """A line per system and cell, in milliseconds."""
    title = "Averages: milliseconds, medians of the slowest peer's; snapshot, exchange"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("peers", "MB"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for heading in ("whole", "/ gloo", "snap", "exch", "apply", "worst"):
        table.add_column(heading, justify="right", no_wrap=True)
    gloo = {(row.peers, row.megabytes): row.whole_s for row in rows if row.system == "gloo"}
    for row in rows:
        base = gloo.get((row.peers, row.megabytes))
        table.add_row(
            str(row.peers),
            str(row.megabytes),
            row.system,
            _ms(row.whole_s),
            f"{row.whole_s / base:.2f}" if base else "-",
            *(_ms(value) for value in (row.snapshot_s, row.exchange_s, row.apply_s)),
            _ms(row.slowest_s),
        )
    console.print(table)


def _ms(value: Seconds | None) -> str:
    return "-" if value is None else f"{1000 * value:.1f}"


def plot(path: Path, rows: Sequence[Row]) -> None:
    """One panel per size of vector: bars by size of group, one colour per system."""
    sizes = sorted({row.megabytes for row in rows})
    figure = Figure(figsize=(9.6, 1.2 + 2.6 * len(sizes)), dpi=150)
    figure.set_layout_engine("constrained", hspace=0.08)
    figure.suptitle(
        "One average, from barrier to barrier", x=0.01, ha="left", fontsize=13, color=INK
    )
    panels = figure.subplots(len(sizes), 1, squeeze=False)[:, 0]
    systems = [system for system in SYSTEMS if any(row.system == system for row in rows)]
    for axes, size in zip(panels, sizes, strict=True):
        _draw_panel(axes, [row for row in rows if row.megabytes == size], systems)
        axes.set_title(f"{size} MB", loc="left", fontsize=11, color=INK)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=len(systems), frameon=False, fontsize=9
    )
    figure.savefig(path)


def _draw_panel(axes: Axes, rows: Sequence[Row], systems: Sequence[str]) -> None:
    groups = sorted({row.peers for row in rows})
    width = 0.8 / len(systems)
    for number, system in enumerate(systems):
        own = {row.peers: row.whole_s for row in rows if row.system == system}
        places = [groups.index(peers) + width * (number - len(systems) / 2 + 0.5) for peers in own]
        heights = [1000 * value for value in own.values()]
        axes.bar(places, heights, width=0.92 * width, color=COLOURS[number], label=system)
        for worker, height in zip(places, heights, strict=True):
            text = f"{height:.0f}" if height >= 10 else f"{height:.1f}"
            axes.annotate(text, (worker, height), ha="center", va="bottom", fontsize=8, color=INK)
    axes.set_xticks(range(len(groups)), [f"{peers} peers" for peers in groups])
    axes.set_ylabel("milliseconds", color=INK)
    axes.margins(y=0.15)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=9)


def _numbers(option: str, text: str, least: int) -> list[int]:
    """Raises ConfigError."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdigit() and int(word) >= least for word in words):
        raise ConfigError(f"{option} {text!r} must be whole numbers from {least} on: 2,4")
    return [int(word) for word in words]


def main(
    peers: Annotated[str, typer.Option(help="Sizes of groups.")] = "2,3,4,8",
    megabytes: Annotated[str, typer.Option(help="Sizes of vectors.")] = "1,10,100",
    systems: Annotated[str, typer.Option(help="Which systems; empty: none.")] = ",".join(SYSTEMS),
    background: Annotated[bool, typer.Option(help="Trainers beside averages, and memory.")] = True,
    out: Annotated[Path, typer.Option(help="Where the results go.")] = Path("runs/bench"),
    check: Annotated[bool, typer.Option(help="Exit with 3 if a claim does not hold.")] = False,
    quick: Quick = False,
) -> None:
    """Measure averages beside Gloo and bare gRPC, and what they cost a trainer."""
    console, began = Console(), time.monotonic()
    chosen = some_of("--systems", systems, tuple(SYSTEMS)) if systems else []
    cells = list(product(_numbers("--peers", peers, 2), _numbers("--megabytes", megabytes, 1)))
    rows = measure(console, chosen, QUICK_CELLS, 1) if quick else measure(console, chosen, cells)
    claims = claims_of(rows)
    beside = costs.measure(console, costs.QUICK if quick else costs.FULL) if background else []
    claims += costs.claims_of(beside)
    averages = [{"measures": "average", **asdict(row)} for row in rows]
    write_bench(out, [*averages, *beside], claims, began)
    if rows:
        plot(out / "bench.png", rows)
        print_rows(console, rows)
    if beside:
        costs.plot(out / "background.png", beside)
        costs.print_rows(console, beside)
    print_claims(console, claims)
    conclude(console, out, claims, check=check, quick=quick)


if __name__ == "__main__":
    run_bench(main)
