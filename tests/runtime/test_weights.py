"""Gradients weigh what they are of: unequal batches train like one process with all of them."""

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from p2ptrain.compute.torch_replica import TorchReplica
from p2ptrain.ids import PeerId
from p2ptrain.runtime.exchange import ExchangeConfig
from p2ptrain.sim.loop import virtual_loop
from p2ptrain.sim.world import SimPeer, World

BATCHES = {"p0": 8, "p1": 8, "p2": 8, "p3": 40}
STEPS, STEP_S = 50, 0.1

OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda model: SGD(model.parameters(), lr=0.05, momentum=0.9),
    "adam": lambda model: Adam(model.parameters(), lr=0.005),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of torch wait for each other by turning; where cores are short that takes minutes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def network(*first: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*first, nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))


def network_with_statistics() -> nn.Module:
    return network(nn.BatchNorm1d(6))


def batch(step: int, rows: slice) -> tuple[Tensor, Tensor]:
    """Some rows of what all peers together see in one step; a peer's differ from the others'."""
    rng = torch.Generator().manual_seed(step)
    inputs = torch.randn(sum(BATCHES.values()), 6, generator=rng)
    inputs += torch.linspace(-2, 2, len(inputs))[:, None]
    return inputs[rows], inputs[rows, :2].sin()


def rows_of(name: str) -> slice:
    start = sum(size for other, size in BATCHES.items() if other < name)
    return slice(start, start + BATCHES[name])


def backward(model: nn.Module, step: int, rows: slice, parts: int) -> None:
    """Gradients of the mean loss over `rows`, accumulated from so many uneven parts of them."""
    model.zero_grad()
    cuts = [rows.start, *range(rows.start + 1, rows.start + parts), rows.stop]
    for start, stop in pairwise(cuts):
        inputs, targets = batch(step, slice(start, stop))
        share = (stop - start) / (rows.stop - rows.start)
        (share * (model(inputs) - targets).square().mean()).backward()


def numbers(model: nn.Module) -> np.ndarray:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).double().numpy()


def trained_alone(optimizer: str = "sgd", make: Callable[[], nn.Module] = network) -> nn.Module:
    model = make()
    steps = OPTIMIZERS[optimizer](model)
    for step in range(STEPS):
        backward(model, step, slice(0, sum(BATCHES.values())), 1)
        steps.step()
    return model


async def trained_together(
    algorithm: str,
    optimizer: str = "sgd",
    parts: int = 1,
    codec: str = "fp32",
    make: Callable[[], nn.Module] = network,
    **options: object,
) -> list[nn.Module]:
    world = World(exchange=ExchangeConfig(gradient_codec=codec))
    models = {name: make() for name in BATCHES}
    for name, model in models.items():
        replica = TorchReplica(model, OPTIMIZERS[optimizer](model))
        await world.add(name, replica, algorithm, **options)  # type: ignore[arg-type]

    async def train(peer: SimPeer) -> None:
        name, replica = peer.driver.name, peer.replica
        assert isinstance(replica, TorchReplica)
        peer.boundary.begin()
        for step in range(STEPS):
            backward(models[name], step, rows_of(name), parts)
            await virtual_loop().work(STEP_S)
            await peer.boundary.step(BATCHES[name], None, replica.optimizer_step)
        await peer.boundary.end()

    await world.run(train)
    assert world.peers[PeerId("p0")].driver.agreed.progress == STEPS * sum(BATCHES.values())
    await world.close()
    return list(models.values())


def off(model: nn.Module, expected: nn.Module) -> float:
    """How far parameters are apart, relative to their size."""
    ours, theirs = numbers(model), numbers(expected)
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


@pytest.mark.parametrize("parts", [1, 3], ids=["at once", "accumulated"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
async def test_unequal_batches_train_like_one_process_with_the_union(optimizer: str, parts: int):
    expected = trained_alone(optimizer)
    for ours in await trained_together("allreduce", optimizer, parts):
        assert off(ours, expected) < 1e-5


async def test_stale_gradients_that_are_all_in_time_do_so_too():
    expected = trained_alone()
    options = {"rule": "quorum", "quorum": 1.0, "average_models_every": 1000}
    for ours in await trained_together("eager", **options):
        assert off(ours, expected) < 1e-5


@pytest.mark.parametrize(
    ("codec", "within"), [("bf16", 0.02), ("fp16", 0.002), ("int8", 0.03), ("int4", 0.1)]
)
async def test_a_codec_of_gradients_rounds_and_leaves_all_peers_with_the_same_bits(
    codec: str, within: float
):
    expected = trained_alone()
    ours = await trained_together("allreduce", codec=codec)
    assert len({numbers(model).tobytes() for model in ours}) == 1
    assert 0 < off(ours[0], expected) < within


@pytest.mark.parametrize("codec", ["fp32", "int8", "int4"])
async def test_statistics_are_those_of_the_union_and_no_codec_rounds_them(codec: str):
    """Those of the inputs: they do not depend on parameters, which a codec changes a little."""
    make = network_with_statistics
    expected = trained_alone(make=make)[0].running_mean.numpy()
    for model in await trained_together("allreduce", codec=codec, make=make):
        np.testing.assert_allclose(model[0].running_mean.numpy(), expected, rtol=1e-5, atol=1e-6)
