"""Define the port for long copies: a worker thread for real, inline in simulated worlds."""

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class CopyExecutor(Protocol):
    """Runs a function that may take long without holding up the event loop."""

    def __call__(self, function: Callable[[], T], /) -> Awaitable[T]: ...
