"""What all benchmarks share: their results, their verdict, and processes that end with them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from matplotlib.figure import Figure

from p2plab.harness.bench import Bench
from p2plab.harness.claims import Claim
from p2plab.harness.processes import Children, side_by_side
from p2plab.harness.tables import table
from p2ptrain.errors import ConfigError
from tests.launcher.conftest import printed
from tests.launcher.sleepers import refuse

ROOT = Path(__file__).parents[2]
HELD = Claim("it is fast", "speed", "us", at_least=2.0).check(3.0)
CONTRADICTED = Claim("it is slow", "speed", "us", at_most=2.0, published=1.9).check(3.0)


def test_results_are_in_a_file_before_anything_is_drawn(tmp_path: Path):
    def fails() -> Figure:
        raise ValueError("no picture")

    bench = Bench(tmp_path / "new", check=True, quick=False)
    with pytest.raises(ValueError, match="no picture"):
        bench.conclude([{"speed": 3.0}], [HELD], pictures={"bench.png": fails}, link_mbit=100)
    written = json.loads((tmp_path / "new/bench.json").read_text())
    assert written["rows"] == [{"speed": 3.0}]
    assert written["claims"] == [HELD]
    assert written["machine"]["link_mbit"] == 100


@pytest.mark.parametrize(
    ("check", "quick", "code"), [(True, False, 3), (False, False, 0), (True, True, 0)]
)
def test_a_contradicted_claim_is_the_exit_code_only_where_claims_are_enforced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], check: bool, quick: bool, code: int
):
    bench, ended = Bench(tmp_path, check=check, quick=quick), 0
    try:
        bench.conclude([], [HELD, CONTRADICTED])
    except typer.Exit as left:
        ended = left.exit_code
    assert ended == code
    lines = capsys.readouterr().out.splitlines()
    (slow,) = [line.split() for line in lines if "it is slow" in line]
    assert slow == ["it", "is", "slow", "≤", "2", "1.9", "3", "no"]


def test_a_missing_figure_is_a_dash():
    rows = [{"name": "one", "step_s": 0.25}, {"name": "two", "step_s": None}]
    lines = printed(table("", rows, {"": "{name}", "step": "{step_s:.1f}"})).splitlines()
    assert [line.split() for line in lines if line.strip()][-2:] == [["one", "0.2"], ["two", "-"]]


@pytest.mark.sockets
def test_results_are_in_the_order_of_the_settings_and_a_mistake_is_the_parents():
    told: list[int] = []
    assert side_by_side(abs, [-3, 1, -2], told.append, at_once=2) == [3, 1, 2]
    assert sorted(told) == [-3, -2, 1]
    with pytest.raises(ConfigError, match="three is too much"):
        side_by_side(refuse, [3], told.append)


@pytest.mark.sockets
def test_a_process_that_dies_ends_the_benchmark():
    with Children() as children:
        children.start(os._exit, 5)
        with pytest.raises(RuntimeError, match="a process of the benchmark died"):
            children.result()


@pytest.mark.sockets
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_benchmark_that_is_ended_leaves_no_process(number: int, code: int):
    program = (sys.executable, "-m", "tests.launcher.sleepers")
    with subprocess.Popen(program, cwd=ROOT, stdout=subprocess.PIPE, text=True) as bench:
        assert bench.stdout is not None
        sleepers = [int(bench.stdout.readline()) for _ in range(2)]
        bench.send_signal(number)
        assert bench.wait(100) == code
    assert not any(map(is_running, sleepers))


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
