"""Barriers: arrivals, a coordinator that dies, lost messages, breaks, laggards, newcomers, claims.

All of it goes through the slot of each peer (`core/group_lock.py`), as any other group does.
"""

from collections import Counter
from collections.abc import Iterator
from random import Random

import pytest

from p2ptrain.core.barrier import DEPUTY_S
from p2ptrain.core.contribution import Contribution
from p2ptrain.core.effects import Average, Outcome, TakeState
from p2ptrain.core.lock_state import Offered
from p2ptrain.core.messages import Arrive, Begin, CatchUp, Inquire, Relinquish, Request
from p2ptrain.core.purpose import Formation, Purpose, What
from p2ptrain.core.scheduled import Arrival
from p2ptrain.errors import InvariantViolation, LocalProtocolError
from p2ptrain.ids import PeerId, Ticket
from p2ptrain.net import wire
from p2ptrain.net.wire import Envelope
from p2ptrain.sim.explore.copies import frozen_part
from tests.helpers.meeting import RESEND_S, Guest, InFlight, Meeting


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    meeting = Meeting("abc")
    yield meeting
    meeting.check()


def begun(meeting: Meeting) -> list[InFlight]:
    """Deliver all arrivals; the groups that the coordinator begins then are still on the wire."""
    meeting.deliver_all(Arrive)
    return [sent for sent in meeting.wire if isinstance(sent.message, Begin)]


def waits(guest: Guest) -> bool:
    return isinstance(guest.groups.barrier.state, Arrival)


def waits_with(guest: Guest, version: int, lineage: int) -> bool:
    return guest.groups.barrier.waits_with(version, lineage)


def offer_of(guest: Guest) -> Ticket:
    state = guest.groups.lock.state
    assert isinstance(state, Offered), state
    return state.ticket


# --- everyone arrives -----------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["abc", "cba", "bca"])
def test_the_group_is_formed_when_the_last_one_arrives(meeting: Meeting, order: str):
    meeting.arrive(order[:2], 0)
    meeting.settle()
    assert all(not meeting[name].averages for name in order)
    meeting.arrive(order[2], 0)
    meeting.settle()
    assert meeting.together("abc").initiator == "a"
    meeting.finish("abc")
    assert all(meeting[name].ended == [(0, Outcome.DONE)] for name in "abc")


def test_all_members_hear_what_the_group_is_for(meeting: Meeting):
    meeting.arrive("abc", 3, lineage=8)
    meeting.settle()
    for name in "abc":
        (average,) = meeting[name].averages
        assert average.purpose == Purpose(Formation.BARRIER, What.GRADIENTS, 3, 8)


@pytest.mark.parametrize("names", ["ab", "abc", "abcdef"])
def test_a_barrier_costs_one_message_each_way(names: str):
    meeting = Meeting(names)
    for version in range(3):
        meeting.said.clear()
        meeting.arrive("".join(reversed(names)), version)
        meeting.settle()
        meeting.together(names)
        meeting.finish(names)
        assert meeting.states() == dict.fromkeys(names, "free"), (
            "nothing is offered while they train"
        )
        meeting.settle()
        expected = [f"{name} -> a Arrive" for name in names[1:]]
        expected += [f"a -> {name} Begin" for name in names[1:]]
        assert Counter(meeting.said) == Counter(expected)


def test_a_trainer_that_goes_on_does_not_arrive_again_when_its_group_breaks(meeting: Meeting):
    meeting.arrive("abc", 0)
    meeting.settle()
    meeting["b"].groups.barrier.release()
    meeting.finish("abc", Outcome.LOST)
    assert meeting["b"].ended == [(0, Outcome.LOST)]
    assert not waits(meeting["b"])
    assert waits(meeting["a"])
    meeting.arrive("b", 1)
    assert waits(meeting["b"])


def test_each_version_has_a_ticket_of_its_own(meeting: Meeting):
    for version in range(3):
        meeting.arrive("abc", version)
        meeting.settle()
        meeting.together("abc")
        meeting.finish("abc")
    assert len({average.ticket for average in meeting["b"].averages}) == 3


def test_what_a_member_states_with_its_arrival_reaches_all(meeting: Meeting):
    stated = {name: Contribution(weight=number) for number, name in enumerate("abc", start=5)}
    for name in "abc":
        meeting[name].states = stated[name]
    meeting.arrive("cab", 0)
    meeting.settle()
    for name in "abc":
        assert meeting[name].averages[0].contributions == tuple(stated.values())


def test_what_a_member_states_when_it_is_asked_reaches_all(meeting: Meeting):
    """C's slot is in another group when it arrives, so that it grants instead of offering."""
    meeting["c"].states = Contribution(weight=9)
    meeting.request("c", "b")
    meeting.settle()
    meeting.arrive("abc", 0)
    meeting.settle()
    meeting.finish("bc")
    meeting.settle()
    meeting.together("abc")
    weights = [stated.weight for stated in meeting["a"].averages[-1].contributions]
    assert weights == [1, 1, 9]


@pytest.mark.parametrize("outside", [0, 96, 1 << 62, 1 << 70])
def test_samples_that_nobody_can_have_made_keep_nobody_out_of_a_group(
    meeting: Meeting, outside: int
):
    """As said by members that do not exist; a `Begin` with too large a number is lost."""
    meeting["a"].outside = outside
    meeting.arrive("bca", 0)
    for sent in begun(meeting):
        envelope = Envelope(PeerId("a"), "a swarm", sent.message)
        assert wire.decode_envelope(wire.encode_envelope(envelope)) == envelope
    meeting.settle()
    said = {meeting[name].averages[0].outside_samples for name in "abc"}
    assert said == {min(outside, 1 << 62)}


def test_one_peer_alone_is_a_group_at_once():
    meeting = Meeting("a")
    meeting.arrive("a", 0)
    meeting.together("a")
    assert meeting.wire == []
    meeting.finish("a")
    assert meeting["a"].ended == [(0, Outcome.DONE)]


def test_who_finishes_first_may_arrive_anew_while_others_finish(meeting: Meeting):
    meeting.arrive("abc", 0)
    meeting.settle()
    meeting.finish("bc")
    meeting.arrive("bc", 1)
    meeting.settle()
    meeting.finish("a")
    meeting.arrive("a", 1)
    meeting.settle()
    meeting.together("abc")


def test_arriving_twice_is_our_own_mistake(meeting: Meeting):
    meeting.arrive("a", 0)
    with pytest.raises(LocalProtocolError, match="a arrives with 0 but is"):
        meeting.arrive("a", 0)


# --- each message is lost -------------------------------------------------------------------------


@pytest.mark.parametrize("lost", range(4))
def test_any_message_of_a_barrier_may_be_lost(meeting: Meeting, lost: int):
    """Two arrivals and the two words that it has begun, one of them lost."""
    meeting.arrive("cba", 0)
    for index in range(lost + 1):
        assert meeting.wire
        meeting.wire.pop(0) if index == lost else meeting.deliver_at(0)
    meeting.settle()
    meeting.advance(RESEND_S)
    meeting.together("abc")
    assert all(len(meeting[name].averages) == 1 for name in "abc")


def test_who_is_told_late_hears_of_the_first_members_also_of_those_lost_since(meeting: Meeting):
    meeting.arrive("cba", 0)
    begun(meeting)
    meeting.wire.clear()
    ticket = meeting["a"].averages[-1].ticket
    meeting["a"].groups.lock.regroup(ticket, (PeerId("a"), PeerId("b")))  # c is gone
    meeting.advance(RESEND_S)
    assert meeting["b"].averages[-1].members == ("a", "b", "c")


def test_a_lost_word_to_catch_up_is_said_again(meeting: Meeting):
    meeting.arrive("ab", 5)
    meeting.arrive("c", 3)
    meeting.deliver_all(Arrive)
    (lost,) = meeting.wire
    assert lost.message == CatchUp(5, PeerId("a"), 0)
    meeting.wire.clear()
    assert meeting["c"].taking == []
    meeting.advance(RESEND_S)
    assert [(t.version, t.donor) for t in meeting["c"].taking] == [(5, "b")], "the next donor"


def test_a_peer_that_cannot_have_the_state_of_one_is_sent_to_the_next(meeting: Meeting):
    meeting.arrive("ab", 5)
    meeting.arrive("c", 3)
    meeting.settle()
    for _ in range(2):
        meeting.miss_state("c", 5)
        meeting.advance(RESEND_S)
    assert [taking.donor for taking in meeting["c"].taking] == ["a", "b", "a"]


def test_a_peer_that_is_sent_to_donors_again_and_again_leaves_nothing_behind(meeting: Meeting):
    meeting.arrive("ab", 5)
    meeting.arrive("c", 3)
    meeting.settle()
    states = []
    for _ in range(round(DEPUTY_S / RESEND_S) + 4):
        meeting.miss_state("c", 5)
        meeting.advance(RESEND_S)
        states.append(frozen_part(meeting["a"].groups.barrier, meeting.clock("a")))
    assert states[-1] == states[-3] != states[-2] == states[-4], "two donors in turn"


def test_every_message_may_come_twice_and_in_any_order(meeting: Meeting):
    for seed in range(20):
        rng, version = Random(seed), len(meeting["a"].ended)
        meeting.arrive("abc", version)
        for _ in range(40):
            if meeting.wire:
                message = rng.choice(meeting.wire)
                meeting.wire += [message] * rng.choice([0, 0, 1])
                meeting.deliver_at(rng.randrange(len(meeting.wire)))
        meeting.settle()
        meeting.advance(4 * RESEND_S)
        meeting.together("abc")
        meeting.finish("abc")


def test_a_late_begin_of_a_group_that_ended_draws_nobody_in(meeting: Meeting):
    meeting.arrive("abc", 0)
    (late,) = [sent for sent in begun(meeting) if sent.target == "b"]
    meeting.settle()
    meeting.finish("abc", Outcome.LOST)  # everyone waits with version 0 again
    meeting.release(late)
    assert waits(meeting["b"])
    meeting.settle()
    meeting.together("abc")


def test_an_even_later_begin_draws_nobody_in_either(meeting: Meeting):
    meeting.arrive("abc", 0)
    (late,) = [sent for sent in begun(meeting) if sent.target == "b"]
    for _ in range(2):
        meeting.settle()
        meeting.finish("abc", Outcome.LOST)
        meeting.settle()
    meeting.finish("abc", Outcome.LOST)
    meeting.release(late)
    assert waits(meeting["b"])


@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize("is_offered", [False, True])
def test_who_waits_with_something_else_is_in_no_group_of_its_old_arrival(
    is_offered: bool, is_lost: bool
):
    meeting = Meeting("ab")
    old = Ticket(PeerId("b"), 1, 0) if is_offered else None
    meeting.say("b", "a", Arrive(2, offer=old))  # it was on its way for long
    meeting.arrive("a", 2)
    assert bool(meeting["a"].averages) is is_offered
    if is_lost:
        meeting.wire.clear()
    meeting.arrive("b", 5)
    meeting.settle()
    meeting.advance(RESEND_S)
    assert meeting["b"].averages == []
    assert not meeting["a"].group, "b's new offer has brought it the lost word, which it refused"
    meeting.advance(RESEND_S)
    assert [(t.version, t.donor) for t in meeting["a"].taking] == [(5, "b")]


def test_chunks_of_a_group_that_we_have_refused_to_enter_are_refused_at_once():
    """We wait for its coordinator all the same, for another group."""
    meeting = Meeting("ab")
    meeting.say("b", "a", Arrive(2, offer=Ticket(PeerId("b"), 1, 0)))
    meeting.arrive("a", 2)
    (average,) = meeting["a"].averages
    meeting.arrive("b", 5)
    assert meeting["b"].groups.lock.expects(average.ticket), "it may be its own"
    meeting.deliver("a", "b")
    assert not meeting["b"].groups.lock.expects(average.ticket)
    assert meeting["b"].groups.lock.is_over(average.ticket)


# --- offers ---------------------------------------------------------------------------------------


def test_whoever_waits_expects_the_coordinators_group_and_nobody_elses(meeting: Meeting):
    meeting.arrive("c", 0)
    lock = meeting["c"].groups.lock
    assert lock.expects(Ticket(PeerId("a"), 1, 1))
    assert not lock.expects(Ticket(PeerId("b"), 1, 1))
    meeting.arrive("ab", 0)
    meeting.settle()
    meeting.finish("abc")
    assert not lock.expects(meeting["c"].averages[-1].ticket)


def test_a_claim_takes_an_offer_back_and_the_slot_is_offered_again_afterwards(meeting: Meeting):
    meeting.arrive("bc", 0)
    meeting.settle()
    first = offer_of(meeting["c"])
    claim = meeting.request("a", "c")
    assert meeting.on_wire() == ["a -> c Request"]
    meeting.settle()
    assert meeting.groups() == {"a": "ac", "c": "ac"}
    meeting.arrive("a", 0)
    meeting.settle()
    assert meeting.groups() == {"a": "ac", "c": "ac"}, "a waits for its own slot"
    meeting.finish("ac")
    assert meeting["a"].requests == {claim: Outcome.DONE}
    assert first < offer_of(meeting["c"])
    meeting.settle()
    meeting.together("abc")


def test_an_offer_is_asked_back_of_the_coordinator_before_it_is_granted_to_another(
    meeting: Meeting,
):
    meeting.arrive("c", 0)
    meeting.settle()
    offer = offer_of(meeting["c"])
    meeting.request("b", "c")
    meeting.deliver("b", "c")
    assert meeting.on_wire() == ["c -> a Inquire", "c -> b Failed"]
    assert offer_of(meeting["c"]) == offer, "promised to nobody before the coordinator lets go"
    meeting.settle()
    assert meeting.groups() == {"b": "bc", "c": "bc"}


@pytest.mark.parametrize("lost", ["Inquire", "Release"])
def test_a_lost_word_about_an_offer_that_is_wanted_back_is_said_again(meeting: Meeting, lost: str):
    meeting.arrive("c", 0)
    meeting.settle()
    meeting.request("b", "c")
    meeting.deliver("b", "c")
    if lost == "Inquire":
        meeting.take("c", "a")
    else:
        meeting.deliver("c", "a")
        meeting.take("a", "c")
    meeting.settle()
    assert meeting.groups() == {}
    meeting.advance(meeting.config.resend_s)
    assert meeting.groups() == {"b": "bc", "c": "bc"}


def test_a_wish_of_ones_own_takes_the_offer_back_too(meeting: Meeting):
    meeting.arrive("c", 0)
    meeting.settle()
    claim = meeting.request("c", "b")
    assert meeting.on_wire() == ["c -> a Inquire"]
    meeting.settle()
    assert meeting.groups() == {"b": "bc", "c": "bc"}
    meeting.finish("bc")
    meeting.arrive("ab", 0)
    meeting.settle()
    meeting.together("abc")
    assert meeting["c"].requests == {claim: Outcome.DONE}


def test_who_wants_its_offer_back_after_the_group_has_begun_is_told_that_it_has(meeting: Meeting):
    meeting.arrive("abc", 0)
    begun(meeting)
    meeting.wire.clear()  # nobody hears that it has begun
    claim = meeting.request("c", "b")
    assert meeting.on_wire() == ["c -> a Inquire"]
    meeting.settle()
    assert meeting.groups() == {"a": "0:abc", "c": "0:abc"}
    meeting.finish("c")
    meeting.settle()
    assert claim not in meeting["c"].requests, "b has still to hear that the group has begun"
    meeting.advance(RESEND_S)
    meeting.finish("ab")
    meeting.settle()
    assert meeting.groups() == {"b": "bc", "c": "bc"}


@pytest.mark.parametrize("claimer", ["a", "b"])
def test_a_younger_claim_takes_an_offer_too_as_an_offer_is_of_the_lowest_priority(
    meeting: Meeting, claimer: str
):
    """The barrier's request is not made yet: nothing is older than any claim."""
    for _ in range(3):
        meeting.request(claimer, "c")  # its clock grows
        meeting.settle()
        meeting.finish(claimer + "c")
    meeting.arrive("c", 0)
    meeting.settle()
    meeting.request(claimer, "c")
    meeting.settle()
    assert meeting.groups() == dict.fromkeys(sorted(claimer + "c"), "".join(sorted(claimer + "c")))


def test_the_coordinator_lets_an_offer_go_while_it_collects_and_asks_for_the_slot_by_request():
    """D averages with e, so that the barrier's request has to wait; b's claim wants c meanwhile."""
    meeting = Meeting("abcde")
    meeting.request("d", "e")
    meeting.settle()
    meeting.arrive("bcdea", 0)
    meeting.settle()
    assert meeting.states()["a"].startswith("collecting")
    ticket = next(
        sent.message.ticket  # type: ignore[union-attr]
        for sent in _replay(meeting, Request)
        if sent.source == "a"
    )
    meeting.say("c", "a", Inquire(offer_of(meeting["c"])))
    assert meeting.on_wire() == ["a -> c Release", "a -> c Request"]
    meeting.settle()
    assert meeting["c"].groups.lock.expects(ticket)
    meeting.finish("de")
    meeting.settle()
    assert meeting.together("abcde") == ticket


def _replay(meeting: Meeting, kind: type) -> list[InFlight]:
    """Let the timers of those who collect fire; what of this kind they repeat."""
    meeting.advance(meeting.config.resend_s, delivering=False)
    found = [sent for sent in meeting.wire if isinstance(sent.message, kind)]
    meeting.settle()
    return found


def test_an_offer_that_was_let_go_is_not_taken_when_it_comes_again(meeting: Meeting):
    meeting.arrive("c", 0)
    late = meeting.take("c", "a")
    meeting.release(late)
    claim = meeting.request("b", "c")
    meeting.settle()
    meeting.finish("bc")
    assert meeting["b"].requests == {claim: Outcome.DONE}
    meeting.wire.clear()  # c's new offer is lost
    meeting.release(late)
    assert meeting.on_wire() == ["a -> c Release"], "an older one is void"
    meeting.arrive("ab", 0)
    meeting.deliver_all(Arrive)
    assert "a -> c Request" in meeting.on_wire(), "c has arrived, and has not granted"
    meeting.settle()
    meeting.together("abc")


@pytest.mark.parametrize("is_offer", [False, True])
@pytest.mark.parametrize("incarnation", [1, 1 << 62])
def test_a_made_up_ticket_voids_none_of_the_offers_to_come(
    meeting: Meeting, incarnation: int, is_offer: bool
):
    made_up = Ticket(PeerId("b"), incarnation, 1 << 62)
    meeting.say("b", "a", Arrive(0, offer=made_up) if is_offer else Inquire(made_up))
    meeting.settle()
    meeting.arrive("bca", 0)
    meeting.settle()
    meeting.advance(RESEND_S)
    if is_offer and "c" in meeting.groups() and "b" not in meeting.groups():
        meeting.finish("c", Outcome.LOST)  # b has refused what its offer was taken for
        meeting.advance(2 * RESEND_S)
    meeting.together("abc")
    meeting.finish("abc")
    meeting.settle()
    meeting.said.clear()
    meeting.arrive("bca", 1)
    meeting.settle()
    meeting.together("abc")
    assert len(meeting.said) == 4, "as if nothing had been"


def test_a_claim_and_a_barrier_that_want_the_same_peers_both_come_to_pass(meeting: Meeting):
    """Whatever order their messages come in."""
    for seed in range(60):
        meeting, rng = Meeting("abc"), Random(seed)
        claimer = rng.choice("abc")
        others = "abc".replace(claimer, "")
        acts = [(meeting.arrive, (name, 0)) for name in "abc"]
        acts.append((meeting.request, (claimer, others if seed % 2 else rng.choice(others))))
        while acts or meeting.wire:
            if acts and (not meeting.wire or rng.random() < 0.3):
                act, args = acts.pop(rng.randrange(len(acts)))
                act(*args)  # type: ignore[operator]
            else:
                meeting.deliver_at(rng.randrange(len(meeting.wire)))
        for _ in range(20):
            for ticket, members in meeting.complete().items():
                for name in members:
                    meeting.end(name, ticket)
            meeting.settle()
            meeting.advance(RESEND_S)
        assert all(meeting[name].ended == [(0, Outcome.DONE)] for name in "abc"), seed
        (outcome,) = [  # of the claim
            outcome for ticket, outcome in meeting[claimer].requests.items() if ticket.number
        ][:1]
        assert outcome in (Outcome.DONE, Outcome.YIELDED), seed
        meeting.check()


# --- peers die, come late, leave ------------------------------------------------------------------


def test_the_others_do_not_wait_for_the_dead(meeting: Meeting):
    meeting.arrive("ab", 0)
    meeting.settle()
    meeting.die("c")
    meeting.settle()
    meeting.together("ab")


def test_when_the_coordinator_dies_while_all_wait_the_next_one_by_name_is_it(meeting: Meeting):
    meeting.arrive("bc", 0)
    meeting.settle()
    meeting.die("a")
    meeting.settle()
    assert meeting.together("bc").initiator == "b"


def test_when_the_coordinator_dies_before_anybody_hears_of_the_group_the_next_forms_another(
    meeting: Meeting,
):
    meeting.arrive("bca", 0)
    begun(meeting)
    meeting.wire.clear()
    meeting.die("a")
    meeting.settle()
    assert meeting.together("bc").initiator == "b"
    meeting.finish("bc")
    assert meeting["b"].ended == meeting["c"].ended == [(0, Outcome.DONE)]


def test_when_the_coordinator_dies_and_one_has_heard_of_its_group_both_meet_in_another(
    meeting: Meeting,
):
    meeting.arrive("bca", 0)
    begun(meeting)
    meeting.deliver("a", "b")
    meeting.take("a", "c")
    meeting.die("a")
    meeting.settle()
    assert meeting.together("bc").initiator == "b"
    assert [outcome for _, outcome in meeting["b"].abandoned] == [Outcome.LOST]
    assert meeting["c"].abandoned == []


def test_when_a_member_dies_inside_the_group_the_others_form_one_without_it(meeting: Meeting):
    meeting.arrive("abc", 0)
    meeting.settle()
    broken = meeting.together("abc")
    meeting.die("b")
    meeting.settle()
    assert meeting.together("ac") != broken
    assert [ticket for ticket, _ in meeting["a"].abandoned] == [broken]
    assert meeting["a"].ended == []
    meeting.finish("ac")
    assert meeting["a"].ended == [(0, Outcome.DONE)]


def test_when_the_coordinator_dies_inside_the_group_the_others_form_one_without_it(
    meeting: Meeting,
):
    meeting.arrive("abc", 0)
    meeting.settle()
    meeting.die("a")
    meeting.settle()
    assert meeting.together("bc").initiator == "b"


def test_a_member_that_leaves_while_others_collect_is_not_waited_for():
    meeting = Meeting("abcd")
    meeting.request("c", "d")
    meeting.settle()
    meeting.arrive("abcd", 0)
    meeting.settle()
    meeting.finish("d")
    for name in "abc":
        meeting.hear_left(name, "d")
    meeting.guests.pop("d")
    meeting.settle()
    meeting.finish("c")
    meeting.settle()
    meeting.together("abc")


def test_a_broken_group_is_formed_again_under_another_ticket(meeting: Meeting):
    meeting.arrive("abc", 0)
    meeting.settle()
    first = meeting.together("abc")
    meeting.finish("cab", Outcome.BROKEN)
    meeting.settle()
    assert meeting.together("abc") != first


def test_after_a_break_whoever_missed_the_version_takes_over_the_state(meeting: Meeting):
    """A and b have version 0, c has not: its model would differ from theirs for ever."""
    meeting.arrive("abc", 0)
    meeting.settle()
    meeting.finish("c", Outcome.LOST)
    meeting.finish("ab")
    meeting.arrive("ab", 1)
    meeting.settle()
    (take,) = meeting["c"].taking
    assert (take.version, take.donor) == (1, "a")
    assert waits_with(meeting["a"], 1, 0)
    meeting.take_state("c", 1)
    meeting.settle()
    meeting.together("abc")
    meeting.finish("abc")
    assert meeting["c"].ended == [(1, Outcome.DONE)]


def test_the_coordinator_itself_may_be_the_one_behind(meeting: Meeting):
    meeting.arrive("a", 3)
    meeting.arrive("bc", 4)
    meeting.settle()
    (take,) = meeting["a"].taking
    assert (take.version, take.donor) == (4, "b")
    meeting.take_state("a", 4)
    meeting.settle()
    meeting.together("abc")


def test_a_newcomer_at_the_same_version_takes_part(meeting: Meeting):
    meeting.arrive("abc", 40)
    meeting.settle()
    meeting.finish("abc")
    meeting.join("d")
    meeting.arrive("abcd", 41)
    meeting.settle()
    meeting.together("abcd")


def test_a_newcomer_that_is_behind_takes_over_the_state(meeting: Meeting):
    meeting.join("d")
    meeting.arrive("abc", 41)
    meeting.arrive("d", 0)
    meeting.settle()
    assert meeting.is_catching_up("d")
    assert [t.version for t in meeting["d"].taking] == [41]
    meeting.take_state("d", 41)
    meeting.settle()
    meeting.together("abcd")


def test_who_catches_up_offers_its_slot_to_nobody(meeting: Meeting):
    meeting.arrive("ab", 5)
    meeting.arrive("c", 3)
    meeting.settle()
    assert meeting.states()["c"] == "free"
    meeting.request("a", "c")
    meeting.settle()
    assert meeting.groups() == {"a": "ac", "c": "ac"}
    meeting.take_state("c", 5)
    meeting.finish("ac")
    meeting.settle()
    meeting.together("abc")


def test_of_two_models_of_a_version_most_decide_and_the_others_take_theirs(meeting: Meeting):
    meeting.arrive("a", 7, lineage=1)
    meeting.arrive("bc", 7, lineage=2)
    meeting.settle()
    assert meeting["a"].taking == [TakeState(7, PeerId("b"), 2)]
    meeting.take_state("a", 7)
    meeting.settle()
    meeting.together("abc")


def test_of_two_models_that_as_many_have_the_first_ones_is_taken():
    meeting = Meeting("ab")
    meeting.arrive("b", 7, lineage=2)
    meeting.arrive("a", 7, lineage=1)
    meeting.settle()
    assert meeting["b"].taking == [TakeState(7, PeerId("a"), 1)]
    assert not waits_with(meeting["b"], 7, 2), "nobody is to take what it gives up"


def test_who_is_behind_takes_the_model_that_most_have(meeting: Meeting):
    meeting.join("d")
    meeting.arrive("a", 7, lineage=1)
    meeting.arrive("bc", 7, lineage=2)
    meeting.arrive("d", 3, lineage=1)
    meeting.settle()
    assert [meeting[name].taking for name in "ad"] == [[TakeState(7, PeerId("b"), 2)]] * 2


@pytest.mark.parametrize("is_offered", [False, True])
def test_one_whose_model_changed_on_the_way_is_in_no_group_of_the_old_one(is_offered: bool):
    meeting = Meeting("ab")
    meeting.arrive("a", 7, lineage=1)
    old = Ticket(PeerId("b"), 1, 0) if is_offered else None
    meeting.say("b", "a", Arrive(7, 1, old))  # older than what b has
    meeting.arrive("b", 7, lineage=2)
    meeting.settle()
    assert meeting["b"].averages == []
    assert waits_with(meeting["b"], 7, 2)


def test_a_model_that_could_not_be_had_leaves_the_old_one_to_wait_with(meeting: Meeting):
    meeting.arrive("ab", 7, lineage=2)
    meeting.arrive("c", 7, lineage=1)
    meeting.settle()
    meeting.miss_state("c", 7)
    assert waits_with(meeting["c"], 7, 1)
    meeting.settle()
    assert len(meeting["c"].taking) == 2


def test_who_does_not_wait_expects_no_group(meeting: Meeting):
    meeting.arrive("b", 0)
    meeting.withdraw("b")
    assert not meeting["b"].groups.lock.expects(Ticket(PeerId("a"), 1, 1))


def test_a_newcomer_that_sorts_first_becomes_the_coordinator():
    meeting = Meeting("bc")
    meeting.arrive("bc", 7)
    meeting.settle()
    meeting.finish("bc")
    meeting.join("a")
    meeting.arrive("bc", 8)
    meeting.arrive("a", 0)
    meeting.settle()
    assert [t.version for t in meeting["a"].taking] == [8]
    meeting.take_state("a", 8)
    meeting.settle()
    assert meeting.together("abc").initiator == "a"


def test_those_who_wait_when_the_coordinator_changes_offer_their_slots_to_the_new_one():
    meeting = Meeting("bcd")
    meeting.arrive("cd", 7)
    meeting.settle()
    meeting.join("a")
    assert {name: meeting.states()[name] for name in "cd"} == {
        "c": "offered to a",
        "d": "offered to a",
    }
    meeting.arrive("ab", 7)
    meeting.settle()
    assert meeting.together("abcd").initiator == "a"


def test_a_state_that_cannot_be_had_is_asked_for_again(meeting: Meeting):
    meeting.arrive("ab", 5)
    meeting.arrive("c", 3)
    meeting.settle()
    meeting.miss_state("c", 5)
    meeting.settle()
    assert [t.version for t in meeting["c"].taking] == [5, 5]


def test_a_donor_that_dies_is_replaced(meeting: Meeting):
    meeting.arrive("ab", 5)
    meeting.arrive("c", 3)
    meeting.settle()
    meeting.die("a")
    meeting.miss_state("c", 5)
    meeting.settle()
    assert [t.donor for t in meeting["c"].taking] == ["a", "b"]


def test_who_stops_while_it_waits_is_let_go_and_the_others_go_on(meeting: Meeting):
    meeting.arrive("ab", 0)
    meeting.settle()
    meeting.withdraw("b")
    assert meeting["b"].ended == [(0, Outcome.WITHDRAWN)]
    assert meeting["b"].groups.barrier.state is None
    for name in "ac":
        meeting.see(name, "ac")
    meeting.arrive("c", 0)
    meeting.settle()
    meeting.together("ac")
    assert meeting["b"].averages == []


def test_who_stops_and_is_thought_to_wait_still_refuses_and_the_others_meet_when_they_know(
    meeting: Meeting,
):
    meeting.arrive("bc", 0)
    meeting.settle()
    meeting.withdraw("b")
    meeting.arrive("a", 0)
    meeting.settle()
    assert meeting["b"].averages == []
    assert [outcome for _, outcome in meeting["a"].abandoned] == [Outcome.REFUSED]
    meeting.finish("c", Outcome.LOST)  # as repair says
    for name in "ac":
        meeting.see(name, "ac")
    meeting.settle()
    meeting.together("ac")


def test_who_stops_inside_a_group_lets_it_end(meeting: Meeting):
    meeting.arrive("abc", 0)
    meeting.settle()
    meeting.withdraw("b")
    meeting.together("abc")
    meeting.finish("abc")
    assert meeting["b"].ended == [(0, Outcome.DONE)]


def test_who_stops_inside_a_group_that_breaks_waits_no_more(meeting: Meeting):
    meeting.arrive("abc", 0)
    meeting.settle()
    meeting.withdraw("b")
    meeting.finish("b", Outcome.LOST)
    assert meeting["b"].ended == [(0, Outcome.WITHDRAWN)]


def test_who_stops_while_it_catches_up_waits_no_more(meeting: Meeting):
    meeting.arrive("ab", 5)
    meeting.arrive("c", 3)
    meeting.settle()
    meeting.withdraw("c")
    assert meeting["c"].ended == [(3, Outcome.WITHDRAWN)]
    meeting.take_state("c", 5)
    assert meeting["c"].groups.barrier.state is None


@pytest.mark.parametrize("leaves", [False, True])
def test_an_arrival_of_one_who_went_does_not_count_when_it_comes_back(
    meeting: Meeting, leaves: bool
):
    meeting.arrive("c", 0)
    meeting.settle()
    for name in "ab":
        (meeting.hear_left if leaves else meeting.hear_dead)(name, "c")
        meeting.see(name, "abc")
    meeting.add("c", "abc", incarnation=2)
    meeting.arrive("ab", 0)
    meeting.settle()
    assert all(not meeting[name].averages for name in "abc")
    meeting.arrive("c", 0)
    meeting.settle()
    meeting.together("abc")


# --- views differ ---------------------------------------------------------------------------------


def test_two_coordinators_form_no_two_groups_that_share_a_peer(meeting: Meeting):
    """B and c think that a is dead; a thinks that all are here."""
    for name in "bc":
        meeting.see(name, "bc")
    meeting.arrive("abc", 0)
    meeting.settle()
    assert meeting.together("bc").initiator == "b"
    assert waits(meeting["a"])
    for name in "bc":
        meeting.see(name, "abc")
    meeting.finish("bc")
    meeting.arrive("bc", 1)
    meeting.settle()
    assert [t.donor for t in meeting["a"].taking] == ["b"]


def test_of_two_coordinators_that_request_a_shared_peer_one_gets_it_and_the_other_waits(
    meeting: Meeting,
):
    """A and b do not see each other; both have heard that c waits."""
    meeting.see("a", "ac")
    meeting.see("b", "bc")
    meeting.arrive("c", 0)
    meeting.settle()
    meeting.say("c", "b", Arrive(0))
    meeting.arrive("ab", 0)
    meeting.settle()
    assert meeting.groups() == {"a": "0:ac", "c": "0:ac"}
    meeting.finish("ac")
    meeting.settle()
    assert meeting.groups() == {}, "c waits no more for what b wants with it"
    for name in "ab":
        meeting.see(name, "abc")
    meeting.arrive("ac", 1)
    meeting.settle()
    meeting.advance(RESEND_S)
    assert [t.donor for t in meeting["b"].taking] == ["a"]


def test_chunks_of_a_group_that_is_over_are_refused(meeting: Meeting):
    meeting.arrive("abc", 0)
    meeting.settle()
    ticket = meeting.together("abc")
    assert meeting["b"].groups.lock.holds(ticket)
    meeting.finish("b")
    assert not meeting["b"].groups.lock.holds(ticket)
    meeting.end("b", ticket)  # again: changes nothing
    assert meeting["b"].ended == [(0, Outcome.DONE)]


# --- a coordinator that forms nothing -------------------------------------------------------------


def test_a_coordinator_that_forms_nothing_is_replaced_by_the_next_by_name(meeting: Meeting):
    """As one did that counted all arrivals as old ones, for ever: it was restarted, its clock back.

    It waits like everyone, tells the deputy so, and grants when it is asked.
    """
    meeting.arrive("a", 0)
    meeting["a"].groups.barrier.receive = lambda *_: None  # type: ignore[method-assign]
    meeting.arrive("bc", 0)
    meeting.settle()
    meeting.advance(DEPUTY_S - RESEND_S)
    assert meeting.groups() == {}
    meeting.advance(2 * RESEND_S)
    assert meeting.together("abc").initiator == "b"
    meeting.finish("abc")
    assert all(meeting[name].ended == [(0, Outcome.DONE)] for name in "abc")


def test_before_that_nobody_but_the_coordinator_is_told(meeting: Meeting):
    meeting.arrive("bc", 0)
    meeting.advance(DEPUTY_S - RESEND_S)
    assert set(meeting.said) == {"b -> a Arrive", "c -> a Arrive"}
    meeting.advance(2 * RESEND_S)
    assert "c -> b Arrive" in meeting.said


def test_the_deputy_does_not_form_a_group_before_all_have_arrived(meeting: Meeting):
    meeting.arrive("bc", 0)
    meeting.advance(3 * DEPUTY_S)
    assert meeting.groups() == {}, "a computes, as far as anybody knows"
    meeting.arrive("a", 0)
    meeting.settle()
    assert meeting.together("abc").initiator == "a"


def test_a_slow_coordinator_and_its_deputy_form_one_group_of_a_version(meeting: Meeting):
    """All have waited so long that both request it, whatever comes first."""
    for seed in range(40):
        meeting, rng = Meeting("abc"), Random(seed)
        for name in "abc":
            meeting.arrive(name, 0)
        meeting.wire.clear()
        meeting.advance(DEPUTY_S, delivering=False)
        meeting.wire.clear()
        for _ in range(6):
            meeting.advance(RESEND_S, delivering=False)
            while meeting.wire and rng.random() < 0.9:
                meeting.deliver_at(rng.randrange(len(meeting.wire)))
        meeting.settle()
        meeting.advance(4 * RESEND_S)
        meeting.together("abc")
        meeting.finish("abc")
        meeting.settle()
        meeting.advance(4 * RESEND_S)
        assert all(meeting[name].ended == [(0, Outcome.DONE)] for name in "abc")
        assert meeting.groups() == {}
        meeting.check()


def test_a_refusal_makes_the_coordinator_ask_everyone_anew(meeting: Meeting):
    meeting.say("c", "a", Arrive(0))  # of a life that nobody remembers
    meeting.arrive("ab", 0)
    meeting.deliver_all(Arrive)
    meeting.deliver("a", "c")
    assert [type(sent.message) for sent in meeting.wire] == [Relinquish]
    meeting.settle()
    assert meeting["a"].groups.lock.state.__class__.__name__ == "Free"
    meeting.advance(2 * RESEND_S)
    assert meeting.groups() == {}, "it knows better than to ask c again"
    meeting.arrive("c", 0)
    meeting.settle()
    meeting.together("abc")
    assert isinstance(meeting["a"].groups.barrier.state, Average)


def test_a_trainer_that_waits_for_two_things_is_found_out(meeting: Meeting):
    meeting.arrive("a", 0)
    barrier = meeting["a"].groups.barrier
    barrier._taking = TakeState(1, PeerId("b"), 0), (0, 0)
    with pytest.raises(InvariantViolation, match="a waits for several things"):
        meeting.check()
    barrier._taking = None
