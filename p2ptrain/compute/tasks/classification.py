"""Telling classes apart: what most tasks are, and a ready shell for one's own."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from p2ptrain.compute.seeds import build_seeded, generator
from p2ptrain.compute.shards import endless, owned_shard_of, skewed_shard_of
from p2ptrain.compute.tasks.base import Batch, Evaluation, batches_of, judging, on_device_of
from p2ptrain.errors import ConfigError

AT_ONCE = 500
"""Samples that are evaluated at once; more would need more memory than training does."""


def unchanged(inputs: Tensor, rng: torch.Generator) -> Tensor:
    """No augmentation."""
    return inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Classification:
    """A `Task` of telling classes apart, by cross-entropy."""

    build: Callable[[], nn.Module]
    """Makes a network from torch's default generator; ``(B, ...)`` to ``(B, classes)``."""

    train: Batch
    held_out: Batch

    skew_alpha: float = math.inf
    """How unlike the peers' shards are in their labels: infinity, not at all; 1, clearly; 0.1, a
    peer knows one or two classes. Too small: peers with a handful of samples, which they repeat."""

    own_class: int | None = None
    """A class of which the last peer by rank has all samples, and no other any; it has no more
    samples than the others. None: no such class. It and `skew_alpha` exclude each other."""

    augment: Callable[[Tensor, torch.Generator], Tensor] = unchanged
    """Varies the inputs of a batch, drawing from nothing but the given generator."""

    def __post_init__(self) -> None:
        if not self.skew_alpha > 0:
            raise ConfigError(
                f"skew_alpha = {self.skew_alpha} must be above 0; inf gives all peers alike shards"
            )
        if self.own_class is not None and self.skew_alpha != math.inf:
            raise ConfigError(
                f"own_class = {self.own_class} and skew_alpha = {self.skew_alpha}: give one of them"
            )

    def build_model(self, seed: int) -> nn.Module:
        """The network, initialised from the seed."""
        return build_seeded(self.build, seed)

    def batches(self, rank: int, peers: int, batch_size: int, seed: int) -> Iterator[Batch]:
        """Endless batches of one shard; a batch may reach into the next epoch, none is short."""
        inputs, targets = self.train
        if self.own_class is not None:
            shard = owned_shard_of(targets, rank, peers, seed, self.own_class)
        else:
            shard = skewed_shard_of(targets, rank, peers, seed, self.skew_alpha)
        order = generator("order", seed, peers, rank)
        rng = generator("augment", seed, peers, rank)
        return (
            (self.augment(inputs[i], rng), targets[i]) for i in endless(shard, batch_size, order)
        )

    @property
    def samples(self) -> int:
        """Those that are not held out."""
        return len(self.train[1])

    def batch_of(self, indices: Sequence[int], seed: int) -> Batch:
        """These samples, varied by what follows from the seed and the first of them."""
        inputs, targets = self.train
        rng, these = generator("augment", seed, *indices[:1]), torch.tensor(indices)
        return self.augment(inputs[these], rng), targets[these]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross-entropy."""
        inputs, targets = on_device_of(model, batch)
        return nn.functional.cross_entropy(model(inputs), targets)

    def evaluate(self, model: nn.Module) -> Evaluation:
        """Mean cross-entropy and share of right answers on the held-out samples."""
        labels = self.held_out[1]
        count, loss, found = len(labels), 0.0, torch.zeros(0, dtype=torch.long)
        with judging(model), torch.no_grad():
            for batch in batches_of(self.held_out, AT_ONCE):
                inputs, targets = on_device_of(model, batch)
                scores = model(inputs)
                loss += nn.functional.cross_entropy(scores, targets, reduction="sum").item()
                found = torch.cat([found, targets[scores.argmax(dim=1) == targets].cpu()])
        of_class = torch.bincount(labels.cpu())
        right = torch.bincount(found, minlength=len(of_class))
        recall = (right / of_class.clamp(min=1)).tolist()
        return Evaluation(loss / count, len(found) / count, tuple(recall))
