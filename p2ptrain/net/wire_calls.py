"""Encode and decode the calls of callers that may be no members: settings, dial backs, paths.

As in `net/wire.py`, which passes all of this on: any bytes either decode to a valid value or raise
`CodecError` with one sentence.
"""

from dataclasses import dataclass
from typing import Any

from p2ptrain.core.messages import MOST_SETTINGS_TEXT
from p2ptrain.errors import CodecError
from p2ptrain.net._pb import peer_pb2 as pb
from p2ptrain.net.wire_parts import MAX_NAME, number, parse, text_of

MAX_REASON = 300
MAX_REFUSAL = 4 * MAX_REASON
SECRET_BYTES = 32
LOWEST_PORT = 1024
"""A dial back goes to no port below: no peer listens there, but scanners probe them."""


@dataclass(frozen=True, slots=True)
class SetRequest:
    """Change the settings of the swarm."""

    text: str
    """JSON: names and plain values."""
    why: str = ""


@dataclass(frozen=True, slots=True)
class SetReply:
    """What was wrong, or what the swarm works with from now on."""

    refusal: str
    settings: str = ""
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class DialBackRequest:
    """Request to call `port` at the caller's address, where `number` answers."""

    port: int
    number: int


@dataclass(frozen=True, slots=True)
class DialedBack:
    """The result of a dial back."""

    seen_as: str
    """The caller's IP address, as the callee sees it."""
    why_not: str
    """A sentence; empty if the caller was reached."""


@dataclass(frozen=True, slots=True)
class Paths:
    """Paths to a peer for streams, besides gRPC; see `net/sockets.py`."""

    port: int
    secret: bytes
    machine: str
    unix_name: str


def encode_set(request: SetRequest) -> bytes:
    """Raises CodecError: for more than the other side would take."""
    if len(request.text) > MOST_SETTINGS_TEXT:
        raise CodecError(f"settings of {len(request.text)} characters; set fewer at a time")
    return bytes(pb.SetRequest(text=request.text, why=request.why[:MAX_REASON]).SerializeToString())


def decode_set(data: bytes) -> SetRequest:
    """Raises CodecError."""
    p: Any = parse(pb.SetRequest, data)  # Any: a generated class
    return SetRequest(text_of(p.text, MOST_SETTINGS_TEXT), text_of(p.why, MAX_REASON))


def encode_set_reply(reply: SetReply) -> bytes:
    """As bytes."""
    packed = pb.SetReply(
        refusal=reply.refusal[:MAX_REFUSAL], settings=reply.settings[:MAX_REASON], epoch=reply.epoch
    )
    return bytes(packed.SerializeToString())


def decode_set_reply(data: bytes) -> SetReply:
    """Raises CodecError."""
    p: Any = parse(pb.SetReply, data)  # Any: a generated class
    refusal, settings = text_of(p.refusal, MAX_REFUSAL), text_of(p.settings, MAX_REASON)
    return SetReply(refusal, settings, number(p.epoch))


def encode_dial_back(request: DialBackRequest) -> bytes:
    return bytes(pb.DialBackRequest(port=request.port, number=request.number).SerializeToString())


def decode_dial_back(data: bytes) -> DialBackRequest:
    """Raises CodecError."""
    p: Any = parse(pb.DialBackRequest, data)  # Any: a generated class
    if not LOWEST_PORT <= p.port < 65536:
        raise CodecError(f"port {p.port} is not called back; choose one of {LOWEST_PORT} to 65535")
    return DialBackRequest(p.port, number(p.number))


def encode_dialed_back(answer: DialedBack) -> bytes:
    packed = pb.DialedBack(seen_as=answer.seen_as, why_not=answer.why_not[:MAX_REASON])
    return bytes(packed.SerializeToString())


def decode_dialed_back(data: bytes) -> DialedBack:
    """Raises CodecError."""
    p: Any = parse(pb.DialedBack, data)  # Any: a generated class
    return DialedBack(text_of(p.seen_as, MAX_NAME), text_of(p.why_not, MAX_REASON))


def encode_paths(paths: Paths) -> bytes:
    """As bytes."""
    packed = pb.Paths(
        port=paths.port,
        secret=paths.secret,
        machine=paths.machine,
        unix_name=paths.unix_name,
    )
    return bytes(packed.SerializeToString())


def decode_paths(data: bytes) -> Paths:
    """Raises CodecError."""
    p: Any = parse(pb.Paths, data)  # Any: a generated class
    if p.port > 65535 or len(p.secret) != SECRET_BYTES:
        raise CodecError(f"paths with port {p.port} and a secret of {len(p.secret)} bytes")
    return Paths(p.port, p.secret, text_of(p.machine, MAX_NAME), text_of(p.unix_name, MAX_NAME))
