"""Repair a broken group: its surviving members agree in one round how it goes on.

The first attempt of a group has the ticket that formed it, each later one the same ticket with a
higher `attempt`. What holds the group together (the slot, the version) stays held meanwhile.

**Rule.** A member commits an attempt only when all members have all of its result
(`runtime/streams.py`). So if any member has committed it, all hold the result, and *all adopt it*.
If no surviving member has, none may: all drop it, and the survivors *try again* without the others.
A member that has reported an attempt as broken commits it only if told to adopt.

**Messages.** A member whose attempt breaks reports that to all members, and their attempts break at
once. The *repair leader* is the first surviving member: the ticket's initiator, then by name. When
all that are not lost have reported, it announces the resolution. Reports are repeated until then.
A member that is past the attempt answers how it ended there; one that has committed does not lead.

::

               a stream fails, a member is lost,     resolution: adopt
              or reports broken, or out              +-----------------------> commit --> over
    RUNNING(n) ------------------------------> BROKEN(n) -- again --> RUNNING(m), m > n
        |  ^                                         |
        |  +-- polls members it has not heard from   +-- neither; or too late --> over
        +----- done ----------------------------------------------------------> over

**Lost members.** A member is lost if membership does not call it alive (a broken connection
suffices, at once), or if it has not answered for `silence_s`. A chunk of the attempt counts as an
answer: a peer that is busy moving chunks may answer late. A member that was declared lost by
mistake learns so and gives up. If it had committed, or if two repair leaders cannot hear each other
and disagree, some members have a result that others lack. That is recorded; in delta form it moves
the mean of all models by a little, and nothing else. Where all members must end with equal models
even that is too much: such a group tries again only with more than half of its first members.

**Members that are voted out** (`core/offenders.py`) are as good as lost to those that know of it:
they do not lead, what they report does not count, and the group tries again without them. All that
have ended the attempt well know the same; one that has not learns it from the next attempt.

**No member waits for one that left.** After `ask_s` each member polls the others, a few at a time.
One that left, or never entered, answers that it is out: its earlier message was lost.

**Bounds.** `MOST_ATTEMPTS` per group, `give_up_s` per break. Then the group ends as broken, and a
new one may form.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from p2ptrain.core.effects import Break, Effect, Resolve, Send
from p2ptrain.core.messages import AttemptPhase, AttemptStatus, RepairMessage, Resolution
from p2ptrain.errors import ConfigError, InvariantViolation, check_above_0
from p2ptrain.ids import PeerId, Seconds, Ticket

T = TypeVar("T")

MOST_ATTEMPTS = 4
"""Attempts of one group, including the first."""

ASKED_AT_ONCE = 8
"""Members polled at a time, however large the group."""

REMEMBERED = 64
"""Ended attempts that are remembered, far more than can be under way at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairConfig:
    """How long the members of a group wait for each other's messages."""

    ask_s: Seconds = 0.4
    """The period of polling the other members during an average. Too short: needless messages where
    averages take long; too long: a silent member is noticed late."""

    silence_s: Seconds = 1.2
    """A member that has not answered for this long is lost. Too short: busy peers lose groups; too
    long: a cut link is noticed late."""

    report_s: Seconds = 0.5
    """How long the repair leader waits for the report of a member that is alive. Too short: slow
    links lose members; too long: one that hangs delays the others."""

    resend_s: Seconds = 0.1
    """After this long a member of a broken group repeats its report."""

    give_up_s: Seconds = 3.0
    """A broken group without a resolution is over after this long."""

    def __post_init__(self) -> None:
        names = ("ask_s", "silence_s", "report_s", "resend_s", "give_up_s")
        check_above_0("repair", self, *names)
        if self.silence_s <= self.ask_s:
            raise ConfigError(
                f"repair silence_s = {self.silence_s} must be above ask_s = {self.ask_s}, "
                "or members are lost before they are asked"
            )
        if self.give_up_s <= self.report_s:
            raise ConfigError(
                f"repair give_up_s = {self.give_up_s} must be above report_s = {self.report_s}, "
                "or no group is ever repaired without a silent member"
            )


@dataclass(slots=True)
class _Group:
    """This peer's group, at its present attempt."""

    ticket: Ticket
    members: tuple[PeerId, ...]
    size: int
    """Members of the first attempt."""
    least: int
    """The least number of survivors to try again with."""
    wake_at: Seconds
    """When to poll again, or to repeat the report."""
    broken_at: Seconds | None = None
    complete: bool = False
    """It broke, and all of its result is here."""
    stopped: bool = False
    """It runs, and `Break` was emitted."""
    asked: dict[PeerId, Seconds] = field(default_factory=dict)
    """Polled members without an answer, and since when."""
    reports: dict[PeerId, AttemptPhase] = field(default_factory=dict)
    without: tuple[PeerId, ...] = ()
    """Voted out; it broke for that."""
    turn: int = 0


@dataclass(eq=False)
class Repair:
    """One peer's part in repairing its groups; `is_alive` is membership's view."""

    me: PeerId
    config: RepairConfig
    is_alive: Callable[[PeerId], bool]
    expects: Callable[[Ticket], bool]
    emit: Callable[[Effect], None]
    _group: _Group | None = None
    _past: dict[Ticket, AttemptPhase] = field(default_factory=dict)
    _resolutions: dict[Ticket, Resolution] = field(default_factory=dict)  # ours, as the leader

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
            self._end(AttemptPhase.OUT)
        least = max(2, len(members) // 2 + 1 if whole else 2)
        self._group = _Group(ticket, members, len(members), least, now + self.config.ask_s)

    def broke(
        self,
        ticket: Ticket,
        now: Seconds,
        *,
        complete: bool,
        without: tuple[PeerId, ...] = (),
    ) -> None:
        """Our attempt broke; it ends in a `Resolve`. `complete`: we hold all of its result.

        It is tried again `without` these members at any rate.
        """
        group = self._group
        if group is None or group.ticket != ticket:
            self.emit(Resolve(ticket, why="the group is over"))
            return
        group.broken_at, group.complete, group.without = now, complete, without
        self._report(group, now)
        self._maybe_resolve(group, now)

    def ended(self, root: Ticket, now: Seconds, *, done: bool) -> None:
        """The average of this group is over, for good."""
        if self._group and self._group.ticket.root == root:
            self._end(AttemptPhase.COMMITTED if done else AttemptPhase.OUT)
        elif done:  # abandoned too late: it was applied
            mine = [ticket for ticket in self._past if ticket.root == root]
            self._past.update(dict.fromkeys(mine[-1:], AttemptPhase.COMMITTED))

    def doubted(self, peer: PeerId, now: Seconds) -> None:
        """Membership suspects `peer`."""
        group = self._group
        if group and peer in group.members:
            if group.broken_at is None:
                group.wake_at = now  # ask it
                group.asked.setdefault(peer, now)
            self._maybe_resolve(group, now)

    def heard(self, ticket: Ticket, peer: PeerId) -> None:
        """A chunk of this attempt has come from `peer`, which counts as an answer."""
        if self._group and self._group.ticket == ticket:
            self._group.asked.pop(peer, None)

    def peer_dead(self, peer: PeerId, why: str) -> tuple[Ticket, tuple[PeerId, ...]] | None:
        """A peer is dead or cut off: the attempt with it is over.

        Returns the group's first ticket and the survivors, if enough are left to try again.
        """
        group = self._group
        if group is None or peer not in group.members or len(group.members) < 3:
            return None
        self._stop(group, why)
        return group.ticket.root, tuple(other for other in group.members if other != peer)

    def receive(self, source: PeerId, message: RepairMessage, now: Seconds) -> None:
        """A member, or a peer that believes to be one, has a status or a resolution for us."""
        group = self._group
        if group is None or group.ticket != message.ticket:
            if isinstance(message, AttemptStatus) and message.asks:
                self._answer(source, message.ticket)
        elif source in group.members and source not in (self.me, *group.without):
            match message:
                case AttemptStatus():
                    self._handle_status(group, source, message, now)
                case Resolution() if group.broken_at is None:  # we say so, and are told again
                    self._stop(group, "it was repaired without us")
                case Resolution():
                    self._resolve(group, message, now)

    def handle_timer(self, now: Seconds) -> None:
        group = self._group
        if group is None:
            return
        is_due = group.wake_at <= now
        if group.broken_at is None:
            if is_due:
                self._ask(group, now)
        elif now >= group.broken_at + self.config.give_up_s:
            self._resolve(group, Resolution(group.ticket), now)
        else:
            if is_due:
                self._report(group, now)
            self._maybe_resolve(group, now)

    def next_deadline(self) -> Seconds | None:
        return self._group.wake_at if self._group else None

    def check(self) -> None:
        group = self._group
        if group and self.me not in group.members:
            raise InvariantViolation(f"{self.me} repairs a group without itself: {group}")

    # --- while it runs ----------------------------------------------------------------------------

    def _ask(self, group: _Group, now: Seconds) -> None:
        """Poll some members; stop the attempt if one has been silent for too long."""
        group.wake_at = now + self.config.ask_s
        if group.stopped:
            return
        for peer, since in group.asked.items():
            if since + self.config.silence_s <= now:
                self._stop(group, f"{peer} has not answered for {now - since:.1f} s")
                return
        others = [peer for peer in group.members if peer != self.me]
        count = min(ASKED_AT_ONCE, len(others))
        for turn in range(group.turn, group.turn + count):
            group.asked.setdefault(others[turn % len(others)], now)
        group.turn += count
        # Lost: asked again, until it has been silent for too long.
        self._send(group.asked, AttemptStatus(group.ticket, AttemptPhase.RUNNING, asks=True))

    def _stop(self, group: _Group, why: str) -> None:
        """Break the attempt, unless it is broken or can break no more."""
        if group.broken_at is None and not group.stopped:
            group.stopped = True
            self.emit(Break(group.ticket, why))

    def _handle_status(
        self, group: _Group, source: PeerId, message: AttemptStatus, now: Seconds
    ) -> None:
        group.asked.pop(source, None)
        if message.phase is not AttemptPhase.RUNNING:
            group.reports[source] = message.phase
            if group.broken_at is None:
                self._stop(group, f"{source} is {message.phase.name.lower()}")
            else:
                self._maybe_resolve(group, now)
        elif message.asks and group.broken_at is None:
            self._send([source], AttemptStatus(group.ticket, message.phase))  # lost: it asks again

    def _answer(self, source: PeerId, ticket: Ticket) -> None:
        """Report our status in an attempt that we are not in; lost: it asks again."""
        phase = self._past.get(ticket)
        if phase is None:
            is_coming = self.expects(ticket.root)
            phase = AttemptPhase.RUNNING if is_coming else AttemptPhase.OUT
        self._send([source], self._resolutions.get(ticket, AttemptStatus(ticket, phase)))

    # --- when it is broken ------------------------------------------------------------------------

    def _report(self, group: _Group, now: Seconds) -> None:
        """Tell all that it is broken; lost: said again until it is repaired."""
        group.wake_at = now + self.config.resend_s
        self._send(group.members, AttemptStatus(group.ticket, AttemptPhase.BROKEN, asks=True))

    def _maybe_resolve(self, group: _Group, now: Seconds) -> None:
        """If it is broken, this peer leads and all survivors have reported: say how it goes on."""
        if group.broken_at is None:
            return
        reports = {self.me: AttemptPhase.BROKEN, **group.reports}
        waits = now < group.broken_at + self.config.report_s
        # Without those that are lost, or past the attempt: they take no part in the repair.
        left = [
            peer
            for peer in sorted(group.members, key=lambda p: (p != group.ticket.initiator, p))
            if peer not in group.without
            and (
                reports.get(peer) is AttemptPhase.BROKEN
                or (peer not in reports and waits and self.is_alive(peer))
            )
        ]
        if not left or left[0] != self.me or any(peer not in reports for peer in left):
            return
        rounds = group.ticket.attempt // group.size + 1
        counted = [phase for peer, phase in reports.items() if peer not in group.without]
        if AttemptPhase.COMMITTED in counted:
            resolution = Resolution(group.ticket, adopt=True)
        elif len(left) < group.least or rounds >= MOST_ATTEMPTS:
            resolution = Resolution(group.ticket)
        else:  # by a number that is no other leader's
            again = rounds * group.size + group.members.index(self.me)
            members = tuple(peer for peer in group.members if peer in left)
            resolution = Resolution(group.ticket, again=again, members=members)
        _keep(self._resolutions, group.ticket, resolution)
        self._send(group.members, resolution)  # lost: they say again that it is broken
        self._resolve(group, resolution, now)

    def _resolve(self, group: _Group, resolution: Resolution, now: Seconds) -> None:
        left = {*resolution.members}
        goes_on = (
            group.ticket.attempt < resolution.again <= MOST_ATTEMPTS * group.size
            and self.me in left
            and len(left) >= group.least
            and left <= {*group.members}
        )
        wake_at = now + self.config.ask_s
        if resolution.adopt and group.complete:
            group.broken_at, group.wake_at = None, wake_at
            group.stopped = True  # it cannot break any more
            self.emit(Resolve(group.ticket, adopt=True))
        elif goes_on:
            ticket, members = replace(group.ticket, attempt=resolution.again), tuple(sorted(left))
            _keep(self._past, group.ticket, AttemptPhase.OUT)
            self._group = _Group(ticket, members, group.size, group.least, wake_at)
            self.emit(Resolve(group.ticket, again=ticket, members=members))
        else:
            self._end(AttemptPhase.OUT)
            self.emit(Resolve(group.ticket, why="too few are left of the group"))

    def _end(self, phase: AttemptPhase) -> None:
        """Tell those who would wait: all, if we leave in the middle, or who has reported."""
        group, self._group = self._group, None
        assert group is not None
        _keep(self._past, group.ticket, phase)
        leaves = phase is AttemptPhase.OUT and group.broken_at is None
        told = group.members if leaves else group.reports
        self._send(told, AttemptStatus(group.ticket, phase))  # lost: they ask

    def _send(self, targets: Iterable[PeerId], message: RepairMessage) -> None:
        for peer in targets:
            if peer != self.me:
                self.emit(Send(peer, message))


def _keep(memory: dict[Ticket, T], ticket: Ticket, what: T) -> None:
    """Remember an entry, and drop the oldest."""
    memory[ticket] = what
    if len(memory) > REMEMBERED:
        del memory[next(iter(memory))]
