"""AD-PSGD: its graphs, and that gossip loses nothing, whatever the network and the peers do."""

from collections.abc import Callable
from itertools import combinations
from random import Random
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.averaging.ad_psgd import Graph, neighbours
from p2ptrain.averaging.base import MOST_ASKED, in_turn
from p2ptrain.core.effects import Outcome
from p2ptrain.ids import PeerId, Seconds
from p2ptrain.sim.link import Link
from p2ptrain.sim.world import World
from tests.helpers.worlds import Books, build, consensus_distance, models, steps_of, sum_of

GRAPHS = get_args(Graph)
COUNTS = [1, 2, 3, 4, 5, 7, 8, 13, 16]


def asks(graph: Graph, count: int) -> dict[str, tuple[PeerId, ...]]:
    """Whom each of `count` peers may ask."""
    names = [PeerId(f"p{i:02}") for i in range(count)]
    return {me: neighbours(graph, me, [n for n in names if n != me]) for me in names}


# --- graphs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("graph", GRAPHS)
def test_nobody_asks_itself_or_anyone_twice(graph: str, count: int):
    for me, others in asks(graph, count).items():
        assert me not in others
        assert list(others) == sorted(set(others))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("graph", GRAPHS)
def test_news_reaches_everyone(graph: str, count: int):
    edges = asks(graph, count)
    links = {me: set(others) for me, others in edges.items()}
    for me, others in edges.items():
        for other in others:
            links[other].add(me)  # an average goes both ways, whoever asked
    reached, todo = {"p00"}, ["p00"]
    while todo:
        for other in sorted(links[todo.pop()] - reached):
            reached.add(other)
            todo.append(other)
    assert reached == set(edges)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("graph", ["random", "ring", "exponential"])
def test_who_may_ask_may_be_asked(graph: str, count: int):
    edges = asks(graph, count)
    assert all(me in edges[other] for me, others in edges.items() for other in others)


@pytest.mark.parametrize("count", COUNTS)
def test_on_the_bipartite_graph_even_places_ask_odd_ones_which_never_ask(count: int):
    for place, others in enumerate(asks("bipartite", count).values()):
        if place % 2 == 1:
            assert others == ()
        else:
            assert others == tuple(f"p{i:02}" for i in range(1, count, 2))


@pytest.mark.parametrize(
    ("graph", "count", "expected"),
    [
        ("random", 3, {"p00": ("p01", "p02"), "p01": ("p00", "p02"), "p02": ("p00", "p01")}),
        ("ring", 2, {"p00": ("p01",), "p01": ("p00",)}),
        ("ring", 5, {"p00": ("p01", "p04"), "p03": ("p02", "p04")}),
        ("exponential", 5, {"p00": ("p01", "p02", "p03", "p04")}),
        ("exponential", 16, {"p00": ("p01", "p02", "p04", "p08", "p12", "p14", "p15")}),
    ],
)
def test_graphs_in_examples(graph: str, count: int, expected: dict[str, tuple[str, ...]]):
    edges = asks(graph, count)
    assert {me: edges[me] for me in expected} == expected


def test_alone_one_asks_nobody():
    assert all(neighbours(graph, PeerId("a"), []) == () for graph in GRAPHS)


@given(seed=st.integers(), graph=st.sampled_from(GRAPHS), count=st.integers(1, 12))
def test_the_choice_follows_from_the_view_and_the_seed(seed: int, graph: str, count: int):
    for me, others in asks(graph, count).items():
        view = [PeerId(name) for name in asks(graph, count) if name != me]
        once = in_turn(neighbours(graph, PeerId(me), view), {}, Random(seed))
        again = in_turn(neighbours(graph, PeerId(me), view[::-1]), {}, Random(seed))
        assert once == again
        assert sorted(once) == list(others)


@given(seed=st.integers())
def test_whom_we_met_longest_ago_is_asked_first_and_before_them_whom_we_never_met(seed: int):
    peers = [PeerId(name) for name in "abcdef"]
    met = {PeerId("a"): 9, PeerId("b"): 3, PeerId("c"): 9, PeerId("d"): 5}
    order = "".join(in_turn(peers, met, Random(seed)))
    assert sorted(order[:2]) == ["e", "f"]
    assert order[2:4] == "bd"
    assert sorted(order[4:]) == ["a", "c"]


def test_of_very_many_only_some_are_asked():
    peers = [PeerId(f"p{i:04}") for i in range(2000)]
    some = in_turn(peers, {}, Random(1))
    assert len(set(some)) == len(some) == MOST_ASKED


# --- meetings -------------------------------------------------------------------------------------


def meetings(world: World) -> set[tuple[str, ...]]:
    """The groups that have formed."""
    return {
        tuple(record["members"])
        for peer in world.peers.values()
        for record in peer.metrics.of("group")
        if record["outcome"] == Outcome.DONE
    }


async def test_on_the_random_graph_every_pair_meets():
    world = await build(5, "ad_psgd")
    await world.train(60, steps_of(0.1))
    assert meetings(world) == set(combinations(sorted(world.peers), 2))
    await world.close()


@pytest.mark.parametrize("graph", ["ring", "exponential", "bipartite"])
async def test_nobody_meets_outside_the_graph(graph: str):
    world = await build(6, "ad_psgd", graph=graph)
    await world.train(40, steps_of(0.1))
    names = sorted(world.peers)
    allowed = {
        tuple(sorted((me, other)))
        for me in names
        for other in neighbours(graph, me, [n for n in names if n != me])
    }
    assert meetings(world) == allowed
    await world.close()


async def test_a_group_is_asked_for_once_per_so_many_updates():
    world = await build(2, "ad_psgd", every_updates=5)
    await world.train(50, steps_of(0.1))
    formed = [peer.driver.accounts.groups_formed for peer in world.peers.values()]
    assert all(10 <= count <= 20 for count in formed)  # ten of its own, and those it was asked into
    await world.close()


async def test_who_is_taken_by_others_still_starts_its_own_exchanges():
    world = await build(3, "ad_psgd")
    await world.train(50, steps_of(0.1))
    for name, peer in world.peers.items():
        done = [r["ticket"] for r in peer.metrics.of("group") if r["outcome"] == Outcome.DONE]
        own = [ticket for ticket in done if ticket.startswith(f"{name}#")]
        assert len(own) == pytest.approx(50, abs=2)
        assert len(done) > len(own)
    await world.close()


async def test_a_slow_exchange_leaves_no_backlog_behind():
    """An average of 0.8 s and more, a step of 0.02 s: one may run, and each peer may want one."""
    world = await build(2, "ad_psgd", link=Link(latency_s=0.1))
    await world.train(100, steps_of(0.02))
    ended = [peer.metrics.of("step")[-1]["t"] for peer in world.peers.values()]
    averaged = [peer.metrics.of("group")[-1]["t"] for peer in world.peers.values()]
    assert max(averaged) < max(ended) + 3.0
    await world.close()


async def test_nobody_waits_for_a_slow_peer():
    world = await build(4, "ad_psgd")
    await world.train(30, steps_of(0.05, p3=0.5))
    for name, peer in world.peers.items():
        assert peer.boundary.totals.wait_s == 0
        last_step = peer.metrics.of("step")[-1]
        assert name == "p3" or last_step["t"] < 2.0
    await world.close()


# --- nothing is lost ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "graph"),
    [*((5, graph) for graph in GRAPHS), (2, "random"), (3, "ring"), (8, "random")],
)
async def test_all_reach_the_mean_of_where_they_began_and_all_updates_are_there(
    count: int, graph: str
):
    """Issue A: with different starting points and updates of known sum injected meanwhile."""
    await gossip_until_equal(await build(count, "ad_psgd", seed=count, graph=graph), mixing=100)


FAULTS = {
    "loss": Link(latency_s=0.005, loss=0.05),
    "duplication": Link(latency_s=0.005, duplication=0.5),
    "reordering": Link(latency_s=0.005, jitter_s=0.1),
    "all of it": Link(latency_s=0.02, jitter_s=0.2, loss=0.03, duplication=0.2),
}


@pytest.mark.parametrize(
    ("count", "fault"), [*((3, fault) for fault in FAULTS), (2, "all of it"), (5, "all of it")]
)
async def test_a_bad_network_costs_time_and_no_update(count: int, fault: str):
    await gossip_until_equal(await build(count, "ad_psgd", link=FAULTS[fault]), mixing=200)


@pytest.mark.parametrize("seed", range(5))
async def test_late_words_between_slow_streams_tear_no_average(seed: int):
    """Streams so slow that words are said again and again while chunks are on their way."""
    link = Link(latency_s=0.15, jitter_s=0.6, duplication=0.5)
    world = await build(3, "ad_psgd", seed=seed, link=link)
    books = Books(world)
    await world.train(200, steps_of(0.1), books.injecting(200))
    np.testing.assert_allclose(sum_of(world), books.due_M, rtol=1e-5)
    assert len(meetings(world)) == 3
    await world.close()


async def test_a_slow_peer_loses_nothing_either():
    world = await build(4, "ad_psgd")
    await gossip_until_equal(world, mixing=80, step_s=steps_of(0.1, p2=0.4))


async def gossip_until_equal(
    world: World, *, mixing: int, step_s: Callable[[PeerId], Seconds] | None = None
) -> None:
    """Inject updates for 60 steps, mix for `mixing` more, then audit the books."""
    books = Books(world)
    await world.train(60 + mixing, step_s or steps_of(0.1), books.injecting(60))
    due_M = books.due_M / len(world.peers)
    scale = abs(due_M).max()
    assert books.injected == 60 * len(world.peers)
    assert abs(models(world) - due_M).max() <= 1e-5 * scale
    assert consensus_distance(world) <= 1e-5
    assert abs(sum_of(world) / len(world.peers) - due_M).max() <= 1e-5 * scale
    await world.close()
