"""The backend `sim`: scenarios in virtual time, by the command that people type.

What runs inside a world is tested where it lives; here it is what comes out of one.
"""

import json
import os
import re
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from p2plab.backends.sim import SimBackend
from p2plab.backends.sim_fleet import SLICE_S, SimFleet
from p2plab.conditions import DeviceConfig, FaultConfig, LinkConfig, MachinesConfig
from p2plab.faults import FaultPlan
from p2plab.run import Run
from p2ptrain.compute.step_timing import StepTiming, Straggler
from p2ptrain.compute.training_config import TrainingConfig
from p2ptrain.config import StopConfig
from p2ptrain.errors import ConfigError
from p2ptrain.sim.compute import STANDS_FOR
from tests.launcher.fakes import FakeEvaluator, scenario

pytestmark = pytest.mark.usefixtures("own_signals")

ROOT = Path(__file__).parents[2]

SCENARIO = """
name = "small"
text = "Three peers, one of them three times slower"
peers = 3
seed = 5
stop = { samples = 3_200 }
training = { learning_rate = 0.1 }
target = { accuracy = 0.5 }

[pace]
min_step_ms = 100

[[pace.stragglers]]
peers = [2]
factor = 3

[[claims]]
text = "gossip is faster"
metric = "samples_per_s"
of = "ad_psgd"
over = "allreduce"
at_least = 2.0

[[claims]]
text = "and learns"
metric = "final.accuracy"
of = "ad_psgd"
at_least = 0.5
"""


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(SCENARIO)
    return path


def priced(**changes):
    """A scenario without gradients, which takes no time."""
    defaults = {"gradients": False, "pace": StepTiming(min_step_ms=100), "algorithms": ("ad_psgd",)}
    return scenario(**{**defaults, "peers": 3, "stop": StopConfig(seconds=2.0), **changes})


def fleet_of(folder, chosen, algorithm="ad_psgd"):
    folder.mkdir(exist_ok=True)
    return SimFleet(chosen, chosen.configs(algorithm, folder))


def lived(fleet, until_s=60.0):
    """Let the world go on until all have ended."""
    while any(status.state == "running" for status in fleet.poll()) and fleet.now() < until_s:
        fleet.let_pass(None)
    fleet.stop(0.0)
    return fleet


def records(folder, name, kind):
    lines = (folder / f"{name}.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


# --- what a person gets ---------------------------------------------------------------------------


def test_a_scenario_gives_the_same_files_in_virtual_time(p2plab, small, tmp_path):
    code, out, err = p2plab("run", str(small), "--backend", "sim", "--check")
    assert (code, err) == (0, "")
    folder = tmp_path / "runs" / "small"
    for name in ("comparison.json", "comparison.png", "report.html", "scenario.toml"):
        assert (folder / name).stat().st_size
    summary = json.loads((folder / "ad_psgd" / "summary.json").read_text())
    assert (summary["backend"], summary["seed"]) == ("sim", 5)
    assert len(summary["trace_hash"]) == 64
    assert summary["wall_s"] == pytest.approx(4.4, abs=0.2), "3,200 samples at 7 x 32 in 300 ms"
    assert 0 < summary["time_to_target_s"] <= summary["wall_s"]
    assert (folder / "ad_psgd" / "consensus.safetensors").exists()
    assert len(records(folder / "ad_psgd", "p00", "step")) == summary["peers"][0]["steps"]
    assert "of virtual time (" in out
    report = (folder / "report.html").read_text()
    assert "3 simulated peers" in report
    assert summary["trace_hash"][:16] in report
    assert "--backend sim" in report


def test_without_gradients_only_speed_is_told(p2plab, small, tmp_path):
    code, out, _ = p2plab("run", str(small), "--backend", "sim", "--no-gradients", "--check")
    assert code == 0
    assert "not applicable, since nothing was trained: and learns" in out
    folder = tmp_path / "runs" / "small"
    summary = json.loads((folder / "ad_psgd" / "summary.json").read_text())
    assert set(summary["final"].values()) == {None}
    assert summary["time_to_target_s"] is None
    assert summary["samples_per_s"] > 0
    assert not (folder / "ad_psgd" / "consensus.safetensors").exists()
    report = (folder / "report.html").read_text()
    assert "nothing was trained" in report
    assert 'data-chart="loss-time"' not in report
    assert 'data-chart="throughput"' in report
    assert (folder / "comparison.png").stat().st_size


@pytest.mark.parametrize("gradients", [True, False], ids=["trained", "priced"])
def test_by_speed_slow_peers_have_small_batches_and_all_steps_last_equally_long(
    tmp_path, gradients
):
    slow = tuple(Straggler(factor=2**rank, peers=(rank,)) for rank in (1, 2, 3))
    chosen = scenario(
        peers=4,
        algorithms=("allreduce",),
        gradients=gradients,
        training=TrainingConfig(batch_size=15, batches="by_speed"),
        pace=StepTiming(min_step_ms=60, stragglers=slow),
        stop=StopConfig(samples=60 * 20),
    )
    lived(fleet_of(tmp_path / "runs", chosen, "allreduce"))
    steps = [records(tmp_path / "runs", f"p0{rank}", "step") for rank in range(4)]
    assert [len(one) for one in steps] == [20] * 4
    assert [one[0]["samples"] for one in steps] == [15] * 4
    assert [one[-1]["samples"] for one in steps] == [32, 16, 8, 4]
    assert [one[-1]["compute_s"] for one in steps] == pytest.approx([0.128] * 4)


def test_several_seeds_give_means_and_folders_of_their_own(p2plab, small, tmp_path):
    small.write_text(SCENARIO.replace("seed = 5", "seed = 5\nseeds = 2"))
    code, _, _ = p2plab("run", str(small), "--backend", "sim", "--algorithms", "ad_psgd")
    assert code == 0
    folder = tmp_path / "runs" / "small"
    (row,) = json.loads((folder / "comparison.json").read_text())["rows"]
    files = [folder / "ad_psgd", folder / "seeds" / "6" / "ad_psgd"]
    first, second = (json.loads((file / "summary.json").read_text()) for file in files)
    assert (first["seed"], second["seed"], row["seed"], row["seeds"]) == (5, 6, 5, 2)
    assert first["trace_hash"] != second["trace_hash"]
    for key in ("loss", "accuracy"):
        assert first["final"][key] != second["final"][key]
        mean = (first["final"][key] + second["final"][key]) / 2
        assert row["final"][key] == pytest.approx(mean)
    assert row["final"]["recall"].keys() == {str(digit) for digit in range(10)}


def test_a_shared_uplink_is_what_limits_the_peers_of_a_machine(tmp_path):
    """Two machines of two, uplinks a tenth of a link: all that leaves a machine passes its own."""

    def wall_s(name, algorithm="allreduce", **changes):
        chosen = priced(
            peers=4,
            algorithms=(algorithm,),
            stop=StopConfig(samples=4 * 32 * 10),
            link=LinkConfig(bandwidth_mbit_s=8),
            **changes,
        )
        run = Run(chosen, algorithm, tmp_path / name, FakeEvaluator())
        run.execute(SimBackend(), lambda run: None)
        return run.wall_s

    machines = MachinesConfig(peers=2, uplink_mbit_s=0.8)
    # 17,226 numbers are 69 ms on a link of 8 Mbit/s, and so few that peers swap them whole: a peer
    # sends 3 models, and a machine 2 x 2. A ring sends 2 x 3/4 of a model over each of its ways.
    model_s = 4 * 17_226 / 1e6
    alone, together = wall_s("alone"), wall_s("together", machines=machines)
    assert alone == pytest.approx(10 * (0.1 + 3 * model_s), rel=0.1)
    assert together == pytest.approx(10 * (0.1 + 4 * 10 * model_s), rel=0.1)
    ring, slow_ring = wall_s("ring", "ring"), wall_s("slow", "ring", machines=machines)
    assert ring == pytest.approx(10 * (0.1 + 1.5 * model_s), rel=0.03)
    assert slow_ring == pytest.approx(10 * (0.1 + 15 * model_s), rel=0.03)


def test_other_machines_may_be_further_away_than_peers_of_ones_own(tmp_path):
    machines = MachinesConfig(peers=2, uplink_mbit_s=1000, latency_ms=50)
    link = LinkConfig(latency_ms=1)
    lived(
        fleet_of(tmp_path, priced(peers=4, link=link, machines=machines, algorithms=("ad_psgd",)))
    )
    near_s, far_s = [], []
    for group in records(tmp_path, "p00", "group"):
        if group["outcome"] == "done":
            (near_s if "p01" in group["members"] else far_s).append(group["exchange_s"])
    assert max(near_s) < 0.04
    assert min(far_s) >= 0.05


def test_one_seed_gives_one_trace_whatever_the_hash_seed(small, tmp_path):
    def simulate(hash_seed: str):
        out = tmp_path / f"out{hash_seed}"
        command = (sys.executable, "-m", "p2plab", "run", str(small), "--backend", "sim")
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        subprocess.run(
            [*command, "--out", str(out)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
            check=True,
        )
        return [(out / name / "summary.json").read_text() for name in ("allreduce", "ad_psgd")]

    first = simulate("0")
    assert "trace_hash" in first[0]
    assert simulate("1") == first, "not only the trace: every figure"


def test_another_seed_gives_another_trace(tmp_path):
    traces = [lived(fleet_of(tmp_path, priced(seed=seed))).facts() for seed in (1, 2, 1)]
    assert traces[0] == traces[2]
    assert traces[0]["trace_hash"] != traces[1]["trace_hash"]


def test_every_mistake_is_one_sentence_and_exit_code_2(p2plab, small, tmp_path):
    unpriced = tmp_path / "unpriced.toml"
    unpriced.write_text('name = "unpriced"\npeers = 2\nstop = { samples = 64 }\n')
    linked = tmp_path / "linked.toml"
    linked.write_text(SCENARIO + "[link]\nlatency_ms = 5\n")
    mistakes = {
        (str(unpriced), "--backend", "sim"): "unpriced cannot be simulated: computing takes no",
        (str(small), "--backend", "sim", "--algorithms", "ddp"): "ddp cannot be simulated; use",
        (
            str(small),
            "--backend",
            "smi",
        ): "unknown backend 'smi'; there are: process, docker, ray, ssh, sim",
        (str(small), "--backend", "sim", "--peers", "0"): "peers = 0 must be 1 or more",
        (str(small), "--no-gradients"): "small is to run without gradients, but processes compute",
        (str(linked),): "small has a [link], but processes of one machine have the link they have",
    }
    for arguments, sentence in mistakes.items():
        code, _, err = p2plab("run", *arguments)
        assert code == 2
        assert err.startswith(f"error: {sentence}"), err
        assert err.count("\n") == 1


def test_an_outsider_of_the_scenario_is_left_out_with_a_word(p2plab, small):
    small.write_text(SCENARIO.replace("seed = 5", 'seed = 5\nalgorithms = ["ad_psgd", "ddp"]'))
    small.write_text(small.read_text().replace('over = "allreduce"', 'over = "ddp"'))
    code, out, _ = p2plab("run", str(small), "--backend", "sim", "--no-gradients")
    assert code == 0
    assert "not applicable, since not all of ad_psgd and ddp ran: gossip is faster" in out
    assert "left out, since ddp cannot be simulated: ddp" in out


def test_ctrl_c_exits_with_130(p2plab, small, monkeypatch):
    monkeypatch.setattr(SimFleet, "poll", lambda fleet: signal.raise_signal(signal.SIGINT))
    assert p2plab("run", str(small), "--backend", "sim")[0] == 130


# --- what happens inside --------------------------------------------------------------------------


def test_steps_cost_what_the_pace_says_to_the_microsecond(tmp_path):
    slow = (Straggler(factor=4, peers=(1,)),)
    lived(fleet_of(tmp_path, priced(pace=StepTiming(min_step_ms=100, stragglers=slow))))
    for name, price_s in (("p00", 0.1), ("p01", 0.4)):
        steps = records(tmp_path, name, "step")
        assert steps
        assert {round(step["compute_s"], 6) for step in steps} == {price_s}


def test_a_peer_that_refuses_says_so_with_its_sentence(tmp_path):
    exploding = TrainingConfig(learning_rate=1e30, momentum=0.0)
    chosen = priced(gradients=True, training=exploding, stop=StopConfig(seconds=20.0))
    statuses = lived(fleet_of(tmp_path, chosen)).poll()
    assert {status.state for status in statuses} <= {"refused", "ended"}
    sentence = next(status.why for status in statuses if status.state == "refused")
    assert "lower" in sentence
    assert "\n" not in sentence


def test_stop_lets_peers_leave_within_the_grace_of_their_own_time(tmp_path):
    fleet = fleet_of(tmp_path, priced(stop=StopConfig(seconds=1000.0)))
    fleet.let_pass(None)
    fleet.stop(8.0)
    assert [status.state for status in fleet.poll()] == ["ended"] * 3
    assert fleet.now() < 9.0
    assert records(tmp_path, "p00", "ended")[0]["why"] == "asked to end by the launcher"
    fleet.stop(8.0)  # and once more does no harm


def test_a_world_that_was_interrupted_is_not_asked_to_go_on(tmp_path):
    fleet = fleet_of(tmp_path, priced())
    fleet._loop.call_later(SLICE_S / 2, signal.raise_signal, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        fleet.let_pass(None)
    interrupted_at = fleet.now()
    fleet.stop(8.0)
    assert fleet.now() == interrupted_at
    assert [status.state for status in fleet.poll()] == ["lost"] * 3


@pytest.mark.parametrize("algorithm", ["ad_psgd", "wagma", "allreduce"])
def test_a_world_that_is_interrupted_while_a_peer_is_paused_ends_all_the_same(tmp_path, algorithm):
    chosen = faulty(FaultConfig(kind="pause", peers=(1,), at_s=1))
    fleet = fleet_of(tmp_path, chosen, algorithm)
    fleet.let_pass(None)
    assert fleet.apply(FaultPlan(chosen.faults).instances[0])
    fleet._loop.call_later(SLICE_S / 2, signal.raise_signal, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        fleet.let_pass(None)
    fleet.stop(8.0)
    assert {status.state for status in fleet.poll()} == {"lost"}


def test_a_run_that_does_not_end_is_ended_by_the_worlds_clock(tmp_path):
    chosen = priced(limit_s=3.0, stop=StopConfig(samples=10**9))
    run = Run(chosen, "ad_psgd", tmp_path / "ad_psgd", FakeEvaluator())
    with pytest.raises(Exception, match="ad_psgd did not end within 3 s; still running: p00"):
        run.execute(_Backend(), lambda run: None)


class _Backend:
    def start(self, scenario, configs):
        return SimFleet(scenario, configs)


@pytest.mark.parametrize("link", [None, LinkConfig(latency_ms=40), LinkConfig(bandwidth_mbit_s=1)])
def test_the_link_decides_how_long_an_exchange_takes(tmp_path, link):
    folder = tmp_path / "run"
    lived(fleet_of(folder, priced(link=link, peers=2)))
    done = [g for g in records(folder, "p00", "group") if g["outcome"] == "done"]
    exchange_s = min(group["exchange_s"] for group in done)
    if link is None:
        assert exchange_s < 0.005
    elif link.latency_ms == 40:
        assert 0.04 <= exchange_s < 0.2
    else:
        # 17,226 numbers of 4 bytes at 1 Mbit/s; both send at once, each over its own uplink.
        assert exchange_s == pytest.approx(17_226 * 4 * 8 / 1e6, rel=0.05)
    assert {g["sent_bytes"] for g in done} == {-(-17_226 // STANDS_FOR) * STANDS_FOR * 4}
    assert all(group["consensus_distance_l2"] is None for group in done)


@pytest.mark.parametrize(
    ("own", "least_s"),
    [
        ({"latency_ms": 40}, 0.04),
        ({"uplink_mbit_s": 1}, 17_226 * 32 / 1e6),
        ({"downlink_mbit_s": 1}, 17_226 * 32 / 1e6),
    ],
)
def test_a_device_has_links_of_its_own_and_leaves_those_of_others_alone(tmp_path, own, least_s):
    phone = DeviceConfig(peers=(2,), **own)
    lived(fleet_of(tmp_path, priced(peers=3, devices=(phone,))))
    lasted = {True: [], False: []}
    for name in ("p00", "p01"):
        for group in records(tmp_path, name, "group"):
            if group["outcome"] == "done":
                lasted["p02" in group["members"]].append(group["exchange_s"])
    assert min(lasted[True]) >= least_s
    assert max(lasted[False]) < 0.005


def test_lost_messages_are_lost_and_the_run_ends_all_the_same(tmp_path):
    fleet = lived(fleet_of(tmp_path, priced(link=LinkConfig(loss=0.1, jitter_ms=2))))
    assert {status.state for status in fleet.poll()} == {"ended"}


# --- faults ---------------------------------------------------------------------------------------


def faulty(*faults, **changes):
    """Three peers for six seconds."""
    return priced(faults=tuple(faults), **{"stop": StopConfig(seconds=6.0), **changes})


def executed(tmp_path, chosen):
    """The run of its algorithm ad_psgd, with its faults."""
    run = Run(chosen, "ad_psgd", tmp_path / "ad_psgd", FakeEvaluator())
    run.execute(SimBackend(), lambda run: None)
    return run


def gaps(folder, name):
    """How long each step of a peer lasted, in tenths of a second."""
    steps = [step["t"] for step in records(folder, name, "step")]
    return [round(10 * (later - sooner)) for sooner, later in pairwise(steps)]


def test_a_crashed_peer_is_lost_and_the_others_go_on(tmp_path):
    run = Run(
        faulty(FaultConfig(kind="crash", peers=(1,), at_step=10)),
        "ad_psgd",
        tmp_path / "ad_psgd",
        FakeEvaluator(),
    )
    run.execute(_Backend(), lambda run: None)
    assert run.notes == ["p01 was lost: it was killed"]
    assert [len(history.steps) for history in run.histories] == [61, 10, 61]


def test_a_peer_that_crashes_for_a_while_starts_again_and_joins_the_others(tmp_path):
    folder = tmp_path / "ad_psgd"
    crash = FaultConfig(kind="crash", peers=(0,), at_s=2.0, for_s=1.0)
    run = Run(faulty(crash, gradients=True), "ad_psgd", folder, FakeEvaluator())
    run.execute(_Backend(), lambda run: None)
    assert [status.state for status in run.statuses] == ["ended"] * 3
    assert len(records(folder, "p00", "started")) == 2
    assert any("took over the model of" in w["text"] for w in records(folder, "p00", "warning"))
    steps = [len(history.steps) for history in run.histories]
    assert run.histories[0].totals()["steps"] == steps[0], "of both lives"
    assert max(gaps(folder, "p00")) in (10, 11, 12)


def test_who_is_paused_or_slow_does_less(tmp_path):
    pause = FaultConfig(kind="pause", peers=(0,), at_s=2.0, for_s=1.0)
    slow = FaultConfig(kind="slow", peers=(1,), at_s=2.0, for_s=2.0, factor=5)
    executed(tmp_path, faulty(pause, slow))
    folder = tmp_path / "ad_psgd"
    assert sorted(set(gaps(folder, "p00"))) == [1, 11]
    assert set(gaps(folder, "p01")) >= {1, 5}
    assert set(gaps(folder, "p02")) == {1}


@pytest.mark.parametrize("stop", [StopConfig(seconds=5.0), StopConfig(samples=2_000)])
def test_who_is_paused_for_ever_is_noted_and_the_training_of_the_others_counts(tmp_path, stop):
    run = executed(tmp_path, faulty(FaultConfig(kind="pause", peers=(1,), at_s=1), stop=stop))
    assert [status.state for status in run.statuses] == ["ended"] * 3
    assert "p01 did not end within 30 s of the others" in run.notes
    assert len(records(tmp_path / "ad_psgd", "p00", "step")) > 20


def test_who_is_cut_off_is_gone_for_the_others_and_comes_back(tmp_path):
    cut = FaultConfig(kind="partition", peers=(0,), at_s=2.0, for_s=8.0)
    executed(tmp_path, faulty(cut, stop=StopConfig(seconds=20.0)))
    folder = tmp_path / "ad_psgd"
    seen = [m["state"] for m in records(folder, "p01", "member") if m["member"] == "p00"]
    assert seen == ["suspect", "dead", "alive"]


def test_peers_come_late_leave_and_come_again(tmp_path):
    plan = (
        FaultConfig(kind="join", peers=(2,), at_s=2.0),
        FaultConfig(kind="leave", peers=(1,), at_s=3.0, for_s=1.0),
        FaultConfig(kind="leave", peers=(2,), at_step=20),
    )
    run = Run(faulty(*plan), "ad_psgd", tmp_path / "ad_psgd", FakeEvaluator())
    run.execute(_Backend(), lambda run: None)
    assert [status.state for status in run.statuses] == ["ended", "ended", "left"]
    assert run.histories[2].steps[0].at == pytest.approx(2.2, abs=0.2)
    assert len(records(tmp_path / "ad_psgd", "p01", "started")) == 2
    assert len(run.histories[2].steps) == pytest.approx(20, abs=1)
    told = {one["kind"]: one for one in run.costs["instances"]}
    assert told["leave"]["at_s"] == pytest.approx(4.0, abs=0.3), "the later one of the two"
    assert run.costs["kept_of_present"] > 0.9


def test_throttled_peers_and_drifting_clocks_are_carried_out_too(tmp_path):
    plan = (
        FaultConfig(kind="throttle", peers=(0,), at_s=1.0, mbit_s=1),
        FaultConfig(kind="drift", peers=(1,), at_s=1.0, rate=1.5),
    )
    executed(tmp_path, faulty(*plan))
    done = [g for g in records(tmp_path / "ad_psgd", "p02", "group") if g["outcome"] == "done"]
    assert max(g["exchange_s"] for g in done if "p00" in g["members"]) > 0.5, "p00 sends slowly"
    last = records(tmp_path / "ad_psgd", "p01", "step")[-1]
    assert last["t"] == pytest.approx(1 + 5 / 1.5, abs=0.2), "six seconds are over sooner for it"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kind": "crash", "peers": ()}, "fault 'crash': peers = [] must be ranks, from 0"),
        ({"kind": "crash", "at_step": 3}, "give exactly one of at_s and at_step"),
        ({"kind": "pause", "for_s": -1.0}, "fault 'pause': for_s = -1.0 must be a number"),
        ({"kind": "pause", "for_s": 0.0}, "for_s = 0.0 must be a number above 0; leave it out"),
        ({"kind": "slow"}, "fault 'slow': it needs factor"),
        ({"kind": "pause", "rate": 2.0}, "fault 'pause': it has no rate"),
        ({"kind": "drift", "rate": 0.0}, "fault 'drift': rate = 0.0 must be above 0"),
    ],
)
def test_a_fault_that_cannot_be_is_refused(wrong, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        FaultConfig(**{"peers": (1,), "at_s": 1.0, **wrong})


def test_faults_of_a_kind_at_a_time_count_together_and_each_ends_alone(tmp_path):
    pauses = [FaultConfig(kind="pause", peers=(0,), at_s=at, for_s=2.0) for at in (2.0, 3.0)]
    slow = [
        FaultConfig(kind="slow", peers=(1,), at_s=at, for_s=for_s, factor=factor)
        for at, for_s, factor in ((1.0, 4.0, 2.0), (2.0, 1.0, 4.0))
    ]
    run = executed(tmp_path, faulty(*pauses, *slow))
    assert sorted(set(gaps(tmp_path / "ad_psgd", "p00"))) == [1, 31], "until both are over"
    assert set(gaps(tmp_path / "ad_psgd", "p01")) == {1, 2, 4}
    ends = [one.ended - run.curve.started_at for one in run.plan.instances]
    assert ends == pytest.approx([4.0, 5.0, 5.0, 3.0])


def test_the_end_of_one_partition_does_not_end_another(tmp_path):
    cuts = [
        FaultConfig(kind="partition", peers=(rank,), at_s=at, for_s=3.0)
        for rank, at in ((0, 1.0), (1, 2.0))
    ]
    folder = tmp_path / "ad_psgd"
    executed(tmp_path, faulty(*cuts, stop=StopConfig(seconds=12.0)))
    done = [g for g in records(folder, "p01", "group") if g["outcome"] == "done"]
    assert [g for g in done if 1.2 < g["t"] < 1.9], "only p00 is cut off"
    assert not [g for g in done if 2.2 < g["t"] < 4.9], "p01 is cut off from all until 5 s"
    assert [g for g in done if g["t"] > 6.0]


def test_seconds_count_from_the_first_step_and_not_from_the_start_of_the_world(tmp_path):
    """On a link of half a second the peers need some time to come together."""
    pause = FaultConfig(kind="pause", peers=(1,), at_s=1.0, for_s=1.0)
    run = executed(tmp_path, faulty(pause, link=LinkConfig(latency_ms=500)))
    start, (instance,) = run.curve.started_at, run.plan.instances
    assert start > 1.0
    assert instance.began == pytest.approx(start + 1.0)
    paused = [step["t"] - start for step in records(tmp_path / "ad_psgd", "p01", "step")]
    assert not [at for at in paused if 1.01 < at < 1.99]


def test_peers_whose_clocks_drift_are_in_the_curve(tmp_path):
    drift = FaultConfig(kind="drift", peers=(1,), at_s=1.0, rate=1.2)
    run = executed(tmp_path, faulty(drift, gradients=True))
    assert len(run.curve.points) >= 12
    rows = [len(history.snapshots) for history in run.histories]
    assert rows == pytest.approx([rows[0]] * 3, abs=2)


def test_under_all_reduce_the_models_of_one_step_are_equal(tmp_path):
    """Also while one peer is killed and comes back."""
    crash = FaultConfig(kind="crash", peers=(1,), at_s=1.0, for_s=1.0)
    slow = (Straggler(factor=3, peers=(2,)),)
    pace = StepTiming(min_step_ms=40, stragglers=slow)
    chosen = faulty(crash, gradients=True, pace=pace, algorithms=("allreduce",))
    run = Run(chosen, "allreduce", tmp_path / "allreduce", FakeEvaluator())
    run.execute(SimBackend(), lambda run: None)
    points = run.curve.points
    assert len(points) > 8
    assert max(point.consensus_distance for point in points) < 1e-6


def test_no_model_of_a_dead_peer_is_in_the_curve(tmp_path):
    """While p01 is away for three seconds, means are of the two others alone."""
    crash = FaultConfig(kind="crash", peers=(1,), at_s=1.0, for_s=3.0)
    run = executed(tmp_path, faulty(crash, gradients=True))
    start, rows = run.curve.started_at, run.histories[1].snapshots
    assert not [row for row in rows if start + 1.01 < row.at < start + 4.0]
    assert not run.histories[1].was_there(start + 2.0)
    assert [p for p in run.curve.points if 2.0 < p.wall_s < 3.5], "the others have a curve"


def test_a_slow_peer_that_starts_again_is_as_slow_as_before(tmp_path):
    slow = FaultConfig(kind="slow", peers=(1,), at_s=1.0, factor=3)
    crash = FaultConfig(kind="crash", peers=(1,), at_s=2.0, for_s=1.0)
    executed(tmp_path, faulty(slow, crash))
    steps = records(tmp_path / "ad_psgd", "p01", "step")
    assert {round(step["compute_s"], 6) for step in steps if step["t"] > 3.0} == {0.3}


def test_a_fault_of_a_peer_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="there are 3 peers, ranks 0 to 2"):
        faulty(FaultConfig(kind="pause", peers=(3,), at_s=1.0))
