"""List the external baselines: systems that p2ptrain is compared with and that are not part of it.

An external baseline is an algorithm name that p2ptrain itself does not have. Its peers are a
separate program, started like ours (``--config peer.toml``, a `RunConfig`) and writing the same
records, so that everything after the start treats it like any other row. It trains the same task
from the same seed with the same shards, pace, batch size, optimizer and end. It has no options: the
comparison must be with what people run.

A *price* is an external baseline without a program: `p2plab.backends.ring` computes how long it
would take, in simulations only.
"""

import sys
from collections.abc import Mapping
from typing import Any

from p2ptrain.averaging.base import load_algorithm
from p2ptrain.errors import ConfigError

EXTERNAL_BASELINES: Mapping[str, tuple[str, ...]] = {
    "ddp": (sys.executable, "-m", "p2plab.ddp", "--config"),
}
"""The command that starts a peer of each, up to the path of its configuration."""

PRICES = ("ring",)
"""Those that can only be simulated."""


def is_external(name: str) -> bool:
    """Whether p2ptrain itself has no such algorithm, and this page has."""
    return name in EXTERNAL_BASELINES or name in PRICES


def check_algorithm(
    name: str,
    options: Mapping[str, Any],  # Any: an algorithm's own
    peers: int,
) -> None:
    """Refuse an algorithm or option that cannot work with this many peers, before any start.

    Raises:
        ConfigError: listing those there are, or naming the value and the number of peers.
    """
    if not is_external(name):
        load_algorithm(name, options).check_swarm(peers)
    elif options:
        raise ConfigError(f"{name!r} has no options, but [options.{name}] sets {sorted(options)}")
