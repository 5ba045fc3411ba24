"""Keep gradients until a group takes them, and means until their trainer takes them in.

Where versions run without their trainers, a gradient may miss its own version. It is *held*, and
later ones are added to it. When a peer grants its slot it states the weight of what it holds; since
its trainer may add more before the group runs, exactly what was stated is set apart as *promised*.
Each gradient is delivered once::

    hand_in ──►  held  ──promise──►  promised  ──contribute──►  under way ──delivered──►  in
                  ^                                                 │            everybody's result
                  └──────────────────── give_back ──────────────────┘
                                        the group is over, and no member has it

A version's result waits for the end of its trainer's step. A trainer that missed several takes them
in one after the other, each with an optimizer step of its own, so that all peers make the same
updates from the same means.

Legend of shapes: ``G`` numbers of a replica's gradients and buffers, ``M`` of its model.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from p2ptrain.compute.replica import Replica, Vector
from p2ptrain.core.contribution import Contribution
from p2ptrain.runtime.agreed_state import union
from p2ptrain.runtime.copy_executor import CopyExecutor
from p2ptrain.vectors import Buffers


@dataclass(slots=True)
class _Load:
    """The sum of some gradients, each times its samples."""

    sum_G: Vector
    weight: int
    """All their samples."""
    mask: bytes
    knew: int
    """The version that the oldest of them knew."""
    step: int
    """Which of the trainer's gradients it is; -1 if it is several."""


@dataclass(frozen=True, slots=True)
class _Result:
    """What a version yields."""

    version: int
    mean_G: Vector
    contributions: Sequence[Contribution]
    outside_samples: int
    step: int
    """The mean is this gradient of the trainer's alone; -1 if not."""


class PendingGradients:
    """One peer's gradients and results. Everything but `take_in` belongs to the protocol's side."""

    def __init__(self, replica: Replica, buffers: Buffers, copy: CopyExecutor) -> None:
        self._replica = replica
        self._buffers = buffers  # of results; what is held travels only as a copy
        self._loads = Buffers(lambda size: np.empty(size, np.float32))
        self._copy = copy
        self._held: _Load | None = None
        self._promised: _Load | None = None
        self._under_way: _Load | None = None
        self._is_under_way = False  # also where there was nothing to take along
        self._results: deque[_Result] = deque()  # both sides: one appends, one pops
        self._usual = self._step = 0  # samples of the last step, and how many there were
        self.samples = 0
        """Of all gradients that were handed in."""
        self.is_newcomer = False
        """Others made versions between the state that we took over and our first result."""

    @property
    def missed(self) -> int:
        """Of a newcomer: the version that its state must have before its first result; or 0."""
        before = self._results[0].version - 1 if self.is_newcomer and self._results else 0
        return before if before > self._replica.version else 0

    async def hand_in(self, samples: int, *, contributes: bool) -> None:
        """Take the trainer's gradients; it waits. Those that overflowed have no say.

        Raises:
            StateError: if a gradient is not finite.
        """
        weight = samples if contributes else 0
        mask = self._replica.gradient_mask() if weight else b""
        gradient_G = self._loads.take(self._replica.gradient_size)
        await self._copy(lambda: self._replica.export_gradients(gradient_G, weight))
        self.samples, self._usual, self._step = self.samples + samples, samples, self._step + 1
        load = _Load(gradient_G, weight, mask, self._replica.version, self._step)
        self._held = self._sum(self._held, load)

    def promise(self) -> Contribution:
        """Set everything that is held apart for the group to which the slot is granted.

        The next `contribute` takes it along. What an earlier group was promised and did not take is
        part of it.
        """
        self._promised, self._held = self._sum(self._promised, self._held), None
        load = self._promised
        weight, mask = (load.weight, load.mask) if load else (0, b"")
        return Contribution(
            weight=weight, usual=self._usual, samples=self.samples, gradient_mask=mask
        )

    async def contribute(self, into_G: Vector) -> int:
        """Write what was promised, and returns its weight; it is under way from here on.

        A group that tries again contributes the same again.
        """
        if not self._is_under_way:
            self._under_way, self._promised = self._promised, None
        self._is_under_way, load = True, self._under_way
        if load is None:
            into_G.fill(0)
            return 0
        await self._copy(lambda: np.copyto(into_G, load.sum_G))
        return load.weight

    def delivered(
        self,
        version: int,
        mean_G: Vector,
        contributions: Sequence[Contribution],
        outside_samples: int,
    ) -> int:
        """The group is done; `mean_G` is ours to keep. Returns how late the oldest gradient was."""
        load, self._under_way, self._is_under_way = self._under_way, None, False
        step = load.step if load and len(contributions) == 1 else -1
        self._results.append(_Result(version, mean_G, contributions, outside_samples, step))
        if load is None:
            return 0
        self._loads.give(load.sum_G)
        return version - 1 - load.knew

    def give_back(self) -> None:
        """The group is over; what it did not deliver waits again.

        It may have been promised nothing of that since: so it is held, and not promised.
        """
        self._held = self._sum(self._under_way, self._held)
        self._under_way, self._is_under_way = None, False

    def release(self, buffers: int) -> tuple[Vector | None, bytes]:
        """Give up what waits: the sum without its last numbers, so many buffers, and its mask.

        Means that wait for the trainer are forgotten; call it when it has taken them in.
        """
        load = self._sum(self._sum(self._under_way, self._promised), self._held)
        self._held = self._promised = self._under_way = None
        self._is_under_way, self.is_newcomer = False, False
        while self._results:
            self._buffers.give(self._results.popleft().mean_G)
        if load is None or not load.weight:
            return None, b""
        left_G = load.sum_G[: len(load.sum_G) - buffers].copy()
        self._loads.give(load.sum_G)
        return left_G, load.mask

    def undelivered(self) -> Vector:
        """The weighted sum of all gradients that wait, or are under way."""
        sum_G = np.zeros(self._replica.gradient_size, np.float32)
        for load in (self._held, self._promised, self._under_way):
            if load:
                sum_G += load.sum_G
        return sum_G

    def state_dict(self) -> dict[str, Any]:  # Any: a vector or None, and numbers
        """What waits, or is under way: whether its group is done is known later, if at all."""
        loads = [load for load in (self._held, self._promised, self._under_way) if load]
        return {
            "sum": self.undelivered() if loads else None,
            "weight": sum(load.weight for load in loads),
            "mask": union(load.mask for load in loads),
            "usual": self._usual,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # Any: as above
        """What waited then waits again."""
        self._usual = state["usual"]
        if state["sum"] is not None:
            sum_G = np.array(state["sum"], np.float32)
            knew = self._replica.version
            self._held = _Load(sum_G, state["weight"], state["mask"], knew, -1)

    def take_in(
        self, choose: Callable[[Sequence[int]], Sequence[int]], optimizer_step: Callable[[], None]
    ) -> tuple[Sequence[Contribution], int] | None:
        """The trainer's side, at its boundary: one update per result.

        Args:
            choose: of the versions whose results wait, those to take in: `Algorithm.take_in`.
            optimizer_step: changes the live parameters from the gradients.

        Returns:
            What the members of the last one stated, and the samples of all others; None if there
            was none.
        """
        stated, replica = None, self._replica
        versions = [] if self.missed else [result.version for result in self._results]
        new = [version for version in versions if version > replica.version]
        wanted = choose(new) if new else ()
        for version in versions:
            self.is_newcomer, result = False, self._results.popleft()
            stated = result.contributions, result.outside_samples
            if version in wanted and any(one.weight for one in result.contributions):
                mask = union(one.gradient_mask for one in result.contributions)
                if result.step != self._step:  # or else it is there, in whatever dtype it has
                    replica.import_gradients(result.mean_G, mask)
                replica.update(partial(self._update, optimizer_step, version))
            replica.version = max(replica.version, version)
            self._buffers.give(result.mean_G)
        replica.settle()
        return stated

    def _update(self, optimizer_step: Callable[[], None], version: int) -> None:
        optimizer_step()
        self._replica.version = version

    def _sum(self, one: _Load | None, other: _Load | None) -> _Load | None:
        """Both loads as one; they are worthless by themselves afterwards."""
        if one is None or other is None:
            return one or other
        one.sum_G += other.sum_G
        one.weight += other.weight
        one.mask = union((one.mask, other.mask))
        one.knew, one.step = min(one.knew, other.knew), -1
        self._loads.give(other.sum_G)
        return one
