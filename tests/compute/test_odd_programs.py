"""Odd models and optimizers: as a replica each trains as in plain torch, bit by bit.

Each is saved, taken over by a newcomer and given back, too. Models that change while they are
trained are refused (`test_coverage.py`).
"""

import copy
import io

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from p2ptrain.compute.torch_replica import TorchReplica
from p2ptrain.errors import StateError

WIDTH = 6


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs):
        return self.second(self.first(inputs).tanh())


class Tied(Plain):
    def __init__(self):
        super().__init__()
        self.second.weight = self.first.weight


class Normalised(Plain):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, inputs):
        return super().forward(self.norm(inputs))


class LowRank(Plain):
    """LoRA: a frozen matrix and two thin ones beside it."""

    def __init__(self):
        super().__init__()
        self.first.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, inputs):
        return self.second((self.first(inputs) + self.up(self.down(inputs))).tanh())


class Checkpointed(Plain):
    """Computes its activations twice."""

    def forward(self, inputs):
        return checkpoint(super().forward, inputs, use_reentrant=False)


class Compiled(Plain):
    def __init__(self):
        super().__init__()
        self.compile(backend="eager")


class Reparametrised(Plain):
    def __init__(self):
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.first)


class Unused(Plain):
    """A branch that no batch takes."""

    def __init__(self):
        super().__init__()
        self.never = nn.Linear(WIDTH, 3)


class Recurrent(nn.Module):
    """Its own list of flat weights, beside the registry."""

    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(WIDTH, WIDTH, num_layers=2)

    def forward(self, inputs):
        return self.cell(inputs[None])[0][0]


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4))

    def forward(self, inputs):
        return self.layers(inputs.view(len(inputs), 1, 2, -1)).mean(1).flatten(1)


class Double(Plain):
    def __init__(self):
        super().__init__()
        self.double()


class Half(Plain):
    def __init__(self):
        super().__init__()
        self.bfloat16()


class Mixed(Plain):
    """Two dtypes, as where a head stays in float32."""

    def __init__(self):
        super().__init__()
        self.first.bfloat16()

    def forward(self, inputs):
        return self.second(self.first(inputs.bfloat16()).float().tanh())


MODELS = [
    Plain, Tied, Normalised, LowRank, Checkpointed, Compiled, Reparametrised, Unused, Recurrent,
    Convolutional, Double, Half, Mixed,
]  # fmt: skip


def muon_and_adamw(parameters):
    """Muon for matrices, AdamW for the rest, as people use it."""
    held = list(parameters)
    matrices, rest = [p for p in held if p.dim() == 2], [p for p in held if p.dim() != 2]
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]


def groups(parameters):
    held = list(parameters)
    return torch.optim.AdamW([{"params": held[:1], "lr": 0.1}, {"params": held[1:]}], lr=0.01)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "groups": groups,
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=3, history_size=4),
    "muon and adamw": muon_and_adamw,
}


class Program:
    """A model, its optimizers and a loop, with a replica around them, in a peer, or without."""

    def __init__(self, model, optimizer, seed=0, replicated=True):
        self.peer = None
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.model = model()
        made = OPTIMIZERS[optimizer](p for p in self.model.parameters() if p.requires_grad)
        self.optimizers = made if isinstance(made, list) else [made]
        self.replica = TorchReplica(self.model, made) if replicated else None

    def train(self, *seeds):
        for seed in seeds:
            if isinstance(self.optimizers[0], torch.optim.LBFGS):
                self._step(lambda seed=seed: self._backward(seed))
            else:
                self._backward(seed)
                self._step(None)
        return self

    def _backward(self, seed):
        dtype = next(self.model.parameters()).dtype
        dtype = torch.float32 if isinstance(self.model, Mixed) else dtype
        inputs = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)
        self.model.zero_grad()
        loss = self.model(inputs).square().mean()
        loss.backward()
        return loss

    def _step(self, closure):
        if self.peer:
            self.peer.step(samples=3, closure=closure)
            return
        if self.replica:
            self.replica.update(lambda: self.replica.optimizer_step(closure=closure))
            return
        for optimizer in self.optimizers:
            optimizer.step(*[closure] if closure else [])

    def everything(self):
        return {
            **{name: value.clone() for name, value in self.model.state_dict().items()},
            "optimizers": repr([optimizer.state_dict() for optimizer in self.optimizers]),
        }


def assert_same(mine, theirs):
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        same = torch.equal(value, theirs[name]) if name != "optimizers" else value == theirs[name]
        assert same, name


def programs(**kind):
    return Program(**kind, replicated=False), Program(**kind)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_with_any_optimizer_a_model_trains_as_in_plain_torch(optimizer):
    plain, ours = programs(model=Normalised, optimizer=optimizer)
    assert_same(ours.train(1, 2, 3).everything(), plain.train(1, 2, 3).everything())


@pytest.mark.parametrize("model", MODELS)
def test_any_model_trains_as_in_plain_torch(model):
    plain, ours = programs(model=model, optimizer="adam")
    assert_same(ours.train(1, 2, 3).everything(), plain.train(1, 2, 3).everything())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_with_any_optimizer_a_newcomer_goes_on_bit_by_bit(optimizer):
    giver, taker = Program(Normalised, optimizer, 1), Program(Normalised, optimizer, 2)
    giver.train(1, 2)
    taker.replica.import_state(giver.replica.export_state())
    assert_same(taker.train(3, 4).everything(), giver.train(3, 4).everything())


@pytest.mark.parametrize("model", MODELS)
def test_of_any_model_a_newcomer_goes_on_bit_by_bit(model):
    giver, taker = Program(model, "adam", 1), Program(model, "adam", 2)
    giver.train(1, 2)
    taker.replica.import_state(giver.replica.export_state())
    assert_same(taker.train(3, 4).everything(), giver.train(3, 4).everything())
    assert taker.replica.frozen_digest == giver.replica.frozen_digest


@pytest.mark.parametrize("model", MODELS)
def test_any_model_averages_gradients_alone_as_it_would_without(model):
    """A group of one: what is exported comes back, and float32 and less lose nothing by it."""
    plain, ours = programs(model=model, optimizer="momentum")
    vector = np.empty(ours.replica.gradient_size, np.float32)
    for seed in range(3):
        plain.train(seed)
        ours._backward(seed)
        if model is not Double:
            ours.replica.export_gradients(vector, 1)
            ours.replica.import_gradients(vector, ours.replica.gradient_mask())
        ours._step(None)
    assert_same(ours.everything(), plain.everything())


@pytest.mark.parametrize("model", MODELS)
def test_any_model_is_saved_loaded_and_given_back(model, tmp_path):
    program = Program(model, "adam").train(1)
    expected = program.everything()
    other = Program(model, "adam", seed=5, replicated=False)
    file = io.BytesIO()
    torch.save(program.model.state_dict(), file)
    other.model.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    safetensors.torch.save_model(program.model, tmp_path / "model")
    third = Program(model, "adam", seed=6, replicated=False)
    safetensors.torch.load_model(third.model, tmp_path / "model")
    fourth = Program(model, "adam", seed=7, replicated=False)
    fourth.model.load_state_dict(program.replica.state_dict())
    copies = [copy.deepcopy(program.model), other.model, third.model, fourth.model]
    program.replica.release()
    program.replica, whole = None, program.everything()
    assert_same(whole, expected)
    for one in copies:
        del expected["optimizers"]
        assert_same(one.state_dict(), expected)
        expected["optimizers"] = ""
    program.train(2)
    assert_same(
        program.everything(), Program(model, "adam", replicated=False).train(1, 2).everything()
    )


@pytest.mark.parametrize("model", [Plain, LowRank, Compiled, Recurrent])
def test_any_model_whose_head_is_swapped_or_that_grows_is_refused(model):
    for change in (
        lambda m: setattr(m, "head", nn.Linear(WIDTH, 1)),
        lambda m: setattr(next(m.children()), "more", nn.Parameter(torch.ones(1))),
    ):
        program = Program(model, "sgd").train(1)
        change(program.model)
        with pytest.raises(StateError, match=r"parameter (head\.weight|\w+\.more) is trainable"):
            program.train(2)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "muon and adamw"])
def test_with_a_scaler_any_optimizer_skips_what_overflows(optimizer):
    plain, ours = programs(model=Normalised, optimizer=optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for seed in range(4):
        loss = ours._backward(seed)
        for parameter in ours.model.parameters():
            parameter.grad *= scaler.scale(torch.ones(())).item()
        if seed == 1:
            ours.model.first.bias.grad[0] = torch.inf
        assert torch.isfinite(loss)
        if ours.replica.unscale(scaler):
            ours._step(None)
        scaler.update()
        plain._backward(seed)
        if seed != 1:
            plain._step(None)
    assert scaler.get_scale() == 2.0
    assert_same(ours.everything(), plain.everything())
