"""Many small tensors move together, and the numbers are those of one at a time."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD

from p2ptrain.compute import gradients
from p2ptrain.compute.torch_replica import TorchReplica
from p2ptrain.errors import StateError

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SHAPES = [(3,), (2, 3), (), (0, 3), (2, 3), (2, 3), (4, 2, 2, 2), (200, 100), (1,), (5, 4)]


class Odd(nn.Module):
    """Parameters of many shapes and dtypes in a row, and buffers."""

    def __init__(self, seed, dtypes, shapes):
        super().__init__()
        rng = torch.Generator().manual_seed(seed)
        self.rows = nn.ParameterList()
        for dtype in dtypes:
            for shape in shapes:
                self.rows.append(nn.Parameter(torch.randn(shape, generator=rng).to(dtype)))
        for number in range(6):
            value = torch.randn(number, generator=rng).to(dtypes[number % len(dtypes)])
            self.register_buffer(f"buffer{number}", value)


def set_gradients(model, seed, missing):
    """Gradients of every memory layout; some parameters have none."""
    rng = torch.Generator().manual_seed(seed)
    for number, parameter in enumerate(model.rows):
        parameter.grad = None
        if number % 7 < missing:
            continue
        values = torch.randn(parameter.shape, generator=rng).to(parameter.dtype)
        if parameter.dim() == 2 and number % 2:
            values = values.t().contiguous().t()
        elif parameter.dim() == 4:
            values = values.contiguous(memory_format=torch.channels_last)
        elif parameter.dim() == 1 and number % 3 == 0:
            values = values[:1].expand(parameter.shape)
        parameter.grad = values


def one_at_a_time(model, size, weight):
    """What was exported before tensors moved together."""
    into, start = torch.zeros(size), 0
    tensors = [p.grad for p in model.rows] + list(model.buffers())
    for like, tensor in zip([*model.rows, *model.buffers()], tensors, strict=True):
        stop = start + like.numel()
        if tensor is not None:
            there = into[start:stop].view(like.shape)
            if tensor.dtype == torch.float32:
                torch.mul(tensor.detach(), weight, out=there)
            else:
                there.copy_(tensor).mul_(weight)
        start = stop
    return into.numpy()


def replica_of(model):
    return TorchReplica(model, SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("missing", [0, 1, 3])
@pytest.mark.parametrize("dtypes", [DTYPES[:1], DTYPES[2:3], DTYPES, DTYPES * 2])
@pytest.mark.parametrize("shapes", [SHAPES, SHAPES[1:2] * 9, SHAPES[4:6] + SHAPES[9:] * 5])
def test_the_numbers_are_those_of_one_at_a_time(shapes, dtypes, missing, monkeypatch):
    monkeypatch.setattr(gradients, "BATCH", 60)  # so that there are several
    model = Odd(1, dtypes, shapes)
    replica = replica_of(model)
    into = np.full(replica.gradient_size, np.nan, np.float32)
    for seed in range(3):
        set_gradients(model, seed, missing)
        replica.export_gradients(into, 7)
        assert into.tobytes() == one_at_a_time(model, into.size, 7).tobytes()


@pytest.mark.parametrize("missing", [0, 3])
@pytest.mark.parametrize("dtypes", [DTYPES[:1], DTYPES])
def test_a_mean_is_set_as_one_at_a_time(dtypes, missing):
    model = Odd(1, dtypes, SHAPES)
    replica = replica_of(model)
    set_gradients(model, 0, missing)
    objects = [parameter.grad for parameter in model.rows]
    mean = np.random.default_rng(0).normal(size=replica.gradient_size).astype(np.float32)
    mean.flags.writeable = False
    flags = np.arange(len(model.rows)) % 5 > missing - 1
    mask = np.packbits(flags, bitorder="little").tobytes()
    with warnings.catch_warnings(action="error"):
        replica.import_gradients(mean, mask)
    start = 0
    for number, parameter in enumerate(model.rows):
        stop = start + parameter.numel()
        want = torch.from_numpy(mean[start:stop].copy()).view(parameter.shape).to(parameter.dtype)
        if flags[number]:
            assert torch.equal(parameter.grad, want)
            before = objects[number]
            if before is not None and 0 not in before.stride():
                assert parameter.grad is before
        else:
            assert parameter.grad is None
        start = stop
    for buffer in model.buffers():
        stop = start + buffer.numel()
        assert torch.equal(buffer, torch.from_numpy(mean[start:stop].copy()).to(buffer.dtype))
        start = stop


@pytest.mark.parametrize("number", [0, 5, 7, 9])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_the_first_that_is_not_finite_is_named(number, value):
    model = Odd(1, DTYPES[:1], SHAPES)
    replica = replica_of(model)
    set_gradients(model, 0, 0)
    model.rows[number].grad = torch.full(model.rows[number].shape, value)
    model.rows[9].grad[-1] = value
    into = np.ones(replica.gradient_size, np.float32)
    with pytest.raises(StateError, match=rf"gradient of parameter rows\.{number} is not finite"):
        replica.export_gradients(into, 1)
    assert not into.any()


def test_a_sparse_gradient_among_others_is_refused_by_name():
    model = nn.ModuleList([nn.Linear(2, 2), nn.Embedding(4, 2, sparse=True), nn.Linear(2, 4)])
    replica = replica_of(model)
    for dense in (model[0], model[2]):
        dense(torch.ones(2)).sum().backward()
    model[1](torch.tensor([1])).sum().backward()
    into = np.ones(replica.gradient_size, np.float32)
    with pytest.raises(StateError, match=r"gradient of parameter 1\.weight is sparse"):
        replica.export_gradients(into, 1)
    assert not into.any()
    replica.import_gradients(np.ones_like(into), replica.gradient_mask())
    assert model[1].weight.grad.tolist() == [[1, 1]] * 4


def test_gradients_that_a_program_keeps_are_not_overwritten_later():
    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    replica = replica_of(model)
    kept = []
    for value in (1.0, 2.0):
        model.zero_grad()
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        into = np.empty(replica.gradient_size, np.float32)
        replica.export_gradients(into, 1)
        replica.import_gradients(into, replica.gradient_mask())
        kept.append(model[1].weight.grad)
    assert [float(gradient.mean()) for gradient in kept] == [1, 2]


@pytest.mark.parametrize("default", [torch.float16, torch.bfloat16])
def test_a_default_dtype_of_16_bits_rounds_no_gradient(default):
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
    torch.set_default_dtype(default)
    try:
        replica = TorchReplica(model, torch.optim.SGD(model.parameters(), lr=0.1))
        sum_G = np.empty(replica.gradient_size, np.float32)
        wanted = torch.cat([3 * parameter.grad.view(-1) for parameter in model.parameters()])
        replica.export_gradients(sum_G, 3)
        replica.import_gradients(sum_G, replica.gradient_mask())
    finally:
        torch.set_default_dtype(torch.float32)
    assert np.array_equal(sum_G, wanted.numpy())
