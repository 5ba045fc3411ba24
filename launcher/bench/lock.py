"""Measure how fast a free peer is found: 64 simulated peers request groups all the time.

``python -m p2plab.bench.lock`` writes ``bench.json`` and ``bench-lock.png``: groups of 2, 3 and
8, without loss of messages and with some. Everything that decides is production code; the network
is simulated (1 ms one way), and models have the size for which an average lasts about 100 ms on
uplinks of a megabyte per second.

A peer is *inside* from the formation of its group until its average has ended there. The rest of
the time it waits: for its turn or a grant, or held by an initiator that still waits for others.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import combinations, pairwise, product
from pathlib import Path
from statistics import fmean

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from p2plab.harness.bench import Bench, Check, Out, Quick, run_bench
from p2plab.harness.claims import Claim, Json
from p2plab.harness.pictures import BLUE, ORANGE, headline, panels
from p2plab.harness.processes import side_by_side
from p2plab.harness.tables import table
from p2plab.plot import INK
from p2ptrain.averaging import in_turn
from p2ptrain.averaging.base import Algorithm, Swarm
from p2ptrain.core.lock_state import LockConfig
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

INSIDE_AT_LEAST = {2: 0.85, 8: 0.75}
PAIRS_AT_LEAST = 0.9
WAIT_AT_MOST_S: Seconds = 1.0

COLOURS = (BLUE, ORANGE, "#CC3377")
"""By loss."""


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
            order = in_turn(swarm.alive(), swarm.met(), swarm.rng)
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

    @property
    def waits(self) -> tuple[Seconds, Seconds, Seconds]:
        """Median, 99th percentile, longest."""
        return self.wait_median_s, self.wait_p99_s, self.wait_longest_s


def loss_of(loss: float) -> str:
    """``loss 5 %``."""
    return f"loss {100 * loss:g} %"


# --- one world ------------------------------------------------------------------------------------


async def measure(
    size: int,
    loss: float,
    *,
    peers: int = PEERS,
    measured_s: Seconds = MEASURED_S,
    seed: int = 0,
) -> Figures:
    """Let `peers` peers request groups of `size`."""
    link = Link(latency_s=LATENCY_S, loss=loss, bandwidth_bytes_s=UPLINK_BYTES_S)
    trace = CountingTrace()
    world = World(seed, link, trace=trace)
    for number in range(peers):
        replica = VectorReplica(np.zeros(NUMBERS[size], np.float32))
        algorithm = f"{AsksAlways.__module__}:AsksAlways"
        await world.add(f"p{number:02}", replica, algorithm, others=size - 1)
    await asyncio.sleep(GATHER_S)
    for peer in world.peers.values():
        peer.process.start(_ask(peer))
    await asyncio.sleep(WARM_UP_S)
    start, before = asyncio.get_running_loop().time(), trace.lock_messages
    await asyncio.sleep(measured_s)
    end, messages = asyncio.get_running_loop().time(), trace.lock_messages - before
    await asyncio.sleep(COOL_DOWN_S)
    spans = {name: spans_of(peer.metrics.of("group")) for name, peer in world.peers.items()}
    for name in tuple(world.peers):
        world.crash(name)  # they would never end
    return figures_of(size, loss, spans, start, end, messages)


async def _ask(peer: SimPeer) -> None:
    """Start its algorithm, within the peer's own process."""
    peer.driver.start(peer.driver.algorithm.background(peer.swarm))


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


def claims_of(rows: Sequence[Figures]) -> list[Json]:
    """The claims; with loss of messages there are very few."""
    claims = []
    for row in rows:
        if row.loss:
            text = f"{row.name}: no lost message idles anybody for a lease"
            lost = Claim(text, "wait_longest_s", row.name, at_most=LockConfig().lease_s)
            claims.append(lost.check(row.wait_longest_s))
            continue
        if row.size in INSIDE_AT_LEAST:
            text = f"{row.name}: peers that ask all the time are inside one most of it"
            inside = Claim(text, "inside", row.name, at_least=INSIDE_AT_LEAST[row.size])
            claims.append(inside.check(row.inside))
        text = f"{row.name}: nearly all pairs meet in 20 s"
        met = Claim(text, "pairs_met", row.name, at_least=PAIRS_AT_LEAST)
        text = f"{row.name}: no peer waits for long"
        wait = Claim(text, "wait_longest_s", row.name, at_most=WAIT_AT_MOST_S)
        claims += [met.check(row.pairs_met), wait.check(row.wait_longest_s)]
    return claims


def table_of(rows: Sequence[Json]) -> Table:
    """One line per world."""
    return table(
        "Peers that ask all the time (times in s)",
        rows,
        {
            "": "{name}",
            "inside": "{inside:.1%}",
            "wait": "{wait_median_s:.3f}",
            "99 %": "{wait_p99_s:.3f}",
            "longest": "{wait_longest_s:.3f}",
            "met": "{pairs_met:.1%}",
            "average": "{average_s:.3f}",
            "msgs": "{messages:.0f}",
        },
    )


# --- as a picture ---------------------------------------------------------------------------------


def picture(rows: Sequence[Figures]) -> Figure:
    """Left: the fraction of time a peer is inside; right: how long it waits."""
    title = "64 peers that ask for a group all the time"
    figure, (inside, waits) = panels((9.6, 4.2), 2, across=True, title=title)
    sizes = sorted({row.size for row in rows})
    losses = sorted({row.loss for row in rows})
    for axes in (inside, waits):
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
    headline(inside, "Inside; lines: what is required without loss")
    waits.set_yscale("log")
    waits.set_ylim(0.001, 2)
    waits.set_yticks([0.001, 0.01, 0.1, 1], ["1 ms", "10 ms", "100 ms", "1 s"])
    waits.axhline(WAIT_AT_MOST_S, color=INK, linewidth=0.9)
    waits.set_ylabel("from one group to the next", color=INK)
    headline(waits, "Waiting: median, 99th percentile, longest")
    handles = [
        waits.scatter([], [], color=COLOURS[n % len(COLOURS)], label=loss_of(loss))
        for n, loss in enumerate(losses)
    ]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(losses), frameon=False, fontsize=9
    )
    return figure


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
    axes.plot([place] * 3, row.waits, color=colour, linewidth=1.2)
    for value, marker in zip(row.waits, "o_^", strict=True):
        axes.scatter(place, value, color=colour, marker=marker, s=36)


# --- all of them ----------------------------------------------------------------------------------


def _measure(setting: tuple[int, float], scale: Scale) -> Figures:
    return run(measure(*setting, peers=scale.peers, measured_s=scale.measured_s))


def main(out: Out = Path("runs/bench-lock"), check: Check = False, quick: Quick = False) -> None:
    """Measure how fast 64 peers that ask all the time find someone free."""
    bench, scale = Bench(out, check=check, quick=quick), QUICK if quick else FULL
    settings = tuple(product(scale.sizes, scale.losses))
    with bench.progress(f"worlds of {scale.peers} peers", len(settings)) as told:
        found = side_by_side(partial(_measure, scale=scale), settings, told)
    rows = [{"name": row.name, **asdict(row)} for row in found]
    pictures = {"bench-lock.png": partial(picture, found)}
    bench.conclude(rows, claims_of(found), [table_of(rows)], pictures)


if __name__ == "__main__":
    run_bench(main)
