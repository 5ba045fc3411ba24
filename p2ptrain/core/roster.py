"""Who is known, and what follows from it: the lists that are asked for all the time.

Rule 1: a record changes in `Roster.keep` and nowhere else, so that no list lags behind.
Rule 2: this file decides nothing. Which of two records is the news says `newer`; whether to believe
one at all is the business of `core/membership.py`.
"""

import bisect
from dataclasses import replace

from p2ptrain.core.messages import Member, MemberState, Phase
from p2ptrain.ids import PeerId

ACCUSERS = 4
"""So many who could not reach a peer are as good as all."""


def newer(known: Member, heard: Member) -> Member:
    """What is true of one peer after hearing `heard` (commutative, associative, idempotent)."""
    if known.incarnation != heard.incarnation:
        return max(known, heard, key=lambda member: member.incarnation)
    is_old = heard.beat < known.beat and heard.state <= known.state and heard.phase <= known.phase
    if is_old and (heard.accusers == known.accusers or heard.state < known.state):
        return known  # as many are that go round
    facts = max(known, heard, key=lambda member: (member.beat, member.steps, member.samples))
    state, phase = max(known.state, heard.state), max(known.phase, heard.phase)
    accusers: tuple[PeerId, ...] = ()
    if state is MemberState.SUSPECT:
        accusers = joined(known.accusers, heard.accusers)
    if (facts.state, facts.phase, facts.accusers) == (state, phase, accusers):
        return facts
    return replace(facts, state=state, phase=phase, accusers=accusers)


def joined(some: tuple[PeerId, ...], others: tuple[PeerId, ...]) -> tuple[PeerId, ...]:
    """Accusers of both, as many as count."""
    return some if some == others else tuple(sorted({*some, *others})[:ACCUSERS])


class Names:
    """Some names, sorted. Changing one among a thousand does not sort the thousand again."""

    def __init__(self) -> None:
        self.changes = 0
        """How often one came or went."""
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
        """`name` is one of them, or is not."""
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
    """Records of everyone but `me`, and the names of those who may be chosen for what."""

    def __init__(self, me: Member) -> None:
        self._me = me.peer
        self.others: dict[PeerId, Member] = {}
        self.names = Names()
        """Of the others."""
        self.alive = Names()
        """Of those of them that may be chosen."""
        self.participants = Names()
        """Who takes part in scheduled groups."""
        self.trainees = Names()
        """Who takes part in wait-avoiding groups."""
        self.samples = 0
        """Of the others, also of those that are not here any more."""
        self.begun = 0
        """How many of them train, or did."""
        self.sort(me)

    def keep(self, member: Member) -> None:
        """This is what is known of another peer from now on."""
        known = self.others.get(member.peer)
        self.others[member.peer] = member
        self.samples += member.samples - (known.samples if known else 0)
        self.begun += _has_begun(member) - (known is not None and _has_begun(known))
        if known is None or (known.state, known.phase) != (member.state, member.phase):
            self.sort(member)

    def forget(self, peer: PeerId) -> None:
        """As if it had never been here, but for its samples."""
        member = self.others.pop(peer)
        self.begun -= _has_begun(member)
        for names in (self.names, self.alive, self.participants, self.trainees):
            names.keep(peer, belongs=False)

    def sort(self, member: Member) -> None:
        """Put a name where it belongs; ours, too."""
        is_me = member.peer == self._me
        here = member.state <= MemberState.SUSPECT
        self.participants.keep(member.peer, here and member.phase is not Phase.DONE)
        trains = member.state is MemberState.ALIVE and member.phase is Phase.TRAINING
        self.trainees.keep(member.peer, is_me or trains)
        self.names.keep(member.peer, not is_me)
        self.alive.keep(member.peer, not is_me and member.state is MemberState.ALIVE)

    def reachable(self) -> tuple[PeerId, ...]:
        """Whom it makes sense to talk to, sorted."""
        others = self.others
        here = MemberState.SUSPECT
        return tuple(peer for peer in self.names.sorted if others[peer].state <= here)

    def gone(self) -> tuple[PeerId, ...]:
        """Who is, sorted; those who said goodbye are not among them."""
        others, gone = self.others, MemberState.GONE
        return tuple(peer for peer in self.names.sorted if others[peer].state is gone)


def _has_begun(member: Member) -> bool:
    return member.phase is not Phase.ARRIVING
