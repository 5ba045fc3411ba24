"""Check and convert the parts that messages share: names, numbers, tickets, contributions, ...

Each function takes a decoded value and returns it, or raises `CodecError` with one sentence.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from p2ptrain.core.contribution import Contribution
from p2ptrain.errors import CodecError
from p2ptrain.ids import Address, PeerId, Ticket
from p2ptrain.net._pb import peer_pb2 as pb

MAX_NAME = 128
MAX_MEMBERS = 4096
MAX_NUMBER = 1 << 62
MAX_MASK_BYTES = 1 << 17
"""One bit for each of a million parameters."""
MAX_WEIGHT = 1 << 40
MAX_SETTINGS = 256
MAX_SETTING = 300

T = TypeVar("T")


def ticket_to_pb(ticket: Ticket) -> Any:  # Any: a generated class
    return pb.Ticket(
        initiator=ticket.initiator,
        incarnation=ticket.incarnation,
        number=ticket.number,
        attempt=ticket.attempt,
    )


def ticket_of(p: Any) -> Ticket:  # Any: a generated class
    initiator, attempt = name_of(p.initiator), number(p.attempt)
    return Ticket(initiator, number(p.incarnation), number(p.number), attempt)


def contribution_to_pb(stated: Contribution) -> Any:  # Any: a generated class
    return pb.Contribution(
        weight=stated.weight,
        usual=stated.usual,
        samples=stated.samples,
        wants_to_end=stated.wants_to_end,
        gradient_mask=stated.gradient_mask,
        rule=stated.rule,
        progress=min(stated.progress, MAX_NUMBER),  # of sums of what others claim
        begun=stated.begun,
        together=stated.together,
        history=stated.history,
        outer_steps=stated.outer_steps,
        speed=min(stated.speed, MAX_NUMBER),
        wants_checkpoint=stated.wants_checkpoint,
        writes_checkpoint=stated.writes_checkpoint,
    )


def contribution_of(p: Any) -> Contribution:  # Any: a generated class
    if len(p.gradient_mask) > MAX_MASK_BYTES:
        raise CodecError(f"gradients of {8 * len(p.gradient_mask)} parameters")
    return Contribution(
        weight=at_most(MAX_WEIGHT, p.weight, "a weight"),
        usual=at_most(MAX_WEIGHT, p.usual, "a weight"),
        samples=number(p.samples),
        wants_to_end=p.wants_to_end,
        gradient_mask=p.gradient_mask,
        rule=p.rule,
        progress=number(p.progress),
        begun=p.begun,
        together=p.together,
        history=p.history,
        outer_steps=number(p.outer_steps),
        speed=number(p.speed),
        wants_checkpoint=p.wants_checkpoint,
        writes_checkpoint=p.writes_checkpoint,
    )


def group_of(names: Sequence[str]) -> tuple[PeerId, ...]:
    group = tuple(name_of(name) for name in names)
    if not 0 < len(group) <= MAX_MEMBERS or list(group) != sorted(set(group)):
        raise CodecError(f"a group of {len(group)} members that are not sorted or not distinct")
    return group


def name_of(text: str) -> PeerId:
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


def number(value: int) -> int:
    if not 0 <= value <= MAX_NUMBER:
        raise CodecError(f"a number out of range: {value}")
    return value


def at_most(most: int, value: int, what: str) -> int:
    if not 0 <= value <= most:
        raise CodecError(f"{what} out of range: {value}")
    return value


def measure(value: float) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise CodecError(f"a measure that cannot be one: {value}")
    return value


def text_of(text: str, longest: int) -> str:
    if len(text) > longest:
        raise CodecError(f"a text of {len(text)} characters where {longest} are allowed")
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else "?" for c in text)


def settings_to_pb(settings: Mapping[str, str]) -> list[Any]:  # Any: a generated class
    return [pb.Setting(name=name, value=value) for name, value in settings.items()]


def settings_of(packed: Sequence[Any]) -> dict[str, str]:  # Any: a generated class
    if len(packed) > MAX_SETTINGS:
        raise CodecError(f"{len(packed)} settings; at most {MAX_SETTINGS} are allowed")
    return {text_of(p.name, MAX_SETTING): text_of(p.value, MAX_SETTING) for p in packed}


def parse(kind: type[T], data: bytes) -> T:
    packed: Any = kind()  # Any: a generated class
    try:
        packed.ParseFromString(data)
    except DecodeError as error:
        raise CodecError(f"{len(data)} bytes that are not a {kind.__name__}") from error
    return packed  # type: ignore[no-any-return]


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_varint(data: bytes, start: int) -> tuple[int, int]:
    value = 0
    for index in range(5):
        if start + index >= len(data):
            break
        byte = data[start + index]
        value |= (byte & 0x7F) << (7 * index)
        if not byte & 0x80:
            return value, start + index + 1
    raise CodecError("a chunk whose length cannot be read")
