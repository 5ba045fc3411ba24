"""Gradients as one vector: the mean over the contributors, the same bits for everybody."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from p2ptrain.compute.torch_replica import TorchReplica
from p2ptrain.errors import StateError
from p2ptrain.runtime.agreed_state import union


class Branches(nn.Module):
    """A parameter that every batch uses, one that some use, one that none uses, and statistics."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.always = nn.Parameter(torch.ones(2, dtype=dtype))
        self.sometimes = nn.Parameter(torch.ones((), dtype=dtype))
        self.never = nn.Parameter(torch.ones(3, dtype=dtype))
        self.register_buffer("statistics", torch.zeros(2))


def peer(dtype=torch.float32):
    model = Branches(dtype)
    return model, TorchReplica(model, torch.optim.SGD(model.parameters(), lr=0.1))


def group_mean(replicas, weights):
    """The group's mean and mask, to be imported."""
    parts = np.empty((len(replicas), replicas[0].gradient_size), np.float32)
    for replica, part, weight in zip(replicas, parts, weights, strict=True):
        replica.export_gradients(part, weight)
    total = parts.sum(axis=0, dtype=np.float32) / np.float32(sum(weights) or 1)
    return total, union(r.gradient_mask() for r, w in zip(replicas, weights, strict=True) if w)


def test_the_vector_holds_gradients_and_buffers_times_the_weight():
    model, replica = peer()
    model.always.grad = torch.tensor([1.0, 2.0])
    model.statistics.fill_(7)
    into = np.full(replica.gradient_size, np.nan, np.float32)
    replica.export_gradients(into, 3)
    assert into.tolist() == [3, 6, 0, 0, 0, 0, 21, 21]
    assert replica.buffer_size == 2
    assert replica.gradient_mask() == b"\x01"
    replica.export_gradients(into, 0)
    assert not into.any()


def test_gradients_become_the_mean_over_the_contributors():
    (a, ra), (b, rb), (c, rc) = peer(), peer(), peer()
    a.always.grad = torch.tensor([1.0, 2.0])
    b.always.grad = torch.tensor([3.0, 6.0])
    c.always.grad = torch.tensor([torch.nan, torch.inf])  # overflowed: it has no say
    b.sometimes.grad = torch.tensor(8.0)
    mean = group_mean([ra, rb, rc], [1, 1, 0])
    for model, replica in ((a, ra), (b, rb), (c, rc)):
        replica.import_gradients(*mean)
        assert model.always.grad.tolist() == [2.0, 4.0]
        assert model.sometimes.grad.item() == 4.0
        assert model.never.grad is None


def test_a_gradient_that_only_a_peer_without_a_say_has_is_dropped():
    (a, ra), (b, rb) = peer(), peer()
    a.always.grad = torch.ones(2)
    b.never.grad = torch.ones(3)
    mean = group_mean([ra, rb], [1, 0])
    rb.import_gradients(*mean)
    assert b.never.grad is None
    assert b.always.grad.tolist() == [1, 1]


def test_buffers_become_the_contributors_mean_for_everybody():
    peers = [peer() for _ in range(3)]
    for value, (model, _) in zip((1.0, 2.0, 100.0), peers, strict=True):
        model.statistics.fill_(value)
        model.always.grad = torch.ones(2)
    mean = group_mean([replica for _, replica in peers], [1, 1, 0])
    for model, replica in peers:
        replica.import_gradients(*mean)
        assert model.statistics.tolist() == [1.5, 1.5]


def test_all_peers_hold_the_same_bits_afterwards():
    peers = [peer() for _ in range(7)]
    rng = torch.Generator().manual_seed(0)
    for model, _ in peers:
        model.always.grad = torch.randn(2, generator=rng)
        model.statistics.copy_(torch.randn(2, generator=rng))
    mean = group_mean([replica for _, replica in peers], [n % 3 for n in range(7)])
    for model, replica in peers:
        replica.import_gradients(*mean)
        assert torch.equal(model.always.grad, peers[0][0].always.grad)
        assert torch.equal(model.statistics, peers[0][0].statistics)


def test_each_sample_weighs_the_same_in_gradients_and_buffers():
    (a, ra), (b, rb) = peer(), peer()
    a.always.grad, b.always.grad = torch.tensor([1.0, 4.0]), torch.tensor([5.0, 8.0])
    a.statistics.fill_(10)
    b.statistics.fill_(2)
    mean = group_mean([ra, rb], [8, 24])
    for model, replica in ((a, ra), (b, rb)):
        replica.import_gradients(*mean)
        assert model.always.grad.tolist() == [4.0, 7.0]
        assert model.statistics.tolist() == [4.0, 4.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_gradients_are_averaged_through_float32(dtype):
    (a, ra), (b, rb) = peer(dtype), peer(dtype)
    a.always.grad = torch.tensor([60_000.0, 1.0], dtype=dtype)
    b.always.grad = torch.tensor([60_000.0, 2.0], dtype=dtype)  # the sum is beyond float16
    expected = a.always.grad.tolist()[0]
    mean = group_mean([ra, rb], [1, 1])
    ra.import_gradients(*mean)
    assert a.always.grad.dtype == dtype
    assert a.always.grad.tolist() == [expected, 1.5]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_contributed_gradient_that_is_not_finite_is_refused_by_name(value):
    model, replica = peer()
    model.sometimes.grad = torch.tensor(value)
    into = np.ones(replica.gradient_size, np.float32)
    with pytest.raises(StateError, match="gradient of parameter sometimes is not finite"):
        replica.export_gradients(into, 1)
    assert not into.any()


def test_a_buffer_that_is_not_finite_is_refused_by_name():
    model, replica = peer()
    model.statistics[1] = torch.nan
    with pytest.raises(StateError, match="buffer statistics is not finite"):
        replica.export_gradients(np.empty(replica.gradient_size, np.float32), 1)


def test_a_sparse_gradient_is_refused_by_name():
    model = nn.Embedding(4, 2, sparse=True)
    replica = TorchReplica(model, torch.optim.SGD(model.parameters()))
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(StateError, match="gradient of parameter weight is sparse"):
        replica.export_gradients(np.empty(replica.gradient_size, np.float32), 1)


def test_a_mean_that_is_not_finite_is_not_applied():
    model, replica = peer()
    mean = np.ones(replica.gradient_size, np.float32)
    mean[0] = np.nan
    with pytest.raises(StateError, match="not finite"):
        replica.import_gradients(mean, b"\x07")
    assert model.always.grad is None


def test_a_mean_may_be_read_only_memory():
    model, replica = peer()
    mean = np.ones(replica.gradient_size, np.float32)
    mean.flags.writeable = False
    replica.import_gradients(mean, b"\x07")
    assert model.never.grad.tolist() == [1, 1, 1]


def test_a_group_of_one_keeps_its_gradients_bit_for_bit():
    model, replica = peer()
    model.always.grad = torch.tensor([0.1, 1 / 3])
    before = copy.deepcopy(model.always.grad)
    replica.import_gradients(*group_mean([replica], [64]))
    assert torch.equal(model.always.grad, before)


def test_averaged_gradients_train_like_one_peer_with_the_whole_batch():
    whole = nn.Linear(3, 1)
    halves = [copy.deepcopy(whole) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in halves]
    replicas = [TorchReplica(m, o) for m, o in zip(halves, optimizers, strict=True)]
    reference = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    for _ in range(5):
        reference.zero_grad()
        whole(inputs).square().mean().backward()
        reference.step()
        for n, (model, optimizer) in enumerate(zip(halves, optimizers, strict=True)):
            optimizer.zero_grad()
            model(inputs[4 * n : 4 * n + 4]).square().mean().backward()
        mean = group_mean(replicas, [1, 1])
        for replica, optimizer in zip(replicas, optimizers, strict=True):
            replica.import_gradients(*mean)
            replica.update(optimizer.step)
    assert torch.equal(halves[0].weight, halves[1].weight)
    assert torch.allclose(halves[0].weight, whole.weight, atol=1e-6)
