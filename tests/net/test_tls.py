"""TLS: who has a certificate of the swarm's CA is let in, nobody else; mistakes are named."""

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from p2ptrain import cli
from p2ptrain.core.messages import Member
from p2ptrain.errors import ConfigError, P2PTrainError, RefusedError, TransportError
from p2ptrain.ids import Address, PeerId
from p2ptrain.net.ask import asking
from p2ptrain.net.grpc_config import GrpcConfig
from p2ptrain.net.grpc_transport import GrpcTransport
from p2ptrain.net.shared_vectors import SharedVectors
from p2ptrain.net.sockets import SocketCaller, SocketStream
from p2ptrain.net.wire import Hello, StateOpening
from tests.helpers.tls import make_swarm, openssl

pytestmark = pytest.mark.sockets

OPENING = StateOpening("swarm", PeerId("a"), 7)


@pytest.fixture(scope="module")
def ours(tmp_path_factory) -> GrpcConfig:
    return make_swarm(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory) -> GrpcConfig:
    return make_swarm(tmp_path_factory.mktemp("tls") / "theirs")


class Echo:
    """Says who it is, and sends back what it hears."""

    def handle_identify(self) -> Hello:
        me = Member(peer=PeerId("a"), address=Address("h:1"), incarnation=1)
        return Hello((1, 0), "ad_psgd", "model", 1, me)

    async def handle_stream(self, opening, stream) -> None:
        while (payload := await stream.receive()) is not None:
            await stream.send(payload)


@asynccontextmanager
async def two(
    one: GrpcConfig, other: GrpcConfig
) -> AsyncIterator[tuple[GrpcTransport, GrpcTransport, Address]]:
    """Two transports, and the address of the other one."""
    a, b = (GrpcTransport("127.0.0.1:0", config=config) for config in (one, other))
    await a.start(Echo())
    try:
        yield a, b, await b.start(Echo())
    finally:
        for transport in (a, b):
            await transport.close(0.1)


async def echo(a: GrpcTransport, address: Address) -> type:
    stream = await a.open(address, OPENING)
    await stream.send(memoryview(b"there and back"), last=True)
    assert bytes(await stream.receive() or b"") == b"there and back"
    assert await stream.receive() is None
    return type(stream)


async def test_peers_of_one_ca_talk_and_exchange_chunks(ours):
    async with two(ours, ours) as (a, _, address):
        assert (await a.identify(address, 5.0)).me.peer == "a"
        await echo(a, address)
        async with asking(address, ours) as asker:
            assert (await asker.identify(5.0)).me.peer == "a"


async def test_peers_of_one_machine_share_memory(ours):
    async with two(replace(ours, data="memory"), ours) as (a, _, address):
        assert await echo(a, address) is SocketStream


async def test_peers_of_two_machines_use_sockets_that_are_encrypted(ours, monkeypatch):
    monkeypatch.setattr("p2ptrain.net.grpc_link.this_machine", lambda: "another")
    async with two(replace(ours, data="sockets"), ours) as (a, b, address):
        assert await echo(a, address) is SocketStream
        assert b._sockets
        paths = b._sockets.paths
        stranger = SocketCaller(paths, "127.0.0.1", SharedVectors(), near=False)
        await stranger.connect()  # and what it says in plain text is no greeting of TLS
        stream = await stranger.open(OPENING, address)
        with pytest.raises(TransportError):
            await stream.receive()
        stranger.close()


async def test_sockets_do_not_talk_to_a_certificate_of_another_ca(ours, theirs):
    async with two(ours, ours) as (_, b, _):
        assert b._sockets
        way = {"near": False, "security": theirs.security()}
        stranger = SocketCaller(b._sockets.paths, "127.0.0.1", SharedVectors(), **way)
        with pytest.raises(TransportError, match="no socket to"):
            await stranger.connect()


async def test_a_peer_of_another_ca_is_refused_both_ways(ours, theirs):
    sentence = r"shows no certificate of our swarm's CA; start both peers with a token"
    for one, other in ((ours, theirs), (theirs, ours)):
        async with two(one, other) as (a, _, address):
            with pytest.raises(RefusedError, match=sentence):
                await a.identify(address, 5.0)
            stream = await a.open(address, OPENING)
            with pytest.raises(RefusedError, match=sentence):
                await stream.receive()


async def test_a_stranger_who_believes_our_ca_and_has_no_certificate_of_it_is_refused(
    ours, theirs, monkeypatch
):
    monkeypatch.setattr("p2ptrain.net.tls._shake_hands", lambda *_: None)
    stranger = replace(theirs, tls_ca=ours.tls_ca)
    async with two(stranger, ours) as (a, _, address):
        with pytest.raises(TransportError, match="it does not accept our token or certificate"):
            await a.identify(address, 5.0)


async def test_a_peer_without_tls_is_told_what_it_lacks(ours):
    async with two(GrpcConfig(data="grpc"), ours) as (a, _, address):
        with pytest.raises(TransportError, match="its swarm is encrypted: give a --token"):
            await a.identify(address, 5.0)


async def test_a_peer_with_tls_does_not_talk_to_one_without(ours):
    async with two(ours, GrpcConfig(data="grpc")) as (a, _, address):
        with pytest.raises(RefusedError, match="shows no certificate of our swarm's CA"):
            await a.identify(address, 5.0)


# --- files ----------------------------------------------------------------------------------------


def complaint(config: GrpcConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        config.security()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_file_that_is_not_there_is_named(ours):
    missing = replace(ours, tls_key="/nowhere/p01.key")
    assert (
        complaint(missing) == "cannot read tls_key = '/nowhere/p01.key': No such file or directory"
    )


def test_files_that_are_not_what_they_should_be_are_named(ours, theirs):
    assert "no certificate and its own key" in complaint(replace(ours, tls_key=theirs.tls_key))
    assert "no certificate and its own key" in complaint(replace(ours, tls_cert=ours.tls_key))
    assert "is no certificate in PEM form" in complaint(replace(ours, tls_ca=ours.tls_key))


def test_a_key_with_a_password_asks_nobody_for_it(ours, tmp_path):
    locked = str(tmp_path / "locked.key")
    openssl("ec", "-in", ours.tls_key, "-aes128", "-passout", "pass:secret", "-out", locked)
    assert "without a password" in complaint(replace(ours, tls_key=locked))


def test_a_certificate_that_nobody_would_accept_is_refused_before_anybody_sees_it(
    ours, theirs, tmp_path
):
    said = complaint(replace(ours, tls_ca=theirs.tls_ca))
    assert re.search(r"is not what peers of .* accept \(.*\); let that CA sign one for DNS:", said)
    said = complaint(make_swarm(tmp_path / "other-name", name="example.org"))
    assert "not valid for 'p2ptrain'" in said
    assert "expired" in complaint(make_swarm(tmp_path / "old", days="-1"))


def test_tls_takes_all_three_files():
    with pytest.raises(ConfigError, match="tls_key and tls_ca missing; TLS takes all of"):
        GrpcConfig(tls_cert="p01.pem")


@pytest.mark.parametrize("command", ["peer", "status", "doctor", "health"])
def test_a_bad_file_is_one_sentence_and_exit_code_2(command, ours, monkeypatch, capsys):
    given = ["--tls-cert", ours.tls_cert, "--tls-key", "/nowhere", "--tls-ca", ours.tls_ca]
    address = [] if command == "peer" else ["127.0.0.1:1"]
    monkeypatch.setattr(sys, "argv", ["p2ptrain", command, *address, *given])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert said == "error: cannot read tls_key = '/nowhere': No such file or directory\n"


def test_status_of_a_swarm_with_tls(ours):
    from p2ptrain.console.status import look

    async def story() -> str:
        async with two(ours, ours) as (_, _, address):
            with pytest.raises(P2PTrainError) as caught:  # it answers, in its own words
                await look(address, 5.0, ours)
            return str(caught.value)

    assert asyncio.run(story()) == "this peer is still starting; ask again soon"
