"""What a program may not do beside `peer.step`, refused when it does it.

An optimizer's step of its own changes one peer's model behind the averages. Where all peers are to
have one model, so does a checkpoint that one of them loads while it trains: the others go on from
another model, and nothing of what is averaged shows it.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from p2ptrain.errors import LocalProtocolError


def refuse_strays(
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    is_ours: Callable[[], bool],
    *,
    may_load: bool,
) -> list[RemovableHandle]:
    """Raise LocalProtocolError from now on where a program steps, or loads a state, by itself.

    Args:
        module: the peer's model; a part of it that loads a state counts as well.
        optimizers: the peer's.
        is_ours: true while the peer itself makes a step, and may take a state over.
        may_load: whether a program may load states, which others then average with.

    Returns:
        What removes that again.
    """

    def step(*_: object) -> None:
        if not is_ours():
            raise LocalProtocolError(
                "optimizer.step() was called beside peer.step(), which makes that step itself; "
                "leave it out"
            )

    def load(*_: object) -> None:
        if not is_ours():
            raise LocalProtocolError(
                "load_state_dict was called inside `with peer:`, where all peers train one model; "
                "load a checkpoint before the with, and start the swarm from there"
            )

    hooks = [optimizer.register_step_pre_hook(step) for optimizer in optimizers]
    if not may_load:
        owners: list[Any] = [*module.modules(), *optimizers]  # Any: torch's has no types there
        hooks += [owner.register_load_state_dict_pre_hook(load) for owner in owners]
    return hooks
