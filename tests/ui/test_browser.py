"""The page in a real browser: it updates, a killed peer turns grey, a click slows one down."""

import aiohttp
import pytest

from p2ptrain.ui.server import LivePage, PageConfig
from p2ptrain.ui.swarm import SwarmView
from tests.ui import browser
from tests.ui.feed import Clicks, MadeUpFeed, MadeUpSwarm

CHROMIUM = browser.find()
ANY_PORT = PageConfig(listen="127.0.0.1:0")

pytestmark = [
    pytest.mark.sockets,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed here"),
]

HERE = "window.p2ptrain && p2ptrain.state.peers"
ROW_OF_P03 = (
    "[...document.querySelectorAll('#rows tr')].find(r => r.cells[0].textContent === 'p03')"
)
SPOT_OF_P01 = """(() => {
    const spot = p2ptrain.graph.spots[1];
    const box = document.querySelector('#graph').getBoundingClientRect();
    return [box.left + spot.x, box.top + spot.y];
})()"""
CELLS = "new Set(p2ptrain.graph.spots.map(s => s.x + ' ' + s.y)).size"


class SlowedByClicks(Clicks):
    """Slows a made-up peer down."""

    def __init__(self, swarm: MadeUpSwarm) -> None:
        super().__init__()
        self._swarm = swarm

    def apply(self, kind: str, peer: str) -> None:
        super().apply(kind, peer)
        self._swarm.peers[int(peer[1:])].speed /= 4


@pytest.fixture
async def tab():
    async with browser.browsing(CHROMIUM) as tab:
        yield tab


async def test_the_page_lives(tab):
    swarm = MadeUpSwarm(6)
    page = LivePage(ANY_PORT, lambda: swarm.now, faults=SlowedByClicks(swarm))
    async with page.serving() as url:
        view = SwarmView(0.0)
        page.show(view, MadeUpFeed(view, swarm, past_s=10.0), "made up")
        await tab.open(url, 1280, 900)

        await tab.until(f"{HERE}.length === 6")
        now = await tab.value("p2ptrain.state.now")
        await tab.until(f"p2ptrain.state.now > {now} + 1")
        steps = "document.querySelector('#rows tr td:nth-child(3)').textContent"
        first = await tab.until(steps)
        await tab.until(f"{steps} !== '{first}'")

        swarm._kill(3)
        await tab.until(f"{ROW_OF_P03}.className.includes('gone')")
        await tab.until("document.querySelector('#log').textContent.includes('p03 is dead')")

        await tab.click(*await tab.value(SPOT_OF_P01))
        await tab.until("document.querySelector('#detail-name').textContent === 'p01'")
        await tab.value("document.querySelector('[data-kind=slow]').click()")
        await tab.until("document.querySelector('#faults-list').textContent.includes('p01: slow')")
        await tab.until("document.querySelector('#slow').textContent.includes('p01 computes')")

        assert tab.complaints == []
        assert all(one.startswith((url, "data:")) for one in tab.requested)


async def test_names_of_peers_are_text_and_never_markup(tab):
    swarm = MadeUpSwarm(3)
    swarm.peers[1].name = "<img/src=x>"
    page = LivePage(ANY_PORT, lambda: swarm.now)
    async with page.serving() as url:
        view = SwarmView(0.0)
        page.show(view, MadeUpFeed(view, swarm, past_s=2.0))
        await tab.open(url, 400, 900, dark=True)
        await tab.until("document.querySelector('#rows').textContent.includes('<img/src=x>')")
        assert await tab.value("document.querySelectorAll('img').length") == 0
        assert await tab.value("document.documentElement.dataset.theme") == "dark"
        assert await tab.value("document.documentElement.scrollWidth <= innerWidth")
        assert tab.complaints == []


async def test_a_thousand_peers_are_a_grid_of_cells_and_two_hundred_rows(tab):
    swarm = MadeUpSwarm(1024)
    page = LivePage(ANY_PORT, lambda: swarm.now)
    async with page.serving() as url:
        view = SwarmView(0.0)
        feed = MadeUpFeed(view, swarm, past_s=3.0)
        page.show(view, feed)
        async with aiohttp.ClientSession() as session, session.get(f"{url}/state.json") as answer:
            assert (await answer.json())["known"] == 1024
        await tab.open(url, 1600, 1000)
        await tab.until(f"{HERE}.length === 1024")
        await tab.until(f"{CELLS} === 1024")
        await tab.until("document.querySelectorAll('#rows tr').length === 200")
        await tab.value("document.querySelector('#rows-all').click()")
        await tab.until("document.querySelectorAll('#rows tr').length === 1024")
        assert tab.complaints == []
