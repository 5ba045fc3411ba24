"""Peers in a namespace that drops incoming connections train with one that can be called.

The namespaces stand for machines; making them takes root.
"""

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from p2plab.harness.namespaces import Home, laid
from p2ptrain.errors import ConfigError
from tests.integration.test_token import COMMAND, PEER, Started, until

pytestmark = [pytest.mark.sockets, pytest.mark.slow]

ADDRESSES = "10.0.0.5", "10.0.0.6"
FIRST = f"{ADDRESSES[0]}:4000"
SETTINGS = '[pace]\nmin_step_ms = 50\n[network]\ndata = "grpc"\n'


@pytest.fixture
def machines() -> Iterator[tuple[Home, Home]]:
    try:
        with laid(1000, ADDRESSES) as cable:
            cable.far.drop_calls()
            yield cable.ends
    except ConfigError as error:
        pytest.skip(str(error))


def is_answered(caller: Home, callee: Home) -> bool:
    """Whether a connection to a port of `callee` is accepted."""
    found: list[socket.socket] = []

    def listen() -> None:
        callee.enter()
        found.append(socket.create_server((callee.host, 4001)))

    def call() -> None:
        caller.enter()
        with closing(socket.socket()) as calling:
            calling.settimeout(1.0)
            if calling.connect_ex((callee.host, 4001)) == 0:
                found.append(calling)

    for work in (listen, call):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    found[0].close()
    return len(found) == 2


def test_peers_that_cannot_be_called_train_with_one_that_can_and_meet_through_it(
    machines, tmp_path
):
    here, there = machines
    assert is_answered(there, here)
    assert not is_answered(here, there)
    (tmp_path / "settings.toml").write_text(SETTINGS)
    running: list[Started] = []

    def start(home: Home, name: str, *words: str) -> Started:
        own = ("--config", "settings.toml", "--name", name, "--out", str(tmp_path))
        common = [word for word in PEER if word not in ("--config", "pace.toml")]
        running.append(Started(home, tmp_path, name, COMMAND, *common, *own, *words))
        return running[-1]

    def averaged() -> set[tuple[str, ...]]:
        """The groups that have averaged, as all members have recorded them."""
        groups = set()
        for path in tmp_path.glob("*.jsonl"):
            for line in path.read_text().splitlines():
                if '"outcome": "done"' in line:
                    groups.add(tuple(sorted(json.loads(line)["members"])))
        return groups

    try:
        first = start(here, "first", "--listen", FIRST, "--relay", "1000")
        until(lambda: "to join" in first.printed)
        (token,) = re.findall(r"--token (\S+)$", first.printed, re.MULTILINE)
        for name in ("second", "third"):
            start(there, name, "--dial-out", "--join", FIRST, "--token", token)
        every_pair = {("first", "second"), ("first", "third"), ("second", "third")}
        until(lambda: every_pair <= averaged())
        assert all(one.process.poll() is None for one in running), [o.printed for o in running]
    finally:
        for one in running:
            one.process.kill()
            one.process.wait()
