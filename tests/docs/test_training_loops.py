"""Every program of `docs/training-loops.md` runs as it stands there; the page is the source."""

import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch

from p2plab.backends.spawn import free_ports
from tests.helpers.ready import Ready

pytestmark = pytest.mark.sockets

PAGE = Path(__file__).parents[2] / "docs" / "training-loops.md"
PROGRAMS = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(), re.DOTALL))
WITH_A_TEST_OF_ITS_OWN = {"data_loader.py", "schedule.py"}
GUESSING = 2.3
"""Loss of a guess among ten digits."""


@pytest.fixture
def program(tmp_path):
    """Write one program of the page to a file."""

    def write(name: str) -> Path:
        path = tmp_path / name
        path.write_text(PROGRAMS[name])
        return path

    return write


@pytest.fixture(autouse=True)
def _torch_as_it_was():
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.random.set_rng_state(state)


def loss_in(output: str) -> float:
    found = re.search(r"loss (\S+) after (\d+) samples", output)
    assert found, output
    return float(found[1])


def test_every_style_that_is_promised_is_on_the_page():
    assert sorted(PROGRAMS) == [
        "accumulation.py",
        "adamw.py",
        "by_speed.py",
        "clipping.py",
        "data_loader.py",
        "mixed_precision.py",
        "plain.py",
        "schedule.py",
    ]
    assert PAGE.read_text().count("```python") == len(PROGRAMS), "a program without a name"


@pytest.mark.parametrize("name", sorted(set(PROGRAMS) - WITH_A_TEST_OF_ITS_OWN))
def test_the_program_trains_alone(program, monkeypatch, name):
    path = program(name)
    monkeypatch.setattr(sys, "argv", [str(path)])
    left = runpy.run_path(str(path), run_name="__main__")
    assert left["peer"].progress >= 8_000
    assert float(left["loss"].detach()) < GUESSING / 2


def test_the_schedule_ends_where_the_swarm_has_trained_all_samples(program, monkeypatch):
    path = program("schedule.py")
    monkeypatch.setattr(sys, "argv", [str(path)])
    left = runpy.run_path(str(path), run_name="__main__")
    assert left["optimizer"].param_groups[0]["lr"] == pytest.approx(0, abs=1e-4)
    assert float(left["loss"].detach()) < GUESSING / 2


def test_spawned_workers_load_data_while_the_protocol_runs(ready: Ready, program):
    process = ready.start(program("data_loader.py"))
    output = "".join(process.communicate())
    assert process.returncode == 0, output
    assert loss_in(output) < GUESSING / 2


def test_two_processes_run_the_plain_program_together(ready: Ready, program):
    path, address = program("plain.py"), f"127.0.0.1:{free_ports(1)[0]}"
    other = Path(shutil.copy(path, path.with_name("other.py")))
    both = (
        ready.start(path, "--peers", "2", "--listen", address),
        ready.start(other, "--peers", "2", "--join", address),
    )
    outputs = ["".join(process.communicate()) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert all(loss_in(output) < GUESSING / 2 for output in outputs)
