"""Measure what codecs gain on a slow link: averages of two peers over 1 Gbit/s.

``python -m p2plab.bench.links`` lays a cable of that speed (`p2plab.harness.namespaces`, which
needs root) and runs the systems of `p2plab.bench.systems` with one process at each end. Both
processes share one processor; on a link between machines codecs do no worse.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from p2plab.bench.systems import Round, Worker, medians_of, p2ptrain, run
from p2plab.harness.bench import Bench, Check, Out, Quick, run_bench, some_of
from p2plab.harness.claims import Claim, Json
from p2plab.harness.namespaces import Home, laid
from p2plab.harness.tables import table
from p2ptrain.compute.codec import load_codec
from p2ptrain.ids import Seconds

ROUNDS = 5
MEGABYTE = 1_000_000
WAYS = ("sockets", "grpc")
CODECS = ("fp32", "bf16", "int8")
AT_MOST = {"bf16": 0.6, "int8": 0.35}
"""The bound of each codec, as a fraction of float32's time."""


def at_home(worker: Worker, way: str, codec: str, homes: tuple[Home, Home]) -> list[Round]:
    """Average in the namespace of this rank; the process has started no thread of its own yet."""
    home = homes[worker.rank]
    home.enter()
    return p2ptrain(replace(worker, host=home.host), way, codec)


def measure(
    bench: Bench,
    ways: Sequence[str],
    codecs: Sequence[str],
    megabytes: int,
    mbit: int,
    rounds: int = ROUNDS,
) -> list[Json]:
    """Run everything, one after the other."""
    rows = []
    with laid(mbit) as cable, bench.progress("links", len(ways) * len(codecs)) as told:
        for way, codec in product(ways, codecs):
            system = partial(at_home, way=way, codec=codec, homes=cable.ends)
            found = run(system, 2, megabytes * MEGABYTE // 4, rounds)
            rows.append(row_of(way, codec, megabytes, found))
            told(f"{way}, {codec}")
    return rows


def row_of(way: str, codec: str, megabytes: int, rounds: Sequence[Round]) -> Json:
    """The medians of `rounds`, and the payload per second of the exchange, in one direction."""
    medians = medians_of(rounds)
    mbit = 8e-6 * medians["sent_bytes"] / medians["exchange_s"]
    return {"way": way, "codec": codec, "megabytes": megabytes, **medians, "mbit": mbit}


def claims_of(rows: Sequence[Json], mbit: int) -> list[Json]:
    """The bounds of the codecs, as fractions of float32's time."""
    plain, claims = _exchanges_s(rows), []
    for row in rows:
        way, codec = row["way"], row["codec"]
        if codec in AT_MOST and way in plain:
            text = f"{mbit} Mbit/s, {row['megabytes']} MB over {way}: {codec} over float32"
            of, over, bound = f"{way} {codec}", f"{way} fp32", AT_MOST[codec]
            claim = Claim(text, "exchange_s", of, over=over, at_most=bound)
            claims.append(claim.check(row["exchange_s"] / plain[way]))
    return claims


def table_of(rows: Sequence[Json], mbit: int) -> Table:
    """A line per transport and codec, in seconds."""
    plain = _exchanges_s(rows)
    ratios = [
        row["exchange_s"] / plain[row["way"]] if row["way"] in plain else None for row in rows
    ]
    return table(
        f"Two peers, {mbit} Mbit/s between them: seconds, medians of the slower one's",
        [{**row, "ratio": ratio} for row, ratio in zip(rows, ratios, strict=True)],
        {
            "": "{megabytes} MB, {way}, {codec}",
            "exchange": "{exchange_s:.3f}",
            "/ fp32": "{ratio:.2f}",
            "whole": "{whole_s:.3f}",
            "longest": "{slowest_s:.3f}",
            "bytes sent": "{sent_bytes:,.0f}",
            "Mbit/s": "{mbit:.0f}",
        },
    )


def _exchanges_s(rows: Sequence[Json]) -> dict[str, Seconds]:
    """The time of an exchange in float32, by way."""
    return {row["way"]: row["exchange_s"] for row in rows if row["codec"] == "fp32"}


def main(
    megabytes: Annotated[int, typer.Option(help="Size of the vector.", min=1)] = 100,
    mbit: Annotated[int, typer.Option(help="Speed of the link.", min=1)] = 1000,
    ways: Annotated[str, typer.Option(help="How chunks travel.")] = ",".join(WAYS),
    codecs: Annotated[str, typer.Option(help="How numbers are written.")] = ",".join(CODECS),
    out: Out = Path("runs/bench-links"),
    check: Check = False,
    quick: Quick = False,
) -> None:
    """Measure averages over a slow link, with each codec."""
    bench = Bench(out, check=check, quick=quick)
    chosen = [load_codec(name.strip()).name for name in codecs.split(",")]
    by_way, rounds = some_of("--ways", ways, WAYS), ROUNDS
    if quick:
        by_way, chosen, megabytes, rounds = by_way[:1], chosen[:2], 1, 1
    rows = measure(bench, by_way, chosen, megabytes, mbit, rounds)
    table, claims = table_of(rows, mbit), claims_of(rows, mbit)
    bench.conclude(rows, claims, [table], link_mbit=mbit)


if __name__ == "__main__":
    run_bench(main)
