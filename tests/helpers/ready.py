"""Programs started from a process that has imported torch already: each import costs seconds.

`Ready` runs ``python -W error PROGRAM ARGUMENTS`` as far as a program can tell: its lines run at
the top of ``__main__``, and the interpreter ends as it does after any program. Run as a script,
this file is that process: it forks for each line of its input.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from select import select


class Program:
    """One that runs, with as much of a `subprocess.Popen` as tests ask for."""

    returncode: int | None = None

    def __init__(self, ready: "Ready", pid: int, outputs: Path) -> None:
        self.pid = pid
        self._ready, self._outputs = ready, outputs

    def printed(self) -> tuple[str, str]:
        """On stdout and stderr, so far."""
        return tuple(self._outputs.with_suffix(end).read_text() for end in (".out", ".err"))  # type: ignore[return-value]

    def followed(self) -> Iterator[str]:
        """Its lines on stdout and stderr as they come, until it ends."""
        both = [self._outputs.with_suffix(end) for end in (".out", ".err")]
        tail = ["tail", "-q", "-n", "+1", "-f", f"--pid={self.pid}", *both]
        with subprocess.Popen(tail, stdout=subprocess.PIPE, text=True) as following:
            assert following.stdout
            try:
                yield from following.stdout
            finally:
                following.kill()

    def communicate(self, timeout: float = 100) -> tuple[str, str]:
        """As `subprocess.Popen.communicate`; one at a time."""
        if self.returncode is None:
            self.returncode = self._ready.ask({"wait": self.pid}, timeout)
        return self.printed()

    def kill(self) -> None:
        """It and all that it has started, without a word."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.communicate()


class Ready:
    """A process that has imported torch and p2ptrain; `before` comes before its command."""

    def __init__(self, *before: str) -> None:
        self._process = subprocess.Popen(
            [*before, sys.executable, "-W", "error", "-u", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def start(self, program: Path, *arguments: str) -> Program:
        """Run a file in its folder, in a session of its own."""
        for end in (".out", ".err"):  # they can be followed at once
            program.with_suffix(end).touch()
        return Program(self, self.ask({"argv": [str(program), *arguments]}, 100), program)

    def ask(self, order: dict[str, object], timeout_s: float) -> int:
        """Its answer to an order."""
        process = self._process
        assert process.stdin
        assert process.stdout
        process.stdin.write(json.dumps(order).encode() + b"\n")
        process.stdin.flush()
        if not select([process.stdout], [], [], timeout_s)[0]:
            raise subprocess.TimeoutExpired(str(order), timeout_s)
        return int(process.stdout.readline())

    def close(self) -> None:
        """After which no program can be started."""
        self._process.kill()
        self._process.communicate()


def serve() -> None:
    """Carry out orders until there are no more; return in a forked process: a program begins."""
    while line := os.read(0, 1 << 16):
        order = json.loads(line)
        if "wait" in order:
            _, status = os.waitpid(order["wait"], 0)
            print(os.waitstatus_to_exitcode(status))
            continue
        child = os.fork()
        if child == 0:
            return become(order["argv"])
        print(child)
    os._exit(0)


def become(argv: list[str]) -> None:
    """Take over the session, folder, files and arguments of a program."""
    program = Path(argv[0])
    os.setsid()
    os.chdir(program.parent)
    outputs = [program.with_suffix(end) for end in (".out", ".err")]
    for number, path in enumerate([Path(os.devnull), *outputs]):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
    sys.argv[:] = argv
    globals()["__file__"] = argv[0]  # workers of a data loader import it
    sys.path[0] = str(program.parent)


if __name__ == "__main__":
    import p2plab.harness.ready  # noqa: F401 - torch, and all of a peer

    serve()
    exec(compile(Path(sys.argv[0]).read_text(), sys.argv[0], "exec"))
