"""The programs of `docs/integrations.md` run as they stand there."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.sockets

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
PROGRAMS = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(), re.DOTALL))


@pytest.mark.parametrize(("name", "library", "samples"), [
    ("with_transformers.py", "transformers", 60 * 8),
    ("with_lightning.py", "lightning", 10 * 256),
    ("with_accelerate.py", "accelerate", 10 * 256),
])  # fmt: skip
def test_the_program_trains(tmp_path, name, library, samples):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"the extra with {library} is not installed")
    path = tmp_path / name
    path.write_text(PROGRAMS[name])
    done = subprocess.run(
        [sys.executable, str(path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"loss (\S+), (\d+) samples of the whole swarm", done.stdout)
    assert found, done.stdout
    assert float(found[1]) < 2.5, "a guess among 40 letters has 3.7"
    assert int(found[2]) == samples
