"""Limit what the word of others is worth: members that they name, and members that they accuse.

Any peer can claim anything about any other. What it claims costs us records, messages and dialled
addresses, so each *teller* has a share of these.

* A member that we know only from others is *unmet* until it answers a probe of ours. A teller may
  introduce `LEARNED` of them per second, and at most `SHARE` that are still unmet at a time, or
  as many as we have met ourselves. All tellers that are unmet themselves count as one. So a liar
  fills no more than its share, and made-up tellers no more than that of one. Where a peer knows
  only some of a swarm (`core/partial_view.py`), a share is a quarter of those that it chooses.
  While many are unmet, an unmet member that sends us a message is probed at once, and the own
  word of a newcomer that finds no room waits until others have answered, so that a thousand peers
  that start together soon know each other.
* A member that dies unmet is forgotten after `FORGET_S`, with all that it cost.
* A teller may wrongly accuse `ACCUSATIONS`: an accusation is paid for when it makes a member
  suspect, and given back when that member has indeed died. One that cannot pay is not believed; a
  member that is dead is found out by our own probes.

Records of a peer that we joined, and of newcomers that we dialled back, are not limited here: we
have chosen to believe the one, and have met the others.
"""

from collections import Counter
from collections.abc import Iterator

from p2ptrain.core.budgets import Budgets, Rate
from p2ptrain.ids import PeerId, Seconds

LEARNED = Rate(64.0, 1024.0)
"""Too slow: of peers that start together some do not know each other, and a peer does not answer
probes of one that it does not know."""

SHARE = 128
"""Unmet members of one teller. Too few: a large swarm that starts at once is learned slowly."""

ACCUSATIONS = Rate(0.1, 16.0)
FORGET_S: Seconds = 60.0

UNMET = PeerId("")
"""Stands for all tellers that we have not met."""


class Hearsay:
    """Who told us of whom.

    Args:
        share: unmet members of one teller; None: `SHARE`, or as many as we have met.
    """

    def __init__(self, share: int | None = None) -> None:
        self._share = share
        self._learned: Budgets[PeerId] = Budgets(LEARNED)
        self._accusations: Budgets[PeerId] = Budgets(ACCUSATIONS)
        self._teller_of: dict[PeerId, PeerId] = {}  # of the unmet
        self._told: Counter[PeerId] = Counter()  # unmet members of each teller
        self._met: dict[PeerId, None] = {}
        self._accuser_of: dict[PeerId, PeerId] = {}
        self._forget_at: dict[PeerId, Seconds] = {}  # in the order of time

    def may_introduce(self, teller: PeerId, peer: PeerId, now: Seconds) -> bool:
        """True if we take `teller`'s word that there is a `peer`; then its share pays for it."""
        teller = teller if teller in self._met else UNMET
        if self._told[teller] >= (self._share or max(SHARE, len(self._met))):
            return False
        if not self._learned.take(teller, now):
            return False
        self._teller_of[peer] = teller
        self._told[teller] += 1
        return True

    def meet(self, peer: PeerId) -> None:
        """It has answered us, or one that we believe has vouched for it."""
        self._met[peer] = None
        self._forget_at.pop(peer, None)
        self._release(peer)

    def has_met(self, peer: PeerId) -> bool:
        """True if we do not know it from hearsay only."""
        return peer in self._met

    def is_to_be_met(self, peer: PeerId) -> bool:
        """True if it is unmet, and too many are for rounds of probes to meet them soon."""
        return peer in self._teller_of and len(self._teller_of) >= SHARE // 4

    def may_accuse(self, teller: PeerId, peer: PeerId, now: Seconds) -> bool:
        """True if we take `teller`'s word that `peer`, which is alive for us, is not."""
        teller = teller if teller in self._met else UNMET
        if not self._accusations.take(teller, now):
            return False
        self._accuser_of[peer] = teller
        return True

    def died(self, peer: PeerId, now: Seconds) -> None:
        """By our own time-out, or by its own word: so an accusation was right."""
        accuser = self._accuser_of.pop(peer, None)
        if accuser is not None:
            self._accusations.give_back(accuser)
        if peer in self._teller_of:
            self._forget_at.setdefault(peer, now + FORGET_S)

    def lives(self, peer: PeerId) -> None:
        """It has refuted; an accusation is paid for."""
        self._accuser_of.pop(peer, None)
        self._forget_at.pop(peer, None)

    def forget(self, peer: PeerId) -> None:
        """There is no record of it any more."""
        self._met.pop(peer, None)
        self._accuser_of.pop(peer, None)
        self._forget_at.pop(peer, None)
        self._release(peer)

    def due(self, now: Seconds) -> Iterator[PeerId]:
        """Unmet members that died long ago."""
        while self._forget_at:
            peer, at = next(iter(self._forget_at.items()))
            if at > now:
                return
            del self._forget_at[peer]
            yield peer

    def next_deadline(self) -> Seconds | None:
        return next(iter(self._forget_at.values()), None)

    def _release(self, peer: PeerId) -> None:
        teller = self._teller_of.pop(peer, None)
        if teller is not None:
            self._told[teller] -= 1
            if not self._told[teller]:
                del self._told[teller]
