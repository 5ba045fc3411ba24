"""What the port drags in: the simulator must be able to see a model without torch."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("name", ["replica", "pace"])
def test_the_port_and_the_pace_do_not_import_torch(name):
    code = f"import sys, p2ptrain.compute.{name}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
