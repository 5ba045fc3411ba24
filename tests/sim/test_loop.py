"""The virtual loop: waiting is free, waiting for ever is an error."""

import asyncio

import pytest

from p2ptrain.sim.loop import SimulationStuck, run


async def test_an_hour_passes_at_once():
    loop = asyncio.get_running_loop()
    await asyncio.sleep(3600)
    assert loop.time() == pytest.approx(3600)


def test_waiting_for_ever_names_the_task_and_the_line():
    async def wait_for_godot() -> None:
        await asyncio.Event().wait()

    with pytest.raises(SimulationStuck, match="wait_for_godot"):
        run(wait_for_godot())
