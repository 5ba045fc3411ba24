"""Nothing is trained outside of the vector, and whatever would be is named."""

from timeit import repeat

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD

from p2ptrain.compute.coverage import EVERY, FIRST_CHECKS
from p2ptrain.compute.flat import FlatModel
from p2ptrain.compute.torch_replica import TorchReplica
from p2ptrain.errors import StateError


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 2)

    def forward(self, inputs):
        return self.head(self.encoder(inputs))


def add_a_layer(model):
    model.encoder.append(nn.Linear(4, 4))


def add_a_parameter(model):
    model.encoder[0].scale = nn.Parameter(torch.ones(1))


def add_deep_inside(model):
    model.encoder[2].more = nn.Sequential(nn.ReLU(), nn.Linear(1, 1))


def swap_the_head(model):
    model.head = nn.Linear(4, 3)


def swap_a_layer(model):
    model.encoder[2] = nn.Linear(4, 4)


def replace_a_module_without_parameters(model):
    model.encoder[1].activation = nn.Sequential(nn.Linear(4, 4, bias=False))


GROWTHS = {
    add_a_layer: "encoder.3.weight",
    add_a_parameter: "encoder.0.scale",
    add_deep_inside: "encoder.2.more.1.weight",
    swap_the_head: "head.weight",
    swap_a_layer: "encoder.2.weight",
    replace_a_module_without_parameters: "encoder.1.activation.0.weight",
}


def step(replica, model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(4, 3)).tanh().mean().backward()
    replica.update(optimizer.step)


@pytest.mark.parametrize("steps", [0, 1, 3 * EVERY])
@pytest.mark.parametrize("grow", GROWTHS)
def test_a_parameter_that_comes_later_is_refused_by_name_at_the_next_step(grow, steps):
    model = Classifier()
    optimizer = SGD(model.parameters(), lr=0.1)
    replica = TorchReplica(model, optimizer)
    for _ in range(steps):
        step(replica, model, optimizer)
    grow(model)
    before = model.encoder[0].weight.detach().clone()
    model.encoder[0].weight.grad = torch.ones(4, 3)
    for _ in range(2):  # and again: whoever catches it is told so again
        with pytest.raises(StateError, match=f"parameter {GROWTHS[grow]} .*build the peer after"):
            replica.update(optimizer.step)
    assert torch.equal(model.encoder[0].weight, before)


def test_a_parameter_that_leaves_is_refused_by_name():
    model = Classifier()
    flat = FlatModel(model)
    model.head = nn.Identity()
    with pytest.raises(StateError, match=r"parameter head\.weight has left the model"):
        flat.check()


def test_a_sequential_that_is_cut_is_noticed():
    model = Classifier()
    flat = FlatModel(model)
    del model.encoder[2]
    with pytest.raises(StateError, match=r"parameter encoder\.2\.weight has left the model"):
        flat.check()


def test_what_is_not_trained_may_come_and_go():
    model = Classifier()
    model.head.bias.requires_grad_(False)
    flat = FlatModel(model)
    changes = [
        lambda: setattr(model.head, "bias", nn.Parameter(torch.ones(2), requires_grad=False)),
        lambda: model.encoder.append(nn.ReLU()),
        lambda: setattr(model, "seen", nn.Parameter(torch.ones(1), requires_grad=False)),
        lambda: setattr(model, "seen", None),
        lambda: model.register_buffer("table", torch.ones(3), persistent=False),
    ]
    for change in changes:
        change()
        flat.check()
        flat.check()
    model.head.bias.requires_grad_(True)  # the new one
    with pytest.raises(StateError, match=r"head\.bias was frozen"):
        flat.check()


def test_a_trained_parameter_may_be_frozen_for_a_while():
    model = Classifier()
    flat = FlatModel(model)
    for trains in (False, True):
        model.encoder.requires_grad_(trains)
        flat.check()


def check_often(flat):
    for _ in range(EVERY):
        flat.check()


@pytest.mark.parametrize("steps", [1, FIRST_CHECKS + 1])
def test_a_view_of_another_shape_at_the_same_address_is_noticed_soon(steps):
    model = nn.Sequential(nn.Linear(3, 3))
    flat = FlatModel(model)
    for _ in range(steps):
        flat.check()
    model[0].weight.data = model[0].weight.data.t()
    with pytest.raises(StateError, match=r"0\.weight was replaced"):
        check_often(flat)


def test_a_frozen_parameter_that_shares_memory_with_a_trained_one_is_refused():
    model = Classifier()
    shared = nn.Parameter(model.head.weight.data, requires_grad=False)
    model.encoder[0].target = shared
    with pytest.raises(StateError, match=r"share a part of their memory"):
        FlatModel(model)


def test_frozen_parameters_may_share_memory_among_themselves():
    model, both = Classifier(), torch.zeros(6)
    for name, part in {"query": both[:4], "key": both[2:], "value": both}.items():
        model.encoder.register_parameter(name, nn.Parameter(part, requires_grad=False))
    FlatModel(model).check()


# The optimizer


def test_an_optimizer_over_more_than_the_model_is_refused():
    model = Classifier()
    optimizer = SGD(model.parameters(), lr=0.1)
    words = r"shape \[2, 4\] in the optimizer's group 0 is not in the model .* whole model"
    with pytest.raises(StateError, match=words) as refusal:
        TorchReplica(model.encoder, optimizer)
    assert "\n" not in str(refusal.value)


def test_a_frozen_parameter_may_be_in_the_optimizer_until_it_is_trainable():
    """As programs have it that freeze a body and pass `model.parameters()`."""
    model = Classifier()
    model.head.requires_grad_(False)
    optimizer = SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    replica = TorchReplica(model, optimizer)
    before = model.head.weight.clone()
    step(replica, model, optimizer)
    assert torch.equal(model.head.weight, before)
    model.head.weight.requires_grad_(True)
    with pytest.raises(StateError, match=r"head\.weight was frozen .* trainable now"):
        step(replica, model, optimizer)


def test_a_refused_optimizer_leaves_the_model_as_it_was():
    model = Classifier()
    address = model.encoder[0].weight.data_ptr()
    with pytest.raises(StateError):
        TorchReplica(model.encoder, SGD(model.parameters(), lr=0.1))
    assert model.encoder[0].weight.data_ptr() == address


@pytest.mark.parametrize("steps", [0, 2 * EVERY])
def test_a_parameter_group_that_is_added_is_refused_at_the_next_step(steps):
    model, other = Classifier(), nn.Linear(7, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    replica = TorchReplica(model, optimizer)
    for _ in range(steps):
        step(replica, model, optimizer)
    optimizer.add_param_group({"params": other.parameters()})
    for boundary in (lambda: replica.update(optimizer.step), replica.settle):
        with pytest.raises(StateError, match=r"shape \[1, 7\] in the optimizer's group 1"):
            boundary()


def test_a_group_of_the_models_own_parameters_may_be_added():
    model = Classifier()
    optimizer = SGD(model.encoder.parameters(), lr=0.1)
    replica = TorchReplica(model, optimizer)
    optimizer.add_param_group({"params": model.head.parameters(), "lr": 0.2})
    step(replica, model, optimizer)


def test_a_check_costs_little_for_thousands_of_tensors():
    model = nn.ModuleList(nn.Linear(1, 1) for _ in range(2_500))
    flat = FlatModel(model)
    tensors = list(model.parameters())
    numbers = np.zeros(len(tensors))

    def in_python():
        for at, tensor in enumerate(tensors):
            numbers[at] = tensor.data_ptr() + tensor.stride(0) + tensor.shape[0]

    rounds = 4 * EVERY
    check_s, python_s = (repeat(f, number=1, repeat=rounds) for f in (flat.check, in_python))
    # What the machine does beside it adds to rounds; the cheapest is its own.
    assert min(check_s) < min(python_s)
