"""What the launcher asks of a place where peers can run.

A backend starts the peers of one run and returns them as a fleet. The launcher then asks the fleet
how its peers are, many times, and stops it once, whatever happened in between. Everything else
(records, consensus, claims) comes from the files that peers write, so that a backend knows nothing
about training: a container or a virtual world is a backend as much as a process is.

A peer is in one of five states, and never leaves the last four. One that is to come, or to come
back, counts as running::

    running ──> ended      it finished its run, or left cleanly when the launcher told it to
       │
       ├──────> left       it left cleanly because the scenario says so; the others go on
       │
       ├──────> refused    it will not run, because of a mistake that its user can put right
       │
       └──────> lost       it was killed, crashed, or had to be killed; the others go on without it
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from launcher.faults import FaultInstance
from launcher.records import PeerHistory
from launcher.scenario import Scenario
from p2ptrain.config import RunConfig
from p2ptrain.errors import P2PTrainError
from p2ptrain.ids import Seconds

State = Literal["running", "ended", "left", "refused", "lost"]


class LaunchError(P2PTrainError):
    """A fleet that did not come to its end; the message names the peer and what it said."""


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """How one peer is; `why` is a sentence, empty while it runs."""

    name: str
    state: State = "running"
    why: str = ""


class Fleet(Protocol):
    """The peers of one run."""

    @property
    def is_virtual(self) -> bool:
        """True if time passes for them only inside `let_pass`, and then as fast as it can."""
        ...

    def now(self) -> Seconds:
        """The clock by which they live, and by which their deadlines are meant."""
        ...

    def let_pass(self) -> None:
        """Let a moment of their time pass."""
        ...

    def apply_faults(self, histories: Sequence[PeerHistory], started_at: Seconds | None) -> None:
        """Let happen what is due of the scenario's faults.

        Args:
            histories: of the peers, in order.
            started_at: when the first step began, Unix seconds; None before it has.
        """
        ...

    @property
    def instances(self) -> Sequence[FaultInstance]:
        """The scenario's faults, one by one, with when they began and ended."""
        ...

    def poll(self) -> Sequence[PeerStatus]:
        """Say how every peer is, in the order in which they were given. Never waits."""
        ...

    def stop(self, grace_s: Seconds) -> None:
        """Ask whoever still runs to leave.

        After `grace_s` of their time leave nothing behind. May be called again.
        """
        ...

    def facts(self) -> dict[str, Any]:  # Any: JSON
        """What the summary is to say of this run beyond what all backends can say."""
        ...


class Backend(Protocol):
    """A place where peers can run."""

    def refusal(self, algorithm: str) -> str:
        """Why it has no peers of `algorithm`, as the end of a sentence; nothing if it has."""
        ...

    def check(self, scenario: Scenario) -> None:
        """Refuse a scenario that cannot be carried out here as it is written.

        Raises:
            ConfigError: naming what cannot be done, and where it can.
        """
        ...

    def start(self, scenario: Scenario, configs: Sequence[RunConfig]) -> Fleet:
        """Start one peer per configuration of `scenario`, all of one swarm.

        The backend fills in the addresses (`listen`, `advertise`, `join`), which only it can know.

        Raises:
            LaunchError: if they cannot be started; none of them is left running.
        """
        ...
