"""Cables, with this process as everybody: an echo behind the cable of peer 1, calls from peer 0."""

import os
import signal
import socket
import threading

import pytest

from p2plab.backends import cables as cables_module
from p2plab.backends.base import LaunchError
from p2plab.backends.cables import Cables

pytestmark = pytest.mark.sockets

SILENCE_S = 0.2
"""Whoever has not answered by then was not asked: an answer takes a millisecond."""


class Echo:
    """Sends back whatever it is sent, until it dies."""

    def __init__(self) -> None:
        self._connections: list[socket.socket] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            self._connections.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        while data := connection.recv(1 << 16):
            connection.sendall(data)

    def die(self) -> None:
        """Hang up on everybody."""
        for connection in self._connections:
            connection.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def echo():
    return Echo()


@pytest.fixture
def lay(echo):
    laid = []

    def lay_cables(pids):
        laid.append(Cables([1, echo.port], process_group=0))
        for rank, pid in pids.items():
            laid[-1].belongs(rank, pid)
        return laid[-1]

    yield lay_cables
    for cables in laid:
        cables.close()


def call(cables) -> socket.socket:
    host, _, port = cables.addresses[1].rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10.0)


def hears(connection: socket.socket) -> bytes | None:
    """What comes; None for silence."""
    connection.settimeout(SILENCE_S)
    try:
        return connection.recv(1 << 16)
    except TimeoutError:
        return None
    finally:
        connection.settimeout(10.0)


def test_what_is_sent_while_a_cable_is_cut_arrives_after_the_healing(lay):
    cables = lay({0: os.getpid()})
    with call(cables) as connection:
        connection.sendall(b"before")
        assert connection.recv(99) == b"before"
        cables.cut_off([0])
        connection.sendall(b"during")
        assert hears(connection) is None
        cables.heal([0])
        assert connection.recv(99) == b"during"


def test_nobody_is_told_that_a_cable_is_cut_or_who_has_died_behind_it(lay, echo):
    cables = lay({0: os.getpid()})
    with call(cables) as old:
        old.sendall(b"there?")
        assert old.recv(99) == b"there?"
        cables.cut_off([1])
        with call(cables) as new:
            new.sendall(b"new")
            echo.die()
            assert hears(new) is None
            assert hears(old) is None
            cables.heal([1])
            assert new.recv(99) == b"new"
            assert old.recv(99) == b""


def test_two_who_are_cut_off_together_still_reach_each_other(lay):
    cables = lay({0: os.getpid()})
    cables.cut_off([0, 1])
    with call(cables) as connection:
        connection.sendall(b"hello")
        assert connection.recv(99) == b"hello"


def test_strangers_are_never_cut_off(lay):
    cables = lay({})
    cables.cut_off([1])
    with call(cables) as connection:
        connection.sendall(b"hello")
        assert connection.recv(99) == b"hello"


def test_what_leaves_a_throttled_peer_takes_its_time(lay):
    cables = lay({0: os.getpid()})
    cables.throttle(0, 1.0)
    with call(cables) as connection:
        connection.sendall(bytes(50_000))
        threading.Event().wait(SILENCE_S)
        left = 50_000 - len(connection.recv(50_000))
        assert left > 10_000, "400 kbit take 0.4 s"
        while left:
            left -= len(connection.recv(left))
        cables.throttle(0, None)
        connection.sendall(b"quick")
        assert hears(connection) == b"quick"


def test_a_small_message_passes_between_the_pieces_of_a_large_one(lay):
    cables = lay({0: os.getpid()})
    cables.throttle(0, 1.0)
    with call(cables) as large, call(cables) as small:
        large.sendall(bytes(200_000))
        small.sendall(b"hello")
        assert small.recv(99) == b"hello"
        assert len(large.recv(200_000)) < 100_000, "1,600 kbit take 1.6 s"


def test_a_peer_that_is_not_there_hangs_up(lay):
    cables = lay({0: os.getpid()})
    host, _, port = cables.addresses[0].rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10.0) as connection:
        assert connection.recv(99) == b""


@pytest.mark.parametrize("how", ["dead", "stopped"])
def test_relays_that_are_gone_are_said_to_be(lay, monkeypatch, how):
    cables = lay({})
    monkeypatch.setattr(cables_module, "ANSWER_S", 0.1)
    os.kill(cables._process.pid, signal.SIGKILL if how == "dead" else signal.SIGSTOP)
    with pytest.raises(LaunchError, match="the relays between the peers are gone; start the run"):
        cables.cut_off([1])
