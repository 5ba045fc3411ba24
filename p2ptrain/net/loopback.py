"""Tell on loopback whether a caller is of our own user, without any secret.

A TCP connection within one machine has two ends, and the kernel lists the owner of each
(``/proc/net/tcp``; see proc_pid_net(5)). So nothing has to be configured where all peers are one
user's. Root may call too: it could read our memory anyway.

An address and a port of this machine do not name one connection: the system gives the same port to
connections with different destinations. So the destination counts, too. The kernel lists a socket
that is closed already with owner 0, as if it were root's, but without an inode: it does not count.
"""

import ipaddress
import os
import struct
import urllib.parse
from collections.abc import Collection
from pathlib import Path

ROOT = 0
TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))


def is_loopback(host: str) -> bool:
    """True for the hosts that only this machine reaches."""
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def is_ours(caller: str, ports: Collection[int]) -> bool:
    """True if the process at gRPC's ``ipv4:127.0.0.1:567`` is of our user, or of root.

    Args:
        caller: the end of a connection to one of our `ports`.
        ports: where this peer listens.

    The connection has to be open: a closed one has no owner.
    """
    _, _, address = urllib.parse.unquote(caller).partition(":")
    host, _, port = address.rpartition(":")
    owners = owners_of(host.strip("[]"), int(port), ports) if port.isdigit() else ()
    return bool(owners) and all(owner in (os.getuid(), ROOT) for owner in owners)


def owners_of(host: str, port: int, ports: Collection[int]) -> tuple[int, ...]:
    """The user ids of the processes that call one of `ports` from this address of this machine.

    More than one only where others listen at such a port on another address of this machine.
    """
    try:
        ends = _written(host, port)
    except ValueError:
        return ()
    called = tuple(f":{one:04X}" for one in ports)
    owners: list[int] = []
    for table in TABLES:
        try:
            lines = table.read_text(encoding="ascii").splitlines()
        except OSError:
            continue
        for line in lines[1:]:
            _, local, remote, _, _, _, _, owner, _, inode, *_ = line.split(maxsplit=10)
            if local in ends and remote.endswith(called) and inode != _OF_NOBODY:
                owners.append(int(owner))
    return tuple(owners)


_OF_NOBODY = "0"


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
