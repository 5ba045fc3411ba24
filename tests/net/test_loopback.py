"""Whose a connection is within one machine, by the kernel's answer or by its tables."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from p2ptrain.net import loopback
from p2ptrain.net.loopback import End, LocalCallers, owner_by_diag

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  inode\n"
HERE, THERE, OTHER = 4000, 50_000, 4001
STRANGER = 65_534
US = os.getuid()


def row(caller: int, called: int, owner: int, *, state: str = "01", inode: int = 99) -> str:
    ends = f"0100007F:{caller:04X} 0100007F:{called:04X} {state}"
    return (
        f"   0: {ends} 00000000:00000000 00:00000000 00000000 {owner:5}        0 {inode} 1 0 20\n"
    )


OURS = row(THERE, HERE, US)
THEIRS = row(THERE, HERE, STRANGER)
ELSEWHERE = row(THERE, OTHER, US)
"""The system gives one port of a caller to connections with different destinations."""


def callers(*ports: int, host: str = "127.0.0.1") -> LocalCallers:
    found = LocalCallers()
    for port in ports:
        found.listen(f"{host}:0", port)
    return found


# --- by the kernel's tables -----------------------------------------------------------------------


def no_answer(_: End, called: End) -> tuple[int, ...]:
    raise PermissionError(f"about {called}")


@pytest.mark.parametrize(
    ("rows", "is_let_in"),
    [
        ([OURS], True),
        ([THEIRS], False),
        ([ELSEWHERE], False),
        ([ELSEWHERE, THEIRS], False),
        ([row(THERE, OTHER, STRANGER), OURS], True),
        ([OURS, THEIRS], False),
        ([row(THERE, HERE, 0, state="05", inode=0)], False),  # closed already
        ([row(THERE, HERE, 0, state="06", inode=0), THEIRS], False),
        ([row(HERE, 0, US, state="0A")], False),
        ([], False),
    ],
)
def test_where_the_kernel_does_not_answer_a_caller_is_ours_by_its_tables(
    rows, is_let_in, tmp_path, monkeypatch
):
    table = tmp_path / "tcp"
    table.write_text(HEAD + "".join(rows), encoding="ascii")
    monkeypatch.setattr(loopback, "TABLES", (table, tmp_path / "none"))
    monkeypatch.setattr(loopback, "owner_by_diag", no_answer)
    assert callers(HERE).is_ours(f"ipv4:127.0.0.1:{THERE}") is is_let_in


@pytest.mark.parametrize("caller", ["unix:", "", "ipv4:127.0.0.1", "ipv4:elsewhere:50000"])
def test_what_is_no_address_of_this_machine_is_not_ours(caller):
    assert not callers(HERE).is_ours(caller)


# --- by the kernel's answer -----------------------------------------------------------------------


@contextmanager
def called(host: str, caller: socket.AddressFamily) -> Iterator[tuple[socket.socket, End, End]]:
    """A connection: the calling socket, its end, and the end that it calls."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with closing(socket.socket(family)) as listens, closing(socket.socket(caller)) as calls:
        try:
            listens.bind((host, 0))
        except OSError:
            pytest.skip(f"there is no {host} here")
        listens.listen()
        port = listens.getsockname()[1]
        calls.connect((f"::ffff:{host}" if family != caller else host, port))
        with closing(listens.accept()[0]) as accepted:
            yield calls, accepted.getpeername()[:2], (host, port)


def is_told() -> bool:
    """Whether this kernel answers at all (CONFIG_INET_DIAG, no filter of system calls)."""
    with called("127.0.0.1", socket.AF_INET) as (_, caller, end):
        try:
            return owner_by_diag(caller, end) != ()
        except OSError:
            return False


@pytest.fixture
def _told() -> None:
    if not is_told():
        pytest.skip("the kernel does not tell of single connections here")


@pytest.mark.sockets
@pytest.mark.usefixtures("_told")
@pytest.mark.parametrize(
    ("host", "family"),
    [
        ("127.0.0.1", socket.AF_INET),
        ("127.0.0.9", socket.AF_INET),
        ("127.0.0.1", socket.AF_INET6),
        ("::1", socket.AF_INET6),
    ],
)
def test_the_kernel_names_the_owner_of_an_open_connection(host: str, family: socket.AddressFamily):
    with called(host, family) as (calls, caller, end):
        assert owner_by_diag(caller, end) == (US,)
        assert owner_by_diag(caller, (host, end[1] - 1)) == ()
        assert owner_by_diag(end, end) == (), "which is the socket that listens"
        calls.close()
        assert owner_by_diag(caller, end) == ()


@pytest.mark.sockets
@pytest.mark.usefixtures("_told")
def test_once_the_kernel_has_answered_its_tables_are_not_read(monkeypatch):
    with called("127.0.0.1", socket.AF_INET) as (calls, caller, end):
        ours, name = callers(end[1]), f"ipv4:127.0.0.1:{caller[1]}"
        assert ours.is_ours(name)
        monkeypatch.setattr(loopback, "owners_by_tables", None)  # to call it would fail
        calls.close()
        assert not ours.is_ours(name)


@pytest.mark.sockets
@pytest.mark.skipif(US != 0, reason="only root can become another user")
def test_a_process_of_another_user_is_not_ours():
    with closing(socket.create_server(("127.0.0.1", 0))) as listens:
        port = listens.getsockname()[1]
        program = (
            f"import os, socket; os.setuid({STRANGER})\n"
            f"calls = socket.socket(); calls.connect(('127.0.0.1', {port})); calls.recv(1)"
        )
        listens.settimeout(30.0)
        with subprocess.Popen([sys.executable, "-c", program]):
            accepted, (host, caller) = listens.accept()
            assert not callers(port).is_ours(f"ipv4:{host}:{caller}")
            accepted.close()
