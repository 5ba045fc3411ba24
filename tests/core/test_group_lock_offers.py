"""The group lock: slots that are offered, several wishes, what a group is for, what members say."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from p2ptrain.core.contribution import MODEL, Contribution
from p2ptrain.core.effects import Effect, Outcome
from p2ptrain.core.lock_state import Collecting, LockConfig, Offered
from p2ptrain.core.messages import Arrive, Begin, Grant, Inquire, Relinquish, Request
from p2ptrain.core.purpose import GOSSIP, Formation, Purpose, What
from p2ptrain.errors import LocalProtocolError
from p2ptrain.ids import PeerId, Ticket
from p2ptrain.sim.explore.copies import clone_part, frozen_part
from tests.helpers.trio import BARRIER, Trio, of_schedule

LEASE_S, ACQUIRE_S, RESEND_S = 6.0, 2.0, 0.25
CONFIG = LockConfig(lease_s=LEASE_S, acquire_timeout_s=ACQUIRE_S, resend_s=RESEND_S)

A, B, C, D = (PeerId(name) for name in "abcd")
NEXT = replace(BARRIER, version=BARRIER.version + 1)


@pytest.fixture
def quartet() -> Iterator[Trio]:
    quartet = Trio("abcd", CONFIG)
    yield quartet
    quartet.check()


def waiting(trio: Trio, names: str, to: str = "a", purpose: Purpose = BARRIER) -> None:
    """All of `names` have offered their slots to the coordinator, which knows it."""
    for name in names:
        trio.offer(name, to, purpose)
        trio.deliver(name, to)
    assert trio.wire == []


def offer_of(trio: Trio, name: str) -> Ticket:
    state = trio.locks[name].state
    assert isinstance(state, Offered)
    return state.ticket


def youngest(trio: Trio, name: str) -> None:
    """What `name` requests from now on is younger than what others do who have heard of none."""
    for _ in range(5):
        trio.request(name, next(other for other in trio.locks if other != name))
        trio.withdraw(name)
        trio.drop_all()


# --- a barrier costs one message each way ---------------------------------------------------------


def test_those_who_have_offered_have_granted(quartet: Trio):
    for name in "bcd":
        quartet.offer(name, "a")
    assert quartet.on_wire() == ["b -> a Arrive", "c -> a Arrive", "d -> a Arrive"]
    quartet.settle()
    assert quartet.groups == {}
    ticket = quartet.request("a", "bcd", purpose=BARRIER)
    assert quartet.groups == {"a": ticket}
    assert quartet.on_wire() == ["a -> b Begin", "a -> c Begin", "a -> d Begin"]
    quartet.settle()
    assert quartet.groups == dict.fromkeys("abcd", ticket)
    assert {quartet.averages[name, ticket].purpose for name in "abcd"} == {BARRIER}


def test_begin_names_to_each_the_offer_that_it_takes(quartet: Trio):
    waiting(quartet, "bc")
    offers = {name: offer_of(quartet, name) for name in "bc"}
    quartet.request("a", "bc", purpose=BARRIER)
    for name in "bc":
        told = quartet.said("a", name)
        assert isinstance(told, Begin)
        assert told.offer == offers[name]


def test_who_has_not_offered_is_asked_like_anybody(quartet: Trio):
    waiting(quartet, "b")
    ticket = quartet.request("a", "bc", purpose=BARRIER)
    assert quartet.on_wire() == ["a -> c Request"]
    quartet.settle()
    assert quartet.groups == dict.fromkeys("abc", ticket)


def test_of_more_offers_than_are_needed_the_first_candidates_are_taken_and_the_others_stand(
    quartet: Trio,
):
    waiting(quartet, "bcd")
    first = quartet.request("a", "cdb", 2, BARRIER)
    quartet.settle()
    assert quartet.groups == dict.fromkeys("acd", first)
    assert quartet.states["b"] == "offered to a"
    quartet.finish(first)
    second = quartet.request("a", "b", purpose=BARRIER)
    assert quartet.on_wire() == ["a -> b Begin"]
    quartet.settle()
    assert quartet.groups == dict.fromkeys("ab", second)


def test_an_offer_for_something_else_is_not_taken(quartet: Trio):
    waiting(quartet, "b")
    ticket = quartet.request("a", "b", purpose=NEXT)
    assert quartet.on_wire() == ["a -> b Request"]
    quartet.settle()
    assert quartet.groups == dict.fromkeys("ab", ticket), "b takes it back and grants"


def test_a_version_of_a_schedule_takes_offers_for_the_ones_before_it_and_none_for_later_ones(
    quartet: Trio,
):
    waiting(quartet, "b", purpose=of_schedule(4))
    waiting(quartet, "c", purpose=of_schedule(6))
    quartet.request("a", "bc", purpose=of_schedule(5))
    state = quartet.locks["a"].state
    assert isinstance(state, Collecting)
    assert (state.granters, state.asked) == ((B,), (C,))


def test_gossip_takes_no_offer(quartet: Trio):
    waiting(quartet, "b")
    quartet.request("a", "b")
    assert quartet.on_wire() == ["a -> b Request"]


def test_an_offer_holds_for_as_long_as_nobody_wants_the_slot(quartet: Trio):
    waiting(quartet, "b")
    assert quartet.locks["b"].next_deadline() is None
    quartet.advance(1000 * LEASE_S)
    ticket = quartet.request("a", "b", purpose=BARRIER)
    quartet.settle()
    assert quartet.groups == dict.fromkeys("ab", ticket)


def test_the_same_offer_again_is_the_same_and_another_one_has_another_ticket(quartet: Trio):
    waiting(quartet, "b")
    first = offer_of(quartet, "b")
    quartet.offer("b", "a")
    assert offer_of(quartet, "b") == first
    quartet.offer("b", "a", NEXT)
    second = offer_of(quartet, "b")
    quartet.offer("b", "c", NEXT)
    assert first < second < offer_of(quartet, "b")


def test_a_request_that_came_to_nothing_leaves_offers_as_they_are(quartet: Trio):
    waiting(quartet, "b")
    quartet.choices["c"].refused = [BARRIER]
    first = quartet.request("a", "bc", purpose=BARRIER)
    quartet.deliver("a", "c")
    quartet.deliver("c", "a")
    assert quartet.ended == {first: Outcome.REFUSED}
    assert quartet.wire == [], "b was not asked, and need not be told"
    assert quartet.states["b"] == "offered to a"
    second = quartet.request("a", "b", purpose=BARRIER)
    quartet.settle()
    assert quartet.groups == dict.fromkeys("ab", second)


def test_an_offering_peer_expects_chunks_of_its_coordinator_and_of_nobody_else(quartet: Trio):
    """They may come before `Begin` does."""
    waiting(quartet, "b")
    lock = quartet.locks["b"]
    ticket = quartet.request("a", "b", purpose=BARRIER)
    assert lock.expects(ticket)
    assert not lock.expects(Ticket(C, 1, 1))
    quartet.settle()
    quartet.finish(ticket)
    assert not lock.expects(ticket)


# --- an offer is taken back -----------------------------------------------------------------------


@pytest.mark.parametrize("younger", [False, True])
def test_any_request_takes_an_offer_back_however_young(quartet: Trio, younger: bool):
    if younger:
        youngest(quartet, "d")
    waiting(quartet, "b")
    other = quartet.request("d", "b")
    quartet.deliver("d", "b")
    assert quartet.on_wire() == ["b -> a Inquire", "b -> d Failed"]
    quartet.deliver("b", "a")
    quartet.deliver("a", "b")
    assert quartet.states["b"] == f"promised to {other}"
    quartet.settle()
    assert quartet.groups == dict.fromkeys("bd", other)


def test_our_own_wish_takes_our_offer_back(quartet: Trio):
    waiting(quartet, "b")
    wish = quartet.request("b", "d")
    assert quartet.on_wire() == ["b -> a Inquire"]
    quartet.settle()
    assert quartet.groups == dict.fromkeys("bd", wish)


def test_after_the_group_that_came_between_the_slot_is_offered_again(quartet: Trio):
    waiting(quartet, "b")
    first = offer_of(quartet, "b")
    other = quartet.request("d", "b")
    quartet.settle()
    quartet.finish(other)
    assert quartet.states["b"] == "offered to a"
    assert offer_of(quartet, "b") > first
    assert quartet.on_wire() == ["b -> a Arrive"]
    quartet.settle()
    ticket = quartet.request("a", "b", purpose=BARRIER)
    assert quartet.on_wire() == ["a -> b Begin"]
    quartet.settle()
    assert quartet.groups == dict.fromkeys("ab", ticket)


def test_a_coordinator_lets_an_offer_go_also_while_it_is_in_another_group(quartet: Trio):
    waiting(quartet, "b")
    group = quartet.request("a", "c")
    quartet.settle()
    other = quartet.request("d", "b")
    quartet.settle()
    assert quartet.groups == {**dict.fromkeys("ac", group), **dict.fromkeys("bd", other)}


def test_a_coordinator_that_collects_lets_an_offer_go_and_asks_like_anybody(quartet: Trio):
    busy = quartet.request("c", "d")
    quartet.settle()
    waiting(quartet, "b")
    ours = quartet.request("a", "bc", purpose=BARRIER)
    quartet.settle()
    assert quartet.groups == dict.fromkeys("cd", busy)
    wish = quartet.request("b", "d")
    assert quartet.on_wire() == ["b -> a Inquire"]
    quartet.deliver("b", "a")
    assert quartet.on_wire() == ["a -> b Release", "a -> b Request"]
    quartet.settle()
    assert quartet.ended == {wish: Outcome.YIELDED}, "it is the younger one"
    assert quartet.states["b"] == f"promised to {ours}"
    quartet.finish(busy)
    quartet.settle()
    assert quartet.groups == dict.fromkeys("abc", ours)


def test_an_older_request_of_the_coordinator_gets_the_peer_that_was_let_go(quartet: Trio):
    """D's younger one has taken the offer back, and is let go itself if it still collects."""
    youngest(quartet, "d")
    quartet.crash("c")
    waiting(quartet, "b")
    ours = quartet.request("a", "bc", purpose=BARRIER)
    theirs = quartet.request("d", "bc")
    quartet.settle()
    assert quartet.states["b"] == f"promised to {ours}"
    state = quartet.locks["a"].state
    assert isinstance(state, Collecting)
    assert state.ticket == ours
    assert state.granters == (B,)
    assert quartet.ended[theirs] is Outcome.YIELDED


def test_an_inquiry_that_comes_after_the_group_has_begun_brings_begin(quartet: Trio):
    waiting(quartet, "b")
    quartet.request("d", "b")
    quartet.deliver("d", "b")
    ticket = quartet.request("a", "b", purpose=BARRIER)
    quartet.drop("a", "b")  # the begin
    quartet.deliver("b", "a")
    assert quartet.on_wire() == ["b -> d Failed", "a -> b Begin"]
    quartet.settle()
    assert quartet.groups == dict.fromkeys("ab", ticket)


def test_a_begin_and_an_inquiry_may_cross(quartet: Trio):
    waiting(quartet, "b")
    other = quartet.request("d", "b")
    quartet.deliver("d", "b")
    ticket = quartet.request("a", "b", purpose=BARRIER)
    quartet.settle()
    assert quartet.groups == dict.fromkeys("ab", ticket)
    quartet.finish(ticket)
    quartet.settle()
    assert quartet.groups == dict.fromkeys("bd", other)


def test_a_lost_inquiry_for_an_offer_is_sent_again(quartet: Trio):
    waiting(quartet, "b")
    other = quartet.request("d", "b")
    quartet.deliver("d", "b")
    quartet.drop_all()
    quartet.advance(RESEND_S / 2, delivering=False)
    assert "b -> a Inquire" not in quartet.on_wire()
    quartet.advance(RESEND_S / 2, delivering=False)
    assert "b -> a Inquire" in quartet.on_wire()
    quartet.settle()
    assert quartet.groups == dict.fromkeys("bd", other)


def test_a_lost_release_of_an_offer_is_asked_for(quartet: Trio):
    waiting(quartet, "b")
    other = quartet.request("d", "b")
    quartet.deliver("d", "b")
    quartet.deliver("b", "a")
    quartet.drop("a", "b")
    quartet.advance(RESEND_S)
    assert quartet.groups == dict.fromkeys("bd", other)


def test_a_coordinator_that_is_silent_keeps_a_slot_from_others_for_a_lease_at_most(quartet: Trio):
    """It hangs, or is cut off from this one peer: no word of membership will come."""
    waiting(quartet, "b")
    quartet.paused["a"] = None
    began_at = quartet.time
    wish = quartet.request("b", "d")
    while quartet.time < began_at + LEASE_S:
        assert quartet.states["b"] == "offered to a"
        inquiry = quartet.hold_back("b", "a")
        quartet.drop_all()
        quartet.advance(RESEND_S, delivering=False)
    ticket = quartet.request("a", "b", purpose=BARRIER)  # now it wakes up
    quartet.drop_all()
    quartet.release(inquiry)
    quartet.settle()
    assert ("b", ticket) not in quartet.entered
    quartet.advance(RESEND_S)
    assert quartet.groups["b"] == wish


@pytest.mark.parametrize("news", ["gone", "left"])
def test_an_offer_to_one_who_is_no_more_is_none(quartet: Trio, news: str):
    waiting(quartet, "b")
    quartet.request("d", "b")
    quartet.deliver("d", "b")
    if news == "gone":
        quartet.hear_dead("b", "a")
    else:
        quartet.hear_left("b", "a")
    assert quartet.states["b"].startswith("promised to d")


def test_who_has_nobody_to_wait_for_is_free(quartet: Trio):
    waiting(quartet, "b")
    quartet.hear_dead("b", "c")
    assert quartet.states["b"] == "offered to a"
    quartet.hear_dead("b", "a")
    assert quartet.states["b"] == "free"


@pytest.mark.parametrize("news", ["gone", "left"])
def test_the_offer_of_one_who_is_no_more_is_not_taken(quartet: Trio, news: str):
    waiting(quartet, "bc")
    if news == "gone":
        quartet.hear_dead("a", "b")
    else:
        quartet.hear_left("a", "b")
    ticket = quartet.request("a", "bc", 1, BARRIER)
    assert quartet.on_wire() == ["a -> c Begin"]
    assert quartet.members("a", ticket) == "ac"


def test_a_coordinator_that_stops_takes_no_offers_that_it_had(quartet: Trio):
    waiting(quartet, "b")
    quartet.withdraw("a")
    quartet.request("a", "b", purpose=BARRIER)
    assert quartet.on_wire() == ["a -> b Request"]


# --- stale offers ---------------------------------------------------------------------------------


def test_an_offer_that_was_let_go_is_not_taken_if_it_comes_again(quartet: Trio):
    quartet.offer("b", "a")
    quartet.repeat("b", "a")
    quartet.deliver("b", "a")
    late = quartet.hold_back("b", "a")
    other = quartet.request("d", "b")
    quartet.settle()
    quartet.release(late)
    assert quartet.on_wire() == ["a -> b Release"]
    quartet.settle()
    assert quartet.groups == dict.fromkeys("bd", other)
    quartet.request("a", "b", purpose=BARRIER)
    assert quartet.on_wire() == ["a -> b Request"]


def test_an_offer_that_its_inquiry_has_overtaken_is_not_taken(quartet: Trio):
    quartet.offer("b", "a")
    late = quartet.hold_back("b", "a")
    other = quartet.request("d", "b")
    quartet.settle()
    assert quartet.groups == dict.fromkeys("bd", other)
    quartet.release(late)
    assert quartet.on_wire() == ["a -> b Release"]


def test_an_older_offer_that_comes_after_a_newer_one_does_not_replace_it(quartet: Trio):
    """B has taken the older one back by itself: it waits for something else now."""
    quartet.offer("b", "a")
    late = quartet.hold_back("b", "a")
    quartet.withdraw_offer("b")
    waiting(quartet, "b")
    quartet.release(late)
    quartet.settle()
    ticket = quartet.request("a", "b", purpose=BARRIER)
    quartet.settle()
    assert quartet.groups == dict.fromkeys("ab", ticket)


def test_whoever_notes_an_offer_is_told_if_a_later_word_has_overtaken_it(quartet: Trio):
    """What else came with it is as old."""
    lock = quartet.locks["a"]
    older, newer = Ticket(B, 1, 3), Ticket(B, 1, 5)
    assert lock.note_offer(B, newer, BARRIER, MODEL)
    assert lock.note_offer(B, newer, BARRIER, MODEL), "it is said again"
    assert not lock.note_offer(B, older, NEXT, MODEL)
    lock.receive(B, Inquire(newer), quartet.clock("a"))
    assert not lock.note_offer(B, older, NEXT, MODEL)
    assert not lock.note_offer(B, Ticket(C, 1, 9), NEXT, MODEL), "not its own"
    quartet.drop_all()


def test_an_offer_that_its_coordinator_has_forgotten_is_made_anew(quartet: Trio):
    """B was told that what it waits for does not come, and that was lost."""
    waiting(quartet, "b")
    first = offer_of(quartet, "b")
    quartet.locks["a"].forget_offer(B)
    quartet.say_again("b")
    quartet.settle()
    assert offer_of(quartet, "b") > first
    ticket = quartet.request("a", "b", purpose=BARRIER)
    assert quartet.on_wire() == ["a -> b Begin"]
    quartet.settle()
    assert quartet.groups == dict.fromkeys("ab", ticket)


@pytest.mark.parametrize("instead", [BARRIER, NEXT, None])
def test_a_group_that_begins_with_an_offer_that_stands_no_more_is_refused(
    quartet: Trio, instead: Purpose | None
):
    waiting(quartet, "bc")
    quartet.withdraw_offer("b")
    if instead:
        quartet.offer("b", "a", instead)
        quartet.drop("b", "a")
    ticket = quartet.request("a", "bc", purpose=BARRIER)
    quartet.deliver("a", "b")
    assert "b -> a Relinquish" in quartet.on_wire()
    quartet.settle()
    assert ("b", ticket) not in quartet.entered
    assert quartet.ended == {ticket: Outcome.REFUSED}
    assert quartet.abandoned["a", ticket] is Outcome.REFUSED


def test_a_group_of_another_coordinator_than_ours_is_refused(quartet: Trio):
    waiting(quartet, "b")
    waiting(quartet, "b", to="c")
    stale = quartet.request("a", "b", purpose=BARRIER)
    quartet.settle()
    assert quartet.ended == {stale: Outcome.REFUSED}
    assert quartet.states["b"] == "offered to c"


def test_a_peer_that_restarted_has_offered_nothing(quartet: Trio):
    waiting(quartet, "b")
    quartet.start("b")
    ticket = quartet.request("a", "b", purpose=BARRIER)
    quartet.settle()
    assert quartet.ended == {ticket: Outcome.REFUSED}


def test_a_peer_that_stops_takes_its_offer_back(quartet: Trio):
    waiting(quartet, "b")
    quartet.withdraw("b")
    assert quartet.states["b"] == "free"
    ticket = quartet.request("a", "b", purpose=BARRIER)
    quartet.settle()
    assert quartet.ended == {ticket: Outcome.REFUSED}


def test_nobody_offers_the_slot_of_another(quartet: Trio):
    stray = Arrive(BARRIER.version, BARRIER.lineage, Ticket(C, 1, 1))
    quartet.locks["a"].note_offer(B, Ticket(C, 1, 1), BARRIER, stray.contribution)
    assert quartet.wire == []
    quartet.request("a", "bc", purpose=BARRIER)
    assert quartet.on_wire() == ["a -> b Request", "a -> c Request"]


def test_a_newer_offer_that_is_taken_back_voids_an_older_one(quartet: Trio):
    waiting(quartet, "b")
    older = offer_of(quartet, "b")
    newer = replace(older, number=older.number + 1)  # its `Arrive` is late
    quartet.locks["a"].receive(B, Inquire(newer), quartet.clock("a"))
    quartet.request("a", "b", purpose=BARRIER)
    assert quartet.on_wire() == ["a -> b Release", "a -> b Request"]


def test_a_third_peer_cannot_let_go_of_an_offer_nor_begin_with_it(quartet: Trio):
    waiting(quartet, "b")
    offer = offer_of(quartet, "b")
    stray = Begin(Ticket(C, 1, 1), (B, C), purpose=BARRIER, offer=offer)
    lock = quartet.locks["b"]
    lock.receive(C, stray, quartet.clock("b"))
    assert offer_of(quartet, "b") == offer
    assert quartet.on_wire() == ["b -> c Relinquish"]
    quartet.drop_all()
    quartet.locks["a"].receive(C, Inquire(offer), quartet.clock("a"))  # of b's offer
    quartet.drop_all()
    quartet.request("a", "b", purpose=BARRIER)
    assert quartet.on_wire() == ["a -> b Begin"]


@pytest.mark.parametrize("offered", [False, True])
def test_a_group_for_something_else_than_was_granted_or_offered_is_refused(
    quartet: Trio, offered: bool
):
    """Our scalars have been stated for that."""
    lock, ticket = quartet.locks["b"], Ticket(A, 1, 1)
    if offered:
        waiting(quartet, "b")
        offer = offer_of(quartet, "b")
        lock.receive(A, Begin(ticket, (A, B), purpose=NEXT, offer=offer), quartet.clock("b"))
    else:
        lock.receive(A, Request(ticket, 1, BARRIER), quartet.clock("b"))
        quartet.drop_all()
        lock.receive(A, Begin(ticket, (A, B), purpose=NEXT), quartet.clock("b"))
    assert quartet.on_wire() == ["b -> a Relinquish"]
    assert quartet.groups == {}


# --- begin is lost, or comes twice ----------------------------------------------------------------


def test_a_lost_begin_comes_again_when_the_offer_does(quartet: Trio):
    waiting(quartet, "bc")
    ticket = quartet.request("a", "bc", purpose=BARRIER)
    quartet.drop("a", "b")
    quartet.settle()
    quartet.say_again("b")
    quartet.settle()
    assert quartet.groups == dict.fromkeys("abc", ticket)


def test_who_was_not_told_of_a_group_that_is_over_offers_anew(quartet: Trio):
    waiting(quartet, "bc")
    broken = quartet.request("a", "bc", purpose=BARRIER)
    quartet.drop("a", "b")
    quartet.settle()
    quartet.finish(broken, Outcome.LOST)
    stale = offer_of(quartet, "b")
    quartet.say_again("b")
    quartet.settle()
    assert offer_of(quartet, "b") > stale
    again = quartet.request("a", "bc", purpose=BARRIER)
    quartet.settle()
    assert quartet.groups == dict.fromkeys("abc", again)


def test_an_offer_is_taken_once_however_often_it_comes(quartet: Trio):
    quartet.offer("b", "a")
    quartet.wire *= 3
    quartet.deliver("b", "a")
    first = quartet.request("a", "b", purpose=BARRIER)
    quartet.deliver("a", "b")
    late = quartet.hold_back("b", "a")
    quartet.settle()
    quartet.finish(first)
    quartet.release(late)
    quartet.settle()
    assert quartet.entered.count(("b", first)) == 1
    quartet.request("a", "b", purpose=BARRIER)
    assert quartet.on_wire() == ["a -> b Request"]


def test_a_begin_that_comes_again_draws_nobody_in_twice_nor_tears_anything(quartet: Trio):
    waiting(quartet, "b")
    ticket = quartet.request("a", "b", purpose=BARRIER)
    quartet.repeat("a", "b")
    quartet.deliver("a", "b")
    quartet.finish(ticket, by="b")
    quartet.settle()
    assert quartet.groups == {"a": ticket}
    quartet.finish(ticket, by="a")
    assert quartet.abandoned == {}
    assert quartet.ended == {ticket: Outcome.DONE}


def test_once_the_group_that_we_waited_for_is_formed_the_slot_is_not_offered_any_more(
    quartet: Trio,
):
    waiting(quartet, "b")
    ticket = quartet.request("a", "b", purpose=BARRIER)
    quartet.settle()
    quartet.finish(ticket)
    assert quartet.states["b"] == "free"


# --- several wishes of our own --------------------------------------------------------------------


def test_one_wish_of_each_formation_waits_and_they_come_in_order(quartet: Trio):
    busy = quartet.request("b", "a")
    quartet.settle()
    wishes = [
        quartet.request("a", "c", purpose=of_schedule(1)),
        quartet.request("a", "d"),
        quartet.request("a", "b", purpose=BARRIER),
    ]
    assert quartet.wire == []
    assert [wish.ticket for wish in quartet.locks["a"]._wishes] == wishes
    for over, formed in zip([busy, *wishes], wishes, strict=False):
        quartet.finish(over)
        quartet.settle()
        assert quartet.groups["a"] == formed
    quartet.finish(wishes[-1])
    assert [quartet.ended[wish] for wish in wishes] == [Outcome.DONE] * 3


@pytest.mark.parametrize("purpose", [GOSSIP, BARRIER, of_schedule(1)], ids=str)
def test_a_second_wish_of_one_formation_ends_at_once(quartet: Trio, purpose: Purpose):
    first = quartet.request("a", "b", purpose=purpose)
    second = quartet.request("a", "c", purpose=purpose)
    assert quartet.ended == {second: Outcome.BUSY}
    assert quartet.reasons[second] == "a has another request under way"
    quartet.settle()
    assert quartet.groups == dict.fromkeys("ab", first)
    third = quartet.request("a", "c", purpose=purpose)
    fourth = quartet.request("a", "d", purpose=purpose)
    assert third not in quartet.ended
    assert quartet.ended[fourth] is Outcome.BUSY


def test_a_wish_of_another_formation_waits_while_one_is_collected(quartet: Trio):
    quartet.crash("b")
    first = quartet.request("a", "b")
    second = quartet.request("a", "c", purpose=BARRIER)
    quartet.settle()
    assert quartet.groups == {}
    quartet.advance(ACQUIRE_S)
    assert quartet.ended == {first: Outcome.LATE}
    assert quartet.groups == dict.fromkeys("ac", second)


def test_each_formation_has_its_own_age_which_its_own_group_ends(quartet: Trio):
    """A barrier that was put off stays old, though we gossip meanwhile."""

    def age_of(purpose: Purpose) -> int:
        quartet.request("a", "c", purpose=purpose)
        asked = quartet.said("a", "c")
        assert isinstance(asked, Request)
        quartet.settle()
        quartet.finish(asked.ticket)
        return asked.born

    quartet.crash("d")
    put_off = quartet.request("a", "d", purpose=BARRIER)
    quartet.advance(ACQUIRE_S)
    assert quartet.ended[put_off] is Outcome.LATE
    young, younger = age_of(GOSSIP), age_of(GOSSIP)
    assert age_of(BARRIER) < young < younger
    assert age_of(BARRIER) > younger


def test_of_several_wishes_those_end_for_which_too_few_candidates_are_left(quartet: Trio):
    group = quartet.request("a", "d")
    quartet.settle()
    lost = quartet.request("a", "b", purpose=BARRIER)
    kept = quartet.request("a", "bc", 1)
    quartet.hear_dead("a", "b")
    assert quartet.ended == {lost: Outcome.LOST}
    quartet.finish(group)
    quartet.settle()
    assert quartet.groups == dict.fromkeys("ac", kept)


def test_who_stops_gives_up_all_its_wishes(quartet: Trio):
    quartet.request("a", "d")
    quartet.settle()
    wishes = [quartet.request("a", "b", purpose=BARRIER), quartet.request("a", "c")]
    quartet.withdraw("a")
    assert quartet.ended == dict.fromkeys(wishes, Outcome.WITHDRAWN)


def test_a_wish_of_the_coordinator_takes_the_offers_that_came_while_it_waited(quartet: Trio):
    group = quartet.request("a", "d")
    quartet.settle()
    wish = quartet.request("a", "bc", purpose=BARRIER)
    waiting(quartet, "bc")
    quartet.finish(group)
    assert quartet.on_wire() == ["a -> b Begin", "a -> c Begin"]
    quartet.settle()
    assert quartet.groups == dict.fromkeys("abc", wish)


# --- groups of one --------------------------------------------------------------------------------


@pytest.mark.parametrize("purpose", [BARRIER, of_schedule(1)], ids=str)
def test_a_group_that_is_not_gossip_may_be_of_ourselves_alone(quartet: Trio, purpose: Purpose):
    quartet.choices["a"].stated[purpose] = stated = Contribution(weight=8)
    ticket = quartet.request("a", "", purpose=purpose)
    assert quartet.wire == []
    average = quartet.averages["a", ticket]
    assert average.members == (A,)
    assert average.contributions == (stated,)
    quartet.finish(ticket)
    assert quartet.ended == {ticket: Outcome.DONE}
    assert quartet.states["a"] == "free"


def test_a_group_of_one_waits_for_its_turn_like_any_other(quartet: Trio):
    group = quartet.request("b", "a")
    quartet.settle()
    alone = quartet.request("a", "", purpose=BARRIER)
    assert quartet.groups["a"] == group
    quartet.finish(group)
    assert quartet.groups == {"a": alone}


def test_nobody_can_be_needed_of_no_candidates(quartet: Trio):
    with pytest.raises(LocalProtocolError, match="a cannot claim a group with"):
        quartet.request("a", "", 1, BARRIER)
    assert quartet.states["a"] == "free"


# --- who takes part in what -----------------------------------------------------------------------


def test_a_peer_that_is_not_in_such_groups_says_so_at_once(quartet: Trio):
    quartet.choices["b"].refused = [BARRIER]
    ticket = quartet.request("a", "bc", purpose=BARRIER)
    quartet.deliver("a", "b")
    assert "b -> a Relinquish" in quartet.on_wire()
    assert quartet.states["b"] == "free"
    quartet.settle()
    assert quartet.ended == {ticket: Outcome.REFUSED}
    assert quartet.reasons[ticket] == "b is not to be had"
    assert quartet.states["c"] == "free"
    gossip = quartet.request("a", "b")
    quartet.settle()
    assert quartet.groups == dict.fromkeys("ab", gossip)


def test_who_is_refused_by_one_does_without_it_if_enough_are_left(quartet: Trio):
    quartet.choices["b"].refused = [GOSSIP]
    ticket = quartet.request("a", "bcd", 2)
    quartet.settle()
    assert quartet.groups == dict.fromkeys("acd", ticket)


def test_a_peer_is_asked_again_when_its_turn_comes_to_grant(quartet: Trio):
    """What the group is for has gone on without it meanwhile; and the next one has its turn."""
    group = quartet.request("a", "b")
    quartet.settle()
    late = quartet.request("c", "b", purpose=of_schedule(1))
    quartet.settle()
    gossip = quartet.request("d", "b")
    quartet.settle()
    quartet.choices["b"].refused = [of_schedule(1)]
    quartet.finish(group)
    quartet.settle()
    assert quartet.ended[late] is Outcome.REFUSED
    assert quartet.groups == dict.fromkeys("bd", gossip)


def test_our_own_request_is_not_made_if_what_it_is_for_is_over_when_its_turn_comes(quartet: Trio):
    group = quartet.request("b", "a")
    quartet.settle()
    late = quartet.request("a", "c", purpose=of_schedule(1))
    gossip = quartet.request("a", "d")
    quartet.choices["a"].refused = [of_schedule(1)]
    quartet.finish(group)
    assert quartet.ended[late] is Outcome.REFUSED
    assert quartet.reasons[late] == "a has gone on meanwhile"
    assert quartet.on_wire() == ["a -> d Request"]
    quartet.settle()
    assert quartet.groups == dict.fromkeys("ad", gossip)


def test_a_lost_refusal_is_said_again_when_the_request_comes_again(quartet: Trio):
    quartet.choices["b"].refused = [GOSSIP]
    ticket = quartet.request("a", "b")
    quartet.deliver("a", "b")
    quartet.drop("b", "a")
    quartet.advance(RESEND_S)
    assert quartet.ended == {ticket: Outcome.REFUSED}


def test_a_request_that_was_refused_is_refused_for_good(quartet: Trio):
    """Its initiator may hear that when it has a later grant already, and would begin with it."""
    quartet.choices["b"].refused = [BARRIER]
    ticket = quartet.request("a", "bc", purpose=BARRIER)
    quartet.repeat("a", "b")
    quartet.deliver("a", "b")
    quartet.choices["b"].refused = []
    late = next(m for m in quartet.wire if str(m) == "a -> b Request")
    quartet.wire.remove(late)
    quartet.drop_all()
    quartet.release(late)
    assert quartet.on_wire() == ["b -> a Relinquish"]
    assert quartet.states["b"] == "free"
    quartet.settle()
    assert quartet.ended == {ticket: Outcome.REFUSED}


def test_a_group_that_was_refused_is_not_granted_when_its_request_comes_late(quartet: Trio):
    """B's lease has lapsed, and it has refused the group; then an old copy of the request comes."""
    ticket = quartet.request("a", "b")
    quartet.repeat("a", "b")
    quartet.deliver("a", "b")
    late = quartet.hold_back("a", "b")
    quartet.deliver("b", "a")
    begin = quartet.hold_back("a", "b")
    while quartet.states["b"] != "free":
        quartet.advance(RESEND_S, delivering=False)
        quartet.drop_all()
    quartet.release(begin)
    quartet.drop_all()
    quartet.release(late)
    assert quartet.on_wire() == ["b -> a Relinquish"]
    assert not quartet.locks["b"].expects(ticket)


# --- what members state ---------------------------------------------------------------------------

OF_A, OF_B, OF_C = (Contribution(weight=n, usual=8, samples=100 * n) for n in (1, 2, 3))


def stating(trio: Trio, purpose: Purpose = BARRIER) -> None:
    for name, stated in zip("abc", (OF_A, OF_B, OF_C), strict=True):
        trio.choices[name].stated[purpose] = stated


def test_all_members_hear_what_each_has_stated_granted_or_offered(quartet: Trio):
    stating(quartet)
    quartet.choices["b"].weights = (1, 2, 3)
    quartet.choices["b"].samples_of_others = 12345
    waiting(quartet, "c", to="b")
    ticket = quartet.request("b", "ca", purpose=BARRIER)
    quartet.settle()
    for name in "abc":
        average = quartet.averages[name, ticket]
        assert average.members == (A, B, C)
        assert average.contributions == (OF_A, OF_B, OF_C)
        assert average.weights == (1, 2, 3)
        assert average.outside_samples == 12345
        assert average.purpose == BARRIER


def test_where_all_average_models_alike_nothing_of_it_travels(quartet: Trio):
    ticket = quartet.request("a", "b")
    quartet.deliver("a", "b")
    quartet.deliver("b", "a")
    told = quartet.said("a", "b")
    assert isinstance(told, Begin)
    assert told.contributions == ()
    assert quartet.averages["a", ticket].contributions == ()


def test_where_one_states_something_all_are_told_of_all(quartet: Trio):
    quartet.choices["b"].stated[GOSSIP] = OF_B
    ticket = quartet.request("a", "b")
    quartet.settle()
    for name in "ab":
        assert quartet.averages[name, ticket].contributions == (MODEL, OF_B)


@pytest.mark.parametrize("offered", [False, True])
def test_a_member_states_it_once_however_often_its_grant_is_said(quartet: Trio, offered: bool):
    stating(quartet)
    if offered:
        quartet.offer("b", "a")
    else:
        quartet.request("a", "bc", purpose=BARRIER)
        quartet.deliver("a", "b")
    first = quartet.said("b", "a")
    assert isinstance(first, Grant | Arrive)
    assert first.contribution == OF_B
    quartet.drop_all()
    quartet.choices["b"].stated[BARRIER] = MODEL  # its trainer goes on
    if offered:
        quartet.say_again("b")
    else:
        quartet.advance(RESEND_S, delivering=False)
    assert quartet.said("b", "a") == first
    assert quartet.choices["b"].asked == [BARRIER]


def test_an_offer_that_is_made_anew_states_it_anew(quartet: Trio):
    waiting(quartet, "b")
    quartet.choices["b"].stated[BARRIER] = OF_B
    other = quartet.request("d", "b")
    quartet.settle()
    quartet.finish(other)
    quartet.settle()
    ticket = quartet.request("a", "b", purpose=BARRIER)
    quartet.settle()
    assert quartet.averages["b", ticket].contributions == (MODEL, OF_B)


def test_who_is_told_late_hears_the_same_of_all_members(quartet: Trio):
    stating(quartet)
    ticket = quartet.request("a", "bc", purpose=BARRIER)
    for name in "bc":
        quartet.deliver("a", name)
        quartet.deliver(name, "a")
    quartet.drop("a", "b")
    quartet.choices["a"].stated[BARRIER] = MODEL
    quartet.advance(RESEND_S)
    told = {quartet.averages[name, ticket].contributions for name in "abc"}
    assert told == {(OF_A, OF_B, OF_C)}


# --- the same, for explorers ----------------------------------------------------------------------


def test_a_clone_has_offers_of_its_own(quartet: Trio):
    waiting(quartet, "bc")
    effects: list[Effect] = []
    lock = quartet.locks["a"]
    twin = clone_part(lock)
    twin._emit = effects.append
    before = frozen_part(lock, quartet.clock("a"))
    assert frozen_part(twin, quartet.clock("a")) == before
    twin.receive(B, Inquire(offer_of(quartet, "b")), quartet.clock("a"))
    twin.note_offer(C, replace(offer_of(quartet, "c"), number=9), BARRIER, MODEL)
    assert frozen_part(lock, quartet.clock("a")) == before
    assert frozen_part(twin, quartet.clock("a")) != before
    quartet.request("a", "bc", purpose=BARRIER)
    assert quartet.on_wire() == ["a -> b Begin", "a -> c Begin"]


def test_all_that_an_offer_changes_is_in_the_frozen_state(quartet: Trio):
    seen = []
    lock = quartet.locks["a"]

    def note() -> None:
        frozen = frozen_part(lock, quartet.clock("a"))
        hash(frozen)
        assert frozen not in seen
        seen.append(frozen)

    note()
    waiting(quartet, "b")
    note()
    quartet.request("d", "b")
    quartet.settle()
    note()  # it has let the offer go
    quartet.offer("a", "c")
    note()
    quartet.offer("a", "c", NEXT)
    note()
    quartet.request("a", "d", purpose=BARRIER)
    note()  # and asks for its own offer back
    quartet.advance(RESEND_S, delivering=False)
    quartet.drop_all()
    quartet.hear_dead("a", "c")
    note()


# --- what each wait ends as -----------------------------------------------------------------------


def test_a_request_whose_candidates_all_stayed_busy_ends_so(quartet: Trio):
    quartet.request("a", "b")
    quartet.settle()
    ticket = quartet.request("c", "ab")
    quartet.advance(ACQUIRE_S)
    assert quartet.ended == {ticket: Outcome.BUSY}
    assert quartet.reasons[ticket] in (
        f"a, b stayed busy for {ACQUIRE_S:g} s",
        f"b, a stayed busy for {ACQUIRE_S:g} s",
    )


def test_a_request_of_which_one_candidate_said_nothing_is_late(quartet: Trio):
    quartet.request("a", "b")
    quartet.settle()
    quartet.crash("d")
    ticket = quartet.request("c", "bd")
    quartet.advance(ACQUIRE_S)
    assert quartet.ended == {ticket: Outcome.LATE}
    assert quartet.reasons[ticket].startswith("no grant from ")


def test_a_barrier_whose_offers_wait_for_one_that_is_busy_ends_as_busy_and_comes_again(
    quartet: Trio,
):
    busy = quartet.request("c", "d")
    quartet.settle()
    waiting(quartet, "b")
    first = quartet.request("a", "bc", purpose=BARRIER)
    quartet.advance(ACQUIRE_S)
    assert quartet.ended == {first: Outcome.BUSY}
    assert quartet.states["b"] == "offered to a"
    quartet.finish(busy)
    again = quartet.request("a", "bc", purpose=BARRIER)
    quartet.settle()
    assert quartet.groups == dict.fromkeys("abc", again)


def test_a_member_that_relinquishes_ends_our_request_or_our_group(quartet: Trio):
    waiting(quartet, "b")
    first = quartet.request("a", "bc", purpose=BARRIER)
    quartet.locks["a"].receive(B, Relinquish(first), quartet.clock("a"))
    assert quartet.ended == {first: Outcome.REFUSED}


def test_what_a_purpose_fulfils():
    schedule, later = of_schedule(3), of_schedule(4)
    gradients = replace(later, what=What.GRADIENTS)
    assert later.fulfils(schedule)
    assert later.fulfils(later)
    assert not schedule.fulfils(later)
    assert not gradients.fulfils(schedule)
    assert BARRIER.fulfils(BARRIER)
    assert not NEXT.fulfils(BARRIER)
    assert not replace(BARRIER, lineage=8).fulfils(BARRIER)
    assert not GOSSIP.fulfils(GOSSIP)
    assert not replace(BARRIER, formation=Formation.WAIT_AVOIDING).fulfils(BARRIER)


def test_a_member_that_offers_its_slot_anew_is_not_in_the_group_that_took_its_last_offer(
    quartet: Trio,
):
    """`Begin` was lost and the offer was taken back; both waited, each for the other's word."""
    waiting(quartet, "bcd")
    ticket = quartet.request("a", "bcd", purpose=BARRIER)
    quartet.drop("a", "b")
    quartet.withdraw_offer("b")
    quartet.drop_all()
    quartet.offer("b", "a", NEXT)
    quartet.deliver("b", "a")
    assert "a -> b Begin" in quartet.on_wire()
    quartet.settle()
    assert not quartet.holds("a", ticket)
