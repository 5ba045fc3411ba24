"""Peers that only dial out, over real connections: who registers, who relays, and what it sees."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.core.messages import Member
from p2ptrain.errors import CodecError, ConfigError, RefusedError, TransportError
from p2ptrain.ids import Address, PeerId
from p2ptrain.net import dialing_out, pipes
from p2ptrain.net import registry as registry_module
from p2ptrain.net import wire_carried as wire
from p2ptrain.net.enrolment import found
from p2ptrain.net.grpc_config import GrpcConfig
from p2ptrain.net.grpc_link import SERVICE
from p2ptrain.net.grpc_transport import GrpcTransport
from p2ptrain.net.pipes import ServedPipe, SocketPipe
from p2ptrain.net.registry import Registry
from p2ptrain.net.tls import Plain, Security
from p2ptrain.net.tokens import SwarmKey
from p2ptrain.net.wire import (
    DialBackRequest,
    Hello,
    SetReply,
    SetRequest,
    StateOpening,
    encode_dial_back,
    encode_set,
)
from p2ptrain.net.wire_carried import Carrying, ReachReply, Registering, Wanted

pytestmark = pytest.mark.sockets

A, B, RELAY = PeerId("a"), PeerId("päär-b"), PeerId("relay")
SOON_S = 5.0
CHARACTERS = "aä.:%/ \n-"
MARKER = b"the numbers of a model "
RELAYS = GrpcConfig(data="grpc", relay_mbit=1e5)
DIALS_OUT = GrpcConfig(data="grpc", dial_out=True)


def clock() -> float:
    """Certificates that are made at this time have not ended when the tests run."""
    return 3.9e9


@dataclass
class Here:
    """One peer's transport; it echoes what it hears."""

    name: PeerId
    security: Security
    transport: GrpcTransport
    address: Address = field(default_factory=lambda: Address(""))

    def handle_identify(self) -> Hello:
        return Hello((1, 0), "", "", 1, Member(peer=self.name, address=self.address, incarnation=1))

    def handle_broken(self, address, why) -> None:
        pass

    async def handle_stream(self, opening, stream) -> None:
        while (payload := await stream.receive()) is not None:
            await stream.send(payload)

    @property
    def registered(self) -> list[Address]:
        return list(self.transport._carrying.registry._registered)


@asynccontextmanager
async def listening(
    name: PeerId,
    config: GrpcConfig,
    key: SwarmKey | None,
    *known: Here,
    called: str = "",
    host: str = "127.0.0.1",
) -> AsyncIterator[Here]:
    """A peer that knows of the others; without a key, of a plain swarm."""
    security = found(name, clock, key=key) if key else Plain()
    transport = GrpcTransport(f"{host}:0", config=config, security=security, name=called or name)
    here = Here(name, security, transport)
    here.address = await transport.start(here)
    for other in known:
        transport.expect(other.address)
    try:
        yield here
    finally:
        await transport.close(0.1)


@asynccontextmanager
async def meeting(key: SwarmKey | None) -> AsyncIterator[tuple[Here, Here, Here]]:
    """Two peers that only dial out, and the one that relays between them."""
    async with (
        listening(RELAY, RELAYS, key) as relay,
        listening(A, DIALS_OUT, key, relay) as a,
        listening(B, DIALS_OUT, key, relay) as b,
    ):
        yield a, relay, b


async def talk(source: Here, target: Here) -> None:
    """Move so much that nothing hides it, there and back."""
    payload = MARKER * 4000
    stream = await source.transport.open(target.address, StateOpening("swarm", source.name, 7))
    await stream.send(memoryview(payload), last=True)
    back = b""
    while (chunk := await stream.receive()) is not None:
        back += chunk
    assert back == payload


async def until(holds) -> None:
    async with asyncio.timeout(SOON_S):
        while not holds():  # noqa: ASYNC110 - what is waited for does not know us
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("is_encrypted", [True, False])
async def test_a_relay_sees_no_plain_text_where_the_swarm_has_keys(is_encrypted, monkeypatch):
    carried: list[bytes] = []
    read = ServedPipe.read

    async def recorded(pipe: ServedPipe) -> bytes:
        carried.append(await read(pipe))
        return carried[-1]

    monkeypatch.setattr(pipes.ServedPipe, "read", recorded)
    async with meeting(SwarmKey.make() if is_encrypted else None) as (a, relay, b):
        await talk(a, b)
        seen = b"".join(carried)
        assert len(seen) > 2 * 4000 * len(MARKER), "there and back"
        assert relay.transport._carrying.registry.carried_bytes == len(seen)
        assert (MARKER in seen) is not is_encrypted
        if is_encrypted:
            assert B.encode() not in seen, "not even the names"


async def test_a_relay_that_shows_its_own_certificate_is_not_believed(monkeypatch):
    async with meeting(SwarmKey.make()) as (a, relay, b):
        await talk(a, b)
        own = ReachReply(relay.security.certificate(), 1, 1)
        monkeypatch.setattr(registry_module, "ReachReply", lambda *_: own)
        monkeypatch.setattr(dialing_out, "FINDS_AFTER_S", (0.0,))
        a.transport._carrying.dials_out.avoid_route(b.address)
        with pytest.raises(TransportError, match="none of the 1 peers that relay has both of us"):
            await a.transport.identify(b.address, SOON_S)


async def test_a_relay_that_answers_in_the_place_of_the_callee_is_hung_up_on():
    async with meeting(SwarmKey.make()) as (a, relay, b):
        there = relay.transport.listens_at.rpartition(":")[2]

        async def to_itself(address: Address, *, chunks: bool) -> SocketPipe:
            loop, pipe = asyncio.get_running_loop(), pipes.socket.socket()
            pipe.setblocking(False)
            await loop.sock_connect(pipe, ("127.0.0.1", int(there)))
            return SocketPipe(pipe)

        await until(lambda: len(relay.registered) == 2)
        relay.transport._carrying.registry.call = to_itself
        with pytest.raises(RefusedError, match="shows no certificate of our swarm's CA"):
            await a.transport.identify(b.address, SOON_S)


async def test_a_peer_registers_under_its_own_name_only():
    key = SwarmKey.make()
    async with (
        listening(RELAY, RELAYS, key) as relay,
        listening(A, DIALS_OUT, key, relay, called="b") as liar,
    ):
        async with liar.security.channel(relay.address, ()) as channel:
            call = channel.stream_stream(f"/{SERVICE}/Register")()
            await call.write(wire.encode_registering(Registering(wire.address_of("b"))))
            assert await call.code() is grpc.StatusCode.PERMISSION_DENIED
            assert await call.details() == "a has called in the name of b"
        assert relay.registered == []


async def test_a_registration_that_is_cancelled_as_it_fails_ends():
    """It would be made again and again, and `close` would wait for ever."""
    closed = Address("127.0.0.1:1")

    class Channel:
        def __init__(self, *_) -> None:
            self._channel = Plain().channel(closed, ())

        def stream_stream(self, method: str):
            call = self._channel.stream_stream(method)()
            call.add_done_callback(lambda _: visit.task.cancel())
            return lambda: call

        async def close(self) -> None:
            await self._channel.close()

    dials_out = dialing_out.DialsOut(Address("a"), 0, Channel, Plain())
    dials_out.visit(closed)
    visit = dials_out._visits[closed]
    await until(visit.task.cancelled)
    await dials_out.close()


async def test_no_peer_opens_a_connection_that_is_wanted_of_another():
    key = SwarmKey.make()
    async with listening(RELAY, RELAYS, key) as relay, listening(A, DIALS_OUT, key, relay) as a:
        await until(lambda: relay.registered == [a.address])
        wanted = relay.transport._carrying.registry._registered[a.address].wanted
        number = bytes(wire.NUMBER_BYTES)
        wanted[number] = asyncio.get_running_loop().create_future()
        stranger = found(B, clock, key=key)
        async with stranger.channel(relay.address, ()) as channel:
            call = channel.stream_stream(f"/{SERVICE}/Carry")()
            await call.write(wire.encode_carrying(Carrying(number)))
            assert await call.code() is grpc.StatusCode.PERMISSION_DENIED
        assert not wanted[number].done()


async def test_a_member_that_does_not_relay_says_so(monkeypatch):
    monkeypatch.setattr(dialing_out, "FINDS_AFTER_S", (0.0,))
    key = SwarmKey.make()
    async with (
        listening(RELAY, GrpcConfig(data="grpc"), key) as member,
        listening(A, DIALS_OUT, key, member) as a,
        listening(B, DIALS_OUT, key, member) as b,
    ):
        await until(lambda: len(member.registered) == 2)
        assert (await member.transport.identify(b.address, SOON_S)).me.peer == B
        with pytest.raises(TransportError, match="none of the 0 peers that relay"):
            await a.transport.identify(b.address, SOON_S)
        async with a.security.channel(member.address, ()) as channel:
            call = channel.stream_stream(f"/{SERVICE}/Carry")()
            await call.write(wire.encode_carrying(Carrying(address=b.address)))
            assert await call.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_peer_whose_connection_is_lost_registers_again():
    async with (
        listening(RELAY, GrpcConfig(data="grpc"), None) as member,
        listening(A, DIALS_OUT, None, member) as a,
    ):
        assert (await member.transport.identify(a.address, SOON_S)).me.peer == A
        (visit,) = a.transport._carrying.dials_out._visits.values()
        registered = member.transport._carrying.registry._registered
        before = registered[a.address]
        for channel in visit.channels.values():
            await channel.close()
        await until(lambda: registered.get(a.address) not in (None, before))
        assert (await member.transport.identify(a.address, SOON_S)).me.peer == A


@pytest.mark.parametrize("host", ["[::1]", "localhost"])
async def test_a_peer_registers_across_ipv6_and_by_a_name(host):
    key = SwarmKey.make()
    async with (
        listening(RELAY, RELAYS, key, host=host) as member,
        listening(A, DIALS_OUT, key, member) as a,
    ):
        assert member.address.startswith(host)
        assert (await member.transport.identify(a.address, SOON_S)).me.peer == A


async def test_of_several_relays_the_nearest_is_taken_and_one_that_broke_comes_last():
    async with (
        listening(PeerId("far"), RELAYS, None) as far,
        listening(PeerId("near"), RELAYS, None) as near,
        listening(A, DIALS_OUT, None, far, near) as a,
        listening(B, DIALS_OUT, None, far, near) as b,
    ):
        await until(lambda: len(far.registered) == len(near.registered) == 2)
        caller = a.transport._carrying.dials_out
        await until(lambda: all(visit.round_trip_s for visit in caller._visits.values()))
        for relay, taken_s in ((far, 0.2), (near, 0.01)):
            caller._visits[relay.address].round_trip_s = taken_s
        assert (await caller.find(b.address)).relay.address == near.address
        caller.avoid_route(b.address)
        assert (await caller.find(b.address)).relay.address == far.address


async def test_a_carried_caller_does_not_count_as_one_of_this_machine():
    asked: list[bool] = []

    class Service:
        def set(self, is_member: bool, request: SetRequest) -> SetReply:
            asked.append(is_member)
            return SetReply("")

    async with (
        listening(RELAY, GrpcConfig(data="grpc"), None) as member,
        listening(A, DIALS_OUT, None, member) as a,
    ):
        a.transport.service = Service()
        request = encode_set(SetRequest("{}"))
        await member.transport._ask(a.address, "Set", request, SOON_S, "setting")
        await a.transport._ask(a.address, "Set", request, SOON_S, "setting")
        assert asked == [False, True]
        data = encode_dial_back(DialBackRequest(4000, 1))
        with pytest.raises(RefusedError, match="does not call back"):
            await member.transport._ask(a.address, "DialBack", data, SOON_S, "asking")


async def test_a_relay_carries_no_more_than_it_was_told_to(monkeypatch):
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr("p2ptrain.net.registry.asyncio.sleep", sleep)
    registry = Registry(None, relay_mbit=8)
    await registry._pay(1_000_000)
    assert slept == [], "a second's worth is saved up"
    await registry._pay(500_000)
    assert slept == [pytest.approx(0.5, abs=0.05)]


def test_a_peer_that_cannot_be_called_cannot_relay():
    with pytest.raises(ConfigError, match="a peer that cannot be called relays nothing"):
        GrpcConfig(dial_out=True, relay_mbit=10)


@given(st.text(CHARACTERS, min_size=1, max_size=20))
def test_the_address_of_a_peer_that_only_dials_out_has_its_name(name):
    with suppress(CodecError):  # a name that is too long as it is written there
        address = wire.address_of(name)
        sound = name.isprintable() and " " not in name
        assert wire.name_at(address) == (name if sound else None)


@pytest.mark.parametrize("text", ["a:1", ".dial-out.invalid:1", "%.dial-out.invalid:1"])
def test_other_addresses_have_none(text):
    assert wire.name_at(Address(text)) is None


THERE = wire.address_of("b")
SAID = [
    (Registering(THERE, b"pem", 12, 3), wire.encode_registering, wire.decode_registering),
    (Wanted(bytes(16), True, 4, True), wire.encode_wanted, wire.decode_wanted),
    (Wanted(), wire.encode_wanted, wire.decode_wanted),
    (Carrying(bytes(16), None, True), wire.encode_carrying, wire.decode_carrying),
    (Carrying(b"", THERE), wire.encode_carrying, wire.decode_carrying),
    (b"data", wire.encode_carried, wire.decode_carried),
    (THERE, wire.encode_reach, wire.decode_reach),
    (ReachReply(b"pem", 5, 6), wire.encode_reach_reply, wire.decode_reach_reply),
]


@pytest.mark.parametrize(("value", "encode", "decode"), SAID)
def test_what_is_said_comes_back_as_it_was(value, encode, decode):
    assert decode(encode(value)) == value


@given(st.data(), st.sampled_from(SAID))
def test_hostile_bytes_decode_or_are_refused(data, said):
    value, encode, decode = said
    sound = encode(value)
    at = data.draw(st.integers(0, max(0, len(sound) - 1)))
    with suppress(CodecError):
        decode(sound[:at] + data.draw(st.binary(max_size=30)) + sound[at + 1 :])
