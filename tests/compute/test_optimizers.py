"""Closures, several optimizers, and a scaler that was used before."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adam, AdamW

from p2ptrain.compute.torch_replica import TorchReplica
from p2ptrain.errors import ConfigError, StateError


def network(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


def loss_of(model, seed):
    inputs = torch.randn(16, 3, generator=torch.Generator().manual_seed(seed))
    return (model(inputs) - inputs[:, :2].sin()).square().mean()


def closure_of(model, optimizer, seed):
    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, seed)
        loss.backward()
        return loss

    return closure


def assert_equal(model, other):
    for mine, theirs in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


def two_of(model, matrices=AdamW, rest=SGD):
    """Two optimizers as people build them: one for the matrices, one for what is left."""
    return [
        matrices([p for p in model.parameters() if p.dim() == 2], lr=0.02),
        rest([p for p in model.parameters() if p.dim() != 2], lr=0.1),
    ]


# Closures


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_a_closure_is_given_to_the_optimizer_as_in_plain_torch(search):
    plain, model = network(), network()
    lone, optimizer = (LBFGS(m.parameters(), line_search_fn=search) for m in (plain, model))
    replica = TorchReplica(model, optimizer)
    assert replica.needs_closure
    for seed in range(3):
        lone.step(closure_of(plain, lone, seed))
        closure = closure_of(model, optimizer, seed)
        replica.update(lambda closure=closure: replica.optimizer_step(closure=closure))
    assert_equal(model, plain)
    assert replica.updates == 3


def test_lbfgs_goes_on_bit_by_bit_at_a_newcomer():
    replicas, models, optimizers = [], [], []
    for seed in (1, 2):
        model = network(seed)
        optimizer = LBFGS(model.parameters(), max_iter=4)
        models.append(model)
        optimizers.append(optimizer)
        replicas.append(TorchReplica(model, [optimizer]))
    giver, taker = replicas

    def step(number, seed):
        closure = closure_of(models[number], optimizers[number], seed)
        replicas[number].update(lambda: replicas[number].optimizer_step(closure=closure))

    for taken in range(2):
        step(0, taken)
        taker.import_state(giver.export_state())
        assert_equal(*models)
        for number in (0, 1):
            step(number, 5)
        assert_equal(*models)


def test_an_optimizer_that_needs_a_closure_and_has_none_says_so_and_nothing_changes():
    model = network()
    before = copy.deepcopy(model)
    replica = TorchReplica(model, LBFGS(model.parameters()))
    with pytest.raises(ConfigError, match=r"LBFGS .*peer\.step\(closure=\.\.\.\)"):
        replica.update(replica.optimizer_step)
    assert_equal(model, before)
    assert replica.updates == 0


def test_an_optimizer_whose_step_a_schedule_has_wrapped_is_seen_through():
    model = network()
    optimizer = LBFGS(model.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert TorchReplica(model, optimizer).needs_closure
    other = network()
    assert not TorchReplica(other, Adam(other.parameters())).needs_closure


def test_what_a_closure_computes_is_clipped_each_time():
    model = network()
    optimizer = SGD(model.parameters(), lr=1.0)
    replica = TorchReplica(model, optimizer)
    before = torch.cat([p.detach().flatten() for p in model.parameters()])

    def closure():
        optimizer.zero_grad()
        (1e6 * loss_of(model, 0)).backward()

    replica.optimizer_step(0.5, closure)
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert float((after - before).norm()) == pytest.approx(0.5, rel=1e-3)


# Several


@pytest.mark.parametrize("clip", [None, 0.1])
def test_two_optimizers_train_as_without_a_replica(clip):
    plain, model = network(), network()
    lone, optimizers = two_of(plain), two_of(model)
    replica = TorchReplica(model, optimizers)
    for seed in range(4):
        for m in (plain, model):
            m.zero_grad()
            loss_of(m, seed).backward()
        if clip:
            held = [p for o in lone for group in o.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(held, clip)
        for optimizer in lone:
            optimizer.step()
        replica.update(lambda: replica.optimizer_step(clip))
    assert_equal(model, plain)


@pytest.mark.parametrize("average_momentum", [False, True])
def test_the_state_of_each_optimizer_is_taken_over(average_momentum):
    peers = []
    for seed in (1, 2):
        model = network(seed)
        optimizers = two_of(model, AdamW, lambda p, lr: SGD(p, lr, momentum=0.9))
        replica = TorchReplica(model, optimizers, average_momentum=average_momentum)
        peers.append((model, optimizers, replica))
    (model, optimizers, giver), (other, its, taker) = peers

    def step(m, replica, seed):
        m.zero_grad()
        loss_of(m, seed).backward()
        replica.update(replica.optimizer_step)

    for seed in range(3):
        step(model, giver, seed)
    optimizers[1].param_groups[0]["lr"] = 0.3
    taker.import_state(giver.export_state())
    assert its[1].param_groups[0]["lr"] == 0.3
    for seed in range(3):
        step(model, giver, seed)
        step(other, taker, seed)
    assert_equal(model, other)
    assert repr([o.state_dict() for o in optimizers]) == repr([o.state_dict() for o in its])


def test_states_of_other_optimizers_are_refused_and_change_nothing():
    def replica_of(make):
        model = network(1)
        return model, TorchReplica(model, make(model))

    given = replica_of(two_of)[1].export_state()
    for make, words in (
        (lambda m: SGD(m.parameters(), lr=0.1), "has 2 optimizers, this replica 1"),
        (lambda m: two_of(m, SGD, AdamW), "'AdamW'.*'SGD'"),
        (lambda m: two_of(m)[::-1], "'AdamW'.*'SGD'"),
    ):
        model, taker = replica_of(make)
        before = copy.deepcopy(model)
        with pytest.raises(StateError, match=words):
            taker.import_state(given)
        assert_equal(model, before)


def test_if_one_of_two_refuses_its_state_neither_has_it():
    peers = []
    for seed in (1, 2):
        model = network(seed)
        optimizers = two_of(model)
        peers.append((model, optimizers, TorchReplica(model, optimizers)))
    (giving, _, giver), (model, optimizers, taker) = peers
    loss_of(giving, 0).backward()
    giver.update(giver.optimizer_step)

    def dislike(*_):
        raise ValueError("I do not like it")

    optimizers[1].register_load_state_dict_post_hook(dislike)
    before = repr([o.state_dict() for o in optimizers])
    with pytest.raises(StateError, match="I do not like it"):
        taker.import_state(giver.export_state())
    assert repr([o.state_dict() for o in optimizers]) == before


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda m: [SGD(m.parameters()), AdamW(m[2].parameters())], r"2\.weight is in two .*AdamW"),
        (lambda m: [o := SGD(m.parameters()), o], r"0\.weight is in two"),
        (lambda m: [SGD(m.parameters()), SGD(nn.Linear(5, 1).parameters())], r"shape \[1, 5\]"),
    ],
)
def test_optimizers_over_something_else_or_the_same_are_refused(make, words):
    model = network()
    with pytest.raises(StateError, match=words):
        TorchReplica(model, make(model))


def test_a_group_that_another_optimizer_has_is_refused_at_the_next_step():
    model = network()
    optimizers = two_of(model)
    replica = TorchReplica(model, optimizers)
    optimizers[1].add_param_group({"params": [model[0].weight]})
    with pytest.raises(StateError, match=r"0\.weight is in two optimizers"):
        replica.update(replica.optimizer_step)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (lambda m, o: (o, m), "SGD is no module; give the peer a model, then its optimizer"),
        (lambda m, o: (m, m), "Sequential is no optimizer"),
        (lambda m, o: (m, []), "list of optimizers is empty"),
        (lambda m, o: (m, [o, None]), "NoneType is no optimizer"),
        (lambda m, o: (m, m.parameters()), "generator is no optimizer"),
    ],
)
def test_what_is_no_optimizer_is_refused(arguments, words):
    model = network()
    with pytest.raises(ConfigError, match=words):
        TorchReplica(*arguments(model, SGD(model.parameters())))


def test_a_closure_for_two_is_refused():
    model = network()
    replica = TorchReplica(model, two_of(model))
    with pytest.raises(ConfigError, match=r"for one optimizer and there are 2 \(AdamW, SGD\)"):
        replica.optimizer_step(closure=lambda: None)


# A scaler


def scaled(seed, model, scaler, spoil=False):
    model.zero_grad()
    scaler.scale(loss_of(model, seed)).backward()
    if spoil:
        model[2].bias.grad[0] = torch.inf


@pytest.mark.parametrize("spoil", [False, True])
@pytest.mark.parametrize("unscaled_before", [0, 1, 2])
def test_gradients_that_the_program_has_unscaled_are_not_unscaled_again(unscaled_before, spoil):
    model = network()
    optimizers = two_of(model)
    replica = TorchReplica(model, optimizers)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for seed in range(2):
        scaled(seed, model, scaler, spoil)
        for optimizer in optimizers[:unscaled_before]:
            scaler.unscale_(optimizer)
        if unscaled_before == 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)  # hides an infinite one
        assert replica.unscale(scaler) is not spoil
        plain = network()
        plain.load_state_dict(model.state_dict())
        loss_of(plain, seed).backward()
        if not spoil and unscaled_before < 2:
            for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(mine.grad, theirs.grad)
        if not spoil:
            replica.update(replica.optimizer_step)
        scaler.update()
    assert scaler.get_scale() == (2.0 if spoil else 8.0)


def test_a_scaler_that_has_made_the_step_is_refused():
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    replica = TorchReplica(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaled(0, model, scaler)
    scaler.step(optimizer)
    with pytest.raises(StateError, match=r"scaler\.step\(optimizer\) was called .* leave"):
        replica.unscale(scaler)


def test_a_scaler_that_is_off_says_nothing_about_gradients():
    model = network()
    replica = TorchReplica(model, SGD(model.parameters(), lr=0.1))
    loss_of(model, 0).backward()
    model[2].bias.grad[0] = torch.nan
    assert replica.unscale(torch.amp.GradScaler("cpu", enabled=False))
    with pytest.raises(StateError, match=r"2\.bias is not finite"):
        replica.export_gradients(np.empty(replica.gradient_size, np.float32), 1)
