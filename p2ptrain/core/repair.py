"""Repair a broken group: its surviving members agree in one round how it goes on.

If one member's stream fails, the attempt fails at all members sooner or later. The first attempt of
a group has the ticket that formed it, each later one the same ticket with a higher `attempt`.
Whatever holds the group together (the slot, the version) stays held, so nobody joins again.

**Rule.** A member commits an attempt only when all members have all of its result
(`runtime/exchange.py`). So if any member has committed it, all hold the result, and *all adopt it*.
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
the mean of all models by a little, and nothing else.

Where all members must end with equal models even that is too much: such a group tries again only
with more than half of its first members, so no two parts can.

**No member waits for one that left.** After `ask_s` each member polls the others, a few at a time.
One that left, or never entered, answers that it is out: its earlier message was lost.

**Bounds.** `MOST_ATTEMPTS` per group, `give_up_s` per break. Then the group ends as broken, and a
new one may form.
"""

from collections.abc import Callable
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
    turn: int = 0


class Repair:
    """One peer's part in repairing its groups; `is_alive` is membership's view."""

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
        self._past: dict[Ticket, AttemptPhase] = {}
        self._resolutions: dict[Ticket, Resolution] = {}  # ours, as the repair leader

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
        least = len(members) // 2 + 1 if whole else 2
        self._group = _Group(ticket, members, len(members), max(2, least), now + self._config.ask_s)

    def broke(self, ticket: Ticket, now: Seconds, *, complete: bool) -> None:
        """Our attempt broke; it ends in a `Resolve`. `complete`: we hold all of its result."""
        group = self._group
        if group is None or group.ticket != ticket:
            self._emit(Resolve(ticket, why="the group is over"))
            return
        group.broken_at, group.complete = now, complete
        group.wake_at = now + self._config.resend_s
        self._tell(group)
        self._maybe_resolve(now)

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
            else:
                self._maybe_resolve(now)

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
        if group.broken_at is None:
            self._stop(group, why)
        return group.ticket.root, tuple(other for other in group.members if other != peer)

    def receive(self, source: PeerId, message: RepairMessage, now: Seconds) -> None:
        match message:
            case AttemptStatus():
                self._handle_status(source, message, now)
            case Resolution():
                self._handle_resolution(source, message, now)

    def handle_timer(self, now: Seconds) -> None:
        group = self._group
        if group is None:
            return
        if group.broken_at is None:
            if group.wake_at <= now:
                self._ask(group, now)
            return
        if now >= group.broken_at + self._config.give_up_s:
            self._resolve(group, Resolution(group.ticket), now)
            return
        if group.wake_at <= now:
            group.wake_at = now + self._config.resend_s
            self._tell(group)
        self._maybe_resolve(now)

    def next_deadline(self) -> Seconds | None:
        return self._group.wake_at if self._group else None

    def check(self) -> None:
        group = self._group
        if group and self._me not in group.members:
            raise InvariantViolation(f"{self._me} repairs a group without itself: {group}")

    # --- while it runs ----------------------------------------------------------------------------

    def _ask(self, group: _Group, now: Seconds) -> None:
        """Poll some members; stop the attempt if one has been silent for too long."""
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
            self._emit(Send(peer, AttemptStatus(group.ticket, AttemptPhase.RUNNING, asks=True)))

    def _stop(self, group: _Group, why: str) -> None:
        if not group.stopped:
            group.stopped = True
            self._emit(Break(group.ticket, why))

    def _handle_status(self, source: PeerId, message: AttemptStatus, now: Seconds) -> None:
        group, ticket, phase = self._group, message.ticket, message.phase
        if group is None or group.ticket != ticket:
            if message.asks:
                self._answer(source, ticket)
            return
        if source not in group.members or source == self._me:
            return
        group.asked.pop(source, None)
        if phase is AttemptPhase.RUNNING:
            if message.asks and group.broken_at is None:
                self._emit(
                    Send(source, AttemptStatus(ticket, AttemptPhase.RUNNING))
                )  # lost: it asks again
            return
        group.reports[source] = phase
        if group.broken_at is None:
            self._stop(group, f"{source} is {phase.name.lower()}")
        else:
            self._maybe_resolve(now)

    def _answer(self, source: PeerId, ticket: Ticket) -> None:
        """Report our status in an attempt that we are not in."""
        if ticket in self._resolutions:
            self._emit(
                Send(source, self._resolutions[ticket])
            )  # lost: it says again that it is broken
            return
        phase = self._past.get(ticket, AttemptPhase.OUT)
        if ticket not in self._past and self._expects(ticket.root):
            phase = AttemptPhase.RUNNING
        self._emit(Send(source, AttemptStatus(ticket, phase)))  # lost: it asks again

    # --- when it is broken ------------------------------------------------------------------------

    def _tell(self, group: _Group) -> None:
        for peer in group.members:
            if peer != self._me:  # lost: said again until it is repaired
                self._emit(Send(peer, AttemptStatus(group.ticket, AttemptPhase.BROKEN, asks=True)))

    def _maybe_resolve(self, now: Seconds) -> None:
        """If this peer leads and all survivors have reported: announce the resolution."""
        group = self._group
        if group is None or group.broken_at is None:
            return
        order = sorted(group.members, key=lambda peer: (peer != group.ticket.initiator, peer))
        left = [peer for peer in order if peer == self._me or not self._is_past(group, peer, now)]
        if left[0] != self._me or any(p != self._me and p not in group.reports for p in left):
            return
        resolution = self._resolution(group)
        _keep(self._resolutions, group.ticket, resolution)
        for peer in group.members:
            if peer != self._me:
                self._emit(Send(peer, resolution))  # lost: it says again that it is broken
        self._resolve(group, resolution, now)

    def _is_past(self, group: _Group, peer: PeerId, now: Seconds) -> bool:
        """True for a member that is lost, or past the attempt: it takes no part in the repair."""
        assert group.broken_at is not None
        if peer in group.reports:
            return group.reports[peer] is not AttemptPhase.BROKEN
        waited = now >= group.broken_at + self._config.report_s
        return waited or not self._is_alive(peer)

    def _resolution(self, group: _Group) -> Resolution:
        if AttemptPhase.COMMITTED in group.reports.values():
            return Resolution(group.ticket, adopt=True)
        left = [
            p for p in group.members if group.reports.get(p) is AttemptPhase.BROKEN or p == self._me
        ]
        rounds = group.ticket.attempt // group.size + 1
        if len(left) < group.least or rounds >= MOST_ATTEMPTS:
            return Resolution(group.ticket)
        attempt = rounds * group.size + group.members.index(
            self._me
        )  # no other repair leader's number
        return Resolution(group.ticket, again=attempt, members=tuple(left))

    def _handle_resolution(self, source: PeerId, message: Resolution, now: Seconds) -> None:
        group = self._group
        if group is None or group.ticket != message.ticket or source not in group.members:
            return
        if group.broken_at is None:
            self._stop(group, "it was repaired without us")  # and we say so, and are told again
        else:
            self._resolve(group, message, now)

    def _resolve(self, group: _Group, resolution: Resolution, now: Seconds) -> None:
        adopts = resolution.adopt and group.complete
        most = MOST_ATTEMPTS * group.size
        left = {*resolution.members}
        goes_on = (
            group.ticket.attempt < resolution.again <= most
            and self._me in left
            and len(left) >= group.least
            and left <= {*group.members}
        )
        if adopts:
            group.broken_at = None
            group.stopped = True  # it cannot break any more
            group.wake_at = now + self._config.ask_s
            self._emit(Resolve(group.ticket, adopt=True))
        elif goes_on:
            ticket = replace(group.ticket, attempt=resolution.again)
            _keep(self._past, group.ticket, AttemptPhase.OUT)
            members = tuple(sorted(left))
            wake_at = now + self._config.ask_s
            self._group = _Group(ticket, members, group.size, group.least, wake_at)
            self._emit(Resolve(group.ticket, again=ticket, members=members))
        else:
            self._end(AttemptPhase.OUT)
            self._emit(Resolve(group.ticket, why="too few are left of the group"))

    # --- the end ----------------------------------------------------------------------------------

    def _end(self, phase: AttemptPhase) -> None:
        group, self._group = self._group, None
        assert group is not None
        _keep(self._past, group.ticket, phase)
        asking = (
            group.members
            if phase is AttemptPhase.OUT and group.broken_at is None
            else group.reports
        )
        for peer in asking:
            if peer != self._me:
                self._emit(Send(peer, AttemptStatus(group.ticket, phase)))  # lost: it asks


def _keep(memory: dict[Ticket, T], ticket: Ticket, what: T) -> None:
    """Remember an entry, and drop the oldest."""
    memory[ticket] = what
    if len(memory) > REMEMBERED:
        del memory[next(iter(memory))]
