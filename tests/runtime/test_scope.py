"""The ordered task group."""

import asyncio

import pytest

from p2ptrain.errors import InvariantViolation
from p2ptrain.runtime.scope import Scope


async def wait_and_note(log: list[str], name: str, delay_s: float = 1e6) -> None:
    try:
        await asyncio.sleep(delay_s)
        log.append(f"{name} ended")
    except asyncio.CancelledError:
        log.append(f"{name} cancelled")
        raise


async def fail(delay_s: float = 0.0) -> None:
    await asyncio.sleep(delay_s)
    raise ValueError("broken")


async def test_it_leaves_when_all_have_ended():
    log: list[str] = []
    async with Scope() as scope:
        scope.start(wait_and_note(log, "slow", 2.0))
        scope.start(wait_and_note(log, "fast", 1.0))
    assert log == ["fast ended", "slow ended"]


async def test_an_empty_scope_leaves_at_once():
    async with Scope():
        pass


async def test_the_first_failure_cancels_the_others_in_the_order_they_started_in():
    log: list[str] = []
    names = [f"t{number}" for number in range(20)]

    async def run() -> None:
        async with Scope() as scope:
            for name in names:
                scope.start(wait_and_note(log, name))
            scope.start(fail(1.0))

    with pytest.raises(ValueError, match="broken"):
        await run()
    assert log == [f"{name} cancelled" for name in names]


async def test_an_error_in_the_body_cancels_the_tasks_and_passes_through():
    log: list[str] = []

    async def run() -> None:
        async with Scope() as scope:
            scope.start(wait_and_note(log, "task"))
            await asyncio.sleep(1.0)
            raise ValueError("of the body")

    with pytest.raises(ValueError, match="of the body"):
        await run()
    assert log == ["task cancelled"]


async def test_cancelling_the_owner_cancels_the_tasks_and_waits_for_them():
    log: list[str] = []

    async def slow_to_end() -> None:
        try:
            await asyncio.sleep(1e6)
        finally:
            await asyncio.sleep(1.0)
            log.append("cleaned up")

    async def run() -> None:
        async with Scope() as scope:
            scope.start(slow_to_end())

    owner = asyncio.create_task(run())
    await asyncio.sleep(0.1)
    owner.cancel("enough")
    with pytest.raises(asyncio.CancelledError, match="enough"):
        await owner
    assert log == ["cleaned up"]


async def test_tasks_may_start_tasks():
    log: list[str] = []

    async def start_another(scope: Scope) -> None:
        await asyncio.sleep(1.0)
        scope.start(wait_and_note(log, "child", 1.0))

    async with Scope() as scope:
        scope.start(start_another(scope))
    assert log == ["child ended"]


async def test_of_two_failures_the_first_is_raised():
    async def fail_late() -> None:
        try:
            await asyncio.sleep(1e6)
        except asyncio.CancelledError:
            raise ValueError("second") from None

    async def run() -> None:
        async with Scope() as scope:
            scope.start(fail_late())
            scope.start(fail())

    with pytest.raises(ValueError, match="broken"):
        await run()


async def test_a_task_that_somebody_else_cancelled_has_not_done_its_work():
    async def run() -> None:
        async with Scope() as scope:
            task = scope.start(asyncio.sleep(1e6))
            asyncio.get_running_loop().call_later(1.0, task.cancel)

    with pytest.raises(InvariantViolation, match="cancelled"):
        await run()


async def test_a_scope_fails_when_it_is_told_to_with_that_error_and_the_first_one():
    stopped = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(1000.0)
        finally:
            stopped.set()

    async def run(scope: Scope) -> None:
        async with scope:
            scope.start(work())

    scope = Scope()
    running = asyncio.create_task(run(scope))
    await asyncio.sleep(1.0)
    scope.fail(ValueError("first"))
    scope.fail(ValueError("second"))
    with pytest.raises(ValueError, match="first"):
        await running
    assert stopped.is_set()
