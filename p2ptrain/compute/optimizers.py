"""The optimizers of a replica as one, and that they train what peers average and nothing else.

A parameter that an optimizer changes and no vector holds would be another one on each peer, and
nothing would say so. So every one that an optimizer holds has to be a trainable parameter of the
module: when the peer is built, and at each step, as `add_param_group` may bring others. Several
optimizers share the module among them, say Muon for matrices and AdamW for the rest.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from p2ptrain.compute.contract import FROZEN, UpdateRule, digest_of, update_rule
from p2ptrain.compute.replica import clip_scale
from p2ptrain.errors import ConfigError, StateError

HOW_IT_COMPUTES = ("foreach", "fused", "capturable", "differentiable")
"""Hyperparameters that follow from the device, so each peer has its own."""

Settings = list[list[dict[str, Any]]]  # Any: of each optimizer and group, what it has
"""Hyperparameters as they were at some boundary."""

Closure = Callable[[], Any]
"""Computes loss and gradients anew and returns the loss, as torch's optimizers call it."""


class Optimizers:
    """What trains one module.

    Args:
        module: as the peer was given it.
        optimizers: one, or several over parameters of their own.

    Raises:
        ConfigError: if this is no optimizer, or an empty list.
        StateError: if it holds none of the module's parameters, or one that is not trainable, not
            in the module or in two optimizers.
    """

    def __init__(self, module: nn.Module, optimizers: Optimizer | Sequence[Optimizer]) -> None:
        several = optimizers if isinstance(optimizers, Sequence) else (optimizers,)
        self.all: tuple[Optimizer, ...] = tuple(several)
        """In the order in which they were given; that is the order of their steps."""
        self._refuse_what_is_none()
        self._names = {id(p): name for name, p in module.named_parameters()}
        self._covered = {id(p): p for p in module.parameters() if p.requires_grad}
        parameters = self.parameters()
        if not any(id(parameter) in self._names for parameter in parameters):
            raise StateError(
                f"the optimizer holds none of the parameters of {type(module).__name__}; "
                f"build it from module.parameters()"
            )
        self._refuse_strangers()
        self._checked = parameters
        self._rule: tuple[object, UpdateRule] | None = None

    @property
    def kinds(self) -> list[str]:
        """The name of each one's class."""
        return [type(optimizer).__name__ for optimizer in self.all]

    @property
    def needs_closure(self) -> bool:
        """True if one of them evaluates the loss by itself, as LBFGS does."""
        return any(map(_needs_closure, self.all))

    def parameters(self) -> list[Tensor]:
        """Whatever they hold, in their order."""
        groups = chain.from_iterable(optimizer.param_groups for optimizer in self.all)
        return list(chain.from_iterable(group["params"] for group in groups))

    def check(self) -> None:
        """Refuse a parameter that is not in the vector; fast while none has come.

        Raises:
            StateError: naming it and the remedy.
        """
        now = self.parameters()
        if len(now) != len(self._checked) or not all(map(is_, now, self._checked)):
            self._refuse_strangers()
            self._checked = now

    def rule(self, frozen: str) -> UpdateRule:
        """What they make of gradients at this moment; written anew only where that has changed.

        Args:
            frozen: a digest of what they do not train.
        """
        now = (
            frozen,
            [
                [len(group["params"]), *(_plain(group.get(key)) for key in keys)]
                for optimizer in self.all
                for keys in [_hyperparameters(optimizer)]
                for group in optimizer.param_groups
            ],
        )
        if self._rule is None or self._rule[0] != now:
            self._rule = now, update_rule((FROZEN, frozen), *self._described())
        return self._rule[1]

    def _described(self) -> Iterator[tuple[str, object]]:
        groups = [(o, number, g) for o in self.all for number, g in enumerate(o.param_groups)]
        names = [[self._names.get(id(p), "?") for p in group["params"]] for _, _, group in groups]
        yield "optimizer", ", ".join(self.kinds)
        yield "parameter groups", f"{' + '.join(str(len(n)) for n in names)} ({digest_of(names)})"
        for optimizer, number, group in groups:
            whose = f" of group {number} of {type(optimizer).__name__}" if len(groups) > 1 else ""
            for key in _hyperparameters(optimizer):
                yield f"{key}{whose}", _plain(group.get(key))

    def step(self, clip: float | None = None, closure: Closure | None = None) -> None:
        """Clip all gradients to the norm `clip`, if given, and make each one's step.

        Args:
            clip: of all gradients of the module together.
            closure: for one optimizer, which calls it as often as it likes; what it computes is
                clipped each time.

        Raises:
            ConfigError: if there is a closure for several, or none for one that needs it. Nothing
                has changed then.
        """
        if closure is not None:
            self._only_one().step(self._clipped(closure, clip))
            return
        for optimizer in self.all:
            if _needs_closure(optimizer):
                raise ConfigError(
                    f"{type(optimizer).__name__} evaluates the loss several times in a step; pass "
                    f"it a closure that computes loss and gradients: peer.step(closure=...)"
                )
        self._clip(clip)
        for optimizer in self.all:
            optimizer.step()

    def settings(self) -> Settings:
        """The hyperparameters of all groups at this moment, for a step that comes later."""
        for optimizer in self.all:
            setattr(optimizer, "_opt_called", True)  # noqa: B010 - mypy; a scheduler of torch asks whether a step came first
        return [
            [{key: _held(value) for key, value in group.items() if key != "params"} for group in o]
            for o in (optimizer.param_groups for optimizer in self.all)
        ]

    def step_some(self, wanted: Set[int], settings: Settings) -> None:
        """Make the step of some parameters, by their `id`, with these hyperparameters."""
        for optimizer, groups in zip(self.all, settings, strict=True):
            before = [dict(group) for group in optimizer.param_groups]
            some = [[p for p in group["params"] if id(p) in wanted] for group in before]
            if not any(some):
                continue
            try:
                for group, now, params in zip(optimizer.param_groups, groups, some, strict=False):
                    group.update(now, params=params)
                optimizer.step()
            finally:
                for group, was in zip(optimizer.param_groups, before, strict=True):
                    group.update(was)

    def unscale(self, scaler: GradScaler) -> bool:
        """Divide `scaler`'s factor out of all gradients; false if they overflowed.

        A program may have done so itself, to look at gradients or to clip them: then its scaler
        has found out already, and is asked.

        Raises:
            StateError: if the scaler has made the optimizer's step already.
        """
        if not scaler.is_enabled():
            return True  # it scales nothing, and skips nothing
        return all([_unscale(scaler, optimizer) for optimizer in self.all])  # noqa: C419 - all of them

    def _clip(self, clip: float | None) -> None:
        if clip is not None:
            gradients = [p.grad for p in self._covered.values() if p.grad is not None]
            scale_gradients(gradients, clip_scale(_norm(gradients), clip))

    def _clipped(self, closure: Closure, clip: float | None) -> Closure:
        def compute() -> Any:  # Any: whatever the program's closure returns
            loss = closure()
            self._clip(clip)
            return loss

        return compute

    def _only_one(self) -> Optimizer:
        if len(self.all) > 1:
            raise ConfigError(
                f"a closure is for one optimizer and there are {len(self.all)} "
                f"({', '.join(self.kinds)}); compute the gradients before peer.step instead"
            )
        return self.all[0]

    def _refuse_what_is_none(self) -> None:
        if not self.all:
            raise ConfigError("the list of optimizers is empty; give the peer one or more")
        for optimizer in self.all:
            if not hasattr(optimizer, "param_groups") or not callable(
                getattr(optimizer, "step", None)
            ):
                raise ConfigError(
                    f"{type(optimizer).__name__} is no optimizer; "
                    f"give the peer a model, then one optimizer of torch or a list of them"
                )

    def _refuse_strangers(self) -> None:
        seen: dict[int, Optimizer] = {}
        for optimizer, number, parameter in self._held():
            if id(parameter) not in self._covered:
                if id(parameter) in self._names and not parameter.requires_grad:
                    parameter.grad = None  # of before it was frozen: the optimizer would apply it
                    continue
                raise StateError(_stranger(parameter, number, self._names))
            if id(parameter) in seen:
                both = type(seen[id(parameter)]).__name__, type(optimizer).__name__
                raise StateError(
                    f"parameter {self._names[id(parameter)]} is in two optimizers "
                    f"({both[0]} and {both[1]}), which would both step it; give it to one of them"
                )
            seen[id(parameter)] = optimizer

    def _held(self) -> Iterator[tuple[Optimizer, int, Tensor]]:
        """Each parameter, with its optimizer and the number of its group there."""
        for optimizer in self.all:
            for number, group in enumerate(optimizer.param_groups):
                for parameter in group["params"]:
                    yield optimizer, number, parameter


def _hyperparameters(optimizer: Optimizer) -> list[str]:
    """What decides on an update, and not how it is computed; no notes of schedulers."""
    return [key for key in optimizer.defaults if key not in HOW_IT_COMPUTES]


def _held(value: Any) -> Any:  # Any: a hyperparameter
    """As it is now: a tensor may be changed in place."""
    return value.clone() if isinstance(value, Tensor) else value


def _plain(value: object) -> object:
    """A hyperparameter as something that can be compared and hashed."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else tuple(value.flatten().tolist())
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    return value if isinstance(value, (bool, int, float, str)) else repr(value)


def _needs_closure(optimizer: Optimizer) -> bool:
    try:  # of the class: schedulers and frameworks replace the method of the object
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    except (TypeError, ValueError):
        return False
    return closure is not None and closure.default is inspect.Parameter.empty


def _unscale(scaler: GradScaler, optimizer: Optimizer) -> bool:
    stage = scaler._per_optimizer_states[id(optimizer)]["stage"]
    if stage is OptState.STEPPED:
        raise StateError(
            "scaler.step(optimizer) was called before peer.step(scaler=scaler), which makes the "
            "optimizer's step itself; leave scaler.step and scaler.update out"
        )
    if stage is OptState.READY:
        scaler.unscale_(optimizer)
    return not any(float(found) for found in scaler._found_inf_per_device(optimizer).values())


def _stranger(parameter: Tensor, group: int, names: Mapping[int, str]) -> str:
    name = names.get(id(parameter))
    if name is not None:
        return (
            f"parameter {name} is in the optimizer, was frozen when the peer was built and is "
            f"trainable now; set requires_grad before, so that it is averaged"
        )
    shape = list(parameter.shape)
    return (
        f"a parameter of shape {shape} in the optimizer's group {group} is not in the model that "
        f"the peer was given, so it would not be averaged; give the peer the whole model, once it "
        f"is complete, or leave that parameter out of the optimizer"
    )


def scale_gradients(gradients: Sequence[Tensor], factor: float) -> None:
    """Multiply them all, in place."""
    if gradients and factor != 1:
        torch._foreach_mul_(list(gradients), factor)


def _norm(gradients: Sequence[Tensor]) -> float:
    """Of all of them together, in float64: how they are summed changes no bit that counts."""
    norms = [torch.linalg.vector_norm(g, dtype=torch.float64).cpu() for g in gradients]
    return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0
