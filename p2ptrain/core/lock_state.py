"""A slot: whose a peer is, who waits for it, and what it remembers; values and bookkeeping.

`core/group_lock.py` is the protocol on it and says why it holds; nothing else changes a slot.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from p2ptrain.core.contribution import MODEL, Contribution
from p2ptrain.core.deadlines import Deadline
from p2ptrain.core.effects import Effect, GroupEnded, Outcome, Send
from p2ptrain.core.messages import Begin, Inquire, Release, Relinquish, Request
from p2ptrain.core.purpose import GOSSIP, Formation, Purpose
from p2ptrain.core.slot_credit import UNLIMITED, SlotCredit
from p2ptrain.errors import ConfigError, InvariantViolation, check_above_0
from p2ptrain.ids import PeerId, Seconds, Ticket

ENDED_REMEMBERED = 64
"""Tickets whose end we remember, far more than can be under way at once."""

MOST_BEHIND = 1024
"""An offer that is older than another of its peer by more tickets has not been on its way for long:
the other was made up. It must not void all that the peer will ever offer."""

LEAST_SHARE = 0.25
"""The least fraction of what is configured that is waited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LockConfig:
    """Deadlines of the group lock, and how many to ask."""

    lease_s: Seconds = 6.0
    """How long a peer keeps the grant of a silent initiator. Too short: slow initiators lose
    grants that they count on; too long: an unnoticed dead one idles its members."""

    acquire_timeout_s: Seconds = 2.0
    """Stop collecting grants after this, or sooner where less was seen to be enough. Too short:
    where averages last longer, large groups seldom form; too long: members that have granted their
    slot idle for one that is busy."""

    resend_s: Seconds = 0.2
    """Repeat a request after this long without an answer; the first time sooner where answers were
    quicker before. Too short: duplicates; too long: a lost message costs more."""

    spare_claims: int = 1
    """Ask this many candidates more than are needed. Too few: a lost or slow answer delays the
    group; too many: peers grant their slot and are released for nothing."""

    spare_places: int = 24
    """Where candidates are busy, wait in the queues of this many more than are needed. Too few: the
    first free one comes late; too many: needless messages."""

    def __post_init__(self) -> None:
        check_above_0("lock", self, "lease_s", "acquire_timeout_s", "resend_s")
        for name in ("spare_claims", "spare_places"):
            if getattr(self, name) < 0:
                raise ConfigError(f"lock {name} = {getattr(self, name)} must be 0 or more")
        if self.resend_s >= self.acquire_timeout_s:
            raise ConfigError(
                f"lock resend_s = {self.resend_s} must be below "
                f"acquire_timeout_s = {self.acquire_timeout_s}, or nothing is ever sent again"
            )
        if self.lease_s <= self.acquire_timeout_s:
            raise ConfigError(
                f"lock lease_s = {self.lease_s} must be above acquire_timeout_s = "
                f"{self.acquire_timeout_s}, or grants lapse while they are collected"
            )


class TimeoutPolicy:
    """The timeouts of one lock, by its own observations (`core/deadlines.py`).

    Each is between `least_share` of what is configured and all of it. Where answers are quick a
    lost message costs less; from the third repetition on it is as configured.
    """

    def __init__(self, config: LockConfig, least_share: float = LEAST_SHARE) -> None:
        most_s, resend_s = config.acquire_timeout_s, config.resend_s
        least_s = min(most_s, max(least_share * most_s, 2 * resend_s))
        self.answers = Deadline(least_share * resend_s, resend_s, resend_s)
        """From a request to the first word of somebody who was asked; then it is sent again."""
        self.grants = Deadline(least_s, most_s, most_s)
        """From a request to its last grant."""
        self.averages = Deadline(least_s, most_s, most_s)
        """From a request, or the grant, to the end of our time in the group."""

    @property
    def acquire_s(self) -> Seconds:
        """When a request that begins now is given up.

        Candidates may be in an average: were its usual duration not covered, a large group might be
        given up each time before the last of its members is free.
        """
        return max(self.grants.seconds, self.averages.seconds)


@dataclass(frozen=True, slots=True)
class Free:
    """Free, and no peer waits for us: otherwise it would be that one's turn."""

    def __str__(self) -> str:
        return "free"


@dataclass(frozen=True, slots=True)
class Offered:
    """A coordinator may begin a group with us, until we ask for our slot back."""

    ticket: Ticket
    """Ours: it names this offer."""
    to: PeerId
    purpose: Purpose
    contribution: Contribution
    resend_at: Seconds
    """When to ask for it back again, if somebody wants it."""
    lapses_at: Seconds = math.inf
    """When to take it back without an answer, once it was asked for."""

    def __str__(self) -> str:
        return f"offered to {self.to}"


@dataclass(frozen=True, slots=True)
class Granted:
    """Promised to somebody else's request."""

    request: Request
    contribution: Contribution
    granted_at: Seconds
    resend_at: Seconds

    @property
    def ticket(self) -> Ticket:
        return self.request.ticket

    def __str__(self) -> str:
        return f"promised to {self.ticket}"


@dataclass(frozen=True, slots=True)
class Promise:
    """One candidate's grant, as its initiator has it."""

    peer: PeerId
    contribution: Contribution = MODEL
    offer: Ticket | None = None
    """It granted by this offer, which is for such a group."""
    purpose: Purpose = GOSSIP


@dataclass(frozen=True, slots=True)
class Collecting:
    """Our own request; each candidate is in one of the six lists."""

    request: Request
    needed: int
    unasked: tuple[PeerId, ...]
    """In order of preference."""
    asked_at: Seconds
    give_up_at: Seconds
    resend_at: Seconds
    asked: tuple[PeerId, ...] = ()
    """Should answer any moment."""
    busy: tuple[PeerId, ...] = ()
    """Have said that they are in another group, or promised to one; will grant us in our turn."""
    silent: tuple[PeerId, ...] = ()
    """Have not answered for a while."""
    granted: tuple[Promise, ...] = ()
    dropped: tuple[PeerId, ...] = ()
    """Will not be in this group any more."""
    purposes: tuple[tuple[PeerId, Purpose], ...] = ()
    """What a pair with each candidate is for, if that is not the same."""

    @property
    def ticket(self) -> Ticket:
        return self.request.ticket

    @property
    def granters(self) -> tuple[PeerId, ...]:
        return tuple(promise.peer for promise in self.granted)

    @property
    def waiting(self) -> tuple[PeerId, ...]:
        """Who may still grant it."""
        return (*self.busy, *self.silent, *self.asked)

    @property
    def told(self) -> tuple[PeerId, ...]:
        """Who knows of the request, as far as we know."""
        return (*self.granters, *self.waiting)

    def request_to(self, peer: PeerId) -> Request:
        """The request as this candidate gets it."""
        purpose = dict(self.purposes).get(peer)
        return replace(self.request, purpose=purpose) if purpose else self.request

    def without(self, peer: PeerId) -> "Collecting":
        """The same request, with `peer` in none of the lists."""
        granted = tuple(promise for promise in self.granted if promise.peer != peer)
        lists = (self.unasked, self.asked, self.busy, self.silent)
        unasked, asked, busy, silent = (tuple(p for p in peers if p != peer) for peers in lists)
        return replace(
            self, unasked=unasked, asked=asked, busy=busy, silent=silent, granted=granted
        )

    def __str__(self) -> str:
        return f"collecting for {self.ticket}"


@dataclass(frozen=True, slots=True)
class InGroup:
    """The group is formed; its average runs for as long as anything moves."""

    begin: Begin
    """As it was formed, whichever members are left; its initiator tells of it again when asked."""
    members: tuple[PeerId, ...]
    since: Seconds
    """When we were promised to it."""
    offers: tuple[Ticket, ...] = ()
    """At the initiator: those that it took."""

    @property
    def ticket(self) -> Ticket:
        return self.begin.ticket

    def __str__(self) -> str:
        return f"averaging in {self.ticket}"


LockState = Free | Offered | Collecting | Granted | InGroup


@dataclass(frozen=True, slots=True)
class Wish:
    """A request of our own that waits for its turn."""

    ticket: Ticket
    candidates: tuple[PeerId, ...]
    needed: int
    purpose: Purpose = GOSSIP
    purposes: tuple[tuple[PeerId, Purpose], ...] = ()
    """As of `Collecting`."""


@dataclass(frozen=True, slots=True)
class Ended:
    """What we were part of; `members` of a group that was never formed are none."""

    members: tuple[PeerId, ...] = ()
    done: bool = False


NEVER_FORMED = Ended()


def age(request: Request) -> tuple[int, Ticket]:
    """Of two requests the one with the smaller age is the older."""
    return (request.born, request.ticket)


class GroupEnvironment(Protocol):
    """What groups need to know about their peer."""

    @property
    def has_model(self) -> bool:
        """False until this peer has the model that it goes on with."""

    def participants(self) -> Sequence[PeerId]:
        """Everyone who meets at a barrier, sorted, with us."""

    def trainees(self) -> Sequence[PeerId]:
        """Everyone who trains, sorted, with us."""

    def contribution(self, purpose: Purpose) -> Contribution:
        """Our scalars for such a group: stated once, with the grant of our slot."""

    def weigh(self, members: Sequence[PeerId]) -> tuple[int, ...]:
        """How large the members' shares of the vectors should be; empty: all alike."""

    def outside_samples(self, members: Sequence[PeerId]) -> int:
        """Samples of all others."""


class Slot:
    """One peer's slot, as `GroupLock` finds and leaves it."""

    def __init__(
        self,
        me: PeerId,
        incarnation: int,
        config: LockConfig,
        emit: Callable[[Effect], None],
        environment: GroupEnvironment,
        admits: Callable[[PeerId, Purpose], bool],
        timeouts: TimeoutPolicy | None = None,
        credit: SlotCredit | None = None,
    ) -> None:
        self._me = me
        self.incarnation = incarnation  # of new tickets
        self._config = config
        self._emit = emit
        self._environment = environment
        self._admits = admits
        self.timeouts = timeouts or TimeoutPolicy(config, least_share=1.0)
        self._state: LockState = Free()
        self._queue: dict[PeerId, Request] = {}  # of others
        self._wishes: tuple[Wish, ...] = ()  # our own, in order
        self._offering: tuple[PeerId, Purpose] | None = None  # whenever no request waits
        self._offers: dict[PeerId, tuple[Ticket, Promise | None]] = {}  # to us; None: void
        self._born: dict[Formation, int] = {}  # since when we want a group and have formed none
        self._clock = 0  # Lamport's
        self._tickets = 0
        self._ended: dict[Ticket, Ended] = {}
        self._credit = credit or SlotCredit(UNLIMITED)

    @property
    def state(self) -> LockState:
        return self._state

    def holds(self, ticket: Ticket) -> bool:
        """True while we are in the group of `ticket`: the fence for its chunks and its result."""
        return isinstance(self._state, InGroup) and self._state.ticket == ticket

    def expects(self, ticket: Ticket) -> bool:
        """True if we may yet be in the group of `ticket`."""
        state, waiting = self._state, self._queue.get(ticket.initiator)
        if isinstance(state, Offered) and state.to == ticket.initiator:
            return ticket not in self._ended
        is_promised = isinstance(state, Granted) and state.ticket == ticket
        return is_promised or (waiting is not None and waiting.ticket == ticket)

    def is_over(self, ticket: Ticket) -> bool:
        """True if we were part of `ticket`, and are not any more."""
        return ticket in self._ended

    def note_offer(
        self, source: PeerId, offer: Ticket, purpose: Purpose, contribution: Contribution
    ) -> bool:
        """`source` offers us its slot for such a group; false: its own later word overtook it."""
        if offer.initiator != source:
            return False  # not an offer that it could make
        last, standing = self._offers.get(source, (None, None))
        overtaken = offer != last and _is_behind(offer, last)
        if self._tell_taken(offer):
            pass
        elif standing is None and _is_behind(offer, last):
            self._emit(Send(source, Release(offer)))  # lost: the offer comes again
        elif not overtaken:
            self._offers[source] = offer, Promise(source, contribution, offer, purpose)
        return not overtaken

    def forget_offer(self, source: PeerId) -> None:
        """Answer `source` that what it offers its slot for does not come: it takes it back."""
        if source in self._offers:
            self._void(self._offers[source][0])

    def stop_offering(self) -> None:
        """The group that we waited for is formed: once it is over, our slot is not offered."""
        self._offering = None

    def _tell_taken(self, offer: Ticket) -> bool:
        """If our group has taken this offer, say so again: the first `Begin` was lost.

        So it was if the group took an older offer of that peer, which has not entered, or has left
        already: it refuses the group, or has applied its average and says nothing.
        """
        offers = self._state.offers if isinstance(self._state, InGroup) else ()
        theirs = (other for other in offers if other.initiator == offer.initiator)
        taken = next((other for other in theirs if _is_behind(other, offer)), None)
        if taken and isinstance(self._state, InGroup):
            # Lost: its offer, or its inquiry, comes again.
            self._emit(Send(offer.initiator, replace(self._state.begin, offer=taken)))
        return taken == offer

    def _void(self, offer: Ticket) -> None:
        last, _ = self._offers.get(offer.initiator, (None, None))
        if offer == last or not _is_behind(offer, last):
            self._offers[offer.initiator] = offer, None

    def check(self) -> None:
        formations = [wish.purpose.formation for wish in self._wishes]
        once = len(set(formations)) == len(formations)
        if not (self._is_sound() and once and self._me not in self._queue):
            raise InvariantViolation(
                f"{self._me}: unsound lock state {self._state!r}, {self._queue}, {self._wishes}"
            )

    def _is_sound(self) -> bool:
        match self._state:
            case Collecting() as state:
                candidates = (*state.told, *state.unasked, *state.dropped)
                once = len({self._me, *candidates}) == len(candidates) + 1
                enough = len(state.told) + len(state.unasked) >= state.needed
                mine = state.ticket.initiator == self._me
                return mine and once and enough and len(state.granted) < state.needed
            case Granted(ticket=ticket):
                return ticket.initiator != self._me and ticket not in self._ended
            case InGroup() as state:
                return self._me in state.members and state.ticket not in self._ended
            case Offered(to=coordinator, purpose=purpose):
                return self._offering == (coordinator, purpose) and coordinator != self._me
            case Free():
                return not self._is_wanted and self._offering is None

    @property
    def _is_wanted(self) -> bool:
        return bool(self._queue or self._wishes)

    def _oldest(self) -> Request | None:
        """Of the requests of others."""
        return min(self._queue.values(), key=age, default=None)

    def _own_request(self) -> Request | None:
        """Our first wish as a request; it is as old as our wish for such a group."""
        if not self._wishes:
            return None
        wish = self._wishes[0]
        if wish.purpose.formation not in self._born:
            self._clock += 1
            self._born[wish.purpose.formation] = self._clock
        return Request(wish.ticket, self._born[wish.purpose.formation], wish.purpose)

    def _is_past(self, ticket: Ticket) -> bool:
        """True if we know a newer request of the same initiator."""
        known = [request.ticket for request in self._queue.values()]
        if isinstance(self._state, Granted | InGroup):
            known.append(self._state.ticket)
        return any(other.initiator == ticket.initiator and ticket < other for other in known)

    def _dequeue(self, ticket: Ticket) -> None:
        """This request waits for us no longer, if it does."""
        waiting = self._queue.get(ticket.initiator)
        if waiting and waiting.ticket == ticket:
            del self._queue[ticket.initiator]

    def _disown(self, source: PeerId, ticket: Ticket) -> None:
        """Tell `source` that we are not in `ticket` with it, unless we have applied its average."""
        ended = self._ended.get(ticket)
        if not (ended and ended.done and source in ended.members):
            # Lost: `source` asks again, or streams end.
            self._emit(Send(source, Relinquish(ticket)))

    def _end_wish(self, wish: Wish, outcome: Outcome, why: str) -> None:
        self._emit(GroupEnded(wish.ticket, outcome, why, (self._me,), wish.purpose))

    def _remember(self, ticket: Ticket, ended: Ended) -> None:
        self._ended.setdefault(ticket, ended)
        if len(self._ended) > ENDED_REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def next_ticket(self) -> Ticket:
        """A ticket that no other attempt of this life has; pushes have such, too."""
        self._tickets += 1
        return Ticket(self._me, self.incarnation, self._tickets)

    def _maybe_inquire(self, granted: Granted) -> bool:
        """If an older request than the one that we are promised to waits: ask to be let go."""
        waiting = (self._oldest(), self._own_request())
        wanted = any(request and age(request) < age(granted.request) for request in waiting)
        if wanted:  # lost: sent again in place of the grant
            self._emit(Send(granted.ticket.initiator, Inquire(granted.ticket)))
        return wanted


def _is_behind(offer: Ticket, other: Ticket | None) -> bool:
    """True if `offer` is `other`, or an older one of the same peer that comes late."""
    if other is None or offer.incarnation != other.incarnation:
        return False
    return 0 <= other.number - offer.number < MOST_BEHIND
