"""Peers that are forked from a process that has imported torch are as those that are spawned."""

import json
import os
import signal
from pathlib import Path

import pytest

from p2plab.backends import forked
from p2plab.backends.process import can_fork
from p2plab.backends.spawn import PEER_COMMAND
from p2ptrain.compute import devices
from tests.launcher.fakes import doomed_launcher
from tests.launcher.test_process import until

pytestmark = pytest.mark.sockets

TELLS = """
import json, os, random, signal, sys
import numpy

print(json.dumps({
    "name": __name__,
    "arguments": sys.argv[1:],
    "folder": os.getcwd(),
    "found_in": sys.path[0],
    "group": os.getpgrp(),
    "session": os.getsid(0),
    "pid": os.getpid(),
    "read": sys.stdin.read(),
    "files": sorted(map(int, os.listdir("/proc/self/fd")))[:-1],
    "variable": os.environ.get("P2PTRAIN_TEST"),
    "threads": os.environ["OMP_NUM_THREADS"],
    "handlers": [str(signal.getsignal(one)) for one in (signal.SIGCHLD, signal.SIGTERM)],
    "drawn": [random.random(), numpy.random.random()],
    "torch": "torch" in sys.modules,
}))
print("a warning", file=sys.stderr)
sys.exit(7)
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Start a module of this text; it is found in the folder of its launcher, and in our group."""
    monkeypatch.chdir(tmp_path)
    started = []

    def start_module(text: str, *arguments: str) -> forked.ForkedProcess:
        name = f"module_{len(started)}"
        (tmp_path / f"{name}.py").write_text(text)
        log = tmp_path / f"{name}.log"
        started.append(forked.start(name, arguments, log, os.getpgrp()))
        return started[-1]

    yield start_module
    for process in started:
        process.kill()
        process.wait()


def state(pid: int) -> str:
    """Of a process, as the kernel abbreviates it; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def test_it_has_what_a_process_of_its_own_would_have(start, tmp_path, monkeypatch):
    start("")  # the server is there before the variable
    monkeypatch.setenv("P2PTRAIN_TEST", "later")
    (tmp_path / "module_1.log").write_text("of its first life\n")
    process = start(TELLS, "--config", "p00.toml")
    assert process.wait() == 7
    before, told, warned = (tmp_path / "module_1.log").read_text().splitlines()
    assert (before, warned) == ("of its first life", "a warning")
    found = json.loads(told)
    drawn = found.pop("drawn")
    assert found == {
        "name": "__main__",
        "arguments": ["--config", "p00.toml"],
        "folder": str(tmp_path),
        "found_in": str(tmp_path),
        "group": os.getpgrp(),
        "session": os.getsid(0),
        "pid": process.pid,
        "read": "",
        "files": [0, 1, 2],
        "variable": "later",
        "threads": "1",
        "handlers": [str(signal.SIG_DFL)] * 2,
        "torch": True,
    }
    assert start(TELLS).wait() == 7
    others = json.loads((tmp_path / "module_2.log").read_text().splitlines()[0])["drawn"]
    assert not set(drawn) & set(others), "two peers draw the same numbers"


def test_its_end_is_noticed_however_it_came(start, tmp_path):
    well, ill, waits = start(""), start("1 / 0"), start("import time; time.sleep(100)")
    assert (well.wait(), ill.wait()) == (0, 1)
    assert "ZeroDivisionError" in (tmp_path / "module_1.log").read_text()
    assert waits.poll() is None
    os.kill(waits.pid, signal.SIGKILL)
    assert waits.wait() == waits.poll() == -signal.SIGKILL


def test_it_is_stopped_and_goes_on_and_a_signal_after_its_end_reaches_no_process(start):
    process = start("import time; time.sleep(100)")
    process.send_signal(signal.SIGSTOP)
    until(lambda: state(process.pid) == "T")
    process.send_signal(signal.SIGCONT)
    until(lambda: state(process.pid) == "S")
    process.send_signal(signal.SIGTERM)
    assert process.wait() == -signal.SIGTERM
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGTERM


def test_peers_of_a_server_that_was_killed_count_as_killed_and_the_next_has_another(start):
    first = start("import time; time.sleep(100)")
    os.kill(parent_of(first.pid), signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    first.kill()
    assert start("raise SystemExit(3)").wait() == 3
    os.kill(first.pid, signal.SIGKILL)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_launcher_that_is_killed_leaves_no_peer_behind_and_no_server(tmp_path):
    text = (
        "from p2plab.backends.process import ProcessBackend\n"
        "from tests.launcher.test_process import configs, scenario\n"
        "fleet = ProcessBackend().start(scenario(), configs(folder, 'none', 'none'))\n"
        "print(*fleet.pids(), flush=True)\n"
    )
    with doomed_launcher(text, tmp_path) as said:
        pids = [int(pid) for pid in said.split()]
        assert len(pids) == 2
        pids.append(parent_of(pids[0]))
    until(lambda: not any(state(pid) in ("R", "S", "D", "T") for pid in pids))


def test_only_a_module_is_forked_and_only_where_no_accelerator_is(monkeypatch):
    monkeypatch.setattr(devices, "accelerators", lambda: devices.Accelerators())
    assert can_fork(PEER_COMMAND)
    assert not can_fork(("docker", "run"))
    monkeypatch.setattr(devices, "accelerators", lambda: devices.Accelerators("cuda", 1))
    assert not can_fork(PEER_COMMAND)
