"""Measure what a fault of one of four peers costs the other three.

``python -m launcher.bench.faults`` runs real processes on this machine, over gRPC, sockets and
shared memory. Four peers average 100 MB. During the average one of them

* is killed (SIGKILL): its connections are reset;
* freezes (SIGSTOP): its connections stay open, without an answer;
* is cut off: nothing passes between it and the others any more, without an error
  (`launcher/bench/cable.py`; needs root, and excludes shared memory).

Measured is the slowest of the three others, from the fault on: until none of them waits for the
broken average any more, and until all hold the average of the three, which is checked.
`p2ptrain/core/repair.py` describes the protocol. `launcher/bench/beside.py` measures what a fourth
peer that only sleeps costs the others.
"""

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
import uvloop
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from launcher.bench import beside
from launcher.bench.beside import Beside
from launcher.bench.cable import Cable, laid
from launcher.bench.claimer import Claimer
from launcher.bench.claims import (
    Quick,
    claim,
    conclude,
    print_claims,
    run_bench,
    some_of,
    write_bench,
)
from launcher.bench.namespaces import Home, end_on_sigterm, may_be_made
from launcher.collect import Json
from launcher.plot import FAINT, INK
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
COLOURS = {"waits": "#56B4E9", "holds": "#009E73"}

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
    os.environ["OMP_NUM_THREADS"] = "1"
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


class Fleet:
    """Three peers that survive, and a new victim per round, at the end of `cable`."""

    def __init__(
        self, context: SpawnContext, way: str, numbers: int, cable: Cable | None = None
    ) -> None:
        self._context = context
        self._way = way
        self._cable = cable
        self._processes: list[Any] = []  # Any: multiprocessing's own
        self._victims = 0
        self._numbers = numbers
        self._next = self._start_victim()
        near = cable.near if cable else None
        self._peers = [
            self._start(f"p{rank}", float(rank), near, peers=min(rank + 1, 2))
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

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.kill()
            process.join()

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

    def _start_victim(self) -> tuple[Connection, Any, str]:  # Any: multiprocessing's own
        self._victims += 1
        name = f"v{self._victims}"
        far = self._cable.far if self._cable else None
        return self._start(name, 7.0, far, peers=SURVIVORS + 1), self._processes[-1], name

    def _start(self, name: str, value: float, home: Home | None, *, peers: int) -> Connection:
        ours, theirs = self._context.Pipe()
        host = home.host if home else "127.0.0.1"
        make = partial(
            Claimer,
            name,
            self._numbers,
            value,
            self._way,
            host=host,
            peers=peers,
            limit_s=LIMIT_S,
        )
        arguments = (make, value, home, theirs)
        process = self._context.Process(target=_live, args=arguments, daemon=True)
        process.start()
        self._processes.append(process)
        return ours


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
    context = multiprocessing.get_context("spawn")
    found: list[Round] = []
    for way, fault in product(ways, faults):
        if not is_possible(way, fault):
            continue
        with ExitStack() as stack:
            cable = stack.enter_context(laid()) if fault == CUT else None
            fleet = Fleet(context, way, numbers, cable)
            stack.callback(fleet.close)
            for number in range(rounds):
                tries = (fleet.round(fault) for _ in range(3))
                found += [one for one in [next((r for r in tries if r), None)] if one]
                told(f"{way}, {fault}, {number + 1}")
    return found


def is_possible(way: str, fault: str) -> bool:
    """False for shared memory through a cable."""
    return (way, fault) != ("memory", CUT)


# --- results --------------------------------------------------------------------------------------


def claims_of(rounds: Sequence[Round]) -> list[Json]:
    """Median and worst case of each transport, against the required bounds."""
    claims = []
    for fault, way in sorted({(one.fault, one.way) for one in rounds}):
        own = [one for one in rounds if (one.fault, one.way) == (fault, way)]
        waits_s, holds_s = BOUNDS.get((fault, way), (SILENT_S, SILENT_S))
        waits = [one.waits_s for one in own]
        holds = [one.holds_s for one in own]
        of = f"p2ptrain {way}"
        for which, pick in (("median", median), ("worst", max)):
            text = f"{way}, one of four is {fault}: nobody waits any more, {which} of {len(own)}"
            claims.append(claim(text, "waits_s", of, float(pick(waits)), at_most=waits_s))
            text = f"{way}, one of four is {fault}: the others hold their mean, {which}"
            claims.append(claim(text, "holds_s", of, float(pick(holds)), at_most=holds_s))
    return claims


def print_rounds(console: Console, rounds: Sequence[Round]) -> None:
    """A line per fault and transport, in seconds."""
    table = Table(
        title="One of four, averaging 100 MB: seconds from the fault on",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("", no_wrap=True)
    for heading in ("nobody waits", "worst", "the others hold their mean", "worst", "rounds"):
        table.add_column(heading, justify="right")
    for fault, way in sorted({(one.fault, one.way) for one in rounds}):
        own = [one for one in rounds if (one.fault, one.way) == (fault, way)]
        waits, holds = [one.waits_s for one in own], [one.holds_s for one in own]
        values = (median(waits), max(waits), median(holds), max(holds))
        table.add_row(f"{fault}, {way}", *(f"{value:.2f}" for value in values), str(len(own)))
    console.print(table)


def plot(path: Path, rounds: Sequence[Round], besides: Sequence[Beside]) -> None:
    """Every round as a dot, medians as bars."""
    kinds = len({(one.fault, one.way) for one in rounds})
    algorithms = len({one.algorithm for one in besides})
    heights = [1.2 + 0.6 * count for count in (kinds, algorithms) if count]
    figure = Figure(figsize=(8, sum(heights)), dpi=150, layout="constrained")
    panels = list(figure.subplots(len(heights), squeeze=False, height_ratios=heights)[:, 0])
    if kinds:
        _draw(panels.pop(0), rounds)
    if algorithms:
        beside.draw(panels.pop(0), besides)
    figure.savefig(path)


def _draw(axes: Axes, rounds: Sequence[Round]) -> None:
    for place, kind in enumerate(sorted({(one.fault, one.way) for one in rounds})):
        own = [one for one in rounds if (one.fault, one.way) == kind]
        for offset, name, label in (
            (-0.2, "waits", "nobody waits any more"),
            (0.2, "holds", "the other three hold their mean"),
        ):
            values = [getattr(one, f"{name}_s") for one in own]
            shown = label if place == 0 else None
            axes.barh(place + offset, median(values), 0.36, color=COLOURS[name], label=shown)
            axes.plot(values, [place + offset] * len(values), ".", color=INK, markersize=4)
    kinds = sorted({(one.fault, one.way) for one in rounds})
    axes.set_yticks(range(len(kinds)), [f"{fault}, {way}" for fault, way in kinds])
    axes.invert_yaxis()
    axes.set_xlabel("seconds after the fault; dots: rounds, bars: medians", color=INK)
    axes.set_title("One of four dies while it averages 100 MB", loc="left", color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
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
    out: Annotated[Path, typer.Option(help="Where the results go.")] = Path("runs/bench-faults"),
    check: Annotated[bool, typer.Option(help="Exit with 3 if a claim does not hold.")] = False,
    quick: Quick = False,
) -> None:
    """Measure what a peer that dies in the middle of an average, or is slow, costs the others."""
    console, began = Console(), time.monotonic()
    end_on_sigterm()
    by_way = some_of("--ways", ways, WAYS)
    may = [fault for fault in FAULTS if fault != CUT or may_be_made()]
    kinds = some_of("--faults", faults, FAULTS) if faults else may
    deaths = [kind for kind in kinds if kind != SLOW]
    if not faults and CUT not in may:
        console.print("nobody is cut off: that takes root", style="dim")
    by_algorithm = some_of("--algorithms", algorithms, beside.ALGORITHMS) if SLOW in kinds else []
    numbers, scale = NUMBERS, beside.FULL
    if quick:
        by_way, deaths, by_algorithm, rounds = ["sockets"], ["killed"], by_algorithm[:1], 1
        numbers, scale = QUICK_NUMBERS, beside.QUICK
    with Progress(console=console, transient=True) as progress:
        cases = sum(is_possible(*case) for case in product(by_way, deaths))
        total = rounds * (cases + len(by_algorithm))
        bar = progress.add_task("faults", total=total)

        def told(what: str) -> None:
            progress.update(bar, advance=1, description=what)

        found = measure(by_way, deaths, rounds, told, numbers)
        besides = beside.measure(by_algorithm, rounds, told, scale)
    claims = claims_of(found) + beside.claims_of(besides)
    rows = [*map(asdict, found), *map(beside.row_of, besides)]
    write_bench(out, rows, claims, began)
    plot(out / "bench.png", found, besides)
    if found:
        print_rounds(console, found)
    if besides:
        beside.print_besides(console, besides)
    print_claims(console, claims)
    conclude(console, out, claims, check=check, quick=quick)


if __name__ == "__main__":
    run_bench(main)
