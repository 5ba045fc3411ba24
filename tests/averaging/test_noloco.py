"""NoLoCo: whom its peers meet."""

import pytest

from p2ptrain.core.effects import Outcome
from p2ptrain.sim.link import Link
from p2ptrain.sim.world import World
from tests.helpers.worlds import build, steps_of

IN_ROW = 12
"""Meetings within which what one peer knows has reached all four."""


def pairs(world: World) -> list[tuple[str, ...]]:
    """Who has met whom, in the order in which the meetings ended."""
    ended = {
        record["ticket"]: (record["t"], tuple(record["members"]))
        for peer in world.peers.values()
        for record in peer.metrics.of("group")
        if record["outcome"] == Outcome.DONE
    }
    return [pair for _, pair in sorted(ended.values())]


def reached_from(start: str, meetings: list[tuple[str, ...]]) -> set[str]:
    """The peers whose models have something of `start`, after these meetings."""
    reached = {start}
    for pair in meetings:
        if reached & set(pair):
            reached |= set(pair)
    return reached


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("latency_s", [0.02, 0.05])
async def test_four_peers_whose_meetings_follow_each_other_do_not_part_in_two_pairs(
    latency_s: float, seed: int
):
    """World 1508: the members of the last pair were the first to be free for each other again."""
    world = await build(4, "noloco", seed=seed, period=1, link=Link(latency_s=latency_s))
    await world.train(60, steps_of(0.1))
    met = pairs(world)
    assert len(met) >= 2 * IN_ROW
    for first in range(len(met) - IN_ROW):
        some = met[first : first + IN_ROW]
        assert all(reached_from(peer, some) == set(world.peers) for peer in world.peers)
    await world.close()
