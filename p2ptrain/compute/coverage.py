"""Nothing is trained outside of the vector: what a module has become since it was laid out.

A program that replaces a submodule, adds a layer, unfreezes or moves something after its peer was
built trains numbers that no other peer ever sees. Nothing would say so: losses fall, models drift.
So `Coverage.check` runs at each step, and refuses by name.

It has to cost little beside an optimizer's step, also for thousands of small tensors. So it
compares what can be compared without a loop in Python: which objects the module tree holds now,
tensor by tensor and child by child, and where their numbers lie. Only where something differs does
it walk the module, to find the name. Shapes and strides, which only odd programs change without a
new address, are compared at the first `FIRST_CHECKS` and then every `EVERY` checks.

A frozen parameter may be replaced by another frozen one; a module without parameters may come, go
or be replaced. Both are looked at once, and are what is expected from then on.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

from torch import Tensor, nn

from p2ptrain.compute.slots import Home, Slot, layout_of
from p2ptrain.errors import StateError

FIRST_CHECKS = 8
"""So many checks compare everything: what a program does to its model it does early."""

EVERY = 16
"""Of later checks, one in so many. Larger: a strange view trains unseen for longer; smaller: time.
"""

_CHILDREN, _PARAMETERS = attrgetter("_modules"), attrgetter("_parameters")
_IS_TRAINABLE = attrgetter("requires_grad")


class Coverage:
    """Compares a module with the slots that were laid out for it.

    Args:
        module: as the peer was given it.
        slots: its own and those of tensors beside it; the tensors lie where they shall stay.
    """

    def __init__(self, module: nn.Module, slots: Sequence[Slot]) -> None:
        self._module = module
        self._homes = [home for slot in slots for home in slot.homes]
        own = {id(owner) for owner in module.modules()}
        self._buffers = [h for h in self._homes if not h.is_parameter and id(h.owner) in own]
        self._tensors = list({id(home.tensor): home.tensor for home in self._homes}.values())
        self._covered = {id(home.tensor) for home in self._homes if home.is_parameter}
        self._layouts = {id(tensor): layout_of(tensor) for tensor in self._tensors}
        self._addresses, self._views = self._addresses_now(), self._views_now()
        self._checks = 0
        self._remember()

    @property
    def frozen(self) -> dict[str, Tensor]:
        """The module's frozen parameters outside of the vector, under their first names."""
        return {name: tensor for name, tensor in self._outside() if not tensor.requires_grad}

    def check(self) -> None:
        """Refuse a module that trains something outside of the vector, or another memory.

        Raises:
            StateError: naming the parameter or buffer, and the remedy.
        """
        self._checks += 1
        is_thorough = self._checks <= FIRST_CHECKS or self._checks % EVERY == 0
        if self._is_as_it_was() and not (is_thorough and self._views_now() != self._views):
            return
        self._refuse()
        self._remember()

    def _is_as_it_was(self) -> bool:
        now = self._tree_now()
        return (
            len(now) == len(self._tree)
            and all(map(is_, now, self._tree))
            and self._addresses_now() == self._addresses
            and all(home.registered() is home.tensor for home in self._buffers)
            and not any(map(_IS_TRAINABLE, self._frozen.values()))
        )

    def _tree_now(self) -> list[object]:
        """Every child and every parameter of every module, in order."""
        registries = chain(map(_CHILDREN, self._modules), map(_PARAMETERS, self._modules))
        return list(chain.from_iterable(map(dict.values, registries)))

    def _addresses_now(self) -> list[int]:
        return list(map(Tensor.data_ptr, self._tensors))

    def _views_now(self) -> tuple[list[Any], list[Any]]:  # Any: torch.Size, tuples of int
        sizes, strides = map(Tensor.size, self._tensors), map(Tensor.stride, self._tensors)
        return list(sizes), list(strides)

    def _remember(self) -> None:
        """What is there now is what is expected; kept, so that no other object gets its id."""
        self._modules = list(self._module.modules())
        self._tree = self._tree_now()
        self._frozen = dict(self._outside())

    def _outside(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._module.named_parameters():
            if id(parameter) not in self._covered:
                yield name, parameter

    def _refuse(self) -> None:
        """Raise if what differs matters; the first thing that does is named."""
        for home in self._homes:
            if home.registered() is not home.tensor or self._has_moved(home.tensor):
                raise StateError(_replaced(home))
        frozen = {id(parameter) for parameter in self._frozen.values()}
        for name, parameter in self._outside():
            if parameter.requires_grad:
                raise StateError(_unfrozen(name) if id(parameter) in frozen else _added(name))
        here = {id(module) for module in self._module.modules()}
        for home in self._homes:
            if home.is_parameter and id(home.owner) not in here:
                raise StateError(_removed(home))

    def _has_moved(self, tensor: Tensor) -> bool:
        return layout_of(tensor) != self._layouts[id(tensor)]


def _replaced(home: Home) -> str:
    kind = "parameter" if home.is_parameter else "buffer"
    return (
        f"the storage of {kind} {home.name} was replaced after the peer was built; move, cast or "
        f"assign the model before that, and afterwards change values in place (copy_)"
    )


def _unfrozen(name: str) -> str:
    return (
        f"parameter {name} was frozen when the peer was built and is trainable now; "
        f"set requires_grad before, so that it is averaged"
    )


def _added(name: str) -> str:
    return (
        f"parameter {name} is trainable and came into the model after the peer was built, so no "
        f"other peer would see it; build the peer after the model is complete, or freeze it "
        f"(requires_grad_(False))"
    )


def _removed(home: Home) -> str:
    return (
        f"parameter {home.name} has left the model after the peer was built; "
        f"build the peer after the model is complete"
    )
