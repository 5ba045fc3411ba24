"""The effects of a peer's machine, and how each can end (`core/events.py`).

::

    Send          -> nothing: best effort, the machine must survive its loss
    Average       -> AverageEnded, exactly once, unless `Abandon` came first; before that it may
                     break, any number of times: AverageBroke, and wait for its `Resolve`
    Abandon       -> nothing: whatever still runs under the ticket must not change anything any more
    Break         -> AverageBroke, unless the average ends first
    Resolve       -> nothing: it goes on as it says
    TakeState     -> StateTaken | StateNotTaken
    GroupEnded    -> nothing: for the algorithm that waits for this ticket
    VersionEnded  -> nothing: for the trainer, which waits for this version
    MemberChanged -> nothing: for the record
"""

from dataclasses import dataclass

from p2ptrain.core.contribution import Contribution
from p2ptrain.core.events import Outcome
from p2ptrain.core.messages import MemberState, Message
from p2ptrain.core.purpose import GOSSIP, Purpose
from p2ptrain.core.purpose import What as What
from p2ptrain.ids import PeerId, Ticket


@dataclass(frozen=True, slots=True)
class Send:
    target: PeerId
    message: Message


@dataclass(frozen=True, slots=True)
class Average:
    """The group is formed: move its payload."""

    ticket: Ticket
    members: tuple[PeerId, ...]
    purpose: Purpose = GOSSIP
    weights: tuple[int, ...] = ()
    """Of the members' shards, in their order; empty: equal shards."""
    awaited: bool = False
    """Our trainer stands still until this is over."""
    contributions: tuple[Contribution, ...] = ()
    """The members' scalars, in their order; empty: `MODEL` of all of them."""
    outside_samples: int = 0
    """Samples of everyone who is not in the group, as its initiator knew them."""

    @property
    def what(self) -> What:
        return self.purpose.what


@dataclass(frozen=True, slots=True)
class Abandon:
    """The group is over for this peer, whatever still moves."""

    ticket: Ticket
    outcome: Outcome
    why: str


@dataclass(frozen=True, slots=True)
class Break:
    """Stop this attempt: another member cannot finish it."""

    ticket: Ticket
    why: str


@dataclass(frozen=True, slots=True)
class Resolve:
    """How a group whose attempt broke here goes on: adopt the result, try again, or end."""

    ticket: Ticket
    adopt: bool = False
    """We hold the whole result: it counts."""
    again: Ticket | None = None
    """The next attempt, with `members`."""
    members: tuple[PeerId, ...] = ()
    why: str = ""
    """Of its end, if it is over."""


@dataclass(frozen=True, slots=True)
class TakeState:
    """Take parameters and optimizer state at one boundary from another peer."""

    version: int
    donor: PeerId
    lineage: int
    """Of what is taken."""


@dataclass(frozen=True, slots=True)
class GroupEnded:
    """A claim that we made is over, formed or not."""

    ticket: Ticket
    outcome: Outcome
    why: str
    members: tuple[PeerId, ...]
    """Who was in the group, ourselves included; if it was never formed, who was asked."""
    purpose: Purpose = GOSSIP


@dataclass(frozen=True, slots=True)
class VersionEnded:
    """The scheduled average of this version is done, or we withdrew from it.

    Where versions run without their trainers also: it ran without ours (`LATE`), or broke.
    """

    version: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class MemberChanged:
    """We think differently of a member than before."""

    peer: PeerId
    state: MemberState
    why: str


Notice = GroupEnded | VersionEnded | MemberChanged
Effect = Send | Average | Abandon | Break | Resolve | TakeState | Notice
