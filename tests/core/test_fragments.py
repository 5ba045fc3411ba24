"""How a model is cut into fragments: by how long groups took, each number in turn."""

from collections.abc import Callable

import pytest

from p2ptrain.core.fragments import ENOUGH, FIRST, PARTNERS, Fragments
from p2ptrain.core.shards import shard
from p2ptrain.ids import PeerId, Seconds

SIZE = 25_000_000

NEAR, FAR, OTHER = PeerId("near"), PeerId("far"), PeerId("other")

Link = Callable[[int], Seconds]


def groups(
    fragments: Fragments, link: Link, count: int, *, lasts_s: Seconds = 1.0, partner: PeerId = NEAR
) -> list[int]:
    """How many numbers each of so many groups moves, over a link that takes so long for so many."""
    moved = []
    for _ in range(count):
        fragment, parts = choose(fragments, lasts_s, partner)
        numbers = SIZE // parts
        averaged(fragments, fragment, parts, link(numbers), partner)
        moved.append(numbers)
    return moved


def choose(fragments: Fragments, lasts_s: Seconds = 1.0, partner: PeerId = NEAR) -> tuple[int, int]:
    """Which fragment, of how many, a pair with this partner averages next."""
    parts = fragments.count(partner, lasts_s)
    return fragments.next(parts), parts


def averaged(
    fragments: Fragments, fragment: int, parts: int, seconds: Seconds, partner: PeerId = NEAR
) -> None:
    """A pair has averaged this one in this time."""
    fragments.took(parts, seconds, [partner])
    fragments.averaged(fragment, parts)


def mbit(speed: float, latency_s: Seconds = 0.0) -> Link:
    return lambda numbers: latency_s + 32e-6 * numbers / speed


@pytest.mark.parametrize("speed", [5, 20, 100, 300])
def test_a_group_comes_to_last_about_as_long_as_asked_whatever_the_link(speed: float):
    moved = groups(Fragments(SIZE), mbit(speed, 0.04), 40)
    assert all(0.5 <= mbit(speed, 0.04)(numbers) <= 1.5 for numbers in moved[20:])


def test_the_first_one_is_small_since_nothing_is_known():
    assert FIRST / 1.5 < groups(Fragments(SIZE), mbit(5), 1)[0] < FIRST * 1.5


def test_numbers_that_stand_for_many_begin_as_the_real_model_would():
    assert choose(Fragments(SIZE // 2500, 2500)) == choose(Fragments(SIZE))
    assert choose(Fragments(3, 10**9)) == (0, 2), "each fragment has a number"


def test_a_fast_link_moves_the_whole_model():
    assert groups(Fragments(SIZE), mbit(10_000), 30)[-1] == SIZE


def test_a_link_that_becomes_ten_times_slower_or_faster_is_followed():
    fragments = Fragments(SIZE)
    before = groups(fragments, mbit(100), 30)[-1]
    slower = groups(fragments, mbit(10), 30)[-1]
    assert before / 16 <= slower <= before / 6
    assert groups(fragments, mbit(100), 30)[-1] == before


def test_each_partner_has_the_size_of_its_own_link():
    """The size was that of the fastest: between data centres groups lasted 23 s instead of one."""
    fragments = Fragments(SIZE)
    for _ in range(20):
        inside = groups(fragments, mbit(10_000), 1)[-1]
        outside = groups(fragments, mbit(100, 0.03), 1, partner=FAR)[-1]
    assert inside == SIZE
    assert 0.5 <= mbit(100, 0.03)(outside) <= 1.5


def test_a_fast_link_needs_few_groups_to_move_the_whole_model():
    """Each size was twice the one before: with every partner, that would be nine groups."""
    moved = groups(Fragments(SIZE), mbit(10_000, 0.002), 5)
    assert moved[-1] == SIZE


def test_in_a_group_of_several_a_slow_member_makes_no_fragments_of_others_smaller():
    fragments = Fragments(SIZE)
    groups(fragments, mbit(1000), 20)
    groups(fragments, mbit(10), 20, partner=FAR)
    before, slower = fragments.count(NEAR, 1.0), fragments.count(FAR, 1.0)
    assert slower > before
    for _ in range(20):
        fragments.took(slower, 1.2, [NEAR, FAR])
        fragments.averaged(fragments.next(slower), slower)
    assert fragments.count(NEAR, 1.0) == before
    assert fragments.count(FAR, 1.0) == slower


def test_one_group_beside_another_transfer_makes_fragments_no_smaller():
    fragments = Fragments(SIZE)
    before = groups(fragments, mbit(100), 20)[-1]
    groups(fragments, mbit(10), 1)
    assert groups(fragments, mbit(100), 1)[-1] == before


def test_what_the_partner_found_is_not_tried_again_from_the_start():
    """Groups that it began are as good a measurement as those that we did."""
    fragments = Fragments(SIZE)
    averaged(fragments, 0, 8, 1.0)
    assert fragments.count(NEAR, 1.0) == 8
    assert fragments.count(OTHER, 1.0) == Fragments(SIZE).count(OTHER, 1.0), "of it we know nothing"


def test_only_the_partners_of_the_last_groups_are_remembered():
    fragments = Fragments(SIZE)
    averaged(fragments, 0, 1, 0.1)
    groups(fragments, mbit(10_000), 1, partner=FAR)
    for number in range(PARTNERS - 1):
        averaged(fragments, 0, 1, 0.1, PeerId(f"p{number}"))
    assert fragments.count(NEAR, 1.0) == Fragments(SIZE).count(NEAR, 1.0)
    assert fragments.count(PeerId("p0"), 1.0) == 1


@pytest.mark.parametrize("size", [FIRST, SIZE])
def test_on_a_link_that_gets_slower_fragments_do_not_grow(size: int):
    """As beside a newcomer that loads a model: a half to a third is left, and it varies."""
    fragments, turns = Fragments(size), iter(range(1000))

    def left(numbers: int) -> Seconds:
        return mbit(20 * size / SIZE)(numbers) * (2.0, 3.0, 2.3, 2.7, 2.1)[next(turns) % 5]

    alone = [timed(fragments, mbit(20 * size / SIZE), size) for _ in range(60)][-1]
    assert max(timed(fragments, left, size) for _ in range(200)) <= alone


def timed(fragments: Fragments, link: Link, size: int) -> int:
    """How many numbers of so many a group moves over this link."""
    fragment, parts = choose(fragments)
    averaged(fragments, fragment, parts, link(size // parts))
    return size // parts


def test_a_round_is_over_when_each_number_was_in_a_group_whoever_chose_it():
    fragments = Fragments(FIRST * 8)
    for chosen in (0, 1, 1, 2, 3, 4, 5, 6):
        averaged(fragments, chosen, 8, 1.0)
    assert fragments.rounds == 0
    averaged(fragments, 7, 8, 1.0)
    assert fragments.rounds == 1
    averaged(fragments, 0, 1, 8.0)
    assert fragments.rounds == 2, "a whole model is one"


def test_fragments_do_not_shrink_where_messages_take_the_time():
    """A group of 0.3 s, whatever it moves, cannot be made to last a tenth of that."""
    moved = groups(Fragments(SIZE), mbit(10_000, 0.3), 60, lasts_s=0.03)
    assert moved[-1] >= FIRST // 8


def test_every_number_is_averaged_in_turn():
    fragments = Fragments(SIZE)
    groups(fragments, mbit(20), 30)
    seen = [choose(fragments)]
    averaged(fragments, *seen[0], 1.0)
    while (one := choose(fragments)) != seen[0]:
        seen.append(one)
        averaged(fragments, *one, 1.0)
    assert sorted(fragment for fragment, _ in seen) == list(range(seen[0][1]))


@pytest.mark.parametrize("changes", [(2, 1.0, 4.0), (3, 4.0, 1.0), (5, 0.2, 4.0)])
def test_none_is_skipped_when_their_number_changes(changes: tuple[int, float, float]):
    turns, before_s, after_s = changes
    fragments, covered = Fragments(FIRST * 8), [0] * (FIRST * 8 // 64)
    for turn in range(40):
        fragment, parts = choose(fragments)
        span = shard(len(covered), parts, fragment)
        for at in range(span.start, span.stop):
            covered[at] += 1
        seconds = before_s if turn < turns else after_s * 8 / parts
        averaged(fragments, fragment, parts, seconds)
        if parts > 1 and fragment == parts - 1:
            assert min(covered) >= 1


def test_a_group_that_came_to_nothing_is_tried_again_with_the_same_numbers():
    fragments = Fragments(SIZE)
    assert choose(fragments) == choose(fragments)


def test_groups_that_others_chose_count_for_the_speed():
    fragments = Fragments(SIZE)
    _, parts = choose(fragments)
    for _ in range(ENOUGH):
        averaged(fragments, 0, parts, 60.0)
    assert choose(fragments)[1] == 2 * parts


def test_what_another_peer_chose_is_not_due_again_before_the_rest():
    fragments = Fragments(FIRST * 8)
    for chosen in (0, 2, 5):
        averaged(fragments, chosen, 8, 1.0)
    assert [turn(fragments) for _ in range(8)] == [1, 3, 4, 6, 7, 0, 2, 5]


def test_numbers_keep_their_turn_where_partners_have_other_sizes():
    """An eighth with one partner, a half with another one: what is next waits longest."""
    fragments = Fragments(FIRST * 8)
    for _ in range(12):
        for parts in (8, 8, 2):
            waits_longest = fragments.next(8)
            fragment = fragments.next(parts)
            assert waits_longest // (8 // parts) == fragment
            fragments.averaged(fragment, parts)
    assert fragments.rounds >= 6, "two large ones are one round"


def test_beside_whole_models_inside_a_centre_fragments_between_two_have_their_turns():
    """It would be the first one's turn after each whole model."""
    fragments, between = Fragments(SIZE), []
    for _ in range(64):
        between.append(fragments.next(64))
        fragments.averaged(between[-1], 64)
        fragments.averaged(fragments.next(1), 1)
    assert between == list(range(64))


def test_of_a_fragment_the_oldest_number_counts():
    """Another peer has averaged a quarter of our first fragment, and all of the second one."""
    fragments = Fragments(FIRST * 2)
    averaged(fragments, 0, 8, 1.0)
    averaged(fragments, 1, 2, 1.0)
    assert [turn(fragments) for _ in range(3)] == [0, 1, 0]


def turn(fragments: Fragments) -> int:
    """Average what is next, in the time that was asked for."""
    fragment, parts = choose(fragments)
    averaged(fragments, fragment, parts, 1.0)
    return fragment


def test_a_model_of_few_numbers_has_no_more_fragments():
    fragments = Fragments(3)
    for _ in range(20):
        fragment, parts = choose(fragments, 1e-9)
        averaged(fragments, fragment, parts, 1.0 / parts)
        assert parts <= 3


@pytest.mark.parametrize("stands_for", [1, 100])
def test_a_part_of_a_model_that_has_no_numbers_is_one_fragment(stands_for: int):
    """As the second part of a model whose first tensor is nearly all of it."""
    fragments = Fragments(0, stands_for)
    for _ in range(3):
        assert choose(fragments, 1e-9) == (0, 1)
        averaged(fragments, 0, 1, 1.0)
