"""`stop.samples` under every algorithm: where a swarm ends, priced and in virtual time."""

import os
from pathlib import Path

import pytest

from p2plab.backends import load_backend
from p2plab.run import Run
from p2plab.scenario import Scenario
from p2ptrain.averaging.base import known_algorithms
from p2ptrain.compute.step_timing import StepTiming, Straggler
from p2ptrain.compute.training_config import TrainingConfig
from p2ptrain.config import StopConfig

BATCH = 8


def trained(algorithm: str, peers: int, steps: int, folder: Path) -> tuple[int, int]:
    """What a swarm trained that was to end after `steps` of each peer, and what it was to."""
    samples = steps * peers * BATCH
    slow = Straggler(peers=(peers - 1,), factor=4)
    one = Scenario(
        name="stop",
        peers=peers,
        algorithms=(algorithm,),
        gradients=False,
        training=TrainingConfig(batch_size=BATCH),
        pace=StepTiming(min_step_ms=60, stragglers=(slow,)),
        stop=StopConfig(samples=samples),
    )
    run = Run(one, algorithm, folder)
    run.execute(load_backend("sim"), lambda run: None)
    return run.samples, samples


def most_beyond(samples: int, peers: int) -> int:
    """2 %, or one batch of each peer where that is more."""
    return max(samples // 50, peers * BATCH)


@pytest.mark.parametrize("algorithm", known_algorithms())
@pytest.mark.parametrize(
    ("peers", "steps"),
    [(4, 60), (12, 6)],  # many peers: the batches of all in one step are more than 2 %
)
def test_a_swarm_stops_at_its_samples(algorithm, peers, steps, tmp_path):
    done, samples = trained(algorithm, peers, steps, tmp_path)
    assert abs(done - samples) <= most_beyond(samples, peers)


@pytest.mark.parametrize("algorithm", known_algorithms())
@pytest.mark.skipif("P2PTRAIN_THOUSAND" not in os.environ, reason="minutes: set P2PTRAIN_THOUSAND")
def test_a_swarm_of_64_stops_within_two_percent_under_any_algorithm(algorithm, tmp_path):
    done, samples = trained(algorithm, 64, 100, tmp_path)
    assert done == pytest.approx(samples, rel=0.02)


@pytest.mark.parametrize(("algorithm", "steps"), [("ad_psgd", 6), ("wagma", 6), ("sgp", 50)])
def test_a_swarm_of_64_stops_at_its_samples(algorithm, steps, tmp_path):
    done, samples = trained(algorithm, 64, steps, tmp_path)
    assert abs(done - samples) <= most_beyond(samples, 64)


@pytest.mark.skipif("P2PTRAIN_THOUSAND" not in os.environ, reason="minutes: set P2PTRAIN_THOUSAND")
def test_a_thousand_peers_stop_at_their_samples(tmp_path):
    done, samples = trained("ad_psgd", 1024, 12, tmp_path)
    assert abs(done - samples) <= most_beyond(samples, 1024)
