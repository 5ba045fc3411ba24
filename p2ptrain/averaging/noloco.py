"""NoLoCo: DiLoCo in pairs, without a step that all make together (arXiv 2506.10911).

Each peer trains from a model x0 of its own. Once per `period` updates it meets another one, and
both make an outer step towards the mean of their two models, with a momentum m of their own:

    d_i   =   x0_i - (x_i + x_j) / 2
    m_i   <-  mu m_i + d_i
    x0_i  <-  x0_i - lr m_i
    x_i   <-  x0_i

(The paper writes d as the mean of what both have trained, plus the difference of x0_i and the mean
of both x0; with equal factors for the two, that is the same.)

Differences from the paper, and why: *no round.* There, a shared seed divides all peers into pairs,
and a peer waits for its partner. Here a peer takes the first that is free of the half of the others
that it met longest ago, through the group lock: none waits for a slow one. If it asked all of them,
pairs could meet only each other (measured: two pairs of four peers, for a minute). *Delta form*, as
everywhere: what is trained while the mean is on its way is kept.
"""

from dataclasses import dataclass

from p2ptrain.averaging import Algorithm, ConfigError, Group, OuterRule, Swarm, meet_someone
from p2ptrain.averaging.diloco import check_outer


class NoLoCo(Algorithm):
    averages = "models"

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """How often a peer meets another one, and how large the step is that follows."""

        period: int = 50
        """Updates between two meetings. Too small: more bytes; too large: models drift apart."""

        outer_learning_rate: float = 0.7
        """Of the outer step (beta in the paper). 1, without momentum, is the mean of both models.
        """

        outer_momentum: float = 0.5
        """Of the outer step (mu in the paper). Too large: models overtake each other."""

        def __post_init__(self) -> None:
            if self.period < 1:
                raise ConfigError(f"noloco period = {self.period} must be 1 or more")
            check_outer("noloco", self.outer_learning_rate, self.outer_momentum)

    _swarm: Swarm | None = None
    _due = 0  # the next meeting, when so many updates have been made in this life

    @property
    def conserves_mean(self) -> bool:
        """Not by momentum."""
        return False

    @property
    def needs_all(self) -> bool:
        """It meets whom it knows."""
        return False

    @property
    def outer(self) -> OuterRule:
        config = self.config
        return OuterRule(
            learning_rate=config.outer_learning_rate,
            momentum=config.outer_momentum,
            nesterov=False,
        )

    async def background(self, swarm: Swarm) -> None:
        self._swarm, self._due = swarm, self.config.period
        while True:
            updates = await swarm.wait_for_update(self._due)
            if updates >= self._due:  # or else another one has met us meanwhile
                self._due = updates + self.config.period
                await meet_someone(swarm, swarm.choosable)

    async def average(self, group: Group) -> None:
        if self._swarm:
            self._due = await self._swarm.wait_for_update(0) + self.config.period
        await super().average(group)
