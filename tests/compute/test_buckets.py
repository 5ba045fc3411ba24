"""How a gradient is cut into buckets, and when torch's hooks call one final."""

import numpy as np
import pytest
import torch
from torch import nn

from p2ptrain.compute.buckets import bucket_size, cut
from p2ptrain.compute.torch_replica import TorchReplica


@pytest.mark.parametrize(
    ("sizes", "most", "groups"),
    [
        ([5, 5, 5, 5], 10, [(2, 4), (0, 2)]),
        ([5, 5, 5], 10, [(1, 3), (0, 1)]),
        ([100, 1, 1], 10, [(0, 3)]),
        ([1, 1, 100], 10, [(2, 3), (0, 2)]),
        ([0, 5, 0, 5, 0], 5, [(3, 5), (0, 3)]),
        ([0, 0, 7], 100, [(0, 3)]),
        ([3], 1, [(0, 1)]),
    ],
)
def test_buckets_are_cut_from_the_end_and_hold_whole_parameters(sizes, most, groups):
    found = [(group.start, group.stop) for group in cut(sizes, most)]
    assert found == groups
    assert sorted(i for start, stop in found for i in range(start, stop)) == [*range(len(sizes))]


def test_a_size_that_is_not_given_follows_from_the_model():
    assert bucket_size(10**9, 0) == 25 << 16
    assert bucket_size(1 << 24, 0) == 1 << 18
    assert bucket_size(1000, 0) == 1 << 14
    assert bucket_size(1000, 0.001) == 262


class Net(nn.Module):
    """With a parameter that has no numbers, and one that may go unused."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.empty = nn.Parameter(torch.empty(0))
        self.last = nn.Linear(4, 4)
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, inputs, *, uses_last=True):
        hidden = self.first(inputs) + self.empty.sum()
        return (self.last(hidden) if uses_last else hidden).sum() + self.nothing.sum()


@pytest.fixture
def net():
    module = Net()
    replica = TorchReplica(module, torch.optim.SGD(module.parameters(), 0.1))
    buckets = replica.buckets(1e-6)
    taken: list[int] = []
    vector_G = np.zeros(replica.gradient_size, np.float32)

    def backward(**how) -> bool:
        module.zero_grad()
        taken.clear()
        buckets.begin(vector_G, 1, taken.append)
        module(torch.ones(2, 4), **how).backward()
        return True

    yield module, buckets, taken, backward
    replica.release()


def test_a_bucket_is_taken_when_all_of_its_gradients_are_there(net):
    _, buckets, taken, backward = net
    backward()
    assert sorted(taken) == [*range(len(buckets.spans))], "before the boundary"
    assert buckets.finish()


def test_a_parameter_without_a_gradient_is_not_waited_for_in_the_next_step(net):
    _, buckets, taken, backward = net
    backward(uses_last=False)
    assert len(taken) < len(buckets.spans)
    assert buckets.finish()
    assert sorted(taken) == [*range(len(buckets.spans))], "at the boundary"
    backward()
    buckets.finish()
    backward()
    assert sorted(taken) == [*range(len(buckets.spans))]


@pytest.mark.parametrize("change", ["in place", "replaced", "removed", "once more"])
def test_what_changed_after_it_was_taken_does_not_hold(net, change):
    module, buckets, _, backward = net
    backward()
    weight = module.first.weight
    match change:
        case "in place":
            weight.grad.mul_(0.5)
        case "replaced":
            weight.grad = weight.grad.clone()
        case "removed":
            weight.grad = None
        case "once more":
            module(torch.ones(2, 4)).backward()
    assert not buckets.finish()


def test_nothing_is_written_after_the_stop(net):
    _, buckets, taken, backward = net
    backward()
    buckets.stop()
    taken.clear()
    buckets.reach(1.0)
    assert not taken
    assert not buckets.finish()
