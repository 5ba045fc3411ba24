"""A group that breaks is mended by those who are left, in one exchange of words.

An average moves on streams; one that fails at one member fails, sooner or later, at all of them.
What the members do then is decided here. A group's first attempt runs under the ticket that formed
it, each later one under the same ticket with a higher `attempt`. The lock, the version or whatever
else holds the group together stays held meanwhile: nobody asks to be let in again.

**The rule.** A member commits an attempt only when all members have all of its result
(`runtime/exchange.py`). So if anybody has committed it, everybody holds the result: *all adopt it*.
If nobody who is left has, nobody may: all drop it, and those who are left *try again* without those
who are not. Who said of an attempt that it broke commits it no more, unless it is told to.

**The words.** Whoever's attempt breaks says so to all members, and their attempts break, at once.
The *mender* is the first of those who are left in it, the ticket's initiator before all others,
then by name. When it has heard from all members that are not lost it says what becomes of the
attempt. All words are said again until then, and whoever is past an attempt answers how it left it:
who has committed mends nothing any more.

::

               a stream fails, a member is lost,          mended: adopt
              or says that it is broken, or out      +-----------------------> commit --> over
    RUNNING(n) ------------------------------> BROKEN(n) -- mended: again --> RUNNING(m), m > n
        |  ^                                         |
        |  +-- asks those it has not heard of        +-- mended: no; or too late --> over
        +----- done ----------------------------------------------------------> over

**Who is lost.** Whoever is not alive by membership's word (a broken connection is such a word, at
once) or has not answered for `silence_s`, and says nothing. A slice of the attempt is an answer,
too: a peer that moves slices with all it has may be late with its words. A member that is lost by
mistake finds itself out, and gives up; if it had committed, or two menders disagree because they
cannot hear each other, some members have a result that others have not. That is recorded; in delta
form it moves the mean of all models by a little, and nothing else.

Where all members have to have one model afterwards, moving the mean by a little is too much. Such a
group is tried again only by more than half of those who formed it, so that no two halves can.

**Nobody waits for a member that left.** Who has been in an attempt for `ask_s` asks a few others at
a time whether they are. One that left, or never was, answers that it is out: its word was lost.

**Bounds.** `MOST_ATTEMPTS` per group; `give_up_s` in one break. Then the group ends as broken, and
what formed it may form another.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from p2ptrain.core.effects import Break, Effect, Mend, Send
from p2ptrain.core.messages import How, Mended, RepairMessage, Standing
from p2ptrain.errors import ConfigError, InvariantViolation
from p2ptrain.ids import PeerId, Seconds, Ticket

T = TypeVar("T")

MOST_ATTEMPTS = 4
"""Of one group, the first one included."""

ASKED_AT_ONCE = 8
"""So many are asked at a time, however large the group."""

REMEMBERED = 64
"""Attempts of which we still know how they ended, far more than can be under way at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairConfig:
    """How long the members of a group wait for each other's word."""

    ask_s: Seconds = 0.4
    """An average that lasts so long asks its members whether they are in it, and so on. Too short:
    needless messages where averages take long; too long: a silent member is missed late."""

    silence_s: Seconds = 1.2
    """Whoever has not answered for so long is lost to its group. Too short: busy peers lose groups;
    too long: a cut link is noticed late."""

    report_s: Seconds = 0.5
    """The mender waits so long for the word of a member that is alive. Too short: slow links lose
    members; too long: one that hangs holds the others up."""

    resend_s: Seconds = 0.1
    """A member of a broken group says so again after this long."""

    give_up_s: Seconds = 3.0
    """A group that is not mended after so long is over."""

    def __post_init__(self) -> None:
        for name in ("ask_s", "silence_s", "report_s", "resend_s", "give_up_s"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigError(f"repair {name} = {value} must be above 0")
        if self.silence_s <= self.ask_s:
            raise ConfigError(
                f"repair silence_s = {self.silence_s} must be above ask_s = {self.ask_s}, "
                "or members are lost before they are asked"
            )
        if self.give_up_s <= self.report_s:
            raise ConfigError(
                f"repair give_up_s = {self.give_up_s} must be above report_s = {self.report_s}, "
                "or no group is ever mended without a silent member"
            )


@dataclass(slots=True)
class _Group:
    """The group that we are in, at its present attempt."""

    ticket: Ticket
    members: tuple[PeerId, ...]
    size: int
    """Members of the first attempt."""
    least: int
    """So many have to be left to try again."""
    wake_at: Seconds
    """When to ask again, or to say again that it is broken."""
    broken_at: Seconds | None = None
    complete: bool = False
    """It broke, and we hold all of its result."""
    stopped: bool = False
    """It runs, and is to break."""
    asked: dict[PeerId, Seconds] = field(default_factory=dict)
    """Who has not answered, and since when."""
    reports: dict[PeerId, How] = field(default_factory=dict)
    turn: int = 0


class Repair:
    """One peer's share in keeping its groups whole; `is_alive` is membership's word."""

    def __init__(
        self,
        me: PeerId,
        config: RepairConfig,
        is_alive: Callable[[PeerId], bool],
        expects: Callable[[Ticket], bool],
        emit: Callable[[Effect], None],
    ) -> None:
        self._me = me
        self._config = config
        self._is_alive = is_alive
        self._expects = expects
        self._emit = emit
        self._group: _Group | None = None
        self._past: dict[Ticket, How] = {}
        self._verdicts: dict[Ticket, Mended] = {}  # ours, as the mender

    def holds(self, ticket: Ticket) -> bool:
        """True while `ticket` is the present attempt of our group."""
        return self._group is not None and self._group.ticket == ticket

    def is_over(self, ticket: Ticket) -> bool:
        """True if this attempt has ended here."""
        return ticket in self._past

    # --- what happens -----------------------------------------------------------------------------

    def formed(
        self, ticket: Ticket, members: tuple[PeerId, ...], now: Seconds, *, whole: bool
    ) -> None:
        """A group begins its first attempt; a `whole` one is tried again only by a majority."""
        if self._group:
            self._end(How.OUT)
        least = len(members) // 2 + 1 if whole else 2
        self._group = _Group(ticket, members, len(members), max(2, least), now + self._config.ask_s)

    def broke(self, ticket: Ticket, now: Seconds, *, complete: bool) -> None:
        """Our attempt broke; it ends in a `Mend`. `complete`: we hold all of its result."""
        group = self._group
        if group is None or group.ticket != ticket:
            self._emit(Mend(ticket, why="the group is over"))
            return
        group.broken_at, group.complete = now, complete
        group.wake_at = now + self._config.resend_s
        self._tell(group)
        self._maybe_mend(now)

    def ended(self, root: Ticket, now: Seconds, *, done: bool) -> None:
        """The average of this group is over, for good."""
        if self._group and self._group.ticket.root == root:
            self._end(How.COMMITTED if done else How.OUT)
        elif done:  # abandoned too late: it was applied
            mine = [ticket for ticket in self._past if ticket.root == root]
            self._past.update(dict.fromkeys(mine[-1:], How.COMMITTED))

    def doubted(self, peer: PeerId, now: Seconds) -> None:
        """Membership has come to think less of `peer`."""
        group = self._group
        if group and peer in group.members:
            if group.broken_at is None:
                group.wake_at = now  # ask it
                group.asked.setdefault(peer, now)
            else:
                self._maybe_mend(now)

    def heard(self, ticket: Ticket, peer: PeerId) -> None:
        """A slice of this attempt has come from `peer`: it is in it, and not silent."""
        if self._group and self._group.ticket == ticket:
            self._group.asked.pop(peer, None)

    def gone(self, peer: PeerId, why: str) -> tuple[Ticket, tuple[PeerId, ...]] | None:
        """A peer is dead, or cut off: an attempt with it is over.

        Returns the group's first ticket and who is left, if enough are to try again.
        """
        group = self._group
        if group is None or peer not in group.members or len(group.members) < 3:
            return None
        if group.broken_at is None:
            self._stop(group, why)
        return group.ticket.root, tuple(other for other in group.members if other != peer)

    def receive(self, source: PeerId, message: RepairMessage, now: Seconds) -> None:
        match message:
            case Standing():
                self._handle_standing(source, message, now)
            case Mended():
                self._handle_mended(source, message, now)

    def handle_timer(self, now: Seconds) -> None:
        group = self._group
        if group is None:
            return
        if group.broken_at is None:
            if group.wake_at <= now:
                self._ask(group, now)
            return
        if now >= group.broken_at + self._config.give_up_s:
            self._mend(group, Mended(group.ticket), now)
            return
        if group.wake_at <= now:
            group.wake_at = now + self._config.resend_s
            self._tell(group)
        self._maybe_mend(now)

    def next_deadline(self) -> Seconds | None:
        return self._group.wake_at if self._group else None

    def check(self) -> None:
        group = self._group
        if group and self._me not in group.members:
            raise InvariantViolation(f"{self._me} mends a group without itself: {group}")

    # --- while it runs ----------------------------------------------------------------------------

    def _ask(self, group: _Group, now: Seconds) -> None:
        """Ask some members whether they are in it; stop if one has not said so for too long."""
        group.wake_at = now + self._config.ask_s
        if group.stopped:
            return
        for peer, since in group.asked.items():
            if since + self._config.silence_s <= now:
                self._stop(group, f"{peer} has not answered for {now - since:.1f} s")
                return
        others = [peer for peer in group.members if peer != self._me]
        count = min(ASKED_AT_ONCE, len(others))
        chosen = [others[(group.turn + k) % len(others)] for k in range(count)]
        group.turn += count
        for peer in chosen if len(others) > count else others:
            group.asked.setdefault(peer, now)
        for peer in group.asked:
            # Lost: asked again, until it has been silent for too long.
            self._emit(Send(peer, Standing(group.ticket, How.RUNNING, asks=True)))

    def _stop(self, group: _Group, why: str) -> None:
        if not group.stopped:
            group.stopped = True
            self._emit(Break(group.ticket, why))

    def _handle_standing(self, source: PeerId, message: Standing, now: Seconds) -> None:
        group, ticket, how = self._group, message.ticket, message.how
        if group is None or group.ticket != ticket:
            if message.asks:
                self._answer(source, ticket)
            return
        if source not in group.members or source == self._me:
            return
        group.asked.pop(source, None)
        if how is How.RUNNING:
            if message.asks and group.broken_at is None:
                self._emit(Send(source, Standing(ticket, How.RUNNING)))  # lost: it asks again
            return
        group.reports[source] = how
        if group.broken_at is None:
            self._stop(group, f"{source} is {how.name.lower()}")
        else:
            self._maybe_mend(now)

    def _answer(self, source: PeerId, ticket: Ticket) -> None:
        """Somebody asks about an attempt that we are not in."""
        if ticket in self._verdicts:
            self._emit(
                Send(source, self._verdicts[ticket])
            )  # lost: it says again that it is broken
            return
        how = self._past.get(ticket, How.OUT)
        if ticket not in self._past and self._expects(ticket.root):
            how = How.RUNNING
        self._emit(Send(source, Standing(ticket, how)))  # lost: it asks again

    # --- when it is broken ------------------------------------------------------------------------

    def _tell(self, group: _Group) -> None:
        for peer in group.members:
            if peer != self._me:  # lost: said again until it is mended
                self._emit(Send(peer, Standing(group.ticket, How.BROKEN, asks=True)))

    def _maybe_mend(self, now: Seconds) -> None:
        """If we are the mender and have heard from all who are left: say what is to be."""
        group = self._group
        if group is None or group.broken_at is None:
            return
        order = sorted(group.members, key=lambda peer: (peer != group.ticket.initiator, peer))
        left = [peer for peer in order if peer == self._me or not self._is_past(group, peer, now)]
        if left[0] != self._me or any(p != self._me and p not in group.reports for p in left):
            return
        verdict = self._verdict(group)
        _keep(self._verdicts, group.ticket, verdict)
        for peer in group.members:
            if peer != self._me:
                self._emit(Send(peer, verdict))  # lost: it says again that it is broken
        self._mend(group, verdict, now)

    def _is_past(self, group: _Group, peer: PeerId, now: Seconds) -> bool:
        """Lost to this attempt, or through with it: it takes no part in mending."""
        assert group.broken_at is not None
        if peer in group.reports:
            return group.reports[peer] is not How.BROKEN
        waited = now >= group.broken_at + self._config.report_s
        return waited or not self._is_alive(peer)

    def _verdict(self, group: _Group) -> Mended:
        if How.COMMITTED in group.reports.values():
            return Mended(group.ticket, adopt=True)
        left = [p for p in group.members if group.reports.get(p) is How.BROKEN or p == self._me]
        rounds = group.ticket.attempt // group.size + 1
        if len(left) < group.least or rounds >= MOST_ATTEMPTS:
            return Mended(group.ticket)
        attempt = rounds * group.size + group.members.index(self._me)  # no other mender's number
        return Mended(group.ticket, again=attempt, members=tuple(left))

    def _handle_mended(self, source: PeerId, message: Mended, now: Seconds) -> None:
        group = self._group
        if group is None or group.ticket != message.ticket or source not in group.members:
            return
        if group.broken_at is None:
            self._stop(group, "it was mended without us")  # and we say so, and are told again
        else:
            self._mend(group, message, now)

    def _mend(self, group: _Group, verdict: Mended, now: Seconds) -> None:
        adopts = verdict.adopt and group.complete
        most = MOST_ATTEMPTS * group.size
        left = {*verdict.members}
        goes_on = (
            group.ticket.attempt < verdict.again <= most
            and self._me in left
            and len(left) >= group.least
            and left <= {*group.members}
        )
        if adopts:
            group.broken_at = None
            group.stopped = True  # nothing can break it any more
            group.wake_at = now + self._config.ask_s
            self._emit(Mend(group.ticket, adopt=True))
        elif goes_on:
            ticket = replace(group.ticket, attempt=verdict.again)
            _keep(self._past, group.ticket, How.OUT)
            members = tuple(sorted(left))
            wake_at = now + self._config.ask_s
            self._group = _Group(ticket, members, group.size, group.least, wake_at)
            self._emit(Mend(group.ticket, again=ticket, members=members))
        else:
            self._end(How.OUT)
            self._emit(Mend(group.ticket, why="too few are left of the group"))

    # --- the end ----------------------------------------------------------------------------------

    def _end(self, how: How) -> None:
        group, self._group = self._group, None
        assert group is not None
        _keep(self._past, group.ticket, how)
        asking = group.members if how is How.OUT and group.broken_at is None else group.reports
        for peer in asking:
            if peer != self._me:
                self._emit(Send(peer, Standing(group.ticket, how)))  # lost: it asks


def _keep(memory: dict[Ticket, T], ticket: Ticket, what: T) -> None:
    """Remember it, and forget the oldest."""
    memory[ticket] = what
    if len(memory) > REMEMBERED:
        del memory[next(iter(memory))]
