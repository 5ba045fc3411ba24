"""Measure how fast a free peer is found: 64 simulated peers request groups all the time.

``python -m launcher.bench.lock`` writes ``bench.json`` and ``bench-lock.png``: groups of 2, 3 and
8, without loss of messages and with some. Everything that decides is production code; the network
is simulated (1 ms one way), and models have the size for which an average lasts about 100 ms on
uplinks of a megabyte per second.

A peer is *inside* from the formation of its group until its average has ended there. The rest of
the time it waits: for its turn or a grant, or held by an initiator that still waits for others.
"""

import asyncio
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import combinations, pairwise, product
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from statistics import fmean
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress

from launcher.bench.claims import Quick, conclude, run_bench, write_bench
from launcher.bench.lock_figures import Figures, claims_of, plot, print_figures
from launcher.collect import Json
from p2ptrain.averaging import in_turn
from p2ptrain.averaging.base import Algorithm, Swarm
from p2ptrain.ids import PeerId, Seconds
from p2ptrain.sim.link import Link
from p2ptrain.sim.loop import run
from p2ptrain.sim.replica import VectorReplica
from p2ptrain.sim.trace import Trace
from p2ptrain.sim.world import SimPeer, World

PEERS = 64
SIZES = (2, 3, 8)
LOSSES = (0.0, 0.01, 0.05)
LATENCY_S: Seconds = 0.001
UPLINK_BYTES_S = 1e6

NUMBERS = {2: 24_150, 3: 10_850, 8: 3_350}
"""The size of the model, by the size of groups, found by trial: an average lasts 100 ms. Each
member sends its whole model to each other one through one uplink."""

GATHER_S: Seconds = 3.0
"""The time until all peers have each other's records."""

WARM_UP_S: Seconds = 2.0
MEASURED_S: Seconds = 20.0

COOL_DOWN_S: Seconds = 2.0
"""The time until a formed group has ended, and so is on record."""

TICK_S: Seconds = 0.25


@dataclass(frozen=True, slots=True)
class Scale:
    """The scale of the measurement."""

    peers: int
    sizes: tuple[int, ...]
    losses: tuple[float, ...]
    measured_s: Seconds


FULL = Scale(PEERS, SIZES, LOSSES, MEASURED_S)
QUICK = Scale(8, (2, 3), (0.0, 0.05), 2.0)

LOCK_MESSAGES = ("Request", "Grant", "Inquire", "Failed", "Begin", "Release", "Relinquish")


class AsksAlways(Algorithm):
    """Always requests a group with `others` other peers, chosen as AD-PSGD does."""

    averages = "models"

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """The size of its groups."""

        others: int = 1

    async def background(self, swarm: Swarm) -> None:
        while True:
            order = in_turn(swarm.choosable(), swarm.met(), swarm.rng)
            enough = max(self.config.others, -(-len(order) // 2))
            await swarm.form(order[:enough], self.config.others)


class CountingTrace(Trace):
    """Keeps no lines; counts the messages of the lock that arrive."""

    def __init__(self) -> None:
        super().__init__()
        self.lock_messages = 0

    def note(self, now: Seconds, what: str) -> None:
        """Count a message of the lock: ``p03 -> p05 Grant p03#17 after ...``."""
        _, way, _, kind, *_ = f"{what}   ".split(" ", 4)
        self.lock_messages += way == "->" and kind in LOCK_MESSAGES


@dataclass(frozen=True, slots=True)
class Span:
    """One peer was in one group."""

    start: Seconds
    end: Seconds
    members: tuple[str, ...]
    done: bool


# --- one world ------------------------------------------------------------------------------------


async def measure(
    size: int,
    loss: float,
    passed: Callable[[Seconds], None] = lambda _: None,
    *,
    peers: int = PEERS,
    measured_s: Seconds = MEASURED_S,
    seed: int = 0,
) -> Figures:
    """Let `peers` peers request groups of `size`; report virtual time as it passes."""
    link = Link(latency_s=LATENCY_S, loss=loss, bandwidth_bytes_s=UPLINK_BYTES_S)
    trace = CountingTrace()
    world = World(seed, link, trace=trace)
    for number in range(peers):
        replica = VectorReplica(np.zeros(NUMBERS[size], np.float32))
        algorithm = f"{AsksAlways.__module__}:AsksAlways"
        await world.add(f"p{number:02}", replica, algorithm, others=size - 1)
    await _pass(GATHER_S, passed)
    for peer in world.peers.values():
        peer.process.start(_ask(peer))
    await _pass(WARM_UP_S, passed)
    start, before = asyncio.get_running_loop().time(), trace.lock_messages
    await _pass(measured_s, passed)
    end, messages = asyncio.get_running_loop().time(), trace.lock_messages - before
    await _pass(COOL_DOWN_S, passed)
    spans = {name: spans_of(peer.metrics.of("group")) for name, peer in world.peers.items()}
    for name in tuple(world.peers):
        world.crash(name)  # they would never end
    return figures_of(size, loss, spans, start, end, messages)


async def _ask(peer: SimPeer) -> None:
    """Start its algorithm, within the peer's own process."""
    peer.driver.start(peer.driver.algorithm.background(peer.swarm))


async def _pass(duration_s: Seconds, passed: Callable[[Seconds], None]) -> None:
    for _ in range(round(duration_s / TICK_S)):
        await asyncio.sleep(TICK_S)
        passed(TICK_S)


# --- results --------------------------------------------------------------------------------------


def spans_of(records: Sequence[Json]) -> list[Span]:
    """The groups of a peer with their times, by its records; unformed groups take no time."""
    return [
        Span(r["t"] - r["exchange_s"], r["t"], tuple(r["members"]), r["outcome"] == "done")
        for r in records
        if r["exchange_s"] > 0
    ]


def figures_of(
    size: int,
    loss: float,
    spans: dict[PeerId, list[Span]],
    start: Seconds,
    end: Seconds,
    messages: int,
) -> Figures:
    """Compute the figures from `start` to `end`."""
    measured = [s for own in spans.values() for s in own if s.end > start and s.start < end]
    inside_s = sum(min(s.end, end) - max(s.start, start) for s in measured)
    waits = sorted(wait for own in spans.values() for wait in _waits(own, start, end))
    met = {pair for s in measured if s.done for pair in combinations(s.members, 2)}
    everybody_s = len(spans) * (end - start)
    return Figures(
        size=size,
        loss=loss,
        inside=inside_s / everybody_s,
        wait_median_s=waits[len(waits) // 2],
        wait_p99_s=waits[len(waits) * 99 // 100],
        wait_longest_s=waits[-1],
        pairs_met=len(met) / (len(spans) * (len(spans) - 1) // 2),
        groups=round(sum(s.done for s in measured) / size),
        average_s=fmean(s.end - s.start for s in measured),
        messages=messages / len(measured),
    )


def _waits(own: Sequence[Span], start: Seconds, end: Seconds) -> list[Seconds]:
    """One peer's waits that began within the measured time."""
    return [
        after.start - before.end for before, after in pairwise(own) if start <= before.end < end
    ]


# --- all of them ----------------------------------------------------------------------------------

_virtual_s: "Synchronized[float]"


def _share(virtual_s: "Synchronized[float]") -> None:
    """Set, in a worker process, where it reports the time of its worlds."""
    global _virtual_s
    _virtual_s = virtual_s


def _passed(duration_s: Seconds) -> None:
    with _virtual_s.get_lock():
        _virtual_s.value += duration_s


def _measure(scale: Scale, setting: tuple[int, float]) -> Figures:
    return run(measure(*setting, _passed, peers=scale.peers, measured_s=scale.measured_s))


def measure_all(console: Console, scale: Scale) -> list[Figures]:
    """Measure all settings, each in a separate process, as many at a time as there are cores."""
    settings = tuple(product(scale.sizes, scale.losses))
    total_s = len(settings) * (GATHER_S + WARM_UP_S + scale.measured_s + COOL_DOWN_S)
    context = multiprocessing.get_context("spawn")
    virtual_s: Synchronized[float] = context.Value("d", 0.0)
    with (
        ProcessPoolExecutor(None, context, _share, (virtual_s,)) as pool,
        Progress(console=console, transient=True) as progress,
    ):
        bar = progress.add_task(f"{len(settings)} worlds of {scale.peers} peers", total=total_s)
        running = [pool.submit(_measure, scale, setting) for setting in settings]
        while not all(future.done() for future in running):
            time.sleep(0.2)
            progress.update(bar, completed=virtual_s.value)
        return [future.result() for future in running]


def main(
    out: Annotated[Path, typer.Option(help="Where bench.json and bench-lock.png go.")] = Path(
        "runs/bench-lock"
    ),
    check: Annotated[bool, typer.Option(help="Exit with 3 if a claim does not hold.")] = False,
    quick: Quick = False,
) -> None:
    """Measure how fast 64 peers that ask all the time find someone free."""
    console = Console()
    began = time.monotonic()
    figures = measure_all(console, QUICK if quick else FULL)
    claims = claims_of(figures)
    rows = [{"name": row.name, **asdict(row)} for row in figures]
    write_bench(out, rows, claims, began)
    plot(out / "bench-lock.png", figures)
    print_figures(console, figures, claims)
    conclude(console, out, claims, check=check, quick=quick)


if __name__ == "__main__":
    run_bench(main)
