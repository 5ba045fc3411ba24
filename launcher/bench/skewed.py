"""Measure what each way of waiting costs in a collective that peers reach at unequal times.

32 peers reach a collective 1, 2, 3, ... 32 ms after a common start, 64 times (Li et al., PPoPP
2020, figure 9). The latency of one call is the time from the moment at which a peer reaches it
until the peer may go on; compared is the mean over all peers and all rounds, in virtual time. A
peer that waits for all others waits 15.5 ms on average, however fast the network is.

``python -m p2plab.bench.skewed`` writes ``bench.json``.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from p2plab.harness.bench import Bench, Check, Out, Quick, run_bench
from p2plab.harness.claims import Claim, Json
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
        await world.add(
            f"p{rank:02}", replica, algorithm, metrics=None, keeps_model=True, **options
        )
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
        await peer.boundary.end()

    await world.run(trainer)
    await world.close()
    mean_s, p99_s = np.mean(lasted_s), np.percentile(lasted_s, 99)
    return Latency(name, 1000 * float(mean_s), 1000 * float(p99_s))


def claims_of(found: Sequence[Latency]) -> list[Json]:
    """How much sooner peers go on than with a full barrier."""
    mean_ms, claims = {one.name: one.mean_ms for one in found}, []
    for name, at_least, published in (("majority", 2.4, 2.46), ("solo", 53.0, 53.32)):
        claim = Claim(
            f"32 peers, 1 to 32 ms late: mean latency of the full collective over {name}",
            "mean_ms",
            "full",
            over=name,
            at_least=at_least,
            published=published,
            source=SOURCE,
        )
        claims.append(claim.check(mean_ms["full"] / mean_ms[name]))
    return claims


def main(out: Out = Path("runs/bench-skewed"), check: Check = False, quick: Quick = False) -> None:
    """Measure what waiting costs where peers reach a collective at unequal times."""
    bench = Bench(out, check=check, quick=quick)
    size = (8, 8) if quick else (PEERS, ROUNDS)
    found = [run(measure(name, *size)) for name in COLLECTIVES]
    bench.conclude([asdict(one) for one in found], claims_of(found))


if __name__ == "__main__":
    run_bench(main)
