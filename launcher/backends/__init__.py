"""Find the backends, the places where peers can run, by name."""

from launcher.backends.base import Backend
from launcher.backends.docker import DockerBackend
from launcher.backends.process import ProcessBackend
from launcher.backends.sim import SimBackend
from p2ptrain.errors import ConfigError

_BACKENDS: dict[str, type[Backend]] = {
    "process": ProcessBackend,
    "docker": DockerBackend,
    "sim": SimBackend,
}


def known_backends() -> tuple[str, ...]:
    """The names that `load_backend` knows."""
    return tuple(_BACKENDS)


def load_backend(name: str) -> Backend:
    """Find a backend by its name.

    Raises:
        ConfigError: listing those there are.
    """
    if name not in _BACKENDS:
        raise ConfigError(f"unknown backend {name!r}; there are: {', '.join(_BACKENDS)}")
    return _BACKENDS[name]()
