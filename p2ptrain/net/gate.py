"""Let callers in, or refuse them; and end all that a caller has open when its name is revoked.

Every call passes here before its handler runs, and a handler learns from `caller()` who has called:
a context variable, so that what a handler starts knows it as well.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import grpc

from p2ptrain.errors import RefusedError
from p2ptrain.net.tls import NOBODY, Caller, Security

Serve = Callable[[Any, Any], Awaitable[Any]]  # Any: grpc is untyped


class CallEndedError(Exception):
    """Raised by a handler: its call ends with this status, and a sentence.

    What `context.abort` of gRPC raises stays with the call until the next collection of reference
    cycles, and with it all frames that it passed: a host that sends garbage could fill memory.
    """

    def __init__(
        self, why: str, status: grpc.StatusCode = grpc.StatusCode.FAILED_PRECONDITION
    ) -> None:
        super().__init__(why)
        self.status = status


_CALLER: ContextVar[Caller] = ContextVar("caller", default=NOBODY)


def caller() -> Caller:
    """Who has called; inside of a handler."""
    return _CALLER.get()


class Gate:
    """The door of one peer."""

    def __init__(self, security: Security) -> None:
        self._security = security
        self._inside: dict[str, list[asyncio.Task[Any]]] = {}  # Any: whatever handlers return
        self._expelled: set[str] = set()

    def guard(self, method: str, serve: Serve) -> Serve:
        """`serve`, for those who may ask it."""

        async def guarded(request: Any, context: Any) -> Any:  # Any: grpc is untyped
            came = NOBODY
            try:
                came = self._security.admit(method, context)
                with self.inside(came):
                    return await serve(request, context)
            except asyncio.CancelledError:
                if came.name not in self._expelled:
                    raise
                _go_on()
                why = f"{came.name} is no member any more: its name was revoked"
                status = grpc.StatusCode.PERMISSION_DENIED
            except RefusedError as error:
                why, status = str(error), grpc.StatusCode.PERMISSION_DENIED
            except CallEndedError as error:
                why, status = str(error), error.status
            context.set_code(status)
            context.set_details(why)
            return b""  # the caller gets the status instead

        return guarded

    @contextmanager
    def inside(self, came: Caller) -> Iterator[None]:
        """What runs in here is of this caller, and ends when it is expelled."""
        task = asyncio.current_task()
        assert task
        mark = _CALLER.set(came)
        running = self._inside.setdefault(came.name, [])
        running.append(task)
        try:
            yield
        finally:
            _CALLER.reset(mark)
            running.remove(task)
            if not running and self._inside.get(came.name) is running:
                del self._inside[came.name]

    def expel(self, name: str) -> None:
        """End all that the member has open here."""
        self._expelled.add(name)
        for task in list(self._inside.get(name, ())):
            task.cancel()


def _go_on() -> None:
    """The running task was cancelled to end its work, and has an answer to give yet."""
    task = asyncio.current_task()
    assert task
    task.uncancel()
