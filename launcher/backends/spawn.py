"""Start a peer's process: the command, its environment, and free ports.

Imports nothing heavy: agents on other machines (`p2plab.backends.agent`) need it, and no torch.
"""

import contextlib
import random
import socket
import sys
from collections.abc import Mapping

from p2plab.machine import COPYING

PEER_COMMAND = (sys.executable, "-m", "p2ptrain", "peer", "--no-result", "--config")
"""The command that starts a peer, up to the path of its configuration."""

PORTS = 10_000, 32_768

_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def peer_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The launcher's environment, with one compute thread: peers share the machine."""
    ours = {**dict.fromkeys(_ONE_THREAD, "1"), "PYTHONUNBUFFERED": "1"}
    return {**COPYING, **environment, **ours}


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago; a peer that finds one taken ends the run.

    They are below those that the kernel hands out, or a connection of any process might take one.
    """
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(*PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found += [port] if port not in found else []
    return found
