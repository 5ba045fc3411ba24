"""A slot: whose a peer is, who waits for it, and what it remembers; values and bookkeeping.

`core/group_lock.py` is the protocol on it and says why it holds; nothing else changes a slot.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from p2ptrain.core.contribution import Contribution
from p2ptrain.core.effects import Effect, GroupEnded, Send
from p2ptrain.core.events import Outcome
from p2ptrain.core.lock_state import (
    Collecting,
    Ended,
    Free,
    Granted,
    InGroup,
    LockConfig,
    LockState,
    Offered,
    Promise,
    Wish,
    age,
)
from p2ptrain.core.messages import Inquire, Release, Relinquish, Request
from p2ptrain.core.purpose import Formation, Purpose
from p2ptrain.core.timeout_policy import TimeoutPolicy
from p2ptrain.errors import InvariantViolation
from p2ptrain.ids import PeerId, Ticket

ENDED_REMEMBERED = 64
"""Tickets whose end we remember, far more than can be under way at once."""

MOST_BEHIND = 1024
"""An offer that is older than another of its peer by more tickets has not been on its way for long:
the other was made up. It must not void all that the peer will ever offer."""


class GroupEnvironment(Protocol):
    """What groups need to know about their peer."""

    @property
    def has_model(self) -> bool:
        """False until this peer has the model that it goes on with."""
        ...

    def participants(self) -> Sequence[PeerId]:
        """Everyone who meets at a barrier, sorted, with us."""
        ...

    def trainees(self) -> Sequence[PeerId]:
        """Everyone who trains, sorted, with us."""
        ...

    def contribution(self, purpose: Purpose) -> Contribution:
        """Our scalars for such a group: stated once, with the grant of our slot."""
        ...

    def weigh(self, members: Sequence[PeerId]) -> tuple[int, ...]:
        """How large the members' shares of the vectors should be; empty: all alike."""
        ...

    def outside_samples(self, members: Sequence[PeerId]) -> int:
        """Samples of all others."""
        ...


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
        self._offering: tuple[PeerId, Purpose] | None = None  # whenever nobody wants us
        self._offers: dict[PeerId, tuple[Ticket, Promise | None]] = {}  # to us; None: void
        self._born: dict[Formation, int] = {}  # since when we want a group and have formed none
        self._clock = 0  # Lamport's
        self._tickets = 0
        self._ended: dict[Ticket, Ended] = {}

    @property
    def state(self) -> LockState:
        return self._state

    def holds(self, ticket: Ticket) -> bool:
        """True while we are in the group of `ticket`: the fence for its chunks and its result."""
        return isinstance(self._state, InGroup) and self._state.ticket == ticket

    def expects(self, ticket: Ticket) -> bool:
        """True if we may yet be in the group of `ticket`."""
        match self._state:
            case Offered(to=coordinator) if coordinator == ticket.initiator:
                return ticket not in self._ended
            case Granted(request=request) if request.ticket == ticket:
                return True
            case _:
                return any(request.ticket == ticket for request in self._queue.values())

    def is_over(self, ticket: Ticket) -> bool:
        """True if we were part of `ticket`, and are not any more."""
        return ticket in self._ended

    def note_offer(
        self, source: PeerId, offer: Ticket, purpose: Purpose, contribution: Contribution
    ) -> bool:
        """`source` waits for such a group of ours, and offers us its slot.

        Returns:
            False if its own later word has overtaken this one.
        """
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
        """`source` is told that what it offers its slot for does not come: it takes it back."""
        if source in self._offers:
            self._void(self._offers[source][0])

    def stop_offering(self) -> None:
        """The group that we waited for is formed: once it is over, our slot is not offered."""
        self._offering = None

    def _tell_taken(self, offer: Ticket) -> bool:
        """If our group has taken this offer, say so again: the first `Begin` was lost."""
        state = self._state
        if isinstance(state, InGroup) and offer in state.offers:
            # Lost: its offer, or its inquiry, comes again.
            self._emit(Send(offer.initiator, replace(state.begin, offer=offer)))
            return True
        return False

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
        self._ended[ticket] = ended
        if len(self._ended) > ENDED_REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def _next_ticket(self) -> Ticket:
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
