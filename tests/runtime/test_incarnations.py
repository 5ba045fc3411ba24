"""A peer that starts again trains again, wherever its wall clock was set meanwhile."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest

from p2ptrain.averaging.base import known_algorithms
from p2ptrain.core.membership import HIGHEST, LEAP
from p2ptrain.core.messages import Member
from p2ptrain.errors import RefusedError
from p2ptrain.ids import Address, PeerId
from p2ptrain.net.wire import MAX_NUMBER, Hello, JoinReply
from p2ptrain.runtime.admission import request_join, successor
from p2ptrain.runtime.lifecycle import PeerLifecycle
from p2ptrain.sim.world import World
from tests.helpers.worlds import build, steps_of, until

NOW = 1_767_225_600_000
"""Milliseconds since 1970, under which the first life of a peer begins."""

DAY = 24 * 3600 * 1000
YEARS = 50 * 365 * DAY
NAMES = ("p0", "p1", "p2")
MOVES = {"a day back": -DAY, "a day on": DAY, "50 years back": -YEARS, "50 years on": YEARS}


async def restarted(algorithm: str, name: str, move_ms: int, *, dead_s: float) -> World:
    """Three peers train; `name` is killed, its clock is set, and it starts again."""
    world = await build(3, algorithm, equal=True)
    for number, peer in enumerate(world.peers.values()):
        assert peer.driver.me.incarnation > NOW + number
    asyncio.create_task(world.train(100_000, steps_of(0.1)))  # noqa: RUF006 - ends with the loop
    await asyncio.sleep(1.0)
    world.crash(name)
    await asyncio.sleep(dead_s)
    world._lives += move_ms
    await world.restart(name)
    return world


@pytest.fixture(autouse=True)
def wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lives of a world are counted as real ones are: by a wall clock."""
    begin = World.__init__

    def init(self: World, *args: object, **kwargs: object) -> None:
        begin(self, *args, **kwargs)  # type: ignore[arg-type]
        self._lives = NOW

    monkeypatch.setattr(World, "__init__", init)


def averages_with(world: World, name: str) -> dict[PeerId, int]:
    """How many averages each peer has made together with `name` in its present life."""
    groups = {other: peer.metrics.of("group") for other, peer in world.peers.items()}
    return {
        other: sum(name in g["members"] and g["outcome"] == "done" for g in found)
        for other, found in groups.items()
    }


def in_turn(values: Sequence[object]) -> list[tuple[str, str, object]]:
    """Cases of each algorithm with each name; `values` go round, so that each meets each name."""
    pairs = product(enumerate(known_algorithms()), enumerate(NAMES))
    return [
        (algorithm, name, values[(turn + place) % len(values)])
        for (turn, algorithm), (place, name) in pairs
    ]


@pytest.mark.parametrize(
    ("algorithm", "name", "move", "dead_s"),
    [
        *((*case, 6.0) for case in in_turn([*MOVES])),
        *(("allreduce", name, move, 0.3) for name in NAMES for move in MOVES),
    ],
)
async def test_a_peer_whose_clock_was_set_trains_with_the_others_within_five_seconds(
    algorithm: str, name: str, move: str, dead_s: float
):
    world = await restarted(algorithm, name, MOVES[move], dead_s=dead_s)
    before = averages_with(world, name)
    steps = {other: peer.steps for other, peer in world.peers.items()}

    def missing() -> list[str]:
        met = averages_with(world, name)
        return [
            *(f"{p} has not met {name} again" for p in world.peers if met[p] <= before[p]),
            *(
                f"{p} has not trained"
                for p, peer in world.peers.items()
                if peer.steps < steps[p] + 10
            ),
        ]

    await until(lambda: not missing(), within_s=5.0)
    assert missing() == []
    await world.close()


# --- what a host remembers, and what of it is believed --------------------------------------------


def life(incarnation: int, samples: int = 0) -> Member:
    return Member(
        peer=PeerId("p3"),
        address=Address("10.0.0.3:4000"),
        incarnation=incarnation,
        samples=samples,
    )


def test_a_newcomer_is_remembered_above_its_former_life_with_its_samples():
    assert successor(life(7), None) == life(7)
    assert successor(life(7), life(9, samples=64)) == life(10, samples=64)
    assert successor(life(7), life(7, samples=64)) == life(8, samples=64)
    assert successor(life(12), life(9, samples=64)) == life(12, samples=64)


def test_a_newcomer_is_remembered_no_higher_than_others_believe_at_once():
    assert successor(life(1 << 60), life(9)) == life(9 + LEAP)


class Host:
    """A transport on which one host answers, with these members."""

    def __init__(self, *told: Member) -> None:
        self.told = told

    async def join(self, host: Address, hello: Hello, timeout_s: float) -> JoinReply:
        return JoinReply("", self.told)


async def asked(*told: Member) -> Member:
    """What a newcomer of incarnation 7 hears of itself."""
    hello = Hello((1, 0), "ad_psgd", "", 0, life(7))
    clock = asyncio.get_running_loop().time
    return (await request_join(Host(*told), [Address("h:1")], hello, 1.0, clock))[2]  # type: ignore[arg-type]


async def test_a_newcomer_hears_of_the_highest_life_that_is_remembered_or_of_its_own():
    other = replace(life(99), peer=PeerId("p4"))
    assert await asked(other) == life(7)
    assert await asked(other, life(8, samples=64), life(9, samples=128)) == life(9, samples=128)


@pytest.mark.parametrize("made_up", [HIGHEST - LEAP + 1, HIGHEST, MAX_NUMBER])
async def test_an_incarnation_above_which_there_is_no_room_is_refused_and_not_taken(made_up: int):
    with pytest.raises(RefusedError, match=f"h:1 remembers a p3 of incarnation {made_up}, above "):
        await asked(life(made_up))


async def test_the_highest_life_that_can_be_remembered_leaves_room_for_another():
    world = await build(2, "allreduce", equal=True)
    world._lives = HIGHEST - LEAP - 2
    await world.add("p3", world.peers[PeerId("p0")].replica, "allreduce")
    world.crash("p3")
    world._lives = NOW
    again = await world.restart("p3", keeps_model=True)
    assert HIGHEST - LEAP <= again.driver.me.incarnation <= HIGHEST - LEAP + 2
    await asyncio.sleep(2.0)
    for name in ("p0", "p1"):
        assert "p3" in world.peers[PeerId(name)].swarm.alive()
    await world.close()


@pytest.mark.parametrize(("algorithm", "name", "move_ms"), in_turn([-DAY, DAY]))
async def test_one_that_joins_nobody_is_found_again_by_the_others_and_trains_with_them(
    algorithm: str, name: str, move_ms: int, monkeypatch: pytest.MonkeyPatch
):
    joins = PeerLifecycle.enter

    async def enter(self: PeerLifecycle, hosts: Sequence[Address], timeout_s: float) -> None:
        if self.name != name or self.driver.now < 1.0:  # else without --join, as the first peer was
            await joins(self, hosts, timeout_s)

    monkeypatch.setattr(PeerLifecycle, "enter", enter)
    world = await restarted(algorithm, name, move_ms, dead_s=6.0)
    await until(lambda: min(averages_with(world, name).values()) > 3, within_s=10.0)
    assert min(averages_with(world, name).values()) > 3
    await world.close()
