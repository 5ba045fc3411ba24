"""Where swarms end that are to train so many samples: near that number, whoever is slow."""

import asyncio
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from p2ptrain.core.effects import Outcome
from p2ptrain.ids import PeerId, Seconds
from p2ptrain.runtime.exchange import Exchange
from p2ptrain.runtime.settings import StopConfig
from p2ptrain.runtime.silence import ATTEMPTS
from p2ptrain.runtime.streams import GroupBroken
from p2ptrain.sim.link import Link
from p2ptrain.sim.replica import VectorReplica
from p2ptrain.sim.world import SimPeer, World
from tests.helpers.worlds import SIZE, build, steps_of

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


@pytest.mark.parametrize("count", [4, 32])
async def test_peers_that_average_often_end_half_a_batch_each_beyond_the_samples_at_most(
    count: int,
):
    world = await build(count, "ad_psgd", equal=True)
    run = Run(world, count * 12, slow={f"p{count - 1}": 0.4})
    await run.train()
    assert 0 <= run.trained - count * 12 <= count / 2
    await world.close()


async def test_where_averages_are_rare_all_peers_end_near_the_samples_at_the_same_time():
    """Fast ones were ahead of the truth between averages; a slow one went on alone for long."""
    world = await build(8, "diloco", equal=True, period=50)
    run = Run(world, 8 * 230, slow={"p7": 0.4})
    await run.train()
    assert run.trained == pytest.approx(8 * 230, rel=NEAR)
    assert max(run.ended_at.values()) - min(run.ended_at.values()) < 0.5
    await world.close()


async def test_where_pairs_meet_rarely_ten_meetings_are_enough_to_end_near_the_samples():
    world = await build(8, "noloco", equal=True, period=20)
    run = Run(world, 8 * 20 * 10, slow={"p7": 0.4})
    await run.train()
    assert run.trained == pytest.approx(8 * 20 * 10, rel=NEAR)
    assert max(run.ended_at.values()) - min(run.ended_at.values()) < 5
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


async def test_a_peer_that_loads_its_model_for_long_counts_from_when_it_trains():
    """The others counted steps for it meanwhile, and it then began with all that they had made."""
    slow = Link(latency_s=0.02, bandwidth_bytes_s=20e6 / 8)
    world = await build(3, "ad_psgd", equal=True, link=slow)
    world.network.stands_for = 20_000_000 // (4 * SIZE)  # the model takes 8 s
    run = Run(world, 600)
    training = asyncio.ensure_future(run.train())
    await asyncio.sleep(1.0)
    newcomer = await world.add("p3", VectorReplica(np.zeros(SIZE)), "ad_psgd", keeps_model=False)
    assert asyncio.get_running_loop().time() > 8.0
    await run._train(newcomer)
    await training
    assert run.trained == pytest.approx(600, rel=NEAR)
    await world.close()


@pytest.mark.parametrize("algorithm", ["allreduce", "parameter_server", "local_sgd"])
async def test_where_no_average_succeeds_trainers_that_wait_for_one_end_soon_after_their_time(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
):
    """They tried version 0 again and again: all agree to end in an average, and there was none."""

    async def fail(_: Exchange) -> None:
        await asyncio.sleep(5.0)  # of virtual time
        raise GroupBroken(Outcome.LATE, "nothing has moved for 5.0 s")

    monkeypatch.setattr(Exchange, "run", fail)
    world = await build(
        3, algorithm, equal=True, **({"period": 1} if algorithm == "local_sgd" else {})
    )
    ended_at: list[Seconds] = []

    async def train(peer: SimPeer) -> None:
        peer.lifecycle.config = replace(peer.lifecycle.config, stop=StopConfig(seconds=60.0))
        peer.lifecycle.begin()
        while not peer.lifecycle.should_stop:
            await peer.pass_through(0.1, lambda: None)
            await peer.boundary.step(1, None, peer.replica.descend)
        ended_at.append(asyncio.get_running_loop().time())
        await peer.boundary.end()

    async with asyncio.timeout(600):
        await world.run(train)
    assert min(ended_at) > 60.0
    assert max(ended_at) < 60.0 + ATTEMPTS * 10.0
    whys = {peer.lifecycle.why_stopped for peer in world.peers.values()}
    assert "60 s are over, and none of the last 9 averages succeeded" in whys
    await world.close()
