"""A simulated process: a clock of its own, and the power to stand still.

Code that runs on behalf of a process carries it along in its context (`contextvars`): what a task
starts, arms or waits for belongs to the process that the task belongs to. So the loop knows whose
clock a timer was set by and whose callbacks have to wait while their process is paused, and the
code that runs knows nothing of either: it asks its loop for the time, as it does for real.
"""

import asyncio
from collections.abc import Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar

from p2ptrain.errors import ConfigError
from p2ptrain.ids import Seconds

T = TypeVar("T")

_running: ContextVar["Process | None"] = ContextVar("process", default=None)


class Process:
    """One process. Clock and pause are changed by `VirtualLoop`, which knows what they touch."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rate = 1.0
        """Seconds that its clock goes on in one second of the world."""
        self.slowness = 1.0
        """How many times as long as usual its computing takes."""
        self.is_paused = False
        self.waiting: list[asyncio.Handle] = []
        """What became ready while it was paused."""
        self.stood_still_s: Seconds = 0.0
        """How long it was paused before now."""
        self._set_at: Seconds = 0.0
        self._showed: Seconds = 0.0

    def local(self, now: Seconds) -> Seconds:
        """What this process's clock shows at `now` of the world."""
        return self._showed + (now - self._set_at) * self.rate

    def world(self, shown: Seconds) -> Seconds:
        """When, on the world's clock, this process's clock shows `shown`."""
        return self._set_at + (shown - self._showed) / self.rate

    def set_rate(self, rate: float, now: Seconds) -> None:
        """From `now` on the clock runs at `rate`; it does not jump."""
        if rate <= 0:
            raise ConfigError(f"a clock at rate {rate} does not go forward; give one above 0")
        self._showed, self._set_at, self.rate = self.local(now), now, rate

    def context(self) -> Context:
        """A context in which code runs on behalf of this process."""
        context = copy_context()
        context.run(_running.set, self)
        return context

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:  # Any: asyncio's own types
        """Run `work` on behalf of this process."""
        return asyncio.get_running_loop().create_task(work, context=self.context())


def running() -> Process | None:
    """The process on behalf of which the caller runs; None for the world's own doings."""
    return _running.get()


def owner(handle: asyncio.Handle) -> Process | None:
    """The process that a callback belongs to."""
    process: Process | None = handle._context.get(_running)  # type: ignore[attr-defined]
    return process
