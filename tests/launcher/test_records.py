import json

import numpy as np
import pytest

from launcher.records import PeerHistory
from tests.launcher.fakes import UNIX_S, FakePeer


@pytest.fixture
def peer(tmp_path):
    return FakePeer(tmp_path, "p00", offset=500.0)


@pytest.fixture
def history(tmp_path):
    return PeerHistory(tmp_path, "p00")


def test_a_peer_that_has_written_nothing_yet_has_an_empty_history(history):
    history.read()
    assert history.last_at is None
    assert history.samples == 0


def test_a_half_written_line_waits_for_its_end(peer, history):
    record = json.dumps({"kind": "ready", "t": 501.0, "members": []})
    peer.append(record[:9])
    history.read()
    assert history.ready_at is None
    peer.append(record[9:])
    history.read()
    assert history.ready_at is None, "without its newline it may still be half a line"
    peer.append("\n")
    history.read()
    assert history.ready_at == UNIX_S + 1
    assert history.damaged_lines == 0


def test_every_moment_is_on_the_wall_clock_wherever_the_peers_own_clock_starts(peer, history):
    peer.step(at=2.0, number=0)
    peer.snapshot(at=2.5, model=[1, 2])
    history.read()
    assert history.steps[0].at == UNIX_S + 2
    assert history.snapshots[0].at == UNIX_S + 2.5


def test_reading_twice_takes_no_record_in_twice(peer, history):
    peer.step(at=1.0, number=0)
    history.read()
    history.read()
    peer.step(at=2.0, number=1)
    history.read()
    assert [step.number for step in history.steps] == [0, 1]


def test_a_damaged_line_is_counted_and_the_rest_is_read(peer, history):
    peer.append('{"kind": "step", "t": \n')
    peer.append('{"kind": "step", "t": 501}\n')
    peer.append("[]\n")
    peer.step(at=2.0, number=0)
    history.read()
    assert len(history.steps) == 1
    assert history.damaged_lines == 3


def test_records_of_a_kind_that_we_do_not_know_are_passed_over(peer, history):
    peer.write("weather", at=1.0, text="sunny")
    history.read()
    assert history.damaged_lines == 0


def test_samples_are_counted_up_to_a_moment(peer, history):
    peer.step(at=1.0, number=0, samples=32)
    peer.step(at=2.0, number=1, samples=16)
    history.read()
    assert history.samples == 48
    assert history.samples_until(UNIX_S + 0.9) == 0
    assert history.samples_until(UNIX_S + 1.0) == 32
    assert history.samples_until(UNIX_S + 9.0) == 48


def test_the_row_of_a_moment_is_the_latest_at_or_before_it(peer, history):
    for at in (1.0, 2.0):
        peer.snapshot(at, [at, 0])
    history.read()
    assert history.row_at(UNIX_S + 0.5) is None
    assert history.row_at(UNIX_S + 1.9) == 0
    assert history.row_at(UNIX_S + 2.0) == 1
    np.testing.assert_array_equal(history.model(1), [2, 0])


def test_a_lost_peer_has_no_row_after_its_last_record(peer, history):
    peer.snapshot(1.0, [1, 0])
    peer.step(at=1.5, number=0)
    history.read()
    history.close(lost=True)
    assert history.row_at(UNIX_S + 1.5) == 0
    assert history.row_at(UNIX_S + 1.6) is None


def test_a_row_that_was_not_written_to_its_end_is_no_model(peer, history):
    peer.snapshot(1.0, [1, 2])
    history.read()
    peer.rows_path.write_bytes(peer.rows_path.read_bytes()[:-1])
    assert history.model(0) is None
    peer.rows_path.unlink()
    assert history.model(0) is None


def test_the_totals_are_what_the_peer_said_at_its_end(peer, history):
    peer.step(at=1.0, number=0)
    peer.end(at=2.0, steps=7)
    history.read()
    assert history.totals()["steps"] == 7
    assert history.totals()["groups_failed"] == {"busy": 2}
    assert "why" not in history.totals()


def test_the_totals_of_a_killed_peer_are_added_up_from_its_records(peer, history):
    peer.step(at=1.0, number=0, compute_s=0.3, wait_s=0.1)
    peer.step(at=2.0, number=1, compute_s=0.3, wait_s=0.1)
    peer.group(at=1.1, members=["p00", "p01"], staleness_steps=3)
    peer.group(
        at=1.2, members=["p00", "p01"], outcome="busy", exchange_s=None, staleness_steps=None
    )
    history.read()
    totals = history.totals()
    assert totals["steps"] == 2
    assert totals["samples"] == 64
    assert totals["compute_s"] == pytest.approx(0.6)
    assert totals["wait_s"] == pytest.approx(0.2)
    assert totals["sent_bytes"] == 200
    assert totals["groups_formed"] == 1
    assert totals["groups_failed"] == {"busy": 1}
    assert totals["staleness_p50"] == 3
