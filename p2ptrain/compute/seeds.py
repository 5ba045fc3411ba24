"""Random choices that follow from a purpose and numbers, and from nothing else.

Each purpose gets a generator of its own, so that neither the user's random state nor another choice
is disturbed, and so that every peer draws the same without a word on the wire.
"""

import hashlib
from collections.abc import Callable

import torch
from torch import nn


def sub_seed(*purpose: object) -> int:
    """A seed of its own for each purpose; neighbouring seeds do not give related streams."""
    text = "/".join(map(str, purpose))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "little")


def generator(*purpose: object) -> torch.Generator:
    """A generator on the host, seeded with `sub_seed`."""
    return torch.Generator().manual_seed(sub_seed(*purpose))


def build_seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Call `build`, which draws from torch's default generator; equal seeds give equal bits."""
    # Only the host's generator: initialisation happens there, and torch.manual_seed would
    # also reset the devices', which fork_rng does not give back here.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(sub_seed("model", seed))
        return build()
