"""The consensus model in `torch.distributed.checkpoint`: saved by one peer, loaded anywhere.

::

    from torch.distributed import checkpoint
    from p2ptrain.integrations.torch_checkpoint import ConsensusState

    with p2ptrain.Peer(model, optimizer, ...) as peer:
        ...
        mean = peer.consensus()
    checkpoint.save({"model": ConsensusState(model, mean)}, checkpoint_id="DIR", no_dist=True)

    checkpoint.load({"model": ConsensusState(model)}, checkpoint_id="DIR", no_dist=True)

Peers share no process group, so ``no_dist`` it is; all peers have the same mean, and one saves it.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.checkpoint.stateful import Stateful


class ConsensusState(Stateful):
    """Implements `Stateful` for a model.

    Args:
        model: what is loaded goes here; it trains in no peer then.
        mean: what `Peer.consensus` returned; saved in place of the model's own numbers.
    """

    def __init__(
        self, model: nn.Module, mean: Mapping[str, Any] | None = None
    ) -> None:  # Any: also a module's `extra_state`
        self._model = model
        self._mean = mean

    def state_dict(self) -> dict[str, Any]:  # Any: as above
        """The mean or, without one, the model's own."""
        return dict(self._model.state_dict() if self._mean is None else self._mean)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # Any: as above
        """Overwrite the model."""
        self._model.load_state_dict(state_dict)
