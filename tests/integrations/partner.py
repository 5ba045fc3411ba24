"""The other peer of a swarm of two: a plain loop on a thread, beside a framework's trainer."""

import copy
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

import p2ptrain


class Partner:
    """Trains a copy of a model by a loss of its own, for so many steps."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module], Tensor], steps: int) -> None:
        self.model = copy.deepcopy(model)
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.address = f"127.0.0.1:{server.getsockname()[1]}"
        self.error: BaseException | None = None
        self._loss = loss
        self._steps = steps
        self._thread = threading.Thread(target=self._main)

    def _main(self) -> None:
        try:
            self._train()
        except BaseException as error:  # noqa: BLE001 - the test's thread wants to know
            self.error = error

    def _train(self) -> None:
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        config = p2ptrain.PeerConfig(
            name="partner", algorithm="allreduce", listen=self.address, peers=2
        )
        with p2ptrain.Peer(self.model, optimizer, config) as peer:
            for _ in range(self._steps):
                self._loss(self.model).backward()
                peer.step(clip=1.0)
                optimizer.zero_grad()

    @contextmanager
    def training(self) -> Iterator["Partner"]:
        """Inside, it trains together with who joins; afterwards it has ended without an error."""
        self._thread.start()
        yield self
        self._thread.join(60)
        assert self.error is None, self.error


def numbers(model: nn.Module) -> Tensor:
    """All parameters in one vector."""
    return torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])
