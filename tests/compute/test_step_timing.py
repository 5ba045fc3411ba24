"""The pace: how long steps last, and who is slow when."""

from math import inf, nan
from statistics import mean, median, stdev

import pytest

from p2ptrain.compute.step_timing import StepTiming, Straggler
from p2ptrain.errors import ConfigError


def slow_ranks(straggler, step, peers=8, seed=1):
    return [rank for rank in range(peers) if straggler.is_slow(rank, step, peers, seed)]


def test_without_stragglers_a_step_lasts_as_long_as_it_took():
    assert StepTiming().step_s(0.3, 0, 0, 4, 0) == 0.3


def test_a_step_lasts_at_least_the_minimum():
    pace = StepTiming(min_step_ms=200)
    assert [pace.step_s(taken, 0, 0, 4, 0) for taken in (0.1, 0.5)] == [0.2, 0.5]


def test_a_factor_stretches_the_whole_step_of_the_named_ranks_only():
    pace = StepTiming(min_step_ms=200, stragglers=(Straggler(factor=4, peers=(2,)),))
    assert [pace.step_s(0.1, rank, 0, 4, 0) for rank in range(4)] == [0.2, 0.2, 0.8, 0.2]


def test_milliseconds_are_added_after_the_factor():
    pace = StepTiming(stragglers=(Straggler(factor=2, extra_ms=320, peers=(0,)),))
    assert pace.step_s(0.1, 0, 0, 1, 0) == pytest.approx(0.52)


def test_stragglers_add_up():
    pace = StepTiming(
        stragglers=(Straggler(factor=2, peers=(0,)), Straggler(factor=3, peers=(0, 1)))
    )
    assert [pace.step_s(1.0, rank, 0, 3, 0) for rank in range(3)] == [6, 3, 1]


@pytest.mark.parametrize("count", [1, 2, 8])
def test_exactly_k_peers_are_slow_at_every_step(count):
    straggler = Straggler(extra_ms=1, random_peers=count)
    assert {len(slow_ranks(straggler, step)) for step in range(50)} == {count}


def test_all_peers_and_all_algorithms_draw_the_same_delays():
    once = [slow_ranks(Straggler(factor=2, random_peers=2), step) for step in range(20)]
    again = [slow_ranks(Straggler(factor=9, random_peers=2), step) for step in range(20)]
    assert once == again
    assert once[:3] == [[2, 5], [0, 2], [1, 2]]  # on every machine


def test_every_peer_gets_its_turn_and_seeds_differ():
    straggler = Straggler(factor=2, random_peers=1)
    assert {rank for step in range(100) for rank in slow_ranks(straggler, step)} == set(range(8))
    seeds = [[slow_ranks(straggler, step, seed=seed) for step in range(20)] for seed in (1, 2)]
    assert seeds[0] != seeds[1]


def test_a_log_normal_pace_has_the_mean_and_the_deviation_it_was_given():
    pace = StepTiming(mean_ms=100, deviation_ms=50)
    drawn = [pace.step_s(0.0, rank, step, 8, 0) for rank in range(8) for step in range(2500)]
    assert mean(drawn) == pytest.approx(0.1, rel=0.01)
    assert stdev(drawn) == pytest.approx(0.05, rel=0.03)
    assert min(drawn) > 0
    assert median(drawn) < 0.1, "most steps are shorter than the mean, a few much longer"


def test_what_chance_makes_of_a_step_follows_from_seed_rank_and_step_alone():
    pace = StepTiming(mean_ms=100, deviation_ms=50)
    assert pace.step_s(0.0, 3, 7, 8, 1) == pace.step_s(0.05, 3, 7, 8, 1)
    assert pace.step_s(0.0, 0, 0, 8, 1) == pytest.approx(0.0717, abs=1e-4)  # on every machine
    assert len({pace.step_s(0.0, r, s, 8, k) for r in (0, 1) for s in (0, 1) for k in (0, 1)}) == 8


def test_a_pace_without_deviation_is_the_mean():
    assert StepTiming(mean_ms=80).step_s(0.0, 0, 0, 1, 0) == pytest.approx(0.08)


def test_a_trace_is_gone_through_again_and_again_from_a_place_of_each_peers_own():
    pace = StepTiming(trace_ms=(10, 20, 30, 40))
    assert [pace.step_s(0.0, 0, step, 2, 0) for step in range(5)] == [0.01, 0.02, 0.03, 0.04, 0.01]
    assert [pace.step_s(0.0, 1, step, 2, 0) for step in range(3)] == [0.03, 0.04, 0.01]


def test_a_trace_may_come_from_a_file(tmp_path):
    file = tmp_path / "steps.txt"
    file.write_text("12.5\n\n250\n")
    pace = StepTiming(trace_file=str(file))
    pace.check(1)
    assert [pace.step_s(0.0, 0, step, 1, 0) for step in range(3)] == [0.0125, 0.25, 0.0125]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("12\nfast\n", "must hold one number to a line"),
        ("12\n-1\n", "has a duration of -1.0 ms"),
        (None, "cannot read the pace's trace_file"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_before_training(tmp_path, content, message):
    file = tmp_path / "steps.txt"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        StepTiming(trace_file=str(file)).check(1)


def test_stragglers_stretch_whatever_the_price_is():
    slow = (Straggler(factor=4, peers=(1,)),)
    assert StepTiming(trace_ms=(10,), stragglers=slow).step_s(0.0, 1, 0, 2, 0) == 0.04
    drawn, stretched = (
        StepTiming(mean_ms=50, deviation_ms=9),
        StepTiming(mean_ms=50, deviation_ms=9, stragglers=slow),
    )
    assert stretched.step_s(0.0, 1, 5, 2, 0) == 4 * drawn.step_s(0.0, 1, 5, 2, 0)


def test_a_larger_batch_costs_in_proportion_and_a_delay_stays_what_it_is():
    pace = StepTiming(min_step_ms=100, stragglers=(Straggler(factor=2, extra_ms=50, peers=(1,)),))
    assert pace.step_s(0.0, 0, 0, 2, 0, share=1.5) == pytest.approx(0.15)
    assert pace.step_s(0.0, 1, 0, 2, 0, share=1.5) == pytest.approx(0.35)
    assert pace.step_s(0.4, 0, 0, 2, 0, share=0.5) == 0.4, "what it really took, at least"


def test_a_price_is_what_a_step_costs_where_computing_costs_nothing():
    assert not StepTiming(stragglers=(Straggler(extra_ms=5, peers=(0,)),)).is_priced
    assert StepTiming(min_step_ms=1).is_priced
    assert StepTiming(mean_ms=1).is_priced
    assert StepTiming(trace_ms=(1,)).is_priced


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"mean_ms": -1}, "mean_ms = -1"),
        ({"deviation_ms": inf}, "deviation_ms = inf"),
        ({"deviation_ms": 5}, "needs mean_ms above 0"),
        ({"mean_ms": 5, "trace_ms": (5,)}, "mean_ms and trace_ms: give at most one"),
        ({"trace_ms": (5, 0)}, "trace_ms has a duration of 0 ms"),
    ],
)
def test_a_price_that_is_none_is_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        StepTiming(**wrong)


@pytest.mark.parametrize("value", [0, -1, nan, inf, -inf])
def test_a_factor_that_is_no_number_above_0_is_refused(value):
    with pytest.raises(ConfigError, match=f"factor = {value}"):
        Straggler(factor=value, peers=(0,))


@pytest.mark.parametrize("value", [-1, nan, inf])
def test_milliseconds_that_are_no_duration_are_refused(value):
    with pytest.raises(ConfigError, match=f"extra_ms = {value}"):
        Straggler(extra_ms=value, peers=(0,))
    with pytest.raises(ConfigError, match=f"min_step_ms = {value}"):
        StepTiming(min_step_ms=value)


@pytest.mark.parametrize("who", [{}, {"peers": (1,), "random_peers": 1}])
def test_a_straggler_is_either_named_or_drawn(who):
    with pytest.raises(ConfigError, match="give exactly one"):
        Straggler(factor=2, **who)


def test_fewer_than_none_cannot_be_drawn():
    with pytest.raises(ConfigError, match="random_peers = -1"):
        Straggler(random_peers=-1)


@pytest.mark.parametrize("who", [{"peers": (4,)}, {"peers": (-1,)}, {"random_peers": 5}])
def test_stragglers_that_do_not_exist_are_refused(who):
    pace = StepTiming(stragglers=(Straggler(factor=2, **who),))
    with pytest.raises(ConfigError, match="4 peers"):
        pace.check(4)


def test_stragglers_that_exist_are_accepted():
    StepTiming(stragglers=(Straggler(peers=(0, 3)), Straggler(random_peers=4))).check(4)
