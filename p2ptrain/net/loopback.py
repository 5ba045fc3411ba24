"""Tell on loopback whether a caller is of our own user, without any secret.

A TCP connection within one machine has two ends, and the kernel knows the owner of each. So nothing
has to be configured where all peers are one user's. Root may call too: it could read our memory
anyway.

An address and a port of this machine do not name one connection: the system gives the same port to
connections with different destinations. So the destination counts, too. A socket that is closed
already has owner 0, as if it were root's, but no inode: it does not count.

The kernel is asked for that very connection (sock_diag(7)), which takes some microseconds. Where it
does not answer, as in some containers, its list of all connections says the same
(``/proc/net/tcp``, proc_pid_net(5)). To read that list takes milliseconds on a machine with much
memory, however few connections there are: a stranger who asks often would pay for it with our time.
"""

import errno
import ipaddress
import os
import socket
import struct
import urllib.parse
from contextlib import suppress
from pathlib import Path

ROOT = 0
TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))

NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20
NLM_F_REQUEST = 1
NLMSG_ERROR = 2
ALL_STATES = 0xFFFF_FFFF
ANY_COOKIE = b"\xff" * 8

_HEAD = struct.Struct("=IHHII")
"""Length, type, flags, sequence, sender (`nlmsghdr`)."""

_ASKED = struct.Struct("=BBBxI")
"""Family, protocol, extensions, states (`inet_diag_req_v2`); then come the ends."""

_ENDS = struct.Struct("!HH16s16s")
"""Ports and addresses, the one that is asked about first (`inet_diag_sockid`)."""

_FOUND = struct.Struct("=4x48x12xII")
"""Owner and inode in the answer (`inet_diag_msg`); its ends stand at 4."""

_ERROR = struct.Struct("=i")

End = tuple[str, int]
"""Host and port."""


def is_loopback(host: str) -> bool:
    """True for the hosts that only this machine reaches."""
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


class LocalCallers:
    """Those that call this peer from within its machine."""

    def __init__(self) -> None:
        self._called: list[End] = []
        self._kernel_answers = False

    def listen(self, address: str, port: int) -> None:
        """This peer is called here: ``127.0.0.1:0``, which became this port."""
        self._called.append((address.rpartition(":")[0].strip("[]"), port))

    def is_ours(self, caller: str) -> bool:
        """True if the process at gRPC's ``ipv4:127.0.0.1:567`` is of our user, or of root.

        The connection has to be open: a closed one has no owner.
        """
        _, _, address = urllib.parse.unquote(caller).partition(":")
        host, _, port = address.rpartition(":")
        owners = self._owners((host.strip("[]"), int(port))) if port.isdigit() else ()
        return bool(owners) and all(owner in (os.getuid(), ROOT) for owner in owners)

    def _owners(self, caller: End) -> tuple[int, ...]:
        """More than one only where it calls several of our ports by one of its own."""
        with suppress(OSError, ValueError):
            found = [owner for called in self._called for owner in owner_by_diag(caller, called)]
            self._kernel_answers |= bool(found)
            if self._kernel_answers:
                return tuple(found)
        return owners_by_tables(caller, [port for _, port in self._called])


def owner_by_diag(caller: End, called: End) -> tuple[int, ...]:
    """The user id of the process at one end of an open connection; none if there is none.

    Raises:
        OSError: if the kernel does not tell.
        ValueError: if an end is not numeric: then it may be several.
    """
    ends = [ipaddress.ip_address(host.partition("%")[0]) for host, _ in (caller, called)]
    if ends[0].version != ends[1].version:
        return ()
    forms = [_ENDS.pack(caller[1], called[1], *(end.packed for end in ends))]
    if ends[0].version == 4:  # a socket of both kinds has them in the other form
        forms.append(_ENDS.pack(caller[1], called[1], *(_MAPPED + end.packed for end in ends)))
    family = socket.AF_INET if ends[0].version == 4 else socket.AF_INET6
    request = _ASKED.pack(family, socket.IPPROTO_TCP, 0, ALL_STATES)
    request += forms[0] + bytes(4) + ANY_COOKIE
    size = _HEAD.size + len(request)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as kernel:
        kernel.setblocking(False)  # it has answered when `send` returns
        kernel.send(_HEAD.pack(size, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, 1, 0) + request)
        answer = kernel.recv(4096)
    _, kind, *_ = _HEAD.unpack_from(answer)
    body = answer[_HEAD.size :]
    if kind == NLMSG_ERROR:
        (error,) = _ERROR.unpack_from(body)
        if -error == errno.ENOENT:
            return ()
        raise OSError(-error, os.strerror(-error))
    if kind != SOCK_DIAG_BY_FAMILY or len(body) < _FOUND.size:
        raise OSError(errno.EPROTO, "not an answer about a socket")
    owner, inode = _FOUND.unpack_from(body)
    # Without such a connection the kernel finds the socket that listens at the caller's end.
    return (owner,) if inode and body[4 : 4 + _ENDS.size] in forms else ()


def owners_by_tables(caller: End, ports: list[int]) -> tuple[int, ...]:
    """The user ids of the processes that call one of `ports` from this address of this machine.

    More than one, too, where others listen at such a port on another address of this machine.
    """
    try:
        ends = _written(*caller)
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
_MAPPED = bytes(10) + b"\xff\xff"
"""An IPv4 address as one of IPv6 begins so."""


def _written(host: str, port: int) -> tuple[str, ...]:
    """The address as the tables have it: words of four bytes, each in the machine's order."""
    ip = ipaddress.ip_address(host.partition("%")[0])
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    forms = [(mapped or ip).packed]
    if len(forms[0]) == 4:  # a socket of both kinds is listed by the other form
        forms.append(_MAPPED + forms[0])
    return tuple(f"{_words(form)}:{port:04X}" for form in forms)


def _words(packed: bytes) -> str:
    numbers = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{number:08X}" for number in numbers)
