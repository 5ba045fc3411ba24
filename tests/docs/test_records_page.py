"""The program of `docs/records.md` reads what a peer has written, and the page has its defaults."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from p2ptrain.runtime.settings import PeerConfig

PAGE = (Path(__file__).parents[2] / "docs" / "records.md").read_text()
ROOT = Path(__file__).parents[2]


@pytest.mark.sockets
def test_the_program_reads_the_last_model_of_a_peer(tmp_path):
    peer = ["-m", "p2ptrain", "peer", "--name", "p00", "--out", ".", "--samples", "640"]
    _python(tmp_path, *peer, "--snapshot-every-s", "0.2")
    (program,) = re.findall(r"```python\n# read_snapshot.py\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "read_snapshot.py").write_text(program)
    said = _python(tmp_path, "read_snapshot.py")
    assert re.fullmatch(r"row \d+: the model after \d\d updates\n", said)


def test_the_page_has_the_defaults():
    defaults = PeerConfig()
    assert defaults.snapshot_every_s == 0
    assert f"`records_mb` ({defaults.records_mb:g} MB)" in PAGE
    assert f"`snapshot_mb` ({defaults.snapshot_mb:g} MB)" in PAGE


def _python(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
