"""What is compared among peers, without any peer: descriptions, digests, the majority."""

import pytest
import torch
from torch import nn

from p2ptrain.compute.contract import described, difference, outliers, update_rule
from p2ptrain.compute.torch_replica import TorchReplica
from p2ptrain.core.contribution import Contribution
from p2ptrain.ids import PeerId


def net(frozen: float | None = None) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    if frozen is not None:
        model[0].requires_grad_(False)
        model[0].weight.data.fill_(frozen)
    return model


def rule_of(model: nn.Module, kind=torch.optim.SGD, **settings):
    trained = [p for p in model.parameters() if p.requires_grad]
    return TorchReplica(model, kind(trained, **{"lr": 0.1} | settings)).update_rule


@pytest.mark.parametrize(
    ("one", "other"), [(1, 1.0), (0.1, 0.1 + 1e-17), ((0.9, 1), [0.9, 1.0]), (1e-3, 0.001)]
)
def test_equal_values_are_described_alike(one, other):
    assert described(one) == described(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, True), ("1", 1), (None, "None"), (0.1, 0.1000001), ("x" * 999, "x" * 998)],
)
def test_other_values_are_described_otherwise_and_in_few_characters(one, other):
    assert described(one) != described(other)
    assert max(len(described(one)), len(described(other))) <= 300


def test_the_first_difference_has_both_values_and_equal_descriptions_have_none():
    assert difference("a", {"x": "1", "y": "2"}, "b", {"x": "1", "y": "3"}) == (
        "y is 3 at b and 2 at a"
    )
    assert difference("a", {"x": "1"}, "b", {}) == "x is not set at b and 1 at a"
    assert difference("a", {"x": "1"}, "b", {"x": "1"}) == ""


@pytest.mark.parametrize(
    ("name", "kind", "settings"),
    [
        ("lr", torch.optim.SGD, {"lr": 0.2}),
        ("momentum", torch.optim.SGD, {"momentum": 0.9}),
        ("weight_decay", torch.optim.SGD, {"weight_decay": 0.1}),
        ("optimizer", torch.optim.Adam, {}),
    ],
)
def test_what_changes_an_update_changes_the_rule(name, kind, settings):
    one, other = rule_of(net()), rule_of(net(), kind, **settings)
    assert one.digest != other.digest
    assert difference("a", one.description, "b", other.description).startswith(f"{name} is")


def test_how_an_update_is_computed_does_not_change_the_rule():
    assert rule_of(net()).digest == rule_of(net(), foreach=False).digest
    tensor = rule_of(net(), torch.optim.Adam, lr=torch.tensor(0.5), foreach=False, capturable=False)
    assert tensor.digest == rule_of(net(), torch.optim.Adam, lr=0.5).digest


def test_a_schedule_changes_the_rule_and_its_notes_in_the_groups_do_not():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = TorchReplica(model, optimizer)
    before = replica.update_rule
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    assert replica.update_rule.digest == before.digest, "initial_lr is a note"
    optimizer.step()
    schedule.step()
    assert replica.update_rule.digest != before.digest
    optimizer.param_groups[0]["lr"] = 0.1
    assert replica.update_rule.digest == before.digest


def test_a_rule_is_written_anew_only_where_something_has_changed():
    model = net()
    replica = TorchReplica(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert replica.update_rule is replica.update_rule


def test_which_parameters_are_in_which_group_is_part_of_the_rule():
    rules = []
    for cut in (1, 2):
        model = net()
        both = list(model.parameters())
        groups = [{"params": both[:cut], "weight_decay": 0.1}, {"params": both[cut:]}]
        rules.append(TorchReplica(model, torch.optim.SGD(groups, lr=0.1)).update_rule)
    said = difference("a", rules[0].description, "b", rules[1].description)
    assert said.startswith("parameter groups is '2 + 2 (")


def test_frozen_parameters_are_compared_by_shape_and_by_value():
    one, other = rule_of(net(1.0)), rule_of(net(2.0))
    assert one.digest == rule_of(net(1.0)).digest != other.digest
    assert "frozen parameters is" in difference("a", one.description, "b", other.description)
    narrow, wide = net(1.0), net(1.0)
    wide.extra = nn.Parameter(torch.zeros(5), requires_grad=False)
    replicas = [TorchReplica(m, torch.optim.SGD(m[1].parameters(), lr=0.1)) for m in (narrow, wide)]
    assert replicas[0].fingerprint != replicas[1].fingerprint
    assert "frozen extra float32 [5]" in replicas[1].tensors


def test_a_rule_of_many_groups_is_shown_in_part_and_compared_as_a_whole():
    rules = [update_rule(*((f"lr {n}", n * last) for n in range(500))) for last in (1, 2)]
    assert len(rules[0].description) == 64
    assert rules[0].digest != rules[1].digest


def stated(**rules: tuple[int, int]) -> dict[PeerId, Contribution]:
    return {PeerId(n): Contribution(rule=r, samples=s) for n, (r, s) in rules.items()}


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        (stated(a=(7, 0), b=(7, 9)), ()),
        (stated(a=(7, 99), b=(8, 0), c=(8, 0)), ("a",)),
        (stated(a=(7, 0), b=(8, 9)), ("a",)),
        (stated(a=(7, 0), b=(8, 0)), ("b",)),
        (stated(a=(7, 0), b=(8, 0), c=(9, 1)), ("a", "b")),
        (stated(a=(7, 0), b=(0, 9)), ()),
        ({}, ()),
    ],
)
def test_those_are_wrong_whose_rule_is_not_that_of_most_nor_of_the_most_trained(said, wrong):
    assert outliers(said) == wrong
