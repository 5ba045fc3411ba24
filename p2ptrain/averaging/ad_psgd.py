"""AD-PSGD: asynchronous decentralised parallel SGD (Lian, Zhang, Zhang, Liu; ICML 2018).

Each peer trains at its own speed. Beside its trainer, in the background, it meets one other peer at
a time and both take the mean of their two models:

    x_i, x_j  <-  (x_i + x_j) / 2          (the averaging matrix is doubly stochastic)
    x_i       <-  x_i - lr * update(g_i)   whenever a gradient is ready

Nobody waits for a slow peer: it is met less often by its own wish, and answers others while it
computes. Differences to the paper, and why:

* *Delta form.* Each peer adds mean - snapshot to its live model, so an update that lands during the
  exchange is kept. Overwriting the live model loses it; released codes do (`x_i` is then the mean
  of two snapshots), and were measured at 8 points less accuracy on ImageNet.
* *Any graph.* The paper needs a bipartite graph to exclude deadlock; the group lock excludes it on
  every graph, with odd and even numbers of peers. `bipartite` is still there, to compare.
* *Paced.* An exchange starts once per `every_updates` own updates instead of as fast as the network
  allows, so that averaging does not take the processor from computing. Where an exchange takes
  longer than that, the next one starts at once; what was missed meanwhile is not made up for.
  As in the paper a peer takes part in about two exchanges for each that it starts.
* *In turn.* A peer takes the first that is free of that half of its neighbours that it met longest
  ago. With all of them to choose from, those who have just been in a group are the first to be free
  for each other again: where averages follow each other closely, pairs met again and again, and the
  swarm fell apart (measured: 6 peers, 3 of 15 pairs in 20 averages each).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from p2ptrain.averaging import Algorithm, ConfigError, Outcome, PeerId, Swarm, in_turn

Graph = Literal["random", "ring", "exponential", "bipartite"]


class AdPsgd(Algorithm):
    averages = "models"

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """Whom to ask, and how often."""

        graph: Graph = "random"
        """Whom a peer may ask. ``random``: anyone. ``ring``: the two neighbours by name; mixes
        slowly, few links. ``exponential``: those 1, 2, 4, 8, ... places away; mixes in O(log P).
        ``bipartite``: peers at even places ask those at odd places, which never ask."""

        every_updates: int = 1
        """Start an average after so many own updates. Too large: models drift apart; there is no
        smaller value, since a busy partner is replaced by another one at once."""

        def __post_init__(self) -> None:
            if self.every_updates < 1:
                raise ConfigError(f"ad_psgd every_updates = {self.every_updates} must be 1 or more")

    async def background(self, swarm: Swarm) -> None:
        updates = 0
        while True:
            updates = await swarm.wait_for_update(updates + self.config.every_updates)
            await self._meet_someone(swarm)

    async def _meet_someone(self, swarm: Swarm) -> None:
        """Average with the first neighbour that is free, of those that we met longest ago.

        If somebody else's older claim takes us meanwhile, that is their exchange, and ours follows.
        """
        for part in (2, 1):  # half of them; if none of those will do, all
            outcome = Outcome.YIELDED
            while outcome is Outcome.YIELDED:
                candidates = neighbours(self.config.graph, swarm.me, swarm.choosable())
                if not candidates:
                    return
                order = in_turn(candidates, swarm.met(), swarm.rng)
                result = await swarm.form(order[: -(-len(order) // part)], 1)
                outcome = result.outcome
            if outcome in (Outcome.DONE, Outcome.WITHDRAWN):
                return


def neighbours(graph: Graph, me: PeerId, others: Sequence[PeerId]) -> tuple[PeerId, ...]:
    """Whom `me` may ask on `graph`, given the live others; places are ranks by name.

    Symmetric for ring and exponential graphs, up to different views.
    """
    if graph == "random":
        return tuple(sorted(others))
    everyone = sorted([me, *others])
    rank, count = everyone.index(me), len(everyone)
    match graph:
        case "ring":
            chosen = {rank - 1, rank + 1}
        case "exponential":
            hops = [1 << k for k in range(count.bit_length()) if 1 << k < count]
            chosen = {rank + hop for hop in hops} | {rank - hop for hop in hops}
        case _:
            chosen = set(range(1, count, 2)) if rank % 2 == 0 else set()
    return tuple(sorted({everyone[c % count] for c in chosen} - {me}))
