"""Load, evaluate and save the consensus model; nothing else in the launcher touches a model.

Everything goes through `p2ptrain.compute`, so torch is imported there and not here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from p2plab.consensus import Score
from p2ptrain.compute.devices import CPU, accelerators, choose_device, is_far
from p2ptrain.compute.flat import load_vector, save_model
from p2ptrain.compute.replica import Vector
from p2ptrain.compute.tasks import Evaluation, checked, load_task
from p2ptrain.compute.training import threads
from p2ptrain.errors import ConfigError


class TaskEvaluator:
    """Evaluates models of one task by loading each into the same module."""

    def __init__(
        self,
        task: str,
        seed: int,
        options: Mapping[str, Any] | None = None,
        *,
        device: str = "cpu",
    ) -> None:
        """Load the task and its held-out data.

        Args:
            task: its name.
            seed: of the model.
            options: the task's own.
            device: what the peers compute on, as `device` of ``[peer]``; where this machine has no
                such device, models are evaluated on the processor.

        Raises:
            ConfigError: if there is no such task or option, or its data is missing.
        """
        self._task = load_task(task, options)
        self._module = self._task.build_model(seed)
        try:
            self._device = choose_device(device, 0, accelerators())
        except ConfigError:
            self._device = CPU
        if ":" in task:  # of the user's own: a mistake shows before the training
            checked(task, self._evaluate())

    def score(self, model_M: Vector) -> Score:
        """Evaluate a model on held-out data."""
        load_vector(self._module, model_M)
        with threads(1):  # spares the processors for the peers
            found = self._evaluate()
        return Score(found.loss, found.accuracy, found.recall)

    def _evaluate(self) -> Evaluation:
        """On the device, until it has no memory left or a user's task fails there."""
        try:
            return self._task.evaluate(self._module.to(self._device))
        except RuntimeError:
            if not is_far(self._device):
                raise
            self._device = CPU
            return self._task.evaluate(self._module.to(CPU))

    def save(self, model_M: Vector, path: Path) -> None:
        """Write a model as safetensors under the names of its module."""
        load_vector(self._module, model_M)
        save_model(self._module, path)
