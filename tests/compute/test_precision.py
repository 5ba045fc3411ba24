"""What a dtype can hold: float64 stays float64, and of 16 bits nothing is dropped at the end."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.utils._python_dispatch import TorchDispatchMode

from p2ptrain.compute.flat import FlatModel
from p2ptrain.compute.torch_replica import TorchReplica


class Model(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.encode = nn.Linear(3, 4, bias=False)
            self.norm = nn.BatchNorm1d(4)
            self.decode = nn.Linear(3, 4)
        self.decode.weight = self.encode.weight
        self.to(dtype)
        self.table = nn.Parameter(torch.ones(2, dtype=dtype), requires_grad=False)
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("local", torch.ones(2), persistent=False)

    def forward(self, inputs):
        return self.norm(self.encode(inputs)).tanh() + self.decode(inputs)

    def get_extra_state(self):
        return {"note": "of the model's own"}

    def set_extra_state(self, state):
        assert state["note"]


def replica_of(model, make=SGD):
    parameters = [p for p in model.parameters() if p.requires_grad]
    return TorchReplica(model, make(parameters, lr=0.1))


def train(model, replica, steps):
    for seed in range(steps):
        generator = torch.Generator().manual_seed(seed)
        model.zero_grad()
        inputs = torch.randn(8, 3, generator=generator, dtype=torch.float64)
        model(inputs.to(model.table.dtype)).square().mean().backward()
        replica.update(replica.optimizer_step)


def snapshot(replica):
    into = np.empty(replica.model_size, np.float32)
    replica.snapshot(into)
    return into


def small_deltas(replica, count=64):
    rng = np.random.default_rng(0)
    for _ in range(count):
        yield rng.normal(scale=2.0**-13, size=replica.model_size).astype(np.float32)


@pytest.mark.parametrize("make", [SGD, AdamW])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_alone_updates_are_torchs_own_bit_by_bit(dtype, make):
    model = Model(dtype)
    plain = copy.deepcopy(model)
    optimizer = make([p for p in plain.parameters() if p.requires_grad], lr=0.1)
    replica = replica_of(model, make)
    train(model, replica, 5)
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        plain.zero_grad()
        inputs = torch.randn(8, 3, generator=generator, dtype=torch.float64)
        plain(inputs.to(dtype)).square().mean().backward()
        optimizer.step()
        snapshot(replica)  # looking changes nothing
        replica.is_finite()
        replica.settle()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)


def test_a_float64_model_stays_float64_to_the_end():
    model = Model(torch.float64)
    replica = replica_of(model)
    model.encode.weight.data.fill_(1 / 3)
    model.encode.weight.data[0, 0] = -0.0
    before = model.encode.weight.detach().clone()
    delta = np.zeros(replica.model_size, np.float32)
    delta[1] = 0.5
    replica.add_delta(delta)
    before[0, 1] += 0.5
    state = replica.state_dict()
    assert torch.equal(state["encode.weight"], before)
    replica.settle()
    replica.release()
    assert torch.equal(model.encode.weight, before)
    assert model.encode.weight.dtype == state["encode.weight"].dtype == torch.float64


# 16 bits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits_to_the_end(dtype):
    """Deltas far below what 16 bits can hold: all of them are in what is saved."""
    model = Model(dtype)
    replica = replica_of(model)
    train(model, replica, 2)
    for delta in small_deltas(replica):
        replica.add_delta(delta)
        replica.settle()
    want = snapshot(replica)
    rounded = torch.cat([t.detach().flatten() for t in (model.encode.weight, model.norm.weight)])
    assert not np.array_equal(rounded.float().numpy(), want[:16])
    state = replica.state_dict()
    replica.release()
    for kept in (state, replica.state_dict()):
        assert {v.dtype for n, v in kept.items() if n.split(".")[0] in ("encode", "norm")} == {
            torch.float32, torch.int64
        }  # fmt: skip
        for start, name in ((0, "encode.weight"), (12, "norm.weight"), (16, "norm.bias")):
            values = kept[name].numpy().reshape(-1)
            assert np.array_equal(values, want[start : start + values.size])
        assert kept["norm.running_var"].tolist() == want[-4:].tolist()
        assert kept["table"].dtype == dtype
    whole = Model(torch.float32)
    whole.table.data = whole.table.data.to(dtype)
    whole.load_state_dict(state)
    assert torch.equal(whole.encode.weight, state["encode.weight"])
    model.load_state_dict(state)  # it rounds again


def test_what_a_program_trains_after_the_end_is_in_the_state_too():
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    replica = replica_of(model)
    model.weight.data.fill_(1)
    replica.add_delta(np.full(1, 2.0**-12, np.float32))
    replica.release()
    model.weight.data.add_(1)
    assert replica.state_dict()["weight"].tolist() == [[2 + 2.0**-12]]


# state_dict


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_state_dict_has_the_names_of_the_models_and_memory_of_its_own(dtype):
    model = Model(dtype)
    replica = replica_of(model)
    state, plain = replica.state_dict(), model.state_dict()
    assert list(state) == list(plain)
    assert type(state) is type(plain)
    assert state._metadata == plain._metadata
    assert state["_extra_state"] == {"note": "of the model's own"}
    assert state["encode.weight"] is state["decode.weight"]
    own = {t.data_ptr() for t in plain.values() if isinstance(t, torch.Tensor)}
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, plain[name].to(value.dtype))
            assert value.data_ptr() not in own
            assert value.untyped_storage().nbytes() == value.nbytes
            assert not value.requires_grad


def test_what_is_pending_is_in_a_state_dict_and_stays_pending():
    model = nn.Linear(2, 1, bias=False)
    replica = replica_of(model)
    model.weight.data.fill_(1)
    replica.add_delta(np.array([1, 2], np.float32))
    assert replica.state_dict()["weight"].tolist() == [[2, 3]]
    assert model.weight.tolist() == [[1, 1]]
    replica.settle()
    assert replica.state_dict()["weight"].tolist() == [[2, 3]]


class Largest(TorchDispatchMode):
    """How many bytes the largest tensor has that is made inside, and is no view."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.size_bytes = 0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        made = function(*arguments, **(named or {}))
        if isinstance(made, torch.Tensor):
            storage = made.untyped_storage()
            if storage.data_ptr() not in self._known:
                self.size_bytes = max(self.size_bytes, storage.nbytes())
        return made


def test_the_boundary_of_a_model_of_16_bits_takes_no_vector_of_its_size():
    size = 1 << 20
    model = nn.Linear(size, 1, bias=False, dtype=torch.bfloat16)
    flat = FlatModel(model)
    flat.add_delta(np.full(size, 1e-3, np.float32))
    with Largest(model.weight.detach(), flat._pending) as largest, flat.step_lock:
        flat.take_pending()
    assert 0 < largest.size_bytes <= size  # a quarter of such a vector, for each of a few
