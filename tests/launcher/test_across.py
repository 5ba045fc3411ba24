"""`make compare`: how `auto` did beside the others, from rows made by hand."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from p2plab import across
from p2plab.across import (
    COMPARED,
    LONGER,
    Row,
    beside,
    folder_of_seed,
    further_rows,
    keep_rows,
    kept_rows,
    longer_runs,
    over_too_soon,
    page,
    prepared,
    with_longer,
)
from p2ptrain.errors import P2PTrainError


def row(name: str, *curve: tuple[float, float], samples_per_s: float = 100.0) -> Row:
    lasted_s = curve[-1][0] if curve else 0.0
    return Row(name, samples_per_s, curve[-1][1] if curve else None, 1e6, curve, lasted_s)


def test_auto_is_compared_with_the_best_and_the_median_of_the_others():
    rows = [
        row("allreduce", (10.0, 0.5), (20.0, 0.4)),
        row("dear", (5.0, 0.5), (10.0, 0.4)),
        row("wagma", (5.0, 0.9)),
        row("auto", (6.0, 0.6), (12.0, 0.404)),
    ]
    assert (
        beside("one_slow", rows)
        == "| `one_slow` | `dear` | 9 | 18 | 11.51 | 1.279 | 1.01 |  |  |  |"
    )
    text = page({"one_slow": rows})
    assert "`auto` beside the best" in text
    assert f"{len(COMPARED) - 1} were not run here" in text


def test_between_two_looks_the_loss_falls_in_a_straight_line():
    one = row("dear", (0.0, 2.0), (10.0, 1.0), (20.0, 0.5))
    assert one.time_to(1.5) == 5
    assert one.time_to(1.0) == 10
    assert one.time_to(0.75) == 15
    assert one.time_to(0.4) is None
    assert row("dear", (3.0, 0.5)).time_to(1.0) == 3, "the first look"


def test_of_several_seeds_medians_of_auto_are_over_those_of_the_best_fixed_choice(tmp_path: Path):
    took_s = (12.0, 9.0, 5.0), (5.0, 11.0, 30.0), (11.0, 10.0, 6.0)
    for number, (auto_s, dear_s, eager_s) in enumerate(took_s):
        losses = {"auto": auto_s, "dear": dear_s, "eager": eager_s}
        rows = [row(name, (at, 0.4 + number / 100)) for name, at in losses.items()]
        rows[1:] = [replace(one, loss=0.44) for one in rows[1:]]
        folder = folder_of_seed(tmp_path, number)
        folder.mkdir(exist_ok=True)
        keep_rows(folder, "one_slow", rows, whole=True)
    assert prepared("one_slow", further=2).seed == prepared("one_slow").seed + 2
    further = further_rows(tmp_path, 3)["one_slow"]
    line = beside("one_slow", list(kept_rows(tmp_path, "one_slow").values()), further)
    assert line is not None
    assert line.endswith("| `eager`, of 3 | 1.833 | 0.9318 |"), (
        "eager: 6 s, though best in two only"
    )
    assert "`eager`, of 3" in page({"one_slow": rows}, {"one_slow": further})
    assert further_rows(tmp_path, 3)["half_slow"] == []
    assert further_rows(tmp_path, 1)["one_slow"] == [], "what an older run has left is not shown"


def test_where_nothing_was_trained_speed_counts():
    rows = [row("dear", samples_per_s=64), row("auto", samples_per_s=80)]
    assert beside("hidden", rows) == "| `hidden` | `dear` | 10 | 10 | 8 | 0.8 |  |  |  |  |"


def test_without_auto_the_page_has_no_such_table():
    rows = [row("allreduce", (10.0, 0.5)), row("dear", (5.0, 0.5))]
    assert beside("one_slow", rows) is None
    assert "beside the best" not in page({"one_slow": rows})


def test_rows_that_are_measured_again_replace_their_own_and_leave_others(tmp_path: Path):
    keep_rows(tmp_path, "wan/phone", [row("dear", (5.0, 0.5)), row("auto", (9.0, 0.5))], whole=True)
    keep_rows(tmp_path, "wan/phone", [row("auto", (4.0, 0.5))], whole=False)
    kept = kept_rows(tmp_path, "wan/phone")
    assert {name: one.lasted_s for name, one in kept.items()} == {"dear": 5.0, "auto": 4.0}
    assert kept_rows(tmp_path, "one_slow") == {}
    keep_rows(tmp_path, "wan/phone", [row("wagma", (3.0, 0.5))], whole=True)
    assert list(kept_rows(tmp_path, "wan/phone")) == ["wagma"]


def test_a_row_that_is_over_before_the_soonest_is_there_runs_once_more():
    slow, far = row("sgp", (10.0, 0.4)), row("topk", (14.0, 0.9))
    fast = row("auto", (2.0, 0.6), (3.0, 0.5))
    assert over_too_soon([slow, far, fast]) == (["auto"], LONGER * 10)
    rows = with_longer([slow, far, fast], [row("auto", (3.0, 0.5), (5.0, 0.41), (13.0, 0.2))])
    assert over_too_soon(rows) == ([], LONGER * 10), "as before, if a row is measured again"
    assert (
        beside("one_slow", rows)
        == "| `one_slow` | `sgp` | 10 | - | 4.778 | 0.4778 | 1.25 |  |  |  |"
    )


def test_where_nothing_was_trained_no_row_runs_once_more():
    priced = [Row("dear", 64, None, 1e6, ()), Row("auto", 80, None, 1e6, ())]
    assert over_too_soon(priced)[0] == []


def test_where_the_rate_decays_a_row_gets_the_samples_that_it_makes_in_the_same_time(
    tmp_path: Path,
):
    name = "paper/quality_digits"
    slow = row("sgp", (40.0, 0.4), samples_per_s=320)
    soon = row("auto", (15.0, 0.6), samples_per_s=1000)
    keep_rows(tmp_path, name, [slow, soon], whole=True)
    ((key, longer),) = longer_runs([name], tmp_path).items()
    assert (key, longer.algorithms) == (f"{name}, auto", ("auto",))
    assert longer.stop.samples == 40_000


def test_rows_of_a_scenario_that_has_run_are_kept_if_a_later_one_fails(monkeypatch, tmp_path: Path):
    def side_by_side(work, settings, told, at_once):
        (tmp_path / settings[0].name).mkdir()
        figures = {"samples_per_s": 9.0, "bytes_per_peer": 1.0, "wall_s": 2.0}
        rows = [{"algorithm": "dear", "final": {"loss": 0.5}, **figures}]
        results = json.dumps({"claims": [], "rows": rows})
        (tmp_path / settings[0].name / "comparison.json").write_text(results)
        told(settings[0])
        raise P2PTrainError("no memory is left")

    monkeypatch.setattr(across, "side_by_side", side_by_side)
    with pytest.raises(P2PTrainError, match="no memory is left"):
        across.main(["homogeneous", "one_slow"], "dear", out=tmp_path)
    kept = [kept_rows(tmp_path, name) for name in ("homogeneous", "one_slow")]
    assert [list(rows) for rows in kept] == [["dear"], []]
