"""The accelerator of this machine, of whatever kind torch finds, for tests that need one."""

import pytest
import torch

FOUND = torch.accelerator.is_available()

KIND = torch.accelerator.current_accelerator().type if FOUND else "cpu"
"""As torch names it."""

WIDTH = 4096
TURNS = 300


NEEDS_ONE = (pytest.mark.gpu, pytest.mark.skipif(not FOUND, reason="no accelerator"))
"""Marks of what runs where there is one: ``pytest -m gpu``."""


def needs_accelerator(test):
    """A test that runs where there is one."""
    for mark in NEEDS_ONE:
        test = mark(test)
    return test


def keep_busy() -> None:
    """Give the trainer's stream work for about a second, and wait for none of it."""
    left = torch.rand(WIDTH, WIDTH, device=KIND)
    into = torch.empty_like(left)
    for _ in range(TURNS):
        torch.mm(left, left, out=into)


def is_busy() -> bool:
    """True if the trainer's stream has work left."""
    return not torch.accelerator.current_stream().query()
