"""Run an event loop on virtual time, where waiting is free and a deadlock is an error.

Time is a float: when nothing is ready to run, the loop moves the clock to the next timer instead of
sleeping. When nothing is ready and no timer is armed, nothing can happen any more; then
`SimulationStuck` names every waiting task, with the line at which it waits.

**Interleavings.** Callbacks that are ready at one moment in different processes (`sim/process.py`)
could run in any order on different machines; `shuffle` draws the order from a seed. Within one
process the order is kept: asyncio guarantees it, and production code may rely on that.

**Two clocks.** `time`, `call_at` and `call_later` are on the clock of the process that calls, as
code in a process expects; `now` and `at` are on the world's, for the network and for faults.

The loop is asyncio's own, except for the part that would wait for sockets: `_run_once`, and the
queue of timers behind it. It has no threads and no sockets.
"""

import asyncio
import heapq
import io
import math
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from random import Random
from typing import Any, TypeVar, TypeVarTuple

from p2ptrain.errors import P2PTrainError
from p2ptrain.ids import Seconds
from p2ptrain.sim.process import Process, owner, running

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

CANCELLED_KEPT = 1024
"""Cancelled timers stay queued up to this number, or while they are the minority."""

LEAST_S: Seconds = 1e-9
"""A shorter wait is a rounding error."""


class SimulationStuck(P2PTrainError):
    """Nothing is ready and no timer is armed; the message has each task's stack."""


class _WorldTimer(asyncio.TimerHandle):
    """A timer on the world's clock, for arrivals and faults."""


class VirtualLoop(asyncio.BaseEventLoop):
    """A loop on virtual time, from 0."""

    _ready: deque[asyncio.Handle]
    _stopping: bool

    def __init__(self) -> None:
        super().__init__()
        self.now: Seconds = 0.0
        """The world's clock."""
        self.trace_tail: Callable[[], str] | None = None
        """The end of the trace, to report with a failure."""
        self._timers: list[tuple[Seconds, int, asyncio.TimerHandle]] = []
        self._armed = 0  # timers so far; of two for one moment the older one is first
        self._cancelled = 0  # of those that are queued
        self._order: Random | None = None
        self._paused: list[Process] = []
        self._may_run: float = math.inf  # callbacks until `run_for` returns

    # --- for code that runs in a process ----------------------------------------------------------

    def time(self) -> Seconds:
        process = running()
        return self.now if process is None else process.local(self.now)

    def call_soon(
        self,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(
        self,
        when: Seconds,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        process = running()
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._arm(when if process is None else process.world(when), timer)
        return timer

    # --- for the world ----------------------------------------------------------------------------

    def at(
        self,
        when: Seconds,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Call at `when` on the world's clock, in the process that `context` names."""
        timer = _WorldTimer(when, callback, args, self, context)
        self._arm(when, timer)
        return timer

    def clock_of(self, process: Process) -> Callable[[], Seconds]:
        """The clock of `process`, from any context."""
        return lambda: process.local(self.now)

    async def wait(self, duration_s: Seconds) -> None:
        """Wait this many seconds of the world's clock, not the caller's."""
        over = self.create_future()
        timer = self.at(self.now + duration_s, _set, over)
        try:
            await over
        finally:
            timer.cancel()

    async def work(self, price_s: Seconds) -> None:
        """Wait as long as the calling process takes for work that usually takes `price_s`.

        That is in the world's time, times its slowness; a paused process does no work.
        """
        process = running()
        if process is None:
            await self.wait(price_s)
            return
        until = self.now + price_s * process.slowness - process.stood_still_s
        await self.wait(until + process.stood_still_s - self.now)
        while (left_s := until + process.stood_still_s - self.now) > LEAST_S:
            await self.wait(left_s)

    def run_for(self, duration_s: Seconds, callbacks: float = math.inf) -> None:
        """Run the world for this long, or until many callbacks have run.

        Call it repeatedly from outside, to inspect the world in between. Where it stops, after
        `callbacks` callbacks or a few more, follows from the world alone: so the caller's decisions
        fall on the same moment of every run.
        """
        self._may_run = callbacks
        end = self.at(self.now + duration_s, self.stop)
        try:
            self.run_forever()
        finally:
            end.cancel()
            self._may_run = math.inf

    def shuffle(self, order: Random) -> None:
        """From now on `order` decides which process runs first when several are ready."""
        self._order = order

    def pause(self, process: Process) -> None:
        """Nothing of `process` runs until `resume`; what becomes ready for it waits."""
        if not process.is_paused:
            process.is_paused = True
            process.stood_still_s -= self.now
            self._paused.append(process)

    def resume(self, process: Process) -> None:
        """Let `process` go on. As after SIGCONT it reads what has arrived before it reads a clock.

        So it handles late messages first and its own overdue timers only then. That order exposes
        deadlines that hold only if their timer fires in time.
        """
        if process.is_paused:
            process.is_paused = False
            process.stood_still_s += self.now
            self._paused.remove(process)
            waiting, process.waiting = process.waiting, []
            self._ready.extend(sorted(waiting, key=_is_own_timer))

    def set_rate(self, process: Process, rate: float) -> None:
        """Let the clock of `process` and its timers run at `rate` from now on.

        Raises:
            ConfigError: if the clock would not go forward.
        """
        process.set_rate(rate, self.now)
        for index, (_, number, timer) in enumerate(self._timers):
            if _is_own_timer(timer) and owner(timer) is process:
                self._timers[index] = (process.world(timer.when()), number, timer)
        heapq.heapify(self._timers)

    # --- asyncio's other half ---------------------------------------------------------------------

    def _arm(self, at: Seconds, timer: asyncio.TimerHandle) -> None:
        self._armed += 1
        timer._scheduled = True  # type: ignore[attr-defined]
        heapq.heappush(self._timers, (at, self._armed, timer))

    def _timer_handle_cancelled(self, timer: asyncio.TimerHandle) -> None:
        if timer._scheduled:  # type: ignore[attr-defined]
            self._cancelled += 1

    def _process_events(self, event_list: list[Any]) -> None:  # Any: asyncio's own types
        """There are no events from outside."""

    def _write_to_self(self) -> None:
        """There is no sleeping selector to wake."""

    def _run_once(self) -> None:
        """Let time pass if nothing is ready, then run everything that is."""
        if self._cancelled:
            self._drop_cancelled()
        if not self._ready and not self._stopping:
            if not self._timers:
                raise SimulationStuck(self._who_waits())
            self.now = max(self.now, self._timers[0][0])
        self._take_due()
        if self._order and len(self._ready) > 1:
            self._ready = _merged(self._ready, self._order)
        self._may_run -= len(self._ready)
        if self._may_run <= 0:
            self.stop()
        for _ in range(len(self._ready)):
            handle = self._ready.popleft()
            if handle._cancelled:
                continue
            process = owner(handle) if self._paused else None
            if process and process.is_paused:
                process.waiting.append(handle)
            else:
                handle._run()

    def _drop_cancelled(self) -> None:
        timers = self._timers
        if self._cancelled > CANCELLED_KEPT and 2 * self._cancelled > len(timers):
            self._timers = timers = [entry for entry in timers if not entry[2]._cancelled]
            heapq.heapify(timers)
            self._cancelled = 0
        while timers and timers[0][2]._cancelled:
            self._cancelled -= 1
            heapq.heappop(timers)

    def _take_due(self) -> None:
        timers = self._timers
        while timers and timers[0][0] <= self.now:
            timer = heapq.heappop(timers)[2]
            timer._scheduled = False  # type: ignore[attr-defined]
            if timer._cancelled:
                self._cancelled -= 1
            else:
                self._ready.append(timer)

    def _who_waits(self) -> str:
        waiting = io.StringIO()
        tasks = sorted(asyncio.all_tasks(self), key=lambda task: task.get_name())
        for task in tasks:
            task.print_stack(limit=4, file=waiting)
        paused = ", ".join(process.name for process in self._paused)
        return (
            f"at t = {self.now:.6f} s nothing is ready and no timer is armed; "
            f"{len(tasks)} tasks wait for ever{f' ({paused} paused)' if paused else ''}:\n"
            f"{waiting.getvalue()}{self.trace_tail() if self.trace_tail else ''}"
        )


def run(work: Coroutine[Any, Any, T]) -> T:  # Any: asyncio's own types
    """Run `work` on a virtual loop of its own.

    Raises:
        SimulationStuck: if it waits for something that cannot happen any more.
    """
    with asyncio.Runner(debug=False, loop_factory=VirtualLoop) as runner:
        return runner.run(work)


def virtual_loop() -> VirtualLoop:
    """The running loop, which must be a virtual one."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop


def _is_own_timer(handle: asyncio.Handle) -> bool:
    return isinstance(handle, asyncio.TimerHandle) and not isinstance(handle, _WorldTimer)


def _merged(ready: deque[asyncio.Handle], order: Random) -> deque[asyncio.Handle]:
    """A random order of `ready` that keeps the order within each process."""
    owners = [owner(handle) for handle in ready]
    queues: dict[Process | None, deque[asyncio.Handle]] = {}
    for process, handle in zip(owners, ready, strict=True):
        queues.setdefault(process, deque()).append(handle)
    if len(queues) == 1:
        return ready
    order.shuffle(owners)
    return deque(queues[process].popleft() for process in owners)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
