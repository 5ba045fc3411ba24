import numpy as np
import pytest

from launcher.consensus import ConsensusCurve, CurvePoint, Target, mean_and_distance
from launcher.records import PeerHistory
from tests.launcher.fakes import FakeEvaluator, FakePeer


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


def test_a_moment_waits_for_every_peer_that_still_trains(experiment):
    start(experiment)
    first, second = experiment.peers
    first.step(at=2.0, number=0)
    assert experiment.advance() == [(0.0, 0.0)], "the second has written nothing after 0.25 s"
    second.step(at=0.7, number=0)
    assert experiment.advance() == [(0.0, 0.0), (0.5, 0.1)]


def test_each_peer_contributes_its_latest_model_at_or_before_the_moment(experiment):
    start(experiment)
    first, second = experiment.peers
    first.snapshot(0.4, [0.4, 1.0])
    first.snapshot(0.6, [0.9, 1.0])
    second.step(at=0.9, number=0)
    assert experiment.advance()[1] == (0.5, pytest.approx(0.3))


def test_a_lost_peer_holds_nothing_up_and_counts_until_its_last_record(experiment):
    start(experiment)
    first, second = experiment.peers
    first.step(at=1.2, number=0)
    second.step(at=0.6, number=0)
    experiment.read()
    experiment.histories[1].close(lost=True)
    assert experiment.advance() == [(0.0, 0.0), (0.5, 0.1), (1.0, 0.0)]


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
    first.snapshot(1.3, [0.8, 1.0])
    second.snapshot(1.2, [0.6, 1.0])
    for peer in experiment.peers:
        peer.end(1.4)
    assert experiment.advance() == [], "nobody trains: the last moment is for finish to find"
    experiment.curve.finish()
    points = [(point.wall_s, point.accuracy) for point in experiment.curve.points]
    assert [at for at, _ in points] == pytest.approx([0.0, 0.5, 1.0, 1.3])
    assert points[-1][1] == pytest.approx(0.7)


def test_samples_of_a_point_are_those_of_the_whole_swarm_by_then(experiment):
    start(experiment)
    first, second = experiment.peers
    first.step(at=0.3, number=0, samples=10)
    second.step(at=0.5, number=0, samples=5)
    second.step(at=0.6, number=1, samples=5)
    first.step(at=0.7, number=1, samples=10)
    experiment.advance()
    assert [point.samples for point in experiment.curve.points] == [0, 15]


def test_the_time_to_the_target_is_that_of_the_first_moment_that_meets_it(experiment):
    start(experiment)
    for at, accuracy in ((0.4, 0.4), (0.9, 0.6), (1.4, 0.3), (1.9, 0.9)):
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
