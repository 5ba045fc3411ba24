"""Messages to protobuf bytes and back, total in both directions.

Every message of `core/messages.py` can be encoded, and whatever bytes arrive either decode to a
valid value or raise `CodecError` with one sentence: lengths, counts, names and numbers are bounded
here, so that nothing behind this file has to be afraid of the network. The simulator sends its
messages through this file too.

Tensor bytes are the one exception to "protobuf encodes it": a `Slice` that holds a payload is
written by hand, byte for byte as protobuf would (tag, length, bytes; a test compares), because
protobuf copies a payload three times where one copy is enough, and reading it needs none.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from p2ptrain.core import messages as m
from p2ptrain.errors import CodecError
from p2ptrain.ids import Address, PeerId, Ticket
from p2ptrain.net._pb import peer_pb2 as pb

PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 0

MAX_NAME = 128
MAX_REASON = 300
MAX_MEMBERS = 4096
MAX_NUMBER = 1 << 62
MAX_MESSAGE_BYTES = 1 << 20
MAX_SLICE_BYTES = 4 << 20

END = b""
"""A `Slice` without content: the caller of a stream has sent all."""

_PAYLOAD_TAG = b"\x0a"  # field 1, length-delimited

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Hello:
    """What a peer says of itself before anything else."""

    protocol: tuple[int, int]
    algorithm: str
    model: str
    model_size: int
    me: m.Member


@dataclass(frozen=True, slots=True)
class Welcome:
    """The answer to `Hello`: a refusal in words, or everyone the host knows of."""

    refusal: str
    members: tuple[m.Member, ...]


@dataclass(frozen=True, slots=True)
class Envelope:
    """A control message and whose it is; `swarm` is the digest of what must agree in a swarm."""

    source: PeerId
    swarm: str
    message: m.Message


@dataclass(frozen=True, slots=True)
class AverageOpening:
    """The caller asks the callee to reduce the caller's part of the callee's share."""

    swarm: str
    sender: PeerId
    ticket: Ticket
    vector_size: int
    slice_size: int


@dataclass(frozen=True, slots=True)
class StateOpening:
    """The caller asks for the callee's state; without a version, for its model as it is now."""

    swarm: str
    sender: PeerId
    version: int | None


Opening = AverageOpening | StateOpening


# --- control messages -----------------------------------------------------------------------------


def encode_envelope(envelope: Envelope) -> bytes:
    field, body = _message_to_pb(envelope.message)
    packed = pb.Envelope(source=envelope.source, swarm=envelope.swarm, **{field: body})
    return bytes(packed.SerializeToString())


def decode_envelope(data: bytes) -> Envelope:
    """Raises CodecError."""
    packed = _parse(pb.Envelope, data)
    field = packed.WhichOneof("message")
    if field is None:
        raise CodecError("an envelope without a message that this version knows")
    message = _FROM_PB[field](getattr(packed, field))
    return Envelope(_name(packed.source), _text(packed.swarm, MAX_NAME), message)


def _message_to_pb(message: m.Message) -> tuple[str, Any]:  # Any: protobuf's generated classes
    match message:
        case m.Ping(number, members):
            return "ping", pb.Ping(number=number, members=map(_member_to_pb, members))
        case m.Ack(number, members):
            return "ack", pb.Ack(number=number, members=map(_member_to_pb, members))
        case m.Rumours(members):
            return "rumours", pb.Rumours(members=map(_member_to_pb, members))
        case m.Claim(ticket, born, group):
            return "claim", pb.Claim(ticket=_ticket_to_pb(ticket), born=born, members=group)
        case m.Grant(ticket):
            return "grant", pb.Grant(ticket=_ticket_to_pb(ticket))
        case m.Busy(ticket, reason):
            return "busy", pb.Busy(ticket=_ticket_to_pb(ticket), reason=reason[:MAX_REASON])
        case m.Begin(ticket):
            return "begin", pb.Begin(ticket=_ticket_to_pb(ticket))
        case m.Release(ticket):
            return "release", pb.Release(ticket=_ticket_to_pb(ticket))
        case m.Inquire(ticket):
            return "inquire", pb.Inquire(ticket=_ticket_to_pb(ticket))
        case m.Arrive(version):
            return "arrive", pb.Arrive(version=version)
        case m.Assemble(ticket, version, group):
            body = pb.Assemble(ticket=_ticket_to_pb(ticket), version=version, members=group)
            return "assemble", body
        case m.CatchUp(version, donor):
            return "catch_up", pb.CatchUp(version=version, donor=donor)


_FROM_PB: dict[str, Callable[[Any], m.Message]] = {
    "ping": lambda p: m.Ping(_number(p.number), _members(p.members)),
    "ack": lambda p: m.Ack(_number(p.number), _members(p.members)),
    "rumours": lambda p: m.Rumours(_members(p.members)),
    "claim": lambda p: m.Claim(_ticket(p.ticket), _number(p.born), _group(p.members)),
    "grant": lambda p: m.Grant(_ticket(p.ticket)),
    "busy": lambda p: m.Busy(_ticket(p.ticket), _text(p.reason, MAX_REASON)),
    "begin": lambda p: m.Begin(_ticket(p.ticket)),
    "release": lambda p: m.Release(_ticket(p.ticket)),
    "inquire": lambda p: m.Inquire(_ticket(p.ticket)),
    "arrive": lambda p: m.Arrive(_number(p.version)),
    "assemble": lambda p: m.Assemble(_ticket(p.ticket), _number(p.version), _group(p.members)),
    "catch_up": lambda p: m.CatchUp(_number(p.version), _name(p.donor)),
}


# --- joining --------------------------------------------------------------------------------------


def encode_hello(hello: Hello) -> bytes:
    major, minor = hello.protocol
    packed = pb.Hello(
        protocol_major=major,
        protocol_minor=minor,
        algorithm=hello.algorithm,
        model=hello.model,
        model_size=hello.model_size,
        self=_member_to_pb(hello.me),
    )
    return bytes(packed.SerializeToString())


def decode_hello(data: bytes) -> Hello:
    """Raises CodecError."""
    packed = _parse(pb.Hello, data)
    return Hello(
        (packed.protocol_major, packed.protocol_minor),
        _text(packed.algorithm, MAX_REASON),
        _text(packed.model, MAX_NAME),
        _number(packed.model_size),
        _member(packed.self),
    )


def encode_welcome(welcome: Welcome) -> bytes:
    members = map(_member_to_pb, welcome.members)
    return bytes(pb.Welcome(refusal=welcome.refusal, members=members).SerializeToString())


def decode_welcome(data: bytes) -> Welcome:
    """Raises CodecError."""
    packed = _parse(pb.Welcome, data)
    return Welcome(_text(packed.refusal, 4 * MAX_REASON), _members(packed.members))


# --- slices ---------------------------------------------------------------------------------------


def encode_payload(payload: memoryview) -> bytes:
    """A `Slice` with a payload, in the one copy that gRPC needs."""
    return b"".join((_PAYLOAD_TAG, _varint(payload.nbytes), payload))


def decode_payload(data: bytes) -> memoryview:
    """The payload inside `data`, not copied. Raises CodecError."""
    if data[:1] != _PAYLOAD_TAG:
        raise CodecError("a stream carries something other than a slice where a slice was due")
    length, start = _read_varint(data, 1)
    if len(data) - start != length:
        raise CodecError(f"a slice says {length} bytes and carries {len(data) - start}")
    return memoryview(data)[start:]


def encode_opening(opening: Opening) -> bytes:
    match opening:
        case AverageOpening(swarm, sender, ticket, vector_size, slice_size):
            average = pb.AverageOpening(
                swarm=swarm,
                sender=sender,
                ticket=_ticket_to_pb(ticket),
                vector_size=vector_size,
                slice_size=slice_size,
            )
            return bytes(pb.Slice(average=average).SerializeToString())
        case StateOpening(swarm, sender, version):
            state = pb.StateOpening(swarm=swarm, sender=sender, version=version)
            return bytes(pb.Slice(state=state).SerializeToString())


def decode_opening(data: bytes) -> Opening:
    """Raises CodecError."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise CodecError(f"an opening of {len(data)} bytes")
    packed = _parse(pb.Slice, data)
    match packed.WhichOneof("content"):
        case "average":
            p = packed.average
            return AverageOpening(
                _text(p.swarm, MAX_NAME),
                _name(p.sender),
                _ticket(p.ticket),
                _number(p.vector_size),
                _number(p.slice_size),
            )
        case "state":
            version = packed.state.version if packed.state.HasField("version") else None
            swarm = _text(packed.state.swarm, MAX_NAME)
            return StateOpening(swarm, _name(packed.state.sender), version)
        case _:
            raise CodecError("a stream that does not begin with an opening")


# --- parts ----------------------------------------------------------------------------------------


def _member_to_pb(member: m.Member) -> Any:  # Any: a generated class
    return pb.Member(
        peer=member.peer,
        address=member.address,
        incarnation=member.incarnation,
        state=int(member.state),
        beat=member.beat,
        phase=int(member.phase),
        steps=member.steps,
        samples=member.samples,
    )


def _member(p: Any) -> m.Member:  # Any: a generated class
    try:
        state, phase = m.MemberState(p.state), m.Phase(p.phase)
    except ValueError as error:
        raise CodecError(f"a member with an unknown state: {error}") from error
    return m.Member(
        peer=_name(p.peer),
        address=address(p.address),
        incarnation=_number(p.incarnation),
        state=state,
        beat=_number(p.beat),
        phase=phase,
        steps=_number(p.steps),
        samples=_number(p.samples),
    )


def _members(packed: Sequence[Any]) -> tuple[m.Member, ...]:
    if len(packed) > MAX_MEMBERS:
        raise CodecError(f"a message with {len(packed)} members; at most {MAX_MEMBERS} are allowed")
    return tuple(_member(p) for p in packed)


def _group(names: Sequence[str]) -> tuple[PeerId, ...]:
    group = tuple(_name(name) for name in names)
    if not 0 < len(group) <= MAX_MEMBERS or list(group) != sorted(set(group)):
        raise CodecError(f"a group of {len(group)} members that are not sorted or not distinct")
    return group


def _ticket_to_pb(ticket: Ticket) -> Any:  # Any: a generated class
    return pb.Ticket(
        initiator=ticket.initiator, incarnation=ticket.incarnation, number=ticket.number
    )


def _ticket(p: Any) -> Ticket:  # Any: a generated class
    return Ticket(_name(p.initiator), _number(p.incarnation), _number(p.number))


def _name(text: str) -> PeerId:
    if not text or len(text) > MAX_NAME or not text.isprintable() or " " in text:
        raise CodecError(f"a peer's name that cannot be one: {text[:MAX_NAME]!r}")
    return PeerId(text)


def address(text: str) -> Address:
    """Check ``host:port``. Raises CodecError."""
    host, _, port = text.rpartition(":")
    sound = len(text) <= 2 * MAX_NAME and text.isprintable() and not any(c in text for c in "/ ,")
    if not (sound and host and is_port(port) and int(port)):
        raise CodecError(f"{text[:MAX_NAME]!r} is not an address; write host:port")
    return Address(text)


def is_port(text: str) -> bool:
    """True for 0 to 65535 in digits; the length goes first, `int` refuses to read thousands."""
    return len(text) <= 5 and text.isascii() and text.isdigit() and int(text) < 65536


def _number(value: int) -> int:
    if not 0 <= value <= MAX_NUMBER:
        raise CodecError(f"a number out of range: {value}")
    return value


def _text(text: str, longest: int) -> str:
    if len(text) > longest:
        raise CodecError(f"a text of {len(text)} characters where {longest} are allowed")
    return "".join(c if c.isprintable() else "?" for c in text)


def _parse(kind: type[T], data: bytes) -> T:
    packed: Any = kind()  # Any: a generated class
    try:
        packed.ParseFromString(data)
    except DecodeError as error:
        raise CodecError(f"{len(data)} bytes that are not a {kind.__name__}") from error
    return packed  # type: ignore[no-any-return]


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: bytes, start: int) -> tuple[int, int]:
    value = 0
    for index in range(5):
        if start + index >= len(data):
            break
        byte = data[start + index]
        value |= (byte & 0x7F) << (7 * index)
        if not byte & 0x80:
            return value, start + index + 1
    raise CodecError("a slice whose length cannot be read")
