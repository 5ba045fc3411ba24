import gc
import json

import pytest

import p2plab.run
from p2plab.backends.base import LaunchError
from p2plab.conditions import FaultConfig
from p2plab.consensus import Target
from p2plab.faults import FaultInstance
from p2plab.run import LATE_S, Deadline, Run
from p2ptrain.runtime.settings import StopConfig
from tests.launcher.fakes import (
    UNIX_S,
    FakeBackend,
    FakeEvaluator,
    FakeFleet,
    FakePeer,
    scenario,
    set_state,
)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "ad_psgd"


def train(folder, name, accuracy=0.9, ends=True):
    """An act: a peer writes its whole run."""

    def act(states):
        peer = FakePeer(folder, name)
        peer.ready(0.0)
        peer.snapshot(0.0, [0.1, 0.0])
        peer.step(at=1.0, number=0)
        peer.step(at=2.0, number=1)
        peer.snapshot(2.0, [accuracy, 0.0])
        if ends:
            peer.end(2.1)

    return act


def at_once(*acts):
    def act(states):
        for one in acts:
            one(states)

    return act


def execute(folder, fleet, **changes):
    run = Run(scenario(**changes), "ad_psgd", folder, FakeEvaluator())
    run.execute(FakeBackend(fleet), lambda run: None)
    return run


@pytest.mark.parametrize(("kinds", "versions"), [(["models"], 1), (["models", "gradients"], 3)])
def test_versions_are_the_busiest_peers_and_of_gradients_where_there_are_any(
    folder, kinds, versions
):
    def write(states):
        for name, each in (("p00", 3), ("p01", 2)):
            train(folder, name, ends=False)(states)
            peer = FakePeer(folder, name)
            for what in kinds:
                for number in range(each if what == "gradients" else 1):
                    peer.group(1.0 + number / 10, ["p00", "p01"], what=what)
            peer.group(1.9, ["p00", "p01"], what="gradients", outcome="lost")
            peer.end(2.1)

    done = at_once(set_state("p00", "ended"), set_state("p01", "ended"))
    summary = execute(folder, FakeFleet(("p00", "p01"), [write, done])).save("process")
    assert summary["versions_per_s"] == versions / 2.0


def test_a_run_ends_when_all_peers_have_and_yields_its_summary(folder):
    done = at_once(set_state("p00", "ended"), set_state("p01", "ended"))
    fleet = FakeFleet(("p00", "p01"), [train(folder, "p00"), train(folder, "p01"), done])
    run = execute(folder, fleet, target=Target(accuracy=0.5))
    summary = run.save("process")
    assert fleet.stops == 1
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert set(summary) == {
        "algorithm",
        "backend",
        "peers",
        "wall_s",
        "steps",
        "samples",
        "samples_per_s",
        "versions_per_s",
        "averages_per_peer",
        "failed_share",
        "bytes_per_step",
        "bytes_per_peer",
        "longest_gap_s",
        "data",
        "words",
        "silences",
        "time_to_target_s",
        "final",
        "faults",
        "notes",
    }
    assert summary["wall_s"] == 2.0, "from the first step to the end of the last, not of the run"
    assert (summary["steps"], summary["samples"], summary["samples_per_s"]) == (4, 128, 64)
    assert summary["time_to_target_s"] == 2.0
    assert summary["final"]["accuracy"] == pytest.approx(0.9)
    assert [peer["state"] for peer in summary["peers"]] == ["ended", "ended"]
    assert (folder / "consensus.safetensors").exists()
    assert len(json.loads((folder / "curve.json").read_text())) == 2, "of two ticks they wrote"


def test_a_lost_peer_is_noted_and_the_run_goes_on(folder):
    acts = [
        at_once(train(folder, "p00", ends=False), train(folder, "p01")),
        set_state("p00", "lost", "was killed by SIGKILL"),
        set_state("p01", "ended"),
    ]
    run = execute(folder, FakeFleet(("p00", "p01"), acts))
    assert run.notes == ["p00 was lost: it was killed by SIGKILL"]
    summary = run.save("process")
    lost, well = summary["peers"]
    assert (lost["state"], lost["why"]) == ("lost", "was killed by SIGKILL")
    assert lost["steps"] == 2
    assert well["state"] == "ended"


def test_a_peer_that_refuses_ends_the_run_with_its_name_and_sentence(folder):
    fleet = FakeFleet(("p00", "p01"), [set_state("p01", "refused", "port 1 is in use")])
    with pytest.raises(LaunchError, match=r"^p01 \(ad_psgd\): port 1 is in use$"):
        execute(folder, fleet)
    assert fleet.stops == 1


def test_a_peer_that_dies_before_the_first_step_ends_the_run_for_which_it_is_missing(folder):
    fleet = FakeFleet(("p00", "p01"), [set_state("p01", "lost", "ended with exit code 1: boom")])
    with pytest.raises(LaunchError) as caught:
        execute(folder, fleet)
    assert str(caught.value) == (
        "p01 (ad_psgd) ended with exit code 1: boom, before the first step"
    )


def test_a_run_that_nobody_survives_is_an_error(folder):
    gone = [set_state(name, "lost", "was killed by SIGKILL") for name in ("p00", "p01")]
    acts = [train(folder, "p00", ends=False), at_once(*gone)]
    with pytest.raises(LaunchError, match="all 2 peers were lost; p00 was killed by SIGKILL"):
        execute(folder, FakeFleet(("p00", "p01"), acts))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (128, []),
        (16, ["trained 128 samples where 16 were asked for"]),
        (1_000, ["trained 128 samples where 1,000 were asked for"]),
    ],
)
def test_a_run_that_trained_more_or_less_than_it_was_to_says_so(folder, asked, said):
    done = at_once(set_state("p00", "ended"), set_state("p01", "ended"))
    fleet = FakeFleet(("p00", "p01"), [train(folder, "p00"), train(folder, "p01"), done])
    assert execute(folder, fleet, stop=StopConfig(samples=asked)).notes == said


def test_ctrl_c_stops_the_fleet(folder):
    def interrupt(states):
        raise KeyboardInterrupt

    fleet = FakeFleet(("p00", "p01"), [interrupt])
    with pytest.raises(KeyboardInterrupt):
        execute(folder, fleet)
    assert fleet.stops == 1


def test_a_run_in_which_nobody_ends_in_time_names_those_who_still_ran(folder):
    fleet = FakeFleet(("p00", "p01"), [train(folder, "p01", ends=False)])
    with pytest.raises(LaunchError) as caught:
        execute(folder, fleet, limit_s=0.0)
    assert str(caught.value) == (
        "ad_psgd did not end within 0 s; still running: p00 (after 0 steps), p01 (after 2 steps)"
    )
    assert fleet.stops == 1


def test_a_peer_that_does_not_end_with_the_others_is_stopped_and_noted(folder, monkeypatch):
    monkeypatch.setattr(p2plab.run, "LATE_S", 0.0)
    acts = [
        at_once(train(folder, "p00"), train(folder, "p01", ends=False), set_state("p00", "ended"))
    ]
    run = execute(folder, FakeFleet(("p00", "p01"), acts))
    assert run.notes == [
        "p01 did not end within 0 s of the others",
        "p01 was lost: it was killed by SIGKILL",
    ]


def test_while_a_run_goes_on_garbage_is_collected_rarely_also_between_two_looks(folder):
    usual, seen = gc.get_threshold(), []
    names = "p00", "p01"
    ends = [set_state(name, "ended") for name in names]
    acts = [at_once(*(train(folder, name) for name in names), *ends)]
    run = Run(scenario(), "ad_psgd", folder, FakeEvaluator())
    run.execute(FakeBackend(FakeFleet(names, acts)), lambda run: seen.append(gc.get_threshold()))
    assert min(seen[:-1]) > usual
    assert gc.get_threshold() == usual


def test_of_many_that_do_not_end_the_first_are_named(folder, monkeypatch):
    monkeypatch.setattr(p2plab.run, "LATE_S", 0.0)
    monkeypatch.setattr(p2plab.run, "MOST_NAMED", 1)
    late = [train(folder, name, ends=False) for name in ("p01", "p02")]
    acts = [at_once(train(folder, "p00"), *late, set_state("p00", "ended"))]
    run = execute(folder, FakeFleet(("p00", "p01", "p02"), acts), peers=3)
    assert run.notes[0] == "p01 and 1 more did not end within 0 s of the others"


def test_what_a_peer_writes_only_because_it_is_stopped_does_not_count(folder, monkeypatch):
    monkeypatch.setattr(p2plab.run, "LATE_S", 0.0)
    acts = [
        at_once(train(folder, "p00"), train(folder, "p01", ends=False), set_state("p00", "ended"))
    ]

    class Waking(FakeFleet):
        def stop(self, grace_s):
            FakePeer(folder, "p01").step(at=40.0, number=2, compute_s=38.0)
            super().stop(grace_s)

    assert execute(folder, Waking(("p00", "p01"), acts)).wall_s == 2.0


def test_faults_that_did_not_come_or_found_nobody_are_told(folder):
    done = at_once(set_state("p00", "ended"), set_state("p01", "ended"))
    late = FaultConfig(kind="crash", peers=(1,), at_s=100.0)
    missed = FaultConfig(kind="crash", peers=(0,), at_s=0.0)
    fleet = FakeFleet(("p00", "p01"), [train(folder, "p00"), train(folder, "p01"), done])
    assert execute(folder, fleet, faults=(late, missed)).notes == [
        "fault 'crash' of p01 at 100 s did not come before the end",
        "fault 'crash' of p00 at 0 s found no peer there",
    ]


def test_who_comes_back_too_late_to_train_hides_no_fault(folder):
    """Its last step was before the fault; the run's end is that of the others."""
    done = at_once(set_state("p00", "ended"), set_state("p01", "ended"))
    fleet = FakeFleet(("p00", "p01"), [train(folder, "p00"), train(folder, "p01"), done])
    crash = FaultConfig(kind="crash", peers=(1,), at_s=1.0, for_s=0.9)
    run = execute(folder, fleet)
    run.plan.instances = [FaultInstance(crash, (1,), began=UNIX_S + 1.5, ended=UNIX_S + 1.9)]
    run.histories[1].steps.pop()
    assert [cost["kind"] for cost in run.costs["instances"]] == ["crash"]


def test_a_target_that_stops_ends_the_run_when_it_is_reached(folder):
    acts = [at_once(train(folder, "p00", ends=False), train(folder, "p01", ends=False))]
    leave = at_once(set_state("p00", "ended"), set_state("p01", "ended"))

    class LeavingFleet(FakeFleet):
        def stop(self, grace_s):
            leave(self.states)
            super().stop(grace_s)

    fleet = LeavingFleet(("p00", "p01"), acts)
    run = execute(folder, fleet, target=Target(accuracy=0.05, stops=True))
    assert run.curve.time_to_target_s == 0.0
    assert [status.state for status in run.statuses] == ["ended", "ended"]


def test_the_deadline_is_the_limit_and_the_seconds_of_training_together():
    now = 100.0
    deadline = Deadline(scenario(limit_s=50.0), clock=lambda: now)
    assert not deadline.has_passed(someone_ended=False)
    now = 149.0
    assert not deadline.has_passed(someone_ended=True)
    now = 150.0
    assert deadline.has_passed(someone_ended=True)


def test_once_one_has_ended_the_others_have_a_bounded_time():
    now = 100.0
    deadline = Deadline(scenario(limit_s=500.0), clock=lambda: now)
    assert not deadline.has_passed(someone_ended=True)
    now = 100.0 + LATE_S - 0.1
    assert not deadline.has_passed(someone_ended=True)
    now = 100.0 + LATE_S
    assert deadline.has_passed(someone_ended=True)


def test_results_of_an_earlier_run_are_replaced_and_other_files_stay(folder):
    folder.mkdir()
    for name in ("p07.jsonl", "p07.snapshots", "summary.json", "notes.txt", "paper.toml"):
        (folder / name).touch()
    acts = [at_once(*(train(folder, n) for n in ("p00", "p01")))]
    acts += [at_once(set_state("p00", "ended"), set_state("p01", "ended"))]
    execute(folder, FakeFleet(("p00", "p01"), acts))
    assert not (folder / "p07.jsonl").exists()
    assert not (folder / "summary.json").exists()
    assert (folder / "notes.txt").exists()
    assert (folder / "paper.toml").exists()
