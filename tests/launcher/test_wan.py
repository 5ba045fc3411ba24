"""`make wan`: the scenarios of slow links, and the part of the page that has their figures."""

import pytest
from typer.testing import CliRunner

from p2plab import wan
from p2plab.paper import Outcome
from p2plab.scenario import load_scenario
from p2plab.wan import ALONE, FOR_REAL, HEADING, experiments, page
from p2ptrain.errors import ConfigError
from tests.launcher.test_compare import row
from tests.launcher.test_paper import CLAIM, CONTRADICTED

PAGE = f"# Links\n\nTake care.\n\n{HEADING}\n\n### phone\n\nold\n\n## Afterwards\n\nMore.\n"


def outcome(name: str, *, speed: float = 50.0, loss: float = 2.0, claims=(CLAIM,)) -> Outcome:
    def figures(algorithm: str, samples_per_s: float, loss: float):
        found = {**row(algorithm, samples_per_s), "bytes_per_step": 2_500_000.0}
        return {**found, "final": {**found["final"], "loss": loss}}

    rows = [figures("no communication", 100.0, 3.0), figures("allreduce", 4.0, 1.6)]
    return Outcome(name, claims, [*rows, figures("gossip", speed, loss)])


def test_all_scenarios_but_the_real_one_are_simulated_and_compared_with_no_communication():
    names = {one.name for one in experiments()}
    assert {"four_homes", "phone", "two_data_centres", "unequal_speeds"} <= names
    assert FOR_REAL not in names
    for name in names - {"rare_rounds"}:
        assert ALONE in load_scenario(f"wan/{name}").algorithms


def test_a_scenario_that_is_not_simulated_is_refused():
    with pytest.raises(ConfigError, match="no scenario 'four_homes_relays' to simulate; there are"):
        experiments([FOR_REAL])


def test_speeds_stand_beside_that_alone_and_losses_beside_that_of_all_reduce():
    text = page(PAGE, [outcome("four_homes")])
    assert "| gossip | 50 | 0.500 | 2 | 1.250 | 2.5 | 140 | 3 |" in text
    assert "* twice as fast: **2.051** (asked ≥ 2)" in text


def test_a_claim_that_is_not_met_says_so():
    text = page(PAGE, [outcome("four_homes", claims=(CONTRADICTED,))])
    assert "* twice as fast: **2.051** (asked ≤ 1.5; not met)" in text


def test_the_rest_of_the_page_and_other_scenarios_stay_and_a_new_run_replaces_its_own():
    text = page(PAGE, [outcome("four_homes")])
    assert text.startswith("# Links\n\nTake care.\n\n## Measured\n\n### four_homes\n")
    assert text.endswith("### phone\n\nold\n\n## Afterwards\n\nMore.\n")
    assert page(text, [outcome("four_homes")]) == text
    again = page(text, [outcome("four_homes", speed=90.0)])
    assert again == text.replace("| gossip | 50 | 0.500", "| gossip | 90 | 0.900")


@pytest.mark.parametrize(("claims", "code"), [((CLAIM,), 0), ((CLAIM, CONTRADICTED), 3)])
def test_a_claim_that_does_not_hold_is_the_exit_code(monkeypatch, tmp_path, claims, code):
    def side_by_side(work, settings, told, at_once):
        return [outcome(one.name, claims=claims) for one in settings]

    monkeypatch.setattr(wan, "side_by_side", side_by_side)
    app = wan.typer.Typer()
    app.command()(wan.main)
    arguments = ["phone", "--out", str(tmp_path), "--page", str(tmp_path / "links.md")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code, result.output
    assert "### phone" in (tmp_path / "links.md").read_text()
