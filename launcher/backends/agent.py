"""Run one peer on another machine: the agent there starts its processes and passes its files on.

A peer writes its files to a folder of its agent's, which is removed with the agent. `look` gives
what was written since the last one, so that the launcher has copies of them:

* *Records* are one stream: where a full file was replaced (``<name>.jsonl.1``), its rest comes
  first. The copy is one file.
* *Snapshots* are rows, which are written over when they are old. Each comes before the record that
  names it.
* *The exit code* comes last, when everything that the process wrote has been passed on.

If the agent dies, its guard (`p2plab.backends.guard`) ends the peer.

As a program (``python -m p2plab.backends.agent NAME``) it takes calls from its standard input, a
JSON object a line, ``{"method": ..., "arguments": [...]}``, and answers each with a line, in order.
It ends with its input.
"""

import base64
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from p2plab.backends import guard
from p2plab.backends.spawn import PEER_COMMAND, free_ports, peer_environment

MOST_BYTES = 8 << 20
"""About as much is passed on at once; the rest waits for the next look."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a file, and where they are in it; None: behind those that came before."""

    file: str
    data: bytes
    offset: int | None = None


@dataclass(frozen=True, slots=True)
class Look:
    """What was written since the last look, and the latest process's exit code once it is known.

    `life` counts the processes that were started.
    """

    life: int
    code: int | None
    pieces: tuple[Piece, ...]


class Agent:
    """Runs the processes of one peer, one after the other.

    Args:
        name: of the peer, which is how its files begin.
        command: starts a peer; the path of its configuration follows.
    """

    def __init__(self, name: str, command: tuple[str, ...] = PEER_COMMAND) -> None:
        self._name = name
        self._command = command
        self._made = tempfile.TemporaryDirectory(prefix="p2plab-")
        self._folder = Path(self._made.name)
        self._records = _Stream(self._folder / f"{name}.jsonl")
        self._log = _Stream(self._folder / f"{name}.log")
        self._process: subprocess.Popen[bytes] | None = None
        self._life = 0
        self._row_bytes = 0
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__], stdin=subprocess.PIPE, process_group=0
        )

    def port(self) -> int:
        """A port of this machine that was free a moment ago."""
        return free_ports(1)[0]

    def put(self, file: str, text: str | None) -> None:
        """Write a file of the peer's folder; None removes it."""
        path = self._folder / Path(file).name
        if text is None:
            path.unlink(missing_ok=True)
        else:
            path.touch(0o600)  # one of them is the swarm's key
            path.write_text(text, encoding="utf-8")

    def start(self) -> None:
        """Start a process with the configuration that was put there."""
        with (self._folder / f"{self._name}.log").open("ab") as output:
            self._process = subprocess.Popen(
                [*self._command, f"{self._name}.toml"],
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=peer_environment(os.environ),
                process_group=self._guard.pid,
            )
        self._life += 1

    def signal(self, number: int) -> None:
        """Send a signal to the process, if it runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def look(self) -> Look:
        """What was written since the last look."""
        code = self._process.poll() if self._process is not None else None
        log, records = self._log.take(MOST_BYTES), self._records.take(MOST_BYTES)
        pieces = [*self._rows(records), Piece(f"{self._name}.jsonl", records)]
        pieces.append(Piece(f"{self._name}.log", log))
        is_all = not log and not records
        return Look(self._life, code if is_all else None, tuple(p for p in pieces if p.data))

    def close(self) -> None:
        """End the process at once, and remove the folder."""
        if self._guard.poll() is None:
            os.killpg(self._guard.pid, signal.SIGKILL)
        for process in (self._process, self._guard):
            if process is not None:
                process.wait()
        if self._guard.stdin is not None:
            self._guard.stdin.close()
        self._made.cleanup()

    def _rows(self, records: bytes) -> list[Piece]:
        """The rows of the model that `records` name."""
        found = []
        for line in records.splitlines():
            if b'"snapshot"' not in line and b'"started"' not in line:
                continue  # most are of steps, and need not be parsed
            try:
                record = json.loads(line)
            except ValueError:
                continue  # the last one of a killed peer
            if record.get("kind") == "started":
                self._row_bytes = 4 * int(record["model_size"])
            elif record.get("kind") == "snapshot":
                found.append(self._row(int(record["row"])))
        return found

    def _row(self, number: int) -> Piece:
        path, offset = self._folder / f"{self._name}.snapshots", number * self._row_bytes
        with path.open("rb") as file:
            file.seek(offset)
            return Piece(path.name, file.read(self._row_bytes), offset)


class _Stream:
    """Reads a file that grows, in whole lines, also past the moment at which it is replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode: int | None = None
        self._offset = 0

    def take(self, most: int) -> bytes:
        """The whole lines that are new, of about `most` bytes."""
        try:
            with self._path.open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                if self._inode is not None and inode != self._inode:
                    rest = self._rest(most)
                    if rest:
                        return rest
                    self._offset = 0
                self._inode = inode
                file.seek(self._offset)
                return self._counted(file.read(most))
        except FileNotFoundError:
            return b""

    def _rest(self, most: int) -> bytes:
        """What is left of the file that was replaced."""
        try:
            with Path(f"{self._path}.1").open("rb") as file:
                if os.fstat(file.fileno()).st_ino != self._inode:
                    return b""  # it was replaced twice between two looks
                file.seek(self._offset)
                return self._counted(file.read(most))
        except FileNotFoundError:
            return b""

    def _counted(self, fresh: bytes) -> bytes:
        whole = fresh[: fresh.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole


METHODS = ("port", "put", "start", "signal", "look")
"""What may be called from outside."""


def encoded(result: object) -> str:
    """A line for the result of a call."""
    if isinstance(result, Look):
        pieces = [(p.file, base64.b64encode(p.data).decode(), p.offset) for p in result.pieces]
        return json.dumps({"life": result.life, "code": result.code, "pieces": pieces})
    return json.dumps(result)


def decoded(line: bytes) -> object:
    """The result in a line. Raises ValueError if it holds none."""
    result = json.loads(line)
    if not isinstance(result, dict):
        return result
    try:
        pieces = [
            Piece(str(file), base64.b64decode(data), None if offset is None else int(offset))
            for file, data, offset in result["pieces"]
        ]
        code = result["code"]
        return Look(int(result["life"]), None if code is None else int(code), tuple(pieces))
    except (KeyError, TypeError) as error:
        raise ValueError(f"no look: {error}") from error


def main() -> None:
    """Serve calls until the input ends."""
    agent = Agent(sys.argv[1], tuple(sys.argv[2:]) or PEER_COMMAND)
    try:
        for line in sys.stdin.buffer:
            call = json.loads(line)
            if call["method"] not in METHODS:
                raise ValueError(f"no method {call['method']!r}")
            result = getattr(agent, call["method"])(*call["arguments"])
            print(encoded(result), flush=True)
    finally:
        agent.close()


if __name__ == "__main__":
    main()
