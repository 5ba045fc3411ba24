"""Tell on loopback whether a caller is of our own user, without any secret.

A TCP connection within one machine has two ends, and the kernel lists the owner of each
(``/proc/net/tcp``; see proc_pid_net(5)). So nothing has to be configured where all peers are one
user's. Root may call too: it could read our memory anyway.
"""

import ipaddress
import os
import struct
import urllib.parse
from pathlib import Path

ROOT = 0
TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))


def is_loopback(host: str) -> bool:
    """True for the hosts that only this machine reaches."""
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def is_ours(caller: str) -> bool:
    """True if the process at gRPC's ``ipv4:127.0.0.1:567`` is of our user, or of root.

    The connection has to be open: a closed one has no owner.
    """
    _, _, address = urllib.parse.unquote(caller).partition(":")
    host, _, port = address.rpartition(":")
    owner = owner_of(host.strip("[]"), int(port)) if port.isdigit() else None
    return owner is not None and owner in (os.getuid(), ROOT)


def owner_of(host: str, port: int) -> int | None:
    """The user id of the process that calls from this address of this machine; None if none."""
    try:
        ends = _written(host, port)
    except ValueError:
        return None
    for table in TABLES:
        try:
            lines = table.read_text(encoding="ascii").splitlines()
        except OSError:
            continue
        for line in lines[1:]:
            _, local, _, state, *rest = line.split(maxsplit=8)
            if local in ends and state != _LISTENS:
                return int(rest[3])
    return None


_LISTENS = "0A"


def _written(host: str, port: int) -> tuple[str, ...]:
    """The address as the tables have it: words of four bytes, each in the machine's order."""
    ip = ipaddress.ip_address(host.partition("%")[0])
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    forms = [(mapped or ip).packed]
    if len(forms[0]) == 4:  # a socket of both kinds is listed by the other form
        forms.append(bytes(10) + b"\xff\xff" + forms[0])
    return tuple(f"{_words(form)}:{port:04X}" for form in forms)


def _words(packed: bytes) -> str:
    numbers = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{number:08X}" for number in numbers)
