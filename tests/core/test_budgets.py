"""Budgets and fair rooms: what one source may ask for, and what it costs the others."""

import pytest

from p2ptrain.core.budgets import MOST_SOURCES, Budgets, FairRoom, Rate
from p2ptrain.core.redial import LONGEST_S, SHORTEST_S, STEADY_S, Redial
from p2ptrain.core.repeats import MOST_KEYS, PERIOD_S, Repeats

RATE = Rate(2.0, 10.0)


def test_a_source_may_save_up_a_burst_and_gains_its_rate():
    budgets = Budgets(RATE)
    assert [budgets.take("a", 0.0) for _ in range(11)] == [True] * 10 + [False]
    assert budgets.take("a", 0.5)
    assert not budgets.take("a", 0.5)
    assert budgets.take("a", 1000.0, 10.0)
    assert not budgets.take("a", 1000.0, 1.0), "it has saved up a burst, not a thousand seconds"


def test_one_source_spends_nothing_of_another():
    budgets = Budgets(RATE)
    assert not budgets.take("a", 0.0, 11.0)
    assert budgets.take("a", 0.0, 10.0)
    assert budgets.take("b", 0.0, 10.0)


def test_on_credit_a_source_waits_until_it_has_paid():
    budgets = Budgets(RATE)
    assert budgets.charge("a", 0.0, 10.0) == 0.0
    assert budgets.charge("a", 0.0, 4.0) == pytest.approx(2.0)
    assert budgets.owes("a", 1.0)
    assert budgets.charge("a", 2.0, 1.0) == pytest.approx(0.5)
    assert not budgets.owes("b", 0.0)


def test_what_was_worth_it_is_given_back_but_never_more_than_a_burst():
    budgets = Budgets(RATE)
    budgets.take("a", 0.0, 10.0)
    budgets.give_back("a", 3.0)
    assert budgets.take("a", 0.0, 3.0)
    budgets.give_back("a", 1000.0)
    assert not budgets.take("a", 0.0, 11.0)
    budgets.give_back("nobody we know")


def test_a_clock_that_goes_back_gives_nothing():
    budgets = Budgets(RATE)
    budgets.take("a", 100.0, 10.0)
    assert not budgets.take("a", 0.0, 1.0)
    assert not budgets.take("a", 100.0, 1.0)


def test_made_up_sources_cost_bounded_memory_and_forgive_no_debt_of_those_that_keep_asking():
    budgets: Budgets[int] = Budgets(RATE)
    for number in range(20 * MOST_SOURCES):
        budgets.charge(-1, 0.0, 1.0)
        budgets.charge(number, 0.0, 1.0)
    assert len(budgets) <= MOST_SOURCES
    assert budgets.owes(-1, 0.0)


def test_a_full_room_takes_from_the_source_that_has_most():
    room: FairRoom[int] = FairRoom()
    for number in range(8):
        assert room.enter("greedy", "x", number, 8) is None
    assert room.enter("modest", "y", 100, 8) == 0, "the oldest of the greedy one leaves"
    assert room.enter("greedy", "x", 101, 8) == 101, "it takes no place of others"
    assert len(room) == 8
    room.leave("greedy", "x", 0)
    room.leave("modest", "y", 100)
    assert len(room) == 7
    room.leave("modest", "y", 100)
    assert len(room) == 7, "leaving twice frees nothing"


def test_an_impostor_takes_the_places_of_its_own_connection_first():
    room: FairRoom[int] = FairRoom()
    for number in range(8):
        room.enter("p01", "an impostor", number, 8)
    assert room.enter("p01", "p01 itself", 100, 8) == 0
    assert room.enter("p02", "p02 itself", 101, 8) == 1


def test_sources_of_equal_size_do_not_take_from_each_other():
    room: FairRoom[str] = FairRoom()
    assert room.enter("a", "", "a", 2) is None
    assert room.enter("b", "", "b", 2) is None
    assert room.enter("c", "", "c", 2) == "c"


def test_a_thing_is_said_once_a_minute_with_a_count():
    repeats = Repeats()
    assert repeats.said("key", "refused", 0.0) == "refused"
    assert [repeats.said("key", "refused", at) for at in (0.0, 1.0, PERIOD_S - 1)] == [None] * 3
    assert repeats.said("other", "refused", 1.0) == "refused", "each source for itself"
    assert repeats.said("key", "refused", PERIOD_S) == "refused (and 3 times more before)"
    assert repeats.said("key", "refused", 2 * PERIOD_S) == "refused"


def test_made_up_keys_cost_bounded_memory():
    repeats = Repeats()
    for number in range(10 * MOST_KEYS):
        repeats.said(number, "text", 0.0)
    assert len(repeats._said) == MOST_KEYS


def test_an_address_that_is_gone_is_dialled_once_a_minute_at_last():
    now, redial, dials = 0.0, None, []
    while now < 3600.0:
        redial = Redial.after(redial, 0.0, now)
        assert SHORTEST_S - 1e-9 <= redial.again_at - now <= LONGEST_S + 1e-9
        now = redial.again_at
        dials.append(now)
    assert len(dials) < 100
    assert dials[-1] - dials[-2] == pytest.approx(LONGEST_S)


def test_a_link_that_was_cut_is_dialled_again_within_a_quarter_of_the_time():
    now, redial = 0.0, None
    while now < 40.0:
        redial = Redial.after(redial, 0.0, now)
        now = redial.again_at
    assert now <= 40.0 * 1.25 + SHORTEST_S


def test_a_steady_conversation_ends_a_row_of_failures_and_a_short_one_does_not():
    redial = Redial.after(Redial(0.0, 50.0), STEADY_S - 0.1, 100.0)
    assert redial == Redial(0.0, 125.0)
    assert Redial.after(redial, STEADY_S, 200.0) == Redial(200.0, 200.0 + SHORTEST_S)
