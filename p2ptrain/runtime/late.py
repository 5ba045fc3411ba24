"""What comes late: gradients that wait to be delivered, and means that wait for their trainer.

Where versions run without their trainers, a gradient misses its own version. It is then held, and
more gradients are added to it, until a version takes them along. Each is delivered exactly once::

    hand_in ──►  held  ──contribute──►  under way ──delivered──►  in everybody's result
                  ^                         │
                  └────── give_back ────────┘   the group broke: nobody has it

The other way round, a version's result waits for the end of the step that its trainer is in. A
trainer that missed several takes them in one after the other, each with an optimizer step of its
own, so that all peers make the same updates from the same means.

Legend of shapes: ``G`` numbers of a replica's gradients, ``V`` = G and what rides along.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from p2ptrain.compute.replica import Replica, Vector
from p2ptrain.runtime.accord import RIDING
from p2ptrain.runtime.buffers import Buffers
from p2ptrain.runtime.offload import Offload


@dataclass(slots=True)
class _Load:
    """The sum of some gradients, and the version that the oldest of them knew."""

    sum_G: Vector
    knew: int


class LateGradients:
    """One peer's gradients and results. Everything but `take_in` belongs to the protocol's side."""

    def __init__(self, replica: Replica, buffers: Buffers, copy: Offload) -> None:
        self._replica = replica
        self._buffers = buffers  # of results; what is held travels only as a copy
        self._loads = Buffers(lambda size: np.empty(size, np.float32))
        self._copy = copy
        self._held: _Load | None = None
        self._under_way: _Load | None = None
        self._results: deque[tuple[int, Vector]] = deque()  # both sides: one appends, one pops
        self._knows = 0  # the version whose result the trainer computes with
        self.samples = 0
        """Of all gradients that were handed in."""

    async def hand_in(self, samples: int, *, contributes: bool) -> None:
        """Take the trainer's gradients; it waits. Those that overflowed have no say.

        Raises:
            StateError: if a gradient is not finite.
        """
        gradient_G = self._loads.take(self._replica.gradient_size)
        await self._copy(lambda: self._replica.export_gradients(gradient_G, contributes))
        self.samples += samples
        self._hold(_Load(gradient_G, self._knows))

    async def contribute(self, into_G: Vector) -> None:
        """Write everything that is held; it is under way from here on."""
        self._under_way, self._held = self._held, None
        load = self._under_way
        if load is None:
            into_G.fill(0)
        else:
            await self._copy(lambda: np.copyto(into_G, load.sum_G))

    def delivered(self, version: int, mean_V: Vector) -> int:
        """The group is done; `mean_V` is ours to keep. Returns how late the oldest gradient was."""
        load, self._under_way = self._under_way, None
        self._results.append((version, mean_V))
        if load is None:
            return 0
        self._loads.give(load.sum_G)
        return version - 1 - load.knew

    def give_back(self) -> None:
        """The group is over; what it did not deliver waits again."""
        load, self._under_way = self._under_way, None
        if load:
            self._hold(load)

    def undelivered(self) -> Vector:
        """The sum of all gradients that wait, or are under way."""
        sum_G = np.zeros(self._replica.gradient_size, np.float32)
        for load in (self._held, self._under_way):
            if load:
                sum_G += load.sum_G
        return sum_G

    def forget_all_but_latest(self) -> None:
        """Of the results that wait, keep the last one only."""
        while len(self._results) > 1:
            self._buffers.give(self._results.popleft()[1])

    def take_in(self, optimizer_step: Callable[[], None]) -> Vector | None:
        """The trainer's side, at its boundary: one update per result.

        Returns:
            What rode along with the last one, or None if there was none.
        """
        riding = None
        while self._results:
            version, mean_V = self._results.popleft()
            if self._replica.import_gradients(mean_V[:-RIDING], per_member=True):
                self._replica.update(optimizer_step)
            riding, self._knows = mean_V[-RIDING:].copy(), version
            self._buffers.give(mean_V)
        self._replica.settle()
        return riding

    def _hold(self, load: _Load) -> None:
        if self._held is None:
            self._held = load
            return
        self._held.sum_G += load.sum_G
        self._held.knew = min(self._held.knew, load.knew)
        self._loads.give(load.sum_G)


class KeptMean:
    """A mean of models that was there before its trainer; see `Round.keeps_late`."""

    def __init__(self, replica: Replica, buffers: Buffers, offload: Offload) -> None:
        self._replica = replica
        self._buffers = buffers
        self._offload = offload
        self._kept: tuple[Vector, int] | None = None

    def keep(self, mean_M: Vector, count: int) -> None:
        """Keep the mean of `count` models; an older one is forgotten."""
        self._kept = mean_M, count

    async def add(self) -> bool:
        """The model becomes (sum of those + itself) / (count + 1); false if there is no mean."""
        kept, self._kept = self._kept, None
        if kept is None:
            return False
        mean_M, count = kept
        own_M = self._buffers.take(len(mean_M))
        await self._offload(lambda: self._replica.snapshot(own_M))
        mean_M -= own_M
        mean_M *= np.float32(count / (count + 1))
        for vector in (own_M, self._replica.add_delta(mean_M)):
            self._buffers.give(vector)
        return True
