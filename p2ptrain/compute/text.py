"""Real text that every machine has: the running Python's own standard library.

Python source is a good first language: prose in docstrings, structure in code. Left out are tests,
installed packages, and files that programs wrote (character tables, the manual as one string, what
the build recorded of its machine): near-copies of each other or of nothing else, they would make
held-out text either known or foreign. What remains of CPython 3.11 are 608 files, 9.9 MB.

The order of files is by a hash of their names: the same on every machine with the same Python, and
without the alphabet's neighbourhoods, so that the beginning and any stretch resemble the whole.
"""

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from p2ptrain.errors import ConfigError

HELD_OUT_SHARE = 20
"""One part in so many is held out."""

_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    | {"encodings", "pydoc_data"}
)


@dataclass(frozen=True, slots=True)
class Text:
    """Bytes to train on, and others to be judged by."""

    train: Tensor
    """uint8, one-dimensional; never written to."""

    held_out: Tensor
    """Of other files, or of the end of the only one."""


@cache
def standard_library(max_bytes: int) -> Text:
    """Files of the standard library, up to `max_bytes` in all; whole files are held out.

    Raises:
        ConfigError: if this Python came without its sources.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [_read(path) for path in _sources(folder)]
    if len(files) < 2:
        raise ConfigError(
            f"{folder} holds no Python sources to learn from; name a text file with `data`"
        )
    sizes = np.cumsum([len(text) for text in files])
    held_out = 1 + int(np.searchsorted(sizes, min(sizes[-1], max_bytes) // HELD_OUT_SHARE))
    first, rest = b"".join(files[:held_out]), b"".join(files[held_out:])
    return Text(_tensor(rest[: max(0, max_bytes - len(first))]), _tensor(first))


def file_text(path: str, max_bytes: int) -> Text:
    """The first `max_bytes` of a file, whatever its language; the last part of them is held out.

    Raises:
        ConfigError: if the file cannot be read, or is empty.
    """
    try:
        with Path(path).expanduser().open("rb") as file:
            text = file.read(max_bytes)
    except OSError as error:
        raise ConfigError(
            f"cannot read data = {path!r}: {error.strerror}; name a text file"
        ) from error
    if not text:
        raise ConfigError(f"data = {path!r} is empty; name a file with text")
    cut = len(text) - len(text) // HELD_OUT_SHARE
    return Text(_tensor(text[:cut]), _tensor(text[cut:]))


def unigram_loss(text: Text) -> float:
    """Nats per byte of a model that knows how frequent each byte is and nothing else."""
    counts = torch.bincount(text.train.int(), minlength=256).double() + 1
    frequencies = counts / counts.sum()
    return float(-frequencies.log()[text.held_out.long()].mean())


def _sources(folder: Path) -> list[Path]:
    kept = []
    for place, inner, names in os.walk(folder):
        inner[:] = [name for name in inner if name not in _LEFT_OUT]  # packages may be gigabytes
        found = (Path(place, name).relative_to(folder) for name in names if name.endswith(".py"))
        kept += [path for path in found if not _is_of_this_machine(path)]
    return [
        folder / path
        for path in sorted(kept, key=lambda p: hashlib.sha256(p.as_posix().encode()).digest())
    ]


def _is_of_this_machine(path: Path) -> bool:
    """What the build recorded."""
    return path.name.startswith("_sysconfigdata") or path.parts[0].startswith("config-")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}; name a text file with `data`"
        ) from error


def _tensor(text: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(text, np.uint8).copy())
