"""Who trains on what: every sample belongs to exactly one peer, and each peer has some.

Nothing is sent: each peer computes all shards from the run's seed and the number of peers, and
takes its own. Four ways to share:

* `shard_of`          at random, so that all shards have the same distribution (IID);
* `skewed_shard_of`   by label: the samples of each class are dealt in shares drawn from a symmetric
  Dirichlet distribution, ``shares_c ~ Dir(alpha)``, the usual model of data that stayed where it
  arose (Hsu, Qi, Brown, "Measuring the effects of non-identical data distribution", 2019). At
  alpha = 100 shards are hardly unlike, at 1 clearly, at 0.1 a peer knows one or two classes;
* `owned_shard_of`    at random, but for one class, which one peer alone has;
* `piece_of`          contiguous pieces of one long thing, for text.
"""

from collections.abc import Iterator
from itertools import accumulate
from random import Random

import torch
from torch import Tensor

from p2ptrain.compute.seeds import generator
from p2ptrain.errors import ConfigError


def shard_of(samples: int, rank: int, peers: int, seed: int) -> Tensor:
    """The indices of `rank`'s shard; sizes differ by one at most.

    Raises:
        ConfigError: if there is no such rank, or not a sample for everyone.
    """
    _check(samples, rank, peers)
    shuffled = torch.randperm(samples, generator=generator("shards", seed, peers))
    return shuffled[rank::peers]


def skewed_shard_of(labels: Tensor, rank: int, peers: int, seed: int, alpha: float) -> Tensor:
    """The indices of `rank`'s shard when each class is dealt in Dirichlet shares.

    Args:
        labels: class of each sample, integers, one-dimensional.
        rank: whose shard.
        peers: how many there are.
        seed: the run's.
        alpha: above 0; infinity gives `shard_of`. Sizes differ too, the more the smaller it is.

    Raises:
        ConfigError: if there is no such rank, or not a sample for everyone.
    """
    if alpha == float("inf"):
        return shard_of(len(labels), rank, peers, seed)
    _check(len(labels), rank, peers)
    order = torch.randperm(len(labels), generator=generator("skewed shards", seed, peers))
    # The stdlib's generator, whose streams do not change from release to release: peers with
    # unlike versions of torch or numpy must draw the same shares.
    rng = Random(f"skewed shards/{seed}/{peers}")
    shards: list[list[int]] = [[] for _ in range(peers)]
    for label in sorted(set(labels.tolist())):
        members = order[labels[order] == label].tolist()
        ends = [round(end * len(members)) for end in accumulate(_dirichlet(alpha, peers, rng))]
        for shard, begin, end in zip(shards, [0, *ends], [*ends[:-1], len(members)], strict=False):
            shard += members[begin:end]
    _feed_the_empty(shards)
    return torch.tensor(shards[rank])


def owned_shard_of(labels: Tensor, rank: int, peers: int, seed: int, label: int) -> Tensor:
    """The indices of `rank`'s shard when the last rank alone has all samples of class `label`.

    The others' samples are dealt so that shards are of one size, as far as that goes.

    Raises:
        ConfigError: if there is no such rank or class, or not a sample for everyone.
    """
    _check(len(labels), rank, peers)
    order = torch.randperm(len(labels), generator=generator("owned shards", seed, peers))
    owned, rest = order[labels[order] == label], order[labels[order] != label]
    if not len(owned):
        raise ConfigError(f"own_class = {label}: there is no sample of that class")
    if len(rest) < peers - 1:
        raise ConfigError(f"{peers - 1} peers cannot share {len(rest)} samples; take fewer peers")
    filled = max(0, len(labels) // peers - len(owned)) if peers > 1 else len(rest)
    if rank == peers - 1:
        return torch.cat([owned, rest[:filled]])
    return rest[filled:][rank :: peers - 1]


def piece_of(length: int, rank: int, peers: int, seed: int) -> range:
    """The places of `rank`'s piece of something `length` long; which piece is drawn from the seed.

    Raises:
        ConfigError: if there is no such rank, or not a place for everyone.
    """
    _check(length, rank, peers)
    piece = int(torch.randperm(peers, generator=generator("pieces", seed, peers))[rank])
    return range(length * piece // peers, length * (piece + 1) // peers)


def endless(shard: Tensor, batch_size: int, order: torch.Generator) -> Iterator[Tensor]:
    """Cut the shard's epochs, each shuffled anew, end to end into equal pieces."""
    rest = shard[:0]
    while True:
        while len(rest) < batch_size:
            rest = torch.cat([rest, shard[torch.randperm(len(shard), generator=order)]])
        yield rest[:batch_size]
        rest = rest[batch_size:]


def _dirichlet(alpha: float, peers: int, rng: Random) -> list[float]:
    """Shares that sum to 1, by breaking a stick.

    Normalised gamma variates, the common way, all underflow to 0 for a small alpha.
    """
    shares, left = [], 1.0
    for others in range(peers - 1, 0, -1):
        share = left * rng.betavariate(alpha, alpha * others)
        shares.append(share)
        left -= share
    return [*shares, left]


def _feed_the_empty(shards: list[list[int]]) -> None:
    """Give each empty shard a sample of the largest; there is one for everyone."""
    for shard in shards:
        if not shard:
            shard.append(max(shards, key=len).pop())


def _check(samples: int, rank: int, peers: int) -> None:
    if not 0 <= rank < peers:
        raise ConfigError(f"rank = {rank}: there are {peers} peers, ranks 0 to {peers - 1}")
    if peers > samples:
        raise ConfigError(f"{peers} peers cannot share {samples} samples; take fewer peers")
