"""Encode and decode what peers say about keys; total in both directions, as `net/wire.py` is.

A *fact* is something that all members should know of the swarm's keys. A *record* is a fact as its
bytes, signed by the swarm's CA; the bytes are kept, so that the signature stays valid.
"""

from dataclasses import dataclass
from typing import Any

from p2ptrain.errors import CodecError
from p2ptrain.ids import Address, PeerId
from p2ptrain.net._pb import keys_pb2 as pb
from p2ptrain.net.certificates import FOR_EVER_S, PUBLIC_BYTES, Role
from p2ptrain.net.tokens import SEED_BYTES
from p2ptrain.net.wire_parts import MAX_NAME, address, at_most, name_of, parse, text_of

MAX_RECORDS = 4096
MAX_SIGNERS = 64
MAX_USES = 1024
MAX_BODY_BYTES = 4 * MAX_NAME * MAX_SIGNERS + 1024
MAX_SIGNATURE_BYTES = 80
MAX_PEM_BYTES = 4096
MAX_ELSEWHERE = 8
MAX_SHOWN = 1 << 16
DIGEST_BYTES = 16
ID_CHARACTERS = 16


@dataclass(frozen=True, slots=True)
class TokenMade:
    """There is a token with this public key."""

    public: bytes
    role: Role
    until_s: int
    """Unix time."""
    uses: int
    """How many peers may join with it; 0: any number."""


@dataclass(frozen=True, slots=True)
class TokenUsed:
    """A peer has joined with a token."""

    token: str
    name: PeerId


@dataclass(frozen=True, slots=True)
class TokenVoid:
    """A token lets no one in any more."""

    token: str


@dataclass(frozen=True, slots=True)
class Revoked:
    """No peer of this name is a member any more."""

    name: PeerId


@dataclass(frozen=True, slots=True)
class SignersLimited:
    """Only these peers have the key of the swarm's CA."""

    names: tuple[PeerId, ...]


Fact = TokenMade | TokenUsed | TokenVoid | Revoked | SignersLimited


@dataclass(frozen=True, slots=True)
class Record:
    """A fact's bytes, and the signature of the swarm's CA."""

    body: bytes
    signature: bytes


@dataclass(frozen=True, slots=True)
class EnrolRequest:
    """A key and a name, to be signed."""

    public: bytes
    name: PeerId


@dataclass(frozen=True, slots=True)
class EnrolReply:
    """Certificates (PEM) and what a member knows; or where to ask instead."""

    calls: bytes = b""
    answers: bytes = b""
    seed: bytes = b""
    records: tuple[Record, ...] = ()
    elsewhere: tuple[Address, ...] = ()


@dataclass(frozen=True, slots=True)
class Show:
    """Which tokens there are, who signs, who is revoked?"""


@dataclass(frozen=True, slots=True)
class WantToken:
    """Make a token."""

    role: Role
    lasts_s: int
    """0: it does not expire."""
    uses: int


@dataclass(frozen=True, slots=True)
class Revoke:
    """Expel a peer."""

    name: PeerId


@dataclass(frozen=True, slots=True)
class Rotate:
    """Void all tokens, and make a new one for members."""


Command = Show | WantToken | Revoke | Rotate


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command has brought: a token, or lines for a person."""

    token: str = ""
    shown: str = ""


def encode_fact(fact: Fact) -> bytes:
    """The bytes that the CA signs."""
    match fact:
        case TokenMade():
            made = pb.TokenMade(
                public=fact.public,
                viewer=fact.role is Role.VIEWER,
                until_s=fact.until_s,
                uses=fact.uses,
            )
            packed = pb.KeyFact(made=made)
        case TokenUsed():
            packed = pb.KeyFact(used=pb.TokenUsed(token=fact.token, name=fact.name))
        case TokenVoid():
            packed = pb.KeyFact(void=fact.token)
        case Revoked():
            packed = pb.KeyFact(revoked=fact.name)
        case SignersLimited():
            packed = pb.KeyFact(signers=pb.SignersLimited(names=fact.names))
    return bytes(packed.SerializeToString(deterministic=True))


def decode_fact(body: bytes) -> Fact:
    """Raises CodecError."""
    p: Any = parse(pb.KeyFact, body)  # Any: a generated class
    match p.WhichOneof("fact"):
        case "made":
            return _made(p.made)
        case "used":
            return TokenUsed(_token_id(p.used.token), name_of(p.used.name))
        case "void":
            return TokenVoid(_token_id(p.void))
        case "revoked":
            return Revoked(name_of(p.revoked))
        case "signers":
            if not 0 < len(p.signers.names) <= MAX_SIGNERS:
                raise CodecError(f"{len(p.signers.names)} signers; 1 to {MAX_SIGNERS} are allowed")
            return SignersLimited(tuple(name_of(name) for name in p.signers.names))
        case _:
            raise CodecError("a record about keys that says nothing")


def _made(p: Any) -> TokenMade:  # Any: a generated class
    public = _exactly(PUBLIC_BYTES, p.public, "a public key")
    uses = at_most(MAX_USES, p.uses, "the uses of a token")
    until_s = at_most(FOR_EVER_S, p.until_s, "the end of a token")
    return TokenMade(public, Role.VIEWER if p.viewer else Role.MEMBER, until_s, uses)


def encode_enrol_request(request: EnrolRequest) -> bytes:
    """Bytes for `decode_enrol_request`."""
    packed = pb.EnrolRequest(public=request.public, name=request.name)
    return bytes(packed.SerializeToString())


def decode_enrol_request(data: bytes) -> EnrolRequest:
    """Raises CodecError."""
    p: Any = parse(pb.EnrolRequest, data)  # Any: a generated class
    return EnrolRequest(_exactly(PUBLIC_BYTES, p.public, "a public key"), name_of(p.name))


def encode_enrol_reply(reply: EnrolReply) -> bytes:
    """Bytes for `decode_enrol_reply`."""
    packed = pb.EnrolReply(
        calls=reply.calls,
        answers=reply.answers,
        seed=reply.seed,
        records=map(_record_to_pb, reply.records),
        elsewhere=reply.elsewhere,
    )
    return bytes(packed.SerializeToString())


def decode_enrol_reply(data: bytes) -> EnrolReply:
    """Raises CodecError."""
    p: Any = parse(pb.EnrolReply, data)  # Any: a generated class
    if max(len(p.calls), len(p.answers)) > MAX_PEM_BYTES or len(p.elsewhere) > MAX_ELSEWHERE:
        raise CodecError("a reply to a joiner that is too long")
    seed = _exactly(SEED_BYTES, p.seed, "a swarm's key") if p.seed else b""
    elsewhere = tuple(address(text) for text in p.elsewhere)
    return EnrolReply(p.calls, p.answers, seed, _records(p.records), elsewhere)


def encode_records(digest: bytes, records: tuple[Record, ...]) -> bytes:
    """Bytes for `decode_records`."""
    packed = pb.KeyRecords(digest=digest, records=map(_record_to_pb, records))
    return bytes(packed.SerializeToString())


def decode_records(data: bytes) -> tuple[bytes, tuple[Record, ...]]:
    """The sender's digest, and its records, which are not checked yet. Raises CodecError."""
    p: Any = parse(pb.KeyRecords, data)  # Any: a generated class
    return _exactly(DIGEST_BYTES, p.digest, "a digest"), _records(p.records)


def encode_command(command: Command) -> bytes:
    """Bytes for `decode_command`."""
    match command:
        case Show():
            packed = pb.KeyCommand(show=True)
        case WantToken():
            wanted = pb.TokenWanted(
                viewer=command.role is Role.VIEWER, lasts_s=command.lasts_s, uses=command.uses
            )
            packed = pb.KeyCommand(token=wanted)
        case Revoke():
            packed = pb.KeyCommand(revoke=command.name)
        case Rotate():
            packed = pb.KeyCommand(rotate=True)
    return bytes(packed.SerializeToString())


def decode_command(data: bytes) -> Command:
    """Raises CodecError."""
    p: Any = parse(pb.KeyCommand, data)  # Any: a generated class
    match p.WhichOneof("command"):
        case "show":
            return Show()
        case "token":
            lasts_s = at_most(FOR_EVER_S, p.token.lasts_s, "the time of a token")
            uses = at_most(MAX_USES, p.token.uses, "the uses of a token")
            return WantToken(Role.VIEWER if p.token.viewer else Role.MEMBER, lasts_s, uses)
        case "revoke":
            return Revoke(name_of(p.revoke))
        case "rotate":
            return Rotate()
        case _:
            raise CodecError("a command about keys that this release does not know")


def encode_answer(answer: Answer) -> bytes:
    """Bytes for `decode_answer`."""
    packed = pb.KeyAnswer(token=answer.token, shown=answer.shown)
    return bytes(packed.SerializeToString())


def decode_answer(data: bytes) -> Answer:
    """Raises CodecError."""
    p: Any = parse(pb.KeyAnswer, data)  # Any: a generated class
    lines = [text_of(line, MAX_SHOWN) for line in p.shown[:MAX_SHOWN].splitlines()]
    return Answer(text_of(p.token, 2 * MAX_NAME), "\n".join(lines))


def _record_to_pb(record: Record) -> Any:  # Any: a generated class
    return pb.KeyRecord(body=record.body, signature=record.signature)


def _records(packed: Any) -> tuple[Record, ...]:  # Any: a generated class
    if len(packed) > MAX_RECORDS:
        raise CodecError(f"{len(packed)} records about keys; at most {MAX_RECORDS} are allowed")
    for p in packed:
        if len(p.body) > MAX_BODY_BYTES or len(p.signature) > MAX_SIGNATURE_BYTES:
            raise CodecError(f"a record about keys of {len(p.body) + len(p.signature)} bytes")
    return tuple(Record(p.body, p.signature) for p in packed)


def _exactly(size: int, data: bytes, what: str) -> bytes:
    if len(data) != size:
        raise CodecError(f"{what} of {len(data)} bytes; it has {size}")
    return data


def _token_id(text: str) -> str:
    if len(text) != ID_CHARACTERS or not text.isascii() or not text.isalnum():
        raise CodecError(f"a token's name that cannot be one: {text[:MAX_NAME]!r}")
    return text
