"""The server of the page: what it sends, to whom, and what it refuses."""

import json
from contextlib import asynccontextmanager

import aiohttp
import pytest

from p2ptrain.errors import ConfigError
from p2ptrain.ui import server as module
from p2ptrain.ui.server import LivePage, PageConfig, PageThread
from p2ptrain.ui.swarm import SwarmView
from tests.ui.feed import Clicks, MadeUpFeed, MadeUpSwarm

pytestmark = pytest.mark.sockets

ANY_PORT = PageConfig(listen="127.0.0.1:0")


@asynccontextmanager
async def serving(count: int = 4, faults: Clicks | None = None):
    swarm = MadeUpSwarm(count)
    page = LivePage(ANY_PORT, lambda: swarm.now, faults=faults)
    async with page.serving() as url, aiohttp.ClientSession(url) as session:
        view = SwarmView(0.0)
        page.show(view, MadeUpFeed(view, swarm, past_s=3.0), "made up")
        yield page, session


async def events(answer: aiohttp.ClientResponse, count: int) -> list[tuple[str, dict]]:
    found = []
    while len(found) < count:
        name = (await answer.content.readline()).decode().removeprefix("event: ").strip()
        data = (await answer.content.readline()).decode().removeprefix("data: ")
        await answer.content.readline()
        found.append((name, json.loads(data)))
    return found


async def test_a_page_gets_everything_once_and_then_what_has_changed():
    async with serving() as (_, session), session.get("/feed") as answer:
        assert answer.content_type == "text/event-stream"
        (first, whole), (second, update), _ = await events(answer, 3)
    assert (first, second) == ("snapshot", "update")
    assert (whole["title"], len(whole["rows"]), whole["kinds"]) == ("made up", 4, [])
    assert len(whole["history"]["points"]) == 3
    assert set(update["rows"]) <= {"0", "1", "2", "3"}


async def test_a_page_that_falls_behind_gets_a_new_snapshot(monkeypatch):
    monkeypatch.setattr(module, "UPDATE_S", 3600.0)
    async with serving() as (page, session), session.get("/feed"):
        (one,) = page._pages  # it was there before the answer began
        one.is_behind = False
        for _ in range(module.BEHIND + 1):
            page._send_all()
        assert one.is_behind
        assert one.queue.qsize() <= module.BEHIND
        page._send_all()
        assert not one.is_behind


async def test_the_page_is_its_own_files_and_asks_no_other_host():
    async with serving() as (_, session):
        for path in module.FILES:
            async with session.get(path) as answer:
                text = await answer.text()
                assert answer.status == 200
                assert "http://" not in text
                assert "https://" not in text
                assert "default-src 'none'" in answer.headers["Content-Security-Policy"]


async def test_the_state_is_there_for_programs():
    async with serving(6) as (_, session), session.get("/state.json") as answer:
        assert (await answer.json())["known"] == 6


async def test_another_web_site_can_neither_read_it_nor_click():
    clicks = Clicks()
    order = {"kind": "pause", "peer": "p01", "on": True}
    async with serving(faults=clicks) as (page, session):
        async with session.get("/state.json", headers={"Host": "evil.example:9410"}) as answer:
            assert answer.status == 403
        for origin in ("http://evil.example", "null", ""):
            headers = {"Origin": origin}
            async with session.post("/fault", json=order, headers=headers) as answer:
                assert answer.status == 403
        headers = {"Origin": page.url, "Content-Type": "text/plain"}
        async with session.post("/fault", data=json.dumps(order), headers=headers) as answer:
            assert answer.status == 403
    assert clicks.on == set()


async def test_a_fault_is_applied_shown_and_reverted():
    clicks = Clicks()
    async with serving(faults=clicks) as (page, session), session.get("/feed") as feed:
        ((_, whole),) = await events(feed, 1)
        assert whole["kinds"] == list(Clicks.kinds)
        for on in (True, False):
            order, headers = {"kind": "slow", "peer": "p02", "on": on}, {"Origin": page.url}
            async with session.post("/fault", json=order, headers=headers) as answer:
                assert answer.status == 204
            assert clicks.on == ({("slow", "p02")} if on else set())
            *_, (_, update) = await events(feed, 3)
            (fault,) = update["faults"]
            assert (fault["kind"], fault["peer"]) == ("slow", "p02")
            assert (fault["ended"] is None) is on


@pytest.mark.parametrize("order", [
    {"kind": "explode", "peer": "p01", "on": True},
    {"kind": "pause", "peer": "nobody", "on": True},
    {"kind": ["pause"], "peer": "p01", "on": True},
    {"kind": "pause", "peer": {"a": 1}, "on": True},
    {"kind": "pause"},
    [],
    "pause",
])  # fmt: skip
async def test_an_order_that_makes_no_sense_is_refused(order):
    clicks = Clicks()
    async with serving(faults=clicks) as (page, session):
        headers = {"Origin": page.url}
        async with session.post("/fault", json=order, headers=headers) as answer:
            assert answer.status == 400
    assert clicks.on == set()


async def test_a_fault_that_the_lab_refuses_is_its_sentence(monkeypatch):
    clicks = Clicks()

    def refuse(kind: str, peer: str) -> None:
        raise ConfigError("no peer has trained yet")

    monkeypatch.setattr(clicks, "apply", refuse)
    async with serving(faults=clicks) as (page, session):
        order, headers = {"kind": "pause", "peer": "p01", "on": True}, {"Origin": page.url}
        async with session.post("/fault", json=order, headers=headers) as answer:
            assert (answer.status, await answer.text()) == (409, "no peer has trained yet\n")


async def test_without_a_lab_it_is_read_only():
    async with serving() as (page, session):
        headers = {"Origin": page.url}
        async with session.post("/fault", json={}, headers=headers) as answer:
            assert answer.status == 404


@pytest.mark.parametrize("listen", ["0.0.0.0:9410", "192.0.2.7:9410", "[::]:9410", "box:9410"])
def test_a_host_that_others_reach_has_to_be_asked_for(listen):
    with pytest.raises(ConfigError, match=r"no password; listen on 127\.0\.0\.1"):
        PageConfig(listen=listen)
    assert PageConfig(listen=listen, is_public=True).where()[1] == 9410


@pytest.mark.parametrize("listen", ["9410", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:70000", ":80"])
def test_what_is_no_place_to_listen_is_a_sentence(listen):
    with pytest.raises(ConfigError, match="is no place to listen; write host:port"):
        PageConfig(listen=listen)


def test_loopback_has_several_names():
    for listen in ("localhost:1", "127.0.0.1:1", "127.9.9.9:1", "[::1]:1"):
        assert PageConfig(listen=listen).where()[1] == 1


async def test_a_port_that_is_taken_is_a_sentence():
    async with serving() as (page, _):
        taken = PageConfig(listen=page.url.removeprefix("http://"))
        with pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1"):
            async with LivePage(taken, lambda: 0.0).serving():
                pass


def test_a_page_in_a_thread_of_its_own_starts_and_ends():
    thread = PageThread(LivePage(ANY_PORT, lambda: 0.0))
    assert thread.start().startswith("http://127.0.0.1:")
    thread.watch(["127.0.0.1:1"], "nothing there")
    thread.close()
    thread.close()
