"""Render a kustomization: as much of Kustomize as `docker/kubernetes` uses, and no more.

What it does not know it refuses, so that a rendering is never half of one.
"""

import copy
import re
from pathlib import Path
from typing import Any

import yaml

Resource = dict[str, Any]  # Any: YAML

KNOWN = {
    *("apiVersion", "kind", "resources", "components", "labels", "images", "patches"),
    *("generatorOptions", "configMapGenerator"),
}


def rendered(folder: Path) -> list[Resource]:
    """The resources of the kustomization in `folder`."""
    return _built(folder, [])


def _built(folder: Path, resources: list[Resource]) -> list[Resource]:
    """`resources`, with those of `folder` and changed as it says."""
    text = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert set(text) <= KNOWN, f"{folder}: {set(text) - KNOWN}"
    found = list(resources)
    for name in text.get("resources", ()):
        path = folder / name
        found += _built(path, []) if path.is_dir() else yaml.safe_load_all(path.read_text())
    if "configMapGenerator" in text:
        assert text["generatorOptions"] == {"disableNameSuffixHash": True}
        found += [_config_map(folder, one) for one in text["configMapGenerator"]]
    for name in text.get("components", ()):
        found = _built(folder / name, found)
    for one in found:
        for label in text.get("labels", ()):
            one["metadata"].setdefault("labels", {}).update(label["pairs"])
        for patch in text.get("patches", ()):
            if _is_target(patch["target"], one):
                _apply(one, yaml.safe_load(patch["patch"]))
        _name_images(one, text.get("images", ()))
    return found


def _config_map(folder: Path, given: dict[str, Any]) -> Resource:  # Any: YAML
    data = dict(literal.split("=", 1) for literal in given.get("literals", ()))
    data |= {name: (folder / name).read_text() for name in given.get("files", ())}
    head = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": given["name"]}}
    return {**head, "data": data}


def _is_target(target: dict[str, str], one: Resource) -> bool:
    pairs = ((target["kind"], one["kind"]), (target["name"], one["metadata"]["name"]))
    return all(re.fullmatch(pattern, value) for pattern, value in pairs)


def _apply(one: Resource, patch: list[dict[str, Any]]) -> None:  # Any: YAML
    """A JSON patch (RFC 6902) that adds or replaces."""
    for operation in patch:
        assert operation["op"] in ("add", "replace")
        *way, last = [
            part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]
        ]
        place: Any = one  # Any: YAML on the way down
        for step in way:
            place = place[int(step)] if isinstance(place, list) else place[step]
        value = copy.deepcopy(operation["value"])
        if last == "-":
            place.append(value)
        else:
            place[last] = value


def _name_images(one: Resource, images: list[dict[str, str]]) -> None:
    pod = one.get("spec", {}).get("template", {}).get("spec", {})
    for container in pod.get("containers", ()):
        for image in images:
            if container["image"].partition(":")[0] == image["name"]:
                container["image"] = f"{image['newName']}:{image['newTag']}"
