"""Where swarms end that are to train so many samples: near that number, whoever is slow."""

import asyncio
from dataclasses import dataclass, field

import pytest

from p2ptrain.ids import PeerId, Seconds
from p2ptrain.sim.link import Link
from p2ptrain.sim.world import SimPeer, World
from tests.helpers.worlds import build, steps_of

NEAR = 0.02
"""Of the samples that a swarm is to train, so many may be missing, or be too many."""

BAD = Link(latency_s=0.02, jitter_s=0.05, loss=0.05, duplication=0.2)


@dataclass
class Run:
    """A world whose peers train, a sample a step, until by their own word the swarm has enough."""

    world: World
    samples: int
    step_s: Seconds = 0.1
    slow: dict[str, Seconds] = field(default_factory=dict)
    ended_at: dict[PeerId, Seconds] = field(default_factory=dict)

    async def train(self) -> None:
        await self.world.run(self._train)

    async def _train(self, peer: SimPeer) -> None:
        peer.lifecycle.begin()
        step_s = steps_of(self.step_s, **self.slow)(peer.driver.name)
        while peer.lifecycle.progress < self.samples:
            await peer.pass_through(step_s, lambda: None)
            await peer.boundary.step(1, None, peer.replica.descend)
        self.ended_at[peer.driver.name] = asyncio.get_running_loop().time()
        await peer.boundary.end()

    @property
    def trained(self) -> int:
        return sum(peer.boundary.totals.steps for peer in self.world.peers.values())


@pytest.mark.parametrize("servers", [1, 8])
@pytest.mark.parametrize("sync", ["asp", "ssp"])
async def test_peers_of_servers_end_near_the_samples_however_many_parts_there_are(
    sync: str, servers: int
):
    """Each part's push told of the same progress again: eight servers ended at 54 %."""
    world = await build(4, "parameter_server", equal=True, sync=sync, servers=servers)
    run = Run(world, 160, slow={"p3": 0.4})
    await run.train()
    assert run.trained == pytest.approx(160, rel=NEAR)
    await world.close()


@pytest.mark.parametrize("servers", [1, 3])
async def test_servers_keep_what_estimates_of_progress_add_up_to(servers: int):
    """Also where words are lost and come twice; a step beside a suspect counts for one less."""
    world = await build(
        4, "parameter_server", equal=True, seed=5, link=BAD, sync="asp", servers=servers
    )
    await world.train(40, steps_of(0.05, p2=0.12))
    estimates = [peer.driver.agreed.progress for peer in world.peers.values()]
    assert sum(estimates) == pytest.approx(4 * 4 * 40, abs=3)
    await world.close()
