"""The files in `docker/` fit together: with the Compose Specification, our metrics, each other."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from p2ptrain.runtime.prometheus import PrometheusMetrics

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docker" / "docker-compose.yml"
DASHBOARD = ROOT / "docker" / "monitoring" / "dashboards" / "swarm.json"


def test_compose_finds_nothing_wrong_with_the_file():
    """Compose itself holds a file without a version against the schema of the specification."""
    if shutil.which("docker-compose") is None:
        pytest.skip("docker-compose is not installed")
    command = ["docker-compose", "-f", str(FILE), "--profile", "monitoring", "config"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert {"peer", "prometheus", "grafana"} <= set(re.findall(r"^  (\w+):$", done.stdout, re.M))


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
