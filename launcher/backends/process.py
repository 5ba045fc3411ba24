"""Peers as processes of this machine.

The first peer gets a free port and the others join there. Each has one compute thread, a log of
what it printed beside its records, and no standard input. Processes are spawned, never forked, so a
peer inherits no thread, no lock and no open file of the launcher.

Nothing is left behind, in any of the ways in which a launcher can end:

===============================  ==================================================================
all peers ended                  `stop` finds nothing to do
an error, Ctrl-C, SIGTERM        `stop`, in a ``finally``: SIGTERM to each, SIGKILL after the grace
a second Ctrl-C during `stop`    the grace is cut short, SIGKILL at once
kill -9, the OOM killer          `launcher.backends.guard` does the same
===============================  ==================================================================
"""

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.backends import guard
from launcher.backends.base import Fleet, LaunchError, PeerStatus
from launcher.conditions import FaultConfig
from launcher.outsiders import OUTSIDERS, PRICES
from launcher.records import PeerHistory
from launcher.scenario import Scenario
from p2ptrain.config import RunConfig, to_toml
from p2ptrain.errors import ConfigError
from p2ptrain.ids import Seconds

PEER_COMMAND = (sys.executable, "-m", "p2ptrain", "peer", "--config")
"""What starts a peer of ours, up to the path of its configuration."""

USER_MISTAKE = 2
"""The exit code of a peer that refuses to run; its last line says why."""

_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_POLL_S = 0.02

SIGNALS: Mapping[str, signal.Signals] = {"crash": signal.SIGKILL, "pause": signal.SIGSTOP}
"""The faults that can befall a process, and how."""

LOOK_S: Seconds = 0.1
"""Between two looks at what peers have written."""


class ProcessBackend:
    """Starts peers with `command`, followed by the path of a peer's configuration.

    Outsiders (`launcher.outsiders`) have commands of their own.
    """

    def __init__(self, command: Sequence[str] = PEER_COMMAND) -> None:
        self._command = tuple(command)

    def refusal(self, algorithm: str) -> str:
        """Prices are of no process."""
        return "is a price, and can only be simulated" if algorithm in PRICES else ""

    def check(self, scenario: Scenario) -> None:
        """Refuse what only a simulation can do; see `launcher.backends.base.Backend`."""
        if scenario.link is not None:
            raise ConfigError(
                f"{scenario.name} has a [link], but processes of one machine have the link they "
                "have; leave it out, or use --backend sim"
            )
        if scenario.machines is not None:
            raise ConfigError(
                f"{scenario.name} has [machines], but all processes are on this one; leave them "
                "out, or use --backend sim"
            )
        for fault in scenario.faults:
            if fault.kind not in SIGNALS or (fault.kind == "crash" and fault.for_s is not None):
                and_back = " and back" if fault.kind == "crash" else ""
                raise ConfigError(
                    f"{scenario.name}: {fault}{and_back} cannot befall processes of one machine; "
                    f"those that can are {', '.join(SIGNALS)}; all can with --backend sim"
                )
        if not scenario.gradients:
            raise ConfigError(
                f"{scenario.name} is to run without gradients, but processes compute what they "
                "train on; use --backend sim"
            )

    def start(self, scenario: Scenario, configs: Sequence[RunConfig]) -> Fleet:
        """Start one process per configuration; see `launcher.backends.base.Backend`."""
        fleet = ProcessFleet(scenario.faults)
        try:
            for config in _with_addresses(configs):
                fleet.add(config, OUTSIDERS.get(config.algorithm, self._command))
        except OSError as error:
            fleet.stop(0.0)
            raise LaunchError(f"cannot start the peers: {error}") from error
        except BaseException:  # Ctrl-C while starting leaves nothing behind either
            fleet.stop(0.0)
            raise
        return fleet


class ProcessFleet:
    """The processes of one run, all in the process group of their guard."""

    def __init__(self, faults: Sequence[FaultConfig] = ()) -> None:
        self._peers: list[_Peer] = []
        self._due = [(fault, rank) for fault in faults for rank in fault.peers]
        self._resumed_at: list[tuple[Seconds, int]] = []
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__], stdin=subprocess.PIPE, process_group=0
        )

    def add(self, config: RunConfig, command: Sequence[str]) -> None:
        """Start one peer."""
        folder = Path(config.out)
        file = folder / f"{config.name}.toml"
        file.write_text(to_toml(config), encoding="utf-8")
        log = folder / f"{config.name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, str(file)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=peer_environment(os.environ),
                process_group=self._guard.pid,
            )
        self._peers.append(_Peer(config.name, process, log))

    def pids(self) -> Sequence[int]:
        """The process ids of the peers, in order; a scenario's faults are aimed at them."""
        return [peer.process.pid for peer in self._peers]

    @property
    def is_virtual(self) -> bool:
        """Processes live in real time."""
        return False

    def now(self) -> Seconds:
        """A monotonic clock of this machine."""
        return time.monotonic()

    def let_pass(self) -> None:
        """Leave the processor to the peers for a moment."""
        time.sleep(LOOK_S)

    def befall(self, histories: Sequence[PeerHistory], started_at: Seconds | None) -> None:
        """Send the signals that are due, and SIGCONT to those whose pause is over."""
        for fault, rank in list(self._due):
            if _is_due(fault, histories[rank], started_at):
                self._due.remove((fault, rank))
                self._signal(rank, SIGNALS[fault.kind])
                if fault.for_s is not None:
                    self._resumed_at.append((time.monotonic() + fault.for_s, rank))
        for at, rank in list(self._resumed_at):
            if at <= time.monotonic():
                self._resumed_at.remove((at, rank))
                self._signal(rank, signal.SIGCONT)

    def facts(self) -> dict[str, Any]:  # Any: JSON
        """Nothing beyond what all backends say."""
        return {}

    def poll(self) -> Sequence[PeerStatus]:
        """Say how every peer is."""
        return [peer.status() for peer in self._peers]

    def stop(self, grace_s: Seconds) -> None:
        """SIGTERM to each that runs; after `grace_s` SIGKILL to the whole group and its guard."""
        try:
            self._ask_to_leave()
            self._wait(grace_s)
        finally:
            self._kill_group()

    def _signal(self, rank: int, number: signal.Signals) -> None:
        process = self._peers[rank].process
        if process.poll() is None:
            process.send_signal(number)

    def _ask_to_leave(self) -> None:
        for peer in self._peers:
            if peer.process.poll() is None:
                peer.process.send_signal(signal.SIGTERM)
                peer.process.send_signal(signal.SIGCONT)  # a paused peer cannot leave

    def _wait(self, grace_s: Seconds) -> None:
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline and any(p.process.poll() is None for p in self._peers):
            time.sleep(_POLL_S)

    def _kill_group(self) -> None:
        # As long as the guard is not reaped, its number, and so the group, is ours.
        if self._guard.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._guard.pid, signal.SIGKILL)
        for peer in self._peers:
            peer.process.kill()  # does nothing to one that was reaped
            peer.process.wait()
        self._guard.wait()
        if self._guard.stdin is not None:
            self._guard.stdin.close()


def _is_due(fault: FaultConfig, history: PeerHistory, started_at: Seconds | None) -> bool:
    if fault.at_step is not None:
        return len(history.steps) >= fault.at_step
    assert fault.at_s is not None
    return started_at is not None and time.time() >= started_at + fault.at_s


@dataclasses.dataclass(frozen=True, slots=True)
class _Peer:
    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def status(self) -> PeerStatus:
        code = self.process.poll()
        if code is None:
            return PeerStatus(self.name)
        if code == 0:
            return PeerStatus(self.name, "ended", "ended its run")
        if code == USER_MISTAKE:
            return PeerStatus(self.name, "refused", last_words(self.log))
        if code < 0:
            return PeerStatus(self.name, "lost", f"was killed by {signal.Signals(-code).name}")
        return PeerStatus(self.name, "lost", f"ended with exit code {code}: {last_words(self.log)}")


def last_words(log: Path) -> str:
    """The sentence with which a peer gave up, without the word ``error`` in front."""
    lines = [
        line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
    ]
    errors = [line for line in lines if line.startswith("error: ")]
    said = [line for line in lines if line]
    return (errors or said or ["it said nothing"])[-1].removeprefix("error: ")


def peer_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Ours, with one compute thread: peers of one machine must not fight for it."""
    return {**environment, **dict.fromkeys(_ONE_THREAD, "1"), "PYTHONUNBUFFERED": "1"}


def _with_addresses(configs: Sequence[RunConfig]) -> list[RunConfig]:
    """Let the first listen on a free port, and all others join there."""
    first, *others = configs
    address = f"127.0.0.1:{_free_port()}"
    return [
        dataclasses.replace(first, listen=address),
        *(dataclasses.replace(config, listen="127.0.0.1:0", join=(address,)) for config in others),
    ]


def _free_port() -> int:
    """A port that was free a moment ago; a peer that finds it taken says so and ends the run."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
