"""Hold the record of every member, the lists of names that follow, and which records to tell next.

Invariants: records change in `Roster.keep` and `Roster.describe`, and nowhere else, so no list is
out of date. `newer` is commutative, associative and idempotent, so peers that have heard the same
records agree. Whether to believe a record is decided in `core/membership.py`.

**Gossip.** A message to another member carries the sender's own record, the receiver's, then the
pending updates, least sent first, then all other records in turn, within a byte budget. An update
is sent `RETRANSMITS` times for each doubling of the swarm, which reaches everyone with high
probability. So the cost of a message does not grow with the swarm, and a record that was missed
(during a partition, say) arrives with a later turn. Source: SWIM, section 4.1.
"""

import bisect
import math
from collections import defaultdict
from dataclasses import replace
from itertools import chain, islice
from typing import Any

from p2ptrain.core.messages import Member, MemberState, Phase
from p2ptrain.core.partial_view import PartialView
from p2ptrain.ids import PeerId

ACCUSERS = 4
"""More accusers than this do not shorten a suspicion further."""

RETRANSMITS = 3
"""An update is sent so often, times the logarithm of the swarm's size."""

RECORD_BYTES = 65
"""Of a record on the wire, beside its texts, at most (`net/wire.py`; a test compares)."""

RESUME_BYTES = 7
"""Of each version that a record states, at most."""


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
    """A set of names; one change among a thousand does not sort the thousand again."""

    def __init__(self) -> None:
        self._names: list[PeerId] = []
        self._sorted: tuple[PeerId, ...] | None = ()

    def __call__(self) -> tuple[PeerId, ...]:
        """All of them, sorted; the same object until something changes."""
        found = self._sorted  # another thread may read while the protocol's changes it
        if found is None:
            found = self._sorted = tuple(self._names)
        return found

    def keep(self, name: PeerId, belongs: bool) -> None:
        at = bisect.bisect_left(self._names, name)
        if (at < len(self._names) and self._names[at] == name) is belongs:
            return
        if belongs:
            self._names.insert(at, name)
        else:
            del self._names[at]
        self._sorted = None


class Roster:
    """One peer's record of itself and of the others; it tells them `budget` bytes at a time.

    Args:
        me: its first record.
        budget: bytes of records in a message, at most.
        view: which of the others it knows; None: everyone.
    """

    def __init__(self, me: Member, budget: int, view: PartialView | None = None) -> None:
        self.me = me
        self.view = view
        self.records: dict[PeerId, Member] = {}
        """Of the others."""
        self.names = Names()
        """Of everyone else we have heard of."""
        self.alive = Names()
        """Others that are alive as far as known."""
        self.choosable = Names()
        """Those of them that may be asked into a group: they have the model, or are done. One that
        still loads it would refuse, and it was met by none, so it would be asked first."""
        self.participants = Names()
        """Members of scheduled groups: all that are here and not done, including this peer. A
        suspect still counts: a synchronous group waits until the suspicion is settled."""
        self.trainees = Names()
        """Members of wait-avoiding groups: this peer, and all that train as far as known; no
        suspect, since these groups do not wait until the suspicion is settled."""
        self.reachable = Names()
        """Others that are alive or suspect."""
        self.donors = Names()
        """Of these, those that have the model: they train, are about to, or are done."""
        self.holders = Names()
        """Of these, those that hold a checkpoint to start again from."""
        self.changes = 0
        """Of what a peer waits for in its view: who is here, in which phase, with what."""
        self._others_samples = 0  # including dead ones
        self._budget = budget
        self.updates: dict[PeerId, int] = {}
        """How often each record is still to be sent; read only."""
        self._updates_by: defaultdict[int, dict[PeerId, None]] = defaultdict(dict)  # in order
        self._turn = 0  # whose record fills the next message
        self._sort(me)

    @property
    def others(self) -> tuple[Member, ...]:
        """Everyone else we have heard of, sorted by name."""
        return tuple(self.records[peer] for peer in self.names())

    @property
    def knows_all(self) -> bool:
        """Whether it has a record of everyone; or else of a random sample."""
        return self.view is None

    @property
    def samples(self) -> int:
        """Samples of the whole swarm, as far as we know; of a sample of it, an estimate."""
        return self.me.samples + self.of_all_others(self._others_samples, len(self.records))

    def of_all_others(self, of_known: int, known: int) -> int:
        """What a number is that is summed over all others, given its sum over so many of them."""
        if self.view is None or not known:
            return of_known
        return round(of_known * max(known, self.view.peers - 1) / known)

    def trains_already(self) -> bool:
        """Whether another one that is here has trained in this life, and not only served."""
        here = (self.records[peer] for peer in self.reachable())
        return any(member.steps and not member.only_serves for member in here)

    def others_train(self) -> bool:
        """Whether another one is here that trains, or may yet begin to."""
        others = (self.records[peer] for peer in self.participants() if peer != self.me.peer)
        return any(not member.only_serves for member in others)

    def others_are_done(self) -> bool:
        """Whether all others have made their last step, as far as we know; also if they left."""
        return all(member.phase is Phase.DONE for member in self.records.values())

    def member(self, peer: PeerId) -> Member | None:
        return self.me if peer == self.me.peer else self.records.get(peer)

    def dead(self) -> tuple[PeerId, ...]:
        """Dead members, sorted; without those that left."""
        return tuple(p for p in self.names() if self.records[p].state is MemberState.DEAD)

    def describe(self, **facts: Any) -> None:  # Any: fields of `Member`
        """Update this peer's own record; the next probes carry it to others."""
        self.me = replace(self.me, beat=self.me.beat + 1, **facts)
        self._sort(self.me)

    def keep(self, member: Member) -> None:
        """Replace the record of another peer."""
        known = self.records.get(member.peer)
        self.records[member.peer] = member
        self._others_samples += member.samples - (known.samples if known else 0)
        if (
            known is None
            or known.state is not member.state
            or known.phase is not member.phase
            or known.incarnation != member.incarnation
            or known.resumes != member.resumes
            or (member.samples and not known.samples)
            or (member.steps and not known.steps)
        ):
            self._sort(member)

    def forget(self, peer: PeerId) -> None:
        """Remove a record; its samples still count, unless they are of a sample of all peers."""
        gone = self.records.pop(peer)
        if self.view:
            self._others_samples -= gone.samples
            self.view.forget(peer)
        self._schedule(peer, 0)
        self.changes += 1
        for names in (self.names, self.alive, self.choosable, self.participants):
            names.keep(peer, belongs=False)
        for names in (self.trainees, self.reachable, self.donors, self.holders):
            names.keep(peer, belongs=False)

    def _sort(self, member: Member) -> None:
        is_me = member.peer == self.me.peer
        is_alive = member.state is MemberState.ALIVE
        here = member.state <= MemberState.SUSPECT
        self.participants.keep(member.peer, here and member.phase is not Phase.DONE)
        self.trainees.keep(member.peer, is_me or (is_alive and member.phase is Phase.TRAINING))
        self.names.keep(member.peer, not is_me)
        self.alive.keep(member.peer, not is_me and is_alive)
        self.reachable.keep(member.peer, not is_me and here)
        has_model = member.phase is not Phase.ARRIVING
        self.donors.keep(member.peer, not is_me and here and has_model)
        self.holders.keep(member.peer, not is_me and here and bool(member.resumes))
        self.choosable.keep(member.peer, not is_me and is_alive and has_model)
        self.changes += 1

    # --- gossip -----------------------------------------------------------------------------------

    def spread(self, peer: PeerId, *, is_known: bool) -> None:
        """Schedule an update of `peer`; `is_known` if it has sent its record to all itself."""
        rounds = 1 if is_known else math.ceil(math.log2(len(self.records) + 2))
        self._schedule(peer, RETRANSMITS * rounds)

    def piggyback(self, *about: PeerId) -> tuple[Member, ...]:
        """Our record, those of `about`, pending updates, then the others in turn.

        At least one record beside those of `about` is included, however long names are.
        """
        known, names = self.records, self.names()
        chosen = {peer: known[peer] for peer in about if peer in known}
        left = self._budget - size_of(self.me) - sum(map(size_of, chosen.values()))
        least = len(chosen) + 1
        often_first = (self._updates_by[often] for often in sorted(self._updates_by, reverse=True))
        updates = islice(chain.from_iterable(often_first), max(0, left // RECORD_BYTES + 1))
        for peer in updates:
            if peer in chosen:
                continue
            left -= size_of(known[peer])
            if left < 0 and len(chosen) >= least:
                break
            chosen[peer] = known[peer]
        for _ in names:
            peer = names[self._turn % len(names)]
            if peer not in chosen:
                left -= size_of(known[peer])
                if left < 0 and len(chosen) >= least:
                    break
                chosen[peer] = known[peer]
            self._turn += 1
        for peer in chosen:
            if peer in self.updates:
                self._schedule(peer, self.updates[peer] - 1)
        return (self.me, *chosen.values())

    def _schedule(self, peer: PeerId, often: int) -> None:
        """Set how often the record of `peer` is still to be sent."""
        if before := self.updates.pop(peer, 0):
            del self._updates_by[before][peer]
            if not self._updates_by[before]:
                del self._updates_by[before]
        if often > 0:
            self.updates[peer] = often
            self._updates_by[often][peer] = None


def size_of(member: Member) -> int:
    """Bytes of a record on the wire, at most."""
    size = RECORD_BYTES + _bytes(member.peer) + _bytes(member.address)
    for accuser in member.accusers:
        size += 2 + _bytes(accuser)
    return size + RESUME_BYTES * len(member.resumes_before)


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else 4 * len(text)
