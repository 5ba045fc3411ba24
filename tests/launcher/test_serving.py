"""Peers that train nothing, and serve: servers, and members without samples."""

import json

import pytest

from p2plab.backends.sim import SimBackend
from p2plab.conditions import FaultConfig
from p2plab.run import Run
from p2plab.scenario import Overlay, Scenario
from p2ptrain.compute.step_timing import StepTiming
from p2ptrain.compute.training_config import TrainingConfig
from p2ptrain.config import StopConfig
from tests.launcher.fakes import FakeEvaluator

SAMPLES = 1280


def served(algorithm="parameter_server", *, ranks=(0,), samples=SAMPLES, options=(), **changes):
    """Four peers, of which some only serve; steps of 0.1 s and 32 samples."""
    return Scenario(
        name="served",
        algorithms=(algorithm,),
        options={algorithm: dict(options)},
        overlays=(Overlay(ranks=tuple(ranks), peer={"trains": False}),),
        pace=StepTiming(min_step_ms=100),
        training=TrainingConfig(learning_rate=0.1, data="elastic"),
        stop=StopConfig(samples=samples),
        **changes,
    )


def ran(tmp_path, chosen):
    """Its first algorithm, simulated; and why each peer ended."""
    (name,) = chosen.algorithms
    run = Run(chosen, name, tmp_path / name, FakeEvaluator())
    run.execute(SimBackend(), lambda run: None)
    return run, [ended["why"] for ended in endings(tmp_path / name)]


def endings(folder):
    files = sorted(folder.glob("*.jsonl"))
    read = [json.loads(path.read_text().splitlines()[-1]) for path in files]
    return [record for record in read if record["kind"] == "ended"]


@pytest.mark.parametrize("sync", ["bsp", "ssp", "asp"])
def test_a_server_that_only_serves_has_no_samples_and_ends_with_the_others(tmp_path, sync):
    run, _ = ran(tmp_path, served(options={"sync": sync, "servers": 1}))
    assert [status.state for status in run.statuses] == ["ended"] * 4
    assert run.histories[0].samples == 0
    assert {one.samples for one in run.histories[1:]} <= {416, 448}
    model, steps = 4 * 17_226, len(run.histories[1].steps)
    for way in ("sent_bytes", "received_bytes"):  # by workers: each its update, and the answer
        _, *workers = (one[way] for one in endings(tmp_path / "parameter_server"))
        assert [moved / model / steps for moved in workers] == pytest.approx([1] * 3, rel=0.15)


def test_when_the_server_is_killed_one_that_also_only_serves_takes_over(tmp_path):
    kill = FaultConfig(kind="crash", peers=(0,), at_s=1.0)
    chosen = served(ranks=(0, 1), faults=(kill,), samples=4 * SAMPLES)
    run, _ = ran(tmp_path, chosen)
    assert [status.state for status in run.statuses] == ["lost", "ended", "ended", "ended"]
    spare, *workers = (one["sent_bytes"] for one in endings(tmp_path / "parameter_server"))
    assert spare > 1.5 * max(workers)


@pytest.mark.parametrize(
    "algorithm",
    ["allreduce", "dear", "powersgd", "topk", "ok_topk", "eager", "ad_psgd", "wagma", "diloco"],
)
def test_under_every_algorithm_a_peer_that_only_serves_is_in_no_ones_way(tmp_path, algorithm):
    run, why = ran(tmp_path, served(algorithm))
    assert [status.state for status in run.statuses] == ["ended"] * 4
    assert (run.histories[0].samples, run.samples >= SAMPLES) == (0, True)
    assert len(set(why) - {""}) == 1
    assert run.curve.points


def test_what_a_peer_that_only_serves_was_dealt_is_trained_by_the_others(tmp_path):
    ran(tmp_path, served(samples=8 * SAMPLES))
    counts = [one["data"] for one in endings(tmp_path / "parameter_server")]
    finished = [epoch for epoch in counts[1] if epoch[1] == 0]
    assert len(finished) >= 5
    assert [again for _, _, _, again, _ in finished[1:]] == [0] * len(finished[1:])
