"""Simulate a cable that can be cut: packets are lost in both directions, without an error.

Two namespaces are connected by a third that routes between them, until it drops everything: no
reset, no refusal, no device that goes down, as when a distant switch fails.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

from launcher.bench.namespaces import Home, do, made


@dataclass(frozen=True, slots=True)
class Cable:
    """Connects `near` and `far`."""

    near: Home
    far: Home
    middle: str

    def cut(self) -> None:
        """Drop all packets from now on."""
        self._route("blackhole", "replace")

    def restore(self) -> None:
        """Route packets again."""
        self._route("blackhole", "del")

    def _route(self, kind: str, verb: str) -> None:
        for home in (self.near, self.far):  # more specific than the network's route, so it wins
            do("ip", "-n", self.middle, "route", verb, kind, f"{home.host}/32")


@contextlib.contextmanager
def laid() -> Iterator[Cable]:
    """Create a cable, and remove it at the end.

    Raises:
        ConfigError: if this machine does not allow it.
    """
    name = f"p2pcable{os.getpid()}"
    near, far = Home(f"{name}-near", "10.78.0.2"), Home(f"{name}-far", "10.78.1.2")
    middle = Home(f"{name}-middle", "")
    with made((near, far, middle)):
        middle.do("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        for home in (near, far):
            there, here = f"{home.host}/24", f"{home.host[:-1]}1"
            end = f"to-{home.host.split('.')[2]}"
            do("ip", "link", "add", "end", "netns", home.namespace, "type", "veth",
               "peer", "name", end, "netns", middle.namespace)  # fmt: skip
            middle.do("ip", "addr", "add", f"{here}/24", "dev", end)
            middle.do("ip", "link", "set", end, "up")
            home.do("ip", "addr", "add", there, "dev", "end")
            home.do("ip", "link", "set", "end", "up")
            home.do("ip", "route", "add", "default", "via", here)
        yield Cable(near, far, middle.namespace)
