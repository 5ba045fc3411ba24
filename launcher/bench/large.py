"""Measure what a peer with a large model holds in memory beside that model.

Two peers train a model of 1 GB and average; a third one joins, takes the state of one of them over
and takes part; two of them average with the third within one step of it; one writes a checkpoint,
and all end. Measured is, of each peer in each of these parts, the most memory beyond torch, the
model, its gradients and its optimizer: anonymous and shared memory, divided among processes as the
kernel does it (PSS). Mapped files do not count, since the kernel can drop them: a state on its way
is in one, in ``TMPDIR``, which should be on a disk.

The unit is a float32 vector of the model's numbers, 1 GB, whatever the dtype of the model.

Averages are counted by turn, so that a row in which one got stuck says so.

``python -m p2plab.bench.large`` writes ``bench.json``. ``--fleets "ad_psgd float32"`` measures
these rows only; ``diloco float32`` is measured where it is named: anchor and momentum are state of
its outer optimizer, two vectors more.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from p2plab.bench.background import Watch, averages_of, held_bytes
from p2plab.bench.claimer import FilledModel
from p2plab.bench.systems import Worker, in_processes
from p2plab.harness.bench import Bench, Check, Out, Quick, run_bench, some_of
from p2plab.harness.claims import Claim, Json
from p2plab.harness.tables import table
from p2ptrain.ids import Seconds
from p2ptrain.runtime.metrics import MemoryMetrics
from p2ptrain.runtime.peer import Peer

PEERS = 3
STEPS = 3
LIMIT_S: Seconds = 400.0
TURN_S: Seconds = 120.0
"""An average that has not come by then does not come."""
AGAIN_S: Seconds = 20.0
LOOK_S: Seconds = 0.05

MOST_VECTORS = 1.3
MOST_VECTORS_TWICE = 2.3
MOST_VECTORS_OUTER = 4.5
"""Anchor, momentum, what is contributed, and what still waits for its boundary."""
PARTS = ("averages", "a third joins", "two averages in a step", "checkpoint, end")
FIRST, JOIN, TWICE, END = PARTS


@dataclass(frozen=True, slots=True)
class Fleet:
    """What is trained, and how."""

    algorithm: str
    dtype: str

    @property
    def name(self) -> str:
        return f"{self.algorithm} {self.dtype}"

    @property
    def in_step(self) -> bool:
        """All peers step together; else those that ask do, and no peer waits for them."""
        return self.algorithm == "allreduce"


FLEETS = Fleet("ad_psgd", "float32"), Fleet("allreduce", "float32"), Fleet("ad_psgd", "bfloat16")
NAMED = Fleet("diloco", "float32")
"""Measured where it is asked for by its name."""

OPTIONS = {"ad_psgd": {"graph": "bipartite"}, "diloco": {"period": 1}}
"""The middle one of three peers is asked by both others, and asks none; or any may begin."""

FULL, QUICK = 250_000_000, 250_000


@dataclass(frozen=True, slots=True)
class Held:
    """What one peer held at most in one part, and what it did in it."""

    rank: int
    part: str
    most_bytes: int
    averages: tuple[int, ...]
    """In each turn."""


class LargePeer:
    """One peer's life; rank 2 joins later, and rank 0 writes a checkpoint when it ends."""

    def __init__(self, worker: Worker, fleet: Fleet) -> None:
        self._worker, self._fleet = worker, fleet
        self._metrics, self._found = MemoryMetrics(perf_counter), list[Held]()
        self._done: list[int] = []  # averages in each turn of this part
        self._model = FilledModel(worker.numbers, worker.rank).to(getattr(torch, fleet.dtype))
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-6, momentum=0.9)
        self._model.weight.grad = torch.ones_like(self._model.weight)
        self._optimizer.step()
        self._before = held_bytes()

    def run(self) -> list[Held]:
        """Returns what was measured in each part."""
        rank, (middle, last) = self._worker.rank, range(1, PEERS)
        peer: Peer | None = None
        with ExitStack() as stack:
            with self._part(FIRST, rank != last):
                for enters in (0, middle):
                    if rank == enters:
                        peer = stack.enter_context(self._peer())
                        self._worker.tell(peer.address)
                    self._meet()
                self._turns(peer, 0)
            with self._part(JOIN):
                if rank == last:
                    peer = stack.enter_context(self._peer())
                self._meet()
                self._turns(peer, last)
            with self._part(TWICE):
                self._turns(peer, 0, last)
            with self._part(END):
                stack.close()
                self._meet()
        return self._found

    def _peer(self) -> Peer:
        rank, more = self._worker.rank, dict[str, Any]()
        if rank == 0:
            more = {"checkpoint": str(self._worker.folder / "of"), "checkpoint_keep": 1}
        return Peer(
            self._model,
            self._optimizer,
            name=f"p{rank}",
            algorithm=self._fleet.algorithm,
            algorithm_options=OPTIONS.get(self._fleet.algorithm, {}),
            join=(self._worker.hear(0),) if rank else (),
            join_timeout_s=LIMIT_S,
            serve=False,
            checkpoint_every_s=LIMIT_S,  # it writes one when it ends
            metrics=self._metrics,
            **more,
        )

    def _turns(self, peer: Peer | None, *asking: int) -> None:
        """Steps of all in step; else of those that ask, and then of the middle one.

        In step each makes one step in a turn: one that made a second one would wait for the others.
        """
        rank, in_step = self._worker.rank, self._fleet.in_step
        if peer and in_step:
            self._wait_for_all(peer, PEERS if PEERS - 1 in asking else PEERS - 1)
        self._meet()
        for _ in range(STEPS):
            done, until = averages_of(self._metrics), perf_counter() + TURN_S
            steps_at = 0.0
            while peer and (in_step or rank in asking) and perf_counter() < until:
                if averages_of(self._metrics) > done:
                    break
                if perf_counter() >= steps_at:
                    peer.step()  # asks again, if what it has asked for broke
                    steps_at = until if in_step else perf_counter() + AGAIN_S
                threading.Event().wait(LOOK_S / 10)
            self._meet()
            if peer and not in_step and rank == 1:
                peer.step()
            self._meet()
            self._done.append(averages_of(self._metrics) - done)

    def _wait_for_all(self, peer: Peer, count: int) -> None:
        """Until this peer knows that so many train; an average is of those that do.

        Else some would average without a newcomer, which then waits in its step for another one.
        """
        membership, until = peer._life.driver.machine.membership, perf_counter() + TURN_S
        while len(membership.trainees()) < count and perf_counter() < until:
            threading.Event().wait(LOOK_S)

    def _meet(self) -> None:
        self._worker.barrier.wait(LIMIT_S)

    @contextmanager
    def _part(self, name: str, is_in: bool = True) -> Iterator[None]:
        self._done.clear()
        with Watch(LOOK_S) as watch:
            yield
            watch.look()
        if is_in:
            most = watch.most_bytes - self._before
            self._found.append(Held(self._worker.rank, name, most, tuple(self._done)))


def live(worker: Worker, fleet: Fleet) -> list[Held]:
    """One process's part."""
    torch.set_num_threads(1)
    return LargePeer(worker, fleet).run()


# --- results --------------------------------------------------------------------------------------


def measure(
    numbers: int, told: Callable[[object], None], fleets: Sequence[Fleet] = FLEETS
) -> list[Json]:
    """A row for each fleet and part: the most that any peer held, in vectors."""
    rows = []
    for fleet in fleets:
        found = in_processes(partial(live, fleet=fleet), PEERS, numbers, 0)
        for part in PARTS:
            held = [one for peer in found for one in peer if one.part == part]
            most = max(held, key=lambda one: one.most_bytes)
            rows.append(
                {
                    "algorithm": fleet.algorithm,
                    "dtype": fleet.dtype,
                    "part": part,
                    "megabytes": 4 * numbers / 1e6,
                    "vectors": most.most_bytes / (4 * numbers),
                    "by": [one.most_bytes / (4 * numbers) for one in sorted(held, key=_rank)],
                    "averages": [list(one.averages) for one in sorted(held, key=_rank)],
                }
            )
        told(fleet.name)
    return rows


def _rank(held: Held) -> int:
    return held.rank


def claims_of(rows: Sequence[Json]) -> list[Json]:
    """The bound on memory, and that the peers averaged in each turn where they are to."""
    claims = []
    for row in rows:
        fleet = f"{row['algorithm']}, {row['dtype']}, {row['part']}"
        twice = row["algorithm"] == "ad_psgd" and row["part"] == TWICE
        keeps_rest = row["dtype"] != "float32"
        most = MOST_VECTORS_TWICE if twice or keeps_rest else MOST_VECTORS
        if row["algorithm"] == NAMED.algorithm:
            most = MOST_VECTORS_OUTER
        text = f"{fleet}: memory of a peer beside its model, in float32 vectors"
        claims.append(Claim(text, "vectors", fleet, at_most=most).check(row["vectors"]))
        if row["part"] in (JOIN, TWICE):
            text = f"{fleet}: averages of the peer that joined"
            averages = Claim(text, "averages", fleet, at_least=STEPS)
            claims.append(averages.check(sum(row["averages"][-1])))
        if row["part"] != END:
            text = f"{fleet}: turns in which an average got stuck"
            stuck = sum(not any(turn) for turn in zip(*row["averages"], strict=True))
            claims.append(Claim(text, "turns", fleet, at_most=0).check(stuck))
    return claims


def figures(rows: Sequence[Json]) -> Table:
    """A line for each fleet and part."""
    size = rows[0]["megabytes"]
    return table(
        f"Memory beside model, gradients and optimizer: float32 vectors of {size:g} MB, at most",
        [
            {**row, "of": ", ".join(f"{one:.2f}" for one in row["by"]), "done": _turns_of(row)}
            for row in rows
        ],
        {
            "algorithm": "{algorithm}",
            "dtype": "{dtype}",
            "part": "{part}",
            "most": "{vectors:.2f}",
            "by rank": "{of}",
            "averages by turn": "{done}",
        },
        names=3,
    )


def _turns_of(row: Json) -> str:
    """Of each peer, by rank: how many averages it had in each turn."""
    return ", ".join(" ".join(map(str, turns)) or "-" for turns in row["averages"])


def main(
    out: Out = Path("runs/bench-large"),
    fleets: Annotated[str, typer.Option(help="Which: ALGORITHM DTYPE, with commas.")] = "",
    numbers: Annotated[int, typer.Option(help="The numbers of the model.", min=1)] = FULL,
    check: Check = False,
    quick: Quick = False,
) -> None:
    """Measure the memory of peers with a model of 1 GB beside that model."""
    bench, known = Bench(out, check=check, quick=quick), {one.name: one for one in (*FLEETS, NAMED)}
    names = some_of("--fleets", fleets, tuple(known)) if fleets else [one.name for one in FLEETS]
    with bench.progress("a large model", len(names)) as told:
        rows = measure(QUICK if quick else numbers, told, [known[name] for name in names])
    bench.conclude(rows, claims_of(rows), [figures(rows)])


if __name__ == "__main__":
    run_bench(main)
