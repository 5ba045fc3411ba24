"""Handwritten digits of 8 x 8 pixels: the smallest task, for first tries and for tests."""

import math
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from p2ptrain.compute.seeds import generator
from p2ptrain.compute.tasks.base import Batch, Task
from p2ptrain.compute.tasks.classification import Classification
from p2ptrain.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Options of `digits`."""

    skew_alpha: float = math.inf
    """See `Classification`."""

    own_class: int | None = None
    """See `Classification`."""


def digits(config: Config) -> Task:
    """scikit-learn's 1,797 digits and a network of 17,226.

    360 samples are held out, stratified by digit. Plain SGD passes 0.96 within a few epochs.
    """
    images, labels = _load_digits()
    train, held_out = _split(labels, held_out=360)
    return Classification(
        build=_network,
        train=(images[train], labels[train]),
        held_out=(images[held_out], labels[held_out]),
        skew_alpha=config.skew_alpha,
        own_class=config.own_class,
    )


def _load_digits() -> Batch:
    """Inputs of 0 to 1, ``(1797, 64)``, and labels."""
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise ConfigError(
            "task 'digits' needs scikit-learn; pip install 'p2ptrain[lab]', or take another task"
        )
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if file.exists():  # to import scikit-learn takes a second of a processor, its file takes none
        rows = np.loadtxt(file, delimiter=",", dtype=np.float32)
        images, labels = rows[:, :-1].copy(), rows[:, -1]
    else:  # another release may have it elsewhere
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
    return torch.from_numpy(images).float().div_(16), torch.from_numpy(labels).long()


def _split(labels: Tensor, held_out: int) -> tuple[Tensor, Tensor]:
    """Indices to train on and to hold out, the latter with every class in its share."""
    shuffled = torch.randperm(len(labels), generator=generator("held out"))
    by_class = shuffled[torch.argsort(labels[shuffled], stable=True)]
    chosen = torch.linspace(0, len(labels) - 1, held_out).round().long()
    is_held_out = torch.zeros(len(labels), dtype=torch.bool)
    is_held_out[chosen] = True
    return by_class[~is_held_out], by_class[is_held_out]


def _network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 128),
        nn.ReLU(),
        nn.Linear(128, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
