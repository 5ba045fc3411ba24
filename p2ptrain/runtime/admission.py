"""Who may join: version, algorithm, model, codec, name and address are checked.

Whoever may not is told why, in words.

A peer counts its lives by its wall clock, which may have been set back since the last one. What has
a lower incarnation counts as old, so the host remembers a newcomer above its former life and says
so in its answer; the newcomer takes an incarnation above that before it forms a group.
"""

import asyncio
import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace

from p2ptrain.core.membership import HIGHEST, LEAP, Membership
from p2ptrain.core.messages import Member
from p2ptrain.errors import CodecError, RefusedError, TransportError
from p2ptrain.ids import Address, PeerId, Seconds
from p2ptrain.net.transport import Transport
from p2ptrain.net.wire import PROTOCOL_MAJOR, Hello

DIAL_BACK_S: Seconds = 5.0
"""How long a newcomer's advertised address may take to answer: a machine on which a whole fleet is
starting takes seconds, and whoever does not answer is refused."""

DIAL_AGAIN_S: Seconds = 0.3
DIALS = 5
"""A peer that starts again at its old address finds others with a connection that has just failed,
and that fails again at once for up to a second: whoever dials back asks more than once."""

ASK_S: Seconds = 8.0
"""How long one host is asked before the next one is; longer than it takes to dial back."""


@functools.cache  # it is said with every message
def swarm_digest(algorithm: str, fingerprint: str, *codecs: str) -> str:
    """Names what must agree among peers that talk to each other."""
    text = "/".join((str(PROTOCOL_MAJOR), algorithm, fingerprint, *codecs))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


async def knock(
    transport: Transport,
    hosts: Sequence[Address],
    hello: Hello,
    timeout_s: Seconds,
    clock: Callable[[], Seconds],
) -> tuple[Address, tuple[Member, ...], Member]:
    """Ask `hosts` in turn, again and again, until one answers; silent ones share the time.

    Returns which one did, the members that it told of, and what it knows of the asker.

    Raises:
        RefusedError: if one says no, or nothing can be above what it remembers of us.
        TransportError: if none answered within `timeout_s`.
    """
    deadline = clock() + timeout_s
    why = "none was tried"
    while clock() < deadline:
        for index, host in enumerate(hosts):
            share_s = max(0.0, deadline - clock()) / (len(hosts) - index)
            try:
                welcome = await transport.join(host, hello, min(share_s, ASK_S))
            except (TransportError, CodecError) as error:
                why = str(error)
                continue
            if welcome.refusal:
                raise RefusedError(welcome.refusal)
            return host, welcome.members, _remembered(hello.me, host, welcome.members)
        await asyncio.sleep(0.1)
    raise TransportError(
        f"no peer answered at {', '.join(hosts)} within {timeout_s:g} s ({why}); "
        "start that peer first, or check its address"
    )


def successor(newcomer: Member, before: Member | None) -> Member:
    """What a host remembers of a peer that joins, after what it remembers of its former life."""
    if before is None:
        return newcomer
    above, most = before.incarnation + 1, before.incarnation + LEAP  # others believe no more
    incarnation = min(max(newcomer.incarnation, above), most)
    return replace(newcomer, samples=before.samples, incarnation=incarnation)


def _remembered(me: Member, host: Address, told: Sequence[Member]) -> Member:
    """What a `host` whose answer is `told` knows of us: a former life, or what we said of `me`.

    Raises:
        RefusedError: if it leaves no room to refute suspicions; somebody has made it up.
    """
    ours = [member for member in told if member.peer == me.peer]
    known = max(ours, key=lambda member: member.incarnation, default=me)
    if known.incarnation > HIGHEST - LEAP:
        raise RefusedError(
            f"{host} remembers a {me.peer} of incarnation {known.incarnation}, above which there "
            "is no room; choose another name"
        )
    return known


def objection(me: PeerId, ours: Hello, theirs: Hello) -> str:
    """Why whoever says `theirs` cannot be one of us, or nothing."""
    peer = theirs.me.peer
    if theirs.protocol[0] != ours.protocol[0]:
        theirs_text, ours_text = (".".join(map(str, h.protocol)) for h in (theirs, ours))
        return (
            f"{peer} speaks protocol version {theirs_text} and {me} {ours_text}; "
            "install the same release of p2ptrain on both"
        )
    if theirs.algorithm != ours.algorithm:
        return (
            f"{peer} runs algorithm {theirs.algorithm!r} and this swarm {ours.algorithm!r}; "
            "start it with the same one"
        )
    if (theirs.model, theirs.model_size) != (ours.model, ours.model_size):
        return (
            f"{peer} trains a model of {theirs.model_size:,} numbers ({theirs.model}) "
            f"and this swarm one of {ours.model_size:,} ({ours.model}); use the same model"
        )
    if theirs.codec != ours.codec:
        return (
            f"{peer} sends models as {theirs.codec!r} and this swarm as {ours.codec!r}; "
            f'start it with codec = "{ours.codec}" under [exchange]'
        )
    if theirs.gradient_codec != ours.gradient_codec:
        return (
            f"{peer} sends gradients as {theirs.gradient_codec!r} and this swarm as "
            f"{ours.gradient_codec!r}; start it with gradient_codec = "
            f'"{ours.gradient_codec}" under [exchange]'
        )
    return ""


async def cannot_reach(transport: Transport, membership: Membership, newcomer: Member) -> str:
    """Dial back: why others could not reach `newcomer` under its name, or nothing."""
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
    # It may be in by another's word already, and have answered to the news of its own death since.
    if there.peer != peer or there.incarnation < newcomer.incarnation:
        return f"at {address} is {there.peer}, not {peer}; advertise an address of your own"
    return ""


async def _dial(transport: Transport, address: Address) -> Hello:
    """Who is there, asked again and again for a moment longer than one call may take."""
    why: TransportError | None = None
    try:
        async with asyncio.timeout(DIAL_BACK_S + DIALS * DIAL_AGAIN_S):
            for _ in range(DIALS):
                try:
                    return await transport.identify(address, DIAL_BACK_S)
                except TransportError as error:
                    why = error
                await asyncio.sleep(DIAL_AGAIN_S)
    except TimeoutError:
        pass
    raise why or TransportError(f"{address} did not answer")


async def _answers(transport: Transport, member: Member) -> bool:
    try:
        there = await transport.identify(member.address, DIAL_BACK_S)
    except (TransportError, CodecError):
        return False
    return there.me.peer == member.peer
