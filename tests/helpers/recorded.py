"""One example of everything that peers say, as its bytes: what a released protocol is held to.

``python -m tests.helpers.recorded VERSION FILE`` records what a version of the protocol has added
to the one before it, for the day of a release. A file that is there is not changed: a field that
is added later must not change these bytes.
"""

import dataclasses
import json
import sys
import typing
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

from p2ptrain.core import messages as m
from p2ptrain.core.contribution import Contribution
from p2ptrain.core.data_ledger import DataPlan
from p2ptrain.core.purpose import Formation, Purpose, What
from p2ptrain.core.version_vectors import VersionVector
from p2ptrain.ids import Address, PeerId, Ticket
from p2ptrain.net import wire, wire_carried, wire_keys, wire_state
from p2ptrain.net.certificates import PUBLIC_BYTES, Role
from p2ptrain.runtime import pushes

Case = tuple[Any, Callable[[Any], bytes], Callable[[bytes], Any]]
"""What is said, how it is written, and how it is read."""

A, B = PeerId("a"), PeerId("päär-2")
TICKET = Ticket(A, 1_760_000_000_000, 7, 2)
MEMBER = m.Member(
    peer=B,
    address=Address("[::1]:4000"),
    incarnation=3,
    state=m.MemberState.SUSPECT,
    beat=5,
    phase=m.Phase.TRAINING,
    steps=11,
    samples=1 << 40,
    link_mbit=100,
    accusers=(A,),
)
STATED = Contribution(
    weight=32,
    usual=32,
    samples=64,
    wants_to_end=True,
    gradient_mask=b"\x05",
    rule=1,
    progress=128,
    begun=2,
    together=3,
    history=4,
    outer_steps=5,
    speed=6,
)
PURPOSE = Purpose(Formation.BARRIER, What.GRADIENTS, 9, 77, 1, 4)
FIELDS: dict[str, Any] = {
    "number": 12,
    "born": 13,
    "purpose": PURPOSE,
    "contribution": STATED,
    "offer": Ticket(B, 2, 3),
    "version": 14,
    "lineage": 15,
    "ticket": TICKET,
    "reason": "busy",
    "donor": B,
    "waits": True,
    "target": B,
    "answered": True,
    "phase": m.AttemptPhase.COMMITTED,
    "asks": True,
    "adopt": True,
    "again": 1,
    "kind": "book",
    "numbers": (1, 2, 300),
    "peers": (A, B),
    "members": (A, B),
    "weights": (1, 3),
    "contributions": (STATED, STATED),
    "outside_samples": 16,
    "epoch": 3 << 32,
    "text": '{"algorithm":"wagma"}',
    "by": B,
    "why": "a test",
    "plan": DataPlan(360, 16, 5),
    "begin": 0,
    "shares": (),
    "closed": (),
    "is_whole": True,
}
RECORDS = (m.Ping, m.Ack, m.IndirectAck, m.MembershipUpdates)
HELLO = wire.Hello(
    (1, 0), "ad_psgd", "fingerprint", 4104, MEMBER, {"codec": "fp32"}, {"lr": "0.1"}, ("w",), "no"
)


def message(kind: type) -> Any:
    own = {"members": (MEMBER,)} if kind in RECORDS else {}
    known = FIELDS | own
    return kind(**{field.name: known[field.name] for field in dataclasses.fields(kind)})


def first() -> dict[str, Case]:
    """Protocol 1.0, by name."""
    found: dict[str, Case] = {
        kind.__name__: (
            wire.Envelope(A, "digest", message(kind)),
            wire.encode_envelope,
            wire.decode_envelope,
        )
        for kind in typing.get_args(m.AnyMessage)
    }
    average = wire.AverageOpening("digest", A, TICKET, 1000, 100, "fp32", "all")
    found |= {
        "Hello": (HELLO, wire.encode_hello, wire.decode_hello),
        "JoinReply": (
            wire.JoinReply("", (MEMBER,)),
            wire.encode_join_reply,
            wire.decode_join_reply,
        ),
        "Chunk": (wire.Chunk(memoryview(b"\x01\x02"), True), wire.encode_chunk, wire.decode_chunk),
        "Opening": (wire.Chunk(opening=average), wire.encode_chunk, wire.decode_chunk),
        "StateOpening": (
            wire.Chunk(opening=wire.StateOpening("digest", A, 3, 4)),
            wire.encode_chunk,
            wire.decode_chunk,
        ),
        "DialBackRequest": (
            wire.DialBackRequest(4000, 9),
            wire.encode_dial_back,
            wire.decode_dial_back,
        ),
        "DialedBack": (
            wire.DialedBack("10.0.0.5", "closed"),
            wire.encode_dialed_back,
            wire.decode_dialed_back,
        ),
        "Paths": (
            wire.Paths(4001, bytes(32), "machine", "name"),
            wire.encode_paths,
            wire.decode_paths,
        ),
    }
    return found


def added() -> dict[str, Case]:
    """What 1.1 added: votes for checkpoints, carried connections, keys, states, pushes."""
    votes = dataclasses.replace(STATED, wants_checkpoint=True, writes_checkpoint=True)
    resumed = dataclasses.replace(MEMBER, resumes=40, resumes_before=(30, 20))
    there = wire_carried.address_of(B)
    manifest = wire_state.manifest_of(b"0123456789", 4)
    news = wire_state.StateNews(frozenset({0, 2}), (A, B), (1,))
    push = pushes.Push(
        weight=0.5, clock=3, progress=1 << 40, epoch=3 << 32, life=17, part=1, parts=4
    )
    parameters = dataclasses.replace(push, versions=VersionVector({1 << 63: 40, 5: 2}))
    made = wire_keys.TokenMade(bytes(range(PUBLIC_BYTES)), Role.VIEWER, 1_900_000_000, 3)
    record = wire_keys.Record(b"body", b"signature")
    request = wire.SetRequest('{"algorithm":"wagma"}', "a test")
    envelopes: dict[str, Case] = {
        name: (wire.Envelope(A, "digest", said), wire.encode_envelope, wire.decode_envelope)
        for name, said in (
            ("Grant with votes", m.Grant(TICKET, votes)),
            ("Ping with checkpoints", m.Ping(12, (resumed,))),
        )
    }
    chunk = wire.encode_chunk, wire.decode_chunk
    carried = wire_carried
    return envelopes | {
        "StateOpening of a snapshot": (
            wire.Chunk(opening=wire.StateOpening("digest", A, 3, 4, 1, manifest.digest)),
            *chunk,
        ),
        "StateManifest": (manifest, wire_state.encode_manifest, wire_state.decode_manifest),
        "StateRequest": (2, wire_state.encode_request, _request),
        "StateRequest of news": (None, wire_state.encode_request, _request),
        "StateNews": (
            news,
            lambda said: wire_state.encode_news(said, 3),
            lambda data: wire_state.decode_news(data, 3),
        ),
        "Push": (push, pushes.encode_push, pushes.decode_push),
        "Push of parameters": (parameters, pushes.encode_push, pushes.decode_push),
        "Registering": (
            carried.Registering(there, b"certificate", 1500, 7),
            carried.encode_registering,
            carried.decode_registering,
        ),
        "Wanted": (
            carried.Wanted(bytes(range(16)), True, 7, True),
            carried.encode_wanted,
            carried.decode_wanted,
        ),
        "Carrying": (
            carried.Carrying(b"", there, True),
            carried.encode_carrying,
            carried.decode_carrying,
        ),
        "Carried": (b"bytes", carried.encode_carried, carried.decode_carried),
        "ReachRequest": (there, carried.encode_reach, carried.decode_reach),
        "ReachReply": (
            carried.ReachReply(b"certificate", 1500, 2),
            carried.encode_reach_reply,
            carried.decode_reach_reply,
        ),
        "SetRequest": (request, wire.encode_set, wire.decode_set),
        "SetReply": (
            wire.SetReply("no", "wagma", 3 << 32),
            wire.encode_set_reply,
            wire.decode_set_reply,
        ),
        "KeyFact": (made, wire_keys.encode_fact, wire_keys.decode_fact),
        "EnrolRequest": (
            wire_keys.EnrolRequest(bytes(range(PUBLIC_BYTES)), B),
            wire_keys.encode_enrol_request,
            wire_keys.decode_enrol_request,
        ),
        "EnrolReply": (
            wire_keys.EnrolReply(b"calls", b"answers", bytes(32), (record,), (MEMBER.address,)),
            wire_keys.encode_enrol_reply,
            wire_keys.decode_enrol_reply,
        ),
        "KeyRecords": (
            (bytes(16), (record,)),
            lambda said: wire_keys.encode_records(*said),
            wire_keys.decode_records,
        ),
        "KeyCommand": (
            wire_keys.WantToken(Role.VIEWER, 3600, 2),
            wire_keys.encode_command,
            wire_keys.decode_command,
        ),
        "KeyAnswer": (
            wire_keys.Answer("token", "a line"),
            wire_keys.encode_answer,
            wire_keys.decode_answer,
        ),
    }


def _request(data: bytes) -> int | None:
    return wire_state.decode_request(data, 3)


VERSIONS = {"1.0": first, "1.1": added}


def examples() -> dict[str, Case]:
    """Of all versions."""
    return {name: case for version in VERSIONS.values() for name, case in version().items()}


def plain(value: Any) -> Any:
    """A value as JSON has it, with the names of its fields."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [plain(one) for one in value]
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, (bytes, memoryview)):
        return bytes(value).hex()
    return value


def recorded(version: str) -> dict[str, Any]:
    return {
        name: {"bytes": encode(value).hex(), "says": plain(value)}
        for name, (value, encode, _) in VERSIONS[version]().items()
    }


if __name__ == "__main__":
    with Path(sys.argv[2]).open("x", encoding="utf-8") as file:
        json.dump(recorded(sys.argv[1]), file, indent=1)
        file.write("\n")
