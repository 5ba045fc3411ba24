"""TorchReplica: the boundary, under every optimizer and under threads."""

import threading

import numpy as np
import pytest
import torch
from torch import nn

from p2ptrain.compute.torch_replica import TorchReplica
from p2ptrain.errors import StateError
from tests.helpers.accelerator import KIND, needs_accelerator

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


def network(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))


def forward_backward(model, optimizer, step):
    inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad(set_to_none=True)
    model(inputs).square().mean().backward()


def snapshot(replica):
    into = np.empty(replica.model_size, np.float32)
    replica.snapshot(into)
    return into


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("is_older", [True, False])
def test_any_optimizer_trains_as_without_a_replica(kind, is_older):
    plain, flat = network(), network()
    plain_optimizer = OPTIMIZERS[kind](plain.parameters())
    if is_older:
        optimizer = OPTIMIZERS[kind](flat.parameters())
        forward_backward(flat, optimizer, 0)
        optimizer.step()  # its state exists before the replica does
        replica = TorchReplica(flat, optimizer)
    else:
        replica = TorchReplica(flat, torch.optim.SGD(flat.parameters(), lr=1))
        optimizer = OPTIMIZERS[kind](flat.parameters())
        forward_backward(flat, optimizer, 0)
        replica.update(optimizer.step)
    forward_backward(plain, plain_optimizer, 0)
    plain_optimizer.step()
    for step in range(1, 4):
        forward_backward(plain, plain_optimizer, step)
        plain_optimizer.step()
        forward_backward(flat, optimizer, step)
        replica.update(optimizer.step)
    for mine, theirs in zip(flat.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def test_an_optimizer_over_another_module_is_refused():
    with pytest.raises(StateError, match="none of the parameters of Linear"):
        TorchReplica(nn.Linear(1, 1), torch.optim.SGD(nn.Linear(1, 1).parameters()))


def test_an_update_counts_and_takes_pending_in_after_the_optimizer():
    model = nn.Linear(1, 1, bias=False)
    replica = TorchReplica(model, torch.optim.SGD(model.parameters()))
    replica.add_delta(np.ones(1, np.float32))
    replica.update(lambda: model.weight.data.fill_(5))
    assert model.weight.item() == 6
    assert replica.updates == 1
    assert replica.snapshot(np.empty(1, np.float32)) == 1


def test_settling_takes_pending_in_and_counts_no_update():
    model = nn.Linear(1, 1, bias=False)
    replica = TorchReplica(model, torch.optim.SGD(model.parameters()))
    model.weight.data.fill_(0)
    replica.add_delta(np.ones(1, np.float32))
    replica.settle()
    assert (model.weight.item(), replica.updates) == (1, 0)


def test_a_replaced_storage_is_refused_before_anything_changes():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = TorchReplica(model, optimizer)
    forward_backward(model, optimizer, 0)
    replica.add_delta(np.ones(replica.model_size, np.float32))
    last = model[3].weight.detach().clone()
    model[0].weight.data = model[0].weight.data.clone()
    for boundary in (lambda: replica.update(optimizer.step), replica.settle):
        with pytest.raises(StateError, match=r"0\.weight"):
            boundary()
    assert torch.equal(model[3].weight, last)
    assert replica.updates == 0


def test_an_optimizer_that_raises_counts_no_update_and_releases_the_lock():
    model = nn.Linear(1, 1, bias=False)
    replica = TorchReplica(model, torch.optim.SGD(model.parameters()))
    model.weight.data.fill_(0)
    replica.add_delta(np.ones(1, np.float32))
    with pytest.raises(ZeroDivisionError):
        replica.update(lambda: 1 / 0)
    assert replica.updates == 0
    assert model.weight.item() == 0
    assert snapshot(replica).tolist() == [1]


def test_a_snapshot_from_another_thread_is_never_torn():
    model = nn.ParameterList(torch.zeros(2_000) for _ in range(4))
    replica = TorchReplica(model, torch.optim.SGD(model.parameters()))
    done = threading.Event()

    def optimizer_step():
        for parameter in model:  # several pieces, so that a torn copy would show
            parameter.data.add_(1)

    def train():
        for _ in range(300):
            replica.update(optimizer_step)
        done.set()

    def deliver():
        while not done.is_set():
            replica.add_delta(np.full(replica.model_size, 0.5, np.float32))

    threads = [threading.Thread(target=train), threading.Thread(target=deliver)]
    for thread in threads:
        thread.start()
    into = np.empty(replica.model_size, np.float32)
    updates_seen, torn = [], 0
    while not done.is_set():
        updates_seen.append(replica.snapshot(into))
        torn += len(np.unique(into)) > 1
    for thread in threads:
        thread.join()
    assert torn == 0
    assert updates_seen == sorted(updates_seen)
    assert replica.updates == 300


def test_a_delta_does_not_wait_for_the_optimizer():
    model = nn.Linear(1, 1, bias=False)
    replica = TorchReplica(model, torch.optim.SGD(model.parameters()))
    model.weight.data.fill_(0)

    def optimizer_step():
        thread = threading.Thread(target=replica.add_delta, args=(np.ones(1, np.float32),))
        thread.start()
        thread.join(timeout=10)
        assert not thread.is_alive()

    replica.update(optimizer_step)
    assert model.weight.item() == 1


def test_the_deltas_of_one_group_leave_the_mean_of_its_members_as_it_was():
    replicas = []
    for seed in range(4):
        model = network(seed)
        replicas.append(TorchReplica(model, torch.optim.SGD(model.parameters())))
    before = [snapshot(replica) for replica in replicas]
    mean = np.mean(before, axis=0, dtype=np.float64).astype(np.float32)
    for replica, own in zip(replicas, before, strict=True):
        replica.add_delta(mean - own)
        replica.settle()
    for replica in replicas:
        assert np.allclose(snapshot(replica), mean, atol=1e-6)


@needs_accelerator
def test_a_replica_on_a_gpu_trains_exchanges_and_hands_over_its_state():
    peers = []
    for seed in (1, 2):
        model = network(seed).to(KIND)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        peers.append((model, optimizer, TorchReplica(model, optimizer)))
    (giver, optimizer, replica), (_, _, taker) = peers
    giver(torch.ones(8, 3, device=KIND)).square().mean().backward()
    gradients = np.empty(replica.gradient_size, np.float32)
    replica.export_gradients(gradients, 1)
    replica.import_gradients(gradients, replica.gradient_mask())
    replica.update(optimizer.step)
    taker.import_state(replica.export_state())
    assert snapshot(taker).tolist() == snapshot(replica).tolist()
    taker.settle()
