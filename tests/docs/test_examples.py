"""The programs of `examples/` run for a few steps, alone and two together, and save their model."""

import re
import shutil
from pathlib import Path

import pytest
import torch

from p2plab.backends.spawn import free_ports
from tests.helpers.ready import Program, Ready

pytestmark = pytest.mark.sockets

EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAMS = sorted(path.name for path in EXAMPLES.glob("*.py"))
LIMIT_S = 100


@pytest.fixture
def start(ready: Ready, tmp_path: Path):
    """Start an example in a folder of its own."""
    started: list[Program] = []

    def start(name: str, *arguments: str) -> Program:
        folder = tmp_path / f"{len(started)}"
        folder.mkdir()
        started.append(ready.start(Path(shutil.copy(EXAMPLES / name, folder)), *arguments))
        return started[-1]

    yield start
    for program in started:
        program.kill()


def progress_in(printed: str) -> int:
    found = re.search(r"after (\d+) (?:samples|moves) of the whole swarm", printed)
    assert found, printed
    return int(found[1])


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_example_trains_alone_and_saves_its_model(start, tmp_path, name):
    program = start(name, "--samples", "320", "--save", "model.pt")
    printed = "".join(program.communicate(LIMIT_S))
    assert program.returncode == 0, printed
    assert progress_in(printed) >= 320
    assert torch.load(tmp_path / "0/model.pt")


@pytest.mark.parametrize("name", PROGRAMS)
def test_two_of_an_example_train_together(start, name):
    address, both = f"127.0.0.1:{free_ports(1)[0]}", ("--peers", "2", "--samples", "960")
    programs = start(name, *both, "--listen", address), start(name, *both, "--join", address)
    printed = ["".join(program.communicate(LIMIT_S)) for program in programs]
    assert [program.returncode for program in programs] == [0, 0], printed
    # Where models are averaged it is an estimate, which averages after the end still move.
    assert all(progress_in(text) >= 0.9 * 960 for text in printed), printed


def test_the_page_of_the_examples_names_all_of_them():
    page = (EXAMPLES / "README.md").read_text()
    assert all(f"[`{name}`]({name})" in page for name in PROGRAMS)
