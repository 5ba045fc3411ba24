"""Files of a model while it is a peer's, and the model after that: as in plain torch."""

import copy
import gc
import io
import pickle

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import SGD, AdamW

from p2ptrain.compute.torch_replica import TorchReplica
from p2ptrain.errors import StateError
from tests.helpers.accelerator import KIND, needs_accelerator


class Model(nn.Module):
    """Large and small, tied, shared, frozen; a buffer of each kind."""

    def __init__(self, seed=0, dtype=torch.float32):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.body = nn.Linear(400, 400)
            self.norm = nn.BatchNorm1d(400)
            self.encode = nn.Linear(400, 3, bias=False)
            self.decode = nn.Linear(400, 3)
            self.decode.weight = self.encode.weight
            self.fixed = nn.Linear(2, 2).requires_grad_(False)
        self.shared = nn.Parameter(self.decode.bias.data)  # another object, the same memory
        self.to(dtype)
        if dtype is not torch.float32:
            self.shared.data = self.decode.bias.data

    def forward(self, inputs):
        return self.decode(self.norm(self.body(inputs)).tanh()) + self.shared


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def replica_of(model):
    return TorchReplica(model, SGD(trained(model), lr=0.1))


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def step(model, replica, optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    optimizer.zero_grad()
    model(torch.randn(4, 400, generator=generator)).square().mean().backward()
    replica.update(optimizer.step)


def assert_equal(model, other):
    states = zip(model.state_dict().items(), other.state_dict().items(), strict=True)
    for (name, mine), (its_name, theirs) in states:
        assert name == its_name
        assert torch.equal(mine, theirs), name


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("part", ["encode", "norm", "decode", "body"])
def test_a_part_of_the_model_is_saved_as_in_plain_torch(part, released):
    plain, model = Model(), Model()
    replica = replica_of(model)
    if released:
        replica.release()
    state = getattr(model, part).state_dict()
    plain_state = getattr(plain, part).state_dict()
    assert len(saved(state)) == len(saved(plain_state))
    assert type(state) is type(plain_state)
    assert state._metadata == plain_state._metadata
    loaded = torch.load(io.BytesIO(saved(state)), weights_only=True)
    assert all(torch.equal(loaded[name], plain_state[name]) for name in plain_state)


@pytest.mark.parametrize("released", [False, True])
def test_the_whole_model_is_saved_as_in_plain_torch(released, tmp_path):
    plain, model = Model(), Model()
    optimizers = [AdamW(trained(m)) for m in (plain, model)]
    replica = TorchReplica(model, optimizers[1], average_momentum=True)
    if released:
        replica.release()
    assert abs(len(saved(model.state_dict())) - len(saved(plain.state_dict()))) < 2_000
    loaded = torch.load(io.BytesIO(saved(model.state_dict())), weights_only=True)
    assert loaded["encode.weight"].data_ptr() == loaded["decode.weight"].data_ptr()
    assert len(saved(optimizers[1].state_dict()["state"][2])) < 6_000

    safetensors.torch.save_model(model, tmp_path / "model.safetensors")
    other = Model(seed=1)
    safetensors.torch.load_model(other, tmp_path / "model.safetensors")
    assert_equal(other, model)


def test_a_state_dict_is_what_it_is_in_plain_torch():
    model = Model()
    replica_of(model)
    state = model.state_dict(keep_vars=True)
    assert state["body.weight"] is model.body.weight
    assert state["encode.weight"] is state["decode.weight"] is model.decode.weight
    state = model.state_dict()
    assert state["body.weight"].data_ptr() == model.body.weight.data_ptr()
    assert not state["body.weight"].requires_grad


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_the_model_is_a_model_of_its_own(copied):
    model = Model()
    optimizer = SGD(trained(model), lr=0.1)
    replica = TorchReplica(model, optimizer)
    step(model, replica, optimizer, 1)
    other = copied(model)
    assert_equal(other, model)
    assert other.encode.weight is other.decode.weight
    assert len(pickle.dumps(other.encode)) < 10_000
    before = copy.deepcopy(other.state_dict())
    step(model, replica, optimizer, 2)
    assert all(torch.equal(before[name], value) for name, value in other.state_dict().items())
    other_replica = replica_of(other)  # and can be another peer's
    other_replica.settle()


# The storage handed back


@pytest.mark.parametrize("momentum", [False, True])
def test_a_released_model_trains_on_as_in_plain_torch(momentum):
    plain, model = Model(), Model()
    optimizers = [AdamW(trained(m), lr=0.01) for m in (plain, model)]
    replica = TorchReplica(model, optimizers[1], average_momentum=momentum)
    objects = [id(parameter) for parameter in model.parameters()]
    for seed in range(3):
        step(model, replica, optimizers[1], seed)
    replica.release()
    replica.release()
    assert [id(parameter) for parameter in model.parameters()] == objects
    own = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in trained(model)}
    assert sorted(own.values()) == sorted({t.data_ptr(): t.nbytes for t in trained(plain)}.values())
    for seed in range(6):
        for m, optimizer in zip((plain, model), optimizers, strict=True):
            if m is plain or seed >= 3:
                generator = torch.Generator().manual_seed(seed)
                optimizer.zero_grad()
                m(torch.randn(4, 400, generator=generator)).square().mean().backward()
                optimizer.step()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5)
    model.to(torch.float64)
    safetensors.torch.save(model.body.state_dict())


def test_ties_and_shared_memory_survive():
    model = Model()
    replica_of(model).release()
    assert model.encode.weight is model.decode.weight
    model.decode.bias.data.fill_(7)
    assert model.shared.tolist() == [7] * 3


def test_what_is_pending_goes_in_before_the_model_is_given_back():
    model = nn.Linear(1, 1, bias=False)
    replica = replica_of(model)
    model.weight.data.fill_(0)
    replica.add_delta(np.ones(1, np.float32))
    replica.release()
    assert model.weight.item() == 1


def test_the_memory_of_the_vector_is_free_afterwards():
    model = nn.Linear(1000, 1000)
    replica = replica_of(model)
    segment = StorageWeakRef(replica._flat._runs[0].live.untyped_storage())
    gc.collect()
    assert not segment.expired()
    replica.release()
    gc.collect()
    assert segment.expired()
    assert replica._flat._pending.numel() == 0


def test_a_replica_that_has_given_its_model_back_is_no_replica():
    model = nn.Linear(2, 1)
    replica = replica_of(model)
    state, vector = replica.export_state(), np.zeros(replica.model_size, np.float32)
    replica.release()
    for use in (
        lambda: replica.update(lambda: None),
        replica.settle,
        replica.export_state,
        lambda: replica.import_state(state),
        lambda: replica.snapshot(vector),
        lambda: replica.add_delta(vector),
    ):
        with pytest.raises(StateError, match="has given the model back; build a new one"):
            use()
    assert replica.is_finite()
    again = replica_of(model)
    again.settle()
    assert again.snapshot(vector) == 0


def test_a_model_whose_storage_was_replaced_is_released_as_it_is():
    model = nn.Linear(2, 1)
    replica = replica_of(model)
    model.weight.data = torch.full((1, 2), 5.0)
    replica.release()
    assert model.weight.tolist() == [[5, 5]]
    replica_of(model).settle()


@needs_accelerator
def test_on_a_gpu_a_part_is_saved_and_the_model_is_given_back_too():
    model = Model().to(KIND)
    model.shared.data = model.decode.bias.data
    replica = replica_of(model)
    assert len(saved(model.encode.state_dict())) < 10_000
    assert model.body.weight.untyped_storage().nbytes() == model.body.weight.nbytes
    replica.release()
    assert_equal(copy.deepcopy(model), model)
    assert model.encode.weight is model.decode.weight


def test_a_mean_becomes_a_state_dict_without_a_copy_that_torch_and_safetensors_save():
    replica = replica_of(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)))
    mean_M = np.arange(replica.model_size, dtype=np.float32)
    state = replica.state_dict(mean_M)
    assert all(
        np.shares_memory(value.numpy(), mean_M)
        for value in state.values()
        if value.is_floating_point()
    )
    for form in (
        torch.load(io.BytesIO(saved(state)), weights_only=True),
        safetensors.torch.load(safetensors.torch.save(state)),
        safetensors.torch.load(bytes(replica.model_file(mean_M, {}))),
    ):
        assert all(torch.equal(form[name], value) for name, value in state.items())
        assert form["0.weight"].flatten().tolist() == list(range(20))


def test_a_model_file_for_which_there_is_no_room_is_one_sentence(monkeypatch):
    replica = replica_of(nn.Linear(5, 4))
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    with pytest.raises(StateError, match=r"cannot be kept in /nowhere .*TMPDIR"):
        replica.model_file(np.zeros(replica.model_size, np.float32), {})
