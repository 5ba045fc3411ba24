"""Programs of the docs, as a reader runs them."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def printed_by(folder: Path, *arguments: str) -> str:
    """What ``python ARGUMENTS`` prints in `folder`; it has to end well."""
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
