"""Run peers on the hosts of a list, one after the other: ``--backend ssh --hosts FILE``.

A line of the list is a host as all others reach it, and, if it is not ``python3``, the Python in
which p2ptrain is installed there; ``#`` begins a comment. If there are more peers than hosts, the
list is gone through again.

ssh must need no password (``BatchMode``); users, ports and keys are a matter of its configuration.
On each host runs an agent (`p2plab.backends.agent`), whose standard input and output are the
connection: when ssh ends, for whatever reason, so do the agent and its peer.
"""

import contextlib
import json
import queue
import shlex
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2plab.backends.agent import Look, decoded
from p2plab.backends.base import Fleet
from p2plab.backends.remote import (
    AgentLost,
    RemoteFleet,
    refusal,
    refuse_what_is_not_ours,
    unenforced,
)
from p2plab.scenario import LeftOut, Scenario
from p2ptrain.config import RunConfig
from p2ptrain.errors import CodecError, ConfigError
from p2ptrain.ids import Seconds
from p2ptrain.net import wire

OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5")

ANSWER_S: Seconds = 30.0
"""A host without an answer for so long is lost."""

END_S: Seconds = 5.0

MOST_WAITING = 16
"""Lines that wait to be read; there are two at most, unless the host says more than it is asked."""


@dataclass(frozen=True, slots=True)
class Host:
    """A line of the list."""

    name: str
    python: str = "python3"


class SshBackend:
    """Starts a peer per configuration on `hosts`, which is the path of a list.

    Args:
        hosts: None if none was given.
        peer: the command that starts a peer, if it is not the usual one.
    """

    def __init__(self, hosts: Path | None, peer: Sequence[str] = ()) -> None:
        self._path = hosts
        self._peer = tuple(peer)

    def refusal(self, algorithm: str) -> str:
        """External baselines have programs of their own, and prices have no processes."""
        return refusal(algorithm, "by ssh")

    def check(self, scenario: Scenario) -> Sequence[LeftOut]:
        """Refuse what ssh cannot do; see `p2plab.backends.base.Backend`."""
        self._hosts()
        refuse_what_is_not_ours(scenario, "hosts behind ssh")
        return unenforced(scenario, (), "no host behind ssh is divided among peers")

    def start(self, scenario: Scenario, configs: Sequence[RunConfig]) -> Fleet:
        """Start an agent for each configuration, and its peer."""
        hosts = self._hosts()

        def connect(rank: int, name: str) -> "_Ssh":
            return _Ssh(hosts[rank % len(hosts)], name, self._peer)

        return RemoteFleet.started(scenario, configs, connect)

    def _hosts(self) -> list[Host]:
        if self._path is None:
            raise ConfigError("--backend ssh needs --hosts FILE, a list with a host on each line")
        return read_hosts(self._path)


def read_hosts(path: Path) -> list[Host]:
    """The hosts of a list. Raises ConfigError if it has none, or a line is no host."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hosts: cannot read {path}: {error}") from error
    hosts = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            wire.address(f"{words[0]}:1")
            is_host = len(words) <= 2 and not words[0].startswith("-")
        except CodecError:
            is_host = False
        if not is_host:
            raise ConfigError(
                f"{path}, line {number}: {line.strip()!r} is no host; write HOST, or HOST PYTHON"
            )
        hosts.append(Host(*words))
    if not hosts:
        raise ConfigError(f"--hosts: there is no host in {path}; write one on each line")
    return hosts


class _Ssh:
    """The connection to an agent behind ssh."""

    def __init__(self, host: Host, name: str, peer: Sequence[str]) -> None:
        self._host = host.name
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - what ssh says; `close` closes it
        self._answers: queue.Queue[bytes] = queue.Queue(MOST_WAITING)
        self._is_looking = False
        self._looks: list[Look] = []
        agent = shlex.join([host.python, "-m", "p2plab.backends.agent", name, *peer])
        try:
            self._ssh = subprocess.Popen(
                ["ssh", *OPTIONS, "--", host.name, agent],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                start_new_session=True,  # Ctrl-C is for the launcher
            )
        except FileNotFoundError:
            raise ConfigError("there is no ssh command here; install an OpenSSH client") from None
        threading.Thread(target=self._read, name=f"ssh {host.name}", daemon=True).start()

    @property
    def host(self) -> str:
        """As the list has it."""
        return self._host

    def call(self, method: str, *arguments: Any) -> Any:  # Any: of the agent's methods
        """Call a method of the agent's, and wait for its result."""
        self._send(method, *arguments)
        if self._is_looking:  # it was asked before
            self._looks.append(self._answer(ANSWER_S))
            self._is_looking = False
        return self._answer(ANSWER_S)

    def news(self) -> Look | None:
        """The agent's next look, if it has come."""
        if self._looks:
            return self._looks.pop(0)
        if not self._is_looking:
            self._send("look")
            self._is_looking = True
        try:
            found = self._answer(0.0)
        except queue.Empty:
            return None
        self._is_looking = False
        assert isinstance(found, Look)
        return found

    def close(self) -> None:
        """End the agent, and with it the peer."""
        assert self._ssh.stdin is not None
        with contextlib.suppress(OSError):
            self._ssh.stdin.close()
        try:
            self._ssh.wait(END_S)
        except subprocess.TimeoutExpired:
            self._ssh.kill()
            self._ssh.wait()
        self._said.close()

    def _send(self, method: str, *arguments: Any) -> None:  # Any: of the agent's methods
        assert self._ssh.stdin is not None
        line = json.dumps({"method": method, "arguments": arguments}) + "\n"
        try:
            self._ssh.stdin.write(line.encode())
            self._ssh.stdin.flush()
        except (OSError, ValueError):
            raise self._lost() from None

    def _answer(self, timeout_s: Seconds) -> Any:  # Any: of the agent's methods
        """The next answer. Raises queue.Empty if there is none yet, and AgentLost."""
        try:
            line = self._answers.get(timeout=timeout_s) if timeout_s else self._answers.get_nowait()
        except queue.Empty:
            if timeout_s:
                raise AgentLost(f"was on {self.host}, which does not answer") from None
            raise
        try:
            return decoded(line)
        except ValueError:  # nothing: it has ended; something else: a greeting of the host's
            raise self._lost(line) from None

    def _lost(self, line: bytes = b"") -> AgentLost:
        self._ssh.kill()
        self._ssh.wait()
        said = [line]
        if not self._said.closed:
            self._said.seek(0)
            said += self._said.read().splitlines()
        words = [text for one in said if (text := one.decode(errors="replace").strip())]
        why = f": {words[-1]}" if words else ""
        return AgentLost(f"was on {self.host}, to which ssh has no connection any more{why}")

    def _read(self) -> None:
        """Pass lines on; an empty one says that there are no more."""
        assert self._ssh.stdout is not None
        with self._ssh.stdout as lines:
            for line in lines:
                self._answers.put(line)
        self._answers.put(b"")
