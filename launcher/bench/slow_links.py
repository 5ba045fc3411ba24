"""Measure averages over links that are slow for the model: how many formed groups succeed.

``python -m p2plab.bench.slow_links`` lets four real processes train behind relays
(`p2plab.backends.relays`), each of which limits what leaves its peer: 100 MB over 20 Mbit/s, and
4 MB over 1 Mbit/s, so that one average takes half a minute and more. Steps only sleep, so several
algorithms share the machine; every swarm has separate links. Chunks travel by gRPC, since a relay
carries one port; control messages share it, and wait behind chunks.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated

import torch
import typer
from matplotlib.figure import Figure
from rich.table import Table

from p2plab.backends.cables import Cables, can_lay
from p2plab.backends.spawn import free_ports
from p2plab.bench.claimer import FilledModel
from p2plab.harness.bench import Bench, Check, Out, Quick, run_bench, some_of
from p2plab.harness.claims import Claim, Json
from p2plab.harness.pictures import GREEN, RED, headline, panels
from p2plab.harness.processes import Children
from p2plab.harness.tables import table
from p2plab.plot import INK
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


def has_begun(record: Json) -> bool:
    """Whether a group has formed and contributed, or it is a push, which needs no group."""
    return bool(record["snapshot_s"] > 0 or record["weight"] is not None)


def _live(
    algorithm: str, case: Case, rank: int, port: int, addresses: Sequence[str]
) -> list[Attempt]:
    """Train for a while, and return the outcome of each group."""
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
    formed = [record for record in metrics.of("group") if has_begun(record)]
    return [
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


# --- a swarm --------------------------------------------------------------------------------------


class Swarm(Children):
    """Four processes, each behind its own relay."""

    def __init__(self, algorithm: str, case: Case) -> None:
        super().__init__()
        ports = free_ports(PEERS)
        self._cables = Cables(ports, os.getpgrp())
        for rank in range(PEERS):
            self._cables.throttle(rank, case.mbit)
            where = self._cables.addresses
            process = self.start(_live, algorithm, case, rank, ports[rank], where)
            assert process.pid is not None  # it has been started
            self._cables.belongs(rank, process.pid)

    def attempts(self) -> list[Attempt]:
        """The attempts of all peers, after their end."""
        return [attempt for _ in range(PEERS) for attempt in self.result()]

    def close(self) -> None:
        """End all processes and their relays."""
        super().close()
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
    found: list[Attempt] = []
    left = list(product(cases, algorithms))
    while left:
        some, left = left[:together], left[together:]
        with ExitStack() as stack:
            swarms = [stack.enter_context(Swarm(name, case)) for case, name in some]
            for (case, algorithm), swarm in zip(some, swarms, strict=True):
                found += swarm.attempts()
                told(f"{algorithm}, {case}")
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
        claims.append(Claim(text, "share", row["algorithm"], at_least=SUCCEED).check(row["share"]))
    return claims


def tables(rows: Sequence[Json]) -> list[Table]:
    """A line for each algorithm and link, and for each reason of a failure."""
    groups = table(
        "Groups of four processes behind relays, as their members saw them",
        rows,
        {
            "": "{case}",
            "algorithm": "{algorithm}",
            "formed": "{formed}",
            "succeeded": "{share:.1%}",
            "seconds each": "{median_s:.1f}",
            "silent peers": "{silent_peers}",
        },
        names=2,
    )
    reasons = [{**row, "reason": reason} for row in rows for reason in row["failures"]]
    columns = {"": "{case}", "algorithm": "{algorithm}", "reason": "{reason}"}
    failed = [table("Groups that failed", reasons, columns, names=3)]
    return [groups, *(failed if reasons else ())]


def picture(rows: Sequence[Json]) -> Figure:
    """Every group as a dot at its duration; failed ones are crosses."""
    names = list(dict.fromkeys(row["case"] for row in rows))
    heights = [0.8 + 0.35 * sum(row["case"] == name for row in rows) for name in names]
    figure, axes_of = panels((8, sum(heights) + 0.4), heights)
    for axes, name in zip(axes_of, names, strict=True):
        own = [row for row in rows if row["case"] == name]
        for place, row in enumerate(own):
            for is_done, marker, colour in ((True, ".", GREEN), (False, "x", RED)):
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
        headline(axes, f"Four peers, {name}")
    axes_of[-1].set_xlabel("seconds that a formed group took; crosses failed", color=INK)
    return figure


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
    out: Out = Path("runs/bench-slow-links"),
    check: Check = False,
    quick: Quick = False,
) -> None:
    """Count the groups that succeed where one average takes half a minute."""
    bench = Bench(out, check=check, quick=quick)
    names = some_of("--algorithms", algorithms, known_algorithms())
    sizes = some_of("--megabytes", megabytes, SIZES)
    cases = [replace(case, seconds=seconds) for case in CASES if str(case.megabytes) in sizes]
    if quick:
        names, cases = names[:2], [QUICK_CASE]
    with bench.progress("slow links", len(names) * len(cases)) as told:
        attempts = measure(names, cases, together, told)
    rows = [row_of(case, name, attempts) for case in cases for name in names]
    bench.conclude(rows, claims_of(rows), tables(rows), {"bench.png": partial(picture, rows)})


if __name__ == "__main__":
    run_bench(main)
