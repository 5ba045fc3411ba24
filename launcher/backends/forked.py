"""Start peers from a process that has imported torch, since each import takes seconds of a core.

`start` is the launcher's side; `ForkedProcess` is one peer, with as much of a `subprocess.Popen` as
a fleet needs. Run as a module, this file is that process, the *fork server*. It has imported what a
peer imports (`p2plab.harness.ready`) and done nothing else, and it is never forked from the
launcher: a peer inherits no thread, no lock and no open file of either. It has the environment of a
peer from its start, as some variables are read only then.

Orders are lines of JSON on its standard input, answers are lines of JSON on its standard output. It
ends when its standard input closes, and so with the launcher, however that ends;
`p2plab.backends.guard` ends its peers.

Peers that may use an accelerator are not forked: what a driver has opened is no good in a copy.
"""

import atexit
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from select import select
from typing import Any

from p2plab.backends.spawn import peer_environment

_READ_BYTES = 1 << 16

_ANSWER_S = 100.0
"""How long the server may take to answer: it imports torch first, on a machine that may be busy."""


# --- the launcher's side --------------------------------------------------------------------------


class ForkServer:
    """A process that has imported torch and p2ptrain, and forks a peer for each order."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "p2plab.backends.forked"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=peer_environment(os.environ),
            process_group=0,
        )
        self._numbers = count()
        self._rest = b""
        self._pids: dict[int, int] = {}
        self._codes: dict[int, int] = {}
        self.is_there = True

    def start(
        self, module: str, arguments: Sequence[str], log: Path, group: int
    ) -> "ForkedProcess":
        """Run ``python -m module``, with no input and its output at the end of `log`.

        Args:
            module: such as ``p2ptrain``.
            arguments: what follows it on the command line.
            log: a file; it is created where there is none.
            group: the process group that it belongs to.

        Raises:
            OSError: if the server cannot start it.
        """
        number = next(self._numbers)
        self._order(
            number,
            argv=[module, *arguments],
            log=str(log.absolute()),
            environment=peer_environment(os.environ),
            folder=os.getcwd(),
            group=group,
        )
        while number not in self._pids and self._listen(_ANSWER_S):
            pass
        if number not in self._pids:
            doing = f"has not answered for {_ANSWER_S:g} s" if self.is_there else "has ended"
            raise OSError(f"the process that starts peers {doing}")
        return ForkedProcess(self, number, self._pids[number])

    def code(self, number: int, *, waits: bool) -> int | None:
        """The exit code of a peer; None while it runs."""
        while number not in self._codes and self._listen(None if waits else 0):
            pass
        # A server that was killed says no more: its peers count as killed, too.
        return self._codes.get(number, None if self.is_there else -signal.SIGKILL)

    def send_signal(self, number: int, which: signal.Signals) -> None:
        """Send a signal to a peer, or to no process if it has ended."""
        with suppress(OSError):  # as above
            self._order(number, signal=which)

    def close(self) -> None:
        """End the server."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def _order(self, number: int, **order: Any) -> None:  # Any: JSON
        assert self._process.stdin
        left = memoryview(json.dumps({"number": number, **order}).encode() + b"\n")
        while left:
            left = left[self._process.stdin.write(left) :]

    def _listen(self, timeout_s: float | None) -> bool:
        """Take in what the server has said; False if it said nothing in time, or never will."""
        assert self._process.stdout
        if not self.is_there or not select([self._process.stdout], [], [], timeout_s)[0]:
            return False
        said = self._process.stdout.read(_READ_BYTES)
        self.is_there = bool(said)
        *lines, self._rest = (self._rest + said).split(b"\n")
        for line in lines:
            what, number, value = json.loads(line)
            (self._pids if what == "pid" else self._codes)[number] = value
        return self.is_there


class ForkedProcess:
    """A peer that runs, with as much of a `subprocess.Popen` as a fleet needs."""

    def __init__(self, server: ForkServer, number: int, pid: int) -> None:
        self._server, self._number, self.pid = server, number, pid

    def poll(self) -> int | None:
        """Its exit code, negative if a signal ended it; None while it runs."""
        return self._server.code(self._number, waits=False)

    def wait(self) -> int | None:
        """Its exit code, once it has ended."""
        return self._server.code(self._number, waits=True)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, which has no effect once it has ended."""
        self._server.send_signal(self._number, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


_servers: list[ForkServer] = []


def start(module: str, arguments: Sequence[str], log: Path, group: int) -> ForkedProcess:
    """Start a peer from this process's fork server; see `ForkServer.start`."""
    if not _servers or not _servers[-1].is_there:
        _servers.append(ForkServer())
        atexit.register(_servers[-1].close)
    return _servers[-1].start(module, arguments, log, group)


# --- the server's side ----------------------------------------------------------------------------


class _Peers:
    """Those that the server has started and that have not ended, by number."""

    def __init__(self) -> None:
        self._woken, self._wakes = os.pipe()
        for end in (self._woken, self._wakes):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False)
        self._running: dict[int, int] = {}

    def serve(self) -> tuple[str, list[str]] | None:
        """Carry out orders until there are no more.

        Returns in a forked process: the module that it shall run, and its arguments.
        """
        rest = b""
        while True:
            readable, _, _ = select([0, self._woken], [], [])
            if self._woken in readable:
                os.read(self._woken, _READ_BYTES)
                self._tell_of_ends()
            if 0 not in readable:
                continue
            if not (read := os.read(0, _READ_BYTES)):
                return None
            *lines, rest = (rest + read).split(b"\n")
            for order in map(json.loads, lines):
                if "signal" in order:
                    self._send_signal(order["number"], order["signal"])
                elif self._fork(order) == 0:
                    self._become(order)
                    module, *arguments = order["argv"]
                    return module, arguments

    def _fork(self, order: Mapping[str, Any]) -> int:  # Any: JSON
        pid = os.fork()
        if pid:
            with suppress(ProcessLookupError, PermissionError):  # it says so itself
                os.setpgid(pid, order["group"])
            self._running[order["number"]] = pid
            _say("pid", order["number"], pid)
        return pid

    def _send_signal(self, number: int, which: int) -> None:
        """Send it if the peer's end has not been collected: no other process has its pid."""
        if number in self._running:
            os.kill(self._running[number], which)

    def _tell_of_ends(self) -> None:
        for number, pid in list(self._running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._running[number]
                _say("code", number, os.waitstatus_to_exitcode(status))

    def _become(self, order: Mapping[str, Any]) -> None:  # Any: JSON
        """Take over a peer's group, signals, files, environment and folder."""
        os.setpgid(0, order["group"])
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDONLY)
        output = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        for file, number in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(file, number)
        for file in (nothing, output, self._woken, self._wakes):
            os.close(file)
        os.environ.clear()
        os.environ.update(order["environment"])
        os.chdir(order["folder"])
        if not sys.flags.safe_path:
            sys.path[0] = order["folder"]


def _say(what: str, number: int, value: int) -> None:
    os.write(1, json.dumps([what, number, value]).encode() + b"\n")


def _main() -> None:
    import numpy as np

    import p2plab.harness.ready  # noqa: F401 - torch, and all of a peer

    gc.freeze()  # a collection would copy every page
    if peer := _Peers().serve():
        np.random.seed()
        module, sys.argv[1:] = peer
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
