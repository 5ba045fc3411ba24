"""What a slot may be set to, and what it can be: values without behaviour.

What happens to them is the business of `core/group_lock.py`, and of nothing else.
"""

import math
from dataclasses import dataclass, replace

from p2ptrain.core.contribution import MODEL, Contribution
from p2ptrain.core.messages import Begin, Request
from p2ptrain.core.purpose import GOSSIP, Purpose
from p2ptrain.errors import ConfigError
from p2ptrain.ids import PeerId, Seconds, Ticket


@dataclass(frozen=True, slots=True, kw_only=True)
class LockConfig:
    """Deadlines of the group lock, and how many to ask."""

    lease_s: Seconds = 6.0
    """How long a peer keeps the grant of a silent initiator. Too short: slow initiators lose
    grants that they count on; too long: an unnoticed dead one idles its members."""

    acquire_timeout_s: Seconds = 2.0
    """Stop collecting grants after this, or sooner where less was seen to be enough. Too short:
    where averages last longer, large groups seldom come together; too long: those who have granted
    idle for somebody who is busy."""

    resend_s: Seconds = 0.2
    """Say it again after this long without an answer; the first time sooner where answers were seen
    to be quicker. Too short: duplicates; too long: a lost message costs more."""

    spare_claims: int = 1
    """Ask so many candidates more than are needed. Too few: a lost or slow answer holds everyone
    up; too many: peers are promised and released for nothing."""

    spare_places: int = 24
    """Where candidates are busy, wait in the queues of so many more than are needed. Too few: the
    first one that becomes free comes late; too many: needless messages."""

    def __post_init__(self) -> None:
        for name in ("lease_s", "acquire_timeout_s", "resend_s"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigError(f"lock {name} = {value} must be above 0")
        for name in ("spare_claims", "spare_places"):
            if getattr(self, name) < 0:
                raise ConfigError(f"lock {name} = {getattr(self, name)} must be 0 or more")
        if self.resend_s >= self.acquire_timeout_s:
            raise ConfigError(
                f"lock resend_s = {self.resend_s} must be below "
                f"acquire_timeout_s = {self.acquire_timeout_s}, or nothing is ever sent again"
            )
        if self.lease_s <= self.acquire_timeout_s:
            raise ConfigError(
                f"lock lease_s = {self.lease_s} must be above acquire_timeout_s = "
                f"{self.acquire_timeout_s}, or grants lapse while they are collected"
            )


# --- states, all of them values -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Free:
    """Nobody's, and nobody waits for us: otherwise it would be somebody's turn."""

    def __str__(self) -> str:
        return "free"


@dataclass(frozen=True, slots=True)
class Offered:
    """A coordinator may begin a group with us, until we ask for our slot back."""

    ticket: Ticket
    """Ours: it names this offer."""
    to: PeerId
    purpose: Purpose
    contribution: Contribution
    resend_at: Seconds
    """When to ask for it back again, if somebody wants it."""
    lapses_at: Seconds = math.inf
    """When to take it back without an answer, once it was asked for."""

    def __str__(self) -> str:
        return f"offered to {self.to}"


@dataclass(frozen=True, slots=True)
class Granted:
    """Promised to somebody else's request."""

    request: Request
    contribution: Contribution
    granted_at: Seconds
    resend_at: Seconds

    @property
    def ticket(self) -> Ticket:
        return self.request.ticket

    def __str__(self) -> str:
        return f"promised to {self.ticket}"


@dataclass(frozen=True, slots=True)
class Promise:
    """One candidate's grant, as its initiator has it."""

    peer: PeerId
    contribution: Contribution = MODEL
    offer: Ticket | None = None
    """It granted by this offer, which is for such a group."""
    purpose: Purpose = GOSSIP


@dataclass(frozen=True, slots=True)
class Collecting:
    """Our own request; each candidate is in one of the five lists."""

    request: Request
    needed: int
    unasked: tuple[PeerId, ...]
    """In order of preference."""
    asked_at: Seconds
    give_up_at: Seconds
    resend_at: Seconds
    asked: tuple[PeerId, ...] = ()
    """Should answer any moment."""
    queued: tuple[PeerId, ...] = ()
    """Are busy, and will grant us in our turn; or have not answered for a while."""
    granted: tuple[Promise, ...] = ()
    dropped: tuple[PeerId, ...] = ()
    """Will not be in this group any more."""
    busy: tuple[PeerId, ...] = ()
    """Have said that they are in another group, or promised to one."""

    @property
    def ticket(self) -> Ticket:
        return self.request.ticket

    @property
    def granters(self) -> tuple[PeerId, ...]:
        return tuple(promise.peer for promise in self.granted)

    @property
    def told(self) -> tuple[PeerId, ...]:
        """Who knows of the request, as far as we know."""
        return (*self.granters, *self.queued, *self.asked)

    def without(self, peer: PeerId) -> "Collecting":
        """The same request, with `peer` in none of the lists."""

        def others(peers: tuple[PeerId, ...]) -> tuple[PeerId, ...]:
            return tuple(p for p in peers if p != peer) if peer in peers else peers

        return replace(
            self,
            unasked=others(self.unasked),
            asked=others(self.asked),
            queued=others(self.queued),
            granted=tuple(promise for promise in self.granted if promise.peer != peer),
        )

    def __str__(self) -> str:
        return f"collecting for {self.ticket}"


@dataclass(frozen=True, slots=True)
class InGroup:
    """The group is formed; its average runs for as long as anything moves."""

    begin: Begin
    """As it was formed, whoever is left; its initiator tells of it again when asked."""
    members: tuple[PeerId, ...]
    since: Seconds
    """When we were promised to it."""
    offers: tuple[Promise, ...] = ()
    """At the initiator: those who had offered their slots."""

    @property
    def ticket(self) -> Ticket:
        return self.begin.ticket

    def __str__(self) -> str:
        return f"averaging in {self.ticket}"


LockState = Free | Offered | Collecting | Granted | InGroup


@dataclass(frozen=True, slots=True)
class Wish:
    """A request of our own that waits for its turn."""

    ticket: Ticket
    candidates: tuple[PeerId, ...]
    needed: int
    purpose: Purpose = GOSSIP


@dataclass(frozen=True, slots=True)
class Ended:
    """What we were part of; `members` of a group that was never formed are none."""

    members: tuple[PeerId, ...] = ()
    done: bool = False


NEVER_FORMED = Ended()


def age(request: Request) -> tuple[int, Ticket]:
    """Of two requests the one with the smaller age is the older."""
    return (request.born, request.ticket)


def relative(state: LockState, now: Seconds) -> LockState:
    """The same state, with times counted from `now`."""
    match state:
        case Collecting(asked_at=asked_at, give_up_at=give_up_at, resend_at=resend_at):
            return replace(
                state,
                asked_at=asked_at - now,
                give_up_at=give_up_at - now,
                resend_at=resend_at - now,
            )
        case Granted(granted_at=granted_at, resend_at=resend_at):
            return replace(state, granted_at=granted_at - now, resend_at=resend_at - now)
        case Offered(resend_at=resend_at, lapses_at=lapses_at):
            resend_at, lapses_at = max(0.0, resend_at - now), max(0.0, lapses_at - now)
            return replace(state, resend_at=resend_at, lapses_at=lapses_at)
        case InGroup():
            return replace(state, since=0.0)
        case Free():
            return state
