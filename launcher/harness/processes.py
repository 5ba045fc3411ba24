"""Start the processes of a benchmark, and end them with it, however it ends.

They are forked from a server that has imported what they need (`p2plab.harness.ready`) and done
nothing else, never from this process: they inherit no thread, no lock and no open file of it, and
begin without importing torch, which takes seconds of a core. What may use an accelerator is
spawned. Ctrl-C at a terminal reaches them too, so they ignore it: their parent ends them.
"""

import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from multiprocessing.connection import Connection
from queue import Empty
from typing import Any, Self, TypeVar

from p2ptrain.errors import P2PTrainError
from p2ptrain.ids import Seconds

S = TypeVar("S")
T = TypeVar("T")

Context = multiprocessing.context.SpawnContext | multiprocessing.context.ForkServerContext
Process = multiprocessing.context.SpawnProcess | multiprocessing.context.ForkServerProcess

PRELOADED = "p2plab.harness.ready"

GRACE_S: Seconds = 1.0
"""The time that all of them get after SIGTERM."""

POLL_S: Seconds = 0.2


class Children:
    """Processes that end with the ``with`` block.

    Args:
        spawned: each is an interpreter of its own, as what uses an accelerator has to be.
    """

    def __init__(self, *, spawned: bool = False) -> None:
        self.context: Context = (
            multiprocessing.get_context("spawn")
            if spawned
            else multiprocessing.get_context("forkserver")
        )
        self.context.set_forkserver_preload([PRELOADED])
        self._results = self.context.Queue()
        self._processes: list[Process] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, work: Callable[..., Any], *arguments: Any) -> Process:  # Any: as work takes
        """Start a process that calls `work`; what it returns becomes a result."""
        target = (work, arguments, self._results)
        process = self.context.Process(target=_work, args=target, daemon=True)
        self._processes.append(process)
        process.start()
        return process

    def talk(self, work: Callable[..., Any], *arguments: Any) -> tuple[Connection, Process]:
        """Start a process that gets a connection to this one as its last argument."""
        ours, theirs = self.context.Pipe()
        return ours, self.start(work, *arguments, theirs)

    def result(self, limit_s: Seconds = math.inf) -> Any:  # Any: whatever `work` returned
        """Wait for the next result, of any process.

        Raises:
            P2PTrainError: as `work` raised it.
            RuntimeError: if a process died, its error is on standard error; or if no result came
                within `limit_s`.
        """
        until = time.monotonic() + limit_s
        while True:
            if time.monotonic() > until:
                raise RuntimeError(f"no process of the benchmark was done within {limit_s:.0f} s")
            for result in self.poll(POLL_S):
                return result

    def poll(self, within_s: Seconds = 0.0) -> Iterator[Any]:  # Any: as above
        """The next result, if there is one within so short a time. Raises what `result` does."""
        try:
            result = self._results.get(timeout=within_s)
        except Empty as error:
            if any(process.exitcode not in (None, 0) for process in self._processes):
                raise RuntimeError("a process of the benchmark died") from error
            return
        if isinstance(result, P2PTrainError):
            raise result
        yield result

    def close(self) -> None:
        """End all processes. May be called again."""
        for process in self._processes:
            process.terminate()
        until = time.monotonic() + GRACE_S
        for process in self._processes:
            process.join(max(0.0, until - time.monotonic()))
            process.kill()
            process.join()


def side_by_side(
    work: Callable[[S], T],
    settings: Sequence[S],
    told: Callable[[S], None],
    at_once: int | None = None,
) -> list[T]:
    """Call `work` with each setting, in processes; results are in the order of `settings`.

    Args:
        work: must be picklable.
        settings: as many processes as there are.
        told: called with each setting that is done.
        at_once: how many processes run at a time; as many as there are cores by default.
    """
    found: dict[int, T] = {}
    left = iter(range(len(settings)))
    with Children() as children:

        def start(count: int) -> None:
            for number in islice(left, count):
                children.start(_numbered, work, number, settings[number])

        start(at_once or os.cpu_count() or 1)
        for _ in settings:
            number, result = children.result()
            found[number] = result
            told(settings[number])
            start(1)
    return [found[number] for number in range(len(settings))]


def _numbered(work: Callable[[S], T], number: int, setting: S) -> tuple[int, T]:
    return number, work(setting)


def _work(work: Callable[..., Any], arguments: Sequence[Any], results: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        results.put(work(*arguments))
    except P2PTrainError as error:
        results.put(error)
