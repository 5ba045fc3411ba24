"""Compute and evaluate the consensus model, the mean of all peers' models.

Peers that do not wait for each other have no model in common. The product of a run is the mean of
their models, and algorithms are compared by that mean, evaluated on held-out data. Peers only write
their models down periodically (`snapshot` records); everything else happens here, not in the peers,
so that measuring costs an algorithm nothing.

*Moments.* The curve has a point every `period_s` after the first step of the swarm (the earliest
`ready`). At a moment each peer contributes its latest snapshot at or before it, so a model in the
mean may be up to one period old, for every algorithm alike. A peer that was lost takes part until
its last record; one that ended well keeps taking part with its last model.

*Settled moments.* While the run goes on, a moment is evaluated once every peer that is still
training has written a record after it: nothing can change the point any more. The curve that the
live table shows is therefore the curve of the report, point by point.

*Consensus distance* is the root mean square over the P peers of the L2 distance between a peer's
model and the mean::

    distance = sqrt( 1/P * sum_p || x_p - mean ||^2 )

Legend of shapes: ``M`` numbers of a model, ``P`` peers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from launcher.records import PeerHistory
from p2ptrain.compute.replica import Vector
from p2ptrain.errors import ConfigError
from p2ptrain.ids import Seconds


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
        evaluator: Evaluator,
        period_s: Seconds,
        target: Target,
    ) -> None:
        self.points: list[CurvePoint] = []
        self.final_model: Vector | None = None
        self.final_recall: dict[str, float] | None = None
        """Of the last point, by class."""
        self._histories = histories
        self._evaluator = evaluator
        self._period_s = period_s
        self._target = target
        self._next = 0

    @property
    def started_at(self) -> Seconds | None:
        """When the first step of the swarm began.

        None while a present peer is not ready; peers that join later do not count.
        """
        if any(h.ready_at is None and not h.is_finished and not h.is_late for h in self._histories):
            return None
        return min((h.ready_at for h in self._histories if h.ready_at is not None), default=None)

    @property
    def time_to_target_s(self) -> Seconds | None:
        """When the target was first reached, after the first step; None if it was not."""
        return next((p.wall_s for p in self.points if self._target.is_reached(p)), None)

    def advance(self, most: int | None = 1) -> None:
        """Evaluate up to `most` settled moments, or all there are."""
        taken = 0
        while most is None or taken < most:
            moment = self._next_moment()
            if moment is None or not self._is_settled(moment):
                return
            self._take_point(moment)
            taken += 1

    def finish(self) -> None:
        """Evaluate the remaining moments, then the last models of all peers that were not lost."""
        survivors = [h for h in self._histories if h.snapshots and not h.lost]
        last = max((h.snapshots[-1].at for h in survivors), default=None)
        moment = self._next_moment()
        while last is not None and moment is not None and moment < last:
            self._take_point(moment)
            moment = self._next_moment()
        if last is not None:
            self.final_model = self._add(max(last, self._latest(last)), survivors)

    def _is_settled(self, moment: Seconds) -> bool:
        come = [history for history in self._histories if history.last_at or not history.is_late]
        training = [history for history in come if not history.is_finished]
        # Without a training peer the moments would never end; `finish` takes the last.
        return bool(training) and all((h.last_at or 0.0) > moment for h in training)

    def _next_moment(self) -> Seconds | None:
        start = self.started_at
        return None if start is None else start + self._next * self._period_s

    def _latest(self, otherwise: Seconds) -> Seconds:
        """The latest moment of the curve; a lost peer may have written after all survivors."""
        start = self.started_at
        return start + self.points[-1].wall_s if start is not None and self.points else otherwise

    def _take_point(self, moment: Seconds) -> None:
        self._add(moment, self._histories)
        self._next += 1

    def _add(self, moment: Seconds, histories: Sequence[PeerHistory]) -> Vector | None:
        """Evaluate the mean at `moment`.

        Return it, or None if no peer had written a model by then.
        """
        models_PM = _models(histories, moment)
        start = self.started_at
        if not models_PM or start is None:
            return None
        mean_M, distance = mean_and_distance(models_PM)
        score = self._evaluator.score(mean_M)
        self.final_recall = (
            {str(label): found for label, found in enumerate(score.recall)}
            if score.recall
            else None
        )
        samples = sum(h.samples_until(moment) for h in self._histories)
        self.points.append(
            CurvePoint(moment - start, samples, score.loss, score.accuracy, distance)
        )
        return mean_M


def mean_and_distance(models_PM: Sequence[Vector]) -> tuple[Vector, float]:
    """Return the mean model, float32, and the consensus distance (defined at the top)."""
    # float64: a float32 sum over a thousand peers would itself add to the distance.
    stack_PM: NDArray[np.float64] = np.stack(models_PM).astype(np.float64)
    mean_M = stack_PM.mean(axis=0)
    squares_P = ((stack_PM - mean_M) ** 2).sum(axis=1)
    return mean_M.astype(np.float32), float(np.sqrt(squares_P.mean()))


def _models(histories: Sequence[PeerHistory], moment: Seconds) -> list[Vector]:
    rows = ((history, history.row_at(moment)) for history in histories)
    models = (history.model(row) for history, row in rows if row is not None)
    return [model for model in models if model is not None]
