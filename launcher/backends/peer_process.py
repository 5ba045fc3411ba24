"""Run peers in real time: their processes and faults, common to processes and containers.

A peer may have several processes in turn: it starts late, crashes and restarts, leaves and returns.
Between two of them it is *away*, and counts as running as long as another peer runs; if the run
ends without it, it is lost. A later process joins any present peer; if none admits it (it is cut
off, or all others are leaving) it retries after `TRY_AGAIN_S`, as a process supervisor would. Only
the first process of a peer that is present from the start may *refuse* to run.

A backend implements how a process starts, how its state is read, and how it is killed, asked to
leave, stopped and continued; only some backends can change the network.
"""

import dataclasses
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

from p2plab.backends.base import PeerStatus
from p2plab.conditions import FaultConfig, Kind
from p2plab.faults import FaultInstance, left_of
from p2plab.scenario import Scenario
from p2ptrain import exit_codes
from p2ptrain.config import RunConfig, to_toml
from p2ptrain.errors import ConfigError, InvariantViolation
from p2ptrain.ids import Seconds

LOOK_S: Seconds = 0.1
"""The interval between two reads of the peers' records."""

TRY_AGAIN_S: Seconds = 1.0

AGREE_S: Seconds = 1.0
"""Peers of a synchronous algorithm need up to this long after the seconds of a run to agree on
their last step."""


@dataclasses.dataclass(slots=True)
class PeerProcess:
    """Whether a peer is present, by the scenario."""

    starts: int = 0
    is_away: bool = False
    """It is absent, and will start."""

    has_left: bool = False
    again_at: Seconds | None = None
    """When to try again to start a process."""

    is_late: bool = False
    """It started later than the others, so the launcher has to end it with them."""

    is_paused: bool = False
    is_asked: bool = False
    """It was asked to end. If it cannot handle SIGTERM yet, or any more, it ends at once."""


class RealFleet(ABC):
    """The peers of one run, in real time."""

    def __init__(self, scenario: Scenario, configs: Sequence[RunConfig]) -> None:
        self.started_at: Seconds | None = None
        self._faults: list[FaultInstance] = []  # those that last
        self._can_slow = any(fault.kind == "slow" for fault in scenario.faults)
        self._configs = list(configs)
        self._is_over = False
        self._late = scenario.late
        self._peer_processes = [
            PeerProcess(is_away=rank in self._late) for rank in range(len(configs))
        ]

    def begin(self) -> None:
        """Start the peers that are present from the start."""
        for rank, peer_process in enumerate(self._peer_processes):
            if not peer_process.is_away:
                self._live(rank)

    # --- what a backend implements ----------------------------------------------------------------

    @abstractmethod
    def pids(self) -> Sequence[int]:
        """The process ids of the running peers on this machine."""

    @abstractmethod
    def _start(self, rank: int, file: Path) -> None:
        """Start a process with the configuration in `file`."""

    @abstractmethod
    def _exit_code(self, rank: int) -> int | None:
        """The exit code of the latest process; negative for a signal; None while it runs."""

    @abstractmethod
    def _last_words(self, rank: int) -> str:
        """The last sentence of its log."""

    @abstractmethod
    def _signal(self, rank: int, number: signal.Signals) -> None:
        """Send SIGKILL, SIGTERM, SIGSTOP or SIGCONT to a running peer."""

    def _change_network(self, instance: FaultInstance, *, cuts: bool) -> None:
        """Throttle a link or cut a peer off, if the backend has a network of its own.

        With `cuts` the fault begins, else it has ended.
        """
        raise InvariantViolation(f"{instance.fault} was to be refused before anything started")

    def _death(self, rank: int, number: signal.Signals) -> str:
        """How a process ended, as the rest of a sentence after the peer's name."""
        return f"was killed by {number.name}"

    def _where(self, file: Path) -> str:
        """The path under which the peer sees a file of its folder."""
        return str(file)

    # --- what the launcher asks -------------------------------------------------------------------

    @property
    def is_virtual(self) -> bool:
        """Real peers run in real time."""
        return False

    def now(self) -> Seconds:
        """A monotonic clock of this machine."""
        return time.monotonic()

    def record_clock(self) -> Seconds:
        """The wall clock."""
        return time.time()

    def let_pass(self, until: Seconds | None) -> None:
        """Leave the processor to the peers for a moment."""
        left_s = LOOK_S if until is None else until - self.record_clock()
        time.sleep(max(0.0, min(LOOK_S, left_s)))

    def apply(self, instance: FaultInstance) -> bool:
        """Let a fault begin; False if none of its peers is there."""
        if not self._can_apply(instance):
            return False
        self._faults.append(instance)
        self._change(instance, begins=True)
        return True

    def revert(self, instance: FaultInstance) -> None:
        """End a fault."""
        self._faults.remove(instance)
        self._change(instance, begins=False)

    def _end_late_processes(self) -> None:
        """Ask peers that started later to end with the others.

        A peer counts the seconds of a run from its own first step, and the time from its start to
        that step is not known in advance.
        """
        for rank, peer_process in enumerate(self._peer_processes):
            seconds = self._configs[rank].stop.seconds
            if not peer_process.is_late or seconds is None or self.started_at is None:
                continue
            end = self.started_at + seconds + AGREE_S
            if self.record_clock() >= end and self._is_there(rank):
                peer_process.is_late = False
                self._ask_to_end(rank)

    def facts(self) -> dict[str, Any]:  # Any: JSON
        """No additional facts."""
        return {}

    def poll(self) -> Sequence[PeerStatus]:
        """Return the state of every peer, after starting those that could not start before."""
        if not self._is_over:  # the launcher polls once more after the stop
            for rank, peer_process in enumerate(self._peer_processes):
                if peer_process.again_at is not None and self.now() >= peer_process.again_at:
                    self._live(rank)
            self._end_late_processes()
        found = [self._status(rank) for rank in range(len(self._configs))]
        someone_runs = any(status and status.state == "running" for status in found)
        if not any(status and status.state == "ended" for status in found):
            someone_runs = someone_runs or self._someone_returns()
        return [
            status or self._status_away(rank, someone_runs) for rank, status in enumerate(found)
        ]

    def _someone_returns(self) -> bool:
        """True if an absent peer will start, even after all have crashed."""
        retries = any(peer_process.again_at is not None for peer_process in self._peer_processes)
        goings = (one.fault for one in self._faults if one.fault.kind in ("crash", "leave"))
        return retries or any(fault.for_s is not None for fault in goings)

    # --- processes --------------------------------------------------------------------------------

    def _live(self, rank: int) -> None:
        """Start a process, or retry once the previous one has ended."""
        peer_process, config = self._peer_processes[rank], self._configs[rank]
        if peer_process.starts and self._exit_code(rank) is None:
            peer_process.again_at = self.now() + TRY_AGAIN_S
            return
        if peer_process.starts or peer_process.is_away:
            others = tuple(one.advertise or one.listen for one in self._configs if one != config)
            config = dataclasses.replace(config, join=others)
        if self.started_at is not None:
            left = left_of(config.stop, self.record_clock() - self.started_at)
            config = dataclasses.replace(config, stop=left)
        if self._can_slow:
            slowed = self._where(self._slowdown(rank))
            pace = dataclasses.replace(config.pace, slowdown_file=slowed)
            config = dataclasses.replace(config, pace=pace)
        file = self._file(rank, ".toml")
        out = self._where(file.parent)
        checkpoint = str(PurePath(out) / config.checkpoint) if config.checkpoint else ""
        config = dataclasses.replace(config, out=out, checkpoint=checkpoint)
        file.write_text(to_toml(config), encoding="utf-8")
        peer_process.starts += 1
        peer_process.is_late = self.started_at is not None
        peer_process.is_away, peer_process.has_left, peer_process.is_asked = False, False, False
        peer_process.is_paused = False
        peer_process.again_at = None
        self._start(rank, file)

    def _status(self, rank: int) -> PeerStatus | None:
        """None while it is away."""
        peer_process, name = self._peer_processes[rank], self._configs[rank].name
        if peer_process.is_away:
            return None
        code = self._exit_code(rank)
        if code is None:
            return PeerStatus(name)
        if code == 0 or (code == -signal.SIGTERM and peer_process.is_asked):
            left = peer_process.has_left
            return PeerStatus(
                name, "left" if left else "ended", "left" if left else "ended its run"
            )
        if code == exit_codes.MISTAKE and (peer_process.starts > 1 or rank in self._late):
            peer_process.is_away, peer_process.again_at = True, self.now() + TRY_AGAIN_S
            return None
        if code == exit_codes.MISTAKE:
            return PeerStatus(name, "refused", self._last_words(rank))
        if code < 0:
            return PeerStatus(name, "lost", self._death(rank, signal.Signals(-code)))
        why = f"ended with exit code {code}: {self._last_words(rank)}"
        return PeerStatus(name, "lost", why)

    def _status_away(self, rank: int, someone_runs: bool) -> PeerStatus:
        name = self._configs[rank].name
        return PeerStatus(name) if someone_runs else PeerStatus(name, "lost", "was not there")

    # --- faults -----------------------------------------------------------------------------------

    def _can_apply(self, instance: FaultInstance) -> bool:
        if instance.fault.kind == "join":
            return True
        return any(self._is_there(rank) for rank in instance.ranks)

    def _is_there(self, rank: int) -> bool:
        peer_process = self._peer_processes[rank]
        return (
            bool(peer_process.starts) and not peer_process.is_away and self._exit_code(rank) is None
        )

    def _change(self, instance: FaultInstance, *, begins: bool) -> None:
        """Do what a fault says where it `begins`, or undo it where it has ended."""
        rank, returns = instance.ranks[0], instance.fault.for_s is not None
        peer_process = self._peer_processes[rank]
        match instance.fault.kind:
            case "crash" if begins:
                self._signal(rank, signal.SIGKILL)
                peer_process.is_away, peer_process.is_paused = returns, False
            case "leave" if begins:
                self._ask_to_end(rank)
                peer_process.is_away, peer_process.has_left = returns, True
            case "crash" | "leave" | "join":
                self._live(rank)
            case "pause":
                self._hold(rank, paused=bool(self._limits(rank, "pause")))
            case "slow":
                self._slow_down(rank)
            case "throttle" | "partition":
                self._change_network(instance, cuts=begins)
            case "drift":
                raise InvariantViolation(f"{instance.fault} was to be refused")

    def _limits(self, rank: int, kind: Kind) -> list[FaultConfig]:
        """The faults of this kind that the peer has now; they may overlap."""
        return [b.fault for b in self._faults if b.fault.kind == kind and rank in b.ranks]

    def _hold(self, rank: int, *, paused: bool) -> None:
        peer_process = self._peer_processes[rank]
        if paused is not peer_process.is_paused and self._is_there(rank):
            peer_process.is_paused = paused
            self._signal(rank, signal.SIGSTOP if paused else signal.SIGCONT)

    def _slow_down(self, rank: int) -> None:
        """Apply the slowest factor."""
        factors = [fault.factor or 1.0 for fault in self._limits(rank, "slow")]
        if factors:
            self._slowdown(rank).write_text(f"{max(factors)}\n", encoding="utf-8")
        else:
            self._slowdown(rank).unlink(missing_ok=True)

    def _narrowest(self, rank: int) -> float | None:
        """The narrowest rate of its faults, in Mbit/s; None if there is none."""
        rates = [fault.mbit_s or 0.0 for fault in self._limits(rank, "throttle")]
        return min(rates, default=None)

    def _ask_to_end(self, rank: int) -> None:
        self._hold(rank, paused=False)  # a paused peer cannot leave
        self._peer_processes[rank].is_asked = True
        self._signal(rank, signal.SIGTERM)

    def _slowdown(self, rank: int) -> Path:
        return self._file(rank, ".slowdown")

    def _file(self, rank: int, suffix: str) -> Path:
        config = self._configs[rank]
        return Path(config.out) / f"{config.name}{suffix}"


def refuse_faults(scenario: Scenario, kinds: Sequence[str], what: str) -> None:
    """Refuse faults that `what` does not support.

    Raises:
        ConfigError: naming the fault and the supported ones.
    """
    for fault in scenario.faults:
        if fault.kind not in kinds:
            raise ConfigError(
                f"{scenario.name}: {fault} cannot hit {what}; those that can are "
                f"{', '.join(kinds)}; all can with --backend sim"
            )


def last_words(log: str) -> str:
    """The last sentence of a peer's log, without a leading ``error``."""
    lines = [line.strip() for line in log.splitlines()]
    errors = [line for line in lines if line.startswith("error: ")]
    said = [line for line in lines if line]
    return (errors or said or ["it said nothing"])[-1].removeprefix("error: ")
