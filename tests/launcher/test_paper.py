"""`make paper`: all experiments, the largest first, and one table of what they claim."""

import json
import sys

import pytest
from typer.testing import CliRunner

from p2plab import paper
from p2plab.backends import load_backend
from p2plab.paper import (
    FOR_REAL,
    REAL,
    SIMULATED,
    Experiment,
    Outcome,
    carry_out,
    experiments,
    page,
    place_of,
)
from p2plab.scenario import load_scenario
from p2ptrain.errors import ConfigError, P2PTrainError
from tests.launcher.test_compare import row

CLAIM = {
    "text": "twice as fast",
    "at_least": 2.0,
    "at_most": None,
    "published": 2.1,
    "source": None,
    "measured": 2.0512,
    "holds": True,
}
CONTRADICTED = {**CLAIM, "at_least": None, "at_most": 1.5, "published": None, "holds": False}


def outcome(name="one", claims=(CLAIM,)):
    versions = {"versions_per_s": 3.0}
    return Outcome(name, claims, [{**row("allreduce"), **versions}])


def test_every_paper_scenario_claims_something_and_the_largest_goes_first():
    found = experiments()
    sizes = [one.size for one in found]
    assert sizes == sorted(sizes, reverse=True)
    assert {"one_of_16", "one_of_8_100", "two_of_256", paper.SKEWED} <= {one.name for one in found}


def test_only_what_claims_something_about_a_model_is_trained():
    (priced,), (trained,) = experiments(["one_of_16"]), experiments(["quality_digits"])
    assert "--no-gradients" in priced.command
    assert "--no-gradients" not in trained.command


def test_an_experiment_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="no scenario 'paper/one_of_17'"):
        experiments(["one_of_17"])


def test_an_experiment_that_fails_says_why(tmp_path):
    failing = Experiment("bad", ("-c", "import sys; sys.exit('it broke')"), "bench.json", (1,))
    with pytest.raises(P2PTrainError, match="bad ended with 1: it broke"):
        carry_out(failing, tmp_path)


def test_a_simulated_experiment_needs_no_interpreter_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(paper.subprocess, "run", None)
    monkeypatch.setattr(sys, "argv", sys.argv)
    (one,) = experiments(["one_of_8_050"], quick=True)
    found = carry_out(one, tmp_path)
    assert [row["algorithm"] for row in found.rows] == ["allreduce", "eager"]
    assert "written: " in (tmp_path / one.name / "output.txt").read_text(encoding="utf-8")


def test_the_page_has_a_row_for_each_claim_and_each_algorithm():
    text = page("", SIMULATED, [outcome(claims=(CLAIM, CONTRADICTED))])
    assert "| one | twice as fast | 2.1 | ≥ 2 | 2.051 | yes |" in text
    assert "| one | twice as fast |  | ≤ 1.5 | 2.051 | **no** |" in text
    assert "| one | `allreduce` | 100 | 3 | 0.97 | 0.1 |" in text


def test_on_the_page_what_was_measured_elsewhere_stays_and_what_was_measured_again_is_replaced():
    text = page("", REAL, [outcome("mine")])
    text = page(text, SIMULATED, [outcome("one"), outcome("two")])
    better = {**CLAIM, "measured": 2.5}
    again = page(text, SIMULATED, [outcome("one", [better])], whole=False)
    row_of_one = "| one | twice as fast | 2.1 | ≥ 2 | {} | yes |"
    assert again == text.replace(row_of_one.format("2.051"), row_of_one.format("2.5"))
    assert "| mine | twice as fast | 2.1 | ≥ 2 | 2.051 | yes | 20" in again
    renamed = page(again, SIMULATED, [outcome("three")])
    assert "| two |" not in renamed
    assert "| mine |" in renamed


def test_what_runs_for_real_is_what_the_simulator_prices_with_the_same_file():
    found = experiments(place=REAL)
    assert {one.name for one in found} == set(FOR_REAL)
    for one in found:
        assert "--no-gradients" not in one.command
        load_backend("process").check(load_scenario(f"paper/{one.name}"))


@pytest.mark.parametrize("name", [paper.SKEWED, "two_of_256"])
def test_what_is_only_simulated_is_refused_for_real(name):
    with pytest.raises(ConfigError, match=f"'{name}' is only simulated; for real there are: one_"):
        experiments([name], REAL)


def test_a_backend_without_experiments_is_told_which_have_some():
    with pytest.raises(ConfigError, match=r"backend = 'docker'; .* run on: sim, process"):
        place_of("docker")


@pytest.mark.parametrize(("claims", "code"), [((CLAIM,), 0), ((CLAIM, CONTRADICTED), 3)])
def test_a_claim_that_does_not_hold_is_the_exit_code(monkeypatch, tmp_path, claims, code):
    def side_by_side(work, settings, told, at_once):
        return [outcome(one.name, claims) for one in settings]

    monkeypatch.setattr(paper, "side_by_side", side_by_side)
    app = paper.typer.Typer()
    app.command()(paper.main)
    arguments = ["one_of_16", "--out", str(tmp_path), "--page", str(tmp_path / "page.md")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code, result.output
    assert "one_of_16" in (tmp_path / "page.md").read_text()


def test_results_are_read_from_where_the_experiment_wrote_them(tmp_path):
    write = "import sys, pathlib; pathlib.Path(sys.argv[2], 'r.json').write_text(sys.argv[3])"
    said = json.dumps({"claims": [CLAIM], "rows": []})
    (tmp_path / "w.py").write_text(write.replace("sys.argv[3]", repr(said)))
    found = carry_out(Experiment("mine", (str(tmp_path / "w.py"),), "r.json", (1,)), tmp_path)
    assert found.claims == [CLAIM]
