"""Show the results of `launcher.bench.lock`: as a table, as claims, as a picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from launcher.bench.claims import claim, print_claims
from launcher.collect import Json
from launcher.plot import FAINT, INK
from p2ptrain.core.lock_state import LockConfig
from p2ptrain.ids import Seconds

INSIDE_AT_LEAST = {2: 0.85, 8: 0.75}
PAIRS_AT_LEAST = 0.9
WAIT_AT_MOST_S: Seconds = 1.0

COLOURS = ("#0072B2", "#E69F00", "#CC3377")
"""By loss, from Okabe and Ito as everywhere."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one world of peers; shares are from 0 to 1."""

    size: int
    loss: float
    inside: float
    """Fraction of all peers' time spent in a group."""
    wait_median_s: Seconds
    wait_p99_s: Seconds
    wait_longest_s: Seconds
    """The longest time of a peer from one group to the next."""
    pairs_met: float
    """Fraction of all pairs that have been in one group."""
    groups: int
    average_s: Seconds
    """The mean time of a member in a group."""
    messages: float
    """Messages of the lock, per group and member."""

    @property
    def name(self) -> str:
        """``groups of 8``, ``groups of 8, loss 5 %``."""
        return f"groups of {self.size}{f', {loss_of(self.loss)}' if self.loss else ''}"


def loss_of(loss: float) -> str:
    """``loss 5 %``."""
    return f"loss {100 * loss:g} %"


# --- claims ---------------------------------------------------------------------------------------


def claims_of(rows: Sequence[Figures]) -> list[Json]:
    """The claims; with loss of messages there are very few."""
    claims = []
    for row in rows:
        if row.loss:
            text = f"{row.name}: no lost message idles anybody for a lease"
            claims.append(
                claim(
                    text,
                    "wait_longest_s",
                    row.name,
                    row.wait_longest_s,
                    at_most=LockConfig().lease_s,
                )
            )
            continue
        if row.size in INSIDE_AT_LEAST:
            text = f"{row.name}: peers that ask all the time are inside one most of it"
            claims.append(
                claim(text, "inside", row.name, row.inside, at_least=INSIDE_AT_LEAST[row.size])
            )
        text = f"{row.name}: nearly all pairs meet in 20 s"
        claims.append(claim(text, "pairs_met", row.name, row.pairs_met, at_least=PAIRS_AT_LEAST))
        text = f"{row.name}: nobody waits for long"
        claims.append(
            claim(text, "wait_longest_s", row.name, row.wait_longest_s, at_most=WAIT_AT_MOST_S)
        )
    return claims


# --- on the terminal ------------------------------------------------------------------------------


def print_figures(console: Console, rows: Sequence[Figures], claims: Sequence[Json]) -> None:
    """One line per world, then the claims."""
    title = "Peers that ask all the time (times in ms)"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for heading in ("inside", "wait", "99 %", "longest", "met", "average", "msgs"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        waits = (row.wait_median_s, row.wait_p99_s, row.wait_longest_s)
        table.add_row(
            row.name,
            f"{row.inside:.1%}",
            *(f"{1000 * wait:.0f}" for wait in waits),
            f"{row.pairs_met:.1%}",
            f"{1000 * row.average_s:.0f}",
            f"{row.messages:.0f}",
        )
    console.print(table)
    print_claims(console, claims)


# --- as a picture ---------------------------------------------------------------------------------


def plot(path: Path, rows: Sequence[Figures]) -> None:
    """Left: the fraction of time a peer is inside; right: how long it waits."""
    figure = Figure(figsize=(9.6, 4.2), dpi=150)
    figure.set_layout_engine("constrained", wspace=0.06)
    inside, waits = figure.subplots(1, 2)
    figure.suptitle(
        "64 peers that ask for a group all the time",
        x=0.01,
        ha="left",
        fontsize=13,
        weight="bold",
        color=INK,
    )
    sizes = sorted({row.size for row in rows})
    losses = sorted({row.loss for row in rows})
    for axes in (inside, waits):
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(FAINT)
        axes.tick_params(colors=INK, labelsize=9)
        axes.set_xticks(range(len(sizes)), [f"groups of {size}" for size in sizes])
    for row in rows:
        place = sizes.index(row.size) + 0.26 * (losses.index(row.loss) - (len(losses) - 1) / 2)
        colour = COLOURS[losses.index(row.loss) % len(COLOURS)]
        _draw_inside(inside, place, colour, row)
        _draw_waits(waits, place, colour, row)
    for size, bound in INSIDE_AT_LEAST.items():
        if size in sizes:
            middle = sizes.index(size)
            inside.plot([middle - 0.42, middle + 0.42], [bound, bound], color=INK, linewidth=0.9)
    inside.set_ylim(0, 1)
    inside.set_ylabel("share of its time that a peer is in a group", color=INK)
    inside.set_title("Inside; lines: what is required without loss", loc="left", fontsize=11)
    waits.set_yscale("log")
    waits.set_ylim(0.001, 2)
    waits.set_yticks([0.001, 0.01, 0.1, 1], ["1 ms", "10 ms", "100 ms", "1 s"])
    waits.axhline(WAIT_AT_MOST_S, color=INK, linewidth=0.9)
    waits.set_ylabel("from one group to the next", color=INK)
    waits.set_title("Waiting: median, 99th percentile, longest", loc="left", fontsize=11)
    handles = [
        waits.scatter([], [], color=COLOURS[n % len(COLOURS)], label=loss_of(loss))
        for n, loss in enumerate(losses)
    ]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(losses), frameon=False, fontsize=9
    )
    figure.savefig(path)


def _draw_inside(axes: Axes, place: float, colour: str, row: Figures) -> None:
    axes.bar(place, row.inside, width=0.22, color=colour)
    axes.annotate(
        f"{100 * row.inside:.0f}",
        (place, row.inside),
        xytext=(0, -11),
        textcoords="offset points",
        ha="center",
        fontsize=9,
        color="white",
    )


def _draw_waits(axes: Axes, place: float, colour: str, row: Figures) -> None:
    shown = (row.wait_median_s, row.wait_p99_s, row.wait_longest_s)
    axes.plot([place] * 3, shown, color=colour, linewidth=1.2)
    for value, marker in zip(shown, "o_^", strict=True):
        axes.scatter(place, value, color=colour, marker=marker, s=36)
