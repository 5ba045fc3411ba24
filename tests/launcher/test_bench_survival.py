"""The benchmark of survival: what it reads of checkpoints, its claims, commands and picture."""

import os

import pytest

from p2plab.backends.base import LaunchError
from p2plab.bench import survival
from p2plab.bench.survival import (
    EVERY_S,
    Passed,
    Watch,
    checkpoints,
    claims_of,
    folders,
    oldest_s,
    picture,
    polled,
    tables_of,
)
from p2plab.bench.survivors import Containers, Processes
from p2plab.harness.claims import Json
from p2ptrain.runtime.checkpoint_folder import DOCUMENT, CheckpointFolder
from p2ptrain.runtime.files import DiskFiles
from tests.launcher.conftest import printed


def write(folder, name, updates, progress, cut_s=0.0, written_s=0.0):
    own = CheckpointFolder(folder / name, 3, DiskFiles())
    partial = own.begin(lambda write: write(b"model"))
    own.finish(partial, {"updates": updates, "progress": progress, "unix_s": cut_s}, {})
    os.utime(own.folder / f"{own.numbers()[0]:08}" / DOCUMENT, (written_s, written_s))


@pytest.fixture(autouse=True)
def no_models(monkeypatch):
    """The loss of each is the number of its updates."""
    monkeypatch.setattr(survival, "loss_before", lambda found: float(found[0].updates))


def test_a_swarm_is_looked_at_when_all_of_it_have_written_another_one(tmp_path):
    write(tmp_path, "p00", 10, 640)
    watch = Watch(tmp_path, "ad_psgd", 2)
    write(tmp_path, "p00", 20, 1280)
    watch.look()
    write(tmp_path, "p01", 21, 1300)
    watch.look()
    watch.look()
    assert watch.points == [(1280, 20.0)]


def test_peers_in_step_go_on_from_what_all_have_and_others_each_from_its_newest(tmp_path):
    for name, updates in (("p00", 10), ("p01", 10), ("p00", 20)):
        write(tmp_path, name, updates, 64 * updates)
    updates = {
        algorithm: [one.updates for one in checkpoints(tmp_path, algorithm, 2)]
        for algorithm in ("allreduce", "ad_psgd")
    }
    assert updates == {"allreduce": [10, 10], "ad_psgd": [20, 10]}


def test_a_checkpoint_may_be_as_old_as_the_longest_interval_and_the_longest_writing(tmp_path):
    for updates, cut_s, written_s in ((10, 100.0, 100.25), (20, 103.5, 103.75)):
        write(tmp_path, "p00", updates, 640, cut_s, written_s)
    write(tmp_path, "p01", 30, 640, cut_s=101.0, written_s=101.5)
    assert oldest_s(folders(tmp_path, 2)) == 3.5 + 0.5
    assert oldest_s(folders(tmp_path, 2)[1:]) == EVERY_S + 0.5


def test_a_checkpoint_that_was_left_out_does_not_let_the_next_ones_be_older(tmp_path):
    for updates, cut_s in ((10, 100.0), (20, 100.0 + 2 * EVERY_S)):
        write(tmp_path, "p00", updates, 640, cut_s, cut_s)
    assert oldest_s(folders(tmp_path, 1)) == 1.5 * EVERY_S


KILL = "kill", "kill", "wait", "inspect"


class Ended:
    def __init__(self, *codes):
        self._codes = codes

    def codes(self):
        return [*self._codes]

    def kill(self):
        return [0.0]

    def said(self):
        return "no room"


def test_a_peer_that_fails_ends_the_benchmark_in_one_sentence():
    with pytest.raises(LaunchError, match=r"^again: peers ended with \[0, 1\]: no room$"):
        next(polled("again", Ended(0, 1)))


def test_a_swarm_that_does_not_come_to_its_end_ends_the_benchmark(monkeypatch):
    monkeypatch.setattr(survival, "LIMIT_S", 0.0)
    with pytest.raises(LaunchError, match=r"^again: not done after 0 s$"):
        next(polled("again", Ended(None, None)))


def row(peers: int, algorithm: str = "allreduce", **more: object) -> Json:
    usual = {
        "part": "killed",
        "place": "processes",
        "lost_intervals": 0.8,
        "progress": 1000,
        "progress_first": 1200,
        "progress_after": 2000,
        "loss_before": 2.0,
        "loss_worst": 2.05,
        "loss_after": 1.5,
        "bitwise": None,
        "points_before": [(500, 2.2), (1000, 2.0)],
        "points_after": [(1200, 2.05), (2000, 1.5)],
    }
    return {**usual, "algorithm": algorithm, "peers": peers, **more}


BESIDE = {
    "part": "beside",
    "ratios": [0.98, 0.5, 0.99],
    "steps_per_s": 0.98,
    "steps_per_s_without": 1.0,
    "checkpoints": 6,
    "checkpoint_mb": 400.0,
}


def test_a_checkpoint_is_compared_with_the_time_before_it_and_after_it():
    # Steps of one second, of two in the ten that begin with a checkpoint, then of a half.
    ends = [*range(11), *range(12, 21, 2), *(20 + k / 2 for k in range(1, 21))]
    assert Passed(ends, [10.0, 25.0]).pairs(10.0) == [(0.5, 1.5)]


def test_what_is_kept_what_goes_on_and_what_it_costs_is_claimed():
    claims = claims_of([row(8, bitwise=True), BESIDE])
    assert [one["measured"] for one in claims] == [0.8, 1.2, 1.025, 1.0, 0.98]
    assert all(one["holds"] for one in claims)


@pytest.mark.parametrize(
    ("what", "which"),
    [
        ({"lost_intervals": 1.2}, 0),
        ({"progress_first": 999}, 1),
        ({"progress_first": None}, 1),
        ({"loss_worst": 2.2}, 2),
        ({"bitwise": False}, 3),
    ],
)
def test_each_loss_contradicts_its_claim_alone(what, which):
    claims = claims_of([row(8, **{"bitwise": True, **what})])
    assert [number for number, one in enumerate(claims) if not one["holds"]] == [which]


def test_rows_are_printed_and_drawn_by_algorithm():
    rows = [row(8, bitwise=True), row(5), row(8, "ad_psgd", progress_first=None), BESIDE]
    text = "".join(printed(one) for one in tables_of(rows))
    for part in ("allreduce, 5 peers", "1,200", "yes", "400 MB", "0.980"):
        assert part in text
    panels = picture(rows).axes
    assert [axes.get_title(loc="left") for axes in panels] == ["allreduce", "ad_psgd"]
    labels = [text.get_text() for text in panels[0].get_legend().get_texts()]
    assert labels == ["before", "8 peers after", "5 peers after"]


def test_processes_that_do_not_end_are_killed(tmp_path):
    with Processes(0.001).swarm(tmp_path, 2, ["--help"]) as running:
        pass
    assert all(code in (0, -9) for code in running.codes())


def test_containers_get_their_network_their_folder_and_are_removed(tmp_path, monkeypatch):
    said = []

    def docker(*arguments, both=False):
        said.append(arguments)
        if arguments[:3] == ("inspect", "--format", "{{.State.FinishedAt}}"):
            return "1970-01-01T00:00:01.500000000Z\n1970-01-01T00:00:02.25Z\n"
        return "true 0\nfalse 137\n" if arguments[0] == "inspect" else ""

    monkeypatch.setattr("p2plab.bench.survivors.docker", docker)
    with Containers("an-image", 0.001).swarm(tmp_path, 2, ["--resume"]) as running:
        assert running.codes() == [None, 137]
        assert running.kill() == [1.5, 2.25]
    verbs = [arguments[0] for arguments in said]
    assert verbs == ["network", *["create", "start"] * 2, "inspect", *KILL, "rm", "network"]
    second = said[3]
    assert {"--network-alias=p01", "--init", "an-image", "--resume"} <= {*second}
    assert second[second.index("--join") + 1] == "p00:4000"
    assert f"--volume={tmp_path}:/results" in second
    assert (tmp_path / "swarm.key").exists()
    assert 'token_file = "/results/swarm.key"' in (tmp_path / "peer.toml").read_text()
