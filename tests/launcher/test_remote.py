"""Peers on other machines: agents, what they pass on, and a fleet behind connections to them.

The peers are fakes; `fake_peer.py` says how they behave. A stub stands for ssh: it runs here what
it is to run there.
"""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from p2plab.backends import load_backend, peer_process
from p2plab.backends.agent import Agent, Look, Piece, decoded, encoded
from p2plab.backends.base import LaunchError
from p2plab.backends.remote import AgentLost, RemoteFleet
from p2plab.backends.ssh import Host, SshBackend, read_hosts
from p2plab.conditions import DeviceConfig, FaultConfig, LinkConfig
from p2plab.faults import FaultPlan
from p2plab.records import PeerHistory
from p2ptrain.config import StopConfig
from p2ptrain.errors import ConfigError
from tests.launcher.fakes import doomed_launcher, scenario
from tests.launcher.test_process import FAKE_PEER, configs, is_alive, states, until

pytestmark = pytest.mark.sockets

STUB = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
echo "$2" >> "$HOSTS_ASKED"
case "$2" in
    lost*) echo 'Permission denied (publickey).' >&2; exit 255;;
    greets*) echo 'Welcome to this machine!';;
esac
exec sh -c "exec $3"
"""


# --- agents ---------------------------------------------------------------------------------------


@pytest.fixture
def agent():
    with contextlib.closing(Agent("p00", FAKE_PEER)) as one:
        yield one


def whole(agent: Agent) -> dict[str, bytes]:
    """The files of a peer that has ended, put together from all looks."""
    files: dict[str, bytearray] = {}
    code = None
    for _ in range(2_000):
        look = agent.look()
        for piece in look.pieces:
            content = files.setdefault(piece.file, bytearray())
            at = len(content) if piece.offset is None else piece.offset
            content[at : at + len(piece.data)] = piece.data
        if (code := look.code) is not None:
            break
        time.sleep(0.01)
    assert code is not None
    return {name: bytes(content) for name, content in files.items()}


def given(behaviour: str) -> str:
    return (
        f'name = "p00"\nout = "."\nalgorithm = "ad_psgd"\n'
        f'[algorithm_options]\nbehaviour = "{behaviour}"\n'
    )


def test_an_agent_passes_on_everything_that_its_peer_wrote(agent):
    agent.put("p00.toml", given("train"))
    agent.start()
    files = whole(agent)
    kinds = [json.loads(line)["kind"] for line in files["p00.jsonl"].splitlines()]
    assert (kinds[0], kinds[-1]) == ("started", "ended")
    assert len(files["p00.snapshots"]) == 2 * 4 * 17_226


def test_the_last_words_of_a_peer_come_before_its_exit_code(agent):
    agent.put("p00.toml", given("refuse"))
    agent.start()
    assert b"error: port 1 is in use" in whole(agent)["p00.log"]


def test_records_are_one_stream_also_where_a_full_file_was_replaced(agent):
    records = agent._folder / "p00.jsonl"
    passed = b""
    for number in range(6):
        with records.open("a") as file:
            file.write(f'{{"kind": "step", "number": {number}}}\n{{"kind": "half')
        if number % 2:
            passed += b"".join(piece.data for piece in agent.look().pieces)
        with records.open("a") as file:
            file.write('"}\n')
        if number == 2:
            records.replace(f"{records}.1")
    for _ in range(3):
        passed += b"".join(piece.data for piece in agent.look().pieces)
    numbers = [json.loads(line).get("number") for line in passed.splitlines()]
    assert [one for one in numbers if one is not None] == list(range(6))
    assert len(numbers) == 12


def test_a_row_that_was_written_over_takes_the_place_of_the_old_one(agent):
    rows, records = agent._folder / "p00.snapshots", agent._folder / "p00.jsonl"
    records.write_text('{"kind": "started", "model_size": 2}\n')
    seen = {}
    for number, row in enumerate((0, 1, 0)):
        with rows.open("r+b" if number else "wb") as file:
            file.seek(8 * row)
            file.write(np.full(2, number, "<f4").tobytes())
        with records.open("a") as file:
            file.write(json.dumps({"kind": "snapshot", "row": row}) + "\n")
        for piece in agent.look().pieces:
            if piece.file == "p00.snapshots":
                seen[piece.offset] = np.frombuffer(piece.data, "<f4").tolist()
    assert seen == {0: [2.0, 2.0], 8: [1.0, 1.0]}


def test_an_agent_that_dies_takes_its_peer_along(tmp_path):
    program = (
        "from p2plab.backends.agent import Agent\n"
        "from tests.launcher.test_remote import FAKE_PEER, given\n"
        "agent = Agent('p00', FAKE_PEER)\n"
        "agent.put('p00.toml', given('polite'))\n"
        "agent.start()\n"
        "print(agent._process.pid, flush=True)\n"
    )
    with doomed_launcher(program, tmp_path) as said:
        pid = int(said)
        assert is_alive(pid)
    until(lambda: not is_alive(pid))


def test_a_file_has_no_folder_on_another_machine(agent):
    agent.put("../../p00.toml", "here")
    assert (agent._folder / "p00.toml").read_text() == "here"


def test_a_look_survives_its_way_as_a_line():
    look = Look(2, -9, (Piece("p00.jsonl", b'{"a": 1}\n'), Piece("p00.snapshots", b"\0\xff", 8)))
    assert decoded(encoded(look).encode()) == look
    assert decoded(encoded(4711).encode()) == 4711
    for wrong in (b"Welcome!\n", b"", b'{"life": 1}', b'{"life": 1, "code": 0, "pieces": [1]}'):
        with pytest.raises(ValueError):  # noqa: PT011 - of several kinds
            decoded(wrong)


# --- a fleet --------------------------------------------------------------------------------------


class Here:
    """A connection to an agent in this process, which a test can cut."""

    host = "127.0.0.1"

    def __init__(self, name: str):
        self.agent: Agent | None = Agent(name, FAKE_PEER)

    def call(self, method, *arguments):
        if self.agent is None:
            raise AgentLost("was on a machine that burnt down")
        return getattr(self.agent, method)(*arguments)

    def news(self):
        return self.call("look")

    def close(self):
        if self.agent is not None:
            self.agent.close()
            self.agent = None


@pytest.fixture
def start(tmp_path):
    fleets = []

    def start_fleet(*behaviours: str, faults=()):
        chosen = scenario(peers=len(behaviours), faults=faults)
        fleet = RemoteFleet.started(
            chosen, configs(tmp_path, *behaviours), lambda rank, name: Here(name)
        )
        fleets.append(fleet)
        return fleet

    yield start_fleet
    for fleet in fleets:
        fleet.stop(0.0)


def test_the_files_of_peers_elsewhere_are_in_the_folder_of_the_run(start, tmp_path):
    fleet = start("train", "train")
    until(lambda: states(fleet) == ["ended", "ended"])
    for name in ("p00", "p01"):
        history = PeerHistory(tmp_path, name)
        history.read()
        assert history.ended is not None
        assert history.samples == 320
        assert history.model(1) is not None


def test_a_peer_elsewhere_refuses_crashes_or_is_lost_as_one_of_this_machine(start):
    fleet = start("refuse", "crash", "sleep")
    until(lambda: states(fleet) == ["refused", "lost", "running"])
    assert [status.why for status in fleet.poll()[:2]] == [
        "port 1 is in use",
        "ended with exit code 1: RuntimeError: boom",
    ]


def test_the_peers_of_a_lost_machine_are_lost_and_named_and_do_not_return(start):
    crash = FaultConfig(kind="crash", peers=(0,), at_s=1.0, for_s=1.0)
    fleet = start("sleep", "sleep", faults=(crash,))
    fleet._connections[0].close()
    until(lambda: states(fleet) == ["lost", "running"])
    lost = fleet.poll()[0]
    assert (lost.name, lost.why) == ("p00", "was on a machine that burnt down")
    (instance,) = FaultPlan((crash,)).instances
    assert not fleet.apply(instance), "it is not there"
    fleet._live(0)
    assert states(fleet) == ["lost", "running"]


def test_faults_hit_peers_elsewhere(start, tmp_path):
    kinds = ("crash", "pause", "slow", "leave")
    faults = tuple(
        FaultConfig(kind=kind, peers=(rank,), at_s=1.0, for_s=1.0, factor=3.0)
        if kind == "slow"
        else FaultConfig(kind=kind, peers=(rank,), at_s=1.0, for_s=1.0)
        for rank, kind in enumerate(kinds)
    )
    fleet = start(*["polite"] * 4, faults=faults)
    agents = [connection.agent for connection in fleet._connections.values()]
    until(lambda: all((a._folder / f"{a._name}.listens").exists() for a in agents))
    first = [agent._process.pid for agent in agents]
    plan = FaultPlan(faults)
    for instance in plan.instances:
        assert fleet.apply(instance)
    until(lambda: not is_alive(first[0]) and not is_alive(first[3]))
    assert Path(f"/proc/{first[1]}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    slowdown = agents[2]._folder / "p02.slowdown"
    assert slowdown.read_text() == "3.0\n"
    until(lambda: fleet._exit_code(0) is not None and fleet._exit_code(3) is not None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer_process, "TRY_AGAIN_S", 0.1)
        for instance in plan.instances:
            fleet.revert(instance)
        until(lambda: states(fleet) == ["running"] * 4)
    assert agents[0]._process.pid != first[0]
    assert agents[3]._process.pid != first[3]
    assert not slowdown.exists()
    fleet.stop(10.0)
    assert all(code in (0, -signal.SIGTERM) for code in fleet._codes.values())


def test_peers_elsewhere_listen_at_their_machines_and_join_the_first(start, tmp_path):
    start("train", "train", "train")
    texts = [(tmp_path / f"p0{rank}.toml").read_text() for rank in range(3)]
    (first,) = [line for line in texts[0].splitlines() if line.startswith("listen = ")]
    assert "join = []" in texts[0]
    for text in texts[1:]:
        assert f"join = [{first.removeprefix('listen = ')}]" in text
        assert first not in text


# --- ssh ------------------------------------------------------------------------------------------


@pytest.fixture
def ssh(tmp_path, monkeypatch):
    """A stub on the path, and the file in which it writes down the hosts."""
    (tmp_path / "bin").mkdir()
    stub = tmp_path / "bin" / "ssh"
    stub.write_text(STUB)
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("HOSTS_ASKED", str(tmp_path / "asked"))
    return tmp_path / "asked"


def hosts_file(folder: Path, *hosts: str) -> Path:
    (folder / "hosts").write_text("# a list\n" + "".join(f"{h} {sys.executable}\n" for h in hosts))
    return folder / "hosts"


def test_peers_behind_ssh_run_on_the_hosts_of_the_list_in_turn(ssh, tmp_path):
    place = SshBackend(hosts_file(tmp_path, "127.0.0.1", "127.0.0.2"), FAKE_PEER)
    assert place.check(scenario()) == ()
    fleet = place.start(scenario(peers=3), configs(tmp_path, "train", "train", "train"))
    try:
        until(lambda: states(fleet) == ["ended"] * 3)
    finally:
        fleet.stop(0.0)
    assert sorted(ssh.read_text().split()) == ["127.0.0.1", "127.0.0.1", "127.0.0.2"]
    for peer, host in enumerate(("127.0.0.1", "127.0.0.2", "127.0.0.1")):
        assert f'listen = "{host}:' in (tmp_path / f"p{peer:02}.toml").read_text()


def test_a_host_that_is_lost_costs_its_peer_and_no_other(ssh, tmp_path):
    place = SshBackend(hosts_file(tmp_path, "127.0.0.1"), FAKE_PEER)
    fleet = place.start(scenario(), configs(tmp_path, "sleep", "sleep"))
    try:
        fleet._connections[1]._ssh.kill()
        until(lambda: states(fleet) == ["running", "lost"])
        assert "was on 127.0.0.1, to which ssh has no connection any more" in fleet.poll()[1].why
    finally:
        fleet.stop(0.0)
    assert states(fleet) == ["lost", "lost"]


@pytest.mark.parametrize(
    ("host", "says"),
    [
        ("lost.example", "p01 was on lost.example, to which .*: Permission denied .publickey."),
        ("greets.example", "p01 was on greets.example, to which .*: Welcome to this machine!"),
    ],
)
def test_a_host_that_cannot_be_used_is_one_sentence_and_leaves_no_peer(ssh, tmp_path, host, says):
    place = SshBackend(hosts_file(tmp_path, "127.0.0.1", host), FAKE_PEER)
    with pytest.raises(LaunchError, match=says):
        place.start(scenario(), configs(tmp_path, "sleep", "sleep"))


def test_a_list_has_a_host_on_each_line_and_comments(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# ours\n\n10.0.0.5\ngpu7 /opt/p2ptrain/bin/python  # has two\n")
    assert read_hosts(path) == [Host("10.0.0.5"), Host("gpu7", "/opt/p2ptrain/bin/python")]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "there is no host in .*; write one on each line"),
        ("a b c\n", "line 1: 'a b c' is no host; write HOST, or HOST PYTHON"),
        ("good\n-oProxyCommand=evil\n", "line 2: '-oProxyCommand=evil' is no host"),
    ],
)
def test_a_list_without_hosts_is_refused(tmp_path, text, says):
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_hosts(tmp_path / "hosts")
    with pytest.raises(ConfigError, match="cannot read"):
        read_hosts(tmp_path / "no-such-file")


def test_hosts_are_for_ssh_and_ssh_is_for_hosts(tmp_path):
    with pytest.raises(ConfigError, match="--backend ssh needs --hosts FILE"):
        load_backend("ssh").check(scenario())
    with pytest.raises(ConfigError, match="--hosts is for --backend ssh, and not for sim"):
        load_backend("sim", tmp_path)


def test_what_no_launcher_can_do_elsewhere_is_refused_or_said(tmp_path):
    place = SshBackend(hosts_file(tmp_path, "127.0.0.1"))
    for changes, says in (
        ({"link": LinkConfig()}, r"test has \[link\], but hosts behind ssh have the links"),
        ({"gradients": False}, "without gradients, but hosts behind ssh compute"),
        (
            {"faults": (FaultConfig(kind="partition", peers=(1,), at_s=1.0, for_s=1.0),)},
            "fault 'partition' cannot hit hosts behind ssh; those that can are crash, pause",
        ),
    ):
        with pytest.raises(ConfigError, match=says):
            place.check(scenario(**changes))
    device = DeviceConfig(peers=(1,), cpus=0.5)
    (left_out,) = place.check(scenario(devices=(device,), stop=StopConfig(samples=1)))
    assert left_out.what == "[[devices]] cpus of [1]"
    assert place.refusal("ddp") == "is not started by ssh"
    assert place.refusal("ring") == "is a price, and can only be simulated"
