"""The group lock: several peers, one group each, never a deadlock.

Rule 1: all lock state of a peer changes here, in handlers that run to completion.
Rule 2: this file does not know what a group is for.

**The protocol in five lines.** The *initiator* sends `Claim` to every other member at once. A
member that is free answers `Grant` and promises nobody else; any other member answers `Busy`, at
once. When all have granted, the initiator sends `Begin`: the group is formed, and each member moves
its slices under the ticket. When one is busy, the initiator sends `Release` to all and its claim
has failed. A group needs no message to end: each member is free when its own average has ended.

::

                 request                         last Grant                 average ended,
        +------> COLLECTING -----------------------------------> IN_GROUP - expired, broken --+
        |            |   Busy, late, member gone: Release to all     ^                        |
      FREE <---------+   older claim that includes us: yield         |                        |
      ^ |            +-----------+                                   |                        |
      | |  Claim                 v              Begin                |                        |
      | +------------------> GRANTED --------------------------------+                        |
      |                          | Release, lease lapsed, initiator gone                      |
      +--------------------------+------------------------------------------------------------+

**Why no cycle of waits can exist.** Look at what a peer can wait for.

1. COLLECTING waits for answers to its claims. Whoever receives a claim answers in the handler that
   receives it, whatever state it is in: no answer depends on another claim's progress.
2. GRANTED waits for the word of one initiator, which is COLLECTING for that ticket (case 1), or in
   the group, or does not know the ticket any more; then it says `Begin` or `Release` when inquired.
3. IN_GROUP waits for the slices of the members of the same ticket, all of which are in that group
   and in no other, and wait for nothing but it.

So every chain of waits has at most the links GRANTED -> COLLECTING -> (an immediate answer), or
ends inside one group. Nobody holds one group while waiting for another; there is no queue to be
first in. Two claims that cross (a claims b, b claims a) would refuse each other for ever: the
younger one *yields* to an older claim that includes its own initiator. Age is a Lamport clock with
the peer's name to break ties, a total order, so of any set of crossing claims the oldest never
yields. The yielder is not cheated: it becomes a member of a group, which is what it wanted.

**What each timer protects.** None of them is needed for the argument above; they bound the damage
of lost messages and dead peers.

* `resend_s`: a lost `Claim`, `Grant`, `Begin`: the claim is sent again; a grant that comes again
  after `Begin` shows that `Begin` was lost. A member that granted inquires as often, so that a lost
  `Begin` or `Release` idles nobody for a lease.
* `acquire_timeout_s`: an initiator stops collecting (a member died or is cut off).
* `lease_s`: a granter is free again by itself so long after its grant (the initiator died).
* A member's own time in a group ends *earlier*: `acquire_timeout_s` before its lease would lapse,
  and at the initiator likewise. All grants of one ticket are given within `acquire_timeout_s` of
  the first, so when the earliest lease lapses nobody is in the group any more. (Leases protect the
  granter; without the holder's own deadline a granter could meet others while the group still
  thinks it has it.)
* Deadlines bind before anything else happens: a peer that was paused takes no late `Begin` or
  `Grant` for a timely one, and `holds` nothing that has expired, whether its timer has fired or
  not. Each peer reads its own clock only; clocks may differ, and must run at the same rate.
* The *ticket* fences the rest: slices under a ticket that is not `holds` are refused, and a result
  is applied only while it is held.

**What a late duplicate can do.** Nothing. Each peer remembers the last tickets that it was part of.
It never enters one twice; and once its average is *done*, it says nothing about the ticket any
more: another member may still be taking the last slices in, and a `Release` would make it throw
away what we have applied. A claim under a newer ticket of the initiator we are promised to shows
that the older one is over.

**What happens when each message is lost** stands beside each in `core/messages.py`;
`tests/core/test_group_lock.py` shows every line of it.

Not promised yet: a claim for *particular* members may find one of them busy again and again.
Algorithms that do not care whom they meet ask someone else.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from p2ptrain.core.effects import Abandon, Average, Effect, GroupEnded, Send, What
from p2ptrain.core.events import Outcome
from p2ptrain.core.messages import Begin, Busy, Claim, Grant, Inquire, LockMessage, Release
from p2ptrain.errors import ConfigError, InvariantViolation, LocalProtocolError
from p2ptrain.ids import PeerId, Seconds, Ticket


@dataclass(frozen=True, slots=True, kw_only=True)
class LockConfig:
    """Deadlines of the group lock."""

    lease_s: Seconds = 20.0
    """How long a granted peer stays promised without news. Too short: groups on slow links expire
    in the middle of an average; too long: an unnoticed dead initiator idles its members."""

    acquire_timeout_s: Seconds = 2.0
    """Stop collecting grants after this. Must leave most of the lease for the average itself."""

    resend_s: Seconds = 0.2
    """Ask again after this long without an answer. Too short: duplicates; too long: a lost message
    costs more."""

    def __post_init__(self) -> None:
        for name in ("lease_s", "acquire_timeout_s", "resend_s"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigError(f"lock {name} = {value} must be above 0")
        if self.resend_s >= self.acquire_timeout_s:
            raise ConfigError(
                f"lock resend_s = {self.resend_s} must be below "
                f"acquire_timeout_s = {self.acquire_timeout_s}, or nothing is ever sent again"
            )
        if 2 * self.acquire_timeout_s >= self.lease_s:
            raise ConfigError(
                f"lock acquire_timeout_s = {self.acquire_timeout_s} must be below half of "
                f"lease_s = {self.lease_s}, or no time is left to average in"
            )


@dataclass(frozen=True, slots=True)
class Free:
    def __str__(self) -> str:
        return "free"


@dataclass(frozen=True, slots=True)
class Collecting:
    """Our own claim; `missing` have not granted yet."""

    ticket: Ticket
    born: int
    members: tuple[PeerId, ...]
    missing: tuple[PeerId, ...]
    asked_at: Seconds
    resend_at: Seconds

    def __str__(self) -> str:
        return f"claiming {self.ticket}"


@dataclass(frozen=True, slots=True)
class Granted:
    """Promised to somebody else's claim."""

    ticket: Ticket
    members: tuple[PeerId, ...]
    granted_at: Seconds
    inquire_at: Seconds

    def __str__(self) -> str:
        return f"promised to {self.ticket}"


@dataclass(frozen=True, slots=True)
class InGroup:
    """The group is formed; its average runs."""

    ticket: Ticket
    members: tuple[PeerId, ...]
    expires_at: Seconds

    def __str__(self) -> str:
        return f"averaging in {self.ticket}"


LockState = Free | Collecting | Granted | InGroup

ENDED_REMEMBERED = 64
"""Tickets whose end we remember, far more than can be under way at once."""


class GroupLock:
    """One peer's share of the group lock. Effects are handed to `emit`."""

    def __init__(
        self, me: PeerId, incarnation: int, config: LockConfig, emit: Callable[[Effect], None]
    ) -> None:
        self._me = me
        self._incarnation = incarnation
        self._config = config
        self._emit = emit
        self._state: LockState = Free()
        self._clock = 0  # Lamport's
        self._tickets = 0
        self._ended: dict[Ticket, bool] = {}  # what we were part of, and whether it was done

    @property
    def state(self) -> LockState:
        return self._state

    def holds(self, ticket: Ticket, now: Seconds) -> bool:
        """True while we are in the group of `ticket`: the fence for its slices and its result."""
        state = self._state
        return isinstance(state, InGroup) and state.ticket == ticket and now < state.expires_at

    # --- what happens -----------------------------------------------------------------------------

    def request(self, others: Sequence[PeerId], now: Seconds) -> Ticket:
        """Claim a group of ourselves and `others`; it ends in `Average` or in `GroupEnded`.

        Raises:
            LocalProtocolError: if `others` is empty, repeats a peer or contains us.
        """
        members = tuple(sorted({self._me, *others}))
        if len(members) != len(others) + 1 or len(members) < 2:
            raise LocalProtocolError(f"{self._me} cannot claim a group with {list(others)}")
        self._lapse(now)
        self._tickets += 1
        ticket = Ticket(self._me, self._incarnation, self._tickets)
        if not isinstance(self._state, Free):
            self._emit(GroupEnded(ticket, Outcome.BUSY, f"{self._me} is {self._state}"))
            return ticket
        self._clock += 1
        missing = tuple(peer for peer in members if peer != self._me)
        self._state = Collecting(
            ticket, self._clock, members, missing, now, now + self._config.resend_s
        )
        self._ask(self._state)
        return ticket

    def receive(self, source: PeerId, message: LockMessage, now: Seconds) -> None:
        self._lapse(now)
        match message:
            case Claim():
                self._handle_claim(source, message, now)
            case Grant(ticket=ticket):
                self._handle_grant(source, ticket, now)
            case Busy(ticket=ticket, reason=reason):
                self._handle_busy(source, ticket, reason)
            case Begin(ticket=ticket):
                self._handle_begin(source, ticket, now)
            case Release(ticket=ticket):
                self._handle_release(source, ticket)
            case Inquire(ticket=ticket):
                self._handle_inquire(source, ticket)
            case _:
                assert_never(message)

    def average_ended(self, ticket: Ticket, outcome: Outcome, why: str) -> None:
        """Our own average under `ticket` is over; we are free."""
        if isinstance(self._state, InGroup) and self._state.ticket == ticket:
            self._leave_group(outcome, why)
        elif ticket in self._ended:
            self._ended[ticket] = outcome is Outcome.DONE  # abandoned too late: it was applied

    def peer_gone(self, peer: PeerId, why: str) -> None:
        """A member crashed or is cut off: whatever waits for it does not."""
        match self._state:
            case InGroup(members=members) if peer in members:
                self._abandon(Outcome.LOST, why)
            case _:
                self.peer_left(peer, why)

    def peer_left(self, peer: PeerId, why: str) -> None:
        """A member said goodbye: no claim of it or with it comes to anything, its group does."""
        match self._state:
            case Collecting(members=members) if peer in members:
                self._fail(Outcome.LOST, why)
            case Granted(ticket=ticket) if ticket.initiator == peer:
                self._free(ticket)
            case _:
                pass

    def withdraw(self, why: str) -> None:
        """We are leaving: give up a claim and a promise. A formed group is left to end."""
        match self._state:
            case Collecting():
                self._fail(Outcome.WITHDRAWN, why)
            case Granted(ticket=ticket):
                self._free(ticket)
                # Lost: `Begin` or an unanswered claim shows it, or the initiator's time-out.
                self._emit(Send(ticket.initiator, Release(ticket)))
            case _:
                pass

    def handle_timer(self, now: Seconds) -> None:
        self._lapse(now)
        match self._state:
            case Collecting() as state if state.resend_at <= now:
                self._state = replace(state, resend_at=now + self._config.resend_s)
                self._ask(state)
            case Granted() as state if state.inquire_at <= now:
                self._state = replace(state, inquire_at=now + self._config.resend_s)
                self._emit(Send(state.ticket.initiator, Inquire(state.ticket)))
            case _:
                pass

    def next_deadline(self) -> Seconds | None:
        match self._state:
            case Free():
                return None
            case Collecting() as state:
                return min(state.resend_at, self._give_up_at(state))
            case Granted() as state:
                return min(state.inquire_at, state.granted_at + self._config.lease_s)
            case InGroup() as state:
                return state.expires_at

    def check(self) -> None:
        if not self._is_sound():
            raise InvariantViolation(f"{self._me}: unsound lock state {self._state!r}")

    def _is_sound(self) -> bool:
        match self._state:
            case Collecting(ticket=ticket, members=members, missing=missing):
                mine = ticket.initiator == self._me in members
                return mine and bool(missing) and set(missing) < set(members)
            case Granted(ticket=ticket, members=members):
                theirs = ticket.initiator != self._me and self._me in members
                return theirs and ticket not in self._ended
            case InGroup(ticket=ticket, members=members):
                return self._me in members and len(members) > 1 and ticket not in self._ended
            case Free():
                return True

    # --- the initiator's side ---------------------------------------------------------------------

    def _ask(self, claim: Collecting) -> None:
        # A lost claim or grant is asked for again at `resend_at`.
        for peer in claim.missing:
            self._emit(Send(peer, Claim(claim.ticket, claim.born, claim.members)))

    def _handle_grant(self, source: PeerId, ticket: Ticket, now: Seconds) -> None:
        match self._state:
            case Collecting(ticket=mine) as claim if mine == ticket:
                missing = tuple(peer for peer in claim.missing if peer != source)
                if missing:
                    self._state = replace(claim, missing=missing)
                else:
                    self._begin(claim)
            case InGroup(ticket=current, members=members) if current == ticket:
                if source in members:
                    self._emit(Send(source, Begin(ticket)))  # the first one was lost
            case _:
                self._disown(source, ticket)  # we failed, yielded or restarted since

    def _begin(self, claim: Collecting) -> None:
        expires_at = claim.asked_at + self._config.lease_s - self._config.acquire_timeout_s
        self._state = InGroup(claim.ticket, claim.members, expires_at)
        for peer in claim.members:
            if peer != self._me:
                self._emit(Send(peer, Begin(claim.ticket)))  # lost: the member inquires
        self._emit(Average(claim.ticket, claim.members, What.MODELS))

    def _handle_busy(self, source: PeerId, ticket: Ticket, reason: str) -> None:
        match self._state:
            case Collecting(ticket=mine) as claim if mine == ticket and source in claim.members:
                self._fail(Outcome.BUSY, f"{source} is {reason}")
            case _:
                pass

    def _handle_inquire(self, source: PeerId, ticket: Ticket) -> None:
        match self._state:
            case Collecting(ticket=mine) if mine == ticket:
                pass  # still collecting: the outcome follows by itself
            case InGroup(ticket=current, members=members) if current == ticket:
                if source in members:
                    self._emit(Send(source, Begin(ticket)))
            case _:
                self._disown(source, ticket)

    def _fail(self, outcome: Outcome, why: str) -> None:
        """Give up our claim: everyone asked is released, also who has not answered yet."""
        claim = self._state
        assert isinstance(claim, Collecting)
        self._free(claim.ticket)
        for peer in claim.members:
            if peer != self._me:
                self._emit(Send(peer, Release(claim.ticket)))  # lost: the member inquires
        self._emit(GroupEnded(claim.ticket, outcome, why))

    def _give_up_at(self, claim: Collecting) -> Seconds:
        return claim.asked_at + self._config.acquire_timeout_s

    # --- the member's side ------------------------------------------------------------------------

    def _handle_claim(self, source: PeerId, claim: Claim, now: Seconds) -> None:
        if claim.ticket.initiator != source or not {source, self._me} <= set(claim.members):
            return  # not a claim that its sender could make: nothing to answer
        self._clock = max(self._clock, claim.born)
        match self._state:
            case Granted(ticket=ticket) if ticket == claim.ticket:
                self._emit(Send(source, Grant(ticket)))  # our first grant was lost
            case InGroup(ticket=ticket) if ticket == claim.ticket:
                pass  # a late duplicate
            case _ if claim.ticket in self._ended:
                self._disown(source, claim.ticket)  # an even later one
            case Granted(ticket=ticket) if ticket.initiator == source and ticket < claim.ticket:
                self._free(ticket)  # its initiator is past it: a `Release` was lost, or comes later
                self._grant(claim, now)
            case Free():
                self._grant(claim, now)
            case Collecting(ticket=mine, born=born) if (claim.born, claim.ticket) < (born, mine):
                self._fail(Outcome.YIELDED, f"{mine} gave way to the older claim {claim.ticket}")
                self._grant(claim, now)
            case state:
                self._emit(Send(source, Busy(claim.ticket, str(state))))

    def _grant(self, claim: Claim, now: Seconds) -> None:
        inquire_at = now + self._config.resend_s
        self._state = Granted(claim.ticket, claim.members, now, inquire_at)
        self._emit(Send(claim.ticket.initiator, Grant(claim.ticket)))  # lost: the claim comes again

    def _handle_begin(self, source: PeerId, ticket: Ticket, now: Seconds) -> None:
        match self._state:
            case Granted(ticket=granted) as state if (
                granted == ticket and source == ticket.initiator
            ):
                # All grants of a ticket lie within acquire_timeout_s, so until then no granter's
                # lease has lapsed, whichever of us granted first.
                lease_s = self._config.lease_s - self._config.acquire_timeout_s
                expires_at = state.granted_at + lease_s
                if now < expires_at:
                    self._state = InGroup(ticket, state.members, expires_at)
                    self._emit(Average(ticket, state.members, What.MODELS))
                else:
                    self._free(ticket)
                    self._disown(source, ticket)
            case InGroup(ticket=current) if current == ticket:
                pass  # a duplicate
            case _:
                self._disown(source, ticket)  # our lease lapsed

    def _handle_release(self, source: PeerId, ticket: Ticket) -> None:
        match self._state:
            case Granted(ticket=granted) if granted == ticket and source == ticket.initiator:
                self._free(ticket)
            case Collecting(ticket=mine) as claim if mine == ticket and source in claim.members:
                self._fail(Outcome.REFUSED, f"{source} took its promise back")
            case InGroup(ticket=current, members=members) if current == ticket:
                if source in members:
                    self._abandon(Outcome.REFUSED, f"{source} is not in the group any more")
            case _:
                pass

    # --- both sides -------------------------------------------------------------------------------

    def _lapse(self, now: Seconds) -> None:
        """Carry out the deadlines that have passed, before anything else happens."""
        match self._state:
            case Collecting() as state if self._give_up_at(state) <= now:
                waited = self._config.acquire_timeout_s
                self._fail(Outcome.LATE, f"no answer from {', '.join(state.missing)} in {waited} s")
            case Granted() as state if state.granted_at + self._config.lease_s <= now:
                self._free(state.ticket)
            case InGroup() as state if state.expires_at <= now:
                lease_s = self._config.lease_s
                why = f"the average was not over when its lease of {lease_s} s ended"
                self._abandon(Outcome.LATE, why)
            case _:
                pass

    def _disown(self, source: PeerId, ticket: Ticket) -> None:
        """Tell `source` that we are not in `ticket`, unless we have applied its average."""
        if not self._ended.get(ticket, False):
            self._emit(Send(source, Release(ticket)))  # lost: `source` inquires or streams refuse

    def _abandon(self, outcome: Outcome, why: str) -> None:
        state = self._state
        assert isinstance(state, InGroup)
        self._emit(Abandon(state.ticket, outcome, why))
        self._leave_group(outcome, why)

    def _leave_group(self, outcome: Outcome, why: str) -> None:
        state = self._state
        assert isinstance(state, InGroup)
        self._free(state.ticket, done=outcome is Outcome.DONE)
        if state.ticket.initiator == self._me:
            self._emit(GroupEnded(state.ticket, outcome, why))

    def _free(self, ticket: Ticket, *, done: bool = False) -> None:
        """Our part in `ticket` is over, for good."""
        self._state = Free()
        self._ended[ticket] = done
        if len(self._ended) > ENDED_REMEMBERED:
            del self._ended[next(iter(self._ended))]
