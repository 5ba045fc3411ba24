"""Asking peers, over real sockets, with made-up reports."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest

from p2ptrain.core.messages import Member, Phase
from p2ptrain.net.ask import asking
from p2ptrain.net.grpc_config import GrpcConfig
from p2ptrain.net.wire_carried import address_of
from p2ptrain.ui import poller as module
from p2ptrain.ui.poller import Poller
from p2ptrain.ui.swarm import SwarmView
from tests.ui.feed import Listening, MadeUpSwarm

pytestmark = pytest.mark.sockets


@asynccontextmanager
async def listening(count: int):
    peers = Listening(MadeUpSwarm(count))
    await peers.start()
    try:
        yield peers
    finally:
        await peers.stop()


@asynccontextmanager
async def polling(*addresses: str):
    view = SwarmView(time.monotonic())
    poller = Poller(view, addresses, GrpcConfig(), time.monotonic, timeout_s=1.0)
    task = asyncio.create_task(poller.run())
    try:
        yield view, poller
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(condition) -> None:
    for _ in range(400):
        if condition():
            return
        await asyncio.sleep(0.025)
    pytest.fail("it never came true")


def states(view: SwarmView) -> list[str]:
    return [view.peers[name].state for name in sorted(view.peers)]


async def test_one_address_is_enough_to_ask_all_members():
    async with listening(5) as peers, polling(peers.addresses[2]) as (view, _):
        await until(lambda: states(view) == ["trains"] * 5)
        assert all(shown.report for shown in view.peers.values())


async def test_a_peer_that_only_dials_out_is_not_asked():
    async with listening(2) as peers, polling(peers.addresses[0]) as (view, poller):
        await until(lambda: states(view) == ["trains"] * 2)
        away = Member(peer="p09", address=address_of("p09"), incarnation=1, phase=Phase.TRAINING)
        poller._meet([away])
        assert states(view) == ["trains"] * 3
        assert sorted(poller._targets) == ["p00", "p01"]


async def test_a_peer_that_falls_silent_does_not_answer_and_is_asked_less_and_less():
    async with listening(3) as peers, polling(peers.addresses[0]) as (view, poller):
        await until(lambda: states(view) == ["trains"] * 3)
        await peers.stop([1])
        await until(lambda: states(view) == ["trains", "no answer", "trains"])
        target = poller._targets["p01"]
        await until(lambda: target.failures >= 3)
        assert target.next_at - time.monotonic() > 2 * poller.interval_s


async def test_another_peer_becomes_the_guide_when_the_first_one_is_gone():
    async with listening(3) as peers, polling(peers.addresses[0]) as (view, poller):
        await until(lambda: states(view) == ["trains"] * 3)
        await peers.stop([0])
        await until(lambda: states(view)[0] == "no answer")
        await until(lambda: poller._guide.peer != "p00" and not poller.why_not)
        assert states(view)[1:] == ["trains", "trains"]


async def test_no_peer_at_all_is_a_sentence_and_not_an_end():
    async with polling("127.0.0.1:1") as (view, poller):
        await until(lambda: poller.why_not)
        assert "no connection to 127.0.0.1:1" in poller.why_not
        assert view.peers == {}


async def test_at_most_so_many_are_asked_at_once(monkeypatch):
    monkeypatch.setattr(module, "AT_ONCE", 2)
    most = 0
    async with listening(8) as peers, polling(peers.addresses[0]) as (view, poller):

        def seen() -> bool:
            nonlocal most
            most = max(most, len(poller._tasks))
            return states(view) == ["trains"] * 8

        await until(seen)
    assert 1 <= most <= 2


def test_many_peers_are_asked_seldom_and_fewer_while_nobody_looks():
    poller = Poller(SwarmView(0.0), ["a:1"], GrpcConfig(), lambda: 0.0)
    assert poller.interval_s == module.LEAST_S
    poller._targets = dict.fromkeys(map(str, range(48)))
    assert poller.interval_s == 4.0
    poller.is_watched = False
    assert poller.interval_s == 16.0
    poller._targets = dict.fromkeys(map(str, range(100_000)))
    assert poller.interval_s == module.MOST_S * module.IDLE


async def test_a_report_without_members_is_not_read_for_them():
    async with listening(5) as peers, asking(peers.addresses[0], GrpcConfig()) as asker:
        assert len((await asker.report(5.0)).members) == 4
        assert (await asker.report(5.0, members=False)).members == ()
