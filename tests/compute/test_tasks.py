"""Tasks: one model and one split for all peers, shards of their own, no seed disturbed."""

import sys
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import nn

from p2ptrain.compute.shards import shard_of
from p2ptrain.compute.tasks import load_task
from p2ptrain.errors import ConfigError


@pytest.fixture(scope="module")
def digits():
    return load_task("digits")


def test_an_unknown_task_is_refused_with_those_there_are():
    with pytest.raises(
        ConfigError, match=r"unknown task 'digit'; did you mean 'digits'\? there are: .*digits"
    ):
        load_task("digit")


def test_digits_without_scikit_learn_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ConfigError, match=r"needs scikit-learn; pip install 'p2ptrain\[lab\]'"):
        load_task("digits")


def test_digits_are_those_of_scikit_learn_wherever_it_keeps_its_file(digits, monkeypatch):
    monkeypatch.setattr(Path, "exists", lambda _: False)
    assert torch.equal(load_task("digits").train[0], digits.train[0])


def test_the_data_are_scaled_and_split_without_overlap(digits):
    inputs, targets = digits.train
    held_out, held_out_targets = digits.held_out
    assert (len(inputs), len(held_out)) == (1437, 360)
    assert (inputs.min(), inputs.max()) == (0, 1)
    assert len(torch.cat([inputs, held_out]).unique(dim=0)) == 1797
    assert torch.bincount(held_out_targets).min() >= 34
    assert torch.bincount(targets).min() >= 139


def test_the_split_is_the_same_every_time(digits):
    assert torch.equal(load_task("digits").held_out[0], digits.held_out[0])


def test_all_peers_start_from_the_same_model_and_seeds_differ(digits):
    first, second, other = (digits.build_model(seed) for seed in (1, 1, 2))
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    assert not torch.equal(first[0].weight, other[0].weight)
    assert 10_000 < sum(p.numel() for p in first.parameters()) < 60_000


def test_nothing_here_disturbs_the_users_random_state(digits):
    before = torch.get_rng_state()
    digits.build_model(3)
    next(digits.batches(0, 2, 8, 3))
    load_task("digits")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("peers", [1, 3, 16])
def test_shards_are_disjoint_equal_in_size_and_leave_nothing_out(peers):
    shards = [shard_of(1437, rank, peers, seed=5) for rank in range(peers)]
    assert torch.equal(torch.cat(shards).sort().values, torch.arange(1437))
    sizes = [len(shard) for shard in shards]
    assert max(sizes) - min(sizes) <= 1


def test_shards_are_drawn_from_the_seed():
    assert torch.equal(shard_of(100, 1, 4, 5), shard_of(100, 1, 4, 5))
    assert not torch.equal(shard_of(100, 1, 4, 5), shard_of(100, 1, 4, 6))


def test_shards_have_the_same_distribution(digits):
    _, targets = digits.train
    for rank in range(4):
        counts = torch.bincount(targets[shard_of(1437, rank, 4, 0)], minlength=10)
        assert counts.min() >= 20  # of 36 expected; sorted labels would give zeros


@pytest.mark.parametrize(("rank", "peers"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_that_does_not_exist_is_refused(digits, rank, peers):
    with pytest.raises(ConfigError, match=f"rank = {rank}: there are {peers} peers"):
        digits.batches(rank, peers, 8, 0)


def test_more_peers_than_samples_are_refused(digits):
    with pytest.raises(ConfigError, match="1438 peers cannot share 1437 samples"):
        digits.batches(0, 1438, 8, 0)


def test_an_epoch_gives_every_sample_of_the_shard_once_and_is_shuffled_anew(digits):
    batches = digits.batches(1, 3, 479, 0)  # a shard has 479 samples
    first, second = next(batches)[0], next(batches)[0]
    shard = digits.train[0][shard_of(1437, 1, 3, 0)]
    assert torch.equal(first.unique(dim=0), shard.unique(dim=0))
    assert torch.equal(second.unique(dim=0), shard.unique(dim=0))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("batch_size", [1, 32, 500])
def test_no_batch_is_short(digits, batch_size):
    for inputs, targets in islice(digits.batches(0, 10, batch_size, 0), 20):
        assert inputs.shape == (batch_size, 64)
        assert targets.shape == (batch_size,)


def test_batches_follow_from_rank_peers_and_seed(digits):
    def first(rank, peers, seed):
        return next(digits.batches(rank, peers, 16, seed))[0]

    assert torch.equal(first(0, 2, 7), first(0, 2, 7))
    for other in ((1, 2, 7), (0, 3, 7), (0, 2, 8)):
        assert not torch.equal(first(0, 2, 7), first(*other))


def test_an_evaluation_leaves_the_model_as_it_was(digits):
    model = nn.Sequential(nn.BatchNorm1d(64), nn.Dropout(0.5), nn.Linear(64, 10))
    model[0].eval()
    mean = model[0].running_mean.clone()
    first, second = digits.evaluate(model), digits.evaluate(model)
    assert first == second
    assert [module.training for module in model] == [False, True, True]
    assert model.training
    assert torch.equal(model[0].running_mean, mean)


def test_an_untrained_model_knows_nothing(digits):
    evaluation = digits.evaluate(digits.build_model(0))
    assert evaluation.loss == pytest.approx(2.3, abs=0.1)
    assert evaluation.accuracy < 0.4
