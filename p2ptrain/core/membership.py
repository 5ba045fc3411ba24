r"""Who is here, and by whose word.

SWIM (Das, Gupta, Motivala, DSN 2002), with suspicion as in its section 4.2.

Every `probe_period_s` a peer pings the next member of a shuffled round. No ack in time makes the
member *suspect*: it is not chosen for groups any more, but nobody mourns it yet. A suspect that
hears of it refutes the word with a higher incarnation; one that does not is *gone* after
`suspicion_s`. A connection that breaks is evidence too: the driver reports it, and the member is
suspect at once.

::

                      no ack, or connection broke                suspicion_s without refutation
      (join) -> ALIVE ---------------------------> SUSPECT ---------------------------------> GONE
                  ^  \______ says goodbye ________   |                                         |
                  |                               v  |  a higher incarnation                   |
                  |                             LEFT |  ("I am alive")                         |
                  +---------------------------------+-----------------------------------------+

Every ping and ack carries `Member` records within a fixed budget: the sender's own, then what is
new (each item a few times, more the larger the swarm, unless its owner has told everyone), then the
others in turn. So news travels with the probes, the cost per peer does not grow with the swarm, and
how fresh the `steps` and `samples` of far members are does. Merging is a join of a semilattice
(`newer`), so order and duplication do not matter.

Who is gone is still probed, one of them once per round: it may have been cut off, not dead. The
probe tells it what is thought of it, so that it refutes, and two halves of a swarm that could not
hear each other for a while become one again. Who left on purpose is left alone.

This file decides who may be chosen. It does not know what for.
"""

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from random import Random

from p2ptrain.core.effects import Effect, MemberChanged, Send
from p2ptrain.core.messages import (
    Ack,
    Member,
    MembershipMessage,
    MemberState,
    Phase,
    Ping,
    Rumours,
)
from p2ptrain.errors import ConfigError, InvariantViolation
from p2ptrain.ids import PeerId, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipConfig:
    """Deadlines of failure detection."""

    probe_period_s: Seconds = 0.25
    """Between two probes of one peer. Too short: bytes and wake-ups; too long: late suspicion."""

    ack_timeout_s: Seconds = 0.6
    """A probe unanswered for so long makes its target suspect. Too short: a busy machine is
    suspected (and refutes); too long: a vanished peer is still chosen."""

    suspicion_s: Seconds = 1.5
    """A suspect has so long to refute. Too short: a paused peer must rejoin groups; too long: a
    synchronous group waits for the dead."""

    records_per_probe: int = 16
    """How many `Member` records a ping or ack carries at most."""

    def __post_init__(self) -> None:
        for name in ("probe_period_s", "ack_timeout_s", "suspicion_s"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigError(f"membership {name} = {value} must be above 0")
        if self.records_per_probe < 3:
            raise ConfigError(
                f"membership records_per_probe = {self.records_per_probe} must be 3 or more: "
                "the sender's, the receiver's, and one to spread"
            )


FAREWELLS = 64
"""Who leaves tells so many; of a larger swarm the others hear it from these, or miss us."""


def newer(known: Member, heard: Member) -> Member:
    """What is true of one peer after hearing `heard` (commutative, associative, idempotent)."""
    if known.incarnation != heard.incarnation:
        return max(known, heard, key=lambda member: member.incarnation)
    if heard.beat < known.beat and heard.state <= known.state and heard.phase <= known.phase:
        return known  # an old record, as many are that go round
    facts = max(known, heard, key=lambda member: (member.beat, member.steps, member.samples))
    state, phase = max(known.state, heard.state), max(known.phase, heard.phase)
    if (facts.state, facts.phase) == (state, phase):
        return facts
    return replace(facts, state=state, phase=phase)


def _has_begun(member: Member) -> bool:
    return member.phase is not Phase.ARRIVING


class _Names:
    """Some names, sorted. Changing one among a thousand does not sort the thousand again."""

    def __init__(self) -> None:
        self.changes = 0
        """How often one came or went."""
        self._belong: dict[PeerId, None] = {}
        self._names: list[PeerId] = []
        self._sorted: tuple[PeerId, ...] | None = ()

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


class Membership:
    """One peer's view of the swarm. Effects are handed to `emit`; `PeerMachine` states duties."""

    def __init__(
        self, me: Member, config: MembershipConfig, rng: Random, emit: Callable[[Effect], None]
    ) -> None:
        self._config = config
        self._rng = rng
        self._emit = emit
        self._me = me
        self._others: dict[PeerId, Member] = {}
        self._names = _Names()  # of the others
        self._alive = _Names()  # of those of them that may be chosen
        self._participants = _Names()
        self._trainees = _Names()
        self._sort(me)
        self._samples = 0  # of the others, also of those that are not here any more
        self._begun = 0  # how many of them train, or did
        self._news: dict[PeerId, int] = {}  # peer -> how often its record is still to be told
        self._news_by: dict[int, dict[PeerId, None]] = {}  # how often -> these peers, in order
        self._round: list[PeerId] = []  # who is probed next, last first
        self._turn = 0  # whose record fills the next probe
        self._probe_at: Seconds | None = None
        self._probe_number = 0
        self._unanswered: dict[PeerId, tuple[int, Seconds]] = {}  # probe number, deadline
        self._condemned_at: dict[PeerId, Seconds] = {}  # when a suspect becomes gone

    # --- reading ----------------------------------------------------------------------------------

    @property
    def me(self) -> Member:
        return self._me

    @property
    def others(self) -> tuple[Member, ...]:
        """Everyone else we have heard of, sorted by name."""
        return tuple(self._others[peer] for peer in self._names.sorted)

    @property
    def samples(self) -> int:
        """Samples of the whole swarm, as far as we know."""
        return self._me.samples + self._samples

    @property
    def anyone_has_begun(self) -> bool:
        """True if another one trains, or did."""
        return self._begun > 0

    def member(self, peer: PeerId) -> Member | None:
        return self._me if peer == self._me.peer else self._others.get(peer)

    def choosable(self) -> tuple[PeerId, ...]:
        """Who may be asked into a group: alive by all we know, and not ourselves."""
        return self._alive.sorted

    def participants(self) -> tuple[PeerId, ...]:
        """Who takes part in scheduled groups: everyone here who is not done, ourselves included.

        A suspect still counts: a synchronous group waits until the suspicion is settled.
        """
        return self._participants.sorted

    def trainees(self) -> tuple[PeerId, ...]:
        """Who takes part in wait-avoiding groups: ourselves, and whoever trains by all we know.

        A suspect does not, unlike above: nobody waits to hear whether it is dead.
        """
        return self._trainees.sorted

    @property
    def changes(self) -> tuple[int, int]:
        """How often `participants` has changed, and how often `trainees`."""
        return self._participants.changes, self._trainees.changes

    # --- what we say of ourselves -----------------------------------------------------------------

    def describe(
        self,
        *,
        phase: Phase | None = None,
        steps: int | None = None,
        samples: int | None = None,
        link_mbit: int | None = None,
    ) -> None:
        """Say what we are doing, as far as it has changed; told to others with the next probes."""
        me = self._me
        self._me = replace(
            me,
            phase=me.phase if phase is None else phase,
            steps=me.steps if steps is None else steps,
            samples=me.samples if samples is None else samples,
            link_mbit=me.link_mbit if link_mbit is None else link_mbit,
            beat=me.beat + 1,
        )
        self._sort(self._me)

    def announce(self) -> None:
        """Tell everyone our record now (joined, training, done)."""
        self._say_to(self._reachable())

    def leave(self) -> None:
        """Say goodbye; nobody will choose us once this has arrived."""
        self._me = replace(self._me, state=MemberState.LEFT, beat=self._me.beat + 1)
        self._sort(self._me)
        here = self._reachable()
        self._say_to(here if len(here) <= FAREWELLS else self._rng.sample(here, FAREWELLS))
        self._probe_at = None

    # --- what happens -----------------------------------------------------------------------------

    def learn(
        self, members: Sequence[Member], now: Seconds, why: str, teller: PeerId | None = None
    ) -> None:
        """Merge records that somebody told us; what `teller` says of itself all have been told."""
        for heard in members:
            if heard.peer == self._me.peer:
                self._maybe_refute(heard)
            else:
                known = self._others.get(heard.peer)
                if heard is not known:
                    is_known = heard.peer == teller and heard.state is not MemberState.LEFT
                    self._store(newer(known, heard) if known else heard, now, why, is_known)
        if self._probe_at is None and self._others and self._me.state is MemberState.ALIVE:
            self._probe_at = now + self._rng.uniform(0, self._config.probe_period_s)

    def receive(self, source: PeerId, message: MembershipMessage, now: Seconds) -> None:
        self.learn(message.members, now, f"told by {source}", source)
        match message:
            case Ping(number=number):
                self._emit(Send(source, Ack(number, self._records_for(source))))
            case Ack(number=number):
                asked = self._unanswered.get(source)
                if asked and asked[0] == number:
                    del self._unanswered[source]
            case Rumours():
                pass

    def unreachable(self, peer: PeerId, why: str, now: Seconds) -> None:
        """A connection to `peer` broke: suspect it at once, and ask it."""
        member = self._others.get(peer)
        if member and member.state is MemberState.ALIVE:
            self._store(replace(member, state=MemberState.SUSPECT), now, why)
            self._probe(peer, now)

    def handle_timer(self, now: Seconds) -> None:
        for peer, (_, deadline) in sorted(self._unanswered.items()):
            if deadline <= now:
                del self._unanswered[peer]
                member = self._others[peer]
                if member.state is MemberState.ALIVE:
                    why = f"{peer} did not answer a probe within {self._config.ack_timeout_s} s"
                    self._store(replace(member, state=MemberState.SUSPECT), now, why)
        for peer, deadline in sorted(self._condemned_at.items()):
            if deadline <= now:
                why = f"{peer} did not refute its suspicion within {self._config.suspicion_s} s"
                self._store(replace(self._others[peer], state=MemberState.GONE), now, why)
        if self._probe_at is not None and self._probe_at <= now:
            self._probe_at = now + self._config.probe_period_s
            target = self._next_target()
            if target is not None:
                self._probe(target, now)

    def next_deadline(self) -> Seconds | None:
        first = math.inf if self._probe_at is None else self._probe_at
        for _, deadline in self._unanswered.values():
            first = min(first, deadline)
        for deadline in self._condemned_at.values():
            first = min(first, deadline)
        return None if first == math.inf else first

    def check(self) -> None:
        if self._me.peer in self._others:
            raise InvariantViolation(f"{self._me.peer} counts itself among the others")
        for peer in self._condemned_at:
            if self._others[peer].state is not MemberState.SUSPECT:
                raise InvariantViolation(f"{peer} is condemned but {self._others[peer].state.name}")

    # --- inside -----------------------------------------------------------------------------------

    def _sort(self, member: Member) -> None:
        """Keep the lists of names that are asked for with everything that happens."""
        is_me = member.peer == self._me.peer
        here = member.state <= MemberState.SUSPECT
        self._participants.keep(member.peer, here and member.phase is not Phase.DONE)
        trains = member.state is MemberState.ALIVE and member.phase is Phase.TRAINING
        self._trainees.keep(member.peer, is_me or trains)
        self._names.keep(member.peer, not is_me)
        self._alive.keep(member.peer, not is_me and member.state is MemberState.ALIVE)

    def _store(self, member: Member, now: Seconds, why: str, is_known: bool = False) -> None:
        known = self._others.get(member.peer)
        if member is known:
            return
        self._others[member.peer] = member
        self._samples += member.samples - (known.samples if known else 0)
        self._begun += _has_begun(member) - (known is not None and _has_begun(known))
        same_word = known is not None and (known.incarnation, known.state) == (
            member.incarnation,
            member.state,
        )
        if not same_word or (known is not None and known.phase != member.phase):
            self._sort(member)
            rounds = 1 if is_known else math.ceil(math.log2(len(self._others) + 2))
            self._tell(member.peer, 3 * rounds)
        if same_word:
            return
        if member.state is MemberState.SUSPECT:
            self._condemned_at[member.peer] = now + self._config.suspicion_s
        else:
            self._condemned_at.pop(member.peer, None)
            self._unanswered.pop(member.peer, None)  # its word is younger than our question
        if known is None or known.state is not member.state:
            self._emit(MemberChanged(member.peer, member.state, why))

    def _maybe_refute(self, heard: Member) -> None:
        """Somebody thinks ill of us: we are alive, under a higher incarnation."""
        if self._me.state is MemberState.LEFT or heard.incarnation < self._me.incarnation:
            return
        if heard.incarnation > self._me.incarnation or heard.state is not MemberState.ALIVE:
            self._me = replace(self._me, incarnation=heard.incarnation + 1, beat=self._me.beat + 1)
            self.announce()

    def _probe(self, target: PeerId, now: Seconds) -> None:
        self._probe_number += 1
        if target not in self._unanswered:
            self._unanswered[target] = (self._probe_number, now + self._config.ack_timeout_s)
        number = self._unanswered[target][0]
        self._emit(Send(target, Ping(number, self._records_for(target))))

    def _next_target(self) -> PeerId | None:
        """The next member of a shuffled round: everyone is probed once before anyone twice."""
        for _ in range(2):
            while self._round:
                peer = self._round.pop()
                if self._others[peer].state is not MemberState.LEFT:
                    return peer
            gone = [m.peer for m in self.others if m.state is MemberState.GONE]
            self._round = [*self._reachable(), *self._rng.sample(gone, min(1, len(gone)))]
            self._rng.shuffle(self._round)
        return None

    def _say_to(self, peers: Sequence[PeerId]) -> None:
        for peer in peers:
            self._emit(Send(peer, Rumours((self._me,))))

    def _reachable(self) -> tuple[PeerId, ...]:
        return tuple(m.peer for m in self.others if m.state <= MemberState.SUSPECT)

    def _records_for(self, target: PeerId) -> tuple[Member, ...]:
        """Ourselves, what we think of the target, the news, then the others in turn."""
        chosen: dict[PeerId, Member] = {}
        budget = self._config.records_per_probe - 1  # beside our own
        if target in self._others:
            chosen[target] = self._others[target]
        for peer in self._first_news(budget - len(chosen)):
            chosen[peer] = self._others[peer]
        names = self._names.sorted
        for _ in names:
            if len(chosen) == budget:
                break
            peer = names[self._turn % len(names)]
            chosen[peer] = self._others[peer]
            self._turn += 1
        for peer in chosen:
            if peer in self._news:
                self._tell(peer, self._news[peer] - 1)
        return (self._me, *chosen.values())

    def _first_news(self, count: int) -> list[PeerId]:
        """Up to `count` peers of whom there is news, the least told first."""
        first: list[PeerId] = []
        for often in sorted(self._news_by, reverse=True):
            first += islice(self._news_by[often], count - len(first))
        return first

    def _tell(self, peer: PeerId, often: int) -> None:
        """The record of `peer` is to be told so often from now on."""
        before = self._news.pop(peer, 0)
        if before:
            del self._news_by[before][peer]
            if not self._news_by[before]:
                del self._news_by[before]
        if often > 0:
            self._news[peer] = often
            self._news_by.setdefault(often, {})[peer] = None
