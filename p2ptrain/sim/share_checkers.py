"""Check push-sum in a world: weights are neither lost nor made, and means are right.

* *weights*: those of all peers, of all their lives, with those that are on their way or went with
  a peer that died, are as many as there were lives;
* *means*: what arrives is what left, and taking it in leaves the sum of w z as it was.

Together: whatever order shares arrive in, z is the mean of what went into it, weight by weight.

Legend of shapes: ``M`` numbers of a model.
"""

from collections.abc import Callable

import numpy as np

from p2ptrain.compute.replica import Vector
from p2ptrain.ids import PeerId, Ticket
from p2ptrain.runtime.accounts import Attempt
from p2ptrain.runtime.driver import Driver
from p2ptrain.runtime.pushes import Answer, Delivery, Push
from p2ptrain.runtime.shares import SHARE, Shares
from p2ptrain.sim.replica import VectorReplica

RIGHT = 1e-5
"""Of the size of a model: what float32 makes of a mean."""

Note = Callable[[str, str], None]
"""Takes a rule, and what broke it."""


class WatchedShares(Shares):
    """`Shares` whose pushes and merges are checked."""

    def __init__(self, watched: Shares, name: PeerId, books: "ShareBooks") -> None:
        self.__dict__.update(vars(watched))
        self._name, self._books = name, books

    async def _deliver(
        self, to: PeerId, sent: float, clock: int, model_M: Vector, ticket: Ticket
    ) -> Delivery:
        self._books.left[ticket] = model_M.copy()
        delivery = await super()._deliver(to, sent, clock, model_M, ticket)
        if delivery.is_taken and ticket not in self._books.arrived:
            self._books.note("the weights", f"{self._name} counts {ticket} as taken in by {to}")
        return delivery

    async def take(
        self, source: PeerId, push: Push, vector_S: Vector, attempt: Attempt, *, again: bool
    ) -> Answer:
        """As of `Shares`, checked."""
        books, ticket = self._books, attempt.ticket
        if not again and np.isfinite(vector_S).all():
            if ticket in books.arrived:
                books.note("once", f"{self._name} takes {ticket} in twice")
            if not is_right(vector_S, books.left[ticket]):
                books.note("the mean", f"{ticket} left {source} with another model")
            books.arrived[ticket] = None
        return await super().take(source, push, vector_S, attempt, again=again)

    def _merge(self, theirs_M: Vector, weight: float) -> float:
        before_M, theirs, own = self._model(), theirs_M.astype(np.float64), self.weight
        distance = super()._merge(theirs_M, weight)
        due_M = ((own * before_M + weight * theirs) / (own + weight)).astype(np.float32)
        if not is_right(self._model(), due_M):
            self._books.note("the mean", f"{self._name} took a share in, and is off")
        return distance

    def _model(self) -> Vector:
        replica = self._host.replica
        assert isinstance(replica, VectorReplica)
        return replica.live + replica.pending


class ShareBooks:
    """All weights of one world."""

    def __init__(self, note: Note) -> None:
        self.note = note
        self.left: dict[Ticket, Vector] = {}
        """Models as they were pushed."""
        self.arrived: dict[Ticket, None] = {}
        self._all: list[Shares] = []

    def watch(self, driver: Driver) -> None:
        """A life of a peer begins, or it works with another algorithm."""
        driver.shares = WatchedShares(driver.shares, driver.name, self)
        driver.pushes.takers[SHARE] = driver.shares
        self._all.append(driver.shares)

    def look(self) -> None:
        """Add all weights up."""
        total = sum(shares.weight for shares in self._all)
        for shares in self._all:
            ways = shares.on_the_way.items()
            total += sum(weight for ticket, weight in ways if ticket not in self.arrived)
        if abs(total - len(self._all)) > RIGHT:
            self.note("the weights", f"of {len(self._all)} lives are {total:g}")


def is_right(one_M: Vector, other_M: Vector) -> bool:
    off = np.abs(one_M.astype(np.float64) - other_M).max(initial=0)
    return bool(off <= RIGHT * max(1.0, float(np.abs(other_M).max(initial=0))))
