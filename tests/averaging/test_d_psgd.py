"""D-PSGD: who averages with whom, and what a slow peer costs."""

from itertools import chain
from typing import get_args

import pytest

from p2ptrain.averaging import ConfigError, PeerId, What
from p2ptrain.averaging.base import load_algorithm
from p2ptrain.averaging.d_psgd import Graph, coloured_edges
from p2ptrain.core.effects import Outcome
from tests.helpers.worlds import build, steps_of

GRAPHS = get_args(Graph)
COUNTS = range(1, 18)


def degrees(graph: Graph, count: int) -> dict[int, int]:
    """How many neighbours each rank has."""
    edges = list(chain.from_iterable(coloured_edges(graph, count)))
    assert len(set(edges)) == len(edges), "each edge has one colour"
    return {rank: sum(rank in edge for edge in edges) for rank in range(count)}


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("graph", GRAPHS)
def test_edges_of_one_colour_share_nobody(graph: str, count: int):
    for colour in coloured_edges(graph, count):
        ends = list(chain.from_iterable(colour))
        assert len(set(ends)) == len(ends)


@pytest.mark.parametrize("count", range(3, 18))
def test_on_a_ring_everyone_has_two_neighbours_and_few_averages_in_a_step(count: int):
    assert set(degrees("ring", count).values()) == {2}
    assert len(coloured_edges("ring", count)) == 2 + count % 2


@pytest.mark.parametrize("count", [8, 16])
def test_on_an_exponential_graph_neighbours_are_powers_of_two_away(count: int):
    for low, high in chain.from_iterable(coloured_edges("exponential", count)):
        hop = min(high - low, count - high + low)
        assert hop & (hop - 1) == 0
    assert set(degrees("exponential", count).values()) == {2 * count.bit_length() - 3}


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("graph", GRAPHS)
def test_all_members_of_a_group_name_the_same_group_and_all_wait(graph: str, count: int):
    algorithm = load_algorithm("d_psgd", {"graph": graph})
    peers = [PeerId(f"p{rank:02}") for rank in range(count)]
    for version in range(1, 8):
        rounds = {peer: algorithm.schedule(version, peers, peer) for peer in peers}
        for peer, here in rounds.items():
            assert peer in here.members
            assert all(rounds[other] == here for other in here.members)
            assert here.rule.waiting == len(here.members)
            assert here.what is What.MODELS


async def test_a_slow_peer_slows_everyone_in_the_end():
    world = await build(6, "d_psgd", equal=True)
    await world.train(40, steps_of(0.05, p3=0.25))
    for peer in world.peers.values():
        assert peer.metrics.of("step")[-1]["t"] > 30 * 0.25
    await world.close()


async def test_a_step_has_one_version_for_each_colour_of_a_peers_edges():
    world = await build(4, "d_psgd", equal=True)
    await world.train(20, steps_of(0.1))
    for peer in world.peers.values():
        done = [r for r in peer.metrics.of("group") if r["outcome"] == Outcome.DONE]
        # Two colours; in the first and the last step a neighbour may not train yet, or any more.
        assert 2 * 18 <= len(done) <= 2 * 20
    await world.close()


def test_it_averages_models_and_its_trainers_wait():
    algorithm = load_algorithm("d_psgd")
    assert (algorithm.averages, algorithm.trainer_waits) == ("models", True)
    assert (algorithm.in_step, algorithm.conserves_mean) == (False, True)


def test_an_unknown_graph_is_refused_by_name():
    with pytest.raises(ConfigError, match="graph = 'star'; there are: ring, exponential"):
        load_algorithm("d_psgd", {"graph": "star"})
