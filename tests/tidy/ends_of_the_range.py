"""Run the tests of the network at both ends of what pyproject.toml allows: `make ends`.

The packages of one end go into a folder of their own, which is put before those of this
environment. torch and numpy stay as they are here: they are large, and of them a peer uses what has
been there for years. ``--quick`` writes down what each end is, and installs nothing.
"""

import argparse
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
STAY = ("torch", "numpy")
TESTS = (
    "tests/net",
    "tests/conformance",
    "tests/runtime/test_peer.py",
    "tests/runtime/test_prometheus.py",
    "tests/console",
    "tests/test_config.py",
    "tests/test_cli.py",
)


def requirements() -> list[str]:
    """Our dependencies, but those that stay."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    given: list[str] = document["project"]["dependencies"]
    return [one for one in given if _name(one) not in STAY]


def oldest(requirement: str) -> str:
    """``name>=1.2,!=1.3`` as ``name==1.2``."""
    found = re.fullmatch(r"([\w-]+)>=([\w.]+)(,.*)?", requirement)
    assert found, f"{requirement!r} has no lower end"
    return f"{found[1]}=={found[2]}"


def _name(requirement: str) -> str:
    return re.split(r"[<>=!~\[ ]", requirement)[0]


def try_end(folder: Path, packages: list[str]) -> int:
    """Install `packages` into `folder` and run the tests with them; their exit code."""
    wanted = folder.with_suffix(".txt")
    wanted.write_text("\n".join(packages) + "\n")
    install = ["-m", "pip", "install", "--quiet", "--upgrade"]
    subprocess.run(
        [sys.executable, *install, "--target", str(folder), "-r", str(wanted)], check=True
    )
    before = os.pathsep.join([str(folder), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": before}
    show = "from importlib.metadata import version as v; print('protobuf', v('protobuf'))"
    subprocess.run([sys.executable, "-c", show], env=environment, check=True)
    # What is old may use what is deprecated by now.
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-W", "ignore::DeprecationWarning"]
    command += TESTS
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def main() -> None:
    """Entry point of ``make ends``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/ends"))
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    ends = {"oldest": [oldest(one) for one in requirements()], "newest": requirements()}
    failed = []
    for name, packages in ends.items():
        print(f"{name}: {', '.join(packages)}", flush=True)
        (given.out / f"{name}.txt").write_text("\n".join(packages) + "\n")
        if not given.quick and try_end((given.out / name).resolve(), packages):
            failed.append(name)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
