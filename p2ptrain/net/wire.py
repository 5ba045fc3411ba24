"""Encode messages as protobuf and decode them, total in both directions.

Every message of `core/messages.py` can be encoded. Any bytes either decode to a valid value or
raise `CodecError` with one sentence: lengths, counts, names and numbers are bounded here, so code
behind this file need not check them again. The simulator sends its messages through this file, too.

Tensor bytes are the exception: a `Chunk` is encoded and decoded here, byte for byte as protobuf
would (a test compares), because protobuf copies a payload three times where one copy is enough.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from p2ptrain.core import messages as m
from p2ptrain.core.contribution import MODEL, Contribution
from p2ptrain.core.data_ledger import EpochCount
from p2ptrain.core.links import WHOLE
from p2ptrain.core.purpose import MOST_FRAGMENTS, Formation, Purpose, What
from p2ptrain.errors import CodecError, LocalProtocolError
from p2ptrain.ids import PeerId, Seconds, Ticket
from p2ptrain.net._pb import peer_pb2 as pb
from p2ptrain.net.wire_calls import LOWEST_PORT as LOWEST_PORT
from p2ptrain.net.wire_calls import MAX_REASON as MAX_REASON
from p2ptrain.net.wire_calls import MAX_REFUSAL as MAX_REFUSAL
from p2ptrain.net.wire_calls import SECRET_BYTES as SECRET_BYTES
from p2ptrain.net.wire_calls import DialBackRequest as DialBackRequest
from p2ptrain.net.wire_calls import DialedBack as DialedBack
from p2ptrain.net.wire_calls import Paths as Paths
from p2ptrain.net.wire_calls import SetReply as SetReply
from p2ptrain.net.wire_calls import SetRequest as SetRequest
from p2ptrain.net.wire_calls import decode_dial_back as decode_dial_back
from p2ptrain.net.wire_calls import decode_dialed_back as decode_dialed_back
from p2ptrain.net.wire_calls import decode_paths as decode_paths
from p2ptrain.net.wire_calls import decode_set as decode_set
from p2ptrain.net.wire_calls import decode_set_reply as decode_set_reply
from p2ptrain.net.wire_calls import encode_dial_back as encode_dial_back
from p2ptrain.net.wire_calls import encode_dialed_back as encode_dialed_back
from p2ptrain.net.wire_calls import encode_paths as encode_paths
from p2ptrain.net.wire_calls import encode_set as encode_set
from p2ptrain.net.wire_calls import encode_set_reply as encode_set_reply
from p2ptrain.net.wire_ledger import count_of, count_to_pb, ledger_update_of, ledger_update_to_pb
from p2ptrain.net.wire_members import known_to_pb, member_of, member_to_pb, members_of
from p2ptrain.net.wire_parts import MAX_MEMBERS as MAX_MEMBERS
from p2ptrain.net.wire_parts import MAX_NAME as MAX_NAME
from p2ptrain.net.wire_parts import MAX_NUMBER as MAX_NUMBER
from p2ptrain.net.wire_parts import address as address
from p2ptrain.net.wire_parts import (
    at_most,
    contribution_of,
    contribution_to_pb,
    group_of,
    measure,
    name_of,
    number,
    parse,
    read_varint,
    settings_of,
    settings_to_pb,
    text_of,
    ticket_of,
    ticket_to_pb,
    varint,
)
from p2ptrain.net.wire_parts import is_port as is_port

PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 1
PROTOCOL = PROTOCOL_MAJOR, PROTOCOL_MINOR
"""``protos/p2ptrain/v1/peer.proto`` says when they change."""

MAX_TENSORS = 4096
MAX_EPOCHS = 8
MAX_OPENING_BYTES = 1 << 12
MAX_CHUNK_BYTES = 4 << 20

# Tags of a Chunk's fields: number << 3 | kind, kind 2 has a length, kind 0 is a number.
_PAYLOAD, _AVERAGE, _STATE, _LAST = 0x0A, 0x12, 0x1A, 0x20

_WHATS = dict(enumerate(What))
"""By their numbers in the proto."""
_NUMBERS = {what: number for number, what in _WHATS.items()}

T = TypeVar("T")


class UnknownMessage(CodecError):
    """A message of a later minor version: best effort, as if it had been lost."""


@dataclass(frozen=True, slots=True)
class Hello:
    """A peer's description of itself, sent first."""

    protocol: tuple[int, int]
    algorithm: str
    model: str
    model_size: int
    me: m.Member
    settings: Mapping[str, str] = field(default_factory=dict)
    """What all peers of a swarm have alike; empty for a caller without a model."""
    rule: Mapping[str, str] = field(default_factory=dict)
    """How its updates are made, as it last told the others."""
    tensors: tuple[str, ...] = ()
    """One line for each of the model's, the first `MAX_TENSORS`; in a join request only."""
    refused: str = ""
    """Whom this peer has refused last, and why."""


@dataclass(frozen=True, slots=True)
class JoinReply:
    """The answer to `Hello`: a refusal in words, or all members in the host's view.

    The newcomer is among them, with the samples of its earlier incarnations.
    """

    refusal: str
    members: tuple[m.Member, ...]
    settings: m.SettingsChange | None = None
    """That the swarm works with; None: those that it began with."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """A control message and its sender; `swarm` is the digest of what must agree in a swarm."""

    source: PeerId
    swarm: str
    message: m.AnyMessage
    epoch: int = 0
    """Of the settings that the sender works with."""


@dataclass(frozen=True, slots=True)
class AverageOpening:
    """The caller asks the callee to reduce the caller's part of the callee's shard."""

    swarm: str
    sender: PeerId
    ticket: Ticket
    vector_size: int
    chunk_size: int
    codec: str
    bucket: str
    """Which part of the ticket's payload; the sizes are its own."""


@dataclass(frozen=True, slots=True)
class StateOpening:
    """The caller asks for the callee's state; without a version, for that of the moment."""

    swarm: str
    sender: PeerId
    version: int | None
    lineage: int = 0
    """Of that version; without one, a digest of the caller's state: an equal one is not sent."""
    fragment: int | None = None
    """Instead of the state: this fragment of the outer optimizer's."""
    snapshot: bytes = b""
    """The digest of a manifest (`net/wire_state.py`), if only chunks of that one are wanted."""
    bare: bool = False
    """Without the optimizer's state, if it is no version of a barrier."""


Opening = AverageOpening | StateOpening


@dataclass(frozen=True, slots=True)
class Chunk:
    """One message of a stream; the caller's first one has the opening."""

    payload: memoryview | None = None
    last: bool = False
    opening: Opening | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A peer's report to non-members; rates and shares are over the last seconds."""

    hello: Hello
    members: tuple[m.Member, ...]
    """The others, in this peer's view."""
    unix_s: Seconds
    running_s: Seconds
    samples_per_s: float
    wait_share: float
    """0 to 1: the fraction of the trainer's time spent waiting for the protocol."""
    progress: int
    """Samples of the whole swarm."""
    doing: str
    loss: float | None
    partners: tuple[PeerId, ...]
    """Of the last group that was done."""
    consensus_distance_l2: float | None
    groups_done: int
    groups_failed: int
    warning: str
    silence: str = ""
    """Its sentence about averages that do not succeed; empty if it is not silent."""
    since_average_s: Seconds | None = None
    """Time since its last successful average; None before the first one."""
    epoch: int = 0
    """Of the settings that it works with."""
    settings: str = ""
    """These, in few words."""
    changed_why: str = ""
    """Why they are others than at the start; empty if they are not."""
    long_gone: tuple[PeerId, ...] = ()
    """Of `members`: those that died or left more than a minute ago."""
    data: tuple[EpochCount, ...] = ()
    """Of the last epochs of its data, at most `MAX_EPOCHS`; empty if they are not dealt."""


# --- control messages -----------------------------------------------------------------------------


def encode_envelope(envelope: Envelope) -> bytes:
    field, body = _message_to_pb(envelope.message)
    packed = pb.Envelope(
        source=envelope.source, swarm=envelope.swarm, epoch=envelope.epoch, **{field: body}
    )
    return bytes(packed.SerializeToString())


def decode_envelope(data: bytes) -> Envelope:
    """Raises CodecError; UnknownMessage for what a later minor version may say."""
    packed: Any = parse(pb.Envelope, data)  # Any: a generated class
    field = packed.WhichOneof("message")
    if field is None:
        packed.DiscardUnknownFields()
        if packed.ByteSize() < len(data):
            raise UnknownMessage("a message of a kind that this version does not know")
        raise CodecError("an envelope without a message")
    message = _FROM_PB[field](getattr(packed, field))
    source, swarm = name_of(packed.source), text_of(packed.swarm, MAX_NAME)
    return Envelope(source, swarm, message, number(packed.epoch))


def _message_to_pb(
    message: m.AnyMessage,
) -> tuple[str, Any]:  # Any: protobuf's generated classes
    match message:
        case m.Ping(number, members):
            return "ping", pb.Ping(number=number, members=map(known_to_pb, members))
        case m.Ack(number, members):
            return "ack", pb.Ack(number=number, members=map(known_to_pb, members))
        case m.IndirectPing(number, target):
            return "indirect_ping", pb.IndirectPing(number=number, target=target)
        case m.IndirectAck(number, target, answered, members):
            records = map(known_to_pb, members)
            return "indirect_ack", pb.IndirectAck(
                number=number, target=target, answered=answered, members=records
            )
        case m.MembershipUpdates(members):
            return "membership_updates", pb.MembershipUpdates(members=map(known_to_pb, members))
        case m.Request(ticket, born, purpose):
            body = pb.Request(
                ticket=ticket_to_pb(ticket), born=born, purpose=_purpose_to_pb(purpose)
            )
            return "request", body
        case m.Grant(ticket, contribution):
            stated = contribution_to_pb(contribution)
            return "grant", pb.Grant(ticket=ticket_to_pb(ticket), contribution=stated)
        case m.Failed(ticket, reason):
            return "failed", pb.Failed(ticket=ticket_to_pb(ticket), reason=reason[:MAX_REASON])
        case m.Begin():
            formed = _formed_to_pb(replace(message, offer=None))
            return "begin", pb.Begin(formed=formed, offer=_offer_to_pb(message.offer))
        case m.Release(ticket):
            return "release", pb.Release(ticket=ticket_to_pb(ticket))
        case m.Inquire(ticket):
            return "inquire", pb.Inquire(ticket=ticket_to_pb(ticket))
        case m.Relinquish(ticket):
            return "relinquish", pb.Relinquish(ticket=ticket_to_pb(ticket))
        case m.Arrive(version, lineage, offer, contribution):
            stated = contribution_to_pb(contribution) if offer else None
            offered = _offer_to_pb(offer)
            body = pb.Arrive(version=version, lineage=lineage, offer=offered, contribution=stated)
            return "arrive", body
        case m.CatchUp(version, donor, lineage):
            return "catch_up", pb.CatchUp(version=version, donor=donor, lineage=lineage)
        case m.Activate(version, waits, offer, contribution):
            stated = contribution_to_pb(contribution) if offer else None
            offered = _offer_to_pb(offer)
            body = pb.Activate(version=version, waits=waits, offer=offered, contribution=stated)
            return "activate", body
        case m.Past(version):
            return "past", pb.Past(version=version)
        case m.AttemptStatus(ticket, phase, asks):
            body = pb.AttemptStatus(ticket=ticket_to_pb(ticket), phase=phase.value, asks=asks)
            return "attempt_status", body
        case m.Resolution(ticket, adopt, again, group):
            packed = ticket_to_pb(ticket)
            return "resolution", pb.Resolution(
                ticket=packed, adopt=adopt, again=again, members=group
            )
        case m.AlgorithmMessage(kind, numbers, peers):
            body = pb.AlgorithmMessage(kind=kind, numbers=numbers, peers=peers)
            return "algorithm", body
        case m.SettingsChange():
            return "settings_change", _change_to_pb(message)
        case m.LedgerUpdate():
            return "ledger_update", ledger_update_to_pb(message)


_FROM_PB: dict[str, Callable[[Any], m.AnyMessage]] = {
    "ping": lambda p: m.Ping(number(p.number), members_of(p.members)),
    "ack": lambda p: m.Ack(number(p.number), members_of(p.members)),
    "indirect_ping": lambda p: m.IndirectPing(number(p.number), name_of(p.target)),
    "indirect_ack": lambda p: m.IndirectAck(
        number(p.number), name_of(p.target), p.answered, members_of(p.members)
    ),
    "membership_updates": lambda p: m.MembershipUpdates(members_of(p.members)),
    "request": lambda p: m.Request(ticket_of(p.ticket), number(p.born), _purpose(p.purpose)),
    "grant": lambda p: m.Grant(ticket_of(p.ticket), contribution_of(p.contribution)),
    "failed": lambda p: m.Failed(ticket_of(p.ticket), text_of(p.reason, MAX_REASON)),
    "begin": lambda p: _begin(p),
    "release": lambda p: m.Release(ticket_of(p.ticket)),
    "inquire": lambda p: m.Inquire(ticket_of(p.ticket)),
    "relinquish": lambda p: m.Relinquish(ticket_of(p.ticket)),
    "arrive": lambda p: m.Arrive(number(p.version), p.lineage, *_offer_of(p)),
    "catch_up": lambda p: m.CatchUp(number(p.version), name_of(p.donor), p.lineage),
    "activate": lambda p: m.Activate(number(p.version), p.waits, *_offer_of(p)),
    "past": lambda p: m.Past(number(p.version)),
    "attempt_status": lambda p: m.AttemptStatus(
        ticket_of(p.ticket), _attempt_phase(p.phase), p.asks
    ),
    "resolution": lambda p: m.Resolution(
        ticket_of(p.ticket), p.adopt, number(p.again), group_of(p.members) if p.members else ()
    ),
    "settings_change": lambda p: _change(p),
    "algorithm": lambda p: _algorithm_message(
        text_of(p.kind, MAX_NAME), tuple(p.numbers), tuple(map(name_of, p.peers[: MAX_MEMBERS + 1]))
    ),
    "ledger_update": ledger_update_of,
}


def _algorithm_message(
    kind: str, numbers: tuple[int, ...], peers: tuple[PeerId, ...]
) -> m.AlgorithmMessage:
    try:
        return m.AlgorithmMessage(kind, numbers, peers)
    except LocalProtocolError as error:  # a correct peer cannot send it
        raise CodecError(str(error)) from error


# --- joining --------------------------------------------------------------------------------------


def encode_hello(hello: Hello) -> bytes:
    return bytes(_hello_to_pb(hello).SerializeToString())


def decode_hello(data: bytes) -> Hello:
    """Raises CodecError."""
    return _hello(parse(pb.Hello, data))


def encode_join_reply(reply: JoinReply) -> bytes:
    packed = pb.JoinReply(
        refusal=reply.refusal[:MAX_REFUSAL],
        members=map(known_to_pb, reply.members),
        settings=_change_to_pb(reply.settings) if reply.settings else None,
    )
    return bytes(packed.SerializeToString())


def decode_join_reply(data: bytes) -> JoinReply:
    """Raises CodecError."""
    packed = parse(pb.JoinReply, data)
    settings = _change(packed.settings) if packed.HasField("settings") else None
    return JoinReply(text_of(packed.refusal, MAX_REFUSAL), members_of(packed.members), settings)


# --- what strangers may ask -----------------------------------------------------------------------


def encode_report(report: Report) -> bytes:
    packed = pb.Report(
        self=_hello_to_pb(report.hello),
        members=map(known_to_pb, report.members),
        unix_s=report.unix_s,
        running_s=report.running_s,
        samples_per_s=report.samples_per_s,
        wait_share=report.wait_share,
        progress=report.progress,
        doing=report.doing[:MAX_REASON],
        loss=report.loss,
        partners=report.partners,
        consensus_distance_l2=report.consensus_distance_l2,
        groups_done=report.groups_done,
        groups_failed=report.groups_failed,
        warning=report.warning[:MAX_REASON],
        silence=report.silence[:MAX_REASON],
        since_average_s=report.since_average_s,
        epoch=report.epoch,
        settings=report.settings[:MAX_REASON],
        changed_why=report.changed_why[:MAX_REASON],
        long_gone=report.long_gone,
        data=map(count_to_pb, report.data[-MAX_EPOCHS:]),
    )
    return bytes(packed.SerializeToString())


def decode_report(data: bytes, *, members: bool = True) -> Report:
    """Raises CodecError. Without `members` the report has none."""
    p: Any = parse(pb.Report, data)  # Any: a generated class
    return Report(
        hello=_hello(p.self),
        members=members_of(p.members) if members else (),
        unix_s=measure(p.unix_s),
        running_s=measure(p.running_s),
        samples_per_s=measure(p.samples_per_s),
        wait_share=measure(p.wait_share),
        progress=number(p.progress),
        doing=text_of(p.doing, MAX_REASON),
        loss=p.loss if p.HasField("loss") else None,
        partners=tuple(name_of(partner) for partner in p.partners[:MAX_MEMBERS]),
        consensus_distance_l2=measure(p.consensus_distance_l2)
        if p.HasField("consensus_distance_l2")
        else None,
        groups_done=number(p.groups_done),
        groups_failed=number(p.groups_failed),
        warning=text_of(p.warning, MAX_REASON),
        silence=text_of(p.silence, MAX_REASON),
        since_average_s=measure(p.since_average_s) if p.HasField("since_average_s") else None,
        epoch=number(p.epoch),
        settings=text_of(p.settings, MAX_REASON),
        changed_why=text_of(p.changed_why, MAX_REASON),
        long_gone=tuple(name_of(peer) for peer in p.long_gone[:MAX_MEMBERS]) if members else (),
        data=tuple(map(count_of, p.data[:MAX_EPOCHS])),
    )


# --- chunks ---------------------------------------------------------------------------------------


def encode_chunk(content: Chunk) -> bytes:
    """All of a chunk in the one copy that gRPC needs."""
    parts: list[bytes | memoryview] = []
    if content.payload is not None:
        parts += (varint(_PAYLOAD), varint(content.payload.nbytes), content.payload)
    if content.opening is not None:
        tag = _AVERAGE if isinstance(content.opening, AverageOpening) else _STATE
        opening = _opening_to_pb(content.opening).SerializeToString()
        parts += (varint(tag), varint(len(opening)), opening)
    if content.last:
        parts += (varint(_LAST), varint(1))
    return b"".join(parts)


def decode_chunk(data: bytes) -> Chunk:
    """What `data` holds; the payload is not copied, unknown fields are skipped.

    Raises:
        CodecError: if the bytes are not a chunk, or an empty one.
    """
    payload, opening, last = None, None, False
    whole, at = memoryview(data), 0
    while at < len(data):
        tag, at = read_varint(data, at)
        if tag & 7 not in (0, 2):
            raise CodecError(f"a chunk with a field of kind {tag & 7}")
        value, at = read_varint(data, at)
        if tag == _LAST:
            last = value == 1
        if tag & 7 == 0:
            continue
        if at + value > len(data):
            raise CodecError(f"a chunk says {value} bytes and carries {len(data) - at}")
        if tag == _PAYLOAD:
            payload = whole[at : at + value]
        elif tag in (_AVERAGE, _STATE):
            opening = _opening(tag, bytes(whole[at : at + value]))
        at += value
    if payload is None and opening is None and not last:
        raise CodecError("a chunk that says nothing")
    return Chunk(payload, last, opening)


def _opening_to_pb(opening: Opening) -> Any:  # Any: a generated class
    match opening:
        case AverageOpening(swarm, sender, ticket, vector_size, chunk_size, codec, bucket):
            return pb.AverageOpening(
                swarm=swarm,
                sender=sender,
                ticket=ticket_to_pb(ticket),
                vector_size=vector_size,
                chunk_size=chunk_size,
                codec=codec,
                bucket=bucket,
            )
        case StateOpening(swarm, sender, version, lineage, fragment, snapshot, bare):
            outer = 0 if fragment is None else 1 + fragment
            whose = {"swarm": swarm, "sender": sender, "version": version, "lineage": lineage}
            return pb.StateOpening(**whose, outer=outer, snapshot=snapshot, bare=bare)


def _opening(tag: int, data: bytes) -> Opening:
    if len(data) > MAX_OPENING_BYTES:
        raise CodecError(f"an opening of {len(data)} bytes")
    if tag == _AVERAGE:
        p: Any = parse(pb.AverageOpening, data)  # Any: a generated class
        return AverageOpening(
            text_of(p.swarm, MAX_NAME),
            name_of(p.sender),
            ticket_of(p.ticket),
            number(p.vector_size),
            number(p.chunk_size),
            text_of(p.codec, MAX_NAME),
            text_of(p.bucket, MAX_NAME),
        )
    p = parse(pb.StateOpening, data)
    version = p.version if p.HasField("version") else None
    fragment = at_most(MOST_FRAGMENTS, p.outer, "a fragment") - 1 if p.outer else None
    swarm, sender = text_of(p.swarm, MAX_NAME), name_of(p.sender)
    return StateOpening(swarm, sender, version, p.lineage, fragment, p.snapshot, p.bare)


# --- parts ----------------------------------------------------------------------------------------


def _hello_to_pb(hello: Hello) -> Any:  # Any: a generated class
    major, minor = hello.protocol
    return pb.Hello(
        protocol_major=major,
        protocol_minor=minor,
        algorithm=hello.algorithm,
        model=hello.model,
        model_size=hello.model_size,
        self=member_to_pb(hello.me),
        settings=settings_to_pb(hello.settings),
        rule=settings_to_pb(hello.rule),
        tensors=[line[:MAX_REASON] for line in hello.tensors[:MAX_TENSORS]],
        refused=hello.refused[:MAX_REFUSAL],
    )


def _hello(p: Any) -> Hello:  # Any: a generated class
    return Hello(
        (p.protocol_major, p.protocol_minor),
        text_of(p.algorithm, MAX_REASON),
        text_of(p.model, MAX_NAME),
        number(p.model_size),
        member_of(p.self),
        settings_of(p.settings),
        settings_of(p.rule),
        tuple(text_of(line, MAX_REASON) for line in p.tensors[:MAX_TENSORS]),
        text_of(p.refused, MAX_REFUSAL),
    )


@functools.lru_cache(maxsize=8)  # all members get the same
def _formed_to_pb(begin: m.Begin) -> Any:  # Any: a generated class
    return pb.Formed(
        ticket=ticket_to_pb(begin.ticket),
        members=begin.members,
        weights=begin.weights,
        purpose=_purpose_to_pb(begin.purpose),
        contributions=map(contribution_to_pb, begin.contributions),
        outside_samples=begin.outside_samples,
    )


def _begin(p: Any) -> m.Begin:  # Any: a generated class
    return replace(_known_begin(p.formed.SerializeToString()), offer=_offer(p))


@functools.lru_cache(maxsize=8)  # in a simulated world, one decoding serves all
def _known_begin(data: bytes) -> m.Begin:
    """Weights and contributions: none, or one of each member, and not all weights 0."""
    p: Any = parse(pb.Formed, data)  # Any: a generated class
    group = group_of(p.members)
    weights = tuple(at_most(WHOLE, weight, "a share's weight") for weight in p.weights)
    if weights and (len(weights) != len(group) or not any(weights)):
        raise CodecError(f"{len(weights)} weights of the shares of {len(group)} members")
    stated = tuple(map(contribution_of, p.contributions))
    if stated and len(stated) != len(group):
        raise CodecError(f"{len(stated)} contributions of {len(group)} members")
    purpose, outside = _purpose(p.purpose), number(p.outside_samples)
    return m.Begin(ticket_of(p.ticket), group, weights, purpose, stated, outside)


def _purpose_to_pb(purpose: Purpose) -> Any:  # Any: a generated class
    return pb.Purpose(
        formation=int(purpose.formation),
        what=_NUMBERS[purpose.what],
        version=purpose.version,
        lineage=purpose.lineage,
        fragment=purpose.fragment,
        fragments=purpose.fragments - 1,
        epoch=purpose.epoch,
    )


def _purpose(p: Any) -> Purpose:  # Any: a generated class
    try:
        formation, what = Formation(p.formation), _WHATS[p.what]
    except (ValueError, KeyError) as error:
        raise CodecError(f"a group for something unknown: {error}") from error
    fragments = 1 + at_most(MOST_FRAGMENTS - 1, p.fragments, "the number of fragments")
    fragment = at_most(fragments - 1, p.fragment, "a fragment")
    epoch = number(p.epoch)
    return Purpose(formation, what, number(p.version), p.lineage, fragment, fragments, epoch)


def _change_to_pb(change: m.SettingsChange) -> Any:  # Any: a generated class
    return pb.SettingsChange(
        epoch=change.epoch, text=change.text, by=change.by, why=change.why[:MAX_REASON]
    )


def _change(p: Any) -> m.SettingsChange:  # Any: a generated class
    text = text_of(p.text, m.MOST_SETTINGS_TEXT)
    return m.SettingsChange(number(p.epoch), text, name_of(p.by), text_of(p.why, MAX_REASON))


def _offer_to_pb(offer: Ticket | None) -> Any:  # Any: a generated class
    return None if offer is None else ticket_to_pb(offer)


def _offer(p: Any) -> Ticket | None:  # Any: a generated class
    return ticket_of(p.offer) if p.HasField("offer") else None


def _offer_of(p: Any) -> tuple[Ticket | None, Contribution]:  # Any: a generated class
    offer = _offer(p)
    return offer, MODEL if offer is None else contribution_of(p.contribution)


def _attempt_phase(number: int) -> m.AttemptPhase:
    try:
        return m.AttemptPhase(number)
    except ValueError as error:
        raise CodecError(f"an unknown phase of an attempt: {error}") from error
