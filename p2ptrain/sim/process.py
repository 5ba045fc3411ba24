"""Simulate a process: it has its own clock, and it can be paused.

Code that runs on behalf of a process carries it along in its context (`contextvars`): the tasks,
timers and waits of a task belong to the task's own process. So the loop can tell by whose clock a
timer was set and which callbacks have to wait while their process is paused. The code that runs
contains nothing of this: it asks its loop for the time, as in production.
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
    """One process. Only `VirtualLoop` changes clock and pause, since its timers depend on them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rate = 1.0
        """Seconds by which its clock advances in one second of the world."""
        self.slowness = 1.0
        """The factor by which its computing takes longer than usual."""
        self.is_paused = False
        self.waiting: list[asyncio.Handle] = []
        """Callbacks that became ready while it was paused."""
        self.stood_still_s: Seconds = 0.0
        """The total time for which it was paused so far."""
        self._set_at: Seconds = 0.0
        self._showed: Seconds = 0.0

    def local(self, now: Seconds) -> Seconds:
        """The time on this process's clock at `now` of the world."""
        return self._showed + (now - self._set_at) * self.rate

    def world(self, shown: Seconds) -> Seconds:
        """The time on the world's clock at which this process's clock shows `shown`."""
        return self._set_at + (shown - self._showed) / self.rate

    def set_rate(self, rate: float, now: Seconds) -> None:
        """Let the clock run at `rate` from `now` on; it does not jump."""
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
    """The process on behalf of which the caller runs; None for the world's own tasks."""
    return _running.get()


def owner(handle: asyncio.Handle) -> Process | None:
    """The process that a callback belongs to."""
    process: Process | None = handle._context.get(_running)  # type: ignore[attr-defined]
    return process
