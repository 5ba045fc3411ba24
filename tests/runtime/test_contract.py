"""Wrong programs in a swarm: what differs among peers is named, where it is and where it is not."""

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from p2ptrain.errors import ConfigError, RefusedError, StateError, TransportError
from p2ptrain.ids import PeerId
from p2ptrain.runtime.exchange import ExchangeConfig
from p2ptrain.runtime.lifecycle import PeerLifecycle
from p2ptrain.runtime.metrics import MemoryMetrics
from p2ptrain.runtime.settings import PeerConfig
from p2ptrain.sim.link import Link
from p2ptrain.sim.network import SimNetwork
from p2ptrain.sim.peer import simulated_environment
from p2ptrain.sim.process import Process
from p2ptrain.sim.replica import VectorReplica
from p2ptrain.sim.trace import Trace

STEPS = 6


class Fleet:
    """Peers of one simulated network, which share this test's process."""

    def __init__(self) -> None:
        self.network = SimNetwork(0, Link(latency_s=0.01), Trace())
        self.replicas: dict[str, VectorReplica] = {}
        self.records: dict[str, MemoryMetrics] = {}

    async def peer(
        self, name: str, rate: float = 0.5, frozen: str = "none", **settings
    ) -> PeerLifecycle:
        """One that listens."""
        replica = self.replicas[name] = VectorReplica(np.zeros(3, np.float32), rate)
        replica.frozen = frozen
        self.records[name] = MemoryMetrics(lambda: 0.0)
        settings = {"algorithm": "allreduce", "leave_grace_s": 0.5} | settings
        environment = simulated_environment(Process(name), incarnation=1)
        peer = PeerLifecycle(PeerConfig(name=name, **settings), replica, environment)
        await peer.listen(self.network.transport("", PeerId(name)), self.records[name])
        return peer

    async def together(self, rates: dict[str, float]) -> list[PeerLifecycle]:
        """Peers of these learning rates that have joined the first of them."""
        peers = [await self.peer(name, rate, peers=len(rates)) for name, rate in rates.items()]
        hosts = [[], *([peers[0].address] for _ in peers[1:])]
        await asyncio.gather(*(peer.join(at) for peer, at in zip(peers, hosts, strict=True)))
        return peers

    async def train(
        self, peer: PeerLifecycle, before_step: Callable[[int], object] = lambda _: None
    ) -> None:
        """A program: so many steps, then it leaves, also after an error."""
        replica = self.replicas[peer.name]
        peer.begin()
        try:
            for step in range(STEPS):
                await asyncio.sleep(0.01)
                before_step(step)
                replica.gradient[:] = 1
                await peer.boundary.step(1, None, replica.descend)
        finally:
            await peer.boundary.end()
            await peer.depart(serve=False)

    def warnings(self, name: str) -> list[str]:
        return [record["text"] for record in self.records[name].of("warning")]


async def outcomes(*programs) -> list:
    return await asyncio.gather(*programs, return_exceptions=True)


async def test_the_one_with_another_learning_rate_ends_before_its_first_update():
    fleet = Fleet()
    peers = await fleet.together({"a": 0.5, "b": 0.25, "c": 0.5})
    ended = await outcomes(*map(fleet.train, peers))
    assert ended[0] is ended[2] is None
    says = "b makes another update than most peers at version 0: lr is"
    with pytest.raises(ConfigError, match=f"{says} 0.5 at a and 0.25 at b; give all the same"):
        raise ended[1]
    assert fleet.replicas["b"].updates == 0
    assert fleet.warnings("a") == [
        f"{says} 0.25 at b and 0.5 at a; give all the same optimizer, "
        "and let schedules follow peer.progress"
    ]
    for name in "ac":
        assert fleet.replicas[name].updates == STEPS, "the others go on, and lose no version"
        assert fleet.replicas[name].live.tolist() == [-0.5 * STEPS] * 3


async def test_a_rate_that_changes_at_one_peer_is_seen_at_that_version():
    fleet = Fleet()
    peers = await fleet.together({"a": 0.5, "b": 0.5, "c": 0.5})

    def decay(step: int) -> None:
        fleet.replicas["c"].learning_rate = 0.5 if step < 3 else 0.05

    ended = await outcomes(
        fleet.train(peers[0]), fleet.train(peers[1]), fleet.train(peers[2], decay)
    )
    assert ended[:2] == [None, None]
    with pytest.raises(
        ConfigError, match=r"c makes another .* at version 3: lr is 0.5 at a and 0."
    ):
        raise ended[2]
    assert fleet.replicas["c"].updates == 3


async def test_a_rate_that_changes_everywhere_at_one_version_is_a_schedule():
    fleet = Fleet()
    peers = await fleet.together({"a": 0.5, "b": 0.5})

    def schedule(name: str) -> Callable[[int], None]:
        return lambda step: setattr(fleet.replicas[name], "learning_rate", 0.5 / (step + 1))

    ended = await outcomes(*(fleet.train(peer, schedule(peer.name)) for peer in peers))
    assert ended == [None, None]
    assert fleet.replicas["a"].live.tolist() == fleet.replicas["b"].live.tolist()


async def test_of_two_the_newcomer_is_wrong_whatever_its_name():
    fleet = Fleet()
    old = await fleet.peer("z", 0.5)
    await old.join()
    old.begin()
    replica = fleet.replicas["z"]
    for _ in range(3):
        await old.boundary.step(8, None, replica.descend)
    new = await fleet.peer("a", 0.25)
    await new.join([old.address])
    goes_on = asyncio.create_task(old.boundary.step(8, None, replica.descend))
    ended = await outcomes(fleet.train(new))
    with pytest.raises(
        ConfigError, match=r"a makes another update .*: lr is 0.5 at z and 0.25 at a"
    ):
        raise ended[0]
    await goes_on
    assert replica.updates == 4
    await old.depart(serve=False)


async def test_under_an_asynchronous_algorithm_rates_may_differ():
    fleet = Fleet()
    a, b = (
        await fleet.peer("a", 0.5, algorithm="ad_psgd"),
        await fleet.peer("b", 0.25, algorithm="ad_psgd"),
    )
    await a.join()
    await b.join([a.address])
    assert await outcomes(fleet.train(a), fleet.train(b)) == [None, None]


@pytest.mark.parametrize(
    ("algorithm", "ours", "theirs", "says"),
    [
        ("ripples", {"schedule": "static"}, {}, "'generator' at b and 'static' at a"),
        ("eager", {"average_models_every": 5}, {"average_models_every": 7}, "7 at b and 5 at a"),
        ("ad_psgd", {"every_updates": 2}, {}, "1 at b and 2 at a"),
    ],
)
async def test_options_that_differ_are_refused_by_name(algorithm, ours, theirs, says):
    fleet = Fleet()
    a = await fleet.peer("a", algorithm=algorithm, algorithm_options=ours)
    b = await fleet.peer("b", algorithm=algorithm, algorithm_options=theirs)
    await a.join()
    with pytest.raises(RefusedError, match=f"{algorithm} option .* is {says}"):
        await b.join([a.address])
    await b.abandon()
    await a.depart(serve=False)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("robust_mean", "clipped"),
        ("trimmed_share", 0.25),
        ("norm_limit", 2.5),
        ("opposed_groups", 5),
        ("audited_owners", 0.5),
    ],
)
async def test_what_is_done_about_liars_is_the_same_at_all_and_unsaid_where_nothing_is(
    setting, value
):
    fleet = Fleet()
    a = await fleet.peer("a", exchange=ExchangeConfig(**{setting: value}))
    b = await fleet.peer("b")
    assert setting not in b.driver.contract.settings, "older peers know of no such setting"
    await a.join()
    with pytest.raises(RefusedError, match=f"{setting} is not set at b and {value!r} at a"):
        await b.join([a.address])
    await b.abandon()
    await a.depart(serve=False)


async def test_those_that_wait_for_a_refused_peer_say_who_it_is_and_why():
    fleet = Fleet()
    settings = {"peers": 3, "join_timeout_s": 5.0}
    a, b = await fleet.peer("a", **settings), await fleet.peer("b", **settings)
    c = await fleet.peer("c", algorithm="ad_psgd", **settings)
    ended = await outcomes(a.join(), b.join([a.address]), c.join([a.address]))
    why = "algorithm is 'ad_psgd' at c and 'allreduce' at a; start both with the same"
    assert isinstance(ended[2], RefusedError)
    assert str(ended[2]) == why
    for waiting, others in zip(ended[:2], ("a, b", "b, a"), strict=True):
        assert isinstance(waiting, TransportError)
        assert str(waiting) == (
            f"3 peers were to start together; after 5 s there are: {others}; "
            f"none of them is ready; a refused c: {why}"
        )
    for peer in (a, b, c):
        await peer.abandon()


async def test_frozen_parameters_that_could_not_be_taken_over_are_no_silent_difference():
    fleet = Fleet()
    a = await fleet.peer("a", frozen="one", algorithm="ad_psgd")
    b = await fleet.peer("b", frozen="other", algorithm="ad_psgd")
    c = await fleet.peer("c", frozen="one", algorithm="ad_psgd")
    await a.join()
    with pytest.raises(StateError, match="'one' at a and 'other' at b, so that both train another"):
        await b.join([a.address])
    await b.abandon()
    await c.join([a.address])
    for peer in (a, c):
        await peer.depart(serve=False)


async def test_under_a_synchronous_algorithm_frozen_parameters_are_compared_at_each_version():
    fleet = Fleet()
    peers = await fleet.together({"a": 0.5, "b": 0.5, "c": 0.5})
    fleet.replicas["b"].frozen = "other"
    ended = await outcomes(*map(fleet.train, peers))
    assert ended[0] is ended[2] is None
    with pytest.raises(ConfigError, match="frozen parameters is 'none' at a and 'other' at b"):
        raise ended[1]
