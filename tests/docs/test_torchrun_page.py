"""The program of `docs/torchrun.md` runs as it stands there, as a group of two ranks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from p2plab.backends.spawn import free_ports

PAGE = Path(__file__).parents[2] / "docs" / "torchrun.md"


@pytest.mark.sockets
def test_the_group_of_the_page_trains(tmp_path):
    (program,) = re.findall(r"```python\n# group.py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "group.py").write_text(program)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"),
            *("--master-addr", "127.0.0.1", "--master-port", str(free_ports(1)[0])),
            *("group.py", "127.0.0.1:0"),
        ],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"loss (\S+) after (\d+) samples", done.stdout)
    assert found, done.stdout
    assert int(found[2]) == 100 * 2 * 32
