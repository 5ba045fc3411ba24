"""The group lock: one slot per peer, one arbiter for all groups, never a deadlock.

Rule 1: all state of a peer's slot changes here, in handlers that run to completion.
Rule 2: this file does not know what a group is for, nor who decided that it should be formed.

Every group is formed by a *request* of one peer, its initiator, for itself and any `needed` of some
`candidates`, after Maekawa (1985), with Sanders' way out of deadlocks (1987): a peer that is
promised to a younger request asks to be let go.

**The protocol in six lines.** The *initiator* sends `Request` to as many candidates as it needs and
some to spare. One that is free answers `Grant` and promises its slot to no other; any other
keeps the request in its queue, answers `Failed`, at once, and the next candidate is asked. As soon
as enough have granted, the initiator sends `Begin` to those, with the list of them, and `Release`
to all others that it had asked: the group is formed, and each member moves its chunks under the
ticket. A group needs no message to end: each member is free when its own average has ended, and
grants the oldest request in its queue, or starts its own if that is older. (A peer that cannot be
in the group says `Relinquish`.)

**Offers.** A trainer that waits for a group offers its slot to the group's *coordinator*, with the
message that says it waits: a grant in advance, of the lowest priority, so that a barrier costs one
message each way. An offer holds nothing: if any request, or a wish of its own, wants the slot
before the group has begun, the peer sends `Inquire`, and the coordinator lets it go at once,
whatever it is doing, and asks for it by `Request` like for anybody, if it is collecting. Each offer
has a ticket of the offering peer; `Begin` names the offer that it takes: a stale one is refused.

::

                our turn                    enough have granted              average ended,
        +------> COLLECTING -----------------------------------> IN_GROUP - broken, refused --+
        |            |   too few are left, late: Release to all    ^  ^                       |
      FREE <---------+   an older request comes: yield             |  |                       |
      ^ ^ |          +-----------+                                 |  |                       |
      | | |  Request             v              Begin              |  |                       |
      | | +------------------> GRANTED ----------------------------+  |                       |
      | |  nobody wants us       | Release, lease lapsed, dead        |                       |
      | +----> OFFERED --------- | ------------ Begin ----------------+                       |
      |            | Release     |                                                            |
      +------------+-------------+------------------------------------------------------------+

**Why no cycle of waits can exist.** Requests are ordered by age: a Lamport clock, with the ticket
to break ties. Look at what a peer can wait for.

1. COLLECTING waits for answers to its request, which a peer that receives it gives in the handler
   that receives it; and for those candidates that have answered `Failed`. Such a candidate is
   * IN_GROUP (case 3), GRANTED to a request whose group has formed, which `Begin` will tell it, or
     OFFERED (case 4); or
   * COLLECTING or GRANTED for an *older* request. For a younger one it does not stay: if it is its
     own, it yields at once; if not, it sends `Inquire` to that request's initiator, which lets it
     go if it is still collecting, for good under this ticket.
2. GRANTED waits for the word of one initiator, which is COLLECTING for that ticket (case 1), or in
   the group, or does not know the ticket any more; then it says `Begin` or `Release` when told of
   the grant again.
3. IN_GROUP waits for the chunks of the members of the same ticket, all of which are in that group
   and in no other, or will enter it or refuse it in the handler that receives `Begin`; and for
   nothing else. While bytes move no deadline ends it; where none do, `core/repair.py` ends it.
4. OFFERED waits for whatever comes first. To get its slot back it waits for the coordinator's
   answer to `Inquire`, which that gives in the handler that receives it: `Release`, or `Begin`.

So a chain of waits leads from younger requests to older ones, or ends in a formed group: no cycle,
whoever formed the groups. A request of our own that waits for its turn holds nothing.

**Why everybody's turn comes.** Of all requests that are being collected the oldest gets each
candidate that it has asked as soon as the group which that one is in, if any, has ended: nobody
else's request is granted before it, and it is let go by all others. A request that comes to nothing
hands its age on to our next one of the same formation, until one has formed. Only finitely many
requests can be older than a given one (every peer's clock grows with each request that it makes or
hears of), and each of those forms, is given up, or dies with its initiator; so a peer that keeps
asking is the oldest one day, and in a group soon after. A request that is given up because its
candidates are busy for longer than `acquire_timeout_s` stays in their order when it comes again.

**What each timer protects.** The arguments above need none; they bound the damage of lost messages
and dead peers. Each is shorter than configured where less was seen to be enough (`TimeoutPolicy`).

* `resend_s`: requests without a grant, and grants without an answer, are sent again. That repairs
  every loss: a request that comes again is answered again; a grant that comes again is answered
  with `Begin` or `Release`, whichever was lost. No lost message idles anybody for a lease. Where
  all have answered that they are busy, each interval is as long as all before it.
* `acquire_timeout_s`: an initiator stops collecting (candidates died, or average for too long).
* `lease_s`: so long after its grant a granter is free again (the initiator is silent: it died), and
  so long after it has first asked for its offer back, a peer has it back. Should the group form all
  the same, it refuses it, and the group ends or goes on without it. A *formed* group has no lease:
  an average in which nothing moves is broken (`core/repair.py`, `core/transfers.py`).
* A peer that holds our slot without forming a group, or in groups that break, is granted more and
  more seldom (`core/slot_credit.py`).
* Deadlines bind before anything else happens: a peer that was paused takes no late `Begin` or
  `Grant` for a timely one.
* The *ticket* fences the rest: chunks under a ticket that is not `holds` are refused, and a result
  is applied only while it is held. A group commits only if every member has entered it, and a peer
  enters one at a time: so no two groups that share a peer are applied at once.

**What a late duplicate can do.** Nothing. Each peer remembers the last tickets that it was part of.
It never promises itself to one twice, nor enters it twice; and once its average is *done*, it says
nothing about the ticket to other members: one of them may still be taking the last chunks in, and
a `Relinquish` would make it throw away what we have applied. A newer ticket of the same initiator
shows that the older one is over; a coordinator takes no offer that it has let go.

**What happens when each message is lost** stands in `core/messages.py`, and is shown by
`tests/core/test_group_lock.py` and `test_group_lock_offers.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from p2ptrain.core.contribution import MODEL, Contribution
from p2ptrain.core.effects import Abandon, Average, GroupEnded, Outcome, Send
from p2ptrain.core.lock_state import (
    NEVER_FORMED,
    Collecting,
    Ended,
    Free,
    Granted,
    InGroup,
    Offered,
    Promise,
    Slot,
    Wish,
    age,
)
from p2ptrain.core.messages import (
    Begin,
    Failed,
    Grant,
    Inquire,
    Release,
    Relinquish,
    Request,
    SlotMessage,
)
from p2ptrain.core.purpose import GOSSIP, Formation, Purpose
from p2ptrain.errors import LocalProtocolError
from p2ptrain.ids import PeerId, Seconds, Ticket

SAME_FOR_ALL: Mapping[PeerId, Purpose] = MappingProxyType({})
"""Every candidate is asked for the same group."""

MOST_TICKS = 1 << 32
"""No request sets our clock forward by more: a made-up age must not drive it to where our own
requests cannot be encoded any more."""

MOST_SAMPLES = 1 << 62
"""Of all who are not in a group: members that do not exist may have said that they made more, and a
`Begin` with a larger number is not understood by anybody (`net/wire.py`)."""


class GroupLock(Slot):
    """One peer's slot. Effects are handed to `emit`.

    Args:
        admits: true if we can be in such a group of this initiator; asked when it is requested, and
            again when our slot would be granted.
        timeouts: none: as configured.
        credit: none: others may hold us for as long as they like.
    """

    def request(
        self,
        candidates: Sequence[PeerId],
        needed: int,
        now: Seconds,
        purpose: Purpose = GOSSIP,
        purposes: Mapping[PeerId, Purpose] = SAME_FOR_ALL,
    ) -> Ticket:
        """Request a group of ourselves and `needed` of `candidates`, preferred in this order.

        It ends in `Average` and then `GroupEnded`, or in `GroupEnded` only. While we are somebody
        else's, it waits for its turn. A group that is not gossip may be of ourselves alone. A pair
        may be for something else with each candidate: `purposes` then says so, and each of them is
        asked for its own, and begins with that.

        Raises:
            LocalProtocolError: if `candidates` repeats a peer, contains us or has less than
                `needed`, or none is needed, or a group that is no pair has several purposes.
        """
        alone = not candidates and not needed and purpose.formation is not Formation.CLAIMED
        once = len({self._me, *candidates}) == len(candidates) + 1
        if not once or not (alone or 1 <= needed <= len(candidates)):
            raise LocalProtocolError(
                f"{self._me} cannot claim a group with {needed} of {list(candidates)}"
            )
        if purposes and needed != 1:
            raise LocalProtocolError(f"{self._me} cannot claim {needed} for several purposes")
        self._lapse(now)
        if purpose.formation is Formation.CLAIMED:  # stable: else in the order of preference
            candidates = sorted(candidates, key=lambda peer: self._credit.is_spent(peer, now))
        pairs = tuple(purposes.items())
        wish = Wish(self.next_ticket(), tuple(candidates), needed, purpose, pairs)
        asked = [other.purpose.formation for other in self._wishes]
        if isinstance(self._state, Collecting):
            asked.append(self._state.request.purpose.formation)
        if purpose.formation in asked:
            self._end_wish(wish, Outcome.BUSY, f"{self._me} has another request under way")
        else:
            self._wishes = (*self._wishes, wish)
            self._slot_is_wanted(now)
        return wish.ticket

    def offer(self, coordinator: PeerId, purpose: Purpose, now: Seconds) -> None:
        """Let `coordinator` begin such a group with us, whenever no other wants our slot."""
        if self._offering != (coordinator, purpose):
            self._offering = (coordinator, purpose)
            self._take_offer_back(now)

    def withdraw_offer(self, now: Seconds) -> None:
        """We do not wait for a group any more, or are its coordinator ourselves."""
        self._offering = None
        self._take_offer_back(now)

    def receive(self, source: PeerId, message: SlotMessage, now: Seconds) -> None:
        self._lapse(now)
        match message:
            case Request():
                self._handle_request(source, message, now)
            case Grant(ticket=ticket, contribution=contribution):
                self._handle_grant(source, ticket, contribution, now)
            case Inquire(ticket=ticket):
                self._handle_inquire(source, ticket, now)
            case Failed(ticket=ticket):
                self._handle_failed(source, ticket, now)
            case Begin():
                self._handle_begin(source, message, now)
            case Release(ticket=ticket):
                self._handle_release(source, ticket, now)
            case Relinquish(ticket=ticket):
                self._handle_relinquish(source, ticket, now)

    def average_ended(self, ticket: Ticket, outcome: Outcome, why: str, now: Seconds) -> None:
        """Our own average under `ticket` is over; it is the next one's turn."""
        state, done = self._state, outcome is Outcome.DONE
        if not isinstance(state, InGroup) or state.ticket != ticket:
            if ticket in self._ended:  # abandoned too late: it was applied
                self._ended[ticket] = replace(self._ended[ticket], done=done)
            return
        purpose, lasted_s = state.begin.purpose, now - state.since
        if purpose.formation is Formation.CLAIMED:
            others = [peer for peer in state.members if peer != self._me]
            if done:
                self._credit.used(others, lasted_s)
            else:
                self._credit.broke(others, lasted_s, now)
        self._born.pop(purpose.formation, None)
        if done:
            self.timeouts.averages.took(lasted_s)
        else:
            self.timeouts.averages.broke(lasted_s)
        if ticket.initiator == self._me:
            self._emit(GroupEnded(ticket, outcome, why, state.members, purpose))
        self._free(ticket, now, Ended(state.members, done))

    def regroup(self, ticket: Ticket, members: tuple[PeerId, ...]) -> None:
        """Our group goes on without some of its members (`core/repair.py`)."""
        if isinstance(self._state, InGroup) and self._state.ticket == ticket:
            self._state = replace(self._state, members=members)

    def peer_out(self, peer: PeerId, why: str, now: Seconds, *, crashed: bool) -> None:
        """Nothing waits any more for a peer that crashed, is cut off, or said goodbye.

        One that said goodbye has ended its part in its group, and ours ends by itself.
        """
        self._queue.pop(peer, None)
        self._offers.pop(peer, None)
        if self._offering and self._offering[0] == peer:
            self._offering = None  # our next one goes to somebody else
        wishes, self._wishes = self._wishes, ()
        for wish in wishes:
            candidates = tuple(other for other in wish.candidates if other != peer)
            if len(candidates) < wish.needed:
                self._end_wish(wish, Outcome.LOST, why)
            else:
                self._wishes = (*self._wishes, replace(wish, candidates=candidates))
        match self._state:
            case InGroup() as state if crashed and peer in state.members:
                self._abandon(state.ticket, Outcome.LOST, why, now)
            case Collecting() as state:
                self._drop(state, peer, Outcome.LOST, why, now)
            case Granted(ticket=ticket) if ticket.initiator == peer:
                self._free(ticket, now)
            case Offered(to=coordinator) if coordinator == peer:
                self._take_offer_back(now)
            case _:
                pass

    def withdraw(self, why: str, now: Seconds) -> None:
        """We stop: give up our requests, offers and promises. A formed group is left to end.

        Requests of others are served from now on like before.
        """
        self._born.clear()
        self._offering = None
        self._offers = {peer: last for peer, last in self._offers.items() if last[1] is None}
        wishes, self._wishes = self._wishes, ()
        for wish in wishes:
            self._end_wish(wish, Outcome.WITHDRAWN, why)
        match self._state:
            case Collecting() as state:
                self._fail(state, Outcome.WITHDRAWN, why, now)
            case Granted(ticket=ticket):
                # Lost: `Begin` or an unanswered request shows it, or the initiator's time-out.
                self._emit(Send(ticket.initiator, Relinquish(ticket)))
                self._free(ticket, now)
            case Offered():
                self._take_offer_back(now)
            case _:
                pass

    def handle_timer(self, now: Seconds) -> None:
        self._lapse(now)
        match self._state:
            case Collecting() as state if state.resend_at <= now:
                if state.asked:
                    self.timeouts.answers.missed()
                for peer in state.waiting:
                    self._emit(Send(peer, state.request_to(peer)))
                silent, again_s = (*state.silent, *state.asked), self._config.resend_s
                if not silent:  # all are in an average, perhaps a long one: ask less and less often
                    again_s = max(again_s, now - state.asked_at)
                # A peer that is dead, or cut off, keeps us from asking others no longer.
                self._proceed(replace(state, resend_at=now + again_s, asked=(), silent=silent))
            case Granted(ticket=ticket, contribution=stated) as state if state.resend_at <= now:
                self._state = replace(state, resend_at=now + self._config.resend_s)
                if not self._maybe_inquire(state):
                    self._emit(Send(ticket.initiator, Grant(ticket, stated)))
            case Offered() as state if self._is_wanted and state.resend_at <= now:
                self._ask_offer_back(state, now)
            case _:
                pass

    def next_deadline(self) -> Seconds | None:
        match self._state:
            case Free() | InGroup():
                return None
            case Offered() as state:
                return min(state.resend_at, state.lapses_at) if self._is_wanted else None
            case Collecting() as state:
                return min(state.resend_at, state.give_up_at)
            case Granted() as state:
                return min(state.resend_at, state.granted_at + self._config.lease_s)

    # --- whose turn it is -------------------------------------------------------------------------

    def _next_turn(self, now: Seconds) -> None:
        """We are free: grant the oldest request that waits for us, or start our own."""
        while isinstance(self._state, Free):
            oldest, own = self._oldest(), self._own_request()
            if own and (oldest is None or age(own) < age(oldest)):
                self._start(own, now)
            elif oldest:
                self._dequeue(oldest.ticket)
                self._grant(oldest, now)
            elif self._offering:
                coordinator, purpose = self._offering
                ticket, stated = self.next_ticket(), self._environment.contribution(purpose)
                self._state = Offered(ticket, coordinator, purpose, stated, now)
            else:
                return

    def _free(self, ticket: Ticket, now: Seconds, ended: Ended = NEVER_FORMED) -> None:
        """Our part in `ticket` is over, for good; somebody's turn is next."""
        if isinstance(self._state, Granted) and _is_claimed(self._state.request):
            self._credit.wasted((ticket.initiator,), now - self._state.granted_at, now)
        self._state = Free()
        self._remember(ticket, ended)
        self._next_turn(now)

    def _slot_is_wanted(self, now: Seconds) -> None:
        """A request of ours, or somebody else's, has come to wait: does it change what we do?"""
        match self._state:
            case Free():
                self._next_turn(now)
            case Granted() as state:
                self._maybe_inquire(state)
            case Offered() as state:
                self._ask_offer_back(state, now)
            case _:
                pass

    # --- our offer --------------------------------------------------------------------------------

    def _take_offer_back(self, now: Seconds) -> None:
        """What we offered is not to be had any more: should a group begin with it, we refuse."""
        if isinstance(self._state, Offered):
            self._state = Free()
        self._next_turn(now)

    def _ask_offer_back(self, state: Offered, now: Seconds) -> None:
        lapses_at = min(state.lapses_at, now + self._config.lease_s)
        self._state = replace(state, resend_at=now + self._config.resend_s, lapses_at=lapses_at)
        self._emit(Send(state.to, Inquire(state.ticket)))  # lost: sent again at `resend_at`

    # --- the initiator's side ---------------------------------------------------------------------

    def _start(self, own: Request, now: Seconds) -> None:
        wish, self._wishes = self._wishes[0], self._wishes[1:]
        if not self._admits(self._me, own.purpose):
            self._end_wish(wish, Outcome.REFUSED, f"{self._me} has gone on meanwhile")
            return
        # A peer that waits for us will yield to us: it is younger.
        candidates = sorted(wish.candidates, key=lambda peer: peer not in self._queue)
        offered = [self._offers[peer][1] for peer in candidates if peer in self._offers]
        granted = tuple(p for p in offered if p and own.purpose.fulfils(p.purpose))[: wish.needed]
        granters = [promise.peer for promise in granted]
        unasked = tuple(peer for peer in candidates if peer not in granters)
        give_up_at, resend_at = now + self.timeouts.acquire_s, now + self.timeouts.answers.seconds
        self._proceed(
            Collecting(
                own,
                wish.needed,
                unasked,
                now,
                give_up_at,
                resend_at,
                granted=granted,
                purposes=wish.purposes,
            )
        )

    def _proceed(self, state: Collecting) -> None:
        """Begin, or ask as many as are needed and some to spare, and more where they are busy."""
        if len(state.granted) == state.needed:
            self._begin(state)
            return
        spare = len(state.granted) + len(state.asked) - state.needed
        count = min(
            self._config.spare_claims - spare,
            self._config.spare_places - spare - len(state.busy) - len(state.silent),
        )
        now, later = state.unasked[: max(0, count)], state.unasked[max(0, count) :]
        self._state = replace(state, unasked=later, asked=(*state.asked, *now))
        for peer in now:
            self._emit(Send(peer, state.request_to(peer)))  # lost: sent again at `resend_at`

    def _handle_grant(
        self, source: PeerId, ticket: Ticket, contribution: Contribution, now: Seconds
    ) -> None:
        """`source` is promised to us."""
        match self._state:
            case Collecting() as state if state.ticket == ticket and source in state.told:
                if source not in state.granters:
                    if source in state.asked:  # else it was asked twice: which one does it answer?
                        self.timeouts.answers.took(now - state.asked_at)
                    granted = (*state.granted, Promise(source, contribution))
                    if len(granted) == state.needed:
                        self.timeouts.grants.took(now - state.asked_at)
                    self._proceed(replace(state.without(source), granted=granted))
            case _:
                self._tell_begun(source, ticket)

    def _tell_begun(self, source: PeerId, ticket: Ticket) -> None:
        """To a grant, or a wish to be let go, that comes too late, or again."""
        state = self._state
        if isinstance(state, InGroup) and state.ticket == ticket and source in state.members:
            self._emit(Send(source, state.begin))  # the first one was lost
        else:  # lost: it grants, or inquires, again
            self._emit(Send(source, Release(ticket)))

    def _handle_inquire(self, source: PeerId, ticket: Ticket, now: Seconds) -> None:
        """`source` would rather be let go."""
        match self._state:
            case _ if ticket.initiator == source:
                self._let_offer_go(source, ticket)
            case Collecting() as state if state.ticket == ticket and source in state.told:
                self._emit(Send(source, Release(ticket)))  # lost: it inquires again
                why = f"{source} was wanted by an older request"
                self._drop(state, source, Outcome.YIELDED, why, now)
            case _:
                self._tell_begun(source, ticket)

    def _let_offer_go(self, source: PeerId, offer: Ticket) -> None:
        """Any request may take an offer back until its group has begun."""
        if self._tell_taken(offer):
            return
        self._void(offer)
        self._emit(Send(source, Release(offer)))  # lost: it inquires again
        state = self._state
        if isinstance(state, Collecting) and any(p.offer == offer for p in state.granted):
            state = state.without(source)
            self._state = replace(state, asked=(*state.asked, source))
            self._emit(Send(source, state.request_to(source)))  # lost: sent again at `resend_at`

    def _begin(self, state: Collecting) -> None:
        begun = state.request_to(state.granters[0]) if state.granted else state.request
        ticket, purpose = state.ticket, begun.purpose
        mine = Promise(self._me, self._environment.contribution(purpose))
        promises = sorted((mine, *state.granted), key=lambda promise: promise.peer)
        members = tuple(promise.peer for promise in promises)
        stated = tuple(promise.contribution for promise in promises)
        begin = Begin(
            ticket,
            members,
            self._environment.weigh(members),
            purpose,
            () if all(one == MODEL for one in stated) else stated,
            min(self._environment.outside_samples(members), MOST_SAMPLES),
        )
        offers = tuple(promise.offer for promise in state.granted if promise.offer)
        for offer in offers:
            self._void(offer)
        for promise in state.granted:
            # Lost: it grants, or offers, again.
            self._emit(Send(promise.peer, replace(begin, offer=promise.offer)))
        for peer in state.waiting:
            self._emit(Send(peer, Release(ticket)))  # lost: it will grant, and be told again
        self._enter(begin, state.asked_at, offers)

    def _enter(self, begin: Begin, since: Seconds, offers: tuple[Ticket, ...] = ()) -> None:
        begin = replace(begin, offer=None)
        self._state = InGroup(begin, begin.members, since, offers)
        self._emit(
            Average(
                begin.ticket,
                begin.members,
                begin.weights,
                begin.purpose,
                begin.contributions,
                begin.outside_samples,
            )
        )

    def _handle_failed(self, source: PeerId, ticket: Ticket, now: Seconds) -> None:
        state = self._state
        if isinstance(state, Collecting) and state.ticket == ticket and source in state.waiting:
            if source in state.asked:
                self.timeouts.answers.took(now - state.asked_at)
            if source not in state.busy:
                self._proceed(replace(state.without(source), busy=(*state.busy, source)))

    def _drop(
        self, state: Collecting, peer: PeerId, outcome: Outcome, why: str, now: Seconds
    ) -> None:
        """Do without one candidate; if too few are left, our request has failed, and says why."""
        if peer not in state.told and peer not in state.unasked:
            return
        state = replace(state.without(peer), dropped=(*state.dropped, peer))
        if len(state.told) + len(state.unasked) < state.needed:
            self._fail(state, outcome, why, now)
        else:
            self._proceed(state)

    def _fail(self, state: Collecting, outcome: Outcome, why: str, now: Seconds) -> None:
        """Give up our request: everyone asked is released, also who has not answered yet.

        Those who have offered their slots have not been asked: their offers stand.
        """
        offered = [promise.peer for promise in state.granted if promise.offer]
        for peer in state.told:
            if peer not in offered:
                # Lost: it grants, and gets another.
                self._emit(Send(peer, Release(state.ticket)))
        asked = tuple(sorted((self._me, *state.told, *state.dropped)))
        self._emit(GroupEnded(state.ticket, outcome, why, asked, state.request.purpose))
        self._free(state.ticket, now)

    # --- the member's side ------------------------------------------------------------------------

    def _handle_request(self, source: PeerId, request: Request, now: Seconds) -> None:
        ticket = request.ticket
        if ticket.initiator != source:
            return  # not a request that its sender could make: nothing to answer
        self._clock = max(self._clock, min(request.born, self._clock + MOST_TICKS))
        match self._state:
            case Granted(request=granted, contribution=stated) if granted.ticket == ticket:
                self._emit(Send(source, Grant(ticket, stated)))  # our first grant was lost
            case _ if ticket in self._ended:
                self._disown(source, ticket)  # a late duplicate
            case _ if self.holds(ticket) or self._is_past(ticket):
                pass  # another one, of which we need not even say so
            case _ if not self._admits(source, request.purpose):
                self._refuse(source, ticket)
            case _ if self._has_held_us_too_long(request, now):
                pass  # it has been told
            case _:
                self._queue[source] = request
                self._consider(request, now)
                if self._queue.get(source) == request:
                    self._emit(Send(source, Failed(ticket, str(self._state))))

    def _consider(self, request: Request, now: Seconds) -> None:
        """A request has joined our queue: does it change what we do?"""
        initiator = request.ticket.initiator
        match self._state:
            case Granted(request=granted) if granted.ticket.initiator == initiator:
                # Its initiator is past it: a `Release` was lost, or comes later.
                self._free(granted.ticket, now)
            case Granted() if request != self._oldest():
                pass
            case Collecting() as state if age(request) < age(state.request):
                why = f"{state.ticket} gave way to the older request {request.ticket}"
                self._fail(state, Outcome.YIELDED, why, now)
            case Collecting() as state if initiator in state.unasked:
                # It wants a group, and will yield to us.
                self._state = replace(state.without(initiator), asked=(*state.asked, initiator))
                self._emit(Send(initiator, state.request_to(initiator)))  # lost: comes again
            case _:
                self._slot_is_wanted(now)

    def _grant(self, request: Request, now: Seconds) -> None:
        ticket, initiator = request.ticket, request.ticket.initiator
        if not self._admits(initiator, request.purpose):
            self._refuse(initiator, ticket)  # what it is for has gone on meanwhile
            return
        if self._has_held_us_too_long(request, now):
            return
        stated = self._environment.contribution(request.purpose)
        self._state = Granted(request, stated, now, now + self._config.resend_s)
        self._emit(Send(initiator, Grant(ticket, stated)))  # lost: sent again

    def _has_held_us_too_long(self, request: Request, now: Seconds) -> bool:
        """True if the initiator must wait: it is answered like by a busy peer, and asks again."""
        ticket = request.ticket
        if not _is_claimed(request) or not self._credit.is_spent(ticket.initiator, now):
            return False
        why = f"{ticket.initiator} has held {self._me} for long, and nothing came of it"
        self._emit(Send(ticket.initiator, Failed(ticket, why)))
        return True

    def _refuse(self, source: PeerId, ticket: Ticket) -> None:
        """For good: our word may arrive when a later `Grant` has, and no chunks wait for us."""
        self._dequeue(ticket)
        self._remember(ticket, NEVER_FORMED)
        self._disown(source, ticket)

    def _handle_begin(self, source: PeerId, begin: Begin, now: Seconds) -> None:
        ticket, purpose = begin.ticket, begin.purpose
        if source != ticket.initiator or not {source, self._me} <= {*begin.members}:
            return  # not a group that its sender could form
        match self._state:
            case Granted(request=request, granted_at=since) if request.ticket == ticket:
                if purpose == request.purpose:
                    self._enter(begin, since)
                else:
                    self._disown(source, ticket)  # we have stated our scalars for something else
            case Offered() as state if (state.ticket, state.to) == (begin.offer, source):
                if ticket in self._ended or not purpose.fulfils(state.purpose):
                    self._disown(source, ticket)
                else:
                    self._enter(begin, now)
            case InGroup() as state if state.ticket == ticket:
                pass  # a duplicate
            case _:
                self._refuse(source, ticket)  # our lease lapsed, or our offer was taken back

    # --- both sides -------------------------------------------------------------------------------

    def _handle_release(self, source: PeerId, ticket: Ticket, now: Seconds) -> None:
        """`source` lets us go."""
        state = self._state
        if source == ticket.initiator:
            self._dequeue(ticket)
            if isinstance(state, Granted) and state.ticket == ticket:
                self._free(ticket, now)
        elif isinstance(state, Offered) and (state.ticket, state.to) == (ticket, source):
            self._take_offer_back(now)

    def _handle_relinquish(self, source: PeerId, ticket: Ticket, now: Seconds) -> None:
        """`source` is not in this group."""
        match self._state:
            case Collecting() as state if state.ticket == ticket:
                self._drop(state, source, Outcome.REFUSED, f"{source} is not to be had", now)
            case InGroup() as state if state.ticket == ticket and source in state.members:
                why = f"{source} is not in the group any more"
                self._abandon(ticket, Outcome.REFUSED, why, now)
            case _:
                pass

    def _lapse(self, now: Seconds) -> None:
        """Carry out the deadlines that have passed, before anything else happens."""
        match self._state:
            case Collecting() as state if state.give_up_at <= now:
                whom, waited_s = ", ".join(state.waiting), state.give_up_at - state.asked_at
                if state.waiting == state.busy:
                    self._fail(state, Outcome.BUSY, f"{whom} stayed busy for {waited_s:g} s", now)
                else:
                    self.timeouts.grants.missed()
                    self._fail(state, Outcome.LATE, f"no grant from {whom} in {waited_s:g} s", now)
            case Granted() as state if state.granted_at + self._config.lease_s <= now:
                self._free(state.ticket, now)
            case Offered() as state if self._is_wanted and state.lapses_at <= now:
                self._take_offer_back(now)
            case _:
                pass

    def _abandon(self, ticket: Ticket, outcome: Outcome, why: str, now: Seconds) -> None:
        self._emit(Abandon(ticket, outcome, why))
        self.average_ended(ticket, outcome, why, now)


def _is_claimed(request: Request) -> bool:
    return request.purpose.formation is Formation.CLAIMED
