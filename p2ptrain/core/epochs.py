"""Agree on the settings that a swarm works with, while it runs.

Settings carry an *epoch*, one number that orders all settings that a swarm ever has: a count in its
upper bits, a digest of the settings in its lower ones. A peer that proposes a change counts one
further than the highest epoch that it knows. Each peer keeps the highest that it has heard of, so
concurrent proposals end in one, the same at all peers, in whatever order they arrive.

**Spreading.** A peer that learns a higher epoch tells all that it can reach (`MOST_TOLD` of them in
a large swarm). Every message says which epoch its sender works with; a peer that hears from one
that is behind sends it the settings, at most once per `resend_s`. So a lost message, a partition
and a newcomer are repaired by the next probe.

**Two steps.** *Known* settings are not yet *current*: a peer changes at a boundary of its own
trainer, when it is in no group. The purpose of each group carries the epoch, and a peer is in
groups of its current epoch only: no group mixes two settings. From the moment a higher epoch is
known, groups of the former one are refused, and waits for them end.

**Trust.** Any member may propose. A message raises the count by at most `LEAP`, so a forged epoch
leaves room for later ones. What settings say is checked where they are carried out.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from p2ptrain.core.effects import Effect, Send, SettingsKnown
from p2ptrain.core.messages import SettingsChange
from p2ptrain.errors import InvariantViolation
from p2ptrain.ids import PeerId, Seconds

DIGEST_BITS = 32
LEAP = 1 << 16
"""A message raises the count of changes by no more."""

MOST_TOLD = 64
"""Peers that one peer tells of a change at once; they tell the others."""

MOST_REMEMBERED = 4096
"""Peers of which it is remembered when they were told last."""


def epoch_of(count: int, text: str, by: PeerId) -> int:
    """The epoch of the `count`-th change, to the settings `text`, proposed by a peer."""
    digest = hashlib.blake2b(f"{by} {text}".encode(), digest_size=DIGEST_BITS // 8).digest()
    return count << DIGEST_BITS | int.from_bytes(digest)


def count_of(epoch: int) -> int:
    """How many changes there were up to this epoch; 0: the settings that the swarm began with."""
    return epoch >> DIGEST_BITS


BEGINNING = SettingsChange(0, "", PeerId("none"), "")
"""The settings that each peer was started with."""


@dataclass(slots=True)
class _Told:
    epoch: int
    again_at: Seconds


class Epochs:
    """One peer's knowledge of the settings. Effects are handed to `emit`.

    Args:
        me: this peer.
        resend_s: a peer that is behind gets them no more often.
        reachable: the other members that messages may reach.
    """

    def __init__(
        self,
        me: PeerId,
        resend_s: Seconds,
        reachable: Callable[[], Sequence[PeerId]],
        emit: Callable[[Effect], None],
    ) -> None:
        self._me, self._resend_s, self._reachable, self._emit = me, resend_s, reachable, emit
        self.current = self.known = BEGINNING
        self._told: dict[PeerId, _Told] = {}

    @property
    def is_due(self) -> bool:
        """Whether higher settings are known than those that this peer works with."""
        return self.known.epoch != self.current.epoch

    def propose(self, text: str, why: str, now: Seconds) -> SettingsChange:
        """Change the settings of the swarm to `text`, for a reason in one sentence."""
        count = count_of(self.known.epoch) + 1
        change = SettingsChange(epoch_of(count, text, self._me), text, self._me, why)
        self._learn(change, now)
        return change

    def receive(self, source: PeerId, change: SettingsChange, now: Seconds) -> None:
        """Another peer tells its settings; those that cannot be right are ignored."""
        count = count_of(change.epoch)
        is_right = change.epoch == epoch_of(count, change.text, change.by)
        if is_right and 0 < count <= count_of(self.known.epoch) + LEAP:
            if change.epoch > self.known.epoch:
                self._learn(change, now, source)
            else:
                self.heard(source, change.epoch, now)

    def heard(self, source: PeerId, epoch: int, now: Seconds) -> None:
        """A message of `source` came, which works with `epoch`."""
        if epoch >= self.known.epoch:
            return
        told = self._told.get(source)
        if told and told.epoch == self.known.epoch and now < told.again_at:
            return
        if len(self._told) >= MOST_REMEMBERED:
            self._told.clear()
        self._told[source] = _Told(self.known.epoch, now + self._resend_s)
        self._emit(Send(source, self.known))  # lost: its next message brings it again

    def adopt(self, change: SettingsChange) -> None:
        """This peer works with these settings from now on."""
        if change.epoch < self.current.epoch or change.epoch > self.known.epoch:
            raise InvariantViolation(f"{self._me} adopts {change}, {self.known} is known")
        self.current = change

    def check(self) -> None:
        """Raise InvariantViolation if this peer works with settings that it does not know."""
        if self.current.epoch > self.known.epoch:
            raise InvariantViolation(f"{self._me} works with {self.current}, knows {self.known}")

    def _learn(self, change: SettingsChange, now: Seconds, source: PeerId | None = None) -> None:
        self.known = change
        others = [peer for peer in self._reachable() if peer != source]
        step = max(1, -(-len(others) // MOST_TOLD))
        for peer in others[::step]:
            self._told[peer] = _Told(change.epoch, now + self._resend_s)
            self._emit(Send(peer, change))  # lost: its next message brings it again
        self._emit(SettingsKnown(change))
