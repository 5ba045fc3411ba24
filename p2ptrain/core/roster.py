"""Hold the record of every member, and the lists of names that follow from it.

Invariants: records change in `Roster.keep` and `Roster.describe`, and nowhere else, so no list is
out of date. `newer` is commutative, associative and idempotent, so peers that have heard the same
records agree. Whether to believe a record is decided in `core/membership.py`.
"""

import bisect
from dataclasses import replace
from typing import Any

from p2ptrain.core.messages import Member, MemberState, Phase
from p2ptrain.ids import PeerId

ACCUSERS = 4
"""More accusers than this do not shorten a suspicion further."""


def newer(known: Member, heard: Member) -> Member:
    """The join of two records of one peer (commutative, associative, idempotent)."""
    if known.incarnation != heard.incarnation:
        return max(known, heard, key=lambda member: member.incarnation)
    is_old = heard.beat < known.beat and heard.state <= known.state and heard.phase <= known.phase
    if is_old and (heard.accusers == known.accusers or heard.state < known.state):
        return known  # most records that circulate are old
    facts = max(known, heard, key=lambda member: (member.beat, member.steps, member.samples))
    state, phase = max(known.state, heard.state), max(known.phase, heard.phase)
    accusers: tuple[PeerId, ...] = ()
    if state is MemberState.SUSPECT:
        accusers = joined(known.accusers, heard.accusers)
    if (facts.state, facts.phase, facts.accusers) == (state, phase, accusers):
        return facts
    return replace(facts, state=state, phase=phase, accusers=accusers)


def joined(some: tuple[PeerId, ...], others: tuple[PeerId, ...]) -> tuple[PeerId, ...]:
    """The union of two lists of accusers, at most `ACCUSERS` names."""
    return some if some == others else tuple(sorted({*some, *others})[:ACCUSERS])


class Names:
    """A sorted set of names; one change among a thousand does not sort the thousand again."""

    def __init__(self) -> None:
        self._names: list[PeerId] = []
        self._sorted: tuple[PeerId, ...] | None = ()

    @property
    def sorted(self) -> tuple[PeerId, ...]:
        """The same object until something changes."""
        if self._sorted is None:
            self._sorted = tuple(self._names)
        return self._sorted

    def keep(self, name: PeerId, belongs: bool) -> None:
        """Insert `name`, or remove it."""
        at = bisect.bisect_left(self._names, name)
        if (self._names[at : at + 1] == [name]) is belongs:
            return
        if belongs:
            self._names.insert(at, name)
        else:
            del self._names[at]
        self._sorted = None


class Roster:
    """One peer's record of itself and of everyone else, and who is eligible for which groups."""

    def __init__(self, me: Member) -> None:
        self.me = me
        self.records: dict[PeerId, Member] = {}
        """Of the others."""
        self._names = Names()  # of the others
        self._alive = Names()
        self._participants = Names()
        self._trainees = Names()
        self._others_samples = 0  # including dead ones
        self._sort(me)

    # --- reading ----------------------------------------------------------------------------------

    @property
    def names(self) -> tuple[PeerId, ...]:
        """Of everyone else we have heard of, sorted."""
        return self._names.sorted

    @property
    def others(self) -> tuple[Member, ...]:
        """Everyone else we have heard of, sorted by name."""
        return tuple(self.records[peer] for peer in self.names)

    @property
    def samples(self) -> int:
        """Samples of the whole swarm, as far as we know."""
        return self.me.samples + self._others_samples

    @property
    def anyone_has_begun(self) -> bool:
        """True if another one trains, or did."""
        return any(member.phase is not Phase.ARRIVING for member in self.records.values())

    def member(self, peer: PeerId) -> Member | None:
        return self.me if peer == self.me.peer else self.records.get(peer)

    def choosable(self) -> tuple[PeerId, ...]:
        """Members that may be asked into a group: alive as far as known, without this peer."""
        return self._alive.sorted

    def participants(self) -> tuple[PeerId, ...]:
        """Members of scheduled groups: all that are here and not done, including this peer.

        A suspect still counts: a synchronous group waits until the suspicion is settled.
        """
        return self._participants.sorted

    def trainees(self) -> tuple[PeerId, ...]:
        """Members of wait-avoiding groups: this peer, and all that train as far as known.

        A suspect is not among them: these groups do not wait until the suspicion is settled.
        """
        return self._trainees.sorted

    def reachable(self) -> tuple[PeerId, ...]:
        """Members that are alive or suspect, sorted."""
        return tuple(p for p in self.names if self.records[p].state <= MemberState.SUSPECT)

    def dead(self) -> tuple[PeerId, ...]:
        """Dead members, sorted; without those that left."""
        return tuple(p for p in self.names if self.records[p].state is MemberState.DEAD)

    # --- changes ----------------------------------------------------------------------------------

    def describe(self, **facts: Any) -> None:  # Any: fields of `Member`
        """Update this peer's own record; the next probes carry it to others."""
        self.me = replace(self.me, beat=self.me.beat + 1, **facts)
        self._sort(self.me)

    def keep(self, member: Member) -> None:
        """Replace the record of another peer."""
        known = self.records.get(member.peer)
        self.records[member.peer] = member
        self._others_samples += member.samples - (known.samples if known else 0)
        if known is None or (known.state, known.phase) != (member.state, member.phase):
            self._sort(member)

    def forget(self, peer: PeerId) -> None:
        """Remove a record; its samples still count."""
        del self.records[peer]
        for names in (self._names, self._alive, self._participants, self._trainees):
            names.keep(peer, belongs=False)

    def _sort(self, member: Member) -> None:
        is_me = member.peer == self.me.peer
        is_alive = member.state is MemberState.ALIVE
        here = member.state <= MemberState.SUSPECT
        self._participants.keep(member.peer, here and member.phase is not Phase.DONE)
        self._trainees.keep(member.peer, is_me or (is_alive and member.phase is Phase.TRAINING))
        self._names.keep(member.peer, not is_me)
        self._alive.keep(member.peer, not is_me and is_alive)
