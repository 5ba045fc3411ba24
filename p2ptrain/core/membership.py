r"""Keep one peer's view of the swarm: which members are alive, suspect, dead or have left.

**Invariants.** Only this peer's own timeout marks a member dead: a report from others makes it a
suspect at most. A living peer that can be heard refutes every suspicion. No forged record keeps a
living peer dead, or raises an incarnation beyond what can be encoded. Merging records is a join of
a semilattice (`newer`, `core/roster.py`), so order and duplication do not matter.

**Probes.** Every `probe_period_s` a peer pings the next member of a shuffled round; each ping and
ack piggybacks records (`core/roster.py`). If no ack comes in time, it asks `relays` members to ping
the target too (*indirect probes*), and pings again. These helpers report the outcome, also if there
was no answer. If the same time passes again without an ack, the member becomes *suspect*: it is not
chosen for groups, but it is not dead yet. A broken connection is evidence, too: the driver reports
it, the member is suspect and helpers are asked at once.

**Suspicion.** Each ping to a suspect says so; it refutes with a higher incarnation. A suspect that
does not is *dead* after a timeout that shrinks with the number of accusers
(`core/adaptive_timeout.py`): a peer that is alone with a suspicion may be the faulty one. Where
others have declared a member dead, the minimum applies, counted from *this peer's* first suspicion.
So records that cross a healed partition, and a liar's, meet suspects that can still answer.

::

             no ack, no helper got one; or connection broke         no refutation in time
      (join) -> ALIVE ---------------------------> SUSPECT ---------------------------------> DEAD
                  ^  \______ says goodbye ________   |                                         |
                  |                               v  |  a higher incarnation                   |
                  |                             LEFT |  ("I am alive")                         |
                  +---------------------------------+-----------------------------------------+

**Rejoining.** A peer that starts again has a higher incarnation (for real, milliseconds since 1970)
and counts as a new member: answers to its former incarnation are ignored. If its clock was set
back, it takes an incarnation above the highest that others remember. Each round probes one dead
member as well, since it may have been cut off: the probe carries its record, it refutes, and two
halves of a partitioned swarm become one again. A member that left is not probed.

**Late timers.** A deadline that passes while this process stands still proves nothing, since
answers may lie unread. It is extended, once: a peer that is always late must decide, too.

**Trust.** Any peer can claim anything about any other. A third party's record raises an incarnation
by `LEAP` at most; a peer's own record replaces one that is further away than that; a peer refutes
up to the incarnation that others would believe, and not beyond. That a member is dead or has left
makes it a suspect, unless it says so itself. How many members a peer may name and accuse is limited
(`core/hearsay.py`).

Sources: SWIM (Das, Gupta, Motivala, DSN 2002; suspicion as in its section 4.2); local health from
Lifeguard (Dadgar, Phillips, Currey, DSN 2018).
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from random import Random

from p2ptrain.core import messages as m
from p2ptrain.core.adaptive_timeout import AdaptiveTimeout, MembershipConfig
from p2ptrain.core.effects import Effect, MemberChanged, Send
from p2ptrain.core.hearsay import Hearsay
from p2ptrain.core.messages import Member, MembershipMessage, MemberState, Phase
from p2ptrain.core.partial_view import PartialView
from p2ptrain.core.roster import ACCUSERS, Roster, joined, newer
from p2ptrain.errors import InvariantViolation
from p2ptrain.ids import Address, PeerId, Seconds

LEAST_SHARE = 4
"""Of a teller, where we do not know everyone: members that it names and that have not answered."""

FAREWELLS = 64
"""A peer that leaves or refutes tells this many; gossip carries it to the rest of the swarm."""

MOST_MEMBERS = 4000
"""Records of others that are kept. Beyond it dead members make room, or newcomers are ignored. Less
than what fits into one `JoinReply`."""

MOST_WAITING = 4096
"""Newcomers whose own word waits while too many members are unmet. Too few: of more that start at
once some are known to some only after a turn of gossip, and do not begin before."""

WAITING_S: Seconds = 10.0
"""For so long. Too long: made-up newcomers are probed and forgotten, a share at a time, long after
the last of them was sent."""

MOST_INDIRECT_PROBES = 64
"""Indirect probes for others at a time."""

BRIEF = 2
"""A ping with no more records than its sender's and its target's is answered with as few."""

LONG_GONE_S: Seconds = 60.0
"""For so long reports show who has died or left."""

LEAP = 1 << 36
"""A third party's record raises an incarnation by at most this: two years of milliseconds."""

HIGHEST = 1 << 61
"""No higher incarnation is believed; it can be encoded, and so can a refutation above it."""


@dataclass(slots=True, kw_only=True)
class _Waiting:
    """For an answer to a ping, or for a suspect to refute."""

    since: Seconds
    deadline: Seconds
    is_excused: bool = False


@dataclass(slots=True, kw_only=True)
class _Probe(_Waiting):
    """A ping without an answer so far."""

    number: int
    help_at: Seconds
    """When helpers are asked; then infinity."""
    helpers: tuple[PeerId, ...] = ()
    """Helpers that got no answer either."""


@dataclass(slots=True, kw_only=True)
class _IndirectProbe(_Waiting):
    """This peer has pinged `target` for `asker`, which numbers its probe so."""

    asker: PeerId
    number: int
    target: PeerId


class Membership(Roster):
    """One peer's view of the swarm. Effects are handed to `emit`; `PeerMachine` states duties.

    Args:
        me: its first record.
        config: deadlines and sizes.
        rng: of its choices.
        emit: takes effects.
        view: which of the others it knows; None: everyone.
    """

    def __init__(
        self,
        me: Member,
        config: MembershipConfig,
        rng: Random,
        emit: Callable[[Effect], None],
        view: PartialView | None = None,
    ) -> None:
        super().__init__(me, config.probe_bytes, view)
        self._config = config
        self._rng = rng
        self._emit = emit
        self.timeout = AdaptiveTimeout(config)
        self.born = me.incarnation
        """The incarnation in this process's tickets, above any former one that others remember."""
        self._round: list[PeerId] = []  # who is probed next, last first
        self._probe_at: Seconds = math.inf
        self._number = 0  # of pings
        self._probes: dict[PeerId, _Probe] = {}
        self._due: list[tuple[Seconds, int, PeerId]] = []
        """A heap of when each probe is due, with its number; also of probes that have ended. Of a
        thousand peers that meet, each has hundreds of probes and asks for the first all the time.
        """
        self._indirect_probes: dict[int, _IndirectProbe] = {}  # by the number of our ping
        self._suspicions: dict[PeerId, _Waiting] = {}
        self._may_announce_at: Seconds = -math.inf
        self._hearsay = self._no_hearsay()
        self._waiting: dict[PeerId, tuple[Member, Seconds]] = {}  # newcomers' own words, and when
        self._unheard: dict[PeerId, None] = {}  # members that have not spoken to us themselves
        self._gone_at: dict[PeerId, Seconds] = {}  # since when the dead, and those that left, are

    def _no_hearsay(self) -> Hearsay:
        """Of a view of few members a teller may fill a small part only."""
        return Hearsay(max(LEAST_SHARE, self.view.size // 4) if self.view else None)

    def outlive(self, incarnation: int) -> None:
        """The peer that we join remembers us under `incarnation`; take a higher one if needed."""
        if incarnation > self.born:
            self.born = max(incarnation, self.me.incarnation) + 1
            self.describe(incarnation=self.born)

    def announce(self, to: Sequence[PeerId] | None = None) -> None:
        """Send our record to everyone now, or only to these."""
        ours = m.MembershipUpdates((self.me,))
        for peer in self.reachable() if to is None else to:
            self._emit(Send(peer, ours))

    def move(self, address: Address) -> None:
        """This peer is called at `address` from now on: tell everyone.

        As a refutation, under a higher incarnation: peers that have suspected it because it did not
        answer at the old address believe it at once, and what they said of it then is outdated.
        Lost: probes carry our record to each member within a round.
        """
        self.describe(address=address, incarnation=self.me.incarnation + 1)
        self.announce()

    def leave(self) -> None:
        """Say goodbye; peers that receive it do not choose this peer any more."""
        self.describe(state=MemberState.LEFT)
        self.announce(self._some())
        self._probe_at = math.inf
        self._probes.clear()
        self._indirect_probes.clear()
        self._suspicions.clear()
        self._hearsay = self._no_hearsay()
        self._waiting.clear()
        self._unheard.clear()

    def has_met(self, peer: PeerId) -> bool:
        """True if it has answered us, or one that we chose to believe has vouched for it."""
        return self._hearsay.has_met(peer)

    def long_gone(self, now: Seconds) -> tuple[PeerId, ...]:
        """Members that died or left more than `LONG_GONE_S` ago."""
        return tuple(peer for peer, at in self._gone_at.items() if now - at > LONG_GONE_S)

    def others_have_ended(self, now: Seconds) -> bool:
        """Whether others have trained, and none of them does or is likely to come back to it."""
        lost = {*self.dead()} - {*self.long_gone(now)}
        may_return = any(self.records[peer].samples for peer in lost)
        have_trained = self.samples > self.me.samples
        return have_trained and not self.others_train() and not may_return

    # --- what happens -----------------------------------------------------------------------------

    def learn(
        self, members: Sequence[Member], now: Seconds, why: str, sender: PeerId | None = None
    ) -> None:
        """Merge records from others; `sender` has sent its own record to everyone itself."""
        for heard in members:
            peer = heard.peer
            if peer == self.me.peer:
                self._maybe_refute(heard, now, sender)
                continue
            known = self.records.get(peer)
            if peer == sender:
                self._unheard.pop(peer, None)
            if heard is known:
                continue
            if known is not None:
                record = self._merged(known, heard, now, sender)
            elif self._may_learn(heard, now, sender):
                record = heard
            else:
                continue
            is_known = peer == sender and heard.state is not MemberState.LEFT
            self._store(record, now, why, is_known)
            if known is None and sender is not None and peer != sender:
                self._unheard[peer] = None
            if known is None and self.view and not self._hearsay.has_met(peer):
                self._meet(peer, now)  # or else it is not chosen, and may not know us
        if self._probe_at == math.inf and self.records and self.me.state is MemberState.ALIVE:
            self._probe_at = now + self._rng.uniform(0, self._config.probe_period_s)

    def spoke(self, peer: PeerId) -> None:
        """It has sent us a message, of whatever kind."""
        if self.view and peer in self.records:
            self.view.spoke(peer)

    def receive(self, source: PeerId, message: MembershipMessage, now: Seconds) -> None:
        self.spoke(source)
        is_new = source not in self.records or source in self._unheard
        if not isinstance(message, m.IndirectPing):
            self.learn(message.members, now, f"heard from {source}", source)
        if is_new and source in self.records and isinstance(message, m.MembershipUpdates):
            self._introduce_ourselves(source)
        if self._hearsay.is_to_be_met(source) and not isinstance(message, m.Ack | m.IndirectAck):
            self._meet(source, now)
        match message:
            case m.MembershipUpdates():
                pass  # first, since these are most messages of a large swarm
            case m.Ping(number=number, members=members):
                told = self._briefly(source) if len(members) <= BRIEF else self.piggyback(source)
                self._emit(Send(source, m.Ack(number, told)))
            case m.Ack(number=number, members=members):
                known = self.records.get(source)
                own = (one.incarnation for one in members if one.peer == source)
                if known is None or all(known.incarnation <= incarnation for incarnation in own):
                    self._hear_answer(source, number, now)  # not one of its former life
            case m.IndirectPing(number=number, target=target):
                self._probe_for(source, number, target, now)
            case m.IndirectAck(number=number, target=target, answered=answered):
                probe = self._probes.get(target)
                if probe and probe.number == number and answered:
                    del self._probes[target]
                elif probe and probe.number == number:
                    probe.helpers = joined(probe.helpers, (source,))

    def unreachable(self, peer: PeerId, why: str, now: Seconds) -> None:
        """A connection to `peer` broke: suspect it at once, probe it directly and indirectly."""
        member = self.records.get(peer)
        if member is None or member.state > MemberState.SUSPECT:
            return
        for number, indirect in tuple(self._indirect_probes.items()):
            if indirect.target == peer:
                self._report(number, answered=False)
        was_alive = member.state is MemberState.ALIVE
        self._accuse(peer, (), now, why)
        if was_alive:
            self._ask_others(peer, self._probe(peer, now))

    def handle_timer(self, now: Seconds) -> None:
        self._excuse_what_fell_due_unseen(now)
        while self._first_due() <= now:
            *_, peer = heapq.heappop(self._due)
            probe = self._probes[peer]
            is_here = self.records[peer].state <= MemberState.SUSPECT  # the dead: once per round
            if probe.deadline <= now:
                del self._probes[peer]
                if is_here:
                    self._handle_silence(peer, probe, now)
            elif is_here:
                self._ask_others(peer, probe)
                self._probe(peer, now)
            else:
                self._expect_answer(peer, probe)
        for number, indirect in tuple(self._indirect_probes.items()):
            if indirect.deadline <= now:
                self._report(number, answered=False)
        for peer, suspicion in sorted(self._suspicions.items()):
            if suspicion.deadline <= now:
                why = f"{peer} did not refute its suspicion within {now - suspicion.since:.3g} s"
                dead = replace(self.records[peer], state=MemberState.DEAD, accusers=())
                self._store(dead, now, why)
        for peer in self._hearsay.due(now):
            if self.records[peer].state >= MemberState.DEAD:
                self._drop(peer)
        self._admit_waiting(now)
        if self._probe_at <= now:
            self._probe_at = now + self._config.probe_period_s * (1 + self.timeout.doubt)
            if target := self._next_target():
                self._probe(target, now)

    def next_deadline(self) -> Seconds | None:
        first = min(self._probe_at, self._hearsay.next_deadline() or math.inf, self._first_due())
        for waiting in chain(self._indirect_probes.values(), self._suspicions.values()):
            first = min(first, waiting.deadline)
        return None if first == math.inf else first

    def check(self) -> None:
        if self.me.peer in self.records:
            raise InvariantViolation(f"{self.me.peer} counts itself among the others")
        suspects = [p for p, other in self.records.items() if other.state is MemberState.SUSPECT]
        if self.me.state is MemberState.ALIVE and sorted(suspects) != sorted(self._suspicions):
            raise InvariantViolation(f"suspects {suspects}, but doubts {list(self._suspicions)}")

    # --- what to believe --------------------------------------------------------------------------

    def _may_learn(self, heard: Member, now: Seconds, sender: PeerId | None) -> bool:
        """True if a member that we did not know gets a record now; its own word may wait for it."""
        if heard.incarnation > HIGHEST:
            return False
        if sender is None:
            is_taken = self._make_room()
            if is_taken:
                self._hearsay.meet(heard.peer)
            return is_taken
        if heard.state >= MemberState.DEAD:
            if heard.peer == sender:
                self._waiting.pop(sender, None)
            return False  # we may have forgotten it, and others have not
        if self.view and heard.peer != sender and not self.view.wants(heard.peer):
            return False  # one of many that we need not know
        if self._has_place(heard.peer, sender, now):
            return True
        if heard.peer == sender and len(self._waiting) < MOST_WAITING:
            self._waiting[sender] = heard, now
        return False

    def _has_place(self, peer: PeerId, teller: PeerId, now: Seconds) -> bool:
        """True if there is a record for `peer`, at the cost of `teller`'s share."""
        if not self._hearsay.may_introduce(teller, peer, now):
            return False
        if self._make_room():
            return True
        self._hearsay.forget(peer)
        return False

    def _introduce_ourselves(self, newcomer: PeerId) -> None:
        """It was welcomed with a record of us that may be older than our last announcement.

        Of peers that start together one would wait for us, for as long as gossip takes. A member
        that has not spoken itself gets nothing: it may be made up, at the address of another host.
        One that pings us has our record from the ack, and one that answers us from our ping.
        """
        if self.me.phase is not Phase.ARRIVING:
            self.announce((newcomer,))

    def _admit_waiting(self, now: Seconds) -> None:
        """Believe newcomers' own words, as far as fewer are unmet by now, and meet them."""
        while self._waiting:
            peer, (heard, since) = next(iter(self._waiting.items()))
            is_worth_it = peer not in self.records and now - since <= WAITING_S
            if is_worth_it and not self._has_place(peer, peer, now):
                return
            del self._waiting[peer]
            if is_worth_it:
                self._store(heard, now, f"heard from {peer}", is_known=True)
                self._meet(peer, now)

    def _merged(self, known: Member, heard: Member, now: Seconds, sender: PeerId | None) -> Member:
        """What we know of a peer after hearing `heard` from `sender`, perhaps of itself."""
        is_own_word = heard.peer == sender
        if heard.incarnation > known.incarnation:
            most = HIGHEST if is_own_word else min(HIGHEST, known.incarnation + LEAP)
            if heard.incarnation > most:
                return known
        elif is_own_word and heard.incarnation + LEAP < known.incarnation:
            return heard  # the known incarnation was forged: it is too far from the real one
        if not is_own_word and heard.state is not MemberState.ALIVE:
            heard = self._doubted(known, heard, now, sender)
        found = newer(known, heard)
        # It is called where it says itself, or has said last; others are believed of a peer that is
        # gone. Its older word counts, too: under a forged record's higher incarnation it hears of
        # that record there, and refutes it.
        is_gone = known.state >= MemberState.DEAD and heard.incarnation > known.incarnation
        address = heard.address if is_own_word or is_gone else known.address
        return found if found.address == address else replace(found, address=address)

    def _doubted(self, known: Member, heard: Member, now: Seconds, sender: PeerId | None) -> Member:
        """What others say of a member that is not well for them, as far as we believe it."""
        if heard.state >= MemberState.DEAD and heard.incarnation >= known.incarnation:
            heard = self._doubted_death(known, heard, now)
        accuses = known.state is MemberState.ALIVE and heard.incarnation >= known.incarnation
        if accuses and sender and not self._hearsay.may_accuse(sender, heard.peer, now):
            return replace(heard, state=MemberState.ALIVE, accusers=())
        return heard

    def _doubted_death(self, known: Member, heard: Member, now: Seconds) -> Member:
        """Others say that `heard` is dead or has left; believe it only after our own timeout."""
        is_new = heard.incarnation > known.incarnation
        if known.state >= MemberState.DEAD and not is_new:
            return heard
        suspicion = self._suspicions.get(heard.peer)
        if is_new or suspicion is None:
            return replace(heard, state=MemberState.SUSPECT, accusers=())
        least_s = self.timeout.suspicion_s(ACCUSERS, ACCUSERS)
        suspicion.deadline = min(suspicion.deadline, suspicion.since + least_s)
        if suspicion.deadline <= now:
            return heard
        return replace(heard, state=MemberState.SUSPECT, accusers=known.accusers)

    def _maybe_refute(self, heard: Member, now: Seconds, sender: PeerId | None) -> None:
        """A record calls this peer suspect or dead: refute it with a higher incarnation."""
        mine = self.me
        if mine.state is MemberState.LEFT or heard.incarnation < mine.incarnation:
            return
        if heard.incarnation > min(mine.incarnation + LEAP, HIGHEST - 1):
            return  # no peer that has heard us directly believes it
        is_ours = (heard.incarnation, heard.state) == (mine.incarnation, MemberState.ALIVE)
        if is_ours and heard.beat <= mine.beat:
            return
        if heard.incarnation > mine.incarnation:
            self.born = heard.incarnation + 1
        self.describe(incarnation=heard.incarnation + 1)
        if heard.state is not MemberState.ALIVE:
            self.timeout.blame_ourselves()
        if now >= self._may_announce_at:
            self._may_announce_at = now + self._config.probe_period_s
            self.announce(self._some())
        elif sender in self.records:
            self.announce((sender,))

    def _make_room(self) -> bool:
        """True if there is room for one more record; forgets the one gone for longest, if needed.

        Or else, where we do not know everyone, one that we have not chosen.
        """
        if len(self.records) < (self.view.most if self.view else MOST_MEMBERS):
            return True
        if peer := next(iter(self._gone_at), None):
            self._drop(peer)
        elif self.view:
            peer = next((one for one in self.view.strangers() if self._is_alive(one)), None)
            if peer:
                self._need_not_know(peer)
        return peer is not None

    def _is_alive(self, peer: PeerId) -> bool:
        return self.records[peer].state is MemberState.ALIVE

    def _need_not_know(self, peer: PeerId) -> None:
        """Forget one that is here."""
        self._drop(peer)
        why = f"{peer} is one of many that {self.me.peer} need not know"
        self._emit(MemberChanged(peer, MemberState.LEFT, why))

    def _drop(self, peer: PeerId) -> None:
        """Forget a member, and all that it costs."""
        self.forget(peer)
        self._hearsay.forget(peer)
        self._gone_at.pop(peer, None)
        self._probes.pop(peer, None)
        self._suspicions.pop(peer, None)
        self._unheard.pop(peer, None)

    def _store(self, member: Member, now: Seconds, why: str, is_known: bool = False) -> None:
        peer, known = member.peer, self.records.get(member.peer)
        if member is known:
            return
        self.keep(member)
        self._place_in_view(peer)
        is_same = known and (known.incarnation, known.state) == (member.incarnation, member.state)
        if known and is_same and (known.phase, known.accusers) == (member.phase, member.accusers):
            return
        self.spread(peer, is_known=is_known)
        if is_same:
            if suspicion := self._suspicions.get(peer):  # more accusers than before
                due = suspicion.since + self._suspicion_s(member)
                suspicion.deadline = min(suspicion.deadline, due)
            return
        if member.state >= MemberState.DEAD:
            self._gone_at.setdefault(peer, now)
            self._hearsay.died(peer, now)
        else:
            self._gone_at.pop(peer, None)
        if member.state is MemberState.ALIVE:
            self._hearsay.lives(peer)
        if member.state is MemberState.SUSPECT:
            self._suspicions[peer] = _Waiting(since=now, deadline=now + self._suspicion_s(member))
        else:
            self._suspicions.pop(peer, None)
            self._probes.pop(peer, None)  # its word is younger than our question
        was_here = known is not None and known.state <= MemberState.SUSPECT
        if member.state <= MemberState.SUSPECT and not was_here:
            self._round.insert(self._rng.randrange(len(self._round) + 1), peer)
        is_later = known and known.incarnation < member.incarnation
        if known and is_later and was_here and member.beat < known.beat:
            # A restart: a refutation does not reset the beat.
            self._emit(MemberChanged(peer, MemberState.DEAD, f"{peer} has started again"))
        elif known and (known.state, known.address) == (member.state, member.address):
            return
        if known and known.address != member.address:
            why = f"{why}; it is at {member.address} now, and was at {known.address}"
        self._emit(MemberChanged(peer, member.state, why))

    def _place_in_view(self, peer: PeerId) -> None:
        """Its record has changed, or it has answered us."""
        if self.view and (member := self.records.get(peer)):
            is_here = member.state <= MemberState.SUSPECT
            self.view.keep(peer, is_here=is_here, is_met=self._hearsay.has_met(peer))

    def _accuse(self, peer: PeerId, helpers: tuple[PeerId, ...], now: Seconds, why: str) -> None:
        """Neither we nor `helpers` could reach `peer`."""
        member = self.records[peer]
        accusers = joined(member.accusers, (self.me.peer, *helpers))
        self._store(replace(member, state=MemberState.SUSPECT, accusers=accusers), now, why)

    def _suspicion_s(self, suspect: Member) -> Seconds:
        """A suspect without accusers was declared dead elsewhere, so enough accused it."""
        needed = min(ACCUSERS, len(self.alive()) + 1)  # who could accuse it; we could, too
        return self.timeout.suspicion_s(len(suspect.accusers) or needed, needed)

    def _excuse_what_fell_due_unseen(self, now: Seconds) -> None:
        """Extend deadlines that passed while this process stood still: answers may lie unread."""
        due = self.next_deadline()
        if due is None or now - due <= self._config.ack_timeout_s / 2:
            return
        self.timeout.blame_ourselves()
        for waiting in chain(self._probes.values(), self._suspicions.values()):
            if waiting.deadline <= now and not waiting.is_excused:
                waiting.is_excused = True
                waiting.deadline = now + self.timeout.answer_s
        self._due = [(min(p.help_at, p.deadline), p.number, t) for t, p in self._probes.items()]
        heapq.heapify(self._due)

    # --- probes -----------------------------------------------------------------------------------

    def _probe(self, target: PeerId, now: Seconds, *, briefly: bool = False) -> _Probe:
        probe = self._probes.get(target)
        if probe is None:
            answer_s = self.timeout.answer_s
            self._number += 1
            probe = _Probe(
                number=self._number, since=now, help_at=now + answer_s, deadline=now + 2 * answer_s
            )
            self._probes[target] = probe
            heapq.heappush(self._due, (probe.help_at, probe.number, target))
        # Lost: looks like silence, so others are asked.
        told = self._briefly(target) if briefly else self.piggyback(target)
        self._emit(Send(target, m.Ping(probe.number, told)))
        return probe

    def _briefly(self, target: PeerId) -> tuple[Member, ...]:
        """Our own record and the target's, for probes that are no turns of gossip.

        A thousand peers that start at once meet in a million of them.
        """
        member = self.records.get(target)
        return (self.me, member) if member else (self.me,)

    def _first_due(self) -> Seconds:
        """When the first probe is due; infinity if there is none."""
        while self._due:
            due_at, number, target = self._due[0]
            probe = self._probes.get(target)
            if probe and probe.number == number and due_at == min(probe.help_at, probe.deadline):
                return due_at
            heapq.heappop(self._due)
        return math.inf

    def _expect_answer(self, target: PeerId, probe: _Probe) -> None:
        """Helpers are asked by now, if there are any: it is due at its deadline."""
        probe.help_at = math.inf
        heapq.heappush(self._due, (probe.deadline, probe.number, target))

    def _ask_others(self, target: PeerId, probe: _Probe) -> None:
        self._expect_answer(target, probe)
        alive = self.alive()
        some = self._rng.sample(alive, min(self._config.relays + 1, len(alive)))
        relays = [peer for peer in some if peer != target][: self._config.relays]
        for relay in relays:
            self._emit(Send(relay, m.IndirectPing(probe.number, target)))

    def _meet(self, source: PeerId, now: Seconds) -> None:
        """It has spoken to us: ask it at once whether it is there, so that it counts as met."""
        member = self.records.get(source)
        is_here = member is not None and member.state <= MemberState.SUSPECT
        if is_here and source not in self._probes and self.me.state is MemberState.ALIVE:
            self._probe(source, now, briefly=True)

    def _hear_answer(self, source: PeerId, number: int, now: Seconds) -> None:
        probe = self._probes.get(source)
        if probe and probe.number == number:
            del self._probes[source]
            self._hearsay.meet(source)
            self._place_in_view(source)
            self.timeout.answered(now - probe.since, in_time=now <= probe.help_at)
            self._admit_waiting(now)
        indirect = self._indirect_probes.get(number)
        if indirect and indirect.target == source:
            self._report(number, answered=True)

    def _handle_silence(self, peer: PeerId, probe: _Probe, now: Seconds) -> None:
        """Neither the direct nor an indirect probe was answered."""
        if not probe.helpers:
            self.timeout.blame_ourselves()
        by_whom = f" us or {', '.join(probe.helpers)}" if probe.helpers else ""
        why = f"{peer} did not answer{by_whom} within {now - probe.since:.3g} s"
        self._accuse(peer, probe.helpers, now, why)
        self._probe(peer, now)  # it can refute; repeated until the suspicion is settled

    def _next_target(self) -> PeerId | None:
        """The next member of a shuffled round: everyone is probed once before anyone twice."""
        for _ in range(2):
            while self._round:
                peer = self._round.pop()
                member = self.records.get(peer)
                if member and member.state is not MemberState.LEFT:
                    return peer
            dead = self.dead()
            self._round = [*self._to_probe(), *self._rng.sample(dead, min(1, len(dead)))]
            self._rng.shuffle(self._round)
        return None

    def _to_probe(self) -> Sequence[PeerId]:
        """All that are here; where we do not know everyone, those that we have chosen."""
        if self.view is None:
            return self.reachable()
        for peer in self.view.begin_round():
            if self._is_alive(peer):
                self._need_not_know(peer)
        return [peer for peer in self.reachable() if self.view.has_chosen(peer)]

    def _probe_for(self, asker: PeerId, number: int, target: PeerId, now: Seconds) -> None:
        """Ping `target` for `asker`."""
        if target not in self.records or asker not in self.records or target == asker:
            return
        if len(self._indirect_probes) >= MOST_INDIRECT_PROBES:
            return
        self._number += 1
        due = now + 0.8 * self.timeout.answer_s  # so that the asker hears of it in time
        self._indirect_probes[self._number] = _IndirectProbe(
            since=now, deadline=due, asker=asker, number=number, target=target
        )
        self._emit(Send(target, m.Ping(self._number, self._briefly(target))))

    def _report(self, number: int, *, answered: bool) -> None:
        indirect = self._indirect_probes.pop(number)
        members = self.piggyback(indirect.asker, indirect.target)
        message = m.IndirectAck(indirect.number, indirect.target, answered, members)
        self._emit(Send(indirect.asker, message))

    def _some(self) -> Sequence[PeerId]:
        """All reachable members, or a random `FAREWELLS` of them."""
        here = self.reachable()
        return here if len(here) <= FAREWELLS else self._rng.sample(here, FAREWELLS)
