"""What a release has said stays readable, and what we say is readable for it: 1.0 and 1.1."""

import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

from p2ptrain.core.effects import Outcome
from p2ptrain.core.version_vectors import MOST_VERSION
from p2ptrain.errors import CodecError
from p2ptrain.net import wire
from p2ptrain.net._pb import peer_pb2 as pb
from p2ptrain.net.wire import UnknownMessage
from p2ptrain.runtime import pushes
from p2ptrain.runtime.pushes import HEADER
from tests.helpers.recorded import VERSIONS, examples, plain
from tests.helpers.worlds import build

FILES = {
    version: json.loads(
        (Path(__file__).parent / f"protocol_{version.replace('.', '_')}.json").read_text()
    )
    for version in VERSIONS
}
RECORDED = FILES["1.0"] | FILES["1.1"]
OF_FIXED_SIZE = {"Push", "Push of parameters"}
WITHOUT_FIELDS = {"Chunk", "Opening", "StateOpening", "StateOpening of a snapshot"} | OF_FIXED_SIZE
NEW_IN_1_1 = {"resumes_before", "wants_checkpoint", "writes_checkpoint"}
"""Fields of control messages."""

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
    for version, said in VERSIONS.items():
        assert set(said()) == set(FILES[version]), "record what is new for the next minor version"
    assert tuple(map(int, max(VERSIONS).split("."))) == wire.PROTOCOL


@pytest.mark.parametrize("name", RECORDED)
def test_what_was_said_is_understood(name):
    _, _, decode = examples()[name]
    record = RECORDED[name]
    assert includes(plain(decode(bytes.fromhex(record["bytes"]))), record["says"])


@pytest.mark.parametrize("name", RECORDED)
def test_what_we_say_is_what_was_said(name):
    value, encode, _ = examples()[name]
    assert encode(value).hex() == RECORDED[name]["bytes"]


@pytest.mark.parametrize("name", sorted(set(RECORDED) - WITHOUT_FIELDS))
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


@pytest.mark.parametrize("name", sorted(set(RECORDED) - OF_FIXED_SIZE))
def test_what_is_no_such_message_is_refused_in_one_sentence(name):
    _, _, decode = examples()[name]
    with pytest.raises(CodecError) as caught:
        decode(b"\xff\xff\xff" * 20)
    assert 0 < len(str(caught.value)) < 120
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("size", "sentence"),
    [
        (0, "a push without a head"),
        (HEADER.size - 1, "a push without a head"),
        (HEADER.size + 1, "versions of 1 bytes"),
        (HEADER.size + 16 * 300, "versions of 4800 bytes"),
    ],
)
def test_a_push_of_another_version_is_refused_in_one_sentence(size: int, sentence: str):
    _, _, decode = examples()["Push"]
    with pytest.raises(CodecError, match=f"^{sentence}$"):
        decode(bytes(size))


def test_a_history_that_is_too_long_to_be_one_is_refused():
    said = examples()["Push"][1](examples()["Push of parameters"][0])
    with pytest.raises(CodecError, match=r"^version 9007199254740993 of a history$"):
        pushes.decode_push(said[:-8] + (MOST_VERSION + 1).to_bytes(8, "little"))


def without(packed: Any, names: set[str]) -> None:
    """Clear these fields in a message and in all that it holds."""
    for field, value in packed.ListFields():
        if field.name in names:
            packed.ClearField(field.name)
        elif field.type == field.TYPE_MESSAGE:
            for one in [value] if isinstance(value, Message) else value:  # one, or many
                without(one, names)


@pytest.mark.parametrize("algorithm", ["ad_psgd", "allreduce", "wagma"])
async def test_two_minor_versions_train_together(algorithm, monkeypatch):
    """p0 and p2 say 1.0 and nothing newer; p1 and p3 say 1.1, and a field more than that."""
    say, greet, reply = wire.encode_envelope, wire.encode_hello, wire.encode_join_reply

    def is_old(name: str) -> bool:
        return name in ("p0", "p2")

    def greeted(hello: wire.Hello) -> bytes:
        if not is_old(hello.me.peer):
            return greet(hello) + LATER
        packed = pb.Hello.FromString(greet(wire.replace(hello, protocol=(1, 0))))
        without(packed, NEW_IN_1_1)
        return packed.SerializeToString()

    def said(envelope: wire.Envelope) -> bytes:
        if not is_old(envelope.source):
            return say(envelope) + LATER
        packed = pb.Envelope.FromString(say(envelope))
        without(packed, NEW_IN_1_1)
        return packed.SerializeToString()

    monkeypatch.setattr(wire, "encode_hello", greeted)
    monkeypatch.setattr(wire, "encode_envelope", said)
    monkeypatch.setattr(wire, "encode_join_reply", lambda told: reply(told) + LATER)
    world = await build(4, algorithm)
    await world.train(8, lambda _: 0.05)
    for peer in world.peers.values():
        assert peer.replica.updates >= 8
        assert Outcome.DONE in {group["outcome"] for group in peer.metrics.of("group")}
    await world.close()
