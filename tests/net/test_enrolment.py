"""Peers with tokens, over real connections: who has none, a bad one, or is revoked gets nothing."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from p2ptrain.core.messages import Arrive, Member
from p2ptrain.errors import P2PTrainError, RefusedError, TransportError
from p2ptrain.ids import Address, PeerId
from p2ptrain.net import loopback, probe
from p2ptrain.net import wire_keys as wire
from p2ptrain.net.ask import asking
from p2ptrain.net.certificates import Role
from p2ptrain.net.enrolment import command, enrol, found, renewed
from p2ptrain.net.grpc_config import GrpcConfig
from p2ptrain.net.grpc_transport import GrpcTransport
from p2ptrain.net.key_service import KeyService
from p2ptrain.net.tls import Plain, Security, SwarmTls
from p2ptrain.net.tokens import JoinToken, SwarmKey
from p2ptrain.net.wire import Envelope, Hello, StateOpening
from p2ptrain.net.wire_keys import Revoked

pytestmark = pytest.mark.sockets

FIRST, SECOND = PeerId("first"), PeerId("second")
SOON_S = 5.0


@dataclass
class Here:
    """One peer's transport, and what came in."""

    name: PeerId
    security: Security
    transport: GrpcTransport
    address: Address = field(default_factory=lambda: Address(""))
    heard: list[Envelope] = field(default_factory=list)
    streams: list[str] = field(default_factory=list)

    def handle_identify(self) -> Hello:
        me = Member(peer=self.name, address=Address("h:1"), incarnation=1)
        return Hello((1, 0), "ad_psgd", "model", 4104, me)

    def handle_message(self, envelope: Envelope) -> None:
        self.heard.append(envelope)

    def handle_broken(self, address, why) -> None:
        pass

    async def handle_stream(self, opening, stream) -> None:
        self.streams.append("open")
        try:
            while (payload := await stream.receive()) is not None:
                await stream.send(payload)
        finally:
            self.streams.append("closed")

    @property
    def keyring(self):
        assert isinstance(self.security, SwarmTls)
        return self.security.keyring


@asynccontextmanager
async def listening(name: PeerId, security: Security, data: str = "auto") -> AsyncIterator[Here]:
    keys = KeyService(security, time.time) if isinstance(security, SwarmTls) else None
    config = GrpcConfig(data=data)
    transport = GrpcTransport("127.0.0.1:0", config=config, security=security, keys=keys)
    here = Here(name, security, transport)
    here.address = await transport.start(here)
    try:
        yield here
    finally:
        await transport.close(0.1)


@asynccontextmanager
async def two(data: str = "auto") -> AsyncIterator[tuple[Here, Here, JoinToken]]:
    """The first peer of a swarm, one that joined it, and the token."""
    async with listening(FIRST, found(FIRST, time.time), data) as first:
        token = first.keyring.make_token(Role.MEMBER)
        security = await enrol(token, [first.address], SECOND, SOON_S, time.time)
        async with listening(SECOND, security, data) as second:
            yield first, second, token


async def read_all(stream) -> None:
    while True:
        await stream.receive()


async def why_not(token: JoinToken, address: Address, name: str = "third") -> str:
    with pytest.raises(P2PTrainError) as caught:
        await enrol(token, [address], PeerId(name), SOON_S, time.time)
    said = str(caught.value)
    assert "\n" not in said
    assert not any(secret in said for secret in ("first", "second", "4104"))
    return said


async def test_who_joins_by_a_token_talks_and_moves_chunks_and_may_let_others_in():
    async with two("sockets") as (first, second, token):
        assert (await second.transport.identify(first.address, SOON_S)).me.peer == FIRST
        assert (await first.transport.identify(second.address, SOON_S)).me.peer == SECOND
        stream = await second.transport.open(first.address, StateOpening("swarm", SECOND, 7))
        await stream.send(memoryview(b"there and back"), last=True)
        assert bytes(await stream.receive() or b"") == b"there and back"
        assert second.keyring.users(token.id) == (SECOND,)
        third = await enrol(token, [second.address], PeerId("third"), SOON_S, time.time)
        assert third.keyring.signs
        assert set(third.keyring.users(token.id)) == {"second", "third"}


async def test_wrong_expired_void_and_used_up_tokens_get_one_sentence_and_learn_nothing():
    async with two() as (first, _, _):
        ring = first.keyring
        wrong, elsewhere = (
            JoinToken.make(ring.swarm),
            JoinToken.make(SwarmKey.make().authority.public),
        )
        assert "does not accept our token" in await why_not(wrong, first.address)
        assert "shows no certificate of our swarm's CA" in await why_not(elsewhere, first.address)
        short = ring.make_token(Role.MEMBER, lasts_s=1)
        once = ring.make_token(Role.MEMBER, uses=1)
        await enrol(once, [first.address], PeerId("fourth"), SOON_S, time.time)
        assert "has been used up" in await why_not(once, first.address)
        await asyncio.sleep(1.5)
        assert "does not accept our token" in await why_not(short, first.address)
        rotated = ring.make_token(Role.MEMBER)
        ring.rotate()
        assert "does not accept our token" in await why_not(rotated, first.address)


async def test_without_a_token_there_is_nothing_to_hear():
    async with two() as (first, _, _), asking(first.address, GrpcConfig()) as stranger:
        with pytest.raises(TransportError, match="its swarm is encrypted: give a --token of it"):
            await stranger.identify(SOON_S)


async def test_a_viewer_asks_what_peers_do_and_nothing_else():
    async with two() as (first, _, token):
        viewer = first.keyring.make_token(Role.VIEWER)
        config = GrpcConfig(token=str(viewer))
        async with asking(first.address, config) as asker:
            assert (await asker.identify(SOON_S)).model_size == 4104
        assert "more than a token for viewers" in await why_not(viewer, first.address)
        with pytest.raises(RefusedError, match="more than a token for viewers"):
            await command(first.address, config, wire.Rotate(), SOON_S)
        for kind in (viewer, token):
            security = GrpcConfig(token=str(kind)).security()
            stranger = GrpcTransport("127.0.0.1:0", security=security)
            stranger._handler = first
            stream = await stranger.open(first.address, StateOpening("swarm", FIRST, 7))
            with pytest.raises(RefusedError, match="more than a token"):
                await stream.receive()
            await stranger.close(0.1)
        assert first.streams == []


async def test_who_has_a_token_for_members_commands():
    async with two() as (first, _, token):
        config = GrpcConfig(token=str(token))
        wanted = wire.WantToken(Role.MEMBER, 3600, 2)
        made = await command(first.address, config, wanted, SOON_S)
        shown = (await command(first.address, config, wire.Show(), SOON_S)).shown
        assert "who signs: every member" in shown
        assert "for members, does not expire; used 1 times: second" in shown
        assert "for members, expires in 1.0 h; used 0 of 2 times" in shown
        assert made.token.startswith("join-")
        assert made.token not in shown


@pytest.mark.parametrize("data", ["grpc", "sockets", "memory"])
async def test_who_is_revoked_while_connected_is_out_and_its_streams_are_closed(data):
    async with two(data) as (first, second, token):
        stream = await second.transport.open(first.address, StateOpening("swarm", SECOND, 7))
        await stream.send(memoryview(b"x"))
        assert bytes(await stream.receive() or b"") == b"x"
        await command(first.address, GrpcConfig(token=str(token)), wire.Revoke(SECOND), SOON_S)
        first.transport.expel(SECOND)  # as `runtime/keys.py` does
        async with asyncio.timeout(SOON_S):
            with pytest.raises(P2PTrainError):
                await read_all(stream)
        assert first.streams == ["open", "closed"]
        with pytest.raises(RefusedError, match="second is no member any more"):
            await second.transport.identify(first.address, SOON_S)
        again = await second.transport.open(first.address, StateOpening("swarm", SECOND, 7))
        with pytest.raises(P2PTrainError):
            await again.receive()
        with pytest.raises(RefusedError, match="the name second was revoked"):
            await enrol(token, [first.address], SECOND, SOON_S, time.time)


async def test_a_member_speaks_in_its_own_name_only():
    async with two("grpc") as (first, second, _):
        message = Arrive(version=1)
        second.transport.send(first.address, Envelope(SECOND, "swarm", message))
        second.transport.send(first.address, Envelope(PeerId("third"), "swarm", message))
        await asyncio.sleep(0.5)
        assert [envelope.source for envelope in first.heard] == [SECOND]
        stream = await second.transport.open(first.address, StateOpening("swarm", FIRST, 7))
        with pytest.raises(RefusedError, match="second has called in the name of first"):
            await stream.receive()


async def test_where_signers_are_limited_a_member_says_who_signs_and_commands_take_the_key():
    key = SwarmKey.make()
    async with listening(FIRST, found(FIRST, time.time, key=key, signers=[FIRST])) as first:
        token = first.keyring.make_token(Role.MEMBER)
        security = await enrol(token, [first.address], SECOND, SOON_S, time.time)
        assert not security.keyring.signs
        async with listening(SECOND, security) as second:
            assert second.transport._keys
            second.transport._keys.find_signers = lambda: (first.address,)
            await enrol(token, [second.address], PeerId("third"), SOON_S, time.time)
            refused = "only peers that sign, and the swarm's key"
            with pytest.raises(RefusedError, match=refused):
                await command(first.address, GrpcConfig(token=str(token)), wire.Rotate(), SOON_S)
            await command(first.address, GrpcConfig(token=str(key)), wire.Rotate(), SOON_S)
            before = security.identity.calls
            ask, hosts = second.transport.ask_keys, [first.address]
            await renewed(security, ask, hosts, time.time())
            assert security.identity.calls != before
            assert (await second.transport.identify(first.address, SOON_S)).me.peer == FIRST


async def test_a_certificate_that_has_ended_is_refused_and_a_renewed_one_works():
    async with listening(FIRST, found(FIRST, time.time)) as first:
        token = first.keyring.make_token(Role.MEMBER)
        assert first.transport._keys
        first.transport._keys.lasts_s = -1.0
        security = await enrol(token, [first.address], SECOND, SOON_S, time.time)
        async with listening(SECOND, security) as second:
            with pytest.raises(TransportError, match="does not accept our token or certificate"):
                await second.transport.identify(first.address, SOON_S)
            await renewed(security, second.transport.ask_keys, (), time.time())
            second.transport.forget(first.address)
            assert (await second.transport.identify(first.address, SOON_S)).me.peer == FIRST


async def test_on_loopback_another_user_is_refused(monkeypatch):
    async with listening(FIRST, Plain(only_ours=True)) as first:
        async with asking(first.address, GrpcConfig()) as asker:
            assert (await asker.identify(SOON_S)).me.peer == FIRST
        monkeypatch.setattr(loopback, "ROOT", -1)
        monkeypatch.setattr(loopback.os, "getuid", lambda: 12345)
        async with asking(first.address, GrpcConfig()) as stranger:
            with pytest.raises(RefusedError, match="this peer answers its own user only"):
                await stranger.identify(SOON_S)


async def test_a_port_that_hangs_up_is_told_apart_from_an_encrypted_one():
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with server, asking(Address(f"{host}:{port}"), GrpcConfig()) as asker:
        with pytest.raises(TransportError, match="it may still be starting; try again") as caught:
            await asker.report(SOON_S)
        assert "TLS" not in str(caught.value).upper()
    async with two() as (first, _, _):
        assert await probe.speaks_tls(first.address)


def test_a_revoked_name_is_known_by_all_who_learn_the_records():
    ring = found(FIRST, time.time).keyring
    ring.state(Revoked(SECOND))
    assert ring.is_revoked("second")
