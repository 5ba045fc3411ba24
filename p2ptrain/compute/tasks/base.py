"""The contract of a task, and how one is found by its name.

A task is a model, its data, a loss, and how well it does. ``tasks/digits.py`` holds a function
`digits` that returns a `Task`: the file's name is its configuration name, and nothing else has to
be told. ``package.module:function`` finds one anywhere. A function that takes an argument takes its
options: a frozen dataclass, named by the argument's annotation, whose fields become the keys of
``[task_options]``.

Every random choice follows from the arguments, by a generator of its own (`compute/seeds.py`):

* which samples are held out: from the task alone. Runs with different seeds are tested alike;
* the initial model: from the seed alone. All peers start equal without a word on the wire;
* the shards: from seed and number of peers. Every sample is in exactly one shard;
* the order within a shard, and how samples are varied: from seed, number of peers and rank.
"""

import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from p2ptrain.errors import ConfigError
from p2ptrain.named import check_options, module_of, modules_of, suggestion

Batch = tuple[Tensor, Tensor]
"""Inputs and targets, first dimension samples."""

PACKAGE = "p2ptrain.compute.tasks"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """How well a model does on held-out data."""

    loss: float
    """Mean over the samples."""

    accuracy: float | None
    """Share of right answers, 0 to 1; None where a task knows no right answer."""

    recall: tuple[float, ...] | None = None
    """Share of right answers among the samples of each class; None where there are no classes."""


class Task(Protocol):
    """One thing to learn, the same for all peers."""

    def build_model(self, seed: int) -> nn.Module:
        """A new model on the host; equal seeds give equal bits."""
        ...

    def batches(self, rank: int, peers: int, batch_size: int, seed: int) -> Iterator[Batch]:
        """Batches of `rank`'s shard, for ever, each of exactly `batch_size` samples.

        Raises ConfigError, at once, if there are more peers than samples.
        """
        ...

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss of one batch, on the model's device, ready for backward."""
        ...

    def evaluate(self, model: nn.Module) -> Evaluation:
        """Judge `model` on the held-out data, in evaluation mode; it is left as it was."""
        ...


@runtime_checkable
class IndexedTask(Protocol):
    """A task whose samples have numbers: they can be dealt (``data = "elastic"``)."""

    @property
    def samples(self) -> int:
        """Of an epoch."""
        ...

    def batch_of(self, indices: Sequence[int], seed: int) -> Batch:
        """These samples, in order; what is drawn for them follows from `seed` and `indices`."""
        ...


def known_tasks() -> tuple[str, ...]:
    """The names of the tasks that come with p2ptrain, sorted."""
    return modules_of(PACKAGE, but=("base", "classification"))


def load_task(name: str, options: Mapping[str, Any] | None = None) -> Task:
    """Build the task `name` (or ``package.module:function``) with `options`.

    Raises:
        ConfigError: if there is no such task or option, an option's value does not fit, or what
            the function returns is not a task.
    """
    function = _find(name)
    kind = _options_kind(name, function)
    config = _configured(name, kind, dict(options or {}))
    task = function(*config)
    missing = [need for need in _needs() if not callable(getattr(task, need, None))]
    if missing:
        raise ConfigError(
            f"task {name!r}: the {type(task).__name__} that it returned is not a task: "
            f"it has no {', '.join(missing)}"
        )
    return typing.cast(Task, task)


def checked(name: str, found: object) -> Evaluation:
    """What the `evaluate` of the task `name` returned. Raises ConfigError if it is something else.

    No type checker has seen a task of the user's own.
    """
    if isinstance(found, Evaluation):
        return found
    shown = " ".join(repr(found).split())[:80]
    raise ConfigError(
        f"task {name!r}: evaluate returned {shown}; "
        "return p2ptrain.compute.tasks.Evaluation(loss=..., accuracy=...)"
    )


@contextmanager
def judging(model: nn.Module) -> Iterator[None]:
    """Put `model` into evaluation mode, and each of its modules back as it was afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True  # train() would also wake those that slept before


def on_device_of(model: nn.Module, batch: Batch) -> Batch:
    """The batch where the model is."""
    device = next(model.parameters()).device
    return batch[0].to(device), batch[1].to(device)


def batches_of(data: Batch, size: int) -> Iterator[Batch]:
    """All of `data` in order, `size` samples at a time; the last may be fewer."""
    for begin in range(0, len(data[1]), size):
        yield data[0][begin : begin + size], data[1][begin : begin + size]


def _find(name: str) -> Callable[..., object]:
    module, function_name = module_of("task", name, PACKAGE, known_tasks())
    function = getattr(module, function_name, None)
    if not callable(function):
        own = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        advice = f"{suggestion(function_name, own)} name it as package.module:function"
        raise ConfigError(
            f"task {name!r}: {module.__name__} has no function {function_name!r}; {advice.lstrip()}"
        )
    return typing.cast(Callable[..., object], function)


def _options_kind(name: str, function: Callable[..., object]) -> Any:  # Any: a dataclass, or None
    """The dataclass that the function's argument is annotated with; None if it takes none."""
    needed = [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if not needed:
        return None
    kind = typing.get_type_hints(function).get(needed[0])
    if len(needed) > 1 or not dataclasses.is_dataclass(kind):
        raise ConfigError(
            f"task {name!r}: the function takes {', '.join(needed)}; it must take nothing, or one "
            "argument annotated with a dataclass of its options"
        )
    return kind


def _configured(name: str, kind: Any, options: dict[str, Any]) -> tuple[object, ...]:
    """The function's arguments: its options, checked, or nothing."""
    fields = {field.name: field for field in dataclasses.fields(kind)} if kind else {}
    check_options(f"task {name!r}", kind, options)
    for key, field in fields.items():
        if key not in options and field.default is field.default_factory:  # both MISSING
            raise ConfigError(f"task {name!r} needs the option {key!r}; set it in [task_options]")
    try:
        return (kind(**options),) if kind else ()
    except ConfigError as error:
        raise ConfigError(f"task {name!r}: {error}") from error


def _needs() -> list[str]:
    """The methods of a task, as `Task` lists them."""
    return [key for key, value in vars(Task).items() if inspect.isfunction(value) and key[0] != "_"]
