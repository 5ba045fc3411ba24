"""Measure what codecs gain on a slow link: averages of two peers over 1 Gbit/s.

``python -m launcher.bench.links`` creates two network namespaces, connects them by a pair of
virtual Ethernet devices, limits both directions with `tc`, and runs the systems of
`launcher.bench.systems` with one process in each. Namespaces need root, and are removed however the
program ends, unless it is killed. Both processes share one processor; on a link between machines
codecs do no worse.
"""

import contextlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from launcher.bench.claims import (
    Quick,
    claim,
    conclude,
    print_claims,
    run_bench,
    some_of,
    write_bench,
)
from launcher.bench.namespaces import Home, do, end_on_sigterm, made
from launcher.bench.systems import Round, Worker, p2ptrain, run
from launcher.collect import Json
from p2ptrain.compute.codec import load_codec
from p2ptrain.ids import Seconds

ROUNDS = 5
MEGABYTE = 1_000_000
WAYS = ("sockets", "grpc")
CODECS = ("fp32", "bf16", "int8")
AT_MOST = {"bf16": 0.6, "int8": 0.35}
"""The bound of each codec, as a fraction of float32's time."""

BURST = "256kb"
"""The bucket's size: above the 64 KiB that a device takes in one piece."""

QUEUE_S: Seconds = 0.05


@dataclass(frozen=True, slots=True)
class Row:
    """Medians of one transport and codec."""

    way: str
    codec: str
    megabytes: int
    exchange_s: Seconds
    whole_s: Seconds
    slowest_s: Seconds
    sent_bytes: float

    @property
    def mbit(self) -> float:
        """Payload, in one direction, per second of the exchange."""
        return 8e-6 * self.sent_bytes / self.exchange_s


# --- the link -------------------------------------------------------------------------------------


@contextlib.contextmanager
def linked(
    mbit: int, hosts: tuple[str, str] = ("10.77.0.1", "10.77.0.2")
) -> Iterator[tuple[Home, Home]]:
    """Two namespaces with a link of `mbit` Mbit/s in each direction, removed at the end.

    Args:
        mbit: the rate.
        hosts: their addresses, in one network of 24 bits.

    Raises:
        ConfigError: if this machine does not allow it.
    """
    name = f"p2plink{os.getpid()}"
    homes = (Home(f"{name}-0", hosts[0]), Home(f"{name}-1", hosts[1]))
    with made(homes, "tc"):
        _join(homes, mbit)
        yield homes


def _join(homes: tuple[Home, Home], mbit: int) -> None:
    ends = [("netns", home.namespace) for home in homes]
    do("ip", "link", "add", "end", *ends[0], "type", "veth", "peer", "name", "end", *ends[1])
    queue = str(round(mbit * 125_000 * QUEUE_S))
    for home in homes:
        home.do("ip", "addr", "add", f"{home.host}/24", "dev", "end")
        home.do("ip", "link", "set", "end", "up")
        rate = ("rate", f"{mbit}mbit", "burst", BURST, "limit", queue)
        home.do("tc", "qdisc", "add", "dev", "end", "root", "tbf", *rate)


def at_home(worker: Worker, way: str, codec: str, homes: tuple[Home, Home]) -> list[Round]:
    """Average in the namespace of this rank; the process has started no thread of its own yet."""
    home = homes[worker.rank]
    home.enter()
    return p2ptrain(replace(worker, host=home.host), way, codec)


# --- measuring ------------------------------------------------------------------------------------


def measure(
    console: Console,
    ways: Sequence[str],
    codecs: Sequence[str],
    megabytes: int,
    mbit: int,
    rounds: int = ROUNDS,
) -> list[Row]:
    """Run everything, one after the other."""
    context = multiprocessing.get_context("spawn")
    numbers, rows = megabytes * MEGABYTE // 4, []
    with linked(mbit) as homes, Progress(console=console, transient=True) as progress:
        bar = progress.add_task("links", total=len(ways) * len(codecs))
        for way, codec in product(ways, codecs):
            progress.update(bar, description=f"{way}, {codec}")
            system = partial(at_home, way=way, codec=codec, homes=homes)
            with tempfile.TemporaryDirectory() as folder:
                found = run(context, system, 2, numbers, rounds, Path(folder))
            rows.append(row_of(way, codec, megabytes, found))
            progress.advance(bar)
    return rows


def row_of(way: str, codec: str, megabytes: int, rounds: Sequence[Round]) -> Row:
    """The medians of `rounds`."""
    wholes = [one.whole_s for one in rounds]
    return Row(
        way,
        codec,
        megabytes,
        exchange_s=median(one.exchange_s or 0.0 for one in rounds),
        whole_s=median(wholes),
        slowest_s=max(wholes),
        sent_bytes=median(one.sent_bytes or 0 for one in rounds),
    )


def claims_of(rows: Sequence[Row], mbit: int) -> list[Json]:
    """The bounds of the codecs, as fractions of float32's time."""
    plain = {row.way: row for row in rows if row.codec == "fp32"}
    return [
        claim(
            f"{mbit} Mbit/s, {row.megabytes} MB over {row.way}: {row.codec} over float32",
            "exchange_s",
            f"{row.way} {row.codec}",
            row.exchange_s / plain[row.way].exchange_s,
            over=f"{row.way} fp32",
            at_most=AT_MOST[row.codec],
        )
        for row in rows
        if row.codec in AT_MOST and row.way in plain
    ]


def print_rows(console: Console, rows: Sequence[Row], mbit: int) -> None:
    """A line per transport and codec, in milliseconds."""
    title = f"Two peers, {mbit} Mbit/s between them: milliseconds, medians of the slower one's"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for heading in ("exchange", "/ fp32", "whole", "longest", "MB sent", "Mbit/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    plain = {row.way: row.exchange_s for row in rows if row.codec == "fp32"}
    for row in rows:
        ratio = f"{row.exchange_s / plain[row.way]:.2f}" if row.way in plain else "-"
        table.add_row(
            f"{row.megabytes} MB, {row.way}, {row.codec}",
            f"{1000 * row.exchange_s:.0f}",
            ratio,
            f"{1000 * row.whole_s:.0f}",
            f"{1000 * row.slowest_s:.0f}",
            f"{row.sent_bytes / MEGABYTE:.1f}",
            f"{row.mbit:.0f}",
        )
    console.print(table)


def main(
    megabytes: Annotated[int, typer.Option(help="Size of the vector.", min=1)] = 100,
    mbit: Annotated[int, typer.Option(help="Speed of the link.", min=1)] = 1000,
    ways: Annotated[str, typer.Option(help="How chunks travel.")] = ",".join(WAYS),
    codecs: Annotated[str, typer.Option(help="How numbers are written.")] = ",".join(CODECS),
    out: Annotated[Path, typer.Option(help="Where results go.")] = Path("runs/bench-links"),
    check: Annotated[bool, typer.Option(help="Exit with 3 if a claim does not hold.")] = False,
    quick: Quick = False,
) -> None:
    """Measure averages over a slow link, with each codec."""
    console, began = Console(), time.monotonic()
    end_on_sigterm()
    chosen = [load_codec(name.strip()).name for name in codecs.split(",")]
    by_way, rounds = some_of("--ways", ways, WAYS), ROUNDS
    if quick:
        by_way, chosen, megabytes, rounds = by_way[:1], chosen[:2], 1, 1
    rows = measure(console, by_way, chosen, megabytes, mbit, rounds)
    claims = claims_of(rows, mbit)
    write_bench(out, [asdict(row) for row in rows], claims, began, link_mbit=mbit)
    print_rows(console, rows, mbit)
    print_claims(console, claims)
    conclude(console, out, claims, check=check, quick=quick)


if __name__ == "__main__":
    run_bench(main)
