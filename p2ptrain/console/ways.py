"""Say which way connections take between each pair of peers: direct, reversed or relayed.

A peer that only dials out is called by another one over a connection of its own (reversed). Two of
them need a peer that relays, and with which both have registered; so each peer that can be called
is asked which of them it reaches (`net/carrying.py`).
"""

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator, Sequence

from p2ptrain.console.findings import Finding, Level, Visit
from p2ptrain.core.messages import Member
from p2ptrain.errors import CodecError, RefusedError, TransportError
from p2ptrain.ids import PeerId, Seconds
from p2ptrain.net.ask import asking
from p2ptrain.net.enrolment import member_by
from p2ptrain.net.tls import Security
from p2ptrain.net.wire_carried import name_at

NAME = PeerId(f"doctor-{socket.gethostname()}"[:64])
"""Of this machine where that takes a certificate; a token counts it once."""

ENROLS_S: Seconds = 10.0
AT_ONCE = 16
MOST_PAIRS = 20
"""Pairs of peers that only dial out which are named; the others are counted."""

US = PeerId("this machine")


async def member_security(visit: Visit) -> Security:
    """Ours, as a member. Raises what `member_by` raises."""
    return await member_by(visit.network, [visit.address], NAME, ENROLS_S, visit.unix_clock)


async def about_ways(here: Sequence[Member], visit: Visit) -> AsyncIterator[Finding]:
    """Findings about pairs with a peer that only dials out; none if there is no such peer."""
    called = [member for member in here if name_at(member.address) is None]
    dialing = [member for member in here if name_at(member.address)]
    if not dialing and not visit.dial_out:
        return
    names = sorted([member.peer for member in dialing] + [US] * visit.dial_out)
    pairs = len(called) * (len(called) - 1) // 2
    yield Finding(
        Level.OK,
        f"only dialling out: {', '.join(names)}; the others call them over connections of "
        f"theirs (direct: {pairs} pairs, reversed: {len(called) * len(names)})",
    )
    try:
        relays = await _relays(called, dialing, visit)
    except (TransportError, RefusedError, CodecError) as error:
        yield Finding(Level.NOTE, f"which peers relay is not known ({error})")
        return
    between = list(itertools.combinations(names, 2))
    for one, other in between[:MOST_PAIRS]:
        yield _about_pair(one, other, relays)
    if len(between) > MOST_PAIRS:
        yield Finding(Level.NOTE, f"and {len(between) - MOST_PAIRS} more pairs like these")


def _about_pair(one: PeerId, other: PeerId, relays: dict[PeerId, list[PeerId]]) -> Finding:
    sets = [relays[name] for name in (one, other) if name != US]
    common = [relay for relay in sets[0] if all(relay in found for found in sets)]
    if common:
        return Finding(Level.OK, f"{one} and {other} meet through {' or '.join(common)} (relayed)")
    return Finding(
        Level.NOTE,
        f"{one} and {other} do not reach each other, as no peer relays between them; start one "
        "that can be called with --relay MBIT",
    )


async def _relays(
    called: Sequence[Member], dialing: Sequence[Member], visit: Visit
) -> dict[PeerId, list[PeerId]]:
    """For each peer that only dials out, those that relay to it."""
    security, slots = await member_security(visit), asyncio.Semaphore(AT_ONCE)

    async def relays(relay: Member, there: Member) -> bool:
        async with slots, asking(relay.address, visit.network, security) as asker:
            try:
                await asker.reach(there.address, visit.timeout_s)
            except (TransportError, RefusedError, CodecError):
                return False
            return True

    async def those_of(there: Member) -> list[PeerId]:
        answers = await asyncio.gather(*(relays(relay, there) for relay in called))
        return [relay.peer for relay, yes in zip(called, answers, strict=True) if yes]

    found = await asyncio.gather(*(those_of(there) for there in dialing))
    return {there.peer: names for there, names in zip(dialing, found, strict=True)}
