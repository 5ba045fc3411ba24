"""A record, a snapshot or a line on a screen never ends training."""

import asyncio
import errno
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from p2ptrain.compute.snapshots import SnapshotWriter
from p2ptrain.errors import ConfigError
from p2ptrain.runtime import line_file
from p2ptrain.runtime.metrics import JsonlMetrics, MemoryMetrics, TeeMetrics, TensorBoardMetrics
from p2ptrain.sim.replica import VectorReplica
from p2ptrain.standard_streams import Lines


class Disk:
    """Stands in for `os.write`: so many bytes more, then it is full."""

    def __init__(self, monkeypatch) -> None:
        self.room = 10**9
        self._write = os.write
        monkeypatch.setattr(line_file.os, "write", self.write)

    def write(self, descriptor: int, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = self._write(descriptor, data[: self.room])
        self.room -= count
        return count


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_full_disk_costs_records_and_leaves_whole_lines(tmp_path, monkeypatch):
    disk, path, board = Disk(monkeypatch), tmp_path / "p0.jsonl", MemoryMetrics(lambda: 0.0)
    tee = TeeMetrics(board, JsonlMetrics(path, lambda: 0.0))
    tee.record("started", peer="p0")
    disk.room = 20  # half of a line
    for step in range(5):
        tee.record("step", step=step)
    disk.room = 10**9
    tee.record("step", step=5)
    tee.record("step", step=6)
    kinds = [(record["kind"], record.get("step")) for record in read(path)]
    assert kinds == [("started", None), ("warning", None), ("step", 5), ("step", 6)]
    assert read(path)[1]["text"] == "5 records are missing here: they could not be written"
    (warning,) = board.of("warning")
    assert "No space left on device" in warning["text"]
    assert str(path) in warning["text"]
    assert len(board.of("step")) == 7, "the others have them all"


def test_a_file_that_was_full_from_its_first_record_can_be_read_alone(tmp_path, monkeypatch):
    disk, path = Disk(monkeypatch), tmp_path / "p0.jsonl"
    metrics = TeeMetrics(JsonlMetrics(path, lambda: 0.0))
    disk.room = 0
    metrics.record("started", peer="p0")
    metrics.record("step", step=0)
    disk.room = 10**9
    metrics.record("step", step=1)
    assert [record["kind"] for record in read(path)] == ["started", "warning", "step"]


def test_a_second_full_disk_is_a_second_warning(tmp_path, monkeypatch):
    disk, board = Disk(monkeypatch), MemoryMetrics(lambda: 0.0)
    tee = TeeMetrics(board, JsonlMetrics(tmp_path / "p0.jsonl", lambda: 0.0))
    for room in (0, 10**9, 0):
        disk.room = room
        for step in range(3):
            tee.record("step", step=step)
    assert len(board.of("warning")) == 2


def test_metrics_of_a_program_that_fail_at_each_record_are_one_warning():
    class Fails:
        def record(self, kind: str, **fields: object) -> None:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    board = MemoryMetrics(lambda: 0.0)
    tee = TeeMetrics(Fails(), board)
    for step in range(3):
        tee.record("step", step=step)
    (warning,) = board.of("warning")
    assert "cannot write to Fails (Broken pipe)" in warning["text"]


async def test_snapshots_pass_over_a_full_disk_with_one_warning(tmp_path):
    metrics, replica = MemoryMetrics(lambda: 0.0), VectorReplica(np.arange(4, dtype=np.float32))
    loop, is_full = asyncio.get_running_loop(), True

    async def copy(function):
        if is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return function()

    path = tmp_path / "p0.snapshots"
    writer = SnapshotWriter(path, replica, metrics.record, copy, loop.time, 0.5, 1e6)
    for _ in range(3):
        await writer.write()
    is_full = False
    await writer.write()
    assert [record["kind"] for record in metrics.records] == ["warning", "snapshot"]
    assert metrics.of("snapshot")[0]["row"] == 0
    assert np.fromfile(path, "<f4").tolist() == [0, 1, 2, 3]


def test_tensorboard_starts_another_file_a_while_after_one_that_failed(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    now = 0.0
    board = MemoryMetrics(lambda: now)
    metrics = TensorBoardMetrics(tmp_path / "p0", lambda: now)
    tee = TeeMetrics(metrics, board)
    step = {"samples": 1, "loss": None, "compute_s": 1.0, "wait_s": 0.0}

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(metrics._writer, "add_scalar", refuse)
    for number in range(3):
        tee.record("step", step=number, **step)
    assert len(board.of("warning")) == 1
    now = 60.0
    tee.record("step", step=3, **step)
    metrics.close()
    newest = max(tmp_path.rglob("events*"), key=lambda file: file.stat().st_size)
    assert b"trainer/samples" in newest.read_bytes()


def test_a_name_that_the_file_system_cannot_write_is_one_sentence(tmp_path):
    path = tmp_path / "p\ud800"
    with pytest.raises(ConfigError, match="cannot write records to"):
        JsonlMetrics(path, lambda: 0.0)


def test_lines_that_cannot_be_printed_are_said_once(monkeypatch):
    lines = Lines()
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(OSError, match="No space left on device"):
            lines.say("one")
        lines.say("two")
        monkeypatch.undo()
        lines.say("three")
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())


CASES = {
    "both outputs closed": "exec {peer} >&- 2>&-",
    "both outputs full": "exec {peer} >/dev/full 2>&1",
    "a reader that goes, and letters that ASCII lacks": (
        "{{ PYTHONIOENCODING=ascii {peer} --name p\u00e9; echo $? >$0; }} 2>&1 | head -1; "
        "exit $(cat $0)"
    ),
}


@pytest.mark.sockets
@pytest.mark.slow
def test_a_peer_trains_to_its_end_whatever_becomes_of_its_outputs(tmp_path):
    peer = f"{sys.executable} -m p2ptrain peer --samples 320 --no-result -v --out {tmp_path}"
    started = {
        name: subprocess.Popen(
            ["sh", "-c", case.format(peer=peer), str(tmp_path / "code")],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for name, case in CASES.items()
    }
    assert {name: process.wait(100) for name, process in started.items()} == dict.fromkeys(CASES, 0)
    files = list(tmp_path.glob("*.jsonl"))
    assert len(files) == len(CASES)
    for file in files:
        assert read(file)[-1]["kind"] == "ended"
