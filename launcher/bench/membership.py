"""Measure membership: how soon all peers learn of a change, its cost, and false suspicions.

``python -m p2plab.bench.membership`` writes ``bench.json`` and ``bench-membership.png``: swarms
of 8, 64, 512 and 1,024 simulated peers with the default settings, 1 ms one way, no training. The
driver, the membership and the codec are those of production.

* *join*: from the first message of a newcomer until the last peer has it among its members.
* *death*: a peer dies as by SIGKILL: it sends nothing, but connections to it are refused from then
  on. Measured until the last peer has declared it dead.
* *vanished*: it is cut off without an error, as by a pulled cable.
* *bytes*: of control messages, per peer and second, without events.
* *false*: one peer's machine is five times too slow: its whole process, including the protocol,
  runs a fifth of the time and stands still in between, for up to `STALL_MOST_S` at a time. Every
  time that any peer, the slow one included, declares a living one suspect or dead counts.
"""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

from p2plab.harness.bench import Bench, Check, Out, Quick, run_bench
from p2plab.harness.claims import Claim, Json
from p2plab.harness.pictures import BLUE, ORANGE, headline, panels
from p2plab.harness.processes import side_by_side
from p2plab.harness.tables import table
from p2plab.plot import INK
from p2plab.run import rare_collections
from p2ptrain.core.messages import MemberState
from p2ptrain.ids import PeerId, Seconds
from p2ptrain.sim.link import Link
from p2ptrain.sim.loop import run, virtual_loop
from p2ptrain.sim.replica import VectorReplica
from p2ptrain.sim.trace import Trace
from p2ptrain.sim.world import SimPeer, World

SLOW_S: dict[int, Seconds] = {8: 3600.0, 64: 1800.0, 512: 60.0, 1024: 30.0}
"""How long one peer is slow, by the number of peers: an hour, or what is affordable."""

QUICK_SLOW_S: dict[int, Seconds] = {8: 60.0, 16: 30.0}

LATENCY_S: Seconds = 0.001
QUIET_S: Seconds = 5.0
WAIT_S: Seconds = 8.0
"""The wait after each event; a peer that has not learned of it by then counts as never."""

LOOK_S: Seconds = 0.005
"""Between two looks at what all peers know."""

SLOWNESS = 5
STALL_MOST_S: Seconds = 0.8
DEATH_AT_MOST_S: Seconds = 5.0


class NoTrace(Trace):
    """Keeps no lines: there would be millions."""

    def note(self, now: Seconds, what: str) -> None:
        """Ignore the line."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one swarm."""

    peers: int
    join_s: Seconds
    death_s: Seconds
    vanished_s: Seconds
    bytes_per_s: float
    """Per peer."""
    slow_s: Seconds
    """The time for which one peer was slow."""
    falsely_suspected: int
    falsely_dead: int

    @property
    def name(self) -> str:
        """``1,024 peers``."""
        return f"{self.peers:,} peers"


# --- one world ------------------------------------------------------------------------------------


async def measure(peers: int, slow_s: Seconds, seed: int = 0) -> Figures:
    """Build a swarm; let one peer join, one die, one vanish; then slow one down."""
    world = World(seed, Link(latency_s=LATENCY_S), trace=NoTrace())
    for number in range(peers):
        await _add(world, f"p{number:04}")
    await asyncio.sleep(QUIET_S)
    before = world.network.message_bytes
    await asyncio.sleep(QUIET_S)
    bytes_per_s = (world.network.message_bytes - before) / peers / QUIET_S
    began = virtual_loop().now
    await _add(world, "newcomer")
    join_s = await _last_to_know(world, "newcomer", MemberState.ALIVE, began)
    death_s = await _death_of(world, f"p{peers // 2:04}", silent=False)
    vanished_s = await _death_of(world, f"p{peers // 3:04}", silent=True)
    doubts = await _doubts_beside_a_slow_peer(world, f"p{3 * peers // 4:04}", slow_s, Random(seed))
    for name in tuple(world.peers):
        world.crash(name)  # they would never end
    return Figures(
        peers, join_s, death_s, vanished_s, bytes_per_s, slow_s, doubts["suspect"], doubts["dead"]
    )


async def _add(world: World, name: str) -> SimPeer:
    return await world.add(name, VectorReplica(np.zeros(1, np.float32)), "ad_psgd")


async def _death_of(world: World, name: str, *, silent: bool) -> Seconds:
    if silent:
        world.network.partition([world.address_of(PeerId(name))])
    began = virtual_loop().now
    world.crash(name)
    return await _last_to_know(world, name, MemberState.DEAD, began)


async def _last_to_know(world: World, of: str, state: MemberState, began: Seconds) -> Seconds:
    """The time until the last peer has the state; infinite if one has not at the end."""
    loop, known_s = virtual_loop(), math.inf
    waiting = [peer for name, peer in world.peers.items() if name != of]
    while (passed_s := loop.now - began) < WAIT_S:
        if waiting:
            waiting = [peer for peer in waiting if not _knows(peer, PeerId(of), state)]
            known_s = math.inf if waiting else passed_s
        await asyncio.sleep(LOOK_S)
    return known_s


def _knows(peer: SimPeer, of: PeerId, state: MemberState) -> bool:
    member = peer.driver.machine.membership.member(of)
    return member is not None and member.state >= state


async def _doubts_beside_a_slow_peer(
    world: World, name: str, slow_s: Seconds, chance: Random
) -> dict[str, int]:
    """How often a living peer was declared suspect or dead while `name` was slow."""
    loop, process = virtual_loop(), world.process_of(PeerId(name))
    assert process is not None
    began = loop.now
    while loop.now < began + slow_s:
        stall_s = chance.uniform(0.0, STALL_MOST_S)
        loop.pause(process)
        await asyncio.sleep(stall_s)
        loop.resume(process)
        await asyncio.sleep(stall_s / (SLOWNESS - 1))
    await asyncio.sleep(QUIET_S)
    words = [r for p in world.peers.values() for r in _words(p) if r["t"] >= began]
    living = [word["state"] for word in words if PeerId(word["member"]) in world.peers]
    return {state: living.count(state) for state in ("suspect", "dead")}


def _words(peer: SimPeer) -> list[Json]:
    return list(peer.metrics.of("member"))


# --- results --------------------------------------------------------------------------------------


def claims_of(rows: Sequence[Figures]) -> list[Json]:
    """The claims, checked against the figures."""
    claims = []
    for row in rows:
        text = f"{row.name}: a death is known to all within {DEATH_AT_MOST_S:g} s"
        death = Claim(text, "death_s", row.name, at_most=DEATH_AT_MOST_S)
        text = f"{row.name}: in {row.slow_s:g} s beside a slow peer no living one is suspected"
        false = Claim(text, "falsely_suspected", row.name, at_most=0)
        wrong = row.falsely_suspected + row.falsely_dead
        claims += [death.check(row.death_s), false.check(wrong)]
    largest = rows[-1]
    others = max(row.bytes_per_s for row in rows[1:-1]) if len(rows) > 2 else rows[0].bytes_per_s
    text = f"{largest.name} cost each of them no more bytes per second than fewer do"
    cost = Claim(text, "bytes_per_s", largest.name, over="fewer peers", at_most=1.1)
    return [*claims, cost.check(largest.bytes_per_s / others)]


def table_of(rows: Sequence[Json]) -> Table:
    """One line per swarm."""
    return table(
        "until all know, in seconds",
        rows,
        {
            "": "{name}",
            "join": "{join_s:.3f}",
            "death": "{death_s:.2f}",
            "vanished": "{vanished_s:.2f}",
            "bytes/s": "{bytes_per_s:,.0f}",
            "slow for": "{slow_s:,.0f} s",
            "suspected": "{falsely_suspected}",
            "dead": "{falsely_dead}",
        },
    )


def picture(rows: Sequence[Figures]) -> Figure:
    """Left: the time until all peers know; right: the bytes that a peer sends."""
    figure, (left, right) = panels((9.6, 3.8), 2, across=True)
    sizes = [row.peers for row in rows]
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes.set_xlabel("peers", color=INK)
        axes.minorticks_off()
    left.plot(sizes, [row.join_s for row in rows], "o-", color=BLUE, label="a join")
    left.plot(sizes, [row.death_s for row in rows], "s-", color="#CC3377", label="a death")
    vanished = [row.vanished_s for row in rows]
    left.plot(sizes, vanished, "^-", color=ORANGE, label="vanished silently")
    left.axhline(DEATH_AT_MOST_S, color=INK, linewidth=0.9)
    left.set_ylim(0, None)
    left.set_ylabel("seconds until all know", color=INK)
    headline(left, "Line: what is asked of a death")
    left.legend(frameon=False, fontsize=9)
    right.plot(sizes, [row.bytes_per_s / 1000 for row in rows], "o-", color=BLUE)
    right.set_ylim(0, None)
    right.set_ylabel("kB per peer and second", color=INK)
    headline(right, "Control messages, while nothing happens")
    return figure


# --- all of them ----------------------------------------------------------------------------------


def _measure(setting: tuple[int, Seconds]) -> Figures:
    with rare_collections():
        return run(measure(*setting))


def main(
    out: Out = Path("runs/bench-membership"), check: Check = False, quick: Quick = False
) -> None:
    """Measure how soon all peers of a swarm know who is here, and what that costs."""
    bench = Bench(out, check=check, quick=quick)
    largest_first = sorted((QUICK_SLOW_S if quick else SLOW_S).items(), reverse=True)
    with bench.progress("swarms", len(largest_first)) as told:
        found = side_by_side(_measure, largest_first, told)[::-1]
    rows = [{"name": row.name, **asdict(row)} for row in found]
    pictures = {"bench-membership.png": partial(picture, found)}
    bench.conclude(rows, claims_of(found), [table_of(rows)], pictures)


if __name__ == "__main__":
    run_bench(main)
