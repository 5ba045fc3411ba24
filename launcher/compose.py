"""Turn a scenario into a Compose file, one service per peer; ``p2plab compose`` prints it.

Peers differ in the resources that the file gives them (``cpus``, ``mem_limit``). The limits of
their links are set inside the containers once they run (`p2plab.backends.docker`), since Compose
has no option for them. Every service has its own name as its address, mounts the folder of the
run's results, and runs under the launcher's user id, so that the records belong to that user. A
container starts with the rights of an ordinary process; only root inside of it may change its
network, and a peer is root there only if the launcher is.

The file uses only the plain Compose Specification, nothing specific to one engine or version.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from p2plab.scenario import Scenario
from p2ptrain.compute.device_name import parse_device

IMAGE = "p2ptrain"
PORT = 4000
LABEL = "p2plab"
"""Of every container and network of ours; its value is the run's project."""

RESULTS = "/results"
"""Where a container finds the folder of its run."""

GRACE_S = 8


def compose_file(
    scenario: Scenario, names: Sequence[str], folder: Path, project: str
) -> dict[str, Any]:  # Any: YAML
    """The file of one run, whose peers have `names` and whose files are in `folder`."""
    return {
        "services": {
            name: _service(scenario, rank, name, folder, project) for rank, name in enumerate(names)
        },
        "networks": {"default": {"labels": {LABEL: project}}},
    }


def _service(
    scenario: Scenario, rank: int, name: str, folder: Path, project: str
) -> dict[str, Any]:  # Any: YAML
    return {
        "image": IMAGE,
        "container_name": f"{project}-{name}",
        "hostname": name,
        "command": ["peer", "--no-result", "--config", f"{RESULTS}/{name}.toml"],
        "user": f"{os.getuid()}:{os.getgid()}",
        "init": True,
        **_shares(scenario, rank),
        "cap_add": ["NET_ADMIN"],
        "stop_grace_period": f"{GRACE_S}s",
        "environment": {"OMP_NUM_THREADS": "1", "HOME": "/tmp"},
        "healthcheck": {"disable": True},
        "labels": {LABEL: project},
        "volumes": [f"{folder.resolve()}:{RESULTS}"],
    }


def _shares(scenario: Scenario, rank: int) -> dict[str, Any]:  # Any: YAML
    """The resources that a peer may use; of two devices that name it the later one counts."""
    shares: dict[str, Any] = {}
    for device in scenario.devices:
        if rank in device.peers:
            shares |= {"cpus": device.cpus} if device.cpus else {}
            shares |= {"mem_limit": f"{device.memory_mb}m"} if device.memory_mb else {}
            shares |= _gpu(device.device) if device.device else {}
    return shares


def _gpu(device: str) -> dict[str, Any]:  # Any: YAML
    """One GPU and no other; inside, it is the first."""
    kind, index = parse_device(device)
    if kind == "cpu":
        return {}
    one = {"driver": "nvidia", "device_ids": [str(index)], "capabilities": ["gpu"]}
    return {"deploy": {"resources": {"reservations": {"devices": [one]}}}}


def to_yaml(value: Mapping[str, Any], indent: str = "") -> str:  # Any: YAML
    """Tables and lists as YAML, one item to a line; JSON's scalars are YAML's."""
    lines = []
    for key, item in value.items():
        if isinstance(item, Mapping):
            lines.append(f"{indent}{key}:\n{to_yaml(item, indent + '  ')}")
        elif isinstance(item, list):
            items = "".join(f"{indent}  - {json.dumps(one)}\n" for one in item)
            lines.append(f"{indent}{key}:\n{items}")
        else:
            lines.append(f"{indent}{key}: {json.dumps(item)}\n")
    return "".join(lines)
