"""Build a task, a model, an optimizer and a peer from one configuration (`p2ptrain peer`)."""

import signal
import time
import zlib
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch
from torch import nn

from p2ptrain.compute.devices import accelerators, choose_device, explained
from p2ptrain.compute.flat import save_model, save_tensors
from p2ptrain.compute.tasks import Task, checked, load_task
from p2ptrain.compute.training import build_optimizer, threads, train
from p2ptrain.config import RunConfig
from p2ptrain.console.discover import AddressFollower, Neighbourhood, settled
from p2ptrain.console.progress import Narrator, shown_loss
from p2ptrain.errors import ConfigError
from p2ptrain.ids import PeerId
from p2ptrain.runtime.peer import Peer
from p2ptrain.standard_streams import Lines


def run_peer(
    config: RunConfig,
    *,
    local_rank: int = 0,
    quiet: bool = False,
    result: bool = True,
    save: Path | None = None,
) -> None:
    """Train the configured task until the run ends or the process is asked to (SIGTERM, Ctrl-C).

    Args:
        config: the peer, and what it trains.
        local_rank: its place among the peers of this machine; which device is its own.
        quiet: print warnings and nothing else.
        save: a file for the consensus model of all peers.
        result: save the model afterwards, if there is a folder, and say how good it is.

    Raises:
        P2PTrainError: one sentence for the user.
        KeyboardInterrupt: after Ctrl-C, when the peer has left cleanly.
    """
    device = choose_device(config.device, local_rank, accelerators())
    with explained(config.name or "this peer"):
        _run(config, device, quiet=quiet, result=result, save=save)


def _run(
    config: RunConfig, device: torch.device, *, quiet: bool, result: bool, save: Path | None
) -> None:
    config.check_batches()
    if save and not save.parent.is_dir():
        raise ConfigError(f"--save {save}: there is no folder {save.parent}; make it first")
    task = load_task(config.task, config.task_options)
    model = task.build_model(config.seed).to(device)
    if result and ":" in config.task:  # of the user's own: a mistake shows before the training
        _evaluate(config, task, model)
    optimizer = build_optimizer(model, config.training)
    # Last, since a peer must listen soon after discovery.
    around = Neighbourhood(config.network)
    named = config.advertise if config.advertise_ip else ""
    config = settled(config, around, time.monotonic)
    lines = Lines()
    say = _keep_quiet if quiet else lines.say
    narrator = Narrator(say, time.monotonic, plan=config, warn=lines.say)
    this = Peer(model, optimizer, config, metrics=narrator)
    consensus: dict[str, Any] = {}  # Any: as torch has it
    with ExitStack() as stack:
        with narrator.saying_what_it_waits_for():
            stack.enter_context(this)
        stack.enter_context(AddressFollower(named, config.advertise, around, this.advertise))
        ctrl_c = stack.enter_context(_CtrlC(this))
        narrator.follow(lambda: this.progress)
        if this.metrics_address:
            _say(say, f"{this.name} shows its metrics at http://{this.metrics_address}/metrics")
        train(
            task,
            model,
            optimizer,
            this,
            config.training,
            config.pace,
            me=this.name,
            rank=config.rank,
            peers=config.peers,
            seed=data_seed(config, this.name),
            end_samples=config.stop.samples,
            clock=time.perf_counter,
            sleep=time.sleep,
            trains=config.trains,
        )
        if save and not ctrl_c.came and not config.protocol.membership.view:
            consensus = this.consensus()
    if save:
        save_tensors(consensus or this.state_dict(), save)
        whose = f"the mean model of {', '.join(this.consensus_of)}" if consensus else "its model"
        _say(say, f"{this.name}: {whose} is in {save}")
    if result and config.out:
        path = Path(config.out) / f"{this.name}.safetensors"
        save_model(model, path)
        _say(say, f"{this.name}: its model is in {path}")
    if result and not quiet:
        _say(say, f"{this.name}: on held-out data {_evaluate(config, task, model)}")
    if ctrl_c.came:
        raise KeyboardInterrupt


def _evaluate(config: RunConfig, task: Task, model: nn.Module) -> str:
    with threads(config.training.threads):
        found = checked(config.task, task.evaluate(model))
    accuracy = "" if found.accuracy is None else f", accuracy {found.accuracy:.3f}"
    return f"loss {shown_loss(found.loss)}{accuracy}"


def data_seed(config: RunConfig, name: PeerId) -> int:
    """The seed for the order of a peer's data.

    Peers that start together (`peers` above 1) share a seed and each take the shard of their rank.
    A peer that is started alone goes through all of the data, in an order that its name decides: no
    two peers of a swarm see the same batches, and a named peer sees the same ones again. Data that
    are dealt are dealt by one seed.
    """
    is_shared = config.peers > 1 or config.training.data == "elastic"
    return config.seed if is_shared else zlib.crc32(f"{config.seed}/{name}".encode())


class _CtrlC:
    """The first Ctrl-C asks the peer to leave after its step; a second one ends the process."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self.came = False

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        signal.signal(signal.SIGINT, self._before)
        self._peer.stop("asked to end by Ctrl-C")


def _say(say: Callable[[str], None], line: str) -> None:
    with suppress(OSError):  # the narrator's records say so
        say(line)


def _keep_quiet(line: str) -> None:
    """Say nothing."""
