"""An algorithm of public verbs only, which forms groups in two ways at once."""

from collections.abc import Sequence

from p2ptrain.averaging.base import Algorithm, Swarm
from p2ptrain.core.purpose import What
from p2ptrain.core.wait_avoiding import Round, Rule
from p2ptrain.ids import PeerId

EVERY_UPDATES = 5


class Mixed(Algorithm):
    """Each peer gossips after each update; every five, all average with all and wait for it."""

    averages = "models"

    async def background(self, swarm: Swarm) -> None:
        updates = 0
        while True:
            updates = await swarm.wait_for_update(updates + 1)
            others = swarm.choosable()
            await swarm.average_with_any(swarm.rng.sample(others, len(others)))

    async def after_update(self, swarm: Swarm) -> None:
        version, rest = divmod(swarm.updates, EVERY_UPDATES)
        if rest == 0:
            await swarm.average_at(version)

    def schedule(self, version: int, peers: Sequence[PeerId], me: PeerId) -> Round:
        return Round(tuple(peers), What.MODELS, Rule(waiting=len(peers)))
