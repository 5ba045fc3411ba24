"""What there is to learn. A task is one function in a file of its own, found by the file's name."""

from p2ptrain.compute.tasks.base import (
    Batch,
    Evaluation,
    IndexedTask,
    Task,
    checked,
    known_tasks,
    load_task,
)
from p2ptrain.compute.tasks.classification import Classification

__all__ = [
    "Batch",
    "Classification",
    "Evaluation",
    "IndexedTask",
    "Task",
    "checked",
    "known_tasks",
    "load_task",
]
