"""The virtual loop: waiting is free, waiting for ever is an error, order is the seed's."""

import asyncio
from pathlib import Path
from random import Random

import pytest

from p2ptrain.errors import ConfigError
from p2ptrain.sim.loop import SimulationStuck, VirtualLoop, run, virtual_loop
from p2ptrain.sim.process import Process
from p2ptrain.sim.trace import Trace
from tests.helpers.worlds import build, steps_of

# --- time -----------------------------------------------------------------------------------------


async def test_an_hour_passes_at_once():
    loop = asyncio.get_running_loop()
    await asyncio.sleep(3600)
    assert loop.time() == pytest.approx(3600)


async def test_timers_fire_in_order_and_of_two_for_one_moment_the_older_first():
    loop, fired = virtual_loop(), []
    for name, at in (("c", 2.0), ("a", 1.0), ("d", 2.0), ("b", 1.0)):
        loop.call_at(at, fired.append, name)
    await asyncio.sleep(3.0)
    assert fired == ["a", "b", "c", "d"]


async def test_cancelled_timers_do_not_fire_and_are_forgotten():
    loop, fired = virtual_loop(), []
    for number in range(10_000):
        timer = loop.call_at(1.0 + number, fired.append, number)
        if number % 5000:
            timer.cancel()
    await asyncio.sleep(0.5)
    assert len(loop._timers) < 2000
    await asyncio.sleep(20_000)
    assert fired == [0, 5000]


# --- waiting for ever -----------------------------------------------------------------------------


async def wait_for_godot() -> None:
    await asyncio.Event().wait()


def test_waiting_for_ever_names_the_task_and_the_line():
    with pytest.raises(SimulationStuck, match="wait_for_godot"):
        run(wait_for_godot())


def test_waiting_for_a_paused_process_names_it():
    async def work() -> None:
        process = Process("p03")
        waiting = process.start(asyncio.sleep(5.0))
        await asyncio.sleep(1.0)
        virtual_loop().pause(process)
        await waiting

    with pytest.raises(SimulationStuck, match=r"2 tasks wait for ever \(p03 paused\)"):
        run(work())


def test_a_world_that_is_stuck_shows_the_end_of_its_trace_and_how_to_draw_it(tmp_path: Path):
    trace = Trace(path=tmp_path / "trace.txt")

    async def work() -> None:
        world = await build(1, "ad_psgd", trace=trace)
        await world.train(3, steps_of(0.5))
        await wait_for_godot()

    with pytest.raises(SimulationStuck) as stuck:
        run(work())
    assert "t=1.500000s p0 step 2" in str(stuck.value)
    draw = f"diagram {tmp_path}/trace.txt --from 0.500 --to 1.500 --out failure.svg"
    assert draw in str(stuck.value)
    trace.close()


async def test_what_a_trainer_raises_carries_the_end_of_the_trace():
    world = await build(2, "ad_psgd")

    def before_step(peer: object, step: int) -> None:
        if step == 3:
            raise ArithmeticError("of the test")

    with pytest.raises(ArithmeticError) as failed:
        await world.train(5, steps_of(0.5), before_step)
    (note,) = failed.value.__notes__
    assert note.endswith(f"{world.trace.lines[-1]}\n")


# --- order ----------------------------------------------------------------------------------------


def order_of(seed: int | None, processes: int = 4, each: int = 3) -> list[str]:
    """In which order callbacks run that are all ready at once."""

    async def work() -> list[str]:
        loop, ran = virtual_loop(), []
        if seed is not None:
            loop.shuffle(Random(seed))
        for name in "abcdef"[:processes]:
            context = Process(name).context()
            for number in range(each):
                loop.call_soon(ran.append, f"{name}{number}", context=context)
        await asyncio.sleep(0.1)
        return ran

    return run(work())


def test_without_a_seed_the_order_is_that_of_asking():
    assert order_of(None) == sorted(order_of(None))


def test_processes_change_places_and_one_process_stays_in_order():
    orders = {tuple(order_of(seed)) for seed in range(20)}
    assert len(orders) == 20
    for order in orders:
        for name in "abcd":
            assert [ran for ran in order if ran[0] == name] == [f"{name}{n}" for n in range(3)]


def test_every_process_is_first_for_some_seed():
    assert {order_of(seed, each=1)[0] for seed in range(60)} == {"a0", "b0", "c0", "d0"}


def test_one_seed_has_one_order():
    assert order_of(7) == order_of(7)


# --- processes ------------------------------------------------------------------------------------


async def test_what_a_process_starts_belongs_to_it():
    loop, seen = virtual_loop(), []
    process = Process("p")
    loop.set_rate(process, 2.0)

    async def parent() -> None:
        await asyncio.create_task(child())
        seen.append(loop.time())

    async def child() -> None:
        async with asyncio.timeout(10.0):
            await asyncio.sleep(4.0)
        loop.call_later(4.0, lambda: seen.append(loop.time()))

    await process.start(parent())
    assert (seen, loop.now, loop.time()) == ([4.0], 2.0, 2.0)
    await asyncio.sleep(2.0)
    assert seen == [4.0, 8.0]


async def test_a_process_that_goes_on_reads_what_arrived_before_its_timers_fire():
    loop, ran = virtual_loop(), []
    process = Process("p")
    context = process.context()
    context.run(loop.call_later, 1.0, ran.append, "its deadline")
    loop.at(2.0, ran.append, "a late message", context=context)
    loop.pause(process)
    await asyncio.sleep(5.0)
    assert ran == []
    loop.resume(process)
    await asyncio.sleep(1.0)
    assert ran == ["a late message", "its deadline"]


async def test_work_takes_its_price_times_the_slowness_and_not_the_pauses():
    loop, process = virtual_loop(), Process("p")
    process.slowness = 3.0
    working = process.start(loop.work(2.0))
    for _ in range(2):
        await asyncio.sleep(1.5)
        loop.pause(process)
        await asyncio.sleep(10.0)
        loop.resume(process)
    await working
    assert loop.now == pytest.approx(26.0)


async def test_a_clock_that_does_not_go_forward_is_refused():
    with pytest.raises(ConfigError, match="a clock at rate 0 does not go forward"):
        virtual_loop().set_rate(Process("p"), 0)


def test_the_loop_is_asyncios_own_in_all_else():
    async def work() -> list[object]:
        assert isinstance(asyncio.get_running_loop(), VirtualLoop)
        return await asyncio.gather(
            asyncio.wait_for(asyncio.sleep(1.0, "slept"), 2.0),
            asyncio.wait_for(asyncio.sleep(9.0), 1.0),
            return_exceptions=True,
        )

    slept, late = run(work())
    assert slept == "slept"
    assert isinstance(late, TimeoutError)
