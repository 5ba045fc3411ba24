"""What README and `docs/training-loops.md` print runs on two networks, as on two machines.

Two namespaces stand for the machines, with the addresses that README has; making them takes root.
"""

import re
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import torch

from p2plab.harness.namespaces import laid
from p2ptrain.errors import ConfigError
from tests.docs.test_training_loops import PROGRAMS
from tests.helpers.ready import Program, Ready

pytestmark = [pytest.mark.sockets, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
(README_PROGRAM,) = re.findall(
    r"```python\n# train.py\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
)
FIRST, SECOND = "10.0.0.5:4000", "10.0.0.6:4000"
LIMIT_S = 100


@pytest.fixture(scope="module")
def machines() -> Iterator[list[Ready]]:
    """Of each machine a process that has imported torch."""
    try:
        with laid(1000, (FIRST.split(":")[0], SECOND.split(":")[0])) as cable, ExitStack() as both:
            yield [
                both.enter_context(closing(Ready("ip", "netns", "exec", home.namespace)))
                for home in cable.ends
            ]
    except ConfigError as error:
        pytest.skip(str(error))


def run_on_both(machines, folder: Path, programs: tuple[str, str], arguments=((), ())) -> list[str]:
    """Run one program on each machine; what they print, after both ended well.

    TOKEN in the second one's words stands for the token that the first one prints.
    """
    started: list[Program] = []
    seen = ""
    try:
        for number, (machine, lines) in enumerate(zip(machines, programs, strict=True)):
            path = folder / f"machine{number}" / "program.py"
            path.parent.mkdir()
            path.write_text(lines.replace("TOKEN", seen))
            words = [seen if word == "TOKEN" else word for word in arguments[number]]
            started.append(machine.start(path, *words))
            seen = seen or token_of(started[0])
        printed = ["".join(program.communicate(LIMIT_S)) for program in started]
    finally:
        for program in started:
            program.kill()
    assert [program.returncode for program in started] == [0, 0], printed
    return printed


def token_of(first: Program) -> str:
    """Read what the first program prints, up to its token."""
    for line in first.followed():
        if found := re.search(r"^to join this swarm: --join \S+ --token (\S+)$", line):
            return found[1]
    raise AssertionError(first.printed())


def test_the_program_of_the_readme_trains_on_two_machines(machines, tmp_path):
    both = (README_PROGRAM, README_PROGRAM)
    for printed in run_on_both(machines, tmp_path, both, ((FIRST,), (SECOND, FIRST, "TOKEN"))):
        found = re.search(r"loss (\S+) after (\d+) samples of both peers", printed)
        assert found, printed
        # A mean of first steps that arrives at the last one leaves up to a quarter of that.
        assert float(found[1]) < 16, "a guess has 64"
        assert int(found[2]) > 32 * 1000, "this peer's own samples are not all"
    one, other = (torch.load(tmp_path / f"machine{number}" / "model.pt") for number in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert (one["weight"] - 1).square().sum() < 0.1, "the loss of their mean; a guess has 64"


def test_the_plain_program_takes_its_addresses_as_arguments(machines, tmp_path):
    plain = PROGRAMS["plain.py"]
    both = ("--peers", "2", "--listen")
    arguments = (*both, FIRST), (*both, SECOND, "--join", FIRST, "--join", "TOKEN")
    for printed in run_on_both(machines, tmp_path, (plain, plain), arguments):
        assert re.search(r"loss (\S+) after (\d+) samples", printed), printed


@pytest.mark.parametrize("name", sorted(set(PROGRAMS) - {"plain.py"}))
def test_each_program_trains_on_two_machines_with_what_the_page_adds(machines, tmp_path, name):
    both = 'Peer(model, optimizer, peers=2, out=".", listen="{}", join={}, '
    programs = tuple(
        PROGRAMS[name].replace("Peer(model, optimizer, ", both.format(listen, join))
        for listen, join in ((FIRST, []), (SECOND, [FIRST, "TOKEN"]))
    )
    run_on_both(machines, tmp_path, programs)
    for number in range(2):
        (records,) = (tmp_path / f"machine{number}").glob("*.jsonl")
        averaged = [
            line for line in records.read_text().splitlines() if '"outcome": "done"' in line
        ]
        assert averaged, records.read_text()[-2000:]
