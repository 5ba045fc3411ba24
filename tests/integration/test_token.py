"""Two machines with a link of their own: peers that are started by hand with a token train.

Two namespaces stand for the machines; making them takes root.
"""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from p2plab.harness.namespaces import Home, laid
from p2ptrain.errors import ConfigError
from p2ptrain.net.tokens import JoinToken, SwarmKey, parse

pytestmark = [pytest.mark.sockets, pytest.mark.slow]

ADDRESSES = "10.0.0.5", "10.0.0.6"
FIRST, SECOND = (f"{address}:4000" for address in ADDRESSES)
LIMIT_S = 100
SECONDS_TO_LEAVE = 5
COMMAND = "from p2ptrain.cli import main; main()"
PEER = ("peer", "--config", "pace.toml", "--no-result", "--quiet")
PACE = "[pace]\nmin_step_ms = 50\n"
STRANGER = """
import asyncio, json, sys, time
from p2ptrain.errors import P2PTrainError
from p2ptrain.net.ask import asking
from p2ptrain.net.enrolment import enrol
from p2ptrain.net.grpc_config import GrpcConfig
from p2ptrain.net.tokens import parse

async def said(work):
    try:
        return f"got {await work}"
    except P2PTrainError as error:
        return str(error)

async def look(token):
    async with asking(sys.argv[1], GrpcConfig(token=token)) as asker:
        return await asker.report(5.0)

async def main():
    for token in sys.argv[2:]:
        print(json.dumps(await said(look(token))))
        if token:
            print(json.dumps(await said(enrol(parse(token), sys.argv[1:2], "x", 5.0, time.time))))

asyncio.run(main())
"""


@pytest.fixture
def machines() -> Iterator[tuple[Home, Home]]:
    try:
        with laid(1000, ADDRESSES) as cable:
            yield cable.ends
    except ConfigError as error:
        pytest.skip(str(error))


class Started:
    """A program on one machine; what it prints goes to a file."""

    def __init__(self, home: Home, folder: Path, name: str, program: str, *words: str) -> None:
        self._path = folder / f"{name}.log"
        command = ["ip", "netns", "exec", home.namespace, sys.executable, "-c", program, *words]
        with self._path.open("w") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, cwd=folder)

    @property
    def printed(self) -> str:
        return self._path.read_text()

    def end(self) -> tuple[int, str]:
        return self.process.wait(LIMIT_S), self.printed


def until(holds: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, holds
        time.sleep(0.1)


def test_peers_with_a_token_train_and_strangers_learn_nothing(machines, tmp_path):
    (tmp_path / "pace.toml").write_text(PACE)
    here, there = machines
    running: list[Started] = []

    def start(home: Home, name: str, *words: str, program: str = COMMAND) -> Started:
        running.append(Started(home, tmp_path, name, program, *words))
        return running[-1]

    def records(name: str) -> str:
        path = tmp_path / f"{name}.jsonl"
        return path.read_text() if path.exists() else ""

    try:
        own = ("--out", str(tmp_path), "--listen")
        first = start(here, "first", *PEER, "--name", "first", *own, FIRST)
        until(lambda: "to join" in first.printed)
        line = rf"^to join this swarm: --join {FIRST} --token (\S+)$"
        (token,) = re.findall(line, first.printed, re.MULTILINE)
        second = start(
            there,
            "second",
            *PEER,
            "--name",
            "second",
            *own,
            SECOND,
            "--join",
            FIRST,
            "--token",
            token,
        )
        made = start(here, "made", "keys", "token", FIRST, "--expires", "1s", "--token", token)
        until(lambda: all(records(n).count('"outcome": "done"') > 5 for n in ("first", "second")))

        known = parse(token)
        assert isinstance(known, JoinToken)
        wrong = str(JoinToken.make(known.swarm))
        elsewhere = str(JoinToken.make(SwarmKey.make().authority.public))
        expired = made.end()[1].strip()
        assert expired.startswith("join-")
        bad = ("", wrong, elsewhere, expired)
        strangers = start(there, "strangers", FIRST, *bad, program=STRANGER)
        status = start(there, "status", "status", FIRST, "--json", "--token", token)
        said = [json.loads(line) for line in strangers.end()[1].splitlines()]
        assert len(said) == 7, said
        for sentence in said:
            assert re.match(r"10\.0\.0\.5:4000 (hung up on us|shows no certificate)", sentence)
            assert not re.search(r"\n|first|second|Report|\d{5,}", sentence)
        view = json.loads(status.end()[1])
        assert {peer["peer"] for peer in view["peers"]} == {"first", "second"}

        revoke = start(here, "revoke", "keys", "revoke", FIRST, "second", "--token", token)
        assert revoke.end()[0] == 0, revoke.printed
        until(lambda: '"state": "left"' in records("first"), SECONDS_TO_LEAVE)
        code, why = second.end()
        assert code == 2
        assert "second is no member any more: its name was revoked" in why
        assert first.process.poll() is None, "the first one goes on"
    finally:
        for one in running:
            one.process.kill()
            one.process.wait()
