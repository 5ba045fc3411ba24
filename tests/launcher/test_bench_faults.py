"""`make bench-faults`: what it makes of what it measured, and what it refuses."""

from dataclasses import replace
from pathlib import Path

import pytest

from p2plab.bench import beside, faults
from p2plab.bench.beside import Beside
from p2plab.bench.faults import Round
from p2ptrain.errors import ConfigError
from tests.launcher.conftest import draw, printed

KILLED = Round("killed", "grpc", waits_s=0.1, holds_s=0.5)
FROZEN = Round("frozen", "grpc", waits_s=2.0, holds_s=2.5)
SLOW = Beside("ad_psgd", calm_s=0.6, slow_s=0.63, longest_s=0.9)


def test_medians_and_the_worst_case_of_each_fault_are_held_against_its_bound():
    rounds = [KILLED, KILLED, replace(KILLED, holds_s=0.7), FROZEN]
    claims = {one["text"]: (one["measured"], one["holds"]) for one in faults.claims_of(rounds)}
    assert claims == {
        "grpc, one of four is frozen: no peer waits any more, median of 1": (2.0, True),
        "grpc, one of four is frozen: no peer waits any more, worst of 1": (2.0, True),
        "grpc, one of four is frozen: the others hold their mean, median": (2.5, True),
        "grpc, one of four is frozen: the others hold their mean, worst": (2.5, True),
        "grpc, one of four is killed: no peer waits any more, median of 3": (0.1, True),
        "grpc, one of four is killed: no peer waits any more, worst of 3": (0.1, True),
        "grpc, one of four is killed: the others hold their mean, median": (0.5, True),
        "grpc, one of four is killed: the others hold their mean, worst": (0.7, False),
    }


def test_rounds_beside_a_slow_peer_are_compared_with_those_of_the_same_fleet_just_before():
    found = [SLOW, SLOW, replace(SLOW, slow_s=0.9)]
    measured = [(one["measured"], one["holds"]) for one in beside.claims_of(found)]
    assert measured == [(pytest.approx(1.05), True), (pytest.approx(1.5), False)]


@pytest.mark.parametrize("rounds", [[], [KILLED, FROZEN]])
@pytest.mark.parametrize("besides", [[SLOW], [SLOW, replace(SLOW, algorithm="wagma")]])
def test_everything_that_was_measured_is_in_one_picture(
    tmp_path: Path, rounds: list[Round], besides: list[Beside]
):
    text = printed(faults.table_of(rounds), beside.table_of(besides))
    assert "ad_psgd" in text
    assert ("killed, grpc" in text) == bool(rounds)
    draw(faults.picture(rounds, besides), tmp_path)


def test_a_fault_that_there_is_not_is_refused_in_one_sentence():
    expected = "--faults has no 'drowned'; there are: killed, frozen, cut off, slow"
    with pytest.raises(ConfigError, match=f"^{expected}$"):
        faults.main(faults="killed,drowned")
