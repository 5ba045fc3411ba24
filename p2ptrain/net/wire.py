"""Encode messages as protobuf and decode them, total in both directions.

Every message of `core/messages.py` can be encoded. Any bytes either decode to a valid value or
raise `CodecError` with one sentence: lengths, counts, names and numbers are bounded here, so code
behind this file need not distrust them. The simulator sends its messages through this file, too.

Tensor bytes are the exception: a `Slice` is written and read by hand, byte for byte as protobuf
would (a test compares), because protobuf copies a payload three times where one copy is enough.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from p2ptrain.core import messages as m
from p2ptrain.core.contribution import MODEL, Contribution
from p2ptrain.core.links import MAX_MBIT, WHOLE
from p2ptrain.core.purpose import Formation, Purpose, What
from p2ptrain.core.roster import ACCUSERS, joined
from p2ptrain.errors import CodecError, LocalProtocolError
from p2ptrain.ids import Address, PeerId, Seconds, Ticket
from p2ptrain.net._pb import peer_pb2 as pb

PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 0
"""When they move is said in ``protos/p2ptrain/v1/peer.proto``."""

MAX_NAME = 128
MAX_REASON = 300
MAX_MEMBERS = 4096
MAX_NUMBER = 1 << 62
MAX_OPENING_BYTES = 1 << 12
MAX_MASK_BYTES = 1 << 17
"""One bit for each of a million parameters."""
MAX_WEIGHT = 1 << 40
MAX_SLICE_BYTES = 4 << 20
SECRET_BYTES = 32
LOWEST_PORT = 1024
"""A call back goes to no port below: peers have no business there, and scanners do."""

# Tags of a Slice's fields: number << 3 | kind, kind 2 has a length, kind 0 is a number.
_PAYLOAD, _AVERAGE, _STATE, _LAST = 0x0A, 0x12, 0x1A, 0x20

_WHATS = dict(enumerate(What))
"""As they are numbered in the proto."""
_NUMBERS = {what: number for number, what in _WHATS.items()}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Hello:
    """What a peer says of itself before anything else."""

    protocol: tuple[int, int]
    algorithm: str
    model: str
    model_size: int
    me: m.Member
    codec: str = ""
    """How models travel; whoever has no model does not say."""
    gradient_codec: str = ""


@dataclass(frozen=True, slots=True)
class Welcome:
    """The answer to `Hello`: a refusal in words, or everyone the host knows of.

    The newcomer is among them, with the samples of its former lives.
    """

    refusal: str
    members: tuple[m.Member, ...]


@dataclass(frozen=True, slots=True)
class Envelope:
    """A control message and whose it is; `swarm` is the digest of what must agree in a swarm."""

    source: PeerId
    swarm: str
    message: m.Message | m.AlgorithmMessage


@dataclass(frozen=True, slots=True)
class AverageOpening:
    """The caller asks the callee to reduce the caller's part of the callee's shard."""

    swarm: str
    sender: PeerId
    ticket: Ticket
    vector_size: int
    slice_size: int
    codec: str
    bucket: str
    """Which part of the ticket's payload; the sizes are its own."""


@dataclass(frozen=True, slots=True)
class StateOpening:
    """The caller asks for the callee's state; without a version, for its model as it is now."""

    swarm: str
    sender: PeerId
    version: int | None
    line: int = 0
    """Of that version."""


Opening = AverageOpening | StateOpening


@dataclass(frozen=True, slots=True)
class Slice:
    """One message of a stream; the caller's first one has the opening."""

    payload: memoryview | None = None
    last: bool = False
    opening: Opening | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a peer tells whoever asks; rates and shares are over the last seconds."""

    hello: Hello
    members: tuple[m.Member, ...]
    """The others, as this peer knows them."""
    unix_s: Seconds
    running_s: Seconds
    samples_per_s: float
    wait_share: float
    """0 to 1: how much of the trainer's time it waits for the protocol."""
    progress: int
    """Samples of the whole swarm."""
    doing: str
    loss: float | None
    partners: tuple[PeerId, ...]
    """Of the last group that was done."""
    disagreement_l2: float | None
    groups_done: int
    groups_failed: int
    warning: str
    silence: str = ""
    """What the peer says of not averaging at present; empty if it is not silent."""
    since_average_s: Seconds | None = None
    """Since its last average that succeeded; None before the first one."""


@dataclass(frozen=True, slots=True)
class DialBackRequest:
    """Please call `port` at the address that this comes from; `number` answers there."""

    port: int
    number: int


@dataclass(frozen=True, slots=True)
class DialedBack:
    """What became of it."""

    seen_as: str
    """The caller's IP address, as the callee sees it."""
    why_not: str
    """A sentence; empty if the caller was reached."""


@dataclass(frozen=True, slots=True)
class Paths:
    """How else streams can come to a peer, besides gRPC; see `net/sockets.py`."""

    port: int
    secret: bytes
    machine: str
    unix_name: str


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


def _message_to_pb(
    message: m.Message | m.AlgorithmMessage,
) -> tuple[str, Any]:  # Any: protobuf's generated classes
    match message:
        case m.Ping(number, members):
            return "ping", pb.Ping(number=number, members=map(_member_to_pb, members))
        case m.Ack(number, members):
            return "ack", pb.Ack(number=number, members=map(_member_to_pb, members))
        case m.PingFor(number, target):
            return "ping_for", pb.PingFor(number=number, target=target)
        case m.AckFor(number, target, answered, members):
            records = map(_member_to_pb, members)
            return "ack_for", pb.AckFor(
                number=number, target=target, answered=answered, members=records
            )
        case m.Rumours(members):
            return "rumours", pb.Rumours(members=map(_member_to_pb, members))
        case m.Request(ticket, born, purpose):
            body = pb.Request(
                ticket=_ticket_to_pb(ticket), born=born, purpose=_purpose_to_pb(purpose)
            )
            return "request", body
        case m.Grant(ticket, contribution):
            stated = _contribution_to_pb(contribution)
            return "grant", pb.Grant(ticket=_ticket_to_pb(ticket), contribution=stated)
        case m.Failed(ticket, reason):
            return "failed", pb.Failed(ticket=_ticket_to_pb(ticket), reason=reason[:MAX_REASON])
        case m.Begin():
            formed = _formed_to_pb(replace(message, offer=None))
            return "begin", pb.Begin(formed=formed, offer=_offer_to_pb(message.offer))
        case m.Release(ticket):
            return "release", pb.Release(ticket=_ticket_to_pb(ticket))
        case m.Inquire(ticket):
            return "inquire", pb.Inquire(ticket=_ticket_to_pb(ticket))
        case m.Relinquish(ticket):
            return "relinquish", pb.Relinquish(ticket=_ticket_to_pb(ticket))
        case m.Arrive(version, line, offer, contribution):
            stated = _contribution_to_pb(contribution) if offer else None
            offered = _offer_to_pb(offer)
            body = pb.Arrive(version=version, line=line, offer=offered, contribution=stated)
            return "arrive", body
        case m.CatchUp(version, donor, line):
            return "catch_up", pb.CatchUp(version=version, donor=donor, line=line)
        case m.Activate(version, waits, offer, contribution):
            stated = _contribution_to_pb(contribution) if offer else None
            offered = _offer_to_pb(offer)
            body = pb.Activate(version=version, waits=waits, offer=offered, contribution=stated)
            return "activate", body
        case m.Past(version):
            return "past", pb.Past(version=version)
        case m.Standing(ticket, how, asks):
            body = pb.Standing(ticket=_ticket_to_pb(ticket), how=how.value, asks=asks)
            return "standing", body
        case m.Mended(ticket, adopt, again, group):
            packed = _ticket_to_pb(ticket)
            return "mended", pb.Mended(ticket=packed, adopt=adopt, again=again, members=group)
        case m.AlgorithmMessage(kind, numbers, peers):
            body = pb.AlgorithmMessage(kind=kind, numbers=numbers, peers=peers)
            return "algorithm", body


_FROM_PB: dict[str, Callable[[Any], m.Message | m.AlgorithmMessage]] = {
    "ping": lambda p: m.Ping(_number(p.number), _members(p.members)),
    "ack": lambda p: m.Ack(_number(p.number), _members(p.members)),
    "ping_for": lambda p: m.PingFor(_number(p.number), _name(p.target)),
    "ack_for": lambda p: m.AckFor(
        _number(p.number), _name(p.target), p.answered, _members(p.members)
    ),
    "rumours": lambda p: m.Rumours(_members(p.members)),
    "request": lambda p: m.Request(_ticket(p.ticket), _number(p.born), _purpose(p.purpose)),
    "grant": lambda p: m.Grant(_ticket(p.ticket), _contribution(p.contribution)),
    "failed": lambda p: m.Failed(_ticket(p.ticket), _text(p.reason, MAX_REASON)),
    "begin": lambda p: _begin(p),
    "release": lambda p: m.Release(_ticket(p.ticket)),
    "inquire": lambda p: m.Inquire(_ticket(p.ticket)),
    "relinquish": lambda p: m.Relinquish(_ticket(p.ticket)),
    "arrive": lambda p: m.Arrive(_number(p.version), p.line, *_offer_of(p)),
    "catch_up": lambda p: m.CatchUp(_number(p.version), _name(p.donor), p.line),
    "activate": lambda p: m.Activate(_number(p.version), p.waits, *_offer_of(p)),
    "past": lambda p: m.Past(_number(p.version)),
    "standing": lambda p: m.Standing(_ticket(p.ticket), _how(p.how), p.asks),
    "mended": lambda p: m.Mended(
        _ticket(p.ticket), p.adopt, _number(p.again), _group(p.members) if p.members else ()
    ),
    "algorithm": lambda p: _algorithm_message(
        _text(p.kind, MAX_NAME), tuple(p.numbers), tuple(map(_name, p.peers[: MAX_MEMBERS + 1]))
    ),
}


def _algorithm_message(
    kind: str, numbers: tuple[int, ...], peers: tuple[PeerId, ...]
) -> m.AlgorithmMessage:
    try:
        return m.AlgorithmMessage(kind, numbers, peers)
    except LocalProtocolError as error:  # no peer of ours could send it
        raise CodecError(str(error)) from error


# --- joining --------------------------------------------------------------------------------------


def encode_hello(hello: Hello) -> bytes:
    return bytes(_hello_to_pb(hello).SerializeToString())


def decode_hello(data: bytes) -> Hello:
    """Raises CodecError."""
    return _hello(_parse(pb.Hello, data))


def encode_welcome(welcome: Welcome) -> bytes:
    members = map(_member_to_pb, welcome.members)
    return bytes(pb.Welcome(refusal=welcome.refusal, members=members).SerializeToString())


def decode_welcome(data: bytes) -> Welcome:
    """Raises CodecError."""
    packed = _parse(pb.Welcome, data)
    return Welcome(_text(packed.refusal, 4 * MAX_REASON), _members(packed.members))


# --- what strangers may ask -----------------------------------------------------------------------


def encode_report(report: Report) -> bytes:
    packed = pb.Report(
        self=_hello_to_pb(report.hello),
        members=map(_member_to_pb, report.members),
        unix_s=report.unix_s,
        running_s=report.running_s,
        samples_per_s=report.samples_per_s,
        wait_share=report.wait_share,
        progress=report.progress,
        doing=report.doing[:MAX_REASON],
        loss=report.loss,
        partners=report.partners,
        disagreement_l2=report.disagreement_l2,
        groups_done=report.groups_done,
        groups_failed=report.groups_failed,
        warning=report.warning[:MAX_REASON],
        silence=report.silence[:MAX_REASON],
        since_average_s=report.since_average_s,
    )
    return bytes(packed.SerializeToString())


def decode_report(data: bytes) -> Report:
    """Raises CodecError."""
    p: Any = _parse(pb.Report, data)  # Any: a generated class
    return Report(
        hello=_hello(p.self),
        members=_members(p.members),
        unix_s=_measure(p.unix_s),
        running_s=_measure(p.running_s),
        samples_per_s=_measure(p.samples_per_s),
        wait_share=_measure(p.wait_share),
        progress=_number(p.progress),
        doing=_text(p.doing, MAX_REASON),
        loss=p.loss if p.HasField("loss") else None,
        partners=tuple(_name(partner) for partner in p.partners[:MAX_MEMBERS]),
        disagreement_l2=_measure(p.disagreement_l2) if p.HasField("disagreement_l2") else None,
        groups_done=_number(p.groups_done),
        groups_failed=_number(p.groups_failed),
        warning=_text(p.warning, MAX_REASON),
        silence=_text(p.silence, MAX_REASON),
        since_average_s=_measure(p.since_average_s) if p.HasField("since_average_s") else None,
    )


def encode_dial_back(request: DialBackRequest) -> bytes:
    return bytes(pb.DialBackRequest(port=request.port, number=request.number).SerializeToString())


def decode_dial_back(data: bytes) -> DialBackRequest:
    """Raises CodecError."""
    p: Any = _parse(pb.DialBackRequest, data)  # Any: a generated class
    if not LOWEST_PORT <= p.port < 65536:
        raise CodecError(f"port {p.port} is not called back; choose one of {LOWEST_PORT} to 65535")
    return DialBackRequest(p.port, _number(p.number))


def encode_dialed_back(answer: DialedBack) -> bytes:
    packed = pb.DialedBack(seen_as=answer.seen_as, why_not=answer.why_not[:MAX_REASON])
    return bytes(packed.SerializeToString())


def decode_dialed_back(data: bytes) -> DialedBack:
    """Raises CodecError."""
    p: Any = _parse(pb.DialedBack, data)  # Any: a generated class
    return DialedBack(_text(p.seen_as, MAX_NAME), _text(p.why_not, MAX_REASON))


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
    p: Any = _parse(pb.Paths, data)  # Any: a generated class
    if p.port > 65535 or len(p.secret) != SECRET_BYTES:
        raise CodecError(f"paths with port {p.port} and a secret of {len(p.secret)} bytes")
    return Paths(p.port, p.secret, _text(p.machine, MAX_NAME), _text(p.unix_name, MAX_NAME))


# --- slices ---------------------------------------------------------------------------------------


def encode_slice(content: Slice) -> bytes:
    """All of a slice in the one copy that gRPC needs."""
    parts: list[bytes | memoryview] = []
    if content.payload is not None:
        parts += (_varint(_PAYLOAD), _varint(content.payload.nbytes), content.payload)
    if content.opening is not None:
        tag = _AVERAGE if isinstance(content.opening, AverageOpening) else _STATE
        opening = _opening_to_pb(content.opening).SerializeToString()
        parts += (_varint(tag), _varint(len(opening)), opening)
    if content.last:
        parts += (_varint(_LAST), _varint(1))
    return b"".join(parts)


def decode_slice(data: bytes) -> Slice:
    """What `data` holds; the payload is not copied, unknown fields are skipped.

    Raises:
        CodecError: if the bytes are not a slice, or one that says nothing.
    """
    payload, opening, last = None, None, False
    whole, at = memoryview(data), 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        if tag & 7 not in (0, 2):
            raise CodecError(f"a slice with a field of kind {tag & 7}")
        value, at = _read_varint(data, at)
        if tag == _LAST:
            last = value == 1
        if tag & 7 == 0:
            continue
        if at + value > len(data):
            raise CodecError(f"a slice says {value} bytes and carries {len(data) - at}")
        if tag == _PAYLOAD:
            payload = whole[at : at + value]
        elif tag in (_AVERAGE, _STATE):
            opening = _opening(tag, bytes(whole[at : at + value]))
        at += value
    if payload is None and opening is None and not last:
        raise CodecError("a slice that says nothing")
    return Slice(payload, last, opening)


def _opening_to_pb(opening: Opening) -> Any:  # Any: a generated class
    match opening:
        case AverageOpening(swarm, sender, ticket, vector_size, slice_size, codec, bucket):
            return pb.AverageOpening(
                swarm=swarm,
                sender=sender,
                ticket=_ticket_to_pb(ticket),
                vector_size=vector_size,
                slice_size=slice_size,
                codec=codec,
                bucket=bucket,
            )
        case StateOpening(swarm, sender, version, line):
            return pb.StateOpening(swarm=swarm, sender=sender, version=version, line=line)


def _opening(tag: int, data: bytes) -> Opening:
    if len(data) > MAX_OPENING_BYTES:
        raise CodecError(f"an opening of {len(data)} bytes")
    if tag == _AVERAGE:
        p: Any = _parse(pb.AverageOpening, data)  # Any: a generated class
        return AverageOpening(
            _text(p.swarm, MAX_NAME),
            _name(p.sender),
            _ticket(p.ticket),
            _number(p.vector_size),
            _number(p.slice_size),
            _text(p.codec, MAX_NAME),
            _text(p.bucket, MAX_NAME),
        )
    p = _parse(pb.StateOpening, data)
    version = p.version if p.HasField("version") else None
    return StateOpening(_text(p.swarm, MAX_NAME), _name(p.sender), version, p.line)


# --- parts ----------------------------------------------------------------------------------------


def _hello_to_pb(hello: Hello) -> Any:  # Any: a generated class
    major, minor = hello.protocol
    return pb.Hello(
        protocol_major=major,
        protocol_minor=minor,
        algorithm=hello.algorithm,
        model=hello.model,
        model_size=hello.model_size,
        self=_member_to_pb(hello.me),
        codec=hello.codec,
        gradient_codec=hello.gradient_codec,
    )


def _hello(p: Any) -> Hello:  # Any: a generated class
    return Hello(
        (p.protocol_major, p.protocol_minor),
        _text(p.algorithm, MAX_REASON),
        _text(p.model, MAX_NAME),
        _number(p.model_size),
        _member(p.self),
        _text(p.codec, MAX_NAME),
        _text(p.gradient_codec, MAX_NAME),
    )


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
        link_mbit=member.link_mbit,
        accusers=member.accusers,
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
        link_mbit=_at_most(MAX_MBIT, p.link_mbit, "a link's speed"),
        accusers=_accusers(p.accusers) if state is m.MemberState.SUSPECT else (),
    )


def _accusers(names: Sequence[str]) -> tuple[PeerId, ...]:
    return joined(tuple(_name(name) for name in names[: 2 * ACCUSERS]), ())


def _members(packed: Sequence[Any]) -> tuple[m.Member, ...]:
    if len(packed) > MAX_MEMBERS:
        raise CodecError(f"a message with {len(packed)} members; at most {MAX_MEMBERS} are allowed")
    return tuple([_known_member(p.SerializeToString()) for p in packed])


@functools.lru_cache(maxsize=1 << 14)  # every record is heard again and again
def _known_member(data: bytes) -> m.Member:
    return _member(_parse(pb.Member, data))


def _group(names: Sequence[str]) -> tuple[PeerId, ...]:
    group = tuple(_name(name) for name in names)
    if not 0 < len(group) <= MAX_MEMBERS or list(group) != sorted(set(group)):
        raise CodecError(f"a group of {len(group)} members that are not sorted or not distinct")
    return group


@functools.lru_cache(maxsize=8)  # all members are told the same
def _formed_to_pb(begin: m.Begin) -> Any:  # Any: a generated class
    return pb.Formed(
        ticket=_ticket_to_pb(begin.ticket),
        members=begin.members,
        weights=begin.weights,
        purpose=_purpose_to_pb(begin.purpose),
        contributions=map(_contribution_to_pb, begin.contributions),
        outside_samples=begin.outside_samples,
    )


def _begin(p: Any) -> m.Begin:  # Any: a generated class
    return replace(_known_begin(p.formed.SerializeToString()), offer=_offer(p))


@functools.lru_cache(maxsize=8)  # in a simulated world, all are told by one of them
def _known_begin(data: bytes) -> m.Begin:
    """Weights and contributions: none, or one of each member, and not all weights 0."""
    p: Any = _parse(pb.Formed, data)  # Any: a generated class
    group = _group(p.members)
    weights = tuple(_at_most(WHOLE, weight, "a share's weight") for weight in p.weights)
    if weights and (len(weights) != len(group) or not any(weights)):
        raise CodecError(f"{len(weights)} weights of the shares of {len(group)} members")
    stated = tuple(map(_contribution, p.contributions))
    if stated and len(stated) != len(group):
        raise CodecError(f"{len(stated)} contributions of {len(group)} members")
    purpose, outside = _purpose(p.purpose), _number(p.outside_samples)
    return m.Begin(_ticket(p.ticket), group, weights, purpose, stated, outside)


def _purpose_to_pb(purpose: Purpose) -> Any:  # Any: a generated class
    return pb.Purpose(
        formation=int(purpose.formation),
        what=_NUMBERS[purpose.what],
        version=purpose.version,
        line=purpose.line,
    )


def _purpose(p: Any) -> Purpose:  # Any: a generated class
    try:
        formation, what = Formation(p.formation), _WHATS[p.what]
    except (ValueError, KeyError) as error:
        raise CodecError(f"a group for something unknown: {error}") from error
    return Purpose(formation, what, _number(p.version), p.line)


def _contribution_to_pb(stated: Contribution) -> Any:  # Any: a generated class
    return pb.Contribution(
        weight=stated.weight,
        usual=stated.usual,
        samples=stated.samples,
        wants_to_end=stated.wants_to_end,
        gradient_mask=stated.gradient_mask,
    )


def _contribution(p: Any) -> Contribution:  # Any: a generated class
    if len(p.gradient_mask) > MAX_MASK_BYTES:
        raise CodecError(f"gradients of {8 * len(p.gradient_mask)} parameters")
    return Contribution(
        weight=_at_most(MAX_WEIGHT, p.weight, "a weight"),
        usual=_at_most(MAX_WEIGHT, p.usual, "a weight"),
        samples=_number(p.samples),
        wants_to_end=p.wants_to_end,
        gradient_mask=p.gradient_mask,
    )


def _offer_to_pb(offer: Ticket | None) -> Any:  # Any: a generated class
    return None if offer is None else _ticket_to_pb(offer)


def _offer(p: Any) -> Ticket | None:  # Any: a generated class
    return _ticket(p.offer) if p.HasField("offer") else None


def _offer_of(p: Any) -> tuple[Ticket | None, Contribution]:  # Any: a generated class
    offer = _offer(p)
    return offer, MODEL if offer is None else _contribution(p.contribution)


def _ticket_to_pb(ticket: Ticket) -> Any:  # Any: a generated class
    return pb.Ticket(
        initiator=ticket.initiator,
        incarnation=ticket.incarnation,
        number=ticket.number,
        attempt=ticket.attempt,
    )


def _ticket(p: Any) -> Ticket:  # Any: a generated class
    initiator, attempt = _name(p.initiator), _number(p.attempt)
    return Ticket(initiator, _number(p.incarnation), _number(p.number), attempt)


def _how(number: int) -> m.How:
    try:
        return m.How(number)
    except ValueError as error:
        raise CodecError(f"an unknown standing: {error}") from error


def _name(text: str) -> PeerId:
    if not text or len(text) > MAX_NAME or not text.isprintable() or " " in text:
        raise CodecError(f"a peer's name that cannot be one: {text[:MAX_NAME]!r}")
    return PeerId(text)


@functools.lru_cache(maxsize=4096)  # each record carries one, and there are as many as peers
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


def _at_most(most: int, value: int, what: str) -> int:
    if not 0 <= value <= most:
        raise CodecError(f"{what} out of range: {value}")
    return value


def _measure(value: float) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise CodecError(f"a measure that cannot be one: {value}")
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
