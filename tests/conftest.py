"""Async tests run on virtual time; those marked `sockets` on a real loop."""

import asyncio
from collections.abc import Callable, Mapping

import pytest
from hypothesis import settings

from p2ptrain.sim.loop import VirtualLoop


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    if item.get_closest_marker("sockets"):
        return {"real": asyncio.SelectorEventLoop}
    return {"virtual": VirtualLoop}


# `--hypothesis-profile=dev` looks elsewhere each time; `night` looks for long.
settings.register_profile("ci", derandomize=True, deadline=None, database=None)
settings.register_profile("dev", deadline=None)
settings.register_profile("night", max_examples=20_000, deadline=None)
settings.load_profile("ci")
