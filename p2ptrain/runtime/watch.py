"""Asks `core/silence.py` when it is time, and records what it says."""

import asyncio
from typing import TYPE_CHECKING

from p2ptrain.core.messages import Phase
from p2ptrain.ids import Seconds
from p2ptrain.runtime.service import doing

if TYPE_CHECKING:
    from p2ptrain.runtime.driver import Driver


class Watch:
    """One peer's; `look` whenever its trainer or its view of the others has changed."""

    def __init__(self, host: "Driver") -> None:
        self._host = host
        self._timer: asyncio.TimerHandle | None = None

    def look(self) -> None:
        """Count time only while the trainer trains and there is somebody to average with."""
        host, membership = self._host, self._host.machine.membership
        accounts = host.accounts
        trains = membership.me.phase is Phase.TRAINING
        counts = trains and len(membership.participants()) > 1
        accounts.tell(accounts.silence.watch(host.now, counts=counts), host.metrics)
        if self._timer is None and (deadline := accounts.silence.deadline) is not None:
            # Averages that succeed meanwhile do not move the timer: it finds out when it fires.
            self._timer = asyncio.get_running_loop().call_at(deadline, self._ask, deadline)

    def stop(self) -> None:
        """End with the peer."""
        if self._timer:
            self._timer.cancel()

    def _ask(self, due: Seconds) -> None:
        self._timer, host, now = None, self._host, max(self._host.now, due)
        silence, does = host.accounts.silence, doing(host.machine)
        if does == "trains" and host.machine.membership.me.steps == 0:
            silence.watch(now, counts=False)  # the first step may take minutes, as to compile
        host.accounts.tell(silence.ask(now, does), host.metrics)
        self.look()
