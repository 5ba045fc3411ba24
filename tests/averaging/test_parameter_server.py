"""Parameter servers: nothing that is pushed is lost, no gap is too wide, and a server may die."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from random import Random

import numpy as np
import pytest

from p2ptrain.averaging import AlgorithmMessage, RemoteProtocolError
from p2ptrain.averaging.parameter_server import ParameterServer
from p2ptrain.core.choice import Choice
from p2ptrain.core.version_vectors import MOST_VERSION, VersionVector, history_of
from p2ptrain.errors import ConfigError, RefusedError
from p2ptrain.ids import PeerId, Ticket
from p2ptrain.net.wire import AverageOpening
from p2ptrain.runtime.exchange import ExchangeConfig
from p2ptrain.runtime.parameters import UPDATE
from p2ptrain.runtime.pushes import HEADER
from p2ptrain.sim.faults import Partition, Pause
from p2ptrain.sim.link import Link
from p2ptrain.sim.loop import run
from p2ptrain.sim.world import SimPeer, World
from tests.helpers.worlds import Books, build, consensus_distance, models, steps_of

ALONE = ExchangeConfig(chunk_kib=1)


def bytes_of(world: World, field: str) -> dict[PeerId, int]:
    return {name: getattr(peer.driver.accounts, field) for name, peer in world.peers.items()}


async def test_one_server_reduces_everything_and_three_a_third_each():
    """Of 3,000 numbers in steps of 4: one server moves three vectors each way, a worker one."""
    sent = {}
    for servers in (1, 3):
        world = await build(
            4, "parameter_server", equal=True, size=2999, exchange=ALONE, servers=servers
        )
        await world.train(4, steps_of(0.1), Books(world).injecting(4))
        sent[servers] = [n / 4 / 12_000 for n in bytes_of(world, "sent_bytes").values()]
        assert consensus_distance(world) == 0
        await world.close()
    assert sent[1] == pytest.approx([3, 1, 1, 1], rel=1e-2)
    assert sent[3] == pytest.approx([5 / 3, 5 / 3, 5 / 3, 1], rel=1e-2)


@pytest.mark.parametrize("sync", ["asp", "ssp"])
@pytest.mark.parametrize("servers", [1, 3, 8])
async def test_each_update_counts_once_whatever_the_network_does(sync: str, servers: int):
    link = Link(latency_s=0.02, jitter_s=0.05, loss=0.05, duplication=0.2)
    world = await build(
        4, "parameter_server", equal=True, seed=5, link=link, sync=sync, servers=servers, share=1
    )
    books, start_M = Books(world), models(world)[0]
    await world.train(30, steps_of(0.05, p2=0.12), books.injecting(20))
    due_M = np.tile(start_M + books.updates_M, (4, 1))
    np.testing.assert_allclose(models(world), due_M, rtol=1e-5)
    await world.close()


async def test_by_default_a_step_of_all_counts_as_one_step():
    world = await build(4, "parameter_server", equal=True, sync="asp")
    books, start_M = Books(world), models(world)[0]
    await world.train(30, steps_of(0.05), books.injecting(20))
    np.testing.assert_allclose(models(world)[1], start_M + books.updates_M / 4, rtol=1e-5)
    await world.close()


async def test_no_peer_waits_for_a_slow_one_without_a_bound():
    waits = {}
    for sync in ("asp", "ssp"):
        world = await build(4, "parameter_server", equal=True, sync=sync)
        await world.train(20, steps_of(0.1, p3=0.5))
        waits[sync] = world.peers[PeerId("p1")].boundary.totals.wait_s
        await world.close()
    assert waits["asp"] < 0.5
    assert waits["ssp"] > 5


def widest_gap(seed: int) -> int:
    """How far a peer was ahead of the slowest one when it began a step, less what it may be."""
    chance = Random(f"{seed}/gap")
    gap, peers = chance.choice((0, 1, 3)), chance.randint(2, 5)
    over: list[int] = []

    async def work() -> None:
        link = Link(latency_s=0.01, jitter_s=chance.choice((0, 0.1)), loss=chance.choice((0, 0.1)))
        world = await build(
            peers, "parameter_server", equal=True, seed=seed, link=link, sync="ssp", gap=gap
        )

        def begin(peer: SimPeer, step: int) -> None:
            peer.replica.gradient = np.zeros_like(peer.replica.live)

        async def train(peer: SimPeer) -> None:
            peer.lifecycle.begin()
            await asyncio.sleep(2)  # all know of all
            for _ in range(12):
                here = [one.boundary.totals.steps for one in world.peers.values()]
                over.append(peer.boundary.totals.steps - min(here) - gap)
                usual_s = chance.choice((0.05, 0.05, 0.4))
                await peer.pass_through(usual_s, lambda: begin(peer, 0))
                await peer.boundary.step(1, None, peer.replica.descend)
            await peer.boundary.end()

        if peers > 2 and chance.random() < 0.5:
            victim = chance.choice(sorted(world.peers))
            asyncio.get_running_loop().call_later(chance.uniform(2.1, 4), world.crash, victim)
        await world.run(train)
        assert min(p.boundary.totals.steps for p in world.peers.values()) == 12
        await world.close()

    run(work())
    return max(over)


def test_no_gap_is_wider_than_its_bound_in_any_world():
    widest = [widest_gap(seed) for seed in range(12)]
    assert max(widest) == 0  # and the bound is reached


P0, P1, P2, P3 = map(PeerId, ("p0", "p1", "p2", "p3"))


class View:
    """What the algorithm of one peer sees; all that it says is kept."""

    now, trains = 10.0, True

    def __init__(self, me: PeerId, *everyone: PeerId, suspect: PeerId = "", life: int = 1) -> None:
        self.me, self.suspect, self.incarnation = me, suspect, life
        self.everyone = tuple(sorted([me, *everyone]))
        self.said: list[tuple[PeerId, AlgorithmMessage]] = []

    def participants(self) -> tuple[PeerId, ...]:
        return self.everyone

    def trainees(self) -> tuple[PeerId, ...]:
        return tuple(peer for peer in self.everyone if peer != self.suspect)

    def alive(self) -> tuple[PeerId, ...]:
        return tuple(peer for peer in self.trainees() if peer != self.me)

    def tell(self, peer: PeerId, message: AlgorithmMessage) -> None:
        self.said.append((peer, message))

    def last(self, kind: str, to: PeerId) -> tuple[int, ...]:
        """The numbers last said so."""
        said = [one.numbers for peer, one in self.said if (peer, one.kind) == (to, kind)]
        return said[-1]

    def asked(self) -> set[PeerId]:
        return {peer for peer, message in self.said if message.kind == "ask"}


def counting(gap: int = 3, clock: int = 0, slowest: int = 0) -> ParameterServer:
    """The algorithm of a first server that has made so many steps."""
    algorithm = ParameterServer(ParameterServer.Config(sync="ssp", gap=gap))
    algorithm.clock, algorithm.slowest = clock, slowest
    return algorithm


def says(clock: int, slowest: int = 0, life: int = 1, kind: str = "clock") -> AlgorithmMessage:
    return AlgorithmMessage(kind, (clock, slowest, life))


def test_a_successor_lets_none_pass_a_suspect_that_it_has_not_heard():
    view, counts = View(P1, P2, P3, suspect=P3), counting(clock=5)
    counts.handle_message(view, P2, says(7))
    assert view.last("slowest", P2)[0] == 0
    counts.handle_message(view, P3, says(4))
    assert view.last("slowest", P3)[0] == 4
    counts.handle_message(view, P2, says(7))
    assert view.last("slowest", P2)[0] == 4


def test_a_successor_asks_all_that_it_has_not_heard():
    view, counts = View(P1, P2, P3), counting(clock=5, slowest=4)
    counts.handle_message(view, P2, says(7))
    assert view.asked() == {P3}
    counts.handle_message(view, P3, says(6, kind="reply"))
    counts.handle_message(view, P2, says(7))
    assert view.last("slowest", P2)[0] == 5
    asked = View(P3, P1, P2, life=9)
    counting(clock=6, slowest=4).handle_message(asked, P1, AlgorithmMessage("ask"))
    assert asked.last("reply", P1) == (6, 4, 9)


def test_a_peer_that_begins_with_the_others_counts_from_one():
    """p1 has made `gap` + 1 steps and waits; p2 ends its first one."""
    view, counts = View(P0, P1, P2), counting(gap=1, clock=2)
    counts.handle_message(view, P1, says(2))
    counts.handle_message(view, P2, says(0))
    assert view.last("slowest", P2)[:2] == (0, 1)


def test_a_newcomer_counts_on_from_the_slowest_also_after_few_steps():
    """It began at 1 while others were at 4: they had counted on without it."""
    view, counts = View(P0, P1, P2), counting(gap=1, clock=2, slowest=2)
    counts.handle_message(view, P1, says(3, slowest=2))
    counts.handle_message(view, P2, says(0))
    assert view.last("slowest", P2)[:2] == (0, 2)


def test_a_first_server_that_is_itself_a_newcomer_counts_on_from_the_slowest():
    view, counts = View(P0, P1, P2), counting(gap=1)
    counts._say_clock(view)
    assert view.asked() == {P1, P2}
    assert counts._start == 0  # it has not heard all
    counts.handle_message(view, P1, says(101, slowest=100))
    assert counts._start == 0
    counts.handle_message(view, P2, says(100, slowest=99, kind="reply"))
    assert counts._start == 100


def test_a_clock_of_an_earlier_life_does_not_count():
    view, counts = View(P0, P1), counting(clock=50, slowest=48)
    counts.handle_message(view, P1, says(0, life=2))
    counts.handle_message(view, P1, says(49, life=1))
    assert view.last("slowest", P1) == (0, 50, 2)
    newcomer = View(P1, P0, life=2)
    begins = counting()
    begins.handle_message(newcomer, P0, AlgorithmMessage("slowest", (40, 40, 1)))
    assert (begins.slowest, begins._start) == (0, 0)
    begins.handle_message(newcomer, P0, AlgorithmMessage("slowest", (0, 50, 2)))
    assert (begins.slowest, begins._start) == (0, 50)


def test_a_peer_that_the_others_went_on_without_counts_on_from_the_slowest():
    """It was taken for dead; they would wait until it had made all the steps that they made."""
    view, counts = View(P0, P1, P2), counting(gap=1, clock=81, slowest=80)
    counts.handle_message(view, P1, says(81, slowest=80))
    counts.handle_message(view, P2, says(40, slowest=39))
    assert view.last("slowest", P2)[:2] == (40, 80)
    late, follows = View(P2, P0, P1), counting(gap=1, clock=40, slowest=39)
    follows.handle_message(late, P0, AlgorithmMessage("slowest", (40, 80, 1)))
    assert late.last("clock", P0)[0] == 80


def test_a_first_server_lets_itself_pass_no_peer_that_it_has_not_heard():
    """It was alone, and so the slowest."""
    view, counts = View(P0), counting(gap=3, clock=4)
    counts._say_clock(view)
    assert counts._is_near(view)
    assert not counts._is_near(View(P0, P1))


async def test_when_the_first_server_comes_back_the_others_do_not_wait_for_it_to_catch_up():
    link = Link(latency_s=0.01)
    world = await build(3, "parameter_server", equal=True, link=link, sync="ssp", gap=1)

    async def die_and_come_back() -> None:
        await asyncio.sleep(3)
        world.crash("p0")
        await asyncio.sleep(6)
        await world.restart("p0")

    def begin(peer: SimPeer, step: int) -> None:
        peer.replica.gradient = np.zeros_like(peer.replica.live)

    async def train(peer: SimPeer) -> None:
        peer.lifecycle.begin()
        while asyncio.get_running_loop().time() < 20:
            await peer.pass_through(
                0.001 if peer.driver.name == "p0" else 0.3, lambda: begin(peer, 0)
            )
            await peer.boundary.step(1, None, peer.replica.descend)
        await peer.boundary.end()

    back = asyncio.get_running_loop().create_task(die_and_come_back())
    await world.run(train)
    await back
    clocks = [peer.driver.algorithm.clock for peer in world.peers.values()]
    steps = {name: peer.boundary.totals.steps for name, peer in world.peers.items()}
    assert max(clocks) - min(clocks) <= 2
    assert steps["p0"] < 45 < steps["p1"]
    await world.close()


@pytest.mark.parametrize(
    ("sync", "servers", "fault"),
    [
        ("asp", 1, Pause(peer="p0", at_s=5.0, for_s=6.0)),
        ("ssp", 1, Pause(peer="p0", at_s=5.0, for_s=6.0)),
        ("asp", 2, Pause(peer="p0", at_s=5.0, for_s=6.0)),
        ("asp", 1, Partition(parts=(("p3",),), at_s=5.0, for_s=5.0)),
    ],
    ids=["asp", "ssp", "two servers", "a worker is cut off"],
)
async def test_a_server_that_is_wrongly_taken_for_dead_counts_no_step_twice(
    sync: str, servers: int, fault: Pause | Partition
):
    world = await build(
        4,
        "parameter_server",
        equal=True,
        seed=2,
        sync=sync,
        share=1,
        servers=servers,
        link=Link(latency_s=0.01),
    )
    start, learning_rate = models(world)[0][0], world.peers["p0"].replica.learning_rate

    def down(peer: SimPeer, _: int) -> None:
        peer.replica.gradient = np.ones_like(peer.replica.live)

    faults = asyncio.get_running_loop().create_task(world.carry_out((fault,)))
    await world.train(150, steps_of(0.1), down)
    await faults
    made = sum(peer.boundary.totals.steps for peer in world.peers.values())
    held = [(start - model[0]) / learning_rate for model in models(world)]
    assert made == 600
    assert all(made - 4 <= steps <= made + 0.1 for steps in held)
    await world.close()


@pytest.mark.parametrize("sync", ["bsp", "asp", "ssp"])
async def test_when_a_server_dies_what_any_peer_has_got_lives_on(sync: str):
    world = await build(
        4, "parameter_server", equal=True, seed=2, sync=sync, link=Link(latency_s=0.01)
    )
    loop, before = asyncio.get_running_loop(), []

    def crash() -> None:
        before.extend(models(world)[1:])
        world.crash("p0")

    def downhill(peer: SimPeer, _: int) -> None:
        peer.replica.gradient = np.ones_like(peer.replica.live)  # all move all numbers down

    loop.call_later(1.5, crash)
    await world.train(40, steps_of(0.1), downhill)
    assert "p0" not in world.peers
    assert all(peer.boundary.totals.steps == 40 for peer in world.peers.values())
    assert models(world).max(axis=0).max() < np.array(before).max()
    assert np.all(models(world).mean(axis=0) < np.array(before).min(axis=0))  # nothing came back
    assert consensus_distance(world) < 0.01
    await world.close()


async def test_a_successor_gets_the_newest_parameters_that_any_peer_has():
    """p1 has got nothing since the start; p2 has the last answer of p0."""
    world = await build(3, "parameter_server", equal=True, learning_rate=0.0, sync="asp")
    p0, p1, p2 = world.peers.values()
    for peer in (p0, p1, p2):
        peer.lifecycle.begin()
    start = p0.model()[0]
    p2.replica.live += 1
    servers = p2.driver.algorithm.servers
    await p2.process.start(p2.swarm.exchange_updates(servers(["p0", "p1", "p2"]), 1.0))
    p0.replica.settle()
    assert p0.model()[0] == pytest.approx(start + 1)
    world.crash("p0")
    await asyncio.sleep(10)
    await p2.process.start(p2.swarm.exchange_updates(servers(["p1", "p2"]), 1.0))
    assert p1.model()[0] == pytest.approx(start + 1)
    assert p2.model()[0] == pytest.approx(start + 1)
    await world.close()


async def that_all_serve() -> tuple[World, list[SimPeer], Callable[..., Awaitable[None]]]:
    """Peers that move no number by themselves, each a server if one pushes to it, and how to."""
    world = await build(4, "parameter_server", equal=True, learning_rate=0.0, sync="asp")
    peers = list(world.peers.values())
    for peer in peers:
        peer.lifecycle.begin()

    async def push(peer: SimPeer, server: SimPeer, trained: float = 0.0) -> None:
        """As if it thought that this one is the server; what it has trained goes in whole."""
        peer.replica.live += np.float32(trained)
        server.driver.parameters.check = lambda *_: None  # type: ignore[method-assign]
        await peer.process.start(peer.swarm.exchange_updates([server.driver.name], 1.0))
        server.replica.settle()
        peer.replica.settle()

    return world, peers, push


async def test_what_comes_back_through_a_peer_that_its_server_has_not_answered_counts_once():
    """p0 answers p3; that goes on to p1, and from there through p2 back to p0."""
    world, (p0, p1, p2, p3), push = await that_all_serve()
    start = p0.model()[0]
    await push(p3, p0, 1)
    await push(p3, p1, 2)
    await push(p2, p1, 4)
    await push(p2, p0, 8)
    assert p0.model()[0] == pytest.approx(start + 1 + 2 + 4 + 8)
    await push(p3, p0)
    await push(p1, p0)
    assert all(peer.model()[0] == pytest.approx(start + 15) for peer in (p0, p1, p3))
    await world.close()


async def test_after_something_else_was_handed_on_an_earlier_answer_counts_once():
    """A short history of p1 comes to p0, then one of p2, which began from an answer of p0."""
    world, (p0, p1, p2, p3), push = await that_all_serve()
    start = p0.model()[0]
    await push(p3, p0, 1)
    await push(p1, p1, 2)  # it has heard of no one
    await push(p1, p0, 4)
    assert p0.model()[0] == pytest.approx(start + 1 + 2 + 4)
    await push(p3, p2, 8)
    await push(p3, p0, 16)
    without = "what p0 got after its answer to p3 is more than what p2 got"
    assert p0.model()[0] == pytest.approx(start + 1 + 2 + 4 + 16), without
    await world.close()


async def test_what_was_handed_on_and_comes_again_counts_once():
    """p0 hears of the history of p1 between two answers of its own, and then more of it."""
    world, (p0, p1, p2, p3), push = await that_all_serve()
    start = p0.model()[0]
    await push(p3, p0, 1)
    await push(p3, p1, 2)
    await push(p2, p1, 4)
    await push(p2, p1, 8)
    await push(p3, p0, 16)
    assert p0.model()[0] == pytest.approx(start + 1 + 2 + 16)
    await push(p2, p0, 32)
    without = "where p1 has two updates more, p0 has one"
    assert p0.model()[0] == pytest.approx(start + 1 + 2 + 4 + 8 + 32), without
    await push(p1, p0, 64)
    assert p0.model()[0] == pytest.approx(start + 1 + 2 + 4 + 8 + 32 + 64)
    await world.close()


async def push_unanswered(monkeypatch: pytest.MonkeyPatch, peer: SimPeer, server: SimPeer) -> None:
    """The server takes in what this peer has trained, and its answer is lost."""
    with monkeypatch.context() as lossy:
        lossy.setattr(server.driver.pushes, "_answer", never)
        push = peer.process.start(peer.swarm.exchange_updates([server.driver.name], 1.0))
        await asyncio.sleep(1)
        push.cancel()
        await asyncio.sleep(0.1)
    server.replica.settle()


async def never(*_: object) -> None:
    """An answer that does not go out."""
    await asyncio.get_running_loop().create_future()


def refuse(*_: object) -> None:
    raise RefusedError("this is no part of ours")


async def test_an_update_that_was_taken_in_and_not_answered_goes_again_as_it_was(monkeypatch):
    world, (p0, p1, *_), push = await that_all_serve()
    start = p0.model()[0]
    p1.replica.live += np.float32(1)
    await push_unanswered(monkeypatch, p1, p0)
    assert p0.model()[0] == pytest.approx(start + 1), "it was taken in"
    await push(p1, p0, 2)
    assert p0.model()[0] == pytest.approx(start + 1), "again, and it counts once"
    assert p1.model()[0] == pytest.approx(start + 3), "what was trained since is kept"
    await push(p1, p0)
    assert p0.model()[0] == p1.model()[0] == pytest.approx(start + 3)
    await world.close()


async def test_an_update_that_another_server_refused_meanwhile_goes_again_as_it_was(monkeypatch):
    world, (p0, p1, p2, _), push = await that_all_serve()
    start = p0.model()[0]
    p1.replica.live += np.float32(1)
    await push_unanswered(monkeypatch, p1, p0)
    p2.driver.parameters.check = refuse  # type: ignore[method-assign]
    await p1.process.start(p1.swarm.exchange_updates([p2.driver.name], 1.0))
    await push(p1, p0)
    assert p0.model()[0] == pytest.approx(start + 1)
    await world.close()


async def test_an_update_goes_again_as_it_was_to_a_server_that_was_suspect(monkeypatch):
    """It has refuted that under a new incarnation, and refuses what comes for a while."""
    world, (p0, p1, *_), push = await that_all_serve()
    start = p0.model()[0]
    p1.replica.live += np.float32(1)
    await push_unanswered(monkeypatch, p1, p0)
    membership = p0.driver.machine.membership
    membership.describe(incarnation=membership.me.incarnation + 1)
    membership.announce()
    await asyncio.sleep(5)
    p0.driver.parameters.check = refuse  # type: ignore[method-assign]
    await p1.process.start(p1.swarm.exchange_updates([p0.driver.name], 1.0))
    await push(p1, p0)
    assert p0.model()[0] == pytest.approx(start + 1)
    await world.close()


@pytest.mark.parametrize("away_s", [0.3, 10.0])
async def test_a_server_that_starts_again_is_handed_what_others_have_of_its_earlier_life(away_s):
    """Its model comes from one of them, which need not have the newest parameters."""
    world, (p0, p1, p2, p3), push = await that_all_serve()
    start = p0.model()[0]
    await push(p1, p0, 1)
    await push(p2, p0, 2)
    await push(p3, p0, 4)
    p1.replica.live += np.float32(8)  # of its next update
    world.crash("p0")
    await asyncio.sleep(away_s)
    await world.restart("p0")
    await asyncio.sleep(3)
    p0 = world.peers["p0"]
    p0.lifecycle.begin()
    for peer in (p1, p2, p3):
        await push(peer, p0)
    assert p0.model()[0] == pytest.approx(start + 1 + 2 + 4 + 8)
    await world.close()


async def test_claims_about_histories_that_a_server_has_yet_to_begin_change_nothing():
    """A liar names the next 200 of p1, at the highest version that is read."""
    world, (p0, p1, p2, p3), push = await that_all_serve()
    life = p1.driver.machine.groups.lock.incarnation
    tickets = [Ticket(p1.driver.name, life, number) for number in range(1, 200)]
    await push(p3, p2)
    lie = VersionVector({history_of(ticket): MOST_VERSION for ticket in tickets})
    p3.driver.parameters._versions[0] = lie
    await push(p3, p0)
    await push(p1, p0)
    start = p1.model()[0]
    async with asyncio.timeout(60):
        await push(p2, p1, 1)
    assert p1.model()[0] == pytest.approx(start + 1)
    await world.close()


async def test_a_server_that_is_done_serves_on_after_a_change_of_settings():
    world = await build(3, "parameter_server", equal=True, sync="asp", share=1)
    p0, *others = world.peers.values()
    start, learning_rate = p0.model()[0], p0.replica.learning_rate
    for peer in world.peers.values():
        peer.lifecycle.begin()
    await p0.boundary.end()
    choice = Choice("parameter_server", {"sync": "ssp", "gap": 8, "share": 1})
    p0.process.context().run(lambda: p0.driver.live.propose(choice, "a test wants it"))
    numbers = []
    for _ in range(3):  # the others change in the first step
        for peer in others:
            peer.replica.gradient = np.ones_like(peer.replica.live)
            await peer.boundary.step(1, None, peer.replica.descend)
        await asyncio.sleep(1)
        p0.replica.settle()
        numbers.append(p0.model()[0])
    assert {peer.driver.live.choice.text for peer in world.peers.values()} == {choice.text}
    assert numbers[2] == pytest.approx(numbers[1] - 2 * learning_rate)
    assert numbers[2] <= start - 5 * learning_rate  # of the six, one may be on its way
    await world.close()


@pytest.mark.parametrize(
    "between",
    [Choice("parameter_server", {"sync": "bsp"}), Choice("allreduce"), Choice("wagma")],
    ids=str,
)
async def test_a_server_that_has_not_trained_meanwhile_throws_nobody_back(between: Choice):
    world = await build(3, "parameter_server", equal=True, sync="asp")
    p0, *others = world.peers.values()
    start, learning_rate = p0.model()[0], p0.replica.learning_rate
    for peer in world.peers.values():
        peer.lifecycle.begin()
    await p0.boundary.end()  # it serves on, and is the first server by name

    async def train(peer: SimPeer, steps: int) -> None:
        for _ in range(steps):
            await peer.pass_through(0.1, lambda: None)
            peer.replica.gradient = np.ones_like(peer.replica.live)
            await peer.boundary.step(1, None, peer.replica.descend)

    for choice, steps in ((between, 40), (Choice("parameter_server", {"sync": "asp"}), 5)):
        p0.process.context().run(partial(p0.driver.live.propose, choice, "a test wants it"))
        await asyncio.gather(*(peer.process.start(train(peer, steps)) for peer in others))
    for peer in others:
        peer.replica.settle()
        assert (start - peer.model()[0]) / learning_rate > 40
    await world.close()


async def test_what_no_peer_would_push_to_a_server_is_refused():
    world = await build(2, "parameter_server", equal=True, sync="asp")
    p0, p1 = world.peers.values()
    for peer in (p0, p1):
        peer.lifecycle.begin()
    before_M, size, life = p0.model(), p0.replica.model_size, p0.driver.machine.membership.born
    good = np.zeros(size, "<f4")

    async def push(weight: float, part: int, parts: int, vector: np.ndarray) -> None:
        ticket = Ticket(p1.driver.name, 1, 900)
        opening = AverageOpening(
            p1.driver.digest, p1.driver.name, ticket, len(vector), 256, "fp32", UPDATE
        )
        stream = await p1.driver.open_stream(p0.driver.name, opening)
        head = HEADER.pack(weight, 0, 0, 0, life, part, parts)
        await stream.send(memoryview(head))
        await stream.send(memoryview(vector.tobytes()), True)
        await stream.receive()

    for weight, part, parts, vector, why in (
        (2.0, 0, 1, good, "numbers to p0"),
        (1.0, 0, 1, good[1:], "numbers to p0"),
        (1.0, 1, 2, good, "serves no part 1 of 2"),
        (1.0, 0, 1, good + np.inf, "not finite"),
    ):
        with pytest.raises(RefusedError, match=why):
            await p1.process.start(push(weight, part, parts, vector))
    assert np.array_equal(p0.model(), before_M)
    await world.close()


def test_a_clock_that_is_none_is_refused():
    for message in (AlgorithmMessage("clock", ()), AlgorithmMessage("time", (3,)), says(1 << 62)):
        with pytest.raises(RemoteProtocolError):
            ParameterServer().handle_message(View(P0, P1), P1, message)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"servers": 0}, "servers = 0 must be from 1 to 1024"),
        ({"sync": "tsp"}, "sync = 'tsp'; there are: bsp, ssp, asp"),
        ({"gap": -1}, "gap = -1 must be 0 or more"),
        ({"share": 1.5}, "share = 1.5 must be from 0 to 1"),
    ],
)
def test_options_that_cannot_be_are_refused_in_a_sentence(options, sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        ParameterServer.Config(**options)
