"""What chaos draws, and what it calls growth."""

import os
from dataclasses import replace
from unittest.mock import create_autospec

import pytest

from p2plab.backends.peer_process import RealFleet
from p2plab.backends.process import ProcessBackend
from p2plab.bench import chaos
from p2plab.bench.chaos import MOST_AWAY, PEERS, QUIET_S, Watcher, draw_faults, growth_of
from p2plab.bench.chaos_picture import Usage, picture, training_times
from p2plab.conditions import FaultConfig
from p2plab.consensus import CurvePoint
from p2plab.faults import FaultInstance
from p2plab.run import Run
from p2ptrain.config import StopConfig
from tests.launcher.conftest import draw
from tests.launcher.fakes import UNIX_S, FakeEvaluator, FakePeer, scenario


@pytest.mark.parametrize("seed", range(10))
def test_so_many_things_happen_and_most_peers_are_there(seed):
    drawn = draw_faults(seed, 50, 600.0)
    assert len(drawn) == 50
    assert drawn == draw_faults(seed, 50, 600.0)
    for fault in drawn:
        assert 0 < fault.at_s < 600.0 - QUIET_S
        away = {
            rank
            for other in drawn
            if other.at_s <= fault.at_s < other.at_s + other.for_s
            for rank in other.peers
        }
        assert len(away) <= MOST_AWAY < PEERS / 2


def life(*, memory_per_s: float = 0.0, seconds: int = 100):
    return [Usage(float(at), round(1e8 + at * memory_per_s), 40 + at % 2) for at in range(seconds)]


def test_a_life_that_grows_is_found():
    memory, descriptors = growth_of([life(), life(memory_per_s=1e6)])
    assert memory == pytest.approx(1 + 70 / 124, abs=0.03)
    assert descriptors == pytest.approx(0.0, abs=1.0)


def test_a_short_life_says_nothing():
    assert growth_of([life(memory_per_s=1e7, seconds=30)]) == (1.0, 0.0)


@pytest.fixture
def run(tmp_path):
    """Two peers, of which the first was away from the third second to the sixth."""
    for name, ends in (("p00", (1.0, 2.0, 7.0, 8.0)), ("p01", range(1, 9))):
        peer = FakePeer(tmp_path, name)
        peer.ready(0.0)
        for number, at in enumerate(ends):
            peer.step(at=at, number=number, compute_s=0.9, wait_s=0.1)
    one = Run(scenario(), "ad_psgd", tmp_path, FakeEvaluator())
    for history in one.histories:
        history.read()
    fault = FaultConfig(kind="crash", peers=(0,), at_s=3.0, for_s=2.0)
    one.plan.instances = [
        FaultInstance(fault, (0,), began=UNIX_S + 3.0, ended=UNIX_S + 5.0),
        FaultInstance(fault, (0,)),
    ]
    one.curve.points += [CurvePoint(at, int(at), 1.0 / at, 0.5, 0.1) for at in (1.0, 8.0)]
    return one


def test_only_what_is_used_while_the_swarm_trains_counts(run, monkeypatch):
    run.scenario = replace(run.scenario, stop=StopConfig(seconds=60.0))
    fleet = create_autospec(RealFleet, instance=True)
    fleet.pids.return_value = [os.getpid()]
    backend = create_autospec(ProcessBackend, instance=True)
    backend.start.return_value = fleet
    watcher = Watcher(backend)
    watcher.start(run.scenario, [])
    for at in (-5.0, 0.0, 0.5, 1.5, 59.0, 60.0, 70.0):
        monkeypatch.setattr(chaos.time, "time", lambda at=at: UNIX_S + at)
        watcher.look(run)
    assert [usage.at - UNIX_S for usage in watcher.lives[os.getpid()]] == [0.0, 1.5, 59.0]


def test_who_was_away_did_not_train_meanwhile(run):
    spans = [training_times(history) for history in run.histories]
    first, second = ([(b - UNIX_S, e - UNIX_S) for b, e in one] for one in spans)
    assert first == [(0.0, 2.0), (6.0, 8.0)]
    assert second == [(0.0, 8.0)]


def test_the_picture_is_drawn_also_of_a_run_that_nothing_befell(run, tmp_path):
    for lives in ([life(), life(memory_per_s=1e6, seconds=3)], []):
        draw(picture(run, run, lives), tmp_path)
        run.plan.instances = []
