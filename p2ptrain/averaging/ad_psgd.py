"""AD-PSGD: asynchronous decentralised parallel SGD (Lian, Zhang, Zhang, Liu; ICML 2018).

Each peer trains at its own speed. Beside its trainer, in the background, it meets one other peer at
a time and both take the mean of their two models:

    x_i, x_j  <-  (x_i + x_j) / 2          (the averaging matrix is doubly stochastic)
    x_i       <-  x_i - lr * update(g_i)   whenever a gradient is ready

No peer waits for a slow one: a slow peer starts fewer exchanges, and answers those of others while
it computes. Differences from the paper, and why:

* *Delta form.* Each peer adds mean - snapshot to its live model, so an update that lands during the
  exchange is kept. Overwriting the live model, as released codes do, loses it (`x_i` is then the
  mean of two snapshots).
* *Any graph.* The paper needs a bipartite graph to exclude deadlock; the group lock excludes it on
  every graph, with odd and even numbers of peers. `bipartite` remains as an option, to compare.
* *Paced.* An exchange starts once per `every_updates` own updates instead of as fast as the network
  allows, so that averaging does not take the processor from computing. Where an exchange takes
  longer than that, the next one starts at once; missed exchanges are not made up for.
  As in the paper, a peer takes part in about two exchanges for each that it starts.
* *In turn.* A peer asks the half of its neighbours that it met longest ago, and takes the first
  that is free. If it asked all of them, the members of the last group would be the first to be free
  for each other again: where averages follow each other closely, the same pairs met repeatedly, and
  the swarm fell apart (measured: 6 peers, 3 of 15 pairs in 20 averages each).
* *In fragments*, if asked (`fragment_s`): where a model takes longer than some steps on a link, an
  average moves a part of it (DivShare, arXiv 2410.12918): the one that was averaged longest ago,
  whichever peer chose it. One partner at a time: a second one would have half of the link. With
  each partner a part is as large as that pair's link carries (`core/fragments.py`). An exchange
  follows the other, with another partner, until each number was averaged once: a period
  is one of whole models.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from p2ptrain.averaging import (
    Algorithm,
    ConfigError,
    PeerId,
    Swarm,
    check_fragment,
    meet_someone,
)

Graph = Literal["random", "ring", "exponential", "bipartite"]


class AdPsgd(Algorithm):
    averages = "models"

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """Which peers to ask, and how often."""

        graph: Graph = "random"
        """Which peers a peer may ask. ``random``: all. ``ring``: the two neighbours by name; mixes
        slowly, few links. ``exponential``: those 1, 2, 4, 8, ... ranks away; mixes in O(log P).
        ``bipartite``: peers of even rank ask those of odd rank, which never ask."""

        every_updates: int = 1
        """Start an average after this many own updates. Too large: models drift apart. 1 is the
        minimum, and not too small: a busy partner is replaced by another one at once."""

        fragment_s: float = 0
        """Each average moves a fragment of the model, as large as links carry in about so many
        seconds, and the next one another, at once; 0: the whole model. For links on which a model
        takes longer than some steps. Too small: messages cost more than numbers; too large: members
        are busy for long, and means are of old numbers."""

        def __post_init__(self) -> None:
            check_fragment("ad_psgd", self.fragment_s)
            if self.every_updates < 1:
                raise ConfigError(f"ad_psgd every_updates = {self.every_updates} must be 1 or more")

    @property
    def needs_all(self) -> bool:
        """Other graphs go by rank among all."""
        return bool(self.config.graph != "random")

    async def background(self, swarm: Swarm) -> None:
        updates = 0
        while True:
            updates = await swarm.wait_for_update(updates + self.config.every_updates)
            rounds = swarm.rounds
            while await self._meet_someone(swarm):
                if not self.config.fragment_s or swarm.rounds > rounds or not swarm.trains:
                    break

    async def _meet_someone(self, swarm: Swarm) -> bool:
        return await meet_someone(
            swarm,
            lambda: neighbours(self.config.graph, swarm.me, swarm.choosable()),
            fragment_s=self.config.fragment_s,
        )


def neighbours(graph: Graph, me: PeerId, others: Sequence[PeerId]) -> tuple[PeerId, ...]:
    """The peers that `me` may ask on `graph`, given the live others; ranks are by name.

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
