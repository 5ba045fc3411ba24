"""What is derived from reports: pure, with made-up time."""

import json
import math

import pytest

from p2ptrain.core.messages import MemberState, Phase
from p2ptrain.net.wire_carried import address_of
from p2ptrain.ui.swarm import COLUMNS, MAX_PEERS, SwarmView
from tests.ui.feed import MadeUpSwarm, member, report


def column(view: SwarmView, name: str, peer: str):
    rows = view.snapshot()["rows"]
    return next(dict(zip(COLUMNS, row, strict=True)) for row in rows if row[0] == peer)[name]


def texts(view: SwarmView) -> list[str]:
    return [text for _, _, _, text in view.events]


@pytest.fixture
def view():
    """Three peers that have answered once, at 0 s."""
    view = SwarmView(0.0)
    view.saw([member("p01"), member("p02")], 0.0)
    for name in ("p00", "p01", "p02"):
        view.answered(report(name), 0.0)
    return view


def test_known_peers_are_no_news_and_a_later_one_joins(view):
    assert texts(view) == ["the swarm trains with ad_psgd"]
    view.saw([member("p01"), member("p02"), member("p03")], 5.0)
    assert texts(view)[-1] == "p03 joined"
    assert column(view, "state", "p03") == "new"


def test_a_peer_that_only_dials_out_is_shown_by_its_record_and_how_it_is_reached(view):
    there = {"address": address_of("p03"), "steps": 12}
    for phase, state in zip(Phase, ("joins", "trains", "done"), strict=True):
        view.saw([member("p03", phase=phase, **there)], 5.0)
        assert column(view, "state", "p03") == state
    assert column(view, "doing", "p03") == "carried: it only dials out"
    assert column(view, "steps", "p03") == 12
    assert column(view, "samples_per_s", "p03") is None
    view.saw([member("p03", state=MemberState.DEAD, **there)], 6.0)
    assert column(view, "state", "p03") == "dead"


def test_a_killed_peer_does_not_answer_then_is_suspected_dead_and_back(view):
    view.failed("p02", "no connection to p02:4000", 1.0)
    assert column(view, "state", "p02") == "no answer"
    view.saw([member("p02", state=MemberState.SUSPECT)], 2.0)
    view.saw([member("p02", state=MemberState.DEAD)], 4.0)
    assert column(view, "state", "p02") == "dead"
    assert column(view, "samples_per_s", "p02") is None
    view.answered(report("p02", me={"incarnation": 2}, running_s=1.0), 9.0)
    assert column(view, "state", "p02") == "trains"
    assert texts(view)[1:] == [
        "p02 does not answer: no connection to p02:4000",
        "p02 is dead",
        "p02 has started again",
    ]


def test_a_peer_that_answers_is_at_most_suspected_whatever_others_say(view):
    view.saw([member("p02", state=MemberState.DEAD)], 1.0)
    assert column(view, "state", "p02") == "suspect"
    view.failed("p02", "no connection", 2.0)
    assert column(view, "state", "p02") == "dead"


def test_a_peer_that_leaves_is_gone_at_once(view):
    view.saw([member("p02", state=MemberState.LEFT)], 1.0)
    assert (column(view, "state", "p02"), texts(view)[-1]) == ("left", "p02 has left")


def test_a_silence_is_its_own_sentence_and_ends(view):
    sentence = "p01 has not averaged for 31 s (usually every 2 s): p02 is gone"
    view.answered(report("p01", silence=sentence, warning=sentence), 1.0)
    assert (column(view, "state", "p01"), texts(view)[-1]) == ("silent", sentence)
    view.answered(report("p01", warning="p01 averages again after 33 s"), 2.0)
    assert texts(view)[-2:] == ["p01 averages again after 33 s", "p01 averages again"]


def test_a_phase_is_a_state(view):
    view.answered(report("p01", me={"phase": Phase.ARRIVING}), 1.0)
    assert column(view, "state", "p01") == "joins"
    view.answered(report("p01", me={"phase": Phase.DONE}), 2.0)
    assert texts(view)[-1] == "p01 is done"


def test_another_algorithm_is_a_line_of_the_log(view):
    view.answered(report("p01", algorithm="wagma"), 1.0)
    assert texts(view)[-1] == "p01 now uses wagma"


def test_an_average_is_drawn_once_although_both_members_report_it(view):
    view.answered(report("p00", partners=("p01",), groups_done=1), 1.0)
    view.answered(report("p01", partners=("p00",), groups_done=1), 1.2)
    pair = tuple(sorted(view.peers[name].index for name in ("p00", "p01")))
    assert view.take_update()["pulses"] == [(1.0, pair)]
    view.answered(report("p00", partners=("p01",), groups_done=2), 2.5)
    assert len(view.snapshot()["pulses"]) == 2


def test_averages_per_second_count_each_members_share(view):
    view.answered(report("p00", partners=("p01",), groups_done=4), 1.0)
    view.answered(report("p01", partners=("p00",), groups_done=4), 1.0)
    view.tick(2.0)
    assert view.history.points[-1][6] == 2.0  # four averages in two seconds


def test_a_group_of_many_is_one_average():
    swarm = [f"p{i:02}" for i in range(8)]
    view = SwarmView(0.0)
    for done in (0, 1):
        for name in swarm:
            partners = tuple(other for other in swarm if other != name)
            view.answered(report(name, partners=partners, groups_done=done), 1.0 * done)
    (pulse,) = view.snapshot()["pulses"]
    assert len(pulse[1]) == 8


def test_a_second_adds_up_only_those_that_answer(view):
    view.failed("p02", "no connection", 0.5)
    view.tick(1.0)
    at, samples_per_s, _, waiting, loss, distance, _, live = view.history.points[-1]
    assert (at, samples_per_s, waiting, loss, distance, live) == (1.0, 2000.0, 0.0, 0.5, 0.125, 2)


def test_a_timeline_has_a_letter_per_peer_and_second(view):
    view.answered(report("p01", wait_share=0.62), 0.5)
    view.failed("p02", "no connection", 0.5)
    view.tick(1.0)
    names = list(view.peers)
    letters = dict(zip(names, view.history.as_json()["lanes"][-1], strict=True))
    assert letters == {"p00": "0", "p01": "6", "p02": "n"}


def test_steps_per_second_come_from_two_reports(view):
    view.answered(report("p01", me={"steps": 100}), 10.0)
    view.answered(report("p01", me={"steps": 140}), 20.0)
    assert column(view, "steps_per_s", "p01") == 4.0


def test_a_slow_peer_is_logged_once_it_has_been_slow_for_some_seconds(view):
    view.answered(report("p01", samples_per_s=250.0), 1.0)
    for second in range(1, 6):
        view.tick(float(second))
    sentence = "p01 computes 4.0 times slower than the median"
    assert view.sentences == [sentence]
    assert texts(view).count(sentence) == 1
    view.answered(report("p01"), 6.0)
    for second in range(6, 12):
        view.tick(float(second))
    assert texts(view)[-1] == "p01 is no longer slow"
    assert view.sentences == []


def test_many_peers_that_become_slow_together_share_a_line_of_the_log():
    view = SwarmView(0.0)
    for rank in range(20):
        view.answered(report(f"p{rank:02}", samples_per_s=250.0 if rank < 8 else 1000.0), 0.0)
    for second in range(1, 6):
        view.tick(float(second))
    assert texts(view)[1:] == ["8 peers are slow: p00, p01, p02, p03, p04 and others"]


def test_an_update_has_only_what_has_changed(view):
    view.take_update()
    assert view.take_update()["rows"] == {}
    view.answered(report("p01", loss=0.25), 1.0)
    view.tick(1.0)
    update = view.take_update()
    assert list(update["rows"]) == [view.peers["p01"].index]
    assert len(update["seconds"]) == 1
    assert view.take_update()["seconds"] == []


def test_a_fault_is_measured_against_the_throughput_before(view):
    for second in range(1, 6):
        view.tick(float(second))
    view.faults_are({("pause", "p02")}, 5.0)
    view.failed("p02", "no connection", 5.5)
    for second in range(6, 10):
        view.tick(float(second))
    view.faults_are(set(), 9.0)
    view.answered(report("p02"), 9.5)
    view.tick(10.0)
    (fault,) = view.snapshot()["faults"]
    assert (fault["before"], fault["during"], fault["after"]) == (3000.0, 2000.0, 3000.0)
    assert (fault["began"], fault["ended"]) == (5.0, 9.0)
    assert "p02: pause begins" in texts(view)
    assert "p02: pause ends" in texts(view)


def test_hostile_figures_never_reach_a_page(view):
    view.answered(report("p01", loss=math.nan, consensus_distance_l2=math.inf), 1.0)
    view.tick(1.0)
    json.dumps(view.snapshot(), allow_nan=False)
    json.dumps(view.take_update(), allow_nan=False)
    assert column(view, "loss", "p01") is None


def test_no_list_of_members_makes_it_grow_beyond_all_bounds():
    view = SwarmView(0.0)
    view.saw([member(f"p{i}") for i in range(MAX_PEERS + 10)], 0.0)
    view.answered(report("one too many"), 0.0)
    assert len(view.peers) == MAX_PEERS


def test_a_made_up_swarm_shows_who_is_slow_and_who_died():
    swarm, view = MadeUpSwarm(16, by_itself=True), SwarmView(0.0)
    for second in range(1, 61):
        swarm.pass_time(1.0)
        swarm.tell(view, float(second))
        view.tick(float(second))
    said = "\n".join(texts(view))
    for sentence in (
        "p05 is dead",
        "p06 has started again",
        "p02 has not averaged",
        "p08 has a link of 20",
    ):
        assert sentence in said
    assert len(view.history.points) == 60
    assert json.loads(json.dumps(view.snapshot(), allow_nan=False))["known"] == 16
