"""Peers that train nothing, and serve: servers, and members without samples."""

import json
from dataclasses import replace

import pytest

from p2plab.backends.sim import SimBackend
from p2plab.conditions import FaultConfig
from p2plab.run import Run
from p2plab.scenario import Overlay, Scenario
from p2ptrain.compute.step_timing import StepTiming
from p2ptrain.compute.training_config import TrainingConfig
from p2ptrain.config import StopConfig
from p2ptrain.errors import ConfigError
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
    ["allreduce", "dear", "powersgd", "topk", "ok_topk", "parameter_server"],
)
def test_in_step_a_peer_that_only_serves_is_in_no_ones_way(tmp_path, algorithm):
    run, why = ran(tmp_path, served(algorithm))
    assert [status.state for status in run.statuses] == ["ended"] * 4
    assert (run.histories[0].samples, run.samples >= SAMPLES) == (0, True)
    assert len(set(why)) == 1
    assert run.curve.points


def test_what_a_peer_that_only_serves_was_dealt_is_trained_by_the_others(tmp_path):
    ran(tmp_path, served(samples=8 * SAMPLES))
    counts = [one["data"] for one in endings(tmp_path / "parameter_server")]
    finished = [epoch for epoch in counts[1] if epoch[1] == 0]
    assert len(finished) >= 5
    assert [again for _, _, _, again, _ in finished[1:]] == [0] * len(finished[1:])


@pytest.mark.parametrize(
    ("algorithm", "ranks", "message"),
    [
        ("allreduce", range(4), "allreduce: trains = false for all 4 peers; let one train"),
        ("ad_psgd", (0,), "trains = false: ad_psgd averages models, and one that is not trained"),
        ("ddp", (0,), "ddp: trains = false is for algorithms of p2ptrain; set it in the"),
    ],
)
def test_a_run_in_which_no_one_would_train_is_refused(algorithm, ranks, message):
    with pytest.raises(ConfigError, match=message):
        served(algorithm, ranks=ranks).check_algorithms()


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_servers_that_are_here_first_wait_for_those_that_train(tmp_path, sync):
    late = FaultConfig(kind="join", peers=(2, 3), at_s=20.0)
    options = {"sync": sync, "servers": 2}
    chosen = served(ranks=(0, 1), options=options, faults=(late,), samples=4 * SAMPLES)
    run, _ = ran(tmp_path, chosen)
    assert [status.state for status in run.statuses] == ["ended"] * 4
    assert run.samples >= 0.93 * 4 * SAMPLES, (
        "a server that is done says twice a second what it knows"
    )
    waited = len(run.histories[0].steps) - 4 * SAMPLES / 64
    assert waited <= 5, "they do not step while they wait"


def test_a_server_waits_for_workers_that_crashed_and_come_back(tmp_path):
    crash = FaultConfig(kind="crash", peers=(1, 2, 3), at_s=1.0, for_s=20.0)
    run, why = ran(tmp_path, served(faults=(crash,), samples=4 * SAMPLES))
    assert [status.state for status in run.statuses] == ["ended"] * 4
    assert run.samples >= 4 * SAMPLES
    assert why[0] == why[1]


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_a_server_ends_when_the_workers_have_been_gone_for_a_minute(tmp_path, sync):
    crash = FaultConfig(kind="crash", peers=(1, 2, 3), at_s=1.0)
    run, _ = ran(tmp_path, served(options={"sync": sync}, faults=(crash,), samples=10**6))
    assert [status.state for status in run.statuses] == ["ended", "lost", "lost", "lost"]


def test_a_server_that_no_one_comes_to_ends_by_the_clock(tmp_path):
    """The workers are gone before their first step."""
    crash = FaultConfig(kind="crash", peers=(1, 2, 3), at_s=0.05)
    chosen = replace(served(options={"sync": "asp"}, faults=(crash,)), stop=StopConfig(seconds=20))
    run, _ = ran(tmp_path, chosen)
    assert [status.state for status in run.statuses] == ["ended", "lost", "lost", "lost"]
    assert endings(tmp_path / "parameter_server")[0]["t"] == pytest.approx(20, abs=8)
