"""Measure what `auto` asks for, from this peer's own records."""

from collections import deque
from collections.abc import Mapping
from functools import cached_property
from statistics import fmean, median, pstdev
from typing import TYPE_CHECKING, Any

import numpy as np

from p2ptrain.averaging.base import Measured
from p2ptrain.compute.low_rank import Layout

if TYPE_CHECKING:
    from p2ptrain.runtime.driver import Driver

WINDOW = 16
"""Steps that are remembered. Fewer: chance decides; more: changes are seen late."""

TRIMMED = 4
"""Of so many steps or more the longest one counts as the second longest: once another process had
the core. Otherwise one long step would look like a peer whose steps vary."""

AVERAGES, FEW, ENOUGH_S = 8, 3, 1.0
"""Averages that are remembered: so many of the last ones, but only a few where those took long
enough. On a link that has become slow each lasts long, and eight would be seen late."""

RANKS = 4, 1
"""Of factors whose numbers are counted: what `powersgd` has by default, and the fewest."""

NORM_STEPS = 64
"""The norm of a model is taken again after so many steps; until then it hardly changes."""


class Gauges:
    """Implements `Metrics`: remembers the last records of each kind that it measures by."""

    def __init__(self, driver: "Driver") -> None:
        self._driver = driver
        self._steps: deque[tuple[float, int]] = deque(maxlen=WINDOW)
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._averages: deque[tuple[float, int]] = deque(maxlen=AVERAGES)
        self._distances: deque[float] = deque(maxlen=AVERAGES)
        self._made = 0
        self._norm, self._norm_due = 0.0, 0

    def record(self, kind: str, **fields: Any) -> None:  # Any: whatever JSON can hold
        """Remember what counts of one record."""
        match kind:
            case "step":
                self._made += 1
                self._steps.append((fields["compute_s"], fields["samples"]))
                if fields["loss"] is not None:
                    self._losses.append(fields["loss"])
            case "group" if fields["outcome"] == "done":
                moved = max(fields["sent_bytes"], fields["received_bytes"])
                if moved and len(fields["members"]) > 1:
                    lasted_s = fields["exchange_s"] + (fields["overlap_s"] or 0)
                    self._averages.append((lasted_s, moved))
                if (distance := fields["consensus_distance_l2"]) is not None:
                    self._distances.append(distance)
            case "settings":
                self._distances.clear()  # of models under other settings
            case _:
                pass

    async def measure(self) -> Measured:
        """All of it."""
        steps = list(self._steps)  # the trainer's thread may append
        if len(steps) > 1 and self._made <= WINDOW:
            del steps[0]  # the first one of all: memory is touched, kernels are chosen
        if not steps:
            return Measured()
        computed = sorted(compute_s for compute_s, _ in steps)
        if len(computed) >= TRIMMED:
            computed[-1] = computed[-2]
        size_bytes = 4 * self._driver.replica.model_size
        losses = list(self._losses)
        return Measured(
            step_s=fmean(computed),
            spread_s=pstdev(computed),
            samples=round(fmean(samples for _, samples in steps)),
            model_s=self._seconds_per_byte * size_bytes,
            apart=await self._apart(),
            loss=fmean(losses) if losses else None,
            factors=self._factors,
        )

    @property
    def _seconds_per_byte(self) -> float:
        per_byte: list[float] = []
        measured_s = 0.0
        for lasted_s, moved in reversed(list(self._averages)):
            if len(per_byte) >= FEW and measured_s >= ENOUGH_S:
                break
            per_byte.append(lasted_s / moved)
            measured_s += lasted_s
        return median(per_byte) if per_byte else 0.0

    @cached_property
    def _factors(self) -> Mapping[int, float]:
        shapes = self._driver.replica.gradient_shapes
        return {rank: Layout(shapes, rank).share for rank in RANKS}

    async def _apart(self) -> float:
        if not self._distances:
            return 0.0
        if self._made >= self._norm_due:
            self._norm_due = self._made + NORM_STEPS
            self._norm = await self._driver.averages.whole(self._norm_of_model)
        distance = median(self._distances)
        return distance / self._norm if self._norm else 0.0

    def _norm_of_model(self) -> float:
        model_M = np.empty(self._driver.replica.model_size, np.float32)
        self._driver.replica.snapshot(model_M)
        return float(np.linalg.norm(model_M))
