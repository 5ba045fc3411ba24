"""The effects of a peer's machine, and how each can end.

::

    Send          -> nothing: best effort, the machine must survive its loss
    Average       -> AverageEnded (`DONE` and applied, or not and nothing was changed), exactly
                     once, unless `Abandon` came first; before that it may break, any number of
                     times: AverageBroke, and wait for its `Resolve`
    Abandon       -> nothing: the group is over for this peer; whatever still runs under the ticket
                     must not change anything any more
    Break         -> AverageBroke, unless the average ends first: another member cannot finish it
    Resolve       -> nothing: a group whose attempt broke here adopts the result, tries again (with
                     `members`), or ends
    TakeState     -> StateTransferred: take parameters and optimizer state of this version and
                     lineage from another peer; if that fails, nothing is changed
    GroupEnded    -> nothing: for the algorithm that waits for this ticket: a claim that we made is
                     over, formed or not
    VersionEnded  -> nothing: for the trainer, which waits for this version: its scheduled average
                     is done, or we withdrew from it; where versions run without their trainers
                     also: it ran without ours (`LATE`), or broke
    MemberChanged -> nothing: for the record: we think differently of a member than before, or it
                     is called at another address
    SettingsKnown -> nothing: the swarm has other settings; change to them at the next boundary
"""

from dataclasses import dataclass
from enum import StrEnum

from p2ptrain.core.messages import Formed, MemberState, Message, SettingsChange
from p2ptrain.core.purpose import GOSSIP, Purpose
from p2ptrain.core.purpose import What as What
from p2ptrain.ids import PeerId, Seconds, Ticket


class Outcome(StrEnum):
    """How an attempt to average in a group ended. Only `DONE` changed anybody's parameters."""

    DONE = "done"
    BUSY = "busy"
    """Another claim of ours was under way, or there was no peer to ask."""
    YIELDED = "yielded"
    """We gave way to an older claim that includes us."""
    REFUSED = "refused"
    """A member says that it is not in this group."""
    LOST = "lost"
    """A member vanished, or its connection broke."""
    LATE = "late"
    """A deadline passed, or a version had run before its trainer arrived."""
    BROKEN = "broken"
    """A member sent what cannot be averaged: non-finite numbers, a wrong size."""
    WITHDRAWN = "withdrawn"
    """We left before it was over."""


NO_FAILURE = (Outcome.BUSY, Outcome.YIELDED, Outcome.WITHDRAWN)
"""How an attempt ends every day, without anybody's fault."""


@dataclass(frozen=True, slots=True)
class Send:
    target: PeerId
    message: Message


@dataclass(frozen=True, slots=True)
class Average(Formed):
    awaited: bool = False
    """Our trainer stands still until this is over."""

    @property
    def what(self) -> What:
        return self.purpose.what


@dataclass(frozen=True, slots=True)
class AverageEnded:
    ticket: Ticket
    outcome: Outcome
    why: str
    moved_bytes: int = 0
    """Over a link, in the direction in which more did: what stays on one machine does not count."""
    moving_s: Seconds = 0.0


@dataclass(frozen=True, slots=True)
class AverageBroke:
    ticket: Ticket
    complete: bool
    """All of the result is here, but perhaps not at all members."""
    without: tuple[PeerId, ...] = ()
    """It broke since these members are voted out (`core/offenders.py`)."""


@dataclass(frozen=True, slots=True)
class Abandon:
    ticket: Ticket
    outcome: Outcome
    why: str


@dataclass(frozen=True, slots=True)
class Break:
    ticket: Ticket
    why: str


@dataclass(frozen=True, slots=True)
class Resolve:
    ticket: Ticket
    adopt: bool = False
    """We hold the whole result: it counts."""
    again: Ticket | None = None
    members: tuple[PeerId, ...] = ()
    why: str = ""
    """Of its end, if it is over."""


@dataclass(frozen=True, slots=True)
class TakeState:
    version: int
    donor: PeerId
    lineage: int


@dataclass(frozen=True, slots=True)
class StateTransferred:
    version: int
    taken: bool


@dataclass(frozen=True, slots=True)
class GroupEnded:
    ticket: Ticket
    outcome: Outcome
    why: str
    members: tuple[PeerId, ...]
    """Who was in the group, ourselves included; if it was never formed, who was asked."""
    purpose: Purpose = GOSSIP


@dataclass(frozen=True, slots=True)
class VersionEnded:
    version: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class MemberChanged:
    peer: PeerId
    state: MemberState
    why: str


@dataclass(frozen=True, slots=True)
class SettingsKnown:
    change: SettingsChange


Notice = GroupEnded | VersionEnded | MemberChanged | SettingsKnown
Effect = Send | Average | Abandon | Break | Resolve | TakeState | Notice
Ending = AverageEnded | AverageBroke | StateTransferred
