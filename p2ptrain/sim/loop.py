"""An event loop in which waiting is free, and waiting for ever is an error.

Time is a float that jumps: when nothing is ready to run, the selector moves the clock to the next
timer instead of sleeping. When nothing is ready and no timer is armed, nothing can ever happen
again; then `SimulationStuck` names every task that waits, with the line at which it does.
"""

import asyncio
import io
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from p2ptrain.errors import P2PTrainError
from p2ptrain.ids import Seconds

T = TypeVar("T")


class SimulationStuck(P2PTrainError):
    """Nothing is ready and no timer is armed; the message has each task's stack."""


class _JumpingSelector(selectors.SelectSelector):
    """Moves the clock where another selector would sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.now: Seconds = 0.0
        self.loop: VirtualLoop | None = None

    def select(self, timeout: float | None = None) -> list[Any]:  # Any: asyncio's own types
        if timeout is None:
            assert self.loop is not None
            raise SimulationStuck(_stuck(self.loop, self.now))
        self.now += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop on virtual time, from 0. No threads, no sockets."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self._jumping.loop = self
        self._clock_resolution = 1e-9

    def time(self) -> Seconds:
        return self._jumping.now


def run(work: Coroutine[Any, Any, T]) -> T:  # Any: asyncio's own types
    """Run `work` on a virtual loop of its own.

    Raises:
        SimulationStuck: if it waits for something that cannot happen any more.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


def _stuck(loop: asyncio.AbstractEventLoop, now: Seconds) -> str:
    waiting = io.StringIO()
    tasks = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())
    for task in tasks:
        task.print_stack(limit=4, file=waiting)
    return (
        f"at t = {now:.6f} s nothing is ready and no timer is armed; "
        f"{len(tasks)} tasks wait for ever:\n{waiting.getvalue()}"
    )
