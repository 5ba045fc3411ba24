"""Whose a connection is within one machine, by the kernel's tables."""

import os

import pytest

from p2ptrain.net import loopback
from p2ptrain.net.loopback import is_ours

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
def test_a_caller_is_ours_by_the_owner_of_the_very_connection(
    rows, is_let_in, tmp_path, monkeypatch
):
    table = tmp_path / "tcp"
    table.write_text(HEAD + "".join(rows), encoding="ascii")
    monkeypatch.setattr(loopback, "TABLES", (table, tmp_path / "none"))
    assert is_ours(f"ipv4:127.0.0.1:{THERE}", [HERE]) is is_let_in


@pytest.mark.parametrize("caller", ["unix:", "", "ipv4:127.0.0.1", "ipv4:elsewhere:50000"])
def test_what_is_no_address_of_this_machine_is_not_ours(caller):
    assert not is_ours(caller, [HERE])
