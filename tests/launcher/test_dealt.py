"""How often samples were trained, from the records of peers."""

from types import SimpleNamespace

import pytest

from p2plab.dealt import data_of


def history(trained, ledger=None, samples=None):
    ended = None if ledger is None else {"data": ledger}
    total = sum(stop - start for _, start, stop in trained) if samples is None else samples
    return SimpleNamespace(trained=trained, ended=ended, samples=total)


def test_counts_are_of_all_peers_and_finished_is_what_ledgers_say():
    dead = history([(0, 0, 6), (1, 0, 2)])
    ended = history([(0, 5, 10), (1, 2, 4)], [[0, 0, 9, 1, 11], [1, 6, 4, 0, 4]])
    found = data_of([dead, ended])
    assert found["finished"] == 1
    assert found["never"] == 0
    assert found["again"] == found["again_worst"] == pytest.approx(0.1)
    assert found["ledger_gap"] == 0
    assert found["uncounted"] == 0
    assert found["epochs"] == [[0, 0, 9, 1, 11], [1, 6, 4, 0, 4]]


def test_a_peer_that_has_trained_nothing_has_no_say_in_what_is_finished():
    serves = history([], [[0, 7, 3, 0, 3]])
    ended = history([(0, 0, 10)], [[0, 0, 10, 0, 10], [1, 10, 0, 0, 0]])
    assert data_of([serves, ended])["finished"] == 1


def test_a_ledger_that_is_wrong_and_samples_in_no_epoch_show():
    ended = history([(0, 0, 9)], [[0, 0, 10, 0, 10]], samples=12)
    found = data_of([ended])
    assert found["never"] == pytest.approx(0.1)
    assert found["ledger_gap"] == pytest.approx(0.1)
    assert found["uncounted"] == 3


def test_a_run_whose_data_are_not_dealt_has_no_such_figures():
    assert data_of([history([]), history([], [])]) is None
