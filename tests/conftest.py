"""Async tests run on virtual time; those marked `sockets` on a real loop."""

import asyncio
from collections.abc import Callable, Mapping

import pytest

from p2ptrain.sim.loop import VirtualLoop


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    if item.get_closest_marker("sockets"):
        return {"real": asyncio.SelectorEventLoop}
    return {"virtual": VirtualLoop}
