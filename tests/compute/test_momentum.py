"""Optimizer state that is averaged with the model."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, NAdam

from p2ptrain.compute.torch_replica import TorchReplica
from p2ptrain.errors import StateError


def model_of(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))


OPTIMIZERS = {
    "sgd": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda model: AdamW(model.parameters(), lr=0.1),
}
TIMES = {"sgd": 2, "adamw": 3}
"""So many times as long as the model is the vector."""


def replica_of(kind="sgd", seed=0, average_momentum=True):
    model = model_of(seed)
    optimizer = OPTIMIZERS[kind](model)
    return model, optimizer, TorchReplica(model, optimizer, average_momentum=average_momentum)


def step(model, optimizer, replica, seed):
    generator = torch.Generator().manual_seed(seed)
    model(torch.randn(5, 3, generator=generator)).square().mean().backward()
    replica.update(optimizer.step)
    optimizer.zero_grad()


def vector_of(replica):
    vector_M = np.empty(replica.model_size, np.float32)
    replica.snapshot(vector_M)
    return vector_M


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_momentum_makes_the_vector_longer_and_saves_no_more(kind):
    _, _, replica = replica_of(kind)
    plain = replica_of(kind, average_momentum=False)[2]
    assert plain.model_size == plain.saved_size == replica.saved_size
    assert replica.model_size == TIMES[kind] * plain.model_size
    assert replica.fingerprint != plain.fingerprint, "peers that do and do not never meet"


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_alone_it_trains_exactly_as_without(kind):
    averaged, plain = replica_of(kind), replica_of(kind, average_momentum=False)
    for seed in range(5):
        step(*averaged, seed)
        step(*plain, seed)
    size = averaged[2].saved_size
    assert np.array_equal(vector_of(averaged[2])[:size], vector_of(plain[2]))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_two_that_average_go_on_alike(kind):
    """Models and momenta are equal after an average, so equal gradients keep them so."""
    one, other = replica_of(kind, seed=1), replica_of(kind, seed=2)
    for number in range(3):
        step(*one, number)
        step(*other, number + 10)
    vectors = [vector_of(replica) for _, _, replica in (one, other)]
    mean_M = (vectors[0] + vectors[1]) / 2
    for (_, _, replica), vector_M in zip((one, other), vectors, strict=True):
        replica.add_delta(mean_M - vector_M)
        replica.settle()
    for number in range(3):
        step(*one, number)
        step(*other, number)
    np.testing.assert_allclose(vector_of(one[2]), vector_of(other[2]), atol=1e-5)


def test_a_second_moment_never_falls_below_zero_and_what_is_left_waits():
    model, optimizer, replica = replica_of("adamw")
    step(model, optimizer, replica, 1)
    before_M = vector_of(replica)
    replica.add_delta(np.full(replica.model_size, -1.0, np.float32))
    replica.settle()
    moments = [state["exp_avg_sq"] for state in optimizer.state.values()]
    assert all(bool((moment >= 0).all()) for moment in moments)
    np.testing.assert_allclose(vector_of(replica), before_M - 1, atol=1e-6)


def test_state_that_is_loaded_later_is_the_state_that_is_averaged():
    source = replica_of(seed=3, average_momentum=False)
    step(*source, 7)
    model, optimizer, replica = replica_of()
    optimizer.load_state_dict(source[1].state_dict())
    replica.settle()
    loaded = torch.cat([s["momentum_buffer"].flatten() for s in source[1].state.values()])
    np.testing.assert_array_equal(vector_of(replica)[replica.saved_size :], loaded.numpy())
    step(model, optimizer, replica, 1)
    assert not np.array_equal(vector_of(replica)[replica.saved_size :], loaded.numpy())


def test_a_newcomer_takes_momentum_over_with_the_state():
    host, guest = replica_of(seed=1), replica_of(seed=2)
    step(*host, 1)
    guest[2].import_state(host[2].export_state())
    assert np.array_equal(vector_of(host[2]), vector_of(guest[2]))
    step(*host, 2)
    step(*guest, 2)
    assert np.array_equal(vector_of(host[2]), vector_of(guest[2]))


def test_making_the_state_leaves_model_rate_and_gradients_as_they_were():
    model = model_of()
    optimizer = AdamW(model.parameters(), lr=0.5, weight_decay=0.1)
    model(torch.ones(1, 3)).sum().backward()
    before = [(p.detach().clone(), p.grad.clone()) for p in model.parameters()]
    TorchReplica(model, optimizer, average_momentum=True)
    for parameter, (value, gradient) in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, value)
        assert torch.equal(parameter.grad, gradient)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert all(state["step"] == 0 for state in optimizer.state.values())


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda p: SGD(p, lr=0.1), "SGD keeps nothing in the shape of its parameters"),
        (lambda p: NAdam(p), "the mu_product of NAdam begins in an unknown way"),
        (lambda p: torch.optim.LBFGS(p), "LBFGS cannot make a step by itself"),
    ],
)
def test_an_optimizer_without_momentum_to_average_is_refused(make, why):
    model = model_of()
    with pytest.raises(StateError, match=why):
        TorchReplica(model, make(model.parameters()), average_momentum=True)


def test_momentum_that_is_thrown_away_is_noticed():
    _, optimizer, replica = replica_of()
    optimizer.state.clear()
    with pytest.raises(StateError, match="momentum_buffer was there when the peer was built"):
        replica.settle()
