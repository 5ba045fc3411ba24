"""Peers in step whose batches follow their speeds: equal step times, and the same mean."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from p2ptrain.compute.torch_replica import TorchReplica
from p2ptrain.core.contribution import SPEED_S
from p2ptrain.errors import ConfigError
from p2ptrain.ids import PeerId
from p2ptrain.runtime.batches import LEAST, WINDOW, Batches
from p2ptrain.runtime.peer import Peer
from p2ptrain.sim.loop import virtual_loop
from p2ptrain.sim.replica import VectorReplica
from p2ptrain.sim.world import SimPeer, World
from tests.helpers.worlds import build

USUAL, STEPS = 15, 40
SAMPLE_S = {"p0": 0.08, "p1": 0.04, "p2": 0.02, "p3": 0.01}
IN_STEP = ["allreduce", "dear", "topk"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of torch wait for each other by turning; where cores are short that takes long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Diary:
    """What a swarm did: the batch of each step of each peer, and how many were in each average."""

    def __init__(self, fixed_s: float = 0.0) -> None:
        self.fixed_s = fixed_s
        self.batches: dict[PeerId, list[int]] = {}
        self.computed_s: dict[PeerId, list[float]] = {}
        self.averages: list[tuple[int, int]] = []
        """Of p3: the members and the samples of each."""

    async def train(self, peer: SimPeer) -> None:
        name = peer.driver.name
        peer.lifecycle.begin()
        for step in range(peer.steps_before, STEPS):
            samples = peer.lifecycle.batch_size(USUAL)
            step_s = self.fixed_s + samples * SAMPLE_S[name]
            await peer.pass_through(step_s, lambda: self._set_gradient(peer))
            await peer.boundary.step(samples, None, peer.replica.descend)
            self.batches.setdefault(name, []).append(samples)
            self.computed_s.setdefault(name, []).append(step_s)
            if name == "p3":
                stated = peer.driver.batches.stated
                self.averages.append((len(stated), sum(one.usual for one in stated)))
            self.after_step(peer, step)
        await peer.boundary.end()

    def after_step(self, peer: SimPeer, step: int) -> None:
        pass

    def _set_gradient(self, peer: SimPeer) -> None:
        if isinstance(peer.replica, VectorReplica):
            peer.replica.gradient = np.ones_like(peer.replica.live)


@pytest.mark.parametrize("algorithm", IN_STEP)
async def test_slow_peers_get_less_until_all_steps_last_equally_long(algorithm: str):
    world, diary = await build(4, algorithm, equal=True), Diary()
    await world.run(diary.train)
    await world.close()
    assert {name: sizes[0] for name, sizes in diary.batches.items()} == dict.fromkeys(SAMPLE_S, 15)
    assert {name: sizes[-1] for name, sizes in diary.batches.items()} == {
        "p0": 4,
        "p1": 8,
        "p2": 16,
        "p3": 32,
    }
    assert {seconds[-1] for seconds in diary.computed_s.values()} == {0.32}
    assert set(diary.averages) == {(4, 4 * USUAL)}


async def test_batches_change_once_where_speeds_stay_the_same():
    world, diary = await build(4, "allreduce", equal=True), Diary()
    await world.run(diary.train)
    await world.close()
    for sizes in diary.batches.values():
        assert sizes == [USUAL] * (LEAST + 1) + [sizes[-1]] * (STEPS - LEAST - 1)


async def test_a_fixed_part_of_each_step_is_found_without_swinging():
    world, diary = await build(4, "allreduce", equal=True), Diary(fixed_s=0.1)
    await world.run(diary.train)
    await world.close()
    assert diary.batches["p3"] == sorted(diary.batches["p3"])
    assert diary.batches["p0"] == sorted(diary.batches["p0"], reverse=True)
    last = [seconds[-1] for seconds in diary.computed_s.values()]
    assert max(last) <= 0.42 / 0.9 + 0.08, "0.42 s, the threshold, and one sample"
    assert set(diary.averages) == {(4, 4 * USUAL)}


async def test_who_leaves_takes_its_share_along_and_who_comes_back_brings_it():
    world, diary = await build(4, "allreduce", equal=True), Diary()

    def after_step(peer: SimPeer, step: int) -> None:
        if peer.driver.name == "p3" and step == 12:
            world.crash("p1")
            virtual_loop().call_later(4.0, lambda: backs.append(comes_back()))

    def comes_back():
        return virtual_loop().create_task(world.restart("p1"))

    backs: list = []
    diary.after_step = after_step
    await world.run(diary.train)
    await world.close()
    assert len(backs) == 1
    seen = [members for members, _ in diary.averages]
    assert sorted(set(seen)) == [3, 4]
    assert seen[0] == seen[-1] == 4
    odd = [i for i, (members, samples) in enumerate(diary.averages) if samples != members * USUAL]
    changes = [i for i in range(1, STEPS) if seen[i] != seen[i - 1]]
    assert len(changes) == 2
    assert set(odd) <= set(changes), "the first average of others, whose steps had begun before"
    of_p3 = diary.batches[PeerId("p3")]
    assert (of_p3[changes[0] - 1], of_p3[changes[0] + 1], of_p3[-1]) == (32, 28, 32)


async def test_a_swarm_in_which_nobody_asks_states_no_speeds():
    world = await build(2, "allreduce", equal=True)
    await world.train(2 * LEAST, lambda _: 0.1)
    stated = world.peers[PeerId("p0")].driver.batches.stated
    assert [one.speed for one in stated] == [0, 0]
    await world.close()


async def test_a_peer_that_does_not_ask_counts_as_one_of_usual_speed():
    world, sizes = await build(3, "allreduce", equal=True), []

    async def train(peer: SimPeer) -> None:
        name = peer.driver.name
        peer.lifecycle.begin()
        for _ in range(3 * LEAST):
            samples = USUAL if name == "p0" else peer.lifecycle.batch_size(USUAL)
            await peer.pass_through(samples * SAMPLE_S[name], lambda: None)
            await peer.boundary.step(samples, None, peer.replica.descend)
        sizes.append((name, samples))
        await peer.boundary.end()

    await world.run(train)
    await world.close()
    assert dict(sizes) == {"p0": 15, "p1": 10, "p2": 20}


# --- the mean -------------------------------------------------------------------------------------


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))


def data(step: int) -> tuple[Tensor, Tensor]:
    """What all peers together see in one step."""
    rng = torch.Generator().manual_seed(step)
    inputs = torch.randn(4 * USUAL, 6, generator=rng)
    inputs += torch.linspace(-2, 2, len(inputs))[:, None]
    return inputs, inputs[:, :2].sin()


def backward(model: nn.Module, step: int, rows: slice) -> None:
    model.zero_grad()
    inputs, targets = data(step)
    (model(inputs[rows]) - targets[rows]).square().mean().backward()


def numbers(model: nn.Module) -> np.ndarray:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).double().numpy()


async def test_batches_by_speed_train_like_one_process_with_the_one_big_batch():
    alone = network()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        backward(alone, step, slice(0, 4 * USUAL))
        optimizer.step()

    world, models = World(), {name: network() for name in SAMPLE_S}
    for name, model in models.items():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        await world.add(name, TorchReplica(model, optimizer), "allreduce")  # type: ignore[arg-type]

    async def train(peer: SimPeer) -> None:
        name = peer.driver.name
        peer.boundary.begin()
        for step in range(STEPS):
            others = (world.peers[PeerId(other)] for other in SAMPLE_S if other < name)
            start = sum(other.lifecycle.batch_size(USUAL) for other in others)
            samples = peer.lifecycle.batch_size(USUAL)
            backward(models[name], step, slice(start, start + samples))
            await virtual_loop().work(samples * SAMPLE_S[name])
            await peer.boundary.step(samples, None, peer.replica.optimizer_step)  # type: ignore[attr-defined]
        await peer.boundary.end()

    await world.run(train)
    assert world.peers[PeerId("p0")].driver.agreed.progress == STEPS * 4 * USUAL
    assert world.peers[PeerId("p3")].lifecycle.batch_size(USUAL) == 32
    await world.close()
    expected = numbers(alone)
    for model in models.values():
        assert np.linalg.norm(numbers(model) - expected) < 1e-5 * np.linalg.norm(expected)


# --- measuring, and refusals ----------------------------------------------------------------------


def measured(*steps: tuple[int, float], asks: bool = True) -> int:
    batches = Batches()
    if asks:
        batches.size(USUAL)
    for samples, compute_s in steps:
        batches.measure(samples, compute_s)
    return batches.speed


def test_a_speed_is_the_median_of_the_last_steps():
    assert measured(*[(16, 0.5)] * LEAST) == 32 * SPEED_S
    assert measured(*[(16, 0.5)] * (WINDOW - 2), (16, 30.0), (16, 0.001)) == 32 * SPEED_S
    assert measured(*[(16, 0.5)] * WINDOW, *[(16, 1.0)] * WINDOW) == 16 * SPEED_S


@pytest.mark.parametrize(
    "unknown",
    [
        lambda: measured(*[(16, 0.5)] * (LEAST - 1)),
        lambda: measured(*[(16, 0.5)] * LEAST, asks=False),
        lambda: measured(*[(0, 0.5), (16, 0.0)] * LEAST),
    ],
    ids=["too few steps", "its loop does not ask", "steps of nothing"],
)
def test_a_speed_that_is_not_known_is_not_stated(unknown: Callable[[], int]):
    assert unknown() == 0


def test_a_very_slow_peer_has_a_speed_all_the_same():
    assert measured(*[(1, 1e9)] * LEAST) == 1


def peer_of(algorithm: str) -> Peer:
    model = network()
    return Peer(model, torch.optim.SGD(model.parameters(), lr=0.1), algorithm=algorithm)


def test_a_program_may_ask_before_its_peer_has_joined():
    assert peer_of("allreduce").batch_size(32) == 32
    with pytest.raises(ConfigError, match="those of ad_psgd do not"):
        peer_of("ad_psgd").batch_size(32)


@pytest.mark.parametrize("wrong", [0, -1, 2.5, "32"])
def test_a_usual_batch_that_is_none_is_refused(wrong: object):
    with pytest.raises(ConfigError, match="usual"):
        peer_of("allreduce").batch_size(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("algorithm", ["ad_psgd", "wagma", "eager", "local_sgd", "d_psgd"])
async def test_where_peers_are_not_in_step_batches_are_not_divided(algorithm: str):
    world = await build(2, algorithm)
    with pytest.raises(ConfigError, match=f"those of {algorithm} do not; leave batches = 'equal'"):
        world.peers[PeerId("p0")].lifecycle.batch_size(USUAL)
    await world.close()
