"""Run peers as processes of this machine.

The first peer gets a free port and the others join there. Each has one compute thread, a log of its
output beside its records, and no standard input. Processes are never forked from the launcher, so a
peer inherits no thread, no lock and no open file of it: they are forked from a process that has
imported torch (`p2plab.backends.forked`), or spawned where there is an accelerator.

Processes share the network of their machine. Where a scenario cuts or narrows it, every peer is
reached through a cable (`p2plab.backends.cables`), and chunks travel by gRPC, since a cable
carries one port only.

Nothing is left behind, whichever way the launcher ends:

===============================  ==================================================================
all peers ended                  `stop` finds nothing to do
an error, Ctrl-C, SIGTERM        `stop`, in a ``finally``: SIGTERM to each, SIGKILL after the grace
a second Ctrl-C during `stop`    the grace is cut short, SIGKILL at once
kill -9, the OOM killer          `p2plab.backends.guard` does the same
===============================  ==================================================================
"""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from p2plab.backends import cables, forked, guard
from p2plab.backends.base import Fleet, LaunchError
from p2plab.backends.cables import Cables
from p2plab.backends.forked import ForkedProcess
from p2plab.backends.peer_process import RealFleet, last_words, refuse_faults
from p2plab.backends.spawn import PEER_COMMAND, free_ports, peer_environment
from p2plab.external_baselines import EXTERNAL_BASELINES, PRICES
from p2plab.faults import FaultInstance
from p2plab.scenario import LeftOut, Scenario, ways_left_out
from p2ptrain.config import RunConfig
from p2ptrain.errors import ConfigError
from p2ptrain.ids import Seconds

_POLL_S = 0.02

KINDS = ("crash", "pause", "slow", "throttle", "partition", "leave", "join")
"""The faults that processes support; they share a clock."""

OF_NETWORK = ("throttle", "partition")
"""The faults that need cables."""


class ProcessBackend:
    """Starts peers with `command`, followed by the path of a peer's configuration.

    External baselines (`p2plab.external_baselines`) have commands of their own.
    """

    def __init__(self, command: Sequence[str] = PEER_COMMAND) -> None:
        self._command = tuple(command)

    def refusal(self, algorithm: str) -> str:
        """Prices have no processes."""
        return "is a price, and can only be simulated" if algorithm in PRICES else ""

    def check(self, scenario: Scenario) -> Sequence[LeftOut]:
        """Refuse what only a simulation can do; see `p2plab.backends.base.Backend`."""
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
        if limits := [name for device in scenario.devices for name in device.limits]:
            raise ConfigError(
                f"{scenario.name} has {limits[0]} in [[devices]], but nothing divides this machine "
                "among processes; leave them out, or use --backend docker"
            )
        refuse_faults(scenario, KINDS, "processes of one machine")
        if _needs_cables(scenario):
            self._check_cables(scenario)
        if not scenario.gradients:
            raise ConfigError(
                f"{scenario.name} is to run without gradients, but processes compute what they "
                "train on; use --backend sim"
            )
        _check_ports(scenario)
        why = "behind the cables that faults of the network need, all travels by gRPC"
        return ways_left_out(scenario, why, "grpc") if _needs_cables(scenario) else ()

    def _check_cables(self, scenario: Scenario) -> None:
        """Raises ConfigError if this machine cannot have cables."""
        baselines = [
            name
            for name in scenario.algorithms
            if scenario.settings_of(name).algorithm in EXTERNAL_BASELINES
        ]
        if baselines:
            raise ConfigError(
                f"{scenario.name}: {baselines[0]} opens connections of its own, which no fault of "
                "the network reaches; leave it out"
            )
        if not cables.can_lay():
            raise ConfigError(
                f"{scenario.name}: {' and '.join(OF_NETWORK)} can hit processes only where the "
                "kernel says whose a connection is (Linux); use --backend docker or sim"
            )

    def start(self, scenario: Scenario, configs: Sequence[RunConfig]) -> Fleet:
        """Start one process per configuration; see `p2plab.backends.base.Backend`."""
        return self._started(scenario, configs, is_clickable=False)

    def start_clickable(self, scenario: Scenario, configs: Sequence[RunConfig]) -> "ProcessFleet":
        """Start a fleet whose peers any fault can hit at any time. Raises as `start` does."""
        return self._started(scenario, configs, is_clickable=True)

    def _started(
        self, scenario: Scenario, configs: Sequence[RunConfig], *, is_clickable: bool
    ) -> "ProcessFleet":
        placed = _with_addresses(configs, returns=bool(scenario.faults) or is_clickable)
        command = EXTERNAL_BASELINES.get(configs[0].algorithm, self._command)
        fleet = ProcessFleet(scenario, placed, command, is_clickable=is_clickable)
        try:
            fleet.begin()
        except OSError as error:
            fleet.stop(0.0)
            raise LaunchError(f"cannot start the peers: {error}") from error
        except BaseException:  # Ctrl-C while starting leaves nothing behind either
            fleet.stop(0.0)
            raise
        return fleet


class ProcessFleet(RealFleet):
    """The processes of one run, all in the process group of their guard."""

    def __init__(
        self,
        scenario: Scenario,
        configs: Sequence[RunConfig],
        command: Sequence[str],
        *,
        is_clickable: bool,
    ) -> None:
        super().__init__(scenario, configs)
        self._can_slow = self._can_slow or is_clickable
        self._command = tuple(command)
        self._forks = can_fork(command)
        self._processes: dict[int, subprocess.Popen[bytes] | ForkedProcess] = {}
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__], stdin=subprocess.PIPE, process_group=0
        )
        self._cables: Cables | None = None
        if _needs_cables(scenario) or (is_clickable and _can_have_cables(configs)):
            ports = [_port(config.listen) for config in configs]
            self._cables = Cables(ports, self._guard.pid)
            self._configs = _behind(self._cables.addresses, configs)

    @property
    def addresses(self) -> Sequence[str]:
        """The addresses of the peers, by rank."""
        return [config.advertise or config.listen for config in self._configs]

    @property
    def can_cut(self) -> bool:
        """True if a peer can be cut off from the others."""
        return self._cables is not None

    def pids(self) -> Sequence[int]:
        """The process ids of the peers that were started, in order."""
        return [process.pid for _, process in sorted(self._processes.items())]

    def stop(self, grace_s: Seconds) -> None:
        """SIGTERM to each that runs; after `grace_s` SIGKILL to the whole group and its guard."""
        self._is_over = True
        try:
            self._ask_to_leave()
            self._wait(grace_s)
        finally:
            self._kill_group()
            if self._cables:
                self._cables.close()

    def _start(self, rank: int, file: Path) -> None:
        log = file.with_suffix(".log")
        self._processes[rank] = self._forked(file, log) if self._forks else self._spawned(file, log)
        if self._cables:
            self._cables.belongs(rank, self._processes[rank].pid)

    def _forked(self, file: Path, log: Path) -> ForkedProcess:
        _, _, module, *arguments = self._command
        return forked.start(module, [*arguments, str(file)], log, self._guard.pid)

    def _spawned(self, file: Path, log: Path) -> subprocess.Popen[bytes]:
        with log.open("ab") as output:
            return subprocess.Popen(
                [*self._command, str(file)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=peer_environment(os.environ),
                process_group=self._guard.pid,
            )

    def _exit_code(self, rank: int) -> int | None:
        return self._processes[rank].poll()

    def _last_words(self, rank: int) -> str:
        return last_words(self._file(rank, ".log").read_text(encoding="utf-8", errors="replace"))

    def _signal(self, rank: int, number: signal.Signals) -> None:
        if self._processes[rank].poll() is None:
            self._processes[rank].send_signal(number)

    def _change_network(self, instance: FaultInstance, *, cuts: bool) -> None:
        assert self._cables is not None  # a fault that needs them had them made
        if instance.fault.kind == "throttle":
            self._cables.throttle(instance.ranks[0], self._narrowest(instance.ranks[0]))
        elif cuts:
            self._cables.cut_off(instance.ranks)
        else:
            self._cables.heal(instance.ranks)

    def _ask_to_leave(self) -> None:
        for rank in self._processes:
            self._signal(rank, signal.SIGTERM)
            self._signal(rank, signal.SIGCONT)  # a paused peer cannot leave

    def _wait(self, grace_s: Seconds) -> None:
        deadline = time.monotonic() + grace_s
        processes = self._processes.values()
        while time.monotonic() < deadline and any(p.poll() is None for p in processes):
            time.sleep(_POLL_S)

    def _kill_group(self) -> None:
        # Until the guard is reaped its pid, and so the group, cannot be reused.
        if self._guard.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._guard.pid, signal.SIGKILL)
        for process in self._processes.values():
            process.kill()  # has no effect on a reaped process
            process.wait()
        self._guard.wait()
        if self._guard.stdin is not None:
            self._guard.stdin.close()


def _with_addresses(configs: Sequence[RunConfig], *, returns: bool) -> list[RunConfig]:
    """Let the first peer listen on a free port, and all others join there.

    With `returns` every peer keeps one port for all of its processes, so that a returning peer can
    join any other.
    """
    first, *others = free_ports(len(configs) if returns else 1)
    others += [0] * (len(configs) - 1 - len(others))
    address = f"127.0.0.1:{first}"
    return [
        dataclasses.replace(configs[0], listen=address),
        *(
            dataclasses.replace(config, listen=f"127.0.0.1:{port}", join=(address,))
            for config, port in zip(configs[1:], others, strict=True)
        ),
    ]


def can_fork(command: Sequence[str]) -> bool:
    """True for a module of Python, where no accelerator is."""
    if tuple(command[:2]) != (sys.executable, "-m"):
        return False
    from p2ptrain.compute.devices import accelerators  # imports torch

    return not accelerators().count


def _check_ports(scenario: Scenario) -> None:
    """Raises ConfigError if a port is given to two peers of this machine."""
    for name in scenario.algorithms:
        configs = scenario.configs(name, Path())
        for key in ("metrics_port", "ui_port"):
            ports = [port for config in configs if (port := getattr(config, key))]
            if twice := [port for port in ports if ports.count(port) > 1]:
                raise ConfigError(
                    f"{key} = {twice[0]} is given to {ports.count(twice[0])} peers of one machine; "
                    "write 0 for a free port of each, or give it to one by [[overlays]]"
                )


def _needs_cables(scenario: Scenario) -> bool:
    return any(fault.kind in OF_NETWORK for fault in scenario.faults)


def _can_have_cables(configs: Sequence[RunConfig]) -> bool:
    return cables.can_lay() and configs[0].algorithm not in EXTERNAL_BASELINES


def _behind(addresses: Sequence[str], configs: Sequence[RunConfig]) -> list[RunConfig]:
    """Let every peer be reached at the end of its cable, and at no other port."""
    return [
        dataclasses.replace(
            config,
            advertise=address,
            join=tuple(addresses[:1]) if config.join else (),
            network=dataclasses.replace(config.network, data="grpc"),
        )
        for address, config in zip(addresses, configs, strict=True)
    ]


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])
