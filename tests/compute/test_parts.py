"""A model in parts: together they are the model, and are trained as it is."""

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from p2ptrain.compute.parts import Face, Part, rows_of
from p2ptrain.compute.torch_replica import TorchReplica
from p2ptrain.errors import StateError


class Model(nn.Module):
    """Rows that do not divide, fewer rows than parts, a scalar, a tie, a frozen one, buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Linear(4, 7), nn.BatchNorm1d(7), nn.Linear(7, 4, bias=False))
        self.tied = nn.Linear(7, 4, bias=False)
        self.tied.weight = self.body[2].weight
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.one = nn.Parameter(torch.ones(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.body(inputs) * self.scale + self.one


def backward(model: nn.Module, seed: int) -> None:
    inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
    model.zero_grad()
    model(inputs).square().sum().backward()


@pytest.mark.parametrize("parts", [1, 2, 3, 9])
def test_each_number_is_in_one_part(parts):
    model = Model()
    for part in range(parts):
        for tensor in Part(model, part, parts).rows():
            if tensor.is_floating_point():
                tensor += 1
    fresh = dict(Model().named_parameters()) | dict(Model().named_buffers())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        more = 0 if name == "frozen" or not tensor.is_floating_point() else 1
        assert tensor.equal(fresh[name] + more), name


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize(
    "build",
    [
        lambda p: SGD(p, lr=0.001, momentum=0.9, weight_decay=0.01),
        lambda p: AdamW(p, lr=0.01),
    ],
    ids=["sgd", "adamw"],
)
def test_faces_are_trained_as_the_whole_model_is(build, parts):
    whole, model = Model(), Model()
    trainable = [p for p in model.parameters() if p.requires_grad]
    theirs, optimizer = build([p for p in whole.parameters() if p.requires_grad]), build(trainable)
    faces = [Face(model, [optimizer], number, parts) for number in range(parts)]
    replicas = [TorchReplica(face.module, face.optimizers) for face in faces]
    for step in range(4):
        for group in (*theirs.param_groups, *optimizer.param_groups):
            group["lr"] /= step + 1  # as a schedule does
        backward(whole, step)
        theirs.step()
        backward(model, step)
        for face, replica in zip(faces, replicas, strict=True):
            face.take()
            replica.update(replica.optimizer_step)
        for face in faces:
            face.give()
    for (name, ours), expected in zip(
        model.state_dict().items(), whole.state_dict().values(), strict=True
    ):
        assert ours.equal(expected), name
    assert not optimizer.state, "that of the faces is all there is"


def test_one_part_is_the_model_itself_to_other_peers():
    model = Model()
    model.frozen = None
    optimizer = SGD(model.parameters(), lr=0.1)
    face = Face(model, [optimizer], 0, 1)
    ours = TorchReplica(face.module, face.optimizers)
    assert ours.fingerprint == TorchReplica(model, optimizer).fingerprint


def test_a_parameter_without_a_gradient_has_none_in_its_face():
    model = Model()
    face = Face(model, [SGD([model.one, model.scale], lr=0.1)], 0, 2)
    backward(model, 0)
    model.one.grad = None
    face.take()
    assert face.module.one.grad is None
    assert face.module.scale.grad.equal(model.scale.grad)


def test_a_parameter_that_the_model_does_not_have_is_one_sentence():
    with pytest.raises(StateError, match=r"shape \[2\] that is not a trainable one of the model"):
        Face(Model(), [SGD([nn.Parameter(torch.ones(2))], lr=0.1)], 0, 2)


def test_there_may_be_fewer_rows_than_parts():
    assert rows_of(torch.ones(1, 3), 1, 2, "w").shape == (0, 3)
    assert rows_of(torch.tensor(1.0), 1, 2, "w").shape == (0,)
