"""A peer that holds our slot and moves nothing: how much of our time it gets."""

import pytest

from p2ptrain.core.effects import Average, Outcome, Send
from p2ptrain.core.group_lock import GroupLock
from p2ptrain.core.lock_state import Collecting, Free, Granted, InGroup, LockConfig
from p2ptrain.core.messages import Begin, Failed, Grant, Release, Relinquish, Request
from p2ptrain.core.slot_credit import CREDIT, SlotCredit
from p2ptrain.ids import PeerId, Ticket
from tests.helpers.everyone import AnyGroup

LIAR, HONEST, ME = PeerId("liar"), PeerId("honest"), PeerId("me")


class Slot:
    """The lock of ``me``; the test plays the others."""

    def __init__(self) -> None:
        self.sent: list[object] = []
        self.lock = GroupLock(
            ME, 1, LockConfig(), self.sent.append, AnyGroup(), lambda *_: True, None, SlotCredit()
        )
        self.now, self.numbers = 0.0, 0

    def request(self, peer: PeerId) -> Ticket:
        self.numbers += 1
        ticket = Ticket(peer, 1, self.numbers)
        self.lock.receive(peer, Request(ticket, self.numbers), self.now)
        return ticket

    def advance(self, seconds: float) -> None:
        until = self.now + seconds
        while (due := self.lock.next_deadline()) is not None and due <= until:
            self.now = max(self.now, due)
            self.lock.handle_timer(self.now)
        self.now = until

    def said(self, kind: type) -> list[object]:
        return [
            one.message
            for one in self.sent
            if isinstance(one, Send) and isinstance(one.message, kind)
        ]

    def average(self, peer: PeerId, outcome: Outcome, lasts_s: float) -> None:
        ticket = self.request(peer)
        self.lock.receive(peer, Begin(ticket, tuple(sorted((ME, peer)))), self.now)
        assert isinstance(self.lock.state, InGroup)
        self.advance(lasts_s)
        self.lock.average_ended(ticket, outcome, "", self.now)


@pytest.fixture
def slot():
    slot = Slot()
    yield slot
    slot.lock.check()


@pytest.mark.parametrize("hold_s", [1.0, 4.9, 100.0])
def test_one_that_is_granted_and_says_no_more_holds_a_fifth_of_our_time(slot: Slot, hold_s):
    held_s = 0.0
    while slot.now < 3600.0:
        ticket = slot.request(LIAR)
        if isinstance(slot.lock.state, Granted):
            began = slot.now
            slot.advance(min(hold_s, LockConfig().lease_s))
            slot.lock.receive(LIAR, Release(ticket), slot.now)
            held_s += slot.now - began
        else:
            slot.advance(0.5)
        assert isinstance(slot.lock.state, Free)
    assert held_s <= CREDIT.burst + 0.25 * 3600.0 + LockConfig().lease_s


def test_who_has_spent_its_credit_is_answered_as_by_a_busy_peer_and_others_are_granted(slot: Slot):
    for _ in range(10):
        slot.request(LIAR)
        slot.advance(LockConfig().lease_s)
    slot.sent.clear()
    slot.request(LIAR)
    assert slot.said(Grant) == []
    (told,) = slot.said(Failed)
    assert told.reason == "liar has held me for long, and nothing came of it"
    ticket = slot.request(HONEST)
    assert slot.said(Grant) == [Grant(ticket)]
    slot.lock.receive(HONEST, Release(ticket), slot.now)
    slot.advance(1000.0)
    slot.sent.clear()
    again = slot.request(LIAR)
    assert slot.said(Grant) == [Grant(again)], "it has earned some"
    slot.lock.receive(LIAR, Release(again), slot.now)


def test_one_that_waits_in_the_queue_is_not_granted_in_its_turn_either(slot: Slot):
    first = slot.request(HONEST)
    slot.request(LIAR)
    slot.lock._credit.wasted((LIAR,), CREDIT.burst + 1.0, slot.now)
    slot.lock.receive(HONEST, Release(first), slot.now)
    assert isinstance(slot.lock.state, Free)
    assert slot.said(Failed)[-1].reason.startswith("liar has held me for long")


def test_groups_that_are_done_cost_nothing_and_pay_for_some_that_break(slot: Slot):
    for _ in range(100):
        slot.average(HONEST, Outcome.LOST, 2.0)
        slot.average(HONEST, Outcome.DONE, 0.1)
    assert len([one for one in slot.sent if isinstance(one, Average)]) == 200
    assert slot.said(Relinquish) == []


def test_one_whose_groups_came_to_nothing_is_asked_last(slot: Slot):
    for _ in range(4):
        slot.average(LIAR, Outcome.LATE, 100.0)
        slot.now -= 100.0
    slot.lock.receive(LIAR, Release(slot.request(LIAR)), slot.now)
    slot.lock.request([LIAR, HONEST], 1, slot.now)
    assert isinstance(slot.lock.state, Collecting)
    assert slot.lock.state.told[0] == HONEST
