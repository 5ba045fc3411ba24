"""Wait-avoiding groups: who activates, who is late, whose view differs, who dies, what is lost.

All of it goes through the slot of each peer (`core/group_lock.py`), as any other group does.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.core.contribution import Contribution
from p2ptrain.core.effects import Outcome
from p2ptrain.core.lock_state import Offered
from p2ptrain.core.messages import Activate, Begin, Failed, Past, Release, Relinquish, Request
from p2ptrain.core.purpose import Formation, Purpose, What
from p2ptrain.core.wait_avoiding import Round, Rule
from p2ptrain.ids import PeerId, Ticket
from tests.helpers.crowd import everyone, pairs
from tests.helpers.meeting import RESEND_S, Guest, Meeting

A, B, C, D = (PeerId(name) for name in "abcd")


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    meeting = Meeting("abc", everyone())
    yield meeting
    meeting.check()


def version_of(guest: Guest) -> int:
    """How far the others are, as far as it knows."""
    return guest.groups.wait_avoiding.version


def models_of(version: int) -> Purpose:
    return Purpose(Formation.WAIT_AVOIDING, What.MODELS, version)


# --- the first one activates ----------------------------------------------------------------------


@pytest.mark.parametrize("first", "abc")
def test_whoever_arrives_first_runs_the_version_for_everyone(meeting: Meeting, first: str):
    meeting.arrive_at(first, 1)
    meeting.settle()
    assert meeting.groups() == {"a": "1:abc", "b": "1:abc", "c": "1:abc"}
    assert meeting.together("abc").initiator == "a"


def test_all_members_hear_what_the_group_is_for_and_what_each_puts_in():
    meeting = Meeting("abc", everyone(what=What.STALE_GRADIENTS))
    for weight, name in enumerate("abc"):
        meeting[name].states = Contribution(weight=weight)
    meeting.arrive_at("b", 4)
    meeting.settle()
    for name in "abc":
        (average,) = meeting[name].averages
        assert average.purpose == Purpose(Formation.WAIT_AVOIDING, What.STALE_GRADIENTS, 4)
        assert [stated.weight for stated in average.contributions] == [0, 1, 2]


def test_those_who_wait_grant_with_their_word_that_they_do_and_the_others_when_they_are_asked(
    meeting: Meeting,
):
    meeting.arrive_at("b", 1)
    meeting.settle()
    assert Counter(meeting.said) == Counter(
        ["b -> a Activate", "a -> c Request", "c -> a Grant", "a -> b Begin", "a -> c Begin"]
    )


def test_where_all_wait_a_version_costs_one_message_each_way():
    meeting = Meeting("abcd", everyone(Rule(waiting=4)))
    for version in (1, 2):
        meeting.said.clear()
        meeting.run("dcba", version)
        expected = [f"{name} -> a Activate" for name in "bcd"]
        expected += [f"a -> {name} Begin" for name in "bcd"]
        assert Counter(meeting.said) == Counter(expected)


def test_those_who_wait_hear_of_the_end_and_the_others_do_not(meeting: Meeting):
    meeting.arrive_at("b", 1)
    meeting.settle()
    meeting.finish("abc")
    assert meeting["b"].ended == [(1, Outcome.DONE)]
    assert meeting["a"].ended == meeting["c"].ended == []
    assert [version_of(meeting[name]) for name in "abc"] == [1, 1, 1]


@pytest.mark.parametrize("order", ["abc", "cba", "bca"])
def test_those_who_arrive_at_once_run_the_version_once(meeting: Meeting, order: str):
    meeting.arrive_at(order, 1)
    meeting.settle()
    meeting.finish("abc")
    meeting.settle()
    assert all(meeting.versions(name) == [1] for name in "abc")
    assert all(meeting[name].ended == [(1, Outcome.DONE)] for name in "abc")
    assert meeting.groups() == {}


def test_who_arrives_after_the_version_has_run_is_told_so_at_once_and_runs_nothing(
    meeting: Meeting,
):
    meeting.arrive_at("a", 1)
    meeting.settle()
    meeting.finish("abc")
    meeting.arrive_at("c", 1)
    assert meeting["c"].ended == [(1, Outcome.LATE)]
    assert meeting.wire == []


def test_who_arrives_while_the_version_runs_waits_for_its_end(meeting: Meeting):
    meeting.arrive_at("a", 1)
    meeting.settle()
    meeting.arrive_at("c", 1)
    assert meeting["c"].ended == []
    meeting.finish("c")
    assert meeting["c"].ended == [(1, Outcome.DONE)]


def test_who_arrives_while_it_is_promised_to_the_version_waits_for_its_end(meeting: Meeting):
    meeting.arrive_at("a", 1)
    meeting.deliver("a", "c")
    meeting.arrive_at("c", 1)
    meeting.settle()
    assert meeting.groups()["c"] == "1:abc"
    meeting.finish("abc")
    meeting.settle()
    assert meeting["c"].ended == [(1, Outcome.DONE)]
    assert meeting.versions("c") == [1]


def test_an_average_that_broke_ends_the_version_for_those_who_wait(meeting: Meeting):
    meeting.arrive_at("ab", 1)
    meeting.settle()
    meeting.finish("abc", Outcome.LOST)
    assert meeting["a"].ended == meeting["b"].ended == [(1, Outcome.LOST)]
    meeting.run("abc", 2)
    assert meeting.versions("a") == [1, 2]


def test_an_average_says_whose_trainer_stands_still_for_it(meeting: Meeting):
    meeting.arrive_at("ac", 1)
    meeting.settle()
    assert {name: meeting[name].averages[0].awaited for name in "abc"} == {
        "a": True,
        "b": False,
        "c": True,
    }


def test_models_are_not_moved_to_be_averaged_with_nobody_and_gradients_are():
    alone = Meeting("a", everyone())
    alone.arrive_at("a", 1)
    assert alone["a"].ended == [(1, Outcome.DONE)]
    assert alone["a"].averages == []
    alone.check()
    alone = Meeting("a", everyone(what=What.STALE_GRADIENTS))
    alone.arrive_at("a", 1)
    assert [average.what for average in alone["a"].averages] == [What.STALE_GRADIENTS]
    assert alone.groups() == {"a": "1:a"}
    alone.finish("a")
    assert alone["a"].ended == [(1, Outcome.DONE)]
    alone.arrive_at("a", 2)
    assert alone.groups() == {"a": "2:a"}


# --- late members ---------------------------------------------------------------------------------


def test_a_slow_member_takes_part_in_versions_that_its_trainer_skips(meeting: Meeting):
    for version in range(1, 6):
        meeting.arrive_at("ab", version)
        meeting.settle()
        meeting.finish("abc")
    assert meeting.versions("c") == [1, 2, 3, 4, 5]
    meeting.arrive_at("c", 6)
    meeting.settle()
    assert meeting.groups() == {"a": "6:abc", "b": "6:abc", "c": "6:abc"}


def test_a_member_skips_the_versions_that_none_of_its_groups_ran():
    meeting = Meeting("abcd", pairs)
    meeting.run("ab", 1)
    meeting.arrive_at("b", 2)  # b and c; c has not run version 1
    meeting.settle()
    assert meeting.groups() == {"b": "2:bc", "c": "2:bc"}
    meeting.finish("bc")
    meeting.arrive_at("d", 1)  # and now d is there, with c, for version 1
    meeting.settle()
    assert meeting["d"].ended == [(1, Outcome.LATE)]
    assert version_of(meeting["d"]) == 2, "it knows how far the others are"
    assert meeting.versions("c") == [2]
    assert meeting.states()["d"] == "free", "it offers nothing any more"


def test_a_version_that_a_member_is_past_is_given_up_and_those_who_wait_for_it_are_told():
    def trio_first(version: int, peers: Sequence[PeerId], me: PeerId) -> Round:
        first = (A, B, D) if version == 1 else (C, D)
        return Round(first if me in first else (me,), What.MODELS)

    meeting = Meeting("abcd", trio_first)
    meeting.run("cd", 2)
    meeting.arrive_at("ab", 1)
    meeting.settle()
    assert meeting["a"].ended == [(1, Outcome.REFUSED)]
    assert meeting["b"].ended == [(1, Outcome.LATE)]
    assert meeting["a"].averages == meeting["b"].averages == []
    assert meeting.states() == dict.fromkeys("abcd", "free")
    assert version_of(meeting["a"]) == 2
    assert version_of(meeting["b"]) == 1


def test_an_offer_that_came_with_a_late_arrival_is_not_taken_for_a_later_version():
    """Its peer does not wait any more; a group that counts on it would break at once."""
    meeting = Meeting("abcd", pairs)
    meeting.run("b", 2)
    meeting.finish("c")
    meeting.arrive_at("d", 1)
    meeting.settle()
    assert meeting["d"].ended == [(1, Outcome.LATE)]
    meeting.arrive_at("c", 3)
    meeting.settle()
    assert meeting.groups() == {"c": "3:cd", "d": "3:cd"}
    assert meeting["c"].abandoned == []


def test_an_offer_for_a_version_that_was_given_up_is_not_taken_for_a_later_one():
    meeting = Meeting("abc", everyone())
    meeting.withdraw("c")
    meeting.arrive_at("b", 1)
    meeting.settle()
    assert meeting["b"].ended == [(1, Outcome.LATE)]
    for name in "ab":
        meeting.hear_left(name, "c")
    meeting.arrive_at("a", 2)
    meeting.settle()
    assert meeting.groups() == {"a": "2:ab", "b": "2:ab"}
    assert meeting["a"].abandoned == []


def test_an_older_offer_that_comes_late_does_not_stand_for_the_newer_one():
    meeting = Meeting("abc", everyone(Rule(waiting=3)))
    meeting.arrive_at("b", 1)
    late = meeting.take("b", "a")
    meeting.see("b", "b")  # it has lost sight of all others for a moment, so that it coordinates
    meeting.see("b", "abc")
    meeting.settle()
    meeting.release(late)
    meeting.arrive_at("ac", 1)
    meeting.settle()
    assert meeting.groups() == {"a": "1:abc", "b": "1:abc", "c": "1:abc"}
    assert meeting["a"].abandoned == []


def test_a_version_that_was_given_up_is_not_requested_again():
    meeting = Meeting("abcd", everyone(Rule(waiting=2)))
    meeting.withdraw("d")
    meeting.arrive_at("bc", 1)
    meeting.settle()
    assert meeting["b"].ended == meeting["c"].ended == [(1, Outcome.LATE)]
    meeting.said.clear()
    meeting.arrive_at("a", 1)
    assert meeting["a"].ended == [(1, Outcome.LATE)]
    meeting.advance(4 * RESEND_S)
    assert meeting.said == []


def test_who_is_told_late_that_a_version_was_given_up_asks_and_hears_it_again():
    meeting = Meeting("abc", everyone())
    meeting.withdraw("c")
    meeting.arrive_at("b", 1)
    meeting.deliver("b", "a")
    meeting.deliver_all(Request)
    meeting.deliver_all(Relinquish)
    lost = meeting.take("a", "b")
    assert lost.message == Past(1)
    meeting.settle()
    assert meeting["b"].ended == []
    meeting.advance(RESEND_S)
    assert meeting["b"].ended == [(1, Outcome.LATE)]


def test_who_waits_for_a_version_is_content_with_a_later_one(meeting: Meeting):
    meeting.arrive_at("c", 1)
    meeting.wire.clear()  # nobody hears of it
    meeting.arrive_at("a", 7)
    meeting.settle()
    meeting.finish("abc")
    assert meeting["c"].ended == [(7, Outcome.DONE)]


def test_an_offer_for_a_version_is_good_for_a_later_one_too():
    meeting = Meeting("abc", lambda v, p, _: Round(tuple(p), What.MODELS, Rule(4 if v < 7 else 1)))
    meeting.arrive_at("bc", 1)
    meeting.settle()
    meeting.said.clear()
    meeting.arrive_at("a", 7)
    meeting.settle()
    assert meeting.said == ["a -> b Begin", "a -> c Begin"]
    meeting.finish("abc")
    assert meeting["c"].ended == [(7, Outcome.DONE)]


def test_an_offer_for_a_version_is_not_good_for_an_earlier_one():
    """It would say that the trainer has arrived there."""
    meeting = Meeting("abc", lambda v, p, _: Round(tuple(p), What.MODELS, Rule(3 if v == 5 else 1)))
    meeting.arrive_at("c", 5)
    meeting.settle()
    meeting.arrive_at("a", 3)
    assert meeting.on_wire() == ["a -> b Request", "a -> c Request"]
    meeting.settle()
    assert meeting.groups()["c"] == "3:abc"


def test_who_waits_for_a_later_version_takes_part_in_an_earlier_one_and_waits_on():
    meeting = Meeting("abc", lambda v, p, _: Round(tuple(p), What.MODELS, Rule(3 if v == 5 else 1)))
    meeting.arrive_at("c", 5)
    meeting.arrive_at("a", 3)
    meeting.settle()
    assert meeting.groups()["c"] == "3:abc"
    meeting.finish("abc")
    assert meeting["c"].ended == []
    meeting.arrive_at("ab", 5)
    meeting.settle()
    meeting.finish("abc")
    assert meeting["c"].ended == [(5, Outcome.DONE)]


# --- one group at a time --------------------------------------------------------------------------


def test_a_member_that_is_still_in_a_group_enters_the_next_one_when_it_is_over():
    meeting = Meeting("abcd", pairs)
    meeting.arrive_at("ac", 1)
    meeting.settle()
    meeting.finish("ab")
    meeting.arrive_at("b", 2)  # with c, which still averages with d
    (asked,) = meeting.wire
    ticket = asked.message.ticket  # type: ignore[union-attr]
    meeting.settle()
    assert meeting.groups() == {"c": "1:cd", "d": "1:cd"}
    assert meeting["c"].groups.lock.expects(ticket)
    assert not meeting["c"].groups.lock.holds(ticket)
    meeting.finish("c")
    meeting.settle()
    assert meeting.groups() == {"b": "2:bc", "c": "2:bc", "d": "1:cd"}
    assert meeting.together("bc") == ticket


def test_a_coordinator_that_is_still_in_a_group_runs_the_next_version_when_it_is_over():
    meeting = Meeting("abcd", pairs)
    meeting.arrive_at("a", 1)
    meeting.settle()
    meeting.arrive_at("c", 2)  # b coordinates it
    meeting.settle()
    assert meeting.groups() == {"a": "1:ab", "b": "1:ab"}
    meeting.finish("b")
    meeting.settle()
    assert meeting.groups() == {"a": "1:ab", "b": "2:bc", "c": "2:bc"}


def test_a_version_whose_member_is_busy_for_long_is_requested_until_it_runs():
    meeting = Meeting("abc", everyone())
    meeting.request("c", "b")
    meeting.settle()
    meeting.arrive_at("a", 1)
    meeting.settle()
    meeting.advance(3 * meeting.config.acquire_timeout_s)
    assert {*meeting["a"].requests.values()} == {Outcome.BUSY}
    assert len(meeting["a"].requests) >= 2
    meeting.finish("bc")
    meeting.settle()
    assert meeting.groups() == {"a": "1:abc", "b": "1:abc", "c": "1:abc"}
    assert meeting["a"].ended == []


def test_a_request_that_waited_while_a_later_version_ran_is_refused_with_how_far_we_are():
    meeting = Meeting("abc", everyone())
    later, earlier = Ticket(A, 1, 3), Ticket(B, 1, 2)
    meeting.request("c", "b")
    meeting.settle()
    meeting.say("a", "c", Request(later, 1, models_of(3)))
    meeting.say("b", "c", Request(earlier, 9, models_of(2)))
    assert [type(sent.message) for sent in meeting.wire] == [Failed, Failed]
    meeting.wire.clear()
    meeting.finish("c")
    meeting.say("a", "c", Begin(later, (A, C), purpose=models_of(3)))
    meeting.finish("c")
    assert [(sent.target, sent.message) for sent in meeting.wire[-2:]] == [
        ("b", Past(3)),
        ("b", Relinquish(earlier)),
    ]
    assert meeting.versions("c") == [3]


def test_our_own_request_is_not_started_when_its_version_has_begun_here_meanwhile():
    """B coordinates version 2, and a version 7 in which b takes part first."""

    def either(version: int, peers: Sequence[PeerId], me: PeerId) -> Round:
        members = (A, B) if version == 7 else (B, C)
        return Round(members if me in members else (me,), What.MODELS)

    meeting = Meeting("abc", either)
    claim = meeting.request("b", "a")
    meeting.settle()
    meeting.arrive_at("a", 7)
    meeting.finish("a")
    meeting.settle()  # a's request waits in b's queue
    meeting.arrive_at("c", 2)
    meeting.settle()  # and b's own for version 2, which is younger, for its turn
    meeting.finish("b")
    meeting.settle()
    assert meeting.groups() == {"a": "7:ab", "b": "7:ab"}
    meeting.finish("ab")
    meeting.advance(RESEND_S)
    assert meeting.groups() == {}
    assert meeting.versions("b") == [7], "version 2 is not run after it"
    assert meeting["c"].ended == [(2, Outcome.LATE)]
    ((_, outcome),) = [item for item in meeting["b"].requests.items() if item[0] != claim]
    assert outcome is Outcome.REFUSED
    assert "b -> c Request" not in meeting.said, "it was not even started"


def test_a_claim_and_a_version_that_want_the_same_peers_both_come_to_pass():
    """Whatever order their messages come in."""
    for seed in range(60):
        meeting, rng = Meeting("abc", everyone(Rule(waiting=1 + seed % 3))), Random(seed)
        claimer = rng.choice("abc")
        others = "abc".replace(claimer, "")
        claims: list[Ticket] = []
        acts: list[str] = [*"abc", "claim"]
        while acts or meeting.wire:
            if acts and (not meeting.wire or rng.random() < 0.3):
                act = acts.pop(rng.randrange(len(acts)))
                if act == "claim":
                    claims.append(meeting.request(claimer, others))
                else:
                    meeting.arrive_at(act, 1)
            else:
                meeting.deliver_at(rng.randrange(len(meeting.wire)))
        for _ in range(20):
            for ticket, names in meeting.complete().items():
                for name in names:
                    meeting.end(name, ticket)
            meeting.settle()
            meeting.advance(RESEND_S)
        assert all(meeting[name].ended for name in "abc"), seed
        assert all(meeting.versions(name) == [1] for name in "abc"), seed
        (claim,) = claims
        assert meeting[claimer].requests[claim] in (Outcome.DONE, Outcome.YIELDED), seed
        meeting.check()


# --- views that differ ----------------------------------------------------------------------------


def test_of_two_groups_of_one_version_a_shared_peer_enters_the_first_and_refuses_the_other(
    meeting: Meeting,
):
    """A and b do not see each other, so that both coordinate; both see c."""
    meeting.see("a", "ac")
    meeting.see("b", "bc")
    meeting.arrive_at("ab", 1)
    meeting.settle()
    assert meeting.groups() == {"a": "1:ac", "c": "1:ac"}
    meeting.finish("ac")
    meeting.settle()
    assert meeting.groups() == {}
    assert meeting["b"].ended == [(1, Outcome.REFUSED)]
    assert meeting.versions("c") == [1]


def test_of_two_groups_that_cannot_both_run_the_older_request_gets_its_own(meeting: Meeting):
    """B has lost sight of a, and requests c; a requests them both, and b gives way to it."""
    meeting.see("b", "bc")
    meeting.arrive_at("ab", 1)
    meeting.settle()
    assert meeting.groups() == {"a": "1:abc", "b": "1:abc", "c": "1:abc"}
    meeting.finish("abc")
    meeting.settle()
    assert meeting.groups() == {}
    assert [meeting[name].ended for name in "ab"] == [[(1, Outcome.DONE)]] * 2
    assert [meeting.versions(name) for name in "abc"] == [[1]] * 3


def test_who_believes_in_another_group_waits_until_the_views_agree():
    meeting = Meeting("abcd", pairs)
    meeting.see("b", "bcd")  # b believes in b and c, and c in c and d
    meeting.arrive_at("b", 1)
    meeting.settle()
    assert meeting.groups() == {"b": "1:bc", "c": "1:bc"}, (
        "one word is enough: who requests says with whom"
    )
    meeting = Meeting("abcd", pairs)
    meeting.see("c", "bcd")  # c believes that b coordinates its group
    meeting.arrive_at("c", 1)
    meeting.settle()
    assert meeting.groups() == {}
    meeting.see("c", "abcd")
    meeting.settle()
    assert meeting.groups() == {"c": "1:cd", "d": "1:cd"}


def test_the_next_by_name_is_the_coordinator_when_the_first_vanishes(meeting: Meeting):
    meeting.arrive_at("bc", 1)  # the words to a are under way
    meeting.die("a")
    meeting.settle()
    assert meeting.groups() == {"b": "1:bc", "c": "1:bc"}


def test_a_rule_that_waited_for_somebody_who_vanished_is_met():
    meeting = Meeting("abc", lambda _, p, __: Round(tuple(p), What.MODELS, Rule(len(p))))
    meeting.arrive_at("ab", 1)
    meeting.settle()
    assert meeting.groups() == {}
    meeting.die("c")
    meeting.settle()
    assert meeting.groups() == {"a": "1:ab", "b": "1:ab"}


# --- death, joining, leaving ----------------------------------------------------------------------


@pytest.mark.parametrize("victim", "abc")
def test_a_member_that_dies_inside_ends_the_version_for_those_who_are_in_it(
    meeting: Meeting, victim: str
):
    meeting.arrive_at("abc", 1)
    meeting.settle()
    ahead = "c" if victim == "b" else "b"
    meeting.finish(ahead)
    meeting.die(victim)
    behind = next(name for name in "abc" if name not in (ahead, victim))
    assert meeting[ahead].ended == [(1, Outcome.DONE)]
    assert meeting[behind].ended == [(1, Outcome.LOST)]
    assert [outcome for _, outcome in meeting[behind].abandoned] == [Outcome.LOST]
    meeting.run(ahead + behind, 2)
    assert meeting.versions(behind) == [1, 2]


def test_a_group_that_waits_for_us_is_forgotten_when_its_coordinator_vanishes():
    meeting = Meeting("abcd", pairs)
    meeting.arrive_at("ac", 1)
    meeting.settle()
    meeting.finish("ab")
    meeting.arrive_at("b", 2)
    meeting.settle()
    meeting.die("b")
    meeting.finish("cd")
    meeting.settle()
    assert meeting.groups() == {}
    assert meeting.states()["c"] == "free"
    assert meeting.versions("c") == [1]


def test_a_version_one_of_whose_members_dies_before_it_has_granted_runs_without_it(
    meeting: Meeting,
):
    meeting.arrive_at("a", 1)
    meeting.take("a", "c")
    meeting.settle()
    meeting.die("c")
    meeting.settle()
    assert meeting.groups() == {"a": "1:ab", "b": "1:ab"}
    assert [*meeting["a"].requests.values()] == [Outcome.LOST]
    assert meeting["a"].ended == []


def test_a_coordinator_that_dies_while_it_collects_is_replaced(meeting: Meeting):
    meeting.arrive_at("b", 1)
    meeting.deliver("b", "a")
    meeting.deliver("a", "c")
    meeting.die("a")  # c is promised to it, b has offered its slot
    meeting.settle()
    assert meeting.groups() == {"b": "1:bc", "c": "1:bc"}


def test_what_a_peer_said_in_an_earlier_life_does_not_count():
    meeting = Meeting("abc", everyone(Rule(waiting=2)))
    meeting.arrive_at("c", 1)
    meeting.settle()
    meeting.die("c")
    meeting.add("c", "abc", incarnation=2)
    for name in "ab":
        meeting.see(name, "abc")
    meeting.arrive_at("a", 1, waits=False)
    meeting.settle()
    assert meeting.groups() == {}, "nobody who is here waits"
    meeting.arrive_at("b", 1)
    meeting.settle()
    assert meeting.groups() == {}, "one who is here waits"


def test_a_joiner_is_told_how_far_the_others_are_and_goes_on_with_them(meeting: Meeting):
    for version in range(1, 4):
        meeting.run("abc", version)
    meeting.join("d")
    meeting.arrive_at("d", 1)
    meeting.settle()
    assert meeting["d"].ended == [(1, Outcome.LATE)]
    assert version_of(meeting["d"]) == 3
    meeting.run("abcd", 4)
    assert meeting["d"].ended[-1] == (4, Outcome.DONE)


def test_a_joiner_that_is_first_by_name_coordinates_from_then_on():
    meeting = Meeting("bc", everyone())
    meeting.run("bc", 1)
    meeting.join("a")
    meeting.arrive_at("b", 2)
    meeting.settle()
    assert meeting.together("abc").initiator == "a"
    assert meeting.groups() == {"a": "2:abc", "b": "2:abc", "c": "2:abc"}
    meeting.check()


def test_a_peer_without_a_model_is_in_no_version_and_counts_nobodys_arrival(meeting: Meeting):
    meeting["a"].has_model = False
    meeting.arrive_at("b", 1)
    meeting.settle()
    assert meeting.said == ["b -> a Activate"]
    meeting["a"].has_model = True
    meeting["c"].has_model = False
    meeting.advance(RESEND_S)
    assert meeting.groups() == {}
    assert meeting["c"].averages == []


def test_who_withdraws_ends_its_wait_and_refuses_what_comes(meeting: Meeting):
    meeting.arrive_at("c", 1)
    meeting.wire.clear()
    meeting.withdraw("c")
    assert meeting["c"].ended == [(1, Outcome.WITHDRAWN)]
    assert meeting.states()["c"] == "free"
    meeting.arrive_at("c", 2)
    assert meeting["c"].ended[-1] == (2, Outcome.WITHDRAWN)
    meeting.arrive_at("ab", 1)
    meeting.settle()
    assert meeting["a"].ended == [(1, Outcome.REFUSED)]
    assert meeting["b"].ended == [(1, Outcome.LATE)]
    assert meeting["c"].averages == []


def test_who_withdraws_finishes_the_group_it_is_in_and_refuses_those_that_wait_for_it():
    meeting = Meeting("abcd", pairs)
    meeting.arrive_at("ac", 1)
    meeting.settle()
    meeting.finish("ab")
    meeting.arrive_at("b", 2)
    meeting.settle()
    meeting.withdraw("c")
    meeting.settle()
    assert meeting.groups() == {"c": "1:cd", "d": "1:cd"}
    meeting.finish("cd")
    meeting.settle()
    assert meeting["c"].ended == [(1, Outcome.DONE)]
    assert meeting["b"].ended == [(2, Outcome.REFUSED)]
    assert meeting.versions("c") == [1]


def test_a_coordinator_that_withdraws_requests_nothing_more(meeting: Meeting):
    meeting.withdraw("a")
    meeting.arrive_at("b", 1)
    meeting.advance(3 * RESEND_S)
    assert {*meeting.said} == {"b -> a Activate"}
    meeting.see("b", "bc")
    meeting.settle()
    assert meeting.groups() == {"b": "1:bc", "c": "1:bc"}


def test_a_peer_without_a_schedule_takes_no_part():
    deaf = Meeting("c")
    ticket = Ticket(A, 1, 1)
    deaf.say("a", "c", Activate(1, True))
    deaf.say("a", "c", Past(4))
    assert deaf.said == []
    deaf.say("a", "c", Request(ticket, 1, models_of(1)))
    assert [sent.message for sent in deaf.wire] == [Relinquish(ticket)]
    assert deaf["c"].averages == []


# --- lost, repeated, out of order -----------------------------------------------------------------


@pytest.mark.parametrize("lost", range(5))
def test_any_message_of_a_version_may_be_lost(meeting: Meeting, lost: int):
    """Activate, the request to b, its grant, and two words that it has begun; one is lost."""
    meeting.arrive_at("c", 1)
    for index in range(lost + 1):
        assert meeting.wire
        meeting.wire.pop(0) if index == lost else meeting.deliver_at(0)
    meeting.settle()
    meeting.advance(RESEND_S)
    assert meeting.groups() == {"a": "1:abc", "b": "1:abc", "c": "1:abc"}
    assert all(meeting.versions(name) == [1] for name in "abc")


def test_who_was_not_asked_and_arrives_is_in_the_group(meeting: Meeting):
    meeting.arrive_at("a", 1)
    meeting.wire.clear()
    meeting.arrive_at("c", 1)
    meeting.settle()
    meeting.advance(RESEND_S)
    assert meeting.groups() == {"a": "1:abc", "b": "1:abc", "c": "1:abc"}


def test_who_is_told_late_hears_of_the_first_members_also_of_those_lost_since(meeting: Meeting):
    meeting.arrive_at("a", 1)
    meeting.deliver_all(Request)
    meeting.deliver("b", "a")
    meeting.deliver("c", "a")
    meeting.wire.clear()  # it has begun, and nobody hears of it
    (average,) = meeting["a"].averages
    meeting["a"].groups.lock.regroup(average.ticket, (A, B))  # c is gone
    meeting.advance(RESEND_S)
    assert meeting.groups()["b"] == "1:abc"


def test_a_lost_answer_to_a_late_peer_is_asked_for_again():
    meeting = Meeting("abcd", pairs)
    meeting.run("b", 2)
    meeting.finish("c")
    meeting.arrive_at("d", 1)
    meeting.deliver("d", "c")
    assert [(s.source, s.target, s.message) for s in meeting.wire] == [("c", "d", Past(2))]
    meeting.wire.clear()
    meeting.advance(RESEND_S)
    assert meeting["d"].ended == [(1, Outcome.LATE)]


def test_a_lost_refusal_comes_again_with_the_next_request(meeting: Meeting):
    meeting.withdraw("c")
    meeting.arrive_at("a", 1)
    meeting.deliver("a", "b")
    meeting.deliver("a", "c")
    meeting.take("c", "a")
    meeting.settle()
    assert meeting["a"].ended == []
    meeting.advance(RESEND_S)
    assert meeting["a"].ended == [(1, Outcome.REFUSED)]
    assert meeting.groups() == {}
    assert meeting.states()["b"] == "free"


def test_who_hears_how_far_another_is_knows_it_though_it_waits_for_nothing(meeting: Meeting):
    meeting.say("c", "b", Past(5))
    assert version_of(meeting["b"]) == 5
    meeting.say("c", "b", Past(3))
    assert version_of(meeting["b"]) == 5
    assert meeting["b"].ended == []


def test_words_that_come_twice_or_late_change_nothing(meeting: Meeting):
    meeting.arrive_at("b", 1)
    heard = []
    while meeting.wire:
        heard.append(meeting.wire[0])
        meeting.deliver_at(0)
    for sent in heard:
        meeting.release(sent)
    meeting.settle()
    meeting.finish("abc")
    for sent in heard:
        meeting.release(sent)
    meeting.settle()
    meeting.advance(4 * RESEND_S)
    assert all(meeting.versions(name) == [1] for name in "abc")
    assert meeting["b"].ended == [(1, Outcome.DONE)]
    assert meeting.states() == dict.fromkeys("abc", "free")


def test_an_older_word_of_a_peer_does_not_undo_its_newer_one():
    meeting = Meeting("abc", everyone(Rule(waiting=2)))
    meeting.say("c", "a", Activate(4, True))
    meeting.say("c", "a", Activate(3, True))
    meeting.arrive_at("b", 4)
    meeting.settle()
    assert meeting.groups()["a"] == "4:abc"


def test_a_word_that_one_does_not_wait_does_not_undo_that_one_does():
    meeting = Meeting("abc", everyone())
    meeting.arrive_at("b", 1, waits=False)
    late = meeting.take("b", "a")
    meeting.arrive_at("b", 1)
    meeting.settle()
    meeting.finish("abc")
    meeting.release(late)
    meeting.settle()
    assert meeting.versions("b") == [1]
    assert meeting["b"].ended == [(1, Outcome.DONE)]
    meeting = Meeting("abc", everyone(Rule(waiting=2)))
    meeting.say("c", "a", Activate(1, True))
    meeting.say("c", "a", Activate(1, False))
    meeting.arrive_at("b", 1)
    meeting.settle()
    assert meeting.groups()["a"] == "1:abc"


def test_an_old_answer_does_not_end_a_newer_wait(meeting: Meeting):
    meeting.arrive_at("c", 5)
    meeting.say("a", "c", Past(3))
    assert meeting["c"].ended == []
    meeting.settle()
    assert meeting.groups()["c"] == "5:abc"


def test_a_claim_takes_an_offer_back_and_the_slot_is_offered_again_afterwards():
    meeting = Meeting("abc", everyone(Rule(waiting=3)))
    meeting.arrive_at("bc", 1)
    meeting.settle()
    first = meeting["c"].groups.lock.state
    assert isinstance(first, Offered)
    claim = meeting.request("b", "c")
    meeting.settle()
    assert meeting.groups() == {"b": "bc", "c": "bc"}
    meeting.say("c", "a", Activate(1, True, first.ticket))  # a late duplicate
    assert [sent.message for sent in meeting.wire] == [Release(first.ticket)]
    meeting.settle()
    meeting.finish("bc")
    assert [meeting.states()[name] for name in "bc"] == ["offered to a"] * 2
    meeting.settle()
    meeting.said.clear()
    meeting.arrive_at("a", 1)
    assert meeting.said == ["a -> b Begin", "a -> c Begin"]
    meeting.settle()
    assert len(meeting.groups()) == 3
    assert meeting["b"].requests == {claim: Outcome.DONE}


# --- rules ----------------------------------------------------------------------------------------


def test_all_of_them_run_when_the_last_one_arrives():
    meeting = Meeting("abc", everyone(Rule(waiting=3)))
    meeting.arrive_at("ca", 1)
    meeting.settle()
    assert meeting.groups() == {}
    meeting.arrive_at("b", 1)
    meeting.settle()
    assert meeting.groups() == {"a": "1:abc", "b": "1:abc", "c": "1:abc"}


def test_a_quorum_runs_when_so_many_have_arrived_and_takes_the_others_along():
    meeting = Meeting("abcd", everyone(Rule(waiting=2)))
    meeting.arrive_at("d", 1)
    meeting.settle()
    assert meeting.groups() == {}
    meeting.arrive_at("c", 1)
    meeting.settle()
    assert len(meeting.groups()) == 4


def test_who_is_beyond_a_version_counts_for_it_and_who_is_not_there_yet_does_not():
    meeting = Meeting("abc", everyone(Rule(waiting=3)))
    meeting.arrive_at("c", 5)
    meeting.arrive_at("ab", 3)
    meeting.settle()
    assert meeting.groups()["c"] == "3:abc"
    meeting = Meeting("abc", everyone(Rule(waiting=3)))
    meeting.arrive_at("c", 3)
    meeting.arrive_at("ab", 5)
    meeting.settle()
    assert meeting.groups()["c"] == "3:abc"
    meeting.finish("abc")
    meeting.settle()
    assert meeting.groups() == {}


def test_an_initiator_runs_the_version_and_those_before_it_wait():
    meeting = Meeting("abc", everyone(Rule(initiator=B)))
    meeting.arrive_at("ac", 1)
    meeting.arrive_at("b", 1, waits=False)
    meeting.settle()
    assert meeting.groups() == {}, "b has gone on and will be back"
    meeting.arrive_at("b", 1)
    meeting.settle()
    assert len(meeting.groups()) == 3


def test_who_does_not_wait_does_not_count_and_is_taken_along():
    meeting = Meeting("abc", everyone(Rule(waiting=2)))
    meeting.arrive_at("a", 1, waits=False)
    meeting.arrive_at("c", 1)
    meeting.settle()
    assert meeting.groups() == {}
    meeting.arrive_at("b", 1)
    meeting.settle()
    assert len(meeting.groups()) == 3
    meeting.finish("abc")
    assert meeting["a"].ended == []
    assert meeting["c"].ended == [(1, Outcome.DONE)]


def test_who_does_not_wait_offers_nothing(meeting: Meeting):
    meeting.arrive_at("c", 1, waits=False)
    (sent,) = meeting.wire
    assert sent.message == Activate(1, False)
    assert meeting.states()["c"] == "free"


def test_who_arrived_without_waiting_may_wait_at_the_same_version_later():
    meeting = Meeting("abc", everyone())
    meeting.arrive_at("b", 1, waits=False)
    meeting.settle()
    meeting.arrive_at("b", 1)
    meeting.settle()
    assert len(meeting.groups()) == 3


def test_a_grace_lets_others_arrive_after_enough_have():
    meeting = Meeting("abc", everyone(Rule(grace_s=0.5)))
    meeting.arrive_at("b", 1)
    meeting.settle()
    assert meeting.groups() == {}
    meeting.advance(0.3)
    assert meeting.groups() == {}
    meeting.advance(0.3)
    assert len(meeting.groups()) == 3


def test_a_grace_that_has_passed_sets_no_timer():
    """A timer that is due for ever would keep the loop busy."""
    meeting = Meeting("abc", everyone(Rule(waiting=2, grace_s=0.5)))
    meeting.arrive_at("ab", 1)
    meeting.settle()
    meeting.hear_dead("a", "b")
    meeting.advance(1.0)
    assert all(due > meeting.time for due, _ in meeting.due())


def test_no_grace_is_left_once_all_are_here():
    meeting = Meeting("abc", everyone(Rule(grace_s=60)))
    for name in "abc":
        meeting.arrive_at(name, 1)
    meeting.settle()
    assert len(meeting.groups()) == 3


def test_the_limiter_waits_for_whoever_would_fall_further_behind():
    meeting = Meeting("abc", everyone(Rule(limiter=4)))
    meeting.run("abc", 1)
    for version in range(2, 6):
        meeting.arrive_at("ab", version)
        meeting.settle()
        meeting.finish("abc")
    meeting.arrive_at("ab", 6)
    meeting.settle()
    assert meeting.groups() == {}, "c knows version 1, which is five versions ago"
    meeting.arrive_at("c", 6, waits=False)
    meeting.settle()
    assert len(meeting.groups()) == 3


def test_the_limiter_counts_who_passes_by_from_the_last_version_it_surely_knew():
    meeting = Meeting("abc", everyone(Rule(limiter=4)))
    meeting.run("abc", 1)
    for version in range(2, 6):
        meeting.arrive_at("ab", version)
        meeting.settle()
        meeting.finish("abc")
    meeting.arrive_at("c", 6, waits=False)  # it may have missed version 5, if that still ran
    for version in range(6, 9):
        meeting.arrive_at("ab", version)
        meeting.settle()
        meeting.finish("abc")
    meeting.arrive_at("ab", 9)
    meeting.settle()
    assert meeting.groups() == {}


def test_the_limiter_counts_a_newcomer_from_when_it_is_first_seen():
    meeting = Meeting("ab", everyone(Rule(limiter=2)))
    for version in range(1, 10):
        meeting.run("ab", version)
    meeting.join("c")
    for version in (10, 11):
        meeting.arrive_at("ab", version)
        meeting.settle()
        meeting.finish("abc")
    meeting.arrive_at("ab", 12)
    meeting.settle()
    assert meeting.groups() == {}


def test_who_waits_for_one_that_is_beyond_by_another_view_goes_on_when_it_has_asked():
    """B ran version 1 alone, since it knew of nobody: no coordinator of that hears of it."""

    def waiting_pairs(version: int, peers: Sequence[PeerId], me: PeerId) -> Round:
        members = pairs(version, peers, me).members
        return Round(members, What.MODELS, Rule(waiting=len(members)))

    meeting = Meeting("abc", waiting_pairs)
    meeting.see("b", "b")
    meeting.arrive_at("b", 1)
    meeting.see("b", "abc")
    meeting.arrive_at("b", 2)
    meeting.arrive_at("a", 1)
    meeting.settle()
    assert meeting["a"].ended == []
    meeting.advance(RESEND_S)
    assert meeting["a"].ended == [(1, Outcome.REFUSED)]
    meeting.arrive_at("c", 2)
    meeting.settle()
    assert meeting.groups() == {"b": "2:bc", "c": "2:bc"}
    meeting.check()


# --- any interleaving -----------------------------------------------------------------------------


def butterfly(version: int, peers: Sequence[PeerId], me: PeerId) -> Round:
    """Pairs whose places differ in one bit; a peer without a partner is alone."""
    place = peers.index(me)
    other = place ^ (1 << (version % 2))
    places = sorted({place, other if other < len(peers) else place})
    return Round(tuple(peers[p] for p in places), What.MODELS)


SCHEDULES = {
    "pairs": pairs,
    "butterfly": butterfly,
    "solo": everyone(),
    "quorum": everyone(Rule(waiting=2)),
    "all": lambda _, p, __: Round(tuple(p), What.MODELS, Rule(len(p))),
    "limited": everyone(Rule(limiter=3)),
    "initiator": lambda v, p, __: Round(tuple(p), What.MODELS, Rule(initiator=p[v % len(p)])),
}


class Story:
    """Trainers that arrive version after version, while chance decides what happens next.

    Beside them peers claim groups, if they are said to.
    """

    def __init__(
        self, schedule: str, count: int, seed: int, loss: float, *, claims: bool = False
    ) -> None:
        self.meeting = Meeting("abcdef"[:count], SCHEDULES[schedule])
        self.chance = Random(f"{schedule}/{count}/{seed}")
        self.loss = loss
        self.claims = claims

    def act(self) -> None:
        meeting, chance = self.meeting, self.chance
        match chance.randrange(9):
            case 0 | 6 | 7 | 8 if meeting.wire:  # more than timers say again
                index = chance.randrange(len(meeting.wire))
                if chance.random() < self.loss:
                    del meeting.wire[index]
                elif chance.random() < self.loss:
                    meeting.wire.append(meeting.wire[index])
                else:
                    meeting.deliver_at(index)
            case 1:
                name = chance.choice(sorted(meeting.guests))
                self.arrive(name, waits=chance.random() < 0.8)
            case 2:
                self.finish_one()
            case 3 if chance.random() < 0.1:
                meeting.time += RESEND_S
                self.fire()
            case 4 if chance.random() < 0.02:
                name = chance.choice(sorted(meeting.guests))
                seen = [other for other in meeting.guests if chance.random() < 0.7]
                meeting.see(name, "".join(seen))
            case 5 if self.claims and chance.random() < 0.3:
                name, *others = chance.sample(sorted(meeting.guests), len(meeting.guests))
                meeting.request(name, "".join(others), chance.randint(1, len(others)))
        meeting.check()

    def arrive(self, name: str, *, waits: bool = True) -> None:
        """If its trainer does not wait: it has made a step, and is at the next version."""
        part = self.meeting[name].groups.wait_avoiding
        arrival, group = part.arrival, part.group
        if not (arrival and arrival.waits) and not (group and group.awaited):
            self.meeting.arrive_at(name, part.version + 1, waits=waits)

    def finish_one(self) -> None:
        """A group all of whose members have entered it ends at one of them.

        One that a member does not enter breaks: at once, if that one refuses its streams.
        """
        meeting = self.meeting
        for name, guest in meeting.guests.items():
            group = guest.group
            if not group:
                continue
            others = [meeting.guests[peer] for peer in group.members if peer != name]
            missing = [o for o in others if group.ticket not in [a.ticket for a in o.averages]]
            refused = any(not o.groups.lock.expects(group.ticket) for o in missing)
            if not missing:
                meeting.end(name, group.ticket)
                return
            if self.chance.random() < (0.5 if refused else 0.02):
                meeting.end(name, group.ticket, Outcome.LOST)
                return

    def fire(self) -> None:
        for at, name in self.meeting.due():
            if at <= self.meeting.time:
                self.meeting.fire(name)

    def heal(self, steps: int) -> None:
        """No more loss, one view; every trainer makes so many more steps, then all groups end."""
        names = "".join(sorted(self.meeting.guests))
        for name in names:
            self.meeting.see(name, names)
        for step in range(2 * steps):
            for name in names if step < steps else ():
                self.arrive(name)
            self.meeting.settle()
            self.finish_one()
            self.meeting.time += RESEND_S / 4
            self.fire()
            self.meeting.check()


@pytest.mark.parametrize("claims", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
@settings(max_examples=20, deadline=None)
@given(count=st.integers(2, 6), seed=st.integers(0, 10**6), loss=st.sampled_from([0.0, 0.2]))
def test_whatever_happens_versions_run_once_and_no_wait_is_for_ever(
    schedule: str, count: int, seed: int, loss: float, claims: bool
):
    story = Story(schedule, count, seed, loss, claims=claims)
    for _ in range(300):
        story.act()
    guests = story.meeting.guests
    before = {name: len(guest.ended) for name, guest in guests.items()}
    arrivals = {name: guest.groups.wait_avoiding.arrival for name, guest in guests.items()}
    waited = [name for name, arrival in arrivals.items() if arrival and arrival.waits]
    story.heal(steps=60)
    assert story.meeting.groups() == {}
    for name in waited:
        assert len(guests[name].ended) > before[name], f"{name} waits for ever"


@pytest.mark.parametrize("schedule", ["pairs", "butterfly", "solo"])
def test_members_of_one_ticket_agree_on_who_they_are(schedule: str):
    story = Story(schedule, 6, 1, 0.1)
    for _ in range(6000):
        story.act()
    members: dict[Ticket, set[tuple[PeerId, ...]]] = {}
    for guest in story.meeting.guests.values():
        for average in guest.averages:
            members.setdefault(average.ticket, set()).add(average.members)
    assert len(members) > 10
    assert all(len(versions) == 1 for versions in members.values())


# --- views that change often ----------------------------------------------------------------------


def test_a_view_that_changes_often_does_not_keep_the_missing_from_being_asked():
    """Each change postponed it: while a suspect came and went, no question was sent."""
    meeting = Meeting("abc", everyone(Rule(waiting=3)))
    meeting.arrive_at("ab", 1)
    meeting.settle()
    for change in range(20):
        meeting.see("a", "abcd" if change % 2 else "abc")
        meeting.advance(0.8 * RESEND_S)
    assert meeting.said.count("a -> c Activate") > 5


@pytest.mark.parametrize("arrive", ["arrive", "arrive_at"])
def test_a_view_that_changes_without_a_new_coordinator_costs_those_who_wait_no_message(arrive: str):
    meeting = Meeting("abc", everyone(Rule(waiting=3)))
    getattr(meeting, arrive)("b", 1)
    before = len(meeting.said)
    for name in "def":
        meeting.see("b", f"abc{name}")
    assert meeting.said[before:] == []
    meeting.see("b", "bc")
    assert meeting["b"].groups.next_deadline() is not None


# --- one that has left a version out --------------------------------------------------------------


def table(version: int, peers: Sequence[PeerId], me: PeerId) -> Round:
    """All meet at odd versions; at even ones the first is alone. All members are waited for."""
    alone = peers[:1] if version % 2 == 0 else ()
    members = tuple(alone if me in alone else (p for p in peers if p not in alone))
    return Round(members, What.MODELS, Rule(waiting=len(members)))


@pytest.mark.parametrize(("behind", "beyond"), ["bc", "cb"])
def test_one_that_waits_beyond_a_version_does_not_keep_its_group_waiting(behind: str, beyond: str):
    meeting = Meeting("abc", table)
    meeting.arrive_at("a", 5)
    meeting.arrive_at(beyond, 5)
    meeting.arrive_at(behind, 4)
    meeting.settle()
    meeting.advance(RESEND_S)
    meeting.settle()
    assert meeting.groups() == {"b": "4:bc", "c": "4:bc"}
    meeting.finish("bc")
    meeting.arrive_at(behind, 5)
    meeting.settle()
    assert set(meeting.groups().values()) == {"5:abc"}
    meeting.check()
