"""Check whether this machine can join the swarm at an address (`p2ptrain doctor`).

The checks run in order, from the name of the host to a dial back; the list ends at the first
failure that makes the rest pointless. Each finding is one sentence, and that of a problem names the
remedy.
"""

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rich.console import Console
from rich.text import Text

from p2ptrain.console.findings import Finding, Level, Visit
from p2ptrain.console.ways import about_ways, member_security
from p2ptrain.core.messages import Member, MemberState
from p2ptrain.errors import CodecError, P2PTrainError, RefusedError, TransportError
from p2ptrain.ids import Address, PeerId, Seconds
from p2ptrain.net import wire
from p2ptrain.net.ask import Asker, asking
from p2ptrain.net.grpc_transport import GrpcTransport
from p2ptrain.net.transport import ChunkStream
from p2ptrain.net.wire import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    DialBackRequest,
    Envelope,
    Hello,
    JoinReply,
    Opening,
    Report,
)
from p2ptrain.net.wire_carried import name_at

CLOCKS_DIFFER_S: Seconds = 2.0
OTHERS_S: Seconds = 10.0
"""The timeout of a dial back, which has to wait for those of others."""


async def show_findings(visit: Visit) -> int:
    """Print each finding as soon as it is known; return how many are problems."""
    console, problems = Console(soft_wrap=True, highlight=False), 0
    styles = {Level.OK: "green", Level.NOTE: "yellow", Level.PROBLEM: "bold red"}
    async for finding in diagnose(visit):
        problems += finding.level is Level.PROBLEM
        level = Text(f"{finding.level.value:<9}", styles[finding.level])
        console.print(level + Text(finding.text))
    return problems


async def diagnose(visit: Visit) -> AsyncIterator[Finding]:
    """Run all checks in order; yield each finding as soon as it is known."""
    ips = await _resolve(visit.address, visit.timeout_s)
    if isinstance(ips, Finding):
        yield ips
        return
    yield Finding(Level.OK, f"{visit.address} is {', '.join(ips)}")
    way = await _connect(visit.address, visit.timeout_s)
    if isinstance(way, Finding):
        yield way
        return
    ours, theirs = way
    yield Finding(Level.OK, f"{visit.address} accepts connections (we call from {ours})")
    async with asking(visit.address, visit.network) as asker:
        asked_at = visit.unix_clock()
        try:
            serving = await asker.is_serving(visit.timeout_s)
            hello = await asker.identify(visit.timeout_s)
        except (TransportError, CodecError, RefusedError) as error:
            yield Finding(Level.PROBLEM, f"{error}; check that the port is the peer's own")
            return
        yield _about_version(hello, serving)
        if hello.protocol[0] != PROTOCOL_MAJOR:
            return
        try:
            asked_at = visit.unix_clock()
            report = await asker.report(visit.timeout_s)
        except (TransportError, CodecError, RefusedError) as error:
            yield Finding(Level.NOTE, f"{hello.me.peer} gives no report ({error})")
            return
        yield _about_clock(report, asked_at, visit.unix_clock())
        if report.hello.refused:
            yield Finding(Level.NOTE, report.hello.refused)
        async for finding in _about_members(report, theirs, visit):
            yield finding
        async for finding in _about_us(visit, asker, report, ours):
            yield finding


# --- the way there --------------------------------------------------------------------------------


async def _resolve(address: Address, timeout_s: Seconds) -> list[str] | Finding:
    host, port = _split(address)
    try:
        async with asyncio.timeout(timeout_s):
            found = await asyncio.get_running_loop().getaddrinfo(
                host, port, type=socket.SOCK_STREAM
            )
    except (OSError, TimeoutError) as error:
        why = getattr(error, "strerror", None) or "no answer from the name server"
        return Finding(
            Level.PROBLEM,
            f"{host} is no name that this machine can look up ({why}); check its spelling, or use "
            "the IP address",
        )
    return sorted({str(entry[4][0]) for entry in found})


async def _connect(address: Address, timeout_s: Seconds) -> tuple[str, str] | Finding:
    """Our IP address and theirs on a connection, or why there is none."""
    host, port = _split(address)
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        text = f"{address} refuses connections: no peer listens there; start it, or check port"
        return Finding(Level.PROBLEM, f"{text} {port}")
    except TimeoutError:
        return Finding(
            Level.PROBLEM,
            f"{address} does not answer within {timeout_s:g} s: a firewall drops the packets, or "
            f"the machine is off; open TCP port {port} there",
        )
    except OSError as error:
        why = error.strerror or str(error)
        return Finding(Level.PROBLEM, f"there is no way to {address} ({why}); check the network")
    ours, theirs = writer.get_extra_info("sockname")[0], writer.get_extra_info("peername")[0]
    writer.close()
    return str(ours), str(theirs)


# --- who is there ---------------------------------------------------------------------------------


def _about_version(hello: Hello, serving: bool) -> Finding:
    theirs = ".".join(map(str, hello.protocol))
    peer = hello.me.peer
    if hello.protocol[0] != PROTOCOL_MAJOR:
        return Finding(
            Level.PROBLEM,
            f"{peer} speaks protocol {theirs} and this release {PROTOCOL_MAJOR}.{PROTOCOL_MINOR}; "
            "install the same release of p2ptrain on both",
        )
    if not serving:
        return Finding(Level.NOTE, f"{peer} is about to leave; ask another peer")
    return Finding(
        Level.OK,
        f"there is {peer}, protocol {theirs}, algorithm {hello.algorithm}, "
        f"a model of {hello.model_size:,} numbers",
    )


def _about_clock(report: Report, asked_at: Seconds, answered_at: Seconds) -> Finding:
    ahead_s = report.unix_s - (asked_at + answered_at) / 2
    peer = report.hello.me.peer
    if abs(ahead_s) > CLOCKS_DIFFER_S:
        side = "ahead of" if ahead_s > 0 else "behind"
        return Finding(
            Level.NOTE,
            f"the clock of {peer} is {abs(ahead_s):.0f} s {side} ours; training does not mind, but "
            "records of the two cannot be lined up: use NTP on both",
        )
    return Finding(Level.OK, f"the clock of {peer} and ours agree")


async def _about_members(report: Report, theirs: str, visit: Visit) -> AsyncIterator[Finding]:
    """Check the advertised addresses of all members, each of which we must reach."""
    here = [m for m in (report.hello.me, *report.members) if m.state <= MemberState.SUSPECT]
    beyond_reach = 0
    called = [member for member in here if name_at(member.address) is None]
    findings = await asyncio.gather(*(_about_member(m, theirs, visit) for m in called))
    for finding in findings:
        if finding:
            beyond_reach += 1
            yield finding
    if _ip(theirs).is_loopback:
        lonely = [m.peer for m in here if (ip := _ip_in(m.address)) and ip.is_loopback]
        if lonely:
            yield Finding(
                Level.NOTE,
                f"on loopback, where only peers of this machine can join: {', '.join(lonely)}; "
                "others need --listen and --advertise host:port",
            )
    if not beyond_reach:
        yield Finding(Level.OK, f"all peers ({len(called)}) can be reached at what they advertise")
    async for finding in about_ways(here, visit):
        yield finding


async def _about_member(member: Member, theirs: str, visit: Visit) -> Finding | None:
    peer, address = member.peer, member.address
    advertised = _ip_in(address)
    if advertised and advertised.is_unspecified:
        text = f"{peer} advertises {address}, which is no address; start it with --advertise"
        return Finding(Level.PROBLEM, f"{text} host:port")
    if advertised and advertised.is_loopback and not _ip(theirs).is_loopback:
        text = f"{peer} advertises {address}, which means every machine's own self; start it with"
        return Finding(Level.PROBLEM, f"{text} --advertise {theirs}:{_split(address)[1]}")
    try:
        async with asking(address, visit.network) as asker:
            there = await asker.identify(visit.timeout_s)
    except (TransportError, RefusedError, CodecError) as error:
        private = advertised and advertised.is_private and not _ip(theirs).is_private
        what = "a private address, " if private else ""
        text = f"{peer} cannot be reached from here at {what}{address} ({error}); peers must reach"
        return Finding(Level.PROBLEM, f"{text} each other: open that port, or advertise another")
    if there.me.peer != peer:
        text = f"{peer} advertises {address}, but there is {there.me.peer}; give each its own port"
        return Finding(Level.PROBLEM, text)
    return None


# --- the way back ---------------------------------------------------------------------------------


async def _about_us(
    visit: Visit, asker: Asker, report: Report, ours: str
) -> AsyncIterator[Finding]:
    """Check whether the peer can reach us, and which address it sees."""
    if visit.dial_out:
        return
    peer = report.hello.me.peer
    on_loopback = _ip(ours).is_loopback
    listen = visit.listen or ("127.0.0.1:0" if on_loopback else "0.0.0.0:0")
    try:
        async with _listening(listen, visit) as port:
            asked = DialBackRequest(_port_of(visit.advertise) or port, visit.number)
            answer = await asker.dial_back(asked, visit.timeout_s + OTHERS_S)
    except (TransportError, RefusedError, CodecError) as error:
        yield Finding(Level.NOTE, f"{peer} could not be asked to call back ({error})")
        return
    except P2PTrainError as error:
        yield Finding(Level.PROBLEM, f"{error}")
        return
    if answer.why_not:
        yield Finding(
            Level.PROBLEM,
            f"{peer} does not reach us at {answer.seen_as}, port {asked.port} ({answer.why_not}); "
            f"open TCP port {asked.port} for incoming connections here, or forward it to us; or "
            "start with --dial-out",
        )
    else:
        yield Finding(Level.OK, f"{peer} reaches us at {answer.seen_as}, port {asked.port}")
    if _ip(answer.seen_as) != _ip(ours):
        yield Finding(
            Level.NOTE,
            f"addresses are translated between us: we are {ours} here and {answer.seen_as} for "
            f"{peer}; advertise {answer.seen_as} and forward the port to us",
        )
    if visit.advertise:
        yield await _about_advertised(visit, answer.seen_as, on_loopback)


async def _about_advertised(visit: Visit, seen_as: str, on_loopback: bool) -> Finding:
    given = f"advertise = {visit.advertise}"
    ips = await _resolve(wire.address(visit.advertise), visit.timeout_s)
    if isinstance(ips, Finding):
        return ips
    found = [_ip(ip) for ip in ips]
    if any(ip.is_unspecified for ip in found):
        return Finding(Level.PROBLEM, f"{given} is no address; advertise {seen_as} instead")
    if any(ip.is_loopback for ip in found) and not on_loopback:
        return Finding(
            Level.PROBLEM,
            f"{given} means every machine's own self; advertise {seen_as} instead",
        )
    if _ip(seen_as) not in found:
        return Finding(
            Level.NOTE,
            f"{given} leads to {', '.join(ips)}, and we are seen as {seen_as}; make sure that "
            "other peers reach us by it",
        )
    return Finding(Level.OK, f"{given} is the address that we are seen as")


@asynccontextmanager
async def _listening(listen: str, visit: Visit) -> AsyncIterator[int]:
    """A listener that only answers Identify; yields its port."""
    security = await member_security(visit)
    transport = GrpcTransport(listen, "localhost:0", visit.network, security=security)
    answering = _Answering(visit.number)
    port = _split(await transport.start(answering))[1]
    try:
        yield port
    finally:
        await transport.close(0.0)


class _Answering:
    """Implements `Handler` for our own listener: it answers Identify."""

    def __init__(self, number: int) -> None:
        me = Member(peer=PeerId("doctor"), address=Address("localhost:1"), incarnation=number)
        self._hello = Hello((PROTOCOL_MAJOR, PROTOCOL_MINOR), "", "", 0, me)

    def handle_message(self, envelope: Envelope) -> None:
        """Ignored: this listener is no member."""

    def handle_broken(self, address: Address, why: str) -> None:
        """Ignored: this listener sends no messages."""

    async def handle_join(self, hello: Hello) -> JoinReply:
        return JoinReply("this is p2ptrain doctor, not a peer", ())

    def handle_identify(self) -> Hello:
        return self._hello

    async def handle_stream(self, opening: Opening, stream: ChunkStream) -> None:
        raise RefusedError("this is p2ptrain doctor, not a peer")


# --- addresses ------------------------------------------------------------------------------------


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _port_of(address: str) -> int:
    return _split(address)[1] if address else 0


def _ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    found = ipaddress.ip_address(text.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found


def _ip_in(address: Address) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address in ``host:port``; None for a name, except that localhost is loopback."""
    host = _split(address)[0]
    try:
        return _ip("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        return None
