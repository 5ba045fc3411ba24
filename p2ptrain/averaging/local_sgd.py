"""Local SGD: each peer trains on its own and all average their models once in a while.

    x_i  <-  x_i - lr * update(g_i)                    for `period` steps
    x_i  <-  (1 / P) * sum of all x_j

It sends 1 / `period` of what `allreduce` sends (Stich, ICLR 2019). *Post-local SGD* (Lin et al.,
ICLR 2020) averages after every update first: `every_step_until` versions of one step each, then
those of `period`.

All peers that train meet at every version: a slow one slows all. So this is a baseline of the
algorithms that wait for no peer. With a period of 1 and plain SGD models are those of `allreduce`.

Differences from the papers, and why: *delta form*, as everywhere, so that nothing is lost if a peer
takes the mean late; and an optimizer's momentum stays with each peer (as in post-local SGD's code).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from p2ptrain.averaging import Algorithm, ConfigError, PeerId, Round, Rule, Swarm, What


class LocalSGD(Algorithm):
    averages = "models"
    trainer_waits = True
    state_names = ("arrived", "updates_since")

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """How often models are averaged."""

        period: int = 4
        """Updates of a peer between two averages. Too small: links decide how fast it is; too
        large: models drift apart, and their mean is worse than each of them."""

        every_step_until: int = 0
        """The first so many versions have one update each: a young model changes fast."""

        def __post_init__(self) -> None:
            if self.period < 1:
                raise ConfigError(f"local_sgd period = {self.period} must be 1 or more")
            if self.every_step_until < 0:
                found = self.every_step_until
                raise ConfigError(f"local_sgd every_step_until = {found} must be 0 or more")

    arrived = 0
    """The version that we arrived at last."""
    updates_since = 0
    """Updates since then."""

    async def after_update(self, swarm: Swarm) -> None:
        self.updates_since += 1
        self.arrived = max(self.arrived, swarm.version)  # others that ran without us: we are new
        young = self.arrived < self.config.every_step_until
        if young or self.updates_since >= self.config.period:
            self.arrived, self.updates_since = self.arrived + 1, 0
            await swarm.form_at(self.arrived)

    def schedule(self, version: int, peers: Sequence[PeerId], me: PeerId) -> Round:
        return Round(tuple(peers), What.MODELS, Rule(waiting=len(peers)))
