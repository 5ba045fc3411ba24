"""A task group whose order is the program's: tasks are cancelled in the order they started in.

`asyncio.TaskGroup` keeps its tasks in a set and cancels them in the order of their addresses in
memory, which differs from run to run; a simulated run could not be repeated.
"""

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self

from p2ptrain.errors import InvariantViolation


class Scope:
    """``async with Scope() as scope: scope.start(...)``: leaves when all tasks have ended.

    The first task that fails cancels the others, in order, and its error is raised when all have
    ended. An error in the body does the same. Tasks may start tasks. A task that is cancelled, but
    not by the scope, has not done its work: that is an error too, or it would pass for success.
    """

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[Any]] = []  # Any: results are not used
        self._error: BaseException | None = None
        self._cancelled = False
        self._stirred = asyncio.Event()

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run `coroutine` as a task of this scope."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.append(task)
        task.add_done_callback(self._note)
        return task

    def cancel(self) -> None:
        """Cancel all tasks, in order."""
        self._cancelled = True
        for task in self._tasks:
            task.cancel()

    def fail(self, error: BaseException | None) -> None:
        """End all, as if a task had failed with `error`, if that is one and the first."""
        self._error = self._error or error
        self._stirred.set()

    def _note(self, task: asyncio.Task[Any]) -> None:
        self.fail(self._error_of(task))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            while error is None and self._error is None and not self._all_done():
                self._stirred.clear()
                await self._stirred.wait()
        except asyncio.CancelledError as cancelled:
            error = cancelled
        self.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if error is None and self._error is not None:
            raise self._error
        if isinstance(error, asyncio.CancelledError):
            raise error

    def _error_of(self, task: asyncio.Task[Any]) -> BaseException | None:
        if not task.cancelled():
            return task.exception()
        return None if self._cancelled else InvariantViolation(f"{task} was cancelled elsewhere")

    def _all_done(self) -> bool:
        return all(task.done() for task in self._tasks)
