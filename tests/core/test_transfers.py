"""How long groups wait follows what was seen of groups like them."""

import pytest

from p2ptrain.core.deadlines import FEWEST
from p2ptrain.core.effects import What
from p2ptrain.core.transfers import ARRIVAL_S, STALL_S, Transfers
from p2ptrain.ids import Seconds


def seen(after_s: Seconds, size: int = 4) -> Transfers:
    """Enough groups of so many that lasted so long."""
    transfers = Transfers(60.0)
    for _ in range(FEWEST):
        transfers.stall(What.MODELS, size).took(after_s)
    return transfers


def test_a_group_is_given_twice_what_its_kind_takes():
    assert seen(10.0).stall(What.MODELS, 4).seconds == pytest.approx(20.0)


def test_nobody_is_hurried_more_than_a_busy_peer_can_bear():
    assert seen(0.01).stall(What.MODELS, 4).seconds == STALL_S


def test_of_groups_that_average_something_else_or_are_much_larger_nothing_is_known():
    transfers = seen(10.0)
    assert transfers.stall(What.MODELS, 7).seconds == pytest.approx(20.0), "about as large"
    assert transfers.stall(What.MODELS, 8).seconds == 60.0
    assert transfers.stall(What.GRADIENTS, 4).seconds == 60.0


def test_streams_may_come_later_where_they_were_seen_to():
    transfers = Transfers(60.0)
    assert transfers.arrivals.seconds == ARRIVAL_S
    for _ in range(FEWEST):
        transfers.arrivals.took(1.5)
    assert transfers.arrivals.seconds == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("silent_s", "missing_s", "forgets"),
    [(0.5, 0.0, False), (11.0, 0.0, True), (0.0, 1.5, True), (0.0, 0.5, False)],
)
def test_where_chunks_or_words_have_become_slow_nothing_that_was_seen_counts(
    silent_s: Seconds, missing_s: Seconds, forgets: bool
):
    transfers = seen(10.0)
    transfers.broke(What.MODELS, 4, silent_s, missing_s)
    waits = (transfers.stall(What.MODELS, 4).seconds, transfers.arrivals.seconds)
    assert waits == pytest.approx((60.0, 60.0) if forgets else (20.0, ARRIVAL_S))


def test_a_ceiling_below_the_floors_holds():
    transfers = Transfers(1.0)
    assert transfers.arrivals.seconds == transfers.stall(What.MODELS, 4).seconds == 1.0
