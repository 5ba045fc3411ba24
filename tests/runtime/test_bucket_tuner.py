"""How many buckets travel together: a search that all members follow alike."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from p2ptrain.core.contribution import MODEL
from p2ptrain.runtime.bucket_tuner import RESTS, TRIED, BucketTuner

COUNT = 64


def train(tuner: BucketTuner, steps: int, step_s: Callable[[int], float]) -> list[int]:
    """So many steps by this tuner's own wish; returns what it wished for in each."""
    wishes = []
    for _ in range(steps):
        wishes.append(tuner.wish)
        tuner.saw(tuner.wish, step_s(tuner.wish), was_ours=True)
    return wishes


@pytest.mark.parametrize("best", [1, 2, 4, 8, 16, 32, 64])
def test_it_finds_the_size_with_the_shortest_steps_and_stays_there(best: int):
    tuner = BucketTuner(COUNT)
    wishes = train(tuner, 10 * TRIED, lambda n: 1 + 0.1 * abs(best.bit_length() - n.bit_length()))
    assert wishes[0] == 4
    assert wishes[-1] == best
    assert wishes[-1] == wishes[-2 * TRIED]


def test_where_size_does_not_matter_it_stays_as_it_is():
    assert train(BucketTuner(COUNT), 10 * TRIED, lambda _: 0.1)[-1] == 4


def test_one_slow_step_in_a_row_changes_nothing():
    tuner, step = BucketTuner(COUNT), iter(range(1000))
    train(tuner, 10 * TRIED, lambda _: 5.0 if next(step) % TRIED == 3 else 0.1)
    assert tuner.wish == 4


def test_it_is_tried_again_when_steps_become_much_longer():
    tuner = BucketTuner(COUNT)
    train(tuner, 10 * TRIED, lambda n: 1 + 0.1 * n)
    assert tuner.wish == 1
    train(tuner, 12 * TRIED, lambda n: 5 / n**0.5)
    assert tuner.wish == 64


def test_it_is_tried_again_after_a_long_time():
    tuner = BucketTuner(COUNT)
    train(tuner, 5 * TRIED, lambda _: 1.0)
    assert {4} < set(train(tuner, RESTS + 5 * TRIED, lambda _: 1.0))


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_few_buckets_are_never_asked_for_in_larger_numbers(count: int):
    tuner = BucketTuner(count)
    wishes = train(tuner, 20 * TRIED, lambda n: 1 / n)
    assert set(wishes) <= set(range(1, count + 1))
    assert wishes[-1] == count


def test_all_members_do_as_the_first_one_says():
    one, other = BucketTuner(COUNT), BucketTuner(COUNT)
    stated = [replace(MODEL, together=8), replace(MODEL, together=2)]
    assert one.agreed(stated) == other.agreed(stated) == 8


@pytest.mark.parametrize(("stated", "agreed"), [(0, 1), (10**6, COUNT)])
def test_a_wish_that_cannot_be_is_bounded(stated: int, agreed: int):
    assert BucketTuner(COUNT).agreed([replace(MODEL, together=stated)]) == agreed


def test_a_member_that_becomes_the_first_goes_on_where_the_former_one_was():
    tuner = BucketTuner(COUNT)
    for _ in range(20):
        tuner.saw(16, 0.1, was_ours=False)
    assert tuner.wish == 16
    assert train(tuner, 10 * TRIED, lambda _: 0.1)[-1] == 16
