"""Let a person apply faults to the peers of the lab, and watch what each costs.

`FaultControl` is a port: the page knows names of kinds and peers, and the lab knows how to pause,
slow, cut or kill a peer. Without a `FaultControl` the page is read-only.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from p2ptrain.ids import Seconds
from p2ptrain.ui.history import History

BEFORE_S: Seconds = 5.0
"""The throughput before a fault is the mean over this time."""

KEPT = 40
"""Faults that are remembered; the oldest that have ended are forgotten first."""


class FaultControl(Protocol):
    """Applies and reverts faults. Called from the server's thread; must not block."""

    @property
    def kinds(self) -> Sequence[str]:
        """The kinds of faults that can be applied."""
        ...

    def apply(self, kind: str, peer: str) -> None:
        """Begin a fault of `kind` at `peer`.

        Raises:
            ConfigError: in one sentence, if this cannot be done.
        """
        ...

    def revert(self, kind: str, peer: str) -> None:
        """End it: the peer goes on, or starts again. Raises ConfigError as `apply` does."""
        ...

    def active(self) -> Collection[tuple[str, str]]:
        """Kind and peer of every fault that lasts at this moment."""
        ...


@dataclass(slots=True)
class Fault:
    """One fault, and the samples per second of the swarm before it, since it began, and after."""

    kind: str
    peer: str
    began: Seconds
    ended: Seconds | None = None
    before: float | None = None
    during: float | None = None
    after: float | None = None


class FaultLog:
    """The faults that were seen, the oldest first."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []

    def see(
        self, active: Collection[tuple[str, str]], history: History, now: Seconds
    ) -> list[tuple[Fault, bool]]:
        """Compare with what lasts now; return the faults that began (True) or ended (False)."""
        lasting = {(fault.kind, fault.peer): fault for fault in self.faults if fault.ended is None}
        changes = []
        for key in sorted(set(active) - set(lasting)):
            before = history.samples_per_s(now - BEFORE_S, now)
            self.faults.append(Fault(*key, began=now, before=before))
            changes.append((self.faults[-1], True))
        for key, fault in lasting.items():
            if key not in active:
                fault.ended = now
                changes.append((fault, False))
        self._forget()
        return changes

    def measure(self, history: History, now: Seconds) -> None:
        """Update what each fault has cost so far."""
        for fault in self.faults:
            fault.during = history.samples_per_s(fault.began, fault.ended or now)
            if fault.ended is not None and now <= fault.ended + BEFORE_S:
                fault.after = history.samples_per_s(fault.ended, now)

    def as_json(self) -> list[dict[str, Any]]:  # Any: whatever JSON can hold
        """The same for the page."""
        return [
            {
                "kind": fault.kind,
                "peer": fault.peer,
                "began": round(fault.began, 1),
                "ended": None if fault.ended is None else round(fault.ended, 1),
                "before": fault.before,
                "during": fault.during,
                "after": fault.after,
            }
            for fault in self.faults
        ]

    def _forget(self) -> None:
        over = [fault for fault in self.faults if fault.ended is not None]
        for fault in over[: max(0, len(self.faults) - KEPT)]:
            self.faults.remove(fault)
