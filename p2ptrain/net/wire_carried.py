"""Encode and decode what carries connections of peers that only dial out (`net/carrying.py`).

As in `net/wire.py`: any bytes either decode to a valid value or raise `CodecError` with one
sentence.
"""

import urllib.parse
from dataclasses import dataclass
from typing import Any

from p2ptrain.errors import CodecError
from p2ptrain.ids import Address, PeerId
from p2ptrain.net._pb import peer_pb2 as pb
from p2ptrain.net.wire_parts import address, name_of, parse

DIALS_OUT = ".dial-out.invalid:1"
"""The end of the address of a peer that only dials out. No name ends in ``.invalid`` (RFC 6761), so
a peer that does not know the form finds no one there."""

CARRIED = "carried: it only dials out"
"""How such a peer is reached, in words."""

NUMBER_BYTES = 16
MOST_CERTIFICATE = 4096
MOST_CARRIED = 1 << 18
"""Bytes of a connection that travel in one message."""

MOST_ROUND_TRIP_US = 60_000_000
MOST_STREAMS = 1 << 20
MOST_ECHO = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class Registering:
    """What a peer that only dials out says where it registers."""

    address: Address
    certificate: bytes = b""
    round_trip_us: int = 0
    echo: int = 0


@dataclass(frozen=True, slots=True)
class Wanted:
    """A connection that is wanted of a registered peer, or an echo."""

    number: bytes = b""
    chunks: bool = False
    echo: int = 0
    relays: bool = False


@dataclass(frozen=True, slots=True)
class Carrying:
    """Which connection a `Carry` call is: one that was wanted, or one to a registered peer."""

    number: bytes = b""
    address: Address | None = None
    chunks: bool = False


@dataclass(frozen=True, slots=True)
class ReachReply:
    """What a relay knows of a registered peer."""

    certificate: bytes
    round_trip_us: int
    streams: int


def address_of(name: str) -> Address:
    """What the peer `name` advertises if it only dials out. Raises CodecError if it is too long."""
    return address(urllib.parse.quote(name, safe="") + DIALS_OUT)


def name_at(there: Address) -> PeerId | None:
    """Which peer it is that only dials out and advertises `there`; None: it can be called."""
    if not there.endswith(DIALS_OUT):
        return None
    try:
        name = name_of(urllib.parse.unquote(there.removesuffix(DIALS_OUT)))
        return name if address_of(name) == there else None
    except CodecError:
        return None


def encode_registering(said: Registering) -> bytes:
    """As bytes."""
    packed = pb.Registering(
        address=said.address,
        certificate=said.certificate,
        round_trip_us=min(said.round_trip_us, MOST_ROUND_TRIP_US),
        echo=said.echo,
    )
    return bytes(packed.SerializeToString())


def decode_registering(data: bytes) -> Registering:
    """Raises CodecError."""
    p: Any = parse(pb.Registering, data)  # Any: a generated class
    return Registering(_dials_out(p.address), _certificate(p), _round_trip(p), p.echo)


def encode_wanted(wanted: Wanted) -> bytes:
    """As bytes."""
    packed = pb.Wanted(
        number=wanted.number, chunks=wanted.chunks, echo=wanted.echo, relays=wanted.relays
    )
    return bytes(packed.SerializeToString())


def decode_wanted(data: bytes) -> Wanted:
    """Raises CodecError."""
    p: Any = parse(pb.Wanted, data)  # Any: a generated class
    return Wanted(_number(p.number, optional=True), p.chunks, p.echo, p.relays)


def encode_carrying(opening: Carrying) -> bytes:
    """The first message of a connection."""
    packed = pb.Carrying(
        number=opening.number, address=opening.address or "", chunks=opening.chunks
    )
    return bytes(pb.Carried(opening=packed).SerializeToString())


def decode_carrying(data: bytes) -> Carrying:
    """Raises CodecError."""
    p: Any = parse(pb.Carried, data)  # Any: a generated class
    if not p.HasField("opening"):
        raise CodecError("a connection that does not begin with an opening")
    number = _number(p.opening.number, optional=bool(p.opening.address))
    there = _dials_out(p.opening.address) if p.opening.address else None
    return Carrying(number, there, p.opening.chunks)


def encode_carried(data: bytes) -> bytes:
    """Bytes of a connection."""
    return bytes(pb.Carried(data=data).SerializeToString())


def decode_carried(data: bytes) -> bytes:
    """Raises CodecError."""
    p: Any = parse(pb.Carried, data)  # Any: a generated class
    if not p.data or len(p.data) > MOST_CARRIED:
        raise CodecError(f"{len(p.data)} bytes of a connection in one message")
    return bytes(p.data)


def encode_reach(there: Address) -> bytes:
    """As bytes."""
    return bytes(pb.ReachRequest(address=there).SerializeToString())


def decode_reach(data: bytes) -> Address:
    """Raises CodecError."""
    p: Any = parse(pb.ReachRequest, data)  # Any: a generated class
    return _dials_out(p.address)


def encode_reach_reply(reply: ReachReply) -> bytes:
    """As bytes."""
    packed = pb.ReachReply(
        certificate=reply.certificate, round_trip_us=reply.round_trip_us, streams=reply.streams
    )
    return bytes(packed.SerializeToString())


def decode_reach_reply(data: bytes) -> ReachReply:
    """Raises CodecError."""
    p: Any = parse(pb.ReachReply, data)  # Any: a generated class
    return ReachReply(_certificate(p), _round_trip(p), min(p.streams, MOST_STREAMS))


def _dials_out(text: str) -> Address:
    there = address(text)
    if name_at(there) is None:
        raise CodecError(f"{text} is no address of a peer that only dials out")
    return there


def _number(number: bytes, *, optional: bool) -> bytes:
    if len(number) != NUMBER_BYTES and (number or not optional):
        raise CodecError(f"a connection's number of {len(number)} bytes")
    return number


def _certificate(p: Any) -> bytes:  # Any: a generated class
    if len(p.certificate) > MOST_CERTIFICATE:
        raise CodecError(f"a certificate of {len(p.certificate)} bytes")
    return bytes(p.certificate)


def _round_trip(p: Any) -> int:  # Any: a generated class
    return min(int(p.round_trip_us), MOST_ROUND_TRIP_US)
