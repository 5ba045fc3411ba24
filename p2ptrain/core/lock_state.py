"""What a group lock may be set to, and what it can be: values without behaviour.

What happens to them is the business of `core/group_lock.py`, and of nothing else.
"""

import math
from dataclasses import dataclass, replace

from p2ptrain.core.messages import Claim
from p2ptrain.errors import ConfigError
from p2ptrain.ids import PeerId, Seconds, Ticket


@dataclass(frozen=True, slots=True, kw_only=True)
class LockConfig:
    """Deadlines of the group lock, and how many to ask."""

    lease_s: Seconds = 20.0
    """How long a granted peer stays promised without news, at most; where groups are seen to end
    sooner, less (`core/pace.py`). Too short: groups on slow links expire in the middle of an
    average; too long: an unnoticed dead initiator idles its members."""

    acquire_timeout_s: Seconds = 2.0
    """Stop collecting grants after this, or sooner where less was seen to be enough. Too short:
    where averages last longer, large groups seldom come together; too long: little of the lease is
    left for the average itself."""

    resend_s: Seconds = 0.2
    """Say it again after this long without an answer; the first time sooner where answers were seen
    to be quicker. Too short: duplicates; too long: a lost message costs more."""

    clock_drift: float = 0.01
    """No clock runs faster or slower than true time by more than this share. Too small: a peer may
    meet others while its last group still counts on it; too large: leases are cut short."""

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
        if not 0 <= self.clock_drift < 1:
            raise ConfigError(f"lock clock_drift = {self.clock_drift} must be from 0 to below 1")
        for name in ("spare_claims", "spare_places"):
            if getattr(self, name) < 0:
                raise ConfigError(f"lock {name} = {getattr(self, name)} must be 0 or more")
        if self.resend_s >= self.acquire_timeout_s:
            raise ConfigError(
                f"lock resend_s = {self.resend_s} must be below "
                f"acquire_timeout_s = {self.acquire_timeout_s}, or nothing is ever sent again"
            )
        if self.time_in_group_s(self.lease_s) <= self.acquire_timeout_s:
            raise ConfigError(
                f"lock acquire_timeout_s = {self.acquire_timeout_s} must be below half of "
                f"lease_s = {self.lease_s} on clocks that drift by {self.clock_drift}, "
                "or no time is left to average in"
            )

    def time_in_group_s(self, lease_s: Seconds) -> Seconds:
        """How long a member may be in a group of such a lease, from its grant.

        `core/group_lock.py` says why.
        """
        slowest, fastest = 1 - self.clock_drift, 1 + self.clock_drift
        return lease_s * slowest / fastest - self.acquire_timeout_s

    def lease_for_s(self, time_in_group_s: Seconds) -> Seconds:
        """The lease that gives its members so long."""
        slowest, fastest = 1 - self.clock_drift, 1 + self.clock_drift
        return (time_in_group_s + self.acquire_timeout_s) * fastest / slowest


# --- states, all of them values -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Free:
    """Nobody's, and nobody waits for us: otherwise it would be somebody's turn."""

    def __str__(self) -> str:
        return "free"


@dataclass(frozen=True, slots=True)
class Collecting:
    """Our own claim; each candidate is in one of the five lists."""

    claim: Claim
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
    granted: tuple[PeerId, ...] = ()
    dropped: tuple[PeerId, ...] = ()
    """Will not be in this group any more."""

    @property
    def ticket(self) -> Ticket:
        return self.claim.ticket

    @property
    def told(self) -> tuple[PeerId, ...]:
        """Who knows of the claim, as far as we know."""
        return (*self.granted, *self.queued, *self.asked)

    def without(self, peer: PeerId) -> "Collecting":
        """The same claim, with `peer` in none of the lists."""

        def others(peers: tuple[PeerId, ...]) -> tuple[PeerId, ...]:
            return tuple(p for p in peers if p != peer) if peer in peers else peers

        return replace(
            self,
            unasked=others(self.unasked),
            asked=others(self.asked),
            queued=others(self.queued),
            granted=others(self.granted),
        )

    def __str__(self) -> str:
        return f"claiming {self.ticket}"


@dataclass(frozen=True, slots=True)
class Granted:
    """Promised to somebody else's claim."""

    claim: Claim
    granted_at: Seconds
    resend_at: Seconds

    @property
    def ticket(self) -> Ticket:
        return self.claim.ticket

    def __str__(self) -> str:
        return f"promised to {self.ticket}"


@dataclass(frozen=True, slots=True)
class InGroup:
    """The group is formed; its average runs."""

    ticket: Ticket
    members: tuple[PeerId, ...]
    expires_at: Seconds
    lease_s: Seconds
    """Of its claim."""
    formed: tuple[PeerId, ...] = ()
    """At the initiator: the first members, of whom it tells again when asked, whoever is left."""

    weights: tuple[int, ...] = ()
    """Of their shares."""

    def __str__(self) -> str:
        return f"averaging in {self.ticket}"


LockState = Free | Collecting | Granted | InGroup


@dataclass(frozen=True, slots=True)
class Wish:
    """A claim of our own that waits for its turn: we are somebody else's."""

    ticket: Ticket
    candidates: tuple[PeerId, ...]
    needed: int


@dataclass(frozen=True, slots=True)
class Ended:
    """What we were part of; `members` of a group that was never formed are none."""

    members: tuple[PeerId, ...] = ()
    done: bool = False


NEVER_FORMED = Ended()


def age(claim: Claim) -> tuple[int, Ticket]:
    """Of two claims the one with the smaller age is the older."""
    return (claim.born, claim.ticket)


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
        case InGroup(expires_at=expires_at):
            return replace(state, expires_at=expires_at - now)
        case Free():
            return state
