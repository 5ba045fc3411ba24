"""Decide who may join: check version, settings, model, name and address of a newcomer.

A newcomer that may not join gets the reason in one sentence. The address is checked by dialling it
back, so a peer that others cannot reach fails at once, and not in its first group.

A peer takes its incarnation from its wall clock, which may have been set back since it last ran. A
lower incarnation counts as old, so the admitting peer stores the newcomer's record above its former
one and replies with that; the newcomer takes a higher one before it forms a group.
"""

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

from p2ptrain.core.membership import HIGHEST, LEAP, Membership
from p2ptrain.core.messages import Member, SettingsChange
from p2ptrain.errors import CodecError, RefusedError, TransportError
from p2ptrain.ids import Address, Seconds
from p2ptrain.net.transport import Transport
from p2ptrain.net.wire import Hello

DIAL_BACK_S: Seconds = 5.0
"""The timeout for dialling a newcomer back; a machine on which a whole fleet starts takes seconds.
A newcomer that does not answer is refused."""

DIAL_AGAIN_S: Seconds = 0.3
DIALS = 5
"""Where a peer restarts at its old address, the connection of others to it has just failed and
fails again at once for up to a second: so a peer dials back more than once."""

MOST_ADMISSIONS = 64
"""Newcomers that are dialled back at a time; more have to ask again. Too few: a fleet that starts
at once takes long; too many: strangers make this peer dial as many addresses as they like."""

KINDS_OF_REFUSALS = 8
"""What newcomers of one host can make this peer write into its records, per minute."""

ASK_S: Seconds = 8.0
"""The timeout per host; longer than it takes to dial back."""


async def request_join(
    transport: Transport,
    hosts: Sequence[Address],
    hello: Hello,
    timeout_s: Seconds,
    clock: Callable[[], Seconds],
) -> tuple[Address, tuple[Member, ...], Member, SettingsChange | None]:
    """Send a join request to `hosts` in turn until one answers; they share the time.

    Returns that host, the members in its reply, its record of us, perhaps of a former incarnation,
    and the settings of the swarm, if they have changed since it began.

    Raises:
        RefusedError: if one refuses, or its record of us leaves no room for a higher incarnation.
        TransportError: if none answered within `timeout_s`.
    """
    deadline = clock() + timeout_s
    why = "none was tried"
    while clock() < deadline:
        for index, host in enumerate(hosts):
            share_s = max(0.0, deadline - clock()) / (len(hosts) - index)
            try:
                reply = await transport.join(host, hello, min(share_s, ASK_S))
            except (TransportError, CodecError) as error:
                why = str(error)
                continue
            if reply.refusal:
                raise RefusedError(reply.refusal)
            ours = [member for member in reply.members if member.peer == hello.me.peer]
            known = max(ours, key=lambda member: member.incarnation, default=hello.me)
            if known.incarnation > HIGHEST - LEAP:  # no room to refute suspicions: it is forged
                raise RefusedError(
                    f"{host} remembers a {known.peer} of incarnation {known.incarnation}, above "
                    "which there is no room; choose another name"
                )
            return host, reply.members, known, reply.settings
        await asyncio.sleep(0.1)
    raise TransportError(
        f"no peer answered at {', '.join(hosts)} within {timeout_s:g} s ({why}); "
        "start that peer first, or check its address"
    )


def successor(newcomer: Member, before: Member | None) -> Member:
    """The record to store of a newcomer, given that of its former incarnation."""
    if before is None:
        return newcomer
    above, most = before.incarnation + 1, before.incarnation + LEAP  # others believe no higher one
    incarnation = min(max(newcomer.incarnation, above), most)
    return replace(newcomer, samples=before.samples, incarnation=incarnation)


def kind_of(refusal: str, newcomer: Member) -> tuple[str, int]:
    """Which refusals count as one: those of a host for a like reason, and of few kinds in all."""
    host = newcomer.address.rpartition(":")[0]
    reason = refusal.replace(newcomer.peer, "").replace(newcomer.address, "")
    return host, zlib.crc32(reason.encode()) % KINDS_OF_REFUSALS


class Admissions:
    """Dial back few newcomers at a time: each names the address that is dialled."""

    def __init__(self) -> None:
        self._now = 0

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """While one newcomer is dialled back. Raises TransportError if there are too many."""
        if self._now >= MOST_ADMISSIONS:
            raise TransportError(f"{MOST_ADMISSIONS} others join at this moment; ask again soon")
        self._now += 1
        try:
            yield
        finally:
            self._now -= 1


async def cannot_reach(transport: Transport, membership: Membership, newcomer: Member) -> str:
    """Dial back: why `newcomer` cannot be reached under its name, or nothing."""
    peer, address = newcomer.peer, newcomer.address
    known = membership.member(peer)
    if known and known.address != address and await _answers(transport, known):
        return f"a peer named {peer} is already here, at {known.address}; choose another name"
    try:
        there = (await _dial(transport, address)).me
    except (TransportError, CodecError) as error:
        return (
            f"{peer} cannot be reached from {membership.me.peer} at {address} ({error}); "
            "advertise an address that other peers can reach"
        )
    # Another peer may have admitted it, and it may have refuted its own death since.
    if there.peer != peer or there.incarnation < newcomer.incarnation:
        return f"at {address} is {there.peer}, not {peer}; advertise an address of your own"
    return ""


async def _dial(transport: Transport, address: Address) -> Hello:
    """The peer at `address`, asked repeatedly for a moment longer than one call may take."""
    why = TransportError(f"{address} did not answer")
    with suppress(TimeoutError):
        async with asyncio.timeout(DIAL_BACK_S + DIALS * DIAL_AGAIN_S):
            for _ in range(DIALS):
                try:
                    return await transport.identify(address, DIAL_BACK_S)
                except TransportError as error:
                    why = error
                await asyncio.sleep(DIAL_AGAIN_S)
    raise why


async def _answers(transport: Transport, member: Member) -> bool:
    there = await ask(transport, member)
    return there is not None and there.me.peer == member.peer


async def ask(transport: Transport, member: Member) -> Hello | None:
    """What a member says of itself now; None if it does not answer."""
    with suppress(TransportError, CodecError, RefusedError):
        return await transport.identify(member.address, DIAL_BACK_S)
    return None


async def refusals(transport: Transport, members: Sequence[Member]) -> str:
    """Whom these members have refused last, and why; nothing if there is no one."""
    hellos = await asyncio.gather(*(ask(transport, member) for member in members))
    return "".join(f"; {hello.refused}" for hello in hellos if hello and hello.refused)
