"""A lock waits as long as was seen to be enough, within what is configured."""

import pytest

from p2ptrain.core.deadlines import FEWEST
from p2ptrain.core.effects import Abandon, Effect, Send
from p2ptrain.core.events import Outcome
from p2ptrain.core.group_lock import GroupLock
from p2ptrain.core.lock_state import LockConfig
from p2ptrain.core.messages import Begin, Busy, Claim, Grant, Release
from p2ptrain.core.pace import LEAST_SHARE, ObservedPace, Wait
from p2ptrain.ids import PeerId, Seconds, Ticket

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")
CONFIG = LockConfig()
LONGEST_S = CONFIG.time_in_group_s(CONFIG.lease_s)


class Bench:
    """One lock whose words are collected, and whose averages last as long as the test says."""

    def __init__(self, config: LockConfig = CONFIG) -> None:
        self.now: Seconds = 100.0
        self.effects: list[Effect] = []
        self.pace = ObservedPace(config)
        self.lock = GroupLock(A, 1, config, self.effects.append, pace=self.pace)

    def said(self, kind: type) -> list[object]:
        """What it has said of this kind since it was last asked."""
        sent = [e.message for e in self.effects if isinstance(e, Send)]
        self.effects.clear()
        return [message for message in sent if isinstance(message, kind)]

    def later(self, duration_s: Seconds) -> None:
        self.now += duration_s
        self.lock.handle_timer(self.now)

    def average(self, lasts_s: Seconds, outcome: Outcome = Outcome.DONE) -> Claim:
        """b grants us at once, and we average for so long."""
        self.lock.request([B], 1, self.now)
        claim = self.said(Claim)[0]
        assert isinstance(claim, Claim)
        self.lock.receive(B, Grant(claim.ticket), self.now)
        self.now += lasts_s
        self.lock.average_ended(claim.ticket, outcome, "", self.now)
        return claim


def test_a_claim_asks_for_all_that_is_configured_until_enough_groups_were_seen():
    bench = Bench()
    leases = [bench.average(5.0).lease_s for _ in range(FEWEST + 1)]
    assert leases[:FEWEST] == [CONFIG.lease_s] * FEWEST
    assert CONFIG.time_in_group_s(leases[-1]) == pytest.approx(10.0), "twice what groups last"


def test_short_averages_leave_time_to_mend_a_broken_one():
    bench = Bench()
    for _ in range(FEWEST):
        bench.average(0.01)
    least_s = CONFIG.time_in_group_s(bench.average(0.01).lease_s)
    assert least_s == pytest.approx(LEAST_SHARE * LONGEST_S)


def test_after_an_average_that_outlasted_its_lease_the_next_has_all_that_is_configured():
    bench = Bench()
    for _ in range(FEWEST):
        bench.average(0.1)
    ticket = bench.lock.request([B], 1, bench.now)
    claim = bench.said(Claim)[0]
    assert isinstance(claim, Claim)
    assert claim.lease_s < CONFIG.lease_s
    bench.lock.receive(B, Grant(ticket), bench.now)
    bench.later(CONFIG.time_in_group_s(claim.lease_s))
    assert any(isinstance(e, Abandon) and e.outcome is Outcome.LATE for e in bench.effects)
    bench.effects.clear()
    assert bench.average(1.0).lease_s == CONFIG.lease_s


@pytest.mark.parametrize(("after_s", "forgets"), [(0.5, False), (3.0, True)])
def test_a_group_that_breaks_late_may_have_been_about_to_miss_its_deadline(
    after_s: Seconds, forgets: bool
):
    bench = Bench()
    for _ in range(FEWEST + 1):
        last = bench.average(0.1)
    assert last.lease_s < CONFIG.lease_s
    bench.average(after_s, Outcome.LOST)
    assert (bench.average(0.1).lease_s == CONFIG.lease_s) is forgets


def test_a_granter_is_promised_for_as_long_as_the_claim_asks_whatever_it_has_seen_itself():
    for seen_s in (0.1, 8.0):
        bench = Bench()
        for _ in range(FEWEST):
            bench.average(seen_s)
        ticket = Ticket(C, 1, 1)
        bench.lock.receive(C, Claim(ticket, 50, 6.0), bench.now)
        assert bench.said(Grant)
        granted_at = bench.now
        bench.lock.handle_timer(granted_at + 5.9)
        assert str(bench.lock.state) == f"promised to {ticket}"
        bench.lock.handle_timer(granted_at + 6.0)
        assert str(bench.lock.state) == "free"


def test_a_member_leaves_the_group_by_the_lease_of_its_claim():
    bench = Bench()
    ticket = Ticket(C, 1, 1)
    bench.lock.receive(C, Claim(ticket, 50, 6.0), bench.now)
    bench.lock.receive(C, Begin(ticket, (A, C)), bench.now + 1.0)
    ends_at = bench.now + CONFIG.time_in_group_s(6.0)
    assert ends_at < bench.now + 6.0 - CONFIG.acquire_timeout_s
    assert bench.lock.holds(ticket, ends_at - 0.01)
    assert not bench.lock.holds(ticket, ends_at)


@pytest.mark.parametrize("lease_s", [0.0, 20.1, 1e300])
def test_a_promise_that_nobody_here_would_give_is_refused_at_once(lease_s: Seconds):
    bench = Bench()
    bench.lock.receive(C, Claim(Ticket(C, 1, 1), 50, lease_s), bench.now)
    assert bench.said(Release)
    assert str(bench.lock.state) == "free"


def test_a_claim_is_sent_again_sooner_where_answers_are_quick_and_the_next_time_as_configured():
    bench = Bench()
    for _ in range(FEWEST):
        bench.average(0.1)
    bench.lock.request([B], 1, bench.now)
    assert len(bench.said(Claim)) == 1
    bench.later(LEAST_SHARE * CONFIG.resend_s)
    assert len(bench.said(Claim)) == 1
    bench.later(0.9 * CONFIG.resend_s)
    assert not bench.said(Claim)
    bench.later(0.1 * CONFIG.resend_s)
    assert len(bench.said(Claim)) == 1
    assert bench.pace.resend_s == CONFIG.resend_s, "an answer is missing: no longer in a hurry"


def test_a_claim_waits_for_candidates_that_are_in_an_average_as_long_as_averages_last():
    pace = ObservedPace(CONFIG)
    for _ in range(FEWEST):
        pace.note(Wait.GRANTS, 0.001)
        pace.note(Wait.AVERAGE, 0.7)
    assert pace.acquire_s == pytest.approx(1.4)
    assert pace.acquire_s < CONFIG.acquire_timeout_s


def test_who_gives_a_claim_up_waits_longer_with_the_next():
    bench = Bench()
    for _ in range(FEWEST):
        bench.average(0.01)
    short_s = bench.pace.acquire_s
    assert short_s == pytest.approx(LEAST_SHARE * CONFIG.acquire_timeout_s)
    ticket = bench.lock.request([B], 1, bench.now)
    bench.lock.receive(B, Busy(ticket, "in a group"), bench.now)
    bench.later(short_s)
    assert str(bench.lock.state) == "free"
    assert bench.pace.acquire_s == CONFIG.acquire_timeout_s


def test_where_little_time_is_between_resending_and_giving_up_something_is_still_said_again():
    pace = ObservedPace(LockConfig(lease_s=10.0, acquire_timeout_s=2.0, resend_s=0.8))
    for _ in range(FEWEST):
        pace.note(Wait.GRANTS, 0.001)
        pace.note(Wait.AVERAGE, 0.001)
    assert pace.acquire_s == 1.6
