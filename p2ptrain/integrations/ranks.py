"""The ranks of one group of processes: what they say to each other, apart from training.

**A process group of our own.** Where the program names none, `Ranks` makes one of all ranks, like
the program's, and destroys it at the end. A thread of Gloo lets go of a tensor some time after the
collective is over; if the interpreter ends meanwhile, the process is aborted (SIGABRT). Destroying
a group waits for its threads, and the program can only do that to groups that nobody else holds.
For the same reason a group that the program has named is let go of at the end.

**A lost rank** breaks the collectives. What is then under way may never end, so nothing waits for
it: a broken group is left to the end of the process.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from p2ptrain.errors import ConfigError, TransportError

T = TypeVar("T")


class Ranks:
    """Collectives of all ranks of a group; of this process alone, each returns what it was given.

    Args:
        given: the ranks; None: all of them, or this process if none were started.
        device: where this rank's model is, and its numbers are told from.

    Raises:
        ConfigError: if the group cannot move what is on that device.
    """

    def __init__(self, given: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = given or (dist.group.WORLD if dist.is_initialized() else None)
        self._makes_own, self._owns, self._is_broken = given is None, False, False
        self._device = device
        self.size = dist.get_world_size(self._group) if self._group else 1
        self.rank = dist.get_rank(self._group) if self._group else 0
        self._timeout = _timeout_of(self._group, device) if self._group else None

    def open(self) -> Self:
        """Make our own group, of all ranks. They have heard of each other before."""
        if self._makes_own and self.size > 1 and not self._owns:
            with self._losing_ranks():
                self._group = dist.new_group(timeout=self._timeout)
            self._owns = True
        return self

    def close(self) -> None:
        """Let go of the group; its threads have ended, if it is our own and no rank was lost."""
        group, self._group = self._group, None
        if self._owns and not self._is_broken and dist.is_initialized():
            dist.destroy_process_group(group)

    def gathered(self, stated: T) -> list[T]:
        """What each rank has stated, in their order."""
        found = [stated] * self.size
        if self._group and self.size > 1:
            with self._losing_ranks():
                dist.all_gather_object(found, stated, group=self._group)
        return found

    def reduced(self, numbers: Sequence[int], how: Any) -> list[int]:  # Any: torch's
        """Their sums, or the most of each, over all ranks."""
        if not self._group or self.size == 1:
            return list(numbers)
        with self._losing_ranks():
            values = torch.tensor(numbers, dtype=torch.int64, device=self._device)
            dist.all_reduce(values, how, group=self._group)
            return [int(value) for value in values.tolist()]

    @torch.no_grad()
    def broadcast(self, tensors: Iterable[Tensor], source: int) -> None:
        """Overwrite them with those of rank `source`; all under way together."""
        if not self._group or self.size == 1:
            return
        under_way, first = [], dist.get_global_rank(self._group, source)
        with self._losing_ranks():
            for tensor in tensors:
                sent = tensor.contiguous()
                if sent.numel():
                    work = dist.broadcast(sent, first, group=self._group, async_op=True)
                    under_way.append((work, sent, tensor))
            for work, sent, tensor in under_way:
                if work is not None:
                    work.wait()
                if sent.data_ptr() != tensor.data_ptr():
                    tensor.copy_(sent)

    @contextmanager
    def _losing_ranks(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self._is_broken = True
            said = " ".join(str(error).split())[:120]
            raise TransportError(
                f"rank {self.rank} has lost another rank of its group ({said}); the group ends, "
                "and peers outside go on"
            ) from error


def _timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """How long its collectives may take on `device`; None, if this torch does not tell.

    Raises:
        ConfigError: if it has none there.
    """
    try:
        backend = group._get_backend(device)
    except RuntimeError as error:
        raise ConfigError(
            f"the model is on {device.type}, and the process group ({dist.get_backend(group)}) "
            "reaches no memory there; move the model first, or take another backend"
        ) from error
    return getattr(getattr(backend, "options", None), "_timeout", None)
