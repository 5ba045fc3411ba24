"""Describe the machine and date of a measurement, without which its figures mean little."""

import os
import platform
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from p2plab.harness.claims import Json

COPYING = {"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x100000"}
"""Lets glibc write copies of 1 MiB and more past the caches.

By default it does so from a size on that it derives from the last-level cache. A virtual machine
may report that of its whole host (480 MiB), and then a copy of 100 MB takes 15 ms instead of 9.
Every process that is measured gets it, those of other systems too."""

TCP_SETTING = Path("/proc/sys/net/ipv4/tcp_congestion_control")
"""Where Linux has it; each network namespace has its own."""

_PACKAGES = ("p2ptrain", "torch", "numpy", "grpcio")


def describe_machine() -> "Json":
    """The description of this machine in a report, in its order there.

    Contains no host name and no user name, since reports are passed on.
    """
    return {
        "processor": _processor(),
        "cores": os.cpu_count() or 1,
        "memory": _memory(),
        "system": f"{platform.system()} {platform.release()}",
        "TCP": _congestion_control(),
        "Python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
        "date": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
    }


def _processor() -> str:
    """The processor's name on Linux; on other systems at least its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _memory() -> str:
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return "unknown"
    return f"{size / 2**30:.1f} GiB"


def _congestion_control() -> str:
    """How TCP finds its rate, which decides how fast sockets are, even on one machine."""
    try:
        return TCP_SETTING.read_text(encoding="utf-8").strip()
    except OSError:
        return "unknown"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
