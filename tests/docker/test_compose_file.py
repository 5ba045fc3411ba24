"""The files in `docker/` fit together: with the Compose Specification, our metrics, each other."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from p2ptrain.runtime.prometheus import PrometheusMetrics

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docker" / "docker-compose.yml"
GPU_FILE = ROOT / "docker" / "docker-compose.gpu.yml"
DASHBOARD = ROOT / "docker" / "monitoring" / "dashboards" / "swarm.json"


def test_compose_finds_nothing_wrong_with_the_file():
    """Compose itself holds a file without a version against the schema of the specification."""
    if shutil.which("docker-compose") is None:
        pytest.skip("docker-compose is not installed")
    for file, services in (
        (FILE, {"peer", "prometheus", "grafana"}),
        (GPU_FILE, {"gpu0", "gpu1", "gpu2", "gpu3"}),
    ):
        command = ["docker-compose", "-f", str(file), "--profile", "monitoring", "config"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        assert services <= set(re.findall(r"^  (\w+):$", done.stdout, re.M))


def test_each_gpu_is_given_to_one_peer_and_all_have_the_name_that_they_look_for():
    services = yaml.safe_load(GPU_FILE.read_text())["services"]
    del services["key"]
    given = []
    for service in services.values():
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        given += device["device_ids"]
        assert device["capabilities"] == ["gpu"]
        assert service["networks"]["default"]["aliases"] == ["peer"]
        command = service["command"]
        assert command[command.index("--discover") + 1] == "peer:4000"
        assert command[command.index("--device") + 1] == "cuda"
    assert given == [f"${{GPU{number}:-{number}}}" for number in range(len(services))]


def test_the_key_is_made_once_and_before_the_peers_that_read_it():
    for file in (FILE, GPU_FILE):
        services = yaml.safe_load(file.read_text())["services"]
        key = services.pop("key")
        assert key["command"] == ["keys", "new", "--keep", "/run/p2ptrain/swarm.key"]
        assert key["volumes"] == ["keys:/run/p2ptrain"]
        for name, peer in services.items():
            if name in ("peer", "gpu0", "gpu1", "gpu2", "gpu3"):
                waits = {"key": {"condition": "service_completed_successfully"}}
                assert peer["depends_on"] == waits
                assert peer["environment"]["P2PTRAIN_TOKEN_FILE"] == key["command"][-1]
                assert "keys:/run/p2ptrain:ro" in peer["volumes"]


def test_peers_with_and_without_gpus_are_told_the_same():
    ours = yaml.safe_load(FILE.read_text())["services"]["peer"]
    services = yaml.safe_load(GPU_FILE.read_text())["services"]
    del services["key"]
    for theirs in services.values():
        command = [word for word in theirs["command"] if word not in ("--device", "cuda")]
        assert command == ours["command"]
        for key in ("build", "init", "restart", "stop_grace_period", "environment", "ports"):
            assert theirs[key] == ours[key]
        assert theirs["volumes"] == ours["volumes"]


def test_the_dashboard_asks_for_metrics_that_a_peer_has():
    sink = PrometheusMetrics("p00")
    shown = {name for family in sink.registry.collect() for name in _series(family)}
    asked = set(re.findall(r"p2ptrain_\w+", DASHBOARD.read_text()))
    assert asked
    assert asked <= shown


def test_every_panel_of_the_dashboard_has_a_place_of_its_own():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(panels)


def _series(family) -> list[str]:
    endings = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}
    return [family.name + ending for ending in endings.get(family.type, [""])]
