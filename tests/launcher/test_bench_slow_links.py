"""What the benchmark of slow links makes of what peers saw."""

from pathlib import Path

import pytest

from p2plab.bench import slow_links
from p2plab.bench.slow_links import (
    Attempt,
    Case,
    claims_of,
    has_begun,
    picture,
    row_of,
    tables,
)
from p2ptrain.core.effects import Outcome
from p2ptrain.errors import ConfigError
from tests.launcher.conftest import draw, printed

CASE = Case(megabytes=4, mbit=1, seconds=10, step_s=1)


def attempt(peer: str, outcome: Outcome, *, algorithm: str = "ad_psgd", silences: int = 0):
    lasted_s, reason = (30.0, "") if outcome is Outcome.DONE else (5.0, "p1 is broken")
    return Attempt(algorithm, 4, 1, peer, lasted_s, outcome.value, reason, silences)


def test_a_row_counts_the_groups_of_its_algorithm_and_size():
    seen = [
        *[attempt("p0", Outcome.DONE)] * 18,
        attempt("p1", Outcome.LOST, silences=1),
        attempt("p1", Outcome.LOST, silences=1),
        attempt("p0", Outcome.LOST, algorithm="wagma"),
    ]
    row = row_of(CASE, "ad_psgd", seen)
    assert (row["formed"], row["done"], row["share"]) == (20, 18, 0.9)
    assert (row["median_s"], row["silent_peers"]) == (30.0, 1)
    assert row["failures"] == ["p1 is broken"]
    assert not claims_of([row])[0]["holds"]


def test_groups_that_have_formed_and_pushes_count():
    """Under `sgp` there were only pushes, and so no row that could hold."""
    assert has_begun({"snapshot_s": 0.01, "weight": None})
    assert has_begun({"snapshot_s": 0.0, "weight": 0.5})
    assert not has_begun({"snapshot_s": 0.0, "weight": None})


def test_no_group_at_all_is_no_success():
    row = row_of(CASE, "ad_psgd", [])
    assert row["median_s"] is None
    assert not claims_of([row])[0]["holds"]


def test_every_group_is_drawn(tmp_path: Path):
    rows = [row_of(CASE, "ad_psgd", [attempt("p0", Outcome.DONE), attempt("p1", Outcome.LOST)])]
    draw(picture(rows), tmp_path)


def test_the_reason_of_a_failure_is_printed_below_the_groups():
    row = row_of(CASE, "ad_psgd", [attempt("p0", Outcome.DONE), attempt("p1", Outcome.LOST)])
    assert "50.0%" in printed(*tables([row]))
    assert "p1 is broken" in printed(*tables([row]))


def test_it_is_said_where_no_relay_can_be_laid(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(slow_links, "can_lay", lambda: False)
    with pytest.raises(ConfigError, match="relays need to know whose a connection is"):
        slow_links.measure(["ad_psgd"], [CASE], 1, lambda _: None)
