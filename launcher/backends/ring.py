"""Price a ring all-reduce: the baseline of publications, for simulations.

Our own all-reduce moves as few words as a ring, but between all pairs. Where several peers share an
uplink a ring in order of rank is better: one flow leaves each machine. So ``ring`` stands for an
ideal collective library: all peers wait for each other, which is simulated, and then 2 (P - 1)
rounds pass in which each peer sends one P-th of the vector to the next rank, as fast as the slowest
of these links carries it. Protocol and software cost nothing, and nothing overlaps with computing.
"""

from dataclasses import dataclass

from p2plab.conditions import LinkConfig
from p2plab.scenario import Scenario
from p2ptrain.averaging.allreduce import AllReduce
from p2ptrain.averaging.base import Swarm
from p2ptrain.ids import Seconds

SPEC = "p2plab.backends.ring:Ring"
"""Loads the algorithm below."""


class Ring(AllReduce):
    averages = "gradients"
    overlaps = "none"

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """The duration that a simulation has computed."""

        lasts_s: float = 0.0
        """All rounds together."""

    async def after_backward(self, swarm: Swarm) -> None:
        await super().after_backward(swarm)  # over links that cost no time: it only waits
        await swarm.pause(self.config.lasts_s)


def ring_s(scenario: Scenario, model_bytes: int) -> Seconds:
    """How long all rounds of a ring by rank last."""
    link, machines, peers = scenario.link or LinkConfig(), scenario.machines, scenario.peers
    if peers == 1:
        return 0.0
    slowest_mbit_s = link.bandwidth_mbit_s
    if machines is not None and peers > machines.peers:
        slowest_mbit_s = min(slowest_mbit_s, machines.uplink_mbit_s)
    part_s = model_bytes / peers / (slowest_mbit_s * 1e6 / 8)
    return 2 * (peers - 1) * (part_s + link.latency_ms / 1000)
