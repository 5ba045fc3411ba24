"""What there is to learn: a model, its data, a loss, and how well it does.

A task is one function that returns a `Task`; its name in `_TASKS` is its configuration name. Most
are a `Classification`: a network over tensors of samples and labels.

Every random choice follows from the arguments, by a generator of its own, so that neither the
user's random state nor another choice is disturbed:

* which samples are held out: from the task alone. Runs with different seeds are tested alike;
* the initial model: from the seed alone. All peers start equal without a word on the wire;
* the shards: from seed and number of peers. Every sample is in exactly one shard, and shards are
  drawn at random, so that they have the same distribution;
* the order within a shard: from seed, number of peers and rank, anew in each epoch.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from p2ptrain.errors import ConfigError

Batch = tuple[Tensor, Tensor]
"""Inputs and targets, first dimension samples."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """How well a model does on held-out data."""

    loss: float
    """Mean over the samples."""

    accuracy: float | None
    """Share of right answers, 0 to 1; None where a task knows no right answer."""


class Task(Protocol):
    """One thing to learn, the same for all peers."""

    def build_model(self, seed: int) -> nn.Module:
        """A new model on the host; equal seeds give equal bits."""
        ...

    def batches(self, rank: int, peers: int, batch_size: int, seed: int) -> Iterator[Batch]:
        """Batches of `rank`'s shard, for ever, each of exactly `batch_size` samples.

        Raises ConfigError if there are more peers than samples.
        """
        ...

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss of one batch, on the model's device, ready for backward."""
        ...

    def evaluate(self, model: nn.Module) -> Evaluation:
        """Judge `model` on the held-out data, in evaluation mode; it is left as it was."""
        ...


def load_task(name: str) -> Task:
    """Build the task called `name`.

    Raises:
        ConfigError: if there is none; the message lists those there are.
    """
    if name not in _TASKS:
        raise ConfigError(f"there is no task {name!r}; there are: {', '.join(sorted(_TASKS))}")
    return _TASKS[name]()


@dataclass(frozen=True, slots=True)
class Classification:
    """A `Task` of telling classes apart, by cross-entropy."""

    build: Callable[[], nn.Module]
    """Makes a network from torch's default generator; ``(B, ...)`` to ``(B, classes)``."""

    train: Batch
    held_out: Batch

    def build_model(self, seed: int) -> nn.Module:
        """The network, initialised from the seed."""
        # Only the host's generator: initialisation happens there, and torch.manual_seed would
        # also reset the devices', which fork_rng does not give back here.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(_sub_seed("model", seed))
            return self.build()

    def batches(self, rank: int, peers: int, batch_size: int, seed: int) -> Iterator[Batch]:
        """Endless batches of one shard; a batch may reach into the next epoch, none is short."""
        inputs, targets = self.train
        shard = shard_of(len(targets), rank, peers, seed)
        order = _generator("order", seed, peers, rank)
        return ((inputs[i], targets[i]) for i in _endless(shard, batch_size, order))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross-entropy."""
        inputs, targets = _on_device_of(model, batch)
        return nn.functional.cross_entropy(model(inputs), targets)

    def evaluate(self, model: nn.Module) -> Evaluation:
        """Mean cross-entropy and share of right answers on the held-out samples."""
        inputs, targets = _on_device_of(model, self.held_out)
        training = [module for module in model.modules() if module.training]
        model.eval()
        try:
            with torch.no_grad():
                scores = model(inputs)
                loss = nn.functional.cross_entropy(scores, targets).item()
                right = (scores.argmax(dim=1) == targets).float().mean().item()
        finally:
            for module in training:
                module.training = True  # train() would also wake those that slept before
        return Evaluation(loss, right)


def digits() -> Task:
    """Handwritten digits of 8 x 8 pixels (scikit-learn's, 1,797 of them) and a network of 17,226.

    360 samples are held out, stratified by digit. Plain SGD passes 0.96 within a few epochs.
    """
    images, labels = _load_digits()
    train, held_out = _split(labels, held_out=360)
    return Classification(
        build=_digits_network,
        train=(images[train], labels[train]),
        held_out=(images[held_out], labels[held_out]),
    )


_TASKS: dict[str, Callable[[], Task]] = {"digits": digits}


def shard_of(samples: int, rank: int, peers: int, seed: int) -> Tensor:
    """The indices of `rank`'s shard; the shards of all ranks are disjoint and leave nothing out.

    Raises:
        ConfigError: if there is no such rank, or not a sample for everyone.
    """
    if not 0 <= rank < peers:
        raise ConfigError(f"rank = {rank}: there are {peers} peers, ranks 0 to {peers - 1}")
    if peers > samples:
        raise ConfigError(f"{peers} peers cannot share {samples} samples; take fewer peers")
    shuffled = torch.randperm(samples, generator=_generator("shards", seed, peers))
    return shuffled[rank::peers]


def _endless(shard: Tensor, batch_size: int, order: torch.Generator) -> Iterator[Tensor]:
    """Cut the shard's epochs, each shuffled anew, end to end into equal pieces."""
    rest = shard[:0]
    while True:
        while len(rest) < batch_size:
            rest = torch.cat([rest, shard[torch.randperm(len(shard), generator=order)]])
        yield rest[:batch_size]
        rest = rest[batch_size:]


def _load_digits() -> Batch:
    """Inputs of 0 to 1, ``(1797, 64)``, and labels."""
    # A second to import, and only this task needs it.
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return torch.from_numpy(images).float().div_(16), torch.from_numpy(labels).long()


def _split(labels: Tensor, held_out: int) -> tuple[Tensor, Tensor]:
    """Indices to train on and to hold out, the latter with every class in its share."""
    shuffled = torch.randperm(len(labels), generator=_generator("held out"))
    by_class = shuffled[torch.argsort(labels[shuffled], stable=True)]
    chosen = torch.linspace(0, len(labels) - 1, held_out).round().long()
    is_held_out = torch.zeros(len(labels), dtype=torch.bool)
    is_held_out[chosen] = True
    return by_class[~is_held_out], by_class[is_held_out]


def _digits_network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 128),
        nn.ReLU(),
        nn.Linear(128, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def _on_device_of(model: nn.Module, batch: Batch) -> Batch:
    device = next(model.parameters()).device
    return batch[0].to(device), batch[1].to(device)


def _generator(*purpose: object) -> torch.Generator:
    return torch.Generator().manual_seed(_sub_seed(*purpose))


def _sub_seed(*purpose: object) -> int:
    """A seed of its own for each purpose; neighbouring seeds do not give related streams."""
    text = "/".join(map(str, purpose))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "little")
