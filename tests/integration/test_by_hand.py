"""Peers that a person starts one by one, in terminals, and `p2ptrain status` beside them."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from p2ptrain.console.status import View, look
from p2ptrain.errors import P2PTrainError
from tests.helpers.ready import Ready

pytestmark = [pytest.mark.sockets, pytest.mark.slow, pytest.mark.timeout(400)]

PACE = "[pace]\nmin_step_ms = 10\n[training]\nlearning_rate = 0.02\n"
GUESSING = 2.3
"""Loss of a guess among ten digits."""
PATIENCE_S = 150
CLOCK = time.monotonic  # noqa: TID251 - processes live in real time


class Terminal:
    """One `p2ptrain` command, as if typed."""

    def __init__(self, ready: Ready, folder: Path, name: str, *arguments: str) -> None:
        program = folder / f"{name}.py"
        program.write_text("from p2ptrain.cli import main\nmain()\n")
        self.process = ready.start(program, "peer", "--name", name, *arguments)

    @property
    def lines(self) -> list[str]:
        return "".join(self.process.printed()).splitlines()

    def address(self) -> str:
        until(lambda: any("listens at" in line for line in self.lines), self.lines)
        return self.lines[0].split(" listens at ")[1].split()[0]

    def end(self) -> str:
        """Its farewell; what follows is the result."""
        return next(line for line in self.lines if "has left after" in line)

    def interrupt(self) -> int:
        os.kill(self.process.pid, signal.SIGINT)
        self.process.communicate(PATIENCE_S)
        assert self.process.returncode is not None
        return self.process.returncode


def until(holds: Callable[[], object], *shown: object) -> None:
    deadline = CLOCK() + PATIENCE_S
    while not holds():
        assert CLOCK() < deadline, f"it never came true; {shown}"
        time.sleep(0.1)


def swarm(address: str) -> View | None:
    try:
        return asyncio.run(look(address, 5.0))
    except P2PTrainError:
        return None


def trained(address: str, *names: str, steps: int) -> bool:
    """True when exactly these peers are in and each has made so many steps."""
    view = swarm(address)
    reports = [row.report for row in view.rows] if view else []
    all_answer = [r.hello.me.peer for r in reports if r] == sorted(names)
    return all_answer and all(r.hello.me.steps >= steps and r.partners for r in reports)


@pytest.fixture
def terminals(ready, tmp_path):
    opened: list[Terminal] = []
    (tmp_path / "pace.toml").write_text(PACE)

    def open_terminal(name: str, *arguments: str) -> Terminal:
        config = ("--config", str(tmp_path / "pace.toml"), "--task", "digits")
        opened.append(Terminal(ready, tmp_path, name, *config, *arguments))
        return opened[-1]

    yield open_terminal
    for terminal in opened:
        terminal.process.kill()


@pytest.mark.parametrize("algorithm", ["ad_psgd", "allreduce"])
def test_two_train_together_a_third_takes_over_and_takes_part(terminals, tmp_path, algorithm):
    first = terminals("p01", "--algorithm", algorithm, "--listen", "127.0.0.1:0")
    address = first.address()
    until(lambda: any(line.startswith("p01: step ") for line in first.lines), first.lines)
    second = terminals("p02", "--algorithm", algorithm, "--join", address)
    until(lambda: trained(address, "p01", "p02", steps=60))

    joins = ("--join", second.address(), "--out", str(tmp_path))
    third = terminals("p03", "--algorithm", algorithm, *joins)
    until(lambda: trained(address, "p01", "p02", "p03", steps=10))
    records = [json.loads(line) for line in (tmp_path / "p03.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if record["kind"] == "step"]
    # Gradients of the first step are of its own new model: it takes over when it first meets.
    assert losses[1] < GUESSING / 2, "the third began anew"
    if algorithm == "allreduce":
        last = [row.report.partners for row in swarm(address).rows]
        assert last == [("p02", "p03"), ("p01", "p03"), ("p01", "p02")]

    shown = subprocess.run(
        [sys.executable, "-m", "p2ptrain", "status", address],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert all(name in shown for name in ("3 peers", "p01", "p02", "p03", algorithm)), shown

    assert second.interrupt() == 130
    assert second.end().endswith("samples: asked to end by Ctrl-C")
    until(lambda: any("p02 has left" in line for line in first.lines), first.lines)
    before = steps_of(address)
    until(lambda: all(steps_of(address).get(p, 0) > before[p] + 5 for p in ("p01", "p03")))
    assert [first.interrupt(), third.interrupt()] == [130, 130]
    assert first.lines[1].startswith(f"p01 trains digits with {algorithm} until Ctrl-C")
    assert first.lines[3] == "p01 is in, with no other peer yet"
    assert first.lines[4].startswith("p01: step ")
    assert "p01: on held-out data loss " in first.lines[-1]
    assert third.lines[-2] == f"p03: its model is in {tmp_path}/p03.safetensors"
    assert (tmp_path / "p03.safetensors").stat().st_size > 4 * 17_226
    said = "\n".join(first.lines + second.lines + third.lines)
    assert "Traceback" not in said
    assert "rror" not in said


def steps_of(address: str) -> dict[str, int]:
    view = swarm(address)
    reports = [row.report for row in view.rows if row.report] if view else []
    return {report.hello.me.peer: report.hello.me.steps for report in reports}


def test_while_nobody_answers_it_says_so_and_ctrl_c_ends_it_without_a_traceback(terminals):
    peer = terminals("p01", "--algorithm", "ad_psgd", "--join", "127.0.0.1:1")
    peer.address()
    listens_at = CLOCK()
    waits = "p01 waits for an answer from 127.0.0.1:1 ("
    until(lambda: any(line.startswith(waits) for line in peer.lines), peer.lines)
    assert CLOCK() - listens_at < 3.5
    assert peer.interrupt() == 130
    assert "rror" not in "".join(peer.lines)


def test_two_peers_by_hand_see_the_data_in_different_orders():
    from p2ptrain.config import RunConfig
    from p2ptrain.console.training import data_seed

    alone, together = RunConfig(seed=3), RunConfig(seed=3, peers=2)
    assert data_seed(alone, "p01") != data_seed(alone, "p02")
    assert data_seed(alone, "p01") == data_seed(alone, "p01")
    assert data_seed(together, "p01") == data_seed(together, "p02") == 3
