"""A task group whose order is the program's: tasks are cancelled in the order they started in.

`asyncio.TaskGroup` keeps its tasks in a set and cancels them in the order of their addresses in
memory, which differs from run to run; a simulated run could not be repeated.
"""

import asyncio
from collections.abc import Coroutine
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
        self._cancels = False
        self._stirred = asyncio.Event()

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run `coroutine` as a task of this scope."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.append(task)
        task.add_done_callback(self._note)
        return task

    def fail(self, error: BaseException | None) -> None:
        """End all, as if a task had failed with `error`, if that is one and the first."""
        self._error = self._error or error
        self._stirred.set()

    def forget(self) -> None:
        """Let go of tasks that have ended and of their errors, whose tracebacks hold the owner."""
        self._tasks, self._error = [task for task in self._tasks if not task.done()], None

    def _note(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled():
            self.fail(task.exception())
        elif not self._cancels:
            self.fail(InvariantViolation(f"{task} was cancelled elsewhere"))
        self._stirred.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            while not (error or self._error or all(task.done() for task in self._tasks)):
                self._stirred.clear()
                await self._stirred.wait()
        except asyncio.CancelledError as cancelled:
            error = cancelled
        self._cancels = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        first = error or self._error
        try:
            if first:
                raise first
        finally:
            del first, error  # or its traceback would hold this frame, and that the error
