"""Wait-avoiding collectives: whoever arrives first runs a version, and nobody waits for the rest.

An algorithm that acts on a *schedule* says, for each version 1, 2, 3, ... and each view of who
trains, which group a peer is in and when that group may run (`Round`). Its trainer *arrives* at a
version. Once those have arrived whom the rule asks for (`Rule`: one, so many, a drawn initiator,
all), the version runs in the whole group: every member contributes the latest it has, wherever its
own trainer is. A trainer that arrives later finds that its version has run, and goes on.

**The protocol in five lines.** An arriving peer tells the *host* of its group, the first member by
name: `Activate`. When its rule is met the host makes a ticket and sends `Run` to all members; each
enters the group as soon as it is in no other, and moves its slices under the ticket. A member that
is past the version says `Decline` to all members, and the group ends as if it had never been. A
host that is past the version answers `Activate` with `Past`. A group needs no message to end.

::

                  Activate of those whom the rule asks for: Run to all
         (host) ------------------------------------------------------+
                                                                      v
      BETWEEN VERSIONS -- Run(v), v > begun --------------------> IN_GROUP(v) -- Run(w), w > v --+
          ^      ^                                                  |  |  ^                      |
          |      +---------- average ended, broken, declined -------+  |  +-- queued, w is next -+
          |                                                            |
          +---- Run(v), v <= begun: Decline ---------------------------+

**Each version runs at most once at each peer.** `begun` is the last version that began here, and
only grows: a peer enters v only if v > begun, and never a ticket twice. Which versions it skips
does not matter, since all that it holds goes with the next one. Where the group is everyone, no
version is skipped by anyone who is there.

**One host, one ticket.** Several that arrive at once tell the same host, which counts them: there
is nothing to agree on. If views differ, two hosts may form two groups of one version that share a
peer; it enters the first and declines the other, and a ticket is held by whoever is in that group
and in no other. So groups that run never overlap, whatever anybody believes. (A digest of the view
would add nothing: the ticket names one group of one host for ever.)

**Why no cycle of waits can exist.** A group of v waits for members that are still in a group of
u < v (its later `Run` is queued, and a host runs nothing before it is out of its own group), never
for one that is in w >= v or promised to it: that one declines at once. So waits point to smaller
versions only, and the smallest version that runs waits for nothing but its own slices. A trainer
waits for its version, or for its rule: for other trainers to arrive at it *or beyond*. So of all
versions that are waited for, the smallest waits only for trainers that are in the middle of a step.
(Who is beyond has told the host of another group, if groups are not everyone and views differed. So
a host that has waited for `resend_s` asks those who are missing, and is told `Past`.)
There is no lease, since nobody is promised before a group runs.

**Who is late** loses nothing: what it has goes with the version that finds it, and its own result
is in its pending numbers, or kept for it (`Group.keep`). Several versions may pass meanwhile.

**When a member dies** inside, membership says so and the group is over for the others; whoever had
finished has the result. The version is not run again: what was not delivered goes with the next
one. A host that dies is replaced by the next by name: whoever waits tells that one. A joiner is in
no view before it trains, and its first arrival is answered with how far the others are.

**What each loss costs.** `Activate` and `Run` are sent again every `resend_s`, as long as the
trainer waits and as long as the host's own average runs. A lost `Decline` comes again with the next
`Run`; a lost `Past` with the next `Activate`. Until then streams wait; a ticket that is over here
is refused at once, so that they never wait for nothing.

**Bounded staleness** (`Rule.limiter`): the host knows when each trainer arrived last, and runs no
version that would be more than so many later. It counts from when it first heard of a peer.
"""

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from p2ptrain.core.effects import Abandon, Average, Effect, Send, VersionEnded, What
from p2ptrain.core.events import Outcome
from p2ptrain.core.links import Weigh, equally
from p2ptrain.core.messages import Activate, ActivationMessage, Decline, Past, Run
from p2ptrain.errors import InvariantViolation
from p2ptrain.ids import PeerId, Seconds, Ticket


@dataclass(frozen=True, slots=True)
class Rule:
    """When a version may run: one trainer waits for it, and so many wait there or beyond."""

    waiting: int = 1
    """Trainers that must wait. 1: nobody waits for anybody."""

    initiator: PeerId | None = None
    """Must be among them."""

    limiter: int | None = None
    """No trainer's last arrival, waiting or not, may be more than so many versions ago."""


NOBODY = Rule()
"""The first one that waits runs it."""


@dataclass(frozen=True, slots=True)
class Round:
    """What happens at one version, as one peer sees it."""

    members: tuple[PeerId, ...]
    """The group that the peer is in, sorted."""

    what: What
    rule: Rule = NOBODY


Schedule = Callable[[int, Sequence[PeerId], PeerId], Round]
"""Version, who trains (sorted), and one of them: its round. Pure, so that all find the same."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """Our trainer is at `version`, which has not begun here."""

    version: int
    waits: bool
    resend_at: Seconds


@dataclass(frozen=True, slots=True)
class InGroup:
    ticket: Ticket
    version: int
    members: tuple[PeerId, ...]
    awaited: bool
    """Our trainer waits for its end."""

    resend_at: Seconds | None
    """At the host: when to tell the members again."""

    run: Run
    """As all were told, and are told again, whoever of its members is left."""


OVER_REMEMBERED = 64
"""Tickets whose end we remember, far more than can be under way at once."""


class Activation:
    """One peer's share of the scheduled collectives; `view()` is who trains, sorted, with us.

    Args:
        weigh: says how large the members' shares of what they average should be.
        is_ready: says whether others may have us in their groups yet.
    """

    def __init__(
        self,
        me: PeerId,
        incarnation: int,
        resend_s: Seconds,
        schedule: Schedule | None,
        view: Callable[[], Sequence[PeerId]],
        emit: Callable[[Effect], None],
        weigh: Weigh = equally,
        is_ready: Callable[[], bool] = lambda: True,
    ) -> None:
        self._me = me
        self._incarnation = incarnation
        self._resend_s = resend_s
        self._schedule = schedule
        self._view = view
        self._emit = emit
        self._weigh = weigh
        self._is_ready = is_ready
        self._begun = 0  # the last version that began here
        self._heard = 0  # the last version that began anywhere, as far as we were told
        self._group: InGroup | None = None
        self._queue: list[Run] = []  # by version
        self._arrival: Arrival | None = None
        self._arrivals: dict[PeerId, tuple[int, bool]] = {}  # as the host: version, and if it waits
        self._beyond: dict[PeerId, int] = {}  # as the host: a version that has begun there
        self._last: dict[PeerId, int] = {}  # as the host: the last version that a trainer knew
        self._over: dict[Ticket, bool] = {}  # and whether we declined it
        self._tickets = 0
        self._withdrawn = False

    @property
    def group(self) -> InGroup | None:
        return self._group

    @property
    def arrival(self) -> Arrival | None:
        return self._arrival

    @property
    def version(self) -> int:
        """The last version that has begun here, or is known to have begun elsewhere."""
        return max(self._begun, self._heard)

    def holds(self, ticket: Ticket) -> bool:
        """True while we are in the group of `ticket`: the fence for its slices and its result."""
        return self._group is not None and self._group.ticket == ticket

    def version_of(self, ticket: Ticket) -> int | None:
        """The version that runs under `ticket`, if that is the group we are in."""
        return self._group.version if self._group and self._group.ticket == ticket else None

    def expects(self, ticket: Ticket) -> bool:
        """True while the group of `ticket` waits for us to leave another one."""
        return any(run.ticket == ticket for run in self._queue)

    def is_over(self, ticket: Ticket) -> bool:
        """True if we were in the group of `ticket`, or declined it: its streams are refused."""
        return ticket in self._over

    # --- what happens -----------------------------------------------------------------------------

    def arrive(self, version: int, now: Seconds, *, waits: bool = True) -> None:
        """The trainer is at `version`; if it waits, that ends in one `VersionEnded`.

        At once, as `LATE`, if the version has run; with the result of a later one, if that begins
        first. Who does not wait is at least not far behind (`Rule.limiter`).
        """
        group = self._group
        if group and group.version == version and not self._withdrawn:
            self._group = replace(group, awaited=group.awaited or waits)
        elif self._withdrawn or version <= self._begun:
            outcome = Outcome.WITHDRAWN if self._withdrawn else Outcome.LATE
            if waits:
                self._emit(VersionEnded(version, outcome))
        else:
            self._arrival = Arrival(version, waits, now + self._resend_s)
            self._tell_host(now)

    def withdraw(self) -> None:
        """The trainer stops: no more groups. One that is formed is left to end."""
        self._withdrawn = True
        self._end_arrival(Outcome.WITHDRAWN)
        self._arrivals.clear()
        while self._queue:
            self._decline(self._queue.pop(0))

    def receive(self, source: PeerId, message: ActivationMessage, now: Seconds) -> None:
        if self._schedule is None:
            return  # whoever says so runs another algorithm
        match message:
            case Activate(version=version, waits=waits):
                self._handle_activate(source, version, waits, now)
            case Run():
                self._handle_run(source, message, now)
            case Decline(ticket=ticket, version=version):
                self._heard = max(self._heard, version)
                self._handle_decline(source, ticket, now)
            case Past(version=version):
                self._heard = max(self._heard, version)
                self._handle_past(source, version, now)
            case _:
                assert_never(message)

    def average_ended(self, ticket: Ticket, outcome: Outcome, now: Seconds) -> None:
        if self.holds(ticket):
            self._leave(outcome, now)

    def regroup(self, ticket: Ticket, members: tuple[PeerId, ...]) -> None:
        """Our group goes on without some of its members (`core/repair.py`)."""
        if self._group and self._group.ticket == ticket:
            self._group = replace(self._group, members=members)

    def peer_gone(self, peer: PeerId, why: str, now: Seconds) -> None:
        self.peer_left(peer)
        group = self._group
        if group and peer in group.members:
            self._emit(Abandon(group.ticket, Outcome.LOST, why))
            self._leave(Outcome.LOST, now)

    def peer_left(self, peer: PeerId) -> None:
        """A peer said goodbye: its groups have ended, and none that we are yet to enter can."""
        self._arrivals.pop(peer, None)
        self._beyond.pop(peer, None)
        self._last.pop(peer, None)
        for run in [run for run in self._queue if peer in run.members]:
            self._queue.remove(run)
            self._decline(run)

    def view_changed(self, now: Seconds) -> None:
        """Membership has news: our host may have changed, or a rule may be met now."""
        if self._arrival:
            self._tell_host(now)
        self._maybe_run(now)

    def handle_timer(self, now: Seconds) -> None:
        group, arrival = self._group, self._arrival
        if group and group.resend_at is not None and group.resend_at <= now:
            self._group = replace(group, resend_at=now + self._resend_s)
            self._tell(group.members, group.run)
        if arrival and arrival.resend_at <= now:
            self._arrival = replace(arrival, resend_at=now + self._resend_s)
            self._tell_host(now)
            self._look_for_missing(arrival.version)

    def next_deadline(self) -> Seconds | None:
        deadlines = [self._arrival.resend_at] if self._arrival else []
        if self._group and self._group.resend_at is not None:
            deadlines.append(self._group.resend_at)
        return min(deadlines, default=None)

    def check(self) -> None:
        group, versions = self._group, [run.version for run in self._queue]
        if group and (self._me not in group.members or group.version != self._begun):
            raise InvariantViolation(f"{self._me}: unsound group {group}, begun {self._begun}")
        if versions != sorted(set(versions)) or (versions and versions[0] <= self._begun):
            raise InvariantViolation(f"{self._me} queues {versions} after {self._begun}")
        if versions and not group:
            raise InvariantViolation(f"{self._me} queues {versions} and is in no group")
        if self._arrival and self._arrival.version <= self._begun:
            raise InvariantViolation(f"{self._me} waits at {self._arrival}, begun {self._begun}")

    # --- the trainer's side -----------------------------------------------------------------------

    def _tell_host(self, now: Seconds) -> None:
        arrival = self._arrival
        assert arrival is not None
        host = self._round(arrival.version).members[0]
        if host == self._me:
            self._count(self._me, arrival.version, arrival.waits, now)
        else:
            self._emit(Send(host, Activate(arrival.version, arrival.waits)))  # lost: sent again

    def _end_arrival(self, outcome: Outcome) -> None:
        arrival, self._arrival = self._arrival, None
        if arrival and arrival.waits:
            self._emit(VersionEnded(arrival.version, outcome))

    # --- the member's side ------------------------------------------------------------------------

    def _handle_run(self, host: PeerId, run: Run, now: Seconds) -> None:
        ticket, version, members = run.ticket, run.version, run.members
        if host != ticket.initiator or not {host, self._me} <= set(members):
            return
        declined = self._over.get(ticket)
        if self.holds(ticket) or self.expects(ticket) or declined is False:
            return  # said again
        queued = any(version == waiting.version for waiting in self._queue)
        here = self._is_ready() and not self._withdrawn
        if declined or not here or version <= self._begun or queued:
            self._decline(run)
        elif self._group:
            insort(self._queue, run, key=lambda run: run.version)
        else:
            self._enter(run, now)

    def _enter(self, run: Run, now: Seconds) -> None:
        """Take part: from here on the version has begun for us."""
        version, ticket, members = run.version, run.ticket, run.members
        assert self._schedule is not None
        self._begun = version
        arrived = self._arrival is not None and self._arrival.version <= version
        awaited = arrived and self._arrival is not None and self._arrival.waits
        if arrived:
            self._arrival = None
        for peer, (theirs, _) in tuple(self._arrivals.items()):
            if theirs <= version:
                del self._arrivals[peer]
        hosts = ticket.initiator == self._me
        resend_at = now + self._resend_s if hosts else None
        self._group = InGroup(ticket, version, members, awaited, resend_at, run)
        here = self._schedule(version, members, self._me)
        if len(members) == 1 and here.what is What.MODELS:
            self._leave(Outcome.DONE, now)  # its own mean
        else:
            self._emit(Average(ticket, members, here.what, run.weights, awaited))

    def _leave(self, outcome: Outcome, now: Seconds) -> None:
        """Our group is over; the next one that waits for us begins."""
        group, self._group = self._group, None
        assert group is not None
        self._remember(group.ticket, declined=False)
        if group.awaited:
            self._emit(VersionEnded(group.version, outcome))
        if self._queue:
            self._enter(self._queue.pop(0), now)
        else:
            self._maybe_run(now)

    def _decline(self, run: Run) -> None:
        """We are not in this group, and never will be: nobody in it can finish."""
        self._remember(run.ticket, declined=True)
        for peer in run.members:
            if peer != self._me:
                self._emit(Send(peer, Decline(run.ticket, self._begun)))  # lost: `Run` comes again

    def _handle_decline(self, source: PeerId, ticket: Ticket, now: Seconds) -> None:
        group = self._group
        if group and group.ticket == ticket and source in group.members:
            why = f"{source} is not in version {group.version}"
            self._emit(Abandon(ticket, Outcome.REFUSED, why))
            self._leave(Outcome.REFUSED, now)
            return
        self._queue = [run for run in self._queue if run.ticket != ticket]
        if ticket not in self._over:
            self._remember(ticket, declined=False)  # its `Run` is yet to come

    def _remember(self, ticket: Ticket, *, declined: bool) -> None:
        self._over[ticket] = declined
        if len(self._over) > OVER_REMEMBERED:
            del self._over[next(iter(self._over))]

    # --- the host's side --------------------------------------------------------------------------

    def _handle_activate(self, source: PeerId, version: int, waits: bool, now: Seconds) -> None:
        group = self._group
        if self._withdrawn or not self._is_ready():
            return  # we are about to leave, or to begin; then somebody is asked again
        self._note_last(source, version, waits)
        if version > self._begun:
            self._count(source, version, waits, now)
        elif group and group.ticket.initiator == self._me and source in group.members:
            self._emit(Send(source, group.run))  # the first one was lost, or is on its way
        else:
            self._emit(Send(source, Past(self._begun)))  # lost: its `Activate` comes again

    def _look_for_missing(self, version: int) -> None:
        """If we host a group of some at `version`: ask those who are not there where they are."""
        members = self._round(version).members
        if members[0] != self._me or len(members) == len(self._view()) or self._group:
            return  # they have told us, or are in the middle of a step
        for peer in members[1:]:
            if self._arrivals.get(peer, (0, False))[0] < version:
                self._emit(Send(peer, Activate(version, waits=False)))  # lost: sent again

    def _handle_past(self, source: PeerId, version: int, now: Seconds) -> None:
        """`source` is beyond `version`: it hosts ours, or is in a group that we host."""
        arrival = self._arrival
        if arrival and self._round(arrival.version).members[0] == self._me:
            self._beyond[source] = max(version, self._beyond.get(source, 0))
            self._maybe_run(now)
        elif arrival and arrival.version <= version:
            self._end_arrival(Outcome.LATE)

    def _count(self, peer: PeerId, version: int, waits: bool, now: Seconds) -> None:
        known, waited = self._arrivals.get(peer, (0, False))
        if version < known:
            return  # overtaken by its own later word
        self._arrivals[peer] = (version, waits or (waited and version == known))
        self._note_last(peer, version, waits)
        self._maybe_run(now)

    def _note_last(self, peer: PeerId, version: int, waits: bool) -> None:
        # One that waits will know this version. One that does not may have missed the last two, one
        # that is over and one under way.
        self._last[peer] = max(self._last.get(peer, 0), version if waits else version - 2)

    def _maybe_run(self, now: Seconds) -> None:
        """If we are free: run the first version whose rule is met."""
        if self._group or self._withdrawn:
            return
        awaited = sorted({version for version, waits in self._arrivals.values() if waits})
        for version in awaited:
            here = self._round(version)
            if self._is_met(version, here):
                self._run(version, here.members, now)
                return

    def _run(self, version: int, members: tuple[PeerId, ...], now: Seconds) -> None:
        self._tickets += 1
        ticket = Ticket(self._me, self._incarnation, self._tickets)
        run = Run(ticket, version, members, self._weigh(members))
        self._tell(members, run)
        self._enter(run, now)

    def _tell(self, members: tuple[PeerId, ...], run: Run) -> None:
        for peer in members:
            if peer != self._me:
                self._emit(Send(peer, run))  # lost: sent again while our own average runs

    def _is_met(self, version: int, here: Round) -> bool:
        rule = here.rule
        known = {peer: self._arrivals[peer] for peer in here.members if peer in self._arrivals}
        if (version, True) not in known.values():
            return False  # whoever waits for it believes in another group
        arrived = {peer: waits for peer, (theirs, waits) in known.items() if theirs >= version}
        arrived |= {p: True for p in here.members if self._beyond.get(p, 0) >= version}
        waiting = [peer for peer, waits in arrived.items() if waits]
        if len(waiting) < rule.waiting or rule.initiator not in (None, *waiting):
            return False
        for peer in here.members:
            last = self._last.setdefault(peer, version - 1)
            if rule.limiter is not None and peer not in arrived and version - last > rule.limiter:
                return False
        return True

    def _round(self, version: int) -> Round:
        assert self._schedule is not None
        return self._schedule(version, self._view(), self._me)
