"""Ripples' Group Generator: one peer proposes groups, and any other can take its place.

The *generator* is the first by name of those who train, as everyone sees by itself: nobody votes.
It keeps the `GroupBook`. It only proposes; whether a group comes together is the business of the
group lock, in which every member grants for itself.

**The protocol in four lines.** A peer that wants a group sends *ask* to the generator, again and
again until it has been in one. The generator sends each group that may run to one of its members,
the *leader*: *propose*. The leader claims it through the group lock and says *settle* when it is
over. A proposal that is not settled is sent again; a leader that is still at it answers *lead*.

::

      asker            generator            leader              other members
        |----- ask ------->|                   |                      |
        |                  |----- propose ---->|---- Request -------->|
        |                  |                   |<--- Grant -----------|
        |                  |----- propose ---->|                      |
        |                  |<----- lead -------|==== chunks =========>|
        |                  |<----- settle -----|

**When the generator dies** membership says so, the next by name is first, and everyone who still
asks asks that one. Its book is empty, so it may propose a group with a peer that is in one; the
group lock lets them run one after the other. The same goes for two peers that both think they are
first: they waste a little time, and nothing overlaps. A group that runs needs no generator to end.

**When a leader dies** its group is over for the book as soon as membership says so; for a member
that is busy, when its average has ended. Each that still asks gets another group.

**No cycle of waits.** The generator never waits. A leader waits for the group lock, which is free
of cycles; a peer that asks waits for a group to end that the book will make or has made
(`book.py` shows that it comes to run). A leader with several proposals claims them one
by one, in order.

**What each loss costs.** A lost *ask* or *propose* costs `RESEND_S`. A lost *settle* too: the
proposal comes again, and is answered again. A lost *lead* costs nothing: the next one says the
same. A leader that answers nothing, which only one that does not keep to the protocol can, keeps
its members for `LAPSE_S`; how long an average takes does not matter.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from p2ptrain.averaging.ripples.book import Group, GroupBook
from p2ptrain.core.effects import Outcome
from p2ptrain.core.messages import AlgorithmMessage
from p2ptrain.errors import InvariantViolation, RemoteProtocolError
from p2ptrain.ids import PeerId, Seconds, Ticket

RESEND_S: Seconds = 0.25
"""Whatever is not answered is said again after this long. Too short: needless messages beside a
slow average; too long: a lost message delays a group."""

LAPSE_S: Seconds = 20.0
"""The book frees the members of a group whose leader has said nothing for so long."""

SETTLED_REMEMBERED = 64
"""Proposals whose end a leader remembers, far more than can be under way at once."""

MOST_PROPOSALS = 8
"""A leader keeps so many for later; whatever else comes will come again."""


@dataclass(frozen=True, slots=True)
class Turn:
    """This peer wants a group, after so many updates, and has not been in one since."""

    updates: int
    resend_at: Seconds


@dataclass(frozen=True, slots=True)
class Proposal:
    """As the generator: what a leader has been told and has not settled."""

    group: Group
    resend_at: Seconds
    lapses_at: Seconds


class GroupGenerator:
    """One peer's share: asks, leads, and is the generator when it is first.

    A ticket names a question or a proposal, and has nothing to do with those of groups.

    Args:
        incarnation: larger than that of any earlier life of `me`.
        view: who trains, sorted, ourselves included.
        claim: begins to claim a group for a proposal, ourselves and these; ends in `claim_ended`.
        tell: sends a message to another peer, best effort.
    """

    def __init__(
        self,
        me: PeerId,
        incarnation: int,
        book: GroupBook,
        view: Callable[[], Sequence[PeerId]],
        claim: Callable[[Ticket, Sequence[PeerId]], None],
        tell: Callable[[PeerId, AlgorithmMessage], None],
        rng: Random,
    ) -> None:
        self.book = book
        self._me = me
        self._incarnation = incarnation
        self._view = view
        self._claim = claim
        self._tell = tell
        self._rng = rng
        self._seen: Sequence[PeerId] = ()  # the view that the book was told of last
        self._turn: Turn | None = None
        self._asks = 0
        self._leads: Ticket | None = None  # the proposal whose group we claim
        self._to_lead: dict[Ticket, tuple[PeerId, ...]] = {}
        self._settled: dict[Ticket, bool] = {}  # and whether the group was done
        self._proposals: dict[int, Proposal] = {}  # by the number of the group
        self._heard: dict[PeerId, Ticket] = {}  # of each peer: the last time it asked
        self._withdrawn = False

    @property
    def turn(self) -> Turn | None:
        return self._turn

    # --- what happens -----------------------------------------------------------------------------

    def ask(self, updates: int, now: Seconds) -> None:
        """This peer wants a group; its `turn` ends when it has been in one, or there is none."""
        self._turn = Turn(updates, now + RESEND_S)
        if self._withdrawn:
            self._end_turn(Outcome.WITHDRAWN)
        else:
            self._say_ask(now)

    def average_ended(self) -> None:
        """A group that we were in is done, whoever proposed it."""
        self._end_turn(Outcome.DONE)

    def claim_ended(self, ticket: Ticket, outcome: Outcome, now: Seconds) -> None:
        """The claim for this proposal is over."""
        self._leads = None
        self._settle(ticket, outcome is Outcome.DONE, now)
        self._lead_next()

    def withdraw(self, now: Seconds) -> None:
        """The trainer stops: no more groups of our own wish, and no more proposals."""
        self._withdrawn = True
        self._end_turn(Outcome.WITHDRAWN)
        for ticket in tuple(self._to_lead):
            del self._to_lead[ticket]
            self._settle(ticket, False, now)

    def receive(self, source: PeerId, message: AlgorithmMessage, now: Seconds) -> None:
        """Raises RemoteProtocolError for what no generator, leader or asker says."""
        match message:
            case AlgorithmMessage("ask", (incarnation, number, updates), ()):
                self._handle_ask(Ticket(source, incarnation, number), updates, now)
            case AlgorithmMessage("propose", (incarnation, number), members) if (
                self._me in members and list(members) == sorted(dict.fromkeys(members))
            ):
                self._handle_propose(Ticket(source, incarnation, number), members, now)
            case AlgorithmMessage("lead", (self._incarnation, number), ()):
                self._handle_lead(source, number, now)
            case AlgorithmMessage("settle", (self._incarnation, number, done), ()):
                self._handle_settle(source, number, bool(done), now)
            case AlgorithmMessage("lead", (_, _), ()) | AlgorithmMessage("settle", (_, _, _), ()):
                pass  # meant for an earlier life of ours
            case _:
                raise RemoteProtocolError(f"{source} says {message} to a Group Generator")

    def view_changed(self, now: Seconds) -> None:
        """See who trains: there may be another generator, or a group without a member."""
        if (view := self._view()) == self._seen:
            return
        self._seen = view
        self._heard = {peer: ticket for peer, ticket in self._heard.items() if peer in view}
        for number, proposal in tuple(self._proposals.items()):
            if proposal.group.leader not in view:
                del self._proposals[number]
        self._propose(self.book.keep(view, self._rng, now), now)
        if self._turn:
            self._say_ask(now)

    def handle_timer(self, now: Seconds) -> None:
        if self._turn and self._turn.resend_at <= now:
            self._turn = replace(self._turn, resend_at=now + RESEND_S)
            self._say_ask(now)
        for number, proposal in tuple(self._proposals.items()):
            if proposal.lapses_at <= now:
                self._handle_settle(proposal.group.leader, number, False, now)
            elif proposal.resend_at <= now:
                self._proposals[number] = replace(proposal, resend_at=now + RESEND_S)
                self._say_propose(proposal.group, now)

    def next_deadline(self) -> Seconds | None:
        deadlines = [self._turn.resend_at] if self._turn else []
        deadlines += [min(p.resend_at, p.lapses_at) for p in self._proposals.values()]
        return min(deadlines, default=None)

    def check(self) -> None:
        self.book.check()
        numbers = [group.number for group in self.book.running]
        if sorted(self._proposals) != numbers:
            raise InvariantViolation(f"{self._me} proposed {list(self._proposals)}, runs {numbers}")
        if self._to_lead and not self._leads:
            raise InvariantViolation(f"{self._me} leads nothing, then {self._to_lead}")

    # --- who asks ---------------------------------------------------------------------------------

    def _say_ask(self, now: Seconds) -> None:
        """Ask whoever is first; each time under a new ticket, so that a late duplicate is known."""
        assert self._turn is not None
        self._asks += 1
        numbers = self._incarnation, self._asks, self._turn.updates
        self._say(self._view()[0], AlgorithmMessage("ask", numbers), now)  # lost: sent again

    def _end_turn(self, outcome: Outcome) -> None:
        """The turn is over, if there is one; tests override this to see how it ended."""
        self._turn = None

    # --- who leads --------------------------------------------------------------------------------

    def _handle_propose(self, ticket: Ticket, members: tuple[PeerId, ...], now: Seconds) -> None:
        if members == (self._me,):
            self._end_turn(Outcome.BUSY)  # there is nobody to meet
        elif ticket in self._settled:
            self._say_settle(ticket, now)  # the first one was lost
        elif ticket == self._leads or ticket in self._to_lead:
            numbers = ticket.incarnation, ticket.number
            self._say(ticket.initiator, AlgorithmMessage("lead", numbers), now)
        elif self._withdrawn:
            self._settle(ticket, False, now)
        elif len(self._to_lead) < MOST_PROPOSALS:
            self._to_lead[ticket] = members
            self._lead_next()

    def _lead_next(self) -> None:
        if self._to_lead and not self._leads:
            self._leads = next(iter(self._to_lead))
            members = self._to_lead.pop(self._leads)
            self._claim(self._leads, [peer for peer in members if peer != self._me])

    def _settle(self, ticket: Ticket, done: bool, now: Seconds) -> None:
        self._settled[ticket] = done
        if len(self._settled) > SETTLED_REMEMBERED:
            del self._settled[next(iter(self._settled))]
        self._say_settle(ticket, now)  # lost: it proposes again

    def _say_settle(self, ticket: Ticket, now: Seconds) -> None:
        numbers = ticket.incarnation, ticket.number, int(self._settled[ticket])
        self._say(ticket.initiator, AlgorithmMessage("settle", numbers), now)

    # --- the generator ----------------------------------------------------------------------------

    def _handle_ask(self, ticket: Ticket, updates: int, now: Seconds) -> None:
        view, source = self._view(), ticket.initiator
        last = self._heard.get(source)
        is_old = last is not None and ticket <= last
        if source not in view or is_old or self._withdrawn:
            return  # a late duplicate; or of one that we have not heard of, and will ask again
        self._heard[source] = ticket
        self._propose(self.book.ask(source, updates, view, self._rng, now), now)

    def _handle_lead(self, source: PeerId, number: int, now: Seconds) -> None:
        proposal = self._proposals.get(number)
        if proposal and proposal.group.leader == source:
            self._proposals[number] = replace(proposal, lapses_at=now + LAPSE_S)

    def _handle_settle(self, source: PeerId, number: int, done: bool, now: Seconds) -> None:
        proposal = self._proposals.get(number)
        if proposal and proposal.group.leader == source:
            del self._proposals[number]
            self._propose(self.book.over(number, done, self._view(), self._rng, now), now)

    def _propose(self, groups: Sequence[Group], now: Seconds) -> None:
        for group in groups:
            if len(group.members) > 1:
                self._proposals[group.number] = Proposal(group, now + RESEND_S, now + LAPSE_S)
        for group in groups:
            self._say_propose(group, now)  # lost: sent again, or asked for again

    def _say_propose(self, group: Group, now: Seconds) -> None:
        numbers = self._incarnation, group.number
        self._say(group.leader, AlgorithmMessage("propose", numbers, group.members), now)

    def _say(self, target: PeerId, message: AlgorithmMessage, now: Seconds) -> None:
        if target == self._me:
            self.receive(self._me, message, now)
        else:
            self._tell(target, message)
