r"""Keep one peer's view of the swarm: which members are alive, suspect, dead or have left.

**Invariants.** Only this peer's own timeout marks a member dead: a report from others makes it a
suspect at most. A living peer that can be heard refutes every suspicion. No forged record keeps a
living peer dead, or raises an incarnation beyond what can be encoded. Merging records is a join of
a semilattice (`newer`, `core/roster.py`), so order and duplication do not matter.

**Probes.** Every `probe_period_s` a peer pings the next member of a shuffled round. If no ack comes
in time, it asks `relays` members to ping the target too (*indirect probes*), and pings again. These
helpers report the outcome, also if there was no answer. If the same time passes again without an
ack, the member becomes *suspect*: it is not chosen for groups, but it is not dead yet. A broken
connection is evidence, too: the driver reports it, the member is suspect and helpers are asked at
once.

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

**Dissemination.** Every ping and ack piggybacks records within `probe_bytes` (`core/gossip.py`), so
the cost per peer does not grow with the swarm.

**Rejoining.** A peer that starts again has a higher incarnation (for real, milliseconds since 1970)
and counts as a new member: answers to its former incarnation are ignored. If its clock was set
back, it takes an incarnation above the highest that others remember. Each round probes one dead
member as well, since it may have been cut off: the probe carries its record, it refutes, and two
halves of a partitioned swarm become one again. A member that left is not probed.

**Late timers.** A deadline that passes while this process stands still proves nothing, since
answers may lie unread. It is extended, once: a peer that is always late must decide, too.

**Trust.** Any peer can claim anything about any other. A third party's record raises an incarnation
by `LEAP` at most; a peer's own record replaces one that is further away than that; a peer refutes
up to the incarnation that others would believe, and not beyond.

Sources: SWIM (Das, Gupta, Motivala, DSN 2002; suspicion as in its section 4.2); local health from
Lifeguard (Dadgar, Phillips, Currey, DSN 2018).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from p2ptrain.core.adaptive_timeout import AdaptiveTimeout
from p2ptrain.core.effects import Effect, MemberChanged, Send
from p2ptrain.core.gossip import Gossip
from p2ptrain.core.messages import (
    Ack,
    IndirectAck,
    IndirectPing,
    Member,
    MembershipMessage,
    MembershipUpdates,
    MemberState,
    Phase,
    Ping,
)
from p2ptrain.core.roster import ACCUSERS, Roster, joined, newer
from p2ptrain.errors import ConfigError, InvariantViolation
from p2ptrain.ids import PeerId, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipConfig:
    """Deadlines of failure detection."""

    probe_period_s: Seconds = 0.25
    """Between two probes by one peer. Too short: bytes and wake-ups; too long: late suspicion."""

    ack_timeout_s: Seconds = 0.5
    """After this time without an ack indirect probes begin; after twice this time the target is
    suspect. The minimum: it adapts where answers take longer. Too short: a busy machine is
    suspected (and refutes); too long: a vanished peer is still chosen."""

    ack_timeout_most_s: Seconds = 2.0
    """The maximum of the adapted timeout. Too short: peers on slow links are suspected again and
    again; too long: a swarm of stragglers notices no death."""

    suspicion_s: Seconds = 1.5
    """Time to refute for a suspect with several accusers. Too short: a paused peer must rejoin
    groups; too long: a synchronous group waits for the dead."""

    suspicion_most_s: Seconds = 5.0
    """The same with a single accuser. Too short: one peer with a bad connection breaks groups; too
    long: a small part of a partitioned swarm waits for the large one."""

    relays: int = 3
    """Helpers per unanswered probe. Too few: one broken path makes suspects; too many: needless
    messages."""

    probe_bytes: int = 1024
    """The byte budget for records in one ping or ack. Too small: updates spread slowly; too large:
    bandwidth."""

    def __post_init__(self) -> None:
        names = ("probe_period_s", "ack_timeout_s", "ack_timeout_most_s", "suspicion_s")
        for name in (*names, "suspicion_most_s"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigError(f"membership {name} = {value} must be above 0")
        if self.relays < 0:
            raise ConfigError(f"membership relays = {self.relays} must be 0 or more")
        if self.probe_bytes < LEAST_PROBE_BYTES:
            raise ConfigError(
                f"membership probe_bytes = {self.probe_bytes} must be {LEAST_PROBE_BYTES} or more: "
                "the sender's record, the receiver's, and one to spread"
            )
        self._check_nesting()

    def _check_nesting(self) -> None:
        for least, most in (
            ("ack_timeout_s", "ack_timeout_most_s"),
            ("suspicion_s", "suspicion_most_s"),
        ):
            low, high = getattr(self, least), getattr(self, most)
            if low > high:
                raise ConfigError(
                    f"membership {least} = {low} must be at most {most} = {high}: "
                    f"raise {most} or lower {least}"
                )
        if self.ack_timeout_s >= self.suspicion_s:
            raise ConfigError(
                f"membership ack_timeout_s = {self.ack_timeout_s} must be below "
                f"suspicion_s = {self.suspicion_s}, or a suspect is dead before it can answer"
            )


FAREWELLS = 64
"""A peer that leaves or refutes tells this many; gossip carries it to the rest of the swarm."""

LEAST_PROBE_BYTES = 256

MOST_MEMBERS = 4000
"""Records of others that are kept. Beyond it dead members make room, or newcomers are ignored. Less
than what fits into one `JoinReply`."""

MOST_INDIRECT_PROBES = 64
"""Indirect probes for others at a time."""

LEAP = 1 << 36
"""A third party's record raises an incarnation by at most this: two years of milliseconds."""

HIGHEST = 1 << 61
"""No higher incarnation is believed; it can be encoded, and so can a refutation above it."""


def _began_anew(known: Member, heard: Member) -> bool:
    """True after a restart; a refutation does not reset the beat."""
    return heard.incarnation > known.incarnation and heard.beat < known.beat


@dataclass(slots=True)
class _Probe:
    """A ping without an answer so far."""

    number: int
    asked_at: Seconds
    help_at: Seconds
    """When helpers are asked; then infinity."""
    deadline: Seconds
    helpers: tuple[PeerId, ...] = ()
    """Helpers that got no answer either."""
    is_excused: bool = False


@dataclass(frozen=True, slots=True)
class _IndirectProbe:
    """This peer has pinged `target` for `asker`."""

    asker: PeerId
    number: int
    target: PeerId
    deadline: Seconds


@dataclass(slots=True)
class _Suspicion:
    since: Seconds
    deadline: Seconds
    is_excused: bool = False


class Membership:
    """One peer's view of the swarm. Effects are handed to `emit`; `PeerMachine` states duties."""

    def __init__(
        self, me: Member, config: MembershipConfig, rng: Random, emit: Callable[[Effect], None]
    ) -> None:
        self._config = config
        self._rng = rng
        self._emit = emit
        self._me = me
        self._roster = Roster(me)
        self._others = self._roster.others
        self.gossip = Gossip(self._roster, config.probe_bytes)
        self.timeout = AdaptiveTimeout(
            config.ack_timeout_s,
            config.ack_timeout_most_s,
            config.suspicion_s,
            config.suspicion_most_s,
        )
        self._round: list[PeerId] = []  # who is probed next, last first
        self._probe_at: Seconds | None = None
        self.born = me.incarnation
        """The incarnation in this process's tickets, above any former one that others remember."""
        self._number = 0  # of pings
        self._probes: dict[PeerId, _Probe] = {}
        self._indirect_probes: dict[int, _IndirectProbe] = {}  # by the number of our ping
        self._suspicions: dict[PeerId, _Suspicion] = {}
        self._may_announce_at: Seconds = -math.inf

    # --- reading ----------------------------------------------------------------------------------

    @property
    def me(self) -> Member:
        return self._me

    @property
    def others(self) -> tuple[Member, ...]:
        """Everyone else we have heard of, sorted by name."""
        return tuple(self._others[peer] for peer in self._roster.names.sorted)

    @property
    def samples(self) -> int:
        """Samples of the whole swarm, as far as we know."""
        return self._me.samples + self._roster.samples

    @property
    def anyone_has_begun(self) -> bool:
        """True if another one trains, or did."""
        return self._roster.begun > 0

    def member(self, peer: PeerId) -> Member | None:
        return self._me if peer == self._me.peer else self._others.get(peer)

    def choosable(self) -> tuple[PeerId, ...]:
        """Members that may be asked into a group: alive as far as known, without this peer."""
        return self._roster.alive.sorted

    def participants(self) -> tuple[PeerId, ...]:
        """Members of scheduled groups: all that are here and not done, including this peer.

        A suspect still counts: a synchronous group waits until the suspicion is settled.
        """
        return self._roster.participants.sorted

    def trainees(self) -> tuple[PeerId, ...]:
        """Members of wait-avoiding groups: this peer, and all that train as far as known.

        A suspect is not among them: these groups do not wait until the suspicion is settled.
        """
        return self._roster.trainees.sorted

    @property
    def changes(self) -> tuple[int, int]:
        """How often `participants` has changed, and how often `trainees`."""
        return self._roster.participants.changes, self._roster.trainees.changes

    # --- this peer's own record -------------------------------------------------------------------

    def describe(
        self,
        *,
        phase: Phase | None = None,
        steps: int | None = None,
        samples: int | None = None,
        link_mbit: int | None = None,
    ) -> None:
        """Update this peer's own record; the next probes carry it to others."""
        me = self._me
        self._me = replace(
            me,
            phase=me.phase if phase is None else phase,
            steps=me.steps if steps is None else steps,
            samples=me.samples if samples is None else samples,
            link_mbit=me.link_mbit if link_mbit is None else link_mbit,
            beat=me.beat + 1,
        )
        self._roster.sort(self._me)

    def outlive(self, incarnation: int) -> None:
        """The peer that we join remembers us under `incarnation`; take a higher one if needed."""
        if incarnation > self.born:
            self.born = max(incarnation, self._me.incarnation) + 1
            self._me = replace(self._me, incarnation=self.born, beat=self._me.beat + 1)

    def announce(self) -> None:
        """Send our record to everyone now (joined, training, done)."""
        self._say_to(self._roster.reachable())

    def leave(self) -> None:
        """Say goodbye; peers that receive it do not choose this peer any more."""
        self._me = replace(self._me, state=MemberState.LEFT, beat=self._me.beat + 1)
        self._roster.sort(self._me)
        self._say_to(self._some())
        self._probe_at = None
        self._probes.clear()
        self._indirect_probes.clear()
        self._suspicions.clear()

    # --- what happens -----------------------------------------------------------------------------

    def learn(
        self, members: Sequence[Member], now: Seconds, why: str, sender: PeerId | None = None
    ) -> None:
        """Merge records from others; `sender` has sent its own record to everyone itself."""
        for heard in members:
            peer = heard.peer
            if peer == self._me.peer:
                self._maybe_refute(heard, now, sender)
                continue
            known = self._others.get(peer)
            if heard is known:
                continue
            if known is not None:
                record = self._merged(known, heard, now, is_own_word=peer == sender)
            elif heard.incarnation <= HIGHEST and self._make_room():
                record = heard
            else:
                continue
            is_known = peer == sender and heard.state is not MemberState.LEFT
            self._store(record, now, why, is_known)
        if self._probe_at is None and self._others and self._me.state is MemberState.ALIVE:
            self._probe_at = now + self._rng.uniform(0, self._config.probe_period_s)

    def receive(self, source: PeerId, message: MembershipMessage, now: Seconds) -> None:
        match message:
            case Ping(number=number, members=members):
                self.learn(members, now, f"heard from {source}", source)
                self._emit(Send(source, Ack(number, self.gossip.records(self._me, source))))
            case Ack(number=number, members=members):
                self.learn(members, now, f"heard from {source}", source)
                if not self._is_of_former_life(source, members):
                    self._hear_answer(source, number, now)
            case IndirectPing(number=number, target=target):
                self._probe_for(source, number, target, now)
            case IndirectAck(members=members):
                self.learn(members, now, f"heard from {source}", source)
                self._hear_helper(source, message)
            case MembershipUpdates(members=members):
                self.learn(members, now, f"heard from {source}", source)

    def unreachable(self, peer: PeerId, why: str, now: Seconds) -> None:
        """A connection to `peer` broke: suspect it at once, probe it directly and indirectly."""
        member = self._others.get(peer)
        if member is None or member.state > MemberState.SUSPECT:
            return
        for number, indirect in tuple(self._indirect_probes.items()):
            if indirect.target == peer:
                self._report(self._indirect_probes.pop(number), answered=False)
        was_alive = member.state is MemberState.ALIVE
        self._accuse(peer, (), now, why)
        if was_alive:
            self._ask_others(peer, self._probe(peer, now), now)

    def handle_timer(self, now: Seconds) -> None:
        self._excuse_what_fell_due_unseen(now)
        for peer, probe in sorted(self._probes.items()):
            if probe.deadline <= now:
                del self._probes[peer]
                self._handle_silence(peer, probe, now)
            elif probe.help_at <= now:
                self._ask_again(peer, probe, now)
        for number, indirect in tuple(self._indirect_probes.items()):
            if indirect.deadline <= now:
                self._report(self._indirect_probes.pop(number), answered=False)
        for peer, suspicion in sorted(self._suspicions.items()):
            if suspicion.deadline <= now:
                why = f"{peer} did not refute its suspicion within {now - suspicion.since:.3g} s"
                dead = replace(self._others[peer], state=MemberState.DEAD, accusers=())
                self._store(dead, now, why)
        if self._probe_at is not None and self._probe_at <= now:
            self._probe_at = now + self._config.probe_period_s * (1 + self.timeout.doubt)
            target = self._next_target()
            if target is not None:
                self._probe(target, now)

    def next_deadline(self) -> Seconds | None:
        first = math.inf if self._probe_at is None else self._probe_at
        for probe in self._probes.values():
            first = min(first, probe.help_at, probe.deadline)
        for indirect in self._indirect_probes.values():
            first = min(first, indirect.deadline)
        for suspicion in self._suspicions.values():
            first = min(first, suspicion.deadline)
        return None if first == math.inf else first

    def check(self) -> None:
        if self._me.peer in self._others:
            raise InvariantViolation(f"{self._me.peer} counts itself among the others")
        suspects = [p for p, m in self._others.items() if m.state is MemberState.SUSPECT]
        if self._me.state is MemberState.ALIVE and sorted(suspects) != sorted(self._suspicions):
            raise InvariantViolation(f"suspects {suspects}, but doubts {list(self._suspicions)}")

    # --- what to believe --------------------------------------------------------------------------

    def _merged(self, known: Member, heard: Member, now: Seconds, *, is_own_word: bool) -> Member:
        """What we know of a peer after hearing `heard`, from itself or from others."""
        if heard.incarnation > known.incarnation:
            most = HIGHEST if is_own_word else min(HIGHEST, known.incarnation + LEAP)
            if heard.incarnation > most:
                return known
        elif is_own_word and heard.incarnation + LEAP < known.incarnation:
            return heard  # the known incarnation was forged: it is too far from the real one
        if heard.state is MemberState.DEAD and heard.incarnation >= known.incarnation:
            heard = self._doubted_death(known, heard, now)
        return newer(known, heard)

    def _doubted_death(self, known: Member, heard: Member, now: Seconds) -> Member:
        """Others declared `heard` dead; believe it only after our own minimal timeout."""
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
        mine = self._me
        if mine.state is MemberState.LEFT or heard.incarnation < mine.incarnation:
            return
        if heard.incarnation > min(mine.incarnation + LEAP, HIGHEST - 1):
            return  # no peer that has heard us directly believes it
        is_ours = (heard.incarnation, heard.state) == (mine.incarnation, MemberState.ALIVE)
        if is_ours and heard.beat <= mine.beat:
            return
        if heard.incarnation > mine.incarnation:
            self.born = heard.incarnation + 1
        self._me = replace(mine, incarnation=heard.incarnation + 1, beat=mine.beat + 1)
        if heard.state is not MemberState.ALIVE:
            self.timeout.blame_ourselves()
        if now >= self._may_announce_at:
            self._may_announce_at = now + self._config.probe_period_s
            self._say_to(self._some())
        elif sender in self._others:
            self._say_to((sender,))

    def _is_of_former_life(self, source: PeerId, members: Sequence[Member]) -> bool:
        """True if `source` sent this before it restarted."""
        known = self._others.get(source)
        return known is not None and any(
            own.peer == source and own.incarnation < known.incarnation for own in members
        )

    def _make_room(self) -> bool:
        """True if there is room for one more record; forgets a dead member if needed."""
        if len(self._others) < MOST_MEMBERS:
            return True
        over = MemberState.DEAD
        for peer in (p for p, member in self._others.items() if member.state >= over):
            self._roster.forget(peer)
            self.gossip.forget(peer)
            self._probes.pop(peer, None)
            return True
        return False

    def _store(self, member: Member, now: Seconds, why: str, is_known: bool = False) -> None:
        peer, known = member.peer, self._others.get(member.peer)
        if member is known:
            return
        self._roster.keep(member)
        same_word = known is not None and (known.incarnation, known.state) == (
            member.incarnation,
            member.state,
        )
        if known and same_word:
            if (known.phase, known.accusers) != (member.phase, member.accusers):
                self.gossip.spread(peer, is_known=is_known)
                self._maybe_hasten(member)
            return
        self.gossip.spread(peer, is_known=is_known)
        if member.state is MemberState.SUSPECT:
            self._suspicions[peer] = _Suspicion(now, now + self._suspicion_s(member))
        else:
            self._suspicions.pop(peer, None)
            self._probes.pop(peer, None)  # its word is younger than our question
        here = MemberState.SUSPECT
        if member.state <= here and (known is None or known.state > here):
            self._round.insert(self._rng.randrange(len(self._round) + 1), peer)
        if known and known.state <= here and _began_anew(known, member):
            self._emit(MemberChanged(peer, MemberState.DEAD, f"{peer} has started again"))
        elif known and known.state is member.state:
            return
        self._emit(MemberChanged(peer, member.state, why))

    # --- suspicion --------------------------------------------------------------------------------

    def _accuse(self, peer: PeerId, helpers: tuple[PeerId, ...], now: Seconds, why: str) -> None:
        """Neither we nor `helpers` could reach `peer`."""
        member = self._others[peer]
        accusers = joined(member.accusers, (self._me.peer, *helpers))
        if (member.state, member.accusers) != (MemberState.SUSPECT, accusers):
            self._store(replace(member, state=MemberState.SUSPECT, accusers=accusers), now, why)

    def _suspicion_s(self, suspect: Member) -> Seconds:
        """A suspect without accusers was declared dead elsewhere, so enough accused it."""
        needed = min(ACCUSERS, len(self._roster.alive) + 1)  # who could accuse it; we could, too
        return self.timeout.suspicion_s(len(suspect.accusers) or needed, needed)

    def _maybe_hasten(self, member: Member) -> None:
        """Shorten the timeout of a suspect with more accusers than before."""
        suspicion = self._suspicions.get(member.peer)
        if suspicion:
            due = suspicion.since + self._suspicion_s(member)
            suspicion.deadline = min(suspicion.deadline, due)

    def _excuse_what_fell_due_unseen(self, now: Seconds) -> None:
        """Extend deadlines that passed while this process stood still: answers may lie unread."""
        due = self.next_deadline()
        if due is None or now - due <= self._config.ack_timeout_s / 2:
            return
        self.timeout.blame_ourselves()
        open_: tuple[_Probe | _Suspicion, ...] = (
            *self._probes.values(),
            *self._suspicions.values(),
        )
        for waiting in open_:
            if waiting.deadline <= now and not waiting.is_excused:
                waiting.is_excused = True
                waiting.deadline = now + self.timeout.answer_s

    # --- probes -----------------------------------------------------------------------------------

    def _probe(self, target: PeerId, now: Seconds) -> _Probe:
        probe = self._probes.get(target)
        if probe is None:
            answer_s = self.timeout.answer_s
            self._number += 1
            probe = _Probe(self._number, now, now + answer_s, now + 2 * answer_s)
            self._probes[target] = probe
        # Lost: looks like silence, so others are asked.
        self._emit(Send(target, Ping(probe.number, self.gossip.records(self._me, target))))
        return probe

    def _ask_again(self, target: PeerId, probe: _Probe, now: Seconds) -> None:
        self._ask_others(target, probe, now)
        if self._others[target].state <= MemberState.SUSPECT:  # the dead: once per round
            self._probe(target, now)

    def _ask_others(self, target: PeerId, probe: _Probe, now: Seconds) -> None:
        probe.help_at = math.inf
        if self._others[target].state > MemberState.SUSPECT:
            return
        alive = self._roster.alive.sorted
        some = self._rng.sample(alive, min(self._config.relays + 1, len(alive)))
        relays = [peer for peer in some if peer != target][: self._config.relays]
        for relay in relays:
            self._emit(Send(relay, IndirectPing(probe.number, target)))

    def _hear_answer(self, source: PeerId, number: int, now: Seconds) -> None:
        probe = self._probes.get(source)
        if probe and probe.number == number:
            del self._probes[source]
            self.timeout.answered(now - probe.asked_at, in_time=now <= probe.help_at)
        indirect = self._indirect_probes.get(number)
        if indirect and indirect.target == source:
            self._report(self._indirect_probes.pop(number), answered=True)

    def _handle_silence(self, peer: PeerId, probe: _Probe, now: Seconds) -> None:
        """Neither the direct nor an indirect probe was answered."""
        if self._others[peer].state > MemberState.SUSPECT:
            return
        if not probe.helpers:
            self.timeout.blame_ourselves()
        by_whom = f" us or {', '.join(probe.helpers)}" if probe.helpers else ""
        why = f"{peer} did not answer{by_whom} within {now - probe.asked_at:.3g} s"
        self._accuse(peer, probe.helpers, now, why)
        self._probe(peer, now)  # it can refute; repeated until the suspicion is settled

    def _next_target(self) -> PeerId | None:
        """The next member of a shuffled round: everyone is probed once before anyone twice."""
        for _ in range(2):
            while self._round:
                peer = self._round.pop()
                member = self._others.get(peer)
                if member and member.state is not MemberState.LEFT:
                    return peer
            dead = self._roster.dead()
            self._round = [*self._roster.reachable(), *self._rng.sample(dead, min(1, len(dead)))]
            self._rng.shuffle(self._round)
        return None

    # --- for others -------------------------------------------------------------------------------

    def _probe_for(self, asker: PeerId, number: int, target: PeerId, now: Seconds) -> None:
        """Ping `target` for `asker`, with only our own record and the target's."""
        member = self._others.get(target)
        unknown = member is None or asker not in self._others
        if unknown or target == asker or len(self._indirect_probes) >= MOST_INDIRECT_PROBES:
            return
        assert member is not None
        self._number += 1
        due = now + 0.8 * self.timeout.answer_s  # so that the asker hears of it in time
        self._indirect_probes[self._number] = _IndirectProbe(asker, number, target, due)
        self._emit(Send(target, Ping(self._number, (self._me, member))))

    def _report(self, indirect: _IndirectProbe, *, answered: bool) -> None:
        members = self.gossip.records(self._me, indirect.asker, indirect.target)
        message = IndirectAck(indirect.number, indirect.target, answered, members)
        self._emit(Send(indirect.asker, message))

    def _hear_helper(self, source: PeerId, said: IndirectAck) -> None:
        probe = self._probes.get(said.target)
        if probe is None or probe.number != said.number:
            return
        if said.answered:
            del self._probes[said.target]
        else:
            probe.helpers = joined(probe.helpers, (source,))

    # --- direct updates ---------------------------------------------------------------------------

    def _say_to(self, peers: Sequence[PeerId]) -> None:
        for peer in peers:
            self._emit(Send(peer, MembershipUpdates((self._me,))))

    def _some(self) -> Sequence[PeerId]:
        """All reachable members, or a random `FAREWELLS` of them."""
        here = self._roster.reachable()
        return here if len(here) <= FAREWELLS else self._rng.sample(here, FAREWELLS)
