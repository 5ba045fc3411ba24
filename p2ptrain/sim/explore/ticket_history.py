"""Record the history of each ticket, with a view of all peers, and check what must hold.

* *Each ticket once*: no peer promises itself to a ticket twice, enters it twice, or enters it
  without being promised to it or having offered its slot to its initiator; a promise whose lease
  has lapsed does not count. A request ends exactly once.
* *The same group*: all who enter a ticket enter the same group, for the same purpose, with the same
  scalars of its members; each member that it counts on has promised itself, or has offered its
  slot.
* *One group each*: an average can succeed only if all members have been in the group at one moment,
  and a peer is in one group at a time; so two groups that share a peer are not both applied at
  once.
* *No message breaks a result*: once the chunks of a group may all have moved, no message makes a
  member discard what the others apply. (Crashes can.)
* *Each arrival once*: a waiting trainer gets exactly one end, at the barrier that of the version
  with which it waits; a peer enters a barrier's group only while its trainer waits for exactly that
  version. A version of a schedule begins at most once at each peer.

A member that learns that its group is over, or that another member is dead, may be in another group
at once, although others still hold the ticket: without it their average cannot end, since it
refuses their streams.
"""

from collections.abc import Sequence
from dataclasses import replace
from enum import IntEnum
from typing import NamedTuple, TypeVar

from p2ptrain.core.effects import Average, Outcome
from p2ptrain.errors import P2PTrainError
from p2ptrain.ids import PeerId, Ticket

T = TypeVar("T")


class UnsafeError(P2PTrainError):
    """A rule was violated."""


class Role(IntEnum):
    """A peer's role in a ticket."""

    NONE = 0
    PROMISED = 1
    """It is promised to the request; the initiator is to its own."""
    IN = 2
    DONE = 3
    """It was in the group and has applied the average."""
    OUT = 4
    """It was promised or in the group, and left without a result."""
    DEAD = 5


BOUND = (Role.PROMISED, Role.IN)


class TicketHistory(NamedTuple):
    """One ticket. Peers are numbers; `roles` has one entry for each."""

    ticket: Ticket
    answered: bool
    """The initiator learned how its request ended."""
    formed: bool
    """A peer was in its group."""
    moved: bool
    """All members have been in the group at one moment: their chunks may have moved."""
    group: Average | None
    """The group, as the first member entered it."""
    members: tuple[int, ...]
    roles: tuple[Role, ...]


def begun(ticket: Ticket, count: int) -> TicketHistory:
    """A request was made."""
    return TicketHistory(ticket, False, False, False, None, (), (Role.NONE,) * count)


def promise(history: TicketHistory, peer: int, names: Sequence[PeerId]) -> TicketHistory:
    """`peer` is now bound to the ticket."""
    if history.roles[peer] is not Role.NONE:
        raise UnsafeError(f"{names[peer]} promises itself to {history.ticket} again")
    return history._replace(roles=with_one(history.roles, peer, Role.PROMISED))


def enter(
    history: TicketHistory,
    peer: int,
    average: Average,
    names: Sequence[PeerId],
    *,
    offered: Sequence[int] = (),
    lapsed: bool = False,
) -> TicketHistory:
    """`peer` starts to average; if `lapsed`, its promise is older than its lease.

    Members in `offered` have offered their slots, according to the initiator, and need not have
    promised themselves.
    """
    name, ticket = names[peer], history.ticket
    if history.roles[peer] is not Role.PROMISED:
        raise UnsafeError(f"{name} enters {ticket} without being promised to it")
    if lapsed:
        raise UnsafeError(f"{name} enters {ticket} when its promise has lapsed")
    average = replace(average, awaited=False)  # concerns only its own trainer
    if history.group not in (None, average):
        raise UnsafeError(f"{name} enters another group under {ticket} than the others")
    members = tuple(names.index(member) for member in average.members)
    for member in members:
        if history.roles[member] is Role.NONE and member not in offered and history.group is None:
            raise UnsafeError(f"{ticket} counts on {names[member]}, which never promised itself")
    roles = with_one(history.roles, peer, Role.IN)
    return history._replace(formed=True, group=average, members=members, roles=roles)


def leave(
    history: TicketHistory, peer: int, how: Outcome | None, names: Sequence[PeerId]
) -> TicketHistory:
    """`peer` is not bound to the ticket any more; `how` its average ended, if it was in one."""
    others = [history.roles[member] for member in history.members if member != peer]
    together = all(role in (Role.IN, Role.DONE) for role in others)
    if how is Outcome.REFUSED and history.moved and together:
        raise UnsafeError(f"a message makes {names[peer]} throw {history.ticket} away")
    role = Role.DONE if how is Outcome.DONE else Role.OUT
    return _settled(history._replace(roles=with_one(history.roles, peer, role)))


def answer(history: TicketHistory) -> TicketHistory:
    """The initiator learns how its request ended."""
    if history.answered:
        raise UnsafeError(f"the request of {history.ticket} ends twice")
    return history._replace(answered=True)


def mark_dead(history: TicketHistory, peer: int) -> TicketHistory:
    """`peer` has crashed."""
    if history.roles[peer] is Role.DONE:
        return history
    if history.roles[peer] is Role.NONE and peer not in history.members:
        return history
    return _settled(history._replace(roles=with_one(history.roles, peer, Role.DEAD)))


def _settled(history: TicketHistory) -> TicketHistory:
    """Simplify: if no peer is bound any more, only those that cannot be bound again matter.

    (A peer that offered its slot may still enter, in the same group.)
    """
    if any(role in BOUND for role in history.roles):
        return history
    roles = tuple(Role.NONE if role is Role.NONE else Role.OUT for role in history.roles)
    if any(roles[member] is Role.NONE for member in history.members):
        return history._replace(roles=roles)
    return TicketHistory(history.ticket, history.answered, history.formed, False, None, (), roles)


def with_one(row: Sequence[T], place: int, value: T) -> tuple[T, ...]:
    """The same row with another value at one index."""
    return (*row[:place], value, *row[place + 1 :])
