"""The program of `docs/records.md` reads what a peer has written, and the page has its defaults."""

import re
from pathlib import Path

import pytest

from p2ptrain.runtime.settings import PeerConfig
from tests.helpers.programs import printed_by

PAGE = (Path(__file__).parents[2] / "docs" / "records.md").read_text()


@pytest.mark.sockets
def test_the_program_reads_the_last_model_of_a_peer(tmp_path):
    peer = ["-m", "p2ptrain", "peer", "--name", "p00", "--out", ".", "--samples", "640"]
    printed_by(tmp_path, *peer, "--snapshot-every-s", "0.2")
    (program,) = re.findall(r"```python\n# read_snapshot.py\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "read_snapshot.py").write_text(program)
    said = printed_by(tmp_path, "read_snapshot.py")
    assert re.fullmatch(r"row \d+: the model after \d\d updates\n", said)


@pytest.mark.sockets
def test_a_peer_writes_no_model_unless_it_is_asked_to(tmp_path):
    printed_by(tmp_path, "-m", "p2ptrain", "peer", "--name", "p00", "--out", ".", "--samples", "64")
    written = {path.name for path in tmp_path.iterdir()}
    assert "p00.jsonl" in written
    assert "p00.snapshots" not in written


def test_the_page_has_the_defaults():
    defaults = PeerConfig()
    assert defaults.snapshot_every_s == 0
    assert f"`records_mb` ({defaults.records_mb:g} MB)" in PAGE
    assert f"`snapshot_mb` ({defaults.snapshot_mb:g} MB)" in PAGE
