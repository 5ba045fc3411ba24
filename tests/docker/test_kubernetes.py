"""The manifests in `docker/kubernetes`: rendered, held against the schemas, and their commands."""

import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner

from p2ptrain import cli
from p2ptrain.config import RunConfig, load_toml
from tests.docker.kustomize import rendered

FOLDER = Path(__file__).parents[2] / "docker" / "kubernetes"
ROOTS = ("job", "deployment", "job-gpu", "deployment-gpu")
SERVED_FROM = "1.29"
"""The oldest release whose schema all must fit: with it `backoffLimitPerIndex` is on by default."""


def only(root: str, kind: str):
    (found,) = [one for one in rendered(FOLDER / root) if one["kind"] == kind]
    return found


def workload(root: str):
    return only(root, "Job" if root.startswith("job") else "Deployment")


def pod(root: str):
    return workload(root)["spec"]["template"]["spec"]


def container(root: str):
    (one,) = pod(root)["containers"]
    return one


def arguments(root: str, **values: str) -> list[str]:
    """What the kubelet passes on: ``$(NAME)`` filled in from the container's environment."""
    (settings,) = [
        one for one in rendered(FOLDER / root) if one["metadata"]["name"] == "p2ptrain-settings"
    ]
    own = {one["name"]: one.get("value") for one in container(root)["env"]}
    environment = {**settings["data"], **own, **values}
    return [re.sub(r"\$\((\w+)\)", lambda m: environment[m[1]], a) for a in container(root)["args"]]


def configured(monkeypatch, tmp_path, args: list[str]) -> RunConfig:
    """The configuration that a peer has with these arguments."""
    (tmp_path / "peer.toml").write_text(only_config())
    args = [one.replace("/etc/p2ptrain", str(tmp_path)) for one in args]
    seen: list[RunConfig] = []
    monkeypatch.setattr(cli, "run_peer", lambda config, **more: seen.append(config))
    done = CliRunner().invoke(cli.app, args, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return seen[0]


def only_config() -> str:
    (one,) = [r for r in rendered(FOLDER / "job") if r["metadata"]["name"] == "p2ptrain-peer"]
    return one["data"]["peer.toml"]


@pytest.mark.parametrize("root", ROOTS)
def test_every_resource_fits_the_published_schema_of_old_and_new_clusters(root):
    newest = kubernetes_validate.latest_version()
    for one in rendered(FOLDER / root):
        for release in (SERVED_FROM, newest):
            kubernetes_validate.validate(one, release, strict=True)


def test_a_resource_that_does_not_fit_would_be_found():
    wrong = workload("job")
    wrong["spec"]["backoffLimitPerIndx"] = 5
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, SERVED_FROM, strict=True)


@pytest.mark.parametrize("root", ROOTS)
def test_kubectl_renders_the_same(root):
    assert by_kubectl(FOLDER / root) == by_name(rendered(FOLDER / root))


def test_the_overlay_of_the_page_sets_what_it_says(tmp_path):
    page = (FOLDER.parents[1] / "docs" / "fleets.md").read_text()
    (text,) = re.findall(r"```yaml\n# kustomization.yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "p2ptrain").symlink_to(FOLDER.parents[1])
    (tmp_path / "kustomization.yaml").write_text(text)
    found = by_name(rendered(tmp_path))
    assert found["ConfigMap", "p2ptrain-settings"]["data"] == {
        "TASK": "digits",
        "ALGORITHM": "allreduce",
        "SAMPLES": "50000",
        "SEED": "0",
    }
    (one,) = found["Job", "p2ptrain"]["spec"]["template"]["spec"]["containers"]
    assert one["image"] == "registry.example.com/p2ptrain:1"
    (tmp_path / "p2ptrain").unlink()
    shutil.copytree(FOLDER, tmp_path / "p2ptrain" / "docker" / "kubernetes")
    assert by_kubectl(tmp_path) == found


def by_kubectl(folder: Path):
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    command = ["kubectl", "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return by_name(yaml.safe_load_all(done.stdout))


def by_name(resources):
    return {(one["kind"], one["metadata"]["name"]): one for one in resources}


def test_finished_peers_stay_finished_and_each_may_fail_on_its_own():
    spec = workload("job")["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["backoffLimitPerIndex"] >= 1
    assert spec["template"]["spec"]["restartPolicy"] == "Never", "only then it counts by index"
    environment = {one["name"]: one.get("value") for one in container("job")["env"]}
    assert int(environment["PEERS"]) == spec["completions"] == spec["parallelism"]


def test_the_service_has_the_addresses_of_all_pods_before_they_are_ready():
    service = only("job", "Service")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    for root in ("job", "deployment"):
        labels = workload(root)["spec"]["template"]["metadata"]["labels"]
        assert service["spec"]["selector"].items() <= labels.items()
        assert f"--discover={service['metadata']['name']}:4000" in container(root)["args"]


def test_the_budget_is_for_the_pods_of_the_deployment():
    labels = workload("deployment")["spec"]["template"]["metadata"]["labels"]
    for kind in ("PodDisruptionBudget", "Deployment"):
        assert only("deployment", kind)["spec"]["selector"]["matchLabels"] == labels


@pytest.mark.parametrize("root", ROOTS)
def test_probes_ask_the_health_of_the_port_that_peers_are_found_at(root):
    one = container(root)
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert one[probe]["exec"]["command"] == ["p2ptrain", "health", "127.0.0.1:4000"]
    assert one["ports"][0]["containerPort"] == 4000
    startup = one["startupProbe"]
    patience_s = startup["periodSeconds"] * startup["failureThreshold"]
    waits_s = yaml.safe_load(re.search(r"join_timeout_s = (\d+)", only_config())[1])
    assert patience_s > waits_s, "a peer that waits for the others is not killed for it"


def test_a_gpu_is_a_limit_an_image_and_nothing_else():
    for root in ("job", "deployment"):
        plain, gpu = pod(root), pod(f"{root}-gpu")
        one = gpu["containers"][0]
        assert one["resources"]["limits"].pop("nvidia.com/gpu") == 1
        assert one.pop("image") == "p2ptrain:cuda"
        assert one["args"].pop() == "--device=cuda"
        assert plain["containers"][0].pop("image") == "p2ptrain"
        assert gpu.pop("tolerations")[0]["key"] == "nvidia.com/gpu"
        assert gpu == plain


def test_the_pods_of_job_and_deployment_differ_only_in_how_a_peer_is_named_and_ends():
    pods = [pod(root) for root in ("job", "deployment")]
    assert pods[0].pop("restartPolicy") == "Never"
    for one in pods:
        for key in ("args", "env", "command"):
            one["containers"][0].pop(key, None)
    assert pods[0] == pods[1]


def test_a_peer_of_the_job_takes_its_arguments(monkeypatch, tmp_path):
    config = configured(monkeypatch, tmp_path, arguments("job", INDEX="2"))
    assert (config.name, config.rank, config.peers) == ("peer-2", 2, 4)
    assert (config.discover, config.join_timeout_s) == ("p2ptrain:4000", 600)
    assert (config.out, config.metrics_port) == ("/results", 9400)
    assert config.stop.samples == 10_000_000


def test_a_peer_of_the_deployment_takes_its_arguments(monkeypatch, tmp_path):
    args = arguments("deployment", NAME="p2ptrain-5d5c-x1")
    config = configured(monkeypatch, tmp_path, args)
    assert (config.name, config.rank, config.peers) == ("p2ptrain-5d5c-x1", 0, 1)
    assert config.stop.samples is None, "it has no end"


def test_the_file_for_every_peer_is_read(tmp_path):
    (tmp_path / "peer.toml").write_text(only_config())
    assert load_toml(RunConfig, tmp_path / "peer.toml").pace.min_step_ms == 100


@pytest.mark.parametrize(
    ("program", "is_asked", "code"),
    [
        ("exit 0", False, 0),
        ("exit 2", False, 2),
        ("trap 'exit 0' TERM; touch started; while :; do sleep 0.05; done", True, 143),
    ],
)
def test_a_peer_that_is_asked_to_leave_has_not_finished(tmp_path, program, is_asked, code):
    stub = tmp_path / "p2ptrain"
    stub.write_text(f'#!/bin/sh\ntest "$*" = "peer --rank=1" || exit 9\n{program}\n')
    stub.chmod(0o755)
    command = [*container("job")["command"], "peer", "--rank=1"]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    with subprocess.Popen(command, cwd=tmp_path, env=environment) as process:
        if is_asked:
            for _ in range(500):
                if (tmp_path / "started").exists():
                    break
                time.sleep(0.01)
            process.send_signal(signal.SIGTERM)
        assert process.wait(30) == code
