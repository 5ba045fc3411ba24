"""Hold the record of every other member, and the lists of names that follow from it.

Invariants: records change in `Roster.keep` and nowhere else, so no list is out of date. `newer` is
commutative, associative and idempotent, so peers that have heard the same records agree. Whether to
believe a record is decided in `core/membership.py`.
"""

import bisect
from dataclasses import replace

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
        self.changes = 0
        """Number of insertions and removals."""
        self._belong: dict[PeerId, None] = {}
        self._names: list[PeerId] = []
        self._sorted: tuple[PeerId, ...] | None = ()

    def __len__(self) -> int:
        return len(self._names)

    @property
    def sorted(self) -> tuple[PeerId, ...]:
        """The same object until something changes."""
        if self._sorted is None:
            self._sorted = tuple(self._names)
        return self._sorted

    def keep(self, name: PeerId, belongs: bool) -> None:
        """Insert `name`, or remove it."""
        if (name in self._belong) is belongs:
            return
        if belongs:
            self._belong[name] = None
            bisect.insort(self._names, name)
        else:
            del self._belong[name]
            del self._names[bisect.bisect_left(self._names, name)]
        self._sorted = None
        self.changes += 1


class Roster:
    """Records of everyone but `me`, and the names that are eligible for each kind of group."""

    def __init__(self, me: Member) -> None:
        self._me = me.peer
        self.others: dict[PeerId, Member] = {}
        self.names = Names()
        """Of the others."""
        self.alive = Names()
        """Of those that may be asked into a group."""
        self.participants = Names()
        """Members of scheduled groups."""
        self.trainees = Names()
        """Members of wait-avoiding groups."""
        self.samples = 0
        """Of the others, including dead ones."""
        self.begun = 0
        """How many of them train, or did."""
        self.sort(me)

    def keep(self, member: Member) -> None:
        """Replace the record of another peer."""
        known = self.others.get(member.peer)
        self.others[member.peer] = member
        self.samples += member.samples - (known.samples if known else 0)
        self.begun += _has_begun(member) - (known is not None and _has_begun(known))
        if known is None or (known.state, known.phase) != (member.state, member.phase):
            self.sort(member)

    def forget(self, peer: PeerId) -> None:
        """Remove a record; its samples still count."""
        member = self.others.pop(peer)
        self.begun -= _has_begun(member)
        for names in (self.names, self.alive, self.participants, self.trainees):
            names.keep(peer, belongs=False)

    def sort(self, member: Member) -> None:
        """Update every list for one member, or for this peer."""
        is_me = member.peer == self._me
        here = member.state <= MemberState.SUSPECT
        self.participants.keep(member.peer, here and member.phase is not Phase.DONE)
        trains = member.state is MemberState.ALIVE and member.phase is Phase.TRAINING
        self.trainees.keep(member.peer, is_me or trains)
        self.names.keep(member.peer, not is_me)
        self.alive.keep(member.peer, not is_me and member.state is MemberState.ALIVE)

    def reachable(self) -> tuple[PeerId, ...]:
        """Members that are alive or suspect, sorted."""
        others = self.others
        here = MemberState.SUSPECT
        return tuple(peer for peer in self.names.sorted if others[peer].state <= here)

    def dead(self) -> tuple[PeerId, ...]:
        """Dead members, sorted; without those that left."""
        others, dead = self.others, MemberState.DEAD
        return tuple(peer for peer in self.names.sorted if others[peer].state is dead)


def _has_begun(member: Member) -> bool:
    return member.phase is not Phase.ARRIVING
