"""An event loop in which waiting is free, and waiting for ever is an error.

Time is a float that jumps: when nothing is ready to run, the loop moves the clock to the next timer
instead of sleeping. When nothing is ready and no timer is armed, nothing can ever happen again;
then `SimulationStuck` names every task that waits, with the line at which it does.

**Interleavings.** What is ready at one moment in different processes (`sim/process.py`) could run
in any order on different machines; `shuffle` draws the order from a seed. Within one process the
order stays as it is: there asyncio promises it, and production code may rely on the promise.

**Two clocks.** `time`, `call_at` and `call_later` are on the clock of the process that calls, as
code in a process expects; `now` and `at` are on the world's, for the network and for faults.

The loop is asyncio's own with the part replaced that would wait for sockets: `_run_once`, the queue
of timers behind it, and nothing else. It has no threads and no sockets.
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
"""Cancelled timers stay queued until there are so many, and more than those that are not."""

LEAST_S: Seconds = 1e-9
"""Less than this is a rounding error, not a time to wait."""


class SimulationStuck(P2PTrainError):
    """Nothing is ready and no timer is armed; the message has each task's stack."""


class _WorldTimer(asyncio.TimerHandle):
    """A timer on the world's clock: something arrives, whatever clocks show."""


class VirtualLoop(asyncio.BaseEventLoop):
    """A loop on virtual time, from 0."""

    _ready: deque[asyncio.Handle]
    _stopping: bool

    def __init__(self) -> None:
        super().__init__()
        self.now: Seconds = 0.0
        """The world's clock."""
        self.trace_tail: Callable[[], str] | None = None
        """What to tell beside a failure: where the trace is."""
        self._timers: list[tuple[Seconds, int, asyncio.TimerHandle]] = []
        self._armed = 0  # timers so far; of two for one moment the older one is first
        self._cancelled = 0  # of those that are queued
        self._order: Random | None = None
        self._paused: list[Process] = []
        self._may_run: float = math.inf  # callbacks until whoever runs the loop wants to look

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
        """Call at `when` on the world's clock, on behalf of whom `context` says."""
        timer = _WorldTimer(when, callback, args, self, context)
        self._arm(when, timer)
        return timer

    def clock_of(self, process: Process) -> Callable[[], Seconds]:
        """The clock of `process`, whoever looks at it."""
        return lambda: process.local(self.now)

    async def wait(self, duration_s: Seconds) -> None:
        """Wait so many seconds of the world, whatever the caller's clock shows."""
        over = self.create_future()
        timer = self.at(self.now + duration_s, _set, over)
        try:
            await over
        finally:
            timer.cancel()

    async def work(self, price_s: Seconds) -> None:
        """Wait as long as the calling process takes for what usually takes `price_s`.

        Of the world's time, times its slowness; while it is paused it does no work.
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
        """Let the world go on for so long, or a shorter while in which very much happens.

        Call it from outside, again and again, to look at a world in between. That it stops after so
        many `callbacks` or a few more follows from the world alone: whoever decides something then
        decides it at the same moment of every run.
        """
        self._may_run = callbacks
        end = self.at(self.now + duration_s, self.stop)
        try:
            self.run_forever()
        finally:
            end.cancel()
            self._may_run = math.inf

    def shuffle(self, order: Random) -> None:
        """From now on `order` decides which process is first when several are ready."""
        self._order = order

    def pause(self, process: Process) -> None:
        """Nothing of `process` runs until `resume`; what becomes ready for it waits."""
        if not process.is_paused:
            process.is_paused = True
            process.stood_still_s -= self.now
            self._paused.append(process)

    def resume(self, process: Process) -> None:
        """`process` goes on. As after SIGCONT it reads what has arrived before it looks at a clock.

        So it hears late messages first and its own overdue timers only then, which is the order
        that finds deadlines that do not bind by themselves.
        """
        if process.is_paused:
            process.is_paused = False
            process.stood_still_s += self.now
            self._paused.remove(process)
            waiting, process.waiting = process.waiting, []
            self._ready.extend(sorted(waiting, key=_is_own_timer))

    def set_rate(self, process: Process, rate: float) -> None:
        """The clock of `process` runs at `rate` from now on, and its timers by it.

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
        """Nobody sleeps who would have to be woken."""

    def _run_once(self) -> None:
        """Let time pass if nothing is ready, then run everything that is."""
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
    """The running loop, of which the caller knows that it is a virtual one."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop


def _is_own_timer(handle: asyncio.Handle) -> bool:
    return isinstance(handle, asyncio.TimerHandle) and not isinstance(handle, _WorldTimer)


def _merged(ready: deque[asyncio.Handle], order: Random) -> deque[asyncio.Handle]:
    """A random order of `ready` in which everything of one process keeps its own."""
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
