"""What a release has said stays readable, and what we say is readable for it: protocol 1.0."""

import asyncio
import json
from pathlib import Path

import pytest

from p2ptrain.core.effects import Outcome
from p2ptrain.errors import CodecError
from p2ptrain.net import wire
from p2ptrain.net.wire import UnknownMessage
from tests.helpers.recorded import examples, plain
from tests.helpers.worlds import build

RECORDED = json.loads((Path(__file__).parent / "protocol_1_0.json").read_text())
LATER = bytes([0xC2, 0x3E, 3]) + b"new"
"""A field of number 1000, which this version does not know."""


def includes(now: object, then: object) -> bool:
    """True if all that was said then is said now; there may be more."""
    if isinstance(then, dict) and isinstance(now, dict):
        return all(key in now and includes(now[key], value) for key, value in then.items())
    if isinstance(then, list) and isinstance(now, list):
        return len(now) == len(then) and all(map(includes, now, then))
    return now == then


def test_all_that_is_said_today_was_recorded():
    assert set(examples()) == set(RECORDED), "record what is new for the next minor version"


@pytest.mark.parametrize("name", RECORDED)
def test_what_was_said_is_understood(name):
    _, _, decode = examples()[name]
    record = RECORDED[name]
    assert includes(plain(decode(bytes.fromhex(record["bytes"]))), record["says"])


@pytest.mark.parametrize("name", RECORDED)
def test_what_we_say_is_what_was_said(name):
    value, encode, _ = examples()[name]
    assert encode(value).hex() == RECORDED[name]["bytes"]


@pytest.mark.parametrize("name", sorted(set(RECORDED) - {"Chunk", "Opening", "StateOpening"}))
def test_a_field_of_a_later_minor_version_is_ignored(name):
    value, encode, decode = examples()[name]
    assert decode(encode(value) + LATER) == value


def test_a_message_of_a_later_minor_version_is_told_from_garbage():
    later = wire.encode_envelope(examples()["Ping"][0])
    source_and_swarm = later[: later.index(b"digest") + len(b"digest")]
    with pytest.raises(UnknownMessage):
        wire.decode_envelope(source_and_swarm + LATER)
    with pytest.raises(CodecError) as caught:
        wire.decode_envelope(source_and_swarm)
    assert not isinstance(caught.value, UnknownMessage)


async def test_two_minor_versions_train_together(monkeypatch):
    """Every message has a field more than we know, and half of the peers say that they are 1.1."""
    say, greet, reply = wire.encode_envelope, wire.encode_hello, wire.encode_join_reply

    def greeted(hello: wire.Hello) -> bytes:
        minor = int(hello.me.peer[-1]) % 2
        data = greet(wire.replace(hello, protocol=(wire.PROTOCOL_MAJOR, minor)))
        return data + LATER if minor else data

    monkeypatch.setattr(wire, "encode_hello", greeted)
    monkeypatch.setattr(wire, "encode_envelope", lambda envelope: say(envelope) + LATER)
    monkeypatch.setattr(wire, "encode_join_reply", lambda told: reply(told) + LATER)
    world = await build(4, "ad_psgd")
    await asyncio.sleep(1.0)
    (first, *others) = world.peers.values()
    result = await first.swarm.form([other.driver.name for other in others[:1]])
    assert result.outcome is Outcome.DONE
    await world.close()
