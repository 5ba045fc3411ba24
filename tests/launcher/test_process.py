"""The process backend, with processes that do not train: `fake_peer.py` says how they behave."""

import os
import signal
import sys
import time
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from p2plab.backends import known_backends, load_backend, peer_process
from p2plab.backends.peer_process import last_words
from p2plab.backends.process import ProcessBackend
from p2plab.backends.spawn import peer_environment
from p2plab.conditions import DeviceConfig, FaultConfig
from p2plab.faults import FaultPlan
from p2plab.records import PeerHistory, Step
from p2ptrain.config import RunConfig, StopConfig
from p2ptrain.errors import ConfigError
from tests.launcher.fakes import doomed_launcher, scenario

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
        "from p2plab.backends.process import ProcessBackend\n"
        "from tests.launcher.test_process import FAKE_PEER, configs, scenario\n"
        "peers = configs(folder, 'polite', 'sleep')\n"
        "fleet = ProcessBackend(FAKE_PEER).start(scenario(), peers)\n"
        "print(*fleet.pids(), flush=True)\n"
    )
    with doomed_launcher(text, tmp_path) as said:
        pids = [int(pid) for pid in said.split()]
        assert len(pids) == 2
        assert all(is_alive(pid) for pid in pids)
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


def test_peers_copy_models_past_the_caches_unless_the_user_has_tuned_the_c_library():
    assert "non_temporal_threshold" in peer_environment({})["GLIBC_TUNABLES"]
    assert peer_environment({"GLIBC_TUNABLES": "theirs"})["GLIBC_TUNABLES"] == "theirs"


def test_the_last_words_are_the_last_error_whatever_was_printed_after_it():
    said = "hello\nerror: the first\nerror: port 1 is in use\nbye\n\n"
    assert last_words(said) == "port 1 is in use"
    assert last_words("") == "it said nothing"


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_a_scenario_pauses_and_kills_processes_when_they_have_come_far_enough(tmp_path):
    pause = FaultConfig(kind="pause", peers=(0,), at_step=3, for_s=0.3)
    crash = FaultConfig(kind="crash", peers=(1,), at_s=1.0)
    fleet = ProcessBackend(FAKE_PEER).start(
        scenario(faults=(pause, crash)), configs(tmp_path, "sleep", "sleep")
    )
    histories = [PeerHistory(tmp_path, name) for name in ("p00", "p01")]
    plan = FaultPlan((pause, crash))

    def carry_out(started_at, now):
        plan.carry_out(fleet.apply, fleet.revert, histories, started_at, now)

    try:
        carry_out(999.5, 1000.0)
        assert states(fleet) == ["running", "running"]
        histories[0].steps.extend([Step(0.0, n, 1, None, 0.1, 0.0) for n in range(3)])
        carry_out(999.0, 1000.0)
        until(lambda: is_stopped(fleet.pids()[0]))
        until(lambda: states(fleet) == ["running", "lost"])
        carry_out(999.0, 1000.3)
        until(lambda: not is_stopped(fleet.pids()[0]))
    finally:
        fleet.stop(0.05)


class Lives:
    """A fleet of fakes that wait, with faults, and a wall clock that the test turns."""

    def __init__(self, folder, *faults, behaviour="polite", peers=2, seconds=None):
        self.folder = folder
        self.names = [f"p{rank:02}" for rank in range(peers)]
        chosen = scenario(peers=peers, faults=faults)
        stop = StopConfig(seconds=seconds)
        each = [replace(one, stop=stop) for one in configs(folder, *[behaviour] * peers)]
        self.plan = FaultPlan(faults)
        self.fleet = ProcessBackend(FAKE_PEER).start(chosen, each)
        self.histories = [PeerHistory(folder, name) for name in self.names]

    def at(self, now: float):
        """Let happen what is due so long after the first step."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(peer_process.time, "time", lambda: 1000.0 + now)
            self.fleet.started_at = 1000.0
            self.fleet.poll()
            fleet, clock = self.fleet, self.fleet.record_clock()
            self.plan.carry_out(fleet.apply, fleet.revert, self.histories, 1000.0, clock)

    def listens(self, rank: int) -> bool:
        """True, once for each of its lives, as soon as it would leave if it were asked."""
        marker = self.folder / f"{self.names[rank]}.listens"
        found = marker.exists()
        marker.unlink(missing_ok=True)
        return found


@pytest.fixture
def lived(tmp_path):
    started = []

    def start_lives(*faults, **settings):
        started.append(Lives(tmp_path, *faults, **settings))
        return started[-1]

    yield start_lives
    for one in started:
        one.fleet.stop(0.0)


def test_a_crashed_peer_starts_again_and_joins_whoever_is_there(lived, tmp_path):
    crash = FaultConfig(kind="crash", peers=(0,), at_s=1.0, for_s=2.0)
    run = lived(crash)
    until(lambda: run.listens(0))
    first = run.fleet.pids()[0]
    run.at(1.0)
    until(lambda: not is_alive(first))
    assert states(run.fleet) == ["running", "running"], "it is away, and to come back"
    run.at(3.0)
    assert run.fleet.pids()[0] != first
    until(lambda: run.listens(0))
    here, there = (tomllib.loads((tmp_path / f"p0{i}.toml").read_text()) for i in range(2))
    assert here["join"] == [there["listen"]]


def test_a_peer_that_leaves_for_good_has_left_and_the_run_goes_on(lived):
    run = lived(FaultConfig(kind="leave", peers=(1,), at_s=1.0))
    until(lambda: run.listens(1))
    run.at(1.0)
    until(lambda: states(run.fleet) == ["running", "left"])


def test_a_late_peer_is_not_there_until_it_comes(lived):
    run = lived(FaultConfig(kind="join", peers=(1,), at_s=1.0))
    assert len(run.fleet.pids()) == 1
    assert states(run.fleet) == ["running", "running"]
    run.at(1.0)
    assert len(run.fleet.pids()) == 2


def test_who_is_still_away_when_all_others_have_ended_is_lost(lived):
    run = lived(FaultConfig(kind="join", peers=(1,), at_s=60.0), behaviour="train")
    until(lambda: states(run.fleet) == ["ended", "lost"])


def test_one_that_nobody_lets_in_again_tries_again(lived, monkeypatch):
    monkeypatch.setattr(peer_process, "TRY_AGAIN_S", 0.0)
    run = lived(FaultConfig(kind="join", peers=(1,), at_s=1.0))
    run.fleet._configs[1].algorithm_options["behaviour"] = "refuse"
    run.at(1.0)
    first = run.fleet.pids()[1]
    until(lambda: not is_alive(first) and states(run.fleet) == ["running", "running"])
    run.at(2.0)
    assert run.fleet.pids()[1] != first


def test_who_came_back_is_asked_to_end_with_the_others(lived):
    run = lived(FaultConfig(kind="crash", peers=(1,), at_s=1.0, for_s=1.0), seconds=5.0)
    until(lambda: run.listens(1))
    first = run.fleet.pids()[1]
    run.at(1.0)
    until(lambda: not is_alive(first))
    run.at(2.0)
    until(lambda: run.listens(1))
    run.at(5.5)
    assert states(run.fleet) == ["running", "running"], "those who average together agree first"
    run.at(6.0)
    until(lambda: states(run.fleet) == ["running", "ended"])


def test_who_is_asked_to_end_before_it_can_hear_that_has_ended(lived):
    run = lived(FaultConfig(kind="join", peers=(1,), at_s=1.0), behaviour="sleep", seconds=5.0)
    run.at(1.0)
    run.at(6.0)
    until(lambda: states(run.fleet) == ["running", "ended"])


def test_who_is_asked_to_leave_before_it_can_hear_that_has_left(lived):
    run = lived(FaultConfig(kind="leave", peers=(1,), at_s=1.0), behaviour="sleep")
    run.at(1.0)
    until(lambda: states(run.fleet) == ["running", "left"])


def test_a_slowed_peer_finds_its_factor_in_a_file(lived, tmp_path):
    run = lived(FaultConfig(kind="slow", peers=(1,), at_s=1.0, for_s=1.0, factor=4.0))
    file = tmp_path / "p01.slowdown"
    written = tomllib.loads((tmp_path / "p01.toml").read_text())
    assert written["pace"]["slowdown_file"] == str(file)
    run.at(1.0)
    assert float(file.read_text()) == 4.0
    run.at(2.0)
    assert not file.exists()


def test_processes_may_have_devices_but_no_share_of_the_machine():
    gpu = DeviceConfig(peers=(0,), device="cuda:0")
    assert ProcessBackend().check(scenario(devices=(gpu,))) == ()
    half = DeviceConfig(peers=(0,), device="cuda:0", cpus=0.5)
    with pytest.raises(ConfigError, match=r"has cpus in \[\[devices\]\], but nothing divides"):
        ProcessBackend().check(scenario(devices=(half,)))


def test_clocks_of_processes_cannot_drift_which_is_said_in_a_sentence():
    drift = FaultConfig(kind="drift", peers=(0,), at_s=1.0, rate=1.1)
    with pytest.raises(ConfigError, match="those that can are crash, pause, slow, throttle, part"):
        ProcessBackend().check(scenario(faults=(drift,)))


def test_where_the_network_suffers_everybody_is_met_at_the_end_of_a_cable(lived, tmp_path):
    run = lived(FaultConfig(kind="partition", peers=(1,), at_s=1.0, for_s=1.0))
    first, second = (tomllib.loads((tmp_path / f"p0{i}.toml").read_text()) for i in range(2))
    assert first["advertise"] != first["listen"]
    assert second["join"] == [first["advertise"]]
    assert {first["network"]["data"], second["network"]["data"]} == {"grpc"}
    run.at(1.0)
    run.at(2.0)
    assert [instance.ended for instance in run.plan.instances] == [1002.0]


def test_external_baselines_have_no_cables_to_cut():
    partition = FaultConfig(kind="partition", peers=(1,), at_s=1.0)
    with pytest.raises(ConfigError, match="ddp opens connections of its own"):
        ProcessBackend().check(scenario(algorithms=("ddp", "ad_psgd"), faults=(partition,)))


def test_a_port_is_not_given_to_two_peers_of_this_machine():
    with pytest.raises(ConfigError, match="metrics_port = 9000 is given to 2 peers of one machine"):
        ProcessBackend().check(scenario(metrics_port=9000))
    assert not ProcessBackend().check(scenario(metrics_port=0))


def test_an_unknown_backend_is_refused_with_those_there_are():
    assert known_backends() == ("process", "docker", "ray", "ssh", "sim")
    with pytest.raises(ConfigError, match="unknown backend 'dokcer'; there are: process"):
        load_backend("dokcer")
