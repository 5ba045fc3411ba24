"""Scheduled groups: arrivals, a host that dies, lost messages, breaks, laggards, newcomers."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

import pytest
from p2ptrain.core.rendezvous import CatchingUp, Idle, InGroup, Rendezvous, Waiting

from p2ptrain.core.effects import Abandon, Average, Effect, Send, TakeState, VersionEnded
from p2ptrain.core.events import Outcome
from p2ptrain.core.messages import Arrive, RendezvousMessage
from p2ptrain.errors import LocalProtocolError
from p2ptrain.ids import PeerId, Ticket

RESEND_S = 0.25


@dataclass
class Guest:
    rendezvous: Rendezvous
    view: list[str]
    groups: list[Ticket] = field(default_factory=list)
    abandoned: list[Ticket] = field(default_factory=list)
    ended: list[tuple[int, Outcome]] = field(default_factory=list)
    taking: list[TakeState] = field(default_factory=list)


class Table:
    """Rendezvous of peers a, b, c, ...; messages wait until the test lets them through."""

    def __init__(self, names: str) -> None:
        self.time = 0.0
        self.wire: list[tuple[str, str, RendezvousMessage]] = []
        self.guests: dict[str, Guest] = {}
        for name in names:
            self.add(name, names)

    def add(self, name: str, view: str) -> None:
        guest = Guest(None, list(view))  # type: ignore[arg-type]
        guest.rendezvous = Rendezvous(
            PeerId(name),
            1,
            RESEND_S,
            lambda: tuple(PeerId(n) for n in sorted(guest.view)),
            lambda effect: self._note(name, effect),
        )
        self.guests[name] = guest

    def __getitem__(self, name: str) -> Guest:
        return self.guests[name]

    def arrive(self, names: str, version: int, line: int = 0) -> None:
        for name in names:
            self[name].rendezvous.arrive(version, line, self.time)

    def settle(self) -> None:
        while self.wire:
            self.deliver(0)

    def deliver(self, index: int) -> None:
        source, target, message = self.wire.pop(index)
        if target in self.guests:
            self[target].rendezvous.receive(PeerId(source), message, self.time)

    def advance(self, duration_s: float) -> None:
        until = self.time + duration_s
        while True:
            due = [
                (deadline, name)
                for name, guest in self.guests.items()
                if (deadline := guest.rendezvous.next_deadline()) is not None
            ]
            at, name = min(due, default=(until + 1, ""))
            if at > until:
                break
            self.time = max(at, self.time)
            self[name].rendezvous.handle_timer(self.time)
            self.settle()
        self.time = until

    def finish(self, names: str, outcome: Outcome = Outcome.DONE) -> None:
        for name in names:
            ticket = self[name].groups[-1]
            self[name].rendezvous.average_ended(ticket, outcome, self.time)

    def die(self, name: str) -> None:
        """Everybody else hears of it at once."""
        del self.guests[name]
        for guest in self.guests.values():
            guest.view.remove(name)
            guest.rendezvous.peer_gone(PeerId(name), f"{name} is gone", self.time)
            guest.rendezvous.view_changed()

    def join(self, name: str) -> None:
        view = "".join(self.guests) + name
        for guest in self.guests.values():
            guest.view.append(name)
            guest.rendezvous.view_changed()
        self.add(name, view)

    def together(self, names: str) -> Ticket:
        """All of `names` are in one group of exactly them; its ticket."""
        states = [self[name].rendezvous.state for name in names]
        assert all(isinstance(state, InGroup) for state in states), states
        assert {state.members for state in states} == {tuple(sorted(names))}  # type: ignore[union-attr]
        (ticket,) = {state.ticket for state in states}  # type: ignore[union-attr]
        return ticket

    def check(self) -> None:
        for guest in self.guests.values():
            guest.rendezvous.check()
            assert len(set(guest.groups)) == len(guest.groups), "in one group twice"

    def _note(self, name: str, effect: Effect) -> None:
        guest = self[name]
        match effect:
            case Send(target=target, message=message):
                self.wire.append((name, target, message))  # type: ignore[arg-type]
            case Average(ticket=ticket):
                guest.groups.append(ticket)
            case Abandon(ticket=ticket):
                guest.abandoned.append(ticket)
            case VersionEnded(version=version, outcome=outcome):
                guest.ended.append((version, outcome))
            case TakeState():
                guest.taking.append(effect)
            case _:
                raise AssertionError(f"a rendezvous does not emit {effect}")


@pytest.fixture
def table() -> Iterator[Table]:
    table = Table("abc")
    yield table
    table.check()


# --- everyone arrives -----------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["abc", "cba", "bca"])
def test_the_group_is_assembled_when_the_last_one_arrives(table: Table, order: str):
    table.arrive(order[:2], 0)
    table.settle()
    assert all(not table[name].groups for name in order)
    table.arrive(order[2], 0)
    table.settle()
    table.together("abc")
    table.finish("abc")
    assert all(table[name].ended == [(0, Outcome.DONE)] for name in "abc")


def test_each_version_has_a_ticket_of_its_own(table: Table):
    for version in range(3):
        table.arrive("abc", version)
        table.settle()
        table.together("abc")
        table.finish("abc")
    assert len(set(table["b"].groups)) == 3


def test_one_peer_alone_is_a_group_at_once():
    table = Table("a")
    table.arrive("a", 0)
    table.together("a")
    assert table.wire == []


def test_who_finishes_first_may_arrive_anew_while_others_finish(table: Table):
    table.arrive("abc", 0)
    table.settle()
    table.finish("bc")
    table.arrive("bc", 1)
    table.settle()
    table.finish("a")
    table.arrive("a", 1)
    table.settle()
    table.advance(2 * RESEND_S)
    table.together("abc")


def test_arriving_twice_is_our_own_mistake(table: Table):
    table.arrive("a", 0)
    with pytest.raises(LocalProtocolError, match="a arrives with 0 but is"):
        table.arrive("a", 0)


# --- each message is lost -------------------------------------------------------------------------


@pytest.mark.parametrize("lost", range(4))
def test_any_message_of_an_assembly_may_be_lost(table: Table, lost: int):
    """Two arrivals and two assemblies, one of them lost."""
    table.arrive("cba", 0)
    for index in range(lost + 1):
        assert table.wire
        table.wire.pop(0) if index == lost else table.deliver(0)
    table.settle()
    table.advance(2 * RESEND_S)
    table.together("abc")
    assert all(len(table[name].groups) == 1 for name in "abc")


def test_who_is_told_late_hears_of_the_first_members_also_of_those_lost_since(table: Table):
    table.arrive("cba", 0)
    _assembled(table)
    table.wire.clear()
    table["a"].rendezvous.regroup(table["a"].groups[-1], (PeerId("a"), PeerId("b")))  # c is gone
    table.advance(RESEND_S)
    state = table["b"].rendezvous.state
    assert isinstance(state, InGroup)
    assert state.members == ("a", "b", "c")


def test_a_lost_word_to_catch_up_is_said_again(table: Table):
    table.arrive("ab", 5)
    table.arrive("c", 3)
    while table.wire:
        if type(table.wire[0][2]).__name__ == "CatchUp":
            table.wire.pop(0)
            break
        table.deliver(0)
    assert table["c"].taking == []
    table.advance(RESEND_S)
    assert [(t.version, t.donor) for t in table["c"].taking] == [(5, "a")]


def test_every_message_may_come_twice_and_in_any_order(table: Table):
    for seed in range(20):
        rng, version = Random(seed), len(table["a"].ended)
        table.arrive("abc", version)
        for _ in range(40):
            if table.wire:
                message = rng.choice(table.wire)
                table.wire += [message] * rng.choice([0, 0, 1])
                table.deliver(rng.randrange(len(table.wire)))
        table.settle()
        table.advance(4 * RESEND_S)
        table.together("abc")
        table.finish("abc")


def test_a_late_assemble_of_a_group_that_ended_draws_nobody_in(table: Table):
    table.arrive("abc", 0)
    (late,) = [sent for sent in _assembled(table) if sent[1] == "b"]
    table.settle()
    table.finish("abc", Outcome.LOST)  # everyone waits with version 0 again
    table.wire.insert(0, late)
    table.deliver(0)
    assert isinstance(table["b"].rendezvous.state, Waiting)
    table.advance(RESEND_S)
    table.together("abc")


def test_an_even_later_assemble_draws_nobody_in_either(table: Table):
    table.arrive("abc", 0)
    (late,) = [sent for sent in _assembled(table) if sent[1] == "b"]
    for _ in range(2):
        table.settle()
        table.advance(RESEND_S)
        table.finish("abc", Outcome.LOST)
        table.settle()
    table.finish("abc", Outcome.LOST)
    table.wire.insert(0, late)
    table.deliver(0)
    assert isinstance(table["b"].rendezvous.state, Waiting)


def _assembled(table: Table) -> list[tuple[str, str, RendezvousMessage]]:
    """Deliver all arrivals; what the host sends then, still on the wire."""
    while any(type(message).__name__ == "Arrive" for _, _, message in table.wire):
        table.deliver(0)
    return list(table.wire)


@pytest.mark.parametrize("is_lost", [False, True])
def test_who_waits_with_something_else_is_expected_in_no_group_of_its_old_arrival(is_lost: bool):
    table = Table("ab")
    table["a"].rendezvous.receive(PeerId("b"), Arrive(2), table.time)  # it was on its way for long
    table.arrive("a", 2)
    if is_lost:
        table.wire.clear()
    table.arrive("b", 5)
    table.settle()
    assert not table["b"].rendezvous.expects(table["a"].groups[-1])
    table.finish("a", Outcome.LOST)
    table.settle()
    assert [(t.version, t.donor) for t in table["a"].taking] == [(5, "b")]


# --- peers die, come late, leave ------------------------------------------------------------------


def test_the_others_do_not_wait_for_the_dead(table: Table):
    table.arrive("ab", 0)
    table.settle()
    table.die("c")
    table.settle()
    table.together("ab")


def test_when_the_host_dies_while_all_wait_the_next_one_by_name_is_the_host(table: Table):
    table.arrive("bc", 0)
    table.settle()
    table.die("a")
    table.advance(RESEND_S)
    assert table.together("bc").initiator == "b"


def test_when_a_member_dies_inside_the_group_the_others_assemble_without_it(table: Table):
    table.arrive("abc", 0)
    table.settle()
    broken = table.together("abc")
    table.die("b")
    table.advance(RESEND_S)
    assert table.together("ac") != broken
    assert table["a"].abandoned == [broken]
    assert table["a"].ended == []
    table.finish("ac")
    assert table["a"].ended == [(0, Outcome.DONE)]


def test_when_the_host_dies_inside_the_group_the_others_assemble_without_it(table: Table):
    table.arrive("abc", 0)
    table.settle()
    table.die("a")
    table.advance(RESEND_S)
    table.together("bc")


def test_a_broken_group_is_assembled_again_under_another_ticket(table: Table):
    table.arrive("abc", 0)
    table.settle()
    first = table.together("abc")
    table.finish("cab", Outcome.BROKEN)
    table.advance(RESEND_S)
    assert table.together("abc") != first


def test_after_a_break_whoever_missed_the_version_takes_over_the_state(table: Table):
    """A and b have version 0, c has not: its model would differ from theirs for ever."""
    table.arrive("abc", 0)
    table.settle()
    table.finish("c", Outcome.LOST)
    table.finish("ab")
    table.arrive("ab", 1)
    table.settle()
    (take,) = table["c"].taking
    assert (take.version, take.donor) == (1, "a")
    assert table["a"].rendezvous.waits_with(1, 0)
    table["c"].rendezvous.state_taken(1, table.time)
    table.settle()
    table.together("abc")
    table.finish("abc")
    assert table["c"].ended == [(1, Outcome.DONE)]


def test_the_host_itself_may_be_the_one_behind(table: Table):
    table.arrive("a", 3)
    table.arrive("bc", 4)
    table.settle()
    (take,) = table["a"].taking
    assert (take.version, take.donor) == (4, "b")
    table["a"].rendezvous.state_taken(4, table.time)
    table.advance(2 * RESEND_S)
    table.together("abc")


def test_a_newcomer_catches_up_and_takes_part(table: Table):
    table.arrive("abc", 40)
    table.settle()
    table.finish("abc")
    table.join("d")
    table.arrive("abcd", 41)
    table.settle()
    table.together("abcd")


def test_a_newcomer_that_is_behind_takes_over_the_state(table: Table):
    table.join("d")
    table.arrive("abc", 41)
    table.arrive("d", 0)
    table.settle()
    assert isinstance(table["d"].rendezvous.state, CatchingUp)
    assert [t.version for t in table["d"].taking] == [41]
    table["d"].rendezvous.state_taken(41, table.time)
    table.settle()
    table.together("abcd")


def test_of_two_models_of_a_version_most_decide_and_the_others_take_theirs(table: Table):
    table.arrive("a", 7, line=1)
    table.arrive("bc", 7, line=2)
    table.settle()
    assert table["a"].taking == [TakeState(7, PeerId("b"), 2)]
    table["a"].rendezvous.state_taken(7, table.time)
    table.advance(2 * RESEND_S)
    table.together("abc")


def test_of_two_models_that_as_many_have_the_first_ones_is_taken():
    table = Table("ab")
    table.arrive("b", 7, line=2)
    table.arrive("a", 7, line=1)
    table.settle()
    assert table["b"].taking == [TakeState(7, PeerId("a"), 1)]
    assert not table["b"].rendezvous.waits_with(7, 2), "nobody is to take what it gives up"


def test_who_is_behind_takes_the_model_that_most_have(table: Table):
    table.join("d")
    table.arrive("a", 7, line=1)
    table.arrive("bc", 7, line=2)
    table.arrive("d", 3, line=1)
    table.settle()
    assert [table[name].taking for name in "ad"] == [[TakeState(7, PeerId("b"), 2)]] * 2


def test_one_whose_model_changed_on_the_way_is_in_no_group_of_the_old_one():
    table = Table("ab")
    table.arrive("a", 7, line=1)
    table["a"].rendezvous.receive(PeerId("b"), Arrive(7, 1), table.time)  # older than what b has
    table.arrive("b", 7, line=2)
    table.settle()
    assert table["b"].groups == []
    assert table["b"].rendezvous.waits_with(7, 2)


def test_a_model_that_could_not_be_had_leaves_the_old_one_to_wait_with(table: Table):
    table.arrive("ab", 7, line=2)
    table.arrive("c", 7, line=1)
    table.settle()
    table["c"].rendezvous.state_not_taken(7, table.time)
    assert table["c"].rendezvous.waits_with(7, 1)
    table.settle()
    assert len(table["c"].taking) == 2


def test_where_nobody_trains_any_more_no_group_is_expected(table: Table):
    table["a"].view.clear()
    assert not table["a"].rendezvous.expects(Ticket(PeerId("b"), 1, 1))


def test_a_newcomer_that_sorts_first_becomes_the_host():
    table = Table("bc")
    table.arrive("bc", 7)
    table.settle()
    table.finish("bc")
    table.join("a")
    table.arrive("bc", 8)
    table.arrive("a", 0)
    table.advance(2 * RESEND_S)
    assert [t.version for t in table["a"].taking] == [8]
    table["a"].rendezvous.state_taken(8, table.time)
    table.advance(2 * RESEND_S)
    assert table.together("abc").initiator == "a"


def test_a_state_that_cannot_be_had_is_asked_for_again(table: Table):
    table.arrive("ab", 5)
    table.arrive("c", 3)
    table.settle()
    table["c"].rendezvous.state_not_taken(5, table.time)
    table.settle()
    assert [t.version for t in table["c"].taking] == [5, 5]


def test_a_donor_that_dies_is_replaced(table: Table):
    table.arrive("ab", 5)
    table.arrive("c", 3)
    table.settle()
    table.die("a")
    table["c"].rendezvous.state_not_taken(5, table.time)
    table.advance(2 * RESEND_S)
    assert [t.donor for t in table["c"].taking] == ["a", "b"]


def test_who_stops_while_it_waits_is_let_go_and_the_others_go_on(table: Table):
    table.arrive("ab", 0)
    table.settle()
    table["b"].rendezvous.withdraw()
    assert table["b"].ended == [(0, Outcome.WITHDRAWN)]
    assert isinstance(table["b"].rendezvous.state, Idle)
    for name in "ac":
        table[name].view.remove("b")
        table[name].rendezvous.view_changed()
    table.arrive("c", 0)
    table.settle()
    table.together("ac")


def test_who_stops_inside_a_group_lets_it_end(table: Table):
    table.arrive("abc", 0)
    table.settle()
    table["b"].rendezvous.withdraw()
    table.together("abc")
    table.finish("abc")
    assert table["b"].ended == [(0, Outcome.DONE)]


def test_who_stops_inside_a_group_that_breaks_waits_no_more(table: Table):
    table.arrive("abc", 0)
    table.settle()
    table["b"].rendezvous.withdraw()
    table.finish("b", Outcome.LOST)
    assert table["b"].ended == [(0, Outcome.WITHDRAWN)]


def test_who_stops_while_it_catches_up_waits_no_more(table: Table):
    table.arrive("ab", 5)
    table.arrive("c", 3)
    table.settle()
    table["c"].rendezvous.withdraw()
    assert table["c"].ended == [(3, Outcome.WITHDRAWN)]
    table["c"].rendezvous.state_taken(5, table.time)
    assert isinstance(table["c"].rendezvous.state, Idle)


def test_an_arrival_of_one_who_left_does_not_count_when_it_comes_back(table: Table):
    table.arrive("c", 0)
    table.settle()
    for name in "ab":
        table[name].rendezvous.peer_left(PeerId("c"))
    table.add("c", "abc")
    table.arrive("ab", 0)
    table.settle()
    assert all(not table[name].groups for name in "abc")
    table.arrive("c", 0)
    table.settle()
    table.together("abc")


# --- views differ ---------------------------------------------------------------------------------


def test_two_hosts_form_no_two_groups_that_share_a_peer(table: Table):
    """B and c think that a is dead; a thinks that all are here."""
    for name in "bc":
        table[name].view = ["b", "c"]
    table.arrive("abc", 0)
    table.settle()
    assert table.together("bc").initiator == "b"
    assert isinstance(table["a"].rendezvous.state, Waiting)
    for name in "bc":
        table[name].view = ["a", "b", "c"]
    table.finish("bc")
    table.arrive("bc", 1)
    table.settle()
    assert [t.donor for t in table["a"].taking] == ["b"]


def test_slices_of_a_group_that_is_over_are_refused(table: Table):
    table.arrive("abc", 0)
    table.settle()
    ticket = table.together("abc")
    assert table["b"].rendezvous.holds(ticket)
    table.finish("b")
    assert not table["b"].rendezvous.holds(ticket)
    table.finish("b")  # again: changes nothing
    assert table["b"].ended == [(0, Outcome.DONE)]
