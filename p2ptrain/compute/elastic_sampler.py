"""`ElasticSampler`: samples for any torch ``DataLoader``, dealt among the peers that are here.

It turns what `core/dealing.py` deals, places in an epoch's order, into indices of a dataset. The
order of an epoch follows from the seed alone, so all peers have the same one.
"""

from collections.abc import Iterator, Mapping, Sized

import torch
from torch import Tensor
from torch.utils.data import Sampler

from p2ptrain.compute.dealt import DealsData
from p2ptrain.compute.seeds import generator
from p2ptrain.core.data_ledger import DataPlan, EpochCount, usual_part
from p2ptrain.core.dealing import Dealt


class ElasticSampler(Sampler[int]):
    """Indices of the samples that this peer is to train; each sample of an epoch goes to one peer.

    ::

        sampler = p2ptrain.data.ElasticSampler(dataset, peer)
        loader = DataLoader(dataset, batch_size=32, sampler=sampler)
        with peer:
            while not peer.should_stop:
                for inputs, targets in loader:      # what is left of an epoch of the whole swarm
                    ...
                    peer.step(samples=len(targets))

    A pass over it ends when the present epoch has nothing left for this peer; how long it is
    depends on how fast the others are, so it has no length. Make it before the ``with``, so that a
    newcomer has heard what was trained before it takes its first sample. `Peer.step` counts what is
    trained in the order in which it was handed out: leave ``in_order=True`` of the loader. What a
    loader with ``drop_last=True`` drops goes to others, or comes again.

    Args:
        data: a dataset with a length, or its number of samples; the same at all peers.
        peer: the `Peer` that trains on it.
        shuffle: an order of each epoch of its own; without it, all have that of the dataset.
        seed: of order and dealing; the same at all peers.
        part_size: samples that are dealt together, the same at all peers; None: about a thousandth
            of the data, 16 or more.

    Raises:
        ConfigError: if there is nothing to deal, or this peer deals other data already.
    """

    def __init__(
        self,
        data: Sized | int,
        peer: DealsData,
        *,
        shuffle: bool = True,
        seed: int = 0,
        part_size: int | None = None,
    ) -> None:
        samples = data if isinstance(data, int) else len(data)
        size = usual_part(samples) if part_size is None else part_size
        self.plan = DataPlan(samples, size, seed & (1 << 64) - 1)
        self._dealing = peer.deal(self.plan)
        self._shuffle = shuffle
        self._orders: dict[int, Tensor] = {}
        self.epoch = 0
        """That of the sample that was handed out last."""

    def __iter__(self) -> Iterator[int]:
        """The indices of this peer in the present epoch."""
        self._dealing.give_back()
        only: int | None = None
        while (dealt := self._dealing.take(only)) is not None:
            only = dealt.epoch
            yield from self._indices(dealt)

    def endless(self) -> Iterator[int]:
        """The indices of this peer, epoch after epoch."""
        self._dealing.give_back()
        while (dealt := self._dealing.take()) is not None:
            yield from self._indices(dealt)

    def counts(self, most: int = 8) -> tuple[EpochCount, ...]:
        """How many samples were trained never, once and more often, of the last epochs begun."""
        return self._dealing.counts(most)

    def state_dict(self) -> dict[str, object]:
        """Who has trained what, in what JSON can hold; call it between two steps."""
        return self._dealing.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on from there: what was trained before is not dealt again.

        Raises:
            StateError: if it is of other data, or no such state.
        """
        self._dealing.load_state_dict(state)

    def _indices(self, dealt: Dealt) -> list[int]:
        self.epoch = dealt.epoch
        if not self._shuffle:
            return list(range(dealt.start, dealt.stop))
        if dealt.epoch not in self._orders:
            self._orders = {one: o for one, o in self._orders.items() if one >= dealt.epoch - 2}
            rng = generator("elastic order", self.plan.seed, dealt.epoch)
            self._orders[dealt.epoch] = torch.randperm(self.plan.samples, generator=rng)
        indices: list[int] = self._orders[dealt.epoch][dealt.start : dealt.stop].tolist()
        return indices
