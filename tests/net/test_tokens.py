"""Tokens and facts about keys: what is written is read again, and what is wrong is one sentence."""

import os
import stat

import pytest

from p2ptrain.errors import CodecError, ConfigError, RefusedError
from p2ptrain.ids import Address, PeerId
from p2ptrain.net import wire_keys as wire
from p2ptrain.net.certificates import Role, check_signature, fingerprint, shown_by
from p2ptrain.net.enrolment import found, token_command
from p2ptrain.net.keyring import MAX_TOKENS, Keyring
from p2ptrain.net.tokens import JoinToken, SwarmKey, parse, read_file, write_file
from p2ptrain.net.wire_keys import Record, Revoked, SignersLimited, TokenMade, TokenUsed, TokenVoid

KEY = SwarmKey(bytes(range(32)))
PUBLIC = KEY.authority.public
TOKEN = JoinToken(bytes(16), PUBLIC)
NAME = PeerId("p01")
FACTS = [
    TokenMade(TOKEN.authority.public, Role.VIEWER, 77, 3),
    TokenUsed(TOKEN.id, NAME),
    TokenVoid(TOKEN.id),
    Revoked(PeerId("päär")),
    SignersLimited((NAME, PeerId("p02"))),
]


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def ring(key: SwarmKey | None = KEY) -> tuple[Keyring, Clock]:
    clock = Clock()
    return Keyring(PUBLIC, clock, key), clock


# --- tokens ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [TOKEN, KEY])
def test_a_token_is_one_word_that_is_read_again(token, tmp_path):
    assert str(token).isascii()
    assert len(str(token).split()) == 1
    assert parse(f" {token}\n") == token
    path = str(tmp_path / "token")
    write_file(path, token)
    assert read_file(path) == token
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    with pytest.raises(ConfigError, match="File exists"):
        write_file(path, token)


def test_a_token_that_is_none_is_one_sentence_that_does_not_show_it():
    whole = str(TOKEN)
    for wrong in ("", "secret", whole[:-1], whole[:-9], f"{whole}a", whole[:9] + "zz" + whole[11:]):
        with pytest.raises(ConfigError) as caught:
            parse(wrong)
        assert "\n" not in str(caught.value)
        assert whole[6:20] not in str(caught.value)
    with pytest.raises(ConfigError, match="characters that none has"):
        parse("join-0189")
    with pytest.raises(ConfigError, match="`p2ptrain keys new FILE` makes one"):
        read_file("/nowhere/token")


def test_keys_of_one_secret_and_two_purposes_have_nothing_to_do_with_each_other():
    assert KEY.authority.public == SwarmKey(KEY.seed).authority.public
    assert JoinToken(KEY.seed, PUBLIC).authority.public != PUBLIC


def test_a_certificate_says_who_signed_it_for_whom():
    name = PeerId("ü" * 128)
    pem = KEY.authority.certificate(PUBLIC, 2e9, name=name)
    assert shown_by(pem) == shown_by(pem)
    shown = shown_by(pem)
    assert (shown.issuer, shown.name, shown.role) == (fingerprint(PUBLIC), name, Role.MEMBER)
    assert shown_by(KEY.authority.certificate(PUBLIC, 2e9)).name == "", "it names no one"
    with pytest.raises(CodecError):
        shown_by(b"nothing")


# --- facts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fact", FACTS)
def test_a_fact_is_read_as_it_was_written(fact):
    assert wire.decode_fact(wire.encode_fact(fact)) == fact


@pytest.mark.parametrize(
    "command", [wire.Show(), wire.WantToken(Role.VIEWER, 60, 0), wire.Revoke(NAME), wire.Rotate()]
)
def test_a_command_is_read_as_it_was_written(command):
    assert wire.decode_command(wire.encode_command(command)) == command


def test_requests_and_replies_are_read_as_they_were_written():
    request = wire.EnrolRequest(PUBLIC, NAME)
    assert wire.decode_enrol_request(wire.encode_enrol_request(request)) == request
    records = (Record(b"body", b"signature"),)
    full = wire.EnrolReply(b"calls", b"answers", KEY.seed, records, ())
    for reply in (full, wire.EnrolReply(elsewhere=(Address("h:1"),))):
        assert wire.decode_enrol_reply(wire.encode_enrol_reply(reply)) == reply
    assert wire.decode_records(wire.encode_records(bytes(16), records)) == (bytes(16), records)
    answer = wire.Answer("join-x", "one\ntwo")
    assert wire.decode_answer(wire.encode_answer(answer)) == answer


def test_bytes_that_are_out_of_bounds_do_not_decode():
    many = (Record(b"", b""),) * (wire.MAX_RECORDS + 1)
    large = (Record(bytes(wire.MAX_BODY_BYTES + 1), b""),)
    for data, decode in (
        (wire.encode_records(bytes(16), many), wire.decode_records),
        (wire.encode_records(bytes(16), large), wire.decode_records),
        (wire.encode_records(bytes(15), ()), wire.decode_records),
        (wire.encode_enrol_request(wire.EnrolRequest(bytes(32), NAME)), wire.decode_enrol_request),
        (wire.encode_enrol_reply(wire.EnrolReply(bytes(5000))), wire.decode_enrol_reply),
        (wire.encode_enrol_reply(wire.EnrolReply(seed=bytes(5))), wire.decode_enrol_reply),
        (wire.encode_enrol_reply(wire.EnrolReply(elsewhere=("h:1",) * 9)), wire.decode_enrol_reply),
        (wire.encode_fact(TokenVoid("short")), wire.decode_fact),
        (wire.encode_fact(TokenMade(PUBLIC, Role.MEMBER, 1, wire.MAX_USES + 1)), wire.decode_fact),
        (wire.encode_fact(SignersLimited(())), wire.decode_fact),
        (b"", wire.decode_fact),
        (b"", wire.decode_command),
        (b"\xff", wire.decode_answer),
    ):
        with pytest.raises(CodecError):
            decode(data)


# --- the keyring ----------------------------------------------------------------------------------


def test_members_come_to_know_the_same_in_whatever_order_they_hear_it():
    one, _ = ring()
    token = one.make_token(Role.MEMBER)
    one.state(TokenUsed(token.id, NAME))
    one.state(Revoked(PeerId("p02")))
    other, _ = ring(None)
    assert other.learn(reversed(one.records))
    assert not other.learn(one.records), "nothing is new"
    assert other.digest == one.digest
    assert (other.users(token.id), other.revoked) == ((NAME,), (PeerId("p02"),))
    assert other.roots == one.roots


def test_only_who_has_the_key_states_facts():
    member, _ = ring(None)
    with pytest.raises(RefusedError, match="does not have the swarm's key"):
        member.make_token(Role.MEMBER)
    body = wire.encode_fact(Revoked(NAME))
    forged = SwarmKey(bytes(32)).authority.sign(body)
    with pytest.raises(CodecError, match="has not signed"):
        member.learn([Record(body, forged)])
    assert not member.is_revoked(NAME)
    check_signature(PUBLIC, body, KEY.authority.sign(body))


def test_a_token_ends_with_its_time_and_is_forgotten():
    one, clock = ring()
    token = one.make_token(Role.MEMBER, lasts_s=60)
    one.state(TokenUsed(token.id, NAME))
    before = one.records
    assert one.has_uses(token.id)
    clock.now += 61
    assert not one.has_uses(token.id)
    assert one.records == ()
    assert not one.learn(before[1:]) or one.tokens == {}


def test_a_token_is_counted_by_names():
    one, _ = ring()
    token = one.make_token(Role.MEMBER, uses=1)
    assert one.has_uses(token.id, NAME)
    one.state(TokenUsed(token.id, NAME))
    assert one.has_uses(token.id, NAME), "a peer that starts again"
    assert not one.has_uses(token.id, PeerId("p02"))


def test_rotation_makes_all_tokens_void():
    one, _ = ring()
    for _ in range(MAX_TOKENS):
        one.make_token(Role.VIEWER)
    with pytest.raises(RefusedError, match="`p2ptrain keys rotate` makes all of them void"):
        one.make_token(Role.MEMBER)
    left = one.rotate()
    assert list(one.tokens) == [left.id]


def test_who_founds_a_swarm_is_among_its_signers():
    with pytest.raises(ConfigError, match=r"signers = \['p02'\] must have p01"):
        found(NAME, Clock(), signers=["p02"])
    ring = found(NAME, Clock(), signers=["p01"]).keyring
    assert ring.may_sign("p01")
    assert not ring.may_sign("p02")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"expires": "soon"}, "is no time; write 30m, 1h or 7d"),
        ({"expires": "0h"}, "would be over at once"),
        ({"uses": 5000}, "must be between 0"),
        ({"uses": 2, "viewer": True}, "counts peers that join"),
    ],
)
def test_a_token_that_cannot_be_is_one_sentence(given, said):
    with pytest.raises(ConfigError, match=said):
        token_command(**({"viewer": False, "expires": "1h", "uses": 0} | given))


def test_times_are_read():
    assert token_command(viewer=True, expires="30m", uses=0).lasts_s == 1800
