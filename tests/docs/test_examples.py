"""The programs of `examples/` run for a few steps, alone and two together, and save their model."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from p2plab.backends.spawn import free_ports

pytestmark = pytest.mark.sockets

EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAMS = sorted(path.name for path in EXAMPLES.glob("*.py"))
LIMIT_S = 100


def start(name: str, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    return subprocess.Popen(
        command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=folder
    )


def progress_in(printed: str) -> int:
    found = re.search(r"after (\d+) (?:samples|moves) of the whole swarm", printed)
    assert found, printed
    return int(found[1])


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_example_trains_alone_and_saves_its_model(tmp_path, name):
    with start(name, tmp_path, "--samples", "320", "--save", "model.pt") as process:
        printed, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, printed
    assert progress_in(printed) >= 320
    assert torch.load(tmp_path / "model.pt")


@pytest.mark.parametrize("name", PROGRAMS)
def test_two_of_an_example_train_together(tmp_path, name):
    address, both = f"127.0.0.1:{free_ports(1)[0]}", ("--peers", "2", "--samples", "960")
    with (
        start(name, tmp_path, *both, "--listen", address) as first,
        start(name, tmp_path, *both, "--join", address) as second,
    ):
        printed = [process.communicate(timeout=LIMIT_S)[0] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], printed
    # Where models are averaged it is an estimate, which averages after the end still move.
    assert all(progress_in(text) >= 0.9 * 960 for text in printed), printed


def test_the_page_of_the_examples_names_all_of_them():
    page = (EXAMPLES / "README.md").read_text()
    assert all(f"[`{name}`]({name})" in page for name in PROGRAMS)
