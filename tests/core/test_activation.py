"""Wait-avoiding groups: who activates, who is late, whose view differs, who dies, what is lost."""

from collections.abc import Iterator, Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from p2ptrain.core.activation import Activation, Round, Rule

from p2ptrain.core.effects import Effect, What
from p2ptrain.core.events import Outcome
from p2ptrain.core.messages import Activate, Decline, Past, Run
from p2ptrain.ids import PeerId, Ticket
from tests.helpers.crowd import RESEND_S, Crowd, everyone, pairs

A, B, C, D = (PeerId(name) for name in "abcd")


@pytest.fixture
def crowd() -> Iterator[Crowd]:
    crowd = Crowd("abc", everyone())
    yield crowd
    crowd.check()


# --- the first one activates ----------------------------------------------------------------------


@pytest.mark.parametrize("first", "abc")
def test_whoever_arrives_first_runs_the_version_for_everyone(crowd: Crowd, first: str):
    crowd.arrive(first, 1)
    crowd.settle()
    assert crowd.groups() == {"a": "1:abc", "b": "1:abc", "c": "1:abc"}
    assert len({crowd[name].averages[0].ticket for name in "abc"}) == 1


def test_those_who_wait_hear_of_the_end_and_the_others_do_not(crowd: Crowd):
    crowd.arrive("b", 1)
    crowd.settle()
    crowd.finish("abc")
    assert crowd["b"].ended == [(1, Outcome.DONE)]
    assert crowd["a"].ended == crowd["c"].ended == []
    assert [crowd[name].activation.version for name in "abc"] == [1, 1, 1]


@pytest.mark.parametrize("order", ["abc", "cba", "bca"])
def test_those_who_arrive_at_once_run_the_version_once(crowd: Crowd, order: str):
    crowd.arrive(order, 1)
    crowd.settle()
    crowd.finish("abc")
    crowd.settle()
    assert all(crowd.versions(name) == [1] for name in "abc")
    assert all(crowd[name].ended == [(1, Outcome.DONE)] for name in "abc")


def test_who_arrives_after_the_version_has_run_is_told_so_at_once_and_runs_nothing(crowd: Crowd):
    crowd.arrive("a", 1)
    crowd.settle()
    crowd.finish("abc")
    crowd.arrive("c", 1)
    assert crowd["c"].ended == [(1, Outcome.LATE)]
    assert crowd.wire == []


def test_who_arrives_while_the_version_runs_waits_for_its_end(crowd: Crowd):
    crowd.arrive("a", 1)
    crowd.settle()
    crowd.arrive("c", 1)
    assert crowd["c"].ended == []
    crowd.finish("c")
    assert crowd["c"].ended == [(1, Outcome.DONE)]


def test_an_average_that_broke_ends_the_version_for_those_who_wait(crowd: Crowd):
    crowd.arrive("ab", 1)
    crowd.settle()
    crowd.finish("abc", Outcome.LOST)
    assert crowd["a"].ended == crowd["b"].ended == [(1, Outcome.LOST)]
    crowd.run("abc", 2)
    assert crowd.versions("a") == [1, 2]


def test_a_group_is_awaited_by_those_whose_trainers_have_arrived_and_wait():
    crowd = Crowd("abc", everyone())
    crowd.arrive("ac", 1)
    crowd.settle()
    assert {name: crowd[name].averages[0].awaited for name in "abc"} == {
        "a": True,
        "b": False,
        "c": True,
    }


def test_models_are_not_moved_to_be_averaged_with_nobody_and_gradients_are():
    alone = Crowd("a", everyone())
    alone.arrive("a", 1)
    assert alone["a"].ended == [(1, Outcome.DONE)]
    assert alone["a"].averages == []
    alone = Crowd("a", everyone(what=What.LATE_GRADIENTS))
    alone.arrive("a", 1)
    assert [average.what for average in alone["a"].averages] == [What.LATE_GRADIENTS]


# --- late members ---------------------------------------------------------------------------------


def test_a_slow_member_takes_part_in_versions_that_its_trainer_skips(crowd: Crowd):
    for version in range(1, 6):
        crowd.arrive("ab", version)
        crowd.settle()
        crowd.finish("abc")
    assert crowd.versions("c") == [1, 2, 3, 4, 5]
    crowd.arrive("c", 6)
    crowd.settle()
    assert crowd.groups() == {"a": "6:abc", "b": "6:abc", "c": "6:abc"}


def test_a_member_skips_the_versions_that_none_of_its_groups_ran():
    crowd = Crowd("abcd", pairs)
    crowd.run("ab", 1)
    crowd.arrive("b", 2)  # b and c; c has not run version 1
    crowd.settle()
    assert crowd.groups() == {"b": "2:bc", "c": "2:bc"}
    crowd.finish("bc")
    crowd.arrive("d", 1)  # and now d is there, with c, for version 1
    crowd.settle()
    assert crowd["d"].ended == [(1, Outcome.LATE)]
    assert crowd["d"].activation.version == 2, "it knows how far the others are"
    assert crowd.versions("c") == [2]


def test_a_group_of_which_one_member_is_past_ends_at_once_for_all_of_it():
    def trio_first(version: int, peers: Sequence[PeerId], me: PeerId) -> Round:
        first = (A, B, D) if version == 1 else (C, D)
        return Round(first if me in first else (me,), What.MODELS)

    crowd = Crowd("abcd", trio_first)
    crowd.run("cd", 2)
    crowd.arrive("ab", 1)
    crowd.settle()
    assert crowd["a"].ended == crowd["b"].ended == [(1, Outcome.REFUSED)]
    assert [outcome for _, outcome in crowd["b"].abandoned] == [Outcome.REFUSED]
    assert crowd.groups() == {}
    assert crowd["a"].activation.version == 2


def test_who_waits_for_a_version_is_content_with_a_later_one(crowd: Crowd):
    crowd.arrive("c", 1)
    crowd.wire.clear()  # nobody hears of it
    crowd.arrive("a", 7)
    crowd.settle()
    crowd.finish("abc")
    assert crowd["c"].ended == [(7, Outcome.DONE)]


def test_who_waits_for_a_later_version_takes_part_in_an_earlier_one_and_waits_on():
    crowd = Crowd("abc", lambda v, p, _: Round(tuple(p), What.MODELS, Rule(3 if v == 5 else 1)))
    crowd.arrive("c", 5)
    crowd.arrive("a", 3)
    crowd.settle()
    assert crowd.groups()["c"] == "3:abc"
    crowd.finish("abc")
    assert crowd["c"].ended == []
    crowd.arrive("ab", 5)
    crowd.settle()
    crowd.finish("abc")
    assert crowd["c"].ended == [(5, Outcome.DONE)]


# --- one group at a time --------------------------------------------------------------------------


def test_a_member_that_is_still_in_a_group_enters_the_next_one_when_it_is_over():
    crowd = Crowd("abcd", pairs)
    crowd.arrive("ac", 1)
    crowd.settle()
    crowd.finish("ab")
    crowd.arrive("b", 2)  # with c, which still averages with d
    crowd.settle()
    assert crowd.groups() == {"b": "2:bc", "c": "1:cd", "d": "1:cd"}
    ticket = crowd["b"].averages[-1].ticket
    assert crowd["c"].activation.expects(ticket)
    assert not crowd["c"].activation.holds(ticket)
    crowd.finish("c")
    assert crowd.groups() == {"b": "2:bc", "c": "2:bc", "d": "1:cd"}


def test_a_host_that_is_still_in_a_group_runs_the_next_version_when_it_is_over():
    crowd = Crowd("abcd", pairs)
    crowd.arrive("a", 1)
    crowd.settle()
    crowd.arrive("c", 2)  # b is its host
    crowd.settle()
    assert crowd.groups() == {"a": "1:ab", "b": "1:ab"}
    crowd.finish("b")
    crowd.settle()
    assert crowd.groups() == {"a": "1:ab", "b": "2:bc", "c": "2:bc"}


def test_groups_wait_in_the_order_of_their_versions():
    crowd = Crowd("abc", everyone())
    one, two, three = (Ticket(A, 1, n) for n in (1, 2, 3))
    crowd.say("a", "c", Run(one, 1, (A, C)))
    crowd.say("a", "c", Run(three, 3, (A, C)))
    crowd.say("a", "c", Run(two, 2, (A, C)))
    for ticket in (one, two, three):
        assert crowd["c"].activation.holds(ticket)
        crowd.finish("c")
    assert crowd.versions("c") == [1, 2, 3]
    crowd.check()


# --- views that differ ----------------------------------------------------------------------------


def test_of_two_groups_of_one_version_a_shared_peer_enters_the_first_and_declines_the_other(
    crowd: Crowd,
):
    """A and b do not see each other, so that both are hosts; both see c."""
    crowd.see("a", "ac")
    crowd.see("b", "bc")
    crowd.arrive("ab", 1)
    crowd.settle()
    assert crowd.groups() == {"a": "1:ac", "c": "1:ac"}
    assert crowd["b"].ended == [(1, Outcome.REFUSED)]


def test_of_two_groups_that_cannot_both_run_nobody_is_left_in_one(crowd: Crowd):
    """B has lost sight of a: each declines the group of the other, and c loses both."""
    crowd.see("b", "bc")
    crowd.arrive("ab", 1)
    crowd.settle()
    assert crowd.groups() == {}
    assert crowd["a"].ended == crowd["b"].ended == [(1, Outcome.REFUSED)]
    crowd.see("b", "abc")
    crowd.run("abc", 2)
    assert all(crowd[name].ended[-1] == (2, Outcome.DONE) for name in "abc")


def test_who_believes_in_another_group_waits_until_the_views_agree():
    crowd = Crowd("abcd", pairs)
    crowd.see("b", "bcd")  # b believes in b and c, and c in c and d
    crowd.arrive("b", 1)
    crowd.settle()
    assert crowd.groups() == {"b": "1:bc", "c": "1:bc"}, (
        "one word is enough: tickets are the host's"
    )
    crowd = Crowd("abcd", pairs)
    crowd.see("c", "bcd")  # c believes that b is its host
    crowd.arrive("c", 1)
    crowd.settle()
    assert crowd.groups() == {}
    crowd.see("c", "abcd")
    crowd.settle()
    assert crowd.groups() == {"c": "1:cd", "d": "1:cd"}


def test_the_next_by_name_is_the_host_when_the_first_vanishes(crowd: Crowd):
    crowd.arrive("bc", 1)  # the words to a are under way
    crowd.die("a")
    crowd.settle()
    assert crowd.groups() == {"b": "1:bc", "c": "1:bc"}


def test_a_rule_that_waited_for_somebody_who_vanished_is_met():
    crowd = Crowd("abc", lambda _, p, __: Round(tuple(p), What.MODELS, Rule(len(p))))
    crowd.arrive("ab", 1)
    crowd.settle()
    assert crowd.groups() == {}
    crowd.die("c")
    crowd.settle()
    assert crowd.groups() == {"a": "1:ab", "b": "1:ab"}


# --- death, joining, leaving ----------------------------------------------------------------------


@pytest.mark.parametrize("victim", "abc")
def test_a_member_that_dies_inside_ends_the_version_for_those_who_are_in_it(
    crowd: Crowd, victim: str
):
    crowd.arrive("abc", 1)
    crowd.settle()
    ahead = "c" if victim == "b" else "b"
    crowd.finish(ahead)
    crowd.die(victim)
    behind = next(name for name in "abc" if name not in (ahead, victim))
    assert crowd[ahead].ended == [(1, Outcome.DONE)]
    assert crowd[behind].ended == [(1, Outcome.LOST)]
    assert [outcome for _, outcome in crowd[behind].abandoned] == [Outcome.LOST]
    crowd.run(ahead + behind, 2)
    assert crowd.versions(behind) == [1, 2]


def test_a_group_that_waits_for_us_ends_when_one_of_its_members_vanishes():
    crowd = Crowd("abcd", pairs)
    crowd.arrive("ac", 1)
    crowd.settle()
    crowd.finish("ab")
    crowd.arrive("b", 2)
    crowd.settle()
    crowd.die("b")
    crowd.finish("cd")
    assert crowd.groups() == {}
    assert crowd.versions("c") == [1]


def test_those_who_would_wait_for_us_in_a_group_that_cannot_run_are_told():
    crowd = Crowd("abcd", everyone())
    one, two = Ticket(A, 1, 1), Ticket(B, 1, 1)
    crowd.say("a", "c", Run(one, 1, (A, C)))
    crowd.say("b", "c", Run(two, 2, (B, C, D)))
    crowd.die("d")
    assert ("c", "b", Decline(two, 1)) in crowd.wire
    crowd.wire.clear()  # lost; and the host says it again
    crowd.say("b", "c", Run(two, 2, (B, C, D)))
    assert ("c", "b", Decline(two, 1)) in crowd.wire
    crowd.finish("c")
    assert crowd.versions("c") == [1]


def test_what_a_peer_said_in_an_earlier_life_does_not_count():
    crowd = Crowd("abc", everyone(Rule(waiting=2)))
    crowd.arrive("c", 1)
    crowd.settle()
    crowd.die("c")
    crowd.add("c", "abc", incarnation=2)
    for name in "ab":
        crowd.see(name, "abc")
    crowd.arrive("a", 1, waits=False)
    assert crowd.groups() == {}, "nobody who is here waits"


def test_a_joiner_is_told_how_far_the_others_are_and_goes_on_with_them(crowd: Crowd):
    for version in range(1, 4):
        crowd.run("abc", version)
    crowd.add("d", "abcd")
    for name in "abc":
        crowd.see(name, "abcd")
    crowd.arrive("d", 1)
    crowd.settle()
    assert crowd["d"].ended == [(1, Outcome.LATE)]
    assert crowd["d"].activation.version == 3
    crowd.run("abcd", 4)
    assert crowd["d"].ended[-1] == (4, Outcome.DONE)


def test_a_joiner_that_is_first_by_name_is_the_host_from_then_on():
    crowd = Crowd("bc", everyone())
    crowd.run("bc", 1)
    crowd.add("a", "abc")
    for name in "bc":
        crowd.see(name, "abc")
    crowd.arrive("b", 2)
    crowd.settle()
    assert crowd.groups() == {"a": "2:abc", "b": "2:abc", "c": "2:abc"}
    crowd.check()


def test_who_withdraws_ends_its_wait_and_declines_what_comes(crowd: Crowd):
    crowd.arrive("c", 1)
    crowd.wire.clear()
    crowd["c"].activation.withdraw()
    assert crowd["c"].ended == [(1, Outcome.WITHDRAWN)]
    crowd.arrive("c", 2)
    assert crowd["c"].ended[-1] == (2, Outcome.WITHDRAWN)
    crowd.arrive("b", 1)
    crowd.settle()
    assert crowd["b"].ended == [(1, Outcome.REFUSED)]
    assert crowd["c"].averages == []


def test_who_withdraws_finishes_the_group_it_is_in_and_leaves_those_it_waits_for():
    crowd = Crowd("abcd", pairs)
    crowd.arrive("ac", 1)
    crowd.settle()
    crowd.finish("ab")
    crowd.arrive("b", 2)
    crowd.settle()
    crowd["c"].activation.withdraw()
    crowd.settle()
    assert crowd["b"].ended == [(2, Outcome.REFUSED)]
    assert crowd.groups() == {"c": "1:cd", "d": "1:cd"}


def test_a_peer_without_a_schedule_takes_no_part(crowd: Crowd):
    effects: list[Effect] = []
    deaf = Activation(PeerId("z"), 1, RESEND_S, None, lambda: (PeerId("z"),), effects.append)
    deaf.receive(A, Run(Ticket(A, 1, 1), 1, (A, PeerId("z"))), 0.0)
    deaf.receive(A, Activate(1, True), 0.0)
    assert effects == []


# --- lost, repeated, out of order -----------------------------------------------------------------


def test_a_lost_activation_is_said_again(crowd: Crowd):
    crowd.arrive("c", 1)
    crowd.wire.clear()
    crowd.advance(RESEND_S)
    assert crowd.groups()["c"] == "1:abc"


def test_a_lost_run_is_said_again_while_the_hosts_average_runs(crowd: Crowd):
    crowd.arrive("a", 1)
    crowd.wire.clear()
    assert crowd.groups() == {"a": "1:abc"}
    crowd.advance(RESEND_S)
    assert crowd.groups() == {"a": "1:abc", "b": "1:abc", "c": "1:abc"}


def test_who_missed_the_run_and_asks_is_told_again(crowd: Crowd):
    crowd.arrive("a", 1)
    crowd.wire.clear()
    crowd.arrive("c", 1)
    crowd.settle()
    assert crowd.groups() == {"a": "1:abc", "c": "1:abc"}


def test_who_is_told_late_hears_of_the_first_members_also_of_those_lost_since(crowd: Crowd):
    crowd.arrive("a", 1)
    crowd.wire.clear()
    (average,) = crowd["a"].averages
    crowd["a"].activation.regroup(average.ticket, (PeerId("a"), PeerId("b")))  # c is gone
    crowd.advance(RESEND_S)
    assert crowd.groups()["b"] == "1:abc"


def test_a_lost_answer_to_a_late_peer_is_asked_for_again():
    crowd = Crowd("abcd", pairs)
    crowd.run("b", 2)
    crowd.finish("c")
    crowd.arrive("d", 1)
    crowd.deliver(0)
    assert crowd.wire == [("c", "d", Past(2))]
    crowd.wire.clear()
    crowd.advance(RESEND_S)
    assert crowd["d"].ended == [(1, Outcome.LATE)]


def test_a_lost_refusal_comes_again_with_the_next_run(crowd: Crowd):
    crowd["c"].activation.withdraw()
    crowd.arrive("a", 1)
    crowd.deliver(0)  # Run to b
    crowd.deliver(0)  # Run to c
    crowd.wire.clear()  # c declines to a and b
    crowd.advance(RESEND_S)
    assert crowd["a"].ended == [(1, Outcome.REFUSED)]
    assert crowd.groups() == {}


def test_a_refusal_that_comes_before_the_run_is_remembered(crowd: Crowd):
    ticket = Ticket(A, 1, 1)
    crowd.say("c", "b", Decline(ticket, 5))
    crowd.say("a", "b", Run(ticket, 1, (A, B, C)))
    assert crowd["b"].averages == []
    assert crowd["b"].activation.is_over(ticket)
    assert crowd["b"].activation.version == 5


def test_words_that_come_twice_or_late_change_nothing(crowd: Crowd):
    crowd.arrive("b", 1)
    crowd.settle()
    ticket = crowd["b"].averages[0].ticket
    run = Run(ticket, 1, (A, B, C))
    crowd.say("a", "b", run)
    crowd.finish("abc")
    crowd.say("a", "b", run)
    crowd.say("c", "b", Decline(ticket, 1))
    crowd.say("b", "a", Activate(1, True))
    crowd.settle()
    assert all(crowd.versions(name) == [1] for name in "abc")
    assert crowd["b"].ended == [(1, Outcome.DONE)]
    assert crowd.groups() == {}


def test_an_older_word_of_a_peer_does_not_undo_its_newer_one():
    crowd = Crowd("abc", everyone(Rule(waiting=2)))
    crowd.say("c", "a", Activate(4, True))
    crowd.say("c", "a", Activate(3, True))
    crowd.arrive("b", 4)
    crowd.settle()
    assert crowd.groups()["a"] == "4:abc"


def test_a_word_that_one_does_not_wait_does_not_undo_that_one_does():
    crowd = Crowd("abc", everyone())
    crowd.arrive("b", 1, waits=False)
    crowd.arrive("b", 1)
    crowd.deliver(1)
    crowd.finish("a")
    crowd.settle()
    assert crowd.versions("b") == [1]
    crowd = Crowd("abc", everyone(Rule(waiting=2)))
    crowd.say("c", "a", Activate(1, True))
    crowd.say("c", "a", Activate(1, False))
    crowd.arrive("b", 1)
    crowd.settle()
    assert crowd.groups()["a"] == "1:abc"


def test_an_old_answer_does_not_end_a_newer_wait(crowd: Crowd):
    crowd.arrive("c", 5)
    crowd.say("a", "c", Past(3))
    assert crowd["c"].ended == []
    crowd.settle()
    assert crowd.groups()["c"] == "5:abc"


def test_a_run_that_does_not_come_from_its_host_or_is_not_for_us_is_ignored(crowd: Crowd):
    crowd.say("b", "c", Run(Ticket(A, 1, 1), 1, (A, B, C)))
    crowd.say("a", "c", Run(Ticket(A, 1, 1), 1, (A, B)))
    crowd.say("a", "c", Run(Ticket(A, 1, 1), 1, (B, C)))
    assert crowd.groups() == {}
    assert crowd.wire == []


# --- rules ----------------------------------------------------------------------------------------


def test_all_of_them_run_when_the_last_one_arrives():
    crowd = Crowd("abc", everyone(Rule(waiting=3)))
    crowd.arrive("ca", 1)
    crowd.settle()
    assert crowd.groups() == {}
    crowd.arrive("b", 1)
    crowd.settle()
    assert crowd.groups() == {"a": "1:abc", "b": "1:abc", "c": "1:abc"}


def test_a_quorum_runs_when_so_many_have_arrived_and_takes_the_others_along():
    crowd = Crowd("abcd", everyone(Rule(waiting=2)))
    crowd.arrive("d", 1)
    crowd.settle()
    assert crowd.groups() == {}
    crowd.arrive("c", 1)
    crowd.settle()
    assert len(crowd.groups()) == 4


def test_who_is_beyond_a_version_counts_for_it_and_who_is_not_there_yet_does_not():
    crowd = Crowd("abc", everyone(Rule(waiting=3)))
    crowd.arrive("c", 5)
    crowd.arrive("ab", 3)
    crowd.settle()
    assert crowd.groups()["c"] == "3:abc"
    crowd = Crowd("abc", everyone(Rule(waiting=3)))
    crowd.arrive("c", 3)
    crowd.arrive("ab", 5)
    crowd.settle()
    assert crowd.groups()["c"] == "3:abc"
    crowd.finish("abc")
    crowd.settle()
    assert crowd.groups() == {}


def test_an_initiator_runs_the_version_and_those_before_it_wait():
    crowd = Crowd("abc", everyone(Rule(initiator=B)))
    crowd.arrive("ac", 1)
    crowd.arrive("b", 1, waits=False)
    crowd.settle()
    assert crowd.groups() == {}, "b has gone on and will be back"
    crowd.arrive("b", 1)
    crowd.settle()
    assert len(crowd.groups()) == 3


def test_who_does_not_wait_does_not_count_and_is_taken_along():
    crowd = Crowd("abc", everyone(Rule(waiting=2)))
    crowd.arrive("a", 1, waits=False)
    crowd.arrive("c", 1)
    crowd.settle()
    assert crowd.groups() == {}
    crowd.arrive("b", 1)
    crowd.settle()
    assert len(crowd.groups()) == 3
    crowd.finish("abc")
    assert crowd["a"].ended == []
    assert crowd["c"].ended == [(1, Outcome.DONE)]


def test_who_arrived_without_waiting_may_wait_at_the_same_version_later():
    crowd = Crowd("abc", everyone())
    crowd.arrive("b", 1, waits=False)
    crowd.settle()
    crowd.arrive("b", 1)
    crowd.settle()
    assert len(crowd.groups()) == 3


def test_the_limiter_waits_for_whoever_would_fall_further_behind():
    crowd = Crowd("abc", everyone(Rule(limiter=4)))
    crowd.run("abc", 1)
    for version in range(2, 6):
        crowd.arrive("ab", version)
        crowd.settle()
        crowd.finish("abc")
    crowd.arrive("ab", 6)
    crowd.settle()
    assert crowd.groups() == {}, "c knows version 1, which is five versions ago"
    crowd.arrive("c", 6, waits=False)
    crowd.settle()
    assert len(crowd.groups()) == 3


def test_the_limiter_counts_who_passes_by_from_the_last_version_it_surely_knew():
    crowd = Crowd("abc", everyone(Rule(limiter=4)))
    crowd.run("abc", 1)
    for version in range(2, 6):
        crowd.arrive("ab", version)
        crowd.settle()
        crowd.finish("abc")
    crowd.arrive("c", 6, waits=False)  # it may have missed version 5, if that still ran
    for version in range(6, 9):
        crowd.arrive("ab", version)
        crowd.settle()
        crowd.finish("abc")
    crowd.arrive("ab", 9)
    crowd.settle()
    assert crowd.groups() == {}


def test_the_limiter_counts_a_newcomer_from_when_it_is_first_seen():
    crowd = Crowd("ab", everyone(Rule(limiter=2)))
    for version in range(1, 10):
        crowd.run("ab", version)
    crowd.add("c", "abc")
    for name in "ab":
        crowd.see(name, "abc")
    for version in (10, 11):
        crowd.arrive("ab", version)
        crowd.settle()
        crowd.finish("abc")
    crowd.arrive("ab", 12)
    crowd.settle()
    assert crowd.groups() == {}


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
    """Trainers that arrive version after version, while chance decides what happens next."""

    def __init__(self, schedule: str, count: int, seed: int, loss: float) -> None:
        self.crowd = Crowd("abcdef"[:count], SCHEDULES[schedule])
        self.chance = Random(f"{schedule}/{count}/{seed}")
        self.loss = loss

    def act(self) -> None:
        crowd, chance = self.crowd, self.chance
        match chance.randrange(5):
            case 0 if crowd.wire:
                index = chance.randrange(len(crowd.wire))
                if chance.random() < self.loss:
                    del crowd.wire[index]
                elif chance.random() < self.loss:
                    crowd.wire.append(crowd.wire[index])
                else:
                    crowd.deliver(index)
            case 1:
                name = chance.choice(sorted(crowd.heads))
                self.arrive(name, waits=chance.random() < 0.8)
            case 2:
                self.finish_one()
            case 3 if chance.random() < 0.1:
                crowd.time += RESEND_S
                self.fire()
            case 4 if chance.random() < 0.02:
                name = chance.choice(sorted(crowd.heads))
                seen = [other for other in crowd.heads if chance.random() < 0.7]
                crowd.see(name, "".join(seen))
        crowd.check()

    def arrive(self, name: str, *, waits: bool = True) -> None:
        """If its trainer does not wait: it has made a step, and is at the next version."""
        activation = self.crowd[name].activation
        arrival, group = activation.arrival, activation.group
        if not (arrival and arrival.waits) and not (group and group.awaited):
            activation.arrive(activation.version + 1, self.crowd.time, waits=waits)

    def finish_one(self) -> None:
        """A group all of whose members are in it ends at one of them, or breaks where it must."""
        for head in self.crowd.heads.values():
            group = head.activation.group
            if not group:
                continue
            others = [self.crowd.heads.get(peer) for peer in group.members]
            tickets = [(group.ticket, group.version) in other.entered for other in others if other]
            refused = any(o.activation.is_over(group.ticket) for o in others if o is not head and o)
            if all(tickets) and len(tickets) == len(group.members):
                head.activation.average_ended(group.ticket, Outcome.DONE, self.crowd.time)
                return
            if refused and self.chance.random() < 0.5:
                head.activation.average_ended(group.ticket, Outcome.REFUSED, self.crowd.time)
                return

    def fire(self) -> None:
        for at, name in self.crowd.due():
            if at <= self.crowd.time:
                self.crowd[name].activation.handle_timer(self.crowd.time)

    def heal(self, steps: int) -> None:
        """No more loss, one view; every trainer makes so many more steps, then all groups end."""
        names = "".join(sorted(self.crowd.heads))
        for name in names:
            self.crowd.see(name, names)
        for step in range(2 * steps):
            for name in names if step < steps else ():
                self.arrive(name)
            self.crowd.settle()
            self.finish_one()
            self.crowd.time += RESEND_S / 4
            self.fire()
            self.crowd.check()


@pytest.mark.parametrize("schedule", SCHEDULES)
@settings(max_examples=40, deadline=None)
@given(count=st.integers(2, 6), seed=st.integers(0, 10**6), loss=st.sampled_from([0.0, 0.2]))
def test_whatever_happens_versions_run_once_and_no_wait_is_for_ever(
    schedule: str, count: int, seed: int, loss: float
):
    story = Story(schedule, count, seed, loss)
    for _ in range(300):
        story.act()
    before = {name: len(head.ended) for name, head in story.crowd.heads.items()}
    arrivals = {name: head.activation.arrival for name, head in story.crowd.heads.items()}
    waited = [name for name, arrival in arrivals.items() if arrival and arrival.waits]
    story.heal(steps=60)
    assert story.crowd.groups() == {}
    for name in waited:
        assert len(story.crowd[name].ended) > before[name], f"{name} waits for ever"


@pytest.mark.parametrize("schedule", ["pairs", "butterfly", "solo"])
def test_members_of_one_ticket_agree_on_who_they_are(schedule: str):
    story = Story(schedule, 6, 1, 0.1)
    for _ in range(6000):
        story.act()
    members: dict[Ticket, set[tuple[PeerId, ...]]] = {}
    for head in story.crowd.heads.values():
        for average in head.averages:
            members.setdefault(average.ticket, set()).add(average.members)
    assert len(members) > 10
    assert all(len(versions) == 1 for versions in members.values())


def test_who_waits_for_one_that_is_beyond_by_another_view_goes_on_when_it_has_asked():
    """B ran version 1 alone, since it knew of nobody: no host of that version hears of it."""

    def waiting_pairs(version: int, peers: Sequence[PeerId], me: PeerId) -> Round:
        members = pairs(version, peers, me).members
        return Round(members, What.MODELS, Rule(waiting=len(members)))

    crowd = Crowd("abc", waiting_pairs)
    crowd.see("b", "b")
    crowd.arrive("b", 1)
    crowd.see("b", "abc")
    crowd.arrive("b", 2)
    crowd.arrive("a", 1)
    crowd.settle()
    assert crowd["a"].ended == []
    crowd.advance(RESEND_S)
    assert crowd["a"].ended == [(1, Outcome.REFUSED)]
    crowd.arrive("c", 2)
    crowd.settle()
    assert crowd.groups() == {"b": "2:bc", "c": "2:bc"}
    crowd.check()
