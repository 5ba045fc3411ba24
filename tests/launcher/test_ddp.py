"""The external baseline: real ranks over Gloo, two at a time; they need a few seconds to import
torch."""

import os
import signal
from pathlib import Path

import pytest
import torch.distributed as dist

from p2plab.backends.base import LaunchError
from p2plab.backends.process import ProcessBackend
from p2plab.consensus import Target
from p2plab.ddp import End
from p2plab.evaluate import TaskEvaluator
from p2plab.run import Run
from p2ptrain.compute.step_timing import StepTiming, Straggler
from p2ptrain.compute.training_config import TrainingConfig
from p2ptrain.config import StopConfig
from p2ptrain.errors import ConfigError
from tests.launcher.fakes import scenario

BATCH = 32


def of_ddp(**changes):
    """Two ranks, the second three times slower."""
    defaults = {
        "algorithms": ("ddp",),
        "pace": StepTiming(min_step_ms=20, stragglers=(Straggler(factor=3, peers=(1,)),)),
        "training": TrainingConfig(batch_size=BATCH, learning_rate=0.1),
    }
    return scenario(**{**defaults, **changes})


def execute(folder: Path, watch=lambda run, fleet: None, **changes) -> Run:
    """Run to the end; `watch` may lay hands on the fleet."""
    chosen = of_ddp(**changes)
    chosen.check_algorithms()
    backend = KeepingBackend()
    run = Run(chosen, "ddp", folder, TaskEvaluator(chosen.task, chosen.seed))
    run.execute(backend, lambda run: watch(run, backend.fleet))
    return run


class KeepingBackend(ProcessBackend):
    """Remembers its fleet."""

    def start(self, scenario, configs):
        self.fleet = super().start(scenario, configs)
        return self.fleet


@pytest.mark.sockets
def test_ranks_make_the_same_steps_wait_for_the_slowest_and_end_with_equal_models(tmp_path):
    run = execute(tmp_path, stop=StopConfig(samples=50 * BATCH))
    summary = run.save("process")
    fast, slow = summary["peers"]
    assert [peer["state"] for peer in (fast, slow)] == ["ended", "ended"]
    assert fast["steps"] == slow["steps"] == 25
    assert summary["samples"] == 50 * BATCH
    assert fast["wait_s"] > 25 * 0.02, "of 60 ms it computes 20"
    assert slow["wait_s"] < fast["wait_s"] / 2
    assert slow["compute_s"] > 25 * 0.055
    assert fast["groups_formed"] == 25
    assert fast["sent_bytes"] == 25 * 17_226 * 4, "of two ranks each sends half, twice"
    assert summary["final"]["consensus_distance"] == 0.0
    assert summary["final"]["loss"] < run.curve.points[0].loss
    members = {attempt.members for history in run.histories for attempt in history.attempts}
    assert members == {("p00", "p01")}


@pytest.mark.sockets
def test_a_lost_rank_ends_the_run_with_a_sentence(tmp_path):
    def kill_one(run, fleet):
        if len(run.histories[0].steps) > 3 and fleet.poll()[1].state == "running":
            os.kill(fleet.pids()[1], signal.SIGKILL)

    with pytest.raises(LaunchError) as caught:
        execute(tmp_path, kill_one, stop=StopConfig(seconds=1e6))
    assert "ddp: all 2 peers were lost; p00 ended with exit code 1: a rank was lost after" in str(
        caught.value
    )
    assert "DistributedDataParallel cannot go on without it" in str(caught.value)


@pytest.mark.sockets
def test_ranks_that_are_told_to_leave_end_well(tmp_path):
    run = execute(
        tmp_path, stop=StopConfig(samples=10_000_000), target=Target(accuracy=0.01, stops=True)
    )
    assert [status.state for status in run.statuses] == ["ended", "ended"]
    assert run.histories[0].ended["why"] == "asked to end by SIGTERM"


def test_the_last_step_follows_from_the_samples_of_one_step():
    end = End(StopConfig(samples=1000), samples_per_step=300)
    assert not end.is_reached(3)
    assert end.is_reached(4)
    assert end.why == "the swarm has trained 1200 samples"


def test_an_outsider_has_no_options_and_a_wrong_name_is_still_refused():
    with pytest.raises(ConfigError, match=r"'ddp' has no options, but \[options.ddp\] sets"):
        of_ddp(options={"ddp": {"bucket_mb": 1}}).check_algorithms()
    with pytest.raises(ConfigError, match="unknown algorithm 'dpd'"):
        of_ddp(algorithms=("dpd",)).check_algorithms()


@pytest.fixture
def _alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_alone")
def test_that_seconds_are_over_is_agreed_on_during_one_step_and_ends_the_run_at_the_next():
    end = End(StopConfig(seconds=1e-9), samples_per_step=1)
    assert not end.is_reached(0), "the question is out, nobody waits for the answer"
    assert end.is_reached(1)
    assert end.why == "1e-09 s are over"
