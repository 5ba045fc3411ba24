"""A Lightning `Trainer` as a peer: the extra ``p2ptrain[lightning]``.

::

    from p2ptrain.integrations.lightning import P2PTrainCallback

    trainer = Trainer(max_epochs=3, callbacks=[P2PTrainCallback(join=[...])])
    trainer.fit(module, loader)

Lightning does forward, backward, accumulation, precision, logging and checkpoints as before; its
call of the optimizer becomes the boundary (`boundary_step.py`). Each process is one peer: one
device, no strategy of Lightning's own.

*Clipping.* Lightning clips each peer's own gradients before the optimizer is called. That is right
where models are averaged. Where gradients are, the callback takes `gradient_clip_val` over, so that
what is clipped is the average; a module that overrides `configure_gradient_clipping` keeps its own.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from lightning.pytorch import Callback
from torch import Tensor

from p2ptrain.errors import ConfigError
from p2ptrain.integrations.boundary_step import BoundaryStep, leave_with_consensus
from p2ptrain.runtime.peer import Peer


class P2PTrainCallback(Callback):  # type: ignore[misc]  # lightning is skipped by mypy
    """Makes one `Trainer` a peer, from the beginning of `fit` to its end.

    Args:
        settings: as of `p2ptrain.Peer`: ``join``, ``listen``, ``algorithm``, ...

    After training the peer serves the others until they are done too; ``serve=False`` leaves at
    once.
    """

    def __init__(self, **settings: Any) -> None:  # Any: the fields of PeerConfig
        self._settings = settings
        self._boundary: BoundaryStep | None = None
        self._clip: float | None = None
        self._samples = 0
        self.peer: Peer | None = None
        """The peer of the present or last fit."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Join the swarm with the module and its optimizer, both where they will stay.

        Raises:
            ConfigError: for several callbacks, processes or optimizers, manual optimization,
                clipping by value where gradients are averaged, or a setting that cannot work.
        """
        optimizer = _the_optimizer(trainer, pl_module)
        peer = Peer(pl_module, optimizer, **self._settings)
        if peer.averages == "gradients" and trainer.gradient_clip_val:
            self._clip = _norm_to_clip(trainer)
        peer.__enter__()
        self.peer = peer
        self._samples = 0
        self._boundary = BoundaryStep(peer, optimizer, self._take_samples)
        if self._clip:
            self._boundary.clip = self._clip
            trainer.gradient_clip_val = None

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch."""
        self._samples += _size_of(batch) or 1

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End training when the swarm has reached its end."""
        if self.peer and self.peer.should_stop:
            trainer.should_stop = True

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave the swarm, once it can do without us, with the mean model of all."""
        self._leave(trainer, None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the swarm at once."""
        self._leave(trainer, exception)

    def _leave(self, trainer: Any, error: BaseException | None) -> None:
        boundary, self._boundary = self._boundary, None
        if boundary is None or self.peer is None:
            return
        boundary.restore()
        if self._clip:
            trainer.gradient_clip_val, self._clip = self._clip, None
        if error:
            self.peer.__exit__(type(error), error, None)
        else:
            leave_with_consensus(self.peer)

    def _take_samples(self) -> int:
        samples, self._samples = self._samples, 0
        return samples


def _the_optimizer(trainer: Any, pl_module: Any) -> Any:  # Any: a torch optimizer
    """The one optimizer. Raises ConfigError in a sentence if this fit cannot be a peer."""
    if (count := sum(isinstance(one, P2PTrainCallback) for one in trainer.callbacks)) > 1:
        raise ConfigError(
            f"this Trainer has {count} P2PTrainCallbacks and would be as many peers; keep one: "
            "P2PTRAIN_LIGHTNING adds one by itself"
        )
    if trainer.world_size > 1:
        raise ConfigError(
            f"this Trainer is one of {trainer.world_size} processes; a peer is one process: "
            "use Trainer(devices=1) and let peers join each other"
        )
    if not pl_module.automatic_optimization or len(trainer.optimizers) != 1:
        raise ConfigError(
            f"{type(pl_module).__name__} has {len(trainer.optimizers)} optimizers and "
            f"automatic_optimization = {pl_module.automatic_optimization}; a peer needs one "
            "optimizer that Lightning steps; else use p2ptrain.Peer in a loop of your own"
        )
    return trainer.optimizers[0]


def _norm_to_clip(trainer: Any) -> float:
    if trainer.gradient_clip_algorithm == "value":
        raise ConfigError(
            f"gradient_clip_algorithm = 'value' clips each peer's gradients before they are "
            f"averaged; use 'norm' (gradient_clip_val = {trainer.gradient_clip_val}) or none"
        )
    return float(trainer.gradient_clip_val)


def _size_of(batch: object) -> int:
    """Samples of a batch: the first dimension of the first tensor in it; 0 if there is none."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.ndim else 1
    if isinstance(batch, Mapping):
        batch = batch.values()
    if isinstance(batch, Iterable) and not isinstance(batch, (str, bytes)):
        return next((size for part in batch if (size := _size_of(part))), 0)
    return 0
