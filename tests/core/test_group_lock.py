"""The group lock, line by line of its module's docstring, message by message of `messages.py`."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from p2ptrain.core.effects import Average, Effect, GroupEnded, Send
from p2ptrain.core.events import Outcome
from p2ptrain.core.group_lock import ENDED_REMEMBERED, MOST_TICKS
from p2ptrain.core.lock_state import Collecting, InGroup, LockConfig
from p2ptrain.core.messages import Begin, Busy, Claim, Grant, Inquire, Release
from p2ptrain.errors import ConfigError, LocalProtocolError
from p2ptrain.ids import PeerId, Ticket
from tests.helpers.trio import Trio

LEASE_S, ACQUIRE_S, RESEND_S = 20.0, 2.0, 0.25
CONFIG = LockConfig(
    lease_s=LEASE_S, acquire_timeout_s=ACQUIRE_S, resend_s=RESEND_S, clock_drift=0.0
)
IN_GROUP_S = CONFIG.time_in_group_s(LEASE_S)

AB = (PeerId("a"), PeerId("b"))


@pytest.fixture
def trio() -> Iterator[Trio]:
    trio = Trio("abc", CONFIG)
    yield trio
    trio.check()


@pytest.fixture
def quartet() -> Iterator[Trio]:
    quartet = Trio("abcd", CONFIG)
    yield quartet
    quartet.check()


def formed(trio: Trio, name: str, others: str) -> Ticket:
    ticket = trio.request(name, others)
    trio.settle()
    assert trio.groups == dict.fromkeys([name, *others], ticket)
    return ticket


# --- the protocol in five lines -------------------------------------------------------------------


def test_a_pair_forms_with_one_claim_one_grant_one_begin(trio: Trio):
    ticket = trio.request("a", "b")
    assert trio.on_wire() == ["a -> b Claim"]
    trio.deliver("a", "b")
    assert trio.on_wire() == ["b -> a Grant"]
    assert trio.groups == {}
    trio.deliver("b", "a")
    assert trio.on_wire() == ["a -> b Begin"]
    assert trio.groups == {"a": ticket}
    trio.deliver("a", "b")
    assert trio.groups == {"a": ticket, "b": ticket}
    assert trio.on_wire() == []


def test_a_group_of_four_forms_when_the_last_one_has_granted(quartet: Trio):
    ticket = quartet.request("b", "acd")
    for member in "acd":
        quartet.deliver("b", member)
    for member in "ac":
        quartet.deliver(member, "b")
    assert quartet.groups == {}
    quartet.deliver("d", "b")
    quartet.settle()
    assert quartet.groups == dict.fromkeys("abcd", ticket)


def test_a_group_needs_no_message_to_end(trio: Trio):
    ticket = formed(trio, "a", "bc")
    trio.finish(ticket, by="b")
    assert trio.groups == {"a": ticket, "c": ticket}
    trio.finish(ticket)
    assert trio.groups == {}
    assert trio.wire == []
    assert trio.ended == {ticket: Outcome.DONE}


def test_only_the_initiator_hears_how_its_claim_ended(trio: Trio):
    ticket = formed(trio, "a", "b")
    trio.finish(ticket, by="b")
    assert trio.ended == {}
    trio.finish(ticket, by="a")
    assert trio.ended == {ticket: Outcome.DONE}


def test_who_is_promised_answers_busy_at_once_and_says_to_whom(trio: Trio):
    first = trio.request("a", "b")
    trio.deliver("a", "b")
    trio.request("c", "b")
    trio.deliver("c", "b")
    assert trio.on_wire() == ["b -> a Grant", "b -> c Busy"]
    assert trio.said("b", "c").reason == f"promised to {first}"


def test_who_averages_answers_busy_at_once(trio: Trio):
    first = formed(trio, "a", "b")
    trio.request("c", "b")
    trio.deliver("c", "b")
    assert trio.said("b", "c").reason == f"averaging in {first}"


def test_who_becomes_free_grants_the_claim_that_waits_for_it(trio: Trio):
    first = formed(trio, "a", "b")
    second = trio.request("c", "b")
    trio.settle()
    assert trio.groups == {"a": first, "b": first}
    trio.finish(first)
    assert trio.on_wire() == ["b -> c Grant"]
    trio.settle()
    assert trio.groups == {"b": second, "c": second}


def test_of_the_claims_that_wait_the_oldest_is_granted_first(quartet: Trio):
    first = formed(quartet, "a", "b")
    older, younger = quartet.request("c", "b"), quartet.request("d", "b")
    quartet.deliver("d", "b")
    quartet.settle()
    quartet.finish(first)
    quartet.settle()
    assert quartet.groups == {"b": older, "c": older}
    quartet.finish(older)
    quartet.settle()
    assert quartet.groups == {"b": younger, "d": younger}


def test_who_waits_for_one_holds_the_others(quartet: Trio):
    first = formed(quartet, "a", "b")
    second = quartet.request("c", "bd")
    quartet.settle()
    assert quartet.states["d"] == f"promised to {second}"
    quartet.finish(first)
    quartet.settle()
    assert quartet.groups == dict.fromkeys("bcd", second)


def test_who_fails_releases_everyone_it_has_asked_answered_or_not(quartet: Trio):
    formed(quartet, "a", "b")
    quartet.request("c", "bd")
    quartet.deliver("c", "d")
    quartet.deliver("c", "b")
    quartet.deliver("b", "c")
    quartet.withdraw("c")
    assert quartet.on_wire() == ["d -> c Grant", "c -> b Release", "c -> d Release"]


def test_a_claim_that_was_given_up_waits_nowhere(quartet: Trio):
    first = formed(quartet, "a", "b")
    quartet.request("c", "b")
    quartet.settle()
    quartet.withdraw("c")
    quartet.settle()
    quartet.finish(first)
    assert quartet.wire == []
    assert set(quartet.states.values()) == {"free"}


def test_our_own_claim_waits_until_we_are_free(trio: Trio):
    first = formed(trio, "a", "b")
    second = trio.request("a", "c")
    assert trio.wire == []
    trio.finish(first)
    trio.settle()
    assert trio.groups == {"a": second, "c": second}


def test_our_own_claim_waits_while_we_are_promised(trio: Trio):
    first = trio.request("a", "b")
    trio.deliver("a", "b")
    second = trio.request("b", "c")
    trio.settle()
    assert trio.groups == {"a": first, "b": first}
    trio.finish(first)
    trio.settle()
    assert trio.groups == {"b": second, "c": second}


def test_a_request_while_we_claim_fails_at_once(trio: Trio):
    first = trio.request("a", "b")
    second = trio.request("a", "c")
    assert trio.ended == {second: Outcome.BUSY}
    trio.settle()
    assert trio.groups == {"a": first, "b": first}


@pytest.mark.parametrize(
    ("candidates", "needed"), [("", 0), ("a", 1), ("bb", 1), ("ab", 1), ("bc", 3), ("bc", -1)]
)
def test_a_group_that_cannot_be_is_our_own_mistake(trio: Trio, candidates: str, needed: int):
    with pytest.raises(LocalProtocolError, match="a cannot claim a group with"):
        trio.request("a", candidates, needed)
    assert trio.states["a"] == "free"


def claims_in_vain(trio: Trio, name: str, times: int) -> None:
    """Afterwards the claims of `name` are younger than those of others who have heard of none."""
    for _ in range(times):
        trio.request(name, next(other for other in trio.locks if other != name))
        trio.withdraw(name)
        trio.drop_all()


# --- any of several candidates --------------------------------------------------------------------


def crowd(names: str, **changes: int) -> Trio:
    """Many peers, of whom the last ones may be busy with each other."""
    return Trio(names, replace(CONFIG, **changes))


def test_the_first_that_are_free_are_taken_and_all_others_let_go():
    quintet = crowd("abcde", spare_claims=2)
    ticket = quintet.request("a", "bcde", 2)
    for other in "bcde":
        quintet.deliver("a", other)
    for other in "ec":
        quintet.deliver(other, "a")
    assert quintet.groups == {"a": ticket}
    assert quintet.on_wire()[-4:] == [
        "a -> e Begin",
        "a -> c Begin",
        "a -> b Release",
        "a -> d Release",
    ]
    quintet.settle()
    assert quintet.groups == dict.fromkeys("ace", ticket)
    assert quintet.states["b"] == quintet.states["d"] == "free"


def test_as_many_as_are_needed_and_some_to_spare_are_asked_at_first_in_order_of_preference():
    quintet = crowd("abcde", spare_claims=1)
    quintet.request("a", "ecdb", 2)
    assert quintet.on_wire() == ["a -> e Claim", "a -> c Claim", "a -> d Claim"]


def test_where_one_is_busy_the_next_is_asked_at_once():
    quintet = crowd("abcde", spare_claims=0)
    formed(quintet, "d", "e")
    quintet.request("a", "dbc", 1)
    quintet.deliver("a", "d")
    quintet.deliver("d", "a")
    assert quintet.on_wire() == ["a -> b Claim"]


def test_nobody_waits_in_more_queues_than_it_may():
    quintet = crowd("abcde", spare_claims=0, spare_places=1)
    for pair in ("bc", "de"):
        formed_beside(quintet, *pair)
    quintet.request("a", "bcde", 1)
    quintet.settle()
    state = quintet.locks["a"].state
    assert isinstance(state, Collecting)
    assert (state.queued, state.unasked) == (("b", "c"), ("d", "e"))


def formed_beside(trio: Trio, name: str, other: str) -> None:
    """As `formed`, while others are in groups too."""
    ticket = trio.request(name, other)
    trio.settle()
    assert trio.groups[name] == trio.groups[other] == ticket


def test_who_is_silent_keeps_a_claim_from_asking_others_only_for_a_while():
    quintet = crowd("abcde", spare_claims=0)
    quintet.crash("b")
    ticket = quintet.request("a", "bc", 1)
    quintet.settle()
    assert quintet.groups == {}
    quintet.advance(RESEND_S)
    assert quintet.groups == {"a": ticket, "c": ticket}


def test_a_claim_fails_when_too_few_candidates_are_left(quartet: Trio):
    ticket = quartet.request("a", "bcd", 2)
    quartet.hear_gone("a", "b")
    assert ticket not in quartet.ended
    quartet.hear_left("a", "d")
    assert quartet.ended == {ticket: Outcome.LOST}
    assert quartet.reasons[ticket] == "d left"


def test_when_it_ends_a_claim_says_who_was_in_its_group_or_who_was_asked():
    quintet = crowd("abcde", spare_claims=1)
    ended: list[GroupEnded] = []
    lock = quintet.locks["a"]
    quintet.locks["a"] = lock.clone(
        lambda e: ended.append(e) if isinstance(e, GroupEnded) else None
    )
    quintet.request("a", "dcbe", 1)
    quintet.withdraw("a")
    second = quintet.request("a", "cb", 1)
    quintet.locks["a"].receive(PeerId("b"), Grant(second), 0.0)
    quintet.finish(second, by="a")
    assert [e.members for e in ended] == [("a", "c", "d"), AB]


# --- the queue ------------------------------------------------------------------------------------


def test_a_newer_claim_of_the_same_peer_takes_the_place_of_its_older_one(trio: Trio):
    first = formed(trio, "a", "b")
    trio.request("c", "b")
    trio.settle()
    trio.withdraw("c")
    trio.drop_all()  # the release is lost
    newer = trio.request("c", "b")
    trio.settle()
    trio.finish(first)
    trio.settle()
    assert trio.groups == {"b": newer, "c": newer}


def test_an_older_claim_that_comes_after_a_newer_one_is_not_answered(trio: Trio):
    formed(trio, "a", "b")
    trio.request("c", "b")
    late = trio.hold_back("c", "b")
    trio.withdraw("c")
    trio.settle()
    trio.request("c", "b")
    trio.settle()
    trio.release(late)
    assert trio.wire == []


@pytest.mark.parametrize("news", ["gone", "left"])
def test_the_claim_of_one_who_is_no_more_waits_no_longer(trio: Trio, news: str):
    first = formed(trio, "a", "b")
    trio.request("c", "b")
    trio.settle()
    if news == "gone":
        trio.hear_gone("b", "c")
    else:
        trio.hear_left("b", "c")
    trio.finish(first)
    assert trio.states["b"] == "free"


def test_a_claim_whose_release_was_lost_is_granted_once_and_disowned(trio: Trio):
    first = formed(trio, "a", "b")
    trio.request("c", "b")
    trio.settle()
    trio.withdraw("c")
    trio.drop("c", "b")
    trio.finish(first)
    assert trio.on_wire() == ["b -> c Grant"]
    trio.settle()
    assert trio.states["b"] == "free"


def test_who_waits_for_us_is_asked_first_when_our_turn_comes_before_it(quartet: Trio):
    """Its claim is younger, so it will yield."""
    quartet.crash("c")
    claims_in_vain(quartet, "d", 5)
    quartet.request("a", "bc")
    quartet.settle()
    ours = quartet.request("b", "cd", 1)
    theirs = quartet.request("d", "b")
    quartet.settle()
    quartet.withdraw("a")
    quartet.deliver("a", "b")
    assert [m for m in quartet.on_wire() if m.startswith("b")] == ["b -> d Claim", "b -> c Claim"]
    quartet.settle()
    assert quartet.groups == {"b": ours, "d": ours}
    assert quartet.ended[theirs] is Outcome.YIELDED


def test_a_younger_claim_of_a_candidate_is_an_offer(quartet: Trio):
    """It is asked at once, out of turn: it wants a group and will yield."""
    quartet.crash("c")
    older = quartet.request("a", "cbd", 1)
    younger = quartet.request("d", "a")
    assert "a -> d Claim" not in quartet.on_wire()
    quartet.deliver("d", "a")
    assert "a -> d Claim" in quartet.on_wire()
    quartet.settle()
    assert quartet.ended[younger] is Outcome.YIELDED
    assert quartet.groups in ({"a": older, "d": older}, {"a": older, "b": older})


# --- who is wanted by an older claim --------------------------------------------------------------


def contest(trio: Trio, candidates: str = "bc", needed: int = 2) -> tuple[Ticket, Ticket]:
    """B is promised to a younger claim of a, which still collects, when an older one of d comes."""
    claims_in_vain(trio, "a", 3)
    older = trio.request("d", "b")
    late = trio.hold_back("d", "b")
    younger = trio.request("a", candidates, needed)
    trio.deliver("a", "b")
    trio.deliver("b", "a")
    trio.release(late)
    return older, younger


def test_who_is_promised_to_a_younger_claim_asks_to_be_let_go(quartet: Trio):
    older, younger = contest(quartet)
    assert quartet.on_wire()[-2:] == ["b -> a Inquire", "b -> d Busy"]
    quartet.settle()
    assert quartet.groups == {"b": older, "d": older}
    assert quartet.ended[younger] is Outcome.YIELDED
    assert quartet.reasons[younger] == "b was wanted by an older claim"


def test_who_lets_one_go_collects_on_if_enough_are_left():
    quintet = Trio("abcde", CONFIG)
    older, younger = contest(quintet, "bce", 2)
    quintet.settle()
    assert quintet.groups == {
        **dict.fromkeys("bd", older),
        **dict.fromkeys("ace", younger),
    }


def test_who_was_let_go_is_not_taken_again_under_the_same_ticket():
    quintet = Trio("abcde", CONFIG)
    _, younger = contest(quintet, "bce", 2)
    quintet.deliver("b", "a")
    quintet.drop_all()
    quintet.locks["a"].receive(PeerId("b"), Grant(younger), quintet.clock("a"))  # a late one
    assert quintet.on_wire() == ["a -> b Release"]


def test_an_inquiry_comes_too_late_when_the_group_has_formed(quartet: Trio):
    claims_in_vain(quartet, "a", 3)
    older = quartet.request("d", "b")
    late = quartet.hold_back("d", "b")
    younger = quartet.request("a", "b")
    quartet.deliver("a", "b")
    quartet.release(late)
    quartet.settle()
    assert quartet.groups == {"a": younger, "b": younger}
    quartet.finish(younger)
    quartet.settle()
    assert quartet.groups == {"b": older, "d": older}


def test_a_lost_inquiry_is_sent_again_in_place_of_the_grant(quartet: Trio):
    older, _ = contest(quartet)
    quartet.drop_all()
    quartet.advance(RESEND_S, delivering=False)
    assert "b -> a Inquire" in quartet.on_wire()
    assert "b -> a Grant" not in quartet.on_wire()
    quartet.settle()
    assert quartet.groups == {"b": older, "d": older}


def test_an_inquiry_that_overtakes_its_grant_lets_go_all_the_same(quartet: Trio):
    claims_in_vain(quartet, "a", 3)
    older = quartet.request("d", "b")
    late = quartet.hold_back("d", "b")
    quartet.request("a", "bc")
    quartet.deliver("a", "b")
    quartet.release(late)
    quartet.deliver_last("b", "a")
    quartet.settle()
    assert quartet.groups == {"b": older, "d": older}


def test_our_own_older_wish_asks_to_be_let_go_too(trio: Trio):
    """B's claim failed and left it its age; then b is promised to a younger one."""
    trio.crash("c")
    trio.request("b", "c")
    trio.advance(ACQUIRE_S)
    claims_in_vain(trio, "a", 3)
    trio.request("a", "bc")
    trio.settle()
    again = trio.request("b", "a")
    assert trio.on_wire() == ["b -> a Inquire"]
    trio.settle()
    assert trio.groups == {"a": again, "b": again}


# --- everybody's turn comes -----------------------------------------------------------------------


def test_a_claim_that_came_to_nothing_hands_its_age_on(quartet: Trio):
    quartet.crash("c")
    claims_in_vain(quartet, "b", 10)
    first = quartet.request("a", "c")
    quartet.request("b", "a")
    quartet.settle()  # a has heard of a claim that was born much later than its own
    quartet.withdraw("b")
    quartet.advance(ACQUIRE_S)
    assert quartet.ended[first] is Outcome.LATE
    claims_in_vain(quartet, "d", 5)
    crossing, again = quartet.request("d", "a"), quartet.request("a", "d")
    quartet.settle()
    assert quartet.groups == {"a": again, "d": again}
    assert quartet.ended[crossing] is Outcome.YIELDED


def test_after_a_group_one_is_the_youngest_again(quartet: Trio):
    first = formed(quartet, "a", "b")
    wish = quartet.request("b", "c")
    other = quartet.request("c", "b")
    quartet.settle()
    quartet.finish(first)
    quartet.settle()
    assert quartet.groups == {"b": other, "c": other}
    assert wish not in quartet.ended
    quartet.finish(other)
    quartet.settle()
    assert quartet.groups == {"b": wish, "c": wish}


def test_among_peers_that_ask_all_the_time_nobody_is_left_out():
    """Particular pairs on a ring: each peer wants its right neighbour, which is in demand."""
    names = "abcd"
    quartet = Trio(names, CONFIG)
    done = dict.fromkeys(names, 0)
    right = dict(zip(names, names[1:] + names[:1], strict=True))
    wanted = {name: quartet.request(name, right[name]) for name in names}
    for _ in range(60):
        quartet.settle()
        for ticket in sorted(set(quartet.groups.values())):
            quartet.finish(ticket)
        for name, ticket in tuple(wanted.items()):
            if ticket in quartet.ended:
                done[name] += quartet.ended[ticket] is Outcome.DONE
                wanted[name] = quartet.request(name, right[name])
    assert min(done.values()) >= 10


# --- no cycle of waits: crossing claims -----------------------------------------------------------


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_of_two_crossing_claims_the_older_wins_and_the_other_becomes_a_member(
    trio: Trio, order: str
):
    older, younger = trio.request("a", "b"), trio.request("b", "a")
    first, second = order
    trio.deliver(first, second)
    trio.deliver(second, first)
    trio.settle()
    assert trio.groups == {"a": older, "b": older}
    assert trio.ended == {younger: Outcome.YIELDED}
    assert trio.reasons[younger] == f"{younger} gave way to the older claim {older}"


def test_who_has_claimed_less_has_the_older_claim_whatever_its_name(trio: Trio):
    for _ in range(3):
        trio.finish(formed(trio, "a", "c"))
    of_a, of_b = trio.request("a", "b"), trio.request("b", "a")
    trio.settle()
    assert trio.groups == {"a": of_b, "b": of_b}
    assert trio.ended[of_a] is Outcome.YIELDED


def test_who_hears_a_claim_counts_on_from_it(trio: Trio):
    for _ in range(3):
        trio.finish(formed(trio, "a", "b"))  # b has heard of three claims, though it made none
    of_a, of_b = trio.request("a", "b"), trio.request("b", "a")
    trio.settle()
    assert trio.groups == {"a": of_a, "b": of_a}
    assert trio.ended[of_b] is Outcome.YIELDED


def test_of_three_claims_in_a_ring_at_least_one_forms(trio: Trio):
    tickets = [trio.request("a", "b"), trio.request("b", "c"), trio.request("c", "a")]
    trio.settle()
    assert trio.groups
    assert len({trio.groups[name] for name in trio.groups}) == 1
    assert sum(ticket in trio.ended for ticket in tickets) == 2


def test_of_three_claims_for_everyone_the_oldest_forms(trio: Trio):
    oldest = trio.request("a", "bc")
    trio.request("b", "ac")
    trio.request("c", "ab")
    trio.settle()
    assert trio.groups == dict.fromkeys("abc", oldest)


def test_who_yields_frees_whoever_it_had_asked(quartet: Trio):
    older = quartet.request("a", "b")
    quartet.request("b", "cd")
    quartet.deliver("b", "c")
    quartet.deliver("b", "d")
    quartet.settle()
    assert quartet.groups == {"a": older, "b": older}
    assert quartet.states["c"] == quartet.states["d"] == "free"


def test_nobody_yields_to_an_older_claim_after_its_group_has_formed(trio: Trio):
    older = trio.request("a", "b")
    younger = trio.request("b", "c")
    trio.deliver("b", "c")
    trio.deliver("c", "b")
    trio.settle()
    assert trio.groups == {"b": younger, "c": younger}
    assert trio.states["a"] == f"claiming {older}"


# --- each message is lost -------------------------------------------------------------------------


def test_a_lost_claim_is_sent_again(trio: Trio):
    ticket = trio.request("a", "b")
    trio.drop("a", "b")
    trio.advance(RESEND_S)
    assert trio.groups == {"a": ticket, "b": ticket}


def test_a_claim_is_sent_again_only_to_those_who_have_not_granted(trio: Trio):
    trio.request("a", "bc")
    trio.deliver("a", "b")
    trio.deliver("b", "a")
    trio.drop("a", "c")
    trio.advance(RESEND_S, delivering=False)
    assert "a -> c Claim" in trio.on_wire()
    assert "a -> b Claim" not in trio.on_wire()


def test_a_lost_grant_is_given_again_when_the_claim_comes_again(trio: Trio):
    ticket = trio.request("a", "b")
    trio.deliver("a", "b")
    trio.drop("b", "a")
    trio.advance(RESEND_S)
    assert trio.groups == {"a": ticket, "b": ticket}


def test_a_lost_busy_costs_nothing_once_the_grant_comes(trio: Trio):
    first = formed(trio, "a", "b")
    second = trio.request("c", "b")
    trio.deliver("c", "b")
    trio.drop("b", "c")
    trio.finish(first)
    trio.settle()
    assert trio.groups == {"b": second, "c": second}


def test_a_lost_begin_is_asked_for(trio: Trio):
    ticket = trio.request("a", "b")
    trio.deliver("a", "b")
    trio.deliver("b", "a")
    trio.drop("a", "b")
    trio.advance(RESEND_S, delivering=False)
    assert "b -> a Grant" in trio.on_wire()
    trio.settle()
    assert trio.groups == {"a": ticket, "b": ticket}


def test_who_is_told_late_hears_of_the_first_members_also_of_those_lost_since(trio: Trio):
    """An attempt is of one list of members, whoever hears of it when."""
    ticket = trio.request("a", "bc")
    for name in "bc":
        trio.deliver("a", name)
        trio.deliver(name, "a")
    trio.drop("a", "b")
    trio.locks["a"].regroup(ticket, AB)  # c is gone
    trio.advance(trio.config.resend_s)
    state = trio.locks["b"].state
    assert isinstance(state, InGroup)
    assert state.members == (*AB, PeerId("c"))


def test_a_grant_that_comes_again_shows_that_begin_was_lost(trio: Trio):
    ticket = trio.request("a", "b")
    trio.deliver("a", "b")
    trio.repeat("b", "a")
    trio.deliver("b", "a")
    trio.drop("a", "b")
    trio.settle()
    assert trio.groups == {"a": ticket, "b": ticket}


def test_a_lost_release_of_a_claim_is_asked_for(trio: Trio):
    ticket = trio.request("a", "bc")
    trio.deliver("a", "b")
    trio.advance(ACQUIRE_S, delivering=False)
    trio.drop_all()
    assert trio.ended[ticket] is Outcome.LATE
    assert trio.states["b"] == f"promised to {ticket}"
    trio.advance(RESEND_S)
    assert trio.states["b"] == "free"


def test_a_grant_is_said_again_until_it_is_answered(trio: Trio):
    ticket = trio.request("a", "b")
    trio.deliver("a", "b")
    trio.deliver("b", "a")
    trio.drop_all()
    trio.advance(RESEND_S, delivering=False)
    trio.drop_all()
    trio.advance(RESEND_S)
    assert trio.groups == {"a": ticket, "b": ticket}


@pytest.mark.parametrize("is_over", [False, True])
def test_a_lost_release_of_one_who_was_not_needed_idles_it_for_no_lease(trio: Trio, is_over: bool):
    """B and c both grant, one is enough; the initiator knows even when its average is done."""
    ticket = trio.request("a", "bc", 1)
    for other in "bc":
        trio.deliver("a", other)
    trio.deliver("b", "a")
    trio.deliver("a", "b")
    trio.drop("a", "c")  # the release
    trio.drop("c", "a")  # the grant that would have told
    if is_over:
        trio.finish(ticket)
    trio.advance(RESEND_S)
    assert trio.states["c"] == "free"


def test_a_new_claim_of_its_initiator_ends_an_old_promise(trio: Trio):
    """A lost `Release` costs nothing if the same initiator claims us again first."""
    trio.request("a", "b")
    trio.deliver("a", "b")
    trio.advance(ACQUIRE_S, delivering=False)
    trio.drop_all()
    again = trio.request("a", "b")
    trio.settle()
    assert trio.groups == {"a": again, "b": again}


def test_an_initiator_that_restarted_ends_its_old_promise_with_its_first_claim(trio: Trio):
    trio.request("a", "b")
    trio.deliver("a", "b")
    trio.crash("a")
    trio.start("a")
    again = trio.request("a", "b")
    trio.settle()
    assert trio.groups == {"a": again, "b": again}


def test_with_all_messages_lost_everyone_is_free_after_a_lease(trio: Trio):
    ticket = trio.request("a", "bc")
    trio.deliver("a", "b")
    for _ in range(int((LEASE_S + 1) / RESEND_S)):
        trio.advance(RESEND_S, delivering=False)
        trio.drop_all()
    assert trio.ended == {ticket: Outcome.LATE}
    assert set(trio.states.values()) == {"free"}
    assert all(lock.next_deadline() is None for lock in trio.locks.values())


# --- duplicates and reordering --------------------------------------------------------------------


def test_every_message_may_come_twice(quartet: Trio):
    ticket = quartet.request("a", "bcd")
    for _ in range(3):  # claims, grants, begins
        quartet.wire += quartet.wire
        for message in [quartet.wire.pop(0) for _ in range(len(quartet.wire))]:
            quartet.release(message)
    quartet.settle()
    assert quartet.groups == dict.fromkeys("abcd", ticket)
    assert len(quartet.entered) == 4


def test_a_claim_that_comes_after_its_release_is_disowned(trio: Trio):
    ticket = trio.request("a", "b")
    late = trio.hold_back("a", "b")
    trio.advance(ACQUIRE_S, delivering=False)
    trio.drop_all()
    trio.release(late)
    assert trio.states["b"] == f"promised to {ticket}"  # it cannot know better
    trio.settle()
    assert trio.states["b"] == "free"


def test_a_claim_that_comes_twice_and_late_promises_nothing(trio: Trio):
    ticket = trio.request("a", "b")
    trio.repeat("a", "b")
    trio.deliver("a", "b")
    late = trio.hold_back("a", "b")
    trio.settle()
    trio.finish(ticket)
    trio.release(late)
    assert trio.states["b"] == "free"
    assert trio.wire == []


def test_nobody_enters_a_group_twice(trio: Trio):
    """B's average is over first; late duplicates must not draw it in again."""
    ticket = trio.request("a", "b")
    trio.repeat("a", "b")
    trio.deliver("a", "b")
    late_claim = trio.hold_back("a", "b")
    trio.settle()
    trio.finish(ticket, by="b")
    trio.release(late_claim)
    trio.settle()
    assert trio.groups == {"a": ticket}
    assert trio.entered.count(("b", ticket)) == 1


def test_who_is_done_does_not_make_another_throw_its_result_away(trio: Trio):
    """B has applied the mean while a still takes in the last slices; then b hears `Begin` again.

    If it answered "not in this group any more", a would abandon what b has applied, and the mean
    of their models would change.
    """
    ticket = trio.request("a", "b")
    trio.deliver("a", "b")
    trio.repeat("b", "a")
    trio.deliver("b", "a")
    trio.deliver("a", "b")
    trio.finish(ticket, by="b")
    trio.settle()  # the second grant arrives, and brings the second begin
    assert trio.groups == {"a": ticket}
    trio.finish(ticket, by="a")
    assert trio.abandoned == {}


def test_an_initiator_that_is_done_does_not_make_a_member_throw_its_result_away(trio: Trio):
    ticket = trio.request("a", "b")
    trio.deliver("a", "b")
    trio.deliver("b", "a")
    trio.advance(RESEND_S, delivering=False)
    late_inquiry = trio.hold_back("b", "a")
    trio.settle()
    trio.finish(ticket, by="a")
    trio.release(late_inquiry)
    trio.settle()
    assert trio.groups == {"b": ticket}
    trio.finish(ticket, by="b")
    assert trio.abandoned == {}


def test_a_result_that_was_applied_while_the_group_was_abandoned_counts_as_done(trio: Trio):
    ticket = formed(trio, "a", "b")
    trio.hear_gone("b", "a")
    trio.finish(ticket, by="b")  # its result was being applied just then
    trio.locks["b"].receive(PeerId("a"), Begin(ticket, AB), trio.clock("b"))
    assert trio.wire == []


def test_a_begin_for_a_broken_average_is_disowned(trio: Trio):
    ticket = trio.request("a", "b")
    trio.deliver("a", "b")
    trio.repeat("b", "a")
    trio.deliver("b", "a")
    trio.deliver("a", "b")
    trio.finish(ticket, Outcome.BROKEN, by="b")
    trio.settle()
    assert trio.groups == {}
    assert trio.ended == {ticket: Outcome.REFUSED}


def test_a_begin_that_overtakes_nothing_it_belongs_to_is_disowned(trio: Trio):
    stray = Ticket(PeerId("a"), 1, 99)
    trio.locks["b"].receive(PeerId("a"), Begin(stray, (PeerId("a"), PeerId("b"))), trio.clock("b"))
    assert trio.on_wire() == ["b -> a Release"]
    trio.settle()
    assert set(trio.states.values()) == {"free"}


def test_a_late_busy_of_an_older_claim_changes_nothing(trio: Trio):
    other = formed(trio, "b", "c")
    first = trio.request("a", "b")
    trio.deliver("a", "b")
    late = trio.hold_back("b", "a")
    trio.advance(ACQUIRE_S)
    trio.finish(other)
    assert trio.ended[first] in (Outcome.LATE, Outcome.BUSY)
    second = trio.request("a", "b")
    trio.release(late)
    trio.settle()
    assert trio.groups == {"a": second, "b": second}


def test_a_late_release_of_an_older_claim_changes_nothing(trio: Trio):
    trio.request("a", "b")
    trio.deliver("a", "b")
    trio.drop("b", "a")
    trio.advance(ACQUIRE_S, delivering=False)
    late = [m for m in trio.wire if isinstance(m.message, Release)]
    trio.drop_all()
    second = trio.request("a", "b")
    trio.settle()
    for message in late:
        trio.release(message)
    assert trio.groups == {"a": second, "b": second}


def test_only_the_last_tickets_are_remembered(trio: Trio):
    for _ in range(3 * ENDED_REMEMBERED):
        trio.finish(formed(trio, "a", "b"))
    assert all(len(lock._ended) == ENDED_REMEMBERED for n, lock in trio.locks.items() if n in "ab")


# --- what each timer protects ---------------------------------------------------------------------


def test_an_initiator_stops_collecting_in_time_and_says_who_did_not_answer(trio: Trio):
    trio.crash("c")
    ticket = trio.request("a", "bc")
    trio.advance(ACQUIRE_S)
    assert trio.ended == {ticket: Outcome.LATE}
    assert trio.reasons[ticket] == f"no grant from c in {ACQUIRE_S:g} s"
    assert set(trio.states.values()) == {"free"}


def test_a_granter_is_free_a_lease_after_its_grant_if_its_initiator_is_dead(trio: Trio):
    trio.request("a", "b")
    trio.deliver("a", "b")
    trio.crash("a")
    trio.advance(LEASE_S - 0.001)
    assert trio.states["b"] != "free"
    trio.advance(0.001)
    assert trio.states["b"] == "free"


def test_a_granter_is_free_at_once_when_it_hears_that_its_initiator_is_gone(trio: Trio):
    trio.request("a", "b")
    trio.deliver("a", "b")
    trio.hear_gone("b", "a")
    assert trio.states["b"] == "free"


def test_a_granter_keeps_its_promise_when_another_member_is_gone(trio: Trio):
    ticket = trio.request("a", "bc")
    trio.deliver("a", "b")
    trio.hear_gone("b", "c")
    assert trio.states["b"] == f"promised to {ticket}"


@pytest.mark.parametrize("granted", [False, True])
def test_a_claim_fails_at_once_when_a_member_is_gone_granted_or_not(trio: Trio, granted: bool):
    ticket = trio.request("a", "bc")
    if granted:
        trio.deliver("a", "b")
        trio.deliver("b", "a")
    trio.hear_gone("a", "b")
    trio.settle()
    assert trio.ended == {ticket: Outcome.LOST}
    assert trio.reasons[ticket] == "b is gone"
    assert trio.states["c"] == "free"


def test_a_group_is_abandoned_when_a_member_is_gone(trio: Trio):
    ticket = formed(trio, "a", "bc")
    for name in "ac":
        trio.hear_gone(name, "b")
    assert trio.groups == {"b": ticket}
    assert trio.abandoned == {("a", ticket): Outcome.LOST, ("c", ticket): Outcome.LOST}
    assert trio.ended == {ticket: Outcome.LOST}


def test_who_says_goodbye_ends_its_promises_and_our_claims_but_not_our_group(quartet: Trio):
    group = formed(quartet, "a", "b")
    quartet.request("c", "d")
    quartet.deliver("c", "d")
    quartet.hear_left("b", "a")
    quartet.hear_left("d", "c")
    quartet.hear_left("c", "d")
    assert quartet.holds("b", group)
    assert quartet.states["c"] == quartet.states["d"] == "free"


def test_an_average_that_outlives_its_deadline_is_abandoned_by_everyone(trio: Trio):
    ticket = formed(trio, "a", "bc")
    trio.advance(IN_GROUP_S)
    assert trio.groups == {}
    assert set(trio.abandoned.values()) == {Outcome.LATE}
    assert trio.ended == {ticket: Outcome.LATE}


def test_nobody_is_in_the_group_any_more_when_the_first_granters_lease_lapses(trio: Trio):
    """The story of house-style section 7: B grants at once, c almost too late, Begin even later."""
    ticket = trio.request("a", "bc")
    trio.deliver("a", "b")
    trio.deliver("b", "a")
    first_lease_ends = trio.time + LEASE_S
    late_claim = trio.hold_back("a", "c")
    trio.advance(ACQUIRE_S - 0.01, delivering=False)
    trio.drop_all()
    trio.release(late_claim)
    trio.deliver("c", "a")
    assert trio.groups == {"a": ticket}
    trio.deliver("a", "c")
    trio.drop_all()  # b never hears that its group has formed
    while trio.time < first_lease_ends:
        assert trio.states["b"] == f"promised to {ticket}"
        trio.advance(min(RESEND_S, first_lease_ends - trio.time), delivering=False)
        trio.drop_all()
    assert trio.states["b"] == "free"
    assert trio.groups == {}
    assert trio.abandoned == {("a", ticket): Outcome.LATE, ("c", ticket): Outcome.LATE}


def test_a_begin_that_comes_too_late_to_average_in_time_is_refused(trio: Trio):
    ticket = trio.request("a", "b")
    trio.deliver("a", "b")
    trio.deliver("b", "a")
    late_begin = trio.hold_back("a", "b")
    for _ in range(int((IN_GROUP_S) / RESEND_S) + 2):
        trio.advance(RESEND_S, delivering=False)
        trio.drop_all()
    assert trio.states["b"] == f"promised to {ticket}"
    trio.release(late_begin)
    assert trio.states["b"] == "free"
    assert ("b", ticket) not in trio.entered


def test_a_paused_peer_holds_nothing_that_expired_while_it_slept(trio: Trio):
    """Its timers are overdue when it wakes up; no message may come before them."""
    ticket = formed(trio, "a", "b")
    trio.time += LEASE_S  # nobody's timer fires
    assert not trio.holds("a", ticket)
    trio.request("c", "a")
    trio.deliver("c", "a")
    assert trio.abandoned == {("a", ticket): Outcome.LATE}
    assert trio.on_wire() == ["a -> c Grant"]


def test_a_paused_initiator_forms_no_group_from_grants_that_come_too_late(trio: Trio):
    ticket = trio.request("a", "b")
    trio.deliver("a", "b")
    trio.time += ACQUIRE_S
    trio.deliver("b", "a")
    assert trio.ended == {ticket: Outcome.LATE}
    trio.settle()
    assert set(trio.states.values()) == {"free"}


def test_a_paused_peer_may_request_anew_when_it_wakes_up(trio: Trio):
    trio.request("a", "b")
    trio.deliver("a", "b")
    trio.time += LEASE_S
    ticket = trio.request("b", "c")
    trio.deliver("b", "c")
    trio.deliver("c", "b")
    assert trio.groups == {"b": ticket}


# --- clocks that drift ----------------------------------------------------------------------------


def when_the_first_lease_lapses(config: LockConfig, drift: float) -> Trio:
    """As above, and worse: the first granter's clock is fast, the others' are slow."""
    trio = Trio("abc", config, {"a": -drift, "b": drift, "c": -drift})
    trio.request("a", "bc")
    trio.deliver("a", "b")
    trio.deliver("b", "a")
    late_claim = trio.hold_back("a", "c")
    trio.advance(ACQUIRE_S / (1 - drift) - 0.01, delivering=False)
    trio.drop_all()
    trio.release(late_claim)
    trio.deliver("c", "a")
    trio.deliver("a", "c")
    assert set(trio.groups) == {"a", "c"}
    while trio.states["b"] != "free":
        trio.drop_all()  # b never hears that its group has formed
        trio.advance(RESEND_S / 4, delivering=False)
    return trio


def test_clocks_may_drift_as_far_as_is_allowed_for():
    trio = when_the_first_lease_lapses(replace(CONFIG, clock_drift=0.1), 0.1)
    assert trio.groups == {}


def test_clocks_that_drift_further_than_that_are_a_danger():
    """The test of the test above."""
    trio = when_the_first_lease_lapses(replace(CONFIG, clock_drift=0.0), 0.1)
    assert "c" in trio.groups


# --- restarted peers, strangers, leaving ----------------------------------------------------------


def test_a_member_that_restarted_is_not_in_the_group_any_more(trio: Trio):
    ticket = trio.request("a", "b")
    trio.deliver("a", "b")
    trio.start("b")
    trio.settle()
    assert trio.groups == {}
    assert trio.ended == {ticket: Outcome.REFUSED}
    assert trio.reasons[ticket] == "b is not in the group any more"


def test_an_initiator_that_restarted_releases_whoever_inquires(trio: Trio):
    trio.request("a", "b")
    trio.deliver("a", "b")
    trio.drop_all()
    trio.start("a")
    trio.advance(RESEND_S)
    assert trio.states["b"] == "free"


def test_tickets_of_two_lives_of_a_peer_differ(trio: Trio):
    first = trio.request("a", "b")
    trio.start("a")
    assert trio.request("a", "b") != first


def test_an_initiator_that_leaves_frees_whoever_it_had_asked(trio: Trio):
    ticket = trio.request("a", "bc")
    trio.deliver("a", "b")
    trio.withdraw("a")
    trio.settle()
    assert trio.ended == {ticket: Outcome.WITHDRAWN}
    assert set(trio.states.values()) == {"free"}


def test_a_member_that_leaves_takes_its_promise_back(trio: Trio):
    ticket = trio.request("a", "bc")
    trio.deliver("a", "b")
    trio.withdraw("b")
    trio.settle()
    assert trio.ended == {ticket: Outcome.REFUSED}
    assert trio.reasons[ticket] == "b is not to be had"
    assert set(trio.states.values()) == {"free"}


def test_who_leaves_lets_its_group_end(trio: Trio):
    ticket = formed(trio, "a", "b")
    for name in "ab":
        trio.withdraw(name)
    assert trio.groups == {"a": ticket, "b": ticket}


def test_a_claim_that_its_sender_could_not_make_is_not_answered(trio: Trio):
    stray = Claim(Ticket(PeerId("c"), 1, 1), 1, LEASE_S)
    trio.locks["b"].receive(PeerId("a"), stray, trio.clock("b"))
    assert trio.wire == []
    assert trio.states["b"] == "free"


@pytest.mark.parametrize("members", ["bc", "ac"])
def test_a_group_that_its_sender_could_not_form_is_not_entered(trio: Trio, members: str):
    ticket = trio.request("a", "b")
    trio.deliver("a", "b")
    begin = Begin(ticket, tuple(PeerId(member) for member in members))
    trio.locks["b"].receive(PeerId("a"), begin, trio.clock("b"))
    assert trio.states["b"] == f"promised to {ticket}"


def test_a_third_peer_cannot_speak_for_a_ticket(trio: Trio):
    ticket = trio.request("a", "b")
    trio.deliver("a", "b")
    for message in (Begin(ticket, AB), Release(ticket)):
        trio.locks["b"].receive(PeerId("c"), message, trio.clock("b"))
    assert trio.states["b"] == f"promised to {ticket}"
    for message in (Grant(ticket), Release(ticket), Busy(ticket, "mean")):
        trio.locks["a"].receive(PeerId("c"), message, trio.clock("a"))
    assert trio.states["a"] == f"claiming {ticket}"
    trio.settle()
    for message in (Release(ticket), Inquire(ticket), Grant(ticket), Busy(ticket, "mean")):
        trio.locks["a"].receive(PeerId("c"), message, trio.clock("a"))
    assert trio.groups == {"a": ticket, "b": ticket}


def test_our_wish_ends_when_too_few_candidates_are_left(trio: Trio):
    formed(trio, "a", "b")
    wish = trio.request("a", "bc", 2)
    trio.hear_left("a", "c")
    assert trio.ended == {wish: Outcome.LOST}


def test_our_wish_goes_without_a_candidate_that_is_gone(trio: Trio):
    first = formed(trio, "a", "b")
    wish = trio.request("a", "bc", 1)
    trio.hear_left("a", "c")
    trio.finish(first)
    trio.settle()
    assert trio.groups == {"a": wish, "b": wish}


def test_who_stops_gives_up_its_wish_and_serves_on(trio: Trio):
    first = formed(trio, "a", "b")
    wish = trio.request("b", "c")
    trio.withdraw("b")
    assert trio.ended == {wish: Outcome.WITHDRAWN}
    other = trio.request("c", "b")
    trio.settle()
    trio.finish(first)
    trio.settle()
    assert trio.groups == {"b": other, "c": other}


def test_when_a_group_breaks_nobody_grants_the_one_who_is_gone(trio: Trio):
    first = formed(trio, "a", "b")
    trio.locks["a"].average_ended(first, Outcome.BROKEN, "torn", trio.clock("a"))
    trio.request("a", "b")
    trio.deliver("a", "b")
    trio.hear_gone("b", "a")
    assert trio.states["b"] == "free"


# --- copies ---------------------------------------------------------------------------------------


def test_a_clone_goes_its_own_way(trio: Trio):
    ticket = trio.request("a", "b")
    effects: list[Effect] = []
    twin = trio.locks["a"].clone(effects.append)
    twin.receive(PeerId("b"), Grant(ticket), 0.0)
    twin.average_ended(ticket, Outcome.DONE, "", 0.0)
    assert [type(effect) for effect in effects] == [Send, Average, GroupEnded]
    assert trio.states["a"] == f"claiming {ticket}"
    assert not trio.locks["a"]._ended


def test_two_locks_that_will_do_the_same_are_frozen_alike_at_whatever_time(trio: Trio):
    frozen = []
    for _ in range(2):
        trio.start("a")
        lock = trio.locks["a"]
        lock._incarnation = 1
        trio.request("a", "bc", 1)
        lock.receive(PeerId("b"), Claim(Ticket(PeerId("b"), 1, 1), 7, LEASE_S), trio.clock("a"))
        lock.receive(PeerId("b"), Busy(Ticket(PeerId("a"), 1, 1), "b"), trio.clock("a"))
        frozen.append(lock.frozen(trio.clock("a")))
        trio.time += 64.0
    assert frozen[0] == frozen[1]
    assert hash(frozen[0]) == hash(frozen[1])
    assert frozen[1] != lock.frozen(trio.clock("a"))  # it is later, and the lock is still there


def test_a_made_up_age_does_not_drive_our_own_claims_out_of_range(trio: Trio):
    lock = trio.locks["a"]
    for number in range(1, 4):
        hostile = Claim(Ticket(PeerId("b"), 1, number), 1 << 62, LEASE_S)
        lock.receive(PeerId("b"), hostile, trio.clock("a"))
    assert lock._clock == 3 * MOST_TICKS
    lock.peer_gone(PeerId("b"), "b is gone", trio.clock("a"))


# --- configuration --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lease_s": 0}, "lock lease_s = 0 must be above 0"),
        ({"resend_s": -1}, "lock resend_s = -1 must be above 0"),
        ({"lease_s": float("inf")}, "lock lease_s = inf must be above 0"),
        ({"acquire_timeout_s": float("nan")}, "lock acquire_timeout_s = nan must be above 0"),
        (
            {"resend_s": 3.0},
            "lock resend_s = 3.0 must be below acquire_timeout_s = 2.0, or nothing is ever sent",
        ),
        (
            {"acquire_timeout_s": 10.0},
            "lock acquire_timeout_s = 10.0 must be below half of lease_s = 20.0",
        ),
        (
            {"acquire_timeout_s": 9.9},
            "must be below half of lease_s = 20.0 on clocks that drift by 0.01, or no time",
        ),
        ({"clock_drift": 1.0}, "lock clock_drift = 1.0 must be from 0 to below 1"),
        ({"clock_drift": -0.1}, "lock clock_drift = -0.1 must be from 0 to below 1"),
        ({"spare_claims": -1}, "lock spare_claims = -1 must be 0 or more"),
        ({"spare_places": -1}, "lock spare_places = -1 must be 0 or more"),
    ],
)
def test_deadlines_that_cannot_work_are_refused(values: dict[str, float], message: str):
    with pytest.raises(ConfigError, match=message):
        LockConfig(**values)
