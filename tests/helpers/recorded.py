"""One example of everything that peers say, as its bytes: what a released protocol is held to.

``python -m tests.helpers.recorded FILE`` records the present protocol, for the day of a release. A
file that is there is not changed: a field that is added later must not change these bytes.
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
from p2ptrain.ids import Address, PeerId, Ticket
from p2ptrain.net import wire

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


def examples() -> dict[str, tuple[Any, Callable[[Any], bytes], Callable[[bytes], Any]]]:
    """What is said, how it is written, and how it is read; by name."""
    found: dict[str, tuple[Any, Callable[[Any], bytes], Callable[[bytes], Any]]] = {
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


def plain(value: Any) -> Any:
    """A value as JSON has it, with the names of its fields."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, (bytes, memoryview)):
        return bytes(value).hex()
    return value


def recorded() -> dict[str, Any]:
    return {
        name: {"bytes": encode(value).hex(), "says": plain(value)}
        for name, (value, encode, _) in examples().items()
    }


if __name__ == "__main__":
    with Path(sys.argv[1]).open("x", encoding="utf-8") as file:
        json.dump(recorded(), file, indent=1)
        file.write("\n")
