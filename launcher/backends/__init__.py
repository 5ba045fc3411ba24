"""Find the backends, the places where peers can run, by name."""

from collections.abc import Callable

from p2plab.backends.base import Backend
from p2ptrain.errors import ConfigError


def _process() -> Backend:
    from p2plab.backends.process import ProcessBackend

    return ProcessBackend()


def _docker() -> Backend:
    from p2plab.backends.docker import DockerBackend

    return DockerBackend()


def _sim() -> Backend:
    from p2plab.backends.sim import SimBackend  # torch takes seconds to import

    return SimBackend()


_BACKENDS: dict[str, Callable[[], Backend]] = {"process": _process, "docker": _docker, "sim": _sim}


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
