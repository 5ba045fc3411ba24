"""A lock waits as long as was seen to be enough, within what is configured."""

from typing import TypeVar

import pytest

from p2ptrain.core.deadlines import FEWEST
from p2ptrain.core.effects import Effect, Outcome, Send
from p2ptrain.core.group_lock import GroupLock
from p2ptrain.core.lock_state import LEAST_SHARE, LockConfig, TimeoutPolicy
from p2ptrain.core.messages import Begin, Failed, Grant, Request
from p2ptrain.ids import PeerId, Seconds, Ticket
from tests.helpers.everyone import AnyGroup

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")
CONFIG = LockConfig()

T = TypeVar("T")


class Bench:
    """One lock whose words are collected, and whose averages last as long as the test says."""

    def __init__(self, config: LockConfig = CONFIG) -> None:
        self.now: Seconds = 100.0
        self.effects: list[Effect] = []
        self.timeouts = TimeoutPolicy(config)
        self.lock = GroupLock(
            A, 1, config, self.effects.append, AnyGroup(), AnyGroup().admits, self.timeouts
        )

    def said(self, kind: type[T]) -> list[T]:
        """What it has said of this kind since it was last asked."""
        sent = [e.message for e in self.effects if isinstance(e, Send)]
        self.effects.clear()
        return [message for message in sent if isinstance(message, kind)]

    def later(self, duration_s: Seconds) -> None:
        self.now += duration_s
        self.lock.handle_timer(self.now)

    def average(self, lasts_s: Seconds, outcome: Outcome = Outcome.DONE) -> None:
        """b grants us at once, and we average for so long."""
        self.lock.request([B], 1, self.now)
        ticket = self.said(Request)[0].ticket
        self.lock.receive(B, Grant(ticket), self.now)
        self.now += lasts_s
        self.lock.average_ended(ticket, outcome, "", self.now)
        self.effects.clear()


def test_requests_wait_as_configured_until_enough_groups_were_seen():
    bench, seen = Bench(), []
    for _ in range(FEWEST + 1):
        seen.append(bench.timeouts.acquire_s)
        bench.average(0.4)
    assert seen[:FEWEST] == [CONFIG.acquire_timeout_s] * FEWEST
    assert seen[-1] == pytest.approx(0.8), "twice what groups last"


@pytest.mark.parametrize(("after_s", "forgets"), [(0.1, False), (1.5, True)])
def test_after_a_group_that_broke_late_the_next_request_waits_as_configured(
    after_s: Seconds, forgets: bool
):
    bench = Bench()
    for _ in range(FEWEST + 1):
        bench.average(0.1)
    assert bench.timeouts.acquire_s < CONFIG.acquire_timeout_s
    bench.average(after_s, Outcome.LOST)
    assert (bench.timeouts.acquire_s == CONFIG.acquire_timeout_s) is forgets


def test_a_formed_group_lasts_however_short_those_before_it_were():
    bench = Bench()
    for _ in range(3 * FEWEST):
        bench.average(0.01)
    bench.lock.request([B], 1, bench.now)
    ticket = bench.said(Request)[0].ticket
    bench.lock.receive(B, Grant(ticket), bench.now)
    assert bench.lock.next_deadline() is None
    bench.later(1000 * CONFIG.lease_s)
    assert bench.lock.holds(ticket)


def test_a_granter_is_promised_for_as_long_as_is_configured_whatever_it_has_seen_itself():
    for seen_s in (0.01, 8.0):
        bench = Bench()
        for _ in range(FEWEST):
            bench.average(seen_s)
        ticket = Ticket(C, 1, 1)
        bench.lock.receive(C, Request(ticket, 50), bench.now)
        assert bench.said(Grant)
        granted_at = bench.now
        bench.lock.handle_timer(granted_at + CONFIG.lease_s - 0.1)
        assert str(bench.lock.state) == f"promised to {ticket}"
        bench.lock.handle_timer(granted_at + CONFIG.lease_s)
        assert str(bench.lock.state) == "free"


def test_the_time_in_a_group_counts_from_the_grant_of_a_member_too():
    bench = Bench()
    for number in range(1, FEWEST + 1):
        ticket = Ticket(C, 1, number)
        bench.lock.receive(C, Request(ticket, 50), bench.now)
        bench.lock.receive(C, Begin(ticket, (A, C)), bench.now + 0.25)
        bench.now += 0.45
        bench.lock.average_ended(ticket, Outcome.DONE, "", bench.now)
    for _ in range(FEWEST):
        bench.timeouts.grants.took(0.001)
    assert bench.timeouts.acquire_s == pytest.approx(0.9)


def test_a_request_is_sent_again_sooner_where_answers_are_quick_and_the_next_time_as_configured():
    bench = Bench()
    for _ in range(FEWEST):
        bench.average(0.1)
    bench.lock.request([B], 1, bench.now)
    assert len(bench.said(Request)) == 1
    bench.later(LEAST_SHARE * CONFIG.resend_s)
    assert len(bench.said(Request)) == 1
    bench.later(0.9 * CONFIG.resend_s)
    assert not bench.said(Request)
    bench.later(0.1 * CONFIG.resend_s)
    assert len(bench.said(Request)) == 1
    assert bench.timeouts.answers.seconds == CONFIG.resend_s, (
        "an answer is missing: no longer in a hurry"
    )


def test_a_request_waits_for_candidates_that_are_in_an_average_as_long_as_averages_last():
    timeouts = TimeoutPolicy(CONFIG)
    for _ in range(FEWEST):
        timeouts.grants.took(0.001)
        timeouts.averages.took(0.7)
    assert timeouts.acquire_s == pytest.approx(1.4)
    assert timeouts.acquire_s < CONFIG.acquire_timeout_s


def given_up(answered: bool) -> Bench:
    """B, which said nothing or that it is busy, has not granted a request in time."""
    bench = Bench()
    for _ in range(FEWEST):
        bench.average(0.01)
    short_s = bench.timeouts.acquire_s
    assert short_s == pytest.approx(LEAST_SHARE * CONFIG.acquire_timeout_s)
    ticket = bench.lock.request([B], 1, bench.now)
    if answered:
        bench.lock.receive(B, Failed(ticket, "in a group"), bench.now)
    bench.later(short_s)
    assert str(bench.lock.state) == "free"
    return bench


def test_who_gives_a_request_up_because_of_silence_waits_longer_with_the_next():
    assert given_up(answered=False).timeouts.acquire_s == CONFIG.acquire_timeout_s


def test_who_gives_a_request_up_because_all_are_busy_has_missed_nothing():
    """A busy candidate says nothing of how long grants take; averages do."""
    timeouts = given_up(answered=True).timeouts
    assert timeouts.acquire_s == pytest.approx(LEAST_SHARE * CONFIG.acquire_timeout_s)


def test_where_little_time_is_between_resending_and_giving_up_something_is_still_said_again():
    timeouts = TimeoutPolicy(LockConfig(lease_s=10.0, acquire_timeout_s=2.0, resend_s=0.8))
    for _ in range(FEWEST):
        timeouts.grants.took(0.001)
        timeouts.averages.took(0.001)
    assert timeouts.acquire_s == 1.6
