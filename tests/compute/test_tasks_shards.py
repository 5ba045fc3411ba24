"""Shards by label: every sample in one shard, nobody without, and as unlike as asked for."""

import math

import pytest
import torch

from p2ptrain.compute.shards import owned_shard_of, shard_of, skewed_shard_of
from p2ptrain.compute.tasks import load_task
from p2ptrain.errors import ConfigError

LABELS = torch.arange(1_000) % 10


def shards(alpha, peers=8, seed=3, labels=LABELS):
    return [skewed_shard_of(labels, rank, peers, seed, alpha) for rank in range(peers)]


def commonest_share(alpha):
    """The share of a peer's most common label, on average over the peers."""
    counts = [torch.bincount(LABELS[shard], minlength=10) for shard in shards(alpha)]
    return sum(float(count.max() / count.sum()) for count in counts) / len(counts)


@pytest.mark.parametrize("alpha", [1e-9, 0.01, 0.5, 100.0, math.inf])
@pytest.mark.parametrize("peers", [1, 3, 64])
def test_every_sample_is_in_exactly_one_shard_and_no_shard_is_empty(alpha, peers):
    dealt = shards(alpha, peers)
    assert torch.equal(torch.cat(dealt).sort().values, torch.arange(1_000))
    assert min(map(len, dealt)) >= 1


def test_as_many_peers_as_samples_get_one_each():
    assert [len(shard) for shard in shards(0.1, 20, labels=LABELS[:20])] == [1] * 20


def test_the_smaller_alpha_the_more_unlike_the_shards():
    shares = [commonest_share(alpha) for alpha in (math.inf, 1.0, 0.1)]
    assert shares == sorted(shares)
    assert shares[0] < 0.25
    assert shares[2] > 0.4


def test_an_infinite_alpha_is_the_shards_without_skew():
    assert torch.equal(shards(math.inf)[2], shard_of(1_000, 2, 8, 3))


@pytest.mark.parametrize("peers", [1, 2, 4, 64])
def test_the_last_peer_alone_has_the_class_that_it_owns(peers):
    dealt = [owned_shard_of(LABELS, rank, peers, 3, 7) for rank in range(peers)]
    assert torch.equal(torch.cat(dealt).sort().values, torch.arange(1_000))
    assert set(dealt[-1].tolist()) >= set((LABELS == 7).nonzero().flatten().tolist())
    if peers <= 10:  # beyond, the class alone is more than a share
        assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


def test_a_class_that_nobody_has_cannot_be_owned():
    with pytest.raises(ConfigError, match="own_class = 10: there is no sample"):
        next(load_task("digits", {"own_class": 10}).batches(0, 4, 32, 1))
    with pytest.raises(ConfigError, match="give one of them"):
        load_task("digits", {"own_class": 1, "skew_alpha": 0.5})


def test_skewed_shards_follow_from_the_seed():
    assert torch.equal(shards(0.5)[1], shards(0.5)[1])
    assert shards(0.5)[1].tolist() != shards(0.5, seed=4)[1].tolist()


def test_a_task_deals_its_samples_by_label_when_asked_to():
    labels = [
        next(load_task("digits", options).batches(0, 8, 100, 0))[1].bincount(minlength=10)
        for options in ({}, {"skew_alpha": 0.1})
    ]
    assert labels[0].max() < 30 < labels[1].max()


@pytest.mark.parametrize("alpha", [0.0, -1.0, math.nan])
def test_an_alpha_that_is_not_above_zero_is_refused(alpha):
    with pytest.raises(ConfigError, match=r"skew_alpha = .* must be above 0"):
        load_task("digits", {"skew_alpha": alpha})
