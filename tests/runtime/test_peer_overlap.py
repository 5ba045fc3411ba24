"""`Peer` with gradients that travel behind its passes: real sockets, real threads, real hooks."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from p2ptrain.errors import ConfigError
from p2ptrain.runtime.exchange import ExchangeConfig
from p2ptrain.runtime.formed_group import FormedGroup
from tests.runtime.test_peer import Fleet, nothing_is_left, peer_of  # noqa: F401 - a fixture

pytestmark = pytest.mark.sockets

STEPS = 12
WAYS = {
    "allreduce": {"algorithm": "allreduce"},
    "backward": {
        "algorithm": "allreduce",
        "algorithm_options": {"overlap": "backward", "bucket_mib": 0.01},
    },
    "dear": {"algorithm": "dear", "algorithm_options": {"bucket_mib": 0.01}},
}


def net() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(48, 48), nn.Tanh())]
    model = nn.Sequential(*layers, nn.BatchNorm1d(48), nn.Linear(48, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def fleet_of(way: str) -> Fleet:
    fleet = Fleet(2, **WAYS[way])
    fleet.models = [net() for _ in range(2)]
    return fleet


def trained(way: str, steps: int = STEPS, **step) -> tuple[Fleet, list]:
    fleet = fleet_of(way)

    def body(rank: int, peer, model: nn.Module):
        data = torch.Generator().manual_seed(rank)
        schedule = StepLR(fleet.models[rank][1], 4, 0.5)
        seen = []
        for _ in range(steps):
            fleet.models[rank][1].zero_grad()
            model(torch.randn(8, 48, generator=data)).square().mean().backward()
            peer.step(samples=8, **step)
            schedule.step()
            seen.append({k: v.clone() for k, v in model.state_dict().items()})
        return seen

    return fleet, fleet.run(body)


def overlapped(fleet: Fleet) -> int:
    return min(
        sum(r["overlap_s"] is not None for r in metrics.of("group")) for metrics in fleet.metrics
    )


def are_equal(fleet: Fleet) -> bool:
    (one, _), (other, _) = fleet.models
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.fixture(scope="module")
def plain() -> list:
    return trained("allreduce")[1]


@pytest.mark.parametrize("way", ["backward", "dear"])
def test_every_state_dict_is_that_of_allreduce(way: str, plain: list):
    """Also in the middle of an update that is made piece by piece."""
    fleet, seen = trained(way)
    assert overlapped(fleet) == STEPS - 1
    for rank in range(2):
        for step in range(STEPS):
            for key, value in seen[rank][step].items():
                assert torch.equal(value, plain[rank][step][key]), (rank, step, key)


@pytest.mark.parametrize("way", ["backward", "dear"])
def test_the_model_after_the_end_has_the_last_update(way: str, plain: list):
    fleet = fleet_of(way)

    def body(rank: int, peer, model: nn.Module):
        data = torch.Generator().manual_seed(rank)
        schedule = StepLR(fleet.models[rank][1], 4, 0.5)
        for _ in range(STEPS):
            fleet.models[rank][1].zero_grad()
            model(torch.randn(8, 48, generator=data)).square().mean().backward()
            peer.step(samples=8)
            schedule.step()

    fleet.run(body)
    for rank, (model, _) in enumerate(fleet.models):
        for key, value in model.state_dict().items():
            assert torch.equal(value, plain[rank][-1][key]), key


def test_memory_of_means_is_given_back_once_whichever_of_two_threads_ends_last():
    """The trainer has made its update just before the group ends; its message comes afterwards."""
    given = []
    group = object.__new__(FormedGroup)
    group.exchange = SimpleNamespace(give_back=given.append)
    group.vector_V = np.zeros(3, np.float32)
    group._deferred, group._has_given_back = SimpleNamespace(is_made=True), False
    group._is_over, group._is_counted = True, False
    group._give_back()  # as `commit` does
    group._give_back()  # as the trainer has posted
    assert len(given) == 1


def test_an_evaluation_between_two_steps_sees_the_updated_model():
    inputs = torch.randn(16, 48, generator=torch.Generator().manual_seed(9))
    outputs = {}
    for way in ("allreduce", "dear"):
        fleet = fleet_of(way)

        def body(rank: int, peer, model: nn.Module):
            data, seen = torch.Generator().manual_seed(rank), []
            for _ in range(6):
                model.train()
                model.zero_grad()
                model(torch.randn(8, 48, generator=data)).square().mean().backward()
                peer.step(samples=8)
                model.eval()
                with torch.no_grad():
                    seen.append(model(inputs))
            return seen

        outputs[way] = fleet.run(body)
    for one, other in zip(outputs["allreduce"], outputs["dear"], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_copy_of_the_model_is_no_part_of_the_peer():
    fleet = fleet_of("dear")

    def body(rank: int, peer, model: nn.Module):
        for _ in range(3):
            model.zero_grad()
            model(torch.ones(8, 48)).square().mean().backward()
            peer.step(samples=8)
            peer.finish_update()
            twin = copy.deepcopy(model)
            twin(torch.ones(8, 48)).sum().backward()

    assert fleet.run(body) == [None, None]
    assert are_equal(fleet)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # says torch's compiler
@pytest.mark.parametrize("way", ["backward", "dear"])
def test_a_compiled_model_trains(way: str):
    fleet = fleet_of(way)

    def body(rank: int, peer, model: nn.Module):
        compiled = torch.compile(model, backend="eager")
        for _ in range(4):
            model.zero_grad()
            compiled(torch.ones(8, 48) * (1 + rank)).square().mean().backward()
            peer.step(samples=8)

    assert fleet.run(body) == [None, None]
    assert are_equal(fleet)


def test_an_optimizer_that_needs_a_closure_is_refused_in_a_sentence():
    model, _ = net()
    lbfgs = torch.optim.LBFGS(model.parameters())
    with pytest.raises(ConfigError, match="LBFGS computes gradients again within a step"):
        peer_of(model, lbfgs, **WAYS["dear"])


def test_gradients_cannot_travel_behind_a_pass_with_a_lossy_codec():
    model, optimizer = net()
    with pytest.raises(ConfigError, match="gradient_codec = 'bf16': dear with overlap"):
        peer_of(model, optimizer, exchange=ExchangeConfig(gradient_codec="bf16"), **WAYS["dear"])
