"""Records, snapshots, and the calls that carry a step across threads."""

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

from p2ptrain.compute.snapshots import SnapshotWriter
from p2ptrain.errors import ConfigError, LocalProtocolError
from p2ptrain.runtime.metrics import JsonlMetrics, MemoryMetrics
from p2ptrain.runtime.peer import _ProtocolThread, _run_here
from p2ptrain.sim.replica import VectorReplica


async def inline(function):
    return function()


# --- records --------------------------------------------------------------------------------------


def test_records_are_lines_with_their_kind_and_time(tmp_path):
    metrics = JsonlMetrics(tmp_path / "deep" / "p0.jsonl", lambda: 1.5)
    metrics.record("step", loss=None, text="two\nlines", samples=4)
    metrics.record("warning", text="é")
    lines = (tmp_path / "deep" / "p0.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"kind": "step", "t": 1.5, "loss": None, "text": "two\nlines", "samples": 4},
        {"kind": "warning", "t": 1.5, "text": "é"},
    ]
    metrics.close()


def test_a_record_is_on_disk_before_the_file_is_closed_and_none_after(tmp_path):
    path = tmp_path / "p0.jsonl"
    metrics = JsonlMetrics(path, lambda: 0.0)
    metrics.record("step")
    assert path.read_text().count("\n") == 1
    metrics.close()
    metrics.record("late")
    metrics.close()
    assert path.read_text().count("\n") == 1


def test_records_of_several_threads_do_not_run_together(tmp_path):
    path = tmp_path / "p0.jsonl"
    metrics = JsonlMetrics(path, lambda: 0.0)

    def write(thread: int) -> None:
        for number in range(500):
            metrics.record("step", thread=thread, number=number, padding="x" * (number % 300))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    metrics.close()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(records) == 2000
    for thread in range(4):
        own = [record["number"] for record in records if record["thread"] == thread]
        assert own == list(range(500))


def test_a_file_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="cannot write records to "):
        JsonlMetrics(tmp_path / "file" / "p0.jsonl", lambda: 0.0)


def test_a_file_of_records_stays_within_its_bound_and_can_be_read_alone(tmp_path):
    path = tmp_path / "p0.jsonl"
    metrics = JsonlMetrics(path, lambda: 1.0, most_mb=0.002)
    metrics.record("started", peer="p0")
    for step in range(200):
        metrics.record("step", step=step)
        sizes = [file.stat().st_size for file in tmp_path.iterdir()]
        assert sum(sizes) <= 2000 + 100
    metrics.close()
    for file in (path, tmp_path / "p0.jsonl.1"):
        first = json.loads(file.read_text().splitlines()[0])
        assert (first["kind"], first["again"]) == ("started", True)
    assert json.loads(path.read_text().splitlines()[-1])["step"] == 199


def test_records_in_memory_are_found_by_kind():
    metrics = MemoryMetrics(lambda: 2.0)
    metrics.record("a", x=1)
    metrics.record("b")
    metrics.record("a", x=2)
    assert [record["x"] for record in metrics.of("a")] == [1, 2]


# --- snapshots ------------------------------------------------------------------------------------


def writer_of(path, replica, metrics, changed=None, most_bytes=1e6, period_s=0.5):
    clock = asyncio.get_running_loop().time
    return SnapshotWriter(
        path, replica, metrics.record, inline, clock, period_s, most_bytes, changed
    )


async def test_rows_are_complete_before_their_record_and_come_every_so_often(tmp_path):
    metrics = MemoryMetrics(asyncio.get_running_loop().time)
    replica = VectorReplica(np.arange(4, dtype=np.float32))
    path = tmp_path / "deep" / "p0.snapshots"
    writer = writer_of(path, replica, metrics)
    writing = asyncio.create_task(writer.repeat())
    for update in range(5):
        await asyncio.sleep(0.38)
        replica.update(lambda: None)
        replica.add_delta(np.full(4, 10.0 * update, np.float32))
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    await writer.write()
    records = metrics.of("snapshot")
    rows = np.frombuffer(path.read_bytes(), "<f4").reshape(-1, 4)
    assert [record["row"] for record in records] == list(range(len(rows)))
    assert [record["t"] for record in records] == pytest.approx([0.0, 0.5, 1.0, 1.5, 1.9])
    assert [record["step"] for record in records] == [0, 1, 2, 3, 5]
    assert [record["tick"] for record in records] == [0, 1, 2, 3, 3]
    np.testing.assert_array_equal(rows[0], np.arange(4))
    np.testing.assert_array_equal(rows[-1], np.arange(4) + 100)  # pending included


async def test_peers_write_at_the_same_ticks_whenever_they_began(tmp_path):
    ticks = []
    for began_s in (0.1, 0.2):
        await asyncio.sleep(began_s)
        metrics = MemoryMetrics(asyncio.get_running_loop().time)
        replica = VectorReplica(np.zeros(4, np.float32))
        writing = asyncio.create_task(writer_of(tmp_path / "rows", replica, metrics).repeat())
        await asyncio.sleep(1.2)
        writing.cancel()
        ticks.append([(record["tick"], record["t"]) for record in metrics.of("snapshot")])
    for tick, t in [*ticks[0][1:], *ticks[1][1:]]:
        assert t == pytest.approx(tick / 2)


async def test_peers_in_step_write_after_the_same_updates_as_often_as_the_period_says(tmp_path):
    """One peer makes steps of 20 ms and writes after powers of two, then every half second."""
    metrics = MemoryMetrics(asyncio.get_running_loop().time)
    replica, changed = VectorReplica(np.zeros(4, np.float32)), asyncio.Condition()

    async def change():
        async with changed:
            await changed.wait()

    writing = asyncio.create_task(writer_of(tmp_path / "rows", replica, metrics, change).repeat())
    for _ in range(200):
        await asyncio.sleep(0.02)
        replica.update(lambda: None)
        async with changed:
            changed.notify_all()
    writing.cancel()
    steps = [record["step"] for record in metrics.of("snapshot")]
    assert steps == [0, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192]
    assert {record["tick"] for record in metrics.of("snapshot")} == {None}


async def test_no_more_than_the_budget_is_kept_and_it_is_told_before_a_row_is_overwritten(tmp_path):
    metrics = MemoryMetrics(asyncio.get_running_loop().time)
    path, replica = tmp_path / "rows", VectorReplica(np.zeros(4, np.float32))
    writing = asyncio.create_task(writer_of(path, replica, metrics, most_bytes=3 * 16).repeat())
    await asyncio.sleep(2.2)
    writing.cancel()
    told = [(record["row"], record["frees"]) for record in metrics.of("snapshot")]
    assert told == [(0, None), (1, None), (2, 0), (0, 1), (1, 2)]
    assert path.stat().st_size == 3 * 16


async def test_rows_that_take_long_to_write_come_less_often(tmp_path):
    metrics = MemoryMetrics(asyncio.get_running_loop().time)

    async def slow(function):
        await asyncio.sleep(0.15)
        return function()

    writer = writer_of(tmp_path / "rows", VectorReplica(np.zeros(4, np.float32)), metrics)
    writer.on_copy_thread = slow
    writing = asyncio.create_task(writer.repeat())
    await asyncio.sleep(4.4)
    writing.cancel()
    assert [record["tick"] for record in metrics.of("snapshot")] == [0, 2, 4, 6, 8]


async def test_rows_follow_a_clock_that_is_set_back(tmp_path):
    metrics = MemoryMetrics(asyncio.get_running_loop().time)
    replica, back_s = VectorReplica(np.zeros(4, np.float32)), [0.0]
    writer = writer_of(tmp_path / "rows", replica, metrics)
    true_clock = writer.clock
    writer.clock = lambda: 100.0 + true_clock() - back_s[0]
    writing = asyncio.create_task(writer.repeat())
    await asyncio.sleep(0.6)
    back_s[0] = 50.0
    await asyncio.sleep(1.5)
    writing.cancel()
    assert [record["tick"] for record in metrics.of("snapshot")] == [200, 201, 202, 103, 104]


async def test_a_peer_that_starts_again_goes_on_behind_its_last_whole_row(tmp_path):
    metrics = MemoryMetrics(asyncio.get_running_loop().time)
    path = tmp_path / "p0.snapshots"
    await writer_of(path, VectorReplica(np.arange(4, dtype=np.float32)), metrics).write()
    with path.open("ab") as file:
        file.write(b"half a row")
    await writer_of(path, VectorReplica(np.full(4, 7.0)), metrics).write()
    assert [record["row"] for record in metrics.of("snapshot")] == [0, 1]
    rows = np.frombuffer(path.read_bytes(), "<f4").reshape(-1, 4)
    np.testing.assert_array_equal(rows, [[0, 1, 2, 3], [7, 7, 7, 7]])


# --- a step on the trainer's thread ---------------------------------------------------------------


@pytest.fixture
def protocol() -> Iterator[_ProtocolThread]:
    thread = _ProtocolThread()
    thread.start()
    yield thread
    thread.stop()


async def twice(value: int) -> int:
    await asyncio.sleep(0)
    return value * 2


async def fail() -> None:
    await asyncio.sleep(0)
    raise ValueError("over there")


def test_what_awaits_nothing_runs_on_this_thread_without_any_loop():
    async def work() -> int:
        return threading.get_ident()

    assert _run_here(work()) == threading.get_ident()


def test_results_come_back_from_the_other_thread(protocol: _ProtocolThread):
    async def work() -> list[int]:
        return [await protocol.call(twice(value)) for value in range(3)]

    assert _run_here(work()) == [0, 2, 4]


def test_what_is_called_runs_on_the_other_thread(protocol: _ProtocolThread):
    async def there() -> int:
        return threading.get_ident()

    async def work() -> tuple[int, int]:
        return await protocol.call(there()), threading.get_ident()

    other, own = _run_here(work())
    assert other != own == threading.get_ident()


def test_errors_of_the_other_thread_are_raised_where_they_are_awaited(protocol: _ProtocolThread):
    async def work() -> str:
        try:
            await protocol.call(fail())
        except ValueError as error:
            return f"caught {error}"
        return "nothing"

    async def unguarded() -> None:
        await protocol.call(fail())

    assert _run_here(work()) == "caught over there"
    with pytest.raises(ValueError, match="over there"):
        _run_here(unguarded())


def test_an_interrupt_while_waiting_reaches_the_coroutine(
    protocol: _ProtocolThread, monkeypatch: pytest.MonkeyPatch
):
    class Interrupted(Future):
        def result(self, timeout=None):
            raise KeyboardInterrupt

    def over_there(work, loop):
        work.close()
        return Interrupted()

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", over_there)
    cleaned = []

    async def work() -> None:
        try:
            await protocol.call(twice(1))
        finally:
            cleaned.append(True)

    with pytest.raises(KeyboardInterrupt):
        _run_here(work())
    assert cleaned == [True]


def test_what_would_wait_for_a_loop_of_this_thread_is_refused():
    with pytest.raises(LocalProtocolError, match="waits for an event loop"):
        _run_here(asyncio.sleep(0))
