"""Serve the live page of a run (`p2plab run --ui`), on which faults can be clicked.

The launcher's loop and the page live in two threads. The page leaves *orders*, and the loop carries
them out when it shows the run, as instances of faults like those of the scenario: they are in the
costs and in the report. A clicked fault lasts until it is clicked again.
"""

import dataclasses
import time
from collections import deque
from collections.abc import Collection, Iterator, MutableSequence, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from p2plab.backends import cables
from p2plab.backends.base import Backend, Fleet
from p2plab.backends.process import ProcessBackend
from p2plab.conditions import FaultConfig, Kind
from p2plab.faults import FaultInstance
from p2plab.run import Display, Run
from p2plab.scenario import LeftOut, Scenario, peer_names, ways_left_out
from p2ptrain.config import RunConfig
from p2ptrain.errors import ConfigError
from p2ptrain.ids import Address, PeerId, Seconds
from p2ptrain.ui.server import LivePage, PageConfig, PageThread

UNTIL_CLICKED_S: Seconds = 1e9
SLOWED = 4.0
"""The factor of a peer that is slowed down by a click."""

KINDS: dict[str, Kind] = {"pause": "pause", "slow": "slow", "cut": "partition", "kill": "crash"}
"""What the page calls the kinds of faults that can be clicked."""

_CALLED = {kind: name for name, kind in KINDS.items()}


@dataclass(frozen=True, slots=True)
class Order:
    """A click that is still to be carried out."""

    kind: str
    rank: int
    begins: bool


class ClickedFaults:
    """Implements `FaultControl` for the fleet of the moment."""

    def __init__(self) -> None:
        self._orders: deque[Order] = deque()
        self._names: list[PeerId] = []
        self._kinds: tuple[str, ...] = tuple(KINDS)
        self._active: frozenset[tuple[str, str]] = frozenset()
        self._clicked: dict[tuple[str, int], FaultInstance] = {}
        self._has_begun = False

    # --- the server's thread ----------------------------------------------------------------------

    @property
    def kinds(self) -> Sequence[str]:
        """All of them, but `cut` where nothing can cut a peer off."""
        return self._kinds

    def apply(self, kind: str, peer: str) -> None:
        """Order a fault; see `p2ptrain.ui.faults.FaultControl`."""
        if not self._has_begun:
            raise ConfigError("no peer has trained yet; wait for the first step")
        if (kind, peer) not in self._active:
            self._note(Order(kind, self._names.index(PeerId(peer)), True))

    def revert(self, kind: str, peer: str) -> None:
        """Order its end."""
        order = Order(kind, self._names.index(PeerId(peer)), False)
        if (kind, order.rank) not in self._clicked:
            raise ConfigError(f"{kind} of {peer} is in the scenario, which says when it ends")
        self._note(order)

    def _note(self, order: Order) -> None:
        if order not in self._orders:  # so there are never more than kinds of orders and peers
            self._orders.append(order)

    def active(self) -> Collection[tuple[str, str]]:
        """The faults that last, those of the scenario too."""
        return self._active

    # --- the launcher's thread --------------------------------------------------------------------

    def take_over(self, names: Sequence[str], *, can_cut: bool) -> None:
        """A new fleet has begun."""
        self._orders.clear()
        self._clicked.clear()
        self._names = [PeerId(name) for name in names]
        self._kinds = tuple(kind for kind in KINDS if kind != "cut" or can_cut)
        self._active, self._has_begun = frozenset(), False

    def carry_out(
        self, instances: MutableSequence[FaultInstance], started_at: Seconds | None, now: Seconds
    ) -> None:
        """Add what was ordered to the faults of the run, whose first step began at `started_at`."""
        self._has_begun = started_at is not None
        missed = [key for key, one in self._clicked.items() if one.missed]
        for key in missed:  # its peer was away: it may be clicked again
            del self._clicked[key]
        while self._orders and started_at is not None:
            order = self._orders.popleft()
            key = order.kind, order.rank
            if order.begins and key not in self._clicked:
                fault = _fault(order, max(0.0, now - started_at))
                self._clicked[key] = FaultInstance(fault, (order.rank,))
                instances.append(self._clicked[key])
            elif not order.begins and key in self._clicked:
                _end(self._clicked.pop(key), now)
        self._active = frozenset(
            (_CALLED.get(instance.fault.kind, instance.fault.kind), self._names[rank])
            for instance in instances
            if instance.is_on
            for rank in instance.ranks
        )


def _fault(order: Order, at_s: Seconds) -> FaultConfig:
    kind = KINDS[order.kind]
    factor = SLOWED if kind == "slow" else None
    return FaultConfig(
        kind=kind, peers=(order.rank,), at_s=at_s, for_s=UNTIL_CLICKED_S, factor=factor
    )


def _end(instance: FaultInstance, now: Seconds) -> None:
    """Let it end the next time that its end is looked for."""
    lasted_s = max(1e-3, now - (instance.began or now))
    instance.fault = dataclasses.replace(instance.fault, for_s=lasted_s)


class WatchedBackend:
    """Implements `Backend`: a backend whose fleets are shown on a page."""

    def __init__(self, place: ProcessBackend, thread: PageThread, faults: ClickedFaults) -> None:
        self._place = place
        self._thread = thread
        self._faults = faults

    def refusal(self, algorithm: str) -> str:
        """As the backend says."""
        return self._place.refusal(algorithm)

    def check(self, scenario: Scenario) -> Sequence[LeftOut]:
        """As the backend says; chunks pass relays, so that any peer can be cut off."""
        why = "under --ui all chunks travel by gRPC, so that a peer can be cut off"
        left_out = ways_left_out(scenario, why, "grpc") if cables.can_lay() else ()
        return (*self._place.check(scenario), *left_out)

    def start(self, scenario: Scenario, configs: Sequence[RunConfig]) -> Fleet:
        """Start a fleet, and show it."""
        fleet = self._place.start_clickable(scenario, configs)
        names = peer_names(scenario.peers)
        self._faults.take_over(names, can_cut=fleet.can_cut)
        addresses = [Address(address) for address in fleet.addresses]
        self._thread.watch(addresses, f"{scenario.name}, {configs[0].algorithm}")
        return fleet


class WatchedDisplay:
    """Carries out what was clicked whenever the run is shown."""

    def __init__(self, display: Display, faults: ClickedFaults) -> None:
        self._display = display
        self._faults = faults

    def show(self, run: Run) -> None:
        """Show the run in the terminal as well."""
        self._faults.carry_out(run.plan.instances, run.curve.started_at, time.time())
        self._display.show(run)


@contextmanager
def open_page(place: Backend, listen: str) -> Iterator[tuple[str, WatchedBackend, ClickedFaults]]:
    """Serve the page of the runs inside; yields its address, and the backend to run them on.

    Raises:
        ConfigError: if the peers of this backend cannot be asked, or the page cannot listen.
    """
    if not isinstance(place, ProcessBackend):
        raise ConfigError("--ui asks peers at addresses of this machine; use --backend process")
    faults = ClickedFaults()
    thread = PageThread(LivePage(PageConfig(listen=listen), time.monotonic, faults=faults))
    url = thread.start()
    try:
        yield url, WatchedBackend(place, thread, faults), faults
    finally:
        thread.close()
