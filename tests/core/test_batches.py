"""The samples of one step, divided by speed: all members find the same division."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.core.batches import WORTH_A_CHANGE, divide, next_batches

WEIGHTS = st.lists(st.integers(1, 10**12), min_size=1, max_size=40)


def test_batches_are_as_the_speeds():
    assert next_batches(60, [15] * 4, [1, 2, 4, 8]) == [4, 8, 16, 32]


def test_what_a_division_leaves_over_goes_to_the_largest_remainders():
    assert divide(64, [8, 4, 2, 1]) == [34, 17, 9, 4]
    assert divide(10, [1, 1, 1]) == [4, 3, 3]


def test_a_very_slow_peer_has_one_sample_and_the_others_share_the_rest():
    assert divide(64, [1_000, 1_000, 1]) == [32, 31, 1]
    assert divide(3, [1_000, 10, 1]) == [1, 1, 1]


@given(WEIGHTS, st.integers(0, 10**6))
def test_no_sample_is_lost_and_no_peer_is_without(weights: list[int], more: int):
    total = len(weights) + more
    batches = divide(total, weights)
    assert sum(batches) == total
    assert min(batches) >= 1


@given(WEIGHTS, st.integers(0, 10**6))
def test_a_faster_peer_never_has_less_and_who_has_more_than_one_sample_has_its_share(
    weights: list[int], more: int
):
    total = len(weights) + more
    by_weight = sorted(zip(weights, divide(total, weights), strict=True))
    batches = [samples for _, samples in by_weight]
    assert batches == sorted(batches)
    for weight, samples in by_weight:
        assert samples == 1 or samples < Fraction(total * weight, sum(weights)) + 1


def test_until_someone_has_stated_a_speed_batches_are_equal():
    assert next_batches(96, [32, 32, 5], [0, 0, 0]) == [32, 32, 32]


def test_a_newcomer_without_a_speed_has_the_usual_batch_and_the_others_keep_theirs():
    assert next_batches(60, [4, 8, 16, 32], [1, 2, 4, 8]) == [4, 8, 16, 32]
    assert next_batches(75, [4, 8, 16, 32, 15], [1, 2, 4, 8, 0]) == [4, 8, 16, 32, 15]


def test_when_a_member_leaves_the_others_have_the_usual_samples_for_each_of_them():
    assert next_batches(45, [4, 8, 16], [1, 2, 4]) == divide(45, [1, 2, 4]) == [6, 13, 26]


def test_speeds_that_differ_by_a_little_change_nothing():
    assert next_batches(64, [32, 32], [100, 109]) == [32, 32]
    assert next_batches(64, [32, 32], [100, 150]) == [26, 38]


def test_a_division_is_stable_under_noise_below_its_threshold():
    batches = next_batches(128, [32] * 4, [100, 200, 400, 800])
    for noise in ([103, 196, 408, 790], [97, 205, 390, 812], [101, 207, 395, 780]):
        assert next_batches(128, batches, noise) == batches


def test_a_last_batch_that_is_short_leaves_the_slowest_step_within_the_threshold():
    batches = next_batches(64, [32, 3], [100, 100])
    assert sum(batches) == 64
    assert max(batches) * (1 - WORTH_A_CHANGE) <= 32


@pytest.mark.parametrize("fixed", [0, 5, 40, 1_000])
def test_with_a_fixed_part_of_each_step_batches_settle_without_swinging(fixed: int):
    per_sample, batches, slowest = [1, 2, 4, 8], [32] * 4, []
    histories = []
    for _ in range(30):
        lasts = [fixed + c * b for c, b in zip(per_sample, batches, strict=True)]
        slowest.append(max(lasts))
        histories.append(list(batches))
        speeds = [10**6 * b // s for b, s in zip(batches, lasts, strict=True)]
        batches = next_batches(128, batches, speeds)
    assert slowest == sorted(slowest, reverse=True)
    assert histories[-1] == histories[-10]
    first, *_, last = histories
    for before, between, after in zip(first, histories[len(histories) // 2], last, strict=True):
        assert min(before, after) <= between <= max(before, after)
