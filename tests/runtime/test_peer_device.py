"""`Peer` whose model is on an accelerator, beside one on the host: real sockets, real threads.

On a machine without an accelerator a stand-in takes its place: this host, behind a lane.
"""

import copy

import pytest
import torch
from torch import nn

from p2ptrain.compute import flat, gradients
from p2ptrain.compute.staging import HostLane
from p2ptrain.errors import DeviceError
from p2ptrain.runtime.peer import Peer
from p2ptrain.runtime.settings import StopConfig
from tests.helpers.accelerator import KIND, NEEDS_ONE, needs_accelerator
from tests.runtime.test_peer import (  # noqa: F401 - nothing_is_left is a fixture
    ALGORITHMS,
    CLOCK,
    Fleet,
    nothing_is_left,
    peer_of,
)

pytestmark = pytest.mark.sockets

STEPS = 12
WIDTH = 32
IN_STEP = ("allreduce", "dear", "ok_topk", "powersgd", "topk")
ALIKE = {"rtol": 1e-4, "atol": 1e-5}
"""An update of a device differs from that of the host in its last bits."""


@pytest.fixture(params=["stand-in", pytest.param("accelerator", marks=NEEDS_ONE)])
def far(request, monkeypatch) -> torch.device:
    """Where the first peer of a fleet has its model."""
    if request.param == "accelerator":
        return torch.device(KIND, 0)
    for module in (flat, gradients):
        monkeypatch.setattr(module, "is_far", lambda _: True)
        monkeypatch.setattr(module, "lane_of", lambda _: HostLane())
    return torch.device("cpu")


def net(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 4)]
    return nn.Sequential(*layers).to(device, dtype)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def backward(model: nn.Module, seed: int) -> torch.Tensor:
    """Gradients of a batch; the model may be on several devices."""
    weight = next(model.parameters())
    inputs = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))
    loss = model(inputs.to(weight.device, weight.dtype)).square().mean()
    model.zero_grad()
    loss.backward()
    return loss


def mixed_fleet(far: torch.device, dtype: torch.dtype = torch.float32, **settings) -> Fleet:
    """Its first peer is on the device, its second one on the host."""
    fleet = Fleet(2, **settings)
    models = [net(far, dtype), net("cpu", dtype)]
    fleet.models = [(model, adam(model)) for model in models]
    return fleet


def train(rank: int, peer: Peer, model: nn.Module) -> None:
    for step in range(STEPS):
        loss = backward(model, 100 * rank + step)
        peer.step(samples=8, loss=loss)


def averaged(fleet: Fleet, rank: int) -> bool:
    """Tell whether an average of this peer has ended well."""
    return any(record["outcome"] == "done" for record in fleet.metrics[rank].of("group"))


def run(fleet: Fleet, body=train) -> None:
    """Train to the end, without an error, and with averages of both."""
    assert fleet.run(body) == [None, None]
    for rank in range(fleet.count):
        assert averaged(fleet, rank)


def assert_alike(fleet: Fleet) -> None:
    """Both models are equal but for the last bits."""
    (one, _), (other, _) = fleet.models
    for ours, theirs in zip(one.state_dict().values(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs.cpu(), **ALIKE)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_under_every_algorithm_a_device_and_a_host_train_one_model(algorithm, far):
    options = {"period": 4} if algorithm in ("diloco", "noloco") else {}
    fleet = mixed_fleet(far, algorithm=algorithm, algorithm_options=options)
    fleet.settings["stop"] = StopConfig(samples=8 * 2 * STEPS)
    deadline = CLOCK() + 30

    def body(rank: int, peer: Peer, model: nn.Module) -> None:
        """All samples of the run, and more while steps are faster than the first average."""
        step = 0
        while not (peer.should_stop and averaged(fleet, rank)) and CLOCK() < deadline:
            backward(model, 100 * rank + step)
            peer.step(samples=8)
            step += 1

    run(fleet, body)
    for device, (model, optimizer) in zip((far, torch.device("cpu")), fleet.models, strict=True):
        assert {p.device for p in model.parameters()} == {device}
        assert all(p.isfinite().all() for p in model.parameters())
        moments = [state["exp_avg"] for state in optimizer.state.values()]
        assert {moment.device for moment in moments} <= {device}
    if algorithm in IN_STEP:
        assert_alike(fleet)


@pytest.mark.parametrize("way", ["backward", "dear"])
def test_gradients_of_a_device_travel_behind_its_passes(way, far):
    options = {"bucket_mib": 0.001} | ({"overlap": "backward"} if way == "backward" else {})
    algorithm = "dear" if way == "dear" else "allreduce"
    fleet = mixed_fleet(far, algorithm=algorithm, algorithm_options=options)
    run(fleet)
    assert_alike(fleet)
    groups = fleet.metrics[0].of("group")
    assert sum(record["overlap_s"] is not None for record in groups) >= STEPS - 1


def test_a_gradient_scaler_of_the_device_gives_all_the_same_update(far):
    fleet = mixed_fleet(far, algorithm="allreduce")

    def body(rank: int, peer: Peer, model: nn.Module) -> None:
        scaler = torch.amp.GradScaler((far if rank == 0 else torch.device("cpu")).type, 2.0**10)
        for step in range(STEPS):
            inputs = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
            weight = next(model.parameters())
            loss = model(inputs.to(weight.device)).square().mean()
            model.zero_grad()
            scaler.scale(loss).backward()
            peer.step(samples=8, scaler=scaler)

    run(fleet, body)
    assert_alike(fleet)


@pytest.mark.parametrize("algorithm", ["ad_psgd", "allreduce"])
def test_bfloat16_of_a_device_keeps_its_rest_in_float32(algorithm, far):
    fleet = mixed_fleet(far, torch.bfloat16, algorithm=algorithm)

    def body(rank: int, peer: Peer, model: nn.Module) -> None:
        train(rank, peer, model)
        state = peer.state_dict()
        assert {v.dtype for v in state.values() if v.is_floating_point()} == {torch.float32}

    run(fleet, body)
    assert {p.dtype for model, _ in fleet.models for p in model.parameters()} == {torch.bfloat16}


def test_a_model_that_is_split_over_a_device_and_the_host_averages(far):
    class Split(nn.Module):
        """Its first half is on the device, its second one on the host."""

        def __init__(self) -> None:
            super().__init__()
            whole = net()
            self.first, self.second = whole[:2].to(far), whole[2:]

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(inputs).cpu())

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            whole = net()
            self.first, self.second = whole[:2], whole[2:]

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(inputs))

    fleet = Fleet(2, algorithm="allreduce")
    fleet.models = [(model, adam(model)) for model in (Split(), Whole())]
    run(fleet)
    assert_alike(fleet)
    assert {p.device for p in fleet.models[0][0].first.parameters()} == {far}


def test_a_newcomer_on_a_device_takes_over_model_and_moments_of_one_on_the_host(far):
    model, other = net(), net(far)
    with torch.no_grad():
        other[0].weight.mul_(3)
    optimizer, theirs = adam(model), adam(other)
    with peer_of(model, optimizer, name="p0") as first:
        for step in range(3):
            backward(model, step)
            first.step(samples=8)
        with peer_of(other, theirs, name="p1", join=[first.address]):
            for ours, taken in zip(model.parameters(), other.parameters(), strict=True):
                torch.testing.assert_close(taken.cpu(), ours, rtol=0, atol=0)
                assert taken.device == far
                moments = theirs.state[taken]
                assert moments["exp_avg"].device == far
                torch.testing.assert_close(
                    moments["exp_avg"].cpu(), optimizer.state[ours]["exp_avg"], rtol=0, atol=0
                )


@pytest.mark.parametrize("comes_back_on", ["the device", "the host"])
def test_a_checkpoint_of_a_device_goes_on_there_and_on_the_host(comes_back_on, far, tmp_path):
    folder = {"name": "p0", "checkpoint": str(tmp_path)}
    model = net(far)
    optimizer = adam(model)
    with peer_of(model, optimizer, **folder) as peer:
        for step in range(3):
            backward(model, step)
            peer.step(samples=8)
    other = net(far if comes_back_on == "the device" else "cpu")
    with torch.no_grad():
        other[0].weight.zero_()
    with peer_of(other, adam(other), **folder, resume=True) as peer:
        assert peer.progress == 24
        for ours, taken in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(taken.cpu(), ours.cpu(), rtol=0, atol=0)
        backward(other, 4)
        peer.step(samples=8)


def test_a_copy_of_the_model_stays_on_its_device_when_the_peer_has_ended(far):
    model = net(far)
    with peer_of(model, adam(model), name="p0") as peer:
        backward(model, 1)
        peer.step(samples=8)
    twin = copy.deepcopy(model)
    assert {p.device for p in twin.parameters()} == {far}
    assert {v.device for v in model.state_dict().values()} == {far}


@pytest.mark.skipif(KIND != "cuda", reason="needs CUDA, which can limit a process")
@needs_accelerator
def test_a_device_without_room_for_a_delta_ends_its_peer_in_a_sentence_and_the_other_goes_on():
    device, size = torch.device(KIND, 0), 1 << 24

    def large(where: torch.device | str) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(size, 1, bias=False).to(where)
        model.weight.grad = torch.zeros_like(model.weight)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    fleet = Fleet(2, algorithm="ad_psgd")
    fleet.models = [large(device), large("cpu")]

    def body(rank: int, peer: Peer, model: nn.Module) -> str:
        if rank == 0:
            torch.cuda.empty_cache()
            total = torch.cuda.get_device_properties(device).total_memory
            left = torch.cuda.memory_reserved(device) + size
            torch.cuda.set_per_process_memory_fraction(left / total, device)
        deadline = CLOCK() + 30
        while CLOCK() < deadline and (rank == 0 or not fleet.peers[0].should_stop):
            peer.step(samples=8)
        return "it went on"

    try:
        failed, went_on = fleet.run(body)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    assert isinstance(failed, DeviceError)
    assert str(failed).startswith("no memory is left (")
    assert went_on == "it went on"
