"""`p2ptrain doctor`: each thing in the way is one sentence with its remedy."""

import asyncio
import contextlib
import sys
from dataclasses import replace

import pytest
import torch

import p2ptrain
from p2ptrain import cli
from p2ptrain.console import doctor
from p2ptrain.console.doctor import Finding, Level, Visit, diagnose
from p2ptrain.console.ways import about_ways
from p2ptrain.core.messages import Member
from p2ptrain.errors import RefusedError
from p2ptrain.ids import Address, PeerId
from p2ptrain.net.wire import DialedBack
from p2ptrain.net.wire_carried import address_of
from tests.console.test_status import member, report
from tests.net.test_carrying import DIALS_OUT, RELAYS, listening, until

pytestmark = pytest.mark.sockets

NOW = 1_000_000.0


@pytest.fixture(scope="module")
def address():
    """Where a healthy peer is."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with p2ptrain.Peer(model, optimizer, name="p01") as peer:
        yield peer.address


def visit(address: str, **changes: object) -> Visit:
    return replace(Visit(address=address, number=77, unix_clock=lambda: NOW), **changes)


async def problems(visit: Visit) -> list[str]:
    return [f.text for f in [f async for f in diagnose(visit)] if f.level is Level.PROBLEM]


async def test_a_healthy_swarm_has_no_problem(address):
    findings = [finding async for finding in diagnose(visit(address))]
    assert [f.text for f in findings if f.level is Level.PROBLEM] == []
    said = "\n".join(finding.text for finding in findings)
    assert "there is p01, protocol 1.1, algorithm ad_psgd, a model of 8 numbers" in said
    assert "all peers (1) can be reached at what they advertise" in said
    assert "p01 reaches us at 127.0.0.1, port " in said
    assert "on loopback, where only peers of this machine can join: p01" in said


async def test_a_clock_that_is_off_is_worth_a_note_only(address):
    findings = [finding async for finding in diagnose(visit(address))]
    (clock,) = (f for f in findings if "the clock of p01" in f.text)
    assert clock.level is Level.NOTE
    assert "ahead of ours; training does not mind" in clock.text


async def test_whom_the_peer_has_refused_is_a_note_with_the_reason(address):
    model = torch.nn.Linear(5, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RefusedError) as refused:
        p2ptrain.Peer(model, optimizer, name="p02", join=address).__enter__()
    notes = [f.text async for f in diagnose(visit(address)) if f.level is Level.NOTE]
    assert f"p01 refused p02: {refused.value}" in notes


async def test_nobody_listens():
    (text,) = await problems(visit("127.0.0.1:1"))
    assert text == (
        "127.0.0.1:1 refuses connections: no peer listens there; start it, or check port 1"
    )


async def test_a_name_that_nobody_knows(monkeypatch):
    (text,) = await problems(visit("no-such-host.invalid:4000"))
    assert text.startswith("no-such-host.invalid is no name that this machine can look up")
    assert text.endswith("check its spelling, or use the IP address")


async def test_an_address_that_swallows_packets_names_the_firewall(monkeypatch):
    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio, "open_connection", never)
    (text,) = await problems(visit("127.0.0.1:4000", timeout_s=0.05))
    assert "a firewall drops the packets, or the machine is off; open TCP port 4000" in text


async def test_something_that_is_no_peer():
    async def hang_up(_: object, writer: asyncio.StreamWriter) -> None:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        (text,) = await problems(visit(f"127.0.0.1:{port}", timeout_s=0.5))
    assert text.endswith("check that the port is the peer's own")


async def test_an_advertised_port_that_nobody_forwards(address):
    (text,) = await problems(visit(address, advertise="127.0.0.1:1025"))
    assert text.startswith("p01 does not reach us at 127.0.0.1, port 1025 (no connection")
    assert "open TCP port 1025 for incoming connections here, or forward it to us" in text


async def test_a_port_of_ours_that_is_taken(address):
    (text,) = await problems(visit(address, listen=address))
    assert text.startswith(f"cannot listen on {address}")


async def about(known: Member, theirs: str) -> Finding | None:
    return await doctor._about_member(known, theirs, visit(known.address, timeout_s=1.0))


async def test_a_peer_that_advertises_loopback_to_another_machine():
    finding = await about(member("p01", address="127.0.0.1:4000"), theirs="10.0.0.5")
    assert finding.level is Level.PROBLEM
    assert finding.text.endswith("start it with --advertise 10.0.0.5:4000")


async def test_a_peer_that_advertises_every_address():
    finding = await about(member("p01", address="0.0.0.0:4000"), theirs="10.0.0.5")
    assert finding.text.startswith("p01 advertises 0.0.0.0:4000, which is no address")


async def test_a_member_that_we_do_not_reach(address):
    finding = await about(member("p02", address="127.0.0.1:1"), theirs="127.0.0.1")
    assert "p02 cannot be reached from here at 127.0.0.1:1" in finding.text
    assert finding.text.endswith("open that port, or advertise another")


async def test_two_names_at_one_address(address):
    finding = await about(member("p02", address=address), theirs="127.0.0.1")
    assert finding.text == f"p02 advertises {address}, but there is p01; give each its own port"


class Asker:
    """Says that we are seen as some address."""

    def __init__(self, seen_as: str) -> None:
        self._seen_as = seen_as

    async def dial_back(self, *_: object) -> DialedBack:
        return DialedBack(self._seen_as, "")


async def about_us(seen_as: str, ours: str, advertise: str = "") -> list[Finding]:
    asked = visit("h:1", advertise=advertise, listen="127.0.0.1:0")
    return [f async for f in doctor._about_us(asked, Asker(seen_as), report("p01"), ours)]


async def test_addresses_that_are_translated_on_the_way():
    _, note = await about_us(seen_as="203.0.113.7", ours="192.168.1.5")
    assert note.level is Level.NOTE
    assert note.text.endswith("advertise 203.0.113.7 and forward the port to us")


@pytest.mark.parametrize(("advertise", "level", "says"), [
    ("203.0.113.7:4000", Level.OK, "is the address that we are seen as"),
    ("203.0.113.8:4000", Level.NOTE, "leads to 203.0.113.8, and we are seen as 203.0.113.7"),
    ("127.0.0.1:4000", Level.PROBLEM, "means every machine's own self; advertise 203.0.113.7"),
    ("0.0.0.0:4000", Level.PROBLEM, "is no address; advertise 203.0.113.7 instead"),
])  # fmt: skip
async def test_what_we_would_advertise_is_compared_with_how_we_are_seen(advertise, level, says):
    *_, finding = await about_us("203.0.113.7", "203.0.113.7", advertise)
    assert (finding.level, says in finding.text) == (level, True), finding


def test_the_exit_code_says_whether_something_is_in_the_way(address, monkeypatch, capfd):
    for asked, code in ((address, 0), ("127.0.0.1:1", 1)):
        monkeypatch.setattr(sys, "argv", ["p2ptrain", "doctor", asked])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        assert caught.value.code == code
    out, err = capfd.readouterr()
    assert err == ""
    assert "problem  127.0.0.1:1 refuses connections" in out


async def test_each_pair_that_only_dials_out_is_named_with_its_relay_or_the_remedy():
    async with (
        listening(PeerId("p01"), RELAYS, None) as relay,
        listening(PeerId("p02"), DIALS_OUT, None, relay) as second,
        listening(PeerId("p03"), DIALS_OUT, None, relay) as third,
    ):
        await until(lambda: len(relay.registered) == 2)
        here = [
            Member(peer=peer, address=address, incarnation=1)
            for peer, address in (
                (relay.name, relay.address),
                (second.name, second.address),
                (third.name, third.address),
                (PeerId("p04"), address_of("p04")),
            )
        ]
        found = [finding async for finding in about_ways(here, visit(relay.address, dial_out=True))]
    assert [f.text for f in found if f.level is Level.OK] == [
        "only dialling out: p02, p03, p04, this machine; the others call them over connections of "
        "theirs (direct: 0 pairs, reversed: 4)",
        "p02 and p03 meet through p01 (relayed)",
        "p02 and this machine meet through p01 (relayed)",
        "p03 and this machine meet through p01 (relayed)",
    ]
    alone = [f.text for f in found if f.level is Level.NOTE]
    assert len(alone) == 3
    assert alone[0].startswith("p02 and p04 do not reach each other, as no peer relays between")


async def test_without_peers_that_only_dial_out_there_is_nothing_to_say_of_ways():
    here = [Member(peer=PeerId("p01"), address=Address("127.0.0.1:1"), incarnation=1)]
    assert [finding async for finding in about_ways(here, visit("127.0.0.1:1"))] == []
