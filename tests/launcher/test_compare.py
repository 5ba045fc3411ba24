import pytest
from rich.console import Console

from p2plab.compare import check_claim, compare, means, print_comparison
from p2plab.harness.claims import bound_of, do_all_hold
from p2plab.scenario import LeftOut
from tests.launcher.fakes import claim, scenario


def row(algorithm, samples_per_s=100.0, time_to_target_s=10.0, accuracy=0.97):
    final = {"loss": 0.1, "accuracy": accuracy, "consensus_distance": 0.5}
    return {
        "algorithm": algorithm,
        "wall_s": 20.0,
        "steps": 10,
        "samples": 320,
        "samples_per_s": samples_per_s,
        "averages_per_peer": 140.0,
        "failed_share": 0.04,
        "bytes_per_peer": 12_340_000.0,
        "longest_gap_s": 3.25,
        "silences": [],
        "time_to_target_s": time_to_target_s,
        "final": final,
    }


def rows(**of_gossip):
    return {"allreduce": row("allreduce"), "ad_psgd": row("ad_psgd", **of_gossip)}


def test_a_claim_over_another_algorithm_is_about_the_ratio():
    checked = check_claim(claim(at_least=2.0), rows(samples_per_s=310.0))
    assert checked["measured"] == pytest.approx(3.1)
    assert checked["holds"]
    assert checked["why"] == "3.1 is at least 2"


def test_a_claim_without_another_is_about_the_plain_value():
    plain = claim(metric="final.accuracy", over=None, at_least=0.95)
    assert check_claim(plain, rows())["measured"] == 0.97
    assert not check_claim(plain, rows(accuracy=0.94))["holds"]


def test_a_claim_may_be_about_a_difference():
    near = claim(metric="final.accuracy", over=None, minus="allreduce", at_least=-0.01)
    checked = check_claim(near, rows(accuracy=0.965))
    assert (checked["measured"], checked["holds"]) == (pytest.approx(-0.005), True)
    assert not check_claim(near, rows(accuracy=0.95))["holds"]


def test_a_claim_about_a_class_that_the_task_does_not_have_does_not_hold():
    nines = claim(metric="final.recall.9", over=None, at_least=0.7)
    table = rows()
    for recall, holds in (({"9": 0.75}, True), ({"9": 0.6}, False), ({}, False), (None, False)):
        table["ad_psgd"]["final"]["recall"] = recall
        assert check_claim(nines, table)["holds"] is holds


def test_figures_of_several_seeds_are_means_and_one_that_is_missing_spoils_them():
    first, second = row("ad_psgd"), row("ad_psgd", samples_per_s=200.0, time_to_target_s=None)
    (mean,) = means([[{**first, "seed": 3}], [{**second, "seed": 4}]])
    assert (mean["samples_per_s"], mean["time_to_target_s"]) == (150.0, None)
    assert (mean["seed"], mean["seeds"], mean["final"]["accuracy"]) == (3, 2, 0.97)


def test_a_bound_that_is_just_met_holds():
    assert check_claim(claim(at_least=2.0), rows(samples_per_s=200.0))["holds"]
    assert check_claim(claim(at_least=None, at_most=2.0), rows(samples_per_s=200.0))["holds"]
    assert not check_claim(claim(at_least=None, at_most=2.0), rows(samples_per_s=201.0))["holds"]


@pytest.mark.parametrize(("figure", "holds"), [(179.0, False), (180.0, True), (221.0, False)])
def test_a_figure_of_a_model_may_be_neither_below_nor_above_its_bounds(figure, holds):
    both = claim(over=None, at_least=180.0, at_most=220.0, published=200.0)
    checked = check_claim(both, rows(samples_per_s=figure))
    assert checked["holds"] is holds
    assert checked["why"] == f"{figure:g} is {'' if holds else 'not '}from 180 to 220"
    assert bound_of(checked) == "180 to 220"


@pytest.mark.parametrize("bound", [{"at_least": 0.0}, {"at_least": None, "at_most": 9.0}])
def test_a_target_that_was_not_reached_does_not_hold_and_says_so(bound):
    sooner = claim(metric="time_to_target_s", **bound)
    checked = check_claim(sooner, rows(time_to_target_s=None))
    assert checked["measured"] is None
    assert not checked["holds"]
    assert checked["why"] == "ad_psgd did not reach the target"


def test_a_baseline_that_did_not_reach_the_target_proves_nothing():
    table = {"allreduce": row("allreduce", time_to_target_s=None), "ad_psgd": row("ad_psgd")}
    checked = check_claim(claim(metric="time_to_target_s", at_least=None, at_most=0.5), table)
    assert not checked["holds"]
    assert checked["why"] == "allreduce did not reach the target"


def test_there_is_no_ratio_to_zero():
    table = {"allreduce": row("allreduce", samples_per_s=0.0), "ad_psgd": row("ad_psgd")}
    checked = check_claim(claim(), table)
    assert not checked["holds"]
    assert checked["why"] == "samples_per_s of allreduce is 0, so there is no ratio to it"


def test_rows_hold_what_is_compared_and_each_as_a_ratio_to_the_first():
    summaries = [
        {**row("allreduce"), "backend": "process", "peers": [{}]},
        {**row("ad_psgd", samples_per_s=300.0, time_to_target_s=None), "backend": "", "peers": []},
    ]
    comparison = compare(scenario(claims=(claim(),)), summaries)
    first, second = comparison["rows"]
    assert first["ratio"]["samples_per_s"] == 1
    assert second["ratio"]["samples_per_s"] == 3
    assert second["ratio"]["time_to_target_s"] is None
    assert second["ratio"]["final"]["accuracy"] == 1
    assert "peers" not in first
    assert do_all_hold(comparison["claims"])


def shown_at(width: int, *summaries: dict) -> list[str]:
    console = Console(width=width)
    with console.capture() as capture:
        print_comparison(console, compare(scenario(), summaries), [])
    return capture.get().splitlines()


def test_averages_and_what_they_cost_stand_in_a_table_of_80_columns():
    missing = {"failed_share": None, "bytes_per_peer": None, "longest_gap_s": None}
    none = {**row("ad_psgd"), "averages_per_peer": 0.0, **missing}
    shown = shown_at(80, row("allreduce"), none)
    below = shown[[line.strip() for line in shown].index("Averages") :]
    assert ["allreduce", "140", "4.0%", "12.3", "3.2", "s"] in [line.split() for line in below]
    assert ["ad_psgd", "0", "-", "-", "-"] in [line.split() for line in below]


def test_who_did_not_average_is_named_with_the_algorithm_and_the_reason():
    sentence = "p03 has not averaged for 41 s (never yet): p05 is gone, its only attempt"
    shown = shown_at(120, row("allreduce"), {**row("ad_psgd"), "silences": [sentence]})
    assert f"ad_psgd: {sentence}" in shown


def test_a_claim_repeats_what_the_scenario_states():
    stated = claim(published=4.4, source="Luo et al.")
    checked = check_claim(stated, rows())
    assert {key: checked[key] for key in ("text", "metric", "of", "over", "published")} == {
        "text": "faster",
        "metric": "samples_per_s",
        "of": "ad_psgd",
        "over": "allreduce",
        "published": 4.4,
    }


def test_the_table_shows_published_beside_measured_and_what_was_left_out():
    stated = claim(text="four times as fast", published=4.4, source="Luo et al.")
    summaries = [row("allreduce"), row("ad_psgd", samples_per_s=150.0)]
    comparison = compare(scenario(claims=(stated,)), summaries)
    left_out = [LeftOut("faster still", "not all of ripples and allreduce ran", is_claim=True)]
    console = Console(width=120)
    with console.capture() as capture:
        print_comparison(console, comparison, left_out)
    shown = capture.get()
    line = next(line for line in shown.splitlines() if "four times as fast" in line)
    assert "4.4" in line
    assert "1.5" in line
    assert "no" in line
    assert "Luo et al." in shown
    assert "not applicable, since not all of ripples and allreduce ran: faster still" in shown
