"""When faults are due, and what they cost, from records written by hand."""

import pytest

from p2plab.conditions import FaultConfig
from p2plab.faults import FaultPlan, costs_of
from p2plab.records import PeerHistory, Step
from p2ptrain.errors import ConfigError
from tests.launcher.fakes import scenario


def fault(kind="crash", peers=(0,), at_s=None, **changes):
    at_s = 10.0 if at_s is None and "at_step" not in changes else at_s
    return FaultConfig(kind=kind, peers=peers, at_s=at_s, **changes)


def history(tmp_path, rank, *spans, step_s=0.1):
    """A peer that trains ten samples in each tenth of a second of these spans."""
    one = PeerHistory(tmp_path, f"p{rank:02}")
    for begin, end in spans:
        for number in range(round((end - begin) / step_s)):
            at = begin + (number + 1) * step_s
            one.steps.append(Step(at, number, 10, None, step_s, 0.0))
    return one


class Noted:
    """Carries a plan out on nobody, and notes what it did at each call."""

    def __init__(self, *faults, found=True):
        self.plan = FaultPlan(faults)
        self._found = found
        self._done: list[tuple[tuple[int, ...], str]] = []

    def _apply(self, instance):
        self._done.append((instance.ranks, "apply"))
        return self._found

    def _revert(self, instance):
        self._done.append((instance.ranks, "revert"))

    def at(self, histories, started_at, now):
        self._done = []
        self.plan.carry_out(self._apply, self._revert, histories, started_at, now)
        return self._done


def test_a_fault_begins_once_and_ends_once(tmp_path):
    noted, everyone = Noted(fault(for_s=5.0)), [history(tmp_path, 0)]
    assert noted.at(everyone, None, 1000.0) == []
    assert noted.plan.next_at(None) is None
    assert noted.at(everyone, 100.0, 109.9) == []
    assert noted.plan.next_at(100.0) == 110.0
    assert noted.at(everyone, 100.0, 110.0) == [((0,), "apply")]
    assert noted.at(everyone, 100.0, 114.9) == []
    assert noted.plan.next_at(100.0) == 115.0
    assert noted.at(everyone, 100.0, 115.0) == [((0,), "revert")]
    assert noted.at(everyone, 100.0, 900.0) == []
    assert noted.plan.next_at(100.0) is None


def test_a_fault_that_finds_nobody_does_not_end(tmp_path):
    noted, everyone = Noted(fault(for_s=5.0), found=False), [history(tmp_path, 0)]
    assert noted.at(everyone, 100.0, 110.0) == [((0,), "apply")]
    assert noted.plan.next_at(100.0) is None
    assert noted.at(everyone, 100.0, 115.0) == []
    assert noted.plan.instances[0].missed


def test_steps_are_counted_for_each_peer_by_itself(tmp_path):
    noted = Noted(fault("pause", (0, 1), at_step=10))
    everyone = [history(tmp_path, 0, (0, 0.5)), history(tmp_path, 1, (0, 1))]
    assert noted.at(everyone, 0.0, 1.0) == [((1,), "apply")]


def test_a_partition_is_one_fault_for_all_of_its_peers():
    assert Noted(fault("partition", (0, 1))).at([], 0.0, 10.0) == [((0, 1), "apply")]


def carried_out(*faults, until=1000.0):
    instances = FaultPlan(faults).instances
    for instance in instances:
        instance.began = instance.fault.at_s
        ended = instance.began + (instance.fault.for_s or 1e9)
        instance.ended = ended if ended < until else None
    return instances


def test_who_waits_for_nobody_loses_no_more_than_who_is_missing(tmp_path):
    instances = carried_out(fault(for_s=5.0))
    everyone = [history(tmp_path, 0, (0, 10), (16, 30)), history(tmp_path, 1, (0, 30))]
    cost = costs_of(instances, everyone, 0.0, 30.0)
    (told,) = cost["instances"]
    assert (told["kind"], told["peers"]) == ("crash", ["p00"])
    assert (told["planned_s"], told["at_s"], told["until_s"]) == (10.0, 10.0, 15.0)
    assert told["back_s"] == pytest.approx(16.0), "when it trained again, not when it was started"
    assert told["before"] == pytest.approx(200.0)
    assert told["during"] == pytest.approx(100.0)
    assert told["after"] == pytest.approx(180.0), "it trains again a second after it was started"
    assert told["recovery_s"] == pytest.approx(0.8, abs=0.11), "to nine tenths of what was before"
    assert told["stall_s"] == pytest.approx(0.1)
    assert cost["present"] == pytest.approx((40 - 6) / 40)
    assert cost["kept_of_present"] == pytest.approx(1.0)


def test_who_is_missing_for_two_reasons_is_missing_once(tmp_path):
    instances = carried_out(fault("pause", for_s=5.0), fault("crash", at_s=12.0, for_s=8.0))
    everyone = [history(tmp_path, 0, (0, 10), (20, 30)), history(tmp_path, 1, (0, 30))]
    cost = costs_of(instances, everyone, 0.0, 30.0)
    assert cost["present"] == pytest.approx((40 - 10) / 40)
    assert cost["kept_of_present"] == pytest.approx(1.0)


def test_who_waits_for_the_missing_stalls_and_keeps_less(tmp_path):
    instances = carried_out(fault(for_s=5.0))
    everyone = [history(tmp_path, 0, (0, 10), (16, 30)), history(tmp_path, 1, (0, 10), (13, 30))]
    cost = costs_of(instances, everyone, 0.0, 30.0)
    assert cost["longest_stall_s"] == pytest.approx(3.1)
    assert cost["kept_of_present"] == pytest.approx((28 - 3 + 6) / 34, abs=0.02)


def test_who_is_paused_twice_at_a_time_is_back_when_both_are_over(tmp_path):
    pauses = (fault("pause", for_s=2.0), fault("pause", at_s=11.0, for_s=3.0))
    everyone = [history(tmp_path, 0, (0, 10), (14, 30)), history(tmp_path, 1, (0, 30))]
    costs = costs_of(carried_out(*pauses), everyone, 0.0, 30.0)["instances"]
    assert [(one["until_s"], one["back_s"]) for one in costs] == [(12.0, 14.0), (14.0, 14.0)]


def test_who_does_not_train_again_before_the_end_is_not_back(tmp_path):
    instances = carried_out(fault(for_s=5.0), fault("slow", (1,), at_s=2.0, for_s=3.0, factor=2.0))
    everyone = [history(tmp_path, 0, (0, 10)), history(tmp_path, 1, (0, 30))]
    slow, crash = costs_of(instances, everyone, 0.0, 30.0)["instances"]
    assert (crash["until_s"], crash["back_s"]) == (15.0, None)
    assert slow["back_s"] == 5.0, "it was there all the time, and is hindered until then"


def test_a_peer_lost_for_good_is_recovered_from_when_the_others_train_on(tmp_path):
    instances = carried_out(fault())
    everyone = [history(tmp_path, 0, (0, 10)), history(tmp_path, 1, (0, 10), (12, 30))]
    (told,) = costs_of(instances, everyone, 0.0, 30.0)["instances"]
    assert told["until_s"] is None
    assert told["after"] is None
    assert told["recovery_s"] == pytest.approx(1.9, abs=0.11)


def test_a_swarm_that_grows_is_measured_by_those_who_are_there(tmp_path):
    instances = carried_out(fault("join", (1,)))
    everyone = [history(tmp_path, 0, (0, 30)), history(tmp_path, 1, (12, 30))]
    cost = costs_of(instances, everyone, 0.0, 30.0)
    assert cost["present"] == pytest.approx((40 - 2) / 20)
    assert cost["kept_of_present"] == pytest.approx(1.0)


def test_without_a_fault_there_is_no_cost(tmp_path):
    instances = FaultPlan([fault(at_s=60.0)]).instances
    cost = costs_of(instances, [history(tmp_path, 0, (0, 30))], 0.0, 30.0)
    assert cost["instances"] == []
    assert cost["kept_of_present"] is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"faults": (fault("join", (0,)),)}, "peer 0 is the first, and cannot come later"),
        ({"faults": (fault("crash", (5,)),)}, "fault 'crash': peers = .5.: there are 2 peers"),
    ],
)
def test_a_scenario_whose_faults_cannot_be_is_refused(changes, says):
    with pytest.raises(ConfigError, match=says):
        scenario(**changes)


@pytest.mark.parametrize("wrong", [{"for_s": 1.0}, {"at_step": 3}])
def test_who_comes_late_comes_at_a_time_and_to_stay(wrong):
    with pytest.raises(ConfigError, match="give at_s and no for_s"):
        fault("join", (1,), **wrong)
