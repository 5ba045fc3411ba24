"""Define the port of a backend, a place where peers can run.

A backend starts the peers of one run and returns them as a fleet. The launcher then polls the fleet
repeatedly, and stops it once, in every case. Everything else (records, consensus, claims) comes
from the files that peers write, so a backend contains nothing about training, and may run
processes, containers or a virtual world.

A peer is in one of five states, and never leaves the last four. A peer that is still to start, or
to restart, counts as running::

    running ──> ended      it finished its run, or left cleanly when the launcher told it to
       │
       ├──────> left       it left cleanly because the scenario says so; the others go on
       │
       ├──────> refused    it will not run, because of a mistake that its user can correct
       │
       └──────> lost       it was killed, crashed, or had to be killed; the others go on without it
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from p2plab.faults import FaultInstance
from p2plab.scenario import LeftOut, Scenario
from p2ptrain.config import RunConfig
from p2ptrain.errors import P2PTrainError
from p2ptrain.ids import Seconds

State = Literal["running", "ended", "left", "refused", "lost"]


class LaunchError(P2PTrainError):
    """A fleet failed to finish; the message names the peer and its last sentence."""


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """The state of one peer; `why` is a sentence, empty while it runs."""

    name: str
    state: State = "running"
    why: str = ""


class Fleet(Protocol):
    """The peers of one run."""

    started_at: Seconds | None
    """When the first step began, on the clock of the records; the launcher sets it."""

    @property
    def is_virtual(self) -> bool:
        """True if the peers' time passes only inside `let_pass`, as fast as possible."""
        ...

    def now(self) -> Seconds:
        """The peers' clock, to which their deadlines refer."""
        ...

    def record_clock(self) -> Seconds:
        """The clock of the peers' records: Unix seconds, or those of a simulated world."""
        ...

    def let_pass(self, until: Seconds | None) -> None:
        """Let a moment of the peers' time pass, but nothing after `until` of the record clock."""
        ...

    def apply(self, instance: FaultInstance) -> bool:
        """Let a fault begin; False, with nothing done, if it finds none of its peers there."""
        ...

    def revert(self, instance: FaultInstance) -> None:
        """End a fault that was applied; another one of its kind may go on."""
        ...

    def poll(self) -> Sequence[PeerStatus]:
        """Return the state of every peer, in the order of configurations. Never waits."""
        ...

    def stop(self, grace_s: Seconds) -> None:
        """Ask the running peers to leave.

        After `grace_s` of their time, end those that remain. May be called again.
        """
        ...

    def facts(self) -> dict[str, Any]:  # Any: JSON
        """Facts for the summary that only this backend has."""
        ...


class Backend(Protocol):
    """A place where peers can run."""

    def refusal(self, algorithm: str) -> str:
        """Why it cannot run `algorithm`, as the end of a sentence; empty if it can."""
        ...

    def check(self, scenario: Scenario) -> Sequence[LeftOut]:
        """Refuse a scenario that this backend cannot run as it is written; say what has no effect.

        Raises:
            ConfigError: naming what is not supported, and which backend supports it.
        """
        ...

    def start(self, scenario: Scenario, configs: Sequence[RunConfig]) -> Fleet:
        """Start one peer per configuration of `scenario`, all of one swarm.

        The backend fills in the addresses (`listen`, `advertise`, `join`).

        Raises:
            LaunchError: if one cannot be started; none is left running.
        """
        ...
