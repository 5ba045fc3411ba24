"""Encode what peers know of each other, and check it.

Records of members are gossip: each is sent and received many times, so some are remembered. Those
are bounded in number and in bytes, since anybody can forge records.
"""

import functools
from collections.abc import Sequence
from typing import Any

from p2ptrain.core import messages as m
from p2ptrain.core.links import MAX_MBIT
from p2ptrain.core.roster import ACCUSERS, joined
from p2ptrain.errors import CodecError
from p2ptrain.ids import PeerId
from p2ptrain.net._pb import peer_pb2 as pb
from p2ptrain.net.wire_parts import MAX_MEMBERS, address, at_most, name_of, number, parse

KNOWN_RECORDS = 1 << 12
"""So many are remembered as they were sent, and as they were read."""

KNOWN_BYTES = 512
"""What is larger is not remembered: honest records rarely are."""


def member_to_pb(member: m.Member) -> Any:  # Any: a generated class
    return pb.Member(
        peer=member.peer,
        address=member.address,
        incarnation=member.incarnation,
        state=int(member.state),
        beat=member.beat,
        phase=int(member.phase),
        steps=member.steps,
        samples=member.samples,
        link_mbit=member.link_mbit,
        resumes=member.resumes,
        resumes_before=member.resumes_before,
        accusers=member.accusers,
    )


@functools.lru_cache(maxsize=KNOWN_RECORDS)  # every record is sent many times
def known_to_pb(member: m.Member) -> Any:  # Any: a generated class
    """Read only: a message that holds it has a copy."""
    return member_to_pb(member)


def member_of(p: Any) -> m.Member:  # Any: a generated class
    try:
        state, phase = m.MemberState(p.state), m.Phase(p.phase)
    except ValueError as error:
        raise CodecError(f"a member with an unknown state: {error}") from error
    return m.Member(
        peer=name_of(p.peer),
        address=address(p.address),
        incarnation=number(p.incarnation),
        state=state,
        beat=number(p.beat),
        phase=phase,
        steps=number(p.steps),
        samples=number(p.samples),
        link_mbit=at_most(MAX_MBIT, p.link_mbit, "a link's speed"),
        resumes=p.resumes,
        resumes_before=tuple(p.resumes_before[: m.MOST_BEFORE]),
        accusers=_accusers(p.accusers) if state is m.MemberState.SUSPECT else (),
    )


def _accusers(names: Sequence[str]) -> tuple[PeerId, ...]:
    return joined(tuple(name_of(name) for name in names[: 2 * ACCUSERS]), ())


def members_of(packed: Sequence[Any]) -> tuple[m.Member, ...]:
    if len(packed) > MAX_MEMBERS:
        raise CodecError(f"a message with {len(packed)} members; at most {MAX_MEMBERS} are allowed")
    return tuple([_read(p.SerializeToString()) for p in packed])


def _read(data: bytes) -> m.Member:
    if len(data) > KNOWN_BYTES:
        return member_of(parse(pb.Member, data))
    return _known_member(data)


@functools.lru_cache(maxsize=KNOWN_RECORDS)  # every record is received many times
def _known_member(data: bytes) -> m.Member:
    return member_of(parse(pb.Member, data))
