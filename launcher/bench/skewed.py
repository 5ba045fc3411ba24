"""Measure what each way of waiting costs in a collective that peers reach at unequal times.

32 peers reach a collective 1, 2, 3, ... 32 ms after a common start, 64 times (Li et al., PPoPP
2020, figure 9). The latency of one call is the time from the moment at which a peer reaches it
until the peer may go on; compared is the mean over all peers and all rounds, in virtual time. A
peer that waits for all others waits 15.5 ms on average, however fast the network is.

``python -m launcher.bench.skewed`` writes ``bench.json``.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from launcher.bench.claims import Quick, claim, print_claims
from launcher.collect import Json, write_json
from p2ptrain.ids import Seconds
from p2ptrain.sim.link import Link
from p2ptrain.sim.loop import run, virtual_loop
from p2ptrain.sim.replica import VectorReplica
from p2ptrain.sim.world import SimPeer, World

PEERS = 32
ROUNDS = 64
NUMBERS = 1_024
PERIOD_S: Seconds = 0.1
"""The time from one common start to the next; all peers have finished by then."""

SKEW_S: Seconds = 0.001
LINK = Link(latency_s=0.0002, bandwidth_bytes_s=125e6)
"""A quiet local network, as the launcher's."""

COLLECTIVES: dict[str, tuple[str, dict[str, str]]] = {
    "full": ("allreduce", {}),
    "majority": ("eager", {"rule": "majority"}),
    "solo": ("eager", {"rule": "solo"}),
}
SOURCE = "Li et al., PPoPP 2020, figure 9"


@dataclass(frozen=True, slots=True)
class Latency:
    """The latency of one collective, over all calls."""

    name: str
    mean_ms: float
    p99_ms: float


async def measure(name: str, peers: int = PEERS, rounds: int = ROUNDS) -> Latency:
    """Run all rounds of one collective, in a separate world."""
    algorithm, options = COLLECTIVES[name]
    world = World(seed=1, link=LINK)
    for rank in range(peers):
        replica = VectorReplica(np.zeros(NUMBERS, np.float32))
        await world.add(f"p{rank:02}", replica, algorithm, metrics=None, **options)
    loop = virtual_loop()
    start, lasted_s = loop.now + PERIOD_S, []

    async def trainer(peer: SimPeer) -> None:
        rank = int(peer.driver.name.removeprefix("p"))
        peer.boundary.begin()
        for number in range(rounds):
            await loop.work(start + number * PERIOD_S + (rank + 1) * SKEW_S - loop.now)
            reached_at = loop.now
            await peer.boundary.step(1, None, peer.replica.descend)
            lasted_s.append(loop.now - reached_at)
        peer.boundary.end()

    await world.run(trainer)
    await world.close()
    mean_s, p99_s = np.mean(lasted_s), np.percentile(lasted_s, 99)
    return Latency(name, 1000 * float(mean_s), 1000 * float(p99_s))


def claims_of(found: dict[str, Latency]) -> list[Json]:
    """How much sooner peers go on than with a full barrier."""
    claims = []
    for name, at_least, published in (("majority", 2.4, 2.46), ("solo", 53.0, 53.32)):
        ratio = found["full"].mean_ms / found[name].mean_ms
        text = f"32 peers, 1 to 32 ms late: mean latency of the full collective over {name}"
        stated = claim(text, "mean_ms", "full", ratio, over=name, at_least=at_least)
        claims.append({**stated, "published": published, "source": SOURCE})
    return claims


def main(
    out: Annotated[Path, typer.Option(help="Where bench.json goes.")] = Path("runs/bench-skewed"),
    check: Annotated[bool, typer.Option(help="Exit with 3 if a claim does not hold.")] = False,
    quick: Quick = False,
) -> None:
    """Measure what waiting costs where peers reach a collective at unequal times."""
    size = (8, 8) if quick else (PEERS, ROUNDS)
    found = {name: run(measure(name, *size)) for name in COLLECTIVES}
    claims = claims_of(found)
    out.mkdir(parents=True, exist_ok=True)
    rows = [asdict(latency) for latency in found.values()]
    write_json(out / "bench.json", {"rows": rows, "claims": claims})
    print_claims(Console(), claims)
    if check and not quick and not all(one["holds"] for one in claims):
        raise typer.Exit(3)


if __name__ == "__main__":
    typer.run(main)
