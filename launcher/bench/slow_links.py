"""Measure averages over links that are slow for the model: how many formed groups succeed.

``python -m launcher.bench.slow_links`` lets four real processes train behind relays
(`launcher.backends.relays`), each of which limits what leaves its peer: 100 MB over 20 Mbit/s, and
4 MB over 1 Mbit/s, so that one average takes half a minute and more. Steps only sleep, so several
algorithms share the machine; every swarm has separate links. Chunks travel by gRPC, since a relay
carries one port; control messages share it, and wait behind chunks.
"""

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from multiprocessing.context import SpawnContext
from pathlib import Path
from queue import Empty
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from launcher.backends.cables import Cables, can_lay
from launcher.backends.process import free_ports
from launcher.bench.claimer import FilledModel
from launcher.bench.claims import (
    Quick,
    claim,
    conclude,
    print_claims,
    run_bench,
    some_of,
    write_bench,
)
from launcher.bench.namespaces import end_on_sigterm
from launcher.collect import Json
from launcher.plot import FAINT, INK
from p2ptrain.averaging.base import known_algorithms
from p2ptrain.core.effects import Outcome
from p2ptrain.errors import ConfigError
from p2ptrain.ids import Seconds
from p2ptrain.net.grpc_config import GrpcConfig
from p2ptrain.runtime.metrics import MemoryMetrics
from p2ptrain.runtime.peer import Peer
from p2ptrain.runtime.settings import StopConfig

PEERS = 4
SUCCEED = 0.95
"""The least fraction of formed groups that succeeds."""

TOGETHER = 3
"""Concurrent swarms: a peer of 100 MB takes some 600 MB, and hardly any processor time."""


@dataclass(frozen=True, slots=True)
class Case:
    """One model behind one kind of link."""

    megabytes: int
    mbit: float
    seconds: Seconds
    """The duration of training; averages that run at its end are still finished."""
    step_s: Seconds

    def __str__(self) -> str:
        return f"{self.megabytes} MB, {self.mbit:g} Mbit/s"


SECONDS: Seconds = 360.0
CASES = (Case(100, 20, SECONDS, 4.0), Case(4, 1, SECONDS, 4.0))
SIZES = [str(case.megabytes) for case in CASES]
QUICK_CASE = Case(1, 20, 6, 0.2)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt of a formed group, as one of its members saw it."""

    algorithm: str
    megabytes: int
    mbit: float
    peer: str
    lasted_s: Seconds
    outcome: str
    reason: str
    silences: int
    """Warnings of this peer that its averages have stopped succeeding."""

    @property
    def is_done(self) -> bool:
        return self.outcome == Outcome.DONE


# --- one peer, in a process of its own ------------------------------------------------------------


def _live(
    algorithm: str, case: Case, rank: int, port: int, addresses: Sequence[str], results: Any
) -> None:
    """Train for a while, and return the outcome of each group."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    metrics = MemoryMetrics(perf_counter)
    model = FilledModel(case.megabytes * 250_000, 0.0)
    model.weight.grad = torch.zeros_like(model.weight)
    with Peer(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-6),
        name=f"p{rank}",
        algorithm=algorithm,
        listen=f"127.0.0.1:{port}",
        advertise=addresses[rank],
        join=addresses[:1] if rank else (),
        join_timeout_s=120.0,
        peers=PEERS,
        leave_grace_s=case.seconds,
        stop=StopConfig(seconds=case.seconds),
        network=GrpcConfig(data="grpc"),
        metrics=metrics,
    ) as peer:
        while not peer.should_stop:
            time.sleep(case.step_s)
            peer.step()
    silences = sum(bool(record.get("silent")) for record in metrics.of("warning"))
    formed = [record for record in metrics.of("group") if record["snapshot_s"] > 0]
    results.put(
        [
            Attempt(
                algorithm,
                case.megabytes,
                case.mbit,
                peer.name,
                record["exchange_s"],
                record["outcome"],
                record["reason"],
                silences,
            )
            for record in formed
        ]
    )


# --- a swarm --------------------------------------------------------------------------------------


class Swarm:
    """Four processes, each behind its own relay."""

    def __init__(self, context: SpawnContext, algorithm: str, case: Case) -> None:
        self._results = context.Queue()
        ports = free_ports(PEERS)
        self._cables = Cables(ports, os.getpgrp())
        where = self._cables.addresses
        self._processes = [
            context.Process(
                target=_live,
                args=(algorithm, case, rank, ports[rank], where, self._results),
                daemon=True,
            )
            for rank in range(PEERS)
        ]
        for rank, process in enumerate(self._processes):
            self._cables.throttle(rank, case.mbit)
            process.start()
            assert process.pid is not None  # it has been started
            self._cables.belongs(rank, process.pid)

    def attempts(self) -> list[Attempt]:
        """The attempts of all peers, after their end."""
        found: list[list[Attempt]] = []
        while len(found) < PEERS:
            try:
                found.append(self._results.get(timeout=0.5))
            except Empty as error:
                if any(process.exitcode not in (None, 0) for process in self._processes):
                    raise RuntimeError("a peer of the benchmark died") from error
        return [attempt for attempts in found for attempt in attempts]

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._cables.close()


def measure(
    algorithms: Sequence[str], cases: Sequence[Case], together: int, told: Callable[[str], None]
) -> list[Attempt]:
    """All cases of all algorithms, several swarms at a time; `told` is called after each.

    Raises:
        ConfigError: where the kernel does not say which process owns a connection.
    """
    if not can_lay():
        raise ConfigError("relays need to know whose a connection is, as Linux says; use it")
    context = multiprocessing.get_context("spawn")
    found: list[Attempt] = []
    left = list(product(cases, algorithms))
    while left:
        some, left = left[:together], left[together:]
        swarms: list[Swarm] = []
        try:
            swarms.extend(Swarm(context, algorithm, case) for case, algorithm in some)
            for (case, algorithm), swarm in zip(some, swarms, strict=True):
                found += swarm.attempts()
                told(f"{algorithm}, {case}")
        finally:
            for swarm in swarms:
                swarm.close()
    return found


# --- results --------------------------------------------------------------------------------------


def row_of(case: Case, algorithm: str, attempts: Sequence[Attempt]) -> Json:
    """One algorithm's figures over one kind of link."""
    own = [
        attempt
        for attempt in attempts
        if (attempt.algorithm, attempt.megabytes) == (algorithm, case.megabytes)
    ]
    done = [attempt for attempt in own if attempt.is_done]
    return {
        "case": str(case),
        **asdict(case),
        "algorithm": algorithm,
        "formed": len(own),
        "done": len(done),
        "share": len(done) / len(own) if own else 0.0,
        "median_s": median(attempt.lasted_s for attempt in done) if done else None,
        "failures": sorted({attempt.reason for attempt in own if not attempt.is_done}),
        "silent_peers": len({attempt.peer for attempt in own if attempt.silences}),
        "attempts": [asdict(attempt) for attempt in own],
    }


def claims_of(rows: Sequence[Json]) -> list[Json]:
    """The claims: nearly all groups succeed, and there are some."""
    claims = []
    for row in rows:
        text = f"{row['case']}, {row['algorithm']}: share of {row['formed']} that succeed"
        claims.append(claim(text, "share", row["algorithm"], row["share"], at_least=SUCCEED))
    return claims


def print_rows(console: Console, rows: Sequence[Json]) -> None:
    """A line for each algorithm and link."""
    title = "Groups of four processes behind relays, as their members saw them"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("algorithm", no_wrap=True)
    for heading in ("formed", "succeeded", "seconds each", "silent peers"):
        table.add_column(heading, justify="right")
    for row in rows:
        each = "-" if row["median_s"] is None else f"{row['median_s']:.1f}"
        figures = (str(row["formed"]), f"{row['share']:.1%}", each, str(row["silent_peers"]))
        table.add_row(row["case"], row["algorithm"], *figures)
    console.print(table)
    for row in rows:
        for reason in row["failures"]:
            console.print(f"{row['case']}, {row['algorithm']}: {reason}", style="dim")


def plot(path: Path, rows: Sequence[Json]) -> None:
    """Every group as a dot at its duration; failed ones are crosses."""
    names = list(dict.fromkeys(row["case"] for row in rows))
    heights = [0.8 + 0.35 * sum(row["case"] == name for row in rows) for name in names]
    figure = Figure(figsize=(8, sum(heights) + 0.4), dpi=150, layout="constrained")
    panels = figure.subplots(len(names), squeeze=False, height_ratios=heights)[:, 0]
    for axes, name in zip(panels, names, strict=True):
        own = [row for row in rows if row["case"] == name]
        for place, row in enumerate(own):
            for is_done, marker, colour in ((True, ".", "#009E73"), (False, "x", "#D55E00")):
                lasted = [
                    attempt["lasted_s"]
                    for attempt in row["attempts"]
                    if (attempt["outcome"] == Outcome.DONE) == is_done
                ]
                axes.plot(lasted, [place] * len(lasted), marker, color=colour)
        labels = [f"{row['algorithm']}  {row['done']} of {row['formed']}" for row in own]
        axes.set_yticks(range(len(own)), labels)
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        axes.set_title(f"Four peers, {name}", loc="left", color=INK, fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(FAINT)
        axes.tick_params(colors=INK, labelsize=9)
    panels[-1].set_xlabel("seconds that a formed group took; crosses failed", color=INK)
    figure.savefig(path)


def main(
    algorithms: Annotated[str, typer.Option(help="Which, between commas.")] = ",".join(
        known_algorithms()
    ),
    megabytes: Annotated[
        str, typer.Option(help="Of the model, between commas; each has its link.")
    ] = ",".join(SIZES),
    seconds: Annotated[
        float, typer.Option(min=1, help="Of training, of each algorithm over each link.")
    ] = SECONDS,
    together: Annotated[int, typer.Option(min=1, help="Swarms at a time.")] = TOGETHER,
    out: Annotated[Path, typer.Option(help="Where the results go.")] = Path(
        "runs/bench-slow-links"
    ),
    check: Annotated[bool, typer.Option(help="Exit with 3 if a claim does not hold.")] = False,
    quick: Quick = False,
) -> None:
    """Count the groups that succeed where one average takes half a minute."""
    console, began = Console(), time.monotonic()
    end_on_sigterm()
    names = some_of("--algorithms", algorithms, known_algorithms())
    sizes = some_of("--megabytes", megabytes, SIZES)
    cases = [replace(case, seconds=seconds) for case in CASES if str(case.megabytes) in sizes]
    if quick:
        names, cases = names[:2], [QUICK_CASE]
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("slow links", total=len(names) * len(cases))

        def told(what: str) -> None:
            progress.update(bar, advance=1, description=what)

        attempts = measure(names, cases, together, told)
    rows = [row_of(case, name, attempts) for case in cases for name in names]
    claims = claims_of(rows)
    write_bench(out, rows, claims, began)
    plot(out / "bench.png", rows)
    print_rows(console, rows)
    print_claims(console, claims)
    conclude(console, out, claims, check=check, quick=quick)


if __name__ == "__main__":
    run_bench(main)
