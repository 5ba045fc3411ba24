"""The group lock, line by line of its module's docstring, message by message of `messages.py`."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from p2ptrain.core.effects import Average, Effect, GroupEnded, Outcome, Send
from p2ptrain.core.group_lock import MOST_TICKS
from p2ptrain.core.lock_state import ENDED_REMEMBERED, Collecting, InGroup, LockConfig
from p2ptrain.core.messages import Begin, Failed, Grant, Inquire, Release, Request
from p2ptrain.core.purpose import Purpose
from p2ptrain.errors import ConfigError, LocalProtocolError
from p2ptrain.ids import PeerId, Ticket
from p2ptrain.sim.explore.copies import clone_part, frozen_part
from tests.helpers.trio import InFlight, Trio

LEASE_S, ACQUIRE_S, RESEND_S = 6.0, 2.0, 0.25
CONFIG = LockConfig(lease_s=LEASE_S, acquire_timeout_s=ACQUIRE_S, resend_s=RESEND_S)

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


# --- the protocol in six lines --------------------------------------------------------------------


def test_a_pair_forms_with_one_request_one_grant_one_begin(trio: Trio):
    ticket = trio.request("a", "b")
    assert trio.on_wire() == ["a -> b Request"]
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


def test_in_a_pair_each_candidate_is_asked_for_its_own_fragment(trio: Trio):
    """As large as its link carries; the one that is free takes what it was asked for."""
    half, eighth = Purpose(fragments=2), Purpose(fragment=5, fragments=8)
    busy = formed(trio, "b", "c")
    ticket = trio.locks["a"].request([*AB[1:], PeerId("c")], 1, 0.0, half, {PeerId("c"): eighth})
    assert trio.said("a", "b").purpose == half
    trio.settle()
    trio.finish(busy, by="c")
    trio.settle()
    assert trio.groups["a"] == trio.groups["c"] == ticket
    assert {trio.averages[name, ticket].purpose for name in "ac"} == {eighth}
    trio.finish(busy, by="b")
    trio.finish(ticket)


def test_a_request_that_comes_again_is_for_the_same_fragment(trio: Trio):
    eighth = Purpose(fragment=5, fragments=8)
    trio.locks["a"].request([PeerId("b")], 1, 0.0, Purpose(fragments=2), {PeerId("b"): eighth})
    trio.drop("a", "b")
    trio.advance(RESEND_S)
    assert {trio.averages[name, trio.groups[name]].purpose for name in "ab"} == {eighth}
    trio.finish(trio.groups["a"])


def test_only_a_pair_is_for_something_else_with_each_candidate(trio: Trio):
    others = [PeerId("b"), PeerId("c")]
    with pytest.raises(LocalProtocolError, match="several purposes"):
        trio.locks["a"].request(others, 2, 0.0, purposes={PeerId("b"): Purpose(fragments=2)})


def test_a_group_needs_no_message_to_end(trio: Trio):
    ticket = formed(trio, "a", "bc")
    trio.finish(ticket, by="b")
    assert trio.groups == {"a": ticket, "c": ticket}
    trio.finish(ticket)
    assert trio.groups == {}
    assert trio.wire == []
    assert trio.ended == {ticket: Outcome.DONE}


def test_only_the_initiator_hears_how_its_request_ended(trio: Trio):
    ticket = formed(trio, "a", "b")
    trio.finish(ticket, by="b")
    assert trio.ended == {}
    trio.finish(ticket, by="a")
    assert trio.ended == {ticket: Outcome.DONE}


def test_who_is_promised_fails_at_once_and_says_to_whom(trio: Trio):
    first = trio.request("a", "b")
    trio.deliver("a", "b")
    trio.request("c", "b")
    trio.deliver("c", "b")
    assert trio.on_wire() == ["b -> a Grant", "b -> c Failed"]
    assert trio.said("b", "c").reason == f"promised to {first}"


def test_who_averages_fails_at_once(trio: Trio):
    first = formed(trio, "a", "b")
    trio.request("c", "b")
    trio.deliver("c", "b")
    assert trio.said("b", "c").reason == f"averaging in {first}"


def test_who_becomes_free_grants_the_request_that_waits_for_it(trio: Trio):
    first = formed(trio, "a", "b")
    second = trio.request("c", "b")
    trio.settle()
    assert trio.groups == {"a": first, "b": first}
    trio.finish(first)
    assert trio.on_wire() == ["b -> c Grant"]
    trio.settle()
    assert trio.groups == {"b": second, "c": second}


def test_of_the_requests_that_wait_the_oldest_is_granted_first(quartet: Trio):
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


def test_a_request_that_was_given_up_waits_nowhere(quartet: Trio):
    first = formed(quartet, "a", "b")
    quartet.request("c", "b")
    quartet.settle()
    quartet.withdraw("c")
    quartet.settle()
    quartet.finish(first)
    assert quartet.wire == []
    assert set(quartet.states.values()) == {"free"}


def test_our_own_request_waits_until_we_are_free(trio: Trio):
    first = formed(trio, "a", "b")
    second = trio.request("a", "c")
    assert trio.wire == []
    trio.finish(first)
    trio.settle()
    assert trio.groups == {"a": second, "c": second}


def test_our_own_request_waits_while_we_are_promised(trio: Trio):
    first = trio.request("a", "b")
    trio.deliver("a", "b")
    second = trio.request("b", "c")
    trio.settle()
    assert trio.groups == {"a": first, "b": first}
    trio.finish(first)
    trio.settle()
    assert trio.groups == {"b": second, "c": second}


def test_a_request_while_we_request_fails_at_once(trio: Trio):
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


def requests_in_vain(trio: Trio, name: str, times: int) -> None:
    """Afterwards the requests of `name` are younger than those of others who have heard of none."""
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
    assert quintet.on_wire() == ["a -> e Request", "a -> c Request", "a -> d Request"]


def test_where_one_is_busy_the_next_is_asked_at_once():
    quintet = crowd("abcde", spare_claims=0)
    formed(quintet, "d", "e")
    quintet.request("a", "dbc", 1)
    quintet.deliver("a", "d")
    quintet.deliver("d", "a")
    assert quintet.on_wire() == ["a -> b Request"]


def test_nobody_waits_in_more_queues_than_it_may():
    quintet = crowd("abcde", spare_claims=0, spare_places=1)
    for pair in ("bc", "de"):
        formed_beside(quintet, *pair)
    quintet.request("a", "bcde", 1)
    quintet.settle()
    state = quintet.locks["a"].state
    assert isinstance(state, Collecting)
    assert (state.busy, state.unasked) == (("b", "c"), ("d", "e"))


def formed_beside(trio: Trio, name: str, other: str) -> None:
    """As `formed`, while others are in groups too."""
    ticket = trio.request(name, other)
    trio.settle()
    assert trio.groups[name] == trio.groups[other] == ticket


def test_who_is_silent_keeps_a_request_from_asking_others_only_for_a_while():
    quintet = crowd("abcde", spare_claims=0)
    quintet.crash("b")
    ticket = quintet.request("a", "bc", 1)
    quintet.settle()
    assert quintet.groups == {}
    quintet.advance(RESEND_S)
    assert quintet.groups == {"a": ticket, "c": ticket}


def test_a_request_fails_when_too_few_candidates_are_left(quartet: Trio):
    ticket = quartet.request("a", "bcd", 2)
    quartet.hear_dead("a", "b")
    assert ticket not in quartet.ended
    quartet.hear_left("a", "d")
    assert quartet.ended == {ticket: Outcome.LOST}
    assert quartet.reasons[ticket] == "d left"


def test_when_it_ends_a_request_says_who_was_in_its_group_or_who_was_asked():
    quintet = crowd("abcde", spare_claims=1)
    ended: list[GroupEnded] = []
    lock = quintet.locks["a"]
    lock._emit = lambda e: ended.append(e) if isinstance(e, GroupEnded) else None
    quintet.request("a", "dcbe", 1)
    quintet.withdraw("a")
    second = quintet.request("a", "cb", 1)
    quintet.locks["a"].receive(PeerId("b"), Grant(second), 0.0)
    quintet.finish(second, by="a")
    assert [e.members for e in ended] == [("a", "c", "d"), AB]


# --- the queue ------------------------------------------------------------------------------------


def test_a_newer_request_of_the_same_peer_takes_the_place_of_its_older_one(trio: Trio):
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


def test_an_older_request_that_comes_after_a_newer_one_is_not_answered(trio: Trio):
    formed(trio, "a", "b")
    trio.request("c", "b")
    late = trio.hold_back("c", "b")
    trio.withdraw("c")
    trio.settle()
    trio.request("c", "b")
    trio.settle()
    trio.release(late)
    assert trio.wire == []


@pytest.mark.parametrize("news", ["dead", "left"])
def test_the_request_of_one_who_is_no_more_waits_no_longer(trio: Trio, news: str):
    first = formed(trio, "a", "b")
    trio.request("c", "b")
    trio.settle()
    if news == "dead":
        trio.hear_dead("b", "c")
    else:
        trio.hear_left("b", "c")
    trio.finish(first)
    assert trio.states["b"] == "free"


def test_a_request_whose_release_was_lost_is_granted_once_and_disowned(trio: Trio):
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
    """Its request is younger, so it will yield."""
    quartet.crash("c")
    requests_in_vain(quartet, "d", 5)
    quartet.request("a", "bc")
    quartet.settle()
    ours = quartet.request("b", "cd", 1)
    theirs = quartet.request("d", "b")
    quartet.settle()
    quartet.withdraw("a")
    quartet.deliver("a", "b")
    assert [m for m in quartet.on_wire() if m.startswith("b")] == [
        "b -> d Request",
        "b -> c Request",
    ]
    quartet.settle()
    assert quartet.groups == {"b": ours, "d": ours}
    assert quartet.ended[theirs] is Outcome.YIELDED


def test_a_younger_request_of_a_candidate_is_an_offer(quartet: Trio):
    """It is asked at once, out of turn: it wants a group and will yield."""
    quartet.crash("c")
    older = quartet.request("a", "cbd", 1)
    younger = quartet.request("d", "a")
    assert "a -> d Request" not in quartet.on_wire()
    quartet.deliver("d", "a")
    assert "a -> d Request" in quartet.on_wire()
    quartet.settle()
    assert quartet.ended[younger] is Outcome.YIELDED
    assert quartet.groups in ({"a": older, "d": older}, {"a": older, "b": older})


# --- who is wanted by an older request ------------------------------------------------------------


def contest(trio: Trio, candidates: str = "bc", needed: int = 2) -> tuple[Ticket, Ticket]:
    """B is promised to a younger request of a, which collects, when an older one of d comes."""
    requests_in_vain(trio, "a", 3)
    older = trio.request("d", "b")
    late = trio.hold_back("d", "b")
    younger = trio.request("a", candidates, needed)
    trio.deliver("a", "b")
    trio.deliver("b", "a")
    trio.release(late)
    return older, younger


def test_who_is_promised_to_a_younger_request_asks_to_be_let_go(quartet: Trio):
    older, younger = contest(quartet)
    assert quartet.on_wire()[-2:] == ["b -> a Inquire", "b -> d Failed"]
    quartet.settle()
    assert quartet.groups == {"b": older, "d": older}
    assert quartet.ended[younger] is Outcome.YIELDED
    assert quartet.reasons[younger] == "b was wanted by an older request"


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
    requests_in_vain(quartet, "a", 3)
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
    requests_in_vain(quartet, "a", 3)
    older = quartet.request("d", "b")
    late = quartet.hold_back("d", "b")
    quartet.request("a", "bc")
    quartet.deliver("a", "b")
    quartet.release(late)
    quartet.deliver_last("b", "a")
    quartet.settle()
    assert quartet.groups == {"b": older, "d": older}


def test_our_own_older_wish_asks_to_be_let_go_too(trio: Trio):
    """B's request failed and left it its age; then b is promised to a younger one."""
    trio.crash("c")
    trio.request("b", "c")
    trio.advance(ACQUIRE_S)
    requests_in_vain(trio, "a", 3)
    trio.request("a", "bc")
    trio.settle()
    again = trio.request("b", "a")
    assert trio.on_wire() == ["b -> a Inquire"]
    trio.settle()
    assert trio.groups == {"a": again, "b": again}


# --- everybody's turn comes -----------------------------------------------------------------------


def test_a_request_that_came_to_nothing_hands_its_age_on(quartet: Trio):
    quartet.crash("c")
    requests_in_vain(quartet, "b", 10)
    first = quartet.request("a", "c")
    quartet.request("b", "a")
    quartet.settle()  # a has heard of a request that was born much later than its own
    quartet.withdraw("b")
    quartet.advance(ACQUIRE_S)
    assert quartet.ended[first] is Outcome.LATE
    requests_in_vain(quartet, "d", 5)
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


# --- no cycle of waits: crossing requests ---------------------------------------------------------


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_of_two_crossing_requests_the_older_wins_and_the_other_becomes_a_member(
    trio: Trio, order: str
):
    older, younger = trio.request("a", "b"), trio.request("b", "a")
    first, second = order
    trio.deliver(first, second)
    trio.deliver(second, first)
    trio.settle()
    assert trio.groups == {"a": older, "b": older}
    assert trio.ended == {younger: Outcome.YIELDED}
    assert trio.reasons[younger] == f"{younger} gave way to the older request {older}"


def test_who_has_requested_less_has_the_older_request_whatever_its_name(trio: Trio):
    for _ in range(3):
        trio.finish(formed(trio, "a", "c"))
    of_a, of_b = trio.request("a", "b"), trio.request("b", "a")
    trio.settle()
    assert trio.groups == {"a": of_b, "b": of_b}
    assert trio.ended[of_a] is Outcome.YIELDED


def test_who_hears_a_request_counts_on_from_it(trio: Trio):
    for _ in range(3):
        trio.finish(formed(trio, "a", "b"))  # b has heard of three requests, though it made none
    of_a, of_b = trio.request("a", "b"), trio.request("b", "a")
    trio.settle()
    assert trio.groups == {"a": of_a, "b": of_a}
    assert trio.ended[of_b] is Outcome.YIELDED


def test_of_three_requests_in_a_ring_at_least_one_forms(trio: Trio):
    tickets = [trio.request("a", "b"), trio.request("b", "c"), trio.request("c", "a")]
    trio.settle()
    assert trio.groups
    assert len({trio.groups[name] for name in trio.groups}) == 1
    assert sum(ticket in trio.ended for ticket in tickets) == 2


def test_of_three_requests_for_everyone_the_oldest_forms(trio: Trio):
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


def test_nobody_yields_to_an_older_request_after_its_group_has_formed(trio: Trio):
    older = trio.request("a", "b")
    younger = trio.request("b", "c")
    trio.deliver("b", "c")
    trio.deliver("c", "b")
    trio.settle()
    assert trio.groups == {"b": younger, "c": younger}
    assert trio.states["a"] == f"collecting for {older}"


# --- each message is lost -------------------------------------------------------------------------


def test_a_lost_request_is_sent_again(trio: Trio):
    ticket = trio.request("a", "b")
    trio.drop("a", "b")
    trio.advance(RESEND_S)
    assert trio.groups == {"a": ticket, "b": ticket}


def test_a_request_is_sent_again_only_to_those_who_have_not_granted(trio: Trio):
    trio.request("a", "bc")
    trio.deliver("a", "b")
    trio.deliver("b", "a")
    trio.drop("a", "c")
    trio.advance(RESEND_S, delivering=False)
    assert "a -> c Request" in trio.on_wire()
    assert "a -> b Request" not in trio.on_wire()


def test_a_lost_grant_is_given_again_when_the_request_comes_again(trio: Trio):
    ticket = trio.request("a", "b")
    trio.deliver("a", "b")
    trio.drop("b", "a")
    trio.advance(RESEND_S)
    assert trio.groups == {"a": ticket, "b": ticket}


def test_a_lost_failed_costs_nothing_once_the_grant_comes(trio: Trio):
    first = formed(trio, "a", "b")
    second = trio.request("c", "b")
    trio.deliver("c", "b")
    trio.drop("b", "c")
    trio.finish(first)
    trio.settle()
    assert trio.groups == {"b": second, "c": second}


def test_candidates_that_are_busy_for_long_are_asked_less_and_less_often(trio: Trio):
    """An average may last for a minute, on a link that questions would fill."""
    first = formed(trio, "a", "b")
    second = trio.request("c", "b")
    asked_at = [0]
    trio.settle()
    for tick in range(1, 32):
        trio.advance(ACQUIRE_S / 32, delivering=False)
        if trio.on_wire():
            asked_at.append(tick)
            trio.settle()
    assert asked_at == [0, 4, 8, 16]
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


def test_a_lost_release_of_a_request_is_asked_for(trio: Trio):
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


def test_a_new_request_of_its_initiator_ends_an_old_promise(trio: Trio):
    """A lost `Release` costs nothing if the same initiator requests us again first."""
    trio.request("a", "b")
    trio.deliver("a", "b")
    trio.advance(ACQUIRE_S, delivering=False)
    trio.drop_all()
    again = trio.request("a", "b")
    trio.settle()
    assert trio.groups == {"a": again, "b": again}


def test_an_initiator_that_restarted_ends_its_old_promise_with_its_first_request(trio: Trio):
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
    for _ in range(3):  # requests, grants, begins
        quartet.wire += quartet.wire
        for message in [quartet.wire.pop(0) for _ in range(len(quartet.wire))]:
            quartet.release(message)
    quartet.settle()
    assert quartet.groups == dict.fromkeys("abcd", ticket)
    assert len(quartet.entered) == 4


def test_a_request_that_comes_after_its_release_is_disowned(trio: Trio):
    ticket = trio.request("a", "b")
    late = trio.hold_back("a", "b")
    trio.advance(ACQUIRE_S, delivering=False)
    trio.drop_all()
    trio.release(late)
    assert trio.states["b"] == f"promised to {ticket}"  # it cannot know better
    trio.settle()
    assert trio.states["b"] == "free"


def test_a_request_that_comes_twice_and_late_promises_nothing(trio: Trio):
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
    late_request = trio.hold_back("a", "b")
    trio.settle()
    trio.finish(ticket, by="b")
    trio.release(late_request)
    trio.settle()
    assert trio.groups == {"a": ticket}
    assert trio.entered.count(("b", ticket)) == 1


def test_who_is_done_does_not_make_another_throw_its_result_away(trio: Trio):
    """B has applied the mean while a still takes in the last chunks; then b hears `Begin` again.

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
    trio.hear_dead("b", "a")
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
    assert trio.on_wire() == ["b -> a Relinquish"]
    trio.settle()
    assert set(trio.states.values()) == {"free"}


def test_a_late_failed_of_an_older_request_changes_nothing(trio: Trio):
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


def test_a_late_release_of_an_older_request_changes_nothing(trio: Trio):
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
    trio.hear_dead("b", "a")
    assert trio.states["b"] == "free"


def test_a_granter_keeps_its_promise_when_another_member_is_gone(trio: Trio):
    ticket = trio.request("a", "bc")
    trio.deliver("a", "b")
    trio.hear_dead("b", "c")
    assert trio.states["b"] == f"promised to {ticket}"


@pytest.mark.parametrize("granted", [False, True])
def test_a_request_fails_at_once_when_a_member_is_gone_granted_or_not(trio: Trio, granted: bool):
    ticket = trio.request("a", "bc")
    if granted:
        trio.deliver("a", "b")
        trio.deliver("b", "a")
    trio.hear_dead("a", "b")
    trio.settle()
    assert trio.ended == {ticket: Outcome.LOST}
    assert trio.reasons[ticket] == "b is gone"
    assert trio.states["c"] == "free"


def test_a_group_is_abandoned_when_a_member_is_gone(trio: Trio):
    ticket = formed(trio, "a", "bc")
    for name in "ac":
        trio.hear_dead(name, "b")
    assert trio.groups == {"b": ticket}
    assert trio.abandoned == {("a", ticket): Outcome.LOST, ("c", ticket): Outcome.LOST}
    assert trio.ended == {ticket: Outcome.LOST}


def test_who_says_goodbye_ends_its_promises_and_our_requests_but_not_our_group(quartet: Trio):
    group = formed(quartet, "a", "b")
    quartet.request("c", "d")
    quartet.deliver("c", "d")
    quartet.hear_left("b", "a")
    quartet.hear_left("d", "c")
    quartet.hear_left("c", "d")
    assert quartet.holds("b", group)
    assert quartet.states["c"] == quartet.states["d"] == "free"


def test_a_group_that_is_formed_has_no_lease(trio: Trio):
    ticket = formed(trio, "a", "bc")
    assert all(lock.next_deadline() is None for lock in trio.locks.values())
    trio.advance(1000 * LEASE_S)
    assert trio.groups == dict.fromkeys("abc", ticket)
    trio.finish(ticket)
    assert trio.ended == {ticket: Outcome.DONE}
    assert trio.abandoned == {}


def promised_in_vain(trio: Trio) -> tuple[Ticket, InFlight]:
    """A and c are in a group; b grants it, and its `Begin` is on its way for just below a lease."""
    ticket = trio.request("a", "bc")
    for name in "bc":
        trio.deliver("a", name)
    for name in "bc":
        trio.deliver(name, "a")
    late_begin = trio.hold_back("a", "b")
    trio.settle()
    while trio.time < LEASE_S - RESEND_S:
        trio.advance(RESEND_S, delivering=False)
        trio.drop_all()
    assert trio.states["b"] == f"promised to {ticket}"
    return ticket, late_begin


def test_a_begin_within_the_lease_is_taken(trio: Trio):
    ticket, late_begin = promised_in_vain(trio)
    trio.advance(RESEND_S - 0.01, delivering=False)
    trio.release(late_begin)
    assert trio.groups == dict.fromkeys("abc", ticket)


def test_who_is_free_since_its_lease_lapsed_refuses_the_group_and_is_in_another(trio: Trio):
    """The group, which has no lease, ends by this refusal, or as soon as nothing moves in it."""
    ticket, late_begin = promised_in_vain(trio)
    trio.advance(RESEND_S, delivering=False)
    trio.drop_all()
    assert trio.states["b"] == "free"
    assert set(trio.groups) == {"a", "c"}
    trio.release(late_begin)
    assert trio.on_wire() == ["b -> a Relinquish"]
    trio.settle()
    assert trio.ended == {ticket: Outcome.REFUSED}
    assert ("b", ticket) not in trio.entered


def test_a_paused_granter_takes_no_begin_for_a_timely_one_when_it_wakes_up(trio: Trio):
    """Its timer is overdue; no message may come before it."""
    ticket, late_begin = promised_in_vain(trio)
    trio.time += RESEND_S  # nobody's timer fires
    trio.release(late_begin)
    assert trio.states["b"] == "free"
    trio.settle()
    assert trio.ended == {ticket: Outcome.REFUSED}


def test_a_paused_member_is_in_its_group_when_it_wakes_up(trio: Trio):
    ticket = formed(trio, "a", "b")
    trio.time += 10 * LEASE_S
    trio.request("c", "a")
    trio.deliver("c", "a")
    assert trio.holds("a", ticket)
    assert trio.on_wire() == ["a -> c Failed"]


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


def test_a_request_that_its_sender_could_not_make_is_not_answered(trio: Trio):
    stray = Request(Ticket(PeerId("c"), 1, 1), 1)
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
    for message in (Grant(ticket), Release(ticket), Failed(ticket, "mean")):
        trio.locks["a"].receive(PeerId("c"), message, trio.clock("a"))
    assert trio.states["a"] == f"collecting for {ticket}"
    trio.settle()
    for message in (Release(ticket), Inquire(ticket), Grant(ticket), Failed(ticket, "mean")):
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
    trio.hear_dead("b", "a")
    assert trio.states["b"] == "free"


# --- copies ---------------------------------------------------------------------------------------


def test_a_clone_goes_its_own_way(trio: Trio):
    ticket = trio.request("a", "b")
    effects: list[Effect] = []
    twin = clone_part(trio.locks["a"])
    twin._emit = effects.append
    twin.receive(PeerId("b"), Grant(ticket), 0.0)
    twin.average_ended(ticket, Outcome.DONE, "", 0.0)
    assert [type(effect) for effect in effects] == [Send, Average, GroupEnded]
    assert trio.states["a"] == f"collecting for {ticket}"
    assert not trio.locks["a"]._ended


def test_two_locks_that_will_do_the_same_are_frozen_alike_at_whatever_time(trio: Trio):
    frozen = []
    for _ in range(2):
        trio.start("a")
        lock = trio.locks["a"]
        lock.incarnation = 1
        trio.request("a", "bc", 1)
        lock.receive(PeerId("b"), Request(Ticket(PeerId("b"), 1, 1), 7), trio.clock("a"))
        lock.receive(PeerId("b"), Failed(Ticket(PeerId("a"), 1, 1), "b"), trio.clock("a"))
        frozen.append(frozen_part(lock, trio.clock("a")))
        trio.time += 64.0
    assert frozen[0] == frozen[1]
    assert hash(frozen[0]) == hash(frozen[1])
    later = frozen_part(lock, trio.clock("a"))
    assert frozen[1] != later, "the lock is still where it was"


def test_a_made_up_age_does_not_drive_our_own_requests_out_of_range(trio: Trio):
    lock = trio.locks["a"]
    for number in range(1, 4):
        hostile = Request(Ticket(PeerId("b"), 1, number), 1 << 62)
        lock.receive(PeerId("b"), hostile, trio.clock("a"))
    assert lock._clock == 3 * MOST_TICKS
    lock.peer_out(PeerId("b"), "b is gone", trio.clock("a"), crashed=True)


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
            {"acquire_timeout_s": 6.0},
            "lock lease_s = 6.0 must be above acquire_timeout_s = 6.0, or grants lapse",
        ),
        ({"spare_claims": -1}, "lock spare_claims = -1 must be 0 or more"),
        ({"spare_places": -1}, "lock spare_places = -1 must be 0 or more"),
    ],
)
def test_deadlines_that_cannot_work_are_refused(values: dict[str, float], message: str):
    with pytest.raises(ConfigError, match=message):
        LockConfig(**values)
