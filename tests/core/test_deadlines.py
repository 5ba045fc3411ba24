"""Deadlines follow what was seen, within what their owners allow."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.core.deadlines import DEVIATIONS, FEWEST, WINDOW, Deadline


def test_a_deadline_is_the_first_one_until_enough_was_seen():
    deadline = Deadline(floor_s=1.0, ceiling_s=60.0, first_s=10.0)
    for _ in range(FEWEST - 1):
        deadline.took(3.0)
        assert deadline.seconds == 10.0
    deadline.took(3.0)
    assert deadline.seconds == 6.0, "of durations that do not vary, twice as long"


def test_it_is_the_median_and_some_median_absolute_deviations():
    deadline = Deadline(floor_s=0.0, ceiling_s=1e9, first_s=1.0)
    for took in (8.0, 9.0, 10.0, 12.0, 14.0):
        deadline.took(took)
    assert deadline.seconds == 10.0 + DEVIATIONS * 2.0


def test_one_straggler_among_many_moves_nothing():
    deadline = Deadline(floor_s=0.0, ceiling_s=1e9, first_s=1.0)
    for _ in range(WINDOW - 1):
        deadline.took(1.0)
    deadline.took(100.0)
    assert deadline.seconds == 2.0


def test_a_link_that_becomes_ten_times_slower_misses_one_deadline_and_no_second():
    deadline = Deadline(floor_s=1.0, ceiling_s=600.0, first_s=60.0)
    for _ in range(WINDOW):
        deadline.took(3.0)
    misses = 0
    for _ in range(3 * WINDOW):
        if deadline.seconds < 30.0:
            misses += 1
            deadline.missed()
        else:
            deadline.took(30.0)
    assert misses == 1
    assert deadline.seconds == 60.0


def test_a_link_that_recovers_shrinks_the_deadline_again():
    deadline = Deadline(floor_s=1.0, ceiling_s=600.0, first_s=60.0)
    for took in (*[30.0] * WINDOW, *[3.0] * (WINDOW // 2 + 1)):
        deadline.took(took)
    assert deadline.seconds == 6.0


@given(st.lists(st.floats(0, 1e6) | st.none(), max_size=100))
def test_it_never_leaves_its_bounds(seen: list[float | None]):
    deadline = Deadline(floor_s=1.0, ceiling_s=60.0, first_s=10.0)
    for took in seen:
        if took is None:
            deadline.missed()
            assert deadline.seconds == pytest.approx(60.0)
        else:
            deadline.took(took)
        assert 1.0 <= deadline.seconds <= 60.0
