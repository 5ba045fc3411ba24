"""How what others train between averages is estimated."""

import pytest

from p2ptrain.core.growth import AS_LONG, Growth


def met(times: int, *, every_s: float = 10.0, others: int = 3, partners: int = 3) -> Growth:
    """So many averages; this peer makes 2 samples a second, each of three others 5."""
    growth = Growth()
    for number in range(times):
        now = number * every_s
        growth.averaged(round(17 * now), round(2 * now), others, now, partners=partners)
    return growth


def after(growth: Growth, since_s: float, *, last_s: float, others: int = 3) -> int:
    """What the peer takes for the swarm's samples so long after its last average."""
    own = round(2 * (last_s + since_s))
    stated = round(17 * last_s) + 4 * round(2 * since_s)  # as if all were as fast as this one
    growth.trained(2, progress=stated, own=own, others=others, now=last_s + since_s)
    return stated + growth.correction


def test_between_averages_the_others_go_on_at_the_pace_that_they_had():
    assert after(met(3), 5, last_s=20) == 17 * 25


def test_before_three_averages_of_all_the_others_are_taken_to_be_as_fast_as_this_peer():
    assert after(met(0), 5, last_s=0) == 4 * 10
    assert after(met(1), 5, last_s=0) == 4 * 10
    assert after(met(2), 5, last_s=10) == 17 * 10 + 4 * 10


def test_of_pairs_it_takes_twice_as_many_as_there_are_others():
    few, enough = met(6, partners=1), met(7, partners=1)
    assert after(few, 5, last_s=50) == 17 * 50 + 4 * 10
    assert after(enough, 5, last_s=60) == 17 * 65


def test_a_peer_that_has_ended_adds_nothing_to_what_it_knows():
    growth = met(3)
    after(growth, 5, last_s=20)
    growth.ended()
    assert growth.correction == 0


def test_an_average_ends_a_correction():
    growth = met(3)
    after(growth, 5, last_s=20)
    assert growth.correction > 0
    growth.averaged(progress=17 * 30, own=60, others=3, now=30, partners=3)
    assert growth.correction == 0


def test_when_averages_have_stopped_the_pace_holds_for_a_bounded_time():
    growth = met(3)
    bound_s = AS_LONG * 10
    after(growth, bound_s, last_s=20)
    corrected = growth.correction
    after(growth, bound_s + 5, last_s=20)
    assert growth.correction == corrected


def test_each_peer_that_has_gone_takes_its_pace_along():
    assert after(met(3), 5, last_s=20, others=1) == 17 * 20 + 10 + 5 * 5
    growth = met(3)
    assert after(growth, 5, last_s=20, others=0) == 17 * 20 + 4 * 10
    assert growth.correction == 0


def test_an_old_pace_is_forgotten():
    growth, now, progress = met(3), 20.0, 17 * 20
    for _ in range(10):
        now, progress = now + 10, progress + 10 * (2 + 3)  # the others make 1 a second each
        growth.averaged(progress, round(2 * now), 3, now, partners=3)
    growth.trained(2, progress=progress + 40, own=round(2 * (now + 5)), others=3, now=now + 5)
    assert progress + 40 + growth.correction == progress + 10 + 15


def test_where_others_make_a_few_steps_at_most_between_averages_nothing_is_corrected():
    frequent = met(5, every_s=10)
    frequent.trained(13, progress=900, own=90, others=3, now=45)  # the others make 50 samples each
    assert frequent.correction == 0
    frequent.trained(12, progress=900, own=90, others=3, now=45)
    assert frequent.correction != 0


@pytest.mark.parametrize("fallen", [0, 500])
def test_no_estimate_says_that_others_take_samples_back(fallen: int):
    growth = Growth()
    growth.averaged(progress=1000, own=100, others=3, now=0, partners=6)
    growth.averaged(progress=1000 - fallen, own=200, others=3, now=10, partners=6)
    growth.trained(2, progress=1400, own=300, others=3, now=15)
    assert growth.correction == 0
