"""A peer that has stopped averaging says so, in a world of virtual time."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from p2ptrain.errors import TransportError
from p2ptrain.ids import Address, PeerId
from p2ptrain.net.transport import ChunkStream
from p2ptrain.net.wire import Opening
from p2ptrain.runtime.board import Board
from p2ptrain.sim.network import SimTransport
from p2ptrain.sim.world import World
from tests.helpers.worlds import build, steps_of


def told(world: World, name: str) -> list[dict[str, Any]]:
    """What `name` has said of silences."""
    warnings = world.peers[PeerId(name)].metrics.of("warning")
    return [warning for warning in warnings if "silent" in warning]


async def training(world: World, for_s: float) -> None:
    """Peers take steps of 0.2 s in the background from now on; `for_s` pass."""
    task = asyncio.create_task(world.train(100_000, steps_of(0.2)))
    await asyncio.sleep(for_s)
    assert not task.done()


@pytest.fixture
def stop_streams(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Control messages still arrive, chunks do not: every stream ends before its opening."""

    async def open(self: SimTransport, target: Address, opening: Opening) -> ChunkStream:
        await asyncio.sleep(2.0)
        raise TransportError(f"{self._network.name(target)} opened no stream within 2 s")

    return lambda: monkeypatch.setattr(SimTransport, "open", open)


@pytest.mark.parametrize("algorithm", ["ad_psgd", "allreduce", "wagma"])
async def test_peers_that_average_say_nothing(algorithm: str):
    world = await build(3, algorithm, equal=True)
    await training(world, for_s=45.0)
    assert [said for name in world.peers for said in told(world, name)] == []
    await world.close()


@pytest.mark.parametrize("algorithm", ["ad_psgd", "allreduce"])
async def test_peers_whose_averages_all_fail_say_so_once_with_the_reason_and_when_it_ends(
    algorithm: str, stop_streams: Callable[[], None], monkeypatch: pytest.MonkeyPatch
):
    world = await build(3, algorithm, equal=True)
    await training(world, for_s=5.0)
    stop_streams()
    await asyncio.sleep(60.0)
    (said,) = told(world, "p1")
    assert said["silent"] is True
    assert said["text"].startswith("p1 has not averaged for 30 s (usually every ")
    assert "opened no stream within 2 s, " in said["text"]
    assert said["text"].endswith(" of the last 9 attempts")
    monkeypatch.undo()
    await asyncio.sleep(5.0)
    _, over = told(world, "p1")
    assert over["silent"] is False
    assert over["text"].startswith("p1 averages again after 6")
    await world.close()


async def test_a_peer_that_waits_at_a_barrier_for_ever_says_for_what():
    world = await build(2, "allreduce", equal=True)
    p1 = world.peers[PeerId("p1")]
    for peer in world.peers.values():
        peer.boundary.begin()
    waiting = p1.process.start(p1.boundary.step(1, None, lambda: None))
    await asyncio.sleep(40.0)
    (said,) = told(world, "p1")
    assert said["text"] == (
        "p1 has not averaged for 30 s (never yet): "
        "no attempt has ended; it waits for the others at version 0"
    )
    waiting.cancel()
    await world.close()


@pytest.mark.parametrize("algorithm", ["ad_psgd", "allreduce"])
async def test_a_first_step_that_lasts_two_minutes_is_no_silence(algorithm: str):
    world = await build(2, algorithm, equal=True)
    task = asyncio.create_task(world.train(1, lambda _: 120.0))
    await asyncio.sleep(110.0)
    assert not task.done()
    await asyncio.sleep(15.0)
    assert [said for name in world.peers for said in told(world, name)] == []
    await world.close()


async def test_a_peer_alone_is_not_silent_until_somebody_has_been_there_for_long_enough(
    stop_streams: Callable[[], None],
):
    world = await build(1, "ad_psgd")
    await training(world, for_s=100.0)
    assert told(world, "p0") == []
    stop_streams()
    late = await world.add("p1", world.peers[PeerId("p0")].replica, "ad_psgd")
    late.boundary.begin()
    await asyncio.sleep(25.0)
    assert told(world, "p0") == []
    await asyncio.sleep(10.0)
    assert len(told(world, "p0")) == 1
    await world.close()


async def test_a_peer_whose_trainer_has_ended_is_not_silent(stop_streams: Callable[[], None]):
    world = await build(2, "ad_psgd", equal=True)
    await world.train(20, steps_of(0.1))
    stop_streams()
    await asyncio.sleep(100.0)
    assert told(world, "p0") == []
    await world.close()


def test_a_board_shows_a_silence_until_it_is_over_and_the_time_since_the_last_average():
    now = [100.0]
    board = Board(lambda: now[0])
    assert board.since_average_s is None
    board.record("group", outcome="done", members=("p0",), consensus_distance_l2=None)
    now[0] += 41
    assert board.since_average_s == 41
    board.record("warning", text="p0 has not averaged for 41 s", silent=True)
    board.record("warning", text="another one")
    assert (board.silence, board.warning) == ("p0 has not averaged for 41 s", "another one")
    board.record("warning", text="p0 averages again after 41 s", silent=False)
    assert board.silence == ""
