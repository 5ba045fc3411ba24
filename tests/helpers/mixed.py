"""An algorithm that uses several verbs at a time, as the `Swarm` port allows."""

from collections.abc import Sequence
from dataclasses import dataclass

from p2ptrain.averaging.base import Algorithm, Swarm
from p2ptrain.core.effects import What
from p2ptrain.core.wait_avoiding import Round, Rule
from p2ptrain.errors import ConfigError
from p2ptrain.ids import PeerId


class Mixed(Algorithm):
    """Gossip in pairs beside the trainer, and a version of everyone after some updates."""

    averages = "models"
    trainer_waits = True

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """How often everyone meets, and who waits for it."""

        every_updates: int = 5
        """Own updates between two versions of everyone. Too small: as all-reduce."""

        waiting: bool = True
        """Whether a version waits until all trainers have arrived, or runs with the first one."""

        def __post_init__(self) -> None:
            if self.every_updates < 1:
                raise ConfigError(f"mixed every_updates = {self.every_updates} must be 1 or more")

    _arrived = 0  # the version that we arrived at last

    async def after_update(self, swarm: Swarm) -> None:
        if swarm.updates % self.config.every_updates == 0:
            self._arrived = max(self._arrived + 1, swarm.version)
            await swarm.form_at(self._arrived)

    async def background(self, swarm: Swarm) -> None:
        updates = 0
        while True:
            updates = await swarm.wait_for_update(updates + 1)
            others = swarm.choosable()
            if others:
                await swarm.form(swarm.rng.sample(others, len(others)), 1)

    def schedule(self, version: int, peers: Sequence[PeerId], me: PeerId) -> Round:
        rule = Rule(waiting=len(peers)) if self.config.waiting else Rule()
        return Round(tuple(peers), What.MODELS, rule)
