"""What people train with, under every algorithm: optimizers, clipping, schedules, bf16, momentum.

Three peers, the last one three times slower, fit a small network to points of a plane. Whatever is
averaged meanwhile, the mean of their models has learned it in the end.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from p2ptrain.averaging.base import known_algorithms, load_algorithm
from p2ptrain.compute.flat import load_vector
from p2ptrain.compute.torch_replica import TorchReplica
from p2ptrain.sim.loop import virtual_loop
from p2ptrain.sim.world import SimPeer, World
from tests.helpers.variants import options_of

ALGORITHMS = known_algorithms()
OF_MODELS = [name for name in ALGORITHMS if load_algorithm(name).averages == "models"]
PEERS = 3
STEPS = 40


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.05, momentum=0.8)


@dataclass(frozen=True)
class Recipe:
    """One way to train."""

    make: Callable[[nn.Module], Optimizer] = sgd
    clip: float | None = None
    batches: int = 1
    """Whose gradients are accumulated for one step."""

    halves_rate: bool = False
    autocast: bool = False
    average_momentum: bool = False


def adam(model: nn.Module) -> Optimizer:
    return Adam(model.parameters(), lr=0.01)


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=0.01)


RECIPES = {
    "sgd, clipping": Recipe(clip=0.5),
    "adam, bf16": Recipe(adam, autocast=True),
    "adamw, accumulation, schedule": Recipe(adamw, batches=2, halves_rate=True),
}
WITH_MOMENTUM = {
    "sgd": Recipe(average_momentum=True),
    "adamw": Recipe(adamw, average_momentum=True),
}


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))


def error_of(model: nn.Module, points: torch.Tensor) -> torch.Tensor:
    wanted = (points[:, :1] * 2 - points[:, 1:]).sin()
    return nn.functional.mse_loss(model(points).float(), wanted)


def gradients_of(model: nn.Module, recipe: Recipe, chance: torch.Generator) -> float:
    for _ in range(recipe.batches):
        points = torch.rand(16, 2, generator=chance)
        with torch.autocast("cpu", torch.bfloat16, enabled=recipe.autocast):
            loss = error_of(model, points) / recipe.batches
        loss.backward()
    return loss.item()


async def trained(algorithm: str, recipe: Recipe) -> list[TorchReplica]:
    """All peers' replicas after `STEPS` steps of each."""
    world, replicas = World(seed=1), []
    recipes: dict[str, tuple[nn.Module, Optimizer]] = {}
    for rank in range(PEERS):
        model = network()
        optimizer = recipe.make(model)
        replica = TorchReplica(model, optimizer, average_momentum=recipe.average_momentum)
        recipes[f"p{rank}"] = model, optimizer
        replicas.append(replica)
        few = {"density": 0.3} if "density" in options_of(algorithm) else {}  # of 60 steps
        await world.add(f"p{rank}", replica, algorithm, **few)

    async def trainer(peer: SimPeer) -> None:
        name = peer.driver.name
        model, optimizer = recipes[name]
        replica = peer.replica
        schedule = LambdaLR(optimizer, lambda step: 0.5 if recipe.halves_rate and step > 30 else 1)
        chance = torch.Generator().manual_seed(ord(name[-1]))
        peer.lifecycle.begin()
        for _ in range(STEPS):
            await virtual_loop().work(0.3 if name == "p2" else 0.1)
            await peer.boundary.finish_update()
            loss = gradients_of(model, recipe, chance)
            update = partial(replica.optimizer_step, recipe.clip)
            await peer.boundary.step(16, loss, update, clip=recipe.clip)
            optimizer.zero_grad()
            schedule.step()
        await peer.boundary.end()

    await world.run(trainer)
    await world.close()
    return replicas


def mean_error(replicas: list[TorchReplica]) -> float:
    """Of the mean of all models, on points that nobody trained on."""
    rows = [np.empty(replica.model_size, np.float32) for replica in replicas]
    for replica, row in zip(replicas, rows, strict=True):
        replica.snapshot(row)
    model = network()
    load_vector(model, np.mean(rows, axis=0)[: replicas[0].saved_size])
    with torch.no_grad():
        return error_of(
            model, torch.rand(500, 2, generator=torch.Generator().manual_seed(0))
        ).item()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
async def test_the_mean_learns_under_every_algorithm(algorithm: str, recipe: str):
    begun = mean_error([TorchReplica(model := network(), sgd(model))])
    assert mean_error(await trained(algorithm, RECIPES[recipe])) < 0.4 * begun


@pytest.mark.parametrize("recipe", WITH_MOMENTUM)
@pytest.mark.parametrize("algorithm", OF_MODELS)
async def test_the_mean_learns_where_momentum_is_averaged_too(algorithm: str, recipe: str):
    begun = mean_error([TorchReplica(model := network(), sgd(model))])
    replicas = await trained(algorithm, WITH_MOMENTUM[recipe])
    assert replicas[0].model_size > replicas[0].saved_size
    assert mean_error(replicas) < 0.4 * begun
