"""One peer that is several processes: a group of ``torchrun`` under DDP or ``fully_shard``.

::

    dist.init_process_group("gloo")                        # or nccl
    model = DistributedDataParallel(build())               # or fully_shard(model)
    with GroupPeer(model, optimizer, listen="10.0.0.6:4000", join=["10.0.0.5:4000"]) as peer:
        for inputs, targets in loader:
            loss_function(model(inputs), targets).backward()
            peer.step(samples=len(inputs))
            optimizer.zero_grad()
            if peer.should_stop:
                break

The swarm's model is cut into `parts` (`compute/parts.py`), and each part is a swarm of its own: the
same protocol, membership and algorithm, between those that speak for it. Rank ``r`` of a group
speaks for part ``r``, with its twins in other groups; a process that is alone speaks for all parts,
one after the other. Part ``k`` listens at the port of part 0 plus ``k``.

* Under ``fully_shard`` there are as many parts as ranks, and no rank ever holds the whole model.
* Under DDP each rank writes what it speaks for and broadcasts it to the others. With one part rank
  0 speaks for all, and peers outside may be ordinary ones (`p2ptrain.Peer`).

**Who waits for whom.** All ranks call `step` together; it ends when each part is updated, and all
ranks agree there whether to go on. So a group steps at the pace of its slowest part.

**A rank that dies** breaks the collectives of its group (`ranks.py`): there the others leave their
swarms and end. Peers outside lose the group as they lose any peer.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import fields
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from p2ptrain.averaging.base import load_algorithm
from p2ptrain.compute.parts import Face, Part, is_sharded
from p2ptrain.errors import ConfigError, LocalProtocolError
from p2ptrain.ids import Address
from p2ptrain.integrations.ranks import Ranks
from p2ptrain.named import whole_in
from p2ptrain.runtime.peer import Peer
from p2ptrain.runtime.settings import PeerConfig

MOST_PARTS = 1024

AGREED = ("algorithm", "algorithm_options", "average_momentum", "peers", "stop", "parts")
"""Settings that all ranks of a group have alike; the first that differs is named."""


class GroupPeer:
    """A peer of all ranks of a process group, or of this process alone, in `parts`.

    Args:
        model: under DDP or ``fully_shard``, or a plain module.
        optimizer: over its parameters, as `Peer` takes them; its hyperparameters may change.
        parts: in how many the swarm's model is cut, alike at all of its peers. None: as many as
            ranks under ``fully_shard``, otherwise 1.
        group: the ranks; None: all of them, or this process if none were started.
        settings: as of `p2ptrain.Peer`. `listen`, `join` and the like are those of part 0.

    Raises:
        ConfigError: for settings that cannot work, alone or together.
        StateError: for a model that cannot be averaged, or is sharded in another way.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        parts: int | None = None,
        group: dist.ProcessGroup | None = None,
        **settings: Any,  # Any: the fields of PeerConfig
    ) -> None:
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        self._ranks = Ranks(group, next(inner.parameters()).device)
        self._is_sharded = is_sharded(inner)
        usual = self._ranks.size if self._is_sharded else 1
        self._parts = usual if parts is None else whole_in("parts", parts)
        self._settings = settings
        self._check()
        self._all = [Part(inner, number, self._parts) for number in range(self._parts)]
        optimizers = optimizer if isinstance(optimizer, Sequence) else (optimizer,)
        ours = [part.number for part in self._all if self._speaker(part) == self._ranks.rank]
        self._faces = [Face(inner, optimizers, number, self._parts) for number in ours]
        self._peers = [self._peer(face) for face in self._faces]
        self._stack = ExitStack()
        self._progress = 0
        self._should_stop = self._is_inside = False

    @property
    def progress(self) -> int:
        """Samples of the whole swarm, as all ranks knew them after the last step."""
        return self._progress

    @property
    def should_stop(self) -> bool:
        """True, after the same step at all ranks, when the run has reached its end."""
        return self._should_stop

    @property
    def addresses(self) -> Sequence[Address]:
        """Where this rank listens, for each part that it speaks for."""
        return [peer.address for peer in self._peers]

    def step(
        self, *, samples: int = 1, loss: float | Tensor | None = None, clip: float | None = None
    ) -> None:
        """End a step; stands where `optimizer.step()` stood. All ranks call it.

        Args:
            samples: how many samples this rank's gradients are of.
            loss: of this rank, for the record.
            clip: norm to clip gradients to; of a model in one part only, as it is of all numbers.

        Raises:
            ConfigError: for `clip` where there are several parts.
            LocalProtocolError: outside of the with block.
            TransportError: if a rank of this group is lost.
            Everything that `Peer.step` raises.
        """
        if clip is not None and self._parts > 1:
            raise ConfigError(
                f"clip = {clip}: a norm is of the whole model, which is in {self._parts} parts "
                "here; clip each rank's gradients before the step, or leave it out"
            )
        if not self._is_inside:
            raise LocalProtocolError("step belongs inside `with peer:`, which all ranks enter")
        (total,) = self._ranks.reduced([whole_in("samples", samples)], dist.ReduceOp.SUM)
        for face, peer in zip(self._faces, self._peers, strict=True):
            face.take()
            peer.step(samples=total, loss=loss, clip=clip)
        self._give()
        self._agree()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.callback(self._ranks.close)
            self._compare()
            self._ranks.open()
            stack.push(self._give_at_end)
            for peer in self._peers:
                stack.enter_context(peer)
            self._give()
            self._agree()
            self._stack = stack.pop_all()
        self._is_inside = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_inside = False
        self._stack.__exit__(kind, error, trace)

    # --- inside -----------------------------------------------------------------------------------

    def _check(self) -> None:
        if not 1 <= self._parts <= MOST_PARTS:
            raise ConfigError(f"parts = {self._parts} must be between 1 and {MOST_PARTS}")
        if self._is_sharded and self._parts != self._ranks.size:
            raise ConfigError(
                f"parts = {self._parts}: under fully_shard each rank speaks for its own rows; "
                f"leave parts out, or start {self._parts} ranks instead of {self._ranks.size}"
            )
        name = self._settings.get("algorithm", PeerConfig().algorithm)
        algorithm = load_algorithm(name, self._settings.get("algorithm_options", {}))
        if algorithm.overlaps != "none":
            raise ConfigError(
                f"{name} with overlap needs a backward pass of its own, which a group has not; "
                "leave the overlap out, or take allreduce"
            )

    def _compare(self) -> None:
        """Refuse ranks that would not be one peer.

        Raises:
            ConfigError: the same sentence at each rank.
        """
        defaults = {field.name: getattr(PeerConfig(), field.name) for field in fields(PeerConfig)}
        ours = defaults | self._settings | {"parts": self._parts}
        stated = self._ranks.gathered({name: repr(ours[name]) for name in AGREED})
        for name in AGREED:
            values = [one[name] for one in stated]
            for rank, value in enumerate(values):
                if value != values[0]:
                    raise ConfigError(
                        f"the ranks of this group disagree: {name} is {values[0]} at rank 0 and "
                        f"{value} at rank {rank}; start all of them with one value"
                    )

    def _peer(self, face: Face) -> Peer:
        """The peer of one part: its ports are those of part 0, and as many further."""
        settings, number = dict(self._settings), face.number
        joins = settings.get("join", ())
        joins = (joins,) if isinstance(joins, str) else joins
        settings["join"] = [_further(host, number) for host in joins]
        for key in ("listen", "advertise"):
            if settings.get(key):
                settings[key] = _further(settings[key], number)
        for key in ("metrics_port", "ui_port"):
            if settings.get(key):
                settings[key] += number
        if settings.get("name") and self._parts > 1:
            settings["name"] = f"{settings['name']}.{number}"
        return Peer(face.module, face.optimizers, **settings)

    def _speaker(self, part: Part) -> int:
        """The rank that speaks for a part."""
        return part.number % self._ranks.size

    def _give(self) -> None:
        """Write what we speak for into our model, and give it to the ranks that hold it, too."""
        for face in self._faces:
            face.give()
        for part in self._all:
            tensors = part.buffers() if self._is_sharded else part.rows()
            self._ranks.broadcast(tensors, self._speaker(part))

    def _give_at_end(self, kind: object, error: BaseException | None, trace: object) -> None:
        """What came last; unless this peer ends by an error."""
        if error is None:
            self._give()

    def _agree(self) -> None:
        """All ranks go on, or none; and have one progress."""
        stop = any(peer.should_stop for peer in self._peers)
        progress = max((peer.progress for peer in self._peers), default=0)
        stopped, known = self._ranks.reduced([int(stop), progress], dist.ReduceOp.MAX)
        self._should_stop, self._progress = bool(stopped), known


def _further(address: str, number: int) -> str:
    """The address of part `number`, if this is that of part 0."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or port == "0":
        return address  # `PeerConfig` says what is wrong with it, if anything
    return f"{host}:{int(port) + number}"
