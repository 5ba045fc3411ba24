"""Wait for calls of gRPC where its own waits lose a cancellation.

A call prepares itself in a task of its own: it connects, and says that it may be written to. Two
things go wrong if the call ends meanwhile, and either one would be a wait without end here:

* A reader waits for that task. If the reader is cancelled in the turn of the loop in which the call
  fails, the cancellation goes to that task, which swallows it: the reader sees the call's error,
  tries again, and never ends. `cancellable` raises what was swallowed.
* A writer waits for its word. If the call is cancelled (`cancel`, or its channel is closed), that
  task ends without it: the writer waits for ever. `first_write` ends with the call.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def cancellable() -> Iterator[None]:
    """What is awaited inside raises CancelledError if the running task is cancelled meanwhile."""
    task = asyncio.current_task()
    before = task.cancelling() if task else 0
    try:
        yield
    finally:
        if task and task.cancelling() > before:
            raise asyncio.CancelledError


async def first_write(call: Any, data: bytes) -> None:  # Any: grpc is untyped
    """Write to a call that may not be connected yet.

    Raises what `write` does, and InvalidStateError if the call has ended: its status says why.
    """
    loop = asyncio.get_running_loop()
    settled: asyncio.Future[None] = loop.create_future()

    def settle(_: object) -> None:
        if not settled.done():
            settled.set_result(None)

    writing = loop.create_task(call.write(data))
    writing.add_done_callback(settle)
    call.add_done_callback(settle)
    try:
        await settled
    finally:
        is_written = writing.done()
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
    if not is_written:
        raise asyncio.InvalidStateError("the call ended before it was written to")
    await writing
