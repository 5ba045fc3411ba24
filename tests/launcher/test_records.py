import json

import pytest

from p2plab.records import PeerHistory
from p2ptrain.runtime.metrics import JsonlMetrics
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


def test_the_longest_gap_is_that_of_the_number_that_is_averaged_least(peer, history):
    """Halves at 3 and 4, the whole at 6, the first half at 9: the second one waits until 20."""
    peer.ready(at=0.5)
    for at in range(1, 21):
        peer.step(at=float(at), number=at - 1)
    for at, fragment, fragments in ((3, 0, 2), (4, 1, 2), (6, 0, 1), (9, 0, 2)):
        peer.group(float(at), ["p00", "p01"], fragment=fragment, fragments=fragments)
    peer.group(12.0, ["p00", "p01"], outcome="lost")
    history.read()
    assert history.longest_gap_s() == 20 - 6


def test_a_peer_that_made_no_step_has_no_gap(history):
    assert history.longest_gap_s() is None


def test_samples_are_counted_up_to_a_moment(peer, history):
    peer.step(at=1.0, number=0, samples=32)
    peer.step(at=2.0, number=1, samples=16)
    history.read()
    assert history.samples == 48
    assert history.samples_until(UNIX_S + 0.9) == 0
    assert history.samples_until(UNIX_S + 1.0) == 32
    assert history.samples_until(UNIX_S + 9.0) == 48


def test_a_peer_was_there_from_its_first_step_to_its_last_word_in_each_of_its_lives(peer, history):
    peer.ready(1.0)
    peer.step(2.0, number=0)
    history.read()
    assert history.was_there(UNIX_S + 5.0), "as far as is known"
    peer.write("started", 6.0, unix_s=UNIX_S + 6.0, model_size=2)
    peer.ready(7.0)
    peer.end(9.0)
    history.read()
    moments = (0.5, 1.5, 2.5, 6.5, 8.0, 9.5)
    assert [history.was_there(UNIX_S + at) for at in moments] == [0, 1, 0, 0, 1, 0]


def test_a_lost_peer_was_there_until_its_last_record(peer, history):
    peer.ready(1.0)
    peer.step(at=1.5, number=0)
    history.read()
    history.close(lost=True)
    assert history.was_there(UNIX_S + 1.5)
    assert not history.was_there(UNIX_S + 1.6)


def test_a_file_that_was_replaced_when_it_was_full_is_read_to_its_end_first(tmp_path):
    clock = iter(number / 100 for number in range(10_000))
    metrics = JsonlMetrics(tmp_path / "p00.jsonl", lambda: next(clock), most_mb=0.01)
    metrics.record("started", unix_s=UNIX_S, peer="p00", model_size=2)
    metrics.record("ready", members=[])
    history = PeerHistory(tmp_path, "p00")
    fields = {"samples": 1, "loss": None, "compute_s": 0.1, "wait_s": 0.0}
    for number in range(300):
        metrics.record("step", step=number, **fields)
        if number % 7 == 0:
            history.read()
    metrics.close()
    history.read()
    assert (tmp_path / "p00.jsonl.1").exists()
    assert [step.number for step in history.steps] == list(range(300))
    assert [step.at for step in history.steps] == sorted(step.at for step in history.steps)
    assert history.damaged_lines == 0
    late = PeerHistory(tmp_path, "p00")
    late.read()
    assert late.is_cut_short
    assert late.steps[-1].number == 299
    assert late.was_there(late.steps[0].at)


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
