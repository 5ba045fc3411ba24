"""A peer's lifecycle: what each part of it does, and that nothing else puts a peer together."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from p2ptrain.core.messages import Phase
from p2ptrain.errors import ConfigError
from p2ptrain.ids import PeerId
from p2ptrain.runtime.lifecycle import PeerLifecycle
from p2ptrain.runtime.metrics import MemoryMetrics
from p2ptrain.runtime.settings import PeerConfig
from p2ptrain.sim.link import Link
from p2ptrain.sim.network import SimNetwork
from p2ptrain.sim.peer import simulated_environment
from p2ptrain.sim.process import Process
from p2ptrain.sim.replica import VectorReplica
from p2ptrain.sim.trace import Trace

ROOT = Path(__file__).parents[2]


class Fleet:
    """Peers of one simulated network, which share this test's process."""

    def __init__(self) -> None:
        self.network = SimNetwork(0, Link(latency_s=0.01), Trace())
        self.replicas: dict[str, VectorReplica] = {}
        self.records: dict[str, MemoryMetrics] = {}

    async def peer(self, name: str, value: float, **settings) -> PeerLifecycle:
        """One that listens."""
        self.replicas[name] = VectorReplica(np.full(3, value, np.float32))
        self.records[name] = MemoryMetrics(lambda: 0.0)
        environment = simulated_environment(Process(name), incarnation=1)
        config = PeerConfig(name=name, leave_grace_s=0.5, **settings)
        peer = PeerLifecycle(config, self.replicas[name], environment)
        await peer.listen(self.network.transport("", PeerId(name)), self.records[name])
        return peer


async def trained(fleet: Fleet) -> PeerLifecycle:
    """The first of a swarm, which has made a step."""
    first = await fleet.peer("a", 1.0)
    await first.join()
    first.begin()
    await first.boundary.step(4, None, lambda: None)
    return first


async def test_peers_without_a_trainer_are_ready_and_average_when_they_are_told_to():
    fleet = Fleet()
    a, b = await fleet.peer("a", 1.0), await fleet.peer("b", 3.0, peers=2)
    await a.join()
    await b.join([a.address], keeps_model=True)
    result = await a.driver.swarm.form([b.name])
    assert result.done, result.why
    for peer in (a, b):
        await peer.depart(serve=False)
        assert fleet.replicas[peer.name].live.tolist() == [2.0, 2.0, 2.0]
        assert [r["outcome"] for r in fleet.records[peer.name].of("group")] == ["done"]


async def test_a_newcomer_takes_the_model_of_one_who_trains():
    fleet = Fleet()
    a, b = await trained(fleet), await fleet.peer("b", 3.0)
    await b.join([a.address])
    assert fleet.replicas["b"].live.tolist() == [1.0, 1.0, 1.0]
    assert b.driver.me.phase is Phase.ARRIVING
    for peer in (a, b):
        await peer.depart(serve=False)


async def test_a_newcomer_that_keeps_its_model_takes_no_other():
    fleet = Fleet()
    a, b = await trained(fleet), await fleet.peer("b", 3.0)
    await b.join([a.address], keeps_model=True)
    assert fleet.replicas["b"].live.tolist() == [3.0, 3.0, 3.0]
    assert (await b.driver.swarm.form([a.name])).done
    for peer in (a, b):
        await peer.depart(serve=False)


async def test_hosts_of_the_configuration_are_asked_where_none_are_given():
    fleet = Fleet()
    a = await fleet.peer("a", 1.0)
    await a.join()
    b = await fleet.peer("b", 3.0, join=(a.address,))
    await b.join()
    assert b.driver.swarm.alive() == (a.name,)
    for peer in (a, b):
        await peer.depart(serve=False)


async def test_what_cannot_work_is_refused_before_anything_is_opened():
    replica = VectorReplica(np.zeros(3, np.float32))
    environment = simulated_environment(Process("a"), incarnation=1)
    for settings, mistake in (
        ({"algorithm": "ad_psdg"}, "unknown algorithm 'ad_psdg'; did you mean 'ad_psgd'?"),
        (
            {"algorithm": "wagma", "algorithm_options": {"group_size": 8}, "peers": 4},
            "wagma group_size = 8 is more than the 4 peers",
        ),
        ({"algorithm": "allreduce", "average_momentum": True}, "average_momentum: allreduce"),
    ):
        with pytest.raises(ConfigError, match=mistake.replace("?", r"\?")):
            PeerLifecycle(PeerConfig(name="a", **settings), replica, environment)


def test_nothing_else_puts_a_peer_together():
    packages = ("p2ptrain", "launcher")
    sources = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    makers = [path.name for path in sources if " Driver(" in path.read_text(encoding="utf-8")]
    assert makers == ["lifecycle.py"]


async def test_leaving_twice_at_once_closes_once_and_as_soon_as_the_shorter_grace_says():
    """Ctrl-C while a peer leaves; stopping a gRPC server twice at once is a crash."""
    fleet = Fleet()
    a = await fleet.peer("a", 1.0)
    await a.join()
    closed, close = [], a.driver.transport.close

    async def counted(grace_s: float) -> None:
        closed.append(asyncio.get_running_loop().time())
        await close(grace_s)

    a.driver.transport.close = counted
    a.driver.averages._groups["one that does not end"] = SimpleNamespace(task=None)
    before = asyncio.get_running_loop().time()
    first = asyncio.create_task(a.leave(60.0))
    await asyncio.sleep(1.0)
    await a.leave(0.5)
    await first
    assert closed == [pytest.approx(before + 1.5)]
