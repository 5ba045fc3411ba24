"""Async tests run on virtual time; those marked `sockets` on a real loop."""

import asyncio
import gc
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import settings

from p2ptrain.sim.loop import VirtualLoop
from tests.helpers.ready import Ready

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""Workers run beside each other: with more threads of torch each waits for the others' cores."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # by a shell that runs this in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    if item.get_closest_marker("sockets"):
        return {"real": asyncio.SelectorEventLoop}
    return {"virtual": VirtualLoop}


@pytest.fixture(scope="session")
def ready() -> Iterator[Ready]:
    """A process that has imported torch, and starts programs at once."""
    one = Ready()
    yield one
    one.close()


def pytest_collection_finish() -> None:
    """What is imported by now stays: no later collection of garbage looks at all of torch again."""
    gc.collect()
    gc.freeze()


STARTS_PROCESSES = (
    "integration",
    "docs",
    "integrations",
    "make",
    "test_cli.py",
    "test_ddp.py",
    "test_forked.py",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Under xdist what starts processes runs one after the other: importing torch takes a core."""
    for item in items:
        if any(part in STARTS_PROCESSES for part in Path(item.path).parts):
            item.add_marker(pytest.mark.xdist_group("processes"))


# `--hypothesis-profile=dev` looks elsewhere each time; `night` looks for long.
settings.register_profile("ci", derandomize=True, deadline=None, database=None)
settings.register_profile("dev", deadline=None)
settings.register_profile("night", max_examples=20_000, deadline=None)
settings.load_profile("ci")
