from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure

from p2plab.consensus import CurvePoint, Target
from p2plab.plot import (
    LINES,
    MOST_PEERS,
    activities,
    curves_title,
    plot_comparison,
    scale_time,
    shown_ranks,
    strip_title,
)
from p2plab.records import PeerHistory
from p2plab.run import Run
from p2ptrain.compute.step_timing import StepTiming, Straggler
from tests.launcher.fakes import UNIX_S, FakeEvaluator, FakePeer, scenario


@pytest.fixture
def make_run(tmp_path):
    def make(algorithm, reached_s, changes=None):
        folder = tmp_path / algorithm
        for name in ("p00", "p01"):
            peer = FakePeer(folder, name)
            peer.ready(0.0)
            for number in range(20):
                peer.step(at=(number + 1) * 0.4, number=number)
            peer.group(at=4.0, members=["p00", "p01"])
        run = Run(scenario(target=Target(accuracy=0.5)), algorithm, folder, FakeEvaluator())
        for history in run.histories:
            history.read()
        points = ((0.0, 0.1), (reached_s or 1.0, 0.6 if reached_s else 0.2))
        run.curve.points += [CurvePoint(at, 1, 1.0, accuracy, 0.1) for at, accuracy in points]
        return run

    return make


def test_bars_are_cut_to_the_window(tmp_path):
    peer = FakePeer(tmp_path, "p00")
    peer.step(at=1.0, number=0, compute_s=0.75, wait_s=0.25)
    peer.step(at=9.0, number=1, compute_s=0.75, wait_s=0.25)
    peer.group(at=0.75, members=["p00", "p01"], exchange_s=0.25)
    peer.group(at=0.75, members=["p00", "p01"], outcome="busy")
    history = PeerHistory(tmp_path, "p00")
    history.read()
    computing, waiting, averaging = activities(history, UNIX_S + 0.5, width_s=0.375)
    assert computing == [(0.0, 0.25)]
    assert waiting == [(0.25, 0.125)]
    assert averaging == [(0.0, 0.25)]


def test_the_title_says_who_was_sooner_and_by_how_much(make_run):
    runs = [make_run("allreduce", 6.0), make_run("ad_psgd", 2.0)]
    title = curves_title(runs[0].scenario, runs)
    assert title == "ad_psgd reaches accuracy 0.5 after 2.0 s, 3.0 times sooner than allreduce"
    runs.reverse()
    assert "allreduce reaches accuracy 0.5 after 6.0 s, 3.0 times later" in curves_title(
        runs[0].scenario, runs
    )


def test_the_title_claims_nothing_when_a_target_was_not_reached(make_run):
    runs = [make_run("allreduce", None), make_run("ad_psgd", 2.0)]
    assert "times" not in curves_title(runs[0].scenario, runs)


def test_a_strip_says_how_the_time_was_spent(make_run):
    assert strip_title(make_run("ad_psgd", 1.0)) == (
        "ad_psgd: peers compute 75% of the time and wait 25%"
    )


def test_of_a_large_fleet_a_part_is_shown_with_the_slow_ones_in_it():
    pace = StepTiming(stragglers=(Straggler(factor=4, peers=(40,)),))
    assert shown_ranks(scenario(peers=64, pace=pace)) == [*range(MOST_PEERS - 1), 40]


def test_the_lost_are_shown_first_and_the_slow_leave_half_of_the_lines_to_the_others():
    pace = StepTiming(stragglers=(Straggler(factor=4, peers=tuple(range(0, 64, 2))),))
    lost = [rank == 63 for rank in range(64)]
    shown = shown_ranks(scenario(peers=64, pace=pace), most=12, lost=lost)
    assert shown == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 63]


def test_the_picture_is_drawn_for_one_algorithm_and_for_several(make_run, tmp_path):
    one, other = make_run("allreduce", None), make_run("ad_psgd", 2.0)
    for runs in ([one], [one, other]):
        path = tmp_path / f"{len(runs)}.png"
        plot_comparison(path, one.scenario, runs)
        assert path.read_bytes().startswith(b"\x89PNG")


def test_a_run_without_a_single_step_can_be_drawn(tmp_path):
    path = tmp_path / "empty.png"
    empty = Run(scenario(), "ad_psgd", tmp_path / "nowhere", FakeEvaluator())
    plot_comparison(path, empty.scenario, [empty])
    assert path.stat().st_size > 0


def test_nine_ways_have_nine_different_lines():
    assert len(set(LINES)) == len(LINES) == 9


@pytest.mark.parametrize(
    ("lengths_s", "scale"), [((3600, 140_000), "log"), ((60, 240), "linear"), ((), "linear")]
)
def test_time_is_logarithmic_where_one_run_takes_much_longer_than_another(lengths_s, scale):
    axes = Figure().add_subplot()
    left_s = scale_time(axes, [SimpleNamespace(wall_s=length) for length in lengths_s])
    assert axes.get_xscale() == scale
    assert left_s == axes.get_xlim()[0] == (180 if scale == "log" else 0)
