"""A Hugging Face `Trainer` as a peer: the extra ``p2ptrain[huggingface]``.

::

    from p2ptrain.integrations.huggingface import P2PTrainCallback

    trainer = Trainer(model, args, train_dataset=..., callbacks=[P2PTrainCallback(join=[...])])
    trainer.train()

The `Trainer` does forward, backward, accumulation, logging, schedules and checkpoints as before;
its call of the optimizer becomes the boundary (`boundary_step.py`). Each process is one peer: start
it with ``python``, not with ``torchrun`` or ``accelerate launch`` over several processes.

*Clipping.* The `Trainer` clips each peer's own gradients before the optimizer is called. That is
right where models are averaged. Where gradients are, the callback takes `max_grad_norm` over, so
that what is clipped is the average; the logged ``grad_norm`` stays that of the peer's own gradient.
"""

from collections.abc import Callable
from typing import Any, Self

from transformers import TrainerCallback

from p2ptrain.errors import ConfigError
from p2ptrain.integrations.boundary_step import BoundaryStep, leave_with_consensus
from p2ptrain.runtime.peer import Peer


class P2PTrainCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Makes one `Trainer` a peer, from the beginning of its training to the end.

    Args:
        settings: as of `p2ptrain.Peer`: ``join``, ``listen``, ``algorithm``, ...

    After training the peer serves the others until they are done too; ``serve=False`` leaves at
    once. A `Trainer` does not tell its callbacks of an exception. Where the process goes on after
    one (a notebook), call `close`, or use the callback as a context manager.
    """

    def __init__(self, **settings: Any) -> None:  # Any: the fields of PeerConfig
        self._settings = settings
        self._boundary: BoundaryStep | None = None
        self._max_grad_norm: float | None = None
        self._accumulated = 0  # batches of a step that is not over
        self._args: Any = None  # Any: TrainingArguments
        self.peer: Peer | None = None
        """The peer of the present or last training."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Join the swarm with the model and the optimizer, both where they will stay.

        Raises:
            ConfigError: if several processes or GPUs share this training, if a checkpoint is to be
                loaded at its end, or a setting cannot work.
        """
        if args.world_size > 1:
            raise ConfigError(
                f"this Trainer is one of {args.world_size} processes; a peer is one process: "
                "start it with plain python and let peers join each other"
            )
        if args.n_gpu > 1:
            raise ConfigError(
                f"this Trainer spreads its batches over {args.n_gpu} GPUs (DataParallel); a peer "
                "has one: set CUDA_VISIBLE_DEVICES to one GPU and start a peer for each"
            )
        if args.load_best_model_at_end:
            raise ConfigError(
                "load_best_model_at_end loads one peer's checkpoint in place of the mean of all; "
                "leave it out, and load the checkpoint that you want after training"
            )
        wrapper = given["optimizer"]
        optimizer = getattr(wrapper, "optimizer", wrapper)
        peer = Peer(given["model"], optimizer, **self._settings)
        peer.__enter__()
        self.peer = peer
        self._args, self._accumulated = args, 0
        self._boundary = BoundaryStep(peer, optimizer, self._samples, wrapper)
        if peer.averages == "gradients" and args.max_grad_norm:
            self._boundary.clip = self._max_grad_norm = args.max_grad_norm
            args.max_grad_norm = 0.0

    def on_substep_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Count a batch that accumulates; the last step of an epoch may have fewer of them."""
        self._accumulated += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """End training when the swarm has reached its end."""
        self._accumulated = 0
        if self.peer and self.peer.should_stop:
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Leave the swarm, once it can do without us, with the mean model of all."""
        self._leave(leave_with_consensus)

    def close(self) -> None:
        """Leave the swarm and give the trainer's parts back as they were. Idempotent."""
        self._leave(lambda peer: peer.__exit__(None, None, None))

    def _samples(self) -> int:
        """Of the step that ends with this batch."""
        return int(self._args.train_batch_size) * (self._accumulated + 1)

    def _leave(self, leave: Callable[[Peer], None]) -> None:
        boundary, self._boundary = self._boundary, None
        if boundary is None or self.peer is None:
            return
        boundary.restore()
        if self._max_grad_norm is not None:
            self._args.max_grad_norm, self._max_grad_norm = self._max_grad_norm, None
        leave(self.peer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
