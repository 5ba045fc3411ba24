"""Taking fragments of an outer state over: one at a time, on a link that may be slow for them."""

import asyncio
from types import SimpleNamespace
from typing import Any

from p2ptrain.compute.replica import State
from p2ptrain.ids import PeerId
from p2ptrain.runtime.exchange import ExchangeConfig
from p2ptrain.runtime.state_transfer import StateTransfer

DONORS = (PeerId("p1"),)


class Outer:
    """Notes what has been taken over."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.forgotten: list[int] = []

    def forget_missed(self, fragment: int) -> None:
        self.forgotten.append(fragment)

    def take_over(self, fragment: int, state: State) -> bool:
        self.taken.append(fragment)
        return True


class SlowLink(StateTransfer):
    """Transfers end when the test says so."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.asked: list[tuple[int | None, int]] = []
        self.arrivals: list[asyncio.Future[None]] = []

    async def download(
        self,
        donor: PeerId,
        version: int | None = None,
        lineage: int = 0,
        fragment: int | None = None,
    ) -> State:
        self.asked.append((fragment, lineage))
        self.arrivals.append(asyncio.get_running_loop().create_future())
        await self.arrivals[-1]
        return memoryview(b"")

    async def arrive(self) -> None:
        """The transfer under way ends, and the next one begins."""
        self.arrivals[-1].set_result(None)
        for _ in range(5):
            await asyncio.sleep(0)


async def build() -> tuple[SlowLink, Outer]:
    async def run(work: Any) -> Any:
        return work()

    outer, tasks = Outer(), []
    host: Any = SimpleNamespace(
        name=PeerId("p0"),
        averages=SimpleNamespace(outer=outer),
        start=lambda work: tasks.append(asyncio.ensure_future(work)),
    )
    nothing: Any = None
    executor: Any = run
    return SlowLink(host, nothing, nothing, config=ExchangeConfig(), executor=executor), outer


async def test_fragments_are_taken_over_one_at_a_time_the_latest_step_first():
    link, outer = await build()
    for fragment in (0, 1, 2):
        link.follow(fragment, digest=fragment + 10, donors=DONORS)
    await asyncio.sleep(0)
    assert link.asked == [(2, 12)]
    await link.arrive()
    assert link.asked == [(2, 12), (1, 11)]
    await link.arrive()
    await link.arrive()
    assert outer.taken == [2, 1, 0]


async def test_a_fragment_that_waits_is_taken_over_as_it_is_after_its_latest_step():
    link, outer = await build()
    link.follow(0, digest=10, donors=DONORS)
    await asyncio.sleep(0)
    for fragment, digest in ((1, 11), (2, 12), (1, 21)):
        link.follow(fragment, digest, donors=DONORS)
    for _ in range(3):
        await link.arrive()
    assert link.asked == [(0, 10), (1, 21), (2, 12)]
    assert outer.taken == [0, 1, 2]


async def test_a_fragment_that_is_under_way_is_not_asked_for_twice():
    link, outer = await build()
    link.follow(0, digest=10, donors=DONORS)
    await asyncio.sleep(0)
    link.follow(0, digest=20, donors=DONORS)
    assert outer.forgotten == [0], "the steps since are made on top of what arrives"
    await link.arrive()
    assert outer.taken == [0]
    link.follow(0, digest=30, donors=DONORS)
    await asyncio.sleep(0)
    assert link.asked == [(0, 10), (0, 30)]
