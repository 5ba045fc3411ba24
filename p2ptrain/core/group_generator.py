"""Ripples' Group Generator: one peer proposes groups, and any other can take its place.

The *generator* is the first by name of those who train, as everyone sees by itself: nobody votes.
It keeps the `GroupBook`. It only proposes; whether a group comes together is the business of the
group lock, in which every member grants for itself.

**The protocol in four lines.** A peer that wants a group sends `Ask` to the generator, again and
again until it has been in one. The generator sends each group that may run to one of its members,
the *leader*: `Propose`. The leader claims it through the group lock (`core/group_lock.py`) and says
`Settle` when it is over. A proposal that is not settled is sent again.

::

      asker            generator            leader              other members
        |----- Ask ------->|                   |                      |
        |                  |----- Propose ---->|---- Claim ---------->|
        |                  |                   |<--- Grant -----------|
        |                  |                   |==== slices =========>|
        |                  |<----- Settle -----|

**When the generator dies** membership says so, the next by name is first, and everyone who still
asks asks that one. Its book is empty, so it may propose a group with a peer that is in one; the
group lock lets them run one after the other. The same goes for two peers that both think they are
first: they waste a little time, and nothing overlaps. A group that runs needs no generator to end.

**When a leader dies** its group is over for the book as soon as membership says so; for a member
that is busy, when its average has ended. Each that still asks gets another group.

**No cycle of waits.** The generator never waits. A leader waits for the group lock, which is free
of cycles; a peer that asks waits for a group to end that the book will make or has made
(`core/group_book.py` shows that it comes to run). A leader with several proposals claims them one
by one, in order.

**What each loss costs.** A lost `Ask` or `Propose` costs `resend_s`. A lost `Settle` too: the
proposal comes again, and is answered again. A leader that never settles, which only one that does
not keep to the protocol can, keeps its members for `lapse_s`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import assert_never

from p2ptrain.core.effects import Effect, GroupEnded, Send, TurnEnded
from p2ptrain.core.events import Outcome
from p2ptrain.core.group_book import Group, GroupBook
from p2ptrain.core.messages import Ask, GeneratorMessage, Propose, Settle
from p2ptrain.errors import InvariantViolation
from p2ptrain.ids import PeerId, Seconds, Ticket

SETTLED_REMEMBERED = 64
"""Proposals whose end a leader remembers, far more than can be under way at once."""

MOST_PROPOSALS = 8
"""A leader keeps so many for later; whatever else comes will come again."""


@dataclass(frozen=True, slots=True)
class Turn:
    """We want a group, after so many updates, and have not been in one since."""

    updates: int
    resend_at: Seconds


@dataclass(frozen=True, slots=True)
class Proposal:
    """As the generator: what a leader has been told and has not settled."""

    message: Propose
    leader: PeerId
    resend_at: Seconds
    lapses_at: Seconds


class GroupGenerator:
    """One peer's share: asks, leads, and is the generator when it is first.

    Args:
        book: the algorithm's; None if it has no use for one.
        view: who trains, sorted, ourselves included.
        claim: claims a group with all of these through the group lock.
    """

    def __init__(
        self,
        me: PeerId,
        incarnation: int,
        resend_s: Seconds,
        lapse_s: Seconds,
        book: GroupBook | None,
        view: Callable[[], Sequence[PeerId]],
        claim: Callable[[Sequence[PeerId], Seconds], Ticket],
        emit: Callable[[Effect], None],
        rng: Random,
    ) -> None:
        self._me = me
        self._incarnation = incarnation
        self._resend_s = resend_s
        self._lapse_s = lapse_s
        self._book = book
        self._view = view
        self._claim = claim
        self._emit = emit
        self._rng = rng
        self._turn: Turn | None = None
        self._asks = 0
        self._led: dict[Ticket, Ticket] = {}  # a claim of ours: the proposal that it is for
        self._to_lead: list[Propose] = []
        self._settled: dict[Ticket, bool] = {}  # and whether the group was done
        self._ended: list[GroupEnded] = []  # claims, not yet looked at
        self._proposals: dict[Ticket, Proposal] = {}
        self._heard: dict[PeerId, Ticket] = {}  # of each peer: the last time it asked
        self._withdrawn = False

    @property
    def turn(self) -> Turn | None:
        return self._turn

    @property
    def book(self) -> GroupBook | None:
        return self._book

    # --- what happens -----------------------------------------------------------------------------

    def ask(self, updates: int, now: Seconds) -> None:
        """The algorithm wants a group; that ends in one `TurnEnded`, when we have been in one."""
        self._turn = Turn(updates, now + self._resend_s)
        if self._withdrawn:
            self._end_turn(Outcome.WITHDRAWN, f"{self._me} stops")
        else:
            self._say_ask(now)

    def average_ended(self, outcome: Outcome) -> None:
        """A claimed group that we were in is over, whoever proposed it."""
        if outcome is Outcome.DONE:
            self._end_turn(outcome, "")

    def claim_ended(self, ended: GroupEnded) -> None:
        """A claim of ours is over; `follow` looks at it."""
        self._ended.append(ended)

    def follow(self, now: Seconds) -> None:
        """Call it after whatever has happened to the group lock."""
        while self._ended:
            ended = self._ended.pop(0)
            proposal = self._led.pop(ended.ticket, None)
            # Busy: not even tried. It comes again.
            if proposal and ended.outcome is not Outcome.BUSY:
                self._settle(proposal, ended.outcome is Outcome.DONE, now)
            self._lead_next(now)

    def withdraw(self, now: Seconds) -> None:
        """The trainer stops: no more groups of our own wish, and no more proposals."""
        self._withdrawn = True
        self._end_turn(Outcome.WITHDRAWN, f"{self._me} stops")
        while self._to_lead:
            self._settle(self._to_lead.pop(0).ticket, False, now)

    def retire(self) -> None:
        """The trainer is done: we wish for no group, and lead those that are proposed."""
        self._end_turn(Outcome.WITHDRAWN, f"{self._me} is done")

    def receive(self, source: PeerId, message: GeneratorMessage, now: Seconds) -> None:
        if self._book is None:
            return  # whoever says so runs another algorithm
        match message:
            case Ask(ticket=ticket, updates=updates):
                self._handle_ask(source, ticket, updates, now)
            case Propose():
                self._handle_propose(source, message, now)
            case Settle(ticket=ticket, done=done):
                self._handle_settle(source, ticket, done, now)
            case _:
                assert_never(message)

    def view_changed(self, now: Seconds) -> None:
        """Membership has news: there may be another generator, or a group without a member."""
        if self._book is None:
            return
        view = self._view()
        self._heard = {peer: ticket for peer, ticket in self._heard.items() if peer in view}
        for ticket, proposal in tuple(self._proposals.items()):
            if proposal.leader not in view:
                del self._proposals[ticket]
        self._propose(self._book.keep(view, self._rng, now), now)
        if self._turn:
            self._say_ask(now)

    def handle_timer(self, now: Seconds) -> None:
        if self._turn and self._turn.resend_at <= now:
            self._turn = replace(self._turn, resend_at=now + self._resend_s)
            self._say_ask(now)
        for ticket, proposal in tuple(self._proposals.items()):
            if proposal.lapses_at <= now:
                self._handle_settle(proposal.leader, ticket, False, now)
            elif proposal.resend_at <= now:
                self._proposals[ticket] = replace(proposal, resend_at=now + self._resend_s)
                self._say(proposal.leader, proposal.message, now)

    def next_deadline(self) -> Seconds | None:
        deadlines = [self._turn.resend_at] if self._turn else []
        deadlines += [min(p.resend_at, p.lapses_at) for p in self._proposals.values()]
        return min(deadlines, default=None)

    def check(self) -> None:
        if self._book is None:
            return
        self._book.check()
        numbers = [group.number for group in self._book.running]
        if sorted(ticket.number for ticket in self._proposals) != numbers:
            raise InvariantViolation(f"{self._me} proposed {list(self._proposals)}, runs {numbers}")
        if len(self._led) > 1 or (self._to_lead and not self._led):
            raise InvariantViolation(f"{self._me} leads {self._led}, then {self._to_lead}")

    # --- who asks ---------------------------------------------------------------------------------

    def _say_ask(self, now: Seconds) -> None:
        """Ask whoever is first; each time under a new ticket, so that a late duplicate is known."""
        assert self._turn is not None
        self._asks += 1
        ticket = Ticket(self._me, self._incarnation, self._asks)
        self._say(self._view()[0], Ask(ticket, self._turn.updates), now)  # lost: sent again

    def _end_turn(self, outcome: Outcome, why: str) -> None:
        if self._turn:
            self._turn = None
            self._emit(TurnEnded(outcome, why))

    # --- who leads --------------------------------------------------------------------------------

    def _handle_propose(self, source: PeerId, proposed: Propose, now: Seconds) -> None:
        ticket, members = proposed.ticket, proposed.members
        if ticket.initiator != source or self._me not in members:
            return  # not what its sender could propose to us
        if members == (self._me,):
            self._end_turn(Outcome.BUSY, "there is nobody to meet")
        elif ticket in self._settled:
            self._say(source, Settle(ticket, self._settled[ticket]), now)  # the first one was lost
        elif self._withdrawn:
            self._settle(ticket, False, now)
        elif ticket not in self._led.values() and proposed not in self._to_lead:
            if len(self._to_lead) < MOST_PROPOSALS:
                self._to_lead.append(proposed)
            self._lead_next(now)

    def _lead_next(self, now: Seconds) -> None:
        if self._to_lead and not self._led:
            proposed = self._to_lead.pop(0)
            others = [peer for peer in proposed.members if peer != self._me]
            self._led[self._claim(others, now)] = proposed.ticket

    def _settle(self, ticket: Ticket, done: bool, now: Seconds) -> None:
        self._settled[ticket] = done
        if len(self._settled) > SETTLED_REMEMBERED:
            del self._settled[next(iter(self._settled))]
        self._say(ticket.initiator, Settle(ticket, done), now)  # lost: it proposes again

    # --- the generator ----------------------------------------------------------------------------

    def _handle_ask(self, source: PeerId, ticket: Ticket, updates: int, now: Seconds) -> None:
        assert self._book is not None
        view, last = self._view(), self._heard.get(source)
        is_old = last is not None and ticket <= last
        if source != ticket.initiator or source not in view or is_old or self._withdrawn:
            return  # a late duplicate; or of one that we have not heard of, and will ask again
        self._heard[source] = ticket
        self._propose(self._book.ask(source, updates, view, self._rng, now), now)

    def _handle_settle(self, source: PeerId, ticket: Ticket, done: bool, now: Seconds) -> None:
        assert self._book is not None
        proposal = self._proposals.get(ticket)
        if proposal and proposal.leader == source:
            del self._proposals[ticket]
            groups = self._book.over(ticket.number, done, self._view(), self._rng, now)
            self._propose(groups, now)

    def _propose(self, groups: Sequence[Group], now: Seconds) -> None:
        for group in groups:
            message = Propose(Ticket(self._me, self._incarnation, group.number), group.members)
            if len(group.members) > 1:
                self._proposals[message.ticket] = Proposal(
                    message, group.leader, now + self._resend_s, now + self._lapse_s
                )
        for group in groups:
            message = Propose(Ticket(self._me, self._incarnation, group.number), group.members)
            self._say(group.leader, message, now)  # lost: sent again, or asked for again

    def _say(self, target: PeerId, message: GeneratorMessage, now: Seconds) -> None:
        if target == self._me:
            self.receive(self._me, message, now)
        else:
            self._emit(Send(target, message))
