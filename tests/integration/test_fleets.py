"""Fleets of real processes: they train and end, whoever is killed meanwhile."""

import json
import os
import re
import signal
from pathlib import Path

import pytest

from p2plab.backends.base import Fleet
from p2plab.backends.process import ProcessBackend
from p2plab.conditions import FaultConfig
from p2plab.evaluate import TaskEvaluator
from p2plab.harness.claims import Json
from p2plab.run import Run
from p2plab.scenario import Scenario
from p2ptrain.compute.step_timing import StepTiming
from p2ptrain.runtime.settings import StopConfig

pytestmark = [pytest.mark.sockets, pytest.mark.slow, pytest.mark.timeout(400)]

LAST_STEP_BEFORE_THE_KILL = 5
INTERNALS = re.compile(r"grpc_|ipv[46]:|StatusCode|debug_error|RpcError|\bRPC\b|recvmsg|Errno")
"""Words of gRPC and of the kernel, which an event of a run must not have."""


class Killer(ProcessBackend):
    """A backend that remembers its fleet, and kills one peer when a run has come far enough."""

    def __init__(self, victim: int | None) -> None:
        super().__init__()
        self.victim = victim
        self.fleet: Fleet | None = None

    def start(self, scenario, configs) -> Fleet:
        self.fleet = super().start(scenario, configs)
        return self.fleet

    def watch(self, run: Run) -> None:
        reached = all(len(h.steps) > LAST_STEP_BEFORE_THE_KILL for h in run.histories)
        if self.victim is not None and reached:
            os.kill(self.fleet.pids()[self.victim], signal.SIGKILL)
            self.victim = None


def train(folder: Path, algorithm: str, peers: int, victim: int | None = None) -> tuple[Run, Json]:
    """One short run of digits; the summary of what the fleet did."""
    scenario = Scenario(
        name="test",
        peers=peers,
        algorithms=(algorithm,),
        pace=StepTiming(min_step_ms=20),
        stop=StopConfig(samples=32 * 25 * peers),
        limit_s=240,
    )
    run = Run(scenario, algorithm, folder, TaskEvaluator("digits", 0))
    killer = Killer(victim)
    run.execute(killer, killer.watch)
    assert killer.victim is None, "the run ended before the kill"
    return run, run.save("process")


def records_of(folder: Path, name: str, kind: str) -> list[Json]:
    lines = (folder / f"{name}.jsonl").read_text().splitlines()
    return [record for line in lines if (record := json.loads(line))["kind"] == kind]


@pytest.mark.parametrize(("peers", "algorithm"), [(2, "ad_psgd"), (8, "allreduce")])
def test_peers_train_and_end(tmp_path, algorithm, peers):
    run, summary = train(tmp_path, algorithm, peers)
    assert [status.state for status in run.statuses] == ["ended"] * peers
    assert summary["samples"] >= 32 * 24 * peers, "a swarm ends within a batch of each peer"
    assert summary["final"]["loss"] < 2.3, "no better than guessing among ten digits"
    if algorithm == "allreduce":
        assert summary["final"]["consensus_distance"] == 0, "synchronous peers differ"


@pytest.mark.parametrize(
    ("victim", "algorithm"), [(0, "allreduce"), (2, "allreduce"), (1, "ad_psgd")]
)
def test_whoever_of_three_is_killed_the_others_go_on_and_finish(tmp_path, algorithm, victim):
    run, summary = train(tmp_path, algorithm, peers=3, victim=victim)
    expected = ["ended"] * 3
    expected[victim] = "lost"
    assert [status.state for status in run.statuses] == expected
    # A batch of each, and one more: an average that a death cut in two may count at one side only.
    assert summary["samples"] >= 32 * 23 * 3
    survivors = [f"p0{rank}" for rank in range(3) if rank != victim]
    for name in survivors:
        told = [r for r in records_of(tmp_path, name, "member") if r["member"] == f"p0{victim}"]
        assert "dead" in [record["state"] for record in told]
        assert not INTERNALS.search((tmp_path / f"{name}.jsonl").read_text())
    if algorithm == "allreduce":
        assert summary["final"]["consensus_distance"] == 0, "the survivors differ"


def test_the_last_of_two_finishes_alone(tmp_path):
    run, summary = train(tmp_path, "allreduce", peers=2, victim=0)
    assert [status.state for status in run.statuses] == ["lost", "ended"]
    assert summary["samples"] >= 32 * 25 * 2


def test_who_is_cut_off_trains_alone_and_meets_the_others_again(tmp_path):
    scenario = Scenario(
        name="test",
        peers=3,
        algorithms=("ad_psgd",),
        pace=StepTiming(min_step_ms=100),
        stop=StopConfig(seconds=15.0),
        faults=(
            FaultConfig(kind="throttle", peers=(0,), at_s=1.0, for_s=1.0, mbit_s=50.0),
            FaultConfig(kind="partition", peers=(2,), at_s=3.0, for_s=4.0),
            FaultConfig(kind="crash", peers=(1,), at_s=8.0, for_s=0.5),
        ),
        limit_s=240,
    )
    run = Run(scenario, "ad_psgd", tmp_path, TaskEvaluator("digits", 0))
    run.execute(ProcessBackend(), lambda run: None)
    assert [status.state for status in run.statuses] == ["ended"] * 3, run.notes
    (cut,) = [instance for instance in run.plan.instances if instance.fault.kind == "partition"]
    attempts = [(one.at, one.outcome) for one in run.histories[2].attempts]
    # Whatever was on its way when the cable was cut may still have been answered before.
    apart = [o for at, o in attempts if cut.began + 0.5 < at < cut.ended]
    after = [o for at, o in attempts if at > cut.ended]
    assert "done" not in apart
    assert "done" in after
    steps = [step.at for step in run.histories[2].steps]
    assert sum(cut.began < at < cut.ended for at in steps) > 20, "it went on by itself"
