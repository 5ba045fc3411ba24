"""What peers say to each other. Plain values; `net/wire.py` turns them into protobuf and back.

A message may be lost, duplicated, delayed and reordered. Each class says what its loss costs; the
unions at the end say whom it is for.
"""

from dataclasses import dataclass
from enum import IntEnum

from p2ptrain.core.contribution import MODEL, Contribution
from p2ptrain.core.data_ledger import DataPlan, EpochCount, Share
from p2ptrain.core.purpose import GOSSIP, Purpose
from p2ptrain.errors import LocalProtocolError
from p2ptrain.ids import Address, PeerId, Ticket

MOST_BEFORE = 7
"""So many checkpoints a member states beside its newest, at most."""


class MemberState(IntEnum):
    """How a member is; within one incarnation the worse word wins."""

    ALIVE = 0
    SUSPECT = 1
    DEAD = 2
    LEFT = 3


class Phase(IntEnum):
    """What a member is busy with."""

    ARRIVING = 0
    """Joined; has no model yet that it could hand over."""
    TRAINING = 1
    """Trains, or waits until those that start together have the model, too."""
    DONE = 2
    """Its own training has ended; it serves the others until theirs has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One member as somebody knows it."""

    peer: PeerId
    address: Address
    incarnation: int
    """Grows when the peer restarts, and when it refutes that it is suspect or dead."""
    state: MemberState = MemberState.ALIVE
    beat: int = 0
    """Counts updates of the own record in this incarnation; the larger beat is newer."""
    phase: Phase = Phase.ARRIVING
    steps: int = 0
    """In this incarnation."""
    samples: int = 0
    """Of all its incarnations: what it trained before a crash is in the others' models, too."""
    resumes: int = 0
    """How far the checkpoint is that it holds while it arrives (`runtime/checkpoints.py`); 0: it
    holds none, or goes on from none."""
    resumes_before: tuple[int, ...] = ()
    """How far the older ones are that it holds then, the newest first; at most `MOST_BEFORE`."""
    link_mbit: int = 0
    """Mbit/s of its link, in each direction; 0: not known yet."""
    accusers: tuple[PeerId, ...] = ()
    """Of a suspect: members that could not reach it themselves, sorted, at most `ACCUSERS`."""

    @property
    def only_serves(self) -> bool:
        """It takes steps, or has ended, and has trained nothing; one that arrives may yet train."""
        return not self.samples and (self.steps > 0 or self.phase is Phase.DONE)


@dataclass(frozen=True, slots=True)
class Ping:
    """Are you there? Lost: looks like a lost `Ack`."""

    number: int
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Ack:
    """I am. Lost: the pinger suspects us until we refute it, and does not choose us meanwhile."""

    number: int
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class IndirectPing:
    """Probe `target` for me: it does not answer my pings. Lost: one helper less."""

    number: int
    target: PeerId


@dataclass(frozen=True, slots=True)
class IndirectAck:
    """Whether `target` has answered an indirect probe. Lost: one helper less."""

    number: int
    target: PeerId
    answered: bool
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class MembershipUpdates:
    """Records that should not wait for the next probe. Lost: they arrive with a probe."""

    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """Will you be in a group with me? Lost: sent again.

    Of two requests the one that was `born` earlier, by a Lamport clock, is the older.
    """

    ticket: Ticket
    born: int
    purpose: Purpose = GOSSIP


@dataclass(frozen=True, slots=True)
class Grant:
    """I will, and promise no other until you say `Begin` or `Release`. Sent again until then."""

    ticket: Ticket
    contribution: Contribution = MODEL


@dataclass(frozen=True, slots=True)
class Inquire:
    """An older request wants me: if you are still collecting, let me go. Lost: sent again.

    The ticket was granted, or is of an offer, which is always let go before its group has begun.
    """

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Failed:
    """Not now; your request waits in my queue. Lost: the request comes again, and so does this."""

    ticket: Ticket
    reason: str


@dataclass(frozen=True, slots=True)
class Formed:
    """A group, as all its members know it from its initiator."""

    ticket: Ticket
    members: tuple[PeerId, ...]
    weights: tuple[int, ...] = ()
    """Of the members' shards, in their order; empty: equal shards."""
    purpose: Purpose = GOSSIP
    contributions: tuple[Contribution, ...] = ()
    """The members' scalars, in their order; empty: `MODEL` of all of them."""
    outside_samples: int = 0
    """Samples of everyone who is not in the group, as its initiator knows them."""


@dataclass(frozen=True, slots=True)
class Begin(Formed):
    """Enough have granted: these are the group. Lost: the grant, or the offer, comes again."""

    offer: Ticket | None = None
    """The receiver's offer that this takes; None: it has granted."""


@dataclass(frozen=True, slots=True)
class Release:
    """I do without you under this ticket, mine or your offer's. Lost: what you sent comes again."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Relinquish:
    """I am not in this group (any more). Lost: what I answer comes again, or a stream fails."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Arrive:
    """I wait at the barrier with `version`. Lost: sent again until something happens."""

    version: int
    lineage: int = 0
    """Where my model comes from (`core/barrier.py`): who has another one has another model."""
    offer: Ticket | None = None
    """My slot is yours until I ask for it back; None: it is somebody else's."""
    contribution: Contribution = MODEL


@dataclass(frozen=True, slots=True)
class CatchUp:
    """You are behind, or of another lineage: take this state from `donor`. Lost: as `Arrive`."""

    version: int
    donor: PeerId
    lineage: int = 0


@dataclass(frozen=True, slots=True)
class Activate:
    """My trainer is at this version, and waits or not; else as `Arrive`. Lost: sent again."""

    version: int
    waits: bool
    offer: Ticket | None = None
    contribution: Contribution = MODEL


@dataclass(frozen=True, slots=True)
class Past:
    """The version that you are at has begun here without you: so far am I. Lost: you ask again."""

    version: int


MOST_SETTINGS_TEXT = 2000
"""Characters of the settings in a message, as JSON."""


@dataclass(frozen=True, slots=True)
class SettingsChange:
    """The swarm works with these settings. Lost: it comes again (`core/epochs.py`)."""

    epoch: int
    text: str
    """As JSON; what it may say is in `runtime/live_settings.py`."""
    by: PeerId
    """The peer that proposed them."""
    why: str


@dataclass(frozen=True, slots=True)
class AlgorithmMessage:
    """What an algorithm says to itself on another peer. What its loss costs is said there.

    Raises:
        LocalProtocolError: for a kind of more than 32 characters, more than 64 numbers, one that is
            not from 0 to 2^62, or more than 4,096 names; the other side would not take them.
    """

    kind: str
    numbers: tuple[int, ...] = ()
    peers: tuple[PeerId, ...] = ()

    def __post_init__(self) -> None:
        sizes = len(self.kind), len(self.numbers), len(self.peers)
        if any(size > most for size, most in zip(sizes, (32, 64, 4096), strict=True)):
            raise LocalProtocolError(
                f"a message with {sizes[0]} characters, {sizes[1]} numbers and {sizes[2]} names; "
                "32, 64 and 4,096 are allowed: send less, or several"
            )
        if not all(0 <= number <= 1 << 62 for number in self.numbers):
            raise LocalProtocolError(f"a message with {self.numbers}; write numbers from 0 to 2^62")


@dataclass(frozen=True, slots=True)
class LedgerUpdate:
    """Who has trained what, as I know it. Lost: later ones repeat it."""

    plan: DataPlan
    begin: int = 0
    """The first epoch whose shares I keep."""
    shares: tuple[Share, ...] = ()
    """At most `MOST_SHARES`."""
    closed: tuple[EpochCount, ...] = ()
    """Of epochs before `begin`, the newest."""
    asks: bool = False
    """Send me all that you know."""
    is_whole: bool = False
    """The last part of an answer to that."""


MOST_SHARES = 2048
"""In one message: some 40 KB."""


class AttemptPhase(IntEnum):
    """A member's phase in one attempt of a group."""

    RUNNING = 0
    BROKEN = 1
    """Not committed; it will be only by a resolution that adopts it."""
    COMMITTED = 2
    OUT = 3
    """The member is not in it, and has not committed it."""


@dataclass(frozen=True, slots=True)
class AttemptStatus:
    """Report my phase in this attempt; `asks` requests yours. Lost: repeated while it asks."""

    ticket: Ticket
    phase: AttemptPhase
    asks: bool = False


@dataclass(frozen=True, slots=True)
class Resolution:
    """How a broken group goes on: all adopt the result, the `members` try again, or it is over.

    Lost: answered again to each member that repeats its report.
    """

    ticket: Ticket
    adopt: bool = False
    again: int = 0
    """The number of the next attempt, with `members`, if there is one."""
    members: tuple[PeerId, ...] = ()


MembershipMessage = Ping | Ack | IndirectPing | IndirectAck | MembershipUpdates
SlotMessage = Request | Grant | Inquire | Failed | Begin | Release | Relinquish  # of every group
BarrierMessage = Arrive | CatchUp
WaitAvoidingMessage = Activate | Past
FormationMessage = SlotMessage | BarrierMessage | WaitAvoidingMessage
RepairMessage = AttemptStatus | Resolution
Message = MembershipMessage | FormationMessage | RepairMessage | SettingsChange
OF_ONE_EPOCH = (Arrive, CatchUp, Activate, Past, AlgorithmMessage)
"""Said under some settings, and without a meaning under others."""
AnyMessage = Message | AlgorithmMessage | LedgerUpdate
