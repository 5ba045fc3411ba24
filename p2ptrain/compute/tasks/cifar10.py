"""Photographs of ten kinds of things, 32 x 32 pixels: the task of most published comparisons.

The data are CIFAR-10's binary files (the archive ``cifar-10-binary.tar.gz``, unpacked), in a folder
that `data` names; this project does not fetch them. A file is a row of records of 3,073 bytes::

    | label, 0 to 9 | 1,024 red | 1,024 green | 1,024 blue |
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from p2ptrain.compute.resnet import resnet20
from p2ptrain.compute.tasks.base import Batch, Task
from p2ptrain.compute.tasks.classification import Classification
from p2ptrain.errors import ConfigError

TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILE = "test_batch.bin"
SIDE = 32
RECORD_BYTES = 1 + 3 * SIDE * SIDE
PAD = 4
"""Pixels by which an image is moved at most."""

_REMEDY = (
    "`data` names the folder with data_batch_1.bin to data_batch_5.bin and test_batch.bin, "
    "unpacked from cifar-10-binary.tar.gz"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Options of `cifar10`."""

    data: str = ""
    """Folder with the binary files."""

    skew_alpha: float = math.inf
    """See `Classification`."""

    own_class: int | None = None
    """See `Classification`."""

    test_images: int = 1_000
    """So many images of the test file judge a model. Too few: accuracy is known to a few percent
    only; all 10,000, for figures to publish, take a processor most of a minute each time."""

    augment: bool = True
    """Training images are moved by up to 4 pixels and half of them mirrored. Without: overfits."""

    def __post_init__(self) -> None:
        if self.test_images < 1:
            raise ConfigError(f"test_images = {self.test_images} must be 1 or more")


def cifar10(config: Config) -> Task:
    """CIFAR-10 and ResNet-20, 0.27 million parameters.

    Published: 91 % after 64,000 steps of 128 images.

    Raises:
        ConfigError: if the files are missing or not in the binary format.
    """
    if not config.data:
        raise ConfigError(f"task 'cifar10' needs its data: {_REMEDY}")
    folder = Path(config.data).expanduser()
    parts = [_read(folder / name) for name in TRAIN_FILES]
    images, labels = _read(folder / TEST_FILE)
    return Classification(
        build=_network,
        train=(torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])),
        held_out=(images[: config.test_images], labels[: config.test_images]),
        skew_alpha=config.skew_alpha,
        own_class=config.own_class,
        **({"augment": moved_and_mirrored} if config.augment else {}),
    )


def moved_and_mirrored(images: Tensor, rng: torch.Generator) -> Tensor:
    """Each image moved by up to `PAD` pixels both ways, black where it left; half are mirrored."""
    count = len(images)
    padded = nn.functional.pad(images, (PAD, PAD, PAD, PAD))
    corners = torch.randint(2 * PAD + 1, (2, count, 1), generator=rng)
    mirrored = torch.rand(count, 1, generator=rng) < 0.5
    rows = corners[0] + torch.arange(SIDE)
    columns = corners[1] + torch.arange(SIDE)
    columns = torch.where(mirrored, columns.flip(1), columns)
    which = torch.arange(count)[:, None, None]
    # Indices beside a slice put the slice last: (B, 32, 32, 3).
    return padded[which, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def _network() -> nn.Module:
    return resnet20()


def _read(path: Path) -> Batch:
    """Images ``(N, 3, 32, 32)`` as bytes, and labels."""
    try:
        content = np.fromfile(path, np.uint8)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; {_REMEDY}") from error
    if not content.size or content.size % RECORD_BYTES:
        raise ConfigError(
            f"{path} has {content.size} bytes, which is not a number of records of {RECORD_BYTES}; "
            f"{_REMEDY}"
        )
    records = torch.from_numpy(content).view(-1, RECORD_BYTES)
    labels = records[:, 0].long()
    if labels.max() > 9:
        raise ConfigError(
            f"{path} has the label {labels.max()}, and CIFAR-10 has 0 to 9; {_REMEDY}"
        )
    return records[:, 1:].reshape(-1, 3, SIDE, SIDE), labels
