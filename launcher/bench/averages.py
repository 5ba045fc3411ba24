"""Measure how long an average takes, compared with Gloo and with a bare gRPC exchange.

``python -m p2plab.bench.averages`` runs each system for each size of group and vector, in
separate processes, and writes ``bench.json`` and ``bench.png``. `p2plab.bench.systems` defines
the measured systems. All processes share this machine, so only medians and ratios within one run
are meaningful; the machine should be otherwise idle.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated

import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from p2plab.bench import background as costs
from p2plab.bench.systems import SYSTEMS, Round, medians_of, run
from p2plab.harness.bench import Bench, Check, Out, Quick, run_bench, some_of
from p2plab.harness.claims import Claim, Json
from p2plab.harness.pictures import bars, headline, panels
from p2plab.harness.tables import Row, table
from p2plab.plot import INK
from p2ptrain.errors import ConfigError

ROUNDS = 4
PASSES = 2
"""All systems of a cell run once in their order and once in the reverse one: a machine that becomes
slower meanwhile is as slow for each of them."""

QUICK_CELLS = ((2, 1),)
MEGABYTE = 1_000_000
COLOURS = ("#4D4D4D", "#8C8C8C", "#C8C8C8", "#56B4E9", "#009E73", "#CC79A7", "#D55E00")

Cell = tuple[int, int]
"""Peers in the group, megabytes of float32."""


def measure(
    bench: Bench,
    systems: Sequence[str],
    cells: Sequence[Cell],
    rounds: int = ROUNDS,
    passes: int = PASSES,
) -> list[Json]:
    """Run everything, one after the other; a row has the medians of one system in one cell."""
    rows = []
    with bench.progress("averages", len(cells) * len(systems) * passes) as told:
        for peers, megabytes in cells:
            found: dict[str, list[Round]] = {system: [] for system in systems}
            for number in range(passes):
                for system in reversed(systems) if number % 2 else systems:
                    found[system] += run(SYSTEMS[system], peers, megabytes * MEGABYTE // 4, rounds)
                    told(f"{system}, {peers} peers, {megabytes} MB")
            for system, own in found.items():
                cell = {"system": system, "peers": peers, "megabytes": megabytes}
                rows.append({"measures": "average", **cell, **medians_of(own)})
    return rows


def claims_of(rows: Sequence[Json]) -> list[Json]:
    """The required ratios for 100 MB in groups of 2 and 4, and the bytes."""
    claims = []
    by_key = {(row["system"], row["peers"]): row for row in rows if row["megabytes"] == 100}
    for peers in (2, 4):
        if ("gloo", peers) not in by_key:
            continue
        for ours, part, over, at_most in (
            ("p2ptrain memory", "whole_s", "gloo", 0.7),
            ("p2ptrain sockets", "whole_s", "gloo", 1.2),
            ("p2ptrain sockets", "exchange_s", "gloo", 1.0),
            ("p2ptrain grpc", "exchange_s", "bare grpc", 1.2),
            ("p2ptrain sealed", "whole_s", "p2ptrain sockets", 1.3),
        ):
            mine, theirs = by_key.get((ours, peers)), by_key.get((over, peers))
            if mine and theirs:
                what = "whole average" if part == "whole_s" else "exchange"
                text = f"{peers} peers, 100 MB: the {what} of {ours} over {over}"
                claim = Claim(text, part, ours, over=over, at_most=at_most)
                claims.append(claim.check(mine[part] / theirs["whole_s"]))
    for row in rows:
        peers, megabytes, system = row["peers"], row["megabytes"], row["system"]
        if row["sent_bytes"] is not None and megabytes >= 10:
            least = 2 * megabytes * MEGABYTE * (peers - 1) / peers
            text = f"{peers} peers, {megabytes} MB, {system}: bytes over the least"
            claim = Claim(text, "sent_bytes", system, at_most=1.03)
            claims.append(claim.check(row["sent_bytes"] / least))
    return claims


# --- output ---------------------------------------------------------------------------------------


def table_of(rows: Sequence[Json]) -> Table:
    """A line per system and cell, in milliseconds."""
    gloo = {(r["peers"], r["megabytes"]): r["whole_s"] for r in rows if r["system"] == "gloo"}

    def over_gloo(row: Row) -> str:
        base = gloo.get((row["peers"], row["megabytes"]))
        return f"{row['whole_s'] / base:.2f}" if base else "-"

    return table(
        "Averages: milliseconds, medians of the slowest peer's; snapshot, exchange",
        rows,
        {
            "system": "{system}",
            "peers": "{peers}",
            "MB": "{megabytes}",
            "whole": _ms("whole_s"),
            "/ gloo": over_gloo,
            "snap": _ms("snapshot_s"),
            "exch": _ms("exchange_s"),
            "apply": _ms("apply_s"),
            "worst": _ms("slowest_s"),
        },
    )


def _ms(key: str) -> Callable[[Row], str]:
    return lambda row: "-" if row[key] is None else f"{1000 * row[key]:.1f}"


def picture(rows: Sequence[Json]) -> Figure:
    """One panel per size of vector: bars by size of group, one colour per system."""
    sizes = sorted({row["megabytes"] for row in rows})
    systems = [system for system in SYSTEMS if any(row["system"] == system for row in rows)]
    title = "One average, from barrier to barrier"
    figure, axes_of = panels((9.6, 1.2 + 2.6 * len(sizes)), len(sizes), title=title)
    for axes, size in zip(axes_of, sizes, strict=True):
        _draw_panel(axes, [row for row in rows if row["megabytes"] == size], systems)
        headline(axes, f"{size} MB")
    handles, labels = axes_of[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=len(systems), frameon=False, fontsize=9
    )
    return figure


def _draw_panel(axes: Axes, rows: Sequence[Json], systems: Sequence[str]) -> None:
    groups = sorted({row["peers"] for row in rows})
    width = 0.8 / len(systems)
    for number, system in enumerate(systems):
        aside = width * (number - len(systems) / 2 + 0.5)
        own = [row for row in rows if row["system"] == system]
        heights = {groups.index(row["peers"]) + aside: 1000 * row["whole_s"] for row in own}
        bars(axes, heights, _brief, width=0.92 * width, colour=COLOURS[number], label=system)
    axes.set_xticks(range(len(groups)), [f"{peers} peers" for peers in groups])
    axes.set_ylabel("milliseconds", color=INK)
    axes.margins(y=0.15)


def _brief(height: float) -> str:
    return f"{height:.0f}" if height >= 10 else f"{height:.1f}"


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
    out: Out = Path("runs/bench"),
    check: Check = False,
    quick: Quick = False,
) -> None:
    """Measure averages beside Gloo and bare gRPC, and what they cost a trainer."""
    bench = Bench(out, check=check, quick=quick)
    chosen = some_of("--systems", systems, tuple(SYSTEMS)) if systems else []
    cells = list(product(_numbers("--peers", peers, 2), _numbers("--megabytes", megabytes, 1)))
    rows = measure(bench, chosen, QUICK_CELLS, 1, 1) if quick else measure(bench, chosen, cells)
    beside = costs.measure(bench, costs.QUICK if quick else costs.FULL) if background else []
    tables, pictures = [], {}
    if rows:
        tables.append(table_of(rows))
        pictures["bench.png"] = partial(picture, rows)
    if beside:
        tables += costs.tables(beside)
        pictures["background.png"] = partial(costs.picture, beside)
    claims = claims_of(rows) + costs.claims_of(beside)
    bench.conclude([*rows, *beside], claims, tables, pictures)


if __name__ == "__main__":
    run_bench(main)
