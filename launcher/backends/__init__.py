"""Find the backends, the places where peers can run, by name."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from p2ptrain.errors import ConfigError

if TYPE_CHECKING:  # an agent on another machine (`p2plab.backends.agent`) needs no more
    from p2plab.backends.base import Backend


def _process() -> "Backend":
    from p2plab.backends.process import ProcessBackend

    return ProcessBackend()


def _docker() -> "Backend":
    from p2plab.backends.docker import DockerBackend

    return DockerBackend()


def _ray() -> "Backend":
    from p2plab.backends.ray import RayBackend

    return RayBackend()


def _ssh(hosts: Path | None = None) -> "Backend":
    from p2plab.backends.ssh import SshBackend

    return SshBackend(hosts)


def _sim() -> "Backend":
    from p2plab.backends.sim import SimBackend

    return SimBackend()


_BACKENDS: dict[str, Callable[[], "Backend"]] = {
    "process": _process,
    "docker": _docker,
    "ray": _ray,
    "ssh": _ssh,
    "sim": _sim,
}


def known_backends() -> tuple[str, ...]:
    """The names that `load_backend` knows."""
    return tuple(_BACKENDS)


def load_backend(name: str, hosts: Path | None = None) -> "Backend":
    """Find a backend by its name; `hosts` is the list of the one that has hosts.

    Raises:
        ConfigError: listing those there are, or if `hosts` are given to another one.
    """
    if name not in _BACKENDS:
        raise ConfigError(f"unknown backend {name!r}; there are: {', '.join(_BACKENDS)}")
    if hosts is None:
        return _BACKENDS[name]()
    if name != "ssh":
        raise ConfigError(f"--hosts is for --backend ssh, and not for {name}; leave it out")
    return _ssh(hosts)
