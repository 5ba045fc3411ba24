"""A loop with Accelerate as a peer: the extra ``p2ptrain[huggingface]``.

::

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with peer_of(accelerator, model, optimizer, samples=32, join=[...]) as peer:
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_function(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
            if peer.should_stop:
                break

It stands where Accelerate's own ``LocalSGD`` would, without its `step`: each step of the optimizer
that Accelerate lets through becomes the boundary (`boundary_step.py`); those that only accumulate,
or overflowed, do not. Each process is one peer: start it with plain ``python``.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from p2ptrain.errors import ConfigError
from p2ptrain.integrations.boundary_step import BoundaryStep, leave_with_consensus
from p2ptrain.runtime.peer import Peer


@contextmanager
def peer_of(
    accelerator: Any,  # Any: this and the next two are Accelerate's, which has no types
    model: Any,
    optimizer: Any,
    *,
    samples: int,
    clip: float | None = None,
    **settings: Any,  # Any: the fields of PeerConfig
) -> Iterator[Peer]:
    """Inside, `optimizer.step()` averages with the other peers.

    Args:
        accelerator: of one process.
        model: as `accelerator.prepare` returned it.
        optimizer: as `accelerator.prepare` returned it.
        samples: of one step of the optimizer: the batch times the steps that accumulate.
        clip: norm to clip gradients to, after they were averaged. Under an algorithm that averages
            gradients, use it instead of `accelerator.clip_grad_norm_`, which clips one peer's own.
        settings: as of `p2ptrain.Peer`: ``join``, ``listen``, ``algorithm``, ...

    Raises:
        ConfigError: if several processes share this training, or a setting cannot work.
    """
    if accelerator.num_processes > 1:
        raise ConfigError(
            f"this Accelerator is one of {accelerator.num_processes} processes; a peer is one "
            "process: start it with plain python and let peers join each other"
        )
    inner = getattr(optimizer, "optimizer", optimizer)
    peer = Peer(accelerator.unwrap_model(model), inner, **settings)
    with ExitStack() as stack:
        stack.enter_context(peer)
        boundary = BoundaryStep(peer, inner, lambda: samples, optimizer)
        boundary.clip = clip
        try:
            yield peer
        finally:
            boundary.restore()
        stack.pop_all()
    leave_with_consensus(peer)
