from itertools import pairwise
from unittest.mock import Mock

import numpy as np
import pytest

from p2plab.consensus import ConsensusCurve, CurvePoint, Target, mean_and_distance
from p2plab.records import PeerHistory
from tests.launcher.fakes import UNIX_S, FakeEvaluator, FakePeer


class Experiment:
    """Two peers whose models are numbers, and the curve of their consensus."""

    def __init__(self, folder, target):
        self.peers = [FakePeer(folder, "p00", offset=10.0), FakePeer(folder, "p01", offset=-3.0)]
        self.histories = [PeerHistory(folder, name) for name in ("p00", "p01")]
        self.curve = ConsensusCurve(self.histories, FakeEvaluator(), 0.5, target)

    def read(self):
        for history in self.histories:
            history.read()

    def advance(self):
        self.read()
        self.curve.advance(most=100)
        return [(point.wall_s, round(point.accuracy, 4)) for point in self.curve.points]


@pytest.fixture
def experiment(tmp_path):
    return Experiment(tmp_path, Target(accuracy=0.5))


def start(experiment):
    first, second = experiment.peers
    first.ready(0.0)
    second.ready(0.25)
    first.snapshot(0.0, [0.0, 1.0])
    second.snapshot(0.25, [0.2, 1.0])


def test_mean_and_distance_of_two_models_by_hand():
    mean, distance = mean_and_distance([np.float32([0, 0]), np.float32([6, 8])])
    np.testing.assert_array_equal(mean, [3, 4])
    assert distance == 5
    assert mean.dtype == np.float32


def test_equal_models_are_no_distance_apart():
    assert mean_and_distance([np.float32([0.1, 0.7])] * 3)[1] == pytest.approx(0, abs=1e-15)


def test_nothing_is_evaluated_before_everyone_is_ready(experiment):
    experiment.peers[0].ready(0.0)
    experiment.peers[0].snapshot(5.0, [0.0, 1.0])
    assert experiment.advance() == []
    assert experiment.curve.started_at is None


def test_a_tick_waits_for_every_peer_that_still_trains(experiment):
    start(experiment)
    first, second = experiment.peers
    first.snapshot(0.5, [0.4, 1.0])
    first.snapshot(1.0, [0.4, 1.0])
    second.step(at=0.9, number=0)
    assert experiment.advance() == [(0.25, 0.1)], "the second has written nothing after 0.25 s"
    second.snapshot(0.6, [0.2, 1.0])
    assert experiment.advance() == [(0.25, 0.1), (pytest.approx(0.6), 0.3)]


def test_a_tick_that_one_peer_passed_over_is_no_point(experiment):
    start(experiment)
    first, second = experiment.peers
    for at in (0.5, 1.0):
        first.snapshot(at, [0.4, 1.0])
    second.snapshot(1.0, [0.6, 1.0])
    assert experiment.advance() == [(0.25, 0.1), (1.0, 0.5)]


def test_a_peer_that_stands_still_is_left_out_after_a_while_and_comes_back(experiment):
    start(experiment)
    first, second = experiment.peers
    for tick in range(1, 11):
        first.snapshot(tick / 2, [0.4, 1.0])
    second.snapshot(5.0, [0.6, 1.0])
    points = experiment.advance()
    assert [at for at, _ in points] == [0.25, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0]
    assert [accuracy for _, accuracy in points[-2:]] == [0.4, 0.5]


def test_the_longer_a_run_lasts_the_rarer_are_the_points_of_its_curve(experiment):
    """A thousand periods: at first all of them, at last every tenth."""
    start(experiment)
    for tick in range(1, 1001):
        for peer in experiment.peers:
            peer.snapshot(tick / 2, [0.4, 1.0])
    experiment.read()
    experiment.curve.advance(most=None)
    at = [point.wall_s for point in experiment.curve.points]
    assert at[:100] == [0.25, *(tick / 2 for tick in range(1, 100))]
    late = list(pairwise(at))[100:]
    assert late[-1] == (492.5, 497.5)
    assert all(after - before <= 0.02 * after for before, after in late)
    assert len(at) < 350


def test_where_steps_take_many_periods_each_mean_is_evaluated_once(experiment):
    start(experiment)
    scored = []
    evaluator = experiment.curve._evaluator
    experiment.curve._evaluator = Mock(
        score=lambda mean_M: scored.append(1) or evaluator.score(mean_M)
    )
    for tick in range(1, 21):
        for peer in experiment.peers:
            peer.snapshot(tick / 2, [0.4 + tick // 10, 1.0])
    assert len(experiment.advance()) == 21
    assert len(scored) == 4, "the first one, and one for each of three models"


def test_a_model_is_in_no_mean_of_a_time_at_which_its_peer_was_dead(experiment):
    """The second dies, and starts again nine seconds later with another's model."""
    start(experiment)
    first, second = experiment.peers
    for tick in range(1, 21):
        first.snapshot(tick / 2, [0.4, 1.0])
    second.snapshot(0.5, [0.2, 1.0])
    second.step(at=0.7, number=0)
    second.write("started", 9.2, unix_s=UNIX_S + 9.2, model_size=2, peer="p01")
    second.ready(9.4)
    second.snapshot(9.5, [0.6, 1.0])
    second.snapshot(10.0, [0.6, 1.0])
    points = dict(experiment.advance())
    assert points[0.5] == 0.3
    assert {points[tick / 2] for tick in range(2, 19)} == {0.4}
    assert points[9.5] == points[10.0] == 0.5


def test_nothing_waits_for_a_peer_that_was_killed_until_it_is_back(experiment):
    start(experiment)
    first, second = experiment.peers
    second.step(at=0.4, number=0)
    first.snapshot(0.5, [0.4, 1.0])
    first.snapshot(1.0, [0.4, 1.0])
    experiment.read()
    experiment.histories[1].note_death()
    assert experiment.advance() == [(0.25, 0.1), (0.5, 0.4), (1.0, 0.4)]
    second.write("started", 1.1, unix_s=UNIX_S + 1.1, model_size=2, peer="p01")
    second.ready(1.2)
    first.snapshot(1.5, [0.4, 1.0])
    assert len(experiment.advance()) == 3, "it trains again, and has not written yet"
    second.snapshot(1.5, [0.6, 1.0])
    assert experiment.advance()[3] == (1.5, 0.5)


def test_a_model_of_an_earlier_process_is_not_in_the_final_one(experiment):
    """The second is killed, and asked to end before its next process is ready."""
    start(experiment)
    first, second = experiment.peers
    second.snapshot(0.9, [1.0, 1.0])
    second.write("started", 2.0, unix_s=UNIX_S + 2.0, model_size=2, peer="p01")
    first.snapshot(2.8, [0.6, 1.0])
    first.end(2.8)
    experiment.read()
    experiment.histories[1].close(lost=False)
    experiment.curve.finish()
    np.testing.assert_allclose(experiment.curve.final_model, [0.6, 1.0])


def test_a_lost_peer_holds_nothing_up_and_counts_until_its_last_record(experiment):
    start(experiment)
    first, second = experiment.peers
    for at in (0.5, 1.0, 1.5):
        first.snapshot(at, [0.0, 1.0])
    second.snapshot(0.5, [0.2, 1.0])
    second.step(at=0.6, number=0)
    experiment.read()
    experiment.histories[1].close(lost=True)
    assert experiment.advance() == [(0.25, 0.1), (0.5, 0.1), (1.0, 0.0), (1.5, 0.0)]


def test_peers_in_step_are_compared_after_the_same_step_whenever_they_wrote(experiment):
    first, second = experiment.peers
    for peer in (first, second):
        peer.ready(0.0)
        peer.snapshot(0.0, [0.0, 0.0], step=0)
    first.snapshot(0.5, [0.5, 0.0], step=4)
    second.snapshot(0.5, [0.25, 0.0], step=2)
    second.snapshot(0.6, [0.5, 0.0], step=4)
    first.snapshot(1.1, [1.0, 0.0], step=8)
    second.snapshot(1.0, [0.75, 0.0], step=6)
    for peer in (first, second):
        peer.end(1.2)
    experiment.read()
    experiment.curve.finish()
    distances = [point.consensus_distance for point in experiment.curve.points]
    assert distances == pytest.approx([0.0] * len(distances))
    np.testing.assert_allclose(experiment.curve.final_model, [1.0, 0.0])


def test_who_left_long_ago_is_not_in_the_final_model(experiment):
    start(experiment)
    first, second = experiment.peers
    second.snapshot(0.9, [1.0, 1.0])
    second.end(0.9)
    first.snapshot(9.0, [0.6, 1.0])
    first.end(9.0)
    experiment.read()
    experiment.histories[1].has_left = True
    experiment.curve.finish()
    np.testing.assert_allclose(experiment.curve.final_model, [0.6, 1.0])


def test_a_row_that_was_overwritten_is_not_read(experiment):
    start(experiment)
    first, _ = experiment.peers
    first.write("snapshot", 0.5, row=1, step=0, tick=1, frees=0)
    experiment.read()
    assert [row.row for row in experiment.histories[0].snapshots] == [1]


def test_the_final_model_is_the_mean_of_the_last_models_of_those_who_survived(experiment):
    start(experiment)
    first, second = experiment.peers
    second.snapshot(0.9, [1.0, 1.0])
    first.snapshot(0.8, [0.6, 1.0])
    first.end(0.8)
    experiment.read()
    experiment.histories[1].close(lost=True)
    experiment.curve.finish()
    assert experiment.curve.points[-1].accuracy == pytest.approx(0.6)
    np.testing.assert_allclose(experiment.curve.final_model, [0.6, 1.0])


def test_the_last_point_is_at_the_last_snapshot(experiment):
    start(experiment)
    first, second = experiment.peers
    for peer in experiment.peers:
        peer.snapshot(0.5, [0.5, 1.0])
    first.snapshot(1.3, [0.8, 1.0])
    second.snapshot(1.2, [0.6, 1.0])
    for peer in experiment.peers:
        peer.end(1.4)
    assert experiment.advance() == [], "nobody trains: the last moment is for finish to find"
    experiment.curve.finish()
    points = [(point.wall_s, point.accuracy) for point in experiment.curve.points]
    assert [at for at, _ in points] == pytest.approx([0.25, 0.5, 1.3])
    assert points[-1][1] == pytest.approx(0.7)


def test_samples_of_a_point_are_those_of_the_whole_swarm_by_then(experiment):
    start(experiment)
    first, second = experiment.peers
    first.step(at=0.3, number=0, samples=10)
    second.step(at=0.5, number=0, samples=5)
    second.step(at=0.6, number=1, samples=5)
    first.step(at=0.7, number=1, samples=10)
    for peer in experiment.peers:
        peer.snapshot(0.5, [0.0, 1.0])
    experiment.advance()
    assert [point.samples for point in experiment.curve.points] == [0, 15]


def test_the_time_to_the_target_is_that_of_the_first_moment_that_meets_it(experiment):
    start(experiment)
    for at, accuracy in ((0.5, 0.4), (1.0, 0.6), (1.5, 0.3), (2.0, 0.9)):
        for peer in experiment.peers:
            peer.snapshot(at, [accuracy, 1.0])
    experiment.advance()
    assert experiment.curve.time_to_target_s == 1.0


def test_a_target_that_nobody_set_is_never_reached():
    assert not Target().is_reached(CurvePoint(1.0, 1, loss=0.0, accuracy=1.0, consensus_distance=0))


@pytest.mark.parametrize(
    ("accuracy", "loss", "reached"),
    [(0.95, 0.1, True), (0.94, 0.1, False), (0.95, 0.3, False), (None, 0.1, False)],
)
def test_with_two_targets_both_must_hold(accuracy, loss, reached):
    point = CurvePoint(1.0, 1, loss=loss, accuracy=accuracy, consensus_distance=0)
    assert Target(accuracy=0.95, loss=0.2).is_reached(point) is reached


def test_nobody_waits_for_a_peer_that_is_to_come_later(tmp_path):
    here, late = PeerHistory(tmp_path, "p00"), PeerHistory(tmp_path, "p01")
    here.ready_at = 5.0
    curve = ConsensusCurve([here, late], FakeEvaluator(), 0.5, Target())
    assert curve.started_at is None
    late.is_late = True
    assert curve.started_at == 5.0
