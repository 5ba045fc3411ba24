"""A world of configured peers: as many lives as a plan of faults gives them.

`sim/world.py` builds peers for tests that look inside. Here each peer is made anew, by its maker,
for each of its lives, as a real one is by whoever starts its process again; and it leaves what a
real one leaves.
"""

import asyncio
from collections.abc import Callable, Sequence
from random import Random

from p2ptrain.errors import ConfigError
from p2ptrain.ids import Address, PeerId
from p2ptrain.sim.faults import Fault, carry_out
from p2ptrain.sim.link import Link
from p2ptrain.sim.loop import virtual_loop
from p2ptrain.sim.network import SimNetwork
from p2ptrain.sim.peer import LivingPeer
from p2ptrain.sim.process import Process
from p2ptrain.sim.trace import Trace

Maker = Callable[[int], LivingPeer]
"""Makes a peer for a life with this number, from 1."""


class FleetWorld:
    """Peers, the network between them, and one seed for all chance; implements `Afflicted`."""

    def __init__(self, seed: int, link: Link) -> None:
        self.trace = Trace()
        self.network = SimNetwork(seed, link, self.trace)
        self.lives: dict[PeerId, LivingPeer] = {}
        """The latest of each peer, whether it lives or not."""
        self._makers: dict[PeerId, Maker] = {}
        self._numbers: dict[PeerId, int] = {}
        self._dead: dict[PeerId, None] = {}
        loop = virtual_loop()
        loop.shuffle(Random(f"{seed}/order"))
        loop.trace_tail = self.trace.trace_tail

    def expect(self, name: PeerId, make: Maker) -> None:
        """A peer that is to come; `live` begins its first life."""
        self._makers[name] = make
        self._numbers[name] = 0

    def live(self, name: PeerId) -> LivingPeer:
        """A life of `name` begins: the first one, or another after it has left."""
        self._numbers[name] += 1
        peer = self._makers[name](self._numbers[name])
        self.lives[name] = peer
        peer.begin(self.network.transport(address_of(name), name))
        return peer

    def apply_faults(self, plan: Sequence[Fault]) -> asyncio.Task[None]:
        """Let all of `plan` happen to those who are expected. Raises ConfigError in the task."""
        return asyncio.get_running_loop().create_task(carry_out(plan, self))

    def address_of(self, name: PeerId) -> Address:
        """Where a peer is, or was. Raises ConfigError for no peer of ours."""
        if name not in self._makers:
            known = ", ".join(self._makers) or "none"
            raise ConfigError(f"no peer {name!r} in this fleet; there are: {known}")
        return address_of(name)

    def process_of(self, name: PeerId) -> Process | None:
        """None for one that is dead, has left, or has not come yet."""
        is_over = name in self._dead or name not in self.lives or self.lives[name].task.done()
        return None if is_over else self.lives[name].process

    def crash(self, name: str) -> None:
        """Kill -9."""
        peer = self.lives[PeerId(name)]
        self._dead[peer.name] = None
        virtual_loop().resume(peer.process)  # what is dead does not stand still
        self.network.crash(self.address_of(peer.name))
        peer.die()

    async def restart(self, name: str, *, keeps_model: bool = False) -> LivingPeer:
        """A crashed peer starts again as whoever restarts its process would start it.

        It joins, and takes a model, as part of its life.
        """
        if keeps_model:
            raise ConfigError(f"{name} has no checkpoint to start again from")
        del self._dead[PeerId(name)]
        return self.live(PeerId(name))


def address_of(name: str) -> Address:
    """Where a fleet's peer of that name listens, in all its lives."""
    return Address(f"{name}:1")
