"""One peer's machine: its parts told of each other's news, its deadlines, its fence."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from p2ptrain.core.barrier import barrier_of
from p2ptrain.core.contribution import MODEL, Contribution
from p2ptrain.core.effects import (
    Abandon,
    Average,
    AverageBroke,
    AverageEnded,
    Break,
    Effect,
    GroupEnded,
    Outcome,
    Resolve,
    Send,
    StateTransferred,
    VersionEnded,
    What,
)
from p2ptrain.core.links import WHOLE
from p2ptrain.core.messages import (
    Activate,
    Arrive,
    AttemptPhase,
    AttemptStatus,
    Begin,
    CatchUp,
    Grant,
    MembershipUpdates,
    MemberState,
    Past,
    Phase,
    Release,
    Relinquish,
    Request,
)
from p2ptrain.core.peer_machine import PeerMachine, ProtocolConfig
from p2ptrain.core.purpose import GOSSIP, Formation, Purpose
from p2ptrain.core.wait_avoiding import Schedule
from p2ptrain.errors import ConfigError, InvariantViolation
from p2ptrain.ids import PeerId, Ticket
from tests.helpers.circle import member
from tests.helpers.crowd import everyone

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")
ABC = (A, B, C)
TICKET = Ticket(A, 1, 1)
MEETING = barrier_of(0, 0)
FIRST = Purpose(Formation.WAIT_AVOIDING, What.MODELS, version=1)


@pytest.fixture
def machine():
    """Peer b, which knows a and c."""
    machine = PeerMachine(member("b"), ProtocolConfig(), Random(0))
    machine.learn([member("a"), member("c")], 0.0, "admitted by a")
    machine.take_effects()
    yield machine
    machine.check()


def messages(effects: list[Effect], to: str) -> list[object]:
    return [e.message for e in effects if isinstance(e, Send) and e.target == to]


def grouped(machine: PeerMachine, purpose: Purpose = GOSSIP) -> Ticket:
    """B is in a group that a has requested."""
    members = (A, B) if purpose == GOSSIP else ABC
    machine.receive(A, Request(TICKET, 1, purpose), 1.0)
    machine.receive(A, Begin(TICKET, members, purpose=purpose), 1.0)
    assert machine.holds(TICKET)
    machine.take_effects()
    return TICKET


def offered(machine: PeerMachine) -> Ticket:
    """The offer that b makes to a as long as it waits at the barrier."""
    said = [m for m in messages(machine.take_effects(), "a") if isinstance(m, Arrive)]
    assert said[-1].offer
    return said[-1].offer


def met(machine: PeerMachine, ticket: Ticket = TICKET) -> Ticket:
    """B waits at the barrier, and is in the group of all."""
    machine.arrive(0, 0, 1.0)
    machine.receive(A, Begin(ticket, ABC, purpose=MEETING, offer=offered(machine)), 1.0)
    assert machine.holds(ticket)
    machine.take_effects()
    return ticket


def test_effects_are_taken_once_and_in_order(machine: PeerMachine):
    machine.request([A, C], 2, 0.0)
    effects = machine.take_effects()
    assert [type(e.message) for e in effects if isinstance(e, Send)] == [Request, Request]
    assert machine.take_effects() == []


def test_a_claimed_group_averages_models_and_a_barrier_gradients(machine: PeerMachine):
    ticket = machine.request([A], 1, 0.0)
    machine.receive(A, Grant(ticket), 0.1)
    effects = machine.take_effects()
    machine.ended(AverageEnded(ticket, Outcome.DONE, ""), 0.2)
    machine.arrive(0, 0, 0.3)
    machine.receive(A, Begin(TICKET, ABC, purpose=MEETING, offer=offered(machine)), 0.4)
    effects += machine.take_effects()
    averages = [e for e in effects if isinstance(e, Average)]
    assert [average.what for average in averages] == [What.MODELS, What.GRADIENTS]


def test_a_peer_is_in_one_group_at_a_time_whoever_forms_it(machine: PeerMachine):
    claimed, meeting = grouped(machine), Ticket(A, 1, 2)
    machine.arrive(0, 0, 1.1)
    (said,) = messages(machine.take_effects(), "a")
    assert said == Arrive(0, 0), "it waits, and has nothing to offer yet"
    machine.receive(A, Begin(meeting, ABC, purpose=MEETING), 1.3)
    assert machine.holds(claimed)
    assert not machine.holds(meeting)
    assert messages(machine.take_effects(), "a") == [Relinquish(meeting)]
    machine.ended(AverageEnded(claimed, Outcome.DONE, ""), 1.4)
    again, offer = Ticket(A, 1, 3), offered(machine)
    machine.receive(A, Begin(again, ABC, purpose=MEETING, offer=offer), 1.5)
    assert machine.holds(again)


def test_a_barrier_that_is_requested_meanwhile_is_granted_after_the_claimed_group(
    machine: PeerMachine,
):
    claimed, meeting = grouped(machine), Ticket(A, 1, 2)
    machine.arrive(0, 0, 1.1)
    machine.receive(A, Request(meeting, 1, MEETING), 1.2)
    assert not [m for m in messages(machine.take_effects(), "a") if isinstance(m, Grant)]
    machine.ended(AverageEnded(claimed, Outcome.DONE, ""), 1.4)
    assert Grant(meeting) in messages(machine.take_effects(), "a")
    machine.receive(A, Begin(meeting, ABC, purpose=MEETING), 1.5)
    assert machine.holds(meeting)


def test_all_groups_of_a_peer_have_tickets_of_one_counter(machine: PeerMachine):
    machine.describe(0.0, phase=Phase.TRAINING, steps=0, samples=0)
    machine.arrive(0, 0, 0.0)
    first = offered(machine)
    second = machine.request([A], 1, 0.1)
    machine.withdraw(0.2)
    third = machine.request([C], 1, 0.3)
    assert (first.number, second.number, third.number) == (1, 2, 3)


def test_a_part_that_believes_in_a_group_that_its_slot_does_not_hold_is_found_out(
    machine: PeerMachine,
):
    machine.groups.barrier.group = Average(TICKET, ABC, purpose=MEETING)
    with pytest.raises(InvariantViolation, match=r"b is in .* its slot is free"):
        machine.check()
    machine.groups.barrier.group = None


def test_a_formed_group_has_no_deadline_of_its_slot(machine: PeerMachine):
    grouped(machine)
    assert machine.groups.next_deadline() is None


def test_a_member_states_what_its_trainer_has_for_just_such_a_group():
    stated = {GOSSIP: MODEL, MEETING: Contribution(weight=32, usual=16, samples=640)}
    machine = PeerMachine(
        member("b"), ProtocolConfig(), Random(0), state_contribution=stated.__getitem__
    )
    machine.learn([member("a"), member("c")], 0.0, "admitted by a")
    machine.take_effects()
    machine.arrive(0, 0, 0.1)
    (arrival,) = messages(machine.take_effects(), "a")
    assert isinstance(arrival, Arrive)
    assert arrival.contribution == stated[MEETING]
    machine.receive(C, Request(Ticket(C, 1, 1), 1), 0.2)
    assert arrival.offer
    machine.receive(A, Release(arrival.offer), 0.3)
    assert Grant(Ticket(C, 1, 1), MODEL) in messages(machine.take_effects(), "c")


def test_whoever_begins_a_group_tells_of_the_samples_of_all_others():
    machine = PeerMachine(replace(member("b"), samples=1), ProtocolConfig(), Random(0))
    others = [replace(member("a"), samples=20), replace(member("c"), samples=300)]
    machine.learn(others, 0.0, "admitted by a")
    ticket = machine.request([A], 1, 0.0)
    machine.receive(A, Grant(ticket), 0.1)
    effects = machine.take_effects()
    (average,) = [e for e in effects if isinstance(e, Average)]
    assert average.outside_samples == 300
    assert [m.outside_samples for m in messages(effects, "a") if isinstance(m, Begin)] == [300]


def declare_dead(machine: PeerMachine) -> str:
    """A is gone at 3.5 s; returns why."""
    machine.receive(C, MembershipUpdates((replace(member("a"), state=MemberState.DEAD),)), 2.0)
    while (at := machine.membership.next_deadline()) is not None and at <= 3.55:
        machine.handle_timer(max(at, 2.0))
    return "a did not refute its suspicion within 1.5 s"


def test_when_membership_buries_a_member_its_groups_end(machine: PeerMachine):
    ticket = grouped(machine)
    why = declare_dead(machine)
    effects = machine.take_effects()
    assert Abandon(ticket, Outcome.LOST, why) in effects
    assert not machine.holds(ticket)


def test_when_membership_buries_a_member_the_others_go_on_without_it(machine: PeerMachine):
    ticket = met(machine)
    declare_dead(machine)
    assert [e.ticket for e in machine.take_effects() if isinstance(e, Break)] == [ticket]
    machine.ended(AverageBroke(ticket, complete=False), 3.6)
    machine.receive(C, AttemptStatus(ticket, AttemptPhase.BROKEN, asks=True), 3.7)
    (resolve,) = [effect for effect in machine.take_effects() if isinstance(effect, Resolve)]
    assert resolve.members == (B, C)
    assert resolve.again is not None
    assert machine.holds(resolve.again)
    assert not machine.holds(ticket)
    machine.ended(AverageEnded(ticket, Outcome.DONE, ""), 3.8)
    assert VersionEnded(0, Outcome.DONE) in machine.take_effects()


def test_a_suspicion_ends_no_group(machine: PeerMachine):
    ticket = grouped(machine)
    machine.unreachable(A, "connection reset", 2.0)
    assert machine.holds(ticket)


def test_a_goodbye_ends_a_promise_to_whoever_says_it_and_no_group(machine: PeerMachine):
    machine.receive(A, Request(Ticket(A, 1, 1), 1), 1.0)
    machine.receive(A, MembershipUpdates((replace(member("a"), state=MemberState.LEFT),)), 1.1)
    machine.take_effects()
    ticket = machine.request([C], 1, 1.2)
    assert not [e for e in machine.take_effects() if isinstance(e, GroupEnded)]
    machine.receive(C, Grant(ticket), 1.3)
    machine.receive(A, MembershipUpdates((replace(member("c"), state=MemberState.LEFT),)), 1.4)
    assert machine.holds(ticket)


def test_the_next_deadline_is_the_earliest_of_all_parts(machine: PeerMachine):
    first = machine.next_deadline()
    assert first is not None
    assert first <= 0.25  # a probe
    machine.request([A], 1, 0.0)
    machine.handle_timer(0.2)
    assert any(isinstance(m, Request) for m in messages(machine.take_effects(), "a"))
    assert machine.next_deadline() <= 0.4


def test_a_new_phase_is_announced_and_more_steps_are_not(machine: PeerMachine):
    machine.describe(0.0, phase=Phase.TRAINING, steps=0, samples=0)
    assert any(isinstance(m, MembershipUpdates) for m in messages(machine.take_effects(), "c"))
    machine.describe(0.0, phase=Phase.TRAINING, steps=1, samples=64)
    assert machine.take_effects() == []


def test_who_withdraws_gives_up_its_claim_and_its_wait(machine: PeerMachine):
    ticket = machine.request([A], 1, 0.0)
    machine.arrive(0, 0, 0.0)
    machine.withdraw(0.1)
    effects = machine.take_effects()
    assert GroupEnded(ticket, Outcome.WITHDRAWN, "stopping", (A, B)) in effects
    assert VersionEnded(0, Outcome.WITHDRAWN) in effects
    assert Release(ticket) in messages(effects, "a")


def test_who_leaves_tells_everyone_and_asks_for_no_timer(machine: PeerMachine):
    machine.leave(0.0)
    effects = machine.take_effects()
    for peer in "ac":
        (goodbye,) = messages(effects, peer)
        assert goodbye.members[0].state is MemberState.LEFT
    assert machine.next_deadline() is None


def test_who_serves_on_after_its_training_still_grants(machine: PeerMachine):
    machine.withdraw(0.0)
    machine.receive(A, Request(Ticket(A, 1, 1), 1), 0.1)
    assert messages(machine.take_effects(), "a") == [Grant(Ticket(A, 1, 1))]


def test_who_has_still_to_take_a_model_is_in_no_claimed_group(machine: PeerMachine):
    machine.has_model = False
    ticket, newer = Ticket(A, 1, 1), Ticket(A, 1, 2)
    machine.receive(A, Request(ticket, 1), 0.1)
    assert messages(machine.take_effects(), "a") == [Relinquish(ticket)]
    machine.has_model = True
    machine.receive(A, Request(newer, 2), 0.2)
    assert messages(machine.take_effects(), "a") == [Grant(newer)]


def test_who_has_still_to_take_a_model_neither_joins_nor_coordinates_a_version(
    scheduled: PeerMachine,
):
    scheduled.has_model = False
    scheduled.receive(A, Request(TICKET, 1, FIRST), 0.1)
    assert messages(scheduled.take_effects(), "a") == [Relinquish(TICKET)]
    scheduled.receive(C, Activate(2, waits=True), 0.2)
    assert scheduled.take_effects() == [], "whoever asks asks again"
    assert scheduled.groups.wait_avoiding.group is None


def test_who_has_still_to_take_a_model_begins_no_group_itself(machine: PeerMachine):
    machine.has_model = False
    ticket = machine.request([A], 1, 0.0)
    (ended,) = machine.take_effects()
    assert isinstance(ended, GroupEnded)
    assert (ended.ticket, ended.outcome) == (ticket, Outcome.REFUSED)


@pytest.mark.parametrize("taken", [True, False])
def test_who_caught_up_waits_with_the_new_version_and_who_could_not_with_the_old(
    machine: PeerMachine, taken: bool
):
    machine.arrive(3, 0, 0.0)
    machine.receive(A, CatchUp(5, A), 0.1)
    machine.take_effects()
    machine.ended(StateTransferred(5, taken), 0.2)
    (said,) = messages(machine.take_effects(), "a")
    assert isinstance(said, Arrive)
    assert said.version == (5 if taken else 3)
    assert said.offer, "its slot is the coordinator's again"


def test_who_catches_up_offers_nothing(machine: PeerMachine):
    machine.arrive(3, 0, 0.0)
    offer = offered(machine)
    machine.receive(A, CatchUp(5, A), 0.1)
    machine.receive(A, Begin(TICKET, ABC, purpose=barrier_of(3, 0), offer=offer), 0.2)
    assert messages(machine.take_effects(), "a") == [Relinquish(TICKET)]


def test_the_fence_falls_with_the_average(machine: PeerMachine):
    ticket = grouped(machine)
    assert not machine.is_over(ticket)
    machine.ended(AverageEnded(ticket, Outcome.DONE, ""), 2.0)
    assert not machine.holds(ticket)
    assert machine.is_over(ticket)


def test_chunks_are_expected_of_who_may_begin_a_group_with_us(machine: PeerMachine):
    assert not machine.expects(TICKET)
    machine.receive(A, Request(TICKET, 1), 0.1)
    assert machine.expects(TICKET), "promised"
    machine.receive(A, Release(TICKET), 0.2)
    assert not machine.expects(TICKET)
    machine.arrive(0, 0, 0.3)
    assert machine.expects(Ticket(A, 1, 2)), "offered"
    assert not machine.expects(Ticket(C, 1, 2))


def test_a_repetition_that_never_comes_is_refused():
    with pytest.raises(ConfigError, match="barrier_resend_s = inf must be above 0"):
        ProtocolConfig(barrier_resend_s=float("inf"))


# --- wait-avoiding groups -------------------------------------------------------------------------


@pytest.fixture
def scheduled():
    """Peer b with a schedule of one group; a and c train."""
    machine = PeerMachine(member("b"), ProtocolConfig(), Random(0), everyone())
    training = [replace(member(name), phase=Phase.TRAINING) for name in "ac"]
    machine.learn(training, 0.0, "admitted by a")
    machine.take_effects()
    yield machine
    machine.check()


def test_a_wait_avoiding_group_ends_with_its_average(scheduled: PeerMachine):
    ticket = grouped(scheduled, FIRST)
    scheduled.ended(AverageEnded(ticket, Outcome.DONE, ""), 2.0)
    assert not scheduled.holds(ticket)


def test_a_version_begins_once_and_who_asks_again_hears_how_far_we_are(scheduled: PeerMachine):
    ticket = grouped(scheduled, FIRST)
    scheduled.ended(AverageEnded(ticket, Outcome.DONE, ""), 2.0)
    scheduled.take_effects()
    again = Ticket(C, 1, 1)
    scheduled.receive(C, Request(again, 5, FIRST), 2.1)
    assert messages(scheduled.take_effects(), "c") == [Past(1), Relinquish(again)]


def test_a_claimed_group_ends_before_the_version_begins_that_waits_for_it(scheduled: PeerMachine):
    claimed, version = grouped(scheduled), Ticket(C, 1, 1)
    scheduled.receive(C, Request(version, 1, FIRST), 1.1)
    assert not [m for m in messages(scheduled.take_effects(), "c") if isinstance(m, Grant)]
    scheduled.ended(AverageEnded(claimed, Outcome.DONE, ""), 2.0)
    assert Grant(version) in messages(scheduled.take_effects(), "c")


def test_only_those_who_train_are_in_a_group_and_a_suspect_is_left_out(scheduled: PeerMachine):
    scheduled.learn([member("d")], 0.0, "it joined here")
    scheduled.unreachable(A, "connection reset", 0.5)
    scheduled.arrive_at(1, 1.0, waits=True)
    (asked,) = [m for m in messages(scheduled.take_effects(), "c") if isinstance(m, Request)]
    scheduled.receive(C, Grant(asked.ticket), 1.1)
    (average,) = [e for e in scheduled.take_effects() if isinstance(e, Average)]
    assert average.members == (B, C)
    scheduled.ended(AverageEnded(average.ticket, Outcome.DONE, ""), 2.0)


def test_whoever_waits_tells_the_next_coordinator_when_the_first_is_suspect(scheduled: PeerMachine):
    scheduled.receive(C, MembershipUpdates((replace(member("c"), state=MemberState.LEFT),)), 0.5)
    scheduled.arrive_at(1, 1.0, waits=True)
    (said,) = messages(scheduled.take_effects(), "a")
    assert isinstance(said, Activate)
    assert (said.version, said.waits) == (1, True)
    assert said.offer
    scheduled.unreachable(A, "connection reset", 1.1)
    assert VersionEnded(1, Outcome.DONE) in scheduled.take_effects(), "it is alone"


def test_when_membership_buries_a_member_its_wait_avoiding_group_breaks(scheduled: PeerMachine):
    ticket = grouped(scheduled, FIRST)
    declare_dead(scheduled)
    assert [e.ticket for e in scheduled.take_effects() if isinstance(e, Break)] == [ticket]
    scheduled.ended(AverageBroke(ticket, complete=False), 3.6)
    scheduled.receive(C, AttemptStatus(ticket, AttemptPhase.OUT), 3.7)
    assert Resolve(ticket, why="too few are left of the group") in scheduled.take_effects()
    assert not scheduled.holds(ticket)


def test_what_was_not_heard_of_an_arrival_is_said_again(scheduled: PeerMachine):
    scheduled.arrive_at(1, 1.0, waits=False)
    scheduled.take_effects()
    scheduled.handle_timer(1.25)
    assert Activate(1, False) in messages(scheduled.take_effects(), "a")


def test_who_withdraws_gives_up_its_wait_for_a_version(scheduled: PeerMachine):
    scheduled.arrive_at(1, 1.0, waits=True)
    scheduled.withdraw(1.1)
    assert VersionEnded(1, Outcome.WITHDRAWN) in scheduled.take_effects()


# --- links ----------------------------------------------------------------------------------------


def slow_c(schedule: Schedule | None = None) -> PeerMachine:
    """Peer a, which knows b, and c and its slow link."""
    me = replace(member("a"), phase=Phase.TRAINING, link_mbit=1000)
    machine = PeerMachine(me, ProtocolConfig(), Random(0), schedule)
    others = [replace(member(name), phase=Phase.TRAINING) for name in "bc"]
    links = [replace(other, link_mbit=mbit) for other, mbit in zip(others, (900, 10), strict=True)]
    machine.learn(links, 0.0, "they joined here")
    machine.take_effects()
    return machine


def by_claims() -> PeerMachine:
    machine = slow_c()
    ticket = machine.request([B, C], 2, 0.0)
    for peer in (B, C):
        machine.receive(peer, Grant(ticket), 0.1)
    return machine


def by_arrivals() -> PeerMachine:
    machine = slow_c()
    machine.arrive(0, 0, 0.0)
    for peer in (B, C):
        machine.receive(peer, Arrive(0, 0, Ticket(peer, 1, 1)), 0.1)
    return machine


def by_version() -> PeerMachine:
    machine = slow_c(everyone())
    for peer in (B, C):
        machine.receive(peer, Activate(1, waits=False), 0.1)
    machine.arrive_at(1, 0.1, waits=True)
    for peer in (B, C):
        machine.receive(peer, Grant(Ticket(A, 1, 1)), 0.2)
    return machine


@pytest.mark.parametrize("form", [by_claims, by_arrivals, by_version])
def test_whoever_forms_a_group_says_that_a_slow_link_has_no_share(form: Callable[[], PeerMachine]):
    effects = form().take_effects()
    weights = (WHOLE // 2, WHOLE // 2, 0)
    assert [e.weights for e in effects if isinstance(e, Average)] == [weights]
    for peer in ("b", "c"):
        told = messages(effects, peer)[-1]
        assert isinstance(told, Begin)
        assert told.weights == weights


@pytest.mark.parametrize("purpose", [GOSSIP, MEETING], ids=str)
def test_members_take_the_weights_of_whoever_formed_the_group(
    machine: PeerMachine, purpose: Purpose
):
    offer = None
    if purpose == MEETING:
        machine.arrive(0, 0, 1.0)
        offer = offered(machine)
    else:
        machine.receive(A, Request(TICKET, 1), 1.0)
    machine.receive(A, Begin(TICKET, ABC, (3, 2, 1), purpose, offer=offer), 1.0)
    assert [e.weights for e in machine.take_effects() if isinstance(e, Average)] == [(3, 2, 1)]


def done(ticket: Ticket) -> AverageEnded:
    """100 MB in a second."""
    return AverageEnded(ticket, Outcome.DONE, "", moved_bytes=100_000_000, moving_s=1.0)


def test_a_group_that_is_done_tells_how_fast_our_link_is(machine: PeerMachine):
    ticket = grouped(machine)
    machine.ended(replace(done(ticket), outcome=Outcome.LOST), 2.0)
    assert machine.membership.me.link_mbit == 0
    beat = machine.membership.me.beat
    machine.ended(done(ticket), 2.0)
    assert machine.membership.me.link_mbit == 800
    assert machine.membership.me.beat == beat + 1
    machine.ended(done(ticket), 3.0)  # the same again is no news
    assert machine.membership.me.beat == beat + 1


def test_a_link_whose_speed_was_given_is_not_measured():
    machine = slow_c()
    machine.ended(done(Ticket(A, 1, 1)), 2.0)
    assert machine.membership.me.link_mbit == 1000
