"""The command line, in this process: `main` always ends in `SystemExit`."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from p2plab import backends
from p2plab.backends import peer_process
from p2plab.backends.base import LaunchError
from p2plab.backends.process import ProcessBackend
from p2plab.lab import _prepared
from p2plab.scenario import bundled_scenarios, load_scenario
from tests.launcher.fakes import FakeBackend, FakeFleet

FAKE_PEER = (sys.executable, "-I", "-S", str(Path(__file__).with_name("fake_peer.py")))

SCENARIO = """
name = "small"
peers = 2
stop = { samples = 640 }

[[claims]]
text = "gossip is three times as fast"
metric = "samples_per_s"
of = "ad_psgd"
over = "allreduce"
at_least = 3.0
"""


@pytest.fixture(autouse=True)
def _looks_often(own_signals, monkeypatch):
    monkeypatch.setattr(peer_process, "LOOK_S", 0.02)


@pytest.fixture
def scenario(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(SCENARIO)
    return path


@pytest.fixture
def _fake_peers(monkeypatch):
    monkeypatch.setitem(backends._BACKENDS, "process", lambda: ProcessBackend(FAKE_PEER))


@pytest.mark.usefixtures("_fake_peers")
def test_a_run_compares_its_algorithms_and_writes_everything_down(p2plab, scenario, tmp_path):
    code, out, err = p2plab("run", str(scenario), "--check")
    assert (code, err) == (0, "")
    folder = tmp_path / "runs" / "small"
    comparison = json.loads((folder / "comparison.json").read_text())
    assert [row["algorithm"] for row in comparison["rows"]] == ["allreduce", "ad_psgd"]
    assert comparison["claims"][0]["measured"] == pytest.approx(4.0)
    assert (folder / "comparison.png").exists()
    assert "gossip is three times as fast" in (folder / "report.html").read_text()
    assert load_scenario(str(folder / "scenario.toml")) == load_scenario(str(scenario))
    assert (folder / "ad_psgd" / "consensus.safetensors").exists()
    assert "gossip is three times as fast" in out


@pytest.mark.usefixtures("_fake_peers")
def test_check_exits_with_3_when_a_claim_does_not_hold(p2plab, scenario):
    scenario.write_text(SCENARIO.replace("3.0", "5.0"))
    assert p2plab("run", str(scenario), "--check")[0] == 3
    assert p2plab("run", str(scenario))[0] == 0


@pytest.mark.usefixtures("_fake_peers")
def test_a_claim_that_cannot_be_checked_is_left_out_and_said_to_be(p2plab, scenario):
    code, out, _ = p2plab("run", str(scenario), "--algorithms", "allreduce", "--check")
    assert code == 0
    assert "not applicable, since not all of ad_psgd and allreduce ran" in " ".join(out.split())


class EndingBackend(ProcessBackend):
    """Fails when the second algorithm is to start."""

    def __init__(self, error):
        super().__init__(FAKE_PEER)
        self._error = error

    def start(self, scenario, configs):
        if configs[0].algorithm == "ad_psgd":
            raise self._error
        return super().start(scenario, configs)


@pytest.mark.parametrize(
    ("error", "exit_code", "why"),
    [
        (KeyboardInterrupt(), 130, "the run was interrupted"),
        (SystemExit(143), 143, "the run was interrupted"),
        (LaunchError("the engine does not answer"), 2, "the engine does not answer"),
    ],
)
def test_whatever_ends_a_run_the_algorithms_that_ended_are_kept(
    p2plab, scenario, tmp_path, monkeypatch, error, exit_code, why
):
    monkeypatch.setitem(backends._BACKENDS, "process", lambda: EndingBackend(error))
    code, out, _ = p2plab("run", str(scenario))
    assert code == exit_code
    folder = tmp_path / "runs" / "small"
    comparison = json.loads((folder / "comparison.json").read_text())
    assert [row["algorithm"] for row in comparison["rows"]] == ["allreduce"]
    assert comparison["partial"] == f"Partial, since {why}: results of 1 of 2 algorithms only."
    assert comparison["partial"] in " ".join(out.split())
    assert f"left out, since {why}: ad_psgd" in " ".join(out.split())
    assert comparison["partial"] in (folder / "report.html").read_text()
    assert (folder / "comparison.png").stat().st_size
    assert p2plab("report", str(folder))[0] == 0
    again = json.loads((folder / "comparison.json").read_text())
    assert again["rows"] == comparison["rows"]
    assert again == comparison, "the cause as well"


@pytest.mark.usefixtures("_fake_peers")
def test_a_report_is_made_again_of_an_algorithm_whose_name_has_a_space(p2plab, tmp_path):
    named = SCENARIO.partition("[[claims]]")[0] + (
        '[[compare]]\nname = "ad_psgd int8"\nalgorithm = "ad_psgd"\nexchange.codec = "int8"\n'
    )
    (tmp_path / "small.toml").write_text(named.replace('"ad_psgd"]', '"ad_psgd int8"]'))
    assert p2plab("run", "small.toml")[0] == 0
    code, again, _ = p2plab("report", "runs/small")
    assert code == 0
    assert "ad_psgd int8" in again
    assert "Partial" not in again


@pytest.mark.usefixtures("_fake_peers")
def test_a_report_made_again_from_the_records_is_the_same(p2plab, scenario, tmp_path):
    folder = tmp_path / "runs" / "small"
    _, out, _ = p2plab("run", str(scenario))
    names = ("comparison.json", "report.html")
    before = [(folder / name).read_bytes() for name in names]
    (folder / "report.html").unlink()
    (folder / "comparison.png").unlink()
    code, again, err = p2plab("report", "runs/small")
    assert (code, err) == (0, "")
    assert again.splitlines() == out.splitlines()[-len(again.splitlines()) :]
    assert [(folder / name).read_bytes() for name in names] == before
    assert (folder / "comparison.png").stat().st_size


@pytest.mark.usefixtures("_fake_peers")
def test_two_runs_are_shown_beside_each_other(p2plab, scenario, tmp_path):
    folders = [str(tmp_path / name) for name in ("before", "after")]
    p2plab("run", str(scenario), "--out", folders[0])
    p2plab("run", str(scenario), "--out", folders[1], "--algorithms", "ad_psgd")
    code, out, err = p2plab("compare", *folders)
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert ["ad_psgd", "samples", "per", "second", "640", "640", "1.00"] in lines
    assert not [line for line in lines if line[:1] == ["allreduce"]], "it is in one of them only"


def test_a_folder_without_results_is_a_mistake_in_a_sentence(p2plab, scenario, tmp_path):
    (tmp_path / "begun").mkdir()
    shutil.copy(scenario, tmp_path / "begun" / "scenario.toml")
    mistakes = {
        ("report", "nowhere"): "there is no folder nowhere; give one that a run wrote",
        ("report", "."): ". holds no run: there is no scenario.toml in it",
        ("report", "begun"): "begun holds no results: no algorithm has a summary.json yet",
        ("report", "small.toml"): "small.toml is a file; give the folder of the run, .",
        ("compare", "begun", "."): "begun holds no comparison; p2plab report begun makes it",
    }
    for arguments, sentence in mistakes.items():
        code, _, err = p2plab(*arguments)
        assert (code, err) == (2, f"error: {sentence}\n")
    assert not list(tmp_path.rglob(".lock")), "nothing is left where nothing was found"


@pytest.mark.usefixtures("_fake_peers")
def test_after_a_kill_a_report_still_names_what_was_left_out(p2plab, scenario, tmp_path):
    folder = tmp_path / "runs" / "small"
    p2plab("run", str(scenario), "--quick")
    before = json.loads((folder / "comparison.json").read_text())
    for path in (folder / "comparison.json", folder / "ad_psgd" / "summary.json"):
        path.unlink()  # as if the launcher had been killed while the second algorithm ran
    code, out, _ = p2plab("report", "runs/small")
    said = " ".join(out.split())
    assert code == 0
    assert (
        "not applicable, since --quick is too small for it: gossip is three times as fast" in said
    )
    assert "left out, since the run ended before all had: ad_psgd" in said
    after = json.loads((folder / "comparison.json").read_text())
    assert after["left_out"] == before["left_out"] != []
    (folder / "comparison.json").write_text("[]")
    assert p2plab("report", "runs/small")[1] == out, "it is what mends a damaged one"


@pytest.mark.usefixtures("_fake_peers")
@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("curve.json", None, "{folder} has a summary.json and no curve.json"),
        ("curve.json", "[{]", "{folder}/curve.json is damaged: Expecting property name"),
        ("curve.json", "[{}]", "{folder}/curve.json is damaged: 0.wall_s is missing"),
        ("summary.json", "{}", "{folder}/summary.json is damaged: algorithm is missing"),
        ("summary.json", "[]", "{folder}/summary.json is damaged: it holds []"),
    ],
)
def test_a_report_of_damaged_results_is_refused_in_a_sentence(p2plab, scenario, name, text, why):
    p2plab("run", str(scenario))
    folder = Path("runs/small/allreduce")
    (folder / name).unlink()
    if text is not None:
        (folder / name).write_text(text)
    code, out, err = p2plab("report", "runs/small")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"error: {why.format(folder=folder)}")
    assert err.endswith("; run the scenario again\n")


@pytest.mark.usefixtures("_fake_peers")
def test_results_of_another_number_of_peers_than_the_scenario_are_refused(p2plab, scenario):
    p2plab("run", str(scenario))
    Path("runs/small/scenario.toml").write_text(SCENARIO.replace("peers = 2", "peers = 3"))
    why = "runs/small/allreduce/summary.json is of 2 peers and scenario.toml of 3"
    assert p2plab("report", "runs/small") == (2, "", f"error: {why}; run the scenario again\n")


def test_every_mistake_is_one_sentence_and_exit_code_2(p2plab, scenario):
    mistakes = {
        ("run", "one_sloww"): "no scenario 'one_sloww'",
        ("run", str(scenario), "--backend", "dokcer"): "unknown backend 'dokcer'",
        ("run", str(scenario), "--algorithms", "allreduce,ad_psg"): "unknown algorithm 'ad_psg'",
        ("run", str(scenario), "--peers", "0"): "peers = 0 must be 1 or more",
        ("run", "one_slow", "--peers", "2"): "straggler peers = [3]: there are 2 peers",
        ("run", str(scenario), "--out", str(scenario)): f"cannot write to {scenario}",
    }
    for arguments, sentence in mistakes.items():
        code, _, err = p2plab(*arguments)
        assert code == 2
        assert err.startswith(f"error: {sentence}"), err
        assert err.count("\n") == 1


def test_an_algorithm_that_a_backend_cannot_run_is_refused_with_those_that_can(p2plab, scenario):
    given = ("run", str(scenario), "--backend", "docker", "--algorithms", "ddp")
    code, _, err = p2plab(*given)
    assert code == 2
    assert err == "error: ddp has no image to run in containers; use --backend process\n"


@pytest.mark.parametrize("arguments", [("--version",), ("-h",), ("run", "-h")])
def test_what_only_shows_something_ends_well(p2plab, arguments):
    code, out, _ = p2plab(*arguments)
    assert code == 0
    assert out


@pytest.mark.usefixtures("_fake_peers")
def test_a_quiet_run_says_nothing(p2plab, scenario):
    assert p2plab("run", str(scenario), "-q") == (0, "", "")


@pytest.mark.usefixtures("_fake_peers")
def test_two_runs_at_a_time_have_a_folder_each(p2plab, scenario, tmp_path):
    folder = tmp_path / "shared"
    with _prepared(folder):
        (folder / "comparison.json").write_text("{}")
        code, _, err = p2plab("run", str(scenario), "--out", str(folder))
        assert (code, err.count("\n")) == (2, 1)
        assert err.startswith(f"error: another run writes to {folder}; give this one another")
        assert (folder / "comparison.json").exists(), "nothing of the other run is touched"
    assert p2plab("run", str(scenario), "--out", str(folder))[0] == 0


def test_results_that_cannot_be_taken_away_are_a_mistake_in_a_sentence(p2plab, scenario, tmp_path):
    (tmp_path / "out" / "report.html").mkdir(parents=True)
    code, _, err = p2plab("run", str(scenario), "--out", str(tmp_path / "out"))
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith(f"error: cannot write to {tmp_path / 'out'}: ")


def test_a_misspelt_option_of_the_command_exits_with_2(p2plab):
    assert p2plab("run", "one_slow", "--pears", "2")[0] == 2


def test_a_task_that_does_not_exist_is_refused_before_anything_starts(p2plab, scenario):
    scenario.write_text('task = "digist"\n' + SCENARIO)
    code, _, err = p2plab("run", str(scenario))
    assert code == 2
    assert "'digist'" in err


def test_ctrl_c_exits_with_130_and_stops_the_fleet(p2plab, scenario, monkeypatch):
    def interrupt(states):
        raise KeyboardInterrupt

    fleet = FakeFleet(("p00", "p01"), [interrupt])
    monkeypatch.setitem(backends._BACKENDS, "process", lambda: FakeBackend(fleet))
    assert p2plab("run", str(scenario))[0] == 130
    assert fleet.stops == 1


def test_sigterm_stops_the_fleet_too(p2plab, scenario, monkeypatch):
    fleet = FakeFleet(("p00", "p01"), [lambda states: signal.raise_signal(signal.SIGTERM)])
    monkeypatch.setitem(backends._BACKENDS, "process", lambda: FakeBackend(fleet))
    assert p2plab("run", str(scenario))[0] == 143
    assert fleet.stops == 1


def test_python_dash_m_launcher_is_the_same_command():
    root = Path(__file__).parents[2]
    shown = subprocess.run(
        [sys.executable, "-m", "p2plab", "run", "--help"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--algorithms" in shown.stdout


WITHOUT_TORCH = """
import sys
from p2plab.cli import main
sys.argv = ["p2plab", *sys.argv[1:]]
try:
    main()
finally:
    assert "torch" not in sys.modules
"""


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--help"], 0, "Run fleets of p2ptrain peers"),
        (["list"], 0, "one_slow"),
        (["show", "one_slow"], 0, "min_step_ms = 60.0"),
        (["run", "one_sloww", "--backend", "sim"], 2, "no scenario 'one_sloww'"),
        (["run", "one_slow", "--backend", "sim", "--peers", "2"], 2, "there are 2 peers"),
        (["run", "one_slow", "--backend", "sim", "--algorithms", "ad_psg"], 2, "unknown algorithm"),
        (["run", "one_slow", "--backend", "sim", "--algorithms", "ddp"], 2, "ddp cannot be simu"),
        (["run", "one_slow", "--backend", "ray", "--algorithms", "ddp"], 2, "use --backend"),
        (["run", "one_slow", "--backend", "sim", "--out", "/dev/null/x"], 2, "cannot write to"),
        (["run", "thousand", "--backend", "docker", "--quick"], 2, "use --backend sim"),
        (["run", "unlike_containers", "--backend", "sim"], 2, "use --backend docker"),
        (["report", "nowhere"], 2, "nowhere"),
    ],
)
def test_torch_is_not_imported_before_a_run_begins(arguments, code, says):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, says in done.stdout + done.stderr) == (code, True), done.stderr


def test_the_list_has_a_line_for_every_scenario(p2plab):
    code, out, _ = p2plab("list")
    lines = out.splitlines()
    assert code == 0
    assert [line.split()[0] for line in lines] == list(bundled_scenarios())
    assert all(len(line.split()) > 2 for line in lines)


def test_what_show_prints_is_the_same_scenario(p2plab, tmp_path):
    code, out, _ = p2plab("show", "codecs")
    (tmp_path / "shown.toml").write_text(out)
    assert code == 0
    assert load_scenario("shown.toml") == load_scenario("codecs")


def test_a_new_scenario_has_comments_and_runs(p2plab, tmp_path):
    code, out, _ = p2plab("new", "mine")
    assert (code, "p2plab run mine.toml --quick" in out) == (0, True)
    assert "# Other settings of some peers." in (tmp_path / "mine.toml").read_text()
    assert p2plab("run", "mine.toml", "--quick", "--backend", "sim", "--no-gradients")[0] == 0
    assert p2plab("new", "mine")[::2] == (2, "error: cannot write mine.toml: File exists\n")
    assert "must be letters" in p2plab("new", "a/b")[2]


@pytest.mark.parametrize("name", bundled_scenarios())
def test_every_bundled_scenario_runs_in_its_smallest_form(p2plab, name):
    code, out, err = p2plab("run", name, "--quick", "--backend", "sim", "--no-gradients")
    assert (code, err) == (0, ""), err
    assert "Algorithms" in out


def test_a_simulation_says_that_it_prices_no_transport(p2plab):
    _, out, _ = p2plab("run", "transports", "--quick", "--backend", "sim", "--no-gradients")
    said = "left out, since a simulation prices no transport, only the [link]: network.data"
    assert said in " ".join(out.split())
