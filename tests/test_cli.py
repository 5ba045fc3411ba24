"""The command line of one peer: a mistake is one sentence and exit code 2, never a traceback."""

import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import p2ptrain as package
from p2ptrain import cli, exit_codes
from p2ptrain.config import RunConfig, from_mapping, to_toml
from p2ptrain.runtime.peer import Peer

CLOCK = time.perf_counter  # noqa: TID251 - processes live in real time


@pytest.fixture
def p2ptrain(monkeypatch, capsys):
    """Runs the command in this process; returns its exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["p2ptrain", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return caught.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def fails(p2ptrain):
    """Runs the command, which must fail in one sentence; returns it."""

    def run(*arguments: str) -> str:
        code, out, err = p2ptrain(*arguments)
        assert code == 2
        heard = ("listens at", "trains digits", "writes nothing")
        assert all(any(words in line for words in heard) for line in out.splitlines())
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert err.endswith("\n")
        return err.removeprefix("error: ").rstrip()

    return run


@pytest.fixture
def config(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "peer.toml"
        path.write_text(text)
        return str(path)

    return write


# --- help -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["peer", "--help"], ["status", "-h"]])
def test_help_works(p2ptrain, arguments):
    code, out, err = p2ptrain(*arguments)
    assert code == 0
    assert "Usage" in out
    assert err == ""


@pytest.mark.parametrize(
    "arguments", [["per"], ["peer", "--algoritm", "x"], ["peer", "--peers", "x"]]
)
def test_a_misspelt_command_line_is_a_usage_error_without_traceback(p2ptrain, arguments):
    code, _, err = p2ptrain(*arguments)
    assert code == 2
    assert "Traceback" not in err


def test_the_version_is_the_packages(p2ptrain):
    assert p2ptrain("--version") == (0, f"p2ptrain {package.__version__}\n", "")


def test_a_shell_completes_commands_and_algorithms(p2ptrain, monkeypatch):
    monkeypatch.setenv("_P2PTRAIN_COMPLETE", "complete_bash")
    for typed, offered in (
        ("p2ptrain sta", "status"),
        ("p2ptrain peer --algorithm rip", "ripples"),
    ):
        monkeypatch.setenv("COMP_WORDS", typed)
        monkeypatch.setenv("COMP_CWORD", str(typed.count(" ")))
        code, out, _ = p2ptrain()
        assert (code, out.split()) == (0, [offered])


def test_the_help_shows_the_defaults_that_a_peer_has(p2ptrain):
    _, out, _ = p2ptrain("peer", "--help")
    words = " ".join(out.replace("│", " ").split())
    for name, shown in cli.DEFAULTS.items():
        (default,) = (f.default for f in dataclasses.fields(RunConfig) if f.name == name)
        assert default is dataclasses.MISSING or default == shown, name
    for shown in ("(digits)", "(ad_psgd)", "(127.0.0.1:0)", "(1)", "(0)", "(until Ctrl-C)"):
        assert f"[default: {shown}]" in words


def test_the_page_has_every_exit_code():
    page = (Path(__file__).parents[1] / "docs/training-loops.md").read_text()
    table = page.split("| exit code | |\n")[1].split("\n\n")[0]
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)}
    assert listed == {value for name, value in vars(exit_codes).items() if name.isupper()}


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("algoritm = 'allreduce'", "unknown key 'algoritm'; did you mean 'algorithm'?"),
        ("[training]\nlerning_rate = 0.1", "unknown key 'training.lerning_rate'; did you mean"),
        (
            "[protocol.lock]\nleas_s = 3",
            "unknown key 'protocol.lock.leas_s'; did you mean 'lease_s",
        ),
        ("peers = 'many'", "peers = 'many': input should be a valid integer"),
        ("[training]\nlearning_rate = nan", "learning_rate = nan must be"),
        ("[[pace.stragglers]]\nfactor = 0\npeers = [0]", "straggler factor = 0"),
        ("[exchange]\nchunk_kib = 0", "chunk_kib = 0 must be between 1 and"),
        (
            "[protocol.lock]\nacquire_timeout_s = 30.0",
            "lock lease_s = 6.0 must be above acquire_timeout_s = 30.0",
        ),
        ("rank = 3", "rank = 3 must be between 0 and 0 (peers = 1)"),
        ("this is not toml", "is not TOML"),
        ("stop = 3", "stop = 3"),
        ("task_options = 3", "task_options = 3"),
    ],
)
def test_a_mistake_in_the_file_is_one_sentence_that_names_the_file(fails, config, text, says):
    path = config(text)
    sentence = fails("peer", "--config", path, "--samples", "10", "--data", "x")
    assert path in sentence
    assert says in sentence


def test_a_file_that_is_not_there_is_one_sentence(fails, tmp_path):
    assert fails("peer", "--config", str(tmp_path / "no.toml")).endswith(
        "No such file or directory"
    )
    assert "Is a directory" in fails("peer", "--config", str(tmp_path))


def test_options_override_the_file_one_by_one(monkeypatch, config):
    seen = []
    monkeypatch.setattr(cli, "run_peer", lambda config, **_: seen.append(config))
    path = config("peers = 4\nseed = 1\n[stop]\nseconds = 60\nsamples = 5\n[training]\nthreads = 2")
    arguments = ["peer", "--config", path, "--seed", "7", "--samples", "100"]
    cli.app([*arguments, "--join", "a:1", "--join", "b:2"], standalone_mode=False)
    (built,) = seen
    assert (built.peers, built.seed, built.join) == (4, 7, ("a:1", "b:2"))
    assert (built.stop.samples, built.stop.seconds) == (100, 60)
    assert built.training.threads == 2


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--task", "digts"], "digts"),
        (["--algorithm", "gossip"], "unknown algorithm 'gossip'; there are: "),
        (["--algorithm", "ad-psgd"], "did you mean 'ad_psgd'?"),
        (["--algorithm", "no.such.module:Class"], "cannot import 'no.such.module'"),
        (["--peers", "0"], "peers = 0 must be 1 or more"),
        (["--samples", "0"], "stop samples = 0 must be above 0"),
        (["--seconds", "nan"], "stop seconds = nan must be above 0"),
        (["--join", "nonsense"], "join = 'nonsense' is not an address; write host:port"),
        (["--join", "http://host:80"], "join = 'http://host:80' is not an address"),
        (["--listen", "nonsense"], "listen = 'nonsense' is not an address; write host:port"),
        (["--advertise", "host:port"], "advertise = 'host:port' is not an address"),
        (["--listen", "0.0.0.0:0"], "add advertise = 'host:port'"),
        (["--name", "two words"], "name = 'two words' must be printable, without spaces"),
    ],
)
def test_an_option_that_cannot_work_is_one_sentence(fails, arguments, says):
    assert says in fails("peer", *arguments)


def test_a_misspelt_option_of_an_algorithm_is_one_sentence(fails, config):
    path = config("algorithm = 'ad_psgd'\n[algorithm_options]\ngraf = 'ring'")
    assert "has no option 'graf'; did you mean 'graph'?" in fails("peer", "--config", path)


def test_a_loss_that_is_not_finite_is_one_sentence(p2ptrain, config):
    path = config("name = 'p0'\n[training]\nlearning_rate = 1e30")
    code, _, err = p2ptrain("peer", "--config", path, "--samples", "100000")
    assert code == 2
    assert err.count("\n") == 1
    assert "p0: the loss of step" in err
    assert "lower learning_rate (now 1e+30)" in err


OWN_TASK = """
from p2ptrain.compute.tasks.digits import Config, digits

class Task:
    def __init__(self):
        known = digits(Config())
        self.build_model, self.batches, self.loss = known.build_model, known.batches, known.loss
    def evaluate(self, model):
        return 0.97
"""


def test_a_task_of_ones_own_whose_evaluation_is_no_evaluation_is_one_sentence(
    fails, tmp_path, monkeypatch
):
    (tmp_path / "own_task.py").write_text(OWN_TASK)
    monkeypatch.syspath_prepend(tmp_path)
    assert fails("peer", "--task", "own_task:Task", "--samples", "10") == (
        "task 'own_task:Task': evaluate returned 0.97; "
        "return p2ptrain.compute.tasks.Evaluation(loss=..., accuracy=...)"
    )


@pytest.mark.sockets
def test_a_peer_ends_with_its_result_and_a_quiet_one_in_silence(p2ptrain, tmp_path):
    given = ("peer", "--name", "p1", "--out", str(tmp_path), "--samples", "64")
    code, out, _ = p2ptrain(*given)
    assert code == 0
    model, result = out.splitlines()[-2:]
    assert model == f"p1: its model is in {tmp_path}/p1.safetensors"
    assert re.fullmatch(r"p1: on held-out data loss \d\.\d{4}, accuracy 0\.\d{3}", result)
    assert (tmp_path / "p1.safetensors").exists()
    assert p2ptrain(*given, "-q") == (0, "", "")
    (tmp_path / "p1.safetensors").unlink()
    code, out, _ = p2ptrain(*given, "--no-result")
    assert "held-out" not in out
    assert not (tmp_path / "p1.safetensors").exists()


@pytest.mark.sockets
def test_an_address_that_does_not_answer_is_one_sentence_that_says_how_long(fails, config):
    path = config("join_timeout_s = 0.3\njoin = ['127.0.0.1:1']")
    sentence = fails("peer", "--config", path)
    assert sentence.startswith("no peer answered at 127.0.0.1:1 within 0.3 s (no connection")
    assert sentence.endswith("start that peer first, or check its address")


@pytest.mark.sockets
def test_peers_that_do_not_come_are_one_sentence_that_says_how_long(fails, config):
    path = config("join_timeout_s = 0.3\npeers = 3\nname = 'p0'")
    assert "after 0.3 s there are: p0" in fails("peer", "--config", path)


@pytest.mark.sockets
def test_another_swarm_refuses_with_both_values(fails, config):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Peer(model, optimizer, algorithm="allreduce") as host:
        path = config(f"join = ['{host.address}']\njoin_timeout_s = 5.0")
        other_model = fails("peer", "--config", path, "--algorithm", "allreduce")
        other_algorithm = fails("peer", "--config", path, "--algorithm", "ad_psgd")
    assert "numbers" in other_model
    assert "one of 8 (" in other_model
    assert "algorithm is 'ad_psgd' at" in other_algorithm


# --- processes ------------------------------------------------------------------------------------


def start(config: RunConfig, folder: Path) -> subprocess.Popen:
    path = folder / f"{config.name}.toml"
    path.write_text(to_toml(config))
    command = [sys.executable, "-m", "p2ptrain", "peer", "--config", str(path)]
    environment = {k: v for k, v in os.environ.items() if k != "GRPC_VERBOSITY"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def records_of(folder: Path, name: str, kind: str) -> list[dict]:
    path = folder / f"{name}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [record for line in lines if (record := json.loads(line))["kind"] == kind]


@pytest.mark.sockets
def test_a_port_in_use_is_one_sentence_and_nothing_else_on_the_terminal(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        process = start(RunConfig(name="p0", listen=listen), tmp_path)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert out == ""
    assert err == (
        f"error: cannot listen on {listen}: the port is in use or the address is not this "
        "machine's; choose another port, or 0 for a free one\n"
    )


@pytest.mark.sockets
def test_sigterm_while_waiting_for_a_slow_peer_is_a_clean_leave_and_the_others_go_on(tmp_path):
    """p0's steps take so long that p1 and p2 wait in theirs; p1 is told to end meanwhile."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        first = f"127.0.0.1:{free.getsockname()[1]}"
    shared = {"peers": 3, "out": str(tmp_path), "algorithm": "allreduce", "seed": 1}
    slow = {"pace": {"min_step_ms": 1000.0}, "stop": {"samples": 32 * 9}}
    processes = []
    for rank in range(3):
        own = {"name": f"p{rank}", "rank": rank, "listen": first if rank == 0 else "127.0.0.1:0"}
        own |= {"join": []} if rank == 0 else {"join": [first]}
        own |= slow if rank == 0 else {"stop": slow["stop"]}
        processes.append(start(from_mapping(RunConfig, shared | own, "test"), tmp_path))
    try:
        deadline = CLOCK() + 60
        while not records_of(tmp_path, "p0", "step"):
            assert CLOCK() < deadline
            time.sleep(0.05)
        time.sleep(0.5)  # p1 has computed by now and waits for p0
        processes[1].send_signal(signal.SIGTERM)
        out, err = processes[1].communicate(timeout=5)
        assert (processes[1].returncode, err) == (0, "")
        assert out.startswith("p1 listens at 127.0.0.1:")
        assert records_of(tmp_path, "p1", "ended")[0]["why"] == "asked to end by SIGTERM"
        for rank in (0, 2):
            out, err = processes[rank].communicate(timeout=60)
            assert (processes[rank].returncode, err) == (0, "")
            ended = records_of(tmp_path, f"p{rank}", "ended")[0]
            told = records_of(tmp_path, f"p{rank}", "member")
            assert "left" in [r["state"] for r in told if r["member"] == "p1"]
            assert ended["steps"] > len(records_of(tmp_path, "p1", "step"))
        assert len(records_of(tmp_path, "p0", "step")) == len(records_of(tmp_path, "p2", "step"))
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(("given", "level"), [((), None), (("-v",), False), (("-vv",), True)])
def test_v_prints_what_the_protocol_decides_and_vv_the_probes_too(monkeypatch, given, level):
    shown: list[bool] = []
    monkeypatch.setattr(
        "p2ptrain.runtime.protocol_log.show", lambda *, probes: shown.append(probes)
    )
    monkeypatch.setattr(cli, "run_peer", lambda config, **_: None)
    monkeypatch.setattr(sys, "argv", ["p2ptrain", "peer", *given])
    with pytest.raises(SystemExit):
        cli.main()
    assert shown == ([] if level is None else [level])
