"""What has become of each ticket, written down by somebody who sees all peers, and what must hold.

* *Each ticket once*: no peer promises itself to a ticket twice, enters it twice, or enters it
  without being promised to it; all members enter the same group; a request ends exactly once.
* *One group each, by anybody's belief*: a promise ends with its lease, by the granter's own clock,
  without a word. When the lease of a member has lapsed, unless that member has applied the average,
  nobody holds the ticket any more: so nobody counts on a peer that may be meeting others by now.
* *Nothing is torn by a message*: once the slices of a group may all have moved, no message makes a
  member throw away what the others apply. (Crashes, pauses and deadlines can.)

A peer that leaves a ticket in another way, because it was told to, or heard that the initiator is
gone, may be in another group at once, although the first one's members still hold their ticket:
without it their average cannot end, since it refuses their streams.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, TypeVar

from p2ptrain.core.events import Outcome
from p2ptrain.errors import P2PTrainError
from p2ptrain.ids import PeerId, Seconds, Ticket

T = TypeVar("T")


class UnsafeError(P2PTrainError):
    """Something has happened that must not."""


class Role(IntEnum):
    """What a peer is to a ticket."""

    NONE = 0
    PROMISED = 1
    """To the claim; the initiator is to its own."""
    IN = 2
    DONE = 3
    """It was in the group and has applied the average."""
    OUT = 4
    """It was promised or in the group, and left with nothing."""
    DEAD = 5


BOUND = (Role.PROMISED, Role.IN)


class Story(NamedTuple):
    """One ticket. Peers are numbers; `roles` and `left` have one entry for each."""

    ticket: Ticket
    answered: bool
    """The initiator was told how its request ended."""
    formed: bool
    """Somebody was in its group."""
    moved: bool
    """All members have been in the group at one moment: their slices may have moved."""
    members: tuple[int, ...]
    roles: tuple[Role, ...]
    left: tuple[Seconds | None, ...]
    """What is left of each one's lease, by its own clock; None where it binds nobody any more."""


def begun(ticket: Ticket, count: int) -> Story:
    """A request was made."""
    return Story(ticket, False, False, False, (), (Role.NONE,) * count, (None,) * count)


def promise(story: Story, peer: int, lease_s: Seconds, names: Sequence[PeerId]) -> Story:
    """`peer` is now bound to the ticket."""
    if story.roles[peer] is not Role.NONE:
        raise UnsafeError(f"{names[peer]} promises itself to {story.ticket} again")
    return story._replace(
        roles=with_one(story.roles, peer, Role.PROMISED),
        left=with_one(story.left, peer, lease_s),
    )


def enter(story: Story, peer: int, members: tuple[int, ...], names: Sequence[PeerId]) -> Story:
    """`peer` starts to average in a group of `members`."""
    name, ticket = names[peer], story.ticket
    if story.roles[peer] is not Role.PROMISED:
        raise UnsafeError(f"{name} enters {ticket} without being promised to it")
    if story.left[peer] == 0:
        raise UnsafeError(f"{name} enters {ticket} when its promise has lapsed")
    if story.members not in ((), members):
        raise UnsafeError(f"{name} enters {ticket} with other members than the others")
    for member in members:
        if story.roles[member] is Role.NONE:
            raise UnsafeError(f"{ticket} counts on {names[member]}, which never promised itself")
    roles = with_one(story.roles, peer, Role.IN)
    return story._replace(formed=True, members=members, roles=roles)


def leave(story: Story, peer: int, how: Outcome | None, names: Sequence[PeerId]) -> Story:
    """`peer` is not bound to the ticket any more; `how` its average ended, if it was in the group.

    Its lease binds the others on only if it says nothing to them, because its time is over.
    """
    others = [story.roles[member] for member in story.members if member != peer]
    together = all(role in (Role.IN, Role.DONE) for role in others)
    if how is Outcome.REFUSED and story.moved and together:
        raise UnsafeError(f"a message makes {names[peer]} throw {story.ticket} away")
    left = story.left[peer]
    if left and how is not Outcome.LATE:
        left = None
    role = Role.DONE if how is Outcome.DONE else Role.OUT
    return _settled(
        story._replace(
            roles=with_one(story.roles, peer, role),
            left=with_one(story.left, peer, None if role is Role.DONE else left),
        )
    )


def answer(story: Story) -> Story:
    """The initiator hears how its request ended."""
    if story.answered:
        raise UnsafeError(f"the request of {story.ticket} ends twice")
    return story._replace(answered=True)


def bury(story: Story, peer: int) -> Story:
    """`peer` has crashed: its promise binds nobody."""
    if story.roles[peer] in (Role.NONE, Role.DONE):
        return story
    return _settled(
        story._replace(
            roles=with_one(story.roles, peer, Role.DEAD), left=with_one(story.left, peer, None)
        )
    )


def grow_old(story: Story, durations_s: Sequence[Seconds]) -> Story:
    """So much time has passed on each peer's clock."""
    left = zip(story.left, durations_s, strict=True)
    return story._replace(left=tuple(s if s is None else max(0.0, s - d) for s, d in left))


def _settled(story: Story) -> Story:
    """Where nobody is bound any more, all that still matters is who cannot be bound again."""
    if any(role in BOUND for role in story.roles):
        return story
    roles = tuple(Role.NONE if role is Role.NONE else Role.OUT for role in story.roles)
    nobody_s = (None,) * len(roles)
    return Story(story.ticket, story.answered, story.formed, False, (), roles, nobody_s)


def with_one(row: Sequence[T], place: int, value: T) -> tuple[T, ...]:
    """The same row with another value in one place."""
    return (*row[:place], value, *row[place + 1 :])
