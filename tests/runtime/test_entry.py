"""What a peer needs before it listens, and what it is told if that would be open to strangers."""

import sys
from types import SimpleNamespace

import pytest

from p2ptrain import cli
from p2ptrain.core.messages import Member
from p2ptrain.errors import ConfigError, RefusedError
from p2ptrain.ids import Address, PeerId
from p2ptrain.net import wire_keys as wire
from p2ptrain.net.enrolment import found
from p2ptrain.net.grpc_config import GrpcConfig
from p2ptrain.net.tls import Plain, SwarmTls
from p2ptrain.net.tokens import JoinToken, SwarmKey, parse, read_file, write_file
from p2ptrain.runtime.entry import asking_with, enter, keyring_of, welcome
from p2ptrain.runtime.keys import KeyCare
from p2ptrain.runtime.settings import PeerConfig

NAME, OTHER = PeerId("p01"), PeerId("p02")
BEYOND = "192.0.2.1:4000"
KEY = SwarmKey(bytes(32))


def clock() -> float:
    return 1e9


async def entered(**settings):
    return await enter(PeerConfig(**settings), NAME, clock)


async def test_on_loopback_only_our_own_user_is_answered():
    for listen in ("127.0.0.1:0", "localhost:0", "[::1]:0", "127.0.0.9:1"):
        assert (await entered(listen=listen)).security == Plain(only_ours=True)


async def test_the_first_peer_beyond_founds_a_swarm_and_says_how_to_join_it():
    entry = await entered(listen=BEYOND)
    assert isinstance(entry.security, SwarmTls)
    assert entry.token
    said = welcome(Address(BEYOND), entry.token)
    assert parse(said.split()[-1]) == entry.token
    assert entry.security.keyring.tokens
    assert asking_with(entry, GrpcConfig()).security().is_encrypted


async def test_joining_beyond_takes_a_token_or_says_insecure():
    with pytest.raises(ConfigError, match="joining takes a token: give the one that the first"):
        await entered(listen=BEYOND, join=("192.0.2.2:4000",))
    with pytest.raises(ConfigError, match="a join token lets into a swarm that is there"):
        await entered(listen=BEYOND, token=str(JoinToken.make(KEY.authority.public)))
    entry = await entered(listen=BEYOND, join=("192.0.2.2:4000",), insecure=True)
    assert entry.security == Plain()
    assert entry.warning.startswith("warning: insecure: plain text on 192.0.2.1:4000")
    assert not (await entered(insecure=True)).warning


async def test_who_has_the_key_of_the_swarm_signs_itself(tmp_path):
    path = str(tmp_path / "swarm.key")
    write_file(path, KEY)
    network = GrpcConfig(token_file=path)
    first = keyring_of(await entered(listen=BEYOND, network=network))
    other = keyring_of(await enter(PeerConfig(listen=BEYOND, token=str(KEY)), OTHER, clock))
    assert first
    assert other
    assert first.keyring.swarm == other.keyring.swarm
    assert first.admit("Move", Shows(other.identity.calls)).name == OTHER


class Shows:
    def __init__(self, certificate: bytes) -> None:
        self._certificate = certificate

    def auth_context(self):
        return {"x509_pem_cert": [self._certificate]}


def test_a_token_may_stand_among_the_addresses():
    token = str(JoinToken.make(KEY.authority.public))
    config = PeerConfig(join=("10.0.0.5:4000", token))
    assert config.join == ("10.0.0.5:4000",)
    assert config.network.token == token
    with pytest.raises(ConfigError, match="give one"):
        PeerConfig(join=("10.0.0.5:4000", token), token=token)


def test_settings_that_contradict_each_other_are_named():
    token = str(KEY)
    with pytest.raises(ConfigError, match="token and token_file are given"):
        GrpcConfig(token=token, token_file="x")
    with pytest.raises(ConfigError, match="a token and insecure are given"):
        GrpcConfig(token=token, insecure=True)


def test_keys_new_makes_a_file_once(tmp_path, monkeypatch, capsys):
    path = tmp_path / "swarm.key"

    def run(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["p2ptrain", "keys", *words])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return caught.value.code

    assert run("new", str(path)) == 0
    key = read_file(str(path))
    assert isinstance(key, SwarmKey)
    assert run("new", str(path)) == 2
    assert "File exists" in capsys.readouterr().err
    assert run("new", "--keep", str(path)) == 0
    assert read_file(str(path)) == key
    for command in (["show"], ["token"], ["revoke"], ["rotate"]):
        name = ["p02"] if command == ["revoke"] else []
        assert run(*command, "127.0.0.1:1", *name) == 2
        assert "error: give --token or --token-file" in capsys.readouterr().err
    assert run("revoke", "127.0.0.1:1", "p 2", "--token", str(key)) == 2
    assert "a peer's name that cannot be one" in capsys.readouterr().err


# --- care of keys ---------------------------------------------------------------------------------


class FakeSwarm:
    """A driver and a transport of one member, whose calls go to the other's keyring."""

    def __init__(self, security: SwarmTls, others: list[Member]) -> None:
        self.name = NAME
        self.security = security
        self.machine = SimpleNamespace(
            membership=SimpleNamespace(others=others), receive=self._receive
        )
        self.environment = SimpleNamespace(unix_clock=lambda: self.now)
        self.metrics = SimpleNamespace(record=lambda kind, **more: self.records.append(more))
        self.now = clock()
        self.records: list[dict] = []
        self.heard: list[object] = []
        self.expelled: list[str] = []
        self.forgotten: list[str] = []
        self.failure: Exception | None = None
        self.told: list[str] = []

    def _receive(self, source, message, now) -> None:
        self.heard.append((source, message))

    def pump(self) -> None:
        pass

    def fail(self, error) -> None:
        self.failure = error

    def expel(self, name) -> None:
        self.expelled.append(name)

    def forget(self, address) -> None:
        self.forgotten.append(address)

    async def ask_keys(self, address, method, data, timeout_s) -> bytes:
        digest, records = wire.decode_records(data)
        self.told.append(address)
        self.other.keyring.learn(records)
        ours = self.other.keyring.digest
        return wire.encode_records(ours, () if ours == digest else self.other.keyring.records)


def caring(names=(OTHER,)) -> tuple[FakeSwarm, KeyCare]:
    others = [Member(peer=n, address=Address(f"{n}:1"), incarnation=1) for n in names]
    swarm = FakeSwarm(found(NAME, clock, key=KEY), others)
    swarm.other = found(OTHER, clock, key=KEY)
    return swarm, KeyCare(swarm, swarm, swarm.security, 100.0)


async def test_news_reach_all_members_and_come_back():
    names = tuple(PeerId(f"q{number}") for number in range(40))
    swarm, care = caring(names)
    swarm.security.keyring.state(wire.Revoked(PeerId("away")))
    await care._spread()
    assert {address.rpartition(":")[0] for address in swarm.told} == set(names)
    assert swarm.other.keyring.is_revoked("away")
    swarm.told.clear()
    swarm.other.keyring.state(wire.Revoked(PeerId("elsewhere")))
    await care._spread()
    assert len(swarm.told) == 1, "one per round where nothing is new"
    assert swarm.security.keyring.is_revoked("elsewhere")


async def test_a_revoked_member_is_expelled_once_and_counts_as_one_that_left():
    swarm, care = caring()
    swarm.security.keyring.state(wire.Revoked(OTHER))
    care._expel()
    care._expel()
    assert swarm.expelled == [OTHER]
    assert swarm.forgotten[0] == "p02:1"
    source, message = swarm.heard[0]
    assert (source, message.members[0].state.name) == (OTHER, "LEFT")
    assert swarm.failure is None


async def test_who_is_revoked_itself_ends_with_a_sentence():
    swarm, care = caring()
    swarm.security.keyring.state(wire.Revoked(NAME))
    care._expel()
    assert isinstance(swarm.failure, RefusedError)
    assert "p01 is no member any more: its name was revoked" in str(swarm.failure)


async def test_certificates_are_renewed_when_half_of_their_time_is_over():
    swarm, care = caring()
    before = swarm.security.identity
    await care._maybe_renew()
    assert swarm.security.identity is before
    swarm.now = before.until_s - 49
    await care._maybe_renew()
    assert swarm.security.identity.until_s == swarm.now + 100
    assert swarm.security.identity.calls != before.calls
