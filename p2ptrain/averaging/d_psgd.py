"""D-PSGD: decentralised parallel SGD on a fixed graph (Lian et al., NeurIPS 2017).

After each step, a peer averages its model with those of its neighbours:

    x_i  <-  x_i - lr * update(g_i)
    x_i  <-  sum of W_ij x_j over i and its neighbours,    W symmetric and doubly stochastic

A peer waits for its neighbours only. So a slow peer slows its neighbours at once, their neighbours
a step later, and in the end all peers. `ad_psgd` is measured against this algorithm.

Differences from the paper, and why:

* *One edge at a time.* A peer is in one group at a time, and groups that share a peer do not
  commute. So the edges are coloured: those of one colour share no peer, and are averaged at once in
  pairs; the colours follow each other within the step (as MATCHA does; Wang et al., 2019). W is the
  product of these averages: doubly stochastic, so that the mean of all models is conserved, though
  not symmetric, and on a ring of even length each model reaches two neighbours on each side.
* *Delta form*, as everywhere.
* *Any number of peers*, which may join and leave: the graph is drawn over all that train, by name.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from p2ptrain.averaging import Algorithm, PeerId, Round, Rule, Swarm, What

Graph = Literal["ring", "exponential"]

Edge = tuple[int, int]


class DPsgd(Algorithm):
    averages = "models"
    trainer_waits = True
    state_names = ("arrived",)

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """Which peers are neighbours."""

        graph: Graph = "ring"
        """``ring``: the two beside each peer, by name; few averages per step, mixes in O(P^2)
        steps. ``exponential``: those 1, 2, 4, ... ranks away; more averages, mixes in O(log P)."""

    arrived = 0  # the version that we arrived at last

    async def after_update(self, swarm: Swarm) -> None:
        colours = len(coloured_edges(self.config.graph, len(swarm.trainees())))
        if self.arrived + colours < swarm.version:
            self.arrived = swarm.version - swarm.version % max(1, colours)  # we are new here
        for _ in range(colours):
            self.arrived += 1
            await swarm.form_at(self.arrived)

    def schedule(self, version: int, peers: Sequence[PeerId], me: PeerId) -> Round:
        colours = coloured_edges(self.config.graph, len(peers))
        mine, alone = peers.index(me), (me,)
        edges = colours[version % len(colours)] if colours else ()
        members = next(((peers[a], peers[b]) for a, b in edges if mine in (a, b)), alone)
        return Round(members, What.MODELS, Rule(waiting=len(members)))


@lru_cache(maxsize=64)  # every peer asks for the same at every version
def coloured_edges(graph: Graph, count: int) -> tuple[tuple[Edge, ...], ...]:
    """The edges between `count` ranks, by colour; those of one colour share no rank.

    Each edge takes the first colour that is free at both ends: at most one less than twice the
    largest degree, and two on a ring of even length.
    """
    hops = [1 << k for k in range(count.bit_length()) if 1 << k < count]
    hops = hops[:1] if graph == "ring" else hops
    both = ((rank, (rank + hop) % count) for hop in hops for rank in range(count))
    pairs = {(min(ends), max(ends)) for ends in both}
    colours: list[list[Edge]] = []
    for low, high in sorted(pairs):
        free = (c for c in colours if all({low, high}.isdisjoint(edge) for edge in c))
        colour = next(free, None)
        if colour is None:
            colours.append(colour := [])
        colour.append((low, high))
    return tuple(tuple(colour) for colour in colours)
