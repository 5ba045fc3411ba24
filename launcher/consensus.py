"""Compute and evaluate the consensus model, the mean of all peers' models.

Peers that do not wait for each other have no model in common. The product of a run is the mean of
their models, and algorithms are compared by that mean, evaluated on held-out data. Peers only write
their models down periodically (`snapshot` records); everything else happens here, not in the peers.

*One moment.* A point of the curve is made of rows of one version (`p2ptrain.compute.snapshots`):
written after the same update where peers are in step, otherwise at the same tick of the clock. Only
peers take part that were there at that moment: a model of a peer that was dead by then, or had
left, is in no mean. A tick that a present peer passed over yields no point; one that wrote nothing
for `STILL_PERIODS` stood still, and is not waited for. Rows of less than half of the peers yield
no point.

*Settled.* While the run goes on, a version is evaluated once every peer that still trains has
written it or a later one: nothing can change the point any more. The curve that the live table
shows is therefore the curve of the report, point by point.

*As often as the curve needs.* Peers write a version per period. A run that lasts many of them is
evaluated less often the longer it lasts: two points are at least `CLOSEST` of the time since the
first step apart. So a time to a target is known to 2 %, and of a run of a thousand periods some
three hundred points are evaluated.

*The last point* is the mean of the last models of all peers that trained to the end, in their last
process; where peers are in step, of those that ended after the same update as most.

*Consensus distance* is the root mean square over the P peers of the L2 distance between a peer's
model and the mean::

    distance = sqrt( 1/P * sum_p || x_p - mean ||^2 )

Legend of shapes: ``M`` numbers of a model, ``P`` peers.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from p2plab.records import PeerHistory, Snapshot
from p2ptrain.compute.replica import Vector
from p2ptrain.errors import ConfigError
from p2ptrain.ids import Seconds

STILL_PERIODS = 4
"""A peer without a row for so many periods of the curve stands still; versions go on without it."""

CLOSEST = 0.01
"""The least time between two points, as a share of the time since the first step."""


@dataclass(frozen=True, slots=True)
class Score:
    """How good a model is on held-out data; `accuracy` is None where the task has none."""

    loss: float
    accuracy: float | None
    recall: tuple[float, ...] | None = None
    """Fraction of each class that was found, by its number; None where the task has no classes."""


class Evaluator(Protocol):
    """Holds one model of the task, into which others are loaded."""

    def score(self, model_M: Vector) -> Score:
        """Evaluate a model on held-out data."""
        ...

    def save(self, model_M: Vector, path: Path) -> None:
        """Write a model as safetensors under the names of its module."""
        ...


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The consensus model at one moment, `wall_s` after the first step of the swarm."""

    wall_s: Seconds
    samples: int
    loss: float
    accuracy: float | None
    consensus_distance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The goal of the consensus model on held-out data."""

    accuracy: float | None = None
    """At least this; between 0 and 1."""

    loss: float | None = None
    """At most this. With both, both must hold."""

    stops: bool = False
    """Whether reaching it ends the run.

    Left off, every algorithm trains for as long as the others.
    """

    def __post_init__(self) -> None:
        if self.accuracy is not None and not 0 < self.accuracy <= 1:
            raise ConfigError(f"target accuracy = {self.accuracy} must be above 0 and at most 1")
        if self.loss is not None and not math.isfinite(self.loss):
            raise ConfigError(f"target loss = {self.loss} must be a finite number")

    def is_reached(self, point: CurvePoint) -> bool:
        """True if a target was set and `point` meets it."""
        reached = (
            [point.accuracy is not None and point.accuracy >= self.accuracy]
            if self.accuracy is not None
            else []
        )
        reached += [point.loss <= self.loss] if self.loss is not None else []
        return bool(reached) and all(reached)

    def __str__(self) -> str:
        """Format for a sentence, ``accuracy 0.95``."""
        parts = [f"accuracy {self.accuracy:g}"] if self.accuracy is not None else []
        parts += [f"loss {self.loss:g}"] if self.loss is not None else []
        return " and ".join(parts)


class ConsensusCurve:
    """The curve of one run; `advance` while it runs, `finish` when all peers have ended."""

    def __init__(
        self,
        histories: Sequence[PeerHistory],
        evaluator: Evaluator | None,
        period_s: Seconds,
        target: Target,
    ) -> None:
        self.points: list[CurvePoint] = []
        self.final_model: Vector | None = None
        self.final_recall: dict[str, float] | None = None
        """Of the last point, by class."""
        self._everyone = histories
        self._histories = [one for one in histories if one.trains]
        self._evaluator = evaluator
        self._period_s = period_s
        self._target = target
        self._taken = -1  # the last version that was looked at
        self._scored: tuple[Vector, Score] | None = None  # of the last point: steps may take long

    @property
    def started_at(self) -> Seconds | None:
        """When the first step of the swarm began.

        None while a present peer is not ready; peers that join later do not count.
        """
        if any(h.ready_at is None and not h.is_finished and not h.is_late for h in self._everyone):
            return None
        return min((h.ready_at for h in self._everyone if h.ready_at is not None), default=None)

    @property
    def time_to_target_s(self) -> Seconds | None:
        """When the target was first reached, after the first step; None if it was not."""
        return next((p.wall_s for p in self.points if self._target.is_reached(p)), None)

    def advance(self, most: int | None = 1) -> None:
        """Evaluate up to `most` settled versions, or all there are."""
        taken = 0
        while most is None or taken < most:
            version = self._next_version()
            if version is None or not self._is_settled(version):
                return
            taken += self._take(version)

    def finish(self) -> None:
        """Evaluate the remaining versions, then the last models of all that were there."""
        last = [
            (history, history.snapshots[-1])
            for history in self._histories
            if history.snapshots and history.ended is not None and not history.has_left
        ]
        ends = Counter(row.version for _, row in last)
        end = max(ends, default=0)
        if any(row.in_step for _, row in last):
            end = max(ends, key=lambda version: (ends[version], version))
            last = [(history, row) for history, row in last if row.version == end]
        while (version := self._next_version()) is not None and version < end:
            self._take(version)
        self.final_model = self._add(last)

    def _next_version(self) -> int | None:
        """The lowest version that was not looked at and that a peer has written."""
        if self.started_at is None:
            return None
        found = (self._next_of(history) for history in self._histories)
        return min((version for version in found if version is not None), default=None)

    def _next_of(self, history: PeerHistory) -> int | None:
        """The lowest version of one peer that was not looked at."""
        lowest = None
        for row in reversed(history.snapshots):  # the older ones were looked at long ago
            if row.version <= self._taken:
                break
            lowest = row.version
        return lowest

    def _is_settled(self, version: int) -> bool:
        come = [history for history in self._histories if history.last_at or not history.is_late]
        training = [one for one in come if not one.is_finished and not one.is_away]
        # Without a training peer the versions would never end; `finish` takes the last.
        return bool(training) and all(
            history.snapshots and history.snapshots[-1].version >= version for history in training
        )

    def _take(self, version: int) -> int:
        """Add a point, if this version is of one moment; return how many were added."""
        self._taken = version
        rows = [(history, row) for history in self._histories for row in _of(history, version)]
        middle = sorted(row.at for _, row in rows)[len(rows) // 2]
        rows = [(h, row) for h, row in rows if abs(row.at - middle) <= self._period_s]
        at = max(row.at for _, row in rows)
        if self._is_close(at):
            return 0
        rows = [(history, row) for history, row in rows if history.was_there(at)]
        wrote = {id(history) for history, _ in rows}
        missing = [h for h in self._histories if h.was_there(at) and id(h) not in wrote]
        if len(rows) < len(missing) or any(self._passed_over(h, at) for h in missing):
            return 0
        self._add(rows)
        return 1

    def _is_close(self, at: Seconds) -> bool:
        """True if the curve has a point so near to this moment that it needs no other one."""
        if not self.points or self.started_at is None:
            return False
        wall_s = at - self.started_at
        return wall_s - self.points[-1].wall_s < CLOSEST * wall_s

    def _passed_over(self, history: PeerHistory, at: Seconds) -> bool:
        """True if a peer without a row of `at` neither stood still nor has a model equal to it."""
        before = next((row for row in reversed(history.snapshots) if row.at <= at), None)
        if before is None or before.in_step:
            return False
        return before.at > at - STILL_PERIODS * self._period_s

    def _add(self, rows: Sequence[tuple[PeerHistory, Snapshot]]) -> Vector | None:
        """Evaluate the mean of rows; return it, or None if there is none."""
        models = [(history.model(snapshot.row), snapshot.at) for history, snapshot in rows]
        models_PM = [model for model, _ in models if model is not None]
        start = self.started_at
        if not models_PM or start is None or self._evaluator is None:
            return None
        latest = self.points[-1].wall_s if self.points else 0.0
        wall_s = max([latest, *(at - start for _, at in models)])
        mean_M, distance = mean_and_distance(models_PM)
        if self._scored is None or not np.array_equal(self._scored[0], mean_M):
            self._scored = mean_M, self._evaluator.score(mean_M)
        score = self._scored[1]
        self.final_recall = (
            {str(label): found for label, found in enumerate(score.recall)}
            if score.recall
            else None
        )
        samples = sum(h.samples_until(start + wall_s) for h in self._histories)
        self.points.append(CurvePoint(wall_s, samples, score.loss, score.accuracy, distance))
        return mean_M


def _of(history: PeerHistory, version: int) -> list[Snapshot]:
    """The row of this version, the last one if a peer made the same steps twice; or none."""
    for row in reversed(history.snapshots):
        if row.version <= version:
            return [row] if row.version == version else []
    return []


def mean_and_distance(models_PM: Sequence[Vector]) -> tuple[Vector, float]:
    """Return the mean model, float32, and the consensus distance (defined at the top)."""
    # float64: a float32 sum over a thousand peers would itself add to the distance.
    apart_PM: NDArray[np.float64] = np.stack(models_PM, dtype=np.float64)
    mean_M = apart_PM.mean(axis=0)
    apart_PM -= mean_M
    squares_P = np.einsum("pm,pm->p", apart_PM, apart_PM)
    return mean_M.astype(np.float32), float(np.sqrt(squares_P.mean()))
