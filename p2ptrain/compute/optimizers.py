"""The optimizer of a replica, and that it trains what peers average and nothing else.

A parameter that an optimizer changes and no vector holds would be another one on each peer, and
nothing would say so. So every one that the optimizer holds has to be a trainable parameter of the
module: when the peer is built, and at each step, as `add_param_group` may bring others.
"""

from collections.abc import Mapping
from itertools import chain
from operator import is_

from torch import Tensor, nn
from torch.optim import Optimizer

from p2ptrain.errors import StateError


class Optimizers:
    """The optimizer of one replica.

    Raises:
        StateError: if it holds none of the module's parameters, or one that is not trainable or
            not in the module.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
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

    def parameters(self) -> list[Tensor]:
        """Whatever it holds, in its order."""
        groups = self._optimizer.param_groups
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

    def _refuse_strangers(self) -> None:
        for number, group in enumerate(self._optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in self._covered:
                    raise StateError(_stranger(parameter, number, self._names))


def _stranger(parameter: Tensor, group: int, names: Mapping[int, str]) -> str:
    name = names.get(id(parameter))
    if name is not None:
        return (
            f"parameter {name} is in the optimizer and was frozen when the peer was built, so it "
            f"is not averaged; give the optimizer the trainable ones only "
            f"([p for p in model.parameters() if p.requires_grad]), or set requires_grad before"
        )
    shape = list(parameter.shape)
    return (
        f"a parameter of shape {shape} in the optimizer's group {group} is not in the model that "
        f"the peer was given, so it would not be averaged; give the peer the whole model, once it "
        f"is complete, or leave that parameter out of the optimizer"
    )
