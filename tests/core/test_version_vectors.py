"""A vector names what a copy contains, whichever servers it came through."""

from p2ptrain.core.version_vectors import (
    MOST_HISTORIES,
    NO_VERSIONS,
    VersionVector,
    history_of,
)
from p2ptrain.ids import PeerId, Ticket

ONE, OTHER = 7, 8


def test_a_server_adds_to_its_own_history():
    known = VersionVector({ONE: 2}).next(OTHER).next(OTHER)
    assert known == VersionVector({ONE: 2, OTHER: 2})
    assert known.total == 4
    assert known.without(OTHER) == VersionVector({ONE: 2})
    assert known.including(OTHER, 1) == VersionVector({ONE: 2, OTHER: 1})
    assert known.including(OTHER, 0) == VersionVector({ONE: 2})


def test_of_very_many_histories_the_oldest_are_left_out():
    known = NO_VERSIONS
    for history in range(MOST_HISTORIES + 10):
        known = known.next(history).next(0)  # this one goes on all the time
    assert len(known.last) == MOST_HISTORIES
    assert known.last[0] > MOST_HISTORIES
    assert 1 not in known.last
    assert len(known.including(999, 1).last) == MOST_HISTORIES


def test_histories_of_two_lives_of_a_peer_are_two():
    tickets = [Ticket(PeerId("p1"), life, number) for life in (1, 2) for number in (1, 2)]
    assert len({history_of(ticket) for ticket in tickets}) == 4
