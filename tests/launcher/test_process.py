"""The process backend, with processes that do not train: `fake_peer.py` says how they behave."""

import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.backends import known_backends, load_backend, process
from launcher.backends.process import ProcessBackend, last_words, peer_environment
from launcher.conditions import FaultConfig
from launcher.records import PeerHistory, Step
from p2ptrain.config import RunConfig
from p2ptrain.errors import ConfigError
from tests.launcher.fakes import scenario

pytestmark = pytest.mark.sockets

FAKE_PEER = (sys.executable, "-I", "-S", str(Path(__file__).with_name("fake_peer.py")))


def configs(folder: Path, *behaviours: str) -> list[RunConfig]:
    return [
        RunConfig(
            name=f"p{rank:02}",
            rank=rank,
            peers=len(behaviours),
            out=str(folder),
            algorithm_options={"behaviour": behaviour},
        )
        for rank, behaviour in enumerate(behaviours)
    ]


@pytest.fixture
def start(tmp_path):
    fleets = []

    def start_fleet(*behaviours: str):
        fleets.append(ProcessBackend(FAKE_PEER).start(scenario(), configs(tmp_path, *behaviours)))
        return fleets[-1]

    yield start_fleet
    for fleet in fleets:
        fleet.stop(0.0)


def until(condition: Callable[[], bool]) -> None:
    for _ in range(2_000):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("it never came true")


def states(fleet) -> list[str]:
    return [status.state for status in fleet.poll()]


def is_alive(pid: int) -> bool:
    """True if the process runs; one that waits for its parent to notice its death does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_peers_that_end_their_run_have_ended(start, tmp_path):
    fleet = start("train", "train")
    until(lambda: states(fleet) == ["ended", "ended"])
    assert (tmp_path / "p01.snapshots").stat().st_size > 0


def test_a_peer_that_refuses_says_why_in_its_last_line(start):
    fleet = start("sleep", "refuse")
    until(lambda: states(fleet)[1] != "running")
    status = fleet.poll()[1]
    assert (status.name, status.state, status.why) == ("p01", "refused", "port 1 is in use")
    assert states(fleet)[0] == "running", "the fleet reports; who runs it decides"


def test_a_crashed_peer_is_lost_with_its_last_words(start):
    fleet = start("crash")
    until(lambda: states(fleet) == ["lost"])
    assert fleet.poll()[0].why == "ended with exit code 1: RuntimeError: boom"


def test_a_killed_peer_is_lost_and_the_others_are_not(start):
    fleet = start("sleep", "sleep")
    os.kill(fleet.pids()[0], signal.SIGKILL)
    until(lambda: states(fleet) == ["lost", "running"])
    assert fleet.poll()[0].why == "was killed by SIGKILL"


def test_stop_asks_first(start, tmp_path):
    fleet = start("polite")
    until((tmp_path / "p00.listens").exists)
    fleet.stop(10.0)
    assert states(fleet) == ["ended"]


def test_stop_leaves_nothing_behind_whoever_does_not_listen(start, tmp_path):
    fleet = start("stubborn", "sleep")
    until((tmp_path / "p00.is-deaf").exists)
    os.kill(fleet.pids()[1], signal.SIGSTOP)
    fleet.stop(0.05)
    assert states(fleet) == ["lost", "lost"]
    assert not any(is_alive(pid) for pid in fleet.pids())
    fleet.stop(0.05)  # and once more does no harm


def test_a_launcher_that_is_killed_leaves_no_peer_behind(tmp_path):
    text = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from launcher.backends.process import ProcessBackend\n"
        "from tests.launcher.test_process import FAKE_PEER, configs, scenario\n"
        "peers = configs(Path(sys.argv[1]), 'polite', 'sleep')\n"
        "fleet = ProcessBackend(FAKE_PEER).start(scenario(), peers)\n"
        "print(*fleet.pids(), flush=True)\n"
        "time.sleep(60)\n"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", text, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    with launcher, launcher.stdout:
        pids = [int(pid) for pid in launcher.stdout.readline().split()]
        assert len(pids) == 2
        assert all(is_alive(pid) for pid in pids)
        launcher.kill()
    until(lambda: not any(is_alive(pid) for pid in pids))


def test_a_backend_that_cannot_start_its_peers_leaves_none(tmp_path):
    missing = ProcessBackend((str(tmp_path / "no-such-program"),))
    with pytest.raises(Exception, match="cannot start the peers"):
        missing.start(scenario(), configs(tmp_path, "train"))


def test_the_first_peer_gets_a_port_and_the_others_join_there(start, tmp_path):
    fleet = start("train", "train", "train")
    until(lambda: states(fleet) == ["ended"] * 3)
    first, *others = [tomllib.loads((tmp_path / f"p0{i}.toml").read_text()) for i in range(3)]
    assert first["join"] == []
    assert not first["listen"].endswith(":0")
    for other in others:
        assert other["join"] == [first["listen"]]
        assert other["listen"] == "127.0.0.1:0"


def test_a_peer_has_one_compute_thread_and_the_rest_of_our_environment():
    environment = peer_environment({"PATH": "/bin", "OMP_NUM_THREADS": "64"})
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["PATH"] == "/bin"


def test_the_last_words_are_the_last_error_whatever_was_printed_after_it(tmp_path):
    log = tmp_path / "p00.log"
    log.write_text("hello\nerror: the first\nerror: port 1 is in use\nbye\n\n")
    assert last_words(log) == "port 1 is in use"
    log.write_text("")
    assert last_words(log) == "it said nothing"


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_a_scenario_pauses_and_kills_processes_when_they_have_come_far_enough(
    tmp_path, monkeypatch
):
    pause = FaultConfig(kind="pause", peers=(0,), at_step=3, for_s=0.3)
    crash = FaultConfig(kind="crash", peers=(1,), at_s=1.0)
    fleet = ProcessBackend(FAKE_PEER).start(
        scenario(faults=(pause, crash)), configs(tmp_path, "sleep", "sleep")
    )
    histories = [PeerHistory(tmp_path, name) for name in ("p00", "p01")]
    monkeypatch.setattr(process.time, "time", lambda: 1000.0)
    try:
        fleet.befall(histories, 999.5)
        assert states(fleet) == ["running", "running"]
        histories[0].steps.extend([Step(0.0, n, 1, None, 0.1, 0.0) for n in range(3)])
        fleet.befall(histories, 999.0)
        until(lambda: is_stopped(fleet.pids()[0]))
        until(lambda: states(fleet) == ["running", "lost"])
        until(lambda: fleet.befall(histories, None) or not is_stopped(fleet.pids()[0]))
    finally:
        fleet.stop(0.05)


@pytest.mark.parametrize("fault", [{"kind": "crash", "for_s": 1.0}, {"kind": "partition"}])
def test_faults_that_are_beyond_signals_are_refused_in_a_sentence(fault):
    chosen = scenario(faults=(FaultConfig(peers=(0,), at_s=1.0, **fault),))
    with pytest.raises(ConfigError, match="those that can are crash, pause; all can with"):
        ProcessBackend().check(chosen)


def test_an_unknown_backend_is_refused_with_those_there_are():
    assert known_backends() == ("process", "sim")
    with pytest.raises(ConfigError, match="unknown backend 'dokcer'; there are: process"):
        load_backend("dokcer")
