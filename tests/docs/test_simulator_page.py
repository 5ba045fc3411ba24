"""The program of `docs/simulator.md` runs as it stands there, twice alike."""

import re
from pathlib import Path

from tests.helpers.programs import printed_by

PAGE = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text()


def test_the_program_runs_and_its_trace_can_be_drawn(tmp_path):
    (program,) = re.findall(r"```python\n# world.py\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "world.py").write_text(program)
    said = {printed_by(tmp_path, "world.py") for _ in range(2)}
    assert len(said) == 1
    assert re.fullmatch(r"8 peers, \d+ lines, hash [0-9a-f]{16}\n", said.pop())
    draw = ["-m", "p2ptrain.sim.diagram", "trace.txt", "--from", "1", "--to", "1.1"]
    assert printed_by(tmp_path, *draw, "--out", "message_trace.svg") == "message_trace.svg\n"
    assert (tmp_path / "message_trace.svg").read_text().startswith("<svg")
