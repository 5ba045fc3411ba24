"""Charge peers for the time that they hold our slot while nothing comes of it.

A peer with one slot can be kept from averaging by one that asks for it, is granted, and says
nothing more, or enters a group and moves nothing. Leases and time-outs end each such hold; this
bounds their share: time that was lost with a peer is charged to it, and a group that is done gives
it back. One that has used up `CREDIT` is not granted, and is asked last, until it has earned some:
so a peer that forms no group holds a fifth of our time at most.

An honest peer among faults pays too, for groups that others broke; its next success gives it back.
Only claimed groups count: scheduled ones are everyone's, and no member can ask for more of them.
"""

import math
from collections.abc import Iterable

from p2ptrain.core.budgets import Budgets, Rate
from p2ptrain.ids import PeerId, Seconds

CREDIT = Rate(0.25, 20.0)
"""Seconds of our slot: earned per second, and saved up at most."""

UNLIMITED = Rate(1.0, math.inf)

THANKS_S: Seconds = 2.0
"""What a group that is done gives each member beside its time."""


MOST_PER_GROUP_S: Seconds = 5.0
"""Charged for a group that broke, however long it lasted: in one that lasts, bytes have moved."""


class SlotCredit:
    """Of each other peer, in seconds of our slot."""

    def __init__(self, rate: Rate = CREDIT) -> None:
        self._credit: Budgets[PeerId] = Budgets(rate)

    def wasted(self, peers: Iterable[PeerId], lasted_s: Seconds, now: Seconds) -> None:
        """Our slot was held for these, and nothing came of it."""
        for peer in peers:
            self._credit.charge(peer, now, lasted_s)

    def broke(self, peers: Iterable[PeerId], lasted_s: Seconds, now: Seconds) -> None:
        """A group with these has come to nothing."""
        self.wasted(peers, min(lasted_s, MOST_PER_GROUP_S), now)

    def used(self, peers: Iterable[PeerId], lasted_s: Seconds) -> None:
        """A group with these is done."""
        for peer in peers:
            self._credit.give_back(peer, lasted_s + THANKS_S)

    def is_spent(self, peer: PeerId, now: Seconds) -> bool:
        """True if this peer has held us for longer than it may."""
        return self._credit.owes(peer, now)
