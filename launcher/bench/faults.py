"""Measure what a fault of one of four peers costs the other three.

``python -m p2plab.bench.faults`` runs real processes on this machine, over gRPC, sockets and
shared memory. Four peers average 100 MB. During the average one of them

* is killed (SIGKILL): its connections are reset;
* freezes (SIGSTOP): its connections stay open, without an answer;
* is cut off: nothing passes between it and the others any more, without an error
  (`launcher/harness/namespaces.py`; needs root, and excludes shared memory).

Measured is the slowest of the three others, from the fault on: until none of them waits for the
broken average any more, and until all hold the average of the three, which is checked.
`p2ptrain/core/repair.py` describes the protocol. `launcher/bench/beside.py` measures what a fourth
peer that only sleeps costs the others.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated

import torch
import typer
import uvloop
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from p2plab.bench import beside
from p2plab.bench.beside import Beside
from p2plab.bench.claimer import Claimer
from p2plab.harness.bench import Bench, Check, Out, Quick, run_bench, some_of
from p2plab.harness.claims import Claim, Json
from p2plab.harness.namespaces import Cable, Home, laid, may_be_made
from p2plab.harness.pictures import GREEN, SKY, headline, medians, panels
from p2plab.harness.processes import Children, Process
from p2plab.harness.tables import table
from p2plab.plot import INK
from p2ptrain.ids import PeerId, Seconds

ROUNDS = 8
SURVIVORS = 3
NUMBERS = 25_000_000
QUICK_NUMBERS = 10_000_000
WAYS = ("grpc", "sockets", "memory")
SIGNALS = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP}
CUT = "cut off"
SLOW = "slow"
FAULTS = (*SIGNALS, CUT, SLOW)
LIMIT_S: Seconds = 60.0

BOUNDS = {
    ("killed", "grpc"): (0.4, 0.6),
    ("killed", "sockets"): (0.4, 0.4),
    ("killed", "memory"): (0.4, 0.4),
}
"""Seconds until no peer waits any more, and until the others hold their average."""

SILENT_S: Seconds = 3.0
"""The bound of both where no connection is reset."""


@dataclass(frozen=True, slots=True)
class Round:
    """One fault, as the slowest of the survivors saw it."""

    fault: str
    way: str
    waits_s: Seconds
    """From the fault until no peer is in the broken average any more."""
    holds_s: Seconds
    """From the fault until all hold the average of the survivors."""


# --- one peer, in a process of its own ------------------------------------------------------------


def _live(peer: Callable[[], Claimer], value: float, home: Home | None, parent: Connection) -> None:
    """Run a peer that obeys its parent process; `home` is its namespace."""
    if home:
        home.enter()
    torch.set_num_threads(1)
    uvloop.run(_serve(peer, value, parent))


async def _serve(make: Callable[[], Claimer], value: float, parent: Connection) -> None:
    peer, loop = make(), asyncio.get_running_loop()
    parent.send(await peer.listen())
    while True:
        order, *arguments = await loop.run_in_executor(None, parent.recv)
        match order:
            case "join":
                await peer.join(*arguments)
                parent.send("joined")
            case "fill":
                peer.fill(value)
                parent.send("filled")
            case "average":
                parent.send(perf_counter())
                await peer.average([PeerId(other) for other in arguments[0]])
            case "result":
                parent.send(await _result(peer))
                parent.send(peer.mean())
            case _:
                raise AssertionError(f"there is no order {order!r}")


async def _result(peer: Claimer) -> list[Json]:
    """The records of all attempts of one group."""
    records: list[Json] = []
    while not records or records[-1]["outcome"] != "done":
        records.append(await peer.next_group())
    return records


# --- the rounds -----------------------------------------------------------------------------------


class Fleet(Children):
    """Three peers that survive, and a new victim per round, at the end of `cable`."""

    def __init__(self, way: str, numbers: int, cable: Cable | None = None) -> None:
        super().__init__()
        self._way = way
        self._cable = cable
        self._victims = 0
        self._numbers = numbers
        self._next = self._start_victim()
        near = cable.near if cable else None
        self._peers = [
            self._begin(f"p{rank}", float(rank), near, peers=min(rank + 1, 2))[0]
            for rank in range(SURVIVORS)
        ]
        self._host = self._peers[0].recv()
        for peer in self._peers:
            if peer is not self._peers[0]:
                peer.recv()
            self._join(peer)

    def round(self, fault: str) -> Round | None:
        """One average with a fault of the fourth peer; None if the fault came too late."""
        victim, process, name = self._next
        victim.recv()  # it has started, and takes no core from the measured peers
        self._join(victim)
        time.sleep(0.5)  # until all peers have its record
        usual_s = self._average([*self._peers, victim], name)
        self._fill([*self._peers, victim])
        self._peers[0].send(("average", ["p1", "p2", name]))
        began = self._peers[0].recv()
        time.sleep(max(0.0, began + usual_s / 2 - perf_counter()))
        hit_at = perf_counter()
        if self._cable:
            self._cable.cut()
        else:
            assert process.pid is not None  # it has been started
            os.kill(process.pid, SIGNALS[fault])
        found = [self._result(peer) for peer in self._peers]
        process.kill()
        process.join()
        if self._cable:
            self._cable.restore()
        self._next = self._start_victim()
        time.sleep(3.0)  # until the previous victim is forgotten
        self._fill(self._peers)
        if any(
            len(records) == 1 and len(records[0]["members"]) > SURVIVORS for records, _ in found
        ):
            return None
        for records, mean in found:
            expected = (SURVIVORS - 1) / 2
            assert abs(mean - expected) < 1e-4, f"a mean of {mean}, not {expected}: {records}"
        waits_s = max(records[0]["t"] for records, _ in found) - hit_at
        holds_s = max(records[-1]["t"] for records, _ in found) - hit_at
        return Round(fault, self._way, waits_s, holds_s)

    def _average(self, peers: Sequence[Connection], name: str) -> Seconds:
        """The duration of an average without a fault."""
        self._fill(peers)
        peers[0].send(("average", ["p1", "p2", name]))
        began: Seconds = peers[0].recv()
        ends: list[Seconds] = [self._result(peer)[0][-1]["t"] for peer in peers]
        return max(ends) - began

    def _join(self, peer: Connection) -> None:
        hosts = () if peer is self._peers[0] else (self._host,)
        peer.send(("join", *hosts))
        peer.recv()

    def _fill(self, peers: Sequence[Connection]) -> None:
        for peer in peers:
            peer.send(("fill",))
            peer.recv()

    def _result(self, peer: Connection) -> tuple[list[Json], float]:
        peer.send(("result",))
        return peer.recv(), peer.recv()

    def _start_victim(self) -> tuple[Connection, Process, str]:
        self._victims += 1
        name = f"v{self._victims}"
        far = self._cable.far if self._cable else None
        return *self._begin(name, 7.0, far, peers=SURVIVORS + 1), name

    def _begin(
        self, name: str, value: float, home: Home | None, *, peers: int
    ) -> tuple[Connection, Process]:
        make = partial(
            Claimer,
            name,
            self._numbers,
            value,
            self._way,
            host=home.host if home else "127.0.0.1",
            peers=peers,
            limit_s=LIMIT_S,
        )
        return self.talk(_live, make, value, home)


def measure(
    ways: Sequence[str],
    faults: Sequence[str],
    rounds: int,
    told: Callable[[str], None],
    numbers: int = NUMBERS,
) -> list[Round]:
    """All rounds, one after the other; `told` is called for each.

    Raises:
        ConfigError: if a peer is to be cut off and this machine does not allow it.
    """
    found: list[Round] = []
    for way, fault in product(ways, faults):
        if not is_possible(way, fault):
            continue
        with ExitStack() as stack:
            cable = stack.enter_context(laid()) if fault == CUT else None
            fleet = stack.enter_context(Fleet(way, numbers, cable))
            for number in range(rounds):
                tries = (fleet.round(fault) for _ in range(3))
                found += [one for one in [next((r for r in tries if r), None)] if one]
                told(f"{way}, {fault}, {number + 1}")
    return found


def is_possible(way: str, fault: str) -> bool:
    """False for shared memory through a cable."""
    return (way, fault) != ("memory", CUT)


# --- results --------------------------------------------------------------------------------------


Kind = tuple[str, str]
"""A fault, and how chunks travel."""


def by_kind(rounds: Sequence[Round]) -> dict[Kind, tuple[list[Seconds], list[Seconds]]]:
    """All times until no peer waits, and until the others hold their mean, of each kind."""
    found: dict[Kind, tuple[list[Seconds], list[Seconds]]] = {}
    for one in sorted(rounds, key=lambda one: (one.fault, one.way)):
        waits, holds = found.setdefault((one.fault, one.way), ([], []))
        waits.append(one.waits_s)
        holds.append(one.holds_s)
    return found


def claims_of(rounds: Sequence[Round]) -> list[Json]:
    """Median and worst case of each transport, against the required bounds."""
    claims = []
    for (fault, way), (waits, holds) in by_kind(rounds).items():
        waits_s, holds_s = BOUNDS.get((fault, way), (SILENT_S, SILENT_S))
        of, what = f"p2ptrain {way}", f"{way}, one of four is {fault}"
        for which, pick in (("median", median), ("worst", max)):
            text = f"{what}: no peer waits any more, {which} of {len(waits)}"
            waited = Claim(text, "waits_s", of, at_most=waits_s)
            held = Claim(
                f"{what}: the others hold their mean, {which}", "holds_s", of, at_most=holds_s
            )
            claims += [waited.check(float(pick(waits))), held.check(float(pick(holds)))]
    return claims


def table_of(rounds: Sequence[Round]) -> Table:
    """A line per fault and transport, in seconds."""
    return table(
        "One of four, averaging 100 MB: seconds from the fault on",
        [
            {"kind": ", ".join(kind), "waits": waits, "holds": holds}
            for kind, (waits, holds) in by_kind(rounds).items()
        ],
        {
            "": "{kind}",
            "no peer waits": lambda row: f"{median(row['waits']):.2f}",
            "at worst": lambda row: f"{max(row['waits']):.2f}",
            "the others hold their mean": lambda row: f"{median(row['holds']):.2f}",
            "worst": lambda row: f"{max(row['holds']):.2f}",
            "rounds": lambda row: str(len(row["waits"])),
        },
    )


def picture(rounds: Sequence[Round], besides: Sequence[Beside]) -> Figure:
    """Every round as a dot, medians as bars."""
    kinds, algorithms = by_kind(rounds), {one.algorithm for one in besides}
    heights = [1.2 + 0.6 * len(lines) for lines in (kinds, algorithms) if lines]
    figure, axes_of = panels((8, sum(heights)), heights)
    if kinds:
        _draw(axes_of.pop(0), {", ".join(kind): times for kind, times in kinds.items()})
    if algorithms:
        beside.draw(axes_of.pop(0), besides)
    return figure


def _draw(axes: Axes, lines: dict[str, tuple[list[Seconds], list[Seconds]]]) -> None:
    medians(
        axes, lines, (("no peer waits any more", SKY), ("the other three hold their mean", GREEN))
    )
    axes.set_xlabel("seconds after the fault; dots: rounds, bars: medians", color=INK)
    headline(axes, "One of four dies while it averages 100 MB")
    axes.legend(frameon=False, fontsize=9)


def main(
    ways: Annotated[str, typer.Option(help="How chunks travel, where one dies.")] = ",".join(WAYS),
    faults: Annotated[
        str,
        typer.Option(
            help=f"What happens to one, of: {', '.join(FAULTS)}. By default all that may."
        ),
    ] = "",
    algorithms: Annotated[str, typer.Option(help="Of those beside a slow one.")] = ",".join(
        beside.ALGORITHMS
    ),
    rounds: Annotated[int, typer.Option(min=1, help="Of each.")] = ROUNDS,
    out: Out = Path("runs/bench-faults"),
    check: Check = False,
    quick: Quick = False,
) -> None:
    """Measure what a peer that dies in the middle of an average, or is slow, costs the others."""
    bench = Bench(out, check=check, quick=quick)
    by_way = some_of("--ways", ways, WAYS)
    may = [fault for fault in FAULTS if fault != CUT or may_be_made()]
    kinds = some_of("--faults", faults, FAULTS) if faults else may
    deaths = [kind for kind in kinds if kind != SLOW]
    if not faults and CUT not in may:
        bench.console.print("no peer is cut off: that takes root", style="dim")
    by_algorithm = some_of("--algorithms", algorithms, beside.ALGORITHMS) if SLOW in kinds else []
    numbers, scale = NUMBERS, beside.FULL
    if quick:
        by_way, deaths, by_algorithm, rounds = ["sockets"], ["killed"], by_algorithm[:1], 1
        numbers, scale = QUICK_NUMBERS, beside.QUICK
    cases = sum(is_possible(*case) for case in product(by_way, deaths))
    with bench.progress("faults", rounds * (cases + len(by_algorithm))) as told:
        found = measure(by_way, deaths, rounds, told, numbers)
        besides = beside.measure(by_algorithm, rounds, told, scale)
    tables = [
        *([table_of(found)] if found else []),
        *([beside.table_of(besides)] if besides else []),
    ]
    bench.conclude(
        [*map(asdict, found), *map(beside.row_of, besides)],
        claims_of(found) + beside.claims_of(besides),
        tables,
        {"bench.png": partial(picture, found, besides)},
    )


if __name__ == "__main__":
    run_bench(main)
