"""Peers that start together begin with one model; one that joins takes over the whole state."""

import asyncio
from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from p2ptrain.compute.replica import Replica
from p2ptrain.compute.torch_replica import TorchReplica
from p2ptrain.core.messages import Phase
from p2ptrain.errors import RefusedError, TransportError
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

ALGORITHMS = ("allreduce", "eager", "wagma", "ripples", "ad_psgd", "d_psgd")
NAMES = ("a", "b", "c", "d")


class Fleet:
    """Peers of one simulated network, each with its lifecycle and its records."""

    def __init__(self, seed: int = 0, **settings) -> None:
        self.network = SimNetwork(seed, Link(latency_s=0.001, jitter_s=0.002), Trace())
        self.records: dict[str, MemoryMetrics] = {}
        self.lives: dict[str, PeerLifecycle] = {}
        self._settings = settings

    async def listen(self, name: str, replica: Replica, **settings) -> PeerLifecycle:
        self.records[name] = MemoryMetrics(lambda: 0.0)
        config = PeerConfig(name=name, leave_grace_s=0.5, **{**self._settings, **settings})
        life = PeerLifecycle(config, replica, simulated_environment(Process(name), incarnation=1))
        await life.listen(self.network.transport("", PeerId(name)), self.records[name])
        self.lives[name] = life
        return life

    async def join(self, *names: str, via: str = "a") -> None:
        """All of them at once; `via` joins no other."""
        hosts = [self.lives[via].address]
        await asyncio.gather(*(self.lives[name].join(hosts) for name in names))

    def warnings(self, name: str) -> list[str]:
        return [record["text"] for record in self.records[name].of("warning")]

    def crash(self, name: str) -> None:
        life = self.lives.pop(name)
        self.network.crash(life.address)
        life.driver.kill()

    async def end(self) -> None:
        for life in self.lives.values():
            await life.depart(serve=False)


async def started(
    values: Sequence[float], algorithm: str, seed: int = 0
) -> tuple[Fleet, dict[str, VectorReplica]]:
    """Four peers that start together, whose models have these values."""
    fleet = Fleet(seed, algorithm=algorithm, peers=4)
    replicas = {
        name: VectorReplica(np.full(3, value, np.float32), 0.1)
        for name, value in zip(NAMES, values, strict=True)
    }
    for name, replica in replicas.items():
        await fleet.listen(name, replica)
    await fleet.join(*NAMES)
    return fleet, replicas


# --- together -------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
async def test_peers_with_different_seeds_begin_with_the_model_of_the_first(algorithm: str):
    fleet, replicas = await started([1.0, 2.0, 3.0, 4.0], algorithm)
    assert all(replica.live.tolist() == [1.0, 1.0, 1.0] for replica in replicas.values())
    assert fleet.warnings("a") == []
    assert all("took over the model of" in fleet.warnings(name)[-1] for name in NAMES[1:])
    for life in fleet.lives.values():
        seen = life.driver.machine.membership.trainees()
        assert seen == NAMES, "nobody begins before all are in its view"
    await fleet.end()


@pytest.mark.parametrize("seed", range(10))
async def test_a_peer_waits_for_all_though_others_train_already(seed: int):
    """Word of who trains comes late, in another order at each peer."""
    fleet = Fleet(seed, algorithm="eager", peers=4)
    fleet.network.link = Link(latency_s=0.001, jitter_s=0.02)
    seen: dict[str, tuple[PeerId, ...]] = {}
    for name in NAMES:
        await fleet.listen(name, VectorReplica(np.zeros(3, np.float32), 0.1))

    async def take_part(life: PeerLifecycle) -> None:
        await life.join([fleet.lives["a"].address])
        seen[life.name] = life.driver.machine.membership.trainees()
        await train(life, Random(f"{seed}/{life.name}"))

    await asyncio.gather(*map(take_part, lives(fleet)))
    assert seen == dict.fromkeys(NAMES, NAMES)
    await fleet.end()


async def test_peers_with_equal_seeds_send_no_model_when_they_start():
    fleet, _ = await started([1.0, 1.0, 1.0, 1.0], "ad_psgd")
    assert [fleet.warnings(name) for name in NAMES] == [[], [], [], []]
    await fleet.end()


@pytest.mark.parametrize("seed", range(5))
async def test_eager_peers_have_one_model_at_every_version_from_the_first_step(seed: int):
    fleet, replicas = await started([1.0, 2.0, 3.0, 4.0], "eager", seed)
    seen: dict[str, list[bytes]] = {name: [] for name in NAMES}
    for name, replica in replicas.items():
        remember_models(replica, seen[name])
    await asyncio.gather(*(train(life, Random(f"{seed}/{life.name}")) for life in lives(fleet)))
    versions = min(map(len, seen.values()))
    assert versions > 30
    for version in range(versions):
        assert len({models[version] for models in seen.values()}) == 1, f"version {version}"
    await fleet.end()


def lives(fleet: Fleet) -> list[PeerLifecycle]:
    return list(fleet.lives.values())


def remember_models(replica: VectorReplica, seen: list[bytes]) -> None:
    """Keep the model as it is before each update."""
    honest = replica.update

    def update(optimizer_step) -> None:
        seen.append(replica.live.tobytes())
        honest(optimizer_step)

    replica.update = update  # type: ignore[method-assign]


async def train(life: PeerLifecycle, rng: Random, steps: int = 60) -> None:
    replica = life.replica
    assert isinstance(replica, VectorReplica)
    life.begin()
    for _ in range(steps):
        await asyncio.sleep(rng.uniform(0, 0.01))
        replica.gradient = np.array([rng.uniform(-1, 1) for _ in range(3)], np.float32)
        await life.boundary.step(1, None, replica.descend)
    await life.boundary.end()


@pytest.mark.parametrize("after_s", [0.01, 0.02, 0.03, 0.05])
async def test_the_next_by_name_hands_its_model_over_if_the_first_dies(after_s: float):
    fleet, replicas = Fleet(algorithm="eager", peers=3), {}
    for number, name in enumerate(NAMES):
        replicas[name] = VectorReplica(np.full(3, number, np.float32))
        await fleet.listen(name, replicas[name])
    loop = asyncio.get_running_loop()
    joins = {name: loop.create_task(fleet.join(name, via="d")) for name in "dabc"}
    await asyncio.sleep(after_s)
    fleet.crash("a")
    joins.pop("a").cancel()
    await asyncio.gather(*joins.values())
    assert len({replicas[name].live.tobytes() for name in "bcd"}) == 1
    await fleet.end()


async def test_peers_begin_without_one_that_takes_no_model_over():
    fleet = Fleet(algorithm="eager", peers=3, join_timeout_s=5.0)
    for name in "abc":
        await fleet.listen(name, VectorReplica(np.zeros(3, np.float32)))
    loop = asyncio.get_running_loop()
    join = loop.create_task(fleet.join("a", "b"))
    await fleet.lives["c"].enter([fleet.lives["a"].address], 1.0)  # and then it hangs
    await join
    for name in "ab":
        assert fleet.warnings(name) == [
            "begins without those that did not take the model over in time: c",
        ]
    await fleet.end()


async def test_one_that_does_not_know_how_many_start_waits_for_the_founder():
    fleet = Fleet()
    await fleet.listen("b", VectorReplica(np.full(3, 2, np.float32)), peers=3)
    await fleet.listen("a", VectorReplica(np.full(3, 1, np.float32)))
    founder = asyncio.get_running_loop().create_task(fleet.join("b", via="b"))
    await asyncio.sleep(0.1)
    with pytest.raises(TransportError, match="there are: a, b; none of them is ready"):
        await fleet.join("a", via="b")
    founder.cancel()
    await fleet.end()


async def test_a_founder_begins_at_once_and_hands_its_model_to_who_comes():
    fleet = Fleet()
    own = VectorReplica(np.full(3, 1, np.float32))
    await fleet.listen("b", VectorReplica(np.full(3, 2, np.float32)))
    await fleet.listen("a", own)
    await fleet.join("b", via="b")
    assert fleet.lives["b"].driver.me.phase is Phase.TRAINING
    await fleet.join("a", via="b")
    assert own.live.tolist() == [2.0, 2.0, 2.0]
    await fleet.end()


# --- one that joins -------------------------------------------------------------------------------


class Net(nn.Module):
    """Trained and frozen parameters, buffers of both kinds."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Linear(4, 3).requires_grad_(False)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.head(self.norm(self.body(inputs)))
        return scores


BUFFERS = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
"""A trainer's forward pass changes its own."""


class Program:
    """A model, its optimizer and its replica."""

    def __init__(self, seed: int, kind: type[Optimizer] = Adam, **settings) -> None:
        self.model = Net(seed)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = kind(trained, **{"lr": 0.1, **settings})  # type: ignore[call-arg]
        self.replica = TorchReplica(self.model, self.optimizer)
        self._rng = torch.Generator().manual_seed(seed)

    async def step(self, life: PeerLifecycle) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 4, generator=self._rng)).square().mean().backward()
        await life.boundary.step(8, None, self.replica.optimizer_step)

    def state(self) -> dict[str, Tensor]:
        """Model, buffers, frozen parameters and moments."""
        moments = {
            f"{number}/{key}": torch.as_tensor(value)
            for number, entry in self.optimizer.state_dict()["state"].items()
            for key, value in entry.items()
        }
        return {k: v.clone() for k, v in {**self.model.state_dict(), **moments}.items()}


def assert_equal(some: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    assert some.keys() == others.keys()
    for name, tensor in some.items():
        assert torch.equal(tensor, others[name]), name


async def trained(fleet: Fleet, program: Program) -> PeerLifecycle:
    """The first of a swarm, three steps later."""
    life = await fleet.listen("a", program.replica)
    await life.join()
    life.begin()
    for _ in range(3):
        await program.step(life)
    return life


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "allreduce"])
async def test_a_joiner_has_the_moments_the_buffers_and_the_frozen_parts_of_its_donor(
    algorithm: str,
):
    fleet = Fleet(algorithm=algorithm)
    donor, joiner = Program(1), Program(2, lr=0.3)
    await trained(fleet, donor)
    await fleet.listen("b", joiner.replica)
    await fleet.join("b")
    assert_equal(joiner.state(), donor.state())
    assert len(joiner.optimizer.state) == 4, "it has moments, and before its first step"
    assert joiner.optimizer.param_groups[0]["lr"] == 0.3, "its own"
    assert fleet.warnings("b") == ["took over the model of a"]
    await fleet.end()


async def test_a_joiner_under_allreduce_has_the_moments_of_the_others_after_its_first_average():
    fleet = Fleet(algorithm="allreduce")
    first, joiner = Program(1), Program(2)
    programs = {"a": first, "b": joiner}
    life = await trained(fleet, first)
    await fleet.listen("b", joiner.replica)
    await fleet.join("b")
    fleet.lives["b"].begin()
    for _ in range(2):
        await asyncio.gather(*(p.step(fleet.lives[name]) for name, p in programs.items()))
    assert_equal(joiner.state(), first.state())
    await life.boundary.end()
    await fleet.lives["b"].boundary.end()
    await fleet.end()


async def test_a_joiner_with_another_optimizer_takes_the_rest_over_and_says_so():
    fleet = Fleet(algorithm="ad_psgd")
    donor, joiner = Program(1), Program(2, SGD)
    await trained(fleet, donor)
    await fleet.listen("b", joiner.replica)
    await fleet.join("b")
    assert_equal(dict(joiner.model.state_dict()), dict(donor.model.state_dict()))
    assert not joiner.optimizer.state
    (said,) = fleet.warnings("b")
    assert said.startswith("took over the model of a, without its optimizer's state: ")
    assert said.endswith("its optimizer is 'Adam', this replica's is 'SGD'")
    await fleet.end()


async def test_a_joiner_with_other_frozen_parts_is_refused_by_their_name():
    fleet = Fleet(algorithm="ad_psgd")
    donor, joiner = Program(1), Program(2)
    joiner.model.body = nn.Linear(5, 3).requires_grad_(False)
    joiner.replica = TorchReplica(joiner.model, joiner.optimizer)
    await trained(fleet, donor)
    await fleet.listen("b", joiner.replica)
    with pytest.raises(RefusedError, match=r"frozen body\.weight float32 \[3, 5\] instead of"):
        await fleet.join("b")
    await fleet.end()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
async def test_peers_that_start_together_begin_with_one_state_of_model_and_optimizer(
    algorithm: str,
):
    """Frozen parts, buffers and moments of an earlier run included."""
    fleet = Fleet(algorithm=algorithm, peers=2)
    first, second = Program(1), Program(2)
    for program in (first, second):
        program.model(torch.randn(8, 4)).sum().backward()
        program.optimizer.step()
    await fleet.listen("a", first.replica)
    await fleet.listen("b", second.replica)
    await fleet.join("a", "b")
    assert_equal(second.state(), first.state())
    await fleet.end()


class EagerFleet(Fleet):
    """Peers with Adam that step at their own speeds; what each has learned by each version."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed, algorithm="eager")
        self.programs = {name: Program(number) for number, name in enumerate(NAMES)}
        self.learned: dict[str, dict[int, dict[str, Tensor]]] = {name: {} for name in NAMES}
        self._seed = seed

    async def start(self, *names: str) -> None:
        for name in names:
            await self.listen(name, self.programs[name].replica, peers=len(names))
        await self.join(*names)

    async def train(self, name: str, steps: int) -> None:
        life, program, rng = self.lives[name], self.programs[name], Random(f"{name}{self._seed}")
        life.begin()
        for _ in range(steps):
            await asyncio.sleep(rng.uniform(0.01, 0.04))
            await program.step(life)
            state = {k: value for k, value in program.state().items() if k not in BUFFERS}
            self.learned[name][program.replica.version] = state
        await life.boundary.end()


@pytest.mark.parametrize("seed", range(4))
async def test_a_joiner_under_eager_is_equal_to_the_others_from_its_first_mean_on(seed: int):
    fleet = EagerFleet(seed)
    await fleet.start("a", "b", "c")
    training = [asyncio.ensure_future(fleet.train(name, 60)) for name in ("a", "b", "c")]
    await asyncio.sleep(0.5)
    await fleet.start("d")
    await fleet.train("d", 20)
    await asyncio.gather(*training)
    joined = fleet.learned["d"]
    common = [
        (version, name)
        for version in sorted(joined)[1:]
        for name in ("a", "b", "c")
        if version in fleet.learned[name]
    ]
    assert len(common) > 10
    assert max(joined) < 100, "before models are averaged for the first time"
    for version, name in common:
        assert_equal(joined[version], fleet.learned[name][version])
    await fleet.end()


async def test_a_joiner_under_eager_waits_for_one_that_has_had_the_means_before_its_first():
    fleet = EagerFleet()
    await fleet.start("a", "b")
    transfer = fleet.lives["a"].driver.state_transfer
    transfer.replica.version = 5
    await fleet.listen("d", fleet.programs["d"].replica)
    await fleet.join("d")
    asked = asyncio.ensure_future(fleet.lives["d"].driver.state_transfer.take_model(7))
    await asyncio.sleep(1.0)
    assert not asked.done()
    transfer.replica.version = 7
    assert await asked == "a"
    assert fleet.warnings("d")[1:] == ["took over the model of a"]
    assert fleet.programs["d"].replica.version == 7
    await fleet.end()


async def test_a_joiner_under_eager_goes_on_if_the_others_are_done_before_its_first_mean():
    fleet = EagerFleet()
    await fleet.start("a")
    await fleet.train("a", 3)
    await fleet.listen("d", fleet.programs["d"].replica)
    await fleet.join("d")
    assert await fleet.lives["d"].driver.state_transfer.take_model(7) is None
    assert fleet.warnings("d")[1:] == [
        "goes on without the means before version 7: could not take over the model of a: "
        "a has not come to version 7"
    ]
    await fleet.end()


async def test_a_joiner_under_eager_goes_on_if_the_others_are_gone_before_its_first_mean():
    fleet = EagerFleet()
    await fleet.start("a")
    await fleet.train("a", 3)
    await fleet.start("d")
    pending = fleet.lives["d"].driver.averages.pending
    fleet.crash("a")
    await asyncio.sleep(10.0)
    assert fleet.lives["d"].driver.machine.membership.donors() == ()
    assert pending.is_newcomer
    await fleet.train("d", 3)
    assert fleet.programs["d"].replica.version >= 3
    assert not pending.is_newcomer
    await fleet.end()
