"""One peer's machine: its parts told of each other's news, its deadlines, its fence."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from p2ptrain.core.effects import (
    Abandon,
    Average,
    Break,
    Effect,
    GroupEnded,
    Mend,
    Send,
    VersionEnded,
    What,
)
from p2ptrain.core.events import AverageBroke, AverageEnded, Outcome, StateNotTaken, StateTaken
from p2ptrain.core.links import WHOLE
from p2ptrain.core.lock_state import LockConfig
from p2ptrain.core.messages import (
    Activate,
    Arrive,
    Assemble,
    Begin,
    CatchUp,
    Claim,
    Decline,
    Grant,
    How,
    MemberState,
    Message,
    Phase,
    Release,
    Rumours,
    Run,
    Standing,
)
from p2ptrain.core.peer_machine import PeerMachine, ProtocolConfig
from p2ptrain.core.wait_avoiding import Rule, Schedule
from p2ptrain.errors import ConfigError, InvariantViolation
from p2ptrain.ids import PeerId, Ticket
from tests.helpers.circle import member
from tests.helpers.crowd import everyone

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")
ABC = (A, B, C)
TICKET = Ticket(A, 1, 1)


@pytest.fixture
def machine():
    """Peer b, which knows a and c."""
    machine = PeerMachine(member("b"), ProtocolConfig(), Random(0))
    machine.learn([member("a"), member("c")], 0.0, "welcomed by a")
    machine.take_effects()
    yield machine
    machine.check()


def messages(effects: list[Effect], to: str) -> list[object]:
    return [e.message for e in effects if isinstance(e, Send) and e.target == to]


def grouped(machine: PeerMachine) -> Ticket:
    """B is in a claimed group with a, which initiated it."""
    ticket = Ticket(A, 1, 1)
    machine.receive(A, Claim(ticket, 1, 20.0), 1.0)
    machine.receive(A, Begin(ticket, (A, B)), 1.0)
    assert machine.holds(ticket, 1.0)
    machine.take_effects()
    return ticket


def assembled(machine: PeerMachine) -> Ticket:
    """B is in a scheduled group of all."""
    ticket = Ticket(A, 1, 1)
    machine.arrive(0, 0, 1.0)
    machine.receive(A, Assemble(ticket, 0, (A, B, C)), 1.0)
    assert machine.holds(ticket, 1.0)
    machine.take_effects()
    return ticket


def test_effects_are_taken_once_and_in_order(machine: PeerMachine):
    machine.request([A, C], 2, 0.0)
    effects = machine.take_effects()
    assert [type(e.message) for e in effects if isinstance(e, Send)] == [Claim, Claim]
    assert machine.take_effects() == []


def test_a_claimed_group_averages_models_and_a_scheduled_one_gradients(machine: PeerMachine):
    ticket = machine.request([A], 1, 0.0)
    machine.receive(A, Grant(ticket), 0.1)
    machine.arrive(0, 0, 0.2)
    machine.receive(A, Assemble(Ticket(A, 1, 9), 0, (A, B, C)), 0.3)
    averages = [e for e in machine.take_effects() if isinstance(e, Average)]
    assert [average.what for average in averages] == [What.MODELS, What.GRADIENTS]
    machine.ended(AverageEnded(ticket, Outcome.DONE, ""), 0.4)  # or `check` finds two groups


def test_a_peer_in_two_groups_is_found_out(machine: PeerMachine):
    grouped(machine)
    assembled(machine)
    with pytest.raises(InvariantViolation, match="b is in two groups"):
        machine.check()
    machine.ended(AverageEnded(Ticket(A, 1, 1), Outcome.DONE, ""), 2.0)


def bury(machine: PeerMachine) -> str:
    """A is gone at 3.5 s; returns why."""
    machine.receive(C, Rumours((replace(member("a"), state=MemberState.GONE),)), 2.0)
    while (at := machine.membership.next_deadline()) is not None and at <= 3.55:
        machine.handle_timer(max(at, 2.0))
    return "a did not refute its suspicion within 1.5 s"


def test_when_membership_buries_a_member_its_groups_end(machine: PeerMachine):
    ticket = grouped(machine)
    why = bury(machine)
    effects = machine.take_effects()
    assert Abandon(ticket, Outcome.LOST, why) in effects
    assert not machine.holds(ticket, 2.0)


def test_when_membership_buries_a_member_the_others_go_on_without_it(machine: PeerMachine):
    ticket = assembled(machine)
    bury(machine)
    assert [e.ticket for e in machine.take_effects() if isinstance(e, Break)] == [ticket]
    machine.ended(AverageBroke(ticket, complete=False), 3.6)
    machine.receive(C, Standing(ticket, How.BROKEN, asks=True), 3.7)
    (mend,) = [effect for effect in machine.take_effects() if isinstance(effect, Mend)]
    assert mend.members == (B, C)
    assert mend.again is not None
    assert machine.holds(mend.again, 3.7)
    assert not machine.holds(ticket, 3.7)
    machine.ended(AverageEnded(ticket, Outcome.DONE, ""), 3.8)
    assert VersionEnded(0, Outcome.DONE) in machine.take_effects()


def test_a_suspicion_ends_no_group(machine: PeerMachine):
    ticket = grouped(machine)
    machine.unreachable(A, "connection reset", 2.0)
    assert machine.holds(ticket, 2.0)


def test_a_goodbye_ends_a_promise_to_whoever_says_it_and_no_group(machine: PeerMachine):
    machine.receive(A, Claim(Ticket(A, 1, 1), 1, 20.0), 1.0)
    machine.receive(A, Rumours((replace(member("a"), state=MemberState.LEFT),)), 1.1)
    machine.take_effects()
    ticket = machine.request([C], 1, 1.2)
    assert not [e for e in machine.take_effects() if isinstance(e, GroupEnded)]
    machine.receive(C, Grant(ticket), 1.3)
    machine.receive(A, Rumours((replace(member("c"), state=MemberState.LEFT),)), 1.4)
    assert machine.holds(ticket, 1.4)


def test_the_next_deadline_is_the_earliest_of_all_parts(machine: PeerMachine):
    first = machine.next_deadline()
    assert first is not None
    assert first <= 0.25  # a probe
    machine.request([A], 1, 0.0)
    machine.handle_timer(0.2)
    assert any(isinstance(m, Claim) for m in messages(machine.take_effects(), "a"))
    assert machine.next_deadline() <= 0.4


def test_a_new_phase_is_announced_and_more_steps_are_not(machine: PeerMachine):
    machine.describe(0.0, phase=Phase.TRAINING, steps=0, samples=0)
    assert any(isinstance(m, Rumours) for m in messages(machine.take_effects(), "c"))
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
    machine.receive(A, Claim(Ticket(A, 1, 1), 1, 20.0), 0.1)
    assert messages(machine.take_effects(), "a") == [Grant(Ticket(A, 1, 1))]


def test_who_has_still_to_take_over_a_model_is_in_no_claimed_group(machine: PeerMachine):
    machine.has_model = False
    ticket, newer = Ticket(A, 1, 1), Ticket(A, 1, 2)
    machine.receive(A, Claim(ticket, 1, 20.0), 0.1)
    assert messages(machine.take_effects(), "a") == [Release(ticket)]
    machine.has_model = True
    machine.receive(A, Claim(newer, 2, 20.0), 0.2)
    assert messages(machine.take_effects(), "a") == [Grant(newer)]


def test_who_has_still_to_take_over_a_model_neither_joins_nor_hosts_a_version(
    scheduled: PeerMachine,
):
    scheduled.has_model = False
    ticket = Ticket(A, 1, 1)
    scheduled.receive(A, Run(ticket, 1, (A, B, C)), 0.1)
    effects = scheduled.take_effects()
    assert [messages(effects, name) for name in "ac"] == [[Decline(ticket, 0)]] * 2
    scheduled.receive(C, Activate(2, waits=True), 0.2)
    assert scheduled.take_effects() == [], "whoever asks asks again"
    assert scheduled.activation.group is None


@pytest.mark.parametrize("taken", [True, False])
def test_who_caught_up_waits_with_the_new_version_and_who_could_not_with_the_old(
    machine: PeerMachine, taken: bool
):
    machine.arrive(3, 0, 0.0)
    machine.receive(A, CatchUp(5, A), 0.1)
    machine.take_effects()
    machine.ended(StateTaken(5) if taken else StateNotTaken(5, "no"), 0.2)
    assert messages(machine.take_effects(), "a") == [Arrive(5 if taken else 3)]


def test_the_fence_falls_with_the_lease_whether_the_timer_has_fired_or_not(machine: PeerMachine):
    ticket = grouped(machine)
    ends_at = 1.0 + LockConfig().time_in_group_s(LockConfig().lease_s)
    assert machine.holds(ticket, ends_at - 0.1)
    assert not machine.holds(ticket, ends_at)
    machine.handle_timer(ends_at)
    assert not machine.holds(ticket, ends_at - 0.1)


def test_a_repetition_that_never_comes_is_refused():
    with pytest.raises(ConfigError, match="rendezvous_resend_s = inf must be above 0"):
        ProtocolConfig(rendezvous_resend_s=float("inf"))


# --- wait-avoiding groups -------------------------------------------------------------------------


@pytest.fixture
def scheduled():
    """Peer b with a schedule of one group; a and c train."""
    machine = PeerMachine(member("b"), ProtocolConfig(), Random(0), everyone())
    training = [replace(member(name), phase=Phase.TRAINING) for name in "ac"]
    machine.learn(training, 0.0, "welcomed by a")
    machine.take_effects()
    yield machine
    machine.check()


def activated(machine: PeerMachine) -> Ticket:
    """B is in a group that c activated."""
    ticket = Ticket(A, 1, 1)
    machine.receive(A, Run(ticket, 1, (A, B, C)), 1.0)
    assert machine.holds(ticket, 1.0)
    machine.take_effects()
    return ticket


def test_an_activated_group_ends_with_its_average(scheduled: PeerMachine):
    ticket = activated(scheduled)
    scheduled.ended(AverageEnded(ticket, Outcome.DONE, ""), 2.0)
    assert not scheduled.holds(ticket, 2.0)


def test_a_peer_in_an_activated_group_and_a_claimed_one_is_found_out(scheduled: PeerMachine):
    grouped(scheduled)
    activated(scheduled)
    with pytest.raises(InvariantViolation, match="b is in two groups"):
        scheduled.check()
    scheduled.ended(AverageEnded(Ticket(A, 1, 1), Outcome.DONE, ""), 2.0)


def test_only_those_who_train_are_in_a_group_and_a_suspect_is_left_out(scheduled: PeerMachine):
    scheduled.learn([member("d")], 0.0, "it joined here")
    scheduled.unreachable(A, "connection reset", 0.5)
    scheduled.arrive_at(1, 1.0, waits=True)
    (average,) = [e for e in scheduled.take_effects() if isinstance(e, Average)]
    assert average.members == (B, C)
    scheduled.ended(AverageEnded(average.ticket, Outcome.DONE, ""), 2.0)


def test_whoever_waits_tells_the_next_host_when_the_first_is_suspect(scheduled: PeerMachine):
    scheduled.receive(C, Rumours((replace(member("c"), state=MemberState.LEFT),)), 0.5)
    scheduled.arrive_at(1, 1.0, waits=True)
    assert messages(scheduled.take_effects(), "a") == [Activate(1, True)]
    scheduled.unreachable(A, "connection reset", 1.1)
    assert VersionEnded(1, Outcome.DONE) in scheduled.take_effects(), "it is alone"


def test_when_membership_buries_a_member_its_activated_group_breaks(scheduled: PeerMachine):
    ticket = activated(scheduled)
    bury(scheduled)
    assert [e.ticket for e in scheduled.take_effects() if isinstance(e, Break)] == [ticket]
    scheduled.ended(AverageBroke(ticket, complete=False), 3.6)
    scheduled.receive(C, Standing(ticket, How.OUT), 3.7)
    assert Mend(ticket, why="too few are left of the group") in scheduled.take_effects()
    assert not scheduled.holds(ticket, 3.7)


def test_what_was_not_heard_of_an_activation_is_said_again(scheduled: PeerMachine):
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
        machine.receive(peer, Arrive(0), 0.1)
    return machine


def by_activation() -> PeerMachine:
    machine = slow_c(everyone(Rule()))
    machine.arrive_at(1, 0.1, waits=True)
    return machine


@pytest.mark.parametrize("form", [by_claims, by_arrivals, by_activation])
def test_whoever_forms_a_group_says_that_a_slow_link_has_no_share(form: Callable[[], PeerMachine]):
    effects = form().take_effects()
    weights = (WHOLE // 2, WHOLE // 2, 0)
    assert [e.weights for e in effects if isinstance(e, Average)] == [weights]
    for peer in ("b", "c"):
        told = messages(effects, peer)[-1]
        assert isinstance(told, Begin | Assemble | Run)
        assert told.weights == weights


@pytest.mark.parametrize(
    "told", [Begin(TICKET, ABC, (3, 2, 1)), Assemble(TICKET, 0, ABC, (3, 2, 1))], ids=repr
)
def test_members_take_the_weights_of_whoever_formed_the_group(machine: PeerMachine, told: Message):
    machine.receive(A, Claim(TICKET, 1, 20.0), 1.0)
    if isinstance(told, Assemble):
        machine.receive(A, Release(TICKET), 1.0)
        machine.arrive(0, 0, 1.0)
    machine.receive(A, told, 1.0)
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
