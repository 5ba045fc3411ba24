"""What the port drags in: the simulator must be able to see a model without torch."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["replica", "step_timing", "codec", "device_name"])
def test_what_the_simulator_shares_does_not_import_torch(name):
    # The package's own __init__ offers users the real Peer, torch included; it stands aside here.
    code = f"""
import sys, types
package = sys.modules["p2ptrain"] = types.ModuleType("p2ptrain")
package.__path__ = ["p2ptrain"]
import p2ptrain.compute.{name}
sys.exit("torch" in sys.modules)
"""
    ran = subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT)
    assert ran.returncode == 0
