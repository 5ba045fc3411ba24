"""Create network namespaces: separate networks on this machine. This needs root.

They are removed however the program ends, unless it is killed: see `end_on_sigterm`.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from p2ptrain.errors import ConfigError

REMOVALS = 40
CLONE_NEWNET = 0x40000000


@dataclass(frozen=True, slots=True)
class Home:
    """A namespace, and its address on the network between the namespaces."""

    namespace: str
    host: str

    def enter(self) -> None:
        """Move this thread, and those it starts from now on, here: call it before anything else.

        Raises:
            OSError: if it does not exist any more.
        """
        with open(f"/run/netns/{self.namespace}", "rb") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter {self.namespace}")

    def do(self, *command: str) -> None:
        """Run a command in this namespace. Raises ConfigError."""
        do("ip", "netns", "exec", self.namespace, *command)


@contextlib.contextmanager
def made(homes: tuple[Home, ...], *tools: str) -> Iterator[None]:
    """Create these namespaces, with a loopback device each, and remove them at the end.

    Raises:
        ConfigError: if this machine does not allow it, or one of `tools` is missing.
    """
    for tool in ("ip", *tools):
        if shutil.which(tool) is None:
            raise ConfigError(f"there is no {tool!r} command here; install iproute2")
    with contextlib.ExitStack() as stack:
        for home in homes:
            stack.callback(_remove, home)
            do("ip", "netns", "add", home.namespace)
            home.do("ip", "link", "set", "lo", "up")
        yield


def do(*command: str) -> None:
    """Run a command. Raises ConfigError."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        why = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise ConfigError(f"cannot make a link on this machine; it takes root ({why})")


def may_be_made() -> bool:
    """True if this process may be allowed to create them."""
    return os.geteuid() == 0 and shutil.which("ip") is not None


def end_on_sigterm() -> None:
    """Let SIGTERM end this program through every `finally`."""
    signal.signal(signal.SIGTERM, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _remove(home: Home) -> None:
    """Remove a namespace and its devices, if it was created.

    Removal can fail for a moment while another process has a copy of the mounts.
    """
    command = ["ip", "netns", "del", home.namespace]
    for _ in range(REMOVALS):
        subprocess.run(command, capture_output=True, check=False)
        if not Path("/run/netns", home.namespace).exists():
            return
        time.sleep(0.05)
