"""Every target that the Makefile documents runs from end to end, in its smallest form."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from p2plab.harness.namespaces import laid
from p2ptrain.compute.devices import accelerators
from p2ptrain.errors import ConfigError

ROOT = Path(__file__).parents[2]

LIMIT_S = 280

SMALLEST = {
    "demo": ("QUICK=1", "demo/report.html"),
    "test": ("TESTS=-n 0 -q tests/core/test_links.py", ""),
    "explore": ("QUICK=1", ""),
    "worlds": ("QUICK=1", ""),
    "starts": ("QUICK=1", ""),
    "bench": ("QUICK=1", "bench/bench.png"),
    "bench-device": ("QUICK=1", "bench-device/bench.json"),
    "bench-hidden": ("QUICK=1", "bench-hidden/bench.json"),
    "bench-large": ("QUICK=1", "bench-large/bench.json"),
    "bench-links": ("QUICK=1", "bench-links/bench.json"),
    "bench-slow-links": ("QUICK=1", "bench-slow-links/bench.png"),
    "bench-lock": ("QUICK=1", "bench-lock/bench-lock.png"),
    "bench-survival": ("QUICK=1", "bench-survival/bench.json"),
    "bench-faults": ("QUICK=1", "bench-faults/bench.png"),
    "bench-membership": ("QUICK=1", "bench-membership/bench-membership.png"),
    "paper": ("QUICK=1", "paper.md"),
    "paper-real": ("QUICK=1", "paper.md"),
    "wan": ("QUICK=1", "links.md"),
    "compare": ("QUICK=1", "compare.md"),
    "chaos": ("QUICK=1", "chaos/report.html"),
    "attack": ("QUICK=1", "attack/bench.json"),
    "protos": ("PROTOS={out}", "peer_pb2.py"),
    "algorithm-pages": ("PAGES={out}", "ad_psgd.md"),
    "scenario-reference": ("SCENARIO_REFERENCE={out}/reference.md", "reference.md"),
    "reference-pages": ("REFERENCE={out}", "settings.md"),
    "docs": ("SITE={out}", "reference/api.html"),
    "wheel": ("WHEELS={out}", "p2ptrain-*.whl"),
    "ends": ("QUICK=1", "ends/oldest.txt"),
}
"""By target: what makes it small, and a file that it leaves."""


def documented() -> set[str]:
    """The targets with a ``##`` comment."""
    lines = (ROOT / "Makefile").read_text(encoding="utf-8").splitlines()
    return {found[1] for line in lines if (found := re.match(r"([\w-]+):[^=].*## ", line))}


def test_every_documented_target_has_a_smallest_form():
    assert documented() == set(SMALLEST)


@pytest.mark.sockets
@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.parametrize("target", SMALLEST)
def test_a_documented_target_runs_in_its_smallest_form(target: str, tmp_path: Path):
    if target in ("bench-links", "bench-hidden"):
        skip_without_namespaces()
    if target == "bench-device" and not accelerators().count:
        pytest.skip("there is no accelerator here")
    if target == "wheel" and importlib.util.find_spec("setuptools") is None:
        pytest.skip("without setuptools here a wheel takes a package registry")
    if target == "docs" and importlib.util.find_spec("sphinx") is None:
        pytest.skip("the extra docs (Sphinx) is not installed here")
    small, left = SMALLEST[target]
    run_make(
        target, small.format(out=tmp_path), f"RUNS={tmp_path}", f"BIN={Path(sys.executable).parent}"
    )
    assert not left or list(tmp_path.glob(left)), f"make {target} left no {left}"


def run_make(target: str, *variables: str) -> None:
    """With the Python that runs this test, and the packages that it has: nothing is installed."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "BUILD": "--no-isolation",
        "PIP_NO_INDEX": "1",
    }
    command = ["make", "--assume-old=.venv/.ready", target, *variables]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=LIMIT_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)
    assert process.returncode == 0, f"make {target} ended with {process.returncode}:\n{said}"


def skip_without_namespaces() -> None:
    try:
        with laid(1000):
            pass
    except ConfigError as error:
        pytest.skip(str(error))
