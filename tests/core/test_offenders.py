"""Who votes against whom, and when that names a member."""

import json
import math

import pytest

from p2ptrain.core.offenders import (
    AGREE,
    CAUGHT,
    LEAST_NORMS,
    MOST_CAUGHT,
    MOST_KINDS,
    OPPOSED,
    Judge,
    Measured,
    offenders,
)
from p2ptrain.ids import PeerId

TRIO = tuple(map(PeerId, "abc"))
FIVE = tuple(map(PeerId, "abcde"))
AGAINST_C = {PeerId("a"): (0.0, 0.0, 30.0), PeerId("b"): (0.0, 0.0, 40.0)}


def norms(*numbers: float | None) -> Measured:
    return Measured(numbers)


def distances(*numbers: float | None) -> Measured:
    return Measured(numbers, own_model=10.0)


def directions(*cosines: float | None) -> Measured:
    return Measured((1.0,) * len(cosines), cosines=cosines)


# --- norms ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("huge", [11.0, 1e30, math.inf, math.nan])
def test_a_norm_that_is_out_gets_a_vote_at_once(huge):
    ballot = Judge(norm_limit=10).vote("kind", TRIO, norms(1.0, 1.0, huge))
    assert ballot[:2] == (0, 0)
    assert ballot[2] == huge or ballot[2] == math.inf


def test_a_norm_just_below_the_limit_gets_none():
    assert not any(Judge(norm_limit=10).vote("kind", TRIO, norms(1.0, 1.0, 9.9)))


def test_norms_that_grow_together_get_no_votes():
    judge = Judge(norm_limit=10)
    for size in (1.0, 1.0, 1.0, 100.0):
        assert not any(judge.vote("kind", TRIO, norms(size, size, size)))


def test_a_larger_norm_than_the_group_has_is_compared_with_recent_ones_too():
    judge = Judge(norm_limit=10)
    for _ in range(20):
        judge.vote("kind", TRIO, norms(1.0, 1.0, 1.0))
    assert not any(judge.vote("kind", TRIO, norms(0.01, 0.01, 1.0)))
    assert any(judge.vote("another kind", TRIO, norms(0.01, 0.01, 1.0)))


def test_models_that_happen_to_be_equal_name_nobody_while_little_is_known():
    judge = Judge(norm_limit=10)
    assert not any(judge.vote("kind", TRIO, distances(None, 0.01, 1.0)))
    for _ in range(LEAST_NORMS):
        judge.vote("kind", TRIO, distances(None, 1.0, 1.0))
    assert not any(judge.vote("kind", TRIO, distances(None, 0.01, 2.0)))
    assert judge.vote("kind", TRIO, distances(None, 0.01, 50.0))[2] > 10


def test_a_model_that_is_near_is_let_be_however_near_the_others_are():
    judge = Judge(norm_limit=10)
    for _ in range(LEAST_NORMS):
        judge.vote("kind", TRIO, distances(None, 1e-7, 1e-7))
    assert not any(judge.vote("kind", TRIO, distances(None, 1e-7, 0.09)))
    assert any(judge.vote("kind", TRIO, distances(None, 1e-7, 0.11)))


def test_members_that_contribute_nothing_are_no_measure():
    judge = Judge(norm_limit=10)
    assert not any(judge.vote("kind", TRIO, norms(None, None, 5.0)))
    assert not any(judge.vote("kind", TRIO, norms(0.0, 0.0, 5.0)))


def test_memory_is_of_the_kinds_that_were_used_last():
    judge = Judge(norm_limit=10)
    for kind in range(2 * MOST_KINDS):
        judge.vote(f"kind {kind}", TRIO, norms(1.0, 1.0, 1.0))
    assert len(judge._recent) == MOST_KINDS


def test_a_judge_that_starts_again_knows_what_was_usual():
    judge, after = Judge(norm_limit=10), Judge(norm_limit=10)
    judge.vote("kind", TRIO, norms(1.0, 1.0, 1.0))
    after.load_state_dict(json.loads(json.dumps(judge.state_dict())))
    assert not any(after.vote("kind", TRIO, norms(0.01, 0.01, 1.0)))
    assert any(Judge(norm_limit=10).vote("kind", TRIO, norms(0.01, 0.01, 1.0)))


# --- directions -----------------------------------------------------------------------------------


def test_a_member_that_is_opposed_in_so_many_groups_in_a_row_gets_a_vote():
    judge = Judge(opposed_groups=3)
    ballots = [judge.vote("kind", FIVE, directions(0.9, 0.9, -0.9, 0.9, 0.9)) for _ in range(3)]
    assert ballots == [(0,) * 5, (0,) * 5, (0, 0, OPPOSED, 0, 0)]


def test_one_group_in_between_in_which_it_is_not_begins_the_count_anew():
    judge = Judge(opposed_groups=2)
    judge.vote("kind", FIVE, directions(0.9, 0.9, -0.9, 0.9, 0.9))
    judge.vote("kind", FIVE, directions(0.9, 0.9, 0.1, 0.9, 0.9))
    assert not any(judge.vote("kind", FIVE, directions(0.9, 0.9, -0.9, 0.9, 0.9)))


def test_where_members_do_not_agree_nobody_is_opposed():
    judge = Judge(opposed_groups=1)
    for cosine in (-0.5, 0.0, AGREE):
        assert not any(judge.vote("kind", FIVE, directions(cosine, 0.9, -0.9, cosine, cosine)))
    assert not any(judge.vote("kind", FIVE, directions(0.9, None, -0.9, None, None)))


# --- majority -------------------------------------------------------------------------------------


def test_most_of_the_others_name_a_member_with_a_sentence():
    found = offenders(TRIO, AGAINST_C | {PeerId("c"): (0.0, 0.0, 0.0)})
    assert found == {
        "c": "c is left out by 2 of 2 votes: what it contributes has 30 times the usual norm"
    }


def test_of_a_member_that_is_opposed_the_sentence_says_so():
    ballots = dict.fromkeys(TRIO, (0.0, 0.0, OPPOSED))
    assert "points against the others', group after group" in offenders(TRIO, ballots)[TRIO[2]]


def test_who_was_caught_gets_a_vote_in_every_group():
    judge = Judge()
    judge.catch(TRIO[1])
    ballot = judge.vote("kind", TRIO, norms(None, None, None))
    assert ballot == (0, CAUGHT, 0)
    found = offenders(TRIO, {PeerId("a"): ballot, PeerId("c"): ballot})
    assert found[TRIO[1]].endswith("audits have found means that it handed out wrong")


def test_members_that_come_under_new_names_do_not_fill_the_memory_of_who_was_caught():
    judge = Judge()
    for number in range(MOST_CAUGHT + 1):
        judge.catch(PeerId(f"p{number}"))
    assert len(judge.caught) == MOST_CAUGHT
    assert PeerId("p0") not in judge.caught


@pytest.mark.parametrize("vote", [1e30, OPPOSED])
def test_one_liar_names_nobody(vote):
    for members in (TRIO, FIVE):
        quiet = {peer: (0.0,) * len(members) for peer in members}
        assert offenders(members, quiet | {members[0]: (vote,) * len(members)}) == {}


def test_a_vote_of_the_only_voter_names_nobody():
    assert offenders(TRIO, {PeerId("a"): (0.0, 0.0, 30.0)}) == {}


def test_half_of_the_votes_are_no_majority():
    ballots = {peer: (30.0 if peer in "ab" else 0.0, *[0.0] * 4) for peer in FIVE}
    assert offenders(FIVE, ballots) == {}
    two_of_four = {peer: (0.0, 0.0, 0.0, 0.0, 30.0 if peer in "ab" else 0.0) for peer in FIVE}
    assert offenders(FIVE, two_of_four) == {}


def test_where_half_of_the_members_would_be_named_none_is():
    ballots = dict.fromkeys(FIVE, (30.0, 30.0, 30.0, 0.0, 0.0))
    assert offenders(FIVE, ballots) == {}
