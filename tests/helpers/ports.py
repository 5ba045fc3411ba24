"""Ports that stay free until the process that was told of them listens."""

import itertools
import os
import socket

FIRST, COUNT = 2_000, 2_000
"""Below the ports that the launcher takes, and those that Linux gives to all that ask for any (from
32768 on): one of those may go to a connection that is dialled before the peer of a test listens."""

_NEXT = itertools.count(os.getpid() * 61)


def free_port() -> int:
    """A port of loopback; two calls give different ones, and so do processes beside each other."""
    for number in itertools.islice(_NEXT, COUNT):
        port = FIRST + number % COUNT
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
    raise AssertionError(f"none of the ports {FIRST} to {FIRST + COUNT - 1} is free")
