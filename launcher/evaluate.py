"""Load, evaluate and save the consensus model; nothing else in the launcher touches a model.

Everything goes through `p2ptrain.compute`, so torch is imported there and not here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from p2plab.consensus import Score
from p2ptrain.compute.flat import load_vector, save_model
from p2ptrain.compute.replica import Vector
from p2ptrain.compute.tasks import checked, load_task
from p2ptrain.compute.training import threads


class TaskEvaluator:
    """Evaluates models of one task by loading each into the same module."""

    def __init__(self, task: str, seed: int, options: Mapping[str, Any] | None = None) -> None:
        """Load the task and its held-out data; `options` are the task's own.

        Raises:
            ConfigError: if there is no such task or option, or its data is missing.
        """
        self._task = load_task(task, options)
        self._module = self._task.build_model(seed)
        if ":" in task:  # of the user's own: a mistake shows before the training
            checked(task, self._task.evaluate(self._module))

    def score(self, model_M: Vector) -> Score:
        """Evaluate a model on held-out data."""
        load_vector(self._module, model_M)
        with threads(1):  # spares the processors for the peers
            found = self._task.evaluate(self._module)
        return Score(found.loss, found.accuracy, found.recall)

    def save(self, model_M: Vector, path: Path) -> None:
        """Write a model as safetensors under the names of its module."""
        load_vector(self._module, model_M)
        save_model(self._module, path)
