"""Lay a cable between two network namespaces, separate networks on this machine. This needs root.

A third namespace routes between the two. A cable can be as slow as wanted. It can be cut: the
third one then drops everything in both directions, with no reset, no refusal and no device that
goes down, as when a distant switch fails.

All is removed however the program ends, unless it is killed. `p2plab.backends.cables` does
without root, by relays for one port of each peer; through namespaces all traffic passes.
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from p2plab.machine import TCP_SETTING
from p2ptrain.errors import ConfigError
from p2ptrain.ids import Seconds

REMOVALS = 40
CLONE_NEWNET = 0x40000000

BURST = "256kb"
"""The size of the bucket that limits a rate: above the 64 KiB that a device takes in one piece."""

QUEUE_S: Seconds = 0.05

CONGESTION = "reno"
"""How TCP finds its rate on a cable with a limit: the one way that every Linux has and allows.

BBR, the default of some hosts, sends next to nothing for 0.2 s of every ten on each connection
(PROBE_RTT), to find the delay of an empty link: then steps that wait for a link last 0.2 s longer
now and then, whatever is measured."""

ROUTER = "169.254.1.1"
DIALED = 32768
"""Where the ports begin that the kernel gives to connections that a namespace opens itself."""

DEVICES = ("to-near", "to-far")
"""The router's address, and its devices."""


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

    def drop_calls(self) -> None:
        """Drop what others send to ports below `DIALED`, as behind a firewall or NAT.

        No reset, no refusal. Connections that are opened here work. Raises ConfigError.
        """
        rule = ("ip", "-n", self.namespace, "rule")
        do(*rule, "add", "pref", "100", "lookup", "local")
        do(*rule, "del", "pref", "0")
        calls = ("iif", "end", "ipproto", "tcp", "dport", f"1-{DIALED - 1}")
        do(*rule, "add", "pref", "50", *calls, "blackhole")


@dataclass(frozen=True, slots=True)
class Cable:
    """Connects `near` and `far`."""

    near: Home
    far: Home
    middle: Home

    @property
    def ends(self) -> tuple[Home, Home]:
        """Both homes."""
        return self.near, self.far

    def cut(self) -> None:
        """Drop all packets from now on."""
        for home in self.ends:
            self._route("blackhole", home.host)

    def restore(self) -> None:
        """Route packets again."""
        for home, device in zip(self.ends, DEVICES, strict=True):
            self._route(home.host, "dev", device)

    def _route(self, *route: str) -> None:
        do("ip", "-n", self.middle.namespace, "route", "replace", *route)


@contextlib.contextmanager
def laid(
    mbit: int | None = None, hosts: tuple[str, str] = ("10.78.0.1", "10.78.0.2")
) -> Iterator[Cable]:
    """A cable, removed at the end.

    Args:
        mbit: how much it carries in each direction, in Mbit/s; None: no limit.
        hosts: the addresses of its ends.

    Raises:
        ConfigError: if this machine does not allow it, or lacks a tool.
    """
    for tool in ("ip", "tc") if mbit else ("ip",):
        if shutil.which(tool) is None:
            raise ConfigError(f"there is no {tool!r} command here; install iproute2")
    name = f"p2pcable{os.getpid()}"
    near, far = Home(f"{name}-near", hosts[0]), Home(f"{name}-far", hosts[1])
    cable = Cable(near, far, Home(f"{name}-middle", ROUTER))
    with contextlib.ExitStack() as stack:
        for home in (near, far, cable.middle):
            stack.callback(_remove, home)
            do("ip", "netns", "add", home.namespace)
            home.do("ip", "link", "set", "lo", "up")
        cable.middle.do("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        for home, device in zip(cable.ends, DEVICES, strict=True):
            _connect(home, cable.middle, device)
            if mbit:
                queue = str(round(mbit * 125_000 * QUEUE_S))
                rate = ("rate", f"{mbit}mbit", "burst", BURST, "limit", queue)
                home.do("tc", "qdisc", "add", "dev", "end", "root", "tbf", *rate)
                home.do("sh", "-c", f"echo {CONGESTION} > {TCP_SETTING}")
        cable.restore()
        yield cable


def _connect(home: Home, middle: Home, device: str) -> None:
    """Connect `home` to a device of the router, its way to every address."""
    ends = ("end", "netns", home.namespace), (device, "netns", middle.namespace)
    do("ip", "link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1])
    for one, end in ((home, "end"), (middle, device)):
        one.do("ip", "addr", "add", f"{one.host}/32", "dev", end)
        one.do("ip", "link", "set", end, "up")
    home.do("ip", "route", "add", middle.host, "dev", "end")
    home.do("ip", "route", "add", "default", "via", middle.host)


def do(*command: str) -> None:
    """Run a command. Raises ConfigError."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        why = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise ConfigError(f"cannot make a link on this machine; it takes root ({why})")


def may_be_made() -> bool:
    """True if this process may be allowed to create them."""
    return os.geteuid() == 0 and shutil.which("ip") is not None


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
