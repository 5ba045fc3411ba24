"""The group lock: several peers, one group each, never a deadlock, and everybody's turn comes.

Rule 1: all lock state of a peer changes here, in handlers that run to completion.
Rule 2: this file does not know what a group is for.

A claim is for ourselves and any `needed` of some `candidates`; particular members are the case in
which all of them are needed. It follows Maekawa (1985), with Sanders' way out of its deadlocks
(1987): who is promised to a younger claim asks to be let go.

**The protocol in six lines.** The *initiator* sends `Claim` to as many candidates as it needs and
some to spare. One that is free answers `Grant` and promises nobody else; any other keeps the claim
in its queue, answers `Busy`, at once, and the next candidate is asked. As soon as enough have
granted, the initiator sends `Begin` to those, with the list of them, and `Release` to all others
that it had asked: the group is formed, and each member moves its slices under the ticket. A group
needs no message to end: each member is free when its own average has ended. Whoever becomes free
grants the oldest claim in its queue, or starts its own if that is older. (One that is not ready for
any group yet says `Release`, and is done without.)

::

                our turn                    enough have granted              average ended,
        +------> COLLECTING -----------------------------------> IN_GROUP - expired, broken --+
        |            |   too few are left, late: Release to all      ^                        |
      FREE <---------+   an older claim comes: yield                 |                        |
      ^ |            +-----------+                                   |                        |
      | |  Claim                 v              Begin                |                        |
      | +------------------> GRANTED --------------------------------+                        |
      |                          | Release, lease lapsed, initiator gone                      |
      +--------------------------+------------------------------------------------------------+

**Why no cycle of waits can exist.** Claims are ordered by age: a Lamport clock, with the ticket to
break ties. Look at what a peer can wait for.

1. COLLECTING waits for answers to its claims, which whoever receives one gives in the handler that
   receives it; and for those candidates that have answered `Busy`. Such a candidate is

   * IN_GROUP (case 3), or GRANTED to a claim whose group has formed, which `Begin` will tell it; or
   * COLLECTING or GRANTED for an *older* claim. For a younger one it does not stay: if it is its
     own, it yields at once; if not, it sends `Inquire` to that claim's initiator, which lets it
     go if it is still collecting, for good under this ticket.

2. GRANTED waits for the word of one initiator, which is COLLECTING for that ticket (case 1), or in
   the group, or does not know the ticket any more; then it says `Begin` or `Release` when told of
   the grant again.
3. IN_GROUP waits for the slices of the members of the same ticket, all of which are in that group
   and in no other, and wait for nothing but it.

So a chain of waits leads from younger claims to older ones, or ends in a formed group: no cycle. A
claim of our own that waits for its turn holds nothing that anyone could wait for.

**Why everybody's turn comes.** Of all claims that are being collected the oldest gets each
candidate that it has asked as soon as the group which that one is in, if any, has ended: nobody
else's claim is granted before it, and it is let go by all others. A claim that comes to nothing
hands its age on to our next one, until we have been in a group. Only finitely many claims can be
older than a given one (every peer's clock grows with each claim that it makes or hears of), and
each of those forms, is given up, or dies with its initiator; so whoever keeps asking is the oldest
one day, and in a group soon after. One condition: an average lasts less than `acquire_timeout_s`,
or a large group may be given up each time before the last of its members is free.

**What each timer protects.** None of them is needed for the arguments above; they bound the damage
of lost messages and dead peers.

Each is at most as long as configured, and shorter where less was seen to be enough
(`core/pace.py`); the lease of a group travels with its claim, so that all who are in it, or
promised to it, count on the same one, whatever each has seen.

* `resend_s`: claims without a grant, and grants without an answer, are sent again. That repairs
  every loss: a claim that comes again is answered again; a grant that comes again is answered with
  `Begin` or `Release`, whichever was lost. No lost message idles anybody for a lease.
* `acquire_timeout_s`: an initiator stops collecting (candidates died, are cut off, or average for
  too long).
* `lease_s`: a granter is free again by itself so long after its grant (the initiator died).
* A member's own time in a group ends *earlier*, so that when the earliest lease of a ticket lapses
  nobody is in its group any more. (Leases protect the granter; without the holder's own deadline a
  granter could meet others while the group still thinks it has it.) Clocks may differ, and run too
  fast or too slow by a share of `clock_drift` = r. In true seconds after the claim was born: the
  earliest lease lapses no earlier than lease_s / (1 + r), on the fastest clock; the last grant that
  counts was given no later than acquire_timeout_s / (1 - r), and T seconds of a member's clock last
  no longer than T / (1 - r). So T = lease_s (1 - r) / (1 + r) - acquire_timeout_s, from its grant,
  is a member's time in a group, and the initiator's, from its claim. Here `lease_s` is the claim's,
  and `acquire_timeout_s` as configured, whether or not the initiator gives up sooner.
* Deadlines bind before anything else happens: a peer that was paused takes no late `Begin` or
  `Grant` for a timely one, and `holds` nothing that has expired, whether its timer has fired or
  not.
* The *ticket* fences the rest: slices under a ticket that is not `holds` are refused, and a result
  is applied only while it is held.

**What a late duplicate can do.** Nothing. Each peer remembers the last tickets that it was part of.
It never promises itself to one twice, nor enters it twice; and once its average is *done*, it says
nothing about the ticket to other members: one of them may still be taking the last slices in, and
a `Release` would make it throw away what we have applied. A claim under a newer ticket of the same
initiator shows that the older one is over.

**What happens when each message is lost** stands beside each in `core/messages.py`;
`tests/core/test_group_lock.py` shows every line of it.
"""

import copy
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Self, assert_never

from p2ptrain.core.effects import Abandon, Average, Effect, GroupEnded, Send, What
from p2ptrain.core.events import Outcome
from p2ptrain.core.links import Weigh, equally
from p2ptrain.core.lock_state import (
    NEVER_FORMED,
    Collecting,
    Ended,
    Free,
    Granted,
    InGroup,
    LockConfig,
    LockState,
    Wish,
    age,
    relative,
)
from p2ptrain.core.messages import Begin, Busy, Claim, Grant, Inquire, LockMessage, Release
from p2ptrain.core.pace import Pace, Wait
from p2ptrain.errors import InvariantViolation, LocalProtocolError
from p2ptrain.ids import PeerId, Seconds, Ticket

MOST_TICKS = 1 << 32
"""No claim sets our clock forward by more: a made-up age must not drive it to where our own claims
cannot be encoded any more."""

ENDED_REMEMBERED = 64
"""Tickets whose end we remember, far more than can be under way at once."""


class GroupLock:
    """One peer's share of the group lock. Effects are handed to `emit`.

    Args:
        weigh: says how large the members' shares of what they average should be.
        pace: says how long to wait for what, and is told how long it took; none: as configured.
        is_ready: says whether others may have us in their groups yet.
    """

    def __init__(
        self,
        me: PeerId,
        incarnation: int,
        config: LockConfig,
        emit: Callable[[Effect], None],
        weigh: Weigh = equally,
        pace: Pace | None = None,
        is_ready: Callable[[], bool] = lambda: True,
    ) -> None:
        self._me = me
        self._incarnation = incarnation
        self._config = config
        self._emit = emit
        self._weigh = weigh
        self._is_ready = is_ready
        self.pace = pace or Pace(config)
        self._state: LockState = Free()
        self._queue: tuple[Claim, ...] = ()  # others' claims, the oldest first, one of each peer
        self._wish: Wish | None = None
        self._born: int | None = None  # since when we want a group and have not been in one
        self._clock = 0  # Lamport's
        self._tickets = 0
        self._ended: dict[Ticket, Ended] = {}

    @property
    def state(self) -> LockState:
        return self._state

    def holds(self, ticket: Ticket, now: Seconds) -> bool:
        """True while we are in the group of `ticket`: the fence for its slices and its result."""
        state = self._state
        return isinstance(state, InGroup) and state.ticket == ticket and now < state.expires_at

    # --- for explorers ----------------------------------------------------------------------------

    def frozen(self, now: Seconds) -> Hashable:
        """All that decides what this lock will do, as one value, with times relative to `now`."""
        ended = tuple(self._ended.items())
        return (
            relative(self._state, now),
            self._queue,
            self._wish,
            self._born,
            self._clock,
            self._tickets,
            ended,
        )

    def clone(self, emit: Callable[[Effect], None]) -> Self:
        """An independent lock in the same state."""
        twin = copy.copy(self)
        twin._emit = emit
        twin._ended = dict(self._ended)
        return twin

    # --- what happens -----------------------------------------------------------------------------

    def request(self, candidates: Sequence[PeerId], needed: int, now: Seconds) -> Ticket:
        """Claim a group of ourselves and `needed` of `candidates`, which we prefer in this order.

        It ends in `Average` and then `GroupEnded`, or in `GroupEnded` only. While we are somebody
        else's, it waits for its turn.

        Raises:
            LocalProtocolError: if `candidates` repeats a peer, contains us or has less than
                `needed`, or nobody is needed.
        """
        if len({self._me, *candidates}) != len(candidates) + 1:
            raise LocalProtocolError(f"{self._me} cannot claim a group with {list(candidates)}")
        if not 1 <= needed <= len(candidates):
            raise LocalProtocolError(
                f"{self._me} cannot claim a group with {needed} of {list(candidates)}"
            )
        self._lapse(now)
        self._tickets += 1
        ticket = Ticket(self._me, self._incarnation, self._tickets)
        if self._wish or isinstance(self._state, Collecting):
            why = f"{self._me} has another claim under way"
            self._emit(GroupEnded(ticket, Outcome.BUSY, why, (self._me,)))
            return ticket
        self._wish = Wish(ticket, tuple(candidates), needed)
        match self._state:
            case Free():
                self._next_turn(now)
            case Granted() as state:
                self._maybe_inquire(state)
            case _:
                pass
        return ticket

    def receive(self, source: PeerId, message: LockMessage, now: Seconds) -> None:
        self._lapse(now)
        match message:
            case Claim():
                self._handle_claim(source, message, now)
            case Grant(ticket=ticket):
                self._handle_grant(source, ticket, now, wanted=False)
            case Inquire(ticket=ticket):
                self._handle_grant(source, ticket, now, wanted=True)
            case Busy(ticket=ticket):
                self._handle_busy(source, ticket, now)
            case Begin():
                self._handle_begin(source, message, now)
            case Release(ticket=ticket):
                self._handle_release(source, ticket, now)
            case _:
                assert_never(message)

    def average_ended(self, ticket: Ticket, outcome: Outcome, why: str, now: Seconds) -> None:
        """Our own average under `ticket` is over; it is the next one's turn."""
        if isinstance(self._state, InGroup) and self._state.ticket == ticket:
            self._leave_group(outcome, why, now)
        elif ticket in self._ended:  # abandoned too late: it was applied
            self._ended[ticket] = replace(self._ended[ticket], done=outcome is Outcome.DONE)

    def regroup(self, ticket: Ticket, members: tuple[PeerId, ...]) -> None:
        """Our group goes on without some of its members (`core/repair.py`)."""
        if isinstance(self._state, InGroup) and self._state.ticket == ticket:
            self._state = replace(self._state, members=members)

    def peer_gone(self, peer: PeerId, why: str, now: Seconds) -> None:
        """A peer crashed or is cut off: whatever waits for it does not."""
        self._forget(peer, why)
        match self._state:
            case InGroup(members=members) if peer in members:
                self._abandon(Outcome.LOST, why, now)
            case _:
                self._do_without(peer, why, now)

    def peer_left(self, peer: PeerId, why: str, now: Seconds) -> None:
        """A peer said goodbye: no claim of it or with it comes to anything, its group does."""
        self._forget(peer, why)
        self._do_without(peer, why, now)

    def withdraw(self, why: str, now: Seconds) -> None:
        """We stop: give up our claim and a promise. A formed group is left to end.

        Whoever asks us from now on is served like before.
        """
        self._born = None
        if self._wish:
            ticket, self._wish = self._wish.ticket, None
            self._emit(GroupEnded(ticket, Outcome.WITHDRAWN, why, (self._me,)))
        match self._state:
            case Collecting():
                self._fail(Outcome.WITHDRAWN, why, now)
            case Granted(ticket=ticket):
                self._free(ticket)
                # Lost: `Begin` or an unanswered claim shows it, or the initiator's time-out.
                self._emit(Send(ticket.initiator, Release(ticket)))
                self._next_turn(now)
            case _:
                pass

    def handle_timer(self, now: Seconds) -> None:
        self._lapse(now)
        match self._state:
            case Collecting() as state if state.resend_at <= now:
                if state.asked:
                    self.pace.missed(Wait.ANSWER)
                silent = (*state.queued, *state.asked)
                for peer in silent:
                    self._emit(Send(peer, state.claim))
                resend_at = now + self._config.resend_s
                # Whoever is dead, or cut off, keeps us from asking others no longer.
                self._ask_more(replace(state, resend_at=resend_at, asked=(), queued=silent))
            case Granted() as state if state.resend_at <= now:
                self._state = replace(state, resend_at=now + self._config.resend_s)
                if not self._maybe_inquire(state):
                    self._emit(Send(state.ticket.initiator, Grant(state.ticket)))
            case _:
                pass

    def next_deadline(self) -> Seconds | None:
        match self._state:
            case Free():
                return None
            case Collecting() as state:
                return min(state.resend_at, state.give_up_at)
            case Granted() as state:
                return min(state.resend_at, state.granted_at + state.claim.lease_s)
            case InGroup() as state:
                return state.expires_at

    def check(self) -> None:
        if not (self._is_sound() and self._is_queue_sound()):
            raise InvariantViolation(
                f"{self._me}: unsound lock state {self._state!r}, {self._queue}, {self._wish}"
            )

    def _is_sound(self) -> bool:
        match self._state:
            case Collecting() as state:
                candidates = (*state.told, *state.unasked, *state.dropped)
                once = len({self._me, *candidates}) == len(candidates) + 1
                enough = len(state.told) + len(state.unasked) >= state.needed
                mine = state.ticket.initiator == self._me and self._wish is None
                return mine and once and enough and len(state.granted) < state.needed
            case Granted(ticket=ticket):
                return ticket.initiator != self._me and ticket not in self._ended
            case InGroup(ticket=ticket, members=members):
                return self._me in members and len(members) > 1 and ticket not in self._ended
            case Free():
                return not self._queue and self._wish is None

    def _is_queue_sound(self) -> bool:
        initiators = {self._me, *(claim.ticket.initiator for claim in self._queue)}
        in_order = list(self._queue) == sorted(self._queue, key=age)
        return in_order and len(initiators) == len(self._queue) + 1

    # --- whose turn it is -------------------------------------------------------------------------

    def _next_turn(self, now: Seconds) -> None:
        """We are free: grant the oldest claim that waits for us, or start our own."""
        assert isinstance(self._state, Free)
        oldest = self._queue[0] if self._queue else None
        own = self._own_claim()
        if own and (oldest is None or age(own) < age(oldest)):
            self._collect(own, now)
        elif oldest:
            self._queue = self._queue[1:]
            self._grant(oldest, now)

    def _own_claim(self) -> Claim | None:
        """Our wish as a claim; it is as old as our wish to be in a group."""
        if self._wish is None:
            return None
        if self._born is None:
            self._clock += 1
            self._born = self._clock
        return Claim(self._wish.ticket, self._born, self.pace.lease_s)

    def _enqueue(self, claim: Claim) -> None:
        initiator = claim.ticket.initiator
        others = [waiting for waiting in self._queue if waiting.ticket.initiator != initiator]
        self._queue = tuple(sorted([*others, claim], key=age))

    def _maybe_inquire(self, granted: Granted) -> bool:
        """If an older claim than the one that we are promised to waits for us: ask to be let go."""
        own = self._own_claim()
        waiting = [*self._queue[:1], *([own] if own else [])]
        wanted = any(age(claim) < age(granted.claim) for claim in waiting)
        if wanted:  # lost: sent again in place of the grant
            self._emit(Send(granted.ticket.initiator, Inquire(granted.ticket)))
        return wanted

    # --- the initiator's side ---------------------------------------------------------------------

    def _collect(self, own: Claim, now: Seconds) -> None:
        assert self._wish is not None
        wish, self._wish = self._wish, None
        # Whoever waits for us will yield to us: it is younger.
        waiting = {claim.ticket.initiator for claim in self._queue}
        candidates = tuple(sorted(wish.candidates, key=lambda peer: peer not in waiting))
        give_up_at, resend_at = now + self.pace.acquire_s, now + self.pace.resend_s
        self._ask_more(Collecting(own, wish.needed, candidates, now, give_up_at, resend_at))

    def _ask_more(self, state: Collecting) -> None:
        """Ask as many as are needed and some to spare, and wait for more where they are busy."""
        spare = len(state.granted) + len(state.asked) - state.needed
        count = min(
            self._config.spare_claims - spare,
            self._config.spare_places - spare - len(state.queued),
        )
        now, later = state.unasked[: max(0, count)], state.unasked[max(0, count) :]
        self._state = replace(state, unasked=later, asked=(*state.asked, *now))
        for peer in now:
            self._emit(Send(peer, state.claim))  # lost: sent again at `resend_at`

    def _handle_grant(self, source: PeerId, ticket: Ticket, now: Seconds, *, wanted: bool) -> None:
        """`source` is promised to us, and, if `wanted`, would rather be let go."""
        match self._state:
            case Collecting() as state if state.ticket == ticket and source in state.told:
                if wanted:
                    self._emit(Send(source, Release(ticket)))  # lost: it inquires again
                    why = f"{source} was wanted by an older claim"
                    self._drop(source, Outcome.YIELDED, why, now)
                elif source not in state.granted:
                    self._answered(state, source, now)
                    state = state.without(source)
                    self._take(replace(state, granted=(*state.granted, source)), now)
            case InGroup() as state if state.ticket == ticket and source in state.members:
                # The first one was lost.
                self._emit(Send(source, Begin(ticket, state.formed, state.weights)))
            case _:
                self._disown(source, ticket)  # too late, or we can do without it

    def _answered(self, state: Collecting, source: PeerId, now: Seconds) -> None:
        if source in state.asked:  # else it was asked twice: no telling which one it answers
            self.pace.note(Wait.ANSWER, now - state.asked_at)

    def _take(self, state: Collecting, now: Seconds) -> None:
        if len(state.granted) == state.needed:
            self.pace.note(Wait.GRANTS, now - state.asked_at)
            self._begin(state)
        else:
            self._state = state

    def _begin(self, state: Collecting) -> None:
        ticket, members = state.ticket, tuple(sorted((self._me, *state.granted)))
        weights = self._weigh(members)
        lease_s = state.claim.lease_s
        expires_at = state.asked_at + self._config.time_in_group_s(lease_s)
        self._state = InGroup(ticket, members, expires_at, lease_s, members, weights)
        for peer in state.granted:
            self._emit(Send(peer, Begin(ticket, members, weights)))  # lost: it grants again
        for peer in (*state.queued, *state.asked):
            self._emit(Send(peer, Release(ticket)))  # lost: it will grant, and be told again
        self._emit(Average(ticket, members, What.MODELS, weights))

    def _handle_busy(self, source: PeerId, ticket: Ticket, now: Seconds) -> None:
        match self._state:
            case Collecting() as state if state.ticket == ticket and source in state.asked:
                self._answered(state, source, now)
                state = state.without(source)
                self._ask_more(replace(state, queued=(*state.queued, source)))
            case _:
                pass  # it has granted since, or we do without it

    def _drop(self, peer: PeerId, outcome: Outcome, why: str, now: Seconds) -> None:
        """Do without one candidate; if too few are left, our claim has failed, and says why."""
        state = self._state
        assert isinstance(state, Collecting)
        if peer not in state.told and peer not in state.unasked:
            return
        state = state.without(peer)
        state = replace(state, dropped=(*state.dropped, peer))
        if len(state.told) + len(state.unasked) < state.needed:
            self._fail(outcome, why, now)
        else:
            self._ask_more(state)

    def _fail(self, outcome: Outcome, why: str, now: Seconds) -> None:
        """Give up our claim: everyone asked is released, also who has not answered yet."""
        state = self._state
        assert isinstance(state, Collecting)
        self._free(state.ticket)
        for peer in state.told:
            self._emit(Send(peer, Release(state.ticket)))  # lost: it grants, and is told again
        asked = tuple(sorted((self._me, *state.told, *state.dropped)))
        self._emit(GroupEnded(state.ticket, outcome, why, asked))
        self._next_turn(now)

    # --- the member's side ------------------------------------------------------------------------

    def _handle_claim(self, source: PeerId, claim: Claim, now: Seconds) -> None:
        if claim.ticket.initiator != source:
            return  # not a claim that its sender could make: nothing to answer
        if not 0 < claim.lease_s <= self._config.lease_s:
            self._disown(source, claim.ticket)  # we promise ourselves to nobody for so long
            return
        if not self._is_ready():
            self._disown(source, claim.ticket)  # our model is not what they want to average with
            return
        self._clock = max(self._clock, min(claim.born, self._clock + MOST_TICKS))
        match self._state:
            case Granted(ticket=ticket) if ticket == claim.ticket:
                self._emit(Send(source, Grant(ticket)))  # our first grant was lost
            case InGroup(ticket=ticket) if ticket == claim.ticket:
                pass  # a late duplicate
            case _ if claim.ticket in self._ended:
                self._disown(source, claim.ticket)  # an even later one
            case _ if not self._is_past(claim.ticket):
                self._enqueue(claim)
                self._consider(claim, now)
                if claim in self._queue:
                    self._emit(Send(source, Busy(claim.ticket, str(self._state))))
            case _:
                pass  # a late one, of which we need not even say so

    def _consider(self, claim: Claim, now: Seconds) -> None:
        """A claim has joined our queue: does it change what we do?"""
        initiator = claim.ticket.initiator
        match self._state:
            case Free():
                self._next_turn(now)
            case Granted(ticket=ticket) if ticket.initiator == initiator:
                self._free(ticket)  # its initiator is past it: a `Release` was lost, or comes later
                self._next_turn(now)
            case Granted() as state if claim == self._queue[0]:
                self._maybe_inquire(state)
            case Collecting() as state if age(claim) < age(state.claim):
                why = f"{state.ticket} gave way to the older claim {claim.ticket}"
                self._fail(Outcome.YIELDED, why, now)
            case Collecting() as state if initiator in state.unasked:
                # It wants a group, and will yield to us.
                self._state = replace(state.without(initiator), asked=(*state.asked, initiator))
                self._emit(Send(initiator, state.claim))  # lost: sent again at `resend_at`
            case _:
                pass

    def _is_past(self, ticket: Ticket) -> bool:
        """True if we know a newer claim of the same initiator."""
        known = [claim.ticket for claim in self._queue]
        if isinstance(self._state, Granted | InGroup):
            known.append(self._state.ticket)
        return any(other.initiator == ticket.initiator and ticket < other for other in known)

    def _grant(self, claim: Claim, now: Seconds) -> None:
        self._state = Granted(claim, now, now + self._config.resend_s)
        self._emit(Send(claim.ticket.initiator, Grant(claim.ticket)))  # lost: sent again

    def _handle_begin(self, source: PeerId, begin: Begin, now: Seconds) -> None:
        ticket, members = begin.ticket, begin.members
        if source != ticket.initiator or not {source, self._me} <= set(members):
            return  # not a group that its sender could form
        match self._state:
            case Granted() as state if state.ticket == ticket:
                lease_s = state.claim.lease_s
                expires_at = state.granted_at + self._config.time_in_group_s(lease_s)
                if now < expires_at:
                    self._state = InGroup(ticket, members, expires_at, lease_s)
                    self._emit(Average(ticket, members, What.MODELS, begin.weights))
                else:
                    self._free(ticket)
                    self._disown(source, ticket)
                    self._next_turn(now)
            case InGroup(ticket=current) if current == ticket:
                pass  # a duplicate
            case _:
                self._disown(source, ticket)  # our lease lapsed

    # --- both sides -------------------------------------------------------------------------------

    def _handle_release(self, source: PeerId, ticket: Ticket, now: Seconds) -> None:
        """`source` is not in `ticket`, or has nothing to do with it any more."""
        if source == ticket.initiator:
            self._queue = tuple(claim for claim in self._queue if claim.ticket != ticket)
        match self._state:
            case Granted() as state if state.ticket == ticket and source == ticket.initiator:
                self._free(ticket)
                self._next_turn(now)
            case Collecting() as state if state.ticket == ticket:
                self._drop(source, Outcome.REFUSED, f"{source} is not to be had", now)
            case InGroup(members=members) as state if state.ticket == ticket and source in members:
                self._abandon(Outcome.REFUSED, f"{source} is not in the group any more", now)
            case _:
                pass

    def _forget(self, peer: PeerId, why: str) -> None:
        """Neither the claim of `peer` nor `peer` for our own claim waits for its turn any more."""
        self._queue = tuple(claim for claim in self._queue if claim.ticket.initiator != peer)
        if self._wish and peer in self._wish.candidates:
            candidates = tuple(other for other in self._wish.candidates if other != peer)
            wish, self._wish = self._wish, replace(self._wish, candidates=candidates)
            if len(candidates) < wish.needed:
                self._wish = None
                self._emit(GroupEnded(wish.ticket, Outcome.LOST, why, (self._me,)))

    def _do_without(self, peer: PeerId, why: str, now: Seconds) -> None:
        match self._state:
            case Collecting():
                self._drop(peer, Outcome.LOST, why, now)
            case Granted(ticket=ticket) if ticket.initiator == peer:
                self._free(ticket)
                self._next_turn(now)
            case _:
                pass

    def _lapse(self, now: Seconds) -> None:
        """Carry out the deadlines that have passed, before anything else happens."""
        match self._state:
            case Collecting() as state if state.give_up_at <= now:
                self.pace.missed(Wait.GRANTS)
                whom = ", ".join((*state.queued, *state.asked))
                why = f"no grant from {whom} in {state.give_up_at - state.asked_at:g} s"
                self._fail(Outcome.LATE, why, now)
            case Granted() as state if state.granted_at + state.claim.lease_s <= now:
                self._free(state.ticket)
                self._next_turn(now)
            case InGroup() as state if state.expires_at <= now:
                why = f"the average was not over when its lease of {state.lease_s:g} s ended"
                self._abandon(Outcome.LATE, why, now)
            case _:
                pass

    def _disown(self, source: PeerId, ticket: Ticket) -> None:
        """Tell `source` that we are not in `ticket` with it, unless we have applied its average."""
        ended = self._ended.get(ticket)
        if not (ended and ended.done and source in ended.members):
            self._emit(Send(source, Release(ticket)))  # lost: `source` asks again, or streams end

    def _abandon(self, outcome: Outcome, why: str, now: Seconds) -> None:
        state = self._state
        assert isinstance(state, InGroup)
        self._emit(Abandon(state.ticket, outcome, why))
        self._leave_group(outcome, why, now)

    def _leave_group(self, outcome: Outcome, why: str, now: Seconds) -> None:
        state = self._state
        assert isinstance(state, InGroup)
        self._born = None
        self._note_average(state, outcome, now)
        self._free(state.ticket, Ended(state.members, outcome is Outcome.DONE))
        if state.ticket.initiator == self._me:
            self._emit(GroupEnded(state.ticket, outcome, why, state.members))
        self._next_turn(now)

    def _note_average(self, state: InGroup, outcome: Outcome, now: Seconds) -> None:
        since = state.expires_at - self._config.time_in_group_s(state.lease_s)
        match outcome:
            case Outcome.DONE:
                self.pace.note(Wait.AVERAGE, now - since)
            case Outcome.LATE:
                self.pace.missed(Wait.AVERAGE)
            case _:
                self.pace.broke(Wait.AVERAGE, now - since)

    def _free(self, ticket: Ticket, ended: Ended = NEVER_FORMED) -> None:
        """Our part in `ticket` is over, for good; somebody's turn is next."""
        self._state = Free()
        self._ended[ticket] = ended
        if len(self._ended) > ENDED_REMEMBERED:
            del self._ended[next(iter(self._ended))]
