"""The docker backend: what it asks of the engine, and, where one answers, a run from end to end."""

import os
import signal
import subprocess

import pytest

from p2plab.backends.docker import (
    LABEL,
    DockerBackend,
    DockerFleet,
    _placed,
    clean,
    cutting,
    engine_trouble,
    shaping,
)
from p2plab.compose import compose_file, to_yaml
from p2plab.conditions import DeviceConfig, FaultConfig, LinkConfig
from p2plab.run import Run
from p2plab.scenario import peer_names
from p2ptrain.compute.step_timing import StepTiming
from p2ptrain.config import StopConfig
from p2ptrain.errors import ConfigError
from tests.launcher.fakes import FakeEvaluator, doomed_launcher, scenario

TROUBLE = engine_trouble()
needs_engine = pytest.mark.skipif(bool(TROUBLE), reason=TROUBLE or "an engine answers")


def everything_of_ours() -> str:
    command = ["docker", "ps", "--all", "--quiet", "--filter", f"label={LABEL}"]
    networks = ["docker", "network", "ls", "--quiet", "--filter", f"label={LABEL}"]
    return subprocess.check_output(command, text=True) + subprocess.check_output(
        networks, text=True
    )


# --- without an engine ----------------------------------------------------------------------------


def test_peers_are_unlike_by_what_the_file_gives_them(tmp_path):
    devices = (
        DeviceConfig(peers=(0, 1), cpus=0.5, memory_mb=700),
        DeviceConfig(peers=(1,), cpus=0.125, uplink_mbit_s=20.0),
    )
    file = compose_file(scenario(devices=devices), peer_names(2), tmp_path, "p2plab-test")
    first, second = file["services"]["p00"], file["services"]["p01"]
    assert (first["cpus"], first["mem_limit"]) == (0.5, "700m")
    assert (second["cpus"], second["mem_limit"]) == (0.125, "700m")
    assert first["user"] == f"{os.getuid()}:{os.getgid()}"
    assert first["labels"] == file["networks"]["default"]["labels"] == {LABEL: "p2plab-test"}


def test_a_container_is_given_its_gpu_and_no_other_which_is_its_first(tmp_path):
    devices = (DeviceConfig(peers=(1,), device="cuda:3"), DeviceConfig(peers=(0,), device="cpu"))
    chosen = scenario(devices=devices)
    file = compose_file(chosen, peer_names(2), tmp_path, "p2plab-test")
    one = {"driver": "nvidia", "device_ids": ["3"], "capabilities": ["gpu"]}
    assert file["services"]["p01"]["deploy"] == {"resources": {"reservations": {"devices": [one]}}}
    assert "deploy" not in file["services"]["p00"]
    configs = [_placed(config, "p00") for config in chosen.configs("ad_psgd", tmp_path)]
    assert [config.device for config in configs[:2]] == ["cpu", "cuda"]


def test_yaml_is_written_one_item_to_a_line():
    text = to_yaml({"a": {"b": 1, "c": ["x: y", True]}, "d": "no"})
    assert text == 'a:\n  b: 1\n  c:\n    - "x: y"\n    - true\nd: "no"\n'


def test_the_narrow_link_comes_first_and_what_else_it_does_behind_it():
    assert shaping(None, None).splitlines() == ["tc qdisc del dev eth0 root 2>/dev/null || true"]
    assert "root handle 1: tbf rate 20000000bit burst 16384 " in shaping(20.0, None)
    assert "netem" not in shaping(100.0, LinkConfig(bandwidth_mbit_s=100.0))
    slow = shaping(100.0, LinkConfig(bandwidth_mbit_s=100.0, latency_ms=40.0, loss=0.01))
    assert "parent 1:1 netem delay 40.0ms 0.0ms loss 1.0% duplicate 0.0%" in slow


def test_a_cut_is_made_and_healed_address_by_address():
    assert cutting([], []) == ""
    lose, find = cutting(["10.0.0.3"], ["10.0.0.2"]).splitlines()
    assert lose == "ip neigh replace 10.0.0.3 lladdr 02:00:00:00:00:01 dev eth0 nud permanent"
    assert find.startswith("ip neigh del 10.0.0.2 dev eth0")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"cpus": 6400.0}, "devices cpus = 6400 cannot be given .* give from 0.01 to "),
        ({"cpus": 0.0001}, "devices cpus = 0.0001 cannot be given to a container"),
        ({"memory_mb": 120}, "devices memory_mb = 120 is too little .* give 400 or more"),
        ({"uplink_mbit_s": 1e-9}, "devices uplink_mbit_s = 1e-09 is none .* give from 0.001 to"),
        (
            {"device": "cuda"},
            "devices device = 'cuda' cannot be .* which GPU it gets, as in cuda:0",
        ),
        ({"device": "xpu:0"}, "devices device = 'xpu:0' cannot be given to a container"),
        ({"latency_ms": 80}, "devices latency_ms = 80 .* only a simulation has; give it in"),
        ({"downlink_mbit_s": 5}, "devices downlink_mbit_s = 5 .* or use --backend sim"),
    ],
)
def test_a_limit_that_no_container_can_be_held_to_is_refused_before_anything_starts(
    changes, sentence
):
    with pytest.raises(ConfigError, match=sentence):
        DockerBackend().check(scenario(devices=(DeviceConfig(peers=(1,), **changes),)))
    narrow = FaultConfig(kind="throttle", peers=(0,), at_s=1.0, mbit_s=1e12)
    with pytest.raises(ConfigError, match="fault 'throttle': mbit_s = 1e"):
        DockerBackend().check(scenario(faults=(narrow,)))


def test_whoever_wanted_too_much_memory_is_told_how_much_it_had(tmp_path):
    limited = (DeviceConfig(peers=(1,), memory_mb=450), DeviceConfig(peers=(1,), cpus=0.5))
    chosen = scenario(devices=limited)
    fleet = DockerFleet(chosen, chosen.configs("ad_psgd", tmp_path))
    assert fleet._death(1, signal.SIGKILL) == "was killed by SIGKILL"
    fleet._no_memory = dict.fromkeys(fleet._names)
    assert fleet._death(1, signal.SIGKILL).endswith("more than memory_mb = 450; give it more")
    assert fleet._death(0, signal.SIGKILL) == "was killed by SIGKILL", "it had no limit"


def test_what_containers_cannot_do_is_refused_in_a_sentence():
    drift = FaultConfig(kind="drift", peers=(0,), at_s=1.0, rate=1.1)
    with pytest.raises(ConfigError, match="cannot hit containers of one machine"):
        DockerBackend().check(scenario(faults=(drift,)))
    with pytest.raises(ConfigError, match="without gradients"):
        DockerBackend().check(scenario(gradients=False))
    assert DockerBackend().refusal("ddp") == "has no image to run in containers"


# --- with one -------------------------------------------------------------------------------------


@pytest.fixture
def clean_engine():
    """An engine without containers of ours: a test run that was killed leaves some behind."""
    clean()


@pytest.mark.docker
@pytest.mark.xdist_group("docker")  # one cleans up what the other would still use
@pytest.mark.sockets
@pytest.mark.slow
@pytest.mark.timeout(240)
@needs_engine
def test_containers_train_suffer_and_leave_nothing_behind(clean_engine, tmp_path):
    faults = (
        FaultConfig(kind="crash", peers=(1,), at_s=2.0, for_s=1.0),
        FaultConfig(kind="pause", peers=(2,), at_s=3.0, for_s=2.0),
        FaultConfig(kind="slow", peers=(0,), at_s=3.0, for_s=2.0, factor=3.0),
        FaultConfig(kind="throttle", peers=(0,), at_s=2.0, for_s=3.0, mbit_s=10.0),
        FaultConfig(kind="partition", peers=(2,), at_s=8.0, for_s=3.0),
    )
    chosen = scenario(
        peers=3,
        faults=faults,
        devices=(DeviceConfig(peers=(2,), cpus=0.8, memory_mb=900, uplink_mbit_s=50.0),),
        pace=StepTiming(min_step_ms=100),
        stop=StopConfig(seconds=25.0),
    )
    folder = tmp_path / "ad_psgd"
    run = Run(chosen, "ad_psgd", folder, FakeEvaluator())
    run.execute(DockerBackend(), lambda run: None)
    assert [status.state for status in run.statuses] == ["ended"] * 3, run.notes
    assert len(run.costs["instances"]) == len(faults)
    assert (folder / "p01.log").read_text().count("p01 listens at") == 2
    assert everything_of_ours() == ""


@pytest.mark.docker
@pytest.mark.xdist_group("docker")  # one cleans up what the other would still use
@pytest.mark.sockets
@pytest.mark.slow
@needs_engine
def test_after_kill_9_of_the_launcher_clean_removes_what_is_left(clean_engine, tmp_path):
    text = (
        "from p2plab.backends.docker import DockerBackend\n"
        "from tests.launcher.fakes import scenario\n"
        "chosen = scenario(peers=2)\n"
        "DockerBackend().start(chosen, chosen.configs('ad_psgd', folder))\n"
        "print('started', flush=True)\n"
    )
    with doomed_launcher(text, tmp_path) as said:
        assert said == "started"
    assert len(clean()) == 3, "two containers and their network"
    assert everything_of_ours() == ""
