"""One peer's batch, where peers in step divide theirs by speed (`core/batches.py`).

The trainer's side measures: samples per second of computing, without waits, of the last steps. The
protocol's side states that speed with the next contribution, and takes in those of all members.
Nothing is stated until the training loop has asked for its batch for the first time.
"""

from collections import deque
from collections.abc import Sequence
from statistics import median

from p2ptrain.averaging.base import Algorithm
from p2ptrain.core.batches import next_batches
from p2ptrain.core.contribution import SPEED_S, Contribution
from p2ptrain.errors import ConfigError
from p2ptrain.ids import Seconds

WINDOW, LEAST = 9, 5
"""A speed is the median of so many steps, and not known after fewer than so many. Fewer: one pause
changes batches. More: a peer that has become slow slows all others for longer."""


class Batches:
    """What one peer measures of itself, and what all members have stated last."""

    def __init__(self) -> None:
        self._asked = False
        self._speeds: deque[float] = deque(maxlen=WINDOW)
        self._rank = 0
        self.stated: Sequence[Contribution] = ()
        """By all members, for the last average."""

    @property
    def speed(self) -> int:
        """What this peer states; 0: not known, or its loop does not ask."""
        if not self._asked or len(self._speeds) < LEAST:
            return 0
        return max(1, round(median(self._speeds) * SPEED_S))

    def measure(self, samples: int, compute_s: Seconds) -> None:
        """A step of so many samples is over, and computing took so long."""
        if samples > 0 and compute_s > 0:
            self._speeds.append(samples / compute_s)

    def take_in(self, rank: int, stated: Sequence[Contribution]) -> None:
        """An average is done: what its members stated; `rank` is ours among them."""
        self._rank, self.stated = rank, tuple(stated)

    def size(self, usual: int) -> int:
        """Samples of our next step, of ``members * usual``; `usual` before the first average."""
        self._asked = True
        if not self.stated:
            return usual
        own = self.stated[self._rank]
        stated = [one for one in self.stated if one.usual or one is own]  # others only serve
        present, speeds = [one.usual for one in stated], [one.speed for one in stated]
        rank = next(at for at, one in enumerate(stated) if one is own)
        return next_batches(len(stated) * usual, present, speeds)[rank]


def check_divides(name: str, algorithm: Algorithm) -> None:
    """Refuse to divide batches where that makes no sense.

    Raises:
        ConfigError: if peers take steps at their own speeds, or average models, which all weigh
            the same.
    """
    if not (algorithm.in_step and algorithm.averages == "gradients"):
        raise ConfigError(
            f"batches by speed are for peers that take the same steps and average gradients, as "
            f"under allreduce, and those of {name} do not; leave batches = 'equal'"
        )
