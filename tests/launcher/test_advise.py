"""`p2plab advise`: a fleet goes in, a ranking by expected time comes out."""

import dataclasses
import io
import json

import pytest
from rich.console import Console

from p2plab import cli
from p2plab.advise import CANDIDATES, fleet_of, measured, ranked, ranking_table, simulated
from p2plab.scenario import Overlay, load_scenario
from p2ptrain.errors import ConfigError


def row(
    name: str, *, rate: float, waits: float = 0.0, mbit: int | None = None
) -> dict[str, object]:
    return {
        "peer": name,
        "answers": True,
        "steps": 100,
        "samples": 3200,
        "samples_per_s": rate,
        "wait_share": waits,
        "link_mbit": mbit,
    }


def status(*rows: dict[str, object], size: int = 120_000) -> dict[str, object]:
    return {"model_size": size, "peers": list(rows)}


def test_a_measured_swarm_becomes_a_fleet_of_the_same_speeds_and_links():
    fleet = measured(
        status(
            row("a", rate=320, waits=0.5, mbit=20),
            row("b", rate=160),
            {"peer": "c", "answers": False, "samples_per_s": None},
        )
    )
    assert fleet.peers == 2
    assert fleet.training.batch_size == 32
    assert fleet.pace.min_step_ms == pytest.approx(50), "a waits for half of its time"
    (slow,) = fleet.pace.stragglers
    assert (slow.peers, slow.factor) == ((1,), pytest.approx(4))
    (link,) = fleet.devices
    assert (link.peers, link.uplink_mbit_s) == ((0,), 20)
    assert fleet.task_options["width"] == 100


def test_a_model_too_large_to_simulate_has_slower_links_instead():
    fleet = measured(status(row("a", rate=1, mbit=100), row("b", rate=1), size=500_000_000))
    assert fleet.devices[0].uplink_mbit_s == 10


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({}, "no status"),
        ([], "no status"),
        (status(row("a", rate=1)), "1 peers of this swarm train"),
    ],
)
def test_what_is_no_swarm_is_refused_in_a_sentence(told: object, said: str):
    with pytest.raises(ConfigError, match=said):
        measured(told)


def test_standard_input_without_json_is_refused(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("nothing"))
    with pytest.raises(ConfigError, match="no JSON"):
        fleet_of("-")


def test_a_scenario_is_simulated_with_all_candidates_and_its_own_rows():
    scenario = simulated(fleet_of("wan/four_homes"))
    names = set(scenario.algorithms)
    assert {row.name for row in CANDIDATES} | {"diloco streaming"} <= names
    assert not scenario.gradients
    assert not scenario.claims


def test_an_unknown_candidate_is_named():
    with pytest.raises(ConfigError, match="no candidate 'gossip'"):
        simulated(fleet_of("one_slow"), ["gossip"])


def test_the_fastest_is_first_and_what_never_averaged_is_last():
    def of(name: str, rate: float, averages: float) -> dict[str, object]:
        return {
            "algorithm": name,
            "samples_per_s": rate,
            "averages_per_peer": averages,
            "bytes_per_step": 1.0,
        }

    rows = ranked([of("slow", 10, 5), of("alone", 99, 0), of("fast", 20, 5)], 1000)
    assert [row["algorithm"] for row in rows] == ["fast", "slow", "alone"]
    assert rows[0]["expected_s"] == 50


def test_a_ranking_can_be_read_on_eighty_columns():
    figures = {"samples_per_s": 12345.6, "averages_per_peer": 123.4, "bytes_per_step": 1.2e6}
    rows = ranked([{"algorithm": one.name, **figures} for one in CANDIDATES], 10**7)
    console = Console(width=80)
    with console.capture() as shown:
        console.print(ranking_table(rows, "a fleet"))
    assert "…" not in shown.get()
    assert "ad_psgd fragments" in shown.get()


def test_beside_a_straggler_gossip_is_ranked_before_all_reduce(monkeypatch, capsys):
    told = status(*(row(name, rate=320 / (4 if name == "d" else 1)) for name in "abcd"), size=1200)
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(told)))
    cli.app(
        ["advise", "-", "--algorithms", "allreduce,ad_psgd", "--samples", "10000", "--json"],
        standalone_mode=False,
    )
    first, second = json.loads(capsys.readouterr().out)
    assert (first["algorithm"], second["algorithm"]) == ("ad_psgd", "allreduce")
    assert 2.5 < second["expected_s"] / first["expected_s"] < 3.4
    assert first["expected_s"] == pytest.approx(10_000 / first["samples_per_s"])


def test_where_no_named_algorithm_can_train_a_fleet_the_reason_is_said():
    servers = load_scenario("one_slow")
    only = dataclasses.replace(
        servers,
        algorithms=("parameter_server",),
        overlays=(Overlay(ranks=(0,), peer={"trains": False, "serve": True}),),
        claims=(),
        faults=(),
    )
    with pytest.raises(ConfigError, match=r"none of these can train this fleet: .*trains = false"):
        simulated(only, ["ad_psgd"])
