"""Where copies run that may take long: a worker thread for real, inline in a simulated world."""

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Offload(Protocol):
    """Runs a function that may take long without holding up the event loop."""

    def __call__(self, function: Callable[[], T], /) -> Awaitable[T]: ...
