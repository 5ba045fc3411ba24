"""Run a world of configured peers, started and restarted as often as its owner says.

`sim/world.py` builds peers for tests that inspect them. Here a maker creates each peer anew for
every start, as a supervisor starts a real process again; and a peer leaves the same records as a
real one.
"""

from collections.abc import Callable
from random import Random

from p2ptrain.errors import ConfigError
from p2ptrain.ids import Address, PeerId
from p2ptrain.sim.faults import ActiveFaults
from p2ptrain.sim.link import Link
from p2ptrain.sim.loop import virtual_loop
from p2ptrain.sim.network import SimNetwork
from p2ptrain.sim.peer import LivingPeer
from p2ptrain.sim.process import Process
from p2ptrain.sim.trace import Trace

Maker = Callable[[int], LivingPeer]
"""Makes a peer for its start number n, from 1."""


class FleetWorld:
    """Peers, their network, one seed for all random decisions, and the faults that last."""

    def __init__(self, seed: int, link: Link) -> None:
        self.trace = Trace()
        self.network = SimNetwork(seed, link, self.trace)
        self.lives: dict[PeerId, LivingPeer] = {}
        """The latest process of each peer, living or not."""
        self._makers: dict[PeerId, Maker] = {}
        self._numbers: dict[PeerId, int] = {}
        self._dead: dict[PeerId, None] = {}
        self.faults = ActiveFaults(self)
        loop = virtual_loop()
        loop.shuffle(Random(f"{seed}/order"))
        loop.trace_tail = self.trace.trace_tail

    def expect(self, name: PeerId, make: Maker) -> None:
        """Announce a peer; `live` starts it."""
        self._makers[name] = make
        self._numbers[name] = 0

    def live(self, name: PeerId) -> LivingPeer:
        """Start `name`, for the first time or again after it has left or crashed."""
        self._dead.pop(name, None)
        self._numbers[name] += 1
        peer = self._makers[name](self._numbers[name])
        self.lives[name] = peer
        peer.begin(self.network.transport(address_of(name), name))
        self.faults.renew(name)
        return peer

    def address_of(self, name: PeerId) -> Address:
        """A peer's address, past or present. Raises ConfigError for an unknown peer."""
        if name not in self._makers:
            known = ", ".join(self._makers) or "none"
            raise ConfigError(f"no peer {name!r} in this fleet; there are: {known}")
        return address_of(name)

    def process_of(self, name: PeerId) -> Process | None:
        """None for a peer that is dead, has left, or has not started yet."""
        is_over = name in self._dead or name not in self.lives or self.lives[name].task.done()
        return None if is_over else self.lives[name].process

    def crash(self, name: str) -> None:
        """Kill -9."""
        peer = self.lives[PeerId(name)]
        self._dead[peer.name] = None
        virtual_loop().resume(peer.process)  # a dead process is not paused
        self.network.crash(self.address_of(peer.name))
        peer.die()


def address_of(name: str) -> Address:
    """The address of a fleet's peer of that name, the same after every restart."""
    return Address(f"{name}:1")
