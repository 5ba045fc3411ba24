"""Who has a slow link reduces less, and where all are alike nobody does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.core.links import (
    ALIKE,
    LEAST_BYTES,
    MAX_MBIT,
    MOST_SMALL,
    REMEMBERED,
    WHOLE,
    LinkMeter,
    weights_of,
)

speeds = st.lists(st.integers(1, MAX_MBIT), min_size=3, max_size=40)


def time_of(links: list[int], weights: tuple[int, ...]) -> float:
    """How long the slowest member of the group takes, by the cost of a share."""
    count = len(links)
    parts = [weight / sum(weights) for weight in weights] or [1 / count] * count
    return max((1 + (count - 2) * part) / link for part, link in zip(parts, links, strict=True))


def test_one_of_four_ten_times_slower_owns_nothing_and_the_average_takes_two_thirds():
    links = [1000, 1000, 100, 1000]
    weights = weights_of(links)
    assert weights == (round(WHOLE / 3), round(WHOLE / 3), 0, round(WHOLE / 3))
    assert time_of(links, ()) / time_of(links, weights) == pytest.approx(1.5, rel=1e-5)


def test_a_link_between_the_fastest_and_the_slowest_owns_what_it_has_time_for():
    assert weights_of([1000, 500, 400]) == (round(WHOLE * 3 / 4), round(WHOLE / 4), 0)


def test_beside_a_very_slow_link_there_is_time_for_equal_shares_of_all_others():
    assert weights_of([1000, 500, 10, 250]) == (round(WHOLE / 3), round(WHOLE / 3), 0, WHOLE // 3)


def test_links_that_are_alike_have_equal_shares():
    assert weights_of([100, 110, 90, 105]) == ()
    assert weights_of([100, 100, 51]) == ()


def test_a_pair_and_a_group_that_nobody_knows_have_equal_shares():
    assert weights_of([1000, 10]) == ()
    assert weights_of([0, 0, 0]) == ()


def test_whose_link_is_not_known_counts_as_usual():
    known = weights_of([1000, 1000, 100, 1000])
    assert weights_of([1000, 0, 100, 1000]) == known


@given(links=speeds)
def test_weights_make_no_group_slower_and_never_all_zero(links: list[int]):
    weights = weights_of(links)
    if weights:
        assert max(links) >= ALIKE * min(links)
        assert len(weights) == len(links)
        assert all(0 <= weight <= WHOLE for weight in weights)
        assert abs(sum(weights) - WHOLE) <= len(links)
    assert time_of(links, weights) <= time_of(links, ()) * 1.0001


@given(links=speeds)
def test_no_shares_are_faster_than_these(links: list[int]):
    """If any member could own more, or less, in less time, a small shift of work would show it."""
    weights = weights_of(links)
    if not weights:
        return
    now = time_of(links, weights)
    step = WHOLE // 100
    for giver, weight in enumerate(weights):
        for taker in range(len(links)):
            if giver != taker and weight >= step:
                moved = list(weights)
                moved[giver] -= step
                moved[taker] += step
                assert time_of(links, tuple(moved)) >= now * 0.9999


@given(links=speeds, data=st.data())
def test_the_order_of_members_is_no_matter(links: list[int], data: st.DataObject):
    order = data.draw(st.permutations(range(len(links))))
    weights = weights_of(links)
    if weights:
        shuffled = weights_of([links[index] for index in order])
        assert all(
            abs(weights[index] - theirs) <= 1 for index, theirs in zip(order, shuffled, strict=True)
        )


def test_a_link_is_what_the_median_of_the_last_groups_says():
    meter = LinkMeter()
    assert meter.mbit == 0
    for _ in range(8):
        meter.note(125_000_000, 1.0)  # 1000 Mbit/s
    for _ in range(7):
        meter.note(12_500_000, 1.0)  # with a slow peer, now and then
    assert meter.mbit == 1000
    for _ in range(REMEMBERED):
        meter.note(12_500_000, 1.0)
    assert meter.mbit == 100


def test_a_speed_has_two_digits_so_that_it_does_not_change_with_every_group():
    meter = LinkMeter()
    meter.note(123_456_789, 1.0)
    assert meter.mbit == 980


def test_what_is_too_short_to_measure_is_not_measured():
    meter = LinkMeter()
    meter.note(LEAST_BYTES - 1, 1.0)
    meter.note(LEAST_BYTES, 0.0)
    assert meter.mbit == 0


def test_no_measurement_leaves_the_range_that_others_accept():
    meter = LinkMeter()
    meter.note(1 << 50, 1e-9)
    assert meter.mbit == MAX_MBIT
    slow = LinkMeter()
    slow.note(LEAST_BYTES, 1e9)
    assert slow.mbit == 1


@pytest.mark.parametrize("mbit", [1, 5])
def test_short_transfers_over_a_slow_link_are_measured_together(mbit: int):
    """Fragments that last a second there are smaller than what is measured alone."""
    meter, groups = LinkMeter(), 0
    while not meter.mbit:
        meter.note(mbit * 1_000_000 // 8, 1.0)
        groups += 1
        assert groups <= MOST_SMALL
    assert meter.mbit == mbit
    assert groups > 1


def test_small_groups_that_are_short_say_nothing_of_the_link_even_if_some_were_delayed():
    meter = LinkMeter()
    for group in range(100):
        meter.note(LEAST_BYTES // 4, 0.4 if group % 5 == 0 else 0.02)
    assert meter.mbit == 0


def test_what_is_so_small_that_latency_takes_the_time_says_nothing_of_the_link():
    meter = LinkMeter()
    for _ in range(2 * LEAST_BYTES // 4096):
        meter.note(4096, 0.5)
    assert meter.mbit == 0
