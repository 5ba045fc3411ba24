"""The service: a peer answers strangers, and is nobody's port scanner."""

import asyncio
from dataclasses import replace

import pytest

from p2ptrain.core.messages import Member, Phase
from p2ptrain.errors import CodecError, TransportError
from p2ptrain.net import wire
from p2ptrain.net.wire import DialBackRequest, DialedBack, Hello
from p2ptrain.runtime.board import Board
from p2ptrain.runtime.service import MAX_WAITING, PAUSE_S, PeerService
from p2ptrain.sim.replica import VectorReplica
from p2ptrain.sim.world import World

CALLER = "192.0.2.7"
"""An address of the documentation: nobody's."""


class Line:
    """A transport that notes whom it was made to call."""

    def __init__(self, answer: Hello | Exception) -> None:
        self.answer = answer
        self.called: list[str] = []
        self.forgotten: list[str] = []

    async def identify(self, address: str, timeout_s: float) -> Hello:
        self.called.append(address)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def forget(self, address: str) -> None:
        self.forgotten.append(address)


def hello(number: int) -> Hello:
    return Hello((1, 0), "", "", 0, Member(peer="doctor", address="h:1", incarnation=number))


@pytest.fixture
async def world():
    world = World()
    for name in ("p01", "p02"):
        await world.add(name, VectorReplica([0.0, 1.0]), "ad_psgd")
    yield world
    await world.close()


@pytest.fixture
def service(world):
    def of(line: Line, name: str = "p01") -> PeerService:
        driver = world.peers[name].driver
        driver.environment = replace(driver.environment, unix_clock=lambda: 1e9)
        return PeerService(driver, Board(lambda: driver.now), line)

    return of


async def test_it_calls_the_callers_own_address_and_says_that_it_was_reached(service):
    line = Line(hello(number=7))
    answer = await service(line).dial_back(CALLER, DialBackRequest(port=4000, number=7))
    assert answer == DialedBack(CALLER, "")
    assert line.called == [f"{CALLER}:4000"]
    assert line.forgotten == line.called, "strangers leave no connections behind"


async def test_an_ipv6_caller_is_called_in_brackets(service):
    line = Line(hello(number=7))
    await service(line).dial_back("2001:db8::1", DialBackRequest(4000, 7))
    assert line.called == ["[2001:db8::1]:4000"]


async def test_somebody_else_at_that_port_is_not_the_caller(service):
    answer = await service(Line(hello(number=8))).dial_back(CALLER, DialBackRequest(4000, 7))
    assert answer.why_not == f"at {CALLER}:4000 is somebody else"


async def test_why_the_caller_was_not_reached_is_said(service):
    line = Line(TransportError("no connection"))
    answer = await service(line).dial_back(CALLER, DialBackRequest(4000, 7))
    assert answer.why_not == "no connection"


async def test_calls_are_rare_and_a_queue_of_strangers_is_short(service, world):
    line, driver = Line(hello(number=7)), world.peers["p01"].driver
    service, began = service(line), driver.now
    calls = [service.dial_back(CALLER, DialBackRequest(4000, 7)) for _ in range(MAX_WAITING + 1)]
    *answers, refused = await asyncio.gather(*calls, return_exceptions=True)
    assert answers == [DialedBack(CALLER, "")] * MAX_WAITING
    assert driver.now - began == pytest.approx((MAX_WAITING - 1) * PAUSE_S)
    assert "many to call back" in str(refused)
    assert len(line.called) == MAX_WAITING


async def test_a_member_that_asks_keeps_its_connection(service, world):
    address = world.peers["p02"].address
    ip, _, port = address.rpartition(":")
    line = Line(hello(number=7))
    await service(line).dial_back(ip, DialBackRequest(int(port), 7))
    assert line.forgotten == []


@pytest.mark.parametrize("port", [0, 22, 1023, 65536])
def test_no_port_where_peers_have_no_business_is_called(port):
    data = wire.encode_dial_back(DialBackRequest(port, 7))
    with pytest.raises(CodecError, match=f"port {port} is not called back"):
        wire.decode_dial_back(data)


async def test_a_report_says_what_membership_knows_and_survives_the_wire(service, world):
    report = service(Line(hello(7))).report()
    assert report.hello.me.peer == "p01"
    assert [member.peer for member in report.members] == ["p02"]
    assert report.unix_s == 1e9
    assert report.doing == "waits for those it starts together with"
    assert wire.decode_report(wire.encode_report(report)) == report
    world.peers["p01"].driver.describe(Phase.DONE, 3, 96)
    assert service(Line(hello(7))).report().doing == "is done; serves the others"


def test_a_report_that_is_none_is_refused():
    for data in (b"\xff", b""):
        with pytest.raises(CodecError):
            wire.decode_report(data)
