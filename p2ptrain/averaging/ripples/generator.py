"""Ripples' Group Generator: one peer proposes groups, and any other can take its place.

The *generator* is the first by name of the peers that train; each peer finds it without a vote.
It keeps the `GroupBook`. It only proposes; whether a group is formed is decided by the group lock,
in which every member grants its own slot.

**The protocol in four lines.** A peer that wants a group sends *ask* to the generator, again and
again until it has been in one. The generator sends each group that may run to one of its members,
the *leader*: *propose*. The leader claims it through the group lock and sends *settle* when it is
over. A proposal that is not settled is sent again; a leader that still works on it answers *lead*.

::

      asker            generator            leader              other members
        |----- ask ------->|                   |                      |
        |                  |----- propose ---->|---- Request -------->|
        |                  |                   |<--- Grant -----------|
        |                  |----- propose ---->|                      |
        |                  |<----- lead -------|==== chunks =========>|
        |                  |<----- settle -----|

**When the generator dies** membership reports it, the next peer by name is the generator, and all
peers that still ask send their questions to it. Its book is empty, so it may propose a group with a
peer that is in one; the group lock runs them one after the other. The same holds for two peers that
both believe to be first: they waste a little time, and no groups overlap. A running group needs no
generator to end.

**When a leader dies** its group is over for the book as soon as membership reports the death; for a
busy member, when its average has ended. Each peer that still asks gets another group.

**No cycle of waits.** The generator never waits. A leader waits for the group lock, which is free
of cycles. A peer that asks waits for the end of a group that the book will make or has made;
`book.py` shows that it comes to run. A leader with several proposals claims them in order.

**What each loss costs.** A lost *ask* or *propose* costs `RESEND_S`. A lost *settle* too: the
proposal comes again, and is answered again. A lost *lead* costs nothing: the next one says the
same. A leader that violates the protocol and does not answer keeps its members for `LAPSE_S`; how
long an average takes does not matter.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from p2ptrain.averaging import AlgorithmMessage, PeerId, RemoteProtocolError, Seconds, Swarm, Ticket
from p2ptrain.averaging.ripples.book import Group, GroupBook
from p2ptrain.errors import InvariantViolation

if TYPE_CHECKING:
    from p2ptrain.averaging.ripples import Ripples

RESEND_S: Seconds = 0.25
"""An unanswered message is repeated after this long. Too short: needless messages beside a slow
average; too long: a lost message delays a group."""

LAPSE_S: Seconds = 20.0
"""The book frees the members of a group whose leader has been silent for this long."""

SHORTEST_S: Seconds = 0.01
"""The least wait: a timer may fire a little early, and no timer would then wait for what is due."""

SETTLED_REMEMBERED = 64
"""Proposals whose end a leader remembers, far more than can be under way at once."""

MOST_PROPOSALS = 8
"""A leader accepts this many at once; further ones are sent again."""


@dataclass(slots=True)
class Proposal:
    """As the generator: what was proposed to a leader and is not settled."""

    group: Group
    resend_at: Seconds
    lapses_at: Seconds


class GroupGenerator:
    """One peer's share: asks, leads, and is the generator when it is first.

    A ticket names a question or a proposal, and has nothing to do with those of groups.
    """

    def __init__(self, swarm: Swarm, config: "Ripples.Config") -> None:
        self.book = GroupBook(config, swarm.rng, swarm.link_mbit)
        self._fragment_s = config.fragment_s
        self.asks: int | None = None
        """After so many updates this peer wants a group, and has not been in one since."""
        self._swarm = swarm
        self._incarnation = swarm.incarnation  # that a refutation raises it makes no other life
        self._view: Sequence[PeerId] = ()  # the peers that train, as the book knows them
        self._met = 0  # our last group when we asked
        self._ask_at: Seconds = 0.0  # again
        self._asked = 0
        self._leads: dict[Ticket, list[PeerId]] = {}  # whom we claim, or will, for a proposal
        self._settled: dict[Ticket, bool] = {}  # and whether the group was done
        self._proposals: dict[int, Proposal] = {}  # by the number of the group
        self._heard: dict[PeerId, Ticket] = {}  # of each peer: the last time it asked

    # --- what happens -----------------------------------------------------------------------------

    def ask(self) -> None:
        """This peer `asks` until it has been in a group, or there is none."""
        self.asks, self._met = self._swarm.updates, self._last_group()
        self._ask_at = self._swarm.now
        self.look()

    def look(self) -> None:
        """See what may have changed: the peers that train, our last group, the time."""
        now = self._swarm.now
        if not self._swarm.trains or self._last_group() != self._met:
            self.asks = None
        self._look_who_trains()
        if self.asks is not None and self._ask_at <= now:
            self._ask_at = now + RESEND_S
            self._asked += 1  # each time another one, so that a late duplicate is known
            self._say(self._view[0], "ask", self._incarnation, self._asked, self.asks)
        for number, proposal in tuple(self._proposals.items()):
            if proposal.lapses_at <= now:
                self._handle_answer(proposal.group.leader, number, False)
            elif proposal.resend_at <= now:
                proposal.resend_at = now + RESEND_S
                self._say_propose(proposal.group)

    def next_deadline(self) -> Seconds | None:
        """When to `look` at the latest."""
        deadlines = [min(p.resend_at, p.lapses_at) for p in self._proposals.values()]
        return min(deadlines if self.asks is None else [*deadlines, self._ask_at], default=None)

    async def take_turn(self) -> None:
        """Ask for a group until this peer has been in one, at its own request or another's."""
        self.ask()
        while self.asks is not None:
            await self._swarm.wait_for_change(RESEND_S)
            self.look()

    async def run(self) -> None:
        """Look whenever that may be of use."""
        while True:
            self.look()
            due = self.next_deadline() or self._swarm.now + RESEND_S
            await self._swarm.wait_for_change(max(SHORTEST_S, due - self._swarm.now))

    def receive(self, source: PeerId, message: AlgorithmMessage) -> None:
        """Raises RemoteProtocolError for what no generator, leader or asker says."""
        match message:
            case AlgorithmMessage("ask", (incarnation, number, updates), ()):
                self._handle_ask(Ticket(source, incarnation, number), updates)
            case AlgorithmMessage("propose", (incarnation, number), members) if (
                self._swarm.me in members and list(members) == sorted(dict.fromkeys(members))
            ):
                self._handle_propose(Ticket(source, incarnation, number), members)
            case AlgorithmMessage("lead", (self._incarnation, number), ()):
                self._handle_answer(source, number, None)
            case AlgorithmMessage("settle", (self._incarnation, number, done), ()):
                self._handle_answer(source, number, bool(done))
            case AlgorithmMessage("lead", (_, _), ()) | AlgorithmMessage("settle", (_, _, _), ()):
                pass  # meant for an earlier life of ours
            case _:
                raise RemoteProtocolError(f"{source} says {message} to a Group Generator")

    def check(self) -> None:
        self.book.check()
        numbers = [group.number for group in self.book.running]
        if sorted(self._proposals) != numbers:
            raise InvariantViolation(
                f"{self._swarm.me} proposed {list(self._proposals)}, runs {numbers}"
            )
        if both := self._leads.keys() & self._settled.keys():
            raise InvariantViolation(f"{self._swarm.me} leads {sorted(both)}, which it has settled")

    def _last_group(self) -> int:
        return self._swarm.met().get(self._swarm.me, 0)

    # --- who leads --------------------------------------------------------------------------------

    def _handle_propose(self, ticket: Ticket, members: tuple[PeerId, ...]) -> None:
        if members == (self._swarm.me,):
            self.asks = None  # no other peer trains
        elif ticket in self._settled:
            self._say_settle(ticket)  # the first one was lost
        elif ticket in self._leads:
            self._say(ticket.initiator, "lead", ticket.incarnation, ticket.number)
        elif len(self._leads) < MOST_PROPOSALS:
            self._leads[ticket] = [peer for peer in members if peer != self._swarm.me]
            if len(self._leads) == 1:
                self._swarm.start(self._lead())

    async def _lead(self) -> None:
        """Claim the groups that were proposed, one by one, and say how each ended."""
        while self._leads:
            ticket, others = next(iter(self._leads.items()))
            done = self._swarm.trains and await self._claim(others)
            self._settled[ticket] = done
            if len(self._settled) > SETTLED_REMEMBERED:
                del self._settled[next(iter(self._settled))]
            self._say_settle(ticket)  # lost: it proposes again
            del self._leads[ticket]  # now: we may have proposed the next one to ourselves

    async def _claim(self, others: Sequence[PeerId]) -> bool:
        return (await self._swarm.form(others, fragment_s=self._fragment_s)).done

    def _say_settle(self, ticket: Ticket) -> None:
        done = int(self._settled[ticket])
        self._say(ticket.initiator, "settle", ticket.incarnation, ticket.number, done)

    # --- the generator ----------------------------------------------------------------------------

    def _look_who_trains(self) -> None:
        """There may be another generator, or a group without a member."""
        if (view := self._swarm.trainees()) == self._view:
            return
        self._view, self._ask_at = view, self._swarm.now
        self._heard = {peer: last for peer, last in self._heard.items() if peer in view}
        proposals = self._proposals.items()
        self._proposals = {n: told for n, told in proposals if told.group.leader in view}
        self._propose(self.book.keep(view, self._swarm.now))

    def _handle_ask(self, ticket: Ticket, updates: int) -> None:
        source, last = ticket.initiator, self._heard.get(ticket.initiator)
        self._look_who_trains()
        if source not in self._view or (last and ticket <= last) or not self._swarm.trains:
            return  # a late duplicate; or of one that we have not heard of, and will ask again
        self._heard[source] = ticket
        self._propose(self.book.ask(source, updates, self._swarm.now))

    def _handle_answer(self, leader: PeerId, number: int, done: bool | None) -> None:
        """A leader is still at it (None), or its group is over."""
        proposal = self._proposals.get(number)
        if proposal and proposal.group.leader == leader and done is None:
            proposal.lapses_at = self._swarm.now + LAPSE_S
        elif proposal and proposal.group.leader == leader:
            del self._proposals[number]
            self._propose(self.book.over(number, bool(done), self._swarm.now))

    def _propose(self, groups: Sequence[Group]) -> None:
        now = self._swarm.now
        for group in groups:
            if len(group.members) > 1:
                self._proposals[group.number] = Proposal(group, now + RESEND_S, now + LAPSE_S)
        for group in groups:
            self._say_propose(group)  # lost: sent again, or asked for again

    def _say_propose(self, group: Group) -> None:
        self._say(group.leader, "propose", self._incarnation, group.number, peers=group.members)

    def _say(self, to: PeerId, kind: str, *numbers: int, peers: tuple[PeerId, ...] = ()) -> None:
        message = AlgorithmMessage(kind, numbers, peers)
        if to == self._swarm.me:
            self.receive(to, message)
        else:
            self._swarm.tell(to, message)
