"""The ports of data that are dealt: what a sampler and a training loop need of a peer."""

from collections.abc import Mapping
from typing import Protocol

from p2ptrain.core.data_ledger import DataPlan, EpochCount
from p2ptrain.core.dealing import Dealt


class Dealing(Protocol):
    """What deals; `DataDealing` is it."""

    @property
    def taken(self) -> int:
        """Samples that were taken and are not trained yet."""
        ...

    def take(self, only: int | None = None) -> Dealt | None:
        """The next samples to train; None if epoch `only` has none left for this peer."""
        ...

    def give_back(self) -> None:
        """What was taken and is not trained will not be."""
        ...

    def counts(self, most: int = 8) -> tuple[EpochCount, ...]:
        """Of the last epochs."""
        ...

    def state_dict(self) -> dict[str, object]:
        """In what JSON can hold."""
        ...

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on from there."""
        ...


class DealsData(Protocol):
    """A peer, as far as its data are concerned."""

    def deal(self, plan: DataPlan) -> Dealing:
        """Begin to deal these data; the same object for an equal plan."""
        ...
