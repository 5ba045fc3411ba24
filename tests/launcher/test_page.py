"""Faults that are clicked on the page of a run."""

import time
from pathlib import Path

import pytest

from p2plab.backends import load_backend
from p2plab.backends.process import ProcessBackend
from p2plab.faults import FaultInstance, FaultPlan
from p2plab.page import UNTIL_CLICKED_S, ClickedFaults, open_page
from p2plab.records import PeerHistory
from p2ptrain.errors import ConfigError
from tests.launcher.fakes import scenario
from tests.launcher.test_process import FAKE_PEER, configs, until

NAMES = ("p00", "p01", "p02")


@pytest.fixture
def schedule():
    return FaultPlan(())


@pytest.fixture
def clicked(schedule):
    """A run whose first step began at 100 s."""
    faults = ClickedFaults()
    faults.take_over(NAMES, can_cut=True)
    faults.carry_out(schedule.instances, 100.0, 101.0)
    return faults


def due(schedule: FaultPlan, now: float) -> list[tuple[str, tuple[int, ...], str]]:
    found: list[tuple[str, tuple[int, ...], str]] = []

    def apply(instance: FaultInstance) -> bool:
        found.append((instance.fault.kind, instance.ranks, "apply"))
        return True

    def revert(instance: FaultInstance) -> None:
        found.append((instance.fault.kind, instance.ranks, "revert"))

    schedule.carry_out(apply, revert, [], 100.0, now)
    return found


@pytest.mark.parametrize(("kind", "fault"), [
    ("pause", "pause"),
    ("slow", "slow"),
    ("cut", "partition"),
    ("kill", "crash"),
])  # fmt: skip
def test_a_click_is_a_fault_of_the_run_until_the_next_click(clicked, schedule, kind, fault):
    clicked.apply(kind, "p01")
    clicked.carry_out(schedule.instances, 100.0, 105.0)
    assert due(schedule, 105.0) == [(fault, (1,), "apply")]
    clicked.carry_out(schedule.instances, 100.0, 105.1)
    assert clicked.active() == {(kind, "p01")}
    assert due(schedule, 1000.0) == []
    clicked.revert(kind, "p01")
    clicked.carry_out(schedule.instances, 100.0, 1000.0)
    assert due(schedule, 1000.0) == [(fault, (1,), "revert")]
    clicked.carry_out(schedule.instances, 100.0, 1000.1)
    assert clicked.active() == set()
    (instance,) = schedule.instances
    assert (instance.fault.at_s, instance.began, instance.ended) == (5.0, 105.0, 1000.0)


def test_two_clicks_in_one_moment_are_one_fault(clicked, schedule):
    clicked.apply("pause", "p01")
    clicked.apply("pause", "p01")
    clicked.carry_out(schedule.instances, 100.0, 105.0)
    assert len(schedule.instances) == 1


def test_a_peer_may_have_several_faults_at_once(clicked, schedule):
    clicked.apply("pause", "p01")
    clicked.apply("slow", "p01")
    clicked.carry_out(schedule.instances, 100.0, 105.0)
    assert len(due(schedule, 105.0)) == 2


def test_before_the_first_step_a_click_is_refused():
    faults = ClickedFaults()
    faults.take_over(NAMES, can_cut=True)
    with pytest.raises(ConfigError, match="no peer has trained yet"):
        faults.apply("pause", "p00")


def test_a_fault_of_the_scenario_is_shown_but_not_ended_by_a_click(clicked, schedule):
    clicked.apply("pause", "p01")
    clicked.carry_out(schedule.instances, 100.0, 105.0)
    due(schedule, 105.0)
    other = ClickedFaults()
    other.take_over(NAMES, can_cut=True)
    other.carry_out(schedule.instances, 100.0, 106.0)
    assert other.active() == {("pause", "p01")}
    with pytest.raises(ConfigError, match="pause of p01 is in the scenario"):
        other.revert("pause", "p01")


def test_where_nothing_can_cut_a_peer_off_this_is_not_offered():
    faults = ClickedFaults()
    faults.take_over(NAMES, can_cut=False)
    assert faults.kinds == ("pause", "slow", "kill")


def test_the_next_run_begins_without_the_clicks_of_the_last(clicked, schedule):
    clicked.apply("pause", "p01")
    clicked.take_over(NAMES, can_cut=True)
    clicked.carry_out(schedule.instances, 100.0, 105.0)
    assert clicked.active() == set()


def test_a_simulation_has_no_page():
    with (
        pytest.raises(ConfigError, match="--ui asks peers at addresses of this machine"),
        open_page(load_backend("sim"), "127.0.0.1:0"),
    ):
        pass


@pytest.mark.sockets
def test_a_page_beyond_loopback_is_refused(p2plab):
    code, _, err = p2plab("run", "one_slow", "--ui", "--ui-listen", "0.0.0.0:9410")
    assert code == 2
    assert "the page has no password" in err


@pytest.mark.sockets
def test_a_click_stops_slows_and_kills_a_process(tmp_path: Path):
    asked = configs(tmp_path, "sleep", "sleep")
    fleet = ProcessBackend(FAKE_PEER).start_clickable(scenario(), asked)
    try:
        histories = [PeerHistory(tmp_path, config.name) for config in asked]
        faults = ClickedFaults()
        faults.take_over([config.name for config in asked], can_cut=fleet.can_cut)
        plan = FaultPlan(())
        began = time.time()

        def carry_out() -> bool:
            faults.carry_out(plan.instances, began, time.time())
            plan.carry_out(fleet.apply, fleet.revert, histories, began, time.time())
            return False

        carry_out()
        pid = fleet.pids()[1]
        faults.apply("pause", "p01")
        carry_out()
        until(lambda: carry_out() or state_of(pid) == "T")
        faults.revert("pause", "p01")
        carry_out()
        until(lambda: carry_out() or state_of(pid) == "S")
        faults.apply("slow", "p01")
        carry_out()
        assert (tmp_path / "p01.slowdown").read_text() == "4.0\n"
        if fleet.can_cut:
            faults.apply("cut", "p01")
            carry_out()
        faults.apply("kill", "p01")
        carry_out()
        until(lambda: carry_out() or state_of(pid) in ("Z", ""))
        assert [status.state for status in fleet.poll()] == ["running", "running"]
        faults.revert("kill", "p01")
        carry_out()
        until(lambda: carry_out() or (bool(fleet.poll()) and fleet.pids()[1] != pid))
        assert plan.instances[0].fault.for_s < UNTIL_CLICKED_S
    finally:
        fleet.stop(0.0)


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
